"""`Needs`: how many blocks sequences need, in every arena of a pool. It changes nothing.

A pool without layer groups has one arena and one full group. There an admission takes all blocks of a sequence. In a
pool with groups it takes none: the blocks that the chunks of a sequence will take are *promised* to it, because a
window never holds all blocks of a long prompt at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy import int64
from numpy.typing import ArrayLike, NDArray

from kvpool._core import Pool
from kvpool.groups import Group, arenas_of


class Layers(NamedTuple):
    """A layer group as the pool understands it.

    Attributes
    ----------
    reach : int
        Tokens that a step may find held behind its first new one. -1: all.
    kept : int
        Entries that a window never lets go.
    """

    group: Group
    arena: int
    block_size: int
    reach: int
    kept: int


class Needs:
    """Counts of blocks. Every result is int64 with one number per arena in its last dimension.

    Parameters
    ----------
    pool : Pool
    chunk : int
        Most tokens of a sequence in one step.

    Attributes
    ----------
    promises : bool
        Admissions take no blocks. The pool has layer groups.
    unit : int
        Tokens of the largest block. A length that is a multiple of it shares no part of a block.
    """

    def __init__(self, pool: Pool, chunk: int) -> None:
        options = pool.options
        self._pool = pool
        self._chunk = chunk
        self._lookahead = options.lookahead
        self.promises = options.groups is not None
        self._in_place = options.in_order  # a state that one sequence has is written where it is
        groups = options.groups or (Group.full(),)
        self._layers = [
            _layers(group, arena, pool.block_size) for group, arena in zip(groups, arenas_of(groups), strict=True)
        ]
        self.num_arenas = 1 + max(layers.arena for layers in self._layers)
        self.unit = max(layers.block_size for layers in self._layers)
        self._states = np.zeros(self.num_arenas, np.bool_)
        for layers in self._layers:
            self._states[layers.arena] |= layers.group.kind == "state"
        self._columns = np.zeros(self.num_arenas, int64)  # of a token at the beginning of a block in every group
        for layers in self._layers:
            self._columns[layers.arena] += layers.group.columns
        self.nothing = np.zeros(self.num_arenas, int64)
        self.reserve = self.nothing.copy()  # what the pool's own watermark keeps
        self.reserve[0] = options.watermark

    def free(self) -> NDArray[int64]:
        """Return the blocks that a call could take now."""
        return np.array([self._pool.stats(arena).free for arena in range(self.num_arenas)], int64)

    def usable(self) -> NDArray[int64]:
        """Return the blocks that one request may have, if nobody else has any."""
        stats = [self._pool.stats(arena) for arena in range(self.num_arenas)]
        return np.array([one.num_blocks - one.reserved for one in stats], int64) - self.reserve

    def watermark(self, running: int, blocks: int | None) -> NDArray[int64]:
        """Return the blocks that an admission leaves in every arena. It leaves no state slots, as states do not grow.

        None means what one step of the running sequences can take.
        """
        return np.where(self._states, 0, self._columns * running if blocks is None else blocks)

    def most(self, tokens: ArrayLike, shared: ArrayLike = 0, forks: ArrayLike = False) -> NDArray[int64]:
        """Return the most blocks that a sequence holds at a time until `tokens` tokens are computed, in any chunks.

        Its first `shared` tokens, a multiple of `unit`, are another sequence's. `forks`: it may share its state.
        """
        tokens, shared = np.broadcast_arrays(np.asarray(tokens, int64), np.asarray(shared, int64))
        found = np.zeros((*tokens.shape, self.num_arenas), int64)
        for layers in self._layers:
            size = layers.block_size
            if layers.group.kind == "state":
                found[..., layers.arena] += np.where(forks, 2, 1 if self._in_place else 2)  # one read, one written
                continue
            entries = -(-tokens // size) - shared // size
            if layers.reach >= 0:
                span = layers.reach + self._lookahead + self._chunk  # tokens, which begin anywhere in a block
                entries = np.minimum(entries, layers.kept + (span + size - 2) // size + 1)
            found[..., layers.arena] += entries * layers.group.columns
        return found

    def held(self, tokens: ArrayLike, shared: ArrayLike = 0) -> NDArray[int64]:
        """Return the blocks that a sequence holds once `tokens` tokens are computed, without those of `shared`."""
        tokens, shared = np.broadcast_arrays(np.asarray(tokens, int64), np.asarray(shared, int64))
        found = np.zeros((*tokens.shape, self.num_arenas), int64)
        for layers in self._layers:
            if layers.group.kind == "state":
                found[..., layers.arena] += tokens > shared
                continue
            size, first = layers.block_size, shared // layers.block_size
            end = np.maximum(-(-tokens // size), first)
            gone = np.minimum(self._let_go(layers, tokens), end)
            kept = np.clip(layers.kept - first, 0, None) * (gone > 0)
            found[..., layers.arena] += (kept + end - np.maximum(gone, first)) * layers.group.columns
        return found

    def _let_go(self, layers: Layers, tokens: NDArray[int64]) -> NDArray[int64]:
        """Return the first entry behind those that a group has let go. 0: none."""
        position = tokens - self._lookahead
        if layers.group.kind == "window":
            end = (position - layers.reach) // layers.block_size
        elif layers.group.kind == "chunk":
            end = position // layers.group.size * layers.group.size // layers.block_size
        else:
            end = np.zeros_like(position)
        return np.where(end > layers.kept, end, 0)

    def next_token(self, lens: NDArray[np.integer], shared: NDArray[np.bool_]) -> NDArray[int64]:
        """Return, per sequence, the most blocks that its next token takes. Of `shared` ones it may copy some."""
        found = np.zeros((len(lens), self.num_arenas), int64)
        for layers in self._layers:
            if layers.group.kind == "state":
                found[:, layers.arena] += shared | (lens == 0) if self._in_place else 1
            else:
                found[:, layers.arena] += (shared | (lens % layers.block_size == 0)) * layers.group.columns
        return found

    def shares(self, tokens: int) -> bool:
        """Return whether a fork of a sequence of so many tokens may write into what both have."""
        return self.promises or tokens % self.unit != 0

    def fork(self, running: int) -> NDArray[int64]:
        """Return the blocks that must be free for a fork beside so many sequences: all may take one, and its state."""
        return self._columns * (running + 1) + self._states

    def beam(self, tokens: int, prompt: int, width: int) -> NDArray[int64]:
        """Return the blocks of a beam that runs alone: the prompt is shared, each hypothesis may copy one entry."""
        shared = prompt // self.unit * self.unit
        copies = np.where(self._states, 0, self._columns)
        return (self.most(tokens, shared, True) + copies) * width + self.most(tokens) - self.most(tokens, shared)

    def named(self, handle: int) -> set[tuple[int, int]]:
        """Return the blocks in the tables of a sequence, as (arena, block). Holes are left out."""
        found = set()
        for number, layers in enumerate(self._layers):
            reserved = self._pool.stats(layers.arena).reserved
            ids = self._pool.table(handle, number).ravel().tolist()
            found |= {(layers.arena, block) for block in ids if block >= reserved}
        return found

    def short(self, need: NDArray[int64], there: NDArray[int64]) -> int:
        """Return the lowest arena in which there is less than is needed, or -1."""
        (arenas,) = np.nonzero(need > there)
        return int(arenas[0]) if arenas.size else -1

    def name(self, arena: int) -> str:
        """Return what the blocks of an arena are called in a message."""
        if not self.promises:
            return "blocks"
        return f"state slots of arena {arena}" if self._states[arena] else f"blocks of arena {arena}"


def _layers(group: Group, arena: int, block_size: int) -> Layers:
    """Return a group of a pool with blocks of so many tokens."""
    size = group.block_size or block_size
    reach = group.size - 1 if group.kind in ("window", "chunk") else -1
    return Layers(group, arena, size, reach, -(-group.keep // size))
