"""Family H: failures half way, and waiting for ever. See README.md."""

import pytest
from catalogue import idle

from kvpool.errors import OutOfBlocks


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


def test_h4_batch_that_does_not_fit_can_be_tried_again_smaller(make_pool, make_plan):
    """The cache's state was not restored when a batch did not fit."""
    pool = make_pool(6, 4)
    handles = [pool.open() for _ in range(3)]
    plan = make_plan(pool)
    with pytest.raises(OutOfBlocks):
        pool.step(plan, handles, 8)
    pool.step(plan, handles[:2], 8)
    assert [pool.table(h).tolist() for h in handles] == [[1, 2], [3, 4], []]
    assert plan.dirty_rows.tolist() == [0, 1]


def test_h5_room_that_a_victim_gives_back_is_room(make_pool, make_plan):
    """A second allocator had books of its own: it raised where the first would have preempted, and nothing moved."""
    pool = make_pool(8, 4)
    plan = make_plan(pool)
    for _ in range(5):
        victim, survivor = pool.open(), pool.open()
        pool.step(plan, [victim, survivor], 12)
        pool.done(plan)
        with pytest.raises(OutOfBlocks) as caught:
            pool.step(plan, [survivor], 8)
        pool.close(victim)
        assert caught.value.short_by <= 3
        pool.step(plan, [survivor], 8)
        pool.done(plan)
        pool.close(survivor)
    assert idle(pool)
