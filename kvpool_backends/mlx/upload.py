"""Uploads block tables of a plan to MLX: once per step, for all layers, and only the changed rows."""

from __future__ import annotations

import mlx.core as mx
import numpy as np


class TableUploader:
    """Keeps an MLX copy of one plan's block tables, and writes only changed rows to it.

    The rows are written directly into MLX's buffer, which the host can write on a CPU and on Apple silicon. So a steady
    decode step uploads a few rows, not the whole table.

    Parameters
    ----------
    num_buffers : int
        Copies that take turns. A row is written once into each of them.

    Notes
    -----
    MLX does not know of these writes. An operation that was built on the returned array and has not run would read the
    new rows. So the caller must guarantee two things for each call of `upload`:

    - `upload` was called exactly once after every earlier step of that plan. `dirty_rows` is the difference to the
      previous step, not to the last upload.
    - All operations on the array that was returned `num_buffers` calls ago were evaluated (`mx.eval` of that step's
      results). With 1 buffer the previous step must have finished. With 2 it may still run.

    An engine that evaluates its own steps can guarantee this, and gives the array to `PlainBackend.prepare`. The mlx-lm
    adapter cannot: only the caller of the model knows whether the last layer's read was evaluated.

    Complexity: O(dirty rows * table_width) per buffer, 0 when nothing changed; all rows when B outgrows the
    buffers, which then double.

    Attributes
    ----------
    nbytes_handed : int
        Bytes that the last `upload` wrote.
    nbytes_total : int
        Bytes that all uploads wrote.
    """

    def __init__(self, num_buffers: int = 1) -> None:
        if isinstance(num_buffers, bool) or not isinstance(num_buffers, int):
            raise TypeError(f"[TableUploader] num_buffers must be an int, got {num_buffers!r}")
        if num_buffers < 1:
            raise ValueError(f"[TableUploader] num_buffers is {num_buffers}, the least is 1")
        self._tables: list[mx.array] = []
        self._views: list[np.ndarray] = []
        self._behind = np.zeros((num_buffers, 0), np.bool_)  # rows that a buffer has yet to get
        self._turn = 0
        self.nbytes_handed = 0
        self.nbytes_total = 0

    def upload(self, tables: np.ndarray, dirty_rows: np.ndarray) -> mx.array:
        """Bring the next buffer up to date and return it.

        Parameters
        ----------
        tables : int32 ``[B, W]``
            ``plan.block_tables`` after a step.
        dirty_rows : int32 ``[D]``, ascending
            ``plan.dirty_rows`` of that step.

        Returns
        -------
        mx.array, int32 ``[R, W]``
            R >= B; rows from B on hold old content.
        """
        if tables.dtype != np.int32:
            raise TypeError(f"[upload] tables have dtype {tables.dtype}, it must be int32")
        num_rows, width = tables.shape
        if not self._tables or num_rows > self._views[0].shape[0] or width != self._views[0].shape[1]:
            self._allocate(tables)
            return self._tables[self._turn]
        self._turn = (self._turn + 1) % len(self._tables)
        rows = dirty_rows
        if len(self._tables) > 1:
            rows = self._catch_up(dirty_rows, num_rows)
        self.nbytes_handed = len(rows) * width * tables.itemsize
        if len(rows):
            self._views[self._turn][rows] = tables[rows]
            self.nbytes_total += self.nbytes_handed
        return self._tables[self._turn]

    def _catch_up(self, dirty_rows: np.ndarray, num_rows: int) -> np.ndarray:
        """Add `dirty_rows` for every buffer. Return, and clear, the rows that the next buffer lacks."""
        self._behind[:, dirty_rows] = True
        behind = self._behind[self._turn, :num_rows]  # rows past this batch stay behind
        rows = np.flatnonzero(behind)
        behind[rows] = False
        return rows

    def _allocate(self, tables: np.ndarray) -> None:
        """Make new buffers with room for more rows. Work that was built on the old buffers keeps them."""
        num_rows, width = tables.shape
        capacity = 1 << max(0, num_rows - 1).bit_length()
        self._tables = [mx.zeros((capacity, width), mx.int32) for _ in self._behind]
        mx.eval(self._tables)
        self._views = [np.asarray(memoryview(table)) for table in self._tables]  # type: ignore[arg-type]
        for view in self._views:
            view[:num_rows] = tables
        self._behind = np.zeros((len(self._behind), capacity), np.bool_)
        self.nbytes_handed = tables.nbytes * len(self._views)
        self.nbytes_total += self.nbytes_handed
