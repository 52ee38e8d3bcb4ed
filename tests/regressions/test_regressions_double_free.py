"""Family A: one block freed twice, and free lists that lost their order. See README.md."""

import pytest

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
