"""Block-level calls: alloc, incref, decref, free, refcount, and the order in which blocks are handed out."""

import numpy as np
import pytest

from kvpool.errors import DoubleFree, OutOfBlocks


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


def test_alloc_zero_returns_empty_array(make_pool):
    pool = make_pool(4)
    ids = pool.blocks.alloc(0)
    assert ids.shape == (0,) and ids.dtype == np.int32
    assert places(pool) == (3, 0, 0, 0)


def test_alloc_out_fills_the_first_n_and_returns_the_array(make_pool):
    pool = make_pool(8)
    out = np.full(5, -7, np.int32)
    assert pool.blocks.alloc(3, out=out) is out
    assert out.tolist() == [1, 2, 3, -7, -7]


def test_alloc_twice_returns_arrays_that_do_not_share_memory(make_pool):
    pool = make_pool(8)
    first = pool.blocks.alloc(2)
    second = pool.blocks.alloc(2)
    assert not np.shares_memory(first, second)
    assert first.tolist() == [1, 2] and second.tolist() == [3, 4]


def test_free_last_released_block_is_the_next_one_taken(make_pool):
    pool = make_pool(8)
    pool.blocks.alloc(4)
    pool.blocks.free(2)
    pool.blocks.free(4)
    assert [pool.blocks.alloc(), pool.blocks.alloc(), pool.blocks.alloc()] == [4, 2, 5]


def test_free_batch_releases_in_the_order_given(make_pool):
    pool = make_pool(8)
    pool.blocks.alloc(4)
    pool.blocks.free([1, 4, 3])
    assert pool.blocks.alloc(4).tolist() == [3, 4, 1, 5]


def test_decref_batch_releases_in_the_order_given(make_pool):
    pool = make_pool(8)
    pool.blocks.alloc(3)
    pool.blocks.decref([2, 3, 1])
    assert pool.blocks.alloc(3).tolist() == [1, 3, 2]


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


@pytest.mark.parametrize("call", ["incref", "decref", "free", "mark_cached", "touch"])
def test_empty_batch_of_ids_changes_nothing_but_is_legal(make_pool, call):
    pool = make_pool(4)
    pool.blocks.alloc(2)
    before = pool.fingerprint()
    getattr(pool.blocks, call)([])
    getattr(pool.blocks, call)(np.empty(0, np.int32))
    assert pool.fingerprint() == before


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


def test_decref_below_zero_raises_and_does_not_clamp(make_pool, refused):
    pool = make_pool(4)
    block = pool.blocks.alloc()
    pool.blocks.decref(block)
    for _ in range(3):
        with refused(pool, DoubleFree, "decref", block):
            pool.blocks.decref(block)
    assert pool.blocks.refcount(block) == 0
    assert pool.blocks.alloc() == block and pool.blocks.refcount(block) == 1


@pytest.mark.parametrize("call", ["incref", "decref", "free", "mark_cached"])
def test_block_without_reference_is_double_free(make_pool, refused, call):
    pool = make_pool(4)
    with refused(pool, DoubleFree, call, 2):
        getattr(pool.blocks, call)(2)


@pytest.mark.parametrize("call", ["incref", "decref", "free", "mark_cached"])
def test_one_bad_block_in_a_batch_leaves_the_others_alone(make_pool, refused, call):
    pool = make_pool(8)
    pool.blocks.alloc(3)
    with refused(pool, DoubleFree, call, 5):
        getattr(pool.blocks, call)([1, 2, 5, 3])


@pytest.mark.parametrize("call", ["incref", "decref", "free", "mark_cached", "touch"])
def test_duplicate_ids_in_one_batch_are_refused(make_pool, refused, call):
    pool = make_pool(8)
    pool.blocks.alloc(3)
    pool.blocks.incref([1, 2, 3])  # so that counts alone would allow to drop twice
    pool.blocks.mark_cached([1, 2, 3])
    with refused(pool, ValueError, call, 3):
        getattr(pool.blocks, call)([3, 1, 3])


