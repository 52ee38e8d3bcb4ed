"""What has to hold: each row with requests of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from operator import attrgetter
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.gate import Gate
from benchmarks.serving.harness import Run, serve_side_by_side
from benchmarks.serving.workload import Workload, make_workload

if TYPE_CHECKING:
    from benchmarks.serving.lm import Bench

RATE, SHARED_RATE, SHARED_BYTES = 1.0, 1.6, 0.4
TICKS = 3.0
NULL_RATE, NULL_BATCH = 1e6, 256
BATCH, CHUNK, STEADY_CHUNK = 16, 256, 32
"""Sequences at a time, and tokens of prompts in a step: the budgets of both. The pool has room for all sequences."""

ROWS: dict[str, dict[str, Any]] = {
    "equal prompts (64/32)": {"prompt": "64", "output": "32", "requests": 192},
    "equal prompts (256/64)": {"prompt": "256", "output": "64", "requests": 64},
    "mixed lengths": {"prompt": "lognormal:24:0.7:96", "output": "lognormal:32:0.7:128", "requests": 128},
    "single stream": {"prompt": "64", "output": "64", "requests": 8},
    "shared prefix": {
        **{"prompt": "lognormal:24:0.7:96", "output": "lognormal:32:0.7:128", "requests": 96},
        "shared_prefix": 128,
    },
}
SLOW = {"tiny": 1, "medium": 8}
"""How many times fewer requests a model serves, others `SLOWEST` times."""
SLOWEST = 48


def measure(bench: Bench, repetitions: int, say: Callable[[str], None]) -> list[Gate]:
    """Measure every row on a model."""
    say("warming up")
    small = make_workload(bench.vocab_size, prompt="60", output="6", requests=6, seed=2)
    serve_all(bench, small, BATCH, CHUNK, 1)
    gates = []
    for name, row in ROWS.items():
        say(name)
        requests = -(-row["requests"] // SLOW.get(bench.name, SLOWEST))
        workload = make_workload(bench.vocab_size, **row | {"requests": requests})
        batch = 1 if name == "single stream" else BATCH
        gates += compared(f"{bench.name}, {name}", bench, workload, batch, repetitions)
    return gates


def serve_all(
    bench: Bench,
    workload: Workload,
    batch: int,
    chunk: int,
    repetitions: int,
    names: tuple[str, ...] = ("kvpool", "stock"),
) -> dict[str, list[Run]]:
    """Return runs of everybody, side by side, each time in another order."""
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for repetition in range(repetitions):
        turn = repetition % len(names)
        order = [*names[turn:], *names[:turn]]
        servers = [bench.server(name, workload, batch, chunk) for name in order]
        try:
            for name, run in zip(order, serve_side_by_side(servers, workload), strict=True):
                runs[name].append(run)
        finally:
            for server in servers:
                server.close()
    return runs


def compared(title: str, bench: Bench, workload: Workload, batch: int, repetitions: int) -> list[Gate]:
    """Return the gates of one workload: the rates beside stock's, and that the tokens are the same.

    With a shared prefix also the bytes, and how even the steps are with `STEADY_CHUNK` tokens of prompts in a step.
    """
    runs = serve_all(bench, workload, batch, CHUNK, repetitions)
    pairs = list(zip(runs["kvpool"], runs["stock"], strict=True))
    limit = SHARED_RATE if workload.shared_prefix else RATE
    gates = []
    for what, rate in (("tokens/s of CPU time", attrgetter("cpu_rate")), ("tokens/s", attrgetter("rate"))):
        note = " against ".join(f"{median(map(rate, runs[who])):,.0f}" for who in ("kvpool", "stock"))
        ratio = median(rate(a) / rate(b) for a, b in pairs)
        gates.append(Gate(f"{title}: {what} over stock's", ratio, limit, note=note))
    gates.append(Gate(f"{title}: share of the sequences with the same tokens", same_tokens(runs), 1.0))
    if not workload.shared_prefix:
        return gates
    ours, theirs = (median(run.peak for run in runs[who]) for who in ("kvpool", "stock"))
    note = f"{ours:,.0f} blocks against the bytes of {theirs:,.0f}"
    gates.append(Gate(f"{title}: bytes at the peak over stock's", ours / theirs, SHARED_BYTES, True, note))
    even = serve_all(bench, workload, batch, STEADY_CHUNK, repetitions, ("kvpool",))["kvpool"]
    ratio = median(run.steady_ratio for run in even)
    small = f"CPU time, {STEADY_CHUNK} tokens of prompts in a step"
    return [*gates, Gate(f"{title}: steady steps, p99 / p50", ratio, TICKS, True, small)]


def same_tokens(runs: dict[str, list[Run]]) -> float:
    """Return the share of sequences with the same tokens in every run of kvpool as in stock's first.

    Two ways to round may choose different tokens where two are nearly as likely.
    """
    expected = runs["stock"][0].server.tokens
    equal = [all(run.server.tokens[key] == tokens for run in runs["kvpool"]) for key, tokens in expected.items()]
    return sum(equal) / len(equal)


def null_gate(rounds: int = 7, steps: int = 200) -> Gate:
    """Return tokens per second of CPU time that scheduler and pool can keep up with: the best of several rounds."""
    from kvpool import Pool, Request, Scheduler

    tokens, prompt = rounds * steps + 64, 64
    pool = Pool(NULL_BATCH * (-(-(prompt + tokens) // 16) + 1), 16, max_seqs=NULL_BATCH, prefix_cache=True)
    scheduler = Scheduler(pool, max_running=NULL_BATCH, max_step_tokens=8192, prefill_chunk=512)
    for number in range(NULL_BATCH):
        scheduler.add(Request(np.full(prompt, number, np.int32), tokens, id=number))
    sampled = np.zeros(NULL_BATCH, np.int32)

    def step() -> int:
        out = scheduler.schedule()
        assert out is not None
        scheduler.update(out, sampled[: len(out.sample_at)])
        return out.num_decodes

    while step() < NULL_BATCH:
        pass
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(steps):
            step()
        best = min(best, (time.process_time() - start) / steps)
    return Gate(
        f"null model, {NULL_BATCH} running: decode tokens/s of one core",
        NULL_BATCH / best,
        NULL_RATE,
        note=f"{1e6 * best:.0f} us a step, pool included",
    )
