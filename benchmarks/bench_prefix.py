"""The prefix cache: lookups, insertions at full churn, memory. Blocks of 16 tokens, int32 prompts.

The pool is full of committed prompts whose blocks lie in random order, as after hours of use, and every lookup
is of another prompt than the ones before. Times are per 1,000 tokens.
"""

import ctypes
import itertools

import numpy as np
import pytest

import kvpool
from benchmarks.baselines import load_c, pointer

BLOCK_SIZE = 16
THOUSAND = 1000
SEED = 20261121
VOCABULARY = 128_000
LOOKUPS = 4  # per round; so many prompts are held at a time, and the smallest pool has no more
PROMPT, SIZES = 4_096, (1_024, 100_000, 1_000_000)  # tokens, blocks of the pool
CHURN_BLOCKS = 4_096
SHARED = 1_024  # tokens of the system prompt in the churn
INDEX_BLOCKS = 100_000
GROUPS = {"one": None, "three": [kvpool.Group.full(), kvpool.Group.window(128), kvpool.Group.state(16, blocks=3)]}


def random_prompts(rng, count, prompt_len):
    """Return `count` prompts, int32 ``[count, prompt_len]``."""
    return rng.integers(0, VOCABULARY, (count, prompt_len), dtype=np.int32)


class Cache:
    """A pool full of committed `prompts` in random places; with several groups they take half of its blocks."""

    def __init__(self, num_blocks, prompt_len, max_seqs=16, groups=None):
        self.rng = np.random.default_rng(SEED)
        blocks = prompt_len // BLOCK_SIZE
        count = num_blocks // blocks
        total = count * blocks * (2 if groups else 1)
        self.pool = kvpool.Pool(
            total + 1, BLOCK_SIZE, max_seqs=max_seqs, max_blocks_per_seq=blocks + 1, in_order=True,
            prefix_cache=True, seed=SEED, groups=groups,
        )  # fmt: skip
        self.pool.blocks.free(self.rng.permutation(self.pool.blocks.alloc(total)).astype(np.int32))
        self.plan = kvpool.Plan(self.pool, 1, prompt_len, formats=("seq_lens",))
        self.prompts = random_prompts(self.rng, count, prompt_len)
        for prompt in self.prompts:
            self.serve(prompt)
        assert self.pool.prefix.match(np.append(self.prompts[0], np.int32(0))) == prompt_len

    def serve(self, prompt):
        """Open, compute, commit and close a prompt."""
        pool = self.pool
        handle = pool.open(prompt, cut=len(prompt))
        cached = pool.num_tokens(handle)
        pool.step(self.plan, [handle], len(prompt) - cached)
        pool.prefix.commit(handle, prompt[cached:])
        pool.close(handle)


class Lines:
    """The floor's memory: the tokens of all blocks, in random places.

    ``equal(k, prompt)`` and ``store(k, prompt)`` return functions that compare or write the blocks of a prompt in C;
    prompts with different k lie in different places.
    """

    def __init__(self, num_blocks):
        self._c = load_c("lines")
        for function in (self._c.lines_equal, self._c.lines_store):
            function.argtypes = [*[ctypes.POINTER(ctypes.c_int32)] * 3, ctypes.c_int32]
        memory = np.zeros((num_blocks + 1) * BLOCK_SIZE, np.int32)
        start = -memory.ctypes.data % 64 // 4  # a block is one cache line
        self._stored = memory[start : start + num_blocks * BLOCK_SIZE].reshape(num_blocks, BLOCK_SIZE)
        self._order = np.random.default_rng(SEED).permutation(num_blocks).astype(np.int32)

    def _bind(self, function, k, prompt):
        blocks = len(prompt) // BLOCK_SIZE
        where = self._order[k * blocks : (k + 1) * blocks]
        assert len(where) == blocks
        arrays = [self._stored, where, prompt]
        pointers = [pointer(array) for array in arrays]
        return lambda keep=arrays: function(*pointers, blocks)

    def equal(self, k, prompt):
        return self._bind(self._c.lines_equal, k, prompt)

    def store(self, k, prompt):
        return self._bind(self._c.lines_store, k, prompt)


