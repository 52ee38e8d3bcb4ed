"""What `tests/test_ranks.py` runs on every rank: pools without a model, and one way to go wrong."""

import os
import sys
import time

import mlx.core as mx

from kvpool import Plan, Pool
from kvpool.adapters.ranks import RankLost, Ranks, RanksDisagree

STEPS, WHEN, TIMEOUT = 12, 5, 3.0
fault = sys.argv[1]
group = mx.distributed.init(strict=True, backend="ring")
is_last = group.rank() == group.size() - 1
pool = Pool(64, 4, seed=1)
plan = Plan(pool, 4)
handles = [pool.open() for _ in range(3)]
with Ranks(group, timeout=TIMEOUT) as ranks:
    try:
        for step in range(1, STEPS + 1):
            pool.step(plan, handles, 1)
            pool.done(plan)
            if is_last and step == WHEN:
                if fault == "diverge":
                    pool.fork(handles[0])
                elif fault == "leave":
                    os._exit(0)  # another status, and mlx.launch may end rank 0 before it has said what it saw
                elif fault == "crash":
                    os.abort()
                elif fault == "hang":
                    time.sleep(3600)
            digest = ranks.agree(pool)
    except (RanksDisagree, RankLost) as error:
        pool.check()
        print(f"rank {group.rank()} stopped: {type(error).__name__} {error}", flush=True)
        sys.exit(0)
print(f"rank {group.rank()} digest {digest:016x} after {ranks.steps}", flush=True)
print(f"rank {group.rank()}: done", flush=True)
