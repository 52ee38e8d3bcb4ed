"""Sequences: open, fork, truncate, close."""

import numpy as np
import pytest

from kvpool.errors import OutOfBlocks, OutOfSequences, PlanStateError


def slot(handle):
    return handle & 0xFFFFF


# --- open -------------------------------------------------------------------------------------------------


def test_open_returns_an_int_of_tag_generation_and_slot(make_pool):
    pool = make_pool()
    handles = [pool.open() for _ in range(3)]
    assert all(type(h) is int and 0 <= h < 2**63 for h in handles)
    assert [slot(h) for h in handles] == [0, 1, 2]
    assert len({h >> 52 for h in handles}) == 1
    assert 1 <= handles[0] >> 52 <= 2047


@pytest.mark.parametrize("num_tokens, blocks", [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_open_takes_whole_blocks_and_starts_empty(make_pool, num_tokens, blocks):
    pool = make_pool(block_size=4)
    handle = pool.open(num_tokens)
    assert pool.num_tokens(handle) == 0
    assert pool.capacity(handle) == 4 * blocks
    table = pool.table(handle)
    assert table.dtype == np.int32 and table.tolist() == list(range(1, blocks + 1))


def test_table_returns_a_copy(make_pool):
    pool = make_pool()
    handle = pool.open(8)
    table = pool.table(handle)
    table[:] = 99
    assert pool.table(handle).tolist() == [1, 2]


def test_open_without_a_free_slot_is_out_of_sequences(make_pool, refused):
    pool = make_pool(max_seqs=2)
    first, _ = pool.open(), pool.open()
    with refused(pool, OutOfSequences, "open", 2):
        pool.open()
    pool.close(first)
    assert slot(pool.open()) == 0


def test_open_longer_than_the_pool_is_out_of_blocks(make_pool, refused):
    pool = make_pool(4, 4, max_blocks_per_seq=9)
    with refused(pool, OutOfBlocks, "open", 4) as caught:
        pool.open(13)
    error = caught.value
    assert (error.needed, error.short_by, error.row, error.handle, error.blank) == (4, 1, -1, -1, 3)
    assert slot(pool.open()) == 0  # the slot was not used up


# --- fork -------------------------------------------------------------------------------------------------


def test_fork_shares_the_written_blocks(make_pool, grow):
    pool = make_pool()
    parent = pool.open()
    grow(pool, parent, 6)
    children = pool.fork(parent, 3)
    assert children.dtype == np.int64 and children.shape == (3,)
    assert [slot(int(h)) for h in children] == [1, 2, 3]
    for child in children:
        assert pool.table(child).tolist() == [1, 2] and pool.num_tokens(child) == 6
    assert [pool.blocks.refcount(b) for b in (1, 2)] == [4, 4]
    assert pool.stats().used == 2


def test_fork_leaves_reserved_blocks_with_the_parent(make_pool, grow):
    pool = make_pool()
    parent = pool.open(16)
    grow(pool, parent, 5)
    (child,) = pool.fork(parent)
    assert pool.table(parent).tolist() == [1, 2, 3, 4]
    assert pool.table(child).tolist() == [1, 2]
    assert [pool.blocks.refcount(b) for b in (1, 2, 3, 4)] == [2, 2, 1, 1]


@pytest.mark.parametrize("length, shared", [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2)])
def test_fork_shares_the_blocks_that_hold_tokens(make_pool, grow, length, shared):
    pool = make_pool(block_size=4)
    parent = pool.open(12)
    if length:
        grow(pool, parent, length)
    child = int(pool.fork(parent)[0])
    assert pool.table(child).tolist() == list(range(1, shared + 1))
    assert pool.num_tokens(child) == length


def test_fork_closing_the_parent_keeps_the_childs_blocks(make_pool, grow):
    pool = make_pool()
    parent = pool.open()
    grow(pool, parent, 6)
    child = int(pool.fork(parent)[0])
    pool.close(parent)
    assert pool.table(child).tolist() == [1, 2]
    assert [pool.blocks.refcount(b) for b in (1, 2)] == [1, 1]
    pool.close(child)
    assert pool.stats().used == 0


def test_fork_more_children_than_slots_makes_none(make_pool, refused):
    pool = make_pool(max_seqs=4)
    parent = pool.open(4)
    with refused(pool, OutOfSequences, "fork", 4):
        pool.fork(parent, 4)
    assert len(pool.fork(parent, 3)) == 3


def test_fork_needs_no_block(make_pool, grow):
    pool = make_pool(3)
    parent = pool.open()
    grow(pool, parent, 8)
    assert pool.stats().blank == 0
    assert len(pool.fork(parent, 5)) == 5


# --- truncate ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "length, table", [(0, []), (1, [1]), (4, [1]), (5, [1, 2]), (8, [1, 2]), (9, [1, 2, 3]), (11, [1, 2, 3])]
)
def test_truncate_keeps_the_blocks_that_hold_tokens(make_pool, grow, length, table):
    pool = make_pool(block_size=4)
    handle = pool.open()
    grow(pool, handle, 11)
    pool.truncate(handle, length)
    assert pool.num_tokens(handle) == length
    assert pool.table(handle).tolist() == table


def test_truncate_releases_youngest_first(make_pool, grow):
    pool = make_pool()
    handle = pool.open()
    grow(pool, handle, 12)
    pool.truncate(handle, 4)
    assert [pool.blocks.alloc(), pool.blocks.alloc(), pool.blocks.alloc()] == [2, 3, 4]  # 2 was released last


