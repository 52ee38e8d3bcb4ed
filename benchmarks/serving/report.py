"""How a run is shown: tables for people, one JSON object for machines."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

import kvpool
from benchmarks.attention.report import Lines, print_table
from benchmarks.serving.metrics import utilization
from benchmarks.serving.runs import Bench, Run, finite, median, same_tokens
from kvpool.cli.console import cpu_model

NAMES = {"kvpool": "kvpool", "stock": "mlx-lm BatchGenerator"}
NULL_NAMES = {"kvpool": "kvpool", "stock": "slots of the longest length"}
LATENCIES = tuple(f"{name}_ms_p{p}" for name in ("ttft", "tpot", "itl") for p in (50, 95, 99))
TICKS = (
    *("decode_tick_ms_p50", "decode_tick_ms_p95", "decode_tick_ms_p99", "prefill_chunk_ms_p50", "mixed_tick_ms_p50"),
    *("steady_tick_p99_over_p50", "steady_tick_cpu_p99_over_p50"),
)
USAGE = (
    *("paged_kv_bytes_read", "blocks_touched", "COW_clones_per_token", "hit_rate"),
    *("preemptions", "recomputed_tokens", "blocks_leaked"),
)


def as_json(
    bench: Bench,
    runs: dict[str, list[Run]],
    seconds: float,
) -> dict[str, Any]:
    """Return everything that was measured. Rates are tokens per second, times milliseconds unless named otherwise."""
    ours, work, s = median(runs["kvpool"]), bench.workload, bench.settings
    rates = {name: median(found).rate for name, found in runs.items()}
    return {
        "kvpool": kvpool.__version__,
        "machine": {"platform": platform.platform(), "cpu": cpu_model()},
        "simulated": s.is_null,
        "settings": {name: finite(str(v) if name == "trace" and v else v) for name, v in asdict(s).items()},
        "workload": {
            "name": work.name,
            "requests": len(work),
            "prompt_tokens": work.prompt_tokens,
            "tokens": work.num_tokens,
            "longest": work.longest,
        },
        "pool": {"num_blocks": bench.num_blocks, "block_size": s.block_size, "dense_batch": bench.dense_batch},
        "stock_tokens_per_sec": rates.get("stock"),
        "continuous_tokens_per_sec": rates["kvpool"],
        "continuous_steady_tokens_per_sec": ours.summary["steady_tokens_per_sec"],
        "wall_seconds": ours.summary["wall_seconds"],
        **{name: ours.summary[name] for name in (*LATENCIES, *TICKS)},
        "prefill_chunk_ms": ours.summary["prefill_chunk_ms_p50"],
        **{name: ours.summary[name] for name in USAGE},
        "blocks_in_use": {"peak": ours.summary["blocks_in_use_peak"], "mean": ours.summary["blocks_in_use_mean"]},
        "utilization": utilization(ours.record, s.block_size, work.longest),
        "phases": ours.phases.as_json(),
        "cpu_spikes": len(ours.cpu_phases.spikes),
        "same_tokens": same_tokens(runs),
        "runs": {name: run_json(found) for name, found in runs.items()},
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "seconds": round(seconds, 1),
    }


def run_json(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the runs of one contestant."""
    chosen = median(runs)
    return {
        "batch": chosen.batch,
        "tokens_per_sec_of_runs": [run.rate for run in runs],
        "tokens_per_cpu_sec_of_runs": [run.cpu_rate for run in runs],
        "phases": chosen.phases.as_json(),
        **chosen.summary,
    }


def show(bench: Bench, result: dict[str, Any]) -> None:
    """Print tables."""
    s, work, pool = bench.settings, result["workload"], result["pool"]
    time = "simulated time" if s.is_null else f"{cpu_model()}, median of {s.repetitions}"
    print(f"{s.model}: {work['name']}, {work['prompt_tokens']:,} + {work['tokens']:,} tokens; {time}")
    print(
        f"pool: {pool['num_blocks']} blocks of {pool['block_size']}; reserved slots would hold {pool['dense_batch']} "
        f"sequences of {work['longest']} tokens\n"
    )
    print_table("Tokens per second", rate_lines(bench, result))
    print_table("Milliseconds", latency_lines(bench, result))
    print_table("Phases of kvpool", phase_lines(result))
    print_table("kvpool", usage_lines(result))
    if result["same_tokens"] is not None:
        print(f"same tokens as stock: {result['same_tokens']:.1%} of the sequences")
    print(f"({result['seconds']:.0f} s)")


