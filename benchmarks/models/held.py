"""Bytes of keys, values and states of a batch: in mlx-lm's own caches, and in the blocks of a pool.

No model runs over the tokens, and nothing is computed. mlx-lm's caches are filled by their own ``update_and_fetch``,
and the pool by its own steps, in the same pieces: 2,048 tokens of each prompt at a time, then one token alone. MLX
knows the sizes of arrays before it computes them. A state is what the model leaves after one token; both sides hold
these arrays. Caches of unknown classes are filled by the model, and both sides hold these objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np

import kvpool
from benchmarks.models.subjects import Beside
from kvpool.adapters.mlx_lm.cache_hook import Hook
from kvpool.adapters.mlx_lm.layout import Layout, layout_of
from kvpool.adapters.mlx_lm.shapes import Leaf, inspect_model, leaves_of
from kvpool.adapters.mlx_lm.states import arrays_in

BLOCK_SIZE = 16
PIECE = 2048  # tokens that mlx-lm's generate feeds at once


def held(model: Any, num_rows: int, num_tokens: int) -> Beside:
    """Return what rows of so many tokens hold. The last token was a step of its own."""
    layout = layout_of(inspect_model(model), BLOCK_SIZE, keeps_all=False)
    whole = num_rows * _whole_nbytes(model, layout, num_tokens)
    return Beside(
        whole + _stock_nbytes(model, layout, num_rows, num_tokens), whole + _pool_nbytes(layout, num_rows, num_tokens)
    )


def pieces(num_tokens: int) -> Iterator[int]:
    """Yield the tokens that are fed at once: those of a prompt, and the last one alone."""
    left = num_tokens - 1
    while left > 0:
        yield min(left, PIECE)
        left -= PIECE
    yield 1


def merged(make: Callable[[], list[Any]], num_rows: int) -> list[Any]:
    """Return empty caches of a batch."""
    return [caches[0].merge(list(caches)) for caches in zip(*(make() for _ in range(num_rows)), strict=True)]


def _whole_nbytes(model: Any, layout: Layout, num_tokens: int) -> int:
    """Return the bytes of the states of one row, and of the caches that are held whole."""
    caches = Hook.stock_caches(model)
    is_opaque = any(leaf.kind == "opaque" for leaf in layout.leaves)
    for new in pieces(num_tokens) if is_opaque else (1,):
        model(mx.zeros((1, new), mx.int32), cache=caches)
    found = list(leaves_of(caches))
    return sum(x.nbytes for leaf in layout.held for x in arrays_in([found[leaf]]))


def _stock_nbytes(model: Any, layout: Layout, num_rows: int, num_tokens: int) -> int:
    """Return the bytes of keys and values in mlx-lm's caches. A class that cannot be batched has a cache per row."""
    total = 0
    for leaf, one in zip(layout.leaves, leaves_of(Hook.stock_caches(model)), strict=True):
        if leaf.shape is None:
            continue
        is_batch = num_rows > 1 and hasattr(one, "merge")
        cache = one.merge([one] * num_rows) if is_batch else one
        _fill(cache, leaf, num_rows if is_batch else 1, num_tokens)
        total += (cache.keys.nbytes + cache.values.nbytes) * (1 if is_batch else num_rows)
    return total


def _fill(cache: Any, leaf: Leaf, num_rows: int, num_tokens: int) -> None:
    shape = leaf.shape
    assert shape is not None
    dtype = getattr(mx, shape.dtype)
    for new in pieces(num_tokens):
        if leaf.kind == "chunk":
            cache.maybe_trim_front()
        outer = num_rows, shape.num_kv_heads, new
        cache.update_and_fetch(mx.zeros((*outer, shape.head_dim), dtype), mx.zeros((*outer, shape.v_head_dim), dtype))


def _pool_nbytes(layout: Layout, num_rows: int, num_tokens: int) -> int:
    """Return the bytes of the blocks that are in use in all arenas."""
    num_blocks = 1 + num_rows * (-(-num_tokens // BLOCK_SIZE) + 1)
    with layout.make_pool(num_blocks, BLOCK_SIZE, num_rows) as pool:
        plan = kvpool.Plan(pool, num_rows, num_rows * PIECE)
        rows = np.array([pool.open() for _ in range(num_rows)], np.int64)
        for new in pieces(num_tokens):
            pool.step(plan, rows, np.full(num_rows, new))
            pool.done(plan)
        return sum(pool.stats(arena).used * nbytes for arena, nbytes in enumerate(layout.block_nbytes))
