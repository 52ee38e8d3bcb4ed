"""What kvpool's blocks cost inside vLLM, beside vLLM's own: `python speed.py`, ratios of CPU time (stock / kvpool).

Calls of the pool on vLLM's block objects, then the scheduler's own work (`schedule` and `update_from_output`) of an
engine that decodes. Both sides take turns in one process; the median of 15 rounds counts.
"""

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import engine
from vllm.v1.core import kv_cache_coordinator
from vllm.v1.core.block_pool import BlockPool

from kvpool.adapters.vllm.blocks import KVPoolBlocks

ROUNDS = 15


def ratio(sides):
    """Median over the rounds of the first side's time / that of the second. The sides are functions that time."""
    found = [[side() for side in sides] for _ in range(ROUNDS)]
    return statistics.median(stock / ours for stock, ours in found)


def spent_in(which, pool, n):
    """Seconds of calls of get (0) or free (1), of n blocks each. The clock is read around many, since it costs, too."""
    got = freed = 0.0
    for _ in range(4):
        begin = time.thread_time()
        held = [pool.get_new_blocks(n) for _ in range(4000 // n)]
        between = time.thread_time()
        for blocks in held:
            pool.free_blocks(blocks)
        got, freed = got + between - begin, freed + time.thread_time() - between
    return (got, freed)[which]


def touch(pool, blocks):
    begin = time.thread_time()
    for _ in range(40):
        pool.touch(blocks)
    return time.thread_time() - begin


def calls():
    """{call: ratio} of pools whose blocks have no hashes, as for prompts without a common beginning."""
    pools = [kind(num_gpu_blocks=4096, enable_caching=True, hash_block_size=16) for kind in (BlockPool, KVPoolBlocks)]
    told = {}
    for n in (1, 100, 1000):
        for which, name in enumerate(("get", "free")):
            told[f"{name} {n}"] = ratio([partial(spent_in, which, pool, n) for pool in pools])
    return told | {"touch 256 held": ratio([partial(touch, pool, pool.get_new_blocks(256)) for pool in pools])}


def decoding(folder, kind, rows):
    """An engine that decodes so many rows, and a function that runs 10 steps and returns the scheduler's CPU time."""
    kv_cache_coordinator.BlockPool = kind
    one = engine.engine("full", folder, num_gpu_blocks_override=9000, max_num_batched_tokens=4096, max_num_seqs=256)
    kv_cache_coordinator.BlockPool = BlockPool
    params = engine.SamplingParams(max_tokens=900, temperature=0.0, ignore_eos=True)
    for row in range(rows):
        one.add_request(str(row), {"prompt_token_ids": [4 + (row * 7 + k) % 500 for k in range(40)]}, params)
    scheduler, spent = engine.scheduler_of(one), [0.0]

    def timed(stock, *given, **options):
        begin = time.thread_time()
        try:
            return stock(*given, **options)
        finally:
            spent[0] += time.thread_time() - begin

    for name in ("schedule", "update_from_output"):
        setattr(scheduler, name, partial(timed, getattr(scheduler, name)))
    for _ in range(5):
        one.step()

    def steps():
        spent[0] = 0.0
        for _ in range(10):
            one.step()
        return spent[0]

    return steps


def main():
    for name, found in calls().items():
        print(f"{name:20} {found:6.2f}", flush=True)
    kept = []  # vLLM's process groups end with the first engine that does
    for rows in (1, 256):
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            folders = zip((one, other), (BlockPool, KVPoolBlocks), strict=True)
            kept.append([decoding(Path(folder), kind, rows) for folder, kind in folders])
        print(f"scheduler, {rows:3} rows  {ratio(kept[-1]):6.3f}", flush=True)


if __name__ == "__main__":
    main()
