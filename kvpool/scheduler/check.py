"""`check`: recomputes every counter and invariant of a scheduler. It changes nothing."""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvpool.errors import CorruptState
from kvpool.scheduler.request import DECODING, FINISHED, PREFILLING, SPILLED, WAITING, Sequence
from kvpool.scheduler.state import Core, Step

NAMES = ("waiting", "prefilling", "decoding", "spilled", "finished")


def check(core: Core, out: list[Step]) -> None:
    """Raise `CorruptState` for the first invariant that does not hold. `out` are the steps that are out."""
    sequences = live_sequences(core)
    check_states(core, sequences)
    check_lanes(core, sequences)
    new: Counter[int] = Counter()
    for step in out:
        new.update(dict(zip(step.handles.tolist(), step.num_new.tolist(), strict=True)))
    named: set[tuple[int, int]] = set()
    for sequence in sequences:
        if sequence.lane >= 0:
            check_running(core, sequence, new)
            named |= core.needs.named(int(core.rows.handle[sequence.lane]))
        else:
            require(len(sequence.tokens) < sequence.group.request.max_tokens, f"{name(sequence)} waits with all tokens")
    for arena, blocks in Counter(arena for arena, _ in named).items():
        used = core.pool.stats(arena).used
        require(blocks <= used, f"{blocks} blocks of arena {arena} are in tables, {used} in use")
    check_progress(core, out)


def require(holds: object, what: str) -> None:
    if not holds:
        raise CorruptState(f"[check] {what}")


def name(sequence: Sequence) -> str:
    return f"request {sequence.group.id!r}[{sequence.index}]"


def live_sequences(core: Core) -> list[Sequence]:
    """Return all sequences that have not ended. Those of a beam are its unfinished hypotheses."""
    found = []
    for key, group in core.groups.items():
        require(key == group.id, f"request {group.id!r} is filed as {key!r}")
        mine = [sequence for sequence in group.sequences if sequence.state != FINISHED]
        if group.beam is None:
            require(len(mine) == group.unfinished, f"request {key!r} counts {group.unfinished}, has {len(mine)}")
        require(mine, f"request {key!r} has ended and is still there")
        found += mine
    unforked = sum(not group.forked for group in core.groups.values())
    require(unforked == core.unforked, f"{core.unforked} requests count as not forked, {unforked} are")
    return found


def check_states(core: Core, sequences: list[Sequence]) -> None:
    """Check the counters of states, and the lists by state."""
    states = Counter(sequence.state for sequence in sequences)
    for state in (WAITING, PREFILLING, DECODING, SPILLED):
        require(states[state] == core.count[state], f"{core.count[state]} count as {NAMES[state]}, {states[state]} are")
    waiting = {s for s in sequences if s.state == WAITING and (s.group.beam is None or s.group.beam.live[0] is s)}
    held = {group.sequences[0] for group in core.held.values()}
    require(held <= waiting, "somebody is held who does not wait")
    waiting -= held
    queued = list(core.queue)
    require(set(queued) == waiting, "the queue is not who waits")
    require(len(core.queue) == sum(s.group.admitted is None for s in queued), "the queue miscounts new requests")
    require(len(set(queued)) == len(queued), "somebody waits twice")
    check_tenants(core)
    require(set(core.spilled) == {s for s in sequences if s.state == SPILLED}, "spilled is not who is spilled")


def check_tenants(core: Core) -> None:
    """Check the lines of the tenants, their turns, and what they have used."""
    queue = core.queue
    requests = Counter(group.tenant.name for group in core.groups.values())
    for name, tenant in queue.tenants.items():
        require(tenant.requests == requests.pop(name, 0), f"tenant {name!r} counts {tenant.requests} requests")
        ranks = [(sequence.group.rank, sequence.index) for sequence in tenant.line]
        new = sum(sequence.group.admitted is None for sequence in tenant.line)
        require(tenant.new == new, f"tenant {name!r} counts {tenant.new} new requests, {new} are")
        require(ranks == sorted(ranks), f"the line of tenant {name!r} is out of order")
        require(tenant.is_listed or not ranks, f"tenant {name!r} waits and gets no turn")
    require(not requests, f"tenants are forgotten that have requests: {sorted(map(repr, requests))}")
    most = max((group.passed for group in core.groups.values()), default=0)
    require(most <= queue.overtake, f"{most} requests passed one that found no room, {queue.overtake} may")


