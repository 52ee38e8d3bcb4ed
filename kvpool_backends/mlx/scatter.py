"""The storage of the plain route: MLX scatters and gathers on the pool's arrays.

How MLX writes in place
-----------------------
An MLX array is a value. ``pool[blocks, offsets] = rows`` makes a new array and rebinds the name. The new array takes
the old one's buffer (*donation*) if nothing else holds that buffer when the scatter runs. Otherwise MLX copies the
whole pool. A buffer is held by a view of the pool, a gather that was built but has not run, and a gather that runs. So
this module keeps no view and returns none, and its owner waits until the gathers have run before MLX gets the write.

The same rule makes reuse of blocks safe. A gather reads the version of the pool that it was built on. A scatter that is
built later gets a copy while that gather needs the old buffer. So a block may be freed and rewritten as soon as the
reads of its last owner are *built*, even if they have not run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from kvpool.spec import KVSpec
from kvpool_backends.mlx.storage import DTYPES, PoolMemory


class PoolArrays(PoolMemory):
    """The stored planes ``[N, S, Hk, n]`` of every layer.

    Attributes
    ----------
    planes : list of lists
        Per layer, in the order of `KVSpec.stored_planes`. Read them in one expression; a name kept on a view of one
        makes every write a copy.
    pack : callable
        ``pack(plane, x)``: words, scales and biases of tokens ``[T, Hk, D]`` of plane "k" or "v"; those of
        ``mx.quantize`` unless somebody puts something else here.
    """

    def __init__(self, spec: KVSpec, num_blocks: int) -> None:
        super().__init__(spec, num_blocks)
        self._spec = spec
        self.pack: Callable[[str, mx.array], list[mx.array]] = self._quantized
        count = len(spec.stored_planes)
        self.planes = [self.arrays[i : i + count] for i in range(0, len(self.arrays), count)]

    def sides(self, layer: int) -> tuple[tuple[mx.array, ...], tuple[mx.array, ...]]:
        """Return the planes of the keys and of the values of a layer."""
        planes, count = self.planes[layer], 1 if self._spec.k_bits is None else 3
        return tuple(planes[:count]), tuple(planes[count:])

    def stored(self, k: mx.array, v: mx.array) -> list[mx.array]:
        """Return the stored form of tokens for the planes of a layer. Lazy."""
        parts = []
        for (name, _), bits, x in zip(self._spec.planes, self._spec.bits, (k, v), strict=True):
            parts += [x.astype(DTYPES[self._spec.dtype])] if bits is None else self.pack(name, x)
        return parts

    def _quantized(self, plane: str, x: mx.array) -> list[mx.array]:
        bits, size = dict(zip("kv", self._spec.bits, strict=True))[plane], self._spec.quant_group_size
        x = x.astype(DTYPES[self._spec.dtype])
        words, scales, biases = mx.quantize(x, size, bits)
        finite = mx.unflatten(mx.isfinite(x), -1, (-1, size)).all(axis=-1)
        words = mx.where(mx.repeat(finite, words.shape[-1] // finite.shape[-1], axis=-1), words, 0)
        return [words, *(mx.where(finite, part, mx.array(mx.nan, part.dtype)) for part in (scales, biases))]

    def write(self, layer: int, blocks: mx.array, offsets: mx.array, k: mx.array, v: mx.array) -> None:
        """Store token t, ``k[t]`` and ``v[t]``, at position ``offsets[t]`` of block ``blocks[t]``. Lazy."""
        for plane, rows in zip(self.planes[layer], self.stored(k, v), strict=True):
            plane[blocks, offsets] = rows

    def read(self, layer: int, tables: mx.array) -> tuple[mx.array, mx.array]:
        """Return the blocks of `tables` ``[B, W]`` as K ``[B, W * S, Hk, D]`` and V. Lazy, and not a view."""
        k, v = (
            self._floats([plane[tables].flatten(1, 2) for plane in planes], bits)
            for planes, bits in zip(self.sides(layer), self._spec.bits, strict=True)
        )
        return k, v

    def _floats(self, parts: list[mx.array], bits: int | None) -> mx.array:
        """Return the values of planes of the keys or of the values, rounded once."""
        if bits is None:
            return parts[0]
        words, *factors = parts
        scales, biases = (part.astype(mx.float32) for part in factors)
        return mx.dequantize(words, scales, biases, self._spec.quant_group_size, bits).astype(factors[0].dtype)

    def copy(self, src: Sequence[tuple[mx.array, ...]], dst: tuple[mx.array, mx.array]) -> None:
        """Copy positions of each layer, ``(blocks, offsets)`` or ``(blocks, offsets, heads)``, to `dst` in its planes.

        The rows are read out first and for good: a scatter that reads the array which it writes cannot be in
        place. This waits for all work that was queued before.
        """
        rows = [[plane[at] for plane in planes] for at, planes in zip(src, self.planes, strict=True)]
        mx.eval(rows)
        for planes, taken in zip(self.planes, rows, strict=True):
            for plane, row in zip(planes, taken, strict=True):
                plane[dst] = row

    def put(self, blocks: mx.array, data: list[list[mx.array]]) -> None:
        """Overwrite whole blocks with ``data[layer][plane]`` ``[n, S, Hk, D]``. Lazy."""
        for planes, new in zip(self.planes, data, strict=True):
            for plane, values in zip(planes, new, strict=True):
                plane[blocks] = values

    def wait(self) -> None:
        """Wait for all queued work, before the last write of a step is built. Count the copies of that layer."""
        mx.synchronize()
        self.count_copies(len(self.arrays) - len(self.planes[-1]))

    def settle(self) -> int:
        """Wait for all queued work on the pool. Count the arrays that MLX has copied since the last call.

        An array that lies in another buffer than at the last call was copied at least once in between. With
        one write of a layer between two calls the count is exact, otherwise it is a lower bound (two copies
        can end in the first buffer).

        Returns
        -------
        int
            Arrays that moved, also added to `num_copies`.
        """
        mx.eval(self.arrays)
        mx.synchronize()  # the reads of the last layer come after its write
        return self.count_copies()


def positions_of(copies: np.ndarray, block_size: int) -> tuple[tuple[mx.array, mx.array], ...]:
    """Return (blocks, offsets) of every token that `copies` ``[K, 3]`` reads, and of every token that it writes."""
    counts = copies[:, 2].astype(np.int64)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    offsets = mx.array((np.arange(counts.sum()) - first).astype(np.int32))
    return tuple((mx.array(np.repeat(copies[:, side], counts)), offsets) for side in (0, 1))
