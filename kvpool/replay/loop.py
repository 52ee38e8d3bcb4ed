"""The closed loop that every policy runs: admit, give each running sequence one token, release what is finished.

A trace is replayed through the public calls of `kvpool.Pool`, as fast as the pool allows: arrival times are not
looked at, at most C requests run at a time. A step gives one token to every running sequence, in the order of
admission, and a sequence's blocks are released at once when its last token is there, so that the next row can
have them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

from kvpool import Plan, Pool
from kvpool.replay.trace import Trace

INT32_MAX = 2**31 - 1


@dataclass(slots=True)
class Request:
    """One request of the trace while it is served.

    Attributes
    ----------
    row : int
        Its row in the trace.
    prompt, output : int
        Tokens.
    generated : int
        Tokens of the answer so far; a preempted request keeps them.
    handles : list of int
        Its sequences in the pool, empty while it waits.
    """

    row: int
    prompt: int
    output: int
    generated: int = 0
    handles: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens of each of its sequences."""
        return self.prompt + self.generated

    @property
    def tokens_left(self) -> int:
        """Tokens of the answer that are still to come."""
        return self.output - self.generated


@dataclass
class Occupancy:
    """Tokens and blocks in the pool over all steps, beside a static reservation for the same sequences.

    Sums run over the ends of steps. Utilization is tokens of sequences / token positions held for them; sharing
    counts a block once and its tokens in every sequence, so with it a pool can pass 1.
    """

    block_size: int
    reserved_tokens: int  #: what a static reservation holds per sequence: the trace's longest one
    steps: int = 0
    used_block_steps: int = 0
    token_steps: int = 0
    sequence_steps: int = 0
    peak_utilization: float = 0.0
    peak_static_utilization: float = 0.0
    timeline: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    """(steps so far, blocks used, sequences, hit tokens so far, tokens looked up so far), where one changed."""

    def add(self, steps: int, used: int, tokens: int, sequences: int, hit_tokens: int, looked_up: int) -> None:
        """Count `steps` steps after which `used` blocks, `sequences` sequences and `tokens` tokens are there.

        In the steps before the last one the sequences were shorter by one token each, by two, and so on.
        """
        self.steps += steps
        self.used_block_steps += steps * used
        self.token_steps += steps * tokens - sequences * (steps * (steps - 1) // 2)
        self.sequence_steps += steps * sequences
        if used:
            self.peak_utilization = max(self.peak_utilization, tokens / (used * self.block_size))
        if sequences:
            static = tokens / (sequences * self.reserved_tokens)
            self.peak_static_utilization = max(self.peak_static_utilization, static)
        self.timeline.append((self.steps, used, sequences, hit_tokens, looked_up))

    @property
    def mean_utilization(self) -> float:
        """Tokens / positions held by the pool, both summed over the steps."""
        return _ratio(self.token_steps, self.used_block_steps * self.block_size)

    @property
    def mean_static_utilization(self) -> float:
        """The same for a static reservation."""
        return _ratio(self.token_steps, self.sequence_steps * self.reserved_tokens)


@dataclass(frozen=True, eq=False)
class Result:
    """The counters of a replay.

    Attributes
    ----------
    policy : str
    num_blocks, block_size : int
        The pool; usable blocks.
    concurrency, samples : int
        The most requests at a time, and sequences per request.
    counters : dict
        The policy's counters by name, in the order of its definition.
    occupancy : Occupancy
    costs : dict
        Per call of the pool: (number of calls, nanoseconds in all).
    block_operations : int
        Blocks taken, found in the cache, shared by forks, and released.
    peak_sequences : int
        Most sequences at a time.
    """

    policy: str
    num_blocks: int
    block_size: int
    concurrency: int
    samples: int
    counters: dict[str, Any]
    occupancy: Occupancy
    costs: dict[str, tuple[int, int]]
    block_operations: int
    peak_sequences: int

    @property
    def static_blocks(self) -> int:
        """Blocks that a static reservation needs to run as many sequences at a time."""
        return self.peak_sequences * -(-self.occupancy.reserved_tokens // self.block_size)

    @property
    def hit_rate(self) -> float:
        """Hit tokens / tokens looked up, repeated admissions included; 0.0 without a prefix cache."""
        hit, *others = (self.counters.get(f"{name}_tokens", 0) for name in ("hit", "computed", "loaded"))
        return _ratio(hit, hit + sum(others))

    @property
    def ns_per_operation(self) -> float:
        """Time inside of the pool's calls per block operation, nanoseconds."""
        return _ratio(sum(ns for _, ns in self.costs.values()), self.block_operations)


class ClosedLoop:
    """A replay of one trace with one pool; a policy adds `admit`, `make_room` and `counters`.

    Parameters
    ----------
    trace : Trace
    num_blocks : int
        Usable blocks; the reserved block of the pool comes on top.
    block_size : int
        Tokens per block.
    concurrency : int
        Most requests that run at a time.
    samples : int
        Sequences per request.
    options
        Further options of the pool.
    """

    policy = ""

    def __init__(
        self,
        trace: Trace,
        num_blocks: int,
        block_size: int,
        concurrency: int,
        samples: int = 1,
        **options: Any,
    ) -> None:
        self.trace, self.num_blocks, self.block_size = trace, num_blocks, block_size
        self.concurrency, self.samples = min(concurrency, len(trace)), samples
        # The token that a prefill computes is the first of the answer: there is at least one.
        lengths = zip(trace.prompts.tolist(), trace.outputs.tolist(), strict=True)
        self.waiting = deque(Request(row, n, max(m, 1)) for row, (n, m) in enumerate(lengths))
        self.running: list[Request] = []
        longest = max(request.prompt + request.output for request in self.waiting)
        rows = self.concurrency * samples
        self.pool = Pool(
            num_blocks + 1,
            block_size,
            reserved_blocks=1,
            max_seqs=rows,
            # One more than there are: a sequence that wants more than all blocks has to find none, not a limit.
            max_blocks_per_seq=min(-(-longest // block_size), num_blocks + 1),
            in_order=True,
            **options,
        )
        self.plan = Plan(self.pool, rows, INT32_MAX, formats=("seq_lens",))
        self.occupancy = Occupancy(block_size, longest)
        self.costs: dict[str, tuple[int, int]] = {}
        self.finished = self.decode_tokens = self.peak_running = 0
        self.hit_tokens = self.computed_tokens = self.loaded_tokens = 0
        self.shared_blocks = 0  # references beyond the first, and on cached blocks

    def admit(self) -> None:
        """Move requests from waiting to running, as many as the policy lets in."""
        raise NotImplementedError

    def make_room(self) -> None:
        """Release blocks: `grow` served fewer requests than it was given."""
        raise NotImplementedError

    def counters(self) -> dict[str, Any]:
        """Return what the policy counts."""
        raise NotImplementedError

    def run(self, progress: Callable[[int], None] = lambda done: None) -> Result:
        """Serve all requests; `progress` is told how many have left. The pool is shut down afterwards."""
        with self.pool:
            self._serve(progress)
            stats = self.pool.stats()
            return Result(
                policy=self.policy,
                num_blocks=self.num_blocks,
                block_size=self.block_size,
                concurrency=self.concurrency,
                samples=self.samples,
                counters=self.counters(),
                occupancy=self.occupancy,
                costs=self.costs,
                block_operations=2 * (stats.allocs + self.shared_blocks),  # each is released again
                peak_sequences=self.peak_running * self.samples,
            )

    def _serve(self, progress: Callable[[int], None]) -> None:
        total, told = len(self.trace), 0
        while self.waiting or self.running:
            self.admit()
            if self.running:
                self.decode()
            done = total - len(self.waiting) - len(self.running)
            if done != told:
                progress(done)
                told = done

    def call(self, verb: str, *args: Any, **options: Any) -> Any:
        """Call the pool and count the time."""
        method = getattr(self.pool.prefix if verb in ("commit", "wanted") else self.pool, verb)
        start = perf_counter_ns()
        try:
            return method(*args, **options)
        finally:
            elapsed = perf_counter_ns() - start
            calls, ns = self.costs.get(verb, (0, 0))
            self.costs[verb] = calls + 1, ns + elapsed

    def decode(self) -> None:
        """Do the next step, or all steps before the next one in which a block is taken or a request finishes.

        In the steps between only lengths grow, so one call with several tokens per row is the same.
        """
        self.peak_running = max(self.peak_running, len(self.running))
        steps = min(min(-request.length % self.block_size, request.tokens_left - 1) for request in self.running)
        if steps > 0:
            self.grow(self.running, steps)
        else:
            steps = 1
            self.decode_once()
        self.occupancy.add(
            steps,
            self.pool.stats().used,
            self.samples * sum(request.length for request in self.running),
            self.samples * len(self.running),
            self.hit_tokens,
            self.hit_tokens + self.computed_tokens + self.loaded_tokens,
        )

    def decode_once(self) -> None:
        """One token for every running request; the blocks of one that finishes are free for the next row."""
        row = 0
        while row < len(self.running):
            ends = (i for i in range(row, len(self.running)) if self.running[i].tokens_left == 1)
            last = next(ends, len(self.running) - 1)
            row += self.grow(self.running[row : last + 1], 1)
            if row <= last:
                self.make_room()
            elif self.running[last].tokens_left == 0:
                self.release(self.running.pop(last))
                self.finished += 1
                row = last

    def grow(self, requests: list[Request], steps: int) -> int:
        """Give each sequence of `requests` that many tokens; return how many requests were served."""
        self.call("step", self.plan, [handle for request in requests for handle in request.handles], steps)
        for request in requests:
            request.generated += steps
        self.decode_tokens += steps * len(requests) * self.samples
        return len(requests)

    def release(self, request: Request) -> None:
        """Close the request's sequences, the first one first."""
        self.call("close", request.handles)
        request.handles = []


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
