"""Families A, C, D, E and H: blocks freed twice or while in use, copies, counts, failures half way. See README.md."""

import pytest

from kvpool.adapters.block_manager import KVBlockManager
from kvpool.config import KVSpec
from kvpool.errors import OutOfBlocks, PlanStateError


def test_a6_reference_to_a_cached_block_takes_it_off_the_list(make_pool):
    """Pin was an incref on a block that still sat in the free queue; release queued it again."""
    pool = make_pool(4)
    block = pool.blocks.alloc()
    pool.blocks.mark_cached(block)
    pool.blocks.free(block)
    pool.blocks.touch(block)
    assert pool.stats().evictable == 0
    pool.blocks.alloc(2)
    with pytest.raises(OutOfBlocks):
        pool.blocks.alloc()  # the revived block is not to be had
    pool.blocks.decref(block)
    assert pool.stats().evictable == 1
    assert pool.blocks.alloc() == block


def test_d5_arrays_that_the_pool_returned_do_not_change_under_the_caller(make_pool, grow):
    """An offset array was changed in place; the caller's reference changed with it."""
    pool = make_pool()
    handle = pool.open()
    grow(pool, handle, 6)
    table, ids = pool.table(handle), pool.blocks.alloc(2)
    pool.truncate(handle, 0)
    pool.blocks.free(ids)
    pool.blocks.alloc(5)
    assert table.tolist() == [1, 2] and ids.tolist() == [3, 4]


def test_e12_storage_has_as_many_blocks_as_its_pool():
    """The same, where one object owns both."""
    manager = KVBlockManager(KVSpec(1, 1, 8, "float32", 4), num_blocks=8)
    assert manager.backend.num_blocks == manager.pool.stats().num_blocks


def test_h8_small_block_sizes_and_empty_prompts(make_pool, make_plan):
    """Documented block sizes 1 and 8 crashed, and so did max_tokens = 0."""
    for block_size in (1, 8):
        pool = make_pool(8, block_size)
        handle = pool.open(0)
        plan = make_plan(pool)
        pool.step(plan, [handle], 0)
        assert plan.seq_lens.tolist() == [0] and plan.slot_mapping.shape == (0,)
        pool.done(plan)
        pool.step(plan, [handle], 1)
        assert plan.slot_mapping.tolist() == [block_size]


def test_c5_row_of_a_dead_sequence_is_padded(make_pool, make_plan):
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


def test_c8_contents_hold_until_the_next_step_on_the_plan(make_pool, make_plan):
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


def test_c15_hit_that_was_evicted_in_between_is_refused(make_pool, refused):
    """A hit was evicted between lookup and use."""
    pool = make_pool(2, 4)
    block = pool.blocks.alloc()
    pool.blocks.mark_cached(block)
    pool.blocks.free(block)
    pool.blocks.evict(1)
    with refused(pool, ValueError, "touch", block):
        pool.blocks.touch(block)
