"""What operators see of a server: the log on stderr, and statistics for ``GET /metrics``."""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from logging.handlers import QueueHandler, QueueListener
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from kvpool.adapters.mlx_lm.engine import Completion, Engine
from kvpool.groups import arenas_of
from kvpool.metrics import Collector
from kvpool.serving.memory import Memory

FORMS = ("text", "json", "off")
MOST_LINES = 1024  # that wait for stderr; more are dropped
LAST_SECONDS = 1.0  # for the last lines
SECONDS = 10.0  # between two lines of `report`
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 300)  # of times
NAMED = ["model_name"]  # vLLM's label: its dashboards ask for it
THEIRS: dict[str, Callable[[Any], float]] = {  # of vLLM: statistics of the scheduler with the same meaning
    "vllm:num_requests_running": lambda now: now.prefilling + now.decoding,
    "vllm:num_requests_waiting": lambda now: now.waiting,
    "vllm:num_preemptions": lambda now: now.preemptions,
    "vllm:prompt_tokens": lambda now: now.prefill_tokens - now.recomputed_tokens + now.hit_tokens,
    "vllm:generation_tokens": lambda now: now.sampled_tokens,
    "vllm:prefix_cache_queries": lambda now: now.prefill_tokens - now.recomputed_tokens + now.hit_tokens,
    "vllm:prefix_cache_hits": lambda now: now.hit_tokens,
}
_log = logging.getLogger(__name__)


class _Lines(logging.Formatter):
    """Makes a line of a record, as text or JSON. Its fields are those of `told` that are not null or empty."""

    def __init__(self, is_json: bool) -> None:
        super().__init__("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S")
        self._is_json = is_json

    def format(self, record: logging.LogRecord) -> str:
        told = {name: value for name, value in getattr(record, "told", {}).items() if value not in (None, [])}
        if not self._is_json:
            return " ".join([super().format(record), *(f"{name}={_word(value)}" for name, value in told.items())])
        head = {"time": self.formatTime(record, self.datefmt), "level": record.levelname.lower()}
        return json.dumps(head | {"message": record.getMessage()} | told)


def _word(value: Any) -> str:
    text = ",".join(value) if isinstance(value, list) else str(value)
    return text if re.fullmatch(r"[\w.,:/+-]+", text, re.ASCII) else json.dumps(text)


@contextmanager
def to_stderr(form: str) -> Iterator[None]:
    """Write the log of the package and of uvicorn to stderr, from a thread: a server works on if nobody reads it.

    `form` is of `FORMS`. With "off", only failures are written, as text.
    """
    lines: queue.Queue[logging.LogRecord] = queue.Queue(MOST_LINES)
    writer, loggers = logging.StreamHandler(), [logging.getLogger(name) for name in ("kvpool", "uvicorn")]
    writer.setFormatter(_Lines(form == "json"))
    handler, listener = QueueHandler(lines), QueueListener(lines, writer)
    before = [(one.level, one.propagate) for one in loggers], logging.raiseExceptions
    logging.raiseExceptions = False  # of a full queue, and of a reader who is gone
    listener.start()
    for one in loggers:
        one.addHandler(handler)
        one.setLevel(logging.WARNING if form == "off" or one.name == "uvicorn" else logging.INFO)
        one.propagate = False
    try:
        yield
    finally:
        end = time.monotonic() + LAST_SECONDS
        while lines.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.01)
        if not lines.unfinished_tasks:
            listener.stop()
        for one, (level, propagate) in zip(loggers, before[0], strict=True):
            one.removeHandler(handler)
            one.level, one.propagate = level, propagate
        logging.raiseExceptions = before[1]


