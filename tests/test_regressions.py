"""Bugs that bit other KV-cache managers, as small tests; the number names the case of our catalogue.

A double free, B leaks, C use after free, D copy on write, E off by one, F the null block, G integer bounds,
H partial failure. Each docstring gives the cause that the other project reported, in one line.
"""

import numpy as np
import pytest

from kvpool.errors import CapacityExceeded, DoubleFree, OutOfBlocks, OutOfSequences, PlanStateError, StaleHandle


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
    """Pin was an incref on a block that still sat in the free queue; it was queued a second time on release."""
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


# --- D. copy on write -------------------------------------------------------------------------------------


def test_regr_d1_fork_of_forks_keeps_each_history(make_pool, make_plan, grow):
    """Beams whose ids no longer shared a parent kept each other's tokens."""
    pool = make_pool(32)
    plan = make_plan(pool)
    beam = pool.open()
    grow(pool, beam, 5)
    beams = [beam, *pool.fork(beam, 3).tolist()]
    pool.step(plan, beams, 1)
    pool.done(plan)
    survivor = beams[2]
    pool.close([b for b in beams if b != survivor])
    beams = [survivor, *pool.fork(survivor, 3).tolist()]
    pool.step(plan, beams, 1)
    tails = [pool.table(b).tolist()[-1] for b in beams]
    assert len(set(tails)) == 4 and all(pool.table(b)[0] == 1 for b in beams)
    source = plan.copies[0, 0]
    assert plan.copies.tolist() == [[source, tail, 2] for tail in tails[:3]] and tails[3] == source


def test_regr_d2_reset_leaves_no_source_behind(make_pool, make_plan, grow):
    """Reset kept stale source blocks of beams."""
    pool = make_pool()
    plan = make_plan(pool)
    parent = pool.open()
    grow(pool, parent, 6)
    pool.step(plan, [parent, *pool.fork(parent, 2).tolist()], 1)
    assert len(plan.copies) == 2
    pool.reset()
    assert idle(pool)
    handle = pool.open()
    pool.step(plan, [handle], 3)
    assert plan.copies.shape == (0, 3) and pool.table(handle).tolist() == [1]


def test_regr_d5_arrays_that_the_pool_returned_do_not_change_under_the_caller(make_pool, grow):
    """An offset array was changed in place; the caller's reference changed with it."""
    pool = make_pool()
    handle = pool.open()
    grow(pool, handle, 6)
    table, ids = pool.table(handle), pool.alloc(2)
    pool.truncate(handle, 0)
    pool.free(ids)
    pool.alloc(5)
    assert table.tolist() == [1, 2] and ids.tolist() == [3, 4]


def test_regr_d6_tokens_behind_a_truncation_belong_to_nobody(make_pool, make_plan, grow):
    """Trim moved the offset, the tail kept another request's tokens."""
    pool = make_pool()
    plan = make_plan(pool, formats=("kv_slots", "positions", "slot_mapping"), kv_width=12)
    a, b = pool.open(), pool.open()
    grow(pool, a, 10)
    pool.step(plan, [a], 0)
    pool.done(plan)
    pool.truncate(a, 2)
    grow(pool, b, 8)  # takes the blocks that a gave back
    pool.step(plan, [a], 1)
    assert plan.kv_slots.tolist() == [[4, 5, 6] + [0] * 9]
    assert plan.positions.tolist() == [2] and plan.slot_mapping.tolist() == [6]


# --- E. off by one ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 2, 3, 7, 16, 32, 256])
@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("delta", [-1, 0, 1])
def test_regr_e1_lengths_around_a_block_boundary(make_pool, make_plan, block_size, k, delta):
    """len % block_size == 0 broke chains, lookahead and tables in every engine."""
    length = k * block_size + delta
    pool = make_pool(8, block_size)
    handle = pool.open()
    plan = make_plan(pool, 1, 2048, formats=("csr", "slot_mapping", "seq_lens"))
    pool.step(plan, [handle], length)
    blocks = len([p for p in range(length) if p % block_size == 0])
    assert pool.table(handle).tolist() == list(range(1, blocks + 1))
    assert plan.slot_mapping.tolist() == [block_size + p for p in range(length)]
    assert plan.last_page_len.tolist() == [length - (blocks - 1) * block_size if length else 0]
    pool.done(plan)
    pool.step(plan, [handle], 1)
    assert plan.slot_mapping.tolist() == [block_size + length]
    assert len(pool.table(handle)) == blocks + (length % block_size == 0)


def test_regr_e4_reservation_at_a_boundary_makes_no_extra_block(make_pool, make_plan):
    """Lookahead made one extra block at len % block_size == 0, and the trim dropped the first data block."""
    pool = make_pool()
    plan = make_plan(pool)
    handle = pool.open()
    pool.step(plan, [handle], 8)
    pool.done(plan)
    pool.reserve(plan, [handle], 4)
    pool.done(plan)
    assert pool.table(handle).tolist() == [1, 2, 3]
    pool.truncate(handle, 8)
    assert pool.table(handle).tolist() == [1, 2]


