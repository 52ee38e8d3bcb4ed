"""Serving: kvpool's engine beside mlx-lm's own, and scheduler and pool alone.

Both serve the same requests in one process, in turns of a tenth of a second, so that a machine that others share is as
fast for both; of several runs the median counts. `serving_lm` has the engines and their models.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.command import main
from benchmarks.gate import Gate
from kvpool.cli.console import CommandError, progress

if TYPE_CHECKING:
    from benchmarks.serving_lm import Bench

OPTIONS = {
    "model": ("tiny", "null: scheduler and pool alone; tiny, medium, big: random Llamas; or a checkpoint of mlx-lm"),
    "repetitions": (3, "runs of both"),
}

# ---------------------------------------------------------------------------------------------- the requests


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests, all there at the beginning."""

    prompts: list[NDArray[np.int32]] = field(repr=False)  # at least one token each
    max_tokens: NDArray[np.int64]  # of each answer, at least 1; requests end by length: every server does the same work
    shared_prefix: int = 0  # tokens that every prompt begins with

    @property
    def num_tokens(self) -> int:
        """Tokens that are to be generated."""
        return int(self.max_tokens.sum())

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and its answer: what a static reservation holds for each sequence."""
        return max(len(prompt) + int(new) for prompt, new in zip(self.prompts, self.max_tokens, strict=True))


def lengths(rng: np.random.Generator, text: str, count: int) -> NDArray[np.int64]:
    """Return `count` lengths in tokens, int64 ``[count]``: all ``"64"``, or as ``"lognormal:MEDIAN:SIGMA:MAX"`` says.

    Raises
    ------
    ValueError
        `text` is neither of them.
    """
    kind, _, rest = text.partition(":")
    if not rest:
        return np.full(count, int(kind))
    if kind != "lognormal":
        raise ValueError(f"{text}: lengths are N or lognormal:MEDIAN:SIGMA:MAX")
    median, sigma, most = map(float, rest.split(":"))
    return np.clip(np.rint(np.exp(rng.normal(math.log(median), sigma, count))), 1, most).astype(np.int64)


def make_workload(
    vocab_size: int, *, prompt: str, output: str, requests: int, shared_prefix: int = 0, seed: int = 1
) -> Workload:
    """Return random requests, with tokens below `vocab_size`; the lengths of prompts come on top of what they share."""
    _, for_prompts, for_outputs, for_tokens = np.random.default_rng(seed).spawn(4)
    outputs = lengths(for_outputs, output, requests)
    shared = for_tokens.integers(0, vocab_size, shared_prefix, np.int32)
    prompts = [
        np.concatenate([shared, for_tokens.integers(0, vocab_size, int(own), np.int32)])
        for own in lengths(for_prompts, prompt, requests)
    ]
    return Workload(prompts, outputs, shared_prefix)


# ---------------------------------------------------------------------------------------------- servers that take turns


SLICE_SECONDS = 0.1
PLATEAU = 0.9  # of the steps that decode beside prompts, so many have at most the rows of the steady state


@dataclass(slots=True)
class Tick:
    """What a server did in one step."""

    tokens: int = 0  # generated
    decodes: int = 0  # rows of one token
    prefill_tokens: int = 0  # of prompts, computed
    blocks_in_use: int = 0  # while it ran


@dataclass
class Run:
    """A server with requests, and what it did with them.

    A server has ``add(number, prompt, max_tokens)``, `is_busy`, ``tick()``, which is one step and timed, ``describe()``
    of the last step, ``settle()``, which finishes what was begun ahead, and `tokens`, the answers by number.
    """

    server: Any
    seconds: float = 0.0  # its turns by the clock
    cpu_seconds: float = 0.0  # of the process in them
    wall: float = 0.0  # `seconds` when the last token came
    ticks: list[Tick] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)  # CPU seconds of each tick

    def timed(self, work: Callable[[], object]) -> float:
        """Let the server do something, and return its CPU seconds."""
        cpu, start = time.process_time(), time.perf_counter()
        work()
        self.seconds += time.perf_counter() - start
        cpu = time.process_time() - cpu
        self.cpu_seconds += cpu
        return cpu

    def begin(self, workload: Workload) -> None:
        """Hand over all requests."""
        for number, (prompt, most) in enumerate(zip(workload.prompts, workload.max_tokens.tolist(), strict=True)):
            self.server.add(number, prompt, most)

    def turn(self) -> bool:
        """Let the server work for `SLICE_SECONDS`, and return whether there is more to do."""
        until = self.seconds + SLICE_SECONDS
        while self.server.is_busy and self.seconds < until:
            self.costs.append(self.timed(self.server.tick))
            self.wall = self.seconds
            self.ticks.append(self.server.describe())
        self.timed(self.server.settle)
        return self.server.is_busy

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return sum(tick.tokens for tick in self.ticks)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.wall

    @property
    def cpu_rate(self) -> float:
        """Tokens per second of CPU time."""
        return self.num_tokens / self.cpu_seconds

    @property
    def peak(self) -> int:
        """Most blocks in use."""
        return max(tick.blocks_in_use for tick in self.ticks)

    @property
    def steady_ratio(self) -> float:
        """p99 over p50 of the CPU time of steady steps, NaN without any.

        Steps are steady from the first one that decodes as many rows as the plateau has, to the last one that computes
        a prompt.
        """
        decodes = np.array([tick.decodes for tick in self.ticks])
        prompts = np.flatnonzero([tick.prefill_tokens for tick in self.ticks])
        end = int(prompts[-1]) + 1 if len(prompts) else 0
        rows = decodes[:end][decodes[:end] > 0]
        if not len(rows):
            return float("nan")
        first = int(np.argmax(decodes[:end] >= np.quantile(rows, PLATEAU, method="lower")))
        p50, p99 = np.percentile(np.array(self.costs)[first:end][decodes[first:end] > 0], (50, 99))
        return float(p99 / p50)


def serve_side_by_side(servers: Sequence[Any], workload: Workload) -> list[Run]:
    """Let servers do the same work, in turns.

    The speed of a machine that others share changes from second to second; here it changes for everybody alike.

    Raises
    ------
    RuntimeError
        A server is idle, but not all tokens were generated.
    """
    runs = [Run(server) for server in servers]
    gc.collect()
    gc.freeze()  # a collection that walks through all modules would be in somebody's step
    try:
        for run in runs:
            run.timed(lambda run=run: run.begin(workload))  # type: ignore[misc]
        going = runs
        while going:
            going = [run for run in going if run.turn()]
    finally:
        gc.unfreeze()
    for run in runs:
        if run.num_tokens != workload.num_tokens:
            asked = workload.num_tokens
            raise RuntimeError(f"[serve] {run.num_tokens} tokens were generated, {asked} were asked for")
    return runs


# ----------------------------------------------------------------------------------------------------- what has to hold


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


def gates(args: argparse.Namespace) -> Iterator[Gate]:
    """Serve, and yield what was found."""
    yield null_gate()
    if args.model == "null":
        return
    try:
        from benchmarks import serving_lm as lm
    except ImportError as exc:
        need = "needs mlx and mlx-lm: pip install 'kvpool[mlx]'"
        raise CommandError(f"--model {args.model} {need} ({exc})") from None
    with progress(len(ROWS) + 1, args.json) as say:
        yield from measure(lm.Bench(args.model), args.repetitions, say)


if __name__ == "__main__":
    sys.exit(main())
