"""Memory that the kernels like: zeroed, on whole pages, huge ones where the system has them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np

_HUGE_PAGE_NBYTES = 2 * 2**20
_PAGE_NBYTES = 4096


def zeroed(shapes: Sequence[tuple[int, ...]], dtypes: Any, call: str = "zeroed") -> list[np.ndarray]:
    """Arrays of zeros, each from the start of a page on, in one mapping that asks for huge pages.

    `dtypes` is one for all, or a list.

    The system hands out the pages when they are first written. Two things make this faster than `numpy.zeros` for
    attention: with pages of 4 KB every second block of a random table misses the TLB, and numpy's arrays begin 16
    bytes into a cache line, so that every vector load would touch two lines (a quarter more time, measured).

    Raises
    ------
    MemoryError
        ``[call] ...``: the system has not that much address space.
    """
    kinds = list(map(np.dtype, dtypes)) if isinstance(dtypes, list) else [np.dtype(dtypes)] * len(shapes)
    begins, end = [], 0
    for shape, dtype in zip(shapes, kinds, strict=True):
        begins.append(end)
        end += -(-prod(shape) * dtype.itemsize // _PAGE_NBYTES) * _PAGE_NBYTES
    # Private: a shared mapping would be the parent's pool in a forked child, and gets no huge pages.
    try:
        memory = mmap.mmap(-1, end + _HUGE_PAGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"[{call}] no memory for {end} bytes ({error})") from error
    if hasattr(mmap, "MADV_HUGEPAGE") and end >= _HUGE_PAGE_NBYTES:
        with suppress(OSError):  # a kernel without huge pages: slower, nothing else
            memory.madvise(mmap.MADV_HUGEPAGE)
    first = -np.frombuffer(memory, np.uint8).ctypes.data % _HUGE_PAGE_NBYTES
    return [
        np.frombuffer(memory, dtype, prod(shape), first + begin).reshape(shape)
        for shape, dtype, begin in zip(shapes, kinds, begins, strict=True)
    ]
