"""Latencies and rates of a run. Milliseconds unless a name says otherwise; None where nothing was measured."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.serving.phases import Phases
from benchmarks.serving.record import Record

PERCENTILES = (50, 95, 99)


def percentiles(name: str, values: NDArray[np.float64], which: tuple[int, ...] = PERCENTILES) -> dict[str, Any]:
    """Return ``name_p50`` and so on, linear between values as numpy's default."""
    if not len(values):
        return {f"{name}_p{p}": None for p in which}
    return {f"{name}_p{p}": float(v) for p, v in zip(which, np.percentile(values, which), strict=True)}


def latencies(record: Record) -> dict[str, NDArray[np.float64]]:
    """Return seconds per sequence and per gap.

    ``ttft``: arrival to first token; ``tpot``: mean gap of each sequence with two tokens or more; ``itl``: every gap
    between two tokens of a sequence.
    """
    sequences, times = record.token_times
    if not len(sequences):
        return {name: np.zeros(0) for name in ("ttft", "tpot", "itl")}
    firsts = np.flatnonzero(np.diff(sequences, prepend=-1))
    lasts = np.append(firsts[1:], len(sequences)) - 1
    gaps = np.diff(times)
    inside = np.ones(len(gaps), bool)
    inside[firsts[1:] - 1] = False
    several = lasts > firsts
    return {
        "ttft": times[firsts] - record.arrivals[sequences[firsts] // record.samples],
        "tpot": ((times[lasts] - times[firsts])[several]) / (lasts - firsts)[several],
        "itl": gaps[inside],
    }


def summarize(record: Record, phases: Phases) -> dict[str, Any]:
    """Return rates, latencies and tick times of one run, by the names of the command's JSON."""
    found: dict[str, Any] = {
        "tokens": record.num_tokens,
        "wall_seconds": record.wall,
        "cpu_seconds": record.settled + (float(record.column("cpu").sum()) if len(record) else 0.0),
        "tokens_per_sec": record.num_tokens / record.wall if record.wall > 0 else None,
        "steady_tokens_per_sec": phases.steady.tokens_per_sec,
        "ticks": len(record),
    }
    for name, values in latencies(record).items():
        found |= percentiles(f"{name}_ms", 1e3 * values)
    return found | tick_times(record, phases)


def tick_times(record: Record, phases: Phases) -> dict[str, Any]:
    """Return what ticks take: those that decode, by wall and CPU time, and in the steady state p99 / p50."""
    if not len(record):
        return {}
    decodes, prefill = record.column("decodes") > 0, record.column("prefill_tokens") > 0
    ms, cpu_ms = 1e3 * record.seconds, 1e3 * record.column("cpu")
    steady = slice(phases.steady.first, phases.steady.last)
    found = percentiles("decode_tick_ms", ms[decodes]) | percentiles("decode_tick_cpu_ms", cpu_ms[decodes])
    found |= percentiles("prefill_chunk_ms", ms[prefill & ~decodes], (50, 95))  # ticks with nothing but a chunk
    found |= percentiles("mixed_tick_ms", ms[prefill & decodes], (50, 95))
    for name, times in (("steady_tick", ms), ("steady_tick_cpu", cpu_ms)):
        values = times[steady][decodes[steady]]
        p50, p99 = np.percentile(values, (50, 99)) if len(values) else (0.0, 0.0)
        found[f"{name}_p99_over_p50"] = float(p99 / p50) if p50 > 0 else None
    return found


def usage(record: Record, token_nbytes: int = 0) -> dict[str, Any]:
    """Return blocks in use, and what attention read of them.

    token_nbytes : int
        Bytes of K and V of one token in all layers.
    """
    if not len(record):
        return {}
    blocks, seconds = record.column("blocks_in_use"), record.seconds
    total = float(seconds.sum())
    return {
        "blocks_in_use_peak": int(blocks.max()),
        "blocks_in_use_mean": float((blocks * seconds).sum() / total) if total > 0 else float(blocks.mean()),
        "blocks_touched": int(record.column("blocks_touched").sum()),
        "paged_kv_bytes_read": int(record.column("context_tokens").sum()) * token_nbytes,
        "running_peak": int(record.column("decodes").max()),
        "running_mean": float((record.column("decodes") * seconds).sum() / total) if total > 0 else None,
    }


def utilization(record: Record, block_size: int, longest: int) -> dict[str, float | None]:
    """Return tokens that steps read / positions held while they ran, summed over the run.

    ``blocks``: of the blocks in use; sharing counts a block once and its tokens in every sequence, so it can pass 1.
    ``static``: of a reservation of `longest` tokens for each running sequence.
    """
    tokens, blocks, running = (
        float(record.column(name).sum()) for name in ("context_tokens", "blocks_in_use", "running")
    )
    return {
        "blocks": tokens / (blocks * block_size) if blocks else None,
        "static": tokens / (running * longest) if running else None,
    }
