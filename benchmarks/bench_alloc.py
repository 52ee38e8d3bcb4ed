"""Block-level alloc and free on a pool of 100,000 blocks in shuffled order."""

import numpy as np
import pytest

import kvpool
from benchmarks.baselines import Floor
from kvpool.cli.bench import PlainAllocator

NUM_BLOCKS = 100_000
CALLS = 256
BULK = "alloc+free, 1..64 blocks a call"
SEED = 20261121


def shuffled_pool():
    """Return a pool whose free blocks are in random order, as after hours of use."""
    pool = kvpool.Pool(NUM_BLOCKS + 1, 16)
    pool.blocks.free(np.random.default_rng(SEED).permutation(pool.blocks.alloc(NUM_BLOCKS)).astype(np.int32))
    return pool


def sizes_and_order():
    """Return the sizes of `CALLS` allocations and the order in which they are freed."""
    rng = np.random.default_rng(SEED)
    return rng.integers(1, 65, CALLS, dtype=np.int32), rng.permutation(CALLS).astype(np.int32)


@pytest.mark.benchmark(group=BULK)
@pytest.mark.parametrize("who", ["kvpool", "floor", "python"])
def bench_bulk(measure, who):
    sizes, order = sizes_and_order()
    if who == "floor":
        ids = np.random.default_rng(SEED).permutation(NUM_BLOCKS).astype(np.int32)
        run = Floor(NUM_BLOCKS, order=ids).alloc_free(sizes, order)
    elif who == "python":
        pool, counts = PlainAllocator(NUM_BLOCKS), sizes.tolist()

        def run():
            groups = [pool.alloc(count) for count in counts]
            for k in order:
                pool.free(groups[k])
    else:
        pool = shuffled_pool()
        alloc, free = pool.blocks.alloc, pool.blocks.free
        outs = [np.empty(count, np.int32) for count in sizes]
        calls = list(zip(sizes.tolist(), outs, strict=True))
        frees = [outs[k] for k in order]

        def run():
            for count, out in calls:
                alloc(count, out=out)
            for ids in frees:
                free(ids)

    measure(run, int(sizes.sum()), row=BULK, who=who)
