"""P3: the closed loop of P1 on a pool with layer groups, whose hits need checkpoints.

`HybridShape` is what a model keeps, of which the groups are made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import OutOfBlocks
from kvpool.groups import Group
from kvpool.model_config import layer_groups
from kvpool.replay.loop import Request, Result
from kvpool.replay.policies import PrefixCaching
from kvpool.replay.trace import Trace, paths_of, shareable_blocks, unique_blocks
from kvpool.scheduler.needs import Needs
from kvpool.sizing import LayerGroup

IDLE = 0.05
"""Share of the bytes of an entry that may belong to no layer."""

_SLIDING, _FULL = "sliding_attention", "full_attention"

MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "model_type": "qwen3_5",
        "text_config": {
            "dtype": "bfloat16",
            "hidden_size": 5120,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "full_attention_interval": 4,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 48,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        },
    },
    "gemma4": {
        "model_type": "gemma4",
        "text_config": {
            "model_type": "gemma4_text",
            "dtype": "bfloat16",
            "hidden_size": 5376,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
            "num_kv_shared_layers": 0,
            "attention_k_eq_v": True,
            "head_dim": 256,
            "global_head_dim": 512,
            "sliding_window": 1024,
            "layer_types": ([_SLIDING] * 5 + [_FULL]) * 10,
        },
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "dtype": "bfloat16",
        "hidden_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": [_SLIDING, _FULL] * 12,
    },
}
"""Configs that have a name here: Qwen3.5 27B, Gemma 4 31B, gpt-oss 20B; what decides about the bytes."""


@dataclass(frozen=True)
class HybridShape:
    """Blocks of one arena that a model keeps.

    Attributes
    ----------
    layers : tuple of LayerGroup
    block_size : int
        Tokens of a base block.
    block_nbytes : int
        Bytes of a block of the arena.
    groups : tuple of Group
        Those of blocks, in the order of `layers`; all states are one group, the last one.
    """

    layers: tuple[LayerGroup, ...]
    block_size: int
    block_nbytes: int
    groups: tuple[Group, ...]

    @property
    def token_nbytes(self) -> int:
        """Bytes of a token in full attention, which lets nothing go."""
        return sum(layers.token_nbytes for layers in self.layers if layers.kind == "full")

    @property
    def state_nbytes(self) -> int:
        """Bytes of the recurrent states of a sequence."""
        return sum(layers.state_nbytes for layers in self.layers)

    @property
    def tail_nbytes(self) -> int:
        """Bytes of the windows and chunks of a long sequence."""
        return sum(layers.size * layers.token_nbytes for layers in self.layers if layers.size is not None)

    @property
    def checkpoint_nbytes(self) -> int:
        """Bytes that a hit needs besides the entries of full attention."""
        return self.state_nbytes + self.tail_nbytes

    @property
    def grain(self) -> int:
        """Tokens that a hit is a multiple of."""
        return max((group.block_size or self.block_size for group in self.groups), default=self.block_size)

    def names(self) -> tuple[str, ...]:
        """Return a name per group: ``full``, ``window 1024``, ``state``."""
        return tuple(f"{group.kind} {group.size}" if self._is_bounded(group) else group.kind for group in self.groups)

    def entry_blocks(self, index: int) -> int:
        """Return the blocks of an entry of a group, or of a checkpoint of its states."""
        group = self.groups[index]
        return group.blocks if group.kind == "state" else group.columns

    def entry_tokens(self, index: int) -> int:
        """Return the tokens of an entry."""
        return self.groups[index].block_size or self.block_size

    @staticmethod
    def _is_bounded(group: Group) -> bool:
        return group.kind in ("window", "chunk")


def hybrid_shape(model: Mapping[str, Any] | str | os.PathLike[str], block_size: int, rows: int) -> HybridShape:
    """Return the shape of a model: a name of `MODELS`, or what `kvpool.model_config.layer_groups` reads.

    `rows`: sequences that run at a time.

    Layers with smaller tokens have blocks of 2 or 4 times the tokens, where that makes the bytes equal.
    """
    config = MODELS.get(model, model) if isinstance(model, str) else model
    layers = layer_groups(config)
    kept = [group for group in layers if group.kind != "state"]
    widths = [group.token_nbytes // len(group.layers) for group in kept]
    times = [max(widths) // width if max(widths) in (2 * width, 4 * width) else 1 for width in widths]
    entries = [group.token_nbytes * block_size * factor for group, factor in zip(kept, times, strict=True)]
    state_nbytes = sum(group.state_nbytes for group in layers)
    nbytes = _block_nbytes(entries) if entries else state_nbytes
    groups = [
        Group(
            group.kind,
            group.size or 0,
            group.kept,
            block_size * factor,
            columns=-(-entry // nbytes),
        )
        for group, factor, entry in zip(kept, times, entries, strict=True)
    ]
    if state_nbytes:
        groups.append(Group.state(2 * rows, blocks=-(-state_nbytes // nbytes)))
    return HybridShape(layers, block_size, nbytes, tuple(groups))


def _block_nbytes(entries: list[int]) -> int:
    """Return the largest size of a block for which at most `IDLE` of the bytes of each entry belong to no layer."""
    smallest = min(entries)
    sizes = (smallest // parts for parts in range(1, smallest + 1))
    return next(size for size in sizes if all(-(-entry // size) * size * (1 - IDLE) <= entry for entry in entries))


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
