"""Statistics for Prometheus: values, and a collector for its client library.

`Collector` needs the package prometheus-client when it is asked. Names do not change between releases; counters end in
``_total``. Sizes are in blocks and tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from kvpool.groups import Group, arenas_of
from kvpool.stats import PrefixStats

NO_PREFIX = PrefixStats(0, 0, 0, 0.0, 0, 0, 0, 0, 0)


class Metric(NamedTuple):
    """One metric with its samples."""

    name: str  #: of a counter with its ``_total``
    kind: str  #: "gauge" or "counter"
    help: str
    samples: tuple[tuple[Mapping[str, str], float], ...]  #: (labels, value)


def metrics_of(pool: Any, scheduler: Any = None) -> list[Metric]:
    """The metrics of a pool, and of a scheduler on it. O(1): nothing is recomputed.

    With several arenas, counts of blocks have the label ``arena``; ``kvpool_group_info`` says which group has its
    blocks where. The pool may be in use by other threads.
    """
    groups: tuple[Group, ...] = pool.options.groups
    arenas = [pool.stats(arena) for arena in range(1 + max(arenas_of(groups)))]
    labels = [{}] if len(arenas) == 1 else [{"arena": str(arena)} for arena in range(len(arenas))]
    stats, prefix = arenas[0], pool.prefix.stats() if pool.prefix is not None else NO_PREFIX

    def by_arena(name: str, kind: str, text: str, field: str) -> Metric:
        samples = [(label, getattr(arena, field)) for label, arena in zip(labels, arenas, strict=True)]
        return Metric(name, kind, text, tuple(samples))

    places = [
        ({**label, "state": place}, getattr(arena, place))
        for label, arena in zip(labels, arenas, strict=True)
        for place in _PLACES
    ]
    metrics = [
        Metric("kvpool_blocks", "gauge", "Blocks of the pool, by where they are.", tuple(places)),
        gauge("kvpool_block_size_tokens", "Tokens of a block.", pool.block_size),
        by_arena("kvpool_blocks_shared", "gauge", "Blocks with two references or more.", "shared"),
        by_arena("kvpool_blocks_used_peak", "gauge", "Most blocks in use at any time.", "peak_used"),
        gauge("kvpool_sequences", "Open sequences.", stats.sequences),
        gauge("kvpool_sequence_tokens", "Tokens of open sequences.", stats.tokens),
        gauge("kvpool_sequence_capacity_tokens", "Tokens that the blocks of open sequences hold.", stats.capacity),
        gauge("kvpool_steps_pending", "Steps that are neither done nor rolled back.", stats.pending),
        by_arena("kvpool_block_allocations_total", "counter", "Blocks taken.", "allocs"),
        by_arena("kvpool_block_evictions_total", "counter", "Cached blocks whose content made room.", "evictions"),
        counter("kvpool_evicted_tokens_total", "Tokens that left sequences that go on.", stats.evicted_tokens),
        by_arena("kvpool_cow_copies_total", "counter", "Blocks copied because a shared one was written.", "cow_copies"),
        by_arena("kvpool_cow_tokens_total", "counter", "Tokens of these copies.", "cow_tokens"),
        gauge("kvpool_prefix_nodes", "Blocks that the prefix cache can find.", prefix.nodes),
        gauge("kvpool_prefix_kept", "Of these, blocks that a directive keeps.", prefix.kept),
        gauge("kvpool_prefix_checkpoints", "Checkpoints of layer groups that hits can use.", prefix.checkpoints),
        *(counter(f"kvpool_prefix_{name}_total", text, getattr(prefix, name)) for name, text in _PREFIX.items()),
        Metric("kvpool_group_info", "gauge", "1 for each layer group.", tuple(_group_infos(pool))),
    ]
    if scheduler is not None:
        now = scheduler.stats()
        states = tuple(({"state": state}, getattr(now, state)) for state in _STATES)
        metrics.append(Metric("kvpool_requests", "gauge", "Sequences of the scheduler, by state.", states))
        for name, text in _COUNTERS.items():
            metrics.append(counter(f"kvpool_{name}_total", text, getattr(now, name.removeprefix("requests_"))))
        tenants = [({"tenant": str(name)}, had) for name, had in scheduler.tenants().items()]
        for name, kind, text, field in _TENANTS if tenants else ():
            metrics.append(Metric(name, kind, text, tuple((label, getattr(had, field)) for label, had in tenants)))
    return metrics


def _group_infos(pool: Any) -> Iterator[tuple[dict[str, str], float]]:
    for number, (group, arena) in enumerate(zip(pool.options.groups, arenas_of(pool.options.groups), strict=True)):
        numbers = {
            "group": number,
            "arena": arena,
            "size": group.size,
            "keep": group.keep,
            "columns": group.columns,
            "block_size": 0 if group.kind == "state" else group.block_size or pool.block_size,
        }
        yield {"kind": group.kind, **{name: str(value) for name, value in numbers.items()}}, 1


def gauge(name: str, help: str, value: float) -> Metric:
    """A metric that goes up and down, with one value."""
    return Metric(name, "gauge", help, (({}, value),))


def counter(name: str, help: str, value: float) -> Metric:
    """A metric that only grows, with one value; `name` ends in ``_total``."""
    return Metric(name, "counter", help, (({}, value),))


class Collector:
    """The metrics of `metrics_of` for the registry of the package prometheus-client.

        prometheus_client.REGISTRY.register(Collector(pool, scheduler))

    Parameters
    ----------
    pool : kvpool.Pool
    scheduler : kvpool.Scheduler, optional
    extra : callable, optional
        Returns more metrics.
    """

    def __init__(self, pool: Any, scheduler: Any = None, extra: Callable[[], Iterable[Metric]] = tuple) -> None:
        self._pool, self._scheduler, self._extra = pool, scheduler, extra

    def collect(self) -> Iterator[Any]:
        """Collect the metrics; the registry calls it."""
        from prometheus_client.metrics_core import Metric as Family

        for metric in [*metrics_of(self._pool, self._scheduler), *self._extra()]:
            family = Family(metric.name.removesuffix("_total"), metric.help, metric.kind)
            for labels, value in metric.samples:
                family.add_sample(metric.name, dict(labels), value)
            yield family


_PREFIX = {
    "queries": "Prompts looked up.",
    "query_tokens": "Tokens of these prompts.",
    "hit_tokens": "Of these, tokens found.",
    "again_queries": "Prompts looked up again, of requests that were admitted before.",
    "again_query_tokens": "Tokens of these prompts.",
    "again_hit_tokens": "Of these, tokens found.",
    "evicted": "Blocks lost to the prefix cache by eviction.",
    "checkpoints_taken": "Checkpoints whose states a step saved.",
    "checkpoints_published": "Checkpoints that a commit made known.",
    "checkpoints_used": "Checkpoints that a hit used.",
    "checkpoints_skipped": "Checkpoints not taken: blocks or a window were gone.",
    "checkpoints_evicted": "Checkpoints that left to make room.",
}
_PLACES = ("blank", "evictable", "limbo", "used", "reserved")
_STATES = ("waiting", "prefilling", "decoding", "spilled")
_TENANTS = (
    ("kvpool_tenant_waiting", "gauge", "New requests of a tenant that wait.", "waiting"),
    ("kvpool_tenant_requests", "gauge", "Requests of a tenant that have not ended.", "unfinished"),
    ("kvpool_tenant_tokens_total", "counter", "Tokens computed for a tenant, prompts from admission.", "served_tokens"),
)
_COUNTERS = {
    "requests_finished": "Sequences that ended by themselves.",
    "requests_cancelled": "Sequences that were cancelled.",
    "requests_expired": "Sequences whose deadline passed.",
    "requests_rejected": "Requests that could never run, or found the queue full.",
    "admissions": "Sequences that got blocks, repeated ones included.",
    "preemptions": "Sequences that lost their blocks.",
    "spills": "Sequences whose blocks went to another tier.",
    "steps": "Steps executed.",
    "decode_tokens": "Tokens computed one by one.",
    "prefill_tokens": "Tokens computed in chunks.",
    "recomputed_tokens": "Tokens computed again after a preemption.",
    "hit_tokens": "Tokens found in the prefix cache at first admissions of requests.",
    "again_hit_tokens": "Tokens found in the prefix cache at later admissions of requests.",
    "sampled_tokens": "Tokens sampled.",
    "drafted_tokens": "Tokens computed as drafts.",
    "accepted_tokens": "Drafts that sampling confirmed.",
}
