"""Sequences and their handles: open, fork, truncate, close, deferred close, reset, shutdown."""

import gc

import numpy as np
import pytest

from kvpool.errors import (
    ForeignHandle,
    KVPoolError,
    OutOfBlocks,
    OutOfSequences,
    PlanStateError,
    PoolClosed,
    StaleHandle,
)

SLOT_BITS, TAG_SHIFT = 20, 52
LAST_GENERATION = 2**32 - 1


def slot(handle):
    return handle & (2**SLOT_BITS - 1)


def generation(handle):
    return handle >> SLOT_BITS & LAST_GENERATION


# --- open -------------------------------------------------------------------------------------------------


def test_open_returns_an_int_of_tag_generation_and_slot(make_pool):
    pool = make_pool()
    handles = [pool.open() for _ in range(3)]
    assert all(type(h) is int and 0 <= h < 2**63 for h in handles)
    assert [slot(h) for h in handles] == [0, 1, 2]
    assert len({h >> TAG_SHIFT for h in handles}) == 1
    assert 1 <= handles[0] >> TAG_SHIFT <= 2047


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
    assert (error.needed, error.short_by, error.row, error.handle, error.free) == (4, 1, -1, -1, 3)
    assert slot(pool.open()) == 0  # the slot was not used up


# --- slots and generations --------------------------------------------------------------------------------


def test_slots_are_reused_oldest_freed_first(make_pool):
    pool = make_pool(max_seqs=4)
    a, b, c = pool.open(), pool.open(), pool.open()
    pool.close(b)
    pool.close(a)  # the queue of free slots is 3, 1, 0
    assert [slot(pool.open()) for _ in range(3)] == [3, 1, 0]
    assert pool.is_open(c)


def test_close_moves_the_slot_to_its_next_generation(make_pool):
    pool = make_pool(max_seqs=1)
    handles = []
    for _ in range(5):
        handles.append(pool.open())
        pool.close(handles[-1])
    assert [generation(h) - generation(handles[0]) for h in handles] == [0, 1, 2, 3, 4]
    assert len(set(handles)) == 5
    assert not any(pool.is_open(h) for h in handles)


def test_slot_with_its_last_generation_retires(make_pool, refused):
    pool = make_pool(max_seqs=2)
    pool._set_generation(0, LAST_GENERATION - 1)
    first = pool.open()
    assert (slot(first), generation(first)) == (0, LAST_GENERATION - 1)
    other = pool.open()
    pool.close(first)
    last = pool.open()
    assert (slot(last), generation(last)) == (0, LAST_GENERATION)
    pool.close(last)
    with refused(pool, OutOfSequences, "open"):
        pool.open()
    for handle in (first, last):
        with refused(pool, StaleHandle, "close", handle):
            pool.close(handle)
    pool.close(other)
    assert [slot(pool.open())] == [1]


def test_retired_slot_stays_retired_after_reset(make_pool):
    pool = make_pool(max_seqs=2)
    pool._set_generation(0, LAST_GENERATION)
    pool.close(pool.open())
    pool.reset()
    assert slot(pool.open()) == 1
    with pytest.raises(OutOfSequences):
        pool.open()


# --- stale, foreign, duplicates ---------------------------------------------------------------------------

ONE_HANDLE_CALLS = {
    "table": lambda pool, plan, h: pool.table(h),
    "num_tokens": lambda pool, plan, h: pool.num_tokens(h),
    "capacity": lambda pool, plan, h: pool.capacity(h),
    "fork": lambda pool, plan, h: pool.fork(h),
    "close": lambda pool, plan, h: pool.close(h),
    "truncate": lambda pool, plan, h: pool.truncate(h, 0),
    "can": lambda pool, plan, h: pool.can([h], 1),
    "close_finished": lambda pool, plan, h: pool.close_finished([h], np.array([True])),
    "step": lambda pool, plan, h: pool.step(plan, [h], 1),
    "reserve": lambda pool, plan, h: pool.reserve(plan, [h], 1),
}


@pytest.mark.parametrize("call", ONE_HANDLE_CALLS)
def test_closed_handle_is_stale_in_every_call(make_pool, make_plan, refused, call):
    pool = make_pool()
    plan = make_plan(pool)
    handle = pool.open(4)
    pool.close(handle)
    with refused(pool, StaleHandle, call, handle, plans=[plan]):
        ONE_HANDLE_CALLS[call](pool, plan, handle)


@pytest.mark.parametrize("call", ONE_HANDLE_CALLS)
def test_handle_of_the_slots_former_owner_is_stale(make_pool, make_plan, refused, call):
    pool = make_pool(max_seqs=1)
    plan = make_plan(pool)
    former = pool.open(4)
    pool.close(former)
    owner = pool.open(4)
    with refused(pool, StaleHandle, call, former, plans=[plan]):
        ONE_HANDLE_CALLS[call](pool, plan, former)
    assert pool.is_open(owner) and not pool.is_open(former)


