"""Plans in flight: what a pending plan forbids, and what ends it.

Fences, limbo and what a rollback restores, the fuzzer judges and the plain model repeats (`tests/verify`).
"""

import pytest
from catalogue import idle

from kvpool import Plan, Pool
from kvpool.errors import PlanStateError


@pytest.fixture
def flight(make_any, make_plan):
    """``pool, plans = flight(n)``: a pool of each kind and n plans; blocks of 4 tokens."""

    def make(n, num_blocks=32, **options):
        pool = make_any(num_blocks, 4, **options)
        return pool, [make_plan(pool, 8, 64) for _ in range(n)]

    return make


# --- done -------------------------------------------------------------------------------------------------


def test_done_of_the_oldest_passes_any_number_of_plans_that_wait_for_it(flight):
    pool, plans = flight(40)
    handle = pool.open()
    for plan in plans:
        pool.step(plan, [handle], 1)
    for plan in reversed(plans):
        assert all(one.is_pending for one in plans)
        pool.done(plan)
    assert not any(plan.is_pending for plan in plans) and pool.stats().pending == 0


def test_call_that_does_not_fit_the_state_of_its_plan_is_refused(flight, refused):
    pool, (a, b) = flight(2)
    handle = pool.open()
    calls = {
        "step": lambda plan: pool.step(plan, [handle], 1),
        "reserve": lambda plan: pool.reserve(plan, [handle], 1),
        "bind": lambda plan: plan.bind(),
        "done": pool.done,
        "rollback": pool.rollback,
    }

    def refuse(plan, *names):
        for name in names:
            with refused(pool, PlanStateError, name, plans=[a, b]):
                calls[name](plan)

    refuse(a, "done", "rollback")
    pool.step(a, [handle], 3)
    pool.step(b, [handle], 3)
    refuse(a, "step", "reserve", "bind", "rollback")  # rollback is for the newest
    pool.done(b)
    refuse(b, "step", "reserve", "bind", "done", "rollback")  # noted, and still pending
    pool.done(a)
    for plan in (a, b):
        refuse(plan, "done", "rollback")
    pool.step(a, [handle], 3)
    pool.step(b, [handle], 3)
    pool.rollback(b)
    pool.rollback(a)
    refuse(a, "done", "rollback")
    assert pool.num_tokens(handle) == 6


# --- limbo and fences -------------------------------------------------------------------------------------


def test_pool_without_a_pending_step_has_no_limbo_and_one_in_order_never(flight, refused):
    pool, _ = flight(0)
    pool.close(pool.open(12))
    assert idle(pool)
    pool, (plan,) = flight(1, in_order=True)
    handle = pool.open()
    pool.step(plan, [handle], 5)
    assert not plan.is_pending and plan.groups[0].kv_lens.tolist() == [5]
    pool.close(handle)
    assert idle(pool)
    for call in ("done", "rollback"):
        with refused(pool, PlanStateError, call, "in_order pool a step is done when it returns", plans=[plan]):
            getattr(pool, call)(plan)


# --- rollback ---------------------------------------------------------------------------------------------


def test_copy_that_only_a_raw_reference_keeps_is_never_made_after_a_rollback():
    pool = Pool(32, 4)  # with a prefix cache nobody else refers to the blocks of rows
    first, older, newest = (Plan(pool, 4, 16) for _ in range(3))
    row, other = pool.open(), pool.open()
    pool.step(first, [row], 6)
    pool.done(first)
    pool.fork(row)
    pool.step(older, [other], 1)
    pool.step(newest, [row], 1)
    copy = int(newest.copies[0, 1])
    pool.blocks.incref(copy)
    pool.close(row)
    pool.rollback(newest)
    pool.check()
    pool.done(older)
    pool.blocks.decref(copy)
    pool.check()


def test_rollback_is_refused_while_a_descendant_forked_since_is_open(flight, refused):
    pool, (plan,) = flight(1)
    row, other = pool.open(), pool.open()
    earlier = int(pool.fork(row)[0])
    pool.step(plan, [row], 5)
    pool.fork(other, 2)  # of another sequence
    child = int(pool.fork(row)[0])
    grandchild = int(pool.fork(child)[0])
    for handle in (child, grandchild):
        with refused(pool, PlanStateError, "rollback", plans=[plan]):
            pool.rollback(plan)
        pool.close(handle)
    pool.rollback(plan)
    assert pool.num_tokens(row) == pool.num_tokens(earlier) == 0
    pool.step(plan, [row], 5)
    child = int(pool.fork(row)[0])
    pool.close(row)
    with refused(pool, PlanStateError, "rollback", plans=[plan]):
        pool.rollback(plan)
    pool.done(plan)
    assert pool.num_tokens(child) == 5
