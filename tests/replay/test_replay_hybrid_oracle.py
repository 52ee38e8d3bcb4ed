"""The policy with layer groups against a plain simulator of the rule for full attention and states in one budget.

The simulator shares nothing with the core or with the plain model but the text of docs/prefix.md. Synthetic traces
always; real ones if ``KVPOOL_TRACES`` names their folder.
"""

import os
import random
from collections import Counter, OrderedDict
from pathlib import Path

import pytest
from simulator import Cache, Replay, rows_of
from test_replay_oracle import random_trace

from benchmarks.replay import read_trace, replay, synthetic_trace
from benchmarks.replay.shapes import HybridShape, hybrid_shape
from benchmarks.replay.trace import paths_of, shareable_blocks, unique_blocks
from kvpool.groups import Group

ROUNDS = int(os.environ.get("KVPOOL_FUZZ_EXAMPLES", 1000)) // 10
CHUNK = 2048


class Tree(Cache):
    """Units (blocks of full attention at nodes) and checkpoints of `bundle` blocks.

    `below` counts checkpoints at a node and below it. Idle units without one leave before the rest; the others lie in
    `warm`, checkpoints in `new` or, after a hit, in `hit`: each with the time of its last use, oldest first. The age of
    a checkpoint without a hit counts half more.
    """

    def __init__(self, num_blocks, bundle, room):
        super().__init__(num_blocks)
        self.bundle, self.room, self.clock, self.loaded = bundle, room, 0, None
        self.warm, self.new, self.hit, self.below = OrderedDict(), OrderedDict(), OrderedDict(), Counter()

    @property
    def num_available(self):
        return super().num_available + len(self.warm) + self.bundle * (self.num_marks - (self.loaded is not None))

    @property
    def num_marks(self):
        return len(self.new) + len(self.hit)

    def evict(self):
        node, places = next(iter(self.idle), None), None
        if node is None:
            places, node = self.oldest(self.new, self.hit, self.warm)
        if self.has_mark(node) and node != self.loaded:
            self.drop(node)
        if places is None or places is self.warm:
            self.forget(node)

    def oldest(self, *kinds):
        """What leaves first of several kinds. The checkpoint that is loaded may not leave."""
        firsts = [(one, next((node for node in one if one is self.warm or node != self.loaded), None)) for one in kinds]
        return max((first for first in firsts if first[1] is not None), key=self.age, default=None)

    def age(self, first):
        places, node = first
        return (self.clock - places[node]) * (1.5 if places is self.new else 1)

    def rest(self, node):
        if self.below[node]:
            self.put(self.warm, node)
        else:
            self.clock += 1
            super().rest(node)

    def leave(self, node):
        del (self.warm if node in self.warm else self.idle)[node]

    def put(self, places, node):
        self.clock += 1
        places[node] = self.clock
        places.move_to_end(node)

    def has_mark(self, node):
        return node in self.new or node in self.hit

    def mark(self, node, is_hit=False):
        """A checkpoint is the most recent."""
        if is_hit:
            self.new.pop(node, None)
        self.put(self.hit if is_hit or node in self.hit else self.new, node)

    def has_room(self):
        """Whether there is room for one more checkpoint; the oldest one that may leave makes it."""
        first = self.oldest(self.new, self.hit)
        if self.num_marks == self.room and first:
            self.drop(first[1])
        return self.num_marks < self.room

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
                self.leave(one)
                self.rest(one)

    def drop(self, node):
        """A checkpoint leaves. Units that have none below any more become the oldest, the deepest first."""
        del (self.new if node in self.new else self.hit)[node]
        self.blank += self.bundle
        chain = list(self.above(node))
        self.below.subtract(chain)
        for one in reversed(chain):
            if not self.below[one] and self.refs.get(one) == 0:
                self.leave(one)
                self.idle[one] = None
                self.idle.move_to_end(one, last=False)