def test_truncate_to_the_same_length_drops_reserved_blocks(make_pool, grow):
    pool = make_pool()
    handle = pool.open(16)
    grow(pool, handle, 5)
    pool.truncate(handle, 5)
    assert pool.table(handle).tolist() == [1, 2]
    assert pool.stats().used == 2


def test_truncate_of_a_shared_prefix_leaves_the_other_holder_alone(make_pool, grow):
    pool = make_pool()
    parent = pool.open()
    grow(pool, parent, 8)
    child = int(pool.fork(parent)[0])
    pool.truncate(child, 1)
    assert pool.table(parent).tolist() == [1, 2] and pool.num_tokens(parent) == 8
    assert [pool.blocks.refcount(b) for b in (1, 2)] == [2, 1]


@pytest.mark.parametrize("kind", [np.int32, np.int64, None], ids=["int32", "int64", "list"])
def test_truncate_batch_with_a_length_per_row(make_pool, grow, kind):
    pool = make_pool()
    handles = [pool.open() for _ in range(3)]
    for handle in handles:
        grow(pool, handle, 8)
    lengths = [3, 8, 0]
    pool.truncate(np.array(handles), lengths if kind is None else np.array(lengths, kind))
    assert [pool.num_tokens(h) for h in handles] == lengths
    assert [len(pool.table(h)) for h in handles] == [1, 2, 0]


def test_truncate_batch_with_one_length_for_all(make_pool, grow):
    pool = make_pool()
    handles = [pool.open() for _ in range(3)]
    for handle in handles:
        grow(pool, handle, 8)
    pool.truncate(handles, 5)
    assert [pool.num_tokens(h) for h in handles] == [5, 5, 5]


@pytest.mark.parametrize("length", [-1, 9, 2**31, 2**62])
def test_truncate_outside_the_sequence_is_refused(make_pool, grow, refused, length):
    pool = make_pool()
    a, b = pool.open(), pool.open()
    grow(pool, a, 8)
    grow(pool, b, 8)
    with refused(pool, ValueError, "truncate", length):
        pool.truncate(b, length)
    with refused(pool, ValueError, "truncate", length):
        pool.truncate([a, b], [4, length])


def test_truncate_of_a_pending_row_is_refused(make_pool, make_plan, refused):
    pool = make_pool()
    plan = make_plan(pool)
    a, b = pool.open(), pool.open()
    pool.step(plan, [a], 4)
    with refused(pool, PlanStateError, "truncate", plans=[plan]):
        pool.truncate([b, a], 0)
    pool.done(plan)
    pool.truncate([b, a], 0)


# --- close ------------------------------------------------------------------------------------------------


def test_close_releases_youngest_first(make_pool):
    pool = make_pool()
    pool.close(pool.open(12))
    assert pool.blocks.alloc(4).tolist() == [1, 2, 3, 4]


def test_close_batch_goes_in_the_order_given(make_pool):
    pool = make_pool(max_seqs=2)
    a, b = pool.open(8), pool.open(8)  # 1 2 and 3 4
    pool.close([b, a])  # releases 4, 3, then 2, 1
    assert pool.blocks.alloc(5).tolist() == [1, 2, 3, 4, 5]
    assert [slot(pool.open()), slot(pool.open())] == [1, 0]


def test_close_of_a_pending_row_is_legal(make_pool, make_plan):
    pool = make_pool()
    plan = make_plan(pool)
    handle = pool.open()
    pool.step(plan, [handle], 5)
    pool.close(handle)
    assert pool.stats().limbo == 2
    pool.done(plan)
    assert pool.stats().limbo == 0 and pool.stats().blank == 15


def test_close_never_touches_raw_references(make_pool):
    pool = make_pool()
    handle = pool.open(8)
    pool.blocks.incref(2)
    pool.close(handle)
    assert [pool.blocks.refcount(b) for b in (1, 2)] == [0, 1]


@pytest.mark.parametrize("kind", [bool, np.uint8])
def test_close_finished_closes_the_marked_rows(make_pool, kind):
    pool = make_pool()
    handles = [pool.open(4) for _ in range(5)]
    mask = np.array([0, 1, 0, 1, 1]).astype(kind)
    assert pool.close_finished(np.array(handles), mask) == 3
    assert [pool.is_open(h) for h in handles] == [True, False, True, False, False]
    assert pool.stats().used == 2


def test_close_finished_any_non_zero_byte_means_finished(make_pool):
    pool = make_pool()
    handles = [pool.open(4) for _ in range(3)]
    assert pool.close_finished(handles, np.array([255, 0, 2], np.uint8)) == 2
    assert [pool.is_open(h) for h in handles] == [False, True, False]


def test_close_finished_without_a_finished_row_changes_nothing(make_pool):
    pool = make_pool()
    handles = [pool.open(4) for _ in range(3)]
    before = pool.fingerprint()
    assert pool.close_finished(handles, np.zeros(3, bool)) == 0
    assert pool.fingerprint() == before


def test_close_finished_with_a_mask_of_another_length_is_refused(make_pool, refused):
    pool = make_pool()
    handles = [pool.open(4) for _ in range(3)]
    for size in (0, 2, 4):
        with refused(pool, ValueError, "close_finished", size):
            pool.close_finished(handles, np.ones(size, bool))
