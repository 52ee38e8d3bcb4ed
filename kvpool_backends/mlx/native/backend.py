"""Routes of the mlx backend whose calls are lazy nodes of the extension, so that steps can be pipelined.

`NativeBackend` computes with the CPU kernels, `NativeMetalBackend` with those of `kvpool_backends.metal`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np

from kvpool.errors import BackendUnavailable
from kvpool.protocol import AnyPlan, AttentionOptions, StepArrays
from kvpool.spec import LAYOUTS, KVSpec
from kvpool_backends.checks import check_attends, check_layer, checked_copies, checked_options, checked_results
from kvpool_backends.cpu._kernels import BlockStore, num_threads
from kvpool_backends.mlx.base import DTYPES, has_metal
from kvpool_backends.mlx.cpu_kernels import KernelBackend
from kvpool_backends.mlx.metal import MetalAttention, metal_capabilities
from kvpool_backends.mlx.metal_kernels import Launch, in_place_source
from kvpool_backends.mlx.native import load, status
from kvpool_backends.mlx.native.pool import InPlacePool

_NO_WINDOW = 2**63 - 1


@dataclass(frozen=True, slots=True)
class NativeStep(StepArrays):
    """The arrays of a step, and what the extension made of them: checked and copied once for all layers."""

    step: Any = None
    longest: int = 0  # context, in tokens


class NativeBackend(KernelBackend):
    """`KernelBackend` whose `write` and `attend` are nodes of MLX's graph: built now, run when MLX gets there.

    A call never waits, so a step can be built while the one before runs. Calls take effect in the order in which they
    were made (`InPlacePool`). What reads or writes whole blocks (`gather`, `compact`, `zero`, `export_blocks`,
    `import_blocks`, `read`) waits for what was built before and works at once; `copy_blocks` is lazy.

    Threads: one at a time builds or evaluates. Threads may take turns, under a lock; who leaves has called `settle`,
    because what one thread has built MLX does not evaluate in another.
    """

    capabilities = replace(KernelBackend.capabilities, lazy=True, layouts=LAYOUTS[:-1])  # all but "block"

    def _allocate(self) -> None:
        module = load()
        if module is None:
            raise BackendUnavailable(f"[MLXBackend] the native extension is not there: {status()['why']}")
        self._module = module
        super()._allocate()
        self._plain_attention: dict[float, Any] = {}

    def _place(self) -> None:
        super()._place()
        self._lazy = self._chained()

    def _chained(self) -> InPlacePool:
        return InPlacePool(self._module, self.spec, self.num_blocks, self._pool, isa=self.store.isa)

    def _release(self) -> None:
        self.settle()
        del self._lazy  # it has handles of the arrays
        super()._release()

    # ------------------------------------------------------------------------------------------ one step

    def prepare(self, plan: AnyPlan) -> NativeStep:
        """The arrays that the layers of one step need: a copy, so that what is queued outlives the plan's arrays."""
        tables = _ints("block_tables", plan.block_tables, 2)
        seq_lens = _ints("seq_lens", plan.seq_lens, 1)
        cu_q_lens = _ints("cu_q_lens", plan.cu_q_lens, 1)
        slots = np.ascontiguousarray(_ints("slots", plan.slot_mapping, 1), np.int64)
        longest = int(seq_lens.max(initial=0))
        wide = tables[: len(seq_lens), : -(-longest // self.spec.block_size)]
        if wide.dtype == np.int64:  # what does not fit 32 bits stays no block
            wide = np.clip(wide, -1, 2**31 - 1)
        step = self._module.step(
            num_threads(),
            self.num_blocks,
            self.spec.block_size,
            slots,
            wide.shape[1],
            np.ascontiguousarray(wide, np.int32),
            np.ascontiguousarray(seq_lens, np.int64),
            np.ascontiguousarray(cu_q_lens, np.int64),
        )
        return NativeStep(np.array(wide), np.array(seq_lens), np.array(cu_q_lens), slots, step=step, longest=longest)

    def copy_blocks(self, plan: AnyPlan | np.ndarray) -> None:
        copies = checked_copies(self, plan)
        if len(copies) == 0:
            return
        if np.isin(copies[:, 1], copies[:, 0]).any() or len(np.unique(copies[:, 1])) != len(copies):
            raise ValueError("[copy_blocks] a destination is a source too, or is there twice")
        self._lazy.copy_blocks(self._module.copies(num_threads(), np.ascontiguousarray(copies, np.int64)))

    def write(self, step: Any, layer: int, k: mx.array, v: mx.array) -> None:
        check_layer(self, "write", layer)
        self._lazy.write(layer, _array(k), _array(v), step.step)

    def attend(
        self, step: Any, layer: int, q: mx.array, scale: float | None = None, *,
        options: AttentionOptions | None = None, return_attn: bool = False,
        scores: str | None = None, scores_out: np.ndarray | None = None,
    ) -> Any:
        checked_results(self.capabilities, return_attn, scores, scores_out)
        check_layer(self, "attend", layer)
        check_attends(self.spec)
        q = _array(q)
        if scores is not None:  # no node of its own: policies read scores at once anyway
            self._lazy.wait()
            return super().attend(step, layer, q, scale, options=options, scores=scores)
        return self._lazy.attend(layer, q, step.step, self._attention(q, step, scale, options))

    def queued(self, layer: int) -> list[mx.array]:
        """An empty array for ``mx.eval``, which has to see it after a write."""
        return [self._lazy.token(layer)]

    def _idle_store(self) -> BlockStore:
        self._lazy.wait()
        return self.store

    def settle(self) -> int:
        """Wait for everything that was built on the pool. Raises `PoolMoved` if an array is not where it was."""
        self._lazy.wait()
        self._lazy.check_addresses()
        return 0

    # ---------------------------------------------------------------------------------------- internals

    def _attention(self, q: mx.array, step: NativeStep, scale: float | None, options: AttentionOptions | None) -> Any:
        scale = self.spec.head_dim**-0.5 if scale is None else float(scale)
        if not np.isfinite(np.float32(scale)):
            raise ValueError(f"[attend] scale is {scale}, it must be finite in float32")
        num_heads = q.shape[1] if q.ndim == 3 else 0
        options = checked_options(options, self.capabilities, q.shape[0], num_heads, step.longest)
        if not options.features:
            if scale not in self._plain_attention:
                self._plain_attention[scale] = self._module.attention(scale, 0.0, _NO_WINDOW, None, None, None, 0, 0)
            return self._plain_attention[scale]
        mask, token_stride, head_stride = options.mask, 0, 0
        if mask is not None:
            if mask.dtype == np.bool_:
                mask = np.where(mask, np.float32(0), np.float32(-np.inf))
            mask = np.ascontiguousarray(mask[..., : step.longest], np.float32)
            token_stride = mask[0].size if len(mask) else 0
            head_stride = mask.shape[-1] if mask.ndim == 3 and mask.shape[1] > 1 else 0
        return self._module.attention(
            scale,
            options.soft_cap or 0.0,
            options.window or _NO_WINDOW,
            options.sinks,
            options.alibi_slopes,
            mask,
            token_stride,
            head_stride,
        )


class NativeMetalBackend(MetalAttention, NativeBackend):
    """`MetalBackend` whose writes are nodes that store into the pool: it is never copied, and takes every layout.

    Tokens and blocks are moved by the kernels of `kvpool_backends.metal` where MLX computes on a GPU, by those of the
    CPU elsewhere. Attention is a node for each layer, which repeats what MLX has described for the first layer of a
    step; where scores are asked for, MLX launches each. What works on whole blocks waits for the device and works on
    its memory, which is the host's too.
    """

    capabilities = metal_capabilities(LAYOUTS[:-1])  # all but "block"
    describes_each = False  # launch of attention to MLX: no node repeats what was described for another layer

    def _allocate(self) -> None:
        super()._allocate()
        self._notes = not self.describes_each and has_metal() and self._metal_kernel in (None, mx.fast.metal_kernel)

    def _chained(self) -> InPlacePool:
        if not has_metal():
            return super()._chained()
        return InPlacePool(
            self._module,
            self.spec,
            self.num_blocks,
            self._pool,
            isa=self.store.isa,
            on_gpu=True,
            metal=metal_texts(self._module, self.spec),
        )

    def _on_pool(self, layer: int, kernel: Callable[..., list[mx.array]]) -> Sequence[mx.array]:
        return self._lazy.read(layer, kernel)

    def _launched(self, layer: int, launch: Launch, q: mx.array, heads: tuple[mx.array, ...]) -> Sequence[mx.array]:
        if not self._notes or launch.more_inputs:  # of scores
            return super()._launched(layer, launch, q, heads)
        own = q, self._kernels.layout(layer), *heads
        if not launch.noted:
            launch.noted.append(self._lazy.noted(layer, lambda k, v: launch(own[1], q, k, v, heads), own))
        return (self._lazy.repeat(layer, launch.noted[0], own),)

    def _warm_write(self, num_tokens: int) -> None:
        """Write tokens of nobody."""
        k, v = (mx.zeros((num_tokens, self.spec.num_kv_heads, dim), self.dtype) for _, dim in self.spec.planes)
        self.write(self.prepare(StepArrays(slot_mapping=np.full(num_tokens, -1))), 0, k, v)
        self._lazy.wait()


def metal_texts(module: ModuleType, spec: KVSpec) -> Any:
    """The argument `metal` of `InPlacePool`: kernels that write each dtype, in vectors or not, and that copy."""
    block, size = spec.block_size, spec.quant_group_size

    def writes(name: str, *numbers: int, more: tuple[int, ...] = ()) -> tuple[tuple[str, str], ...]:
        kinds = product(DTYPES, (0, 1))
        return tuple(in_place_source(name, (spec.dtype, x), (*numbers, vectors, *more)) for x, vectors in kinds)

    if not spec.is_quantized:
        all_writes = [writes("kv_write", spec.head_dim, spec.value_head_dim, block)]
    else:
        all_writes = [
            writes("kv_write", dim, 0, block)
            if bits is None
            else writes("kv_write_packed", dim, block, more=(bits, size))
            for (_, dim), bits in zip(spec.planes, spec.bits, strict=True)
        ]
    copies = [
        in_place_source("copy_blocks", (dtype,), numbers)
        for dtype, numbers in ((spec.dtype, (block,)), ("uint32", (block,)), (spec.dtype, (block, 1)))
    ]
    return module.metal_texts(tuple(all_writes), *copies)


def _array(x: Any) -> mx.array:
    return x if isinstance(x, mx.array) else mx.array(x)


def _ints(name: str, x: Any, ndim: int) -> np.ndarray:
    x = np.asarray(x)
    if x.dtype not in (np.int32, np.int64):
        raise TypeError(f"[prepare] {name} must be int32 or int64, got {x.dtype}")
    if x.ndim != ndim:
        raise ValueError(f"[prepare] {name} must have {ndim} dimensions, got shape {list(x.shape)}")
    return x
