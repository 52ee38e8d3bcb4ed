"""The seam of the prefix index: committed blocks, LRU order, revival, and the list of dropped blocks."""

import numpy as np
import pytest

from kvpool.errors import DoubleFree


def cached(pool, order):
    """Blocks 1..n, committed and released in `order`: the LRU list, oldest first."""
    pool.blocks.alloc(len(order))
    pool.blocks.mark_cached(order)
    pool.blocks.free(order)


def test_committed_block_without_reference_is_evictable_not_free(make_pool):
    pool = make_pool(6)
    pool.blocks.alloc(2)
    pool.blocks.mark_cached(1)
    pool.blocks.free([1, 2])
    stats = pool.stats()
    assert (stats.blank, stats.evictable, stats.used) == (4, 1, 0)


def test_eviction_takes_the_oldest_release_first(make_pool):
    pool = make_pool(5)
    cached(pool, [2, 4, 1, 3])
    assert [pool.blocks.alloc() for _ in range(4)] == [2, 4, 1, 3]
    assert pool.blocks.drain_evicted().tolist() == [2, 4, 1, 3]


def test_blank_blocks_are_taken_before_cached_ones(make_pool):
    pool = make_pool(6)
    cached(pool, [1, 2])
    assert pool.blocks.alloc(4).tolist() == [3, 4, 5, 1]
    assert pool.blocks.drain_evicted().tolist() == [1]


def test_alloc_counts_cached_blocks_as_available(make_pool):
    pool = make_pool(5)
    cached(pool, [1, 2, 3, 4])
    assert pool.blocks.alloc(4).tolist() == [1, 2, 3, 4]
    assert pool.stats().evictions == 4


def test_close_puts_children_before_parents(make_pool, grow):
    pool = make_pool(8)
    handle = pool.open()
    grow(pool, handle, 12)
    assert pool.table(handle).tolist() == [1, 2, 3]
    pool.blocks.mark_cached([1, 2, 3])
    pool.close(handle)
    assert pool.blocks.evict(2) == 2
    assert pool.blocks.drain_evicted().tolist() == [3, 2]
    assert pool.blocks.evict(9) == 1
    assert pool.blocks.drain_evicted().tolist() == [1]


def test_truncate_puts_children_before_parents(make_pool, grow):
    pool = make_pool(8)
    handle = pool.open()
    grow(pool, handle, 16)
    pool.blocks.mark_cached([1, 2, 3, 4])
    pool.truncate(handle, 4)
    pool.blocks.evict(3)
    assert pool.blocks.drain_evicted().tolist() == [4, 3, 2]


def test_released_again_goes_to_the_new_end(make_pool):
    pool = make_pool(5)
    cached(pool, [1, 2, 3])
    pool.blocks.touch(1)
    pool.blocks.decref(1)
    pool.blocks.evict(3)
    assert pool.blocks.drain_evicted().tolist() == [2, 3, 1]


@pytest.mark.parametrize("block, rest", [(1, [2, 3]), (2, [1, 3]), (3, [1, 2])], ids=["oldest", "middle", "newest"])
def test_touch_unlinks_from_anywhere_in_the_lru(make_pool, block, rest):
    pool = make_pool(5)
    cached(pool, [1, 2, 3])
    pool.blocks.touch(block)
    assert pool.blocks.refcount(block) == 1
    assert pool.stats().evictable == 2
    assert pool.blocks.evict(5) == 2
    assert pool.blocks.drain_evicted().tolist() == rest
    pool.blocks.decref(block)
    assert pool.stats().evictable == 1  # still committed


def test_touch_of_a_used_committed_block_adds_a_raw_reference(make_pool):
    pool = make_pool(4)
    block = pool.blocks.alloc()
    pool.blocks.mark_cached(block)
    pool.blocks.touch(block)
    assert pool.blocks.refcount(block) == 2
    pool.blocks.decref(block)
    pool.blocks.decref(block)
    assert pool.stats().evictable == 1


def test_touch_batch_in_one_call(make_pool):
    pool = make_pool(6)
    cached(pool, [1, 2, 3, 4])
    pool.blocks.touch(np.array([4, 2], np.int32))
    assert [pool.blocks.refcount(b) for b in (1, 2, 3, 4)] == [0, 1, 0, 1]
    pool.blocks.evict(2)
    assert pool.blocks.drain_evicted().tolist() == [1, 3]


def test_touch_refuses_blank_blocks(make_pool, refused):
    pool = make_pool(6)
    cached(pool, [1])
    with refused(pool, ValueError, "touch", 5):
        pool.blocks.touch([1, 5])


def test_touch_after_eviction_is_refused(make_pool, refused):
    pool = make_pool(4)
    cached(pool, [1])
    pool.blocks.evict(1)
    with refused(pool, ValueError, "touch", 1):
        pool.blocks.touch(1)


def test_evicted_blocks_go_to_the_top_of_the_blank_stack(make_pool):
    pool = make_pool(6)
    cached(pool, [1, 2, 3])
    assert pool.blocks.evict(2) == 2  # 1 is cleared first, then 2: 2 lies on top
    stats = pool.stats()
    assert (stats.blank, stats.evictable) == (4, 1)
    assert pool.blocks.alloc(4).tolist() == [2, 1, 4, 5]


