"""Policy: admission, preemption when blocks run out, and eviction of tokens for a budget."""

from __future__ import annotations

from operator import add, sub

import numpy as np

from kvpool.errors import OutOfBlocks, OutOfSequences
from kvpool.scheduler.request import DECODING, PREFILLING, SPILLED, Request, Sequence
from kvpool.scheduler.state import Attempt, Core, DecodeBatch
from kvpool.stats import PoolStats

POLICIES = ("last", "longest", "grower", "priority")
LOOK = 4  # requests that are tried, while the first in line finds no room
REWRITTEN = 16  # tokens at the end of a prompt: `Pool.open` takes no checkpoint behind them (TAIL_TOKENS of the core)


class MustWait(Exception):
    """The next step cannot be planned before the one that is out is done."""


def make_room(core: Core) -> DecodeBatch:
    """Preempt sequences until every decode finds its block. Return the batch that is left.

    A request may compute a block that another request cached meanwhile. The prefix cache then keeps both copies. So a
    request that is left alone and finds no block starts over once, and then finds these blocks in the cache. If it has
    run alone, other users of the pool hold its blocks: OutOfBlocks.
    """
    batch = core.batch()
    while not core.has_room(batch):
        running = core.rows.running()
        victim = choose_victim(core, core.policy, running)
        is_alone = len(running) == (1 if victim.group.beam is None else len(victim.group.beam.live))
        if is_alone:
            core.setbacks += 1
            if core.prefix is None or core.was_alone():
                arena = max(0, core.needs.short(core.growth(batch.lanes), core.needs.free()))
                raise starved(core, f"request {victim.group.id!r} runs alone and finds no block", arena)
        if is_alone or not spill(core, victim):
            core.preempt(victim)
        batch = core.batch()
    return batch


def starved(core: Core, text: str, arena: int) -> OutOfBlocks:
    stats = core.pool.stats(arena)
    where = f" in arena {arena}" if core.needs.num_arenas > 1 else ""
    used = f"{stats.used} of {stats.num_blocks - stats.reserved} are in use"
    return out_of_blocks(f"{text}{where}: {used}, others of the pool hold some", stats, arena)


def out_of_blocks(text: str, stats: PoolStats, arena: int) -> OutOfBlocks:
    """Return an error of `schedule` about an arena with these counts."""
    there = {"blank": stats.blank, "evictable": stats.evictable, "limbo": stats.limbo}
    return OutOfBlocks(f"[schedule] {text}", **there, arena=arena)


def choose_victim(core: Core, policy: str, running: np.ndarray) -> Sequence:
    """Return the sequence to preempt by a policy, of the running lanes in order of admission."""
    rows = core.rows
    if policy == "longest":
        lengths = rows.computed[running]
        lane = running[len(running) - 1 - int(np.argmax(lengths[::-1]))]  # of equals the last admitted
    elif policy == "grower":
        lanes, there = core.batch().lanes, core.available()
        short = (row for row in range(len(lanes)) if core.needs.short(core.growth(lanes[: row + 1]), there) >= 0)
        lane = lanes[next(short)]  # the first that finds no block; there must be one
    elif policy == "priority":
        lowest = [rows.sequence(at).group.request.priority for at in running]
        lane = running[len(lowest) - 1 - lowest[::-1].index(min(lowest))]
    else:
        lane = running[-1]
    return rows.sequence(lane)


def spill(core: Core, sequence: Sequence) -> bool:
    """Move a sequence's KV to the tier. Return False if there is no tier or it refuses.

    A beam is never spilled, because it shares blocks; nor is a sequence that has lost tokens or exceeds its budget.
    """
    lane = sequence.lane
    handle, computed = int(core.rows.handle[lane]), int(core.rows.computed[lane])
    if core.tier is None or sequence.group.beam is not None or not computed:
        return False
    if core.eviction is not None and (core.rows.gone[lane] or computed > core.eviction.policy.most):
        return False
    if (kept := core.tier.spill_to_host(handle, core.tables(handle, computed))) is None:
        return False
    core.commit(lane)
    core.pool.close(handle)
    core.leave(sequence, SPILLED)
    sequence.kept = kept
    core.spilled[sequence] = None
    core.spills += 1
    return True


