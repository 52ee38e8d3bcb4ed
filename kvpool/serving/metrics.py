"""Statistics for ``GET /metrics``: pool, scheduler, answers, and times of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from kvpool.adapters.mlx_lm.engine import Completion, Engine
from kvpool.metrics import Collector, Metric
from kvpool.serving.memory import Memory

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 300)
THEIRS: dict[str, Callable[[Any], float]] = {  # of vLLM: statistics of the scheduler with the same meaning
    "vllm:num_requests_running": lambda now: now.prefilling + now.decoding,
    "vllm:num_requests_waiting": lambda now: now.waiting,
    "vllm:num_preemptions": lambda now: now.preemptions,
    "vllm:prompt_tokens": lambda now: now.prefill_tokens - now.recomputed_tokens + now.hit_tokens,
    "vllm:generation_tokens": lambda now: now.sampled_tokens,
    "vllm:prefix_cache_queries": lambda now: now.prefill_tokens - now.recomputed_tokens + now.hit_tokens,
    "vllm:prefix_cache_hits": lambda now: now.hit_tokens,
}


class ServerMetrics:
    """The statistics of a server, some by the names of vLLM, too. Cancelled requests do not count in the times."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
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
        names = f"kvpool_{ours}_seconds", f"vllm:{theirs}_seconds"
        both = [Histogram(name, help, buckets=SECONDS, registry=self._registry) for name in names]

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
        yield from Collector(engine.kv.pool, engine.scheduler, self._more).collect()
        stats, pool = engine.scheduler.stats(), engine.kv.pool.stats()
        for name, value in THEIRS.items():
            family = GaugeMetricFamily if "requests" in name else CounterMetricFamily
            yield family(name, "See vLLM.", value(stats))
        yield GaugeMetricFamily("vllm:kv_cache_usage_perc", "See vLLM.", pool.used / (pool.num_blocks - pool.reserved))

    def _more(self) -> list[Metric]:
        return [*self._engine.metrics(), *(metric for one in self._memory for metric in one.metrics())]

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
