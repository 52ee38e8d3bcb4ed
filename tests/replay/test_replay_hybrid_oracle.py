"""P3 against a plain simulator of the rule of hybrid models: full attention and recurrent states in one budget.

The simulator shares nothing with the core or with the plain model but the text of docs/prefix.md. Synthetic traces
always; real ones if ``KVPOOL_TRACES`` names their folder.
"""

import hashlib
import heapq
import os
import random
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from test_replay_oracle import NaiveP1, random_trace

from kvpool.groups import Group
from kvpool.replay import read_trace, synthetic_trace
from kvpool.replay.hybrid import CHUNK, HybridShape, hybrid_shape, replay_hybrid
from kvpool.replay.trace import paths_of, shareable_blocks, unique_blocks

ROUNDS = int(os.environ.get("KVPOOL_FUZZ_EXAMPLES", 1000)) // 10
PRIVATE = None  # a block whose content nobody knows


class Tree:
    """Units of KV and checkpoints of `bundle` blocks, in `num_blocks` blocks.

    `refs` has the units that are there, with the rows that use them; `below` counts checkpoints at a node and below it.
    What may leave lies in heaps, of which entries that are out of date are passed over: `cold` (no checkpoint below)
    leaves before the rest. Of these the oldest leaves; the age of a checkpoint without a use counts half more.
    """

    def __init__(self, num_blocks, bundle, room):
        self.num_blocks = self.blank = num_blocks
        self.room = room  # for checkpoints
        self.bundle, self.clock, self.coldest = bundle, 0, 0
        self.refs, self.parent, self.below, self.stamp, self.marks = {}, {}, defaultdict(int), {}, {}
        self.cold, self.warm, self.new_marks, self.hit_marks = [], [], [], []
        self.uses, self.idle, self.loaded = Counter(), 0, None
        self.evictions = self.allocs = self.peak_used = self.releases = 0

    @property
    def used(self):
        return self.num_blocks - self.num_available

    @property
    def num_available(self):
        return self.blank + self.idle + self.bundle * (len(self.marks) - (self.loaded is not None))

    def tick(self):
        self.clock += 1
        return self.clock

    def take(self, count=1):
        while self.blank < count:
            self.evict()
        self.blank -= count
        self.allocs += count
        self.peak_used = max(self.peak_used, self.used)

    def rest(self, node, stamp):
        """A unit that nobody uses gets its place."""
        self.stamp[node] = stamp
        heapq.heappush(self.warm if self.below[node] else self.cold, (stamp, "unit", node))

    def mark(self, node):
        """A checkpoint is the most recent."""
        self.marks[node] = self.tick()
        heapq.heappush(self.hit_marks if self.uses[node] else self.new_marks, (self.marks[node], "mark", node))

    def evict(self):
        cold = self.oldest(self.cold)
        if cold is None:
            heads = [self.oldest(heap) for heap in (self.new_marks, self.hit_marks, self.warm)]
            _, kind, node = max((item for item in heads if item is not None), key=self.age)
        else:
            _, kind, node = cold
        if node in self.marks and node != self.loaded:
            self.drop(node)
        if kind == "unit":
            del self.refs[node]
            self.idle -= 1
            self.blank += 1
            self.evictions += 1

    def has_room(self):
        """Whether there is room for one more checkpoint; the oldest one that may leave makes it."""
        heads = [head for head in map(self.oldest, (self.new_marks, self.hit_marks)) if head is not None]
        if len(self.marks) == self.room and heads:
            self.drop(max(heads, key=self.age)[2])
        return len(self.marks) < self.room

    def age(self, item):
        stamp, kind, node = item
        return (self.clock - stamp) * (1.5 if kind == "mark" and not self.uses[node] else 1)

    def oldest(self, heap):
        """The first item of a heap that is up to date; the checkpoint that is loaded may not leave."""
        kept = []
        while heap and (not self.is_next(*heap[0], heap is self.cold) or heap[0][1:] == ("mark", self.loaded)):
            item = heapq.heappop(heap)
            if item[1:] == ("mark", self.loaded) and self.marks.get(self.loaded) == item[0]:
                kept.append(item)
        first = heap[0] if heap else None
        for item in kept:
            heapq.heappush(heap, item)
        return first

    def is_next(self, stamp, kind, node, is_cold):
        if kind == "mark":
            return self.marks.get(node) == stamp
        return self.refs.get(node) == 0 and self.stamp[node] == stamp and (self.below[node] == 0) == is_cold

    def above(self, node):
        while node is not None:
            yield node
            node = self.parent[node]

    def publish(self, node):
        """A checkpoint for which the blocks are taken is at a node."""
        self.mark(node)
        for one in self.above(node):
            self.below[one] += 1
            if self.below[one] == 1 and self.refs.get(one) == 0:
                self.rest(one, self.tick())

    def drop(self, node):
        del self.marks[node]
        del self.uses[node]
        self.blank += self.bundle
        lost = []
        for one in self.above(node):
            self.below[one] -= 1
            if self.below[one] == 0 and self.refs.get(one) == 0:
                lost.append(one)
        for one in reversed(lost):
            self.coldest -= 1
            self.rest(one, self.coldest)

    def use(self, node):
        self.idle -= self.refs[node] == 0
        self.refs[node] += 1
        self.peak_used = max(self.peak_used, self.used)

    def release(self, blocks):
        """A row lets go of its blocks, the last one first."""
        self.releases += 1
        for node in reversed(blocks):
            if node is PRIVATE:
                self.blank += 1
            elif node[0] == "own":
                self.unuse(node[1])
            elif node[1] not in self.refs:
                self.refs[node[1]] = 1
                self.unuse(node[1])
            else:  # a second copy of what is there
                self.blank += 1
                if self.refs[node[1]] == 0:
                    self.rest(node[1], self.tick())

    def unuse(self, node):
        self.refs[node] -= 1
        if self.refs[node] == 0:
            self.idle += 1
            self.rest(node, self.tick())


