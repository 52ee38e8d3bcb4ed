"""Out of blocks: who makes room for the next token of the rest, by spilling or by being preempted."""

from __future__ import annotations

import numpy as np

from kvpool.errors import OutOfBlocks
from kvpool.scheduler.core import Core
from kvpool.scheduler.sequence import SPILLED, Sequence

POLICIES = ("last", "longest", "grower", "priority")


def make_room(core: Core, probe: object) -> None:
    """Preempt until every decode finds its block.

    Parameters
    ----------
    probe : Plan
        Any plan that is not pending: to learn which row finds no block.

    Raises
    ------
    OutOfBlocks
        One request alone is left and finds no block: others of the pool hold them.

    Notes
    -----
    A request that has run beside others may have computed what one of them had cached before: the prefix cache then
    keeps both copies of a block. If it is left alone and finds no block, it starts over, once, and finds them cached.
    """
    pool = core.pool
    while True:
        batch = core.batch()
        if pool.blocks.num_blank >= len(batch.handles) or pool.can(batch.handles):
            return
        running = core.rows.running()
        victim = choose(core, running, probe)
        unit = 1 if victim.group.beam is None else len(victim.group.beam.live)
        if unit == len(running):
            core.setbacks += 1
            if core.prefix is not None and not core.was_alone():
                core.preempt(victim)
                return
            stats = pool.stats()
            raise OutOfBlocks(
                f"[schedule] request {victim.group.id!r} runs alone and finds no block: "
                f"{stats.used} of {stats.num_blocks - stats.reserved} are in use, others of the pool hold some",
                blank=stats.blank,
                evictable=stats.evictable,
                limbo=stats.limbo,
            )
        if not spill(core, victim):
            core.preempt(victim)


def choose(core: Core, running: np.ndarray, probe: object) -> Sequence:
    """The victim, by policy, of the running slots in order of admission."""
    rows = core.rows
    if core.policy == "longest":
        lengths = rows.computed[running]
        slot = running[len(running) - 1 - int(np.argmax(lengths[::-1]))]  # of equals the last admitted
    elif core.policy == "grower":
        slot = core.batch().slots[first_short(core, probe)]
    elif core.policy == "priority":
        lowest = [rows.sequence(at).group.request.priority for at in running]
        slot = running[len(lowest) - 1 - lowest[::-1].index(min(lowest))]
    else:
        slot = running[-1]
    return rows.sequence(slot)


def first_short(core: Core, probe: object) -> int:
    """Which row finds no block; some row does."""
    try:
        core.pool.step(probe, core.batch().handles, 1)  # type: ignore[arg-type]
    except OutOfBlocks as error:
        return error.row
    raise AssertionError("the blocks are there")


def spill(core: Core, sequence: Sequence) -> bool:
    """Move a sequence's KV to the tier, if there is one and it takes it.

    Never a beam, which shares blocks; nor one with fewer tokens than it knows, or one that is to lose some.
    """
    if core.tier is None or sequence.group.beam is not None:
        return False
    slot = sequence.slot
    if core.eviction is not None and (core.rows.gone[slot] or core.rows.computed[slot] > core.eviction.most):
        return False
    handle = int(core.rows.handle[slot])
    if not core.rows.computed[slot]:
        return False
    blocks = core.pool.table(handle)[: core.blocks(int(core.rows.computed[slot]))]
    kept = core.tier.spill_to_host(handle, blocks)
    if kept is None:
        return False
    core.commit(slot)
    core.pool.close(handle)
    core.leave(sequence, SPILLED)
    sequence.kept = kept
    core.spilled[sequence] = None
    core.spills += 1
    return True
