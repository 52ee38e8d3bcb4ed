"""Statistics of the prefix cache, worked out by hand."""

from __future__ import annotations

import pytest
from prefixes import cache

from kvpool.stats import PrefixStats

A, B, C = ([n] * 4 for n in (1, 2, 3))


def test_stats_count_queries_and_hits_and_those_of_sequences_that_come_back_apart(make_any, make_plan):
    pool = make_any()
    zero = pool.prefix.stats()
    assert zero == PrefixStats(0, 0, 0, 0.0, 0, 0, 0, 0, 0, 0.0)
    cache(make_plan, pool, A + B)  # 8 asked
    cache(make_plan, pool, A + B + C)  # 12 asked, 8 found
    pool.open(5)  # a count is no query
    pool.open([])
    pool.close(pool.open(A + B + C, again=True))  # 12 asked, 8 found
    pool.open(A + C, again=True)  # 8 asked, 4 found
    stats = pool.prefix.stats()
    assert (stats.queries, stats.query_tokens, stats.hit_tokens) == (3, 20, 8)
    assert stats.hit_rate == pytest.approx(0.4)
    assert (stats.again_queries, stats.again_query_tokens, stats.again_hit_tokens) == (2, 20, 12)
    assert (stats.nodes, stats.inserted, stats.duplicates, stats.evicted, stats.namespaces) == (3, 3, 0, 0, 1)
    pool.blocks.evict(2)
    stats = pool.prefix.stats()
    assert (stats.nodes, stats.inserted) == (1, 3) and stats.evicted == 2 * len(pool.options.groups)  # A is in use
    pool.prefix.flush()
    pool.reset()
    stats = pool.prefix.stats()
    assert (stats.queries, stats.inserted, stats.nodes, stats.namespaces) == (3, 3, 0, 0)


def test_open_again_finds_and_takes_what_any_open_does(make_any, make_plan):
    pools = [make_any(seed=1) for _ in range(2)]
    for pool, options in zip(pools, ({}, {"again": True}), strict=True):
        cache(make_plan, pool, A + B)
        pool.open(A + B + C, **options)
        pool.open(7, **options)  # a count is looked up by nobody
    assert pools[0].digest() == pools[1].digest()
    assert pools[1].prefix.stats().again_queries == 1
    for wrong in (1, None, "yes"):
        with pytest.raises(TypeError, match=r"^\[open\] again .* bool"):
            pools[1].open(A, again=wrong)
