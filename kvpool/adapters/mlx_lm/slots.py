"""`SlotStates`: what the state slots of a pool stand for, in an engine whose plans name slots and not batches.

The pool decides which slot a row reads and which it writes (``state_src`` and ``state_dst`` of a plan), shares a slot
with forks, and frees it. Here a slot is a row of what a pass has left behind (`states.Held`). Nothing is ever changed
in place, so a shared slot needs no copy, and a pass that fails leaves every slot as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import mlx.core as mx

from kvpool.adapters.mlx_lm.layout import Layout
from kvpool.adapters.mlx_lm.states import Held, arrays_in, chosen, joined


class _Row(NamedTuple):
    held: Held
    row: int
    num_rows: int  # of `held`


class SlotStates:
    """What each state slot of a pool holds.

    Parameters
    ----------
    layout : Layout
        Of the model.
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

