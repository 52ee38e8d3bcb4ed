"""How many long sequences one budget holds: layer groups beside a pool that keeps every token of every layer.

The geometry is that of Gemma 4 31B. It needs no model: the pools step, and nobody stores anything.
"""

from __future__ import annotations

from typing import NamedTuple

import kvpool
from benchmarks.models.held import pieces
from kvpool import Group, KVSpec, OutOfBlocks

WINDOW = 1024
ARRAYS = 10  # layers of an arena: all full ones; the sliding ones take five columns
FULL = KVSpec(ARRAYS, 4, 512, "bfloat16", block_size=32)
SLIDING = KVSpec(ARRAYS, 16, 256, "bfloat16", block_size=16)
COLUMNS = 5
EVERYTHING = Group.full(block_size=FULL.block_size), Group.full(columns=COLUMNS)
GROUPS = Group.full(block_size=FULL.block_size), Group.window(WINDOW, columns=COLUMNS)


class Capacity(NamedTuple):
    """Sequences that fit."""

    everything: int
    groups: int

    @property
    def ratio(self) -> float:
        """Those with layer groups, divided by those of a pool that keeps everything."""
        return self.groups / self.everything


def gemma4_31b(num_tokens: int, num_kept: int = 16) -> Capacity:
    """Return how many sequences fit into the bytes of `num_kept` sequences that keep everything."""
    assert FULL.block_nbytes == SLIDING.block_nbytes, "one arena has blocks of equal bytes"
    per_sequence = -(-num_tokens // FULL.block_size) + COLUMNS * -(-num_tokens // SLIDING.block_size)
    num_blocks = 1 + num_kept * per_sequence
    return Capacity(fitting(EVERYTHING, num_blocks, num_tokens), fitting(GROUPS, num_blocks, num_tokens))


def fitting(groups: tuple[Group, ...], num_blocks: int, num_tokens: int) -> int:
    """Return how many sequences a pool holds, read in pieces one after the other."""
    lookahead = 16 if any(group.kind == "window" for group in groups) else 0
    with kvpool.Pool(num_blocks, SLIDING.block_size, lookahead=lookahead, groups=list(groups)) as pool:
        plan = kvpool.Plan(pool, 1, num_tokens, table_width=-(-num_tokens // SLIDING.block_size))
        for number in range(num_blocks):
            row = pool.open()
            try:
                for new in pieces(num_tokens):
                    pool.step(plan, [row], new)
                    pool.done(plan)
            except OutOfBlocks:
                return number
    return num_blocks
