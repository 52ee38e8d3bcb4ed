"""The pool's memory: base arrays that MLX allocates once, and their addresses."""

from __future__ import annotations

import ctypes
import logging
from math import prod

import mlx.core as mx

from kvpool.spec import KVSpec

_log = logging.getLogger(__name__)

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
_STORED = {**DTYPES, "uint32": mx.uint32, "uint8": mx.uint8}


class PoolMemory:
    """Zeroed arrays for all planes of all layers.

    Parameters
    ----------
    num_blocks : int
        0: no arrays, the memory is somebody else's.
    alignment : int
        In bytes, of where each array begins. MLX's own arrays begin 24 bytes into a cache line, and attention on 16-bit
        values takes a third more time there (measured); arrays that begin elsewhere are views, which MLX cannot donate.

    Attributes
    ----------
    arrays : list of mx.array
        The base arrays of `KVSpec.plane_layout`: layer by layer and, inside a layer, plane by plane, those that
        planes or layers share once.
    num_copies : int
        Arrays that were found in another buffer than before, see `count_copies`.
    """

    def __init__(self, spec: KVSpec, num_blocks: int, alignment: int = 1) -> None:
        self.arrays: list[mx.array] = []
        made: set[tuple[str, int]] = set()
        for layer in range(spec.num_layers if num_blocks else 0):
            for plane in spec.stored_planes:
                layout = spec.plane_layout(plane.name, num_blocks)
                key = layout.array, layer if layout.per_layer else 0
                if key not in made:
                    made.add(key)
                    dtype = "uint8" if spec.layout == "block" else plane.dtype
                    self.arrays.append(_zeros(layout.shape, _STORED[dtype], alignment))
        mx.eval(self.arrays)
        self.num_copies = 0
        self._addresses = self.addresses()

    def addresses(self, first: int = 0) -> list[int]:
        """Return the current address of each array from `first` on. Evaluates the work that is queued on it."""
        return [_address(array) for array in self.arrays[first:]]

    def count_copies(self, first: int = 0) -> int:
        """Return how many arrays from `first` on have moved since they were looked at, and add it to `num_copies`.

        The first that are found are a line in the log: a copy takes as long as reading and writing a whole array.
        """
        found = self.addresses(first)
        moved = sum(old != new for old, new in zip(self._addresses[first:], found, strict=True))
        self._addresses[first:] = found
        if moved and not self.num_copies:
            _log.warning(
                "[mlx] MLX has copied %d of %d pool arrays to write to them, because reads of an earlier step were "
                "not over, or somebody keeps a view of them (not said again)",
                moved,
                len(found),
            )
        self.num_copies += moved
        return moved


def _zeros(shape: tuple[int, ...], dtype: mx.Dtype, alignment: int) -> mx.array:
    if alignment <= dtype.size:
        return mx.zeros(shape, dtype)
    size = prod(shape)
    room = mx.zeros((size + alignment // dtype.size,), dtype)
    mx.eval(room)  # it has to lie somewhere
    first = -_address(room) % alignment // dtype.size
    return room[first : first + size].reshape(shape)


def _address(array: mx.array) -> int:
    # Through the buffer protocol, which does not copy; ctypes does not look at the item format, so bfloat16
    # works too. The export ends with this expression.
    return ctypes.addressof(ctypes.c_char.from_buffer(memoryview(array)))  # type: ignore[arg-type]
