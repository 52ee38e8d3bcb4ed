"""What kvpool is measured against: the C floor (floor.c), without safety or calls: its loops run inside C.

The allocator in pure Python is that of ``kvpool bench``.
"""

import ctypes
import functools
import os
import shlex
import subprocess
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
BUILD = HERE.parent / "build" / "benchmarks"
INT32_P = ctypes.POINTER(ctypes.c_int32)


@functools.cache
def load_c(name: str) -> ctypes.CDLL:
    """Compile ``benchmarks/<name>.c`` unless that was done already, and load it."""
    source, library = HERE / f"{name}.c", BUILD / f"{name}.so"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        BUILD.mkdir(parents=True, exist_ok=True)
        compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
        subprocess.run([*compiler, "-O3", "-Wall", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def pointer(array: np.ndarray) -> "ctypes._Pointer[ctypes.c_int32]":
    """Return the C pointer of an int32 array; the caller keeps the array alive."""
    assert array.dtype == np.int32 and array.flags.c_contiguous
    return array.ctypes.data_as(INT32_P)


def seconds(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Time of one call."""
    start = clock()
    call()
    return clock() - start


Case = tuple[Callable[[], Any], float, Callable[[], Any] | None]  # a round, its items, what is done before it


def alternate(cases: Sequence[Case], rounds: int) -> list[float]:
    """Return the least time per item of each case, in nanoseconds of this thread's CPU time."""
    least = [float("inf")] * len(cases)
    for k in range(rounds):
        for i, (run, items, setup) in enumerate(cases):
            if setup is not None:
                setup()
            start = time.thread_time_ns()
            run()
            taken = (time.thread_time_ns() - start) / items
            if k >= 2:  # the first ones warm up
                least[i] = min(least[i], taken)
    return least


class Floor:
    """The C floor's pool, with a persistent table of `rows` x `width`. Every method is one ctypes call.

    The free stack hands out `order`, by default 0, 1, 2, ...; `block_size` is a power of two.
    """

    def __init__(self, num_blocks, *, rows=0, width=0, block_size=16, order=None):
        i32, pool_p = ctypes.c_int32, ctypes.c_void_p
        c = self._c = load_c("floor")
        c.floor_new.restype = pool_p
        c.floor_new.argtypes = [INT32_P, i32, i32, i32, i32]
        c.floor_delete.argtypes = [pool_p]
        c.floor_alloc_free.argtypes = [pool_p, INT32_P, i32, INT32_P, INT32_P, INT32_P]
        c.floor_set_lengths.argtypes = [pool_p, INT32_P, i32]
        c.floor_steps.argtypes = [pool_p, INT32_P, i32, i32, i32, INT32_P]
        c.floor_fork.argtypes = c.floor_close.argtypes = [pool_p, i32]
        assert block_size & (block_size - 1) == 0
        order = np.arange(num_blocks, dtype=np.int32) if order is None else order
        self._pool = c.floor_new(pointer(order), num_blocks, rows, width, block_size.bit_length() - 1)
        if not self._pool:
            raise MemoryError(f"no memory for {num_blocks} blocks and a table of {rows} x {width}")

    def __del__(self):
        self._c.floor_delete(self._pool)

    def alloc_free(self, sizes, order):
        """Return a function that takes ``sizes[i]`` blocks for each i, then frees these groups in `order`."""
        ids = np.empty(int(sizes.sum()), np.int32)
        starts = (np.cumsum(sizes) - sizes).astype(np.int32)
        arrays = [ids, sizes, starts, order]
        ids_p, *others = [pointer(array) for array in arrays]

        def run(keep=arrays):
            self._c.floor_alloc_free(self._pool, ids_p, len(sizes), *others)

        return run

    def set_lengths(self, lengths):
        """Give rows 0, 1, ... these lengths and the blocks they need."""
        lengths = np.asarray(lengths, np.int32)
        self._c.floor_set_lengths(self._pool, pointer(lengths), len(lengths))

    def steps(self, rows, slot_mapping, num_new, num_steps):
        """Return a function for `num_steps` steps: `num_new` tokens for each row that the int32 `rows` names."""
        rows_p, out_p = pointer(rows), pointer(slot_mapping)

        def run(keep=(rows, slot_mapping)):
            self._c.floor_steps(self._pool, rows_p, len(rows), num_new, num_steps, out_p)

        return run

    def fork(self, n):
        """Fork row 0 into rows 1 to n."""
        self._c.floor_fork(self._pool, n)

    def close(self, n):
        """Close rows 1 to n."""
        self._c.floor_close(self._pool, n)
