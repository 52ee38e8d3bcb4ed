"""Tables per layer group on one `BlockPool`: null blocks, skipped prefixes, blocks behind a window."""

import random
import re
from math import lcm

import pytest

from kvpool.adapters import block_groups
from kvpool.adapters.block_groups import GroupKeys, longest_hit, skip
from kvpool.adapters.block_pool import BlockPool
from kvpool.errors import DoubleFree

MOST = 96  # tokens of a prompt
KINDS = ("full", "window", "chunk", "state")


def prompt(rng):
    """A pool, the keys of a prompt in one to four groups, and per group the position of each cached key -> block."""
    pool, groups, cached = BlockPool(400), [], []
    for number in range(rng.randint(1, 4)):
        block_size = rng.choice([4, 8, 12, 16])
        grain = rng.choice([grain for grain in (2, 4, 8, 12, 16) if block_size % grain == 0])
        keys = [(number, i) for i in range(rng.randint(MOST // 2, MOST) // grain)]
        share = rng.choice([0.5, 0.9, 0.97, 1.0])
        held = [key for key in keys if rng.random() < share]
        blocks = pool.get(len(held))
        pool.cache(blocks, held)
        cached.append({(key[1] + 1) * grain: block for key, block in zip(held, blocks, strict=True)})
        groups.append(GroupKeys(keys, block_size, rng.choice(KINDS), rng.randint(1, 40), grain))
    return pool, groups, cached


def blocks_read(group, cached, tokens):
    """Per block of a prefix: None if the next query does not read it, else the cached blocks that are right there."""
    ways = []
    for start in range(0, tokens, group.block_size):
        span = range(start, min(start + group.block_size, tokens))
        read = {
            "full": lambda p: True,
            "window": lambda p: tokens - p < group.size,
            "chunk": lambda p: p // group.size == tokens // group.size,
            "state": lambda p: p == tokens - 1,
        }[group.kind]
        ends = [tokens] if group.kind == "state" else range(span[-1] + 1, start + group.block_size + 1)
        ways.append([cached[end] for end in ends if end in cached] if any(map(read, span)) else None)
    return ways


def judge(rng):
    """The hit is the longest length that every group allows, and its tables have blocks that are right there."""
    pool, groups, cached = prompt(rng)
    align, limit = rng.choice([None, 1, 2, 4, 6]), rng.choice([None, rng.randint(0, MOST)])
    every = lcm(*(group.block_size for group in groups)) if align is None else align
    most = min(MOST if limit is None else limit, *(len(group.keys) * group.grain for group in groups))
    allowed = [
        tokens
        for tokens in range(0, most + 1, every)
        if all([] not in blocks_read(group, held, tokens) for group, held in zip(groups, cached, strict=True))
    ]
    before = pool.free_order(), pool.num_cached
    hit = longest_hit(pool, groups, align=align, limit=limit)
    assert hit.tokens == max(allowed)
    for group, held, table in zip(groups, cached, hit.tables, strict=True):
        ways = blocks_read(group, held, hit.tokens)
        assert len(table) == len(ways)
        assert all(block in way if way else block == 0 for block, way in zip(table, ways, strict=True))
    assert before == (pool.free_order(), pool.num_cached)


@pytest.mark.parametrize("seed", range(8))
def test_hit_is_the_longest_of_all_lengths(seed):
    rng = random.Random(seed)
    for _ in range(100):
        judge(rng)


READ_FROM = block_groups._Prefix.read_from


def window_short_by_one(group, tokens):
    return READ_FROM(group, tokens) + (group.kind == "window" and group.size > 1)


def test_hit_with_a_planted_fault_is_convicted(monkeypatch):
    monkeypatch.setattr(block_groups._Prefix, "read_from", window_short_by_one)
    with pytest.raises(AssertionError):
        for seed in range(8):
            test_hit_is_the_longest_of_all_lengths(seed)


def test_hit_of_a_partial_block_is_found_only_where_it_may_be():
    """Two blocks of 32 tokens, and the state after 48: the prefix ends inside the second, and inside the state's."""
    pool = BlockPool(16)
    full, states = [("full", i) for i in range(2)], [("state", i) for i in range(4)]
    table, (state,) = pool.get(2), pool.get(1)
    pool.cache(table, full)
    pool.cache([state], states[2:3])
    groups = [GroupKeys(full, 32), GroupKeys(states, 64, "state", grain=16)]
    assert longest_hit(pool, groups) == (0, [[], []])
    assert longest_hit(pool, groups, align=16) == (48, [table, [state]])
    assert longest_hit(pool, groups, align=16, limit=47) == (0, [[], []])


@pytest.mark.parametrize(
    ("groups", "options", "message"),
    [
        ([], {}, "there are 0 groups, the least is 1"),
        ([GroupKeys([], 16, "mamba")], {}, "kind is 'mamba': give 'full', 'window', 'chunk' or 'state'"),
        ([GroupKeys([], 0)], {}, "block_size is 0, the range is 1 .."),
        ([GroupKeys([], 16, "window", 0)], {}, "size is 0, the range is 1 .."),
        ([GroupKeys([], 16, grain=6)], {}, "grain is 6, it must divide the block size 16"),
        ([GroupKeys([], 16)], {"align": 0}, "align is 0, the range is 1 .."),
        ([GroupKeys([], 16)], {"limit": -1}, "limit is -1, the range is 0 .."),
    ],
)
def test_hit_of_bad_arguments_is_refused(groups, options, message):
    with pytest.raises(ValueError, match=re.escape(f"[longest_hit] {message}")):
        longest_hit(BlockPool(8), groups, **options)


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