class NaiveP3(NaiveP1):
    """P1's loop; prompts are computed in chunks, with checkpoints at the positions of docs/prefix.md."""

    def __init__(self, trace, num_blocks, block_size, concurrency, bundle, tree):
        super().__init__(trace, num_blocks, block_size, concurrency)
        self.pool = tree(num_blocks, bundle, (num_blocks + 1 + min(concurrency, len(trace))) // 4 + 1)
        self.paths = paths_of(trace, block_size)
        self.refused_after = -1  # releases: who was refused is asked again after the next one
        self.first_distance = 1
        while self.first_distance < 3 * bundle * block_size:
            self.first_distance *= 2

    def admit(self):
        while self.waiting and len(self.running) < self.concurrency and self.refused_after < self.pool.releases:
            row, prompt, _, generated, blocks = self.waiting[0]
            total, size, path, pool = prompt + generated, self.block_size, self.paths[row], self.pool
            if total > pool.num_blocks * size:
                path = []  # it is not looked up
            known = 0
            while known < min(len(path), (total - 1) // size) and path[known] in pool.refs:
                known += 1
            hit = next((k for k in range(known, 0, -1) if path[k - 1] in pool.marks), 0)
            need = -(-total // size) - hit
            own = sum(pool.refs[node] == 0 for node in path[:hit]) + pool.bundle * (hit > 0)
            is_short = need > pool.num_available - own
            if is_short and self.running:
                self.refused_after = pool.releases + 1
            for node in path[:hit]:
                pool.use(node)
                blocks.append(("own", node))
            if hit:
                pool.uses[path[hit - 1]] += 1
                pool.mark(path[hit - 1])
                pool.loaded = path[hit - 1]
                pool.peak_used = max(pool.peak_used, pool.used)  # with the checkpoint's blocks, admitted or not
            if is_short:
                pool.loaded = None
                pool.release(blocks)
                blocks.clear()
                if self.running:
                    return
                self.reject(self.waiting.pop(0))
                continue
            self.running.append(self.waiting.pop(0))
            self.prefill(path, blocks, prompt, total, hit, self.positions(prompt, hit, known))
            self.count.update(admissions=1, hit_tokens=hit * size, computed_tokens=total - hit * size)
            self.count["checkpoint_hits"] += hit > 0
            self.count["peak_running"] = max(self.count["peak_running"], len(self.running))
            self.events += f"{row}:{hit * size};"

    def positions(self, prompt, hit, known):
        size = self.block_size
        grain = max(size, self.trace.block_size)
        cut = prompt // grain * grain
        found = {cut, min(known * size, cut)} | {
            self.first_distance << j for j in range(60) if self.first_distance << j <= cut
        }
        return sorted({place // size for place in found if place // size > hit})

    def prefill(self, path, blocks, prompt, total, hit, positions):
        """Chunks end at positions. What a chunk has read may leave; what it has computed is in the index."""
        size, pool = self.block_size, self.pool
        length, known = hit * size, hit
        while length < total:
            wanted = positions[0] * size if positions else total
            end = min(total, length + CHUNK, wanted)
            for _ in range(-(-end // size) - len(blocks)):
                pool.take()
                blocks.append(PRIVATE)
            is_taken = False
            if positions and end == wanted:
                self.count["checkpoints_wanted"] += 1
                is_taken = pool.num_available >= pool.bundle and pool.has_room()
                if is_taken:
                    pool.take(pool.bundle)
                    pool.tick()
                    self.count["checkpoints_taken"] += 1
            pool.loaded = None
            for depth in range(known, min(end, prompt) // size):
                self.name(path, blocks, depth)
            known = min(end, prompt) // size
            if positions and end == wanted:
                node = path[positions.pop(0) - 1]
                if is_taken and node in pool.marks:
                    pool.blank += pool.bundle
                if node in pool.marks:
                    pool.mark(node)
                elif is_taken:
                    pool.publish(node)
            length = end

    def name(self, path, blocks, depth):
        """A block is full."""
        node, pool = path[depth], self.pool
        pool.parent[node] = path[depth - 1] if depth else None
        if node in pool.refs:
            blocks[depth] = ("copy", node)
        else:
            pool.refs[node] = 1
            blocks[depth] = ("own", node)


def shape_with(block_size, bundle, concurrency):
    """Full attention of one byte per token, and states of `bundle` blocks."""
    groups = (Group.full(), Group.state(2 * concurrency, blocks=bundle))
    return HybridShape((), block_size, block_size, groups)


def differences(trace, num_blocks, shape, concurrency, tree=Tree):
    """Play both; returns the counters that differ, and all of the simulator's."""
    naive = NaiveP3(trace, num_blocks, shape.block_size, concurrency, shape.groups[-1].blocks, tree)
    naive.run()
    found = replay_hybrid(trace, shape=shape, num_blocks=num_blocks, concurrency=concurrency).counters
    expected = {
        **{name: naive.count[name] for name in found if name in naive.count},
        "evictions": naive.pool.evictions,
        "allocs": naive.pool.allocs,
        "peak_used": naive.pool.peak_used,
        "event_sha256": hashlib.sha256(naive.events.encode()).hexdigest(),
    }
    return {name: (found[name], value) for name, value in expected.items() if found[name] != value}, naive.count


def check(*case):
    """Every counter is equal; returns those of the simulator."""
    wrong, count = differences(*case)
    assert not wrong
    return count


def random_case(rng):
    """A trace, blocks, a shape and a concurrency; more often than not the pool is too small."""
    trace = random_trace(rng)
    block_size = rng.choice([size for size in (1, 2, 4, 8) if size <= trace.block_size])
    num_blocks = max(1, rng.choice([12, 20, 40, 80, 400]) // block_size)
    concurrency = rng.randrange(1, 7)
    bundle = rng.choice([size for size in (1, 2, 5) if size <= num_blocks])
    return trace, num_blocks, shape_with(block_size, bundle, concurrency), concurrency


def test_random_traces_agree_with_the_plain_simulator():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, seen = random.Random(seed), Counter()
    for _ in range(ROUNDS):
        seen.update(check(*random_case(rng)))
    names = ("preemptions", "rejected", "hit_tokens", "finished", "checkpoint_hits", "checkpoints_taken")
    assert min(seen[name] for name in names) > 0, seen
    assert seen["checkpoints_taken"] < seen["checkpoints_wanted"]


class UsesStayOld(Tree):
    """Fault: a checkpoint that is used again keeps its age."""

    def mark(self, node):
        if node not in self.marks:
            super().mark(node)


def test_simulator_with_a_wrong_rule_does_not_agree():
    rng = random.Random(1)
    cases = [random_case(rng) for _ in range(100)]
    cases += [(synthetic_trace(seed, sessions=16), 400, shape_with(16, 9, 4), 4) for seed in range(4)]
    assert any(differences(*case, UsesStayOld)[0] for case in cases)


@pytest.mark.parametrize("num_blocks", [150, 400, 1000, 3000])
@pytest.mark.parametrize("bundle", [1, 9, 37])
def test_synthetic_conversations_agree_with_the_plain_simulator(num_blocks, bundle):
    seen = check(synthetic_trace(seed=num_blocks + bundle, sessions=16), num_blocks, shape_with(16, bundle, 4), 4)
    assert seen["hit_tokens"] > 0


@pytest.mark.parametrize("divisor", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("name", "requests", "concurrency"), [("agentic_a", 300, 4), ("mooncake_conversation", 1500, 16)]
)
@pytest.mark.skipif("KVPOOL_TRACES" not in os.environ, reason="KVPOOL_TRACES names the folder with the traces")
def test_real_traces_agree_with_the_plain_simulator(name, requests, concurrency, divisor):
    trace = read_trace(Path(os.environ["KVPOOL_TRACES"]) / f"{name}.npz").head(requests)
    shape = hybrid_shape("qwen3_5", 64, concurrency)
    num_blocks = unique_blocks(paths_of(trace, 64)) // divisor
    seen = check(trace, num_blocks, shape, concurrency)
    assert 0 < seen["hit_tokens"] <= 64 * sum(shareable_blocks(trace, paths_of(trace, 64), 64))
