"""What all parts share of sequences that run together: their lengths, and one forward pass through a model."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from kvpool.errors import KVPoolError
from kvpool.protocol import KVBackend

NOT_OPENED = -1  # in place of a handle: an empty sequence, opened when it gets its first token


class EngineStopped(KVPoolError, RuntimeError):
    """A batch was in an engine when a forward pass failed. The engine may have lost tokens: make a new one.

    Or an eviction failed half-way, in any cache: what it holds cannot be read any more.
    """


class Rows:
    """What a batch looks like between two operations. Never changed, only replaced: a facade that has not
    come to the next operation keeps seeing this.

    Attributes
    ----------
    lens : int64 ``[B]``
        Tokens of each sequence that are in the pool.
    gone : int64 ``[B]``
        Tokens that were evicted: the next one has position ``lens + gone``.
    todo : int64 ``[B]``, optional
        While right-padded input is being processed: real tokens that are still to come.
    """

    __slots__ = ("_offsets", "gone", "lens", "todo")

    def __init__(self, lens: np.ndarray, todo: np.ndarray | None = None, gone: np.ndarray | None = None) -> None:
        self.lens = lens
        self.gone = np.zeros_like(lens) if gone is None else gone
        self.todo = todo
        self._offsets: mx.array | None = None

    @property
    def offsets(self) -> mx.array:
        """Positions of the next tokens as int32 ``[B]`` on the device, made once."""
        if self._offsets is None:
            self._offsets = mx.array((self.lens + self.gone).astype(np.int32))
        return self._offsets

    def num_new(self, num_columns: int) -> np.ndarray:
        """How many of the next `num_columns` input columns are real tokens, per row."""
        if self.todo is None:
            return np.full(len(self.lens), num_columns, np.int64)
        return np.minimum(self.todo, num_columns)

    def after(self, new: np.ndarray) -> Rows:
        """The rows when `new` tokens per row have been added."""
        return Rows(self.lens + new, None if self.todo is None else self.todo - new, self.gone)


class Known(NamedTuple):
    """What the prefix cache knows of a sequence."""

    namespace: bytes = b""  # that it was opened in
    num_tokens: int = 0  # committed, or found when it was opened


class Forward:
    """What the layers of one forward pass share.

    Attributes
    ----------
    backend : kvpool.protocol.KVBackend
    step
        What the backend prepared of the plan.
    plan
        A `kvpool.Plan`, or a `kvpool.protocol.StepArrays`.
    shape : (B, N)
        Rows and columns of the model's input.
    columns : int32 ``[T]``, optional
        Which of the B * N input positions are real tokens; None when all are.
    eviction : kvpool.eviction.Evictor, optional
        Who is told what the layers see.
    is_over : bool
        Whether something else has begun since: the blocks may hold other tokens.
    """

    __slots__ = ("backend", "columns", "eviction", "is_over", "plan", "shape", "step")

    def __init__(
        self,
        backend: KVBackend,
        step: Any,
        plan: Any,
        shape: tuple[int, int],
        columns: mx.array | None = None,
        eviction: Any = None,
    ) -> None:
        self.backend = backend
        self.step = step
        self.plan = plan
        self.shape = shape
        self.columns = columns
        self.eviction = eviction
        self.is_over = False