def rate_lines(bench: Bench, result: dict[str, Any]) -> Lines:
    """Return a line for each contestant."""
    names = NULL_NAMES if bench.settings.is_null else NAMES
    lines: Lines = [("", "sequences", "tokens/s", "steady", "wall", "kvpool is", "by CPU time", "blocks at the peak")]
    ours = result["runs"]["kvpool"]
    for name, run in result["runs"].items():
        per_cpu, our_cpu = (r["tokens"] / max(r["cpu_seconds"], 1e-9) for r in (run, ours))
        ratio, cpu_ratio = ours["tokens_per_sec"] / run["tokens_per_sec"], our_cpu / per_cpu
        lines.append(
            (
                names[name],
                f"{run['batch']}",
                number(run["tokens_per_sec"]),
                number(run["steady_tokens_per_sec"]),
                f"{run['wall_seconds']:.2f} s",
                "" if name == "kvpool" else f"{ratio:.2f}x",
                "" if name == "kvpool" or bench.settings.is_null else f"{cpu_ratio:.2f}x",
                f"{run['blocks_in_use_peak']:,}",
            )
        )
    return lines


def latency_lines(bench: Bench, result: dict[str, Any]) -> Lines:
    """Return a line for each contestant and kind of time."""
    names = NULL_NAMES if bench.settings.is_null else NAMES
    lines: Lines = [("", "", "p50", "p95", "p99")]
    titles = {"ttft": "to first token", "tpot": "per token", "itl": "between tokens", "decode_tick": "step"}
    for key, title in titles.items():
        for name, run in result["runs"].items():
            values = (number(run.get(f"{key}_ms_p{p}")) for p in (50, 95, 99))
            lines.append((title, names[name], *values))
            title = ""
    return lines


def phase_lines(result: dict[str, Any]) -> Lines:
    """Return a line for each phase."""
    lines: Lines = [("", "steps", "seconds", "tokens", "tokens/s")]
    for name in ("ramp", "steady", "tail"):
        phase = result["phases"][name]
        rate = number(phase["tokens_per_sec"])
        lines.append((name, f"{phase['ticks']}", f"{phase['seconds']:.2f}", f"{phase['tokens']:,}", rate))
    spikes = result["phases"]["spikes"]
    over, by_cpu = f"over {1e3 * spikes['threshold_seconds']:.1f} ms", f"{result['cpu_spikes']} by CPU time"
    lines.append(("spikes", f"{spikes['count']}", f"{spikes['seconds']:.2f}", over, by_cpu))
    return lines


def usage_lines(result: dict[str, Any]) -> Lines:
    """Return a line for each other number."""
    lines: Lines = [("", "")]
    blocks, ratio = result["blocks_in_use"], result["steady_tick_cpu_p99_over_p50"]
    lines.append(("blocks in use", f"{blocks['peak']:,} at the peak, {blocks['mean']:,.0f} on average"))
    filled, static = result["utilization"]["blocks"], result["utilization"]["static"]
    lines.append(("positions filled", f"{filled:.0%}, shared ones each time; {static:.0%} of a static reservation"))
    lines.append(("blocks touched by attention", f"{result['blocks_touched']:,}"))
    if result["paged_kv_bytes_read"]:
        lines.append(("KV bytes read, all layers", f"{result['paged_kv_bytes_read'] / 1e6:,.0f} MB"))
    lines.append(("prefix hits", f"{result['hit_rate']:.1%} of the prompt tokens"))
    lines.append(("copies on write", f"{result['COW_clones_per_token']:.4f} per token"))
    lines.append(("preemptions", f"{result['preemptions']}, {result['recomputed_tokens']:,} tokens again"))
    if ratio is not None and not result["simulated"]:
        wall = result["steady_tick_p99_over_p50"]
        lines.append(("steady steps, p99 / p50", f"{ratio:.2f} by CPU time, {wall:.2f} by the clock"))
    return lines


def number(value: float | None) -> str:
    """Return a number with three digits or more, nothing for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
