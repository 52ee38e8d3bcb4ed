"""Plans in flight: done in and out of order, fences and limbo, rollback, and what a pending plan forbids."""

import pytest

from kvpool import Plan, Pool
from kvpool.errors import PlanStateError


@pytest.fixture
def flight(make_pool, make_plan):
    """``pool, plans = flight(n)``: a pool and n plans; rows of block size 4."""

    def make(n, num_blocks=32, **options):
        pool = make_pool(num_blocks, 4, **options)
        return pool, [make_plan(pool, 8, 64) for _ in range(n)]

    return make


def limbo(pool):
    stats = pool.stats()
    return stats.limbo, stats.blank


# --- done -------------------------------------------------------------------------------------------------


def test_step_makes_the_plan_pending_and_done_ends_it(flight):
    pool, (plan,) = flight(1)
    handle = pool.open()
    assert not plan.is_pending
    pool.step(plan, [handle], 1)
    assert plan.is_pending and pool.stats().pending == 1
    pool.done(plan)
    assert not plan.is_pending and pool.stats().pending == 0
    assert plan.seq_lens.tolist() == [1]  # contents hold until the next step


def test_step_ids_count_from_one(flight):
    pool, plans = flight(2)
    handle = pool.open()
    pool.step(plans[0], [handle], 1)
    pool.reserve(plans[1], [handle], 1)
    assert [plan.step_id for plan in plans] == [1, 2]
    pool.done(plans[0])
    pool.step(plans[0], [handle], 1)
    assert plans[0].step_id == 3


def test_done_out_of_order_takes_effect_when_the_older_are_through(flight):
    pool, (a, b, c) = flight(3)
    handle = pool.open()
    for plan in (a, b, c):
        pool.step(plan, [handle], 1)
    pool.done(c)
    pool.done(b)
    assert [plan.is_pending for plan in (a, b, c)] == [True, True, True]
    assert pool.stats().pending == 3
    pool.done(a)
    assert [plan.is_pending for plan in (a, b, c)] == [False, False, False]
    assert pool.stats().pending == 0


def test_done_out_of_order_passes_only_up_to_the_first_gap(flight):
    pool, (a, b, c) = flight(3)
    handle = pool.open()
    for plan in (a, b, c):
        pool.step(plan, [handle], 1)
    pool.done(c)
    pool.done(a)
    assert [plan.is_pending for plan in (a, b, c)] == [False, True, True]
    pool.done(b)
    assert not c.is_pending


def test_done_twice_is_refused(flight, refused):
    pool, (a, b) = flight(2)
    handle = pool.open()
    with refused(pool, PlanStateError, "done", plans=[a]):
        pool.done(a)
    pool.step(a, [handle], 1)
    pool.step(b, [handle], 1)
    pool.done(b)
    with refused(pool, PlanStateError, "done", plans=[a, b]):
        pool.done(b)  # noted already
    pool.done(a)
    for plan in (a, b):
        with refused(pool, PlanStateError, "done", plans=[a, b]):
            pool.done(plan)


def test_pending_plan_cannot_step_reserve_or_bind(flight, refused):
    pool, (a, b) = flight(2)
    handle = pool.open()
    pool.step(a, [handle], 1)
    pool.step(b, [handle], 1)
    pool.done(b)  # noted, still pending
    for plan in (a, b):
        with refused(pool, PlanStateError, "step", plans=[a, b]):
            pool.step(plan, [handle], 1)
        with refused(pool, PlanStateError, "reserve", plans=[a, b]):
            pool.reserve(plan, [handle], 1)
        with refused(pool, PlanStateError, "bind", plans=[a, b]):
            plan.bind(seq_lens=plan.seq_lens)


def test_refused_step_leaves_the_plan_idle(flight):
    pool, (plan,) = flight(1, num_blocks=3, max_blocks_per_seq=9)
    handle = pool.open()
    with pytest.raises(MemoryError):
        pool.step(plan, [handle], 9)
    assert not plan.is_pending
    pool.step(plan, [handle], 8)


def test_empty_batch_is_pending_like_any_other(flight):
    pool, (plan,) = flight(1)
    pool.step(plan, [], 1)
    assert plan.is_pending and (len(plan.handles), plan.num_tokens) == (0, 0)
    pool.done(plan)


