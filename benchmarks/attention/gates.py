"""What has to hold, decided by the rows that were measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.attention.rows import Row
from benchmarks.attention.settings import Settings
from benchmarks.gate import Gate

Limits = tuple[float, float | None]  # gate, and goal if there is one

REPETITIONS = 15
BLOCK_SIZE = 16
HEADS = (32, 8, 128)  # query heads, KV heads, head dim
NUM_TOKENS = 16384  # of all contexts together
SCORES_CONTEXT = 4096
OTHERS = "avx2"  # whose gates an instruction set has that is not named below
DECODE: dict[str, dict[str, Limits]] = {
    "avx512": {"float32": (1.5, 1.2), "bfloat16": (1.65, 1.3), "float16": (1.7, 1.25)},
    "avx2": {"float32": (1.5, 1.35), "bfloat16": (1.65, 1.45), "float16": (1.7, 1.4)},
}
GAIN = (0.9, 1.0)
TORCH = (1.8, 2.5)
PREFILL = (85.0, 95.0)
WRITE = {"float32": (1.4, 1.15), "bfloat16": (1.3, 1.15), "float16": (1.4, 1.15)}
COPY = (1.1, 1.0)
RAW_SCORES = (1.03, 1.015)
QUANTIZED_TOKENS = 2 * NUM_TOKENS  # whose bfloat16 exceeds caches
QUANTIZED: dict[str, Limits] = {"8": (1.05, 0.95), "4": (1.05, None)}
QUANTIZED_WRITE = (1.4, None)


def decide(rows: Sequence[Row], settings: Settings, isa: str) -> list[Gate]:
    """Return the gates of everything that the settings ask for, measured or not. Portable C has none."""
    if isa == "portable":
        return []
    gates = []
    for bits in settings.kv_bits:
        if bits in QUANTIZED:
            gates += quantized_gates(bits, rows, settings)
    for dtype in settings.dtypes:
        mine = [row for row in rows if row.dtype == dtype]
        if "decode" in settings.parts:
            gates += decode_gates(dtype, mine, settings, isa)
        for part, name, (limit, goal) in (("write", "write", WRITE[dtype]), ("copy", "copy_blocks", COPY)):
            if part in settings.parts:
                able = [row for row in mine if row.part == part and is_able(row)]
                gates.append(worst(f"{name} {dtype}", "x memcpy", limit, goal, True, able, lambda row: row.ratio))
        if "prefill" in settings.parts:
            able = [row for row in mine if row.part == "prefill" and is_able(row) and is_standard(settings)]
            gates.append(worst(f"prefill {dtype}", "% of sgemm", *PREFILL, False, able, lambda row: 100 / row.ratio))
        if "scores" in settings.parts:
            able = [row for row in mine if is_able_scores(row) and is_standard(settings)]
            name = f"decode with raw scores {dtype}"
            gates.append(worst(name, "x without", *RAW_SCORES, True, able, lambda row: row.median_ratio))
    return gates


def decode_gates(dtype: str, rows: list[Row], settings: Settings, isa: str) -> list[Gate]:
    """Return the gates of decode of one dtype."""
    able = [row for row in rows if is_able_decode(row) and is_standard(settings)]
    limits = DECODE.get(isa, DECODE[OTHERS])[dtype]
    gates = [worst(f"decode {dtype}", "x read", *limits, True, able, lambda row: row.ratio)]
    against_torch = [row for row in able if row.torch is not None]
    gates.append(
        worst(
            f"decode {dtype} against torch",
            "x faster",
            *TORCH,
            False,
            against_torch,
            lambda row: (row.torch or 0) / row.best,
        )
    )
    asked = 1 in settings.batches and NUM_TOKENS in settings.contexts and len(settings.threads) > 1
    if asked and dtype == "float32":  # the only one whose K and V of a single context of 16k exceed caches
        alone = {row.threads: row for row in able if row.batch == 1 and row.context == NUM_TOKENS}
        more = [row for threads, row in alone.items() if threads > 1 and 1 in alone]
        name = "decode of one sequence, more threads"
        gates.append(worst(name, "x gain of the read", *GAIN, False, more, lambda row: alone[1].ratio / row.ratio))
    return gates


def quantized_gates(bits: str, rows: Sequence[Row], settings: Settings) -> list[Gate]:
    """Return the gates of so many bits: decode beside bfloat16, and writes."""
    mine = [row for row in rows if row.dtype == f"{bits} bits" and is_able(row) and is_standard(settings)]
    decode = [row for row in mine if row.part == "quantized" and row.batch * row.context >= QUANTIZED_TOKENS]
    written = [row for row in mine if row.part == "write"]
    return [
        worst(f"decode {bits} bits", "x bfloat16", *QUANTIZED[bits], True, decode, lambda row: row.ratio),
        worst(f"write {bits} bits", "x memcpy", *QUANTIZED_WRITE, True, written, lambda row: row.ratio),
    ]


def is_able(row: Row) -> bool:
    """Whether a row was measured well enough to decide."""
    return row.is_complete and row.repetitions >= REPETITIONS


def is_able_decode(row: Row) -> bool:
    """Whether a row of decode decides: memory decides its time, and blocks have the standard size."""
    is_large = not row.is_cached and row.batch * row.context >= NUM_TOKENS
    return row.part == "decode" and is_able(row) and is_large and row.block_size == BLOCK_SIZE


def is_able_scores(row: Row) -> bool:
    """Whether a row of scores decides: cached or not, the context must outweigh the call."""
    return row.part == "raw" and is_able(row) and row.context >= SCORES_CONTEXT


def is_standard(settings: Settings) -> bool:
    """Whether the heads are those that the gates speak of."""
    return (settings.num_q_heads, settings.num_kv_heads, settings.head_dim) == HEADS


def worst(
    name: str,
    unit: str,
    limit: float,
    goal: float | None,
    at_most: bool,
    rows: Sequence[Row],
    value: Callable[[Row], float],
) -> Gate:
    """Return the gate, decided by the worst of `rows`."""
    if not rows:
        return Gate(name, None, limit, at_most, "no row decides", unit, goal)
    row = (max if at_most else min)(rows, key=value)
    return Gate(name, value(row), limit, at_most, row.name, unit, goal)
