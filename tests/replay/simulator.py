"""Replays of traces by the rules alone: nothing here comes from kvpool.

`Cache` is the prefix cache of docs/prefix.md for one full group, `Replay` the policy of `benchmarks.replay`.
`test_replay_hybrid_oracle` adds checkpoints.
"""

import hashlib
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field


class Cache:
    """Blocks of nodes, in `num_blocks` blocks.

    `refs` has the nodes whose block is there, with the rows that use it; nobody uses those in `idle`, oldest first.
    """

    def __init__(self, num_blocks):
        self.num_blocks = self.blank = num_blocks
        self.refs, self.parent, self.idle = {}, {}, OrderedDict()
        self.evictions = self.allocs = self.peak_used = self.releases = 0

    @property
    def num_available(self):
        return self.blank + len(self.idle)

    @property
    def used(self):
        return self.num_blocks - self.num_available

    def take(self, count=1):
        while self.blank < count:
            self.evict()
        self.blank -= count
        self.allocs += count
        self.peak_used = max(self.peak_used, self.used)

    def evict(self):
        self.forget(next(iter(self.idle)))

    def forget(self, node):
        self.leave(node)
        del self.refs[node]
        self.blank += 1
        self.evictions += 1

    def use(self, node):
        """One more row uses the block of a node."""
        if not self.refs[node]:
            self.leave(node)
        self.refs[node] += 1

    def rest(self, node):
        """Nobody uses the block of a node: it is the most recent."""
        self.idle[node] = None
        self.idle.move_to_end(node)

    def leave(self, node):
        del self.idle[node]

    def name(self, node, parent):
        """A block of a row is full; returns what the row has then: the block of its node, or a copy of it."""
        self.parent[node] = parent
        if node in self.refs:
            return (node,)
        self.refs[node] = 1
        return node

    def release(self, blocks):
        """A row lets go of its blocks, the last one first. None is private, a tuple a copy."""
        self.releases += 1
        for block in reversed(blocks):
            if block is None:
                self.blank += 1
                continue
            is_copy = isinstance(block, tuple)
            node = block[0] if is_copy else block
            if not is_copy:
                self.refs[node] -= 1
            elif node in self.refs:
                self.blank += 1
            else:  # it takes the place of the block that has left
                self.refs[node] = 0
            if not self.refs[node]:
                self.rest(node)


@dataclass(eq=False)
class Request:
    row: int
    prompt: int
    output: int
    generated: int = 0
    blocks: list = field(default_factory=list)

    @property
    def length(self):
        return self.prompt + self.generated


