"""Every number of stats() and of the refcount histogram, in scenes small enough to count by hand."""

import numpy as np
import pytest


def test_fresh_pool(make_pool):
    stats = make_pool(16, 4, reserved_blocks=2).stats()
    assert {name: value for name, value in stats._asdict().items() if value} == {
        "num_blocks": 16, "reserved": 2, "blank": 14,
    }  # fmt: skip


def test_one_of_everything(make_pool, make_plan, grow):
    """A fork writes, one sequence is closed in flight, two blocks are cached: each block is counted once."""
    pool = make_pool(16, 4)
    cached = pool.blocks.alloc(2)  # 1 2
    pool.blocks.mark_cached(cached)
    pool.blocks.free(cached)
    parent = pool.open()
    grow(pool, parent, 6)  # 3 4
    child = int(pool.fork(parent)[0])
    old = pool.open(8)  # 5 6
    plan = make_plan(pool)
    pool.step(plan, [child], 3)  # copies two tokens of 4 into 7, appends 8
    pool.close(old)
    stats = pool.stats()
    assert (stats.num_blocks, stats.reserved) == (16, 1)
    assert (stats.blank, stats.evictable, stats.limbo, stats.used) == (7, 2, 2, 4)
    assert stats.free + stats.limbo + stats.used == 15
    assert stats.shared == 1  # block 3
    assert (stats.sequences, stats.pending) == (2, 1)
    assert (stats.cow_copies, stats.cow_tokens) == (1, 2)
    assert (stats.tokens, stats.capacity) == (6 + 9, 8 + 12)
    assert stats.fragmentation == pytest.approx(1 - 15 / 20, abs=0)
    assert stats.allocs == 2 + 2 + 2 + 2
    assert stats.evictions == 0
    assert stats.peak_used == 6  # 3 4 5 6 7 8


def test_fragmentation_counts_reserved_blocks_as_capacity_and_shared_ones_per_sequence(make_pool, grow):
    pool = make_pool(16, 4)
    handle = pool.open(8)
    assert pool.stats().fragmentation == 1.0
    grow(pool, handle, 6)
    assert pool.stats().fragmentation == 0.25
    children = pool.fork(handle, 3)
    stats = pool.stats()
    assert (stats.tokens, stats.capacity, stats.used, stats.shared) == (24, 32, 2, 2)
    pool.close([handle, *children])
    assert (pool.stats().fragmentation, pool.stats().tokens, pool.stats().capacity) == (0.0, 0, 0)


def test_peak_used_is_the_most_ever_used_and_counts_blocks_that_come_back_to_life(make_any):
    pool = make_any(16, 4)
    pool.blocks.free(pool.blocks.alloc(5))
    ids = pool.blocks.alloc(4)
    pool.blocks.mark_cached(ids)
    pool.blocks.free(ids)
    pool.blocks.alloc(3)
    assert (pool.stats().peak_used, pool.stats().used) == (5, 3)
    pool.blocks.touch(ids)
    assert pool.stats().peak_used == 7
    pool.reset()
    stats = pool.stats()
    assert (stats.allocs, stats.peak_used, stats.used) == (12, 7, 0)  # counters of use survive


def test_refused_calls_count_nothing(make_any):
    pool = make_any(5, 4)
    before = pool.stats()
    for call in (
        lambda: pool.blocks.alloc(5),
        lambda: pool.open(20),
        lambda: pool.blocks.free(1),
        lambda: pool.close(3),
    ):
        with pytest.raises(Exception, match=r"^\[[a-z]+\] "):
            call()
    assert pool.stats() == before


def test_histogram_counts_unreserved_blocks_by_refcount(make_pool, grow):
    pool = make_pool(10, 4, reserved_blocks=2)
    parent = pool.open()
    grow(pool, parent, 6)
    pool.fork(parent, 3)
    pool.blocks.alloc(2)
    histogram = pool.blocks.refcount_histogram()
    assert histogram.dtype == np.int64
    assert histogram.tolist() == [4, 2, 0, 0, 2]


def test_held_block_is_used_though_its_refcount_is_zero(make_pool, make_plan):
    pool = make_pool(8, 4)
    handle = pool.open(4)
    pool.blocks.incref(1)
    plan = make_plan(pool)
    pool.step(plan, [handle], 1)  # replaced without a copy: nothing in it yet
    assert (pool.stats().cow_copies, pool.stats().cow_tokens) == (0, 0)
    pool.blocks.free(1)
    assert pool.blocks.refcount_histogram().tolist() == [6, 1]
    assert (pool.stats().used, pool.stats().blank) == (2, 5)
