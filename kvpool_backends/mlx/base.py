"""What all routes of the mlx backend share: `BaseBackend`, and `PoolMemory`, the arrays and where they lie.

`kvpool_backends.mlx` chooses the route.
"""

from __future__ import annotations

import ctypes
import logging
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np

from kvpool.protocol import Capabilities, checked_resize, move_rows, move_within
from kvpool.spec import KVSpec
from kvpool_backends.checks import checked_rows, checked_storage

_log = logging.getLogger(__name__)

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
_STORED = {**DTYPES, "uint32": mx.uint32, "uint8": mx.uint8}


class PoolMemory:
    """Zeroed `arrays` of `KVSpec.base_arrays`, in its order; none for 0 blocks, whose memory is somebody else's.

    `alignment` is that of where each array begins, in bytes. MLX's own arrays begin 24 bytes into a cache line, and
    attention on 16-bit values takes a third more time there (measured); arrays that begin elsewhere are views, which
    MLX cannot donate. `num_copies` is what `count_copies` has found so far.
    """

    def __init__(self, spec: KVSpec, num_blocks: int, alignment: int = 1) -> None:
        self._spec, self._alignment = spec, alignment
        self.arrays: list[mx.array] = [
            _zeros(shape, dtype, alignment) for shape, dtype in (self._shapes(num_blocks) if num_blocks else ())
        ]
        mx.eval(self.arrays)
        self.num_copies = 0
        self._addresses = self.addresses()

    def _shapes(self, num_blocks: int) -> list[tuple[tuple[int, ...], mx.Dtype]]:
        return [(shape, _STORED[dtype]) for shape, dtype, _ in self._spec.base_arrays(num_blocks)]

    def resize(self, have: int, num_blocks: int, moves: np.ndarray) -> None:
        """Give each array another number of blocks, one after the other. Nothing is queued on them.

        More blocks: all arrays or none. Fewer: all; an array that gets no new memory keeps its old memory.
        """
        try:
            for number, (shape, dtype) in enumerate(self._shapes(num_blocks)):
                self._put(number, self._resized(self.arrays[number], shape, dtype, moves))
                mx.clear_cache()  # the old memory goes to the system
        except BaseException as error:
            for number in range(len(self.arrays)):
                self._cut(number, min(have, num_blocks), moves)
            if num_blocks > have or not isinstance(error, (MemoryError, RuntimeError)):
                raise
        finally:
            self._addresses = self.addresses()

    def _cut(self, number: int, num_blocks: int, moves: np.ndarray) -> None:
        """Leave an array so many blocks, in the memory that it has."""
        array = self.arrays[number]
        if len(array) > num_blocks:
            self._move_within(array, moves)
            array = array[:num_blocks]
            mx.eval(array)
            self._put(number, array)

    def _move_within(self, array: mx.array, moves: np.ndarray) -> None:
        move_within(_memory_of(array), moves)

    def _put(self, number: int, array: mx.array) -> None:
        self.arrays[number] = array

    def _resized(self, old: mx.array, shape: tuple[int, ...], dtype: mx.Dtype, moves: np.ndarray) -> mx.array:
        new = _zeros(shape, dtype, self._alignment)
        mx.eval(new)
        move_rows(_memory_of(old), _memory_of(new), moves)
        return new

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


def _memory_of(array: mx.array) -> np.ndarray:
    """The memory of an evaluated array, as unsigned integers: a view. The array has to stay."""
    memory = (ctypes.c_char * array.nbytes).from_address(_address(array))
    return np.frombuffer(memoryview(memory), f"u{array.dtype.size}").reshape(array.shape)


def int32(x: np.ndarray) -> mx.array:
    """A numpy array on MLX's device."""
    return mx.array(np.ascontiguousarray(x, np.int32))


class BaseBackend:
    """KV storage in MLX's memory, by one of the routes; made by `kvpool_backends.mlx.MLXBackend`.

    Attributes
    ----------
    route : {"metal", "cuda", "kernels", "plain"}
    writes : str
        How tokens are written into the pool, and what that costs.
    dtype : mx.Dtype
        Of the stored values.
    pool_copies : int
        Pool arrays that were found copied so far, see `settle`; 0 where writes are in place.
    """

    required_formats: tuple[str, ...] = ("block_tables", "seq_lens", "slot_mapping", "cu_q_lens")
    capabilities: Capabilities
    route: str
    writes = "in place"
    _pool: PoolMemory

    def __init__(
        self,
        spec: KVSpec,
        num_blocks: int,
        *,
        storage: np.ndarray | None = None,
        metal_kernel: Any = None,
    ) -> None:
        by = f" by the {self.route} route"
        self.num_blocks = checked_storage("MLXBackend", self.capabilities, spec, num_blocks, by)
        self.spec = spec
        self.dtype = DTYPES[spec.dtype]
        self._metal_kernel = metal_kernel
        self._storage = None if storage is None else checked_rows("MLXBackend", spec, self.num_blocks, storage)
        self._allocate()

    def _allocate(self) -> None:
        """Make `_pool`."""
        raise NotImplementedError

    def _place(self) -> None:
        """Make what knows the number of blocks, or where the arrays of `_pool` are."""

    def _release(self) -> None:
        """Wait for all calls so far, and let go of the arrays of `_pool`."""
        self._pool.settle()  # type: ignore[attr-defined]

    def resize(self, num_blocks: int, moves: Any, *, storage: np.ndarray | None = None) -> None:
        """Have another number of blocks, see `KVBackend.resize`. MLX's cache of buffers is given back."""
        size, moves = checked_resize(self.num_blocks, num_blocks, moves)
        rows = None if storage is None else checked_rows("resize", self.spec, size, storage)
        self._release()
        try:
            if self._storage is None:
                self._pool.resize(self.num_blocks, size, moves)
            else:
                self._storage = rows
            self.num_blocks = size
        except BaseException:  # no memory for more, or a signal: the arrays have the smaller of both sizes
            self.num_blocks = min(self.num_blocks, size)
            raise
        finally:
            self._place()

    def __repr__(self) -> str:
        return f"<MLXBackend of {self.spec.describe(self.num_blocks)}, route={self.route!r}>"

    def asarray(self, x: np.ndarray) -> mx.array:
        return mx.array(np.asarray(x, np.float32))

    def to_numpy(self, x: mx.array) -> np.ndarray:
        return np.array(x.astype(mx.float32))

    @property
    def pool_copies(self) -> int:
        return self._pool.num_copies


def has_metal() -> bool:
    """Whether MLX computes on a GPU with Metal."""
    return bool(mx.default_device() == mx.gpu and mx.metal.is_available())


def has_cuda() -> bool:
    """Whether MLX computes on a GPU with CUDA."""
    return bool(mx.default_device() == mx.gpu and mx.cuda.is_available())


def kernels_refusal() -> str | None:
    """Return why the CPU kernels cannot be used now. None: they can."""
    if mx.default_device() != mx.cpu:
        return f"MLX computes on {mx.default_device()}"
    try:
        import kvpool_backends.cpu._kernels  # noqa: F401
    except ImportError as error:
        return f"the CPU kernels cannot be imported ({error})"
    return None