@pytest.mark.parametrize("call", ONE_HANDLE_CALLS)
def test_handle_of_another_pool_is_foreign_in_every_call(make_pool, make_plan, refused, call):
    pool, other = make_pool(), make_pool()
    plan = make_plan(pool)
    pool.open(4)
    handle = other.open(4)
    with refused(pool, ForeignHandle, call, handle, plans=[plan]):
        ONE_HANDLE_CALLS[call](pool, plan, handle)


@pytest.mark.parametrize("call", ONE_HANDLE_CALLS)
def test_handle_with_a_slot_beyond_the_pool_is_stale(make_pool, make_plan, refused, call):
    pool = make_pool(max_seqs=4)
    plan = make_plan(pool)
    handle = pool.open(4) + 4  # slot 4
    with refused(pool, StaleHandle, call, handle, plans=[plan]):
        ONE_HANDLE_CALLS[call](pool, plan, handle)


@pytest.mark.parametrize("call", ONE_HANDLE_CALLS)
def test_small_number_is_a_foreign_handle(make_pool, make_plan, refused, call):
    pool = make_pool()
    plan = make_plan(pool)
    pool.open(4)
    with refused(pool, ForeignHandle, call, 0, plans=[plan]):
        ONE_HANDLE_CALLS[call](pool, plan, 0)


BATCH_CALLS = {
    "close": lambda pool, plan, hs: pool.close(hs),
    "truncate": lambda pool, plan, hs: pool.truncate(hs, 0),
    "can": lambda pool, plan, hs: pool.can(hs, 1),
    "close_finished": lambda pool, plan, hs: pool.close_finished(hs, np.ones(len(hs), bool)),
    "step": lambda pool, plan, hs: pool.step(plan, hs, 1),
    "reserve": lambda pool, plan, hs: pool.reserve(plan, hs, 1),
}


@pytest.mark.parametrize("call", BATCH_CALLS)
@pytest.mark.parametrize("kind", [list, np.array], ids=["list", "int64"])
def test_duplicate_handle_in_a_batch_is_refused(make_pool, make_plan, refused, call, kind):
    pool = make_pool()
    plan = make_plan(pool)
    a, b = pool.open(4), pool.open(4)
    with refused(pool, ValueError, call, a, plans=[plan]):
        BATCH_CALLS[call](pool, plan, kind([a, b, a]))


@pytest.mark.parametrize("call", BATCH_CALLS)
def test_one_dead_handle_in_a_batch_leaves_the_others_alone(make_pool, make_plan, refused, call):
    pool = make_pool()
    plan = make_plan(pool)
    a, dead, b = pool.open(4), pool.open(4), pool.open(4)
    pool.close(dead)
    with refused(pool, StaleHandle, call, dead, plans=[plan]):
        BATCH_CALLS[call](pool, plan, [a, b, dead])
    assert pool.is_open(a) and pool.is_open(b)


@pytest.mark.parametrize("call", BATCH_CALLS)
def test_empty_batch_is_legal(make_pool, make_plan, call):
    pool = make_pool()
    plan = make_plan(pool)
    for handles in ([], (), np.empty(0, np.int64)):
        BATCH_CALLS[call](pool, plan, handles)
        if plan.is_pending:
            pool.done(plan)


def test_batch_after_a_refused_duplicate_is_not_confused(make_pool):
    pool = make_pool()
    a, b = pool.open(4), pool.open(4)
    with pytest.raises(ValueError):
        pool.close([a, b, b])
    pool.truncate([a, b], 0)  # marks left by the refused batch would make these duplicates
    pool.close([b, a])


def test_is_open_answers_false_for_stale_and_foreign(make_pool):
    pool, other = make_pool(), make_pool()
    handle = pool.open()
    assert pool.is_open(handle) is True
    assert other.is_open(handle) is False
    pool.close(handle)
    assert pool.is_open(handle) is False


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
    assert [pool.refcount(b) for b in (1, 2)] == [4, 4]
    assert pool.stats().used == 2


def test_fork_leaves_reserved_blocks_with_the_parent(make_pool, grow):
    pool = make_pool()
    parent = pool.open(16)
    grow(pool, parent, 5)
    (child,) = pool.fork(parent)
    assert pool.table(parent).tolist() == [1, 2, 3, 4]
    assert pool.table(child).tolist() == [1, 2]
    assert [pool.refcount(b) for b in (1, 2, 3, 4)] == [2, 2, 1, 1]


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
    assert [pool.refcount(b) for b in (1, 2)] == [1, 1]
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
    assert pool.stats().free == 0
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
    assert [pool.alloc(), pool.alloc(), pool.alloc()] == [2, 3, 4]  # 2 was released last


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
    assert [pool.refcount(b) for b in (1, 2)] == [2, 1]


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
    assert pool.alloc(4).tolist() == [1, 2, 3, 4]


