"""What the attention kernels cost, variant by variant, counted while the tests' own Metal runs them.

`metal_registers` has the registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from metal_cases import PackedBatch
from metal_engine import StandIn


class Costs(NamedTuple):
    """Of one launch."""

    rows: int  # pairs of query and head in a threadgroup
    threadgroup_memory: int
    bytes: float  # of K and V, over one read for each tile of queries and heads
    accesses: float  # of K and V, per KiB of them
    simd_operations: float  # shuffles and the like, per KiB of them


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
    ((_, work, tiles),) = batch.planned
    planes = [traffic for name, traffic in run.reads.items() if name[:2] in ("k_", "v_")]
    spec, begins, ends = batch.spec, work.items[:, 6], work.items[:, 7]
    nbytes = int((ends - begins).sum()) * tiles.groups * spec.token_nbytes / spec.num_layers
    matrix = 0  # products of all simdgroups, and sums of values of those that have any; each counts as an operation
    if tiles.units:
        simdgroups = tiles.simdgroups(spec)
        owners = -(-spec.head_dim // (16 * tiles.units)) if spec.latent else simdgroups
        steps = int((-(-ends // 32) - begins // 32).sum())  # tiles of 32 tokens
        matrix = steps * tiles.groups * (simdgroups + owners) * -(-tiles.rows // 8) * tiles.units * 2 * 4
    return Costs(
        tiles.rows,
        run.threadgroup_memory,
        sum(plane.bytes for plane in planes) / nbytes,
        sum(plane.accesses for plane in planes) / (nbytes / 1024),
        (run.simd_operations - matrix) / (nbytes / 1024),
    )


def name_of(variant: dict[str, Any]) -> str:
    """A variant in words."""
    batch = batch_of(variant)
    dims = f"{batch.head_dim}" + (f"{' + ' if batch.latent else '/'}{batch.v_head_dim}" if batch.v_head_dim else "")
    bits = "/".join(str(n) for n in batch.spec.bits)
    stored = {"float16": "16 bits", "float32": "32 bits"}[batch.dtype] if bits == "None/None" else f"{bits} bits"
    queries = variant.get("queries", 1)
    what = f"{queries} queries" if queries > 1 else "decode"
    return f"{what}{', every option' if batch.features else ''}, G {batch.group}, D {dims}, {stored}"
