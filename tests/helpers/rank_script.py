"""What `test_ranks.py` runs on every rank: a pool, a sum in place of a model, and one way to go wrong."""

import os
import sys
import time

import mlx.core as mx

from kvpool import Plan, Pool
from kvpool.adapters.ranks import RankLost, Ranks, RanksDisagree

STEPS, WHEN = 12, 5
fault = sys.argv[1]
group = mx.distributed.init(strict=True, backend="ring")
is_last = group.rank() == group.size() - 1
pool = Pool(64, 4, seed=1)
plan = Plan(pool, 4)
handles, passes = [pool.open() for _ in range(3)], 0


def end(message):
    print(message, flush=True)
    os._exit(0)  # another status, and mlx.launch may end the other rank before it has said what it saw


def go_wrong(here):
    """The fault of this place, or what does not happen on the other ranks."""
    if not (is_last and step == WHEN and fault == here):
        return
    if fault in ("leave", "model-leave"):
        end("left")
    elif fault == "crash":
        os.abort()
    elif fault == "diverge":
        handles.append(int(pool.fork(handles[0])[0]))  # one row more, which the sum would be longer by
    elif fault != "words":
        time.sleep(3600)


on_timeout = end if fault == "model-hang" else None  # both ranks time out; a hang outside of a step nobody watches
with Ranks(group, timeout=3.0 if "hang" in fault else 60.0, on_timeout=on_timeout) as ranks:
    try:
        for step in range(1, STEPS + 1):
            for here in ("diverge", "leave", "crash", "hang"):
                go_wrong(here)
            pool.step(plan, handles, 1)
            other = {"batch": 7, "words": "7"}.get(fault, 3) if is_last and step == WHEN else 3
            batch = [other] * len(handles)
            with ranks.step(pool, batch=batch) as digest:
                go_wrong("model-leave")
                go_wrong("model-hang")
                mx.eval(mx.distributed.all_sum(mx.ones(1000 * len(handles)), group=group, stream=mx.cpu))
                passes += 1
            pool.done(plan)
    except (RanksDisagree, RankLost, TypeError) as error:
        pool.check()
        print(f"rank {group.rank()} stopped: {type(error).__name__} {error}, after {passes} passes", flush=True)
        sys.exit(0)
print(f"rank {group.rank()} digest {digest:016x} after {ranks.steps}", flush=True)
print(f"rank {group.rank()}: done", flush=True)
