"""Bugs that bit other KV-cache managers, as small tests; the number names the case of our catalogue.

What a step computes: D copy on write, E off by one, F the null block, G integer bounds, H partial failure.
Each docstring gives the cause that the other project reported, in one line.
"""

import numpy as np
import pytest

from kvpool.errors import CapacityExceeded, OutOfBlocks

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
    assert (pool.stats().used, pool.stats().free) == (0, 15)
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
    assert (pool.stats().used, pool.stats().free) == (0, 7)


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