def test_sequence_may_be_in_several_pending_plans(flight):
    pool, plans = flight(4)
    handle = pool.open()
    for plan in plans:
        pool.step(plan, [handle], 3)
    assert [plan.seq_lens.tolist() for plan in plans] == [[3], [6], [9], [12]]
    for plan in plans:
        pool.done(plan)


# --- limbo and fences -------------------------------------------------------------------------------------

RELEASES = {  # every way a block can lose its last reference; each gives up exactly block 1
    "close": lambda pool, h: pool.close(h),
    "close batch": lambda pool, h: pool.close([h]),
    "truncate": lambda pool, h: pool.truncate(h, 0),
    "defer_close": lambda pool, h: pool.defer_close(h),
    "decref": lambda pool, h: (pool.blocks.incref(1), pool.close(h), pool.blocks.decref(1)),
    "free": lambda pool, h: (pool.blocks.incref(1), pool.close(h), pool.blocks.free(1)),
}


@pytest.mark.parametrize("release", RELEASES)
def test_released_block_waits_for_the_pending_step(flight, release):
    pool, (plan,) = flight(1)
    old, new = pool.open(4), pool.open(4)
    pool.step(plan, [new], 1)
    RELEASES[release](pool, old)
    assert limbo(pool) == (1, 29)
    assert pool.blocks.refcount(1) == 0
    assert pool.blocks.alloc() == 3  # not block 1, which the step may still use
    pool.done(plan)
    assert limbo(pool) == (0, 29)
    assert pool.blocks.alloc() == 1


def test_without_a_pending_step_limbo_is_empty(flight):
    pool, _ = flight(0)
    pool.close(pool.open(12))
    assert limbo(pool) == (0, 31)


def test_block_leaves_limbo_when_its_own_fence_has_passed(flight):
    pool, (a, b) = flight(2)
    keep, first, second = pool.open(), pool.open(4), pool.open(4)
    pool.step(a, [keep], 1)
    pool.close(first)  # fence: a
    pool.step(b, [keep], 1)
    pool.close(second)  # fence: b
    assert limbo(pool) == (2, 28)
    pool.done(a)
    assert limbo(pool) == (1, 29)
    assert pool.blocks.alloc() == 1
    pool.done(b)
    assert limbo(pool) == (0, 29)


def test_done_out_of_order_does_not_open_the_fence(flight):
    pool, (a, b) = flight(2)
    keep, old = pool.open(), pool.open(4)
    pool.step(a, [keep], 1)
    pool.step(b, [keep], 1)
    pool.close(old)
    pool.done(b)
    assert limbo(pool) == (1, 29)
    pool.done(a)
    assert limbo(pool) == (0, 30)


def test_blocks_leave_limbo_in_the_order_they_came(flight):
    pool, (plan,) = flight(1)
    keep, old = pool.open(), pool.open(12)  # blocks 1, 2, 3
    pool.step(plan, [keep], 1)
    pool.close(old)  # limbo: 3, 2, 1
    pool.done(plan)  # each goes on top of the blank stack
    assert pool.blocks.alloc(3).tolist() == [1, 2, 3]


def test_limbo_blocks_are_not_available(flight):
    pool, (plan,) = flight(1, num_blocks=6)
    keep, old = pool.open(), pool.open(16)
    pool.step(plan, [keep], 1)
    pool.close(old)
    with pytest.raises(MemoryError) as caught:
        pool.blocks.alloc()
    assert (caught.value.blank, caught.value.limbo, caught.value.needed) == (0, 4, 1)
    assert pool.can([keep], 3) and not pool.can([keep], 4)
    pool.done(plan)
    assert pool.can([keep], 4)


def test_in_order_pool_never_has_limbo_or_pending_plans(flight, refused):
    pool, (plan,) = flight(1, in_order=True)
    handle = pool.open()
    pool.step(plan, [handle], 5)
    assert not plan.is_pending and plan.seq_lens.tolist() == [5]
    pool.close(handle)
    assert limbo(pool) == (0, 31)
    for call in ("done", "rollback"):
        with refused(pool, PlanStateError, call, plans=[plan]):
            getattr(pool, call)(plan)
        with pytest.raises(PlanStateError, match="is not pending: in an in_order pool a step is done when it returns"):
            getattr(pool, call)(plan)


