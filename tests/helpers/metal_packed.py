"""Batches on pools of 8 and 4 bits, for the tests of the Metal kernels; what comes back is what MLX says."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np
from metal_cases import Batch

from kvpool.config import KVSpec
from kvpool.testing.dense import round_to
from kvpool_backends.mlx.metal_kernels import DTYPES

BITS = ((8, 8), (4, 4), (8, 4), (4, 8), (None, 4), (8, None))
STORED = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16, "uint32": np.uint32}


def bits_of(x):
    """An MLX array as the integers that are stored for it."""
    return np.array(x.view({1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[x.dtype.size]))


def packed(x, dtype, bits, size):
    """`mx.quantize` of tokens ``[T, Hk, D]`` rounded to `dtype`: words, scales, biases."""
    return list(mx.quantize(mx.array(np.asarray(x, np.float32)).astype(DTYPES[dtype]), size, bits))


def floats_of(parts, bits, size):
    """``scale * n + bias`` as float32, from scales and biases as they are stored."""
    words, scales, biases = parts
    factors = (part.astype(mx.float32) for part in (scales, biases))
    return np.array(mx.dequantize(words, *factors, size, bits))


def rows_at(spec, plane, num_blocks, blocks, slots):
    """Indices of the elements ``[n, Hk, dim]`` of a stored plane in its base array."""
    layout = spec.plane_layout(plane, num_blocks)
    (dim,) = (stored.dim for stored in spec.stored_planes if stored.name == plane)
    first = layout.offset + np.asarray(blocks, np.int64) * layout.block_stride
    first = first + np.asarray(slots) * layout.slot_stride
    return first[:, None, None] + np.arange(spec.num_kv_heads)[:, None] * layout.head_stride + np.arange(dim)


@dataclass(frozen=True)
class PackedBatch(Batch):
    """A batch whose keys, values or both are stored in 8 or 4 bits."""

    k_bits: int | None = 8
    v_bits: int | None = 8
    size: int = 64

    @cached_property
    def spec(self) -> KVSpec:
        packing = {"k_bits": self.k_bits, "v_bits": self.v_bits, "quant_group_size": self.size}
        return dataclasses.replace(super().spec, **packing)

    @cached_property
    def parts(self) -> list[list[mx.array]]:
        """Of each row, what the stored planes hold of its tokens ``[n, Hk, dim]``."""
        rng = np.random.default_rng(self.seed + 1)
        rows = []
        for n in self.seq_lens:
            rows.append([])
            for (_, dim), bits in zip(self.spec.planes, self.spec.bits, strict=True):
                x = rng.standard_normal((n, self.kv_heads, dim))
                dense = [mx.array(round_to(x, self.dtype)).astype(DTYPES[self.dtype])]
                rows[-1] += dense if bits is None else packed(x, self.dtype, bits, self.size)
        return rows

    @cached_property
    def content(self) -> list[tuple[np.ndarray, ...]]:
        rows = []
        for parts in self.parts:
            left, planes = iter(parts), []
            for bits in self.spec.bits:
                if bits is None:
                    planes.append(np.array(next(left).astype(mx.float32)))
                else:
                    planes.append(floats_of([next(left), next(left), next(left)], bits, self.size))
            rows.append(tuple(planes))
        return rows

    @cached_property
    def pools(self) -> tuple[tuple[mx.array, ...], tuple[mx.array, ...]]:
        """Base arrays of the stored planes of K and of V; what belongs to no token has all bits set, which is NaN."""
        spec, bases = self.spec, {}
        for number, plane in enumerate(spec.stored_planes):
            layout = spec.plane_layout(plane.name, self.num_blocks)
            base = bases.setdefault(
                layout.array, np.full(layout.shape, np.iinfo(STORED[plane.dtype]).max, STORED[plane.dtype])
            )
            for row, parts in enumerate(self.parts):
                token = np.arange(self.seq_lens[row])
                blocks = self.tables[row, token // self.block_size]
                at = rows_at(spec, plane.name, self.num_blocks, blocks, token % self.block_size)
                base.reshape(-1)[at] = bits_of(parts[number])
        arrays = [
            mx.array(bases[spec.plane_layout(plane.name, self.num_blocks).array]).view(
                mx.uint32 if plane.dtype == "uint32" else DTYPES[plane.dtype]
            )
            for plane in spec.stored_planes
        ]
        keys = 1 if self.k_bits is None else 3
        return tuple(arrays[:keys]), tuple(arrays[keys:])
