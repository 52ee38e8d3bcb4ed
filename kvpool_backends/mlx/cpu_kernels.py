"""The kernel route: the CPU kernels on MLX's memory, in place.

MLX allocates the pool's arrays and never computes with them afterwards: nothing has to be ordered against its graph,
and it never copies the pool, whatever views are kept and steps are pipelined. Two rules for every call ensure this:

- *In*: the call first evaluates its MLX arrays (k and v, or q) and all that they depend on. Then the kernel runs at
  once, on the calling thread. Other work that is queued in MLX stays queued.
- *Out*: a result is a new MLX array. It is allocated and evaluated before the kernel writes it, and no operation uses
  it before.

So calls take effect in their order, and while a step runs, the next one can be built only up to its first `write`.
Inside ``mx.compile`` and ``mx.vmap`` arrays have no content, and a call raises RuntimeError. One thread at a time, as
for all MLX graphs; another thread may continue from the results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np

from kvpool.protocol import AnyPlan, AttentionOptions, BatchShape
from kvpool_backends.checks import checked_results
from kvpool_backends.cpu._kernels import BlockStore
from kvpool_backends.cpu.backend import CPUBackend, StoreBackend, default_layout
from kvpool_backends.mlx.base import DTYPES, BaseBackend, PoolMemory

_LINE_NBYTES = 64  # of a cache line: a vector load touches one
_SMALL = 4096  # elements that are copied in less time than a stream of MLX takes to answer


class KernelBackend(StoreBackend, BaseBackend):
    """`MLXBackend` with the CPU kernels: all layouts and attention options, no lazy work, no copy of the pool.

    `kvpool.protocol.KVBackend` documents each method.
    """

    route = "kernels"
    capabilities = replace(
        CPUBackend.capabilities, name="mlx", dtypes=tuple(DTYPES), scores_out=False, arrays="mlx"
    )

    def _allocate(self) -> None:
        self.spec = self.spec.in_layout(default_layout())
        self._value_head_dim = self.spec.value_head_dim
        size = self.num_blocks if self._storage is None else 0
        self._pool = PoolMemory(self.spec, size, alignment=_LINE_NBYTES)
        self._place()

    def _place(self) -> None:
        given = self._pool.arrays if self._storage is None else [self._storage]
        self.store = BlockStore(self.spec, self.num_blocks, given)

    def _release(self) -> None:
        del self.store

    # ------------------------------------------------------------------------------------------ one step

    def prepare(self, plan: AnyPlan) -> Any:
        """Return the plan itself: each kernel call checks and copies the arrays that it reads."""
        return plan

    def write(self, step: Any, layer: int, k: mx.array, v: mx.array) -> None:
        k, v = (k, v) if isinstance(k, mx.array) and isinstance(v, mx.array) else (mx.array(k), mx.array(v))
        try:
            mx.eval(k, v)
        except ValueError as error:
            raise _no_content("write") from error
        self.store.write(layer, k, v, step.slot_mapping)

    def attend(
        self, step: Any, layer: int, q: mx.array, scale: float | None = None, *,
        options: AttentionOptions | None = None, return_attn: bool = False,
        scores: str | None = None, scores_out: np.ndarray | None = None,
    ) -> Any:
        if return_attn or scores is not None or scores_out is not None:
            checked_results(self.capabilities, return_attn, scores, scores_out)
        q = q if isinstance(q, mx.array) else mx.array(q)
        if q.ndim != 3:
            raise ValueError(f"[attend] q has shape {q.shape}, it must be [T, Hq, D]")
        size = *q.shape[:2], self._value_head_dim
        is_small = 0 < prod(size) <= _SMALL  # such an array exists already: nobody waits for MLX once more
        out = mx.array(np.zeros(size, np.float32), q.dtype) if is_small else mx.zeros(size, q.dtype)
        try:
            mx.eval(q, out)
        except ValueError as error:
            raise _no_content("attend") from error
        tables, seq_lens, cu_q_lens = step.block_tables, step.seq_lens, step.cu_q_lens
        exported = view = None
        if scores is not None:
            exported = mx.zeros((len(seq_lens), self.spec.num_kv_heads, int(np.max(seq_lens, initial=0))))
            mx.eval(exported)
            view = np.asarray(memoryview(exported))  # type: ignore[arg-type]
        self.store.attend(
            layer, q, out, tables, seq_lens, cu_q_lens, scale, options, scores=scores, scores_out=view
        )
        return out if scores is None else (out, exported)

    def warmup(self, shapes: Iterable[BatchShape], *, scores: str | None = None) -> None:
        """Do nothing: there is nothing to compile."""

    def settle(self) -> int:
        """Return the number of pool arrays that MLX has copied: 0, because nothing is queued on the pool."""
        return self._pool.count_copies()

    # ---------------------------------------------------------------------------------------- internals

    def _zeros(self, *shape: int) -> tuple[list[mx.array], list[np.ndarray]]:
        bits = mx.uint16 if self.dtype == mx.bfloat16 else self.dtype  # numpy has no bfloat16
        arrays = [mx.zeros((*shape, dim), bits) for _, dim in self.spec.planes]
        mx.eval(arrays)
        return arrays, [np.asarray(memoryview(array)) for array in arrays]  # type: ignore[arg-type]

    def _results(self, arrays: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
        k, v = (array.view(self.dtype) for array in arrays)
        return k, v


def _no_content(call: str) -> RuntimeError:
    return RuntimeError(
        f"[{call}] the arrays have no content yet, as inside mx.compile or mx.vmap; call it outside of them"
    )
