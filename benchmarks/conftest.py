"""Options shared by all benchmarks: CPU time of this thread as clock, a record of what one round holds."""

import pytest


def pytest_configure(config):
    if hasattr(config.option, "benchmark_timer"):
        # Wall time on a shared machine measures the neighbours. A row that starts processes says so.
        config.option.benchmark_timer = "time.thread_time"
        config.option.benchmark_disable_gc = True


@pytest.fixture
def measure(benchmark):
    """Time `run`, in rounds, and record how many items one round holds.

    ``measure(run, items, row=..., who=..., setup=None, rounds=40)``: `row` names the operation with its
    size, `who` is "kvpool", "floor" or "python". `setup` runs before every round, untimed.
    """

    def timed(run, items, *, row, who, setup=None, rounds=40, **extra):
        benchmark.extra_info.update(row=row, who=who, items=items, **extra)
        benchmark.pedantic(run, setup=setup, rounds=rounds, warmup_rounds=0 if setup else 3)
        if benchmark.stats is not None:  # None when benchmarks are disabled
            benchmark.extra_info["ns_per_item"] = round(benchmark.stats.stats.median * 1e9 / items, 2)

    return timed
