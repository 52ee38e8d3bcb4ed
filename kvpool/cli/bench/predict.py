"""Predicted times of decode by the Metal kernels and by MLX's attention, by arithmetic: for `kvpool doctor --report`.

It guides: where a measurement is far from it, one of the two is wrong. Nothing here was measured by us. A kernel takes
the longest of three times, and is launched:

- bytes of K and V over `READ_SHARE` of the bandwidth, more if fewer than `SIMDGROUPS` simdgroups wait in each core;
  what several threadgroups read comes again from the chip's cache, as far as all of K and V fit there; after them the
  sums of parts;
- instructions over 4 a cycle and core, at `ISSUE_SHARE` of the cycles; products of 8x8 matrices: `MATRIX_CYCLES`;
- the reads that one simdgroup makes one after the other, `CHAIN_SECONDS` each.

Bandwidths are Apple's, clocks are from public tables. `ISSUE_SHARE` and the caches were fitted to rates that others
have published for M5 chips. An Ultra's two halves are taken for one chip: the only rate known is a quarter of what is
predicted. Heat and other processes are not counted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvpool.spec import KVSpec

SIMDGROUPS = 24  # of a core that hide each other's waits: with fewer, reads take proportionally longer
READ_SHARE = 0.9  # of the bandwidth that a stream of whole lines gets
ISSUE_SHARE = 0.7  # of the cycles in which a scheduler issues an instruction
MATRIX_CYCLES = 16  # of a scheduler for the product of two 8x8 matrices
LAUNCH_SECONDS = 2e-6  # a kernel in a command buffer that has others
CHAIN_SECONDS = 0.8e-6  # one read that must be back before the next is asked for


class GPU(NamedTuple):
    """A chip: GPU cores (the most that it is sold with), GB/s, GHz, MB of the cache in front of the memory."""

    cores: int
    bandwidth: float
    clock: float
    cache: int = 8


GPUS = {
    "M1": GPU(8, 68, 1.28), "M1 Pro": GPU(16, 200, 1.30, 24), "M1 Max": GPU(32, 400, 1.30, 48),
    "M1 Ultra": GPU(64, 800, 1.30, 96), "M2": GPU(10, 100, 1.40), "M2 Pro": GPU(19, 200, 1.40, 24),
    "M2 Max": GPU(38, 400, 1.40, 48), "M2 Ultra": GPU(76, 800, 1.40, 96), "M3": GPU(10, 100, 1.40),
    "M3 Pro": GPU(18, 150, 1.40, 24), "M3 Max": GPU(40, 400, 1.40, 48), "M3 Ultra": GPU(80, 819, 1.40, 96),
    "M4": GPU(10, 120, 1.58), "M4 Pro": GPU(20, 273, 1.58, 24), "M4 Max": GPU(40, 546, 1.58, 48),
    "M5": GPU(10, 153, 1.62), "M5 Pro": GPU(20, 307, 1.62, 24), "M5 Max": GPU(40, 614, 1.62, 48),
}  # fmt: skip


class Shape(NamedTuple):
    """One decode: rows of equal contexts, 16-bit K and V."""

    batch: int
    context: int
    kv_heads: int
    group: int
    head_dim: int


def gpu_of(device: str, cores: int | None = None) -> GPU | None:
    """The chip that MLX names, with the cores that it has here. None for one that is not known."""
    name = device.removeprefix("Apple").strip()
    found = GPUS.get(name)
    return found if found is None or cores is None else found._replace(cores=cores)


def paged_seconds(gpu: GPU, shape: Shape) -> float:
    """Of a layer by the Metal kernels, as they plan their launches."""
    from kvpool_backends.mlx.metal_kernels import head_tiles, parts_of, plan_attention

    spec = KVSpec(1, shape.kv_heads, shape.head_dim)
    tiles = head_tiles(spec, shape.group, 1)
    lengths = np.full(shape.batch, shape.context)
    starts, parts = np.arange(shape.batch + 1), parts_of(spec, tiles)
    if gpu.cores > 40:
        parts["parts_max"] = max(96, parts["parts_max"])
    work = plan_attention(lengths, starts, shape.batch, tiles=tiles, **parts)
    simdgroups = len(work.items) * shape.kv_heads * tiles.groups * tiles.simdgroups(spec)
    if tiles.units:  # four waits for 32 tokens
        per_token = 8 + -(-tiles.rows // 8) * (2 + (spec.query_dim + spec.result_dim) / 64 * MATRIX_CYCLES)
        chain = int((work.items[:, 7] - work.items[:, 6]).max()) / 8
    else:
        per_token = shared_instructions(tiles.heads, shape.head_dim)
        chain = int(work.items[:, 5].max()) / 8  # two loads of four rows are on their way
    took = seconds(gpu, shape, simdgroups, tiles.groups * per_token, chain, tiles.groups)
    if work.direct:
        return took
    sums = len(work.items) * shape.kv_heads * tiles.groups * tiles.rows * (shape.head_dim + 4) * 4
    return took + LAUNCH_SECONDS + 2 * sums / (gpu.bandwidth * 1e9 * READ_SHARE)  # written, and read


def shared_instructions(heads: int, head_dim: int) -> float:
    """Of a simdgroup for one token that it reads for so many query heads."""
    return 34 + heads * (5 + head_dim / 8)


def dense_seconds(gpu: GPU, shape: Shape, shares: bool | None = None) -> float:
    """Of a layer by MLX's kernels of two passes, or of one where the context is short.

    `shares`: by the kernel whose simdgroups compute several heads; as MLX chooses, if None.
    """
    parts = 1 if shape.context < 1024 else 128
    simdgroups = shape.batch * shape.kv_heads * shape.group * (32 if parts == 1 else parts)
    tokens = shape.context / (32 if parts == 1 else parts)
    if shares is None:
        shares = shape.group == 8 and shape.head_dim in (64, 128) and shape.context >= 8192
    per_head = 18 + shape.head_dim * 3 / 32
    per_token = shared_instructions(shape.group, shape.head_dim) if shares else shape.group * per_head
    return seconds(gpu, shape, simdgroups, per_token, tokens / 4) + (0 if parts == 1 else LAUNCH_SECONDS)


def seconds(gpu: GPU, shape: Shape, simdgroups: int, per_token: float, chain: float, passes: int = 1) -> float:
    """The longest of the three times, and the launch.

    per_token: instructions for one token of one KV head. passes: how often K and V are read.
    """
    rows = shape.batch * shape.context * shape.kv_heads
    busy = min(1.0, simdgroups / (gpu.cores * SIMDGROUPS))
    missed = 1 - min(1.0, gpu.cache * 1e6 / nbytes(shape))
    reading = nbytes(shape) * (1 + (passes - 1) * missed) / (gpu.bandwidth * 1e9 * READ_SHARE * busy)
    issuing = rows * per_token / (gpu.cores * 4 * gpu.clock * 1e9 * ISSUE_SHARE * busy)
    return max(reading, issuing, chain * CHAIN_SECONDS) + LAUNCH_SECONDS


def nbytes(shape: Shape) -> int:
    """Of K and V."""
    return shape.batch * shape.context * shape.kv_heads * shape.head_dim * 2 * 2
