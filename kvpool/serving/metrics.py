"""Statistics for ``GET /metrics``: pool, scheduler, answers, and times of requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from kvpool.adapters.mlx_lm.engine import Completion, Engine
from kvpool.metrics import Collector

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 300)


class ServerMetrics:
    """The statistics of a server. Cancelled requests do not count in the times."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._queued = self._histogram("queue", "From the arrival of a request to its first blocks.")
        self._first = self._histogram("time_to_first_token", "From the arrival of a request to its first token.")
        self._between = self._histogram("time_per_output_token", "Mean time between two tokens of a sample.")
        self._whole = self._histogram("request", "From the arrival of a request to the end of a sample.")
        self._answers = Counter(
            "kvpool_http_answers", "Answers, by path and status.", ("path", "status"), registry=self._registry
        )

    def _histogram(self, name: str, help: str) -> Histogram:
        return Histogram(f"kvpool_{name}_seconds", help, buckets=SECONDS, registry=self._registry)

    def watch(self, engine: Engine) -> None:
        """Add the statistics of an engine. After it failed, it has another scheduler."""
        self._engine = engine
        self._registry.register(self)

    def collect(self) -> Iterator[Any]:
        """Collect the metrics; the registry calls it."""
        engine = self._engine
        return Collector(engine.kv.pool, engine.scheduler, engine.metrics).collect()

    def ended(self, completion: Completion) -> None:
        """Count a completion."""
        for sample in completion.samples:
            times = sample.output.times
            if sample.finish_reason == "cancelled" or times.admitted is None or times.first_token is None:
                continue
            self._queued.observe(times.admitted - times.arrived)
            self._first.observe(times.first_token - times.arrived)
            self._whole.observe(times.finished - times.arrived)
            if len(sample.tokens) > 1:
                self._between.observe((times.finished - times.first_token) / (len(sample.tokens) - 1))

    def answered(self, path: str, status: int) -> None:
        """Count an answer."""
        self._answers.labels(path, str(status)).inc()

    def text(self) -> tuple[bytes, dict[str, str]]:
        """Return the text for Prometheus, and its header."""
        return generate_latest(self._registry), {"Content-Type": CONTENT_TYPE_LATEST}