async def report(engine: Engine, now: Callable[[], float] = time.monotonic) -> None:
    """Log every ten seconds what the engine computed, unless it was idle."""
    began, before = now(), engine.scheduler.stats()
    while True:
        await asyncio.sleep(SECONDS)
        seconds, stats = now() - began, engine.scheduler.stats()
        began += seconds
        if stats.steps < before.steps:  # the engine failed, and has another scheduler
            before = stats
        if stats.steps > before.steps:
            names = "sampled_tokens", "prefill_tokens", "hit_tokens"
            made, read, hit = (getattr(stats, name) - getattr(before, name) for name in names)
            pool = engine.kv.pool
            arenas = [pool.stats(arena) for arena in set(arenas_of(pool.options.groups))]
            used = sum(arena.used for arena in arenas) / sum(arena.num_blocks for arena in arenas)
            _log.info(
                f"{stats.prefilling + stats.decoding} running, {stats.waiting} waiting; "
                f"{made / seconds:.1f} tokens a second, {read / seconds:.1f} of prompts"
                f"{f', {100 * hit / (hit + read):.0f} % of prompts cached' if hit else ''}; "
                f"{100 * used:.0f} % of blocks in use"
            )
        before = stats


class ServerMetrics:
    """The statistics of a server, some by the names of vLLM, too, which have the name of the `model` as vLLM's do.

    Cancelled requests do not count in the times.
    """

    def __init__(self, model: str) -> None:
        self._registry, self._model = CollectorRegistry(), model
        self._queued = self._times("queue", "request_queue_time", "From the arrival of a request to its first blocks.")
        self._first = self._times(*("time_to_first_token",) * 2, "From the arrival of a request to its first token.")
        text = "Mean time between two tokens of a sample."
        self._between = self._times("time_per_output_token", "request_time_per_output_token", text)
        text = "From the arrival of a request to the end of a sample."
        self._whole = self._times("request", "e2e_request_latency", text)
        labels = "path", "status"
        self._answers = Counter("kvpool_http_answers", "Answers, by path and status.", labels, registry=self._registry)

    def _times(self, ours: str, theirs: str, help: str) -> Callable[[float], None]:
        """Return what notes a time, by both names."""
        own = Histogram(f"kvpool_{ours}_seconds", help, buckets=BUCKETS, registry=self._registry)
        other = Histogram(f"vllm:{theirs}_seconds", help, NAMED, buckets=BUCKETS, registry=self._registry)
        both = own, other.labels(self._model)

        def note(seconds: float) -> None:
            for one in both:
                one.observe(seconds)

        return note

    def watch(self, engine: Engine, memory: Sequence[Memory] = ()) -> None:
        """Add the statistics of an engine, and of what resizes its pool. After it failed, it has another scheduler."""
        self._engine, self._memory = engine, memory
        self._registry.register(self)

    def collect(self) -> Iterator[Any]:
        """Collect the metrics; the registry calls it."""
        engine = self._engine
        own = (metric for one in self._memory for metric in one.metrics())
        yield from Collector(engine.kv.pool, engine.scheduler, lambda: [*engine.metrics(), *own]).collect()
        stats, pool = engine.scheduler.stats(), engine.kv.pool.stats()
        found = {name: value(stats) for name, value in THEIRS.items()}
        found["vllm:kv_cache_usage_perc"] = pool.used / (pool.num_blocks - pool.reserved)
        for name, number in found.items():
            is_gauge = "requests" in name or "usage" in name
            family = (GaugeMetricFamily if is_gauge else CounterMetricFamily)(name, "See vLLM.", labels=NAMED)
            family.add_metric([self._model], number)
            yield family

    def ended(self, completion: Completion) -> None:
        """Count a completion."""
        for sample in completion.samples:
            times, number = sample.output.times, len(sample.tokens)
            if sample.finish_reason == "cancelled" or times.admitted is None or times.first_token is None:
                continue
            self._queued(times.admitted - times.arrived)
            self._first(times.first_token - times.arrived)
            self._whole(times.finished - times.arrived)
            if number > 1:
                self._between((times.finished - times.first_token) / (number - 1))

    def answered(self, path: str, status: int) -> None:
        """Count an answer."""
        self._answers.labels(path, str(status)).inc()

    def text(self) -> tuple[bytes, dict[str, str]]:
        """Return the text for Prometheus, and its header."""
        return generate_latest(self._registry), {"Content-Type": CONTENT_TYPE_LATEST}
