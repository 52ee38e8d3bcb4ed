"""The policy: a closed loop with a prefix cache.

A trace is replayed through the public calls of `kvpool.Pool`, as fast as the pool allows: arrival times are not
looked at, at most C requests run at a time. A step gives one token to every running sequence, in the order of
admission, and a sequence's blocks are released at once when its last token is there, so that the next row can
have them.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.replay.results import Result
from benchmarks.replay.shapes import HybridShape
from benchmarks.replay.trace import Trace, paths_of, shareable_blocks, unique_blocks
from kvpool import Plan, Pool
from kvpool.errors import OutOfBlocks
from kvpool.scheduler.needs import Needs

INT32_MAX = 2**31 - 1
CHUNK = 2048
"""Tokens of a prompt that a step computes at most."""


@dataclass(slots=True)
class Request:
    """One request of the trace while it is served."""

    row: int  # in the trace
    prompt: int  # tokens
    output: int
    generated: int = 0  # tokens of the answer so far; a preempted request keeps them
    cached: int = 0  # tokens of it that the cache had when it was admitted
    handle: int = -1  # its sequence in the pool, while it runs

    @property
    def length(self) -> int:
        """Tokens of its sequence."""
        return self.prompt + self.generated

    @property
    def tokens_left(self) -> int:
        """Tokens of the answer that are still to come."""
        return self.output - self.generated


class Replay:
    """A replay of one trace with one pool.

    Admission is first come, first served: the head of the queue is admitted if there are blocks for the most that its
    tokens hold at a time. If it does not fit it waits, and everybody behind it; if it does not fit into an idle pool it
    is rejected. A prompt is computed before the first token is generated, in chunks that end where the pool wants a
    checkpoint, and its full blocks are committed.

    When blocks run out, the request admitted last is preempted: it releases its blocks, keeps its generated tokens and
    goes to the head of the queue; admitted again, its prompt may hit the cache, its generated tokens are computed
    again. A request alone in the pool that needs one more block is rejected, or it would preempt itself for ever.
    """

    def __init__(
        self,
        trace: Trace,
        num_blocks: int,
        block_size: int,
        concurrency: int,
        *,
        shape: HybridShape | None = None,
        store: Any = None,
    ) -> None:
        self.trace, self.num_blocks, self.block_size = trace, num_blocks, block_size
        self.concurrency, self.shape, self.store = min(concurrency, len(trace)), shape, store
        # The token that a prefill computes is the first of the answer: there is at least one.
        lengths = zip(trace.prompts.tolist(), trace.outputs.tolist(), strict=True)
        self.waiting = deque(Request(row, n, max(m, 1)) for row, (n, m) in enumerate(lengths))
        self.running: list[Request] = []
        longest = max(request.prompt + request.output for request in self.waiting)
        self.pool = Pool(
            num_blocks + 1,
            block_size,
            reserved_blocks=1,
            max_seqs=self.concurrency,
            # One more than there are: a sequence that wants more than all blocks has to find none, not a limit.
            max_blocks_per_seq=min(-(-longest // block_size), num_blocks + 1),
            in_order=True,
            prefix_cache=True,
            groups=None if shape is None else shape.groups,
        )
        assert self.pool.prefix is not None
        self.prefix = self.pool.prefix
        self.plan = Plan(self.pool, self.concurrency, INT32_MAX, formats=("seq_lens",))
        self.needs = Needs(self.pool, CHUNK)
        self.admissions = self.finished = self.rejected = self.preemptions = 0
        self.decode_tokens = self.peak_running = self.steps = self.used_block_steps = 0
        self.hit_tokens = self.computed_tokens = self.loaded_tokens = self.first_hit_tokens = 0
        self.is_head_refused = False
        self.was_admitted = np.zeros(len(trace), np.bool_)
        self.events = hashlib.sha256()
        groups = self.pool.options.groups
        self.states = next((i for i, group in enumerate(groups) if group.kind == "state"), None)
        self.checkpoints = dict.fromkeys(("checkpoints_wanted", "checkpoints_taken", "checkpoint_hits"), 0)
        self.blocks_written = [0] * len(groups)

    def run(self, progress: Callable[[int], None] = lambda done: None) -> Result:
        """Serve all requests; `progress` is told how many have left. The pool is shut down afterwards."""
        with self.pool:
            self._serve(progress)
            return Result(self.num_blocks, self.block_size, self.concurrency, self.counters())

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

    # ---- admission ---------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Admit from the head of the queue until it does not fit."""
        # Other requests that grow never help the head: it is asked again after a release.
        while self.waiting and len(self.running) < self.concurrency and not self.is_head_refused:
            request = self.waiting[0]
            if self.open(request):
                self.running.append(self.waiting.popleft())
            elif self.running:
                self.is_head_refused = True
            else:
                self.reject(self.waiting.popleft())

    def open(self, request: Request) -> bool:
        """Open the request's sequence and compute its prompt; tell whether there were blocks for it."""
        if request.length > self.num_blocks * self.block_size:
            return False  # the pool would say so too, but not before it is given tokens without number
        tokens = self.trace.tokens(request.row, request.length)
        # Full groups take all blocks at once. A window never holds those of a long prompt at a time: they are counted.
        at_once = not self.needs.lets_go
        try:
            handle = self.pool.open(tokens, b"", self.cut_of(request), reserve=at_once)
        except OutOfBlocks:
            return False
        cached = self.pool.num_tokens(handle)
        if not at_once:
            need = self.needs.most(request.length) - self.needs.held(cached, found=cached)
            if self.needs.short(need.tolist(), self.needs.free()) >= 0:
                self.pool.close(handle)
                return False
        request.handle, request.cached = handle, cached
        self.prefill(request, tokens)
        self.count_admission(request)
        return True

    def cut_of(self, request: Request) -> int:
        """Return where the part of the prompt begins that the trace does not name, so that nobody can share it."""
        width = max(self.trace.block_size, self.block_size)
        return request.prompt // width * width

    def prefill(self, request: Request, tokens: NDArray[np.int32]) -> None:
        """Compute what the cache did not have, and publish the prompt as it is computed."""
        handle, length = request.handle, request.cached
        while length < request.length:
            (wanted,) = self.prefix.wanted(handle).tolist()
            end = min(request.length, length + CHUNK, wanted if wanted > length else request.length)
            self.pool.step(self.plan, [handle], end - length)
            named = min(end, request.prompt)
            if length < named:
                self.prefix.commit(handle, tokens[length:named])
            if end == wanted:
                self.count_checkpoint()
            length = end

    def count_checkpoint(self) -> None:
        """The last step ended where the pool wants a checkpoint. Only one of a state may lack blocks."""
        self.checkpoints["checkpoints_wanted"] += 1
        groups, states = self.plan.groups, self.states
        is_taken = states is None or len(groups[states].state_saves) > 0
        self.checkpoints["checkpoints_taken"] += is_taken
        if is_taken and states is not None:
            self.blocks_written[states] += self.pool.options.groups[states].blocks

    def count_admission(self, request: Request) -> None:
        """Count a request that runs."""
        cached = request.cached
        self.admissions += 1
        self.checkpoints["checkpoint_hits"] += cached > 0
        self.hit_tokens += cached
        self.computed_tokens += request.length - cached
        if self.store is not None:
            loaded = self.load(request, cached)
            self.loaded_tokens += loaded
            self.computed_tokens -= loaded
        if not self.was_admitted[request.row]:
            self.was_admitted[request.row] = True
            self.first_hit_tokens += cached
        self.note(request, cached)

    def load(self, request: Request, cached: int) -> int:
        """Return how many tokens behind the cached ones the store has. It gets the full blocks of the prompt."""
        (blocks,) = self.store.layout.blocks(self.trace.tokens(request.row, request.prompt))
        first, most = cached // self.block_size, (request.length - 1) // self.block_size
        rows = np.zeros((len(blocks), 1), np.uint8)
        self.store.touch(blocks[:first])
        found = np.append(self.store.lookup(blocks[first:most]), False)
        end = first + int(found.argmin())
        loaded = np.append(self.store.load(blocks[first:end], rows[first:end]), False)
        end = first + int(loaded.argmin())
        self.store.store(blocks[end:], rows[end:])
        self.store.drain()
        return (end - first) * self.block_size

    # ---- decoding ----------------------------------------------------------------------------------------------

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
        self.steps += steps
        self.used_block_steps += steps * self.pool.stats().used

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
        """Give each of `requests` that many tokens; return how many, from the first on, had blocks for it."""
        try:
            self.pool.step(self.plan, [request.handle for request in requests], steps)
        except OutOfBlocks as short:
            return self.grow(requests[: short.row], steps) if short.row else 0
        for request in requests:
            request.generated += steps
        self.decode_tokens += steps * len(requests)
        return len(requests)

    def make_room(self) -> None:
        """Preempt the request admitted last; reject it if it is alone."""
        victim = self.running.pop()
        self.release(victim)
        if not self.running:
            self.reject(victim)
            return
        self.waiting.appendleft(victim)
        self.preemptions += 1
        self.note(victim, "P")

    def release(self, request: Request) -> None:
        """Close the request's sequence; the head of the queue may fit now."""
        for index, group in enumerate(self.pool.options.groups):
            if group.kind != "state":
                size = group.block_size or self.block_size
                entries = -(-request.length // size) - request.cached // size
                self.blocks_written[index] += entries * group.columns
        self.pool.close(request.handle)
        self.is_head_refused = False

    def reject(self, request: Request) -> None:
        """Drop a request that the whole pool cannot hold."""
        self.rejected += 1
        self.note(request, "R")

    def note(self, request: Request, what: int | str) -> None:
        """Add to the digest of what happened: hit tokens of an admission, P for preempted, R for rejected."""
        self.events.update(f"{request.row}:{what};".encode())

    # ---- what was counted --------------------------------------------------------------------------------------

    def counters(self) -> dict[str, Any]:
        """Return what was counted, by name. With a shape: what no cache can avoid, and what became of checkpoints."""
        found = self.counters_of_prefixes()
        return found if self.shape is None else found | self.counters_of_groups(self.shape)

    def counters_of_prefixes(self) -> dict[str, Any]:
        """Return the counters of any pool; ``used_block_steps`` sums the blocks in use at the end of each step."""
        stats, prompt_tokens = self.pool.stats(), int(self.trace.prompts.sum())
        store = {} if self.store is None else {"loaded_tokens": self.loaded_tokens}
        return {
            **store,
            "admissions": self.admissions,
            "finished": self.finished,
            "rejected": self.rejected,
            "preemptions": self.preemptions,
            "evictions": stats.evictions,
            "allocs": stats.allocs,
            "hit_tokens": self.hit_tokens,
            "computed_tokens": self.computed_tokens,
            "decode_tokens": self.decode_tokens,
            "steps": self.steps,
            "peak_used": stats.peak_used,
            "peak_running": self.peak_running,
            "used_block_steps": self.used_block_steps,
            "first_hit_tokens": self.first_hit_tokens,
            "final_cached_blocks": stats.evictable,
            "prompt_tokens": prompt_tokens,
            "requests": len(self.trace),
            "first_hit_rate": round(self.first_hit_tokens / prompt_tokens, 6),
            "event_sha256": self.events.hexdigest(),
        }

    def counters_of_groups(self, shape: HybridShape) -> dict[str, Any]:
        """Return what a model with layer groups is measured by."""
        size = self.block_size
        paths = paths_of(self.trace, size)
        shareable = size * sum(shareable_blocks(self.trace, paths, size))
        return {
            "shareable_tokens": shareable,
            "avoidable_tokens": shareable - self.first_hit_tokens,
            "unique_nbytes": unique_blocks(paths) * size * shape.token_nbytes,
            **self.checkpoints,
            "written_nbytes": {
                name: blocks * shape.block_nbytes
                for name, blocks in zip(shape.names(), self.blocks_written, strict=True)
            },
        }


def blocks_needed(trace: Trace, block_size: int, concurrency: int) -> int:
    """Return blocks that hold any `concurrency` requests of the trace at once."""
    blocks = -(-(trace.prompts + np.maximum(trace.outputs, 1)) // block_size)
    return int(np.sort(blocks)[-concurrency:].sum())


def replay(
    trace: Trace,
    *,
    shape: HybridShape | None = None,
    num_blocks: int | None = None,
    block_size: int | None = None,
    concurrency: int = 16,
    store: Any = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Result:
    """Replay a trace through a pool and return what happened: see `Replay`.

    Parameters
    ----------
    trace : Trace
    shape : HybridShape, optional
        What a model keeps, in the layer groups of the pool. Its base block divides the trace's. Default: one full
        group.
    num_blocks : int, optional
        Usable blocks of the pool; one reserved block comes on top. Default: `blocks_needed`, which always suffice.
    block_size : int, optional
        Tokens per block. Default: the shape's, else the trace's, or 16 for a trace without ids.
    concurrency : int
        Most requests at a time.
    store : kvpool.store.BlockStore, optional
        A tier behind the pool, of a layout with one group, blocks of `block_size` tokens and one byte. What it has
        behind a hit is loaded, not computed; what is computed is stored.
    progress : callable
        Called with the number of requests that are through, whenever it changes.

    Raises
    ------
    ValueError
        If an option is out of range, or does not fit the others.
    """
    if block_size is None:
        block_size = shape.block_size if shape is not None else trace.block_size or 16
    _check(trace, shape, num_blocks, block_size, concurrency, store)
    num_blocks = blocks_needed(trace, block_size, concurrency) if num_blocks is None else num_blocks
    return Replay(trace, num_blocks, block_size, concurrency, shape=shape, store=store).run(progress)


def _check(
    trace: Trace, shape: HybridShape | None, num_blocks: int | None, block_size: int, concurrency: int, store: Any
) -> None:
    """Refuse what `replay` cannot do."""
    if len(trace) == 0:
        raise ValueError("[replay] the trace has no request (0), at least 1")
    numbers = {"block_size": block_size, "concurrency": concurrency}
    for name, value in (numbers if num_blocks is None else {"num_blocks": num_blocks, **numbers}).items():
        if value < 1:
            raise ValueError(f"[replay] {name} is out of range ({value}), at least 1")
    if shape is not None and num_blocks is None:
        raise ValueError("[replay] a shape needs num_blocks, the usable blocks of the pool")
    groups = [(block_size, 1)] if store is None else [(group.block_size, group.nbytes) for group in store.layout.groups]
    if groups != [(block_size, 1)] or (store is not None and shape is not None):
        raise ValueError(f"[replay] a store has one group, of blocks of {block_size} tokens and 1 byte, and no shape")
    if shape is not None and block_size != shape.block_size:
        raise ValueError(f"[replay] block_size is {block_size}, the shape has {shape.block_size}: leave it out")
    if shape is not None and trace.block_size % shape.grain:
        raise ValueError(
            f"[replay] hits of this model are multiples of {shape.grain} tokens, which do not divide the"
            f" {trace.block_size} of a hash id: choose a smaller block_size"
        )
