"""Tenants, adapters, images: the same namespace hits, every other one misses."""

from __future__ import annotations

import time

import numpy as np
from prefixes import cache

PROMPT, MORE = [1, 2, 3, 4], [1, 2, 3, 4, 5]
#: That `kvpool.namespace` makes other bytes of other tenants is in tests/core/test_namespace.py.
SPACES = [b"", b"\0", b"\0\0", b"a", b"a\0", b"\0a", b"a" * 1000, b"a" * 1001, b"a" * 999 + b"b"]
SPACES += [b"%d" % number for number in range(16)]  # more than there is room for at first


def test_same_namespace_hits_its_own_blocks_and_every_other_misses(make_any, make_plan):
    pool, blocks = make_any(64), {}
    for space in SPACES:
        assert pool.prefix.match(MORE, space) == 0
        (blocks[space],) = cache(make_plan, pool, PROMPT, space)
    assert len(set(blocks.values())) == len(SPACES)
    for space in SPACES:
        assert pool.table(pool.open(MORE, space), 0).ravel()[0] == blocks[space]
    assert pool.prefix.stats().namespaces == pool.prefix.stats().nodes == len(SPACES)
    assert pool.prefix.stats().duplicates == 0


def test_open_with_a_salt_of_its_own_costs_the_same_whatever_is_cached(core):
    pools = []
    for blocks in (100, 400_000):
        pool = core.Pool(blocks + 8, 4, prefix_cache=True, max_seqs=4, max_blocks_per_seq=blocks, in_order=True, seed=1)
        plan = core.Plan(pool, 1, 4 * blocks, formats=("seq_lens",))
        row = pool.open(4 * blocks)
        pool.step(plan, [row], 4 * blocks)
        pool.prefix.commit(row, np.arange(4 * blocks, dtype=np.int32))
        pool.close(row)
        pool.close(pool.open([1]))  # the first call after a close puts what was released in order
        pools.append(pool)
    spent = [0.0, 0.0]
    for turn in range(60):
        for k, pool in enumerate(pools):
            began = time.thread_time()
            for i in range(100):
                pool.close(pool.open([1, 2, 3], b"%d, %d" % (turn, i)))
            spent[k] += time.thread_time() - began
    print(f"{spent[0]:.4f} s of CPU with 100 cached blocks, {spent[1]:.4f} s with 400,000")
    assert spent[1] <= 1.5 * spent[0]
