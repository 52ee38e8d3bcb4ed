"""The two policies: P1, a prefix cache in a pool that fills up, and P2, parallel samples in one that does not."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import CapacityExceeded, OutOfBlocks
from kvpool.replay.loop import ClosedLoop, Request, Result
from kvpool.replay.trace import Trace


class PrefixCaching(ClosedLoop):
    """P1: requests share prefixes through the cache; when blocks run out, the last admitted one is preempted.

    Admission is first come, first served: the head of the queue opens a sequence with all its tokens, so that all
    its blocks are there, the prompt's full ones committed, before the first token is generated. If it does not
    fit it waits, and everybody behind it; if it does not fit into an idle pool it is rejected.

    A preempted request releases its blocks, keeps its generated tokens and goes to the head of the queue;
    admitted again, its prompt may hit the cache, its generated tokens are computed again. A request alone in the
    pool that needs one more block is rejected, or it would preempt itself for ever.
    """

    policy = "P1"

    def __init__(
        self, trace: Trace, num_blocks: int, block_size: int, concurrency: int, store: Any = None, **options: Any
    ) -> None:
        super().__init__(trace, num_blocks, block_size, concurrency, prefix_cache=True, **options)
        self.store = store
        self.admissions = self.rejected = self.preemptions = self.first_hit_tokens = 0
        self.is_head_refused = False
        self.was_admitted = np.zeros(len(trace), np.bool_)
        self.events = hashlib.sha256()

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
        handle = self.open_tokens(request, tokens)
        if handle is None:
            return False
        request.handles = [handle]
        self.prefill(request, tokens)
        return True

    def open_tokens(self, request: Request, tokens: NDArray[np.int32]) -> int | None:
        """Open a sequence over what is cached. None: it does not fit."""
        try:
            handle: int = self.call("open", tokens)
        except OutOfBlocks:
            return None
        return handle

    def prefill(self, request: Request, tokens: NDArray[np.int32]) -> None:
        """Compute what the cache did not have, and publish the full blocks of the prompt."""
        handle = request.handles[0]
        cached = self.pool.num_tokens(handle)
        self.call("step", self.plan, request.handles, request.length - cached)
        full = request.prompt // self.block_size * self.block_size
        if full > cached:
            self.call("commit", handle, tokens[cached:full])
        self.count_admission(request, cached)

    def count_admission(self, request: Request, cached: int) -> None:
        """Count a request that runs, of which the cache had `cached` tokens."""
        self.admissions += 1
        self.shared_blocks += cached // self.block_size
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

    def grow(self, requests: list[Request], steps: int) -> int:
        """Serve as many requests, from the first one on, as there are blocks for."""
        try:
            return super().grow(requests, steps)
        except OutOfBlocks as short:
            return super().grow(requests[: short.row], steps) if short.row else 0

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
        """Close the sequence; the head of the queue may fit now."""
        super().release(request)
        self.is_head_refused = False

    def reject(self, request: Request) -> None:
        """Drop a request that the whole pool cannot hold."""
        self.rejected += 1
        self.note(request, "R")

    def note(self, request: Request, what: int | str) -> None:
        """Add to the digest of what happened: hit tokens of an admission, P for preempted, R for rejected."""
        self.events.update(f"{request.row}:{what};".encode())

    def counters(self) -> dict[str, Any]:
        """Return P1's counters; ``used_block_steps`` sums the blocks in use at the end of each step."""
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
            "steps": self.occupancy.steps,
            "peak_used": stats.peak_used,
            "peak_running": self.peak_running,
            "used_block_steps": self.occupancy.used_block_steps,
            "first_hit_tokens": self.first_hit_tokens,
            "final_cached_blocks": stats.evictable,
            "prompt_tokens": prompt_tokens,
            "requests": len(self.trace),
            "first_hit_rate": round(self.first_hit_tokens / prompt_tokens, 6),
            "event_sha256": self.events.hexdigest(),
        }


