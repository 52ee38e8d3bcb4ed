"""P3: the closed loop of P1 on a pool with layer groups, whose hits need checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import OutOfBlocks
from kvpool.replay.hybrid_shapes import HybridShape
from kvpool.replay.loop import Request, Result
from kvpool.replay.paths import paths_of, shareable_blocks, unique_blocks
from kvpool.replay.policies import PrefixCaching
from kvpool.replay.trace import Trace
from kvpool.scheduler.needs import Needs

CHUNK = 2048
"""Tokens of a prompt that a step computes at most."""


class HybridCaching(PrefixCaching):
    """P3: P1 with layer groups. A prompt is computed in chunks, which end where the pool wants a checkpoint.

    A request is admitted when there are blocks for the most that its prompt holds at a time. Each chunk takes what it
    needs. Only this request has the part of its prompt that the trace does not name, so this part is behind the cut.
    """

    policy = "P3"

    def __init__(self, trace: Trace, num_blocks: int, shape: HybridShape, concurrency: int) -> None:
        super().__init__(trace, num_blocks, shape.block_size, concurrency, groups=shape.groups)
        self.shape = shape
        self.needs = Needs(self.pool, CHUNK)
        self.checkpoints = dict.fromkeys(("checkpoints_wanted", "checkpoints_taken", "checkpoint_hits"), 0)
        self.cached = dict[int, int]()  # row of the trace -> tokens that its sequence found
        self.blocks_written = [0] * len(shape.groups)
        self.states = next((i for i, group in enumerate(shape.groups) if group.kind == "state"), None)

    def cut_of(self, request: Request) -> int:
        """Return where the part of the prompt begins that no other request can share."""
        width = max(self.trace.block_size, self.block_size)
        return request.prompt // width * width

    def open_tokens(self, request: Request, tokens: NDArray[np.int32]) -> int | None:
        """Open a sequence over what is cached, with a cut. It takes no blocks. None: it does not fit."""
        try:
            handle: int = self.call("open", tokens, b"", self.cut_of(request), reserve=False)
        except OutOfBlocks:  # no slot for its states
            return None
        found = self.pool.num_tokens(handle)
        need = self.needs.most(request.length) - self.needs.held(found, found=found)
        if self.needs.short(need.tolist(), self.needs.free()) < 0:
            return handle
        self.call("close", handle)
        return None

    def prefill(self, request: Request, tokens: NDArray[np.int32]) -> None:
        """Compute what the cache did not have, and publish the prompt as it is computed."""
        handle = request.handles[0]
        cached = length = self.pool.num_tokens(handle)
        while length < request.length:
            (wanted,) = self.call("wanted", request.handles).tolist()
            end = min(request.length, length + CHUNK, wanted if wanted > length else request.length)
            self.call("step", self.plan, request.handles, end - length)
            named = min(end, request.prompt)
            if length < named:
                self.call("commit", handle, tokens[length:named])
            if end == wanted:
                self.count_checkpoint()
            length = end
        self.cached[request.row] = cached
        self.checkpoints["checkpoint_hits"] += cached > 0
        self.count_admission(request, cached)

    def count_checkpoint(self) -> None:
        """The last step ended where the pool wants a checkpoint. Only one of a state may lack blocks."""
        self.checkpoints["checkpoints_wanted"] += 1
        groups, states = self.plan.groups, self.states
        assert groups is not None
        is_taken = states is None or len(groups[states].state_saves) > 0
        self.checkpoints["checkpoints_taken"] += is_taken
        if is_taken and states is not None:
            self.blocks_written[states] += self.shape.entry_blocks(states)

    def release(self, request: Request) -> None:
        """Close the sequence, and count the blocks that it wrote."""
        cached = self.cached.pop(request.row)
        for index, group in enumerate(self.shape.groups):
            if group.kind != "state":
                size = self.shape.entry_tokens(index)
                entries = -(-request.length // size) - cached // size
                self.blocks_written[index] += entries * self.shape.entry_blocks(index)
        super().release(request)

    def counters(self) -> dict[str, Any]:
        """Return P1's counters, what no cache can avoid, and what became of the checkpoints."""
        size = self.block_size
        paths = paths_of(self.trace, size)
        shareable = size * sum(shareable_blocks(self.trace, paths, size))
        return super().counters() | {
            "shareable_tokens": shareable,
            "avoidable_tokens": shareable - self.first_hit_tokens,
            "unique_nbytes": unique_blocks(paths) * size * self.shape.token_nbytes,
            **self.checkpoints,
            "written_nbytes": {
                name: blocks * self.shape.block_nbytes
                for name, blocks in zip(self.shape.names(), self.blocks_written, strict=True)
            },
        }


def replay_hybrid(
    trace: Trace,
    *,
    shape: HybridShape,
    num_blocks: int,
    concurrency: int = 16,
    progress: Callable[[int], None] = lambda done: None,
) -> Result:
    """Replay a trace through a pool with layer groups and a prefix cache.

    Parameters
    ----------
    trace : Trace
    shape : HybridShape
        What the model keeps; its base block divides the trace's.
    num_blocks : int
        Usable blocks, of ``shape.block_nbytes`` each.
    concurrency : int
        Most requests at a time.
    progress : callable
        As in `replay`.

    Raises
    ------
    ValueError
        An option is out of range, or the blocks do not divide those of the trace.
    """
    if len(trace) == 0:
        raise ValueError("[replay] the trace has no request (0), at least 1")
    for name, value in (("num_blocks", num_blocks), ("concurrency", concurrency)):
        if value < 1:
            raise ValueError(f"[replay] {name} is out of range ({value}), at least 1")
    if trace.block_size % shape.grain:
        raise ValueError(
            f"[replay] hits of this model are multiples of {shape.grain} tokens, which do not divide the"
            f" {trace.block_size} of a hash id: choose a smaller block_size"
        )
    return HybridCaching(trace, num_blocks, shape, concurrency).run(progress)
