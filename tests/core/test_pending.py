"""Plans in flight: done in and out of order, fences and limbo, rollback, and what a pending plan forbids."""

import itertools

import pytest

from kvpool import Plan, Pool
from kvpool.errors import PlanStateError


def in_flight(make_pool, make_plan):
    def make(n, num_blocks=32, **options):
        pool = make_pool(num_blocks, 4, **options)
        return pool, [make_plan(pool, 8, 64) for _ in range(n)]

    return make


@pytest.fixture
def flight(make_any, make_plan):
    """``pool, plans = flight(n)``: a pool of each kind and n plans; blocks of 4 tokens."""
    return in_flight(make_any, make_plan)


@pytest.fixture
def table_flight(make_pool, make_plan):
    """The same of a pool of one group: its ids are worked out by hand."""
    return in_flight(make_pool, make_plan)


def limbo(pool):
    stats = pool.stats()
    return stats.limbo, stats.blank


def idle(pool):
    """Nothing is used, pending or in limbo."""
    stats = pool.stats()
    return (stats.used, stats.limbo, stats.pending, stats.free) == (0, 0, 0, stats.num_blocks - stats.reserved)


# --- done -------------------------------------------------------------------------------------------------


def test_steps_count_from_one_and_make_their_plans_pending_until_they_are_done(flight):
    pool, (a, b, c) = flight(3)
    handle = pool.open()
    assert not a.is_pending
    pool.step(a, [handle], 3)
    pool.step(b, [handle], 3)  # in several pending plans
    pool.reserve(c, [handle], 1)
    assert [plan.step_id for plan in (a, b, c)] == [1, 2, 3] and pool.stats().pending == 3
    for plan in (a, b, c):
        assert plan.is_pending
        pool.done(plan)
        assert not plan.is_pending
    # Contents hold until the next step.
    assert [[group.kv_lens.tolist() for group in plan.groups] for plan in (a, b, c)] == [
        [[n]] * len(a.groups) for n in (3, 6, 6)
    ]
    pool.step(a, [], 1)  # an empty batch is pending like any other
    assert a.is_pending and (a.step_id, len(a.handles), a.num_tokens) == (4, 0, 0)
    pool.done(a)
    assert pool.stats().pending == 0


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_done_in_any_order_passes_up_to_the_first_step_that_is_not_through(flight, order):
    pool, plans = flight(3)
    handle = pool.open()
    for plan in plans:
        pool.step(plan, [handle], 1)
    for turn, k in enumerate(order, 1):
        pool.done(plans[k])
        first = min({0, 1, 2, 3} - set(order[:turn]))
        assert [plan.is_pending for plan in plans] == [i >= first for i in range(3)]
        assert pool.stats().pending == 3 - first


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


def snapshot(pool, handles):
    groups = range(len(pool.options.groups))
    rows = [(pool.num_tokens(h), [pool.table(h, g).tolist() for g in groups]) for h in handles]
    return rows, pool.blocks.refcount_histogram().tolist(), limbo(pool), pool.stats().pending


ROLLED_BACK = {
    "step": lambda pool, plan, rows: pool.step(plan, rows, [1, 7, 9, 5]),
    "decode step": lambda pool, plan, rows: pool.step(plan, rows, 1),
    "decode step with counts": lambda pool, plan, rows: pool.step(plan, rows, [1] * 4),
    "partial step": lambda pool, plan, rows: pool.step(plan, rows, [1, 60, 2, 1], partial=True),
    "reserve": lambda pool, plan, rows: pool.reserve(plan, rows, 9),
    "unshare": lambda pool, plan, rows: pool.unshare(plan, rows[:2], 5),
}


@pytest.mark.parametrize("call", ROLLED_BACK)
def test_rollback_restores_what_was_and_the_same_call_takes_the_same_blocks(flight, grow, call):
    """Rows with reserved blocks, in the middle of a block, sharing a tail, and empty; older plans wait on."""
    pool, (older, plan) = flight(2, num_blocks=64)
    parent = pool.open(12)
    grow(pool, parent, 6)
    rows, taken = [parent, *map(int, pool.fork(parent, 2)), pool.open()], []
    pool.blocks.alloc(pool.stats().blank - (12 if call == "partial step" else 24))
    first = snapshot(pool, rows)
    for _ in range(2):
        ROLLED_BACK[call](pool, plan, rows)
        assert plan.served.tolist() == [True, call != "partial step", True, True][: len(plan.handles)]
        taken.append(snapshot(pool, rows))
        assert taken[-1] != first
        pool.rollback(plan)
        assert snapshot(pool, rows) == first and not plan.is_pending
        pool.check()
    assert taken[0] == taken[1]
    pool.step(older, rows, [3, 1, 0, 0])
    before = snapshot(pool, rows)
    ROLLED_BACK[call](pool, plan, rows)
    pool.rollback(plan)
    assert snapshot(pool, rows)[0] == before[0]
    pool.rollback(older)
    assert snapshot(pool, rows) == first


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


@pytest.mark.parametrize("closed", [[0], [1], [0, 1]])
def test_rollback_skips_rows_closed_since(flight, grow, closed):
    pool, (plan,) = flight(1)
    parent = pool.open()
    grow(pool, parent, 6)
    rows = [parent, int(pool.fork(parent)[0])]
    ((_, tables), _), *_ = snapshot(pool, rows)
    pool.step(plan, rows, 5)  # the parent moves to a copy of its second block
    pool.close([rows[k] for k in closed])
    pool.rollback(plan)
    left = [handle for k, handle in enumerate(rows) if k not in closed]
    assert snapshot(pool, left)[0] == [(6, tables)] * len(left)
    pool.close(left)
    assert idle(pool)


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


def test_rollback_keeps_evicted_blocks_evicted(table_flight):
    pool, (plan,) = table_flight(1, num_blocks=3)
    pool.blocks.alloc(2)
    pool.blocks.mark_cached([1, 2])
    pool.blocks.free([1, 2])
    pool.step(plan, [pool.open()], 5)
    assert pool.blocks.drain_evicted().tolist() == [1, 2]
    pool.rollback(plan)
    stats = pool.stats()
    assert (stats.blank, stats.evictable) == (2, 0)


@pytest.mark.parametrize("num_new", [0, 1, 3, [1]])
def test_row_of_a_pending_plan_is_refused_with_any_number_of_new_tokens(flight, grow, refused, num_new):
    pool, (plan,) = flight(1)
    row, other = pool.open(), pool.open()
    grow(pool, row, 2)
    pool.step(plan, [row], num_new)
    for rows in (row, [other, row]):
        with refused(pool, PlanStateError, "truncate", plans=[plan]):
            pool.truncate(rows, 0)
    child = int(pool.fork(row)[0])
    with refused(pool, PlanStateError, "rollback", plans=[plan]):
        pool.rollback(plan)
    pool.close(child)
    pool.rollback(plan)
    assert pool.num_tokens(row) == 2
    pool.truncate(row, 0)
