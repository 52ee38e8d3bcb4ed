"""Sequences: open, fork, truncate, close."""

import numpy as np
import pytest

from kvpool.errors import OutOfBlocks, OutOfSequences


def slot(handle):
    return handle & 0xFFFFF


# --- open -------------------------------------------------------------------------------------------------


def test_open_returns_an_int_of_tag_generation_and_slot(make_any):
    pool = make_any()
    handles = [pool.open() for _ in range(3)]
    assert all(type(h) is int and 0 <= h < 2**63 for h in handles)
    assert [slot(h) for h in handles] == [0, 1, 2]
    assert len({h >> 52 for h in handles}) == 1
    assert 1 <= handles[0] >> 52 <= 2047


def test_table_returns_a_copy(make_any):
    pool = make_any()
    handle = pool.open(8)
    table = pool.table(handle, 0).ravel()
    table[:] = 99
    assert pool.table(handle, 0).ravel().tolist() == [1, 2]


def test_open_that_is_refused_takes_no_slot(make_any, refused):
    pool = make_any(4, 4, max_blocks_per_seq=9, max_seqs=2)
    with refused(pool, OutOfBlocks, "open") as caught:
        pool.open(13)
    assert (caught.value.row, caught.value.handle, caught.value.blank) == (-1, -1, 3)
    first, _ = pool.open(), pool.open()
    with refused(pool, OutOfSequences, "open", 2):
        pool.open()
    pool.close(first)
    assert slot(first) == slot(pool.open()) == 0


# --- fork -------------------------------------------------------------------------------------------------


def test_fork_needs_slots_and_no_block_and_outlives_its_parent(make_any, grow, refused):
    pool = make_any(8, max_seqs=4)
    parent = pool.open()
    grow(pool, parent, 8)
    pool.blocks.alloc(pool.stats().blank)
    used, tables = pool.stats().used, pool.table(parent, 0).ravel().tolist()
    with refused(pool, OutOfSequences, "fork", 4):
        pool.fork(parent, 4)
    assert pool.fork(parent, 0).tolist() == [] and pool.stats().shared == 0
    children = pool.fork(parent, 3)
    pool.close(parent)
    assert all(pool.table(child, 0).ravel().tolist() == tables for child in children)
    pool.close(children[:2])
    assert pool.stats().used == used and pool.stats().shared == 0
    pool.close(children[2:])
    assert pool.stats().used < used


# --- truncate ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[3, 8, 2], np.array([3, 8, 2], np.int32), np.array([3, 8, 2]), 5], ids=repr)
def test_truncate_of_a_batch_takes_a_length_per_row_or_one_for_all(make_any, grow, lengths):
    pool = make_any()
    handles = [pool.open() for _ in range(3)]
    for handle in handles:
        grow(pool, handle, 8)
    pool.truncate(np.array(handles), lengths)
    left = [5, 5, 5] if np.ndim(lengths) == 0 else list(lengths)
    assert [pool.num_tokens(h) for h in handles] == left
    assert [len(pool.table(h, 0).ravel()) for h in handles] == [-(-n // 4) for n in left]


@pytest.mark.parametrize("length", [-1, 9, 2**31, 2**62])
def test_truncate_outside_the_sequence_is_refused(make_any, grow, refused, length):
    pool = make_any()
    a, b = pool.open(), pool.open()
    grow(pool, a, 8)
    grow(pool, b, 8)
    with refused(pool, ValueError, "truncate", length):
        pool.truncate(b, length)
    with refused(pool, ValueError, "truncate", length):
        pool.truncate([a, b], [4, length])


# --- close ------------------------------------------------------------------------------------------------


def test_close_batch_goes_in_the_order_given(make_pool):
    pool = make_pool(max_seqs=2)
    a, b = pool.open(8), pool.open(8)  # 1 2 and 3 4
    pool.close([b, a])  # releases 4, 3, then 2, 1
    assert pool.blocks.alloc(5).tolist() == [1, 2, 3, 4, 5]
    assert [slot(pool.open()), slot(pool.open())] == [1, 0]


@pytest.mark.parametrize(
    "mask", [np.array([0, 1, 0, 1, 1], bool), np.array([0, 255, 0, 2, 1], np.uint8), np.zeros(5, bool)], ids=repr
)
def test_close_finished_closes_the_rows_whose_byte_is_not_zero(make_any, mask):
    pool = make_any()
    handles = [pool.open(4) for _ in range(5)]
    each, before = pool.stats().used // 5, pool.fingerprint()
    assert pool.close_finished(np.array(handles), mask) == np.count_nonzero(mask)
    assert [pool.is_open(h) for h in handles] == (mask == 0).tolist()
    assert pool.stats().used == each * np.count_nonzero(mask == 0)
    assert (pool.fingerprint() == before) is not mask.any()