def check_lanes(core: Core, sequences: list[Sequence]) -> None:
    """Check that each lane is free, spare in a beam, or of one sequence, and that handles are distinct."""
    rows = core.rows
    used = [sequence.lane for sequence in sequences if sequence.lane >= 0]
    spare = [lane for beam in core.beams for lane in beam.spare]
    places = sorted([*used, *spare, *rows.free])
    require(places == list(range(core.max_running)), f"lanes are lost or used twice: {places}")
    for sequence in sequences:
        runs = sequence.state in (PREFILLING, DECODING)
        require(runs == (sequence.lane >= 0), f"{name(sequence)} is {NAMES[sequence.state]} in lane {sequence.lane}")
        if runs:
            require(rows.sequences[sequence.lane] is sequence, f"lane {sequence.lane} is not of {name(sequence)}")
            require(rows.state[sequence.lane] == sequence.state, f"lane {sequence.lane} has another state")
    width, most = rows.watch.shape[1], max(1, int(rows.watched.max()))
    require(most <= width < 2 * most, f"{width} tokens are watched for, {most} are the most of a lane")
    require(not rows.watched[rows.free].any(), "tokens are watched for in a free lane")
    handles = rows.handle[used].tolist()
    require(all(core.pool.is_open(handle) for handle in handles), "the handle of a running sequence is closed")
    require(len(set(handles)) == len(handles), "two sequences have one handle")
    idle = np.setdiff1d(np.arange(core.max_running), used)
    require((rows.handle[idle] == -1).all() and (rows.state[idle] == WAITING).all(), "a free lane has a handle")


def check_running(core: Core, sequence: Sequence, new: dict[int, int]) -> None:
    """Check the lengths of one running sequence."""
    rows, lane = core.rows, sequence.lane
    handle, computed, remaining = int(rows.handle[lane]), int(rows.computed[lane]), rows.remaining(lane)
    length = core.pool.num_tokens(handle) - new.get(handle, 0)
    require(length == computed, f"{name(sequence)} has {computed} computed tokens, the pool {length}")
    group = 0 if core.eviction is None else core.eviction.group
    held, gone = core.pool.kv_len(handle, group) - new.get(handle, 0), int(rows.gone[lane])
    require(held == computed - gone, f"{name(sequence)} has lost {gone} of {computed} tokens, the pool has {held}")
    if core.needs.evicting is not None:
        most = core.needs.evicting.budget
        require(held <= most, f"{name(sequence)} holds {held} tokens, {most} are the most")
    require(remaining >= 1, f"{name(sequence)} has computed more than it knows ({remaining} left)")
    require(rows.generated[lane] < sequence.group.request.max_tokens, f"{name(sequence)} runs with all tokens")
    beam = sequence.group.beam
    if beam is None or len(beam.live) == 1:
        require((sequence.state == DECODING) == (remaining == 1), f"{name(sequence)} has {remaining} left to compute")
    else:
        require(sequence.state != DECODING or remaining == 1, f"{name(sequence)} decodes with {remaining} left")
        require(len({s.state for s in beam.live}) == 1, f"the beam of {sequence.group.id!r} is not in lockstep")


def check_progress(core: Core, out: list[Step]) -> None:
    """Check for livelock: progress bounds the number of steps and preemptions (docs/scheduling.md)."""
    steps = core.steps - core.idle_steps
    most = core.sampled_tokens + core.chunks_allowed + core.spills
    require(steps <= most, f"{steps} steps for {core.sampled_tokens} tokens, at most {most}")
    turns = core.sampled_tokens + core.idle_steps + core.setbacks + len(out)
    require(
        core.preemptions <= core.max_running * turns,
        f"{core.preemptions} preemptions for {core.sampled_tokens} tokens and {core.max_running} lanes",
    )
