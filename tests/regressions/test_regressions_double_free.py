"""Family A: one block freed twice, and free lists that lost their order. See README.md."""

import pytest
from catalogue import idle

from kvpool.errors import OutOfBlocks


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
