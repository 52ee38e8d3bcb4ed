"""A small continuous-batching server without a model, once on blocks and once on fixed slots.

Time is counted in engine steps. In a step every admitted prompt is prefilled whole and every running
sequence gains one token.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

import kvpool
from kvpool.errors import OutOfBlocks


@dataclass(frozen=True)
class Request:
    """A prompt of `prompt` tokens that arrives at step `arrival` and is answered with `answer` tokens."""

    arrival: int
    prompt: int
    answer: int

    @property
    def num_tokens(self) -> int:
        """Length of the sequence when it is finished."""
        return self.prompt + self.answer


@dataclass
class Timeline:
    """What a server held at the end of each step.

    Attributes
    ----------
    blocks : list of int
        Blocks that no other request could use: taken from the pool, or reserved.
    filled : list of float
        Blocks' worth of tokens that they really held: tokens / block_size.
    running : list of int
        Sequences that ran in the step.
    preemptions : int
        Times a running sequence was thrown out and later computed again.
    leaked : int
        Blocks still taken when all requests were finished.
    """

    blocks: list[int] = field(default_factory=list)
    filled: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    preemptions: int = 0
    leaked: int = 0

    def record(self, blocks: int, filled: float, running: int) -> None:
        self.blocks.append(blocks)
        self.filled.append(filled)
        self.running.append(running)

    @property
    def steps(self) -> int:
        """Steps until the last request was finished."""
        return len(self.blocks)

    @property
    def wasted(self) -> float:
        """Share of the held space, summed over all steps, that held no token."""
        return 1.0 - sum(self.filled) / max(1, sum(self.blocks))


@dataclass(frozen=True)
class Comparison:
    """The same requests, served from fixed slots and from blocks, in `num_blocks` blocks of memory."""

    slots: Timeline
    blocks: Timeline
    num_requests: int
    num_blocks: int
    block_size: int
    max_len: int

    @property
    def steps(self) -> int:
        """Steps of the slower one."""
        return max(self.slots.steps, self.blocks.steps)


def compare(num_requests: int, num_blocks: int, block_size: int, max_len: int, seed: int) -> Comparison:
    """Serve random requests both ways. The pool's padding block comes on top of `num_blocks`."""
    requests = make_requests(num_requests, max_len, seed)
    slots = serve_from_slots(requests, num_blocks, block_size, max_len)
    blocks = serve_from_blocks(requests, num_blocks, block_size)
    return Comparison(slots, blocks, num_requests, num_blocks, block_size, max_len)


def make_requests(count: int, max_len: int, seed: int) -> list[Request]:
    """Return requests with exponential gaps and log-normal lengths, most far shorter than `max_len`."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(2.0, count)).astype(int)
    prompts = np.clip(rng.lognormal(4.4, 0.9, count), 4, max_len // 2).astype(int)
    answers = np.clip(rng.lognormal(4.6, 0.5, count), 8, max_len // 2).astype(int)
    return [Request(int(a), int(p), int(n)) for a, p, n in zip(arrivals, prompts, answers, strict=True)]


def serve_from_slots(requests: list[Request], num_blocks: int, block_size: int, max_len: int) -> Timeline:
    """Serve with static reservation: a running sequence owns `max_len` tokens from first step to last."""
    blocks_per_slot = -(-max_len // block_size)
    num_slots = num_blocks // blocks_per_slot
    timeline, waiting = Timeline(), deque(requests)
    running: list[list[int]] = []  # [length now, length when finished]
    while waiting or running:
        while waiting and waiting[0].arrival <= timeline.steps and len(running) < num_slots:
            request = waiting.popleft()
            running.append([request.prompt, request.num_tokens])
        for sequence in running:
            sequence[0] += 1
        filled = sum(length for length, _ in running) / block_size
        timeline.record(len(running) * blocks_per_slot, filled, len(running))
        running = [sequence for sequence in running if sequence[0] < sequence[1]]
    return timeline


def serve_from_blocks(requests: list[Request], num_blocks: int, block_size: int) -> Timeline:
    """Serve from a `kvpool.Pool`: a sequence takes a block when it needs one.

    When a step does not fit, the newest sequence is thrown out, and its request waits to be computed again.
    """
    timeline, waiting = Timeline(), deque(requests)
    running: list[tuple[int, Request]] = []  # (handle, request), oldest first
    max_seqs = len(requests)
    with kvpool.Pool(num_blocks + 1, block_size, max_seqs=max_seqs, watermark=num_blocks // 50) as pool:
        plan = kvpool.Plan(pool, max_rows=max_seqs, max_tokens=num_blocks * block_size)
        while waiting or running:
            while waiting and waiting[0].arrival <= timeline.steps:
                try:
                    handle = pool.open(waiting[0].prompt + 1)
                except OutOfBlocks:
                    break
                running.append((handle, waiting.popleft()))
            while running and not _step(pool, plan, running):
                handle, request = running.pop()
                pool.close(handle)
                waiting.appendleft(request)
                timeline.preemptions += 1
            stats = pool.stats()
            timeline.record(stats.used, stats.tokens / block_size, len(running))
            if running:
                pool.done(plan)
                over = [pool.num_tokens(handle) == request.num_tokens for handle, request in running]
                pool.close_finished([handle for handle, _ in running], np.array(over))
                running = [entry for entry, is_over in zip(running, over, strict=True) if not is_over]
        pool.check()
        timeline.leaked = pool.stats().used
    return timeline


def _step(pool: kvpool.Pool, plan: kvpool.Plan, running: list[tuple[int, Request]]) -> bool:
    """Plan one step for all of `running`; False if the pool is too full for it (then nothing has moved)."""
    handles = [handle for handle, _ in running]
    new = [1 if pool.num_tokens(handle) else request.prompt + 1 for handle, request in running]
    try:
        pool.step(plan, handles, new)
    except OutOfBlocks:
        return False
    return True
