"""Predicted times of the Metal kernels and of MLX's attention, by arithmetic: for `benchmarks.mac_report`.

``python -m benchmarks.predict`` prints them for some chips. They guide: where a measurement is far from it, one of the
two is wrong. Nothing here was measured by us. A kernel takes the longest of three times, and is launched:

- bytes of K and V over `READ_SHARE` of the bandwidth, more if fewer than `SIMDGROUPS` simdgroups wait in each core;
  what several threadgroups read comes again from the chip's cache, as far as all of K and V fit there; after them the
  sums of parts;
- instructions over 4 a cycle and core, at `ISSUE_SHARE` of the cycles; products of 8x8 matrices: `MATRIX_CYCLES`;
- the reads that one simdgroup makes one after the other, `CHAIN_SECONDS` each.

MLX has the tensor operations of an M5 ("NAX") in products of matrices and in attention of more than 8 queries with
head dimensions `NAX_DIMS`. No decode has them, nor kvpool's kernels; its long chunks run MLX's. What a kernel spills it
writes and reads once for 32 tokens.

Bandwidths are Apple's, clocks are from public tables. `ISSUE_SHARE`, `NAX_SHARE` and the caches were fitted to rates
that others have published for M5 chips, `NAX_CYCLES` is from their tests of an A19. An Ultra's two halves are taken for
one chip: the only rate of decode known is a quarter of what is predicted. Heat and other processes are not counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from benchmarks.measure import tokens
from kvpool.spec import KVSpec

SIMDGROUPS = 24  # of a core that hide each other's waits: with fewer, reads take proportionally longer
READ_SHARE = 0.9  # of the bandwidth that a stream of whole lines gets
ISSUE_SHARE = 0.7  # of the cycles in which a scheduler issues an instruction
MATRIX_CYCLES, NAX_CYCLES = 16, 4  # of a scheduler for the product of two 8x8 matrices, and with tensor operations
NAX_SHARE, NAX_DIMS = 0.33, (64, 96, 128, 256)  # of these cycles in MLX's attention, and where it has them
LAUNCH_SECONDS = 2e-6  # a kernel in a command buffer that has others
CHAIN_SECONDS = 0.8e-6  # one read that must be back before the next is asked for


class GPU(NamedTuple):
    """A chip: GPU cores (as many as it is sold with), GB/s, GHz, MB of cache before the memory, tensor operations."""

    cores: int
    bandwidth: float
    clock: float
    cache: int = 8
    nax: bool = False

    def moving(self, size: float) -> float:
        """Seconds for so many bytes."""
        return size / (self.bandwidth * 1e9 * READ_SHARE)


GPUS = {
    "M1": GPU(8, 68, 1.28), "M1 Pro": GPU(16, 200, 1.30, 24), "M1 Max": GPU(32, 400, 1.30, 48),
    "M1 Ultra": GPU(64, 800, 1.30, 96), "M2": GPU(10, 100, 1.40), "M2 Pro": GPU(19, 200, 1.40, 24),
    "M2 Max": GPU(38, 400, 1.40, 48), "M2 Ultra": GPU(76, 800, 1.40, 96), "M3": GPU(10, 100, 1.40),
    "M3 Pro": GPU(18, 150, 1.40, 24), "M3 Max": GPU(40, 400, 1.40, 48), "M3 Ultra": GPU(80, 819, 1.40, 96),
    "M4": GPU(10, 120, 1.58), "M4 Pro": GPU(20, 273, 1.58, 24), "M4 Max": GPU(40, 546, 1.58, 48),
    "M5": GPU(10, 153, 1.62, 8, True), "M5 Pro": GPU(20, 307, 1.62, 24, True), "M5 Max": GPU(40, 614, 1.62, 48, True),
}  # fmt: skip
CHIPS = ("M1", "M4 Max", "M3 Ultra", "M5 Max")  # that are printed
CASES = (  # rows, queries of each, tokens of each, query heads of a KV head, dimensions, window
    *((1, 1, context, 4, 128, None) for context in (1024, 16384, 131072)),
    *((8, 1, 4096, 4, 128, None), (8, 1, 4096, 8, 64, None), (1, 512, 4096, 4, 128, None)),
    *((1, 2048, 16384, 4, 128, None), (1, 2048, 16384, 2, 256, None), (1, 2048, 3072, 4, 128, 1024)),
)


class Shape(NamedTuple):
    """Rows of equal contexts, 16-bit K and V."""

    batch: int
    context: int
    kv_heads: int
    group: int
    head_dim: int


def gpu_of(device: str, cores: int | None = None) -> GPU | None:
    """The chip that MLX names, with the cores that it has here. None for one that is not known."""
    found = GPUS.get(device.removeprefix("Apple").strip())
    return found if found is None or cores is None else found._replace(cores=cores)


def paged_seconds(gpu: GPU, shape: Shape, queries: int = 1, window: int | None = None, spilled: int = 0) -> float:
    """Of a layer by the Metal kernels, as they plan their launches. `spilled`: bytes of a lane."""
    from kvpool_backends.mlx.metal_kernels import head_tiles, parts_of, plan_attention

    spec = KVSpec(1, shape.kv_heads, shape.head_dim)
    tiles = head_tiles(spec, shape.group, queries)
    lengths = np.full(shape.batch, shape.context)
    starts, parts = queries * np.arange(shape.batch + 1), parts_of(spec, tiles)
    if gpu.cores > 40:
        parts["parts_max"] = max(96, parts["parts_max"])
    work = plan_attention(lengths, starts, int(starts[-1]), tiles=tiles, window=window, **parts)
    simdgroups = len(work.items) * shape.kv_heads * tiles.groups * tiles.simdgroups(spec)
    seen = work.items[:, 7] - work.items[:, 6]
    passes = float(seen.sum()) * tiles.groups / (shape.batch * shape.context)
    if tiles.units:  # four waits for 32 tokens
        per_token = 8 + -(-tiles.rows // 8) * (2 + (spec.query_dim + spec.result_dim) / 64 * MATRIX_CYCLES)
        chain = int(seen.max()) / 8
    else:
        per_token = shared_instructions(tiles.heads, shape.head_dim)
        chain = int(work.items[:, 5].max()) / 8  # two loads of four rows are on their way
    per_token += spilled / 8  # 64 bytes a cycle and core
    took = seconds(gpu, shape, simdgroups, passes * per_token, chain, passes)
    if work.direct:
        return took
    sums = len(work.items) * shape.kv_heads * tiles.groups * tiles.rows * (shape.head_dim + 4) * 4
    return took + LAUNCH_SECONDS + gpu.moving(2 * sums)  # written, and read


def shared_instructions(heads: int, head_dim: int) -> float:
    """Of a simdgroup for one token that it reads for so many query heads."""
    return 34 + heads * (5 + head_dim / 8)


def dense_seconds(gpu: GPU, shape: Shape, shares: bool | None = None) -> float:
    """Of a layer by MLX's kernels of two passes, or of one where the context is short.

    `shares`: by the kernel whose simdgroups compute several heads; as MLX chooses, if None.
    """
    parts = 1 if shape.context < (1024 if gpu.cores > 20 else 4096) else 128 if gpu.cores > 20 else 64
    simdgroups = shape.batch * shape.kv_heads * shape.group * (32 if parts == 1 else parts)
    tokens = shape.context / (32 if parts == 1 else parts)
    if shares is None:
        shares = shape.group == 8 and shape.head_dim in (64, 128) and shape.context >= 8192
    per_head = 18 + shape.head_dim * 3 / 32
    per_token = shared_instructions(shape.group, shape.head_dim) if shares else shape.group * per_head
    took = seconds(gpu, shape, simdgroups, per_token, tokens / 4)
    return took if parts == 1 else took + LAUNCH_SECONDS + gpu.moving(2 * simdgroups * (2 * shape.head_dim + 8))


def both_seconds(gpu: GPU, shape: Shape, queries: int = 1, window: int | None = None, spilled: int = 0) -> list[float]:
    """Of a layer for the last queries of each context: by kvpool, and by MLX on dense K and V.

    With a window MLX has a mask, and computes what it hides.
    """
    from kvpool_backends.mlx.metal import FUSED_DIMS, LONG_CHUNK, TENSOR_CHUNK, TENSOR_DIMS

    dim, heads, gathers = shape.head_dim, shape.batch * shape.kv_heads * shape.group, False
    if queries <= 8 and queries * shape.group <= 32:
        dense = dense_seconds(gpu, shape._replace(group=queries * shape.group), None if queries == 1 else False)
    else:
        is_plain = window is None
        is_fused = dim in FUSED_DIMS or (gpu.nax and dim in TENSOR_DIMS and is_plain and queries >= TENSOR_CHUNK)
        gathers = is_fused and is_plain and queries > LONG_CHUNK
        nax = gpu.nax and (dim in NAX_DIMS or not is_fused)
        tile = 1 if not is_fused else 64 if nax else 32  # of queries, by four simdgroups
        rows = heads * -(-queries // tile) * tile
        tokens = shape.context - queries / 2 if is_fused and is_plain else shape.context
        share = NAX_SHARE if nax and is_fused else ISSUE_SHARE
        busy = min(1.0, rows / tile * 4 / (gpu.cores * 8))
        cycles = rows * tokens * dim * 2 / 8**3 * (NAX_CYCLES if nax else MATRIX_CYCLES)
        dense = cycles / (gpu.cores * 4 * gpu.clock * 1e9 * share * busy) + LAUNCH_SECONDS
        if not is_fused:  # all scores are written, made weights, and read
            dense += gpu.moving(4 * heads * queries * shape.context * 2) + 2 * LAUNCH_SECONDS
    if gathers:
        return [dense + gpu.moving(2 * nbytes(shape)) + 2 * LAUNCH_SECONDS, dense]
    return [paged_seconds(gpu, shape, queries, window, spilled), dense]


def seconds(gpu: GPU, shape: Shape, simdgroups: int, per_token: float, chain: float, passes: float = 1) -> float:
    """The longest of the three times, and the launch.

    per_token: instructions for one token of one KV head. passes: how often K and V are read.
    """
    rows = shape.batch * shape.context * shape.kv_heads
    busy = min(1.0, simdgroups / (gpu.cores * SIMDGROUPS))
    missed = 1 - min(1.0, gpu.cache * 1e6 / nbytes(shape))
    reading = gpu.moving(nbytes(shape) * min(passes, 1 + (passes - 1) * missed)) / busy
    issuing = rows * per_token / (gpu.cores * 4 * gpu.clock * 1e9 * ISSUE_SHARE * busy)
    return max(reading, issuing, chain * CHAIN_SECONDS) + LAUNCH_SECONDS


def nbytes(shape: Shape) -> int:
    """Of K and V."""
    return shape.batch * shape.context * shape.kv_heads * shape.head_dim * 2 * 2


def table(spilled: int) -> Iterator[str]:
    """What is predicted for `CHIPS`."""
    yield "ms of a layer of 8 KV heads: kvpool, MLX on dense K and V, and how many times as fast kvpool is"
    yield f"{'':44}" + "".join(f"{chip:>22}" for chip in CHIPS)
    for batch, queries, context, group, dim, window in CASES:
        shape = Shape(batch, context, 8, group, dim)
        name = f"{batch} x {queries} of {tokens(context)}, group {group}, D {dim}"
        line = f"{name + (f', window {window}' if window else ''):44}"
        for chip in CHIPS:
            ours, dense = both_seconds(GPUS[chip], shape, queries, window, spilled)
            line += f"{ours * 1e3:9.3f}{dense * 1e3:8.3f}{dense / ours:5.2f}"
        yield line


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print predicted times of attention on Macs.")
    text = "bytes of a lane that kvpool's kernels spill (tests/helpers/metal_registers.py says 0)"
    parser.add_argument("--spilled", metavar="BYTES", type=int, default=0, help=text)
    print(*table(parser.parse_args().spilled), sep="\n")
