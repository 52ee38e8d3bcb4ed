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


TURNS = {
    "fork": lambda pool, handle: pool.fork(handle),
    "incref": lambda pool, handle: pool.blocks.incref(pool.table(handle)[-1:]),
    "mark_cached": lambda pool, handle: pool.blocks.mark_cached(pool.table(handle)[-1:]),
    "truncate": lambda pool, handle: pool.truncate(handle, 3),
}


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("in_order", [True, False])
def test_tail_that_ceases_to_be_own_between_equal_steps_is_copied(make_pool, make_plan, turn, in_order):
    pool = make_pool(32, in_order=in_order)
    handles, plans = [pool.open() for _ in range(3)], [make_plan(pool) for _ in range(2)]

    def step(plan, n=1):
        pool.step(plan, handles, n)
        if not in_order:
            pool.done(plan)
        return len(plan.copies)

    step(plans[0], 4)
    pool.fork(handles[1])  # the first block is shared
    assert [step(plan) for plan in (*plans, plans[0])] == [0, 0, 0]
    TURNS[turn](pool, handles[1])
    assert [step(plan) for plan in (plans[1], *plans)] == [1, 0, 0]
    pool.check()
