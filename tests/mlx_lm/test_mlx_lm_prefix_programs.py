"""Random programs over caches that share a small pool: what is read is always what the sequence's tokens imply.

No model: a layer stores, at every position, a number made of all tokens up to there, so that a block of another
prefix shows even where its own tokens are the same. Two symbols and prompts of a few blocks make hits, duplicates
and evictions frequent.
"""

import copy
import gc
import random
import zlib

import mlx.core as mx
import numpy as np
import pytest
from mlx_models import tiny_llama

import kvpool
from kvpool.adapters.mlx_lm import PagedKVCache, install
from kvpool.errors import OutOfBlocks

BLOCK = 3
LAYERS, HEADS, DIM = 3, 2, 8
NAMESPACES = [b"", kvpool.namespace(salt="other")]


def trace(tokens, namespace, layer):
    """One number per position, float32 exactly, that depends on everything before it."""
    numbers, state = [], zlib.crc32(namespace, layer)
    for token in tokens:
        state = zlib.crc32(bytes([token]), state)
        numbers.append(state % 2**20)
    return numbers


class Program:
    """Sequences in flight, each with the tokens that it holds."""

    def __init__(self, kv, seed):
        self.kv, self.rng = kv, random.Random(seed)
        self.live = []  # [caches, tokens, namespace]
        self.hits = self.refusals = 0

    def tokens(self, most):
        return [self.rng.choice((0, 0, 0, 0, 0, 1)) for _ in range(self.rng.randint(1, most))]

    def pick(self):
        return self.rng.randrange(len(self.live))

    def feed(self, caches, rows, new):
        """One pass over rows of equally many new tokens; False if the pool is full (then nothing happened)."""
        traces = [
            [trace(held + more, ns, layer) for layer in range(LAYERS)]
            for (held, ns), more in zip(rows, new, strict=True)
        ]
        order = self.rng.sample(range(LAYERS), LAYERS)
        for layer in order:
            fresh = mx.array([row[layer][-len(more) :] for row, more in zip(traces, new, strict=True)], mx.float32)
            x = mx.broadcast_to(fresh[:, None, :, None], (len(rows), HEADS, fresh.shape[1], DIM))
            try:
                keys, _ = caches[layer].update_and_fetch(x, -x)
            except OutOfBlocks:
                assert layer == order[0]
                self.refusals += 1
                return False
            for read, row in zip(np.array(keys)[:, 0, :, 0].tolist(), traces, strict=True):
                assert read[: len(row[layer])] == row[layer]
        return True

    def open(self):
        prompt, namespace = self.tokens(20), self.rng.choice(NAMESPACES)
        caches, num_cached = self.kv.fetch(prompt, namespace)
        self.hits += num_cached
        held = prompt[:num_cached]
        if self.feed(caches, [(held, namespace)], [prompt[num_cached:]]):
            held = prompt
        self.live.append([caches, held, namespace])

    def grow(self):
        entry, more = self.live[self.pick()], self.tokens(5)
        if self.feed(entry[0], [entry[1:]], [more]):
            entry[1] = entry[1] + more

    def commit(self):
        caches, tokens, namespace = self.live[self.pick()]
        self.kv.commit(caches, tokens + [7] * self.rng.randrange(2), namespace)

    def trim(self):
        entry = self.live[self.pick()]
        drop = self.rng.randint(0, len(entry[1]))
        for cache in entry[0]:
            cache.trim(drop)
        entry[1] = entry[1][: len(entry[1]) - drop]

    def clone(self):
        caches, tokens, namespace = self.live[self.pick()]
        self.live.append([copy.deepcopy(caches), tokens, namespace])

    def drop(self):
        del self.live[self.pick()]

    def batch(self):
        """Merge two, take a step together, and go on with both apart; or as before, if the step did not fit."""
        pair = [self.live.pop(self.pick()) for _ in range(2)]
        merged = [PagedKVCache.merge(list(layers)) for layers in zip(*(entry[0] for entry in pair), strict=True)]
        new = [[self.rng.randrange(2)] for _ in pair]
        if self.feed(merged, [entry[1:] for entry in pair], new):
            for row, entry in enumerate(pair):
                entry[:2] = [cache.extract(row) for cache in merged], entry[1] + new[row]
        self.live += pair

    def forget(self):
        self.rng.choice((self.kv.pool.prefix.flush, lambda: self.kv.pool.blocks.evict(2)))()

    def step(self):
        choices = [self.open] * 4
        if self.live:
            choices += [self.grow] * 3 + [self.commit] * 6 + [self.trim, self.clone, self.drop, self.drop]
        if len(self.live) >= 2:
            choices += [self.batch] * 2
        if len(self.live) > 5:
            choices = [self.drop]
        if self.rng.random() < 0.01:
            choices = [self.forget]
        self.rng.choice(choices)()


@pytest.mark.parametrize("seed", range(12))
def test_random_program_reads_the_values_of_its_tokens(seed):
    kv = install(tiny_llama(), 21, block_size=BLOCK, prefix_cache=True)
    program = Program(kv, seed)
    for _ in range(400):
        program.step()
        kv.pool.check()
        assert kv.summary().blocks_leaked == 0
    stats = kv.pool.prefix.stats()
    assert program.hits and program.refusals and stats.evicted and stats.duplicates, (program.hits, stats)
    program.live.clear()
    gc.collect()
    stray = kv.pool.open(BLOCK)
    assert kv.summary().blocks_leaked == 1
    kv.pool.close(stray)
    summary = kv.summary()
    assert (summary.blocks_used, summary.sequences) == (0, 0)
    assert summary.blocks_free == 20