@pytest.mark.benchmark(group="full hit")
@pytest.mark.parametrize("num_blocks", SIZES)
@pytest.mark.parametrize("who", ["kvpool", "floor"])
def bench_full_hit(measure, who, num_blocks):
    """Hash, look up, prove and hold every block of a cached prompt."""
    name = f"prefix hit per 1k tokens, 4k prompt, {num_blocks:,} blocks"
    items = LOOKUPS * PROMPT / THOUSAND
    if who == "floor":
        lines, rng = Lines(num_blocks), np.random.default_rng(SEED)
        prompts = random_prompts(rng, num_blocks * BLOCK_SIZE // PROMPT, PROMPT)
        for k, prompt in enumerate(prompts):
            lines.store(k, prompt)()
        assert all(lines.equal(k, prompt)() == PROMPT // BLOCK_SIZE for k, prompt in enumerate(prompts))
        calls = itertools.cycle([lines.equal(k, prompt) for k, prompt in enumerate(prompts)])
        measure(lambda: [next(calls)() for _ in range(LOOKUPS)], items, row=name, who=who)
        return
    measure_hits(measure, Cache(num_blocks, PROMPT), name, items)


def measure_hits(measure, cache, name, items):
    """Hold cached prompts, other ones in every round."""
    pin, unpin, held, asked = cache.pool.prefix.pin, cache.pool.prefix.unpin, [], []

    def other_prompts():
        for handle in held:
            unpin(handle)
        cache.pool.stats()  # a pool settles released blocks at the next call
        chosen = cache.rng.choice(len(cache.prompts), LOOKUPS, replace=False)
        asked[:] = [cache.prompts[i].copy() for i in chosen]

    def look_up():
        held[:] = [pin(prompt) for prompt in asked]

    measure(look_up, items, row=name, who="kvpool", setup=other_prompts)
    assert all(cache.pool.num_tokens(handle) == len(cache.prompts[0]) for handle in held)


@pytest.mark.benchmark(group="full hit")
@pytest.mark.parametrize("num_blocks", [10_000, 100_000])
@pytest.mark.parametrize("groups", GROUPS)
def bench_hit_of_groups(measure, groups, num_blocks):
    """Hold a prompt of 1,024 tokens: full attention alone, or with a window and states that have a checkpoint."""
    cache = Cache(num_blocks, 1_024, groups=GROUPS[groups])
    measure_hits(measure, cache, f"prefix hit of 1,024 tokens, groups: {groups}, {num_blocks:,} blocks", LOOKUPS)


@pytest.mark.benchmark(group="insert at full churn")
@pytest.mark.parametrize("num_blocks", SIZES)
@pytest.mark.parametrize("who", ["kvpool", "floor"])
def bench_insert(measure, who, num_blocks):
    """A new prompt in a full pool: a miss, an eviction for every block, and every block inserted."""
    name = f"prefix insert per 1k tokens, 4k prompt, {num_blocks:,} blocks"
    items = LOOKUPS * PROMPT / THOUSAND
    if who == "floor":
        lines = Lines(num_blocks)
        prompts = random_prompts(np.random.default_rng(SEED), 2 * LOOKUPS, PROMPT)
        places = num_blocks * BLOCK_SIZE // PROMPT
        calls = itertools.cycle([lines.store(k, prompts[k % len(prompts)]) for k in range(places)])
        measure(lambda: [next(calls)() for _ in range(LOOKUPS)], items, row=name, who=who)
        return
    cache, new = Cache(num_blocks, PROMPT), []
    serve = cache.serve

    def new_prompts():
        new[:] = list(random_prompts(cache.rng, LOOKUPS, PROMPT))

    def insert():
        for prompt in new:
            serve(prompt)

    before = cache.pool.prefix.stats().evicted
    measure(insert, items, row=name, who=who, setup=new_prompts)
    assert (cache.pool.prefix.stats().evicted - before) % (LOOKUPS * PROMPT // BLOCK_SIZE) == 0


@pytest.mark.benchmark(group="miss")
def bench_miss(measure):
    """A prompt whose first block is unknown; the time is that of the call."""
    cache = Cache(100_000, PROMPT)
    match, unknown = cache.pool.prefix.match, []

    def new_prompts():
        unknown[:] = list(random_prompts(cache.rng, 64, PROMPT))

    def look_up():
        for prompt in unknown:
            match(prompt)

    measure(look_up, 64, row="prefix miss, per call, 4k prompt, 100,000 blocks", who="kvpool", setup=new_prompts)


@pytest.mark.benchmark(group="list")
def bench_list(measure):
    """The same with lists of int in place of arrays: nearly all of it is the checked conversion."""
    cache = Cache(1_024, PROMPT)
    match, unknown = cache.pool.prefix.match, []

    def new_prompts():
        unknown[:] = random_prompts(cache.rng, 8, PROMPT).tolist()  # as from a tokenizer: new, still in cache

    def look_up():
        for prompt in unknown:
            match(prompt)

    name = "prompt as a list, per 1k tokens"
    measure(look_up, 8 * PROMPT / THOUSAND, row=name, who="kvpool", setup=new_prompts)


@pytest.mark.benchmark(group="churn")
def bench_churn(measure):
    """Whole requests that share a system prompt, in a pool far too small: the time per evicted block."""
    cache = Cache(CHURN_BLOCKS, 8_192)
    serve, requests = cache.serve, []
    (system,) = random_prompts(cache.rng, 1, SHARED)
    serve(np.concatenate([system, system]))
    own_blocks = np.arange(32, (8_192 - SHARED) // BLOCK_SIZE, 25)

    def new_requests():
        own = [cache.rng.integers(0, VOCABULARY, n * BLOCK_SIZE, dtype=np.int32) for n in own_blocks]
        requests[:] = [np.concatenate([system, tokens]) for tokens in own]

    def churn():
        for tokens in requests:
            serve(tokens)

    before = cache.pool.prefix.stats()
    name = f"prefix churn, per evicted block, {CHURN_BLOCKS:,} blocks"
    rounds = 40
    measure(churn, int(own_blocks.sum()), row=name, who="kvpool", setup=new_requests, rounds=rounds)
    after = cache.pool.prefix.stats()
    assert after.evicted - before.evicted == own_blocks.sum() * (after.queries - before.queries) // len(own_blocks)
    assert after.hit_tokens - before.hit_tokens == SHARED * (after.queries - before.queries)


@pytest.mark.benchmark(group="memory")
def bench_index_memory(measure):
    """Bytes of the index per block, all of it allocated with the pool."""
    pool = kvpool.Pool(INDEX_BLOCKS + 1, BLOCK_SIZE, prefix_cache=True)
    start = pool.prefix.nbytes
    measure(
        lambda: pool.prefix.nbytes, 1, row="prefix index, bytes per block", who="kvpool", rounds=1,
        index_nbytes=start / (INDEX_BLOCKS + 1), limit_nbytes=66 + 4 * BLOCK_SIZE,
    )  # fmt: skip
    assert pool.prefix.nbytes == start
