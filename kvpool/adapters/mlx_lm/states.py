"""Arrays of recurrent layers, and caches that are held whole: the state of a batch beside keys and values.

`Held` is never changed, only replaced. Its arrays and objects may belong to several batches: arrays of MLX are values,
and a forward pass works on copies of unknown objects. So a state is never copied when it is shared, and the states
before a pass are those that the batch still has.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache

from kvpool.adapters.mlx_lm.layout import Layout
from kvpool.adapters.mlx_lm.shapes import state_shapes

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
    """Rows without an array get zeros. They are empty rows, so nobody reads them."""
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


class _Row(NamedTuple):
    held: Held
    row: int
    num_rows: int  # of `held`


class SlotStates:
    """The contents of a pool's state slots, for an engine whose plans name slots and not batches.

    A slot is one row of the states that a pass returned. The pool decides which slot a row reads and which it writes.
    It shares a slot with forks, and frees it.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._rows: dict[int, _Row] = {}

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays that slots refer to."""
        batches = {id(row.held): row.held for row in self._rows.values()}.values()
        arrays = {id(x): x for held in batches for items in held.values() for x in arrays_in(items)}
        return sum(x.nbytes for x in arrays.values())

    def read(self, slots: Sequence[int]) -> Held:
        """Return what rows with these slots hold. The rows of a whole pass, in its order, are not copied."""
        pieces = []
        for _, run in groupby((self._rows[slot] for slot in slots), key=lambda row: id(row.held)):
            places = list(run)
            held, rows = places[0].held, [place.row for place in places]
            is_whole = rows == list(range(places[0].num_rows))
            pieces.append((held if is_whole else chosen(self._layout, held, rows), len(rows)))
        return joined(self._layout, pieces)

    def write(self, slots: Sequence[int], held: Held) -> None:
        """Let each slot stand for a row of `held`."""
        for row, slot in enumerate(slots):
            self._rows[slot] = _Row(held, row, len(slots))

    def keep(self, slots: Iterable[int]) -> None:
        """Forget all slots but these."""
        self._rows = {slot: self._rows[slot] for slot in slots if slot in self._rows}


def arrays_of(held: Held) -> list[mx.array]:
    """Return all arrays of what rows hold."""
    return [x for items in held.values() for x in arrays_in(items)]


class Checkpoints:
    """Executes the ``state_loads`` and ``state_saves`` of plans, bit by bit.

    A checkpoint is a bundle of blocks of arena 0. Its bytes are those of all arrays of all states of a sequence, one
    after the other; what is left of the last block is 0. docs/prefix.md says when a pool asks for loads and saves.
    `store` has ``export_blocks`` and ``import_blocks`` for arena 0, as a `KVBackend` has.
    """

    def __init__(self, layout: Layout, store: Any) -> None:
        self._layout = layout
        self._store = store

    def loaded(self, plan: Any) -> tuple[list[int], Held]:
        """Return the slots that a plan loads, and what they hold, row by row. To be called before the first layer."""
        bundles = self._bundles(plan, "state_loads")
        if not len(bundles):
            return [], {}
        blocks = bundles[:, 1:]
        data = self._store.export_blocks(blocks.ravel()).reshape(len(bundles), -1)
        held: Held = {}
        begin = 0
        for leaf in self._layout.held:
            held[leaf] = []
            for array in self._layout.leaves[leaf].arrays:
                if array is None:
                    held[leaf].append(None)
                    continue
                part = mx.array(np.ascontiguousarray(data[:, begin : begin + array.nbytes]))
                held[leaf].append(part.view(array.dtype).reshape(len(bundles), *array.shape))
                begin += array.nbytes
        return bundles[:, 0].tolist(), held

    def save(self, plan: Any, read: Callable[[Sequence[int]], Held]) -> None:
        """Fill the bundles that a plan saves. To be called after the last layer.

        `read` returns what slots hold after the pass.

        Raises
        ------
        TypeError
            The arrays of a state differ from those of the model when it was traced.
        """
        bundles = self._bundles(plan, "state_saves")
        if not len(bundles):
            return
        held = read(bundles[:, 0].tolist())
        parts: list[mx.array] = []
        for leaf in self._layout.held:
            found, due = state_shapes(held[leaf]), self._layout.leaves[leaf].arrays
            if found != due:
                raise TypeError(
                    f"[forward] the state of cache {leaf} has arrays {found}, it had {due} when the model was traced: "
                    "after a model was cast, call install again, or make a new engine"
                )
            parts += [x.reshape(len(bundles), -1).view(mx.uint8) for x in held[leaf] if x is not None]
        mx.eval(parts)
        data = np.zeros((len(bundles), (bundles.shape[1] - 1) * self._layout.block_nbytes[0]), np.uint8)
        begin = 0
        for part in parts:
            data[:, begin : begin + part.shape[1]] = np.asarray(part)
            begin += part.shape[1]
        self._store.import_blocks(bundles[:, 1:].ravel(), data.reshape(-1, self._layout.block_nbytes[0]))

    def _bundles(self, plan: Any, name: str) -> np.ndarray:
        """Return (slot, blocks) of each load or save, int32 ``[K, 1 + blocks]``."""
        if self._layout.checkpoint_blocks == 0:
            return np.zeros((0, 1), np.int32)
        bundles: np.ndarray = getattr(plan.groups[self._layout.state_group], name)
        return bundles