def test_in_order_pool_releases_holds_at_once(flight):
    pool, (plan,) = flight(1, in_order=True)
    handle = pool.open(4)
    pool.blocks.incref(1)
    pool.step(plan, [handle], 1)
    pool.blocks.free(1)
    assert limbo(pool) == (0, 30)


# --- rollback ---------------------------------------------------------------------------------------------


def snapshot(pool, handles):
    return [(pool.num_tokens(h), pool.table(h).tolist()) for h in handles], pool.blocks.refcount_histogram().tolist()


def test_rollback_restores_lengths_tables_references_and_the_blank_stack(flight, grow):
    pool, (plan,) = flight(1)
    parent = pool.open(12)
    grow(pool, parent, 6)
    rows = [parent, *map(int, pool.fork(parent, 2)), pool.open()]
    before, free = snapshot(pool, rows), pool.stats().blank
    pool.step(plan, rows, [1, 7, 9, 5])
    assert len(plan.copies) == 2
    assert snapshot(pool, rows) != before
    pool.rollback(plan)
    assert snapshot(pool, rows) == before
    stats = pool.stats()
    assert (stats.blank, stats.pending, stats.limbo) == (free, 0, 0)
    assert not plan.is_pending
    pool.check()
    assert pool.blocks.alloc(3).tolist() == [4, 5, 6]


@pytest.mark.parametrize("num_new", [1, [1, 1, 1, 1]], ids=["one for all", "one per row"])
def test_rollback_of_a_decode_step(flight, grow, num_new):
    """Rows in the middle of a block, at its end, empty, and sharing a tail."""
    pool, (plan,) = flight(1)
    rows = [pool.open() for _ in range(3)]
    grow(pool, rows[0], 2)
    grow(pool, rows[1], 4)
    rows.append(int(pool.fork(rows[0])[0]))
    before = snapshot(pool, rows)
    pool.step(plan, rows, num_new)
    assert [pool.num_tokens(h) for h in rows] == [3, 5, 1, 3]
    pool.rollback(plan)
    assert snapshot(pool, rows) == before
    pool.step(plan, rows, num_new)
    assert plan.seq_lens.tolist() == [3, 5, 1, 3]


def test_rollback_then_the_same_step_takes_the_same_blocks(flight, grow):
    pool, (plan,) = flight(1)
    parent = pool.open()
    grow(pool, parent, 6)
    rows = [parent, int(pool.fork(parent)[0])]
    results = []
    for _ in range(3):
        pool.step(plan, rows, [7, 2])
        results.append((plan.block_tables.tolist(), plan.copies.tolist(), plan.slot_mapping.tolist()))
        pool.rollback(plan)
    assert results[0] == results[1] == results[2]


def test_rollback_of_a_reserve(flight, grow):
    pool, (plan,) = flight(1)
    parent = pool.open()
    grow(pool, parent, 6)
    rows = [parent, int(pool.fork(parent)[0])]
    before = snapshot(pool, rows)
    pool.reserve(plan, rows, 9)
    pool.rollback(plan)
    assert snapshot(pool, rows) == before


def test_rollback_restores_replaced_reserved_blocks(flight):
    pool, (plan,) = flight(1)
    handle = pool.open(12)
    pool.blocks.incref([1, 2, 3])
    pool.step(plan, [handle], 12)
    assert pool.table(handle).tolist() == [4, 5, 6]
    pool.rollback(plan)
    assert pool.table(handle).tolist() == [1, 2, 3]
    assert [pool.blocks.refcount(b) for b in range(1, 7)] == [2, 2, 2, 0, 0, 0]


def test_rollback_of_a_partial_step(flight, grow):
    pool, (plan,) = flight(1, num_blocks=4)
    a, b, c = (pool.open() for _ in range(3))
    for handle in (a, b, c):
        grow(pool, handle, 2)
    before = snapshot(pool, [a, b, c])
    pool.step(plan, [a, b, c], [1, 9, 2], partial=True)
    assert plan.served.tolist() == [1, 0, 1]
    pool.rollback(plan)
    assert snapshot(pool, [a, b, c]) == before