def blocks_alone(core: Core, tokens: int) -> list[int]:
    """Return the blocks of each arena that a sequence needs to run alone, with copies for compaction."""
    need, layers, evictor = core.needs.alone(tokens), core.needs.evicting, core.eviction
    if evictor is None or layers is None or core.prefix is None or tokens <= evictor.policy.max_kv:
        return need
    copies = 0 if evictor.policy.whole_blocks else -(-evictor.policy.most // layers.block_size)
    need[layers.arena] += (copies + 1) * layers.group.columns  # 1: a block may be cached twice
    return need


def open_with_room(core: Core, attempt: Attempt, need: list[int], tokens: np.ndarray, request: Request) -> int | None:
    """Open a sequence with the cached part of `tokens`. Return None if there is no room for it.

    It needs so many blocks with the cached part. Those that it does not hold yet are promised to it. A checkpoint is
    held until the first step has loaded it. If it leaves no room for that step, the sequence begins without it.
    """
    needs, kept, cut, keep = core.needs, blocks_kept(core), request.cut, core.kept(request)
    if cut is None and len(tokens) > core.findable:
        cut = max(0, len(tokens) - REWRITTEN)
    tokens = tokens[: core.findable + 1]
    is_short = needs.short(need, core.available(), kept) >= 0
    most = list(map(add, need, needs.checkpoint))
    try:
        if core.prefix is None or (
            needs.short(most, core.available(), kept) >= 0
            and not fits_found(core, attempt, need, tokens, request.namespace)
        ):
            return None if is_short else attempt.open(core.pool.open, 0, request.namespace, keep=keep)
        place, how = cut and min(cut, len(tokens)), {"reserve": False, "again": attempt.again, "keep": keep}
        return attempt.open(core.pool.open, tokens, request.namespace, place, **how)
    except (OutOfBlocks, OutOfSequences):
        return None


def fits_found(core: Core, attempt: Attempt, need: list[int], tokens: np.ndarray, namespace: bytes) -> bool:
    """Return whether enough blocks are left once the cached part of `tokens` is held, without the last token."""
    assert core.prefix is not None
    found = core.prefix.match(tokens, namespace)
    if not found or not fits_beside(core, need, found):
        return False
    if core.is_ahead:  # what is unpinned while a step is out cannot be taken before that step is done
        raise MustWait
    pinned = attempt.open(core.prefix.pin, tokens[:-1], namespace)  # what it finds is not available for the rest
    try:
        return fits_beside(core, need, core.pool.num_tokens(pinned))
    finally:
        core.pool.close(pinned)


def fits_beside(core: Core, need: list[int], found: int) -> bool:
    """Return whether there is what a sequence needs beside what it holds of `found` tokens that the cache has."""
    due = list(map(sub, need, core.needs.held(found, found=found).tolist()))
    return core.needs.short(due, core.available(), blocks_kept(core)) < 0


def publish(core: Core, lane: int) -> None:
    """Commit a sequence that goes on to the prefix cache, unless the same blocks are there: it would hold both copies.

    It is for a sequence that is about to lose tokens, and cannot be committed afterwards, and for one that was spilled
    and restored into new blocks. The latter is committed again when it ends.
    """
    rows, request = core.rows, core.rows.sequence(lane).group.request
    end = min(int(rows.computed[lane]), core.findable)
    if core.prefix is None or rows.gone[lane] or end <= rows.committed[lane]:
        return
    if core.prefix.match(rows.known(lane, 0, end + 1), request.namespace) <= rows.committed[lane]:
        core.commit(lane)


def keep_budgets(core: Core) -> None:
    """Evict tokens of sequences that have reached their budget, before a step. What the backend raises preempts one."""
    assert core.eviction is not None
    rows = core.rows
    lanes = rows.running()
    lens = rows.kv_lens(lanes)
    full = lanes[core.eviction.lens_after(lens) < lens]
    for sequence in [rows.sequence(lane) for lane in full.tolist()]:
        while sequence.lane >= 0:
            try:
                evict(core, sequence)
                break
            except OutOfBlocks as short:
                make_way(core, "the copies that eviction needs", short.arena)


def evict(core: Core, sequence: Sequence) -> None:
    """Bring one sequence below its budget."""
    rows, evictor, lane = core.rows, core.eviction, sequence.lane
    assert evictor is not None
    handle = int(rows.handle[lane])
    now = rows.kv_lens(np.array([lane]))
    after = evictor.lens_after(now)
    publish(core, lane)
    try:
        evictor.evict([handle], np.array([lane]), after)
        rows.gone[lane] += now[0] - after[0]
        core.evicted_tokens += int(now[0] - after[0])
    except OutOfBlocks:
        raise
    except BaseException:
        rows.gone[lane] = rows.computed[lane] - core.pool.kv_len(handle, evictor.group)
        core.preempt(sequence)
        core.setbacks += 1
        raise


def make_way(core: Core, purpose: str, arena: int) -> None:
    """Preempt the last admitted sequence; with the policy "priority", the last of the lowest priority.

    Other choices could let two long prompts preempt each other for ever. A request that is left alone starts over if it
    ran beside others, as in `make_room`.
    """
    running = core.rows.running()
    core.setbacks += 1
    if len(running) == 1 and (core.was_alone() or core.prefix is None):
        name = core.rows.sequence(running[0]).group.id
        raise starved(core, f"request {name!r} runs alone and finds no blocks for {purpose}", arena)
    victim = choose_victim(core, "priority" if core.policy == "priority" else "last", running)
    if not spill(core, victim):
        core.preempt(victim)


def known_tokens(sequence: Sequence) -> np.ndarray:
    """Return prompt and generated tokens of a sequence that does not run."""
    prompt = sequence.group.request.prompt
    return np.concatenate([prompt, sequence.tokens]) if len(sequence.tokens) else prompt


def blocks_kept(core: Core) -> list[int]:
    """Return the blocks of each arena that an admission must leave: the watermark, and those for this step's decodes.

    The pool's own watermark is left even if nothing runs.
    """
    running = core.count[PREFILLING] + core.count[DECODING]
    if not running:
        return core.needs.reserve
    if core.growing is None:
        core.growing = core.growth(core.batch().lanes)
    return core.needs.kept(core.growing, running, core.watermark)


def admit(core: Core, sequence: Sequence) -> bool:
    """Admit a waiting sequence, or the beam that it leads. Return False if lanes or blocks are missing."""
    if sequence.group.beam is not None:
        if core.is_ahead:
            raise MustWait
        return bool(sequence.group.beam.admit(core))
    if not core.rows.free:
        return False
    tokens = known_tokens(sequence)
    attempt = core.attempt = Attempt(core, sequence)
    handle = open_with_room(core, attempt, core.needs.alone(len(tokens)), tokens, sequence.group.request)
    if handle is None:
        return False
    computed = core.pool.num_tokens(handle)
    core.queue.remove(sequence)
    count_admission(core, sequence, computed, len(tokens))
    core.start(sequence, core.rows.take(), handle, computed, core.admission_number())
    return True


def count_admission(core: Core, sequence: Sequence, computed: int, known: int) -> None:
    """Count an admission with `known` tokens, of which the cache has `computed`. Charge the tenant for the others."""
    group = sequence.group
    group.tenant.served += max(0, known - max(computed, sequence.paid))
    sequence.paid = max(sequence.paid, known)
    if group.admitted is None:
        group.admitted = core.clock()
        group.tenant.admitted += 1
        group.tenant.waited = group.admitted - group.arrived
        group.num_cached = min(computed, len(group.request.prompt))
        core.hit_tokens += computed
    else:
        core.again_hit_tokens += computed
    core.admissions += 1
    core.chunks_allowed += -(-(known - computed) // core.chunk)


def restore(core: Core, sequence: Sequence) -> bool:
    """Restore a spilled sequence from the tier. Return False if there is no room."""
    request = sequence.group.request
    need = core.needs.alone(len(request.prompt) + len(sequence.tokens))
    if not core.rows.free or core.needs.short(need, core.available(), blocks_kept(core)) >= 0:
        return False
    attempt = core.attempt = Attempt(core, sequence)
    try:
        handle = attempt.open(core.pool.open, 0, request.namespace, keep=core.kept(request))
    except OutOfSequences:
        return False
    computed, kept = sequence.computed, sequence.kept
    core.set_length(handle, computed)
    del core.spilled[sequence]
    sequence.kept = None
    core.start(sequence, core.rows.take(), handle, computed, core.admission_number())
    core.rows.committed[sequence.lane] = 0
    core.tier.prefetch(kept, handle, core.tables(handle, computed))  # last: nothing undoes it
    return True


def admit_next(core: Core) -> Sequence | None:
    """Admit the next sequence and return it. None if nobody waits, or nobody who may come finds room.

    Whatever raises in it, also a signal between two lines, the sequence waits as before.
    """
    if not core.rows.free:
        return None
    core.attempt = None
    try:
        for sequence in core.spilled:
            return sequence if restore(core, sequence) else None
        head = core.queue.head()
        return head if head is None or admit(core, head) else admit_other(core, head)
    except MustWait:
        raise  # before anything has changed
    except BaseException:
        if core.attempt is not None:
            core.attempt.undo()
        core.queue.mend()
        raise
    finally:
        core.attempt = None  # it holds the request


def admit_other(core: Core, head: Sequence) -> Sequence | None:
    """Admit one who may overtake the first in line, which finds no room. Nobody overtakes one that ran before.

    `overtake` requests may overtake a request and its samples. Another tenant may if it has used at most a step more.
    """
    passed = [head]
    for sequence in () if core.queue.is_back(head) else core.queue.first(LOOK)[1:]:
        if passed[-1].group.passed >= core.queue.overtake:
            return None
        ahead = sequence.group.tenant.used - head.group.tenant.used
        if ahead <= core.max_step_tokens and admit(core, sequence):
            for group in {other.group for other in passed}:
                group.passed += 1
            return sequence
        passed.append(sequence)
    return None
