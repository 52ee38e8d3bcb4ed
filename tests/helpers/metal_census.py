"""Which last tiles the tests of attention see, by kernel and block size: tiles before it in its run, tokens in it."""

from __future__ import annotations

import functools

import numpy as np
from metal_cases import Batch

from kvpool_backends.mlx.metal_kernels import plan_attention

TILE = 32  # tokens
BEFORE = 2  # tiles before the last one: 0, 1, or this many and more
PAIRS = {(before, tail) for before in range(BEFORE + 1) for tail in range(1, TILE + 1)}
BLOCK_SIZES = (8, 16, 24, 32)
SMALL = {
    "paged_attention": {"kv_heads": 1, "group": 1, "head_dim": 32},
    "paged_matrix": {"kv_heads": 1, "group": 9, "head_dim": 32},
    "latent": {"kv_heads": 1, "group": 2, "head_dim": 32, "v_head_dim": 8, "latent": True},
}
"""The smallest shape of each kernel."""


def batch_of(kernel: str, block_size: int, seq_lens: tuple[int, ...], features: tuple[str, ...] = ()) -> Batch:
    """Rows whose contexts are one part each."""
    return Batch(seq_lens=seq_lens, block_size=block_size, part_tokens=1024, features=features, **SMALL[kernel])


def last_tiles(batch: Batch) -> list[tuple[int, int]]:
    """Where the context of each row ends: (tiles of its last run before the last one, tokens in the last one)."""
    work = plan_attention(
        np.array(batch.seq_lens), batch.cu_q_lens, len(batch.q), tiles=batch.tiles, part_tokens=batch.part_tokens
    )
    found = []
    for *_, part, run, _, end in work.items.tolist():
        inside = end - 1 - part
        tile, tail = divmod(inside if batch.tiles.units else inside % run, TILE)
        found.append((min(tile, BEFORE), tail + 1))
    return found


@functools.cache
def contexts(kernel: str, block_size: int) -> tuple[int, ...]:
    """The least lengths with which every pair occurs, one for each."""
    lengths = tuple(range(1, 1025))
    found: dict[tuple[int, int], int] = {}
    for length, pair in zip(lengths, last_tiles(batch_of(kernel, block_size, lengths)), strict=True):
        found.setdefault(pair, length)
    return tuple(sorted(found.values()))