def test_regr_e7_sequence_never_grows_past_its_table(make_pool, make_plan, refused):
    """Allocation past the model length overflowed a row of the table."""
    pool = make_pool(16, 4, max_blocks_per_seq=3)
    plan = make_plan(pool, 2, 16, table_width=3)
    handle = pool.open()
    pool.step(plan, [handle], 12)
    pool.done(plan)
    for partial in (False, True):
        with refused(pool, CapacityExceeded, "step", plans=[plan]):
            pool.step(plan, [handle], 1, partial=partial)


def test_regr_e8_cached_blocks_count_once_in_the_capacity_check(make_pool, make_plan):
    """The number of touched blocks was wrong when cached blocks sat in the evictor."""
    pool = make_pool(5, 4)
    ids = pool.alloc(2)
    pool.mark_committed(ids)
    pool.free(ids)
    handle = pool.open()
    assert pool.can([handle], 16) is True
    pool.step(make_plan(pool), [handle], 16)
    assert pool.stats().evictions == 2


@pytest.mark.parametrize("length", [-1, -5])
def test_regr_e9_negative_truncate_does_not_grow(make_pool, grow, refused, length):
    """trim(-5) grew the offset."""
    pool = make_pool()
    handle = pool.open()
    grow(pool, handle, 6)
    with refused(pool, ValueError, "truncate", length):
        pool.truncate(handle, length)
    assert pool.num_tokens(handle) == 6


def test_regr_e11_one_slot_per_token(make_pool, make_plan):
    """len(slot_mapping) != len(token_ids) at chunk 256 under load."""
    pool = make_pool(200, 16)
    plan = make_plan(pool, 4, 1024)
    handles = [pool.open() for _ in range(4)]
    for new in ([256, 255, 257, 1], [256, 256, 256, 256], [1, 0, 1, 0]):
        pool.step(plan, handles, new)
        assert len(plan.slot_mapping) == sum(new) == plan.num_tokens
        assert len(set(plan.slot_mapping.tolist())) == sum(new)
        pool.done(plan)


def test_regr_e12_ids_stay_below_num_blocks(make_pool):
    """The scheduler had 35341 blocks, the worker 34435: ids were out of the worker's range."""
    pool = make_pool(34)
    assert max(pool.alloc(33).tolist()) == 33


def test_regr_e13_reservation_and_step_agree_on_the_number_of_blocks(make_pool, make_plan):
    """A formula that stood in two places drifted."""
    for length in range(0, 14):
        for new in range(0, 14):
            pool = make_pool(16, 4)
            reserved, stepped = pool.open(), pool.open()
            plan = make_plan(pool)
            pool.step(plan, [reserved, stepped], length)
            pool.done(plan)
            pool.reserve(plan, [reserved], new)
            pool.done(plan)
            pool.step(plan, [stepped], new)
            assert pool.capacity(reserved) == pool.capacity(stepped)
            pool.done(plan)


# --- F. the null block ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reserved", [1, 2, 5])
def test_regr_f1_null_block_is_reserved_by_the_constructor(make_pool, reserved):
    """Block 0 was assumed to be the null block, but another thread took it first."""
    pool = make_pool(12, reserved_blocks=reserved)
    ids = pool.alloc(12 - reserved).tolist()
    assert ids == list(range(reserved, 12))
    pool.free(ids[::-1])
    pool.reset()
    assert sorted(pool.alloc(12 - reserved).tolist()) == ids


def test_regr_f2_null_block_is_in_no_count(make_pool):
    """The null block was counted as evictable."""
    pool = make_pool(12, reserved_blocks=3)
    stats = pool.stats()
    assert (stats.free, stats.evictable, stats.used) == (9, 0, 0)
    assert pool.refcount_histogram().sum() == 9


def test_regr_f5_padding_is_the_null_block_and_no_slot(make_pool, make_plan, core):
    """Padding rows that named real blocks changed results."""
    pool = make_pool()
    plan = make_plan(pool, 3, 4, formats=core.all_formats, table_width=2, kv_width=4)
    pool.step(plan, [pool.open()], 2, pad_to=(3, 4))
    assert plan.block_tables.tolist() == [[1, 0], [0, 0], [0, 0]]
    assert plan.slot_mapping.tolist() == [4, 5, -1, -1]
    assert plan.cu_q_lens.tolist() == [0, 2, 2, 2]
    assert plan.kv_slots.tolist() == [[4, 5, 0, 0], [0] * 4, [0] * 4]
    assert plan.slot_ids.tolist() == [0, -1, -1]


# --- G. integer bounds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [2**27, 2**28, 2**29, 2**30, 2**31 - 1])
def test_regr_g1_slots_beyond_int32_are_exact(make_pool, make_plan, block_size):
    """block * block_size overflowed int32 in the slot mapping, and was widened afterwards."""
    pool = make_pool(40, block_size)
    pool.alloc(36)
    handle = pool.open()
    plan = make_plan(pool, 1, 3, formats=("slot_mapping",), dtype="int64")
    pool.step(plan, [handle], 2)
    assert plan.slot_mapping.tolist() == [37 * block_size, 37 * block_size + 1]
    pool.done(plan)
    pool.step(plan, [handle], 1)
    assert plan.slot_mapping.tolist() == [37 * block_size + 2]
    assert pool.capacity(handle) == block_size


