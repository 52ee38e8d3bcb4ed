"""`Needs`: how many blocks sequences need, in every arena of a pool. It changes nothing.

An admission takes no blocks: those that the chunks of a sequence will take are *promised* to it, because a window never
holds all blocks of a long prompt at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import repeat
from operator import add, attrgetter, mul, sub
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy import int64
from numpy.typing import ArrayLike, NDArray

from kvpool._core import Pool
from kvpool.groups import Group, arenas_of

if TYPE_CHECKING:
    from kvpool.eviction import Evictor

_free = attrgetter("free")


class Layers(NamedTuple):
    """A layer group as the pool understands it."""

    group: Group
    arena: int
    block_size: int
    reach: int  #: tokens that a step may find held behind its first new one; -1: all
    kept: int  #: entries that a window never lets go
    budget: int  #: most tokens that a sequence has here; evicted tokens do not count


class Needs:
    """Counts of blocks: a list with one number per arena, or for many sequences int64 ``[..., A]``.

    `chunk` is the most tokens of a sequence in one step. With `eviction` it has its budget and a chunk in that group.
    """

    def __init__(self, pool: Pool, chunk: int, eviction: Evictor | None = None) -> None:
        options = pool.options
        self._pool = pool
        self._chunk = chunk
        self._lookahead = options.lookahead
        self._in_place = options.in_order  # a state that one sequence has is written where it is
        # Where some group is not full, its blocks leave a sequence that runs, and it has checkpoints.
        self.lets_go = any(group.kind != "full" for group in options.groups)
        arenas = zip(options.groups, arenas_of(options.groups), strict=True)
        self._layers = [_layers(group, arena, pool.block_size) for group, arena in arenas]
        self.evicting: Layers | None = None  # the group that tokens are evicted from
        if eviction is not None:
            self.evicting = self._layers[eviction.group]._replace(budget=eviction.policy.most + chunk)
            self._layers[eviction.group] = self.evicting
        self.num_arenas = 1 + max(layers.arena for layers in self._layers)
        # Tokens of the largest block: a length that is a multiple of it shares no part of a block.
        self.unit = max(layers.block_size for layers in self._layers)
        self.nothing = [0] * self.num_arenas
        self._states = self.nothing.copy()  # 1: an arena of state slots
        self._columns = self.nothing.copy()  # of a token at the beginning of a block in every group
        for layers in self._layers:
            self._states[layers.arena] = int(layers.group.kind == "state")
            self._columns[layers.arena] += layers.group.columns * (layers.group.kind != "state")
        self.checkpoint = self.nothing.copy()  # blocks of the states of one checkpoint
        self.checkpoint[0] = sum(layers.group.blocks for layers in self._layers)
        self._growing = [int(columns > 0) for columns in self._columns]  # 1: an arena of blocks
        self.reserve = self.nothing.copy()  # blocks that every admission leaves: the pool's own watermark
        self.reserve[0] = options.watermark

    def usable(self, num_blocks: Mapping[int, int] = MappingProxyType({})) -> list[int]:
        """Return the blocks that one request may have, if nobody else has any. `num_blocks`: arenas of other sizes."""
        stats = enumerate(map(self._pool.stats, range(self.num_arenas)))
        return [num_blocks.get(at, one.num_blocks) - one.reserved - self.reserve[at] for at, one in stats]

    def free(self) -> list[int]:
        """Return the blocks that a call could take now."""
        return list(map(_free, map(self._pool.stats, range(self.num_arenas))))

    def kept(self, growing: list[int], running: int, watermark: int | None) -> list[int]:
        """Return the blocks that an admission leaves: `growing` and the watermark, at least the pool's own.

        A watermark of None means what one step of the running sequences can take. No state slots are left, as states
        do not grow.
        """
        each, times = (self._columns, running) if watermark is None else (self._growing, watermark)
        return list(map(max, map(add, growing, map(mul, each, repeat(times))), self.reserve))

    def widest(self, tokens: int) -> int:
        """Return the blocks of the pool's size for what a sequence of so many tokens holds in the largest group."""
        blocks = [layers for layers in self._layers if layers.group.kind != "state"]
        held = max((min(tokens, layers.budget) for layers in blocks), default=tokens)
        return -(-held // self._pool.block_size)

    def alone(self, tokens: int) -> list[int]:
        """Return what `most` says of a sequence that shares no block."""
        found: list[int] = self.most(tokens).tolist()
        return found

    def most(self, tokens: ArrayLike, shared: ArrayLike = 0, forks: ArrayLike = False) -> NDArray[int64]:
        """Return the most blocks that sequences hold at a time until `tokens` tokens are computed, in any chunks.

        Their first `shared` tokens, a multiple of `unit`, are another sequence's. `forks`: they may share their state.
        """
        tokens, shared = np.asarray(tokens, int64), np.asarray(shared, int64)
        found = np.zeros((*np.broadcast(tokens, shared).shape, self.num_arenas), int64)
        for layers in self._layers:
            size = layers.block_size
            if layers.group.kind == "state":
                found[..., layers.arena] += np.where(forks, 2, 1 if self._in_place else 2)  # one read, one written
                continue
            entries = self._most(layers, -(-tokens // size) - shared // size)
            found[..., layers.arena] += entries * layers.group.columns
        return found

    def _most(self, layers: Layers, entries: NDArray[int64]) -> NDArray[int64]:
        """Return how many of so many entries a group holds at a time, at most."""
        if layers.reach < 0 and layers is not self.evicting:
            return entries
        # The tokens may begin anywhere in a block, also in the group that evicts: entries are counted by positions.
        span = layers.budget if layers.reach < 0 else layers.reach + self._lookahead + self._chunk
        return np.minimum(entries, layers.kept + (span + layers.block_size - 2) // layers.block_size + 1)

    def held(
        self, tokens: ArrayLike, shared: ArrayLike = 0, found: ArrayLike = 0, evicted: ArrayLike = 0
    ) -> NDArray[int64]:
        """Return the blocks that a sequence holds once `tokens` tokens are computed, without those of `shared`.

        The prefix cache had the first `found` tokens. Behind a window it gives no more than the next query reads.
        """
        arrays = [np.asarray(array, int64) for array in (tokens, shared, found, evicted)]
        tokens, shared, found_tokens, evicted = arrays
        found = np.zeros((*np.broadcast(*arrays).shape, self.num_arenas), int64)
        for layers in self._layers:
            if layers.group.kind == "state":
                found[..., layers.arena] += tokens > shared
                continue
            size, first = layers.block_size, shared // layers.block_size
            end = np.maximum(-(-tokens // size) - evicted // size * (layers is self.evicting), first)
            gone = np.maximum(self._let_go(layers, tokens - self._lookahead), self._let_go(layers, found_tokens))
            gone = np.minimum(gone, end)
            kept = np.clip(layers.kept - first, 0, None) * (gone > 0)
            found[..., layers.arena] += (kept + end - np.maximum(gone, first)) * layers.group.columns
        return found

    def growth(self, lens: ArrayLike, limits: ArrayLike) -> list[int]:
        """Return the blocks that must be free for sequences to grow, each from one length to another, in any chunks.

        They may share what they hold with each other, and with sequences that are kept: then a block that a window lets
        go does not come free. They may have been cut, by the lookahead at most.
        """
        lens, limits = np.asarray(lens, int64), np.asarray(limits, int64)
        found, let_go = self.nothing.copy(), self.nothing.copy()
        for layers in self._layers:
            if layers.group.kind == "state":
                found[layers.arena] += int(((limits > lens) * (2 - (lens > 0))).sum())
                let_go[layers.arena] += int((lens > 0).sum())
                continue
            size, columns = layers.block_size, layers.group.columns
            now, then = -(-lens // size), -(-limits // size)
            first = np.minimum(self._let_go(layers, lens), now)
            held = now - first + layers.kept * (first > 0)
            more = np.minimum(np.maximum(self._most(layers, then) - held, 0), then - now)
            found[layers.arena] += int((more + 1).sum()) * columns  # one for the copy of a tail that is shared
            let_go[layers.arena] += int(held.sum()) * columns * (layers.reach >= 0)
        shared = [self._pool.stats(arena).shared for arena in range(self.num_arenas)]
        return list(map(add, found, map(min, shared, let_go)))

    def _let_go(self, layers: Layers, position: NDArray[int64]) -> NDArray[int64]:
        """Return the first entry behind those that a query at a position and later ones do not read. 0: none."""
        if layers.group.kind == "window":
            end = (position - layers.reach) // layers.block_size
        elif layers.group.kind == "chunk":
            end = position // layers.group.size * layers.group.size // layers.block_size
        else:
            end = np.zeros_like(position)
        return np.where(end > layers.kept, end, 0)

    def next_tokens(
        self, lens: NDArray[np.integer], shared: NDArray[np.bool_], new: NDArray[int64] | int = 1
    ) -> list[int]:
        """Return the most blocks that the `new` next tokens of sequences take. Of `shared` ones they may copy some."""
        found = self.nothing.copy()
        for layers in self._layers:
            if layers.group.kind != "state":
                tail = lens % layers.block_size
                taken = int(((tail + new - 1) // layers.block_size + (shared | (tail == 0))).sum())
            else:
                taken = int(np.count_nonzero(shared | (lens == 0))) if self._in_place else len(lens)
            found[layers.arena] += taken * layers.group.columns
        return found

    def shares(self, tokens: int) -> bool:
        """Return whether a fork of a sequence of so many tokens may write into what both have."""
        return any(layers.group.kind == "state" or tokens % layers.block_size for layers in self._layers)

    def fork(self, running: int) -> list[int]:
        """Return the blocks that must be free for a fork beside so many sequences: all may take one, and its state."""
        marks = zip(self._columns, self._states, strict=True)
        return [columns * (running + 1) + state * (running + 2) for columns, state in marks]

    def beam(self, tokens: int, prompt: int, width: int) -> list[int]:
        """Return the blocks of a beam that runs alone: the prompt is shared, each hypothesis may copy one entry."""
        shared = prompt // self.unit * self.unit
        own = self.most(tokens, shared, True) + np.array(self._columns)
        found: list[int] = (own * width + self.most(tokens) - self.most(tokens, shared)).tolist()
        return found

    def named(self, handle: int) -> set[tuple[int, int]]:
        """Return the blocks in the tables of a sequence, as (arena, block). Holes are left out."""
        found = set()
        for number, layers in enumerate(self._layers):
            reserved = self._pool.stats(layers.arena).reserved
            ids = self._pool.table(handle, number).ravel().tolist()
            found |= {(layers.arena, block) for block in ids if block >= reserved}
        return found

    def short(self, need: list[int], there: list[int], kept: list[int] | None = None) -> int:
        """Return the lowest arena in which there is less than is needed and kept, or -1."""
        for arena, most in enumerate(there if kept is None else map(sub, there, kept)):
            if need[arena] > most:
                return arena
        return -1

    def name(self, arena: int) -> str:
        """Return what the blocks of an arena are called in a message."""
        kind = "state slots" if self._states[arena] else "blocks"
        return kind if self.num_arenas == 1 else f"{kind} of arena {arena}"


def _layers(group: Group, arena: int, block_size: int) -> Layers:
    """Return a group of a pool with blocks of so many tokens."""
    size = group.block_size or block_size
    reach = group.size - 1 if group.kind in ("window", "chunk") else -1
    return Layers(group, arena, size, reach, -(-group.keep // size), 2**31 - 1)
