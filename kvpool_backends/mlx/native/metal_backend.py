"""`NativeMetalBackend`: the Metal route with writes in place, by the extension."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from kvpool.protocol import StepArrays
from kvpool.spec import LAYOUTS, QUANT_BITS
from kvpool_backends.mlx.base import has_metal
from kvpool_backends.mlx.metal import MetalAttention, metal_capabilities
from kvpool_backends.mlx.native.backend import NativeBackend
from kvpool_backends.mlx.native.metal import metal_texts
from kvpool_backends.mlx.native.pool import InPlacePool


class NativeMetalBackend(MetalAttention, NativeBackend):
    """`MetalBackend` whose writes are nodes that store into the pool: it is never copied, and takes every layout.

    Tokens and blocks are moved by the kernels of `kvpool_backends.metal` where MLX computes on a GPU, by those of the
    CPU elsewhere. What works on whole blocks waits for the device and works on its memory, which is the host's too.
    """

    capabilities = metal_capabilities(LAYOUTS[:-1], QUANT_BITS)  # all but "block"

    def _allocate(self) -> None:
        super()._allocate()
        if has_metal():
            self._lazy = InPlacePool(
                self._module,
                self.spec,
                self.num_blocks,
                self._pool,
                isa=self._store.isa,
                on_gpu=True,
                metal=metal_texts(self._module, self.spec),
            )

    def _on_pool(self, layer: int, kernel: Callable[..., list[mx.array]]) -> list[mx.array]:
        return list(self._lazy.read(layer, kernel))

    def _warm_write(self, num_tokens: int) -> None:
        """Write tokens of nobody."""
        k, v = (mx.zeros((num_tokens, self.spec.num_kv_heads, dim), self.dtype) for _, dim in self.spec.planes)
        self.write(self.prepare(StepArrays(slot_mapping=np.full(num_tokens, -1))), 0, k, v)
        self._lazy.wait()
