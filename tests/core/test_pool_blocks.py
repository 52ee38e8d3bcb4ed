"""Block-level calls: alloc, incref, decref, free, refcount, committed blocks, and the order in which blocks are taken.

The fuzzer makes these calls in every arena, beside the plain model (`tests/verify`); here are the forms
of their arguments, limits, and numbers counted by hand.
"""

from array import array

import numpy as np
import pytest
from tests.verify._hooks import corrupt

from kvpool import Group, Pool
from kvpool.errors import DoubleFree, OutOfBlocks


def places(pool):
    stats = pool.stats()
    return stats.blank, stats.evictable, stats.limbo, stats.used


def test_alloc_fresh_pool_hands_out_lowest_ids_first(make_pool):
    pool = make_pool(8)
    first, some, none = pool.blocks.alloc(), pool.blocks.alloc(3), pool.blocks.alloc(0)
    assert first == 1 and type(first) is int
    assert some.dtype == none.dtype == np.int32 and (some.tolist(), none.tolist()) == ([2, 3, 4], [])
    assert not np.shares_memory(some, pool.blocks.alloc(2)) and some.tolist() == [2, 3, 4]
    assert places(pool) == (1, 0, 0, 6)


def test_alloc_out_fills_the_first_n_and_returns_the_array(make_any, refused):
    pool = make_any(8)
    out = np.full(9, -7, np.int32)
    assert pool.blocks.alloc(3, out=out) is out
    assert out.tolist() == [1, 2, 3] + [-7] * 6
    assert pool.blocks.alloc(1, out=(ints := array("i", [-7] * 2))) is ints and ints.tolist() == [4, -7]
    with refused(pool, TypeError, "alloc"):
        pool.blocks.alloc(1, out=array("q", [0] * 4))
    with refused(pool, OutOfBlocks, "alloc"):
        pool.blocks.alloc(5, out=out)
    assert out.tolist() == [1, 2, 3] + [-7] * 6


def test_references_of_a_block_end_at_their_limit(make_pool, refused):
    pool, limit = make_pool(8), 2**30
    block = pool.blocks.alloc()
    for word in ("refcount", "raw"):
        corrupt(pool, word, block, limit - 1)
    for call in (pool.blocks.incref, pool.blocks.touch):
        with refused(pool, OverflowError, call.__name__, limit):
            call(block)
    pool.blocks.decref(block)
    pool.blocks.incref(block)
    assert pool.blocks.refcount(block) == limit
    for word in ("refcount", "raw"):
        corrupt(pool, word, block, 1 - limit)


@pytest.mark.parametrize("n", [0, 2, 99, None])
def test_free_order_of_the_first_blocks_is_the_beginning_of_all(make_any, n):
    pool = make_any(8)
    assert pool.blocks.free_order(n).tolist() == list(range(1, 8))[:n]


@pytest.mark.parametrize(
    "ids",
    [[1, 2], (1, 2), np.array([1, 2], np.int32), [np.int64(1), np.int32(2)], 2, np.int32(2), np.int64(2), np.uint8(2)],
    ids=repr,
)
def test_ids_may_be_any_int_or_sequence_of_ints(make_any, ids):
    pool = make_any(4)
    pool.blocks.alloc(2)
    pool.blocks.incref(ids)
    assert [pool.blocks.refcount(1), pool.blocks.refcount(2)] == [1 + (np.ndim(ids) > 0), 2]
    pool.blocks.decref(ids)
    pool.blocks.free(ids)
    assert places(pool) == (3 - (np.ndim(ids) == 0), 0, 0, int(np.ndim(ids) == 0))


@pytest.mark.parametrize("call", ["incref", "decref", "free", "mark_cached", "touch"])
def test_empty_batch_of_ids_changes_nothing_but_is_legal(make_any, call):
    pool = make_any(4)
    pool.blocks.alloc(2)
    before = pool.fingerprint()
    getattr(pool.blocks, call)([])
    getattr(pool.blocks, call)(np.empty(0, np.int32))
    assert pool.fingerprint() == before


