"""`StateSlots`: the arrays of recurrent layers, one row per state slot of a pool. docs/groups.md is the contract.

The pool names slots: a step reads the state in ``state_src`` and writes the one in ``state_dst`` (`Plan.groups`). A
state is never computed on in place, so forks share a slot until one of them steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from kvpool.sizing import StateArray
from kvpool.spec import checked_int

Slots = Sequence[int] | np.ndarray
_AS_BITS = {"bfloat16": "uint16", "float8_e4m3": "uint8"}  # where the framework does not have them


class StateSlots:
    """Arrays of any dtypes and shapes, each ``[num_slots, *shape]``.

    Parameters
    ----------
    arrays : sequence of StateArray
        What one slot holds: all arrays of all layers of the state group.
    num_slots : int
    xp : module
        The framework of the arrays: numpy, or ``mlx.core``.

    Raises
    ------
    TypeError, ValueError, IndexError
        From any call, as ``[call] what is wrong (value), the limit``, before a byte is changed.

    Notes
    -----
    bfloat16 is uint16 in numpy, as bits, and float8_e4m3 is uint8. What `read` and `export_slots` return are copies.
    """

    def __init__(self, arrays: Sequence[StateArray], num_slots: int, xp: Any = np) -> None:
        self.arrays = tuple(arrays)
        self.num_slots = checked_int("StateSlots", "num_slots", num_slots)
        for number, array in enumerate(self.arrays):
            if not isinstance(array, StateArray):
                raise TypeError(f"[StateSlots] arrays[{number}] must be a StateArray, got {type(array).__name__}")
            if not array.nbytes:
                raise ValueError(f"[StateSlots] arrays[{number}] has shape {list(array.shape)}, no dimension may be 0")
        self.slot_nbytes = sum(array.nbytes for array in self.arrays)
        self._xp = xp
        self._planes = [xp.zeros((self.num_slots, *array.shape), self._dtype(array)) for array in self.arrays]

    def __repr__(self) -> str:
        return f"<StateSlots of {self.num_slots} slots, {len(self.arrays)} arrays, {self.slot_nbytes} bytes a slot>"

    def read(self, slots: Slots) -> list[Any]:
        """Return the arrays ``[n, *shape]`` of the states in `slots`; -1 is no state, all zeros."""
        ids = self._ids("read", slots, least=-1)
        found = [plane[self._xp.array(np.maximum(ids, 0))] for plane in self._planes]
        if (ids >= 0).all():
            return found
        has_state = [self._xp.array((ids >= 0).reshape(-1, *[1] * (x.ndim - 1))) for x in found]
        return [self._xp.where(has, x, self._xp.zeros_like(x)) for has, x in zip(has_state, found, strict=True)]

    def write(self, slots: Slots, arrays: Sequence[Any]) -> None:
        """Store row n of each of `arrays` ``[n, *shape]`` in slot ``slots[n]``; -1 stores nothing. No slot twice."""
        ids = self._ids("write", slots, least=-1)
        rows = np.flatnonzero(ids >= 0)
        self._check_distinct("write", ids[rows])
        if len(arrays) != len(self._planes):
            raise ValueError(f"[write] there are {len(arrays)} arrays, a state has {len(self._planes)}")
        for number, (array, plane) in enumerate(zip(arrays, self._planes, strict=True)):
            if type(array) is not type(plane) or array.dtype != plane.dtype:
                found = getattr(array, "dtype", type(array).__name__)
                raise TypeError(f"[write] arrays[{number}] is {found}, the state has {plane.dtype}")
            expected = (len(ids), *plane.shape[1:])
            if tuple(array.shape) != expected:
                raise ValueError(f"[write] arrays[{number}] must have shape {list(expected)}, got {list(array.shape)}")
        for array, plane in zip(arrays, self._planes, strict=True):
            plane[self._xp.array(ids[rows])] = array[self._xp.array(rows)]

    def copy(self, src: Slots, dst: Slots) -> None:
        """Copy whole states from ``src[n]`` to ``dst[n]``, all read before one is written; no dst twice."""
        sources, targets = self._ids("copy", src), self._ids("copy", dst)
        if len(sources) != len(targets):
            raise ValueError(f"[copy] there are {len(sources)} src and {len(targets)} dst, they must be as many")
        self._check_distinct("copy", targets)
        for plane in self._planes:
            plane[self._xp.array(targets)] = plane[self._xp.array(sources)]

    def zero(self, slots: Slots) -> None:
        """Set every byte of these slots to 0."""
        ids = self._xp.array(self._ids("zero", slots))
        for plane in self._planes:
            plane[ids] = self._xp.zeros_like(plane[ids])

    def export_slots(self, slots: Slots) -> np.ndarray:
        """Return the bytes of states, uint8 ``[n, slot_nbytes]``: array after array, little-endian."""
        ids = self._ids("export_slots", slots)
        data, begin = np.empty((len(ids), self.slot_nbytes), np.uint8), 0
        for plane, array in zip(self._planes, self.arrays, strict=True):
            flat = plane[self._xp.array(ids)].reshape(len(ids), prod(array.shape))
            data[:, begin : begin + array.nbytes] = np.asarray(flat.view(self._xp.uint8))
            begin += array.nbytes
        return data

    def import_slots(self, slots: Slots, data: np.ndarray) -> None:
        """Overwrite states with rows of `export_slots`. Slots must be distinct."""
        ids, data = self._ids("import_slots", slots), np.array(data)
        self._check_distinct("import_slots", ids)
        if data.dtype != np.uint8:
            raise TypeError(f"[import_slots] data must be uint8, got {data.dtype}")
        if data.shape != (len(ids), self.slot_nbytes):
            expected = [len(ids), self.slot_nbytes]
            raise ValueError(f"[import_slots] data must have shape {expected}, got {list(data.shape)}")
        begin = 0
        for plane, array in zip(self._planes, self.arrays, strict=True):
            part = self._xp.array(data[:, begin : begin + array.nbytes]).view(plane.dtype)
            plane[self._xp.array(ids)] = part.reshape(len(ids), *array.shape)
            begin += array.nbytes

    def _dtype(self, array: StateArray) -> Any:
        name = array.dtype
        return getattr(self._xp, name if hasattr(self._xp, name) else _AS_BITS[name])

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