class Replay:
    """The policy, step by step. `rows` has (prompt, output, ids); an id stands for `width` tokens and all before."""

    def __init__(self, rows, width, cache, block_size, concurrency, tier=None):
        self.rows, self.width, self.cache = rows, width, cache
        self.block_size, self.concurrency, self.tier = block_size, concurrency, tier
        self.count, self.events, self.refused_at = Counter(), hashlib.sha256(), -1
        self.waiting = deque(Request(row, n, max(m, 1)) for row, (n, m, _) in enumerate(rows))
        self.running, self.was_admitted = [], set()

    def path_of(self, row):
        """A number for each full block of the prompt, that tells all tokens up to its end."""
        prompt, _, ids = self.rows[row]
        parts, full = (self.width or self.block_size) // self.block_size, prompt // self.block_size
        path = [key * parts + part for key in ids for part in range(parts)][:full]
        return path + [-(row << 32 | place) - 1 for place in range(len(path), full)]

    def run(self):
        while self.waiting or self.running:
            self.admit()
            if self.running:
                self.step()
        return self

    def admit(self):
        """From the head of the queue. Who was refused is asked again after the next release."""
        while self.waiting and len(self.running) < self.concurrency and self.refused_at != self.cache.releases:
            if self.open(self.waiting[0]):
                self.running.append(self.waiting.popleft())
            elif self.running:
                self.refused_at = self.cache.releases
            else:
                self.reject(self.waiting.popleft())
        self.count["peak_running"] = max(self.count["peak_running"], len(self.running))

    def known(self, path, total):
        """How many blocks of a prompt are there; at least one token is computed."""
        most = path[: (total - 1) // self.block_size]
        return next((depth for depth, node in enumerate(most) if node not in self.cache.refs), len(most))

    def open(self, request):
        cache, total, path = self.cache, request.length, self.path_of(request.row)
        hit = self.known(path, total)
        need = -(-total // self.block_size) - hit
        if need > cache.num_available - sum(not cache.refs[node] for node in path[:hit]):
            return False
        for node in path[:hit]:
            cache.use(node)
        cache.take(need)
        computed = [cache.name(path[i], path[i - 1] if i else None) for i in range(hit, len(path))]
        request.blocks = path[:hit] + computed + [None] * (need - len(computed))
        loaded = 0 if self.tier is None else self.load(path, hit, (total - 1) // self.block_size)
        self.count_admission(request, hit, loaded)
        return True

    def load(self, path, first, most):
        """How many blocks from `first` on the tier has. All of the prompt that the pool or the tier has are of use."""
        loaded = 0
        self.tier.use(path[:first])
        while first + loaded < min(most, len(path)) and path[first + loaded] in self.tier:
            loaded += 1
        self.tier.use(path[first : first + loaded])
        self.tier.offer(path[first + loaded :])
        return loaded

    def count_admission(self, request, hit, loaded=0):
        found, size = hit * self.block_size, self.block_size
        computed = request.length - found - loaded * size
        self.count.update(admissions=1, hit_tokens=found, computed_tokens=computed, loaded_tokens=loaded * size)
        if request.row not in self.was_admitted:
            self.was_admitted.add(request.row)
            self.count["first_hit_tokens"] += found
        self.note(request, found)

    def step(self):
        """One token for each running request, in the order of admission."""
        for request in list(self.running):
            if request.blocks:  # not preempted in this step
                self.decode(request)
        self.count["steps"] += 1
        self.count["used_block_steps"] += self.cache.used

    def decode(self, request):
        if (request.prompt + request.generated) % self.block_size == 0:
            while not self.cache.num_available:
                victim = self.running[-1]
                self.release(victim)
                if victim is request and not self.running:
                    return self.reject(victim)
                self.waiting.appendleft(victim)
                self.count["preemptions"] += 1
                self.note(victim, "P")
                if victim is request:
                    return None
            self.cache.take()
            request.blocks.append(None)
        request.generated += 1
        self.count["decode_tokens"] += 1
        if request.generated == request.output:
            self.release(request)
            self.count["finished"] += 1
        return None

    def release(self, request):
        self.running.remove(request)
        self.cache.release(request.blocks)
        request.blocks = []

    def reject(self, request):
        self.count["rejected"] += 1
        self.note(request, "R")

    def note(self, request, what):
        self.events.update(f"{request.row}:{what};".encode())

    def counters(self):
        prompts, cache, count = sum(prompt for prompt, _, _ in self.rows), self.cache, self.count
        names = "admissions finished rejected preemptions hit_tokens computed_tokens decode_tokens steps peak_running"
        return {name: count[name] for name in [*names.split(), "used_block_steps", "first_hit_tokens"]} | {
            "evictions": cache.evictions,
            "allocs": cache.allocs,
            "peak_used": cache.peak_used,
            "final_cached_blocks": cache.num_available - cache.blank,
            "prompt_tokens": prompts,
            "requests": len(self.rows),
            "first_hit_rate": round(count["first_hit_tokens"] / prompts, 6),
            "event_sha256": self.events.hexdigest(),
        }


def rows_of(trace):
    """(prompt, output, ids) of each request of a `Trace`."""
    lengths = zip(trace.prompts.tolist(), trace.outputs.tolist(), strict=True)
    return [(prompt, output, trace.ids_of(row).tolist()) for row, (prompt, output) in enumerate(lengths)]
