"""Schedules: every seed is a legal order, and a kernel whose result depends on the order is caught."""

import numpy as np
import pytest
from msl import MetalError, metal_kernel, settings, under_schedules

THREADS, GROUPS = 96, 5
ORDER = """
    uint place = atomic_fetch_add_explicit(y, 1, memory_order_relaxed);
    atomic_store_explicit(y + 1 + place, thread_position_in_grid.x, memory_order_relaxed);
"""


def launch(body, **arguments):
    kernel = metal_kernel("schedule", [], ["y"], body, atomic_outputs=arguments.pop("atomic_outputs", False))
    threads = THREADS * GROUPS
    return kernel(
        inputs=[], output_shapes=[(threads + 1,)], output_dtypes=[np.uint32], init_value=0, grid=(threads, 1, 1),
        threadgroup=(THREADS, 1, 1), **arguments,
    )  # fmt: skip


def order_of(seed):
    """The order in which threads start."""
    with settings(seed=seed):
        return launch(ORDER, atomic_outputs=True)[0][1:]


def test_seed_0_is_the_natural_order():
    assert (order_of(0) == np.arange(THREADS * GROUPS)).all()


def test_seeds_shuffle_threadgroups_simdgroups_and_lanes():
    orders = np.stack([order_of(seed) for seed in range(1, 9)])
    assert (np.sort(orders, axis=1) == np.arange(THREADS * GROUPS)).all()
    assert len({order.tobytes() for order in orders}) == 8
    groups = orders.reshape(8, GROUPS, 3, 32)
    assert (groups // THREADS == groups[:, :, :1, :1] // THREADS).all(), "threadgroups do not mix"
    assert (groups // 32 == groups[..., :1] // 32).all(), "between meetings a simdgroup's lanes run one after another"
    for part in (groups[:, :, 0, 0] // THREADS, groups[:, 0, :, 0] % THREADS // 32, groups[:, 0, 0] % 32):
        assert len({row.tobytes() for row in part}) > 1


def test_a_seed_repeats_its_order():
    assert (order_of(7) == order_of(7)).all()


def test_a_result_that_depends_on_the_order_is_refused():
    with pytest.raises(MetalError, match=r"result 0 depends on the schedule: .* bytes differ between seeds 0 and 1"):
        under_schedules(lambda: launch(ORDER, atomic_outputs=True))


def test_a_missing_barrier_is_seen_by_plain_runs_too():
    body = "threadgroup uint s[96]; uint i = thread_index_in_threadgroup; s[i] = i; y[i] = s[95 - i];"
    with pytest.raises(MetalError, match="depends on the schedule"):
        under_schedules(lambda: launch(body))


def test_a_result_that_does_not_depend_on_it_is_returned():
    body = "atomic_fetch_add_explicit(y, thread_position_in_grid.x, memory_order_relaxed);"
    (y,), runs = under_schedules(lambda: launch(body, atomic_outputs=True), seeds=[0, 3, 4], instrumented=True)
    assert y[0] == sum(range(THREADS * GROUPS)) and len(runs) == 3
    assert all(run.threadgroups == GROUPS for run in runs)


def test_an_error_names_its_seed():
    body = "y[int(thread_position_in_grid.x) - 1] = 0;"
    with pytest.raises(MetalError, match=r"out-of-bounds .* \(seed 1\)"):
        under_schedules(lambda: launch(body), seeds=[1, 2])
