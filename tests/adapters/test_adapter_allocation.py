"""What a step of an adapter takes of Python's memory: a few KiB, however many blocks there are, and nothing stays."""

import gc
import tracemalloc

import pytest

from kvpool import Pool
from kvpool.adapters.block_pool import BlockPool

SIZES = (256, 65_536)  # blocks
PEAK_MAX, GROWTH_MAX, STAYS_MAX, STEPS = 4096, 1024, 2048, 200  # bytes, bytes, bytes, steps


def measured(step):
    """Peak of one call in bytes, and what is left after `STEPS` of them."""
    for _ in range(20):
        step()
    gc.collect()
    tracemalloc.start()
    try:
        step()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        step()
        peak = tracemalloc.get_traced_memory()[1] - before
        for _ in range(STEPS):
            step()
        gc.collect()
        return peak, tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def blocks_of(num_blocks):
    """A decode step of a scheduler on `BlockPool`: half of the blocks are in use, eight more come and go."""
    pool = BlockPool(num_blocks)
    table, keys = pool.get(num_blocks // 2), [f"key {k}" for k in range(8)]

    def step():
        found = pool.lookup(keys)
        pool.touch(found)
        pool.evict(found)
        pool.free(found)
        ids = pool.get(len(keys))
        pool.cache(ids, keys)
        pool.free(ids[::-1])

    step.kept = table
    return step


def ranks_of(num_blocks):
    """A step of a group of one, half of whose pool is in use."""
    mx = pytest.importorskip("mlx.core", reason="the ranks talk through mlx")
    from kvpool.adapters.ranks import Ranks

    pool, batch = Pool(num_blocks, 16, max_blocks_per_seq=num_blocks), list(range(64))
    pool.open(num_blocks // 2 * 16)
    ranks = Ranks(mx.distributed.init(backend="any"))

    def step():
        with ranks.step(pool, batch=batch):
            pass

    step.close = ranks.close
    return step


def verdict(make):
    """What is wrong with the steps that `make` makes for a number of blocks; None if nothing is."""
    peaks = []
    for size in SIZES:
        step = make(size)
        peak, stays = measured(step)
        getattr(step, "close", lambda: None)()
        print(f"{make.__name__}({size}): peak {peak} bytes, {stays} stay after {STEPS} steps")
        if peak > PEAK_MAX or stays > STAYS_MAX:
            return f"peak {peak}, stays {stays}"
        peaks.append(peak)
    return "grows" if peaks[1] - peaks[0] > GROWTH_MAX else None


@pytest.mark.parametrize("make", [blocks_of, ranks_of])
def test_step_of_an_adapter_takes_little_and_keeps_nothing(make):
    assert verdict(make) is None
