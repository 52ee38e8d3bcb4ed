"""Family H: failures half way, and waiting for ever. See README.md."""

import numpy as np
import pytest
from catalogue import idle
from prefixes import compute

from kvpool.errors import OutOfBlocks


def test_h1_failure_half_way_leaves_no_block_without_owner(make_pool, make_plan):
    """Page allocation failed mid-way; blocks that were taken already had no owner."""
    pool = make_pool(8, 4)
    handles = [pool.open() for _ in range(4)]
    plan = make_plan(pool)
    with pytest.raises(OutOfBlocks) as caught:
        pool.step(plan, handles, [8, 8, 8, 8])
    assert caught.value.row == 3
    assert [pool.capacity(h) for h in handles] == [0, 0, 0, 0]
    assert (pool.stats().used, pool.stats().blank) == (0, 7)


def test_h2_failed_step_leaves_no_reference_up_or_down(make_pool, make_plan, grow, refused):
    """Touch before the capacity check left references bumped on failure."""
    pool = make_pool(8, 4)
    parent = pool.open()
    grow(pool, parent, 6)
    rows = [parent, *pool.fork(parent, 3).tolist()]
    plan = make_plan(pool)
    with refused(pool, OutOfBlocks, "step", plans=[plan]):
        pool.step(plan, rows, 7)  # three copies and eight appended blocks, five are free
    assert [pool.blocks.refcount(b) for b in range(1, 8)] == [4, 4, 0, 0, 0, 0, 0]
    assert [pool.table(h).tolist() for h in rows] == [[1, 2]] * 4


def test_h3_can_and_step_agree(make_pool, make_plan, grow):
    """Check and take disagreed: 'failure to allocate KV blocks'."""
    rng = np.random.default_rng(4)
    for _ in range(400):
        pool = make_pool(14, 4)
        parent = pool.open()
        grow(pool, parent, int(rng.integers(1, 9)))
        rows = [parent, *pool.fork(parent, int(rng.integers(0, 3))).tolist(), pool.open(4)]
        pool.blocks.alloc(int(rng.integers(0, 8)))
        new = rng.integers(0, 9, len(rows))
        plan = make_plan(pool)
        if pool.can(rows, new):
            pool.step(plan, rows, new)
        else:
            with pytest.raises(OutOfBlocks):
                pool.step(plan, rows, new)


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


def test_h6_request_larger_than_the_pool_is_an_error_not_a_wait(make_pool, make_plan):
    """Tiny pools hung."""
    pool = make_pool(2, 4, max_blocks_per_seq=100)
    handle = pool.open()
    with pytest.raises(OutOfBlocks) as caught:
        pool.step(make_plan(pool), [handle], 60)
    assert (caught.value.needed, caught.value.short_by) == (15, 14)


def test_h7_batch_that_is_refused_in_its_middle_has_done_nothing(make_pool, make_plan, refused):
    """Storing failed for some blocks of a batch, and the books of the others were updated."""
    pool = make_pool(prefix_cache=True)
    good, short = pool.open(), pool.open()
    compute(make_plan, pool, good, 4)
    compute(make_plan, pool, short, 3)
    with refused(pool, ValueError, "commit", 3):
        pool.prefix.commit([good, short], [1, 1, 1, 1, 2, 2, 2, 2])
    assert pool.prefix.match([1] * 5) == 0


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
