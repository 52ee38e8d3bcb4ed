"""`BlockPool`: blocks for an engine that keeps its own block tables and its own content keys.

Block 0 is the null block: it means "no block" in a table and is never handed out. Counts, eviction order and refusals
are those of `Pool.blocks`. docs/embedding.md has an example.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from operator import index
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool import Pool
from kvpool._core import Keys, References
from kvpool.errors import CorruptState

BlockIds = Sequence[int] | NDArray[np.int32]
Event = tuple[str, *tuple[object, ...]]
NULL_BLOCK = 0


class BlockPoolStats(NamedTuple):
    """Statistics of a `BlockPool` since it was made."""

    usage: float  #: share of the blocks that are in use
    num_free: int  #: blocks that `get` can hand out
    num_cached: int  #: blocks that have a key
    queries: int  #: keys given to `lookup`
    hits: int  #: of these, found
    evictions: int  #: keys that `get` removed


class BlockPool:
    """Blocks, their references, and the content keys of cached blocks.

    Parameters
    ----------
    num_blocks : int
        Blocks of the KV storage, the null block included.
    events : int, default 0
        Keep up to this many events for `drain_events`; 0: none.

    Notes
    -----
    Every call is O(ids it names). `get` adds O(blocks it evicts). A block is cached while it has a key. A block that is
    freed without a key is blank. A block that is freed with a key goes to the new end of the LRU list. Blank blocks are
    taken before cached ones, the last that became blank first. A block that loses its key is blank at once if it is
    free, or when it is freed if it is in use. Of the blocks of one call of `free` or `evict`, the first named is taken
    first, among blank blocks and among cached ones.

    Ids are a list of ints or an int32 array, none of them twice. Errors of the core name the core's call:
    `take` for `get`, `release` for `free`, `mark_cached` for `cache`, `uncache` for `evict`.
    """

    null_block = NULL_BLOCK

    def __init__(self, num_blocks: int, *, events: int = 0) -> None:
        self._pool = Pool(num_blocks, 1, max_seqs=1, max_blocks_per_seq=1, reserved_blocks=1, in_order=True)
        self._blocks = self._pool.blocks
        self._references = self._blocks.references
        self._keys = Keys(num_blocks, reserved=1)
        self._events: deque[Event] | None = deque(maxlen=events) if events else None
        self._lost = self._queries = self._hits = self._evictions = 0
        if type(self).touch is BlockPool.touch:  # a Python wrapper would cost as much as the call
            self.touch = self._blocks.touch  # type: ignore[method-assign]

    @property
    def num_free(self) -> int:
        """Blocks that `get` can hand out, cached ones included."""
        return self._blocks.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that have a key, in use or not."""
        return len(self._keys)

    @property
    def usage(self) -> float:
        """Share of the blocks that are in use, 0.0 to 1.0. The null block does not count."""
        return self._blocks.usage

    def stats(self) -> BlockPoolStats:
        counted = self._queries, self._hits, self._evictions
        return BlockPoolStats(self.usage, self.num_free, self.num_cached, *counted)

    @property
    def references(self) -> References:
        """``references[block]``: the references of a block, read as fast as an attribute. Keep the object."""
        return self._references

    def refcount(self, block: int) -> int:
        """References of a block: one for `get`, one more for every `touch`."""
        return self._blocks.refcount(block)

    def room(self, hits: BlockIds = ()) -> int:
        """Blocks that `get` can hand out once these are touched. IndexError if there is no such block."""
        free = {int(block) for block in hits if not self._references[block]} - {NULL_BLOCK}
        return self._blocks.num_free - len(free)

    def key(self, block: int) -> Hashable | None:
        """The key of a block, or None."""
        return self._keys.key(block)

    def free_order(self) -> list[int]:
        """The free blocks in the order in which `get` hands them out."""
        return self._blocks.free_order().tolist()

    def get(self, n: int) -> list[int]:
        """Take `n` blocks, each with one reference; cached ones lose their keys, least recently freed first.

        Raises
        ------
        OutOfBlocks
            Fewer than `n` are free. State unchanged.
        """
        ids, evicted = self._blocks.take(n)
        if evicted:
            self._evictions += evicted
            self._forget(ids)  # blank ones have no key
        return ids

    def touch(self, ids: BlockIds, *, blank: bool = False) -> None:
        """One reference more for each block that is in use or cached, or with `blank` for any; null blocks are skipped.

        Raises
        ------
        ValueError, IndexError
            A block is neither in use nor cached, without `blank`, or stands twice; there is no such block. State
            unchanged.
        """
        self._blocks.touch(ids, blank=blank)

    def free(self, ids: BlockIds) -> None:
        """Give back one reference of each block; of those that end, the first named is taken first.

        Raises
        ------
        DoubleFree, IndexError
            A block has no reference left, also by standing here twice; there is no such block. State unchanged.
        """
        self._blocks.release(ids)

    def cache(self, ids: BlockIds, keys: Sequence[Hashable]) -> None:
        """Make blocks that are full and computed findable by `keys`. They are immutable from then on.

        A known key keeps its block, and the new block gets no key. Null blocks are skipped.

        Raises
        ------
        DoubleFree
            A block to get a key has no reference. State unchanged.
        ValueError
            A block has another key or is named twice, or the number of keys and blocks differ. State unchanged.
        IndexError
            An id is out of range. State unchanged.
        """
        blocks = ids if type(ids) is list else list(map(index, ids))
        named = keys if type(keys) is list else list(keys)
        if len(blocks) != len(named):
            raise ValueError(f"[cache] {len(named)} keys for {len(blocks)} blocks")
        try:
            self._blocks.mark_cached(blocks)
        except ValueError:  # perhaps of a block that gets no key
            blocks, named = self._keys.new(blocks, named)
            self._blocks.mark_cached(blocks)
        try:
            others = self._keys.add(blocks, named)
        except BaseException:  # a key that cannot be hashed or compared
            self._blocks.uncache(blocks)
            raise
        if others:
            self._blocks.uncache(others)
        if self._events is not None:
            kept = {*blocks} - {*others, NULL_BLOCK}
            self._tell("stored", [key for block, key in zip(blocks, named, strict=True) if block in kept])

    def lookup(self, keys: Sequence[Hashable]) -> list[int]:
        """Blocks of the longest cached prefix of `keys`. Nothing changes, so `touch` them before any other call."""
        found = self._keys.find(keys)
        self._queries += len(keys)
        self._hits += len(found)
        return found

    def evict(self, ids: BlockIds, *, keep_place: bool = False) -> None:
        """Forget the keys of these blocks, in use or not. No later `lookup` finds them.

        With `keep_place` free ones are taken when their turn comes in `free_order`, as if they had their key still.

        Raises
        ------
        ValueError, IndexError
            A block is named twice; an id is out of range. State unchanged.
        """
        self._blocks.uncache(ids, keep_place=keep_place)
        self._forget(ids)

    def reset(self) -> bool:
        """Forget every key, if no block is in use. Returns whether it did."""
        if self._pool.stats().used:
            return False
        self._pool.reset()
        self._blocks.drain_evicted()
        self._keys.clear()
        if self._events is not None:
            self._tell("cleared")
        return True

    def drain_events(self) -> list[Event]:
        """Events of keys since the last call, oldest first. The list is empty without `events`.

        ``("stored", keys)``: `cache` made them findable. ``("removed", keys)``: `get` or `evict` removed them.
        ``("cleared",)``: `reset` removed all. ``("lost", n)`` comes first: n older events were dropped.
        """
        if self._events is None:
            return []
        told: list[Event] = [("lost", self._lost)] if self._lost else []
        told += self._events
        self._events.clear()
        self._lost = 0
        return told

    def check(self) -> None:
        """Recompute the invariants: keys and blocks are one to one, and a block with a key is cached. O(blocks)."""
        self._pool.check()
        try:
            keyed = self._keys.check()
        except AssertionError as error:
            raise CorruptState(f"[check] keys and blocks are not one to one: {error}") from None
        cached = np.flatnonzero(self._blocks.is_cached(np.arange(self._pool.num_blocks)))
        if cached.tolist() != keyed:
            raise CorruptState(f"[check] {len(keyed)} blocks have a key, the core caches {len(cached)}, not the same")

    def _tell(self, what: str, *about: list[Hashable]) -> None:
        assert self._events is not None
        if all(about):  # no event without keys
            self._lost += len(self._events) == self._events.maxlen
            self._events.append((what, *about))

    def _forget(self, ids: BlockIds) -> None:
        """Remove the keys of blocks that the core has evicted."""
        dropped = self._keys.drop(ids)
        if self._events is not None:
            self._tell("removed", dropped)
