"""`NativeMetalBackend`: the Metal route with writes in place, by the extension."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np

from kvpool.protocol import StepArrays
from kvpool.spec import LAYOUTS, KVSpec
from kvpool_backends.mlx.base import DTYPES, has_metal
from kvpool_backends.mlx.metal import MetalAttention, metal_capabilities
from kvpool_backends.mlx.metal_kernels import Launch, in_place_source
from kvpool_backends.mlx.native.backend import NativeBackend
from kvpool_backends.mlx.native.pool import InPlacePool


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
