"""Plans the step after one that is out: what is known of it before its tokens are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kvpool.scheduler.state import FINISHED, Core, Step


def may_plan_ahead(core: Core, step: Step) -> bool:
    """Return whether the tokens of a step that is out decide nothing but which of its sequences end.

    False also where the next step may need a call of the pool that the step could not be taken back from.
    """
    if core.beams or core.spilled or core.eviction is not None or core.needs.promises:
        return False
    return not (core.unforked and (np.diff(step.sample_at) == 0).any())  # it ends no prompt that has samples


@contextmanager
def executed(core: Core, step: Step) -> Iterator[None]:
    """Make every sequence, inside the block, what it is after a step that is out, but for its newest token.

    A sequence that gets its last token has FINISHED there. All others go on: nobody knows yet whether they end.
    """
    rows = core.rows
    alive = rows.handle[step.lanes] == step.handles
    lanes, new, sampled = step.lanes, step.num_new.astype(np.int32), step.sample_lane
    if not alive.all():
        lanes, new = lanes[alive], new[alive]
        sampled = sampled[np.isin(sampled, lanes)]
    rows.computed[lanes] += new
    rows.generated[sampled] += 1
    chunks = step.lanes[step.num_decodes :][alive[step.num_decodes :]].tolist()
    last = sampled[rows.generated[sampled] >= rows.limit[sampled]].tolist()
    states = {sequence: sequence.state for sequence in map(rows.sequence, chunks + last)}
    for lane in chunks:
        core.set_phase(lane)
    for lane in last:
        core.move(rows.sequence(lane), FINISHED)
    core.is_ahead = True
    try:
        yield
    finally:
        core.is_ahead = False
        rows.computed[lanes] -= new
        rows.generated[sampled] -= 1
        for sequence, state in states.items():
            if sequence.state != state:
                core.move(sequence, state)
