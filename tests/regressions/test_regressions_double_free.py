"""Family A: one block freed twice, and free lists that lost their order. See README.md."""

import pytest
from catalogue import idle

from kvpool.errors import OutOfBlocks


def test_a2_fork_of_a_table_then_append_then_free(make_pool, make_plan, grow):
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


def test_a10_truncates_that_meet_inside_a_block_release_it_once(make_pool, grow):
    """Two contiguous frees met inside one page, which was freed twice."""
    pool = make_pool()
    handle = pool.open()
    grow(pool, handle, 12)
    for length in (7, 6, 5, 4, 3, 2, 1, 0):
        pool.truncate(handle, length)
        assert len(pool.table(handle)) == -(-length // 4)
    pool.close(handle)
    assert idle(pool)


def test_a14_batch_that_shares_blocks_releases_each_once(make_pool, grow):
    """Batched frees of two pools needed a queue of their own, or a shared page was freed per group."""
    pool = make_pool()
    parent = pool.open()
    grow(pool, parent, 10)
    family = [parent, *pool.fork(parent, 3).tolist()]
    pool.close(family[:2])
    assert [pool.blocks.refcount(block) for block in (1, 2, 3)] == [2, 2, 2] and pool.stats().blank == 12
    pool.close(family[2:])
    assert sorted(pool.blocks.alloc(15).tolist()) == list(range(1, 16))
