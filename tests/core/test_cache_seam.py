"""The seam of the prefix index: committed blocks, LRU order, revival, and the list of dropped blocks."""

import numpy as np
import pytest

from kvpool.errors import DoubleFree


def cached(pool, order):
    """Blocks 1..n, committed and released in `order`: the LRU list, oldest first."""
    pool.blocks.alloc(len(order))
    pool.blocks.mark_cached(order)
    pool.blocks.free(order)


def test_cached_blocks_are_evicted_oldest_release_first_after_the_blank_ones(make_any):
    pool = make_any(7)
    cached(pool, [2, 4, 1, 3])
    stats = pool.stats()
    assert (stats.blank, stats.evictable, stats.used) == (2, 4, 0)
    assert pool.blocks.alloc(3).tolist() == [5, 6, 2]
    assert [pool.blocks.alloc() for _ in range(3)] == [4, 1, 3]
    assert pool.blocks.drain_evicted().tolist() == [2, 4, 1, 3] and pool.stats().evictions == 4
    pool.blocks.free([1, 2])  # a block that was taken has no flags
    assert (pool.stats().blank, pool.stats().evictable) == (2, 0)


@pytest.mark.parametrize(("left", "order"), [(None, [4, 3, 2, 1]), (4, [4, 3, 2])], ids=["close", "truncate"])
def test_close_and_truncate_put_children_before_parents(make_pool, grow, left, order):
    pool = make_pool(8)
    handle = pool.open()
    grow(pool, handle, 16)
    pool.blocks.mark_cached(pool.table(handle))
    pool.close(handle) if left is None else pool.truncate(handle, left)
    assert pool.blocks.evict(2) == 2 and pool.blocks.evict(9) == len(order) - 2
    assert pool.blocks.drain_evicted().tolist() == order


@pytest.mark.parametrize("block", [1, 2, 3], ids=["oldest", "middle", "newest"])
def test_touch_unlinks_from_anywhere_in_the_lru_and_a_release_goes_to_the_new_end(make_any, block):
    pool = make_any(5)
    cached(pool, [1, 2, 3])
    pool.blocks.touch(block)
    assert pool.blocks.refcount(block) == 1 and pool.stats().evictable == 2
    pool.blocks.decref(block)
    assert pool.blocks.evict(5) == 3
    assert pool.blocks.drain_evicted().tolist() == [*({1, 2, 3} - {block}), block]


def test_touch_adds_a_raw_reference_to_each_block_of_a_batch(make_any):
    pool = make_any(6)
    cached(pool, [1, 2, 3, 4])
    pool.blocks.touch(np.array([4, 2], np.int32))
    pool.blocks.touch(4)
    assert pool.blocks.refcounts([1, 2, 3, 4]).tolist() == [0, 1, 0, 2]
    pool.blocks.decref(4)
    pool.blocks.decref(4)
    pool.blocks.evict(2)
    assert pool.blocks.drain_evicted().tolist() == [1, 3] and pool.stats().evictable == 1


def test_evicted_blocks_go_to_the_top_of_the_blank_stack(make_any):
    pool = make_any(6)
    cached(pool, [1, 2, 3])
    assert pool.blocks.evict(2) == 2  # 1 is cleared first, then 2: 2 lies on top
    stats = pool.stats()
    assert (stats.blank, stats.evictable) == (4, 1)
    assert pool.blocks.alloc(4).tolist() == [2, 1, 4, 5]


@pytest.mark.parametrize("n, cleared", [(0, 0), (1, 1), (3, 3), (10**6, 3)])
def test_evict_returns_how_many_it_cleared_and_drain_gives_them_once(make_any, n, cleared):
    pool = make_any(8)
    cached(pool, [1, 2, 3])
    assert pool.blocks.evict(n) == pool.stats().evictions == cleared
    dropped, again = pool.blocks.drain_evicted(), pool.blocks.drain_evicted()
    assert dropped.dtype == again.dtype == np.int32 and again.shape == (0,)
    assert dropped.tolist() == [1, 2, 3][:cleared]


def test_block_is_noted_as_dropped_once_however_often_it_is_taken(make_pool):
    pool = make_pool(2)
    cached(pool, [1])
    for _ in range(3):
        pool.blocks.free(pool.blocks.alloc(1))
    assert pool.blocks.drain_evicted().tolist() == [1]


def test_call_that_does_not_fit_the_state_of_a_block_is_refused(make_any, refused):
    pool = make_any(6)
    pool.blocks.alloc(2)
    pool.blocks.mark_cached(1)
    for call, block, error in (("mark_cached", 1, ValueError), ("touch", 5, ValueError)):
        with refused(pool, error, call, block):
            getattr(pool.blocks, call)([*{1, 2} - {block}, block])
    pool.blocks.free(1)
    with refused(pool, DoubleFree, "mark_cached", 1):
        pool.blocks.mark_cached(1)
    pool.blocks.evict(1)
    with refused(pool, ValueError, "touch", 1):
        pool.blocks.touch(1)
    assert pool.blocks.alloc() == 1  # the index does not know yet that it was evicted
    with refused(pool, ValueError, "mark_cached", 1):
        pool.blocks.mark_cached(1)
    pool.blocks.drain_evicted()
    pool.blocks.mark_cached(1)
    pool.blocks.free(1)
    assert pool.stats().evictable == 1


@pytest.mark.parametrize(
    "block, rest",
    [(None, [3, 2, 1]), (3, [2, 1]), (2, [3, 1]), (1, [3, 2])],
    ids=["no", "oldest", "middle", "newest"],
)
def test_committed_block_in_limbo_becomes_evictable_unless_it_was_touched(make_pool, make_plan, grow, block, rest):
    pool = make_pool(8)
    old, new = pool.open(), pool.open()
    grow(pool, old, 12)
    pool.blocks.mark_cached([1, 2, 3])
    plan = make_plan(pool)
    pool.step(plan, [new], 1)
    pool.close(old)  # limbo: 3, 2, 1
    if block is not None:
        pool.blocks.touch(block)
        assert pool.blocks.refcount(block) == 1
    assert (pool.stats().limbo, pool.stats().evictable) == (len(rest), 0) and pool.blocks.evict(1) == 0
    pool.done(plan)
    assert (pool.stats().limbo, pool.stats().evictable) == (0, len(rest))
    assert pool.blocks.evict(8) == len(rest)
    assert pool.blocks.drain_evicted().tolist() == rest


def test_revived_out_of_limbo_gets_a_new_fence_when_released_again(make_pool, make_plan, grow):
    pool = make_pool(8)
    old, new = pool.open(), pool.open()
    grow(pool, old, 4)
    pool.blocks.mark_cached(1)
    first, second = make_plan(pool), make_plan(pool)
    pool.step(first, [new], 1)
    pool.close(old)
    pool.blocks.touch(1)
    pool.step(second, [new], 1)
    pool.blocks.decref(1)  # fence of the second step now
    pool.done(first)
    assert pool.stats().limbo == 1
    pool.done(second)
    assert pool.stats().evictable == 1


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


def test_reset_notes_every_committed_block_as_dropped(make_pool):
    pool = make_pool(6)
    pool.blocks.alloc(3)
    pool.blocks.mark_cached([1, 3])
    pool.blocks.free(1)
    pool.reset()
    stats = pool.stats()
    assert (stats.blank, stats.evictable, stats.used) == (5, 0, 0)
    assert sorted(pool.blocks.drain_evicted().tolist()) == [1, 3]
    assert pool.blocks.alloc(5).tolist() == [1, 2, 3, 4, 5]
