"""What all parts share of sequences that run together: their lengths, and one forward pass through a model."""

from __future__ import annotations

from functools import cached_property
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

    def __init__(self, lens: np.ndarray, todo: np.ndarray | None = None, gone: np.ndarray | None = None) -> None:
        self.lens = lens
        self.gone = np.zeros_like(lens) if gone is None else gone
        self.todo = todo

    @cached_property
    def offsets(self) -> mx.array:
        """Positions of the next tokens as int32 ``[B]`` on the device, made once."""
        return mx.array((self.lens + self.gone).astype(np.int32))

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
    """One forward pass: what its layers share, and where they store keys and values.

    Its copies are done when it is made.

    Parameters
    ----------
    backend : kvpool.protocol.KVBackend
    plan
        A `kvpool.Plan`, or a `kvpool.protocol.StepArrays`.
    shape : (B, N)
        Rows and columns of the model's input.
    columns : int32 ``[T]``, optional
        Which of the B * N input positions are real tokens; None when all are.
    eviction : kvpool.eviction.Evictor, optional
        Who is told what the layers see.
    is_fused : bool
        Whether the layers attend over the pool.
    defers : bool
        Store the keys and values of a layer when its queries are there, so that all are evaluated together. Where
        kernels run at once, every evaluation is a wait.
    stores : bool
        Whether there is something to store: not where the tokens of another pass are looked at once more.

    Attributes
    ----------
    step
        What the backend prepared of the plan.
    attends : bool
        Whether somebody looks at the attention; it is 0 otherwise.
    is_over : bool
        Whether something else has begun since: the blocks may hold other tokens.
    """

    def __init__(
        self,
        backend: KVBackend,
        plan: Any,
        shape: tuple[int, int],
        *,
        columns: mx.array | None = None,
        eviction: Any = None,
        is_fused: bool = False,
        defers: bool = False,
        stores: bool = True,
    ) -> None:
        self.backend = backend
        self.plan = plan
        self.shape = shape
        self.columns = columns
        self.eviction = eviction
        self.is_fused = is_fused
        self.defers = defers
        self.stores = stores
        self.attends = True
        self.is_over = False
        self._late: tuple[int, mx.array, mx.array] | None = None
        self.step = backend.prepare(plan)
        if len(plan.copies):
            backend.copy_blocks(plan)

    def put(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Store a layer's new keys ``[B, Hk, N, D]`` and values, now or with its queries (`defers`)."""
        if not self.stores:
            return
        k, v = keys.swapaxes(1, 2).flatten(0, 1), values.swapaxes(1, 2).flatten(0, 1)
        if self.columns is not None:
            k, v = k[self.columns], v[self.columns]
        if self.defers and self.attends:
            if self._late is not None:
                self.flush()
            self._late = layer, k, v
        else:
            self.backend.write(self.step, layer, k, v)

    def flush(self, *others: mx.array) -> None:
        """Store what was put off, if anything was; `others` are evaluated with it."""
        if self._late is not None:
            layer, k, v = self._late
            mx.eval(k, v, *others)
            self.backend.write(self.step, layer, k, v)
            self._late = None