def test_close_batch_goes_in_the_order_given(make_pool):
    pool = make_pool(max_seqs=2)
    a, b = pool.open(8), pool.open(8)  # 1 2 and 3 4
    pool.close([b, a])  # releases 4, 3, then 2, 1
    assert pool.alloc(5).tolist() == [1, 2, 3, 4, 5]
    assert [slot(pool.open()), slot(pool.open())] == [1, 0]


def test_close_of_a_pending_row_is_legal(make_pool, make_plan):
    pool = make_pool()
    plan = make_plan(pool)
    handle = pool.open()
    pool.step(plan, [handle], 5)
    pool.close(handle)
    assert pool.stats().limbo == 2
    pool.done(plan)
    assert pool.stats().limbo == 0 and pool.stats().free == 15


def test_close_never_touches_raw_references(make_pool):
    pool = make_pool()
    handle = pool.open(8)
    pool.incref(2)
    pool.close(handle)
    assert [pool.refcount(b) for b in (1, 2)] == [0, 1]


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


# --- deferred close ---------------------------------------------------------------------------------------


def test_defer_close_takes_effect_in_the_next_call(make_pool):
    pool = make_pool()
    handle = pool.open(8)
    pool.defer_close(handle)
    assert pool.is_open(handle) is False  # this call drained the list first
    assert pool.stats().used == 0


SEES_THE_CLOSE = {  # each call answers as if the sequence (all blocks, the only slot) was closed before it
    "stats": lambda pool, plan, h: pool.stats().used == 0,
    "refcount": lambda pool, plan, h: pool.refcount(1) == 0,
    "refcount_histogram": lambda pool, plan, h: pool.refcount_histogram().tolist() == [3],
    "alloc": lambda pool, plan, h: len(pool.alloc(3)) == 3,
    "open": lambda pool, plan, h: pool.num_tokens(pool.open(12)) == 0,
    "is_open": lambda pool, plan, h: not pool.is_open(h),
    "reset": lambda pool, plan, h: pool.reset() is None,
}


@pytest.mark.parametrize("call", SEES_THE_CLOSE)
def test_defer_close_is_drained_before_the_next_call(make_pool, make_plan, call):
    pool = make_pool(4, max_seqs=1)
    handle = pool.open(12)
    pool.defer_close(handle)
    assert SEES_THE_CLOSE[call](pool, make_plan(pool), handle)


@pytest.mark.parametrize("call", ["table", "num_tokens", "capacity", "close", "fork"])
def test_defer_close_makes_the_handle_stale_for_the_next_call(make_pool, make_plan, call):
    pool = make_pool()
    handle = pool.open(8)
    pool.defer_close(handle)
    with pytest.raises(StaleHandle):
        ONE_HANDLE_CALLS[call](pool, make_plan(pool), handle)
    assert pool.stats().used == 0  # closed, although the call itself was refused


def test_deferred_closes_are_calls_of_their_own(make_pool):
    deferred, explicit = make_pool(), make_pool()
    for pool in (deferred, explicit):
        first, second = pool.open(8), pool.open(4)
        if pool is deferred:
            pool.defer_close(second)
            pool.defer_close(first)
        else:
            pool.close(second)
            pool.close(first)
    assert deferred.digest() == explicit.digest()
    assert deferred.fingerprint() == explicit.fingerprint()


def test_defer_close_of_dead_handles_is_skipped(make_pool):
    pool, other = make_pool(), make_pool()
    live, dead = pool.open(4), pool.open(4)
    pool.close(dead)
    before = pool.fingerprint(), pool.digest()
    for handle in (dead, dead, other.open()):
        pool.defer_close(handle)
    assert (pool.fingerprint(), pool.digest()) == before
    assert pool.is_open(live)


def test_defer_close_twice_closes_once(make_pool):
    pool = make_pool(max_seqs=1)
    handle = pool.open(4)
    pool.defer_close(handle)
    pool.defer_close(handle)
    assert pool.stats().sequences == 0
    assert generation(pool.open()) == generation(handle) + 1


def test_defer_close_then_close_leaves_the_slots_next_owner_alone(make_pool):
    pool = make_pool(max_seqs=1)
    handle = pool.open(4)
    pool.close(handle)
    owner = pool.open(8)
    pool.defer_close(handle)
    assert pool.is_open(owner) and len(pool.table(owner)) == 2


def test_defer_close_takes_more_handles_than_there_are_sequences(make_pool):
    pool = make_pool(max_seqs=2)
    handle = pool.open(4)
    for _ in range(10_000):
        pool.defer_close(handle)
    assert pool.stats().sequences == 0


