"""Schedules: every seed is a legal order, and shows a kernel whose result depends on the order."""

import numpy as np
from msl import metal_kernel, settings

THREADS, GROUPS = 96, 5
ORDER = "uint place = y[0]; y[0] = place + 1; y[1 + place] = thread_position_in_grid.x;"


def launch(body, seed):
    kernel = metal_kernel("schedule", [], ["y"], body)
    threads = THREADS * GROUPS
    with settings(seed=seed):
        return kernel(
            inputs=[], output_shapes=[(threads + 1,)], output_dtypes=[np.uint32], init_value=0, grid=(threads, 1, 1),
            threadgroup=(THREADS, 1, 1),
        )[0]  # fmt: skip


def order_of(seed):
    """The order in which threads start."""
    return launch(ORDER, seed)[1:]


def test_seed_0_is_the_natural_order():
    assert (order_of(0) == np.arange(THREADS * GROUPS)).all()


def test_seeds_shuffle_threadgroups_simdgroups_and_lanes_and_repeat_their_order():
    orders = np.stack([order_of(seed) for seed in range(1, 9)])
    assert (np.sort(orders, axis=1) == np.arange(THREADS * GROUPS)).all()
    assert len({order.tobytes() for order in orders}) == 8 and (order_of(7) == orders[6]).all()
    groups = orders.reshape(8, GROUPS, 3, 32)
    assert (groups // THREADS == groups[:, :, :1, :1] // THREADS).all(), "threadgroups do not mix"
    assert (groups // 32 == groups[..., :1] // 32).all(), "between meetings a simdgroup's lanes run one after another"
    for part in (groups[:, :, 0, 0] // THREADS, groups[:, 0, :, 0] % THREADS // 32, groups[:, 0, 0] % 32):
        assert len({row.tobytes() for row in part}) > 1