@pytest.mark.parametrize("n, cleared", [(0, 0), (1, 1), (3, 3), (4, 3), (10**6, 3)])
def test_evict_returns_how_many_it_cleared(make_pool, n, cleared):
    pool = make_pool(8)
    cached(pool, [1, 2, 3])
    assert pool.blocks.evict(n) == cleared
    assert pool.blocks.drain_evicted().tolist() == [1, 2, 3][:cleared]
    assert pool.stats().evictions == cleared


def test_drain_evicted_empties_the_list(make_pool):
    pool = make_pool(4)
    cached(pool, [1, 2])
    pool.blocks.evict(2)
    dropped = pool.blocks.drain_evicted()
    assert dropped.dtype == np.int32 and dropped.tolist() == [1, 2]
    again = pool.blocks.drain_evicted()
    assert again.dtype == np.int32 and again.shape == (0,)
    assert dropped.tolist() == [1, 2]  # a copy of the caller's own


def test_taken_block_has_no_flags(make_pool):
    pool = make_pool(3)
    cached(pool, [1, 2])
    assert pool.blocks.alloc(2).tolist() == [1, 2]
    pool.blocks.free([1, 2])
    stats = pool.stats()
    assert (stats.blank, stats.evictable) == (2, 0)


def test_block_is_noted_as_dropped_once_however_often_it_is_taken(make_pool):
    pool = make_pool(2)
    cached(pool, [1])
    for _ in range(3):
        pool.blocks.free(pool.blocks.alloc(1))
    assert pool.blocks.drain_evicted().tolist() == [1]


def test_mark_cached_refuses_a_block_that_is_marked(make_pool, refused):
    pool = make_pool(4)
    pool.blocks.alloc(2)
    pool.blocks.mark_cached(1)
    with refused(pool, ValueError, "mark_cached", 1):
        pool.blocks.mark_cached([2, 1])


def test_mark_cached_refuses_a_cached_block(make_pool, refused):
    pool = make_pool(4)
    cached(pool, [1])
    with refused(pool, DoubleFree, "mark_cached", 1):
        pool.blocks.mark_cached(1)


def test_mark_cached_refuses_a_block_whose_drop_was_not_drained(make_pool, refused):
    pool = make_pool(2)
    cached(pool, [1])
    assert pool.blocks.alloc() == 1  # evicts it: the index does not know yet
    with refused(pool, ValueError, "mark_cached", 1):
        pool.blocks.mark_cached(1)
    pool.blocks.drain_evicted()
    pool.blocks.mark_cached(1)
    pool.blocks.free(1)
    assert pool.stats().evictable == 1


def test_committed_block_in_limbo_waits_then_becomes_evictable(make_pool, make_plan, grow):
    pool = make_pool(8)
    old, new = pool.open(), pool.open()
    grow(pool, old, 4)
    pool.blocks.mark_cached(1)
    plan = make_plan(pool)
    pool.step(plan, [new], 1)
    pool.close(old)
    stats = pool.stats()
    assert (stats.limbo, stats.evictable) == (1, 0)
    assert pool.blocks.evict(1) == 0
    pool.done(plan)
    stats = pool.stats()
    assert (stats.limbo, stats.evictable) == (0, 1)


@pytest.mark.parametrize("block, rest", [(3, [2, 1]), (2, [3, 1]), (1, [3, 2])], ids=["oldest", "middle", "newest"])
def test_touch_unlinks_from_anywhere_in_limbo(make_pool, make_plan, grow, block, rest):
    pool = make_pool(8)
    old, new = pool.open(), pool.open()
    grow(pool, old, 12)
    pool.blocks.mark_cached([1, 2, 3])
    plan = make_plan(pool)
    pool.step(plan, [new], 1)
    pool.close(old)  # limbo: 3, 2, 1
    pool.blocks.touch(block)
    assert pool.blocks.refcount(block) == 1 and pool.stats().limbo == 2
    pool.done(plan)
    assert pool.blocks.refcount(block) == 1
    assert pool.blocks.evict(8) == 2
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


def test_write_after_truncate_to_a_block_boundary_copies_nothing(make_pool, make_plan, grow):
    pool = make_pool(8)
    handle = pool.open()
    grow(pool, handle, 8)
    pool.blocks.mark_cached([1, 2])
    pool.truncate(handle, 4)
    plan = make_plan(pool)
    pool.step(plan, [handle], 1)
    assert plan.copies.shape == (0, 3)
    assert pool.table(handle).tolist() == [1, 3]  # 2 is cached, 3 was blank
    assert pool.stats().evictable == 1


def test_write_into_a_committed_block_without_valid_tokens_replaces_without_copy(make_pool, make_plan):
    pool = make_pool(8)
    handle = pool.open(8)
    pool.blocks.mark_cached(1)
    plan = make_plan(pool)
    pool.step(plan, [handle], 1)
    assert plan.copies.shape == (0, 3)
    assert pool.table(handle).tolist() == [3, 2]
    pool.done(plan)
    assert pool.stats().evictable == 1


def test_reading_a_committed_block_replaces_nothing(make_pool, make_plan, grow):
    pool = make_pool(8)
    handle = pool.open()
    grow(pool, handle, 7)
    pool.blocks.mark_cached([1, 2])
    plan = make_plan(pool)
    pool.step(plan, [handle], 0)
    assert plan.copies.shape == (0, 3) and pool.table(handle).tolist() == [1, 2]


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
