"""The whole life of a request: 2k tokens of prompt, 1k of them shared, 200 decode steps in a batch of 64, free.

64 requests arrive together: each is opened with what the prefix cache holds of it, computed, committed, decoded
with the others and closed. The pool is a few times as large as the batch, so from the second round on every new
block is an evicted one. The time is that of one request.
"""

import itertools

import numpy as np
import pytest

import kvpool
from benchmarks.baselines import Floor
from benchmarks.bench_prefix import BLOCK_SIZE, SEED, VOCABULARY, Lines, random_prompts

REQUESTS = 64
PROMPT = 2_048
SHARED = 1_024
STEPS = 200
NUM_BLOCKS = 20_000
ROUNDS = 20
ROW = f"request: 2k prompt, half of it cached, {STEPS} decode steps"


def kvpool_requests():
    """Return what makes `REQUESTS` new prompts, and what serves them."""
    rng = np.random.default_rng(SEED)
    pool = kvpool.Pool(
        NUM_BLOCKS + 1, BLOCK_SIZE, max_seqs=REQUESTS, max_blocks_per_seq=256, in_order=True, prefix_cache=True,
        seed=SEED,
    )  # fmt: skip
    pool.blocks.free(rng.permutation(pool.blocks.alloc(NUM_BLOCKS)).astype(np.int32))
    prefill = kvpool.Plan(pool, 1, PROMPT)
    decode = kvpool.Plan(pool, REQUESTS)
    handles = np.empty(REQUESTS, np.int64)
    (system,) = random_prompts(rng, 1, SHARED)
    prompts = []

    def new_prompts():
        own = rng.integers(0, VOCABULARY, (REQUESTS, PROMPT - SHARED), dtype=np.int32)
        prompts[:] = [np.concatenate([system, tokens]) for tokens in own]

    def serve():
        for i, prompt in enumerate(prompts):
            handle = handles[i] = pool.open(prompt)
            cached = pool.num_tokens(handle)
            pool.step(prefill, [handle], PROMPT - cached)
            pool.prefix.commit(handle, prompt[cached:])
        for _ in range(STEPS):
            pool.step(decode, handles, 1)
        pool.close(handles)

    return pool, new_prompts, serve


def floor_requests():
    """Return the same in C: blocks taken, tables and slots filled, cached tokens compared, new ones stored."""
    floor = Floor(NUM_BLOCKS, rows=REQUESTS + 1, width=256, block_size=BLOCK_SIZE)
    lines = Lines(NUM_BLOCKS)
    prompts = random_prompts(np.random.default_rng(SEED), 1 + 2 * REQUESTS, SHARED)
    system = prompts[0]
    lines.store(0, system)()
    equal = lines.equal(0, system)
    stores = itertools.cycle([lines.store(k, prompts[k]) for k in range(1, len(prompts))])
    rows = np.arange(1, REQUESTS + 1, dtype=np.int32)
    lengths = np.full(REQUESTS + 1, SHARED)
    lengths[0] = 0
    prefills = [floor.steps(rows[i : i + 1], np.empty(SHARED, np.int32), SHARED, 1) for i in range(REQUESTS)]
    decode = floor.steps(rows, np.empty(REQUESTS, np.int32), 1, STEPS)

    def serve():
        floor.set_lengths(lengths)
        for prefill in prefills:
            equal()
            prefill()
            next(stores)()
        decode()
        floor.close(REQUESTS)

    return serve


@pytest.mark.benchmark(group="request lifecycle")
@pytest.mark.parametrize("who", ["kvpool", "floor"])
def bench_lifecycle(measure, who):
    if who == "floor":
        measure(floor_requests(), REQUESTS, row=ROW, who=who, rounds=ROUNDS)
        return
    pool, new_prompts, serve = kvpool_requests()
    new_prompts()
    serve()
    before = pool.prefix.stats()
    measure(serve, REQUESTS, row=ROW, who=who, setup=new_prompts, rounds=ROUNDS)
    after = pool.prefix.stats()
    assert after.hit_tokens - before.hit_tokens == SHARED * (after.queries - before.queries)
    assert after.evicted > before.evicted
