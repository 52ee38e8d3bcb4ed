"""Predicted times of the Metal kernels, and of those of MLX and vllm-metal, by arithmetic.

It guides: where a measurement is far from it, one of the two is wrong. Nothing here was measured by us.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvpool.spec import KVSpec

SIMDGROUPS = 24  # of a core that hide each other's waits: with fewer, reads take proportionally longer
READ_SHARE = 0.9  # of the bandwidth that a stream of whole lines gets
ISSUE_SHARE = 0.7  # of the cycles in which a scheduler issues an instruction
MATRIX_CYCLES = 16  # of a scheduler for the product of two 8x8 matrices
MATRIX_SHARE = 0.85  # of the cycles in which a kernel that does little else issues those
LAUNCH_SECONDS = 2e-6  # a kernel in a command buffer that has others
CHAIN_SECONDS = 0.8e-6  # one read that must be back before the next is asked for
ASSUMPTIONS = f"""\
A kernel takes the longest of three times, and {LAUNCH_SECONDS * 1e6:.0f} us to be launched:
- bytes of K and V over {READ_SHARE:.0%} of the bandwidth, more if fewer than {SIMDGROUPS} simdgroups wait in each core.
  What several threadgroups read comes again from the chip's cache, as far as all of K and V fit there;
- instructions over 4 a cycle and core, at {ISSUE_SHARE:.0%} of the cycles; products of 8x8 matrices: {MATRIX_CYCLES}.
  Chunks: at {MATRIX_SHARE:.0%} of the cycles, and a quarter more instructions in kvpool's kernel;
