"""What has to hold: each gate with a workload of its own, all in one run of the command."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from statistics import median
from typing import Any

import numpy as np

import kvpool
from benchmarks.gate import Gate, held
from benchmarks.serving.runs import Bench, Run, make_bench, run_all, same_tokens, warm_up, workload_of
from benchmarks.serving.settings import Settings
from kvpool.cli.console import cpu_model

RATE, SHARED_RATE, SHARED_BYTES = 1.0, 1.6, 0.4
TICKS = 3.0
SPIKES = 0
NULL_RATE = 1e6
NULL_BATCH = 256

STEADY_CHUNK = 32

ROWS: dict[str, dict[str, Any]] = {
    "equal prompts (64/32)": {"prompt": "64", "output": "32", "requests": 192},
    "equal prompts (256/64)": {"prompt": "256", "output": "64", "requests": 64},
    "mixed lengths": {"prompt": "lognormal:24:0.7:96", "output": "lognormal:32:0.7:128", "requests": 128},
    "single stream": {"prompt": "64", "output": "64", "requests": 8, "max_batch": 1},
    "shared prefix": {
        **{"prompt": "lognormal:24:0.7:96", "output": "lognormal:32:0.7:128", "requests": 96},
        "shared_prefix": 128,
    },
}
"""Both have the same budgets: 16 sequences at a time, 256 tokens of prompts in a step, room for all sequences."""
SLOW = {"tiny": 1, "medium": 8}
"""How many times fewer requests a model serves, others `SLOWEST` times."""
SLOWEST = 48


def measure(settings: Settings, say: Callable[[str], None]) -> list[Gate]:
    """Measure every gate that the model allows: those of the scheduler always."""
    say("scheduler and pool alone")
    gates = [null_gate()]
    if settings.is_null:
        return gates
    base = replace(settings, max_batch=16, shared_prefix=0, chunk=256, num_blocks=None)
    bench = replace(make_bench(replace(base, requests=1)), say=say)
    warm_up(bench, ("kvpool", "stock"))
    for name, row in ROWS.items():
        requests = -(-row["requests"] // SLOW.get(settings.model, SLOWEST))
        own = replace(base, **row | {"requests": requests})
        gates += compared(name, replace(bench, settings=own, workload=workload_of(own, bench.vocab_size)))
    return gates


def compared(name: str, bench: Bench) -> list[Gate]:
    """Return the gates of one workload: the rates beside stock's, and that the tokens are the same.

    With a shared prefix also the bytes, and how even the steps are with `STEADY_CHUNK` tokens of prompts in a step.
    """
    s = bench.settings
    bench.say(name)
    runs = run_all(bench, ("kvpool", "stock"), s.repetitions)
    pairs = list(zip(runs["kvpool"], runs["stock"], strict=True))
    limit = SHARED_RATE if s.shared_prefix else RATE
    title = f"{s.model}, {name}"
    gates = []
    for what, rate in (("tokens/s of CPU time", attrgetter("cpu_rate")), ("tokens/s", attrgetter("rate"))):
        note = " against ".join(f"{median(map(rate, runs[who])):,.0f}" for who in ("kvpool", "stock"))
        ratio = median(rate(a) / rate(b) for a, b in pairs)
        gates.append(Gate(f"{title}: {what} over stock's", ratio, limit, note=note))
    gates.append(Gate(f"{title}: share of the sequences with the same tokens", same_tokens(runs), 1.0))
    if not s.shared_prefix:
        return gates
    ours, theirs = (median(run.summary["blocks_in_use_peak"] for run in runs[who]) for who in ("kvpool", "stock"))
    note = f"{ours:,.0f} blocks against the bytes of {theirs:,.0f}"
    gates.append(Gate(f"{title}: bytes at the peak over stock's", ours / theirs, SHARED_BYTES, True, note))
    bench.say(f"{name}: kvpool alone, {STEADY_CHUNK} tokens of prompts in a step")
    even = run_all(bench.with_settings(chunk=STEADY_CHUNK), ("kvpool",), s.repetitions)["kvpool"]
    small = f"CPU time, {STEADY_CHUNK} tokens of prompts in a step"
    return [
        *gates,
        Gate(f"{title}: steady steps, p99 / p50", steady_ratio(even), TICKS, True, small),
        Gate(f"{title}: spikes", median(map(spikes, even)), SPIKES, True, f"{small}, > 5 medians"),
    ]


def steady_ratio(runs: Sequence[Run]) -> float:
    """Return p99 / p50 of steady steps by CPU time: the median of the runs, NaN without a steady state."""
    found = [run.summary["steady_tick_cpu_p99_over_p50"] for run in runs]
    return median(float("nan") if ratio is None else ratio for ratio in found)


def spikes(run: Run) -> int:
    """Return the spikes by CPU time."""
    return len(run.cpu_phases.spikes)


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


def as_json(gates: Sequence[Gate], settings: Settings) -> dict[str, Any]:
    """Return the gates and what they were measured on."""
    return {
        "kvpool": kvpool.__version__,
        "machine": {"platform": platform.platform(), "cpu": cpu_model()},
        "model": settings.model,
        "gates": [gate.as_json() for gate in gates],
        "held": held(gates),
    }
