"""What a pool takes when it is made: bytes per block, sequence and entry of a table, counted by glibc's malloc.

``python -m benchmarks.pool_memory`` (Linux with glibc). The index of a prefix cache has a power of two of slots, so its
bytes per block are given for the best and the worst number of blocks.
"""

from __future__ import annotations

import ctypes
from typing import Any

from kvpool import Pool

BLOCK_SIZE = 16
BEST, WORST = 3 << 18, (3 << 18) + 4096  # blocks: 4 slots for each 3, all in use; one more doubles them
SEQUENCES = 100_000


class _Malloc(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "free", "top")
    ]


_libc = ctypes.CDLL("libc.so.6")
_libc.mallinfo2.restype = _Malloc


def held() -> int:
    """Bytes that malloc has handed out."""
    now = _libc.mallinfo2()
    return int(now.uordblks + now.hblkhd)


def nbytes(num_blocks: int, max_seqs: int = 1, width: int = 1, **options: Any) -> int:
    """What one pool takes."""
    before = held()
    with Pool(num_blocks, BLOCK_SIZE, max_seqs=max_seqs, max_blocks_per_seq=width, seed=1, **options):
        return held() - before


def rates(**options: Any) -> dict[str, float]:
    """Bytes per unit."""
    few, best, worst = (nbytes(n, **options) for n in (2, BEST, WORST))
    many, wide = nbytes(2, SEQUENCES, 1, **options), nbytes(2, SEQUENCES, 101, **options)
    entry = (wide - many) / SEQUENCES / 100
    return {
        "block, at best": (best - few) / BEST,
        "block, at worst": (worst - few) / WORST,
        "sequence": (many - few) / SEQUENCES - entry,
        "entry of its table": entry,
    }


def main() -> None:
    """Print a line per kind of pool."""
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        f"prefix cache, blocks of {BLOCK_SIZE} tokens": {"prefix_cache": True},
        "and events": {"prefix_cache": True, "events": 1},
    }
    for name, options in kinds.items():
        found = rates(**options)
        print(f"{name}: " + ", ".join(f"{value:.1f} bytes per {unit}" for unit, value in found.items()))


if __name__ == "__main__":
    main()
