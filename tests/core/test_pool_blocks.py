"""Block-level calls: alloc, incref, decref, free, refcount, and the order in which blocks are handed out."""

import itertools
from array import array

import numpy as np
import pytest

from kvpool.errors import DoubleFree, OutOfBlocks
from tests.verify._hooks import corrupt


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


@pytest.mark.parametrize("reserved", [0, 1, 3])
def test_alloc_reserved_blocks_are_never_handed_out(make_pool, reserved):
    pool = make_pool(6, reserved_blocks=reserved)
    assert pool.blocks.alloc(6 - reserved).tolist() == list(range(reserved, 6))
    with pytest.raises(OutOfBlocks):
        pool.blocks.alloc()


def test_alloc_out_fills_the_first_n_and_returns_the_array(make_any, refused):
    pool = make_any(8)
    out = np.full(9, -7, np.int32)
    assert pool.blocks.alloc(3, out=out) is out
    assert out.tolist() == [1, 2, 3] + [-7] * 6
    with refused(pool, OutOfBlocks, "alloc"):
        pool.blocks.alloc(5, out=out)
    assert out.tolist() == [1, 2, 3] + [-7] * 6


def test_alloc_out_fills_any_buffer_of_int32(make_any, refused):
    pool, out = make_any(8), array("i", [-7] * 4)
    assert pool.blocks.alloc(3, out=out) is out and out.tolist() == [1, 2, 3, -7]
    with refused(pool, TypeError, "alloc"):
        pool.blocks.alloc(3, out=array("q", [0] * 4))


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


@pytest.mark.parametrize("call", ["free", "decref"])
def test_released_blocks_are_taken_the_last_one_first(make_any, call):
    pool = make_any(8)
    pool.blocks.alloc(5)
    getattr(pool.blocks, call)([1, 4, 3])
    getattr(pool.blocks, call)(2)
    getattr(pool.blocks, call)(5)
    assert pool.blocks.alloc(6).tolist() == [5, 2, 3, 4, 1, 6]


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


def test_reserved_ids_are_value_errors(make_any, refused):
    pool = make_any(8, reserved_blocks=2)
    for call, block in itertools.product(("incref", "decref", "free", "refcount"), (0, 1)):
        with refused(pool, ValueError, call, block):
            getattr(pool.blocks, call)(block)


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


def test_alloc_more_than_there_are_is_refused_with_the_numbers(make_any, refused):
    pool = make_any(6)
    pool.blocks.alloc(2)
    with refused(pool, OutOfBlocks, "alloc", 4) as caught:
        pool.blocks.alloc(4)
    error = caught.value
    assert (error.needed, error.short_by, error.row, error.handle) == (4, 1, -1, -1)
    assert (error.blank, error.evictable, error.limbo) == (3, 0, 0)
    assert pool.blocks.alloc(3).tolist() == [3, 4, 5]


@pytest.mark.parametrize("block_size", [1, 2, 3, 7, 16, 31, 256, 2**20])
def test_any_block_size_is_legal(make_pool, block_size):
    pool = make_pool(5, block_size)
    handle = pool.open(block_size + 1)
    assert pool.table(handle).tolist() == [1, 2]
    assert pool.capacity(handle) == 2 * block_size