def test_regr_g2_int32_slots_are_refused_rather_than_wrapped(make_pool, make_plan):
    """Offsets at num_blocks * block_size >= 2^31 crashed, or were silently wrong."""
    make_plan(make_pool(2**16 - 1, 2**15))  # 2^31 - 2^15 slots
    with pytest.raises(ValueError, match=r"^\[Plan\] .*2147483648"):
        make_plan(make_pool(2**16, 2**15))


@pytest.mark.parametrize("block", [-1, 16, 2**31 - 1, 2**31, 2**32 + 1, -(2**31)])
def test_regr_g6_both_bounds_of_an_id_are_checked(make_pool, refused, block):
    """slot < 0 was checked, slot >= capacity was not."""
    pool = make_pool()
    pool.alloc(3)
    with refused(pool, IndexError, "decref", block):
        pool.decref([1, block])


def test_regr_g6_id_is_not_taken_modulo_2_32(make_pool, refused):
    """The same, through a narrowing cast."""
    pool = make_pool()
    pool.alloc(3)
    with refused(pool, IndexError, "free", 2**32 + 2):
        pool.free(np.array([2**32 + 2], np.int64))


# --- H. partial failure -----------------------------------------------------------------------------------


def test_regr_h1_failure_half_way_leaves_no_block_without_owner(make_pool, make_plan):
    """Page allocation failed mid-way; blocks that were taken already had no owner."""
    pool = make_pool(8, 4)
    handles = [pool.open() for _ in range(4)]
    plan = make_plan(pool)
    with pytest.raises(OutOfBlocks) as caught:
        pool.step(plan, handles, [8, 8, 8, 8])
    assert caught.value.row == 3
    assert [pool.capacity(h) for h in handles] == [0, 0, 0, 0]
    assert pool.stats().used == 0 and accounted(pool)


def test_regr_h2_failed_step_leaves_no_reference_up_or_down(make_pool, make_plan, grow, refused):
    """Touch before the capacity check left references bumped on failure."""
    pool = make_pool(8, 4)
    parent = pool.open()
    grow(pool, parent, 6)
    rows = [parent, *pool.fork(parent, 3).tolist()]
    plan = make_plan(pool)
    with refused(pool, OutOfBlocks, "step", plans=[plan]):
        pool.step(plan, rows, 7)  # three copies and eight appended blocks, five are free
    assert [pool.refcount(b) for b in range(1, 8)] == [4, 4, 0, 0, 0, 0, 0]
    assert [pool.table(h).tolist() for h in rows] == [[1, 2]] * 4


def test_regr_h3_can_and_step_agree(make_pool, make_plan, grow):
    """Check and take disagreed: 'failure to allocate KV blocks'."""
    rng = np.random.default_rng(4)
    for _ in range(60):
        pool = make_pool(14, 4)
        parent = pool.open()
        grow(pool, parent, int(rng.integers(1, 9)))
        rows = [parent, *pool.fork(parent, int(rng.integers(0, 3))).tolist(), pool.open(4)]
        pool.alloc(int(rng.integers(0, 8)))
        new = rng.integers(0, 9, len(rows))
        plan = make_plan(pool)
        if pool.can(rows, new):
            pool.step(plan, rows, new)
        else:
            with pytest.raises(OutOfBlocks):
                pool.step(plan, rows, new)


def test_regr_h4_batch_that_does_not_fit_can_be_tried_again_smaller(make_pool, make_plan):
    """The cache's state was not restored when a batch did not fit."""
    pool = make_pool(6, 4)
    handles = [pool.open() for _ in range(3)]
    plan = make_plan(pool)
    with pytest.raises(OutOfBlocks):
        pool.step(plan, handles, 8)
    pool.step(plan, handles[:2], 8)
    assert [pool.table(h).tolist() for h in handles] == [[1, 2], [3, 4], []]
    assert plan.dirty_rows.tolist() == [0, 1]


def test_regr_h6_request_larger_than_the_pool_is_an_error_not_a_wait(make_pool, make_plan):
    """Tiny pools hung."""
    pool = make_pool(2, 4, max_blocks_per_seq=100)
    handle = pool.open()
    with pytest.raises(OutOfBlocks) as caught:
        pool.step(make_plan(pool), [handle], 60)
    assert (caught.value.needed, caught.value.short_by) == (15, 14)


@pytest.mark.parametrize("block_size", [1, 8])
def test_regr_h8_small_block_sizes_and_empty_prompts(make_pool, make_plan, block_size):
    """Documented block sizes 1 and 8 crashed, and so did max_tokens = 0."""
    pool = make_pool(8, block_size)
    handle = pool.open(0)
    plan = make_plan(pool)
    pool.step(plan, [handle], 0)
    assert plan.seq_lens.tolist() == [0] and plan.slot_mapping.shape == (0,)
    pool.done(plan)
    pool.step(plan, [handle], 1)
    assert plan.slot_mapping.tolist() == [block_size]
