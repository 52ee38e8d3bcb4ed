"""The blocks of `PromptCache`: found by whole blocks of tokens, and by the beginning of one more.

A pool with a prefix cache is the index: it finds whole blocks, and says which of those that no sequence has leaves
first. A block's id names its rows, an array of MLX that all prompts share, and the blocks behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np

import kvpool
from kvpool.adapters.dense_caches import BLOCK, CacheLayout

INDEX_NBYTES = 960
"""Bytes of memory that a block takes beside its rows."""

Tokens = list[int] | np.ndarray


@dataclass(eq=False)
class CachedSequence:
    """An inserted sequence: an open row of the pool, and the caches that are valid at its end only.

    `parent` is its last full block (or the root), `tail` the tokens behind it. Until `until` it is kept with
    `priority`.
    """

    layout: CacheLayout
    root: bytes
    kind: str = "assistant"
    extra: Any = None
    media_end: int = 0  # behind the last span of media
    priority: int = 0
    until: float = 0.0
    handle: int = -1
    parent: int | bytes = b""
    length: int = 0
    tail: list[int] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    kept_nbytes: int = 0
    nbytes: int = 0
    can_cut: bool = True  # a shorter prefix can be made of it

    def priority_at(self, now: float) -> int:
        """Return how late it leaves: 0 unless it is kept."""
        return self.priority if now < self.until else 0

    def keep(self, priority: int, until: float, now: float) -> None:
        """Keep it until `until` with `priority`, and never shorter or with less than it is kept now."""
        self.priority = max(priority, self.priority_at(now))
        self.until = max(until, self.until)

    def is_prefix_of(self, known: Tokens) -> bool:
        """Whether a prompt that has its whole blocks begins with it."""
        return self.tail == list(known[self.length - len(self.tail) : self.length])


class BlockIndex:
    """Blocks of 16 tokens, or fewer at the end of a sequence. The caller has a lock."""

    def __init__(self, num_blocks: int, max_sequences: int) -> None:
        self.pool = kvpool.Pool(
            num_blocks, BLOCK, max_seqs=max_sequences, in_order=True, prefix_cache=True, reserved_blocks=0
        )
        self._prefix: Any = self.pool.prefix  # what it calls a namespace is the root of a tree of blocks
        self._plan = kvpool.Plan(self.pool, 1, num_blocks * BLOCK, formats=())
        self._most = num_blocks * BLOCK  # tokens of a sequence of the pool
        self.rows = np.empty(num_blocks, object)  # what each block holds, None if it is not in use
        self.origins: dict[int, CachedSequence] = {}  # of blocks in use: the last sequence that has an `extra` for them
        self.nbytes = 0  # of the blocks in use and their index
        self.num_puts = 0
        self.ends: dict[int | bytes, list[CachedSequence]] = {}  # behind a block or a root, before another one is full
        self._is_end = np.zeros(num_blocks, bool)
        self._tokens = np.empty((num_blocks, BLOCK), np.int32)  # -1 where a block has no token
        self._parents: dict[int, int | bytes] = {}
        self._after: dict[int | bytes, list[int]] = {}

    @property
    def num_idle(self) -> int:
        """Blocks that no sequence has."""
        return self.pool.blocks.num_free - self.pool.blocks.num_blank

    def path(self, root: bytes, known: Tokens) -> np.ndarray:
        """Return the whole blocks that a prompt begins with. They become the most recent."""
        handle = self._prefix.pin(known if len(known) <= self._most else known[: self._most], root)
        blocks = self.pool.table(handle)
        self._prefix.unpin(handle)
        return blocks

    def nearest(self, parent: int | bytes, behind: Tokens) -> tuple[int, int]:
        """Return the block behind `parent` that begins with the most of these tokens, and how many these are."""
        blocks = self._after.get(parent)
        if blocks is None or not len(behind):
            return -1, 0
        same = self._tokens[blocks, : len(behind)] == behind
        counts = np.where(same.all(axis=1), len(behind), same.argmin(axis=1))
        best = int(counts.argmax())
        return blocks[best], int(counts[best])

    def ending(self, root: bytes, blocks: np.ndarray) -> Iterator[tuple[int, CachedSequence]]:
        """Yield what ends behind one of these blocks, or the root, and how many blocks are before; the last first."""
        for count in (*(np.flatnonzero(self._is_end[blocks])[::-1] + 1).tolist(), 0):
            for one in self.ends.get(int(blocks[count - 1]) if count else root, ()):
                yield count, one

    def end(self, one: CachedSequence) -> None:
        """Note where an open sequence ends."""
        full = one.length // BLOCK
        one.parent = int(self.pool.table(one.handle)[full - 1]) if full else one.root
        self.ends.setdefault(one.parent, []).append(one)
        if isinstance(one.parent, int):
            self._is_end[one.parent] = True

    def open(self, root: bytes, known: np.ndarray) -> int:
        """Open a sequence with the whole blocks that are known."""
        known = known[: self._most - 1]
        full = len(known) - len(known) % BLOCK
        more = known[: full + 1] if full < len(known) else np.append(known, np.int32(0))  # one is never a hit
        return self.pool.open(more, root, reserve=False)

    def put(self, one: CachedSequence, known: np.ndarray, rows: list[mx.array]) -> None:
        """Make the rest of these tokens blocks of an open sequence, with `rows`."""
        begin = self.pool.num_tokens(one.handle)
        self.pool.step(self._plan, [one.handle], len(known) - begin)
        self._prefix.commit(one.handle, known[begin : len(known) - len(known) % BLOCK])
        self.num_puts += 1
        blocks = self.pool.table(one.handle)
        new, parent = blocks[begin // BLOCK :].tolist(), int(blocks[begin // BLOCK - 1]) if begin else one.root
        if new:
            tokens = np.full(len(new) * BLOCK, -1, np.int32)
            tokens[: len(known) - begin] = known[begin:]
            self._tokens[new] = tokens.reshape(-1, BLOCK)
            self.rows[new] = np.fromiter(rows, object, len(rows))
            self._parents.update(zip(new, [parent, *new[:-1]], strict=True))
            self._after.setdefault(parent, []).append(new[0])
            self._after.update((block, [following]) for block, following in pairwise(new))
            self.nbytes += sum(map(self.nbytes_of, new))
        if one.extra is not None and one.layout.is_dense:
            self.origins.update(dict.fromkeys(blocks[max(0, one.media_end - 1) // BLOCK :].tolist(), one))
        self.end(one)

    def close(self, handle: int, left: int = 0) -> None:
        """Close a sequence, or leave it so many whole blocks. Its other whole blocks stay until they are evicted."""
        tail = self.pool.table(handle)[self.pool.num_tokens(handle) // BLOCK :].tolist()
        if left:
            self.pool.truncate([handle], [BLOCK * left])
        else:
            self.pool.close(handle)
        self._clear(tail)

    def drop(self, one: CachedSequence, left: int = 0) -> None:
        """Close a sequence that was put here, or let it end behind so many whole blocks."""
        self.ends[one.parent].remove(one)
        if not self.ends[one.parent]:
            del self.ends[one.parent]
            if isinstance(one.parent, int):
                self._is_end[one.parent] = False
        self.close(one.handle, left)
        if left:
            one.length, one.tail = BLOCK * left, []
            self.end(one)

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
            self.origins.pop(block, None)
            after = self._after.get(parent := self._parents.pop(block), [])
            if block in after:
                after.remove(block)
                if not after:
                    del self._after[parent]
            self._after.pop(block, None)