def test_rollback_only_of_the_newest(flight, refused):
    pool, (a, b) = flight(2)
    handle = pool.open()
    pool.step(a, [handle], 3)
    pool.step(b, [handle], 3)
    with refused(pool, PlanStateError, "rollback", plans=[a, b]):
        pool.rollback(a)
    pool.rollback(b)
    pool.rollback(a)
    assert pool.num_tokens(handle) == 0 and pool.stats().blank == 31


def test_rollback_of_a_plan_noted_done_is_refused(flight, refused):
    pool, (a, b) = flight(2)
    handle = pool.open()
    pool.step(a, [handle], 3)
    pool.step(b, [handle], 3)
    pool.done(b)
    with refused(pool, PlanStateError, "rollback", plans=[a, b]):
        pool.rollback(b)


def test_rollback_of_an_idle_plan_is_refused(flight, refused):
    pool, (plan,) = flight(1)
    with refused(pool, PlanStateError, "rollback", plans=[plan]):
        pool.rollback(plan)
    pool.step(plan, [pool.open()], 3)
    pool.done(plan)
    with refused(pool, PlanStateError, "rollback", plans=[plan]):
        pool.rollback(plan)
    pool.step(plan, [], 0)
    pool.rollback(plan)
    with refused(pool, PlanStateError, "rollback", plans=[plan]):
        pool.rollback(plan)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_copy_that_only_a_raw_reference_keeps_is_never_made_after_a_rollback(prefix_cache):
    pool = Pool(32, 4, prefix_cache=prefix_cache)
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


def test_rolled_back_blocks_wait_for_older_steps(flight):
    pool, (a, b) = flight(2)
    handle, other = pool.open(), pool.open()
    pool.step(a, [other], 1)
    pool.step(b, [handle], 8)
    pool.rollback(b)
    assert limbo(pool) == (2, 28)  # a is still in flight
    pool.done(a)
    assert limbo(pool) == (0, 30)


def test_rollback_of_the_older_plan_after_the_newer(flight, grow):
    pool, (a, b) = flight(2)
    parent = pool.open()
    grow(pool, parent, 6)
    rows = [parent, int(pool.fork(parent)[0])]
    before = snapshot(pool, rows)
    pool.step(a, rows, [3, 1])
    pool.step(b, rows[::-1], [4, 4])
    pool.rollback(b)
    pool.rollback(a)
    assert snapshot(pool, rows) == before


def test_rollback_skips_rows_closed_since(flight, grow):
    pool, (plan,) = flight(1)
    parent = pool.open()
    grow(pool, parent, 6)
    child = int(pool.fork(parent)[0])
    pool.step(plan, [parent, child], 5)  # the parent moves to a copy of block 2
    pool.close(parent)
    pool.rollback(plan)
    assert (pool.num_tokens(child), pool.table(child).tolist()) == (6, [1, 2])
    stats = pool.stats()
    assert (stats.used, stats.limbo) == (2, 0)


def test_rollback_with_every_row_closed(flight, grow):
    pool, (plan,) = flight(1)
    parent = pool.open()
    grow(pool, parent, 6)
    rows = [parent, int(pool.fork(parent)[0])]
    pool.step(plan, rows, 5)
    pool.close(rows)
    pool.rollback(plan)
    stats = pool.stats()
    assert (stats.used, stats.limbo, stats.blank) == (0, 0, 31)


def test_rollback_is_refused_while_a_child_forked_since_is_open(flight, refused):
    pool, (plan,) = flight(1)
    row, other = pool.open(), pool.open()
    pool.step(plan, [row], 5)
    child = int(pool.fork(row)[0])
    with refused(pool, PlanStateError, "rollback", plans=[plan]):
        pool.rollback(plan)
    pool.close(child)
    pool.rollback(plan)
    assert pool.num_tokens(row) == 0 and pool.is_open(other)