@pytest.mark.parametrize("call", ["incref", "decref", "free", "mark_cached", "touch"])
def test_duplicate_ids_in_one_batch_are_refused(make_any, refused, call):
    pool = make_any(8)
    pool.blocks.alloc(3)
    pool.blocks.incref([1, 2, 3])  # so that counts alone would allow to drop twice
    pool.blocks.mark_cached([1, 2, 3])
    with refused(pool, ValueError, call, 3):
        getattr(pool.blocks, call)([3, 1, 3])


def test_raw_references_are_counted_apart_from_those_of_a_sequence(make_any, refused):
    pool = make_any(8)
    handle = pool.open(4)
    block = int(pool.table(handle, 0)[0, 0])
    for call in ("decref", "free"):
        with refused(pool, DoubleFree, call, block):
            getattr(pool.blocks, call)(block)
    pool.blocks.incref(block)
    assert pool.blocks.refcount(block) == 2
    with refused(pool, ValueError, "free", block):  # the raw reference is there, but the block is shared
        pool.blocks.free(block)
    pool.close(handle)
    assert pool.blocks.refcount(block) == pool.stats().used == 1
    pool.blocks.incref(block)
    with refused(pool, ValueError, "free", block):
        pool.blocks.free(block)
    pool.blocks.decref(block)
    pool.blocks.free(block)
    assert pool.blocks.refcount(block) == 0 and places(pool) == (7, 0, 0, 0)


def test_arena_that_is_not_there_is_refused():
    groups = [Group.full(), Group.full(arena=1, num_blocks=9), Group.state(7)]
    for pool, count in ((Pool(8, 4), 1), (Pool(12, 4, groups=groups), 3)):
        with pytest.raises(ValueError, match=rf"\[blocks\] there is no arena {count}, the pool has {count}"):
            pool.blocks.arena(count)
        with pytest.raises((ValueError, OverflowError)):
            pool.blocks.arena(-1)
        with pytest.raises(TypeError):
            pool.blocks.arena("1")
        assert repr(pool.blocks.arena(0)) == repr(pool.blocks)


# --- committed blocks: LRU order, revival, and the list of dropped blocks ----------------------------------


def cached(pool, order):
    """Blocks 1..n, committed and released in `order`: the LRU list, oldest first."""
    pool.blocks.alloc(len(order))
    pool.blocks.mark_cached(order)
    pool.blocks.free(order)


@pytest.mark.parametrize("n, cleared", [(0, 0), (2, 2), (10**6, 3)])
def test_evict_returns_how_many_it_cleared_and_drain_gives_them_once(make_any, n, cleared):
    pool = make_any(6)
    cached(pool, [1, 2, 3])
    assert pool.blocks.evict(n) == pool.stats().evictions == cleared
    dropped, again = pool.blocks.drain_evicted(), pool.blocks.drain_evicted()
    assert dropped.dtype == again.dtype == np.int32 and again.shape == (0,)
    assert dropped.tolist() == [1, 2, 3][:cleared]
    # Each goes to the top of the blank stack; however often it is taken, it is told of once.
    assert pool.blocks.alloc(cleared + 2).tolist() == [*[1, 2, 3][:cleared][::-1], 4, 5]
    pool.blocks.free([4, 5])
    assert pool.blocks.drain_evicted().tolist() == []


def test_alloc_of_one_block_takes_the_oldest_cached_one_once_none_is_blank(make_any, refused):
    pool = make_any(4)
    cached(pool, [2, 1])
    assert [pool.blocks.alloc() for _ in range(3)] == [3, 2, 1]
    indexed = make_any(2, prefix_cache=True)
    indexed.blocks.alloc()
    for full in (pool, indexed):
        with refused(full, OutOfBlocks, "alloc"):
            full.blocks.alloc()


def test_hit_raises_the_peak(make_any):
    pool = make_any(8)
    cached(pool, [1, 2])
    pool.blocks.alloc()
    pool.blocks.touch([1, 2])
    assert pool.stats().peak_used == pool.stats().used == 3
