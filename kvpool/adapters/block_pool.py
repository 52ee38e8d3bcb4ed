"""`BlockPool`: blocks for an engine that keeps its own block tables and its own content keys.

The shape is the one that such engines expect of a block pool: get new blocks, touch cached ones, free a request's
blocks in the order in which they may be evicted, look up content keys, evict, usage; block 0 is the null block, which
stands for "nothing here" in a table and is never handed out. Counting, eviction order and refusals are those of
`kvpool.Pool`: a block freed twice raises and nothing has changed, where hand-written pools queue it twice.

A scheduler that has ``kv_cache_manager.block_pool`` calls:

    ids = pool.lookup(keys)                     # longest cached prefix, nothing changes
    pool.touch(ids)                             # now it cannot be evicted
    table = [*ids, *pool.get(n)]                # OutOfBlocks, and nothing was taken: undo with free(ids)
    pool.cache(table[a:b], keys[a:b])           # blocks that are full and computed
    pool.free(table[::-1])                      # the request is over: its tail is evicted first
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from operator import index

import numpy as np
from numpy.typing import NDArray

from kvpool import Pool
from kvpool.errors import DoubleFree

BlockIds = Sequence[int] | NDArray[np.int32]
NULL_BLOCK = 0


class BlockPool:
    """Blocks, their references, and which of them hold what content.

    Parameters
    ----------
    num_blocks : int
        Blocks of the KV storage, the null block included.

    Notes
    -----
    Every call is O(ids it names); `get` adds O(blocks it evicts), once each. A block is cached while it has a key and
    nobody needs it for something else: freed without a key it is blank and goes first, freed with a key it goes to
    the new end of the LRU list, and blank blocks are always taken before cached ones.

    Invariants, recomputed by `check`: keys and blocks are one to one; a block with a key is referenced or evictable.
    """

    null_block = NULL_BLOCK

    def __init__(self, num_blocks: int) -> None:
        self._pool = Pool(num_blocks, 1, max_seqs=1, max_blocks_per_seq=1, reserved_blocks=1, in_order=True)
        self._block_of: dict[Hashable, int] = {}
        self._key_of: dict[int, Hashable] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `get` can hand out, cached ones included."""
        stats = self._pool.stats()
        return stats.free + stats.evictable

    @property
    def num_cached(self) -> int:
        """Blocks that have a key, in use or not."""
        return len(self._block_of)

    @property
    def usage(self) -> float:
        """Share of the blocks that somebody holds, 0.0 to 1.0; the null block does not count."""
        stats = self._pool.stats()
        usable = stats.num_blocks - stats.reserved
        return stats.used / usable if usable else 0.0

    def refcount(self, block: int) -> int:
        """References of a block: one for `get`, one more for every `touch`."""
        return self._pool.refcount(block)

    def get(self, n: int) -> NDArray[np.int32]:
        """Take `n` blocks, each with one reference; cached ones lose their keys, least recently freed first.

        Raises
        ------
        OutOfBlocks
            Fewer than `n` are free. State unchanged.
        """
        ids = self._pool.alloc(n)
        self._forget(self._pool.take_dropped().tolist())
        return ids

    def touch(self, ids: BlockIds) -> None:
        """One reference more for each block that is in use or cached; null blocks are passed over.

        Raises
        ------
        ValueError, IndexError
            A block is neither, or stands twice; there is no such block. State unchanged.
        """
        named = self._known("touch", ids)
        held = [i for i in named if self._pool.refcount(i)]
        cached = [i for i in named if not self._pool.refcount(i)]
        strangers = [i for i in cached if i not in self._key_of]
        if strangers:
            raise ValueError(f"[touch] blocks {strangers} are neither in use nor cached")
        if len(set(named)) != len(named):
            raise ValueError(f"[touch] a block stands twice in {named}")
        self._pool.incref(held)
        self._pool.revive(cached)

    def free(self, ids: BlockIds) -> None:
        """Give back one reference of each block; of those that end, the first named is evicted first.

        Raises
        ------
        DoubleFree, IndexError
            A block has no reference left, also by standing here twice; there is no such block. State unchanged.
        """
        named = self._known("free", ids)
        if len(set(named)) != len(named):
            raise DoubleFree(f"[free] a block stands twice in {named}")
        if ended := [i for i in named if not self._pool.refcount(i)]:
            raise DoubleFree(f"[free] block {ended[0]} has no reference left")
        self._pool.decref(named)

    def cache(self, ids: BlockIds, keys: Sequence[Hashable]) -> None:
        """Blocks that are full and computed become findable, and immutable: their content is `keys`.

        A key that is known already keeps its block, and the new block stays without one; null blocks are passed over.

        Raises
        ------
        DoubleFree
            A block that would get a key has no reference. State unchanged.
        ValueError
            A block has another key, or there are not as many keys as blocks. State unchanged.
        IndexError
            There is no such block. State unchanged.
        """
        if len(ids) != len(keys):
            raise ValueError(f"[cache] {len(keys)} keys for {len(ids)} blocks")
        fresh: dict[Hashable, int] = {}
        for block, key in zip(self._known("cache", ids, keep_null=True), keys, strict=True):
            if block == NULL_BLOCK or key in self._block_of or key in fresh:
                continue
            if block in self._key_of:
                raise ValueError(f"[cache] block {block} has a key already ({self._key_of[block]!r})")
            fresh[key] = block
        self._pool.mark_committed(list(fresh.values()))
        self._block_of.update(fresh)
        self._key_of.update((block, key) for key, block in fresh.items())

    def lookup(self, keys: Iterable[Hashable]) -> list[int]:
        """Blocks of the longest prefix of `keys` that is cached. Nothing changes: `touch` them before anything else."""
        found: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def evict(self, ids: BlockIds) -> None:
        """Forget the keys of these blocks, whoever holds them: nobody finds them again.

        Raises
        ------
        IndexError
            There is no such block. State unchanged.
        """
        self._forget(self._known("evict", ids))

    def reset(self) -> bool:
        """Forget every key, if no block is in use; tells whether it was so."""
        if self._pool.stats().used:
            return False
        self._pool.reset()
        self._pool.take_dropped()
        self._block_of.clear()
        self._key_of.clear()
        return True

    def check(self) -> None:
        """Recompute every invariant. O(blocks)."""
        self._pool.check()
        if {key: block for block, key in self._key_of.items()} != self._block_of:
            raise AssertionError("[check] keys and blocks are not one to one")

    def _known(self, call: str, ids: BlockIds, keep_null: bool = False) -> list[int]:
        """The ids as ints, all of them blocks of the pool."""
        known, last = [index(i) for i in ids if keep_null or i != NULL_BLOCK], self._pool.num_blocks - 1
        if strangers := [i for i in known if not 0 <= i <= last]:
            raise IndexError(f"[{call}] no such block ({strangers[0]}), ids are 0 .. {last}")
        return known

    def _forget(self, ids: Iterable[int]) -> None:
        for block in ids:
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]
