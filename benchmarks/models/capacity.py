"""How many long sequences one budget holds: layer groups beside a pool that keeps every token of every layer.

The geometry is that of Gemma 4 31B, laid out as `install` does it. It needs no model: the pools step, and nobody stores
anything.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import kvpool
from benchmarks.models.held import pieces
from kvpool import OutOfBlocks
from kvpool.adapters.mlx_lm.layout import Layout, layout_of
from kvpool.adapters.mlx_lm.shapes import Leaf, ModelShape, Shape

BLOCK_SIZE, MAX_SEQS = 16, 256
SLIDING = Leaf("window", "RotatingKVCache", 1024, Shape(16, 256, 256, "bfloat16"))
FULL = Leaf("full", "KVCache", 0, Shape(4, 512, 512, "bfloat16"))
LEAVES = ((SLIDING,) * 5 + (FULL,)) * 10
MODEL = ModelShape(LEAVES, tuple(range(len(LEAVES))), (None,) * len(LEAVES), is_apart=False)
GROUPS = layout_of(MODEL, BLOCK_SIZE, keeps_all=False, is_shared=True)
EVERYTHING = replace(GROUPS, groups=tuple(replace(group, kind="full", size=0) for group in GROUPS.groups))


class Capacity(NamedTuple):
    """Sequences that fit."""

    everything: int
    groups: int

    @property
    def ratio(self) -> float:
        """Those with layer groups, divided by those of a pool that keeps everything."""
        return self.groups / self.everything


def gemma4_31b(num_tokens: int, num_kept: int = 16) -> Capacity:
    """Return how many sequences fit into the blocks of `num_kept` sequences that keep everything."""
    num_blocks = 1 + num_kept * -(-num_tokens // BLOCK_SIZE)
    return Capacity(fitting(EVERYTHING, num_blocks, num_tokens), fitting(GROUPS, num_blocks, num_tokens))


def fitting(layout: Layout, num_blocks: int, num_tokens: int) -> int:
    """Return how many sequences a pool holds, read in pieces one after the other."""
    with layout.make_pool(num_blocks, BLOCK_SIZE, MAX_SEQS) as pool:
        plan = kvpool.Plan(pool, 1, num_tokens, table_width=-(-num_tokens // BLOCK_SIZE))
        for number in range(MAX_SEQS):
            row = pool.open()
            try:
                for new in pieces(num_tokens):
                    pool.step(plan, [row], new)
                    pool.done(plan)
            except OutOfBlocks:
                return number
    return MAX_SEQS