def test_defer_close_from_a_finalizer(make_pool):
    pool = make_pool(64, max_seqs=64)

    class Owner:
        def __init__(self):
            self.handle = pool.open(4)
            self.cycle = self

        def __del__(self):
            pool.defer_close(self.handle)

    owners = [Owner() for _ in range(50)]
    assert pool.stats().sequences == 50
    del owners
    gc.collect()
    assert pool.stats().sequences == 0


# --- reset and shutdown -----------------------------------------------------------------------------------


def test_reset_makes_every_handle_stale_and_every_block_free(make_pool, make_plan, grow):
    pool = make_pool(max_seqs=4)
    plan = make_plan(pool)
    handles = [pool.open(4) for _ in range(3)]
    pool.close(handles[1])
    pool.alloc(3)
    pool.step(plan, [handles[2]], 9)
    pool.reset()
    assert not any(pool.is_open(h) for h in handles)
    stats = pool.stats()
    assert (stats.free, stats.used, stats.limbo, stats.sequences, stats.pending) == (15, 0, 0, 0, 0)
    assert not plan.is_pending
    fresh = [pool.open(4) for _ in range(4)]
    assert [slot(h) for h in fresh] == [0, 1, 2, 3]
    assert [pool.table(h).tolist() for h in fresh] == [[1], [2], [3], [4]]
    assert not set(fresh) & set(handles)


def test_reset_forgets_a_pending_plan_which_can_then_step_again(make_pool, make_plan):
    pool = make_pool()
    plan = make_plan(pool)
    pool.step(plan, [pool.open()], 5)
    pool.reset()
    with pytest.raises(PlanStateError):
        pool.done(plan)
    handle = pool.open()
    pool.step(plan, [handle], 5)
    assert plan.dirty_rows.tolist() == [0]
    assert plan.block_tables.tolist()[0][:2] == [1, 2]


def test_shutdown_twice_is_legal_and_every_call_afterwards_is_pool_closed(make_pool, make_plan):
    pool = make_pool()
    plan = make_plan(pool)
    handle = pool.open(4)
    pool.shutdown()
    pool.shutdown()
    calls = dict(ONE_HANDLE_CALLS)
    calls |= {
        "open": lambda pool, plan, h: pool.open(),
        "alloc": lambda pool, plan, h: pool.alloc(),
        "incref": lambda pool, plan, h: pool.incref(1),
        "decref": lambda pool, plan, h: pool.decref(1),
        "free": lambda pool, plan, h: pool.free(1),
        "mark_committed": lambda pool, plan, h: pool.mark_committed(1),
        "revive": lambda pool, plan, h: pool.revive(1),
        "evict": lambda pool, plan, h: pool.evict(1),
        "take_dropped": lambda pool, plan, h: pool.take_dropped(),
        "refcount": lambda pool, plan, h: pool.refcount(1),
        "is_open": lambda pool, plan, h: pool.is_open(h),
        "done": lambda pool, plan, h: pool.done(plan),
        "rollback": lambda pool, plan, h: pool.rollback(plan),
        "reset": lambda pool, plan, h: pool.reset(),
        "stats": lambda pool, plan, h: pool.stats(),
        "refcount_histogram": lambda pool, plan, h: pool.refcount_histogram(),
        "digest": lambda pool, plan, h: pool.digest(),
        "fingerprint": lambda pool, plan, h: pool.fingerprint(),
        "check": lambda pool, plan, h: pool.check(),
        "Plan": lambda pool, plan, h: type(plan)(pool, 1),
    }
    for name, call in calls.items():
        with pytest.raises(PoolClosed) as caught:
            call(pool, plan, handle)
        assert str(caught.value).startswith(f"[{name}] "), str(caught.value)


def test_shutdown_with_open_sequences_and_pending_plans(make_pool, make_plan):
    pool = make_pool()
    plan = make_plan(pool)
    pool.step(plan, [pool.open()], 5)
    pool.shutdown()
    with pytest.raises(PoolClosed):
        pool.done(plan)


def test_pool_is_a_context_manager(core):
    with core.Pool(4, 4) as pool:
        pool.open(4)
    with pytest.raises(PoolClosed):
        pool.stats()


def test_pool_as_context_manager_lets_exceptions_pass(core):
    with pytest.raises(KVPoolError, match="row"), core.Pool(4, 4) as pool:
        raise KVPoolError("row")
    with pytest.raises(PoolClosed):
        pool.open()


def test_defer_close_after_shutdown_does_not_raise(make_pool):
    pool = make_pool()
    handle = pool.open()
    pool.shutdown()
    pool.defer_close(handle)  # called by finalizers at interpreter exit
