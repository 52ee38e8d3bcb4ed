"""Block-level calls: alloc, incref, decref, free, refcount, and the order in which blocks are handed out."""

import numpy as np
import pytest

from kvpool.errors import OutOfBlocks


def places(pool):
    stats = pool.stats()
    return stats.blank, stats.evictable, stats.limbo, stats.used


def test_alloc_fresh_pool_hands_out_lowest_ids_first(make_pool):
    pool = make_pool(8)
    first = pool.blocks.alloc()
    assert first == 1 and type(first) is int
    ids = pool.blocks.alloc(3)
    assert ids.dtype == np.int32 and ids.tolist() == [2, 3, 4]
    assert places(pool) == (3, 0, 0, 4)


@pytest.mark.parametrize("reserved", [0, 1, 3])
def test_alloc_reserved_blocks_are_never_handed_out(make_pool, reserved):
    pool = make_pool(6, reserved_blocks=reserved)
    assert pool.blocks.alloc(6 - reserved).tolist() == list(range(reserved, 6))
    with pytest.raises(OutOfBlocks):
        pool.blocks.alloc()


def test_alloc_out_fills_the_first_n_and_returns_the_array(make_pool):
    pool = make_pool(8)
    out = np.full(5, -7, np.int32)
    assert pool.blocks.alloc(3, out=out) is out
    assert out.tolist() == [1, 2, 3, -7, -7]


def test_free_batch_releases_in_the_order_given(make_pool):
    pool = make_pool(8)
    pool.blocks.alloc(4)
    pool.blocks.free([1, 4, 3])
    assert pool.blocks.alloc(4).tolist() == [3, 4, 1, 5]


@pytest.mark.parametrize(
    "ids",
    [[1, 2], (1, 2), np.array([1, 2], np.int32), [np.int64(1), np.int32(2)]],
    ids=["list", "tuple", "int32", "np"],
)
def test_ids_may_be_any_sequence_of_ints(make_pool, ids):
    pool = make_pool(4)
    pool.blocks.alloc(2)
    pool.blocks.incref(ids)
    assert [pool.blocks.refcount(1), pool.blocks.refcount(2)] == [2, 2]
    pool.blocks.decref(ids)
    pool.blocks.free(ids)
    assert places(pool) == (3, 0, 0, 0)


@pytest.mark.parametrize("block", [2, np.int32(2), np.int64(2), np.uint8(2)])
def test_id_may_be_any_int(make_pool, block):
    pool = make_pool(4)
    pool.blocks.alloc(2)
    pool.blocks.incref(block)
    assert pool.blocks.refcount(block) == 2
    pool.blocks.decref(block)
    pool.blocks.free(block)
    assert pool.blocks.refcount(block) == 0


def test_refcount_follows_incref_and_decref(make_pool):
    pool = make_pool(4)
    pool.blocks.alloc(2)
    assert [pool.blocks.refcount(b) for b in (1, 2, 3)] == [1, 1, 0]
    pool.blocks.incref([1, 2])
    pool.blocks.incref(1)
    assert [pool.blocks.refcount(b) for b in (1, 2, 3)] == [3, 2, 0]
    pool.blocks.decref([1, 2])
    assert [pool.blocks.refcount(b) for b in (1, 2, 3)] == [2, 1, 0]
    assert places(pool) == (1, 0, 0, 2)


@pytest.mark.parametrize("call", ["incref", "decref", "free", "mark_cached", "touch"])
def test_duplicate_ids_in_one_batch_are_refused(make_pool, refused, call):
    pool = make_pool(8)
    pool.blocks.alloc(3)
    pool.blocks.incref([1, 2, 3])  # so that counts alone would allow to drop twice
    pool.blocks.mark_cached([1, 2, 3])
    with refused(pool, ValueError, call, 3):
        getattr(pool.blocks, call)([3, 1, 3])


def test_free_of_a_shared_block_is_refused(make_pool, refused):
    pool = make_pool(4)
    block = pool.blocks.alloc()
    pool.blocks.incref(block)
    with refused(pool, ValueError, "free", block):
        pool.blocks.free(block)
    pool.blocks.decref(block)
    pool.blocks.free(block)
    assert pool.blocks.refcount(block) == 0


def test_alloc_more_than_there_are_is_refused_with_the_numbers(make_pool, refused):
    pool = make_pool(6)
    pool.blocks.alloc(2)
    with refused(pool, OutOfBlocks, "alloc", 4) as caught:
        pool.blocks.alloc(4)
    error = caught.value
    assert (error.needed, error.short_by, error.row, error.handle) == (4, 1, -1, -1)
    assert (error.blank, error.evictable, error.limbo) == (3, 0, 0)
    assert pool.blocks.alloc(3).tolist() == [3, 4, 5]
