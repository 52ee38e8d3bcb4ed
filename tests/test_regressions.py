"""Bugs that bit other KV-cache managers, as small tests; the number names the case of our catalogue.

Who owns a block: A double free, B leaks, C use after free. Each docstring gives the cause that the other
project reported, in one line.
"""

import numpy as np
import pytest

from kvpool.errors import DoubleFree, OutOfBlocks, OutOfSequences, PlanStateError, StaleHandle


def idle(pool):
    """No sequence, no reference, nothing pending: every block is blank or cached."""
    stats = pool.stats()
    pool.check()
    return (
        (stats.used, stats.limbo, stats.sequences, stats.pending, stats.shared) == (0, 0, 0, 0, 0)
        and stats.free + stats.evictable == stats.num_blocks - stats.reserved
        and pool.refcount_histogram().tolist() == [stats.num_blocks - stats.reserved]
    )


def accounted(pool):
    stats = pool.stats()
    return stats.free + stats.evictable + stats.limbo + stats.used == stats.num_blocks - stats.reserved


# --- A. double free ---------------------------------------------------------------------------------------


def test_regr_a1_same_block_twice_in_one_free(make_pool, refused):
    """free([b, b]) decremented per occurrence and queued b twice."""
    pool = make_pool()
    pool.alloc(3)
    with refused(pool, ValueError, "free", 2):
        pool.free([2, 2])
    pool.free(2)
    assert sorted(pool.alloc(13).tolist()) == [2, *range(4, 16)]


def test_regr_a2_fork_of_a_table_then_append_then_free(make_pool, make_plan, grow):
    """Fork counted references per table entry, append dropped one, free dropped it again."""
    pool = make_pool()
    parent = pool.open()
    grow(pool, parent, 7)
    child = int(pool.fork(parent)[0])
    plan = make_plan(pool)
    pool.step(plan, [child, parent], 3)
    pool.done(plan)
    pool.close([parent, child])
    assert idle(pool)


def test_regr_a3_null_block_never_reaches_the_free_list(make_pool, refused):
    """Null placeholders and duplicates reached the free queue."""
    pool = make_pool()
    pool.alloc(3)
    for ids in ([1, 0], [0, 0], [0]):
        with refused(pool, ValueError, "free", 0):
            pool.free(ids)
    assert 0 not in pool.alloc(12).tolist()


def test_regr_a4_shared_block_twice_in_one_decref(make_pool, refused):
    """All references were dropped first, then ref == 0 filtered: an id listed twice was queued twice."""
    pool = make_pool()
    block = pool.alloc()
    pool.incref(block)
    with refused(pool, ValueError, "decref", block):
        pool.decref([block, block])
    assert pool.refcount(block) == 2 and pool.stats().free == 14


def test_regr_a6_reference_to_a_cached_block_takes_it_off_the_list(make_pool):
    """Pin was an incref on a block that still sat in the free queue; release queued it again."""
    pool = make_pool(4)
    block = pool.alloc()
    pool.mark_committed(block)
    pool.free(block)
    pool.revive(block)
    assert pool.stats().evictable == 0
    pool.alloc(2)
    with pytest.raises(OutOfBlocks):
        pool.alloc()  # the revived block is not to be had
    pool.decref(block)
    assert pool.stats().evictable == 1
    assert pool.alloc() == block


def test_regr_a6_incref_does_not_resurrect_a_free_block(make_pool, refused):
    """The same, on a blank block."""
    pool = make_pool()
    pool.free(pool.alloc(1))
    with refused(pool, DoubleFree, "incref", 1):
        pool.incref(1)


def test_regr_a7_one_id_is_never_handed_out_twice(make_pool):
    """The wrong one of two blocks was pinned, and an id was handed out again and again."""
    pool = make_pool(64)
    rng, held = np.random.default_rng(1), set()
    for _ in range(500):
        if held and rng.random() < 0.5:
            ids = rng.permutation(sorted(held))[: rng.integers(1, len(held) + 1)].astype(np.int32)
            pool.free(ids)
            held -= set(ids.tolist())
        elif len(held) < 63:
            ids = pool.alloc(int(rng.integers(1, 64 - len(held)))).tolist()
            assert not held & set(ids) and len(set(ids)) == len(ids)
            held |= set(ids)
    assert pool.stats().used == len(held)


