"""The core and its plain model, for tests whose every number holds for both."""

import kvpool
from kvpool.testing import ModelPlan, ModelPool


def pools_of(kind, formats):
    """Yield ``make(num_blocks, block_size, *groups, **options)``, which makes a pool and two plans; check all pools."""
    make_pool, make_plan = (ModelPool, ModelPlan) if kind == "model" else (kvpool.Pool, kvpool.Plan)
    pools = []

    def build(num_blocks, block_size, *groups, **options):
        pool = make_pool(num_blocks, block_size, groups=list(groups), **{"max_seqs": 8, **options})
        pools.append(pool)
        return pool, *(make_plan(pool, 4, 32, formats=formats) for _ in range(2))

    yield build
    for pool in pools:
        pool.check()
        pool.shutdown()
