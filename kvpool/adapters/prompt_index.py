"""The blocks of `PromptCache`: found by whole blocks of tokens, and by the beginning of one more.

A pool with a prefix cache finds whole blocks, and says which of those that no sequence has leaves first. Beside it are
the rows of each block, and which blocks lie behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np

import kvpool
from kvpool.adapters.dense_caches import BLOCK

INDEX_NBYTES = 960
"""Bytes of memory that a block takes beside its rows."""


class BlockIndex:
    """Blocks of 16 tokens, or fewer at the end of a sequence. The caller has a lock.

    Parameters
    ----------
    num_blocks, max_sequences : int

    Attributes
    ----------
    pool : Pool
        Its sequences hold blocks. What it calls a namespace is the root of a tree of blocks.
    rows : ndarray of array
        What each block holds, None if it is not in use.
    ends : dict
        Block or root: what the caller has of the sequences that end behind it, before another block is full.
    extras : dict
        What else the caller keeps of a block, as long as it is in use.
    nbytes : int
        Bytes of the blocks in use, those of the index included.
    """

    def __init__(self, num_blocks: int, max_sequences: int) -> None:
        self.pool = kvpool.Pool(
            num_blocks, BLOCK, max_seqs=max_sequences, in_order=True, prefix_cache=True, reserved_blocks=0
        )
        self._prefix: Any = self.pool.prefix
        self._plan = kvpool.Plan(self.pool, 1, num_blocks * BLOCK, formats=())
        self.rows = np.empty(num_blocks, object)
        self.ends: dict[int | bytes, list[Any]] = {}
        self.extras: dict[int, Any] = {}
        self.nbytes = 0
        self._is_end = np.zeros(num_blocks, bool)
        self._tokens = np.empty((num_blocks, BLOCK), np.int32)  # -1 where a block has no token
        self._parents: dict[int, int | bytes] = {}
        self._after: dict[int | bytes, list[int]] = {}

    @property
    def num_idle(self) -> int:
        """Blocks that no sequence has."""
        return self.pool.blocks.num_free - self.pool.blocks.num_blank

    def path(self, root: bytes, known: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the whole blocks that a prompt begins with. They become the most recent."""
        handle = self._prefix.pin(known, root)
        blocks = self.pool.table(handle)
        self._prefix.unpin(handle)
        return blocks

    def nearest(self, parent: int | bytes, behind: list[int]) -> tuple[int, int]:
        """Return the block behind `parent` that begins with the most of these tokens, and how many these are."""
        blocks = self._after.get(parent)
        if blocks is None or not behind:
            return -1, 0
        same = self._tokens[blocks, : len(behind)] == behind
        counts = np.where(same.all(axis=1), len(behind), same.argmin(axis=1))
        best = int(counts.argmax())
        return blocks[best], int(counts[best])

    def ending(self, root: int | bytes, blocks: np.ndarray) -> Iterator[tuple[int, Any]]:
        """Yield what ends behind one of these blocks, or the root, and how many blocks are before; the last first."""
        for count in (*(np.flatnonzero(self._is_end[blocks])[::-1] + 1).tolist(), 0):
            for one in self.ends.get(int(blocks[count - 1]) if count else root, ()):
                yield count, one

    def end(self, parent: int | bytes, one: Any) -> None:
        """Take something that ends behind `parent`."""
        self.ends.setdefault(parent, []).append(one)
        if isinstance(parent, int):
            self._is_end[parent] = True

    def open(self, root: bytes, known: np.ndarray) -> int:
        """Open a sequence with the whole blocks that are known."""
        full = len(known) - len(known) % BLOCK
        more = known[: full + 1] if full < len(known) else np.append(known, np.int32(0))  # one is never a hit
        return self.pool.open(more, root, reserve=False)

    def put(self, root: bytes, handle: int, known: np.ndarray, rows: list[mx.array]) -> list[int]:
        """Make the rest of these tokens blocks of a sequence, with `rows`. Return all its blocks."""
        begin = self.pool.num_tokens(handle)
        self.pool.step(self._plan, [handle], len(known) - begin)
        self._prefix.commit(handle, known[begin : len(known) - len(known) % BLOCK])
        blocks: list[int] = self.pool.table(handle).tolist()
        new, parent = blocks[begin // BLOCK :], blocks[begin // BLOCK - 1] if begin else root
        if new:
            tokens = np.full(len(new) * BLOCK, -1, np.int32)
            tokens[: len(known) - begin] = known[begin:]
            self._tokens[new] = tokens.reshape(-1, BLOCK)
            self.rows[new] = np.fromiter(rows, object, len(rows))
            self._parents.update(zip(new, [parent, *new[:-1]], strict=True))
            self._after.setdefault(parent, []).append(new[0])
            self._after.update((block, [following]) for block, following in pairwise(new))
            self.nbytes += sum(map(self.nbytes_of, new))
        return blocks

    def close(self, handle: int, parent: int | bytes = b"", one: Any = None, left: int = 0) -> None:
        """Close a sequence, or leave it so many whole blocks, and forget what ends with it.

        Its other whole blocks stay until they are evicted.
        """
        tail = self.pool.table(handle)[self.pool.num_tokens(handle) // BLOCK :].tolist()
        if left:
            self.pool.truncate([handle], [BLOCK * left])
        else:
            self.pool.close(handle)
        self._clear(tail)
        if one is not None:
            self.ends[parent].remove(one)
            if not self.ends[parent]:
                del self.ends[parent]
                if isinstance(parent, int):
                    self._is_end[parent] = False

    def evict(self, count: int) -> None:
        """Evict blocks that no sequence has, the least recently used first."""
        before = self.pool.blocks.num_blank
        self.pool.blocks.evict(count)
        self._clear(self.pool.blocks.free_order(self.pool.blocks.num_blank - before).tolist())  # they are taken next

    def nbytes_of(self, block: int) -> int:
        """Bytes of a block, those of the index included."""
        nbytes = self.rows[block].nbytes
        return nbytes + INDEX_NBYTES if nbytes else 0

    def _clear(self, blocks: list[int]) -> None:
        for block in blocks:
            self.nbytes -= self.nbytes_of(block)
            self.rows[block] = None
            self.extras.pop(block, None)
            after = self._after.get(parent := self._parents.pop(block), [])
            if block in after:
                after.remove(block)
                if not after:
                    del self._after[parent]
            self._after.pop(block, None)
