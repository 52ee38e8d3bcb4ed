"""A reservation, which a fork may end. Copies on write: test_model.py has their numbers, `tests/verify` judges them."""

import pytest

from kvpool.errors import OutOfBlocks


def test_step_inside_a_reservation_cannot_run_out_unless_a_fork_ends_it(make_any, make_plan, grow, refused):
    pool = make_any(14)
    handle = pool.open()
    grow(pool, handle, 2)
    plan = make_plan(pool)
    pool.reserve(plan, [handle], 10)
    pool.done(plan)
    pool.blocks.alloc(pool.stats().blank)
    for _ in range(9):
        pool.step(plan, [handle], 1)
        pool.done(plan)
    pool.blocks.alloc(pool.stats().blank)  # what a window let go
    child = int(pool.fork(handle)[0])
    with refused(pool, OutOfBlocks, "step", plans=[plan]):
        pool.step(plan, [handle], 1)  # the tail is shared now
    pool.close(child)
    pool.step(plan, [handle], 1)
    pool.done(plan)
    with pytest.raises(OutOfBlocks):
        pool.step(plan, [handle], 1)
