"""How runs are shown, and what has to hold."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import kvpool
from benchmarks.attention.report import Lines, print_table
from benchmarks.gate import Gate, short
from benchmarks.http.judge import Result
from kvpool.cli.console import cpu_model

OURS = "kvpool"
RATE, TTFT, ITL = 1.2, 0.5, 3.0
Runs = Mapping[str, Sequence[Result]]


def figure(runs: Sequence[Result], name: str) -> float | None:
    """Return the median of a figure over runs; None if a run has none."""
    found = [run.as_json()[name] for run in runs]
    return None if None in found else median(found)


def number(value: float | None) -> str:
    """Return a number as tables show it, nothing for None."""
    return "" if value is None else short(value)


def same_texts(runs: Runs) -> float:
    """Return the share of chats whose right answers have the same text, in all runs of all servers."""
    chats = zip(*(run.answers for found in runs.values() for run in found), strict=True)
    same = [len({answer.text for answer in one if answer.failure is None}) <= 1 for one in chats]
    return sum(same) / len(same)


def gates(runs: Runs) -> list[Gate]:
    """Return what has to hold. In each figure, ours is compared with the best of all settings of stock."""
    ours, stock = runs[OURS], [found for name, found in runs.items() if name.startswith("stock")]
    failures = [failure for run in ours for failure in run.failures]
    decided = [
        Gate("failures", len(failures), 0, True, ", ".join(sorted(set(failures)))),
        Gate("the same text from all servers, share of the chats", same_texts(runs), 1.0),
    ]
    for what, key, best, limit, at_most in (
        ("tokens/s over stock's", "tokens_per_sec", max, RATE, False),
        ("tokens/s of CPU time over stock's", "tokens_per_cpu_sec", max, RATE, False),
        ("p99 to first token over stock's", "ttft_ms_p99", min, TTFT, True),
        ("p99 to first token over stock's, CPU time", "ttft_cpu_ms_p99", min, TTFT, True),
    ):
        own, others = figure(ours, key), [figure(found, key) for found in stock]
        known = [other for other in others if other is not None]
        value = None if own is None or not known else own / best(known)
        decided.append(Gate(what, value, limit, at_most, "" if own is None else number(own)))
    p50, p99 = figure(ours, "itl_cpu_ms_p50"), figure(ours, "itl_cpu_ms_p99")
    ratio = p99 / p50 if p50 and p99 is not None else None
    return [*decided, Gate("between tokens, p99 / p50, CPU time", ratio, ITL, True)]


def as_json(runs: Runs) -> dict[str, Any]:
    """Return everything that was measured."""
    return {
        "kvpool": kvpool.__version__,
        "machine": {"platform": platform.platform(), "cpu": cpu_model()},
        "same_texts": same_texts(runs),
        "runs": {name: [run.as_json() for run in found] for name, found in runs.items()},
    }


def show(runs: Runs) -> None:
    """Print tables: medians over the runs."""
    keys = ("tokens_per_sec", "tokens_per_cpu_sec", "wall_seconds", "cpu_seconds", "clients_cpu_seconds")
    lines: Lines = [("", "tokens/s", "by CPU time", "seconds", "CPU", "clients' CPU", "grown by", "failures")]
    for name, found in runs.items():
        failures = sum(len(run.failures) for run in found)
        grown = figure(found, "grown_nbytes") or 0
        lines.append((name, *(number(figure(found, key)) for key in keys), f"{grown / 2**20:,.0f} MiB", f"{failures}"))
    print_table("Rates", lines)
    lines = [("", "", *(f"{p}, {by}" for p in ("p50", "p95", "p99") for by in ("clock", "CPU")))]
    for key, title in {"ttft": "to first token", "itl": "between tokens"}.items():
        for name, found in runs.items():
            values = (f"{key}{by}_ms_p{p}" for p in (50, 95, 99) for by in ("", "_cpu"))
            lines.append((title, name, *(number(figure(found, value)) for value in values)))
            title = ""
    print_table("Milliseconds, by the clock and by the CPU time of the server", lines)
    print(f"the same text from all servers: {same_texts(runs):.1%} of the chats")