class NaiveGroups(Replay):
    """The loop of the policy; prompts are computed in chunks, with checkpoints at the positions of docs/prefix.md."""

    def __init__(self, rows, width, num_blocks, block_size, concurrency, bundle, tree):
        room = (num_blocks + 1 + min(concurrency, len(rows))) // 4 + 1
        super().__init__(rows, width, tree(num_blocks, bundle, room), block_size, concurrency)
        self.first_distance = 1
        while self.first_distance < 3 * bundle * block_size:
            self.first_distance *= 2

    def open(self, request):
        cache, size, total, path = self.cache, self.block_size, request.length, self.path_of(request.row)
        if total > cache.num_blocks * size:
            path = []  # it is not looked up
        known = self.known(path, total)
        hit = next((k for k in range(known, 0, -1) if cache.has_mark(path[k - 1])), 0)
        need = -(-total // size) - hit
        own = sum(cache.refs[node] == 0 for node in path[:hit]) + cache.bundle * (hit > 0)
        is_short = need > cache.num_available - own
        for node in path[:hit]:
            cache.use(node)
        request.blocks = path[:hit]
        if hit:
            cache.mark(path[hit - 1], is_hit=True)
            cache.loaded = path[hit - 1]
            cache.peak_used = max(cache.peak_used, cache.used)  # with the checkpoint's blocks, admitted or not
        if is_short:
            cache.loaded = None
            cache.release(request.blocks)
            request.blocks = []
            return False
        self.prefill(request, path, hit, self.positions(request.prompt, hit, known))
        self.count["checkpoint_hits"] += hit > 0
        self.count_admission(request, hit)
        return True

    def positions(self, prompt, hit, known):
        size = self.block_size
        grain = max(size, self.width)
        cut = prompt // grain * grain
        found = {cut, min(known * size, cut)} | {
            self.first_distance << j for j in range(60) if self.first_distance << j <= cut
        }
        return sorted({place // size for place in found if place // size > hit})

    def prefill(self, request, path, hit, positions):
        """Chunks end at positions. What a chunk has read may leave; what it has computed is in the index."""
        size, cache, blocks, total = self.block_size, self.cache, request.blocks, request.length
        length, known = hit * size, hit
        while length < total:
            wanted = positions[0] * size if positions else total
            end = min(total, length + CHUNK, wanted)
            for _ in range(-(-end // size) - len(blocks)):
                cache.take()
                blocks.append(None)
            is_taken = False
            if positions and end == wanted:
                self.count["checkpoints_wanted"] += 1
                is_taken = cache.num_available >= cache.bundle and cache.has_room()
                if is_taken:
                    cache.take(cache.bundle)
                    cache.clock += 1
                    self.count["checkpoints_taken"] += 1
            cache.loaded = None
            for depth in range(known, min(end, request.prompt) // size):
                blocks[depth] = cache.name(path[depth], path[depth - 1] if depth else None)
            known = min(end, request.prompt) // size
            if positions and end == wanted:
                node = path[positions.pop(0) - 1]
                if is_taken and cache.has_mark(node):
                    cache.blank += cache.bundle
                if cache.has_mark(node):
                    cache.mark(node)
                elif is_taken:
                    cache.publish(node)
            length = end


def shape_with(block_size, bundle, concurrency):
    """Full attention of one byte per token, and states of `bundle` blocks."""
    groups = (Group.full(), Group.state(2 * concurrency, blocks=bundle))
    return HybridShape((), block_size, block_size, groups)


def differences(trace, num_blocks, shape, concurrency, tree=Tree):
    """Play both; returns the counters that differ, and all of the simulator's."""
    bundle = shape.groups[-1].blocks
    naive = NaiveGroups(rows_of(trace), trace.block_size, num_blocks, shape.block_size, concurrency, bundle, tree).run()
    found = replay(trace, shape=shape, num_blocks=num_blocks, concurrency=concurrency).counters
    expected = {name: value for name, value in naive.counters().items() if name != "final_cached_blocks"}
    expected |= {name: naive.count[name] for name in found if name.startswith("checkpoint")}
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

    def mark(self, node, is_hit=False):
        if not self.has_mark(node):
            super().mark(node, is_hit)


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
