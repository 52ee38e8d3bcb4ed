"""Who serves the workload, and what came of it: everybody side by side, the run with the median rate counts."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import ModuleType
from typing import Any

from benchmarks.serving.harness import SimulatedClock, Tick, WallClock, serve, serve_side_by_side
from benchmarks.serving.metrics import summarize, usage
from benchmarks.serving.phases import Phases, find_phases
from benchmarks.serving.record import Record
from benchmarks.serving.settings import TICK_COST, Settings
from benchmarks.serving.slots import SlotServer
from benchmarks.serving.workload import Lengths, Workload, make_workload, trace_workload
from kvpool.cli.console import CommandError

NULL_VOCABULARY = 32000
REQUESTS = 64


@dataclass(frozen=True)
class Run:
    """One run of one contestant.

    Attributes
    ----------
    name : str
        "kvpool" or "stock".
    batch : int
        Sequences at a time.
    phases, cpu_phases : Phases
        By wall time (simulated for the null model), and with spikes by CPU time.
    facts : dict
        What the pool and the scheduler counted.
    tokens : dict
        Tokens of each sequence; empty for the null model.
    """

    name: str
    batch: int
    record: Record
    phases: Phases
    cpu_phases: Phases
    facts: dict[str, Any] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict, repr=False)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """See `summarize` and `usage`."""
        found = summarize(self.record, self.phases) | usage(self.record, self.facts.get("token_nbytes") or 0)
        return found | {"spikes": len(self.phases.spikes), "cpu_spikes": len(self.cpu_phases.spikes)} | self.facts

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return float(self.summary["tokens_per_sec"] or 0.0)

    @property
    def cpu_rate(self) -> float:
        """Tokens per second of CPU time."""
        return self.record.num_tokens / max(self.summary["cpu_seconds"], 1e-9)


@dataclass
class Bench:
    """A model and what it is to serve.

    Attributes
    ----------
    say : callable
        Told what begins now.
    advance : callable
        Told how many tokens were generated.
    """

    settings: Settings
    workload: Workload
    lm: ModuleType | None = None
    model: Any = None
    vocab_size: int = NULL_VOCABULARY
    say: Callable[[str], None] = lambda what: None
    advance: Callable[[int], None] = lambda tokens: None

    @property
    def slot_blocks(self) -> int:
        """Blocks that a static reservation holds for each sequence."""
        return -(-self.workload.longest // self.settings.block_size)

    @property
    def num_blocks(self) -> int:
        """Usable blocks of the pool."""
        s = self.settings
        room = max(1, s.max_batch // 4) if s.is_null else s.max_batch
        return s.num_blocks if s.num_blocks is not None else room * self.slot_blocks

    @property
    def dense_batch(self) -> int:
        """The largest batch whose padded dense KV fits the same bytes, at least 1."""
        return max(1, self.num_blocks * self.settings.block_size // self.workload.longest)

    def run(self, name: str) -> Run:
        """Serve the workload once."""
        with self.serving(name) as server:
            clock = SimulatedClock(self.cost) if self.settings.is_null else WallClock()
            return self.result(name, server, serve(server, self.workload_of(name), clock, self.advance))

    def run_side_by_side(self, names: Sequence[str]) -> list[Run]:
        """Serve the workload by several at the same time, see `serve_side_by_side`."""
        if self.settings.is_null:
            return [self.run(name) for name in names]
        with contextlib.ExitStack() as stack:
            servers = [stack.enter_context(self.serving(name)) for name in names]
            pairs = [(server, self.workload_of(name)) for name, server in zip(names, servers, strict=True)]
            records = serve_side_by_side(pairs, progress=self.advance)
            return [self.result(*one) for one in zip(names, servers, records, strict=True)]

    def workload_of(self, name: str) -> Workload:
        """The workload as somebody knows it: samples are kvpool's."""
        return self.workload if name == "kvpool" else self.workload.one_by_one()

    def batch(self, name: str) -> int:
        """Sequences that somebody runs at a time. The null model's slots: as many as fit the pool."""
        has_slots = self.settings.is_null and name != "kvpool"
        return min(self.dense_batch, self.settings.max_batch) if has_slots else self.settings.max_batch

    @contextlib.contextmanager
    def serving(self, name: str) -> Iterator[Any]:
        """Yield a fresh server, for the length of a ``with`` block."""
        server = self.server(name, self.batch(name))
        try:
            yield server
        finally:
            if not self.settings.is_null:
                server.close()

    def result(self, name: str, server: Any, record: Record) -> Run:
        """Return what came of a run."""
        batch = self.batch(name)
        facts = pool_facts(server, record) if name == "kvpool" else {}
        phases, cpu_phases = (find_phases(record, batch, by=by) for by in ("wall", "cpu"))
        return Run(name, batch, record, phases, cpu_phases, facts, getattr(server, "tokens", {}))

    def server(self, name: str, batch: int) -> Any:
        """Return a fresh server."""
        s = self.settings
        if name == "kvpool":
            options = {"max_step_tokens": batch + s.chunk, "prefill_chunk": s.chunk, "preempt": s.preempt}
            if self.lm is None:
                return paged_server(self.num_blocks, s.block_size, batch, s.samples, **options)
            return self.lm.EngineServer(self.model, self.num_blocks, s.block_size, batch, s.samples, **options)
        if self.lm is None:
            return SlotServer(batch, slot_blocks=self.slot_blocks, prefill_chunk=s.chunk)
        block_nbytes = self.lm.block_nbytes(self.model, s.block_size)
        return self.lm.StockServer(
            self.model,
            batch,
            chunk=s.chunk,
            block_nbytes=block_nbytes,
            shared_prefix=s.shared_prefix,
        )

    def cost(self, tick: Tick) -> float:
        """Seconds that a step takes, where nothing is computed."""
        step, row, token = TICK_COST
        return (step + row * tick.decodes + token * tick.prefill_tokens) / 1e3

    def with_settings(self, **changes: Any) -> Bench:
        """Return a bench with other settings, the same workload and a pool of the same size."""
        return replace(self, settings=replace(self.settings, num_blocks=self.num_blocks, **changes))


