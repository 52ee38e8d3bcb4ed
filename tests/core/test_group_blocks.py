"""Blocks by id in every arena of a pool with layer groups.

The oracle of the calls is a pool without groups per arena, of as many blocks: what a call does to one arena it must do
to that pool. `test_stats` counts references beside those of sequences.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest

from kvpool import Group, Pool
from kvpool.errors import DoubleFree, OutOfBlocks

SIZES = (12, 9, 7)
GROUPS = [Group.full(), Group.window(6, arena=1, columns=2, num_blocks=SIZES[1]), Group.state(SIZES[2])]
CALLS = ("alloc", "alloc", "incref", "decref", "free", "evict", "take", "take", "take_block", "touch", "release")
MORE = ("release", "mark_cached", "mark_cached", "uncache", "drain_evicted", "refcounts", "oldest")


def told(call: Any) -> Any:
    """What a call returned or raised, as values that can be compared."""
    try:
        got = call()
    except OutOfBlocks as error:
        return "OutOfBlocks", error.needed, error.short_by, error.blank, error.evictable, error.limbo
    except Exception as error:
        return type(error).__name__
    return got.tolist() if hasattr(got, "tolist") else got


def make_call(blocks: Any, name: str, n: int, ids: list[int]) -> Any:
    """One call by its name."""
    if name in ("alloc", "evict", "take"):
        return getattr(blocks, name)(n)
    if name == "take_block":
        return blocks.take_block(n)
    if name == "oldest":
        return blocks.release(ids, oldest=True)
    return blocks.drain_evicted() if name == "drain_evicted" else getattr(blocks, name)(ids)


def differences(arenas: list[Any], pool: Pool, seed: int) -> int:
    """Play a random program on all arenas at once; how many calls did something else than on pools without groups."""
    rng, found = random.Random(seed), 0
    plain = [Pool(SIZES[0], 4), Pool(SIZES[1], 4), Pool(SIZES[2], 4, reserved_blocks=0)]
    for _ in range(300):
        at, name, n = rng.randrange(3), rng.choice(CALLS + MORE), rng.randrange(SIZES[0] + 2)
        ids = [rng.randrange(-1, SIZES[at] + 1) if rng.random() < 0.03 else rng.randrange(1, SIZES[at]) for _ in "123"]
        ids = ids[: rng.randint(0, 3)]
        before = pool.digest()
        got, due = (told(partial(make_call, blocks, name, n, ids)) for blocks in (arenas[at], plain[at].blocks))
        found += got != due
        assert isinstance(got, str) is False or pool.digest() == before, f"{name} raised and changed the digest"
        for number, one in enumerate(plain):
            mine = arenas[number]
            found += mine.free_order().tolist() != one.blocks.free_order().tolist()
            found += mine.refcount_histogram().tolist() != one.blocks.refcount_histogram().tolist()
            found += (mine.num_free, mine.num_blank, mine.usage) != (
                one.blocks.num_free,
                one.blocks.num_blank,
                one.blocks.usage,
            )
            found += tuple(pool.stats(number))[:7] != tuple(one.stats())[:7]
        pool.check()
    return found


def grouped() -> Pool:
    return Pool(SIZES[0], 4, groups=GROUPS)


def test_calls_on_an_arena_do_what_they_do_on_a_pool_of_so_many_blocks():
    for seed in range(20):
        pool = grouped()
        assert not differences([pool.blocks.arena(k) for k in range(3)], pool, seed), f"seed {seed}"


def test_calls_on_the_wrong_arena_are_convicted():
    pool = grouped()
    assert differences([pool.blocks.arena(0), pool.blocks.arena(0), pool.blocks.arena(2)], pool, 0)


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
