"""P1 on random traces against a naive simulator: one step at a time, one request at a time, lists and dicts.

The golden files hold two kinds of traces; these are small ones of every kind, with pools that are too small more
often than not: ids for the whole prompt or for its full blocks only, prompts that repeat, pools whose block size
divides the trace's.
"""

import hashlib
import os
import random
from collections import Counter

from traces import make_trace

from kvpool.replay import replay
from kvpool.store import BlockLayout, Layout, MemoryStore

ROUNDS = int(os.environ.get("KVPOOL_FUZZ_EXAMPLES", 1000)) // 5


class NaivePool:
    """N blocks; `keys` maps what a cached block holds (its whole prefix) to the block, `lru` is oldest first."""

    def __init__(self, num_blocks):
        self.blank, self.lru, self.keys, self.refs = list(range(num_blocks)), [], {}, Counter()
        self.evictions = self.allocs = self.peak_used = 0

    @property
    def used(self):
        return sum(count > 0 for count in self.refs.values())

    @property
    def num_available(self):
        return len(self.blank) + len(self.lru)

    def take(self):
        if self.blank:
            block = self.blank.pop()
        else:
            block = self.lru.pop(0)
            self.keys = {key: other for key, other in self.keys.items() if other != block}
            self.evictions += 1
        self.allocs += 1
        self.hold(block)
        return block

    def hold(self, block):
        if block in self.lru:
            self.lru.remove(block)
        self.refs[block] += 1
        self.peak_used = max(self.peak_used, self.used)

    def release(self, blocks):
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                (self.lru if block in self.keys.values() else self.blank).append(block)