class ParallelSampling(ClosedLoop):
    """P2: every prompt is continued by K sequences that share its blocks until they write (copy-on-write).

    No prefix cache. The pool must hold everything: `blocks_needed` of them always suffice.
    """

    policy = "P2"

    def __init__(self, trace: Trace, num_blocks: int, block_size: int, concurrency: int, samples: int) -> None:
        super().__init__(trace, num_blocks, block_size, concurrency, samples)
        self.peak_ref = 0

    def admit(self) -> None:
        """Admit up to the cap: one prefill, then K - 1 forks of it."""
        while self.waiting and len(self.running) < self.concurrency:
            request = self.waiting.popleft()
            parent = self.call("open", request.prompt)
            self.call("step", self.plan, [parent], request.prompt)
            self.computed_tokens += request.prompt
            children = self.call("fork", parent, self.samples - 1).tolist() if self.samples > 1 else []
            request.handles = [parent, *children]
            self.shared_blocks += len(children) * -(-request.prompt // self.block_size)
            self.peak_ref = max(self.peak_ref, self.pool.blocks.refcount(int(self.pool.table(parent)[0])))
            self.running.append(request)

    def counters(self) -> dict[str, Any]:
        """Return P2's counters; ``frees`` are blocks that lost their last reference."""
        stats = self.pool.stats()
        return {
            "allocs": stats.allocs,
            "cow_copies": stats.cow_copies,
            "copied_tokens": stats.cow_tokens,
            "peak_used": stats.peak_used,
            "peak_ref": self.peak_ref,
            "frees": stats.allocs - stats.used,
            "steps": self.occupancy.steps,
            "decode_tokens": self.decode_tokens,
        }


def blocks_needed(trace: Trace, block_size: int, concurrency: int, samples: int) -> int:
    """Return blocks that hold any `concurrency` requests of the trace at once, each with `samples` sequences."""
    blocks = -(-(trace.prompts + np.maximum(trace.outputs, 1)) // block_size)
    return int(np.sort(blocks)[-concurrency:].sum()) * samples


def replay(
    trace: Trace,
    *,
    policy: str = "P1",
    num_blocks: int | None = None,
    block_size: int | None = None,
    concurrency: int = 16,
    samples: int = 1,
    store: Any = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Result:
    """Replay a trace through a pool and return what happened.

    Parameters
    ----------
    trace : Trace
    policy : {"P1", "P2"}
        `PrefixCaching` or `ParallelSampling`.
    num_blocks : int, optional
        Usable blocks of the pool; one reserved block comes on top. P2's default always suffices.
    block_size : int, optional
        Tokens per block. Default: the trace's, or 16 for a trace without ids.
    concurrency : int
        Most requests at a time.
    samples : int
        Sequences per request, P2 only.
    store : kvpool.store.BlockStore, optional
        P1 only: a tier behind the pool, of a layout with one group, blocks of `block_size` tokens and one byte. What
        it has behind a hit is loaded, not computed; what is computed is stored.
    progress : callable
        Called with the number of requests that are through, whenever it changes.

    Raises
    ------
    ValueError
        If an option is out of range, or does not belong to the policy, or P2 has too few blocks.
    """
    if block_size is None:
        block_size = trace.block_size or 16
    if len(trace) == 0:
        raise ValueError("[replay] the trace has no request (0), at least 1")
    for name, value in (("block_size", block_size), ("concurrency", concurrency), ("samples", samples)):
        if value < 1:
            raise ValueError(f"[replay] {name} is out of range ({value}), at least 1")
    groups = [(block_size, 1)] if store is None else [(group.block_size, group.nbytes) for group in store.layout.groups]
    if groups != [(block_size, 1)] or (store is not None and policy != "P1"):
        raise ValueError(f"[replay] a store is a matter of P1 ({policy}), of blocks of {block_size} tokens and 1 byte")
    if policy == "P2":
        enough = blocks_needed(trace, block_size, concurrency, samples)
        num_blocks = enough if num_blocks is None else num_blocks
        try:
            return ParallelSampling(trace, num_blocks, block_size, concurrency, samples).run(progress)
        except (OutOfBlocks, CapacityExceeded):
            message = f"[replay] num_blocks is too small for P2 ({num_blocks}), {enough} are always enough"
            raise ValueError(message) from None
    if policy != "P1":
        raise ValueError(f"[replay] there is no such policy ({policy}): P1, P2")
    if samples != 1:
        raise ValueError(f"[replay] samples are a matter of P2 ({samples})")
    if num_blocks is None:
        raise ValueError("[replay] P1 needs num_blocks, the usable blocks of the pool")
    return PrefixCaching(trace, num_blocks, block_size, concurrency, store).run(progress)
