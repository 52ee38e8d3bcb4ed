"""What has to hold: each gate with a workload of its own, all in one run of the command."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

import kvpool
from benchmarks.gate import Gate, held
from benchmarks.serving.runs import Bench, Run, make_bench, run_all, warm_up, workload_of
from benchmarks.serving.settings import Settings
from kvpool.cli.machine import cpu_model

EQUAL, SHORT, MIXED = 1.0, 0.9, 1.3
TICKS = 3.0
SPIKES = 0
NULL_RATE = 1e6
NULL_BATCH = 256

STEADY_CHUNK = 32

EQUAL_WORKLOAD: dict[str, Any] = {
    **{"prompt": "256", "output": "64", "requests": 32, "max_batch": 16, "shared_prefix": 0, "chunk": 512},
}
SHORT_WORKLOAD: dict[str, Any] = EQUAL_WORKLOAD | {"prompt": "64", "output": "32"}
MIXED_WORKLOAD: dict[str, Any] = {
    **{"prompt": "lognormal:24:0.7:96", "output": "lognormal:32:0.7:128", "requests": 48},
    **{"max_batch": 16, "shared_prefix": 128, "chunk": 128},
}
"""Rates are compared with as many tokens of prompts in a step for both as stock is fast with, 32 of each prompt. How
even steps are is a matter of `STEADY_CHUNK`: fewer tokens of prompts stand between two tokens of an answer."""


def measure(settings: Settings, say: Callable[[str], None]) -> list[Gate]:
    """Measure every gate that the model allows: those of the scheduler always."""
    say("scheduler and pool alone")
    gates = [null_gate()]
    if settings.is_null:
        return gates
    one = make_bench(replace(settings, **EQUAL_WORKLOAD, num_blocks=None))
    blocks = EQUAL_WORKLOAD["max_batch"] * one.slot_blocks
    equal = replace(one, settings=replace(one.settings, num_blocks=blocks), say=say)
    warm_up(equal, ("kvpool", "stock"))
    gates += compared(f"equal {_shape(EQUAL_WORKLOAD)}", equal, EQUAL)
    short = _with_workload(equal, replace(settings, **SHORT_WORKLOAD, num_blocks=blocks))
    gates += compared(f"equal short {_shape(SHORT_WORKLOAD)}", short, SHORT, by="cpu")
    mixed = _with_workload(equal, replace(settings, **MIXED_WORKLOAD, num_blocks=None))
    return gates + compared("mixed lengths, shared prefix", mixed, MIXED)


def _with_workload(bench: Bench, settings: Settings) -> Bench:
    return replace(bench, settings=settings, workload=workload_of(settings, bench.vocab_size))


def _shape(workload: dict[str, Any]) -> str:
    return f"({workload['prompt']}/{workload['output']})"


def compared(name: str, bench: Bench, limit: float, by: str = "wall") -> list[Gate]:
    """Return the gates of one workload: the rate beside stock's, and the steps of the steady state.

    `by` "cpu" compares tokens per second of CPU time, for rates so close to each other that a busy machine decides.
    """
    s = bench.settings
    bench.say(f"{name}: {bench.dense_batch} sequences fit the pool densely")
    runs = run_all(bench, ("kvpool", "stock"), s.repetitions)
    pairs = list(zip(runs["kvpool"], runs["stock"], strict=True))
    wall, cpu = median(a.rate / b.rate for a, b in pairs), median(a.cpu_rate / b.cpu_rate for a, b in pairs)
    rates = " against ".join(f"{median(run.rate for run in runs[who]):,.0f}" for who in ("kvpool", "stock"))
    bench.say(f"{name}: kvpool alone, {STEADY_CHUNK} tokens of prompts in a step")
    ours = run_all(bench.with_settings(chunk=STEADY_CHUNK), ("kvpool",), s.repetitions)["kvpool"]
    title, small = f"{s.model}, {name}", f"CPU time, {STEADY_CHUNK} tokens of prompts in a step"
    return [
        Gate(f"{title}: tokens/s over stock's", wall, limit, note=f"{rates}; {cpu:.2f} by CPU time")
        if by == "wall"
        else Gate(f"{title}: tokens/s of CPU time over stock's", cpu, limit, note=f"{wall:.2f} by the clock, {rates}"),
        Gate(f"{title}: steady steps, p99 / p50", steady_ratio(ours), TICKS, True, small),
        Gate(f"{title}: spikes", median(map(spikes, ours)), SPIKES, True, f"{small}, > 5 medians"),
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
