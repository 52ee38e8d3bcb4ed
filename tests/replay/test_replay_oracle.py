"""Replays against the plain simulator: every counter, and the digest of what happened in which order.

Random traces are small ones of every kind, with pools that are too small more often than not, and with tiers behind
them: ids for the whole prompt or for its full blocks only, prompts that repeat, pools whose block size divides the
trace's. ``KVPOOL_TRACES`` names a folder with real traces, of which ``KVPOOL_LONG=1`` replays all requests.
"""

import os
import random
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from simulator import Cache, Replay, rows_of
from traces import make_trace

from benchmarks.replay import read_trace, replay, synthetic_trace
from benchmarks.replay.trace import paths_of, unique_blocks
from kvpool.store import BlockLayout, DiskStore, Layout, MemoryStore
from kvpool.store import disk as module

SEGMENT, SEGMENT_NBYTES = 4, 64 + 4 * (128 + 64 + 64) + 64 + 64  # header, records, footer, trailer
ROUNDS = int(os.environ.get("KVPOOL_FUZZ_EXAMPLES", 1000)) // 5


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


def simulated(trace, num_blocks, block_size, concurrency, tier):
    """What the simulator makes of a trace."""
    return Replay(rows_of(trace), trace.block_size, Cache(num_blocks), block_size, concurrency, tier).run()


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
        naive = simulated(trace, num_blocks, block_size, concurrency, tier)
        layout = Layout((BlockLayout(block_size, 1, "replay"),), b"")
        store = None if store_blocks is None else MemoryStore(layout, store_blocks)
        result = replay(trace, num_blocks=num_blocks, block_size=block_size, concurrency=concurrency, store=store)
        expected = naive.counters() | ({} if tier is None else {"loaded_tokens": naive.count["loaded_tokens"]})
        assert result.counters == expected
        seen.update(naive.count)
    assert min(seen[name] for name in ("preemptions", "rejected", "hit_tokens", "loaded_tokens", "finished")) > 0, seen


def check(trace, num_blocks, block_size, concurrency):
    """Replay and simulate: every number is the same."""
    found = replay(trace, num_blocks=num_blocks, block_size=block_size, concurrency=concurrency).counters
    assert found == simulated(trace, num_blocks, block_size, concurrency, None).counters()


@pytest.mark.parametrize("concurrency", [1, 8, 32])
@pytest.mark.parametrize(("seed", "sessions"), [(1, 24), (2, 24), (3, 120)])
def test_generated_conversations_agree_with_the_simulator(seed, sessions, concurrency):
    for num_blocks in (63, 102, 192, 600, 100_000):
        check(synthetic_trace(seed, sessions), num_blocks, 16, concurrency)


@pytest.mark.parametrize("divisor", [1, 4, 32])
@pytest.mark.parametrize(
    ("name", "block_size", "concurrency"),
    [
        ("tiny_conversation.jsonl", 512, 1),
        ("tiny_conversation.jsonl", 16, 8),
        ("tiny_agentic.jsonl", 64, 16),
        ("mooncake_conversation.npz", 512, 64),
        ("agentic_a.npz", 64, 8),
    ],
)
@pytest.mark.skipif("KVPOOL_TRACES" not in os.environ, reason="KVPOOL_TRACES names the folder with the traces")
def test_real_traces_agree_with_the_simulator(name, block_size, concurrency, divisor):
    trace = read_trace(Path(os.environ["KVPOOL_TRACES"]) / name)
    trace = trace if os.environ.get("KVPOOL_LONG") else trace.head(300)
    check(trace, unique_blocks(paths_of(trace, block_size)) // divisor, block_size, concurrency)


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
    naive = simulated(trace, num_blocks, size, concurrency, NaiveDisk(quota))
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
    layout, quota = Layout((BlockLayout(64, 1, "replay"),), b""), 180_000 * record
    store = DiskStore(str(tmp_path / "d"), layout, quota, segment_nbytes=quota // 100)
    assert store.ready.wait(60)
    found = replay(trace, num_blocks=whole // 10, block_size=64, concurrency=16, store=store).counters
    store.close()
    unlimited = replay(trace, num_blocks=2 * whole, block_size=64, concurrency=16).counters
    assert found["computed_tokens"] <= 1.05 * unlimited["computed_tokens"]