def test_regr_a9_slot_released_by_close_cannot_be_released_by_truncate(make_pool, grow, refused):
    """A slot was freed by two release paths, one of which inferred the length."""
    pool = make_pool()
    handle = pool.open()
    grow(pool, handle, 9)
    pool.close(handle)
    with refused(pool, StaleHandle, "truncate", handle):
        pool.truncate(handle, 0)
    assert idle(pool)


def test_regr_a10_truncates_that_meet_inside_a_block_release_it_once(make_pool, grow):
    """Two contiguous frees met inside one page, which was freed twice."""
    pool = make_pool()
    handle = pool.open()
    grow(pool, handle, 12)
    for length in (7, 6, 5, 4, 3, 2, 1, 0):
        pool.truncate(handle, length)
        assert len(pool.table(handle)) == -(-length // 4)
    pool.close(handle)
    assert idle(pool)


def test_regr_a11_second_free_is_a_typed_error(make_pool, refused):
    """A connector popped a request's blocks twice; the server died of a bare assertion."""
    pool = make_pool()
    ids = pool.alloc(3)
    pool.free(ids)
    with refused(pool, DoubleFree, "free", 1):
        pool.free(ids)


def test_regr_a11_second_close_is_a_typed_error(make_pool, refused):
    """The same, for a sequence."""
    pool = make_pool()
    handle = pool.open(8)
    pool.close(handle)
    with refused(pool, StaleHandle, "close", handle):
        pool.close(handle)


def test_regr_a12_counts_are_never_clamped(make_pool):
    """A count of -1 was 'set back to 0 as a hack'."""
    pool = make_pool()
    block = pool.alloc()
    pool.decref(block)
    for _ in range(5):
        with pytest.raises(DoubleFree):
            pool.decref(block)
    assert pool.alloc() == block
    pool.incref(block)
    assert pool.refcount(block) == 2


def test_regr_a13_stale_mapping_cannot_free_another_owners_block(make_pool, refused):
    """A stale mapping freed a slot that somebody else owned already."""
    pool = make_pool(max_seqs=1)
    former = pool.open(8)
    pool.close(former)
    owner = pool.open(8)
    assert pool.table(owner).tolist() == [1, 2]
    with refused(pool, StaleHandle, "close", former):
        pool.close(former)
    assert pool.table(owner).tolist() == [1, 2]


# --- B. leaks ---------------------------------------------------------------------------------------------


def test_regr_b1_failed_step_keeps_no_block_and_no_slot(make_pool, make_plan):
    """A slot was taken, then scheduling failed, and it was never returned."""
    pool = make_pool(8, 4)
    plan = make_plan(pool)
    handles = [pool.open() for _ in range(3)]
    for _ in range(100):
        with pytest.raises(OutOfBlocks):
            pool.step(plan, handles, 12)
    pool.close(handles)
    assert idle(pool)


def test_regr_b1_failed_open_keeps_no_slot(make_pool):
    """The same, in open."""
    pool = make_pool(4, 4, max_seqs=2, max_blocks_per_seq=9)
    for _ in range(10):
        with pytest.raises(OutOfBlocks):
            pool.open(16)
    assert pool.stats().sequences == 0
    pool.open(), pool.open()


def test_regr_b1_failed_fork_keeps_no_reference(make_pool, grow):
    """The same, in fork."""
    pool = make_pool(max_seqs=3)
    parent = pool.open()
    grow(pool, parent, 8)
    with pytest.raises(OutOfSequences):
        pool.fork(parent, 3)
    assert pool.refcount(1) == 1
    pool.close(parent)
    assert idle(pool)


def test_regr_b2_sum_of_all_places_is_the_pool_after_every_call(make_pool, make_plan):
    """available + evictable != total, found by the idle check of a production server."""
    rng = np.random.default_rng(2)
    pool = make_pool(24, 4, max_seqs=8)
    plans, pending, handles = [make_plan(pool) for _ in range(2)], [], []
    for _ in range(400):
        choice = rng.random()
        if choice < 0.2 and len(handles) < 6:
            handles.append(pool.open())
        elif choice < 0.3 and handles and len(handles) < 8:
            handles += pool.fork(handles[0]).tolist()
        elif choice < 0.5 and handles:
            table = pool.table(handles[-1])
            full = pool.num_tokens(handles[-1]) // 4
            pool.take_dropped()
            pool.mark_committed(table[:full])
            pool.close(handles.pop())
        elif choice < 0.9 and len(pending) < 2:
            plan = plans[0] if plans[0] not in pending else plans[1]
            rows = [h for h in handles if pool.num_tokens(h) < 30]
            pool.step(plan, rows, int(rng.integers(0, 6)), partial=True)
            pending.append(plan)
        elif pending:
            pool.done(pending.pop(0))
        assert accounted(pool)
    for plan in pending:
        pool.done(plan)
    if handles:
        pool.close(handles)
    assert idle(pool)


def test_regr_b3_shared_block_is_evictable_once(make_pool, grow):
    """The evictable size counted shared pages twice."""
    pool = make_pool()
    parent = pool.open()
    grow(pool, parent, 8)
    handles = [parent, *pool.fork(parent, 3).tolist()]
    pool.mark_committed([1, 2])
    pool.close(handles[:3])
    assert pool.stats().evictable == 0
    pool.close(handles[3])
    assert pool.stats().evictable == 2


@pytest.mark.parametrize("state", ["new", "reserved", "stepped", "forked", "done", "rolled back", "skipped"])
def test_regr_b4_abort_in_any_state_returns_everything(make_pool, make_plan, state):
    """An aborted request in an odd state was never given back."""
    pool = make_pool(8, 4)
    plan = make_plan(pool)
    handle = pool.open(8)
    if state == "reserved":
        pool.reserve(plan, [handle], 12)
    if state in ("stepped", "forked", "done", "rolled back"):
        pool.step(plan, [handle], 9)
    if state == "forked":
        pool.close(pool.fork(handle, 2))
    if state == "done":
        pool.done(plan)
    if state == "rolled back":
        pool.rollback(plan)
    if state == "skipped":
        raw = pool.alloc(5)
        pool.step(plan, [handle], 12, partial=True)
        assert plan.served.tolist() == [0]
        pool.free(raw)
    pool.close(handle)
    if plan.is_pending:
        pool.done(plan)
    assert idle(pool)


def test_regr_b6_close_does_not_wait_for_a_signal_of_its_own(make_pool, make_plan):
    """A delayed free waited for a signal that a dead peer never sent: any later done lets the blocks go."""
    pool = make_pool()
    lost, later = make_plan(pool), make_plan(pool)
    handle = pool.open(8)
    pool.step(lost, [handle], 8)
    pool.close(handle)
    pool.rollback(lost)  # the peer is dead
    assert idle(pool)
    pool.step(later, [], 0)
    pool.done(later)


def test_regr_b11_finish_drops_the_references_not_only_the_table(make_pool, grow):
    """Finish removed the table but never decremented: evictions 0 at 100 % use."""
    pool = make_pool(5, 4)
    for _ in range(20):
        handle = pool.open()
        grow(pool, handle, 16)
        pool.take_dropped()
        pool.mark_committed(pool.table(handle))
        pool.close(handle)
    stats = pool.stats()
    assert (stats.used, stats.evictable, stats.evictions) == (0, 4, 76)


def test_regr_b11_many_prompts_one_after_another_without_reset(make_pool, make_plan):
    """A page table that only a reset emptied."""
    pool = make_pool(12, 4)
    plan = make_plan(pool)
    for length in [1, 4, 5, 17, 40, 3] * 20:
        handle = pool.open(length)
        pool.step(plan, [handle], length)
        pool.done(plan)
        pool.close(handle)
    assert idle(pool)


# --- C. use after free ------------------------------------------------------------------------------------


def test_regr_c1_freed_block_waits_for_the_newest_step_in_flight(make_pool, make_plan):
    """Blocks were freed on the output of step N while step N + 1, already dispatched, still wrote them."""
    pool = make_pool()
    steps = [make_plan(pool), make_plan(pool)]
    handle = pool.open()
    for plan in steps:
        pool.step(plan, [handle], 4)
    pool.done(steps[0])
    pool.close(handle)  # finished by what step N produced
    assert pool.stats().limbo == 2
    assert not {1, 2} & set(pool.alloc(13).tolist())
    pool.done(steps[1])
    assert {1, 2} == set(pool.alloc(2).tolist())


def test_regr_c3_preempted_sequence_frees_nothing_in_flight(make_pool, make_plan, refused):
    """Preemption returned blocks with a step in flight."""
    pool = make_pool()
    plan = make_plan(pool)
    handle = pool.open()
    pool.step(plan, [handle], 8)
    with refused(pool, PlanStateError, "truncate"):
        pool.truncate(handle, 0)
    pool.done(plan)
    pool.truncate(handle, 0)
    assert pool.stats().free == 15


def test_regr_c5_row_of_a_dead_sequence_is_padded(make_pool, make_plan):
    """An idle rank's dummy step wrote through stale block-table rows into cached blocks."""
    pool = make_pool()
    plan = make_plan(pool, 4, 4, table_width=3)
    handles = [pool.open() for _ in range(3)]
    pool.step(plan, handles, 1)
    pool.done(plan)
    pool.close(handles[1:])
    pool.step(plan, handles[:1], 1, pad_to=(4, 4))
    assert plan.block_tables.tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert plan.slot_mapping.tolist() == [5, -1, -1, -1]
    assert plan.seq_lens.tolist() == [2, 0, 0, 0]


def test_regr_c6_late_call_with_the_old_handle_is_refused(make_pool, make_plan, refused):
    """Late output after a preemption was applied to the request that had been reset."""
    pool = make_pool(max_seqs=1)
    plan = make_plan(pool)
    first = pool.open()
    pool.close(first)
    second = pool.open()
    with refused(pool, StaleHandle, "step", first, plans=[plan]):
        pool.step(plan, [first], 1)
    assert pool.num_tokens(second) == 0


def test_regr_c8_contents_hold_until_the_next_step_on_the_plan(make_pool, make_plan):
    """Asynchronous copies read ONE reused offsets buffer that the next iteration overwrote."""
    pool = make_pool()
    first, second = make_plan(pool), make_plan(pool)
    handles = [pool.open(), pool.open()]
    pool.step(first, handles, 3)
    shown = first.block_tables.tolist(), first.slot_mapping.tolist(), first.seq_lens.tolist()
    pool.step(second, handles[::-1], 5)
    pool.done(first)
    pool.close(handles)
    assert (first.block_tables.tolist(), first.slot_mapping.tolist(), first.seq_lens.tolist()) == shown
    with pytest.raises(PlanStateError):
        pool.step(second, [], 0)  # still in flight: its buffers may not be reused


def test_regr_c9_cached_block_has_a_reference_or_is_on_the_list(make_pool, make_plan, grow):
    """A prefill chunk was indexed, then its request was retracted and freed the pages."""
    pool = make_pool()
    handle = pool.open()
    grow(pool, handle, 8)
    pool.mark_committed([1, 2])
    pool.close(handle)
    assert pool.stats().evictable == 2
    pool.revive([1, 2])
    assert pool.stats().evictable == 0
    assert not {1, 2} & set(pool.alloc(13).tolist())


def test_regr_c13_hits_leave_the_free_list_before_the_capacity_check(make_pool):
    """Hit blocks were counted as available and as hits: the check passed, the allocation failed."""
    pool = make_pool(5, 4)
    ids = pool.alloc(4)
    pool.mark_committed(ids)
    pool.free(ids)
    pool.revive([1, 2])
    with pytest.raises(OutOfBlocks) as caught:
        pool.alloc(3)
    assert (caught.value.evictable, caught.value.short_by) == (2, 1)
    assert pool.alloc(2).tolist() == [3, 4]


def test_regr_c15_hit_that_was_evicted_in_between_is_refused(make_pool, refused):
    """A hit was evicted between lookup and use."""
    pool = make_pool(2, 4)
    block = pool.alloc()
    pool.mark_committed(block)
    pool.free(block)
    pool.evict(1)
    with refused(pool, ValueError, "revive", block):
        pool.revive(block)


def test_regr_c17_recycled_block_keeps_no_committed_bit(make_pool, make_plan):
    """A recycled block kept its old hash, or its 'computed' bit."""
    pool = make_pool(2, 4)
    pool.alloc()
    pool.mark_committed(1)
    pool.free(1)
    plan = make_plan(pool)
    handle = pool.open()
    pool.step(plan, [handle], 1)
    assert pool.take_dropped().tolist() == [1]
    pool.done(plan)
    pool.step(plan, [handle], 1)  # in place: the block is not committed any more
    assert plan.copies.shape == (0, 3) and plan.slot_mapping.tolist() == [5]
    pool.done(plan)
    pool.close(handle)
    assert pool.stats().free == 1
