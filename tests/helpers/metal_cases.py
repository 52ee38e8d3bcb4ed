"""Batches for the tests of the Metal kernels: pools full of NaN, tables full of wild ids, answers from float64."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from pairwise import pairwise

from kvpool.config import KVSpec
from kvpool.protocol import AttentionOptions
from kvpool.testing.dense import dense_attention, dense_scores, round_to
from kvpool_backends.mlx.metal_kernels import (
    DTYPES,
    AttentionWork,
    HeadTiles,
    MetalKernels,
    attention_step,
    head_tiles,
    plan_attention,
    score_export,
)

# Of a head's largest magnitude, before the result is rounded: what float32 sums of a few hundred terms lose. Sums in 16
# bits lose a hundred times that.
TOLERANCE = {"float32": 2e-6, "float16": 2e-5, "bfloat16": 2e-5}
ROUNDING = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # of the result, relative
WILD = (-1, 2**31 - 1, -(2**31), 0x7FFFFFF0)  # ids of blocks that no pool has
FEATURES = ("window", "soft_cap", "sinks", "alibi_slopes", "mask")
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
class Batch:
    """A batch on a pool, made from a seed."""

    dtype: str = "float32"
    head_dim: int = 64
    v_head_dim: int | None = None
    group: int = 2
    kv_heads: int = 2
    block_size: int = 16
    layout: str = "NHD"
    seq_lens: tuple[int, ...] = (100, 17, 1)
    q_lens: tuple[int, ...] | None = None  # decode: one each
    features: tuple[str, ...] = ()
    padding: int = 0  # query tokens of nobody, at the end
    extra_columns: int = 2  # of the block table
    part_tokens: int = 512
    seed: int = 0
    q_dtype: str | None = None  # of queries and results: that of the pool
    latent: bool = False  # K is latents, V their rotary parts
    k_bits: int | None = None  # of what is stored in 8 or 4 bits
    v_bits: int | None = None
    size: int = 64

    @property
    def result_dtype(self) -> str:
        return self.q_dtype or self.dtype

    @cached_property
    def spec(self) -> KVSpec:
        shape = 2, self.kv_heads, self.head_dim, self.dtype, self.block_size, self.v_head_dim, self.layout
        return KVSpec(*shape, self.k_bits, self.v_bits, self.size, self.latent)

    @property
    def num_q_heads(self) -> int:
        return self.group * self.kv_heads

    @cached_property
    def cu_q_lens(self) -> np.ndarray:
        q_lens = (1,) * len(self.seq_lens) if self.q_lens is None else self.q_lens
        return np.concatenate([[0], np.cumsum(q_lens)])

    @cached_property
    def num_blocks(self) -> int:
        return sum(-(-n // self.block_size) for n in self.seq_lens) + 3

    @cached_property
    def tables(self) -> np.ndarray:
        """Blocks in random order; entries of nobody are wild."""
        rng = np.random.default_rng(self.seed)
        counts = [-(-n // self.block_size) for n in self.seq_lens]
        tables = rng.choice(np.array(WILD, np.int32), (len(counts), max(counts) + self.extra_columns))
        blocks = iter(rng.permutation(self.num_blocks))
        for row, count in enumerate(counts):
            tables[row, :count] = list(itertools.islice(blocks, count))
        return tables

    @cached_property
    def parts(self) -> list[list[list[Any]]]:
        """Of each row and plane what is stored of its tokens: floats, or words, scales and biases of MLX."""
        rng = np.random.default_rng(self.seed + 1)

        def stored(x: np.ndarray, bits: int | None) -> list[Any]:
            return [round_to(x, self.dtype)] if bits is None else packed(x, self.dtype, bits, self.size)

        planes = list(zip(self.spec.planes, self.spec.bits, strict=True))
        return [
            [stored(rng.standard_normal((n, self.kv_heads, dim)), bits) for (_, dim), bits in planes]
            for n in self.seq_lens
        ]

    @cached_property
    def content(self) -> list[tuple[np.ndarray, ...]]:
        """K and V of each row, as stored; to change what is not packed before it comes into the pool."""
        bits = self.spec.bits
        return [
            tuple(x[0] if n is None else floats_of(x, n, self.size) for x, n in zip(row, bits, strict=True))
            for row in self.parts
        ]

    @property
    def keys_and_values(self) -> list[tuple[np.ndarray, ...]]:
        """Of each row, what queries are multiplied with and what is summed."""
        if not self.latent:
            return self.content
        return [(np.concatenate(planes, axis=-1), planes[0]) for planes in self.content]

    @cached_property
    def q(self) -> np.ndarray:
        rng = np.random.default_rng(self.seed + 2)
        shape = (self.cu_q_lens[-1] + self.padding, self.num_q_heads, self.spec.query_dim)
        return round_to(rng.standard_normal(shape), self.dtype)

    @cached_property
    def options(self) -> AttentionOptions:
        rng = np.random.default_rng(self.seed + 3)
        mask = rng.standard_normal((len(self.q), self.num_q_heads, max(self.seq_lens)))
        mask[rng.random(mask.shape) < 0.3] = -np.inf
        every = {
            "window": int(rng.integers(1, max(self.seq_lens) // 3 + 2)),
            "soft_cap": 1.5,
            "sinks": rng.standard_normal(self.num_q_heads),
            "alibi_slopes": rng.random(self.num_q_heads) / 8,
            "mask": mask[:, :1] if self.seed % 2 else mask,
        }
        return AttentionOptions(**{name: every[name] for name in self.features})

    def element_indices(self, plane: str, row: int) -> np.ndarray:
        """Where the elements of a row's tokens lie in the base array of a stored plane, int64 ``[n, Hk, dim]``."""
        token = np.arange(self.seq_lens[row])
        blocks = self.tables[row, token // self.block_size]
        return rows_at(self.spec, plane, self.num_blocks, blocks, token % self.block_size)

    @cached_property
    def pools(self) -> tuple[tuple[mx.array, ...], tuple[mx.array, ...]]:
        """Base arrays of the stored planes of K and of V; what belongs to no token has all bits set, which is NaN."""
        arrays = []
        for number, plane in enumerate(self.spec.stored_planes):
            shape, stored = self.spec.plane_layout(plane.name, self.num_blocks).shape, STORED[plane.dtype]
            dtype, base = DTYPES.get(plane.dtype, mx.uint32), np.full(shape, np.iinfo(stored).max, stored)
            for row, planes in enumerate(self.parts):
                part = [part for parts in planes for part in parts][number]
                base.reshape(-1)[self.element_indices(plane.name, row)] = bits_of(mx.array(part).astype(dtype))
            arrays.append(mx.array(base).view(dtype))
        keys = 1 if self.k_bits is None else 3
        return tuple(arrays[:keys]), tuple(arrays[keys:])

    @cached_property
    def expected(self) -> np.ndarray:
        """float64 ``[T, Hq, Dv]``."""
        out = np.zeros((*self.q.shape[:2], self.spec.result_dim))
        for row, (k, v) in enumerate(self.keys_and_values):
            tokens = slice(self.cu_q_lens[row], self.cu_q_lens[row + 1])
            options = self.options
            if options.mask is not None:
                options = dataclasses.replace(options, mask=options.mask[tokens])
            out[tokens] = dense_attention(self.q[tokens], k, v, None, options)[0]
        return out

    def run(self, factory: Any, **changed: Any) -> np.ndarray:
        """What the kernels say, float32 ``[T, Hq, Dv]``."""
        return self.run_with_scores(factory, None, **changed)[0]

    def run_with_scores(self, factory: Any, scores: str | None, **changed: Any) -> list[np.ndarray]:
        """The same, and what `MetalKernels.attend` exports."""
        batch = dataclasses.replace(self, **changed) if changed else self
        kernels = MetalKernels(batch.spec, batch.num_blocks, factory)
        q = mx.array(batch.q).astype(DTYPES[batch.result_dtype])
        results, exports = np.zeros((*batch.q.shape[:2], batch.spec.result_dim), np.float32), []
        for tokens, work, _ in batch.planned:
            options = batch.options
            if options.mask is not None:
                options = dataclasses.replace(options, mask=options.mask[tokens])
            step = attention_step(work, mx.array(self.tables), self.spec.query_dim**-0.5, options)
            if scores is not None:
                step = step._replace(export=score_export(work, batch.seq_lens, batch.options.window, 8))
            out, *exported = kernels.attend(0, q[mx.array(tokens)], *self.pools, step, scores, options)
            results[tokens] = np.array(out.astype(mx.float32))
            exports += map(np.array, exported)
        return [results, *([(sum if scores == "raw" else max_of)(exports)] if exports else [])]

    @property
    def planned(self) -> list[tuple[np.ndarray, AttentionWork, HeadTiles]]:
        """For each kernel that the rows need: its tokens, and its work list."""
        found = []
        for tokens, q_lens in self.launches:
            tiles = head_tiles(self.spec, self.group, int(q_lens.max()))
            work = plan_attention(
                np.array(self.seq_lens),
                np.concatenate([[0], np.cumsum(q_lens)]),
                len(tokens),
                tiles=tiles,
                window=self.options.window,
                part_tokens=self.part_tokens,
            )
            found.append((tokens, work, tiles))
        return found

    @property
    def tiles(self) -> HeadTiles:
        """Of rows with one query."""
        return head_tiles(self.spec, self.group, 1)

    @property
    def launches(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each kernel that the rows need: its tokens, and how many each row has there; padding is the last's."""
        q_lens = np.diff(self.cu_q_lens)
        kernels = np.array([head_tiles(self.spec, self.group, max(int(n), 1)).kernel for n in q_lens])
        owner = np.repeat(kernels, q_lens)
        found = [
            (np.flatnonzero(owner == kernel), np.where(kernels == kernel, q_lens, 0)) for kernel in dict.fromkeys(owner)
        ]
        tokens, last = found[-1]
        found[-1] = np.concatenate([tokens, np.arange(len(owner), len(self.q))]), last
        return found

    def expected_scores(self, kind: str) -> np.ndarray:
        """float64 ``[B, Hk, C]``, of the newest queries."""
        scores = np.zeros((len(self.seq_lens), self.kv_heads, max(self.seq_lens)))
        for row, (k, _) in enumerate(self.keys_and_values):
            if self.cu_q_lens[row] < self.cu_q_lens[row + 1]:
                newest = slice(self.cu_q_lens[row + 1] - 1, self.cu_q_lens[row + 1])
                mask = self.options.mask
                options = dataclasses.replace(self.options, mask=None if mask is None else mask[newest])
                scores[row, :, : len(k)] = dense_scores(self.q[newest], k, kind, None, options)
        return scores

    def check(self, out: np.ndarray) -> None:
        """Compare with float64: errors relative to the largest magnitude of a head, and one rounding of the result."""
        assert np.isfinite(out).all(), f"{self}: {np.argwhere(~np.isfinite(out))[:5].tolist()} are not finite"
        magnitude = np.abs(self.expected).max(axis=(0, 2), keepdims=True)
        magnitude[magnitude == 0] = 1.0
        error = (np.abs(out - self.expected) - ROUNDING[self.result_dtype] * np.abs(self.expected)) / magnitude
        at = np.unravel_index(np.argmax(error), error.shape) if error.size else ()
        assert (error <= TOLERANCE[self.dtype]).all(), f"{self}: element {at} is wrong by {error[at]:.2g}"


@dataclass(frozen=True)
class PackedBatch(Batch):
    """A batch whose keys, values or both are stored in 8 or 4 bits."""

    k_bits: int | None = 8
    v_bits: int | None = 8


def max_of(arrays: list[np.ndarray]) -> np.ndarray:
    """The largest of each element."""
    return np.maximum.reduce(arrays)


def choices(factors: dict[str, Sequence[Any]], swept: Sequence[str]) -> list[dict[str, Any]]:
    """Choices of the factors: `pairwise`, or with ``KVPOOL_METAL_SWEEP`` that share of all values of those in `swept`.

    Those in which every two values of two factors meet come first. The order of the others, and the other factors, are
    drawn by ``KVPOOL_METAL_SEED``.
    """
    share, seed = float(os.environ.get("KVPOOL_METAL_SWEEP", "0")), int(os.environ.get("KVPOOL_METAL_SEED", "1"))
    if not share:
        return pairwise(factors)
    every = list(itertools.product(*(factors[name] for name in swept)))
    rng = random.Random(seed)
    first = [tuple(row[name] for name in swept) for row in pairwise({name: factors[name] for name in swept}, seed)]
    drawn = list(dict.fromkeys([*first, *rng.sample(every, len(every))]))[: round(share * len(every))]
    print(f"sweep: {len(drawn)} of {len(every)} variants, seed {seed}")
    return [{name: rng.choice(factors[name]) for name in factors} | dict(zip(swept, row, strict=True)) for row in drawn]


def shape_of(choice: dict[str, Any], most_rows: int = 100) -> dict[str, Any]:
    """Arguments of a `Batch` from a choice in which "queries" is of each row, and "head_dim" may be a pair.

    A pair is the dimensions of latents and of their rotary parts. A KV head has at most `most_rows` queries and heads.
    """
    choice = dict(choice)
    queries, dims = min(choice.pop("queries"), -(-most_rows // choice["group"])), choice.pop("head_dim")
    if isinstance(dims, tuple):
        choice |= {"v_head_dim": dims[1], "latent": True}
    return {
        "head_dim": dims[0] if isinstance(dims, tuple) else dims,
        "kv_heads": 1 if isinstance(dims, tuple) or choice["group"] > 4 else 2,
        "q_lens": tuple(min(n, queries) for n in choice["seq_lens"]),
    } | choice