def test_rollback_is_refused_while_a_grandchild_is_open(flight, refused):
    pool, (plan,) = flight(1)
    row = pool.open()
    pool.step(plan, [row], 5)
    child = int(pool.fork(row)[0])
    grandchild = int(pool.fork(child)[0])
    pool.close(child)
    with refused(pool, PlanStateError, "rollback", plans=[plan]):
        pool.rollback(plan)
    pool.close(grandchild)
    pool.rollback(plan)


def test_rollback_is_refused_for_children_of_a_row_closed_since(flight, refused):
    pool, (plan,) = flight(1)
    row = pool.open()
    pool.step(plan, [row], 5)
    child = int(pool.fork(row)[0])
    pool.close(row)
    with refused(pool, PlanStateError, "rollback", plans=[plan]):
        pool.rollback(plan)
    pool.done(plan)
    assert pool.num_tokens(child) == 5


def test_rollback_is_legal_with_children_forked_before_the_step(flight, grow):
    pool, (plan,) = flight(1)
    parent = pool.open()
    grow(pool, parent, 6)
    child = int(pool.fork(parent)[0])
    pool.step(plan, [parent], 5)
    pool.rollback(plan)
    assert pool.table(child).tolist() == [1, 2] and pool.num_tokens(parent) == 6


def test_rollback_is_legal_with_children_of_other_sequences(flight):
    pool, (plan,) = flight(1)
    row, other = pool.open(), pool.open()
    pool.step(plan, [row], 5)
    pool.fork(other, 2)
    pool.rollback(plan)


def test_rollback_keeps_evicted_blocks_evicted(flight):
    pool, (plan,) = flight(1, num_blocks=3)
    pool.blocks.alloc(2)
    pool.blocks.mark_cached([1, 2])
    pool.blocks.free([1, 2])
    pool.step(plan, [pool.open()], 5)
    assert pool.blocks.drain_evicted().tolist() == [1, 2]
    pool.rollback(plan)
    stats = pool.stats()
    assert (stats.blank, stats.evictable) == (2, 0)


def test_truncate_of_a_row_is_legal_after_rollback(flight):
    pool, (plan,) = flight(1)
    row = pool.open()
    pool.step(plan, [row], 5)
    pool.rollback(plan)
    pool.truncate(row, 0)


def test_truncate_is_legal_after_rollback_though_an_older_plan_is_pending(flight, grow):
    pool, (a, b) = flight(2)
    row, other = pool.open(), pool.open()
    grow(pool, row, 2)
    pool.step(a, [other], 1)
    pool.step(b, [row], 1)
    pool.rollback(b)
    pool.truncate(row, 0)  # in no pending plan any more
    assert pool.num_tokens(row) == 0


@pytest.mark.parametrize("num_new", [0, 1, 3, [1]])
def test_row_of_a_pending_plan_is_refused_with_any_number_of_new_tokens(flight, grow, refused, num_new):
    pool, (plan,) = flight(1)
    row = pool.open()
    grow(pool, row, 2)
    pool.step(plan, [row], num_new)
    with refused(pool, PlanStateError, "truncate", plans=[plan]):
        pool.truncate(row, 0)
    child = int(pool.fork(row)[0])
    with refused(pool, PlanStateError, "rollback", plans=[plan]):
        pool.rollback(plan)
    pool.close(child)
    pool.rollback(plan)
    assert pool.num_tokens(row) == 2


# --- forks of pending rows --------------------------------------------------------------------------------


def test_fork_of_a_pending_row_shares_what_the_step_wrote(flight):
    pool, (a, b) = flight(2)
    row = pool.open()
    pool.step(a, [row], 6)
    child = int(pool.fork(row)[0])
    assert (pool.num_tokens(child), pool.table(child).tolist()) == (6, [1, 2])
    pool.step(b, [child], 1)
    assert b.copies.tolist() == [[2, 3, 2]]
    pool.done(a)
    pool.done(b)


def test_child_of_a_pending_row_may_be_truncated(flight):
    pool, (plan,) = flight(1)
    row = pool.open()
    pool.step(plan, [row], 6)
    child = int(pool.fork(row)[0])
    pool.truncate(child, 2)
    assert pool.table(child).tolist() == [1]
