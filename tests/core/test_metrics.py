"""Statistics for Prometheus, read back by its client library."""

import numpy as np
import pytest

import kvpool
from kvpool.metrics import Collector, gauge

prometheus_client = pytest.importorskip("prometheus_client")


def read(pool, scheduler=None, **options):
    """{(name, labels): value} of what the client library writes."""
    from prometheus_client.parser import text_string_to_metric_families

    registry = prometheus_client.CollectorRegistry()
    registry.register(Collector(pool, scheduler, **options))
    values = {}
    for family in text_string_to_metric_families(prometheus_client.generate_latest(registry).decode()):
        for name, labels, value, *_ in family.samples:
            assert family.documentation and (family.type == "counter") == name.endswith("_total")
            key = (name, tuple(labels.items()))
            assert key not in values
            values[key] = value
    return values


def working_scheduler():
    pool = kvpool.Pool(20, 4, prefix_cache=True)
    scheduler = kvpool.Scheduler(pool, max_running=4, max_step_tokens=16)
    for prompt in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [7]):
        scheduler.add(kvpool.Request(prompt, max_tokens=9))
    for _ in range(3):
        step = scheduler.schedule()
        scheduler.update(step, np.zeros(len(step.sample_at), np.int32))
    return pool, scheduler


def test_tenants_with_weights_have_statistics_and_others_have_none():
    pool = kvpool.Pool(20, 4)
    scheduler = kvpool.Scheduler(pool, max_running=1, weights={"a": 2, ("b", 1): 1})
    for tenant in ("a", "a", "stranger"):
        scheduler.add(kvpool.Request([1, 2, 3], max_tokens=4, tenant=tenant))
    for _ in range(2):
        scheduler.update(scheduler.schedule(), np.zeros(1, np.int32))
    found = {key: value for key, value in read(pool, scheduler).items() if "tenant" in key[0]}
    due = {"waiting": (1, 0), "requests": (2, 0), "tokens_total": (4, 0)}
    assert found == {
        (f"kvpool_tenant_{name}", (("tenant", tenant),)): value
        for name, both in due.items()
        for tenant, value in zip(("a", "('b', 1)"), both, strict=True)
    }


def test_values_are_those_of_the_pool_and_the_scheduler():
    pool, scheduler = working_scheduler()
    scheduler.cancel(2)
    values = read(pool, scheduler)
    stats, now = pool.stats(), scheduler.stats()
    for state in ("blank", "evictable", "limbo", "used", "reserved"):
        assert values["kvpool_blocks", (("state", state),)] == getattr(stats, state)
    blocks = [value for (name, _), value in values.items() if name == "kvpool_blocks"]
    assert sum(blocks) == pool.num_blocks == 20
    assert values["kvpool_requests", (("state", "decoding"),)] == now.decoding == 2
    assert values["kvpool_requests_cancelled_total", ()] == 1
    assert values["kvpool_steps_total", ()] == 3
    assert values["kvpool_prefill_tokens_total", ()] == now.prefill_tokens == 11
    assert values["kvpool_block_allocations_total", ()] == stats.allocs > 0


def test_a_pool_with_groups_counts_the_blocks_of_every_arena():
    groups = [
        kvpool.Group.full(),
        kvpool.Group.window(9, keep=2, columns=3, block_size=8, arena=1, num_blocks=30),
        kvpool.Group.state(5),
    ]
    pool = kvpool.Pool(20, 4, groups=groups)
    scheduler = kvpool.Scheduler(pool, max_running=4, max_step_tokens=16)
    scheduler.add(kvpool.Request(range(9), max_tokens=5))
    scheduler.update(scheduler.schedule(), np.zeros(1, np.int32))
    values = read(pool, scheduler)
    for arena, size in enumerate((20, 30, 5)):
        stats = pool.stats(arena)
        label = ("arena", str(arena))
        for state in ("blank", "evictable", "limbo", "used", "reserved"):
            assert values["kvpool_blocks", (label, ("state", state))] == getattr(stats, state)
        assert sum(v for (name, at), v in values.items() if name == "kvpool_blocks" and label in at) == size
        assert values["kvpool_block_allocations_total", (label,)] == stats.allocs > 0
        assert values["kvpool_blocks_used_peak", (label,)] == stats.peak_used > 0
    infos = [dict(at) for (name, at), _ in values.items() if name == "kvpool_group_info"]
    assert [(info["kind"], info["arena"], info["columns"], info["block_size"]) for info in infos] == [
        ("full", "0", "1", "4"),
        ("window", "1", "3", "8"),
        ("state", "2", "1", "0"),
    ]


def test_pool_alone_has_no_requests_and_counters_that_never_shrink():
    pool = kvpool.Pool(8, 4)
    before = read(pool)
    assert not any(name.startswith("kvpool_requests") for name, _ in before)
    assert before["kvpool_blocks", (("state", "blank"),)] == 7
    pool.close([pool.open(9)])
    after = read(pool)
    assert all(after[key] >= before[key] for key in before if key[0].endswith("_total"))


def test_more_metrics_of_the_caller_stand_beside_those_of_the_pool():
    values = read(kvpool.Pool(8, 4), extra=lambda: [gauge("mine", "Of the caller.", 2.5)])
    assert values["mine", ()] == 2.5 and values["kvpool_blocks", (("state", "blank"),)] == 7
