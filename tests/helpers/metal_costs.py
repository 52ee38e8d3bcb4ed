"""What the attention kernels cost, variant by variant, as far as it can be known without a GPU.

``python tests/helpers/metal_costs.py`` prints the table of ``metal/README.md``, which is counted while the tests' own
Metal runs the kernels. `metal_registers` has the registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from metal_engine import StandIn
from metal_packed import PackedBatch

FULL = 32  # lanes
MATRIX_MADDS = 512  # of one 8x8 times 8x8


class Costs(NamedTuple):
    """Of one launch."""

    kernel: str
    rows: int  # pairs of query and head in a threadgroup
    simdgroups: int
    threadgroup_memory: int
    bytes: float  # of K and V, over one read for each tile of queries and heads
    accesses: float  # of K and V, per KiB of them: as all below
    simd_operations: float  # shuffles and the like
    multiply_adds: float  # instructions, of 32 lanes each
    matrix: float  # matrix instructions
    share: float  # of all multiply-adds, those of matrix instructions


LATENT = {"head_dim": 512, "v_head_dim": 64, "latent": True}
VARIANTS: list[dict[str, Any]] = [
    {"head_dim": 64, "group": 1},
    {"head_dim": 64, "group": 8},
    {"head_dim": 80, "group": 4, "layout": "HND"},
    {"head_dim": 128, "group": 1},
    {"head_dim": 128, "group": 4},
    {"head_dim": 128, "group": 8},
    {"head_dim": 192, "v_head_dim": 128, "group": 4},
    {"head_dim": 256, "group": 4},
    {"head_dim": 128, "group": 2, "dtype": "float32"},
    {"head_dim": 128, "group": 2, "k_bits": 8, "v_bits": 8},
    {"head_dim": 128, "group": 4, "k_bits": 8, "v_bits": 8},
    {"head_dim": 128, "group": 4, "k_bits": 8, "v_bits": 4},
    {"head_dim": 128, "group": 2, "k_bits": 4, "v_bits": 4},
    {"head_dim": 128, "group": 16},
    {"head_dim": 256, "group": 8},
    {"head_dim": 512, "group": 8},
    {"head_dim": 128, "group": 8, "k_bits": 8, "v_bits": 8},
    {"head_dim": 64, "group": 4, "queries": 32},
    {"head_dim": 80, "group": 4, "queries": 32},
    {"head_dim": 128, "group": 4, "queries": 32},
    {"head_dim": 128, "group": 4, "queries": 32, "features": ("window", "soft_cap", "sinks", "alibi_slopes", "mask")},
    {"head_dim": 128, "group": 4, "queries": 32, "dtype": "float32"},
    {"head_dim": 256, "group": 4, "queries": 32},
    {"head_dim": 256, "group": 4, "queries": 32, "dtype": "float32"},
    {"head_dim": 512, "group": 4, "queries": 32, "dtype": "float32"},
    {"head_dim": 128, "group": 4, "queries": 32, "k_bits": 8, "v_bits": 8},
    {"head_dim": 256, "group": 4, "queries": 32, "k_bits": 4, "v_bits": 4},
    {**LATENT, "group": 16},
    {**LATENT, "group": 128},
    {**LATENT, "group": 16, "dtype": "float32"},
    {**LATENT, "group": 16, "k_bits": 8, "v_bits": 8},
    {**LATENT, "group": 16, "queries": 32, "features": ("window", "soft_cap", "sinks", "alibi_slopes", "mask")},
]


def batch_of(variant: dict[str, Any]) -> PackedBatch:
    """A decode of 256 tokens, or a chunk at the end of them."""
    chosen = {"dtype": "float16", "kv_heads": 1, "seq_lens": (256,), "k_bits": None, "v_bits": None} | variant
    queries = chosen.pop("queries", 1)
    return PackedBatch(q_lens=(queries,), part_tokens=1024, **chosen)


def costs(variant: dict[str, Any]) -> Costs:
    """Run a variant once and count."""
    batch, runs = batch_of(variant), []
    batch.check(batch.run(StandIn().factory(0, runs=runs)))
    (run,) = runs
    (tiles,) = {tiles for _, _, tiles in batch.planned}
    planes = [traffic for name, traffic in run.reads.items() if name[:2] in ("k_", "v_")]
    spec, rows = batch.spec, tiles.rows
    token_nbytes = spec.token_nbytes / spec.num_layers
    seen = sum(int((work.items[:, 7] - work.items[:, 6]).sum()) for _, work, _ in batch.planned) * tiles.groups
    steps = sum(
        int((-(-work.items[:, 7] // 32) - work.items[:, 6] // 32).sum()) for _, work, _ in batch.planned
    )  # tiles of 32 tokens
    dims = spec.query_dim + spec.result_dim
    kib = seen * token_nbytes / 1024
    if tiles.units:
        simdgroups = tiles.simdgroups(spec)
        padded = -(-rows // 8) * 8
        # Products of all simdgroups, and sums of values of those that have any.
        owners = -(-spec.head_dim // (16 * tiles.units)) if spec.latent else simdgroups
        matrix = steps * tiles.groups * (simdgroups + owners) * (padded // 8) * tiles.units * 2 * 4
        # The rescaling of values, scale and sums of softmax, and packed elements becoming floats.
        unpacked = sum(dim * FULL for (_, dim), bits in zip(spec.planes, spec.bits, strict=True) if bits is not None)
        madds = steps * tiles.groups * (padded * spec.result_dim + 2 * padded * FULL + unpacked) / FULL
    else:
        simdgroups, matrix = 4, 0
        unpacked = sum(dim for (_, dim), bits in zip(spec.planes, spec.bits, strict=True) if bits is not None)
        madds = (seen * (rows * dims + unpacked) + steps * FULL * rows * (spec.result_dim + 2)) / FULL
    share = matrix * MATRIX_MADDS / (matrix * MATRIX_MADDS + madds * FULL)
    return Costs(
        tiles.kernel,
        rows,
        simdgroups,
        run.threadgroup_memory,
        sum(plane.bytes for plane in planes) / (seen * token_nbytes),
        sum(plane.accesses for plane in planes) / kib,
        (run.simd_operations - matrix) / kib,  # a product of matrices is one
        madds / kib,
        matrix / kib,
        share,
    )


# ---------------------------------------------------------------------------------------------------- table


def name_of(variant: dict[str, Any]) -> str:
    """A variant in the words of the table."""
    batch = batch_of(variant)
    dims = f"{batch.head_dim}" + (f"{' + ' if batch.latent else '/'}{batch.v_head_dim}" if batch.v_head_dim else "")
    bits = "/".join(str(n) for n in batch.spec.bits)
    stored = {"float16": "16 bits", "float32": "32 bits"}[batch.dtype] if bits == "None/None" else f"{bits} bits"
    queries = variant.get("queries", 1)
    what = f"{queries} queries" if queries > 1 else "decode"
    return f"{what}{', every option' if batch.features else ''}, G {batch.group}, D {dims}, {stored}"


HEAD = (
    "| variant | kernel | rows x simdgroups | threadgroup memory | K, V bytes | accesses | SIMD "
    "| multiply-adds | matrix | share |\n|---|---|--:|--:|--:|--:|--:|--:|--:|--:|"
)


def line(variant: dict[str, Any], counted: Costs) -> str:
    """A line of the table."""
    matrix, share = (f"{counted.matrix:.0f}", f"{counted.share:.1%}") if counted.matrix else ("", "")
    return (
        f"| {name_of(variant)} | `{counted.kernel}` | {counted.rows} x {counted.simdgroups} "
        f"| {counted.threadgroup_memory / 1024:.1f} KiB | {counted.bytes:.2f} | {counted.accesses:.1f} "
        f"| {counted.simd_operations:.0f} | {counted.multiply_adds:.0f} | {matrix} | {share} |"
    )


if __name__ == "__main__":
    print(HEAD)
    for chosen in VARIANTS:
        print(line(chosen, costs(chosen)))
