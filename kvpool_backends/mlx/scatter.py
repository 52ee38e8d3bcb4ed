"""The storage of the plain route: scatters and gathers of MLX on the pool's arrays.

How MLX writes in place
-----------------------
An MLX array is a value. ``pool[blocks, offsets] = rows`` makes a new array and rebinds the name; the new
array takes over the old one's buffer (*donation*) if nothing else holds that buffer when the scatter runs,
and copies the whole pool if something does. Holders are: a view of the pool, a gather that was built but has
not run, and a gather that is still running. So this module keeps no view, hands out none, and offers
`settle`: wait until the gathers have run, and the next write is in place.

The same rule makes reuse of blocks safe. A gather reads the version of the pool that it was built on: a
scatter that is built later gets a buffer of its own (a copy) while that gather still needs the old one. A
block may therefore be freed and rewritten as soon as the reads of its last owner are *built*, whether they
have run or not.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from kvpool.config import KVSpec
from kvpool_backends.mlx.storage import PoolMemory


class PoolArrays(PoolMemory):
    """K ``[N, S, Hk, D]`` and V ``[N, S, Hk, Dv]`` of every layer.

    Attributes
    ----------
    planes : list of [k, v]
        Per layer. Read them in one expression; a name kept on a view of one makes every write a copy.
    """

    def __init__(self, spec: KVSpec, num_blocks: int) -> None:
        super().__init__(spec, num_blocks)
        self.planes = [self.arrays[i : i + 2] for i in range(0, len(self.arrays), 2)]

    def write(self, layer: int, blocks: mx.array, offsets: mx.array, k: mx.array, v: mx.array) -> None:
        """Token t, ``k[t]`` and ``v[t]``, goes to position ``offsets[t]`` of block ``blocks[t]``. Lazy."""
        for plane, rows in zip(self.planes[layer], (k, v), strict=True):
            plane[blocks, offsets] = rows.astype(plane.dtype)

    def read(self, layer: int, tables: mx.array) -> tuple[mx.array, mx.array]:
        """The blocks of `tables` ``[B, W]`` as K ``[B, W * S, Hk, D]`` and V, lazy and not a view."""
        k, v = (plane[tables].flatten(1, 2) for plane in self.planes[layer])
        return k, v

    def copy(self, src: tuple[mx.array, mx.array], dst: tuple[mx.array, mx.array]) -> None:
        """Copy positions ``src = (blocks, offsets)`` to `dst` in all layers and planes.

        The rows are read out first and for good: a scatter that reads the array which it writes cannot be in
        place. This waits for all work that was queued before.
        """
        rows = [[plane[src] for plane in planes] for planes in self.planes]
        mx.eval(rows)
        for planes, taken in zip(self.planes, rows, strict=True):
            for plane, row in zip(planes, taken, strict=True):
                plane[dst] = row

    def put(self, blocks: mx.array, data: list[list[mx.array]]) -> None:
        """Overwrite whole blocks with ``data[layer][plane]`` ``[n, S, Hk, D]``. Lazy."""
        for planes, new in zip(self.planes, data, strict=True):
            for plane, values in zip(planes, new, strict=True):
                plane[blocks] = values

    def settle(self) -> int:
        """Wait for all queued work on the pool; count the arrays that were copied since the last call.

        An array that lies in another buffer than at the last call was copied at least once in between. With
        one write of a layer between two calls the count is exact, otherwise it is a lower bound (two copies
        can end in the first buffer). Looking after each step takes the overlap between steps away and, for
        the same reason, the copies.

        Returns
        -------
        int
            Arrays that moved, also added to `num_copies`.
        """
        mx.eval(self.arrays)
        mx.synchronize()  # the reads of the last layer come after its write
        return self.count_copies()


def positions_of(copies: np.ndarray, block_size: int) -> tuple[tuple[mx.array, mx.array], ...]:
    """(blocks, offsets) of every token that `copies` ``[K, 3]`` reads, and of every token that it writes."""
    counts = copies[:, 2].astype(np.int64)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    offsets = mx.array((np.arange(counts.sum()) - first).astype(np.int32))
    return tuple((mx.array(np.repeat(copies[:, side], counts)), offsets) for side in (0, 1))
