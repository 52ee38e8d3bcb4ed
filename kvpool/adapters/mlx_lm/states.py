"""What a batch holds beside keys and values: arrays of recurrent layers, and caches that are held whole.

`Held` is never changed, only replaced. Its arrays and objects may belong to several batches: arrays of MLX are values,
and a forward pass works on copies of unknown objects. So a state is never copied when it is shared, and the states
before a pass are those that the batch still has.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache

from kvpool.adapters.mlx_lm.layout import Layout

Held = dict[int, list[Any]]
"""For each leaf without a place in a pool: its arrays ``[B, ...]``, None where nothing was computed yet; or, if it is
opaque, a cache of mlx-lm for each row, None for an empty one."""


def nothing(layout: Layout, num_rows: int) -> Held:
    """Return what `num_rows` empty rows hold."""
    return {leaf: [None] * (num_rows if _is_opaque(layout, leaf) else layout.leaves[leaf].size) for leaf in layout.held}


def chosen(layout: Layout, held: Held, rows: Sequence[int]) -> Held:
    """Return what these rows hold."""
    if not held:
        return held
    index = mx.array(np.array(rows, np.int32))
    return {
        leaf: [items[row] for row in rows]
        if _is_opaque(layout, leaf)
        else [None if x is None else x[index] for x in items]
        for leaf, items in held.items()
    }


def joined(layout: Layout, parts: Sequence[tuple[Held, int]]) -> Held:
    """Return what the rows of several batches hold, given as pairs of what they hold and how many rows they are."""
    parts = [part for part in parts if part[1]]
    if len(parts) == 1:
        return parts[0][0]
    result: Held = {}
    for leaf in layout.held if parts else ():
        if _is_opaque(layout, leaf):
            result[leaf] = [item for held, _ in parts for item in held[leaf]]
        else:
            arrays = range(layout.leaves[leaf].size)
            result[leaf] = [_stacked([(held[leaf][i], num_rows) for held, num_rows in parts]) for i in arrays]
    return result


def _stacked(parts: Sequence[tuple[mx.array | None, int]]) -> mx.array | None:
    """Rows without an array get zeros. They are empty rows, so nobody reads them (see `calls.parts_of`)."""
    first = next((array for array, _ in parts if array is not None), None)
    if first is None:
        return None
    return mx.concatenate([mx.zeros((n, *first.shape[1:]), first.dtype) if x is None else x for x, n in parts])


def opened(layout: Layout, held: Held, leaf: int) -> Any:
    """Return a cache of mlx-lm with what a leaf holds, for one pass of all rows: a pass may change it."""
    if not _is_opaque(layout, leaf):
        cache = ArraysCache(layout.leaves[leaf].size)
        cache.cache = list(held[leaf])
        return cache
    (item,) = held[leaf]
    return copy.deepcopy(layout.model.fresh[leaf] if item is None else item)


def closed(layout: Layout, leaf: int, cache: Any) -> list[Any]:
    """Return what a leaf holds after a pass that was given `opened`."""
    return [cache] if _is_opaque(layout, leaf) else list(cache.cache)


def arrays_in(items: Sequence[Any]) -> list[mx.array]:
    """Return the arrays that a leaf holds."""
    found: list[mx.array] = []
    for item in items:
        if isinstance(item, mx.array):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            found += arrays_in(item)
        elif item is not None and hasattr(item, "state"):
            found += arrays_in(item.state)
    return found


def _is_opaque(layout: Layout, leaf: int) -> bool:
    return layout.leaves[leaf].kind == "opaque"
