"""Copy on write: who may write in place, who moves to a copy, and what the copies read."""

import pytest

from kvpool.errors import OutOfBlocks


@pytest.fixture
def shared(make_pool, grow):
    """``pool, holders = shared(length, n)``: n sequences of this length that share all their blocks."""

    def make(length, n, **options):
        pool = make_pool(32, 4, **options)
        parent = pool.open()
        grow(pool, parent, length)
        return pool, [parent, *map(int, pool.fork(parent, n - 1))]

    return make


def tables(pool, handles):
    return [pool.table(h).tolist() for h in handles]


def test_writer_of_a_shared_tail_moves_to_a_copy_and_the_other_holder_writes_in_place(shared, make_plan):
    pool, (parent, child) = shared(6, 2)
    first, second = make_plan(pool), make_plan(pool)
    pool.step(first, [child], 1)
    assert first.copies.tolist() == [[2, 3, 2]] and first.slot_mapping.tolist() == [3 * 4 + 2]
    assert tables(pool, [parent, child]) == [[1, 2], [1, 3]]
    assert [pool.blocks.refcount(b) for b in (1, 2, 3)] == [2, 1, 1]
    pool.step(second, [parent], 1)  # offset 2 is not below the two tokens that the pending copy reads
    assert second.copies.shape == (0, 3) and second.copies.dtype == "int32"
    assert second.slot_mapping.tolist() == [2 * 4 + 2]


@pytest.mark.parametrize("n", [2, 3, 8])
def test_all_holders_in_one_plan_are_served_in_order_and_the_last_writes_in_place(shared, make_plan, n):
    pool, holders = shared(6, n)
    plan = make_plan(pool, 8)
    pool.step(plan, holders, 1)
    assert plan.copies.tolist() == [[2, 3 + i, 2] for i in range(n - 1)]
    assert tables(pool, holders) == [[1, 3 + i] for i in range(n - 1)] + [[1, 2]]
    assert pool.blocks.refcount(2) == 1
    pool.done(plan)
    pool.step(plan, holders, 1)
    assert plan.copies.shape == (0, 3)


# --- the floor: no write below what a pending copy still reads --------------------------------------------


@pytest.mark.parametrize(
    ("cut", "end", "copies"),
    [
        (1, None, [[1, 3, 1]]),  # would overwrite what the first copy reads
        (2, None, [[1, 3, 2]]),
        (3, None, []),
        (1, "done", []),
        (1, "rollback", []),
    ],
)
def test_write_below_what_a_pending_copy_reads_moves_away(shared, make_plan, cut, end, copies):
    pool, (parent, child) = shared(3, 2)
    first, second = make_plan(pool), make_plan(pool)
    pool.step(first, [parent], 1)
    assert first.copies.tolist() == [[1, 2, 3]]
    pool.truncate(child, cut)
    if end is not None:
        getattr(pool, end)(first)
    if end == "rollback":
        pool.close(parent)
    pool.step(second, [child], 1)
    assert second.copies.tolist() == copies
    assert pool.table(child).tolist() == [copies[0][1] if copies else 1]


@pytest.mark.parametrize(("done", "copies"), [(False, [[1, 4, 2]]), (True, [])])
def test_floor_is_the_largest_of_the_copies_that_are_pending(shared, make_plan, done, copies):
    pool, (a, b, c) = shared(3, 3)
    plans = [make_plan(pool) for _ in range(3)]
    pool.truncate(b, 2)
    pool.step(plans[0], [a], 1)  # reads three tokens of block 1
    pool.step(plans[1], [b], 1)  # reads two
    assert [plan.copies.tolist() for plan in plans[:2]] == [[[1, 2, 3]], [[1, 3, 2]]]
    if done:
        pool.done(plans[0])
    pool.truncate(c, 2)
    pool.step(plans[2], [c], 1)
    assert plans[2].copies.tolist() == copies


@pytest.mark.parametrize(
    ("order", "copies", "left"), [([0, 1], [[1, 2, 3], [1, 3, 1]], [[2], [3]]), ([1, 0], [[1, 2, 1]], [[1], [2]])]
)
def test_floor_counts_the_copies_of_the_plan_itself(shared, make_plan, order, copies, left):
    pool, holders = shared(3, 2)
    pool.truncate(holders[1], 1)
    plan = make_plan(pool)
    pool.step(plan, [holders[k] for k in order], 1)
    assert plan.copies.tolist() == copies and tables(pool, holders) == left
    pool.done(plan)
    assert pool.stats().used == 2


# --- reserved blocks, raw references, several blocks at once ----------------------------------------------


@pytest.mark.parametrize(
    ("length", "new", "named", "copies", "table"),
    [
        (0, 12, [1, 3], [], [4, 2, 5]),  # ascending index: 1 -> 4, then 3 -> 5
        (2, 7, [1, 2, 3], [[1, 4, 2]], [4, 5, 6]),  # only the first holds valid tokens
        (2, 2, [1, 2, 3], [[1, 4, 2]], [4, 2, 3]),  # what lies behind the write stays
    ],
)
def test_reserved_blocks_that_are_shared_are_replaced_as_far_as_the_write_goes(
    make_pool, make_plan, grow, length, new, named, copies, table
):
    pool = make_pool()
    handle = pool.open(12)
    grow(pool, handle, length)
    pool.blocks.incref(named)
    plan = make_plan(pool)
    pool.step(plan, [handle], new)
    assert plan.copies.tolist() == copies and pool.table(handle).tolist() == table
    pool.done(plan)
    pool.blocks.decref(named)


# --- committed blocks -------------------------------------------------------------------------------------


def test_write_into_a_committed_tail_after_truncate_copies_it(make_pool, make_plan, grow):
    pool = make_pool(8)
    handle = pool.open()
    grow(pool, handle, 8)
    assert pool.table(handle).tolist() == [1, 2]
    pool.blocks.mark_cached([1, 2])
    pool.truncate(handle, 7)  # block 2 stays, three tokens of it are valid
    plan = make_plan(pool)
    pool.step(plan, [handle], 1)
    assert plan.copies.tolist() == [[2, 3, 3]]
    assert pool.table(handle).tolist() == [1, 3]
    assert plan.slot_mapping.tolist() == [3 * 4 + 3]
    assert pool.blocks.refcount(2) == 0 and pool.stats().evictable == 0  # held by the pending copy
    pool.done(plan)
    assert pool.stats().evictable == 1  # the cached tokens of block 2 were never overwritten
    pool.blocks.touch(2)
    assert pool.blocks.refcount(2) == 1


@pytest.mark.parametrize(
    ("length", "left", "marked", "new", "table"),
    [
        (8, 4, [1, 2], 1, [1, 3]),  # a block boundary: 2 is cached, 3 was blank
        (0, 0, [1], 1, [3, 2]),  # no valid tokens: replaced without a copy
        (7, 7, [1, 2], 0, [1, 2]),  # reading replaces nothing
    ],
)
def test_committed_block_whose_tokens_nobody_overwrites_is_not_copied(
    make_pool, make_plan, grow, length, left, marked, new, table
):
    pool = make_pool(8)
    handle = pool.open(8)
    grow(pool, handle, length)
    pool.blocks.mark_cached(marked)
    if left < length:
        pool.truncate(handle, left)
    plan = make_plan(pool)
    pool.step(plan, [handle], new)
    assert plan.copies.shape == (0, 3) and pool.table(handle).tolist() == table
    pool.done(plan)
    assert pool.stats().evictable == (new > 0)


# --- reserve ----------------------------------------------------------------------------------------------


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
