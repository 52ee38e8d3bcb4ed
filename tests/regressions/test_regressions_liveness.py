"""Family K: how long things take, and that they end. See README.md."""

import time

SMALL, LARGE = 2**6, 2**15
RATIO = 40  # a scan of every block makes it five hundred


def seconds_of(call, times):
    """CPU seconds of so many calls, the best of three."""
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        for _ in range(times):
            call()
        best = min(best, time.process_time() - start)
    return max(best, 1e-6)


def test_k1_stats_cost_the_same_in_a_large_pool(make_pool):
    """A sanity check of all N entries on every idle tick took tens of seconds: servers stood still."""
    small, large = (seconds_of(make_pool(blocks).stats, 20) for blocks in (SMALL, LARGE))
    assert large < RATIO * small


def test_k2_eviction_costs_the_same_in_a_large_pool(make_pool):
    """Eviction scanned all blocks for each victim: 2000 ms where 30 would do."""
    taken = []
    for blocks in (SMALL, LARGE):
        pool = make_pool(blocks)
        ids = pool.blocks.alloc(blocks - 1)
        pool.blocks.mark_cached(ids)
        pool.blocks.free(ids)
        taken.append(seconds_of(pool.blocks.alloc, 20))
        assert pool.stats().evictions == 60
    assert taken[1] < RATIO * taken[0]
