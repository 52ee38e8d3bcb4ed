"""`MemoryStore`: blocks in host memory. `TieredStore`: stores one behind the other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock
from typing import NamedTuple

import numpy as np

from kvpool.spec import checked_int
from kvpool.store.blocks import Blocks, BlockStore, Layout, Rows, TierStats, checked, checked_layout


class _Held(NamedTuple):
    parent: bytes
    tokens: bytes
    namespace: bytes
    row: np.ndarray


class MemoryStore:
    """Blocks in host memory, within a budget; the least recently used ones leave. See `BlockStore`.

    Parameters
    ----------
    layout : Layout
    max_nbytes : int
        Most bytes of blocks.
    """

    def __init__(self, layout: Layout, max_nbytes: int) -> None:
        self.layout = checked_layout("MemoryStore", layout)
        self.max_nbytes = checked_int("MemoryStore", "max_nbytes", max_nbytes)
        largest = max(group.nbytes for group in layout.groups)
        if self.max_nbytes < largest:
            raise ValueError(f"[MemoryStore] max_nbytes is {max_nbytes}, a block alone has {largest}")
        self._lock = Lock()
        self._held: OrderedDict[tuple[bytes, int], _Held] = OrderedDict()
        self._nbytes = 0
        self._counts = TierStats(limit_nbytes=self.max_nbytes)
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<MemoryStore of {len(self._held)} blocks, {self._nbytes} of {self.max_nbytes} bytes>"

    def lookup(self, blocks: Blocks) -> np.ndarray:
        checked("lookup", self.layout, blocks)
        with self._lock:
            return np.array([name in self._held for name in _names(blocks)], bool)

    def load(self, blocks: Blocks, rows: Rows) -> np.ndarray:
        checked("load", self.layout, blocks, rows, writable=True)
        loaded, damaged = np.zeros(len(blocks), bool), 0
        with self._lock:
            for number, name in enumerate(_names(blocks)):
                held = self._held.get(name)
                if held is None:
                    continue
                if held[:3] != _proof(blocks, number):
                    damaged += 1
                    continue
                self._held.move_to_end(name)
                rows[number][:] = held.row
                loaded[number] = True
            hits, nbytes = int(loaded.sum()), self.layout.groups[blocks.group].nbytes
            self._count(hits=hits, hit_nbytes=hits * nbytes, misses=len(loaded) - hits - damaged, damaged=damaged)
        return loaded

    def store(self, blocks: Blocks, rows: Rows) -> int:
        checked("store", self.layout, blocks, rows)
        nbytes = self.layout.groups[blocks.group].nbytes
        with self._lock:
            if self._is_closed:
                return 0
            for number, name in enumerate(_names(blocks)):
                held = self._held.get(name)
                if held is not None:
                    if held[:3] == _proof(blocks, number):
                        self._held.move_to_end(name)
                        continue
                    self._nbytes -= self._held.pop(name).row.nbytes  # another content: the latest one counts
                while self._nbytes + nbytes > self.max_nbytes:
                    self._nbytes -= self._held.popitem(last=False)[1].row.nbytes
                    self._count(evicted=1)
                self._held[name] = _Held(*_proof(blocks, number), np.array(rows[number]))
                self._nbytes += nbytes
                self._count(stored=1, stored_nbytes=nbytes, written_nbytes=nbytes)
            return len(blocks)

    def touch(self, blocks: Blocks) -> None:
        checked("touch", self.layout, blocks)
        with self._lock:
            for name in _names(blocks):
                with suppress(KeyError):
                    self._held.move_to_end(name)

    def drain(self, timeout: float = 60.0) -> bool:
        """Return True: nothing waits."""
        return True

    def stats(self) -> dict[str, TierStats]:
        with self._lock:
            return {"memory": self._counts._replace(blocks=len(self._held), nbytes=self._nbytes)}

    def close(self) -> None:
        """Forget all blocks."""
        with self._lock:
            self._is_closed = True
            self._held.clear()
            self._nbytes = 0

    def _count(self, **more: int) -> None:
        self._counts = self._counts.plus(**more)


class TieredStore:
    """Stores one behind the other, fastest first: what one does not have, the next is asked for. See `BlockStore`.

    Parameters
    ----------
    tiers : sequence of BlockStore
        Of one layout.
    """

    def __init__(self, tiers: Sequence[BlockStore]) -> None:
        self.tiers = tuple(tiers)
        if not self.tiers:
            raise ValueError("[TieredStore] there are no tiers, one at least is needed")
        self.layout = self.tiers[0].layout
        for number, tier in enumerate(self.tiers):
            if tier.layout.digest != self.layout.digest:
                raise ValueError(f"[TieredStore] tier {number} has another layout than tier 0")

    def __repr__(self) -> str:
        return f"<TieredStore of {', '.join(map(repr, self.tiers))}>"

    def lookup(self, blocks: Blocks) -> np.ndarray:
        found = self.tiers[0].lookup(blocks)
        for tier in self.tiers[1:]:
            if (rest := np.flatnonzero(~found)).size:
                found[rest] = tier.lookup(blocks[rest])
        return found

    def load(self, blocks: Blocks, rows: Rows) -> np.ndarray:
        loaded = self.tiers[0].load(blocks, rows)
        for tier in self.tiers[1:]:
            if (rest := np.flatnonzero(~loaded)).size:
                loaded[rest] = tier.load(blocks[rest], [rows[number] for number in rest.tolist()])
        return loaded

    def store(self, blocks: Blocks, rows: Rows) -> int:
        return max([tier.store(blocks, rows) for tier in self.tiers])

    def touch(self, blocks: Blocks) -> None:
        for tier in self.tiers:
            tier.touch(blocks)

    def drain(self, timeout: float = 60.0) -> bool:
        """See `BlockStore.drain`; the timeout is that of each tier."""
        return all([tier.drain(timeout) for tier in self.tiers])

    def stats(self) -> dict[str, TierStats]:
        """Return the statistics of all tiers. The second one of a name has " 2" behind it."""
        found: dict[str, TierStats] = {}
        for name, stats in (pair for tier in self.tiers for pair in tier.stats().items()):
            same = sum(known.partition(" ")[0] == name for known in found)
            found[f"{name} {same + 1}" if same else name] = stats
        return found

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()


def lacking(store: BlockStore, blocks: Blocks) -> np.ndarray:
    """Which of these blocks to offer to a store, bool ``[n]``: those that it does not have.

    Of tiers the last one decides, because the others forget. While it is paused it takes nothing, and all tiers decide.
    """
    last = store.tiers[-1] if isinstance(store, TieredStore) else store
    found: np.ndarray = (store if getattr(last, "is_paused", False) else last).lookup(blocks)
    return ~found


def _names(blocks: Blocks) -> list[tuple[bytes, int]]:
    return [(key.tobytes(), blocks.group) for key in blocks.keys]


def _proof(blocks: Blocks, number: int) -> tuple[bytes, bytes, bytes]:
    return blocks.parents[number].tobytes(), blocks.tokens[number].tobytes(), blocks.namespace
