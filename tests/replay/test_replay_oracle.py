"""P1 on random traces against a naive simulator: one step at a time, one request at a time, lists and dicts.

The golden files hold two kinds of traces; these are small ones of every kind, with pools that are too small more
often than not: ids for the whole prompt or for its full blocks only, prompts that repeat, pools whose block size
divides the trace's.
"""

import hashlib
import os
import random
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from traces import make_trace

from kvpool.replay import read_trace, replay
from kvpool.store import BlockLayout, DiskStore, Layout, MemoryStore
from kvpool.store import folder as module

SEGMENT, SEGMENT_NBYTES = 4, 64 + 4 * (128 + 64 + 64) + 64 + 64  # header, records, footer, trailer
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


class NaiveMemory:
    """What a `MemoryStore` has, oldest first."""

    def __init__(self, num_blocks):
        self.num_blocks, self.held = num_blocks, []

    def __contains__(self, key):
        return key in self.held

    def use(self, keys):
        for key in keys:
            if key in self.held:
                self.held.remove(key)
                self.held.append(key)

    def offer(self, keys):
        for key in keys:
            self.use([key])
            if key not in self.held:
                self.held = [*self.held, key][-self.num_blocks :]


def seconds_of(ticks):
    """The time of a clock that each seal and each touch moves on; not even, so that no two segments have one time."""
    return ticks**1.37


class NaiveDisk:
    """What a `DiskStore` has: segments of `SEGMENT` blocks, [time, blocks, uses], of which `quota` fit."""

    def __init__(self, quota):
        self.quota, self.segments, self.ticks, self.written = quota, [], 0, 0

    def __contains__(self, key):
        return any(key in segment[1] for segment in self.segments)

    def use(self, keys):
        for segment in self.segments:
            segment[2] += sum(key in segment[1] for key in keys)

    def offer(self, keys):
        for key in [key for key in keys if key not in self]:
            if not self.segments or len(self.segments[-1][1]) == SEGMENT:
                self.begin()
            self.segments[-1][1].append(key)
            self.written += 1

    def begin(self):
        if self.segments:
            self.segments[-1][0] = self.tick()
        for segment in self.segments:
            if segment[2]:
                segment[0] += (self.tick() - segment[0]) * min(segment[2] / SEGMENT, 1) ** 0.5
                segment[2] = 0
        if len(self.segments) == self.quota:
            self.segments.remove(min(self.segments))
        self.segments.append([0, [], 0])

    def tick(self):
        self.ticks += 1
        return seconds_of(self.ticks)


class NaiveP1:
    """The policy, step by step. A request is [row, prompt, output, generated, blocks]."""

    def __init__(self, trace, num_blocks, block_size, concurrency, tier=None):
        self.trace, self.block_size, self.concurrency = trace, block_size, concurrency
        self.tier = tier  # a store behind the pool
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
            loaded = 0 if self.tier is None else self.load(keys, len(hits), (total - 1) // size)
            computed = total - (len(hits) + loaded) * size
            self.count.update(admissions=1, hit_tokens=len(hits) * size, computed_tokens=computed)
            self.count["loaded_tokens"] += loaded * size
            self.count["peak_running"] = max(self.count["peak_running"], len(self.running))
            self.events += f"{row}:{len(hits) * size};"

    def load(self, keys, first, most):
        """How many blocks from `first` on the tier has. All of the prompt that the pool or the tier has are of use."""
        self.tier.use(keys[:first])
        loaded = 0
        while first + loaded < min(most, len(keys)) and keys[first + loaded] in self.tier:
            loaded += 1
        self.tier.use(keys[first : first + loaded])
        self.tier.offer(keys[first + loaded :])
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
        tier = None if store_blocks is None else NaiveMemory(store_blocks)
        naive = NaiveP1(trace, num_blocks, block_size, concurrency, tier)
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


def on_counted_clock(monkeypatch):
    """Give files the time of `seconds_of`."""
    clock = SimpleNamespace(ticks=0)

    def tick():
        clock.ticks += 1
        return int(seconds_of(clock.ticks) * 10**9)

    def seal(folder, stem, real=module.Folder.seal):
        os.utime(stem + module.GROWING, ns=(0, 0), dir_fd=folder.fd)  # not that of this machine
        real(folder, stem)

    monkeypatch.setattr(module.Folder, "seal", seal)
    counted = {"time_ns": tick, "time": lambda: seconds_of(clock.ticks)}
    monkeypatch.setattr(module, "time", SimpleNamespace(**vars(time) | counted))
    return clock


def replayed_with_a_disk(rng, path):
    """Tokens computed and loaded, blocks written and kept: of the replay, and of the simulator."""
    trace, quota, size, concurrency = random_trace(rng), rng.randrange(2, 12), rng.choice([2, 4]), rng.randrange(1, 7)
    num_blocks = rng.choice([20, 40]) // size
    naive = NaiveP1(trace, num_blocks, size, concurrency, NaiveDisk(quota))
    naive.run()
    layout, nbytes = Layout((BlockLayout(size, 1, "replay"),), b""), quota * SEGMENT_NBYTES
    store = DiskStore(str(path), layout, nbytes, segment_nbytes=SEGMENT_NBYTES, refresh_seconds=1e6)
    assert store.ready.wait(60)
    count = replay(trace, num_blocks=num_blocks, block_size=size, concurrency=concurrency, store=store).counters
    stats = store.stats()["disk"]
    store.close()
    kept = sum(len(segment[1]) for segment in naive.tier.segments)
    expected = (naive.count["computed_tokens"], naive.count["loaded_tokens"], naive.tier.written, kept)
    return (count["computed_tokens"], count["loaded_tokens"], stats.stored, stats.blocks), expected


def test_random_traces_with_a_disk_agree_with_the_naive_simulator(tmp_path, monkeypatch):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, clock, loaded, evicted = random.Random(seed), on_counted_clock(monkeypatch), 0, 0
    for number in range(max(ROUNDS // 5, 20)):
        clock.ticks = 0
        found, expected = replayed_with_a_disk(rng, tmp_path / str(number))
        assert found == expected
        loaded, evicted = loaded + found[1], evicted + found[2] - found[3]
    assert loaded and evicted


@pytest.mark.long
@pytest.mark.skipif("KVPOOL_TRACES" not in os.environ, reason="KVPOOL_TRACES names the folder with the traces")
def test_coding_sessions_with_a_tenth_of_the_pool_and_a_disk_compute_what_is_new_only(tmp_path):
    trace = read_trace(Path(os.environ["KVPOOL_TRACES"]) / "agentic_a.npz")
    record, whole = 128 + 64 * 4 + 64 + 16, 281_753  # bytes, and blocks that the prompts have
    layout, budget = Layout((BlockLayout(64, 1, "replay"),), b""), 250_000 * record
    quota = 180_000 * record
    store = DiskStore(str(tmp_path / "d"), layout, quota, segment_nbytes=quota // 100, write_nbytes_per_day=budget)
    assert store.ready.wait(60)
    found = replay(trace, num_blocks=whole // 10, block_size=64, concurrency=16, store=store).counters
    store.close()
    unlimited = replay(trace, num_blocks=2 * whole, block_size=64, concurrency=16).counters
    assert found["computed_tokens"] <= 1.05 * unlimited["computed_tokens"]
    assert store.stats()["disk"].written_nbytes <= budget