def paged_server(num_blocks: int, block_size: int, batch: int, samples: int, **options: Any) -> Any:
    """Return the scheduler on a pool, without a model."""
    from benchmarks.serving.paged import NullModel, PagedServer
    from kvpool import Pool, Scheduler

    pool = Pool(num_blocks + 1, block_size, reserved_blocks=1, max_seqs=2 * batch + 16, prefix_cache=True)
    scheduler = Scheduler(pool, max_running=batch, **options)
    return PagedServer(scheduler, pool, NullModel(), max_running=batch, samples=samples)


def pool_facts(server: Any, record: Record) -> dict[str, Any]:
    """Return what pool and scheduler counted over a run."""
    pool, scheduler = server.pool.stats(), server.scheduler.stats()
    prefix = server.pool.prefix.stats()
    return {
        "COW_clones_per_token": pool.cow_copies / max(record.num_tokens, 1),
        "hit_rate": prefix.hit_rate,
        "hit_tokens": prefix.hit_tokens,
        "preemptions": scheduler.preemptions,
        "recomputed_tokens": scheduler.recomputed_tokens,
        "prefill_tokens": scheduler.prefill_tokens,
        "blocks_leaked": pool.used,
        "token_nbytes": getattr(server, "token_nbytes", None),
        "attention": getattr(server, "route", None),
    }


def make_bench(settings: Settings) -> Bench:
    """Load the model and make the workload."""
    if settings.is_null:
        return Bench(settings, workload_of(settings, NULL_VOCABULARY))
    try:
        from benchmarks.serving import lm
    except ImportError as exc:
        need = "needs mlx and mlx-lm: pip install 'kvpool[mlx]'"
        raise CommandError(f"--model {settings.model} {need} ({exc})") from None
    model, vocab_size = lm.load(settings.model)
    return Bench(settings, workload_of(settings, vocab_size), lm, model, vocab_size)


def workload_of(settings: Settings, vocab_size: int) -> Workload:
    """Return the requests."""
    s = settings
    if s.trace is not None:
        from benchmarks.replay import TraceError, read_trace

        try:
            trace = read_trace(s.trace)
        except OSError as exc:
            raise CommandError(f"--trace {s.trace}: {exc.strerror or exc}") from None
        except TraceError as exc:
            raise CommandError(f"--trace {exc}") from None
        work = trace_workload(trace, requests=s.requests, scale=s.trace_scale, vocab_size=vocab_size)
        return replace(work, samples=s.samples)
    requests = s.requests if s.requests is not None or s.tokens_target is not None else REQUESTS
    return make_workload(
        Lengths.parse(s.prompt),
        Lengths.parse(s.output),
        requests=requests,
        tokens_target=s.tokens_target,
        rate=s.rate,
        shared_prefix=s.shared_prefix,
        vocab_size=vocab_size,
        samples=s.samples,
        seed=s.seed,
    )


def warm_up(bench: Bench, names: Sequence[str]) -> None:
    """Let everybody serve a little first: memory is mapped, kernels are chosen, modules are imported."""
    work = make_workload(
        Lengths.parse("uniform:20:90"), Lengths.parse("6"), requests=6, vocab_size=bench.vocab_size, seed=2
    )
    small = replace(bench.settings, num_blocks=-(-6 * 96 // bench.settings.block_size), samples=1, max_batch=4)
    for name in names:
        replace(bench, workload=work, settings=small, advance=lambda tokens: None).run(name)


def run_all(bench: Bench, names: Sequence[str], repetitions: int) -> dict[str, list[Run]]:
    """Return `repetitions` runs of everybody, side by side, each time in another order."""
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for repetition in range(repetitions):
        bench.say(f"{', '.join(names)}: run {repetition + 1} of {repetitions}")
        turn = repetition % len(names)
        for run in bench.run_side_by_side([*names[turn:], *names[:turn]]):
            runs[run.name].append(run)
    return runs


def median(runs: Sequence[Run]) -> Run:
    """Return the run with the median rate (the lower one of two)."""
    return sorted(runs, key=lambda run: run.rate)[(len(runs) - 1) // 2]


def same_tokens(runs: dict[str, list[Run]]) -> float | None:
    """Return the share of sequences with the same tokens in every run of kvpool and stock; None without a model.

    Two ways to round may choose different tokens where two are nearly as likely.
    """
    ours, theirs = (runs.get(name, []) for name in ("kvpool", "stock"))
    if not theirs or not theirs[0].tokens:
        return None
    expected = theirs[0].tokens
    equal = [all(run.tokens.get(key) == tokens for run in ours) for key, tokens in expected.items()]
    return sum(equal) / len(equal)


def check_fits(bench: Bench) -> None:
    """Refuse, before anything runs, a pool that cannot hold the longest request."""
    s, need = bench.settings, bench.slot_blocks
    if bench.num_blocks < need:
        raise CommandError(
            f"--num-blocks {bench.num_blocks}: the longest request has {bench.workload.longest} tokens, "
            f"{need} blocks of {s.block_size}"
        )


def finite(value: Any) -> Any:
    """Return a value as JSON can hold it."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