- the reads that one simdgroup makes one after the other, {CHAIN_SECONDS * 1e6:.1f} us each.
Instructions of a simdgroup for a token: 34, and 5 + D / 8 for each query head, where heads share the read (kvpool, MLX
for groups of 8 from 8k on); else for each query head 18 + 3 D / 32 (MLX), 18 + D / 4 (vllm-metal). vllm-metal splits
contexts at 512 tokens. MLX's mask of a window hides tokens, but its kernel computes their products.
Two of these numbers were fitted to the rates below, on M5 chips: {ISSUE_SHARE:.0%}, and 48 MB of cache in a Max. Others
have 8 MB (24 Pro, 96 Ultra). Bandwidths are Apple's, clocks are from public tables. An Ultra's two halves are taken for
one chip: the only rate known is a quarter of what is predicted. Heat and other processes are not counted."""
PUBLISHED = (  # kernel, GPU, KV heads, group, head_dim, context, GB/s of K and V
    *(("MLX", "M5 Pro", 32, 1, 128, context, rate) for context, rate in ((2048, 239), (8192, 282), (32_768, 281))),
    *(("MLX", "M5 Pro", 8, 4, 128, context, rate) for context, rate in ((2048, 234), (8192, 263), (32_768, 264))),
    *(("MLX", "M5 Pro", 4, 8, 128, context, rate) for context, rate in ((2048, 130), (8192, 184), (32_768, 190))),
    *(("MLX", "M5 Pro", 8, 8, 64, context, rate) for context, rate in ((2048, 76), (8192, 113), (32_768, 119))),
    *(("MLX", "M5 Max", 4, 8, 128, context, rate) for context, rate in ((8192, 314), (16_384, 383), (32_768, 430))),
    *(("MLX", "M5 Max", 8, 8, 64, context, rate) for context, rate in ((8192, 228), (16_384, 258), (32_768, 275))),
    *(("MLX, shared", "M5 Max", 4, 8, 128, n, rate) for n, rate in ((8192, 363), (16_384, 415), (32_768, 482))),
    *(("MLX, shared", "M5 Max", 8, 8, 64, n, rate) for n, rate in ((8192, 273), (16_384, 307), (32_768, 360))),
    *(("vllm-metal", "M5 Max", 4, 6, 256, n, rate) for n, rate in ((16_384, 209), (32_768, 143), (65_536, 103))),
    *(
        ("vllm-metal, shared", "M5 Max", 4, 6, 256, n, rate)
        for n, rate in ((16_384, 275), (32_768, 398), (65_536, 378))
    ),
    ("MLX", "M1 Ultra", 4, 8, 256, 100_000, 180),
)
# From discussions and pull requests of MLX and vllm-metal on GitHub.


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
    """One decode: rows of equal contexts, 16-bit K and V. `rotary`: of latent attention, whose latent is `head_dim`."""

    batch: int
    context: int
    kv_heads: int
    group: int
    head_dim: int
    rotary: int = 0


def gpu_of(device: str, cores: int | None = None) -> GPU | None:
    """The chip that MLX names, with the cores that it has here. None for one that is not known."""
    name = device.removeprefix("Apple").strip()
    found = GPUS.get(name)
    return found if found is None or cores is None else found._replace(cores=cores)


def paged_seconds(gpu: GPU, shape: Shape) -> float:
    """Of a layer by the Metal kernels, as they plan their launches."""
    from kvpool_backends.mlx.metal_kernels import head_tiles, parts_of, plan_attention

    is_latent = shape.rotary > 0
    spec = KVSpec(1, shape.kv_heads, shape.head_dim, v_head_dim=shape.rotary or None, latent=is_latent)
    tiles = head_tiles(spec, shape.group, 1)
    lengths = np.full(shape.batch, shape.context)
    starts, parts = np.arange(shape.batch + 1), parts_of(spec, tiles)
    work = plan_attention(lengths, starts, shape.batch, tiles=tiles, **parts)
    simdgroups = len(work.items) * shape.kv_heads * tiles.groups * tiles.simdgroups(spec)
    if tiles.units:  # four waits for 32 tokens
        per_token = 8 + -(-tiles.rows // 8) * (2 + (spec.query_dim + spec.result_dim) / 64 * MATRIX_CYCLES)
        chain = int((work.items[:, 7] - work.items[:, 6]).max()) / 8
    else:
        per_token = shared_instructions(tiles.heads, shape.head_dim)
        chain = int(work.items[:, 5].max()) / 8  # two loads of four rows are on their way
    took = seconds(gpu, shape, simdgroups, tiles.groups * per_token, chain, tiles.groups)
    return took + (0 if work.direct else LAUNCH_SECONDS)


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


def vllm_seconds(gpu: GPU, shape: Shape, shares: bool) -> float:
    """Of a layer by vllm-metal: a threadgroup per query head, or a simdgroup each in one threadgroup of a KV head."""
    parts = shape.batch * -(-shape.context // 512)
    simdgroups = parts * shape.kv_heads * shape.group * (1 if shares else 8)
    per_token = shape.group * (18 + shape.head_dim / 4)
    passes = 1 if shares else shape.group
    return seconds(gpu, shape, simdgroups, per_token, 512 / 32, passes) + LAUNCH_SECONDS


def seconds(gpu: GPU, shape: Shape, simdgroups: int, per_token: float, chain: float, passes: int = 1) -> float:
    """The longest of the three times in `ASSUMPTIONS`, and the launch.

    per_token: instructions for one token of one KV head. passes: how often K and V are read.
    """
    rows = shape.batch * shape.context * shape.kv_heads
    busy = min(1.0, simdgroups / (gpu.cores * SIMDGROUPS))
    missed = 1 - min(1.0, gpu.cache * 1e6 / nbytes(shape))
    reading = nbytes(shape) * (1 + (passes - 1) * missed) / (gpu.bandwidth * 1e9 * READ_SHARE * busy)
    issuing = rows * per_token / (gpu.cores * 4 * gpu.clock * 1e9 * ISSUE_SHARE * busy)
    return max(reading, issuing, chain * CHAIN_SECONDS) + LAUNCH_SECONDS


def window_seconds(gpu: GPU, queries: int, window: int, q_heads: int, head_dim: int, paged: bool) -> float:
    """Of a layer for a chunk of so many queries behind a full window, by matrix units: `paged`, or MLX with a mask."""
    tokens = (window + 16) * 1.25 if paged else window + queries
    products = queries * q_heads / 8 * tokens / 8 * head_dim / 8 * 2
    return products * MATRIX_CYCLES / (gpu.cores * 4 * gpu.clock * 1e9 * MATRIX_SHARE) + LAUNCH_SECONDS


def published_rate(kernel: str, gpu: GPU, shape: Shape) -> float:
    """The predicted rate of an entry of `PUBLISHED`, in GB/s."""
    name, _, shared = kernel.partition(", ")
    took = (vllm_seconds if name == "vllm-metal" else dense_seconds)(gpu, shape, bool(shared))
    return nbytes(shape) / took / 1e9


def nbytes(shape: Shape) -> int:
    """Of K and V."""
    dims = shape.head_dim + shape.rotary if shape.rotary else 2 * shape.head_dim
    return shape.batch * shape.context * shape.kv_heads * dims * 2


def page() -> str:
    """Assumptions, predictions beside published rates, and tables of chips."""
    lines = [ASSUMPTIONS, "", "published, predicted (GB/s of K and V) and predicted over published:"]
    for kernel, name, kv_heads, group, dim, context, rate in PUBLISHED:
        found = published_rate(kernel, GPUS[name], Shape(1, context, kv_heads, group, dim))
        what = f"{kernel:18} {name:8} group {group}, D {dim:3}, {context / 1024:3.0f}k"
        lines.append(f"  {what}: {rate:4} {found:5.0f} {found / rate:5.2f}")
    lines += ["", "8 KV heads, D 128; us of a layer, kvpool and dense MLX, and their ratio (above 1: kvpool is faster)"]
    columns = [(batch, context, group) for batch in (1, 8) for context in (1024, 16_384) for group in (4, 8)]
    shapes = [Shape(batch, context, 8, group, 128) for batch, context, group in columns]
    heads = [f"{b} x {c // 1024}k G{g}" for b, c, g in columns]
    lines += _table(heads, lambda gpu, i: (paged_seconds(gpu, shapes[i]), dense_seconds(gpu, shapes[i])))
    windows = (1024, 4096)
    lines += ["", "the same of chunks of 2,048 queries and 32 heads of 128 dimensions, behind a window"]
    lines += _table(
        [f"window {window}" for window in windows],
        lambda gpu, i: tuple(window_seconds(gpu, 2048, windows[i], 32, 128, paged) for paged in (True, False)),
    )
    latents = [Shape(1, context, 1, group, 512, 64) for context in (4096, 32_768) for group in (16, 128)]
    lines += ["", "kvpool, decode with latents of 512 + 64: us of a layer, and GB/s of the latents"]
    lines.append(" " * 9 + "".join(f"{f'{s.context // 1024}k, {s.group} heads':>20}" for s in latents))
    for name, gpu in GPUS.items():
        took = [paged_seconds(gpu, shape) for shape in latents]
        cells = (f"{t * 1e6:13.0f}{nbytes(s) / t / 1e9:7.0f}" for t, s in zip(took, latents, strict=True))
        lines.append(f"{name:9}" + "".join(cells))
    return "\n".join(lines)


def _table(heads: list[str], both: Callable[[GPU, int], tuple[float, ...]]) -> list[str]:
    """A line per chip: us of both, and the second over the first."""
    lines = [" " * 9 + "".join(f"{head:>20}" for head in heads)]
    for name, gpu in GPUS.items():
        pairs = [both(gpu, i) for i in range(len(heads))]
        lines.append(f"{name:9}" + "".join(f"{a * 1e6:8.0f}{b * 1e6:7.0f}{b / a:5.2f}" for a, b in pairs))
    return lines
