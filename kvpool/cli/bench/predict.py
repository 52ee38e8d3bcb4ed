"""Times that arithmetic predicts for decode with the Metal kernels, and for MLX's own attention on dense K and V.

It guides: where a measurement is far from it, one of the two is wrong. Nothing here was measured by us.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvpool.spec import KVSpec

SIMDGROUPS = 24  # of a core that hide each other's waits: with fewer, reads take proportionally longer
READ_SHARE = 0.9  # of the bandwidth that a stream of whole lines gets
ISSUE_SHARE = 0.7  # of the cycles in which a scheduler issues an instruction
LAUNCH_SECONDS = 2e-6  # a kernel in a command buffer that has others
CHAIN_SECONDS = 0.8e-6  # one read that must be back before the next is asked for
ASSUMPTIONS = f"""\
A kernel takes the longest of three times, and {LAUNCH_SECONDS * 1e6:.0f} us to be launched:
- bytes of K and V over {READ_SHARE:.0%} of the bandwidth, more if fewer than {SIMDGROUPS} simdgroups wait in each core;
- instructions over 4 a cycle and core, at {ISSUE_SHARE:.0%} of the cycles;
- the reads that one simdgroup makes one after the other, {CHAIN_SECONDS * 1e6:.1f} us each.
Instructions of a simdgroup: a token costs kvpool 34, and 5 + D / 8 more for each query head that shares the read; it
costs MLX 18 + 3 D / 32 for each query head. These figures put MLX's published rates below within a tenth, where they
are known. Bandwidths are Apple's, clocks are from public tables. Caches, other processes and heat are not counted."""
PUBLISHED = (  # GPU, group, head_dim, context, GB/s of K and V; MLX's pull request 4077
    ("M5 Pro", 1, 128, 32_768, 281),
    ("M5 Pro", 4, 128, 32_768, 264),
    ("M5 Pro", 8, 128, 32_768, 190),
    ("M5 Pro", 8, 64, 32_768, 119),
)


class GPU(NamedTuple):
    """A chip: GPU cores (the most that it is sold with), GB/s, GHz."""

    cores: int
    bandwidth: float
    clock: float


GPUS = {
    "M1": GPU(8, 68, 1.28), "M1 Pro": GPU(16, 200, 1.30), "M1 Max": GPU(32, 400, 1.30), "M1 Ultra": GPU(64, 800, 1.30),
    "M2": GPU(10, 100, 1.40), "M2 Pro": GPU(19, 200, 1.40), "M2 Max": GPU(38, 400, 1.40),
    "M2 Ultra": GPU(76, 800, 1.40), "M3": GPU(10, 100, 1.40), "M3 Pro": GPU(18, 150, 1.40),
    "M3 Max": GPU(40, 400, 1.40), "M3 Ultra": GPU(80, 819, 1.40), "M4": GPU(10, 120, 1.58),
    "M4 Pro": GPU(20, 273, 1.58), "M4 Max": GPU(40, 546, 1.58), "M5": GPU(10, 153, 1.62),
    "M5 Pro": GPU(20, 307, 1.62), "M5 Max": GPU(40, 614, 1.62),
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
    from kvpool_backends.mlx.metal_kernels import head_tiles, plan_attention

    spec = KVSpec(1, shape.kv_heads, shape.head_dim, "float16", 16)
    tiles = head_tiles(spec, shape.group, 1)
    lengths = np.full(shape.batch, shape.context)
    work = plan_attention(lengths, np.arange(shape.batch + 1), shape.batch, block_size=16, tiles=tiles)
    simdgroups = len(work.items) * shape.kv_heads * tiles.groups * tiles.simdgroups(spec)
    passes = tiles.groups  # of the same K and V, the second from a cache
    if tiles.units:  # 16 cycles for each 8x8 of products and of sums; four waits for 32 tokens
        per_token = 8 + -(-tiles.rows // 8) * (2 + shape.head_dim / 2)
        chain = int((work.items[:, 7] - work.items[:, 6]).max()) / 8
    else:
        per_token = 16 + tiles.heads * (4 + shape.head_dim / 8)
        chain = int(work.items[:, 5].max()) / 8  # two loads of four rows are on their way
    return seconds(gpu, shape, simdgroups, passes * per_token, chain) + (0 if work.direct else LAUNCH_SECONDS)


def dense_seconds(gpu: GPU, shape: Shape) -> float:
    """Of a layer by MLX's kernels of two passes, or of one where the context is short."""
    parts = 1 if shape.context < 1024 else 128
    simdgroups = shape.batch * shape.kv_heads * shape.group * (32 if parts == 1 else parts)
    tokens = shape.context / (32 if parts == 1 else parts)
    per_token = shape.group * (18 + shape.head_dim * 3 / 32)
    return seconds(gpu, shape, simdgroups, per_token, tokens / 4) + (0 if parts == 1 else LAUNCH_SECONDS)


def seconds(gpu: GPU, shape: Shape, simdgroups: int, per_token: float, chain: float) -> float:
    """The longest of what `ASSUMPTIONS` names; `per_token`: instructions for one token of one KV head."""
    rows = shape.batch * shape.context * shape.kv_heads
    busy = min(1.0, simdgroups / (gpu.cores * SIMDGROUPS))
    reading = nbytes(shape) / (gpu.bandwidth * 1e9 * READ_SHARE * busy)
    issuing = rows * per_token / (gpu.cores * 4 * gpu.clock * 1e9 * ISSUE_SHARE * busy)
    return max(reading, issuing, chain * CHAIN_SECONDS) + LAUNCH_SECONDS


def nbytes(shape: Shape) -> int:
    """Of K and V."""
    return shape.batch * shape.context * shape.kv_heads * shape.head_dim * 2 * 2


def page() -> str:
    """Assumptions, how they fit what others published, and a table of chips."""
    lines = [ASSUMPTIONS, "", "published by MLX, predicted (GB/s of K and V):"]
    for name, group, dim, context, rate in PUBLISHED:
        shape = Shape(1, context, 8, group, dim)
        found = nbytes(shape) / dense_seconds(GPUS[name], shape) / 1e9
        lines.append(f"  {name:9} group {group}, D {dim:3}, {context // 1024}k: {rate:4} {found:6.0f}")
    lines += ["", "8 KV heads, D 128; us of a layer, kvpool and dense MLX, and their ratio (above 1: kvpool is faster)"]
    columns = [(batch, context, group) for batch in (1, 8) for context in (1024, 16_384) for group in (4, 8)]
    lines.append(" " * 9 + "".join(f"{f'{b} x {c // 1024}k G{g}':>20}" for b, c, g in columns))
    for name, gpu in GPUS.items():
        cells = []
        for batch, context, group in columns:
            shape = Shape(batch, context, 8, group, 128)
            ours, theirs = paged_seconds(gpu, shape) * 1e6, dense_seconds(gpu, shape) * 1e6
            cells.append(f"{ours:8.0f}{theirs:7.0f}{theirs / ours:5.2f}")
        lines.append(f"{name:9}" + "".join(cells))
    return "\n".join(lines)
