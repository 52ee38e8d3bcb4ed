"""Sequences: open, fork, truncate, close."""

import numpy as np
import pytest


def slot(handle):
    return handle & 0xFFFFF


def test_open_returns_an_int_of_tag_generation_and_slot(make_any):
    pool = make_any()
    handles = [pool.open() for _ in range(3)]
    assert all(type(h) is int and 0 <= h < 2**63 for h in handles)
    assert [slot(h) for h in handles] == [0, 1, 2]
    assert len({h >> 52 for h in handles}) == 1
    assert 1 <= handles[0] >> 52 <= 2047


def test_fork_of_no_child_is_legal(make_any):
    pool = make_any()
    assert pool.fork(pool.open(4), 0).tolist() == [] and pool.stats().sequences == 1


def test_table_returns_a_copy(make_any):
    pool = make_any()
    handle = pool.open(8)
    table = pool.table(handle, 0).ravel()
    table[:] = 99
    assert pool.table(handle, 0).ravel().tolist() == [1, 2]


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
