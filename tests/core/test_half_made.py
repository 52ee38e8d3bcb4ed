"""Pools that could not be made: whoever still sees one finds a pool that was shut down."""

import pytest

from kvpool import Pool
from kvpool.errors import PoolClosed

WRONG = [
    *({"block_size": 0}, {"reserved_blocks": 99}, {"max_seqs": 0}, {"max_blocks_per_seq": 0}),
    *({"watermark": 99}, {"seed": "x"}, {"prefix_cache": 1}, {"events": 5}, {"in_order": 3}, {"block_size": "4"}),
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_finalizer_of_a_pool_that_could_not_be_made_finds_it_closed(wrong):
    seen = []

    class Finalized(Pool):
        def __del__(self):
            for call in (lambda: self.is_open(0), lambda: self.blocks.incref([1]), self.stats, self.check):
                with pytest.raises(PoolClosed):
                    call()
                seen.append(call)
            self.shutdown()

    with pytest.raises((ValueError, TypeError)):
        Finalized(**({"num_blocks": 8, "block_size": 4} | wrong))
    assert len(seen) == 4


def test_pools_that_could_not_be_made_give_their_tags_back():
    for _ in range(3000):  # there are 2,047
        with pytest.raises(TypeError):
            Pool(8, 4, in_order=3)
    Pool(8, 4).shutdown()


def test_compact_judges_its_arguments_in_their_order():
    pool = Pool(8, 4)
    handle = pool.open()
    with pytest.raises(TypeError, match="handles"):
        pool.compact(["x"], [1], -1)
    with pytest.raises(TypeError, match="lens"):
        pool.compact([handle], "x", -1)
    with pytest.raises(ValueError, match="first"):
        pool.compact([handle], [0], -1)
