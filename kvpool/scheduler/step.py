"""`Step`: what one call of `schedule` decided, as arrays for the backend and the sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy import int32, int64
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kvpool import Plan
    from kvpool.scheduler.request import Request
    from kvpool.scheduler.rows import Rows


class Step:
    """One batch. The arrays hold until `update` or `fail`.

    Attributes
    ----------
    plan : Plan
        Of the pool's step: copies, writes, reads.
    num_decodes : int
        The first rows are decodes, one token each; prefill chunks follow.
    handles : int64 ``[S]``
    slots : int32 ``[S]``
        The scheduler's slot of each row.
    num_new : int64 ``[S]``
        New tokens of each row.
    tokens : int32 ``[T]``
        Inputs, row after row.
    sample_at : int32 ``[M]``
        Which of the T positions' logits are sampled, ascending; several times the same for several samples.
    sample_slot, sample_index, sample_position : int32 ``[M]``
        The scheduler's slot, which sample of its request, how many tokens this has generated so far.
    beam_width : int32 ``[M]``
        Of the request, 0: not a beam.
    """

    __slots__ = (
        *("plan", "num_decodes", "handles", "slots", "num_new", "tokens", "sample_at", "sample_slot", "sample_index"),
        *("sample_position", "beam_width", "_rows"),
    )

    def __init__(
        self,
        plan: Plan,
        num_decodes: int,
        slots: NDArray[int32],
        handles: NDArray[int64],
        num_new: NDArray[int64],
        tokens: NDArray[int32],
        sample_at: NDArray[int32],
        sample_slot: NDArray[int32],
        sample_index: NDArray[int32],
        rows: Rows,
    ) -> None:
        self.plan = plan
        self.num_decodes = num_decodes
        self.slots = slots
        self.handles = handles
        self.num_new = num_new
        self.tokens = tokens
        self.sample_at = sample_at
        self.sample_slot = sample_slot
        self.sample_index = sample_index
        self.sample_position = rows.generated[sample_slot]
        self.beam_width = rows.width[sample_slot]
        self._rows = rows

    def __repr__(self) -> str:
        return (
            f"<kvpool.Step of {self.num_decodes} decodes and {len(self.slots) - self.num_decodes} chunks, "
            f"{len(self.tokens)} tokens, {len(self.sample_at)} samples>"
        )

    @property
    def requests(self) -> list[Request]:
        """The request of each sample, length M; made on demand."""
        return [self._rows.sequence(slot).group.request for slot in self.sample_slot.tolist()]


def arange(n: int) -> NDArray[int32]:
    """Return 0 .. n - 1 as int32."""
    return np.arange(n, dtype=np.int32)
