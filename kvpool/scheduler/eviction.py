"""A budget per sequence: tokens that leave before a step, and what a request needs of the pool then."""

from __future__ import annotations

import numpy as np

from kvpool.errors import OutOfBlocks, RequestRejected
from kvpool.scheduler.core import Core
from kvpool.scheduler.request import Request
from kvpool.scheduler.room import spill
from kvpool.scheduler.sequence import Sequence


def most_tokens(core: Core, tokens: int) -> int:
    """Tokens that a sequence of so many has slots for at a time: what is left of it, and a chunk."""
    return tokens if core.eviction is None else min(tokens, core.eviction.most + core.chunk)


def blocks_alone(core: Core, tokens: int) -> int:
    """Blocks with which a sequence of so many tokens runs alone: where it is compacted, also those for copies."""
    need = core.blocks(most_tokens(core, tokens))
    if core.eviction is not None and core.prefix is not None and tokens > core.eviction.policy.max_kv:
        need += 1  # a block that is cached twice
        need += 0 if core.eviction.policy.whole_blocks else core.blocks(core.eviction.most)
    return need


def judge(core: Core, request: Request) -> None:
    """Refuse what does not go with eviction."""
    if core.eviction is not None and request.beam_width > 1:
        raise RequestRejected(
            f"[add] a beam of {request.beam_width} sequences keeps every token, this scheduler evicts", "beam"
        )


def open_within(core: Core, tokens: np.ndarray, namespace: bytes) -> int:
    """A sequence with what the cache has of these tokens, and the blocks that it needs until they are computed."""
    looked_up = tokens[: core.findable + 1]  # the last one is always computed
    handle = int(core.pool.open(looked_up, namespace))
    if len(looked_up) < len(tokens):
        try:
            assert core.eviction is not None
            core.eviction.reserve(handle, most_tokens(core, len(tokens)) - core.pool.num_tokens(handle))
        except BaseException:
            core.pool.close(handle)
            raise
    return handle


def publish(core: Core, slot: int) -> None:
    """What a sequence has computed goes to the cache before it loses tokens: later it cannot any more.

    Not where somebody else has published it meanwhile: the cache would keep both copies.
    """
    rows, request = core.rows, core.rows.sequence(slot).group.request
    end = min(int(rows.computed[slot]), core.findable)
    if core.prefix is None or rows.gone[slot] or end <= rows.committed[slot]:
        return
    if core.prefix.match(rows.known(slot, 0, end + 1), request.namespace) <= rows.committed[slot]:
        core.commit(slot)


def keep_budgets(core: Core) -> None:
    """Before a step: tokens leave the sequences that have as many as they may.

    Raises
    ------
    OutOfBlocks
        One request alone is left and finds no blocks for copies: others of the pool hold them.
    Exception
        What the backend raises; the sequence in question is preempted.
    """
    assert core.eviction is not None
    rows = core.rows
    slots = rows.running()
    lens = rows.kv_lens(slots)
    full = slots[core.eviction.lens_after(lens) < lens]
    for sequence in [rows.sequence(slot) for slot in full.tolist()]:
        while sequence.slot >= 0:
            try:
                evict(core, sequence)
                break
            except OutOfBlocks:
                make_way(core)


def evict(core: Core, sequence: Sequence) -> None:
    """Bring one sequence below its budget."""
    rows, evictor, slot = core.rows, core.eviction, sequence.slot
    assert evictor is not None
    handle = int(rows.handle[slot])
    now = rows.kv_lens(np.array([slot]))
    after = evictor.lens_after(now)
    if after[0] < now[0]:
        publish(core, slot)
    try:
        if after[0] < now[0]:
            evictor.evict([handle], np.array([slot]), now, after, rows.computed[[slot]])
            rows.gone[slot] += now[0] - after[0]
            core.evicted_tokens += int(now[0] - after[0])
        # What was reserved left with the tokens. Without it a sequence could lose its blocks before its next token, and
        # two of them could preempt each other for ever.
        evictor.reserve(handle, min(rows.remaining(slot), evictor.most + core.chunk - int(after[0])))
    except OutOfBlocks:
        raise
    except BaseException:
        rows.gone[slot] = rows.computed[slot] - core.pool.kv_len(handle)
        core.preempt(sequence)
        core.setbacks += 1
        raise


def make_way(core: Core) -> None:
    """Preempt one: the last admitted, of the lowest priority if that is the policy.

    Others in turn would do harm: of two long prompts each could preempt the other for ever. Who is left alone starts
    over if it ran beside others, as in `room.make_room`.
    """
    running = core.rows.running()
    core.setbacks += 1
    if len(running) == 1 and (core.was_alone() or core.prefix is None):
        stats = core.pool.stats()
        raise OutOfBlocks(
            f"[schedule] request {core.rows.sequence(running[0]).group.id!r} runs alone and finds no blocks for the "
            f"copies that eviction needs: {stats.used} of {stats.num_blocks - stats.reserved} are in use, others of "
            f"the pool hold some",
            blank=stats.blank,
            evictable=stats.evictable,
            limbo=stats.limbo,
        )
    victims = [core.rows.sequence(slot) for slot in running[::-1].tolist()]
    victim = victims[0]
    if core.policy == "priority":
        victim = min(victims, key=lambda sequence: sequence.group.request.priority)
    if not spill(core, victim):
        core.preempt(victim)
