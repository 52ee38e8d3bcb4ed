"""Family C: used after it was freed, evicted while in use, steps that are late. See README.md."""

import pytest

from kvpool.errors import PlanStateError


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
