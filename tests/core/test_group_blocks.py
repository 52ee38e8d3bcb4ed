"""Blocks by id in every arena of a pool with layer groups.

The oracle of the calls is a pool without groups per arena, of as many blocks: what a call does to one arena it must do
to that pool. `test_stats` counts references beside those of sequences.
"""

from __future__ import annotations

import pytest

from kvpool import Group, Pool
from kvpool.errors import DoubleFree

SIZES = (12, 9, 7)
GROUPS = [Group.full(), Group.window(6, arena=1, columns=2, num_blocks=SIZES[1]), Group.state(SIZES[2])]


def grouped() -> Pool:
    return Pool(SIZES[0], 4, groups=GROUPS)


def test_equal_calls_on_two_arenas_give_two_digests():
    digests = set()
    for arena in (0, 1, 2):
        pool = grouped()
        pool.blocks.arena(arena).alloc(2)
        digests.add(pool.digest())
    assert len(digests) == 3


def test_reference_of_a_sequence_is_never_taken_away():
    pool = grouped()
    handle = pool.open(8)
    (block, _), *_ = pool.table(handle, 1).tolist()
    with pytest.raises(DoubleFree):
        pool.blocks.arena(1).decref(block)
    pool.blocks.arena(1).incref(block)
    pool.close(handle)
    assert (pool.stats(0).used, pool.stats(1).used) == (0, 1)
    pool.blocks.arena(1).free(block)
    assert pool.stats(1).used == 0


def test_marked_block_of_a_closed_sequence_comes_back_by_touch():
    pool = grouped()
    handle = pool.open(8)
    entry = pool.table(handle, 1)[0].tolist()
    pool.blocks.arena(1).mark_cached(entry)
    pool.close(handle)
    assert [pool.stats(arena).evictable for arena in range(3)] == [0, 2, 0]
    pool.blocks.arena(1).touch(entry)
    assert [pool.stats(arena).used for arena in range(3)] == [0, 2, 0]
    pool.check()


def test_arena_that_is_not_there_is_refused():
    for pool, count in ((Pool(8, 4), 1), (grouped(), 3)):
        with pytest.raises(ValueError, match=rf"\[blocks\] there is no arena {count}, the pool has {count}"):
            pool.blocks.arena(count)
        with pytest.raises((ValueError, OverflowError)):
            pool.blocks.arena(-1)
        with pytest.raises(TypeError):
            pool.blocks.arena("1")
        assert repr(pool.blocks.arena(0)) == repr(pool.blocks)
