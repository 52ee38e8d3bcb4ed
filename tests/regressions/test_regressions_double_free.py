"""Family A: one block freed twice, and free lists that lost their order. See README.md."""

import numpy as np
import pytest
from catalogue import idle
from prefixes import cache

from kvpool.errors import DoubleFree, OutOfBlocks, StaleHandle


def test_a1_same_block_twice_in_one_free(make_pool, refused):
    """free([b, b]) decremented per occurrence and queued b twice."""
    pool = make_pool()
    pool.blocks.alloc(3)
    with refused(pool, ValueError, "free", 2):
        pool.blocks.free([2, 2])
    pool.blocks.free(2)
    assert sorted(pool.blocks.alloc(13).tolist()) == [2, *range(4, 16)]


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


def test_a3_null_block_never_reaches_the_free_list(make_pool, refused):
    """Null placeholders and duplicates reached the free queue."""
    pool = make_pool()
    pool.blocks.alloc(3)
    for ids in ([1, 0], [0, 0], [0]):
        with refused(pool, ValueError, "free", 0):
            pool.blocks.free(ids)
    assert 0 not in pool.blocks.alloc(12).tolist()


def test_a4_shared_block_twice_in_one_decref(make_pool, refused):
    """All references were dropped first, then ref == 0 filtered: an id listed twice was queued twice."""
    pool = make_pool()
    block = pool.blocks.alloc()
    pool.blocks.incref(block)
    with refused(pool, ValueError, "decref", block):
        pool.blocks.decref([block, block])
    assert pool.blocks.refcount(block) == 2 and pool.stats().blank == 14


def test_a5_free_list_stays_whole_under_hits_and_pins(make_pool, make_plan):
    """The free queue was corrupted with several connectors and frequent hits: here, many pins and hits at once."""
    pool, rng = make_pool(32, prefix_cache=True), np.random.default_rng(5)
    prompts = [[n] * 12 for n in range(1, 6)]
    held = []  # (what gives it back, handle, its blocks)
    for turn in range(200):
        prompt = prompts[rng.integers(len(prompts))]
        if held and rng.random() < 0.5:
            give_back, handle, _ = held.pop(rng.integers(len(held)))
            give_back(handle)
        elif len(held) < 8:
            cache(make_plan, pool, prompt)
            give_back, handle = pool.close, pool.open([*prompt, 0])
            blocks = pool.table(handle).tolist()[:3]
            if turn % 2:
                pool.close(handle)
                give_back, handle = pool.prefix.unpin, pool.prefix.pin(prompt)
            held.append((give_back, handle, blocks))
        if turn % 8 == 0:  # all that is free leaves its list once, what is held does not
            pool.blocks.evict(32)
            free = pool.blocks.alloc(pool.stats().free).tolist()
            assert len(set(free)) == len(free) and not set(free) & {b for *_, blocks in held for b in blocks}
            pool.blocks.free(free)


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


def test_a6_incref_does_not_resurrect_a_free_block(make_pool, refused):
    """The same, on a blank block."""
    pool = make_pool()
    pool.blocks.free(pool.blocks.alloc(1))
    with refused(pool, DoubleFree, "incref", 1):
        pool.blocks.incref(1)


def test_a7_one_id_is_never_handed_out_twice(make_pool):
    """The wrong one of two blocks was pinned, and an id was handed out again and again."""
    pool = make_pool(64)
    rng, held = np.random.default_rng(1), set()
    for _ in range(500):
        if held and rng.random() < 0.5:
            ids = rng.permutation(sorted(held))[: rng.integers(1, len(held) + 1)].astype(np.int32)
            pool.blocks.free(ids)
            held -= set(ids.tolist())
        elif len(held) < 63:
            ids = pool.blocks.alloc(int(rng.integers(1, 64 - len(held)))).tolist()
            assert not held & set(ids) and len(set(ids)) == len(ids)
            held |= set(ids)
    assert pool.stats().used == len(held)


def test_a9_slot_released_by_close_cannot_be_released_by_truncate(make_pool, grow, refused):
    """A slot was freed by two release paths, one of which inferred the length."""
    pool = make_pool()
    handle = pool.open()
    grow(pool, handle, 9)
    pool.close(handle)
    with refused(pool, StaleHandle, "truncate", handle):
        pool.truncate(handle, 0)
    assert idle(pool)


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


def test_a11_second_free_and_second_close_are_typed_errors(make_pool, refused):
    """A connector popped a request's blocks twice; the server died of a bare assertion."""
    pool = make_pool()
    ids, handle = pool.blocks.alloc(3), pool.open(8)
    pool.blocks.free(ids)
    with refused(pool, DoubleFree, "free", 1):
        pool.blocks.free(ids)
    pool.close(handle)
    with refused(pool, StaleHandle, "close", handle):
        pool.close(handle)


def test_a12_counts_are_never_clamped(make_pool):
    """A count of -1 was 'set back to 0 as a hack'."""
    pool = make_pool()
    block = pool.blocks.alloc()
    pool.blocks.decref(block)
    for _ in range(5):
        with pytest.raises(DoubleFree):
            pool.blocks.decref(block)
    assert pool.blocks.alloc() == block
    pool.blocks.incref(block)
    assert pool.blocks.refcount(block) == 2


def test_a13_stale_mapping_cannot_free_another_owners_block(make_pool, refused):
    """A stale mapping freed a slot that somebody else owned already."""
    pool = make_pool(max_seqs=1)
    former = pool.open(8)
    pool.close(former)
    owner = pool.open(8)
    assert pool.table(owner).tolist() == [1, 2]
    with refused(pool, StaleHandle, "close", former):
        pool.close(former)
    assert pool.table(owner).tolist() == [1, 2]


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
