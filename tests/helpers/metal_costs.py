"""What the attention kernels cost, variant by variant, as far as it can be known without a GPU.

``python tests/helpers/metal_costs.py`` prints the table of ``metal/README.md``. Registers are an estimate from the
shipped text: of all arrays of a lane, those that lie in open braces at once, at most, in units of 32 bits, and
`OTHERS` for what is no array. Values that are the same in all lanes have registers of their own on Apple's GPUs.
Everything else is counted while the tests' own Metal runs the kernel.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from metal_engine import StandIn
from metal_packed import PackedBatch

from kvpool_backends.mlx.metal_kernels import source_text

OTHERS = 20  # addresses, predicates, the numbers of a lane
FULL = 32  # lanes
MATRIX_MADDS = 512  # of one 8x8 times 8x8


class Costs(NamedTuple):
    """Of one launch."""

    kernel: str
    rows: int  # pairs of query and head in a threadgroup
    simdgroups: int
    registers: int
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
    {"head_dim": 128, "group": 4, "dtype": "float32"},
    {"head_dim": 128, "group": 4, "k_bits": 8, "v_bits": 8},
    {"head_dim": 128, "group": 4, "k_bits": 8, "v_bits": 4},
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
        registers(variant),
        run.threadgroup_memory,
        sum(plane.bytes for plane in planes) / (seen * token_nbytes),
        sum(plane.accesses for plane in planes) / kib,
        (run.simd_operations - matrix) / kib,  # a product of matrices is one
        madds / kib,
        matrix / kib,
        share,
    )


# ------------------------------------------------------------------------------------------------ registers


@dataclass(frozen=True)
class _Sizes:
    """Registers of one element of the types that a kernel has arrays of."""

    constants: dict[str, int]
    types: dict[str, float]


def registers(variant: dict[str, Any]) -> int:
    """What a lane of a variant holds at once, from the text of its kernel."""
    batch = batch_of(variant)
    ((_, _, tiles),) = batch.planned
    sizes = _sizes(batch, tiles)
    open_braces: list[list[str]] = [[]]
    declared: dict[str, tuple[float, list[str]]] = {}  # not used so far: registers, and the names of its braces
    alive: dict[str, float] = {}
    most = 0.0
    for line in _lines(tiles.kernel):
        for name in [name for name in declared if re.search(rf"\b{name}\b", line)]:
            alive[name], scope = declared.pop(name)
            scope.append(name)
        most = max(most, sum(alive.values()))
        if not line.startswith(("threadgroup ", "constexpr ")):
            declared |= {name: (size, open_braces[-1]) for name, size in _declared(line, sizes)}
        for brace in re.findall(r"[{}]", re.sub(r"\{[^{}]*\}", "", line)):
            if brace == "{":
                open_braces.append([])
            else:
                for name in open_braces.pop():
                    del alive[name]
    return math.ceil(most) + OTHERS


def _lines(kernel: str) -> list[str]:
    """The text of a kernel, in which the function that has arrays of its own stands in place of its calls."""
    text = source_text("kv_matrix.h")
    body = text[text.index("METAL_FUNC void multiply(") :]
    body = body[body.index("{\n") : body.index("\n}\n") + 3]
    return re.sub(r"\n *kv::multiply<[^;]*;\n", lambda _: "\n" + body, source_text(f"{kernel}.metal")).splitlines()


def _declared(line: str, sizes: _Sizes) -> list[tuple[str, float]]:
    """Names and registers of the arrays that a line declares."""
    found = re.match(r"^\s*(?:metal::)?((?:[\w:]+)(?:<[^>]*>)?) (\w+)((?:\[[^\]]+\])+);", line)
    if not found or found[1] == "return":
        return []
    if found[2] == "sum_of_query" and not sizes.constants["K_BITS"]:
        return []  # nothing reads it
    number = math.prod(eval(n.replace("::", "_"), {}, sizes.constants) for n in re.findall(r"\[([^\]]+)\]", found[3]))
    return [(found[2], number * sizes.types[found[1]])]


def _sizes(batch: PackedBatch, tiles: Any) -> _Sizes:
    spec, item = batch.spec, batch.spec.itemsize_nbytes
    constants = {"ROWS": tiles.rows, "UNITS": tiles.units, "TILES": -(-tiles.rows // 8), "K_BITS": spec.k_bits or 0}
    types = {"float": 1.0, "float4": 4.0, "simdgroup_float8x8": 2.0}
    types |= {"kv::Chunk<Q>": float(item), "simdgroup_matrix<Q, 8, 8>": 2 * item / 4}
    types |= {"Keys": 0.0, "Rotary": 0.0}
    names = ("Values", "Rotary") if spec.latent else ("Keys", "Values")  # latents are the values
    for name, (_, dim), bits in zip(names, spec.planes, spec.bits, strict=True):
        chunks = dim // 4
        per_lane = -(-chunks // 32)
        accesses = 4 // per_lane if bits else 8 // (per_lane * item)
        each = bits / 8 + 2 if bits else item  # a packed chunk has a scale and a bias
        constants |= {f"{name}_PER_LANE": per_lane, f"{name}_ACCESSES": accesses}
        groups = max(1, 16 * tiles.units // batch.size)
        columns = tiles.units * bits / 8 + 2 * groups if bits else tiles.units * item
        types[name] = float(columns if tiles.units else accesses * per_lane * each)
    return _Sizes(constants, types)


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
    "| variant | kernel | rows x simdgroups | registers | threadgroup memory | K, V bytes | accesses | SIMD "
    "| multiply-adds | matrix | share |\n|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
)


def line(variant: dict[str, Any], counted: Costs) -> str:
    """A line of the table."""
    matrix, share = (f"{counted.matrix:.0f}", f"{counted.share:.1%}") if counted.matrix else ("", "")
    return (
        f"| {name_of(variant)} | `{counted.kernel}` | {counted.rows} x {counted.simdgroups} | {counted.registers} "
        f"| {counted.threadgroup_memory / 1024:.1f} KiB | {counted.bytes:.2f} | {counted.accesses:.1f} "
        f"| {counted.simd_operations:.0f} | {counted.multiply_adds:.0f} | {matrix} | {share} |"
    )


if __name__ == "__main__":
    print(HEAD)
    for chosen in VARIANTS:
        print(line(chosen, costs(chosen)))
