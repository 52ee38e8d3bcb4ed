"""`StateSlots`: the arrays of recurrent layers, one row per state slot of a pool. docs/groups.md is the contract.

The pool names slots: a step reads the state in ``state_src`` and writes the one in ``state_dst`` (`Plan.groups`). A
state is never computed on in place, so forks share a slot until one of them steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvpool.sizing import StateArray
from kvpool.spec import checked_int

Slots = Sequence[int] | np.ndarray
_AS_BITS = {"bfloat16": "<u2", "float8_e4m3": "u1"}  # numpy has none of them


class StateSlots:
    """Arrays of any dtypes and shapes in one block of memory, ``[num_slots, slot_nbytes]``.

    Parameters
    ----------
    arrays : sequence of StateArray
        What one slot holds: all arrays of all layers of the state group.
    num_slots : int

    Raises
    ------
    TypeError, ValueError, IndexError
        From any call, as ``[call] what is wrong (value), the limit``, before a byte is changed.

    Notes
    -----
    bfloat16 is uint16 and float8_e4m3 is uint8, as bits. What `read` and `export_slots` return are copies.
    """

    def __init__(self, arrays: Sequence[StateArray], num_slots: int) -> None:
        self.arrays = tuple(arrays)
        self.num_slots = checked_int("StateSlots", "num_slots", num_slots)
        self.slot_nbytes = sum(array.nbytes for array in self.arrays)
        self._rows = np.zeros((self.num_slots, self.slot_nbytes), np.uint8)
        self._views, begin = [], 0
        for array in self.arrays:
            dtype = np.dtype(_AS_BITS.get(array.dtype, array.dtype))
            view = self._rows[:, begin : begin + array.nbytes].view(dtype)
            self._views.append(view.reshape(self.num_slots, *array.shape))
            begin += array.nbytes

    def __repr__(self) -> str:
        return f"<StateSlots of {self.num_slots} slots, {len(self.arrays)} arrays, {self.slot_nbytes} bytes a slot>"

    def read(self, slots: Slots) -> list[np.ndarray]:
        """Return the arrays ``[n, *shape]`` of the states in `slots`; -1 is no state, all zeros."""
        ids = self._ids("read", slots, least=-1)
        found = [view[ids] for view in self._views]
        for array in found:
            array[ids < 0] = 0
        return found

    def write(self, slots: Slots, arrays: Sequence[Any]) -> None:
        """Store ``arrays[i][n]`` ``[n, *shape]`` in slot ``slots[n]``; -1 stores nothing. No other slot twice."""
        ids = self._ids("write", slots, least=-1)
        kept = ids >= 0
        self._check_distinct("write", ids[kept])
        given = [np.asarray(array) for array in arrays]
        if len(given) != len(self._views):
            raise ValueError(f"[write] there are {len(given)} arrays, a state has {len(self._views)}")
        for number, (array, view) in enumerate(zip(given, self._views, strict=True)):
            if array.dtype != view.dtype:
                raise TypeError(f"[write] arrays[{number}] is {array.dtype}, the state has {view.dtype}")
            if array.shape != (len(ids), *view.shape[1:]):
                expected = [len(ids), *view.shape[1:]]
                raise ValueError(f"[write] arrays[{number}] must have shape {expected}, got {list(array.shape)}")
        for array, view in zip(given, self._views, strict=True):
            view[ids[kept]] = array[kept]

    def copy(self, src: Slots, dst: Slots) -> None:
        """Copy whole states from ``src[n]`` to ``dst[n]``; no dst twice."""
        sources, targets = self._ids("copy", src), self._ids("copy", dst)
        if len(sources) != len(targets):
            raise ValueError(f"[copy] there are {len(sources)} src and {len(targets)} dst, they must be as many")
        self._check_distinct("copy", targets)
        self._rows[targets] = self._rows[sources]

    def zero(self, slots: Slots) -> None:
        """Set every byte of these slots to 0."""
        self._rows[self._ids("zero", slots)] = 0

    def export_slots(self, slots: Slots) -> np.ndarray:
        """Return the bytes of states, uint8 ``[n, slot_nbytes]``: array after array, little-endian."""
        return self._rows[self._ids("export_slots", slots)]

    def import_slots(self, slots: Slots, data: np.ndarray) -> None:
        """Overwrite states with rows of `export_slots`. Slots must be distinct."""
        ids, data = self._ids("import_slots", slots), np.asarray(data)
        self._check_distinct("import_slots", ids)
        if data.dtype != np.uint8:
            raise TypeError(f"[import_slots] data must be uint8, got {data.dtype}")
        if data.shape != (len(ids), self.slot_nbytes):
            expected = [len(ids), self.slot_nbytes]
            raise ValueError(f"[import_slots] data must have shape {expected}, got {list(data.shape)}")
        self._rows[ids] = data

    def _ids(self, call: str, slots: Slots, least: int = 0) -> np.ndarray:
        ids = np.array(slots)
        if ids.size and ids.dtype.kind not in "iu":
            raise TypeError(f"[{call}] slots must be integers, got {ids.dtype}")
        if ids.ndim != 1:
            raise ValueError(f"[{call}] slots must have shape [n], got {list(ids.shape)}")
        if ids.size and not least <= ids.min() <= ids.max() < self.num_slots:
            bad = int(ids.min()) if ids.min() < least else int(ids.max())
            raise IndexError(f"[{call}] slot {bad} does not exist, the limit is {self.num_slots}")
        return ids.astype(np.int64)

    def _check_distinct(self, call: str, ids: np.ndarray) -> None:
        if np.unique(ids).size != ids.size:
            raise ValueError(f"[{call}] a slot is named twice in {ids.tolist()}")
