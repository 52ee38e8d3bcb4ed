"""Tables per layer group on one `BlockPool`: null blocks, skipped prefixes, blocks behind a window."""

import random

import pytest

from kvpool.adapters.block_pool import BlockPool
from kvpool.adapters.block_windows import find, skip
from kvpool.errors import DoubleFree


def longest(cached, keys, window):
    """The length of the hit, by its definition."""
    return max(c for c in range(len(keys) + 1) if all(key in cached for key in keys[max(0, c - window) : c]))


def test_find_gives_what_its_definition_says():
    rng = random.Random(18)
    for _ in range(400):
        pool, size = BlockPool(12), rng.randrange(11)
        keys = list(range(size))
        cached = {key: block for key, block in zip(keys, pool.get(size), strict=True) if rng.random() < 0.7}
        pool.cache(list(cached.values()), list(cached))
        for window in range(size + 2):
            end, found = longest(cached, keys, window), find(pool, keys, window=window)
            held = range(max(0, end - window), end)
            assert found == [0] * held.start + [cached[key] for key in held], (cached, window)
        assert pool.lookup(keys) == [cached[k] for k in range(longest(cached, keys, size))]
        pool.check()


def test_find_refuses_a_window_below_nothing():
    pool = BlockPool(8)
    table = pool.get(4)
    pool.cache(table[2:], ["c", "d"])
    assert find(pool, ["a", "b", "c", "d", "e"], window=2) == [0, 0, *table[2:]]
    with pytest.raises(ValueError, match=r"\[find\] window is -1, the least is 0"):
        find(pool, ["a"], window=-1)


def test_skip_is_free_from_the_last_and_puts_null_blocks_in_the_table():
    """Random tables with null blocks and keys, beside a pool on which the blocks are freed by hand."""
    rng = random.Random(7)
    for _ in range(200):
        pools = [BlockPool(12), BlockPool(12)]
        table = pools[0].get(9)
        assert pools[1].get(9) == table
        keyed = [block for block in table if rng.random() < 0.5]
        for pool in pools:
            pool.cache(keyed, keyed)
        done = 0
        while done < len(table):
            n = rng.randint(done, len(table))
            due = [block for block in reversed(table[:n]) if block]
            pools[1].free(due)
            before = list(table)
            assert skip(pools[0], table, n) == due
            assert table == [0] * n + before[n:]
            assert pools[0].free_order() == pools[1].free_order()
            pools[0].check()
            done = n
        assert skip(pools[0], table, 9) == []


def test_skip_that_is_refused_changes_nothing():
    pool = BlockPool(8)
    table = pool.get(3)
    for n in (-1, 4):
        with pytest.raises(ValueError, match=rf"\[skip\] n is {n}, the table has 3 blocks"):
            skip(pool, table, n)
    pool.free(table[:1])
    before = list(table)
    with pytest.raises(DoubleFree):
        skip(pool, table, 2)
    assert table == before and pool.num_free == 5
    pool.check()


def test_groups_of_one_pool_agree_on_a_hit():
    """A full group and a window group, each with keys of its own: what both have is what can be skipped."""
    rng = random.Random(3)
    for _ in range(200):
        pool, contents, window = BlockPool(30), list(range(10)), rng.randint(1, 4)
        tables = [pool.get(10), pool.get(10)]
        keys = [[(content, group) for content in contents] for group in range(2)]
        pool.cache(tables[0], keys[0])
        skip(pool, tables[1], first := rng.randrange(10))
        pool.cache(tables[1], keys[1])
        pool.free(tables[0][::-1])
        pool.free(tables[1][::-1])
        pool.get(rng.randrange(20))  # some of it is evicted
        end, before = 10, -1
        while end != before:
            before = end
            full = pool.lookup(keys[0][:end])
            tail = find(pool, keys[1][: len(full)], window=window)
            end = len(tail)
        found = [{key for key in keys[g] if pool.lookup([key])} for g in range(2)]
        due = [
            c
            for c in range(11)
            if all(key in found[0] for key in keys[0][:c])
            and all(key in found[1] for key in keys[1][max(0, c - window) : c])
        ]
        assert end == max(due), (first, window)
        hit = [*pool.lookup(keys[0][:end]), *find(pool, keys[1][:end], window=window)]
        pool.touch(hit)  # null blocks are passed over
        assert all(pool.refcount(block) for block in hit if block)
        pool.check()