class NaiveP1:
    """The policy, step by step. A request is [row, prompt, output, generated, blocks]."""

    def __init__(self, trace, num_blocks, block_size, concurrency, store_blocks=None):
        self.trace, self.block_size, self.concurrency = trace, block_size, concurrency
        self.tier, self.store_blocks = [], store_blocks  # what a store behind the pool has, oldest first
        self.pool, self.count, self.events = NaivePool(num_blocks), Counter(), ""
        lengths = zip(trace.prompts.tolist(), trace.outputs.tolist(), strict=True)
        self.waiting = [[row, n, m, 0, []] for row, (n, m) in enumerate(lengths)]
        self.running = []

    def keys_of(self, row, prompt):
        """For each full block of the prompt: everything up to its end, as (id, offset) or (row, position)."""
        ids, width = self.trace.ids_of(row).tolist(), self.trace.block_size
        content = [
            (ids[at // width], at % width) if at < len(ids) * width else ("tail", row, at) for at in range(prompt)
        ]
        ends = range(self.block_size, prompt + 1, self.block_size)
        return [tuple(content[:end]) for end in ends]

    def run(self):
        while self.waiting or self.running:
            self.admit()
            if self.running:
                self.count["steps"] += 1
                for request in list(self.running):
                    if request in self.running:
                        self.decode(request)
                self.count["used_block_steps"] += self.pool.used
                self.count["token_steps"] += sum(prompt + done for _, prompt, _, done, _ in self.running)
                self.count["sequence_steps"] += len(self.running)

    def admit(self):
        while self.waiting and len(self.running) < self.concurrency:
            row, prompt, _, generated, blocks = self.waiting[0]
            total, size = prompt + generated, self.block_size
            keys, hits = self.keys_of(row, prompt), []
            while len(hits) < min(len(keys), (total - 1) // size) and keys[len(hits)] in self.pool.keys:
                hits.append(self.pool.keys[keys[len(hits)]])
            need = -(-total // size) - len(hits)
            if need > self.pool.num_available - sum(block in self.pool.lru for block in hits):
                if self.running:
                    return
                self.reject(self.waiting.pop(0))
                continue
            self.running.append(self.waiting.pop(0))
            for block in hits:
                self.pool.hold(block)
            blocks += hits + [self.pool.take() for _ in range(need)]
            for key, block in zip(keys, blocks, strict=False):
                self.pool.keys.setdefault(key, block)
            loaded = 0 if self.store_blocks is None else self.load(keys, len(hits), (total - 1) // size)
            computed = total - (len(hits) + loaded) * size
            self.count.update(admissions=1, hit_tokens=len(hits) * size, computed_tokens=computed)
            self.count["loaded_tokens"] += loaded * size
            self.count["peak_running"] = max(self.count["peak_running"], len(self.running))
            self.events += f"{row}:{len(hits) * size};"

    def load(self, keys, first, most):
        """How many blocks from `first` on the tier has; all blocks of the prompt are its newest afterwards."""
        loaded = 0
        while first + loaded < min(most, len(keys)) and keys[first + loaded] in self.tier:
            loaded += 1
        for place, key in enumerate(keys):
            if key in self.tier:
                self.tier.remove(key)
            elif place < first:
                continue  # the pool had it, the tier has lost it, and nobody computed it
            self.tier = [*self.tier, key][-self.store_blocks :]
        return loaded

    def decode(self, request):
        _, prompt, output, generated, blocks = request
        if (prompt + generated) % self.block_size == 0:
            while self.pool.num_available == 0:
                victim = self.running.pop()
                self.pool.release(victim[4])
                victim[4] = []
                if not self.running and victim is request:
                    self.reject(victim)
                else:
                    self.waiting.insert(0, victim)
                    self.count["preemptions"] += 1
                    self.events += f"{victim[0]}:P;"
                if victim is request:
                    return
            blocks.append(self.pool.take())
        request[3] += 1
        self.count["decode_tokens"] += 1
        if request[3] == output:
            self.pool.release(blocks)
            self.running.remove(request)
            self.count["finished"] += 1

    def reject(self, request):
        self.count["rejected"] += 1
        self.events += f"{request[0]}:R;"


def random_trace(rng):
    """Up to 25 requests whose ids are the nodes of a random tree, so that an id tells its whole prefix."""
    block_size, children = rng.choice([4, 8]), {}
    has_partial_ids = rng.random() < 0.5
    requests = []
    for _ in range(rng.randrange(1, 26)):
        path, node = [], None
        for _ in range(rng.randrange(6)):
            node = children.setdefault((node, rng.randrange(2)), len(children))
            path.append(node)
        tail = rng.randrange(1 - block_size, 1) if has_partial_ids and path else rng.randrange(block_size)
        requests.append((max(1, len(path) * block_size + tail), rng.randrange(1, 20), path))
    return make_trace(requests, block_size)


def test_random_traces_agree_with_the_naive_simulator():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, seen = random.Random(seed), Counter()
    for _ in range(ROUNDS):
        trace = random_trace(rng)
        block_size = rng.choice([size for size in (1, 2, 4, 8) if size <= trace.block_size])
        num_blocks = max(1, rng.choice([4, 12, 20, 40, 400]) // block_size)
        concurrency = rng.randrange(1, 7)
        store_blocks = rng.choice([None, 1, 5, 20, 500])
        naive = NaiveP1(trace, num_blocks, block_size, concurrency, store_blocks)
        naive.run()
        layout = Layout((BlockLayout(block_size, 1, "replay"),), b"")
        store = None if store_blocks is None else MemoryStore(layout, store_blocks)
        result = replay(trace, num_blocks=num_blocks, block_size=block_size, concurrency=concurrency, store=store)
        expected = {
            **{name: naive.count[name] for name in result.counters if name in naive.count},
            "evictions": naive.pool.evictions,
            "allocs": naive.pool.allocs,
            "peak_used": naive.pool.peak_used,
            "final_cached_blocks": len(naive.pool.lru),
            "event_sha256": hashlib.sha256(naive.events.encode()).hexdigest(),
        }
        assert {name: result.counters[name] for name in expected} == expected
        assert result.occupancy.token_steps == naive.count["token_steps"]
        assert result.occupancy.sequence_steps == naive.count["sequence_steps"]
        seen.update(naive.count)
    assert min(seen[name] for name in ("preemptions", "rejected", "hit_tokens", "loaded_tokens", "finished")) > 0, seen
