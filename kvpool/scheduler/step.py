"""`Step`: what one call of `schedule` decided, as arrays for the backend and the sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy import int32, int64
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kvpool._core import Plan
    from kvpool.scheduler.core import Batch
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
        *("sample_position", "beam_width", "_rows", "batch"),
    )

    def __init__(
        self, rows: Rows, plan: Plan, batch: Batch | None, tokens: NDArray[int32], num_decodes: int, *arrays: np.ndarray
    ) -> None:
        self._rows = rows
        self.plan = plan
        self.batch = batch  # the decodes, if each samples one token
        self.tokens = tokens
        self.num_decodes = num_decodes
        self.slots: NDArray[int32]
        self.handles: NDArray[int64]
        self.num_new: NDArray[int64]
        self.sample_at: NDArray[int32]
        self.sample_slot: NDArray[int32]
        self.sample_index: NDArray[int32]
        self.beam_width: NDArray[int32]
        self.slots, self.handles, self.num_new, self.sample_at, self.sample_slot, self.sample_index, self.beam_width = (
            arrays
        )
        self.sample_position: NDArray[int32] = rows.generated[self.sample_slot]

    def __repr__(self) -> str:
        return (
            f"<kvpool.scheduler.Step of {self.num_decodes} decodes and {len(self.slots) - self.num_decodes} chunks, "
            f"{len(self.tokens)} tokens, {len(self.sample_at)} samples>"
        )

    @property
    def evicted(self) -> NDArray[int32]:
        """Tokens of each row that have left, ``[S]``: how much positions are ahead of places in the table."""
        gone: NDArray[int32] = self._rows.gone[self.slots]
        return gone

    @property
    def requests(self) -> list[Request]:
        """The request of each sample, length M; made on demand."""
        sequences = self._rows.sequences
        return [sequences[slot].group.request for slot in self.sample_slot.tolist()]  # type: ignore[union-attr]