@pytest.mark.parametrize("call", ["incref", "decref", "free", "mark_cached", "touch", "refcount"])
@pytest.mark.parametrize("block", [-1, 8, 9, 2**31 - 1, -(2**31)])
def test_id_outside_the_pool_is_an_index_error(make_pool, refused, call, block):
    pool = make_pool(8)
    with refused(pool, IndexError, call, block):
        getattr(pool.blocks, call)(block)


@pytest.mark.parametrize("call", ["incref", "decref", "free", "refcount"])
def test_reserved_id_is_a_value_error(make_pool, refused, call):
    pool = make_pool(8, reserved_blocks=2)
    for block in (0, 1):
        with refused(pool, ValueError, call, block):
            getattr(pool.blocks, call)(block)


def test_free_of_a_shared_block_is_refused(make_pool, refused):
    pool = make_pool(4)
    block = pool.blocks.alloc()
    pool.blocks.incref(block)
    with refused(pool, ValueError, "free", block):
        pool.blocks.free(block)
    pool.blocks.decref(block)
    pool.blocks.free(block)
    assert pool.blocks.refcount(block) == 0


def test_decref_cannot_eat_the_reference_of_a_sequence(make_pool, refused):
    pool = make_pool(4)
    block = int(pool.table(pool.open(4))[0])
    assert pool.blocks.refcount(block) == 1
    with refused(pool, DoubleFree, "decref", block):
        pool.blocks.decref(block)
    with refused(pool, DoubleFree, "free", block):
        pool.blocks.free(block)
    pool.blocks.incref(block)
    with refused(pool, ValueError, "free", block):  # the raw reference is there, but the block is shared
        pool.blocks.free(block)
    pool.blocks.decref(block)
    with refused(pool, DoubleFree, "decref", block):
        pool.blocks.decref(block)


def test_raw_reference_keeps_a_block_alive_after_its_sequence(make_pool):
    pool = make_pool(4)
    handle = pool.open(4)
    block = int(pool.table(handle)[0])
    pool.blocks.incref(block)
    pool.close(handle)
    assert pool.blocks.refcount(block) == 1
    assert places(pool) == (2, 0, 0, 1)
    pool.blocks.free(block)
    assert places(pool) == (3, 0, 0, 0)


def test_alloc_more_than_there_are_is_refused_with_the_numbers(make_pool, refused):
    pool = make_pool(6)
    pool.blocks.alloc(2)
    with refused(pool, OutOfBlocks, "alloc", 4) as caught:
        pool.blocks.alloc(4)
    error = caught.value
    assert (error.needed, error.short_by, error.row, error.handle) == (4, 1, -1, -1)
    assert (error.blank, error.evictable, error.limbo) == (3, 0, 0)
    assert pool.blocks.alloc(3).tolist() == [3, 4, 5]


def test_alloc_refused_leaves_out_untouched(make_pool, refused):
    pool = make_pool(4)
    out = np.full(8, -7, np.int32)
    with refused(pool, OutOfBlocks, "alloc"):
        pool.blocks.alloc(4, out=out)
    assert out.tolist() == [-7] * 8


@pytest.mark.parametrize("block_size", [1, 2, 3, 7, 16, 31, 256, 2**20])
def test_any_block_size_is_legal(make_pool, block_size):
    pool = make_pool(5, block_size)
    handle = pool.open(block_size + 1)
    assert pool.table(handle).tolist() == [1, 2]
    assert pool.capacity(handle) == 2 * block_size


def test_alloc_and_free_many_times_hands_out_the_same_blocks(make_pool):
    pool = make_pool(64)
    for size in range(1, 64):
        ids = pool.blocks.alloc(size)
        assert ids.tolist() == list(range(1, size + 1))
        pool.blocks.free(ids[::-1].copy())
        assert places(pool) == (63, 0, 0, 0)
