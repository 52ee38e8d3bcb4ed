"""How long calls hold the lock of a pool: CPU time of the longest ones, everything in one call.

``python -m benchmarks.holds``: what other threads wait for in the worst case.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from functools import partial

import numpy as np

from benchmarks.baselines import seconds
from benchmarks.command import main
from benchmarks.gate import table
from kvpool import Plan, Pool

BLOCK_SIZE = 16
ROUNDS = 3
OPTIONS = {"blocks": ("100000,1000000", "of the pools")}


took = partial(seconds, clock=time.thread_time)  # reading and copying the arguments is in it


def calls(num_blocks: int) -> Iterator[tuple[str, float]]:
    """Calls that touch every block of a pool, and how long each took."""
    tokens = np.arange((num_blocks - 2) * BLOCK_SIZE, dtype=np.int32)
    with Pool(num_blocks, BLOCK_SIZE, max_seqs=4, max_blocks_per_seq=num_blocks, prefix_cache=True, seed=1) as pool:
        plan = Plan(pool, 1, max_tokens=len(tokens), formats=("seq_lens",))
        handle = pool.open(0)
        yield "step", took(lambda: pool.step(plan, [handle], len(tokens)))
        yield "done", took(lambda: pool.done(plan))
        yield "commit", took(lambda: pool.prefix.commit(handle, tokens))
        yield "fork", took(lambda: pool.fork(handle))
        yield "match", took(lambda: pool.prefix.match(tokens))
        yield "check", took(pool.check)
        yield "fingerprint", took(pool.fingerprint)
        pool.reset()
        handle = pool.open(0)
        pool.step(plan, [handle], len(tokens))
        pool.done(plan)
        pool.prefix.commit(handle, tokens)
        yield "close", took(lambda: pool.close(handle))
        yield "open", took(lambda: pool.open(tokens))
        pool.close(pool.open(tokens))
        yield "flush", took(pool.prefix.flush)
        yield "reset", took(pool.reset)


def run(args: argparse.Namespace) -> int:
    """Print a line for each pool: ms of CPU time of each call."""
    lines = []
    for size in map(int, args.blocks.split(",")):
        best: dict[str, float] = {}
        for name, took in (found for _ in range(ROUNDS) for found in calls(size)):
            best[name] = min(best.get(name, took), took)
        lines.append([f"{size:,}", *(f"{1e3 * took:.2f}" for took in best.values())])
    print(table(["blocks", *best], *lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
