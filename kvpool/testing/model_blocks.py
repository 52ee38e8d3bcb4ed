"""The block half of `kvpool.testing.model`: where a block is, who refers to it, and the block-level calls."""

from __future__ import annotations

import functools
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvpool.errors import DoubleFree, KVPoolError, OutOfBlocks, PoolClosed
from kvpool.testing import model_args as args
from kvpool.testing.model_plan import ModelPlan

SLOT_BITS, GENERATION_BITS, NUM_TAGS = 20, 32, 2047
MAX_GENERATION = 2**GENERATION_BITS - 1
MAX_REFCOUNT = 2**30

_live_tags: set[int] = set()


@dataclass(eq=False, slots=True)
class Sequence:
    """An open sequence."""

    handle: int
    num_tokens: int
    table: list[int]
    epoch: int = 0
    #: (handle forked from, newest step id at that moment), for all its ancestors
    ancestors: list[tuple[int, int]] = field(default_factory=list)
    #: what `commit` and the prefix cache know, see `kvpool.testing.model_prefix`
    root: int | None = None
    tokens: list[int] = field(default_factory=list)
    published: int = 0  #: how many of its full blocks the index was offered
    #: (step, done tokens) when it was forked from a row of a pending step
    forked_in: tuple[int, int] | None = None
    #: tokens that left; `num_tokens` are those that are there, and positions go on from the sum of both
    evicted: int = 0
    point: int = 0  #: that sum when tokens left last


@dataclass(eq=False, slots=True)
class Row:
    """What a step did to one sequence, so that `rollback` can undo it."""

    handle: int
    old_length: int
    replaced: list[tuple[int, int, int]] = field(default_factory=list)  # (table index, old block, new block)
    num_appended: int = 0


@dataclass(eq=False, slots=True)
class Step:
    """A pending step."""

    id: int
    plan: ModelPlan
    rows: list[Row]
    copies: list[tuple[int, int, int]]
    noted: bool = False

    def held(self) -> list[int]:
        """Blocks that this step keeps alive, in the order the holds were made."""
        return [old for row in self.rows for _, old, _ in row.replaced]


def public_call(method: Callable) -> Callable:
    """Every public call: read the arguments, refuse a closed pool, drain the deferred closes, then run.

    Reading may run the caller's code; a call that this code makes is an earlier call.
    """

    @functools.wraps(method)
    def call(self: BlockModel, *arguments: Any, **options: Any) -> Any:
        name = method.__name__.lstrip("_")
        self._refuse_closed(name)
        arguments = tuple(args.own(name, value) for value in arguments)
        options = {key: args.own(name, value) for key, value in options.items()}
        self._refuse_closed(name)
        self._drain()
        return method(self, *arguments, **options)

    return call


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class BlockModel:
    """A pool of KV blocks in plain Python; same constructor, methods and errors as `kvpool.Pool`.

    Parameters
    ----------
    num_blocks, block_size : int
        Blocks in the pool, tokens in a block.
    max_seqs, max_blocks_per_seq : int
        Limits on open sequences and on the table of one; the second defaults to
        ``min(num_blocks - reserved_blocks, max(1, 2**27 // max_seqs))``.
    reserved_blocks : int
        Ids below it are never allocated.
    watermark : int
        Blocks that `open` leaves for sequences that grow.
    in_order : bool
        Every step counts as done when it returns.
    seed : int, optional
        Accepted for symmetry; nothing in the model is random.
    """

    _closed = True  # until the constructor has seen that everything is legal

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_seqs: int = 1024,
        max_blocks_per_seq: int | None = None,
        reserved_blocks: int = 1,
        watermark: int = 0,
        in_order: bool = False,
        seed: int | None = None,
    ) -> None:
        reserved_blocks = args.integer("Pool", "reserved_blocks", reserved_blocks, 0, 2**31 - 2)
        num_blocks = args.integer("Pool", "num_blocks", num_blocks, reserved_blocks + 1, 2**31 - 1)
        block_size = args.integer("Pool", "block_size", block_size, 1, min(2**31 - 1, 2**62 // num_blocks))
        max_seqs = args.integer("Pool", "max_seqs", max_seqs, 1, 2**SLOT_BITS)
        unreserved = num_blocks - reserved_blocks
        watermark = args.integer("Pool", "watermark", watermark, 0, unreserved)
        if max_blocks_per_seq is None:
            max_blocks_per_seq = min(unreserved, max(1, 2**27 // max_seqs))
        if not isinstance(in_order, bool):
            raise TypeError(f"[Pool] in_order is a {type(in_order).__name__}, a bool is needed")
        if seed is not None:
            args.integer("Pool", "seed", seed, 0, 2**64 - 1)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_seqs = max_seqs
        self.max_blocks_per_seq = args.integer("Pool", "max_blocks_per_seq", max_blocks_per_seq, 1, 2**31 - 1)
        self.reserved_blocks = reserved_blocks
        self.watermark = watermark
        self.in_order = in_order
        self._tag = self._take_tag()
        self._closed = False
        self._next_step = 1
        self._generations: dict[int, int] = {}
        counted = ("cow_copies", "cow_tokens", "allocs", "evictions", "peak_used", "evicted_tokens")
        self._counters = dict.fromkeys(counted, 0)
        self._dropped: list[int] = []
        self._deferred: list[int] = []
        self._digest = 0
        self._empty()

    @staticmethod
    def _take_tag() -> int:
        for tag in range(1, NUM_TAGS + 1):
            if tag not in _live_tags:
                _live_tags.add(tag)
                return tag
        raise KVPoolError(f"[Pool] too many live pools ({NUM_TAGS}), shut one down first")

    def _empty(self) -> None:
        """Every block blank, every slot free, nothing pending."""
        self._blank = list(range(self.num_blocks - 1, self.reserved_blocks - 1, -1))  # top = end
        self._lru: list[int] = []  # oldest first
        self._limbo: list[tuple[int, int]] = []  # (block, fence), oldest first
        self._raw: dict[int, int] = {}
        self._holds: list[int] = []  # one entry per hold
        self._committed: set[int] = set()
        self._sequences: dict[int, Sequence] = {}  # slot -> sequence
        self._free_slots = deque(s for s in range(self.max_seqs) if self._generations.get(s, 0) <= MAX_GENERATION)
        self._pending: list[Step] = []  # oldest first

    def _refuse_closed(self, call: str) -> None:
        if self._closed:
            raise PoolClosed(f"[{call}] the pool was shut down")

    def _drain(self) -> None:
        """Close the sequences whose close was deferred."""
        raise NotImplementedError

    def _local(self, handle: int) -> int:
        return handle & (2 ** (SLOT_BITS + GENERATION_BITS) - 1)

    def _chain(self, *words: object) -> None:
        """Add a successful call to the digest."""
        self._digest = zlib.crc32(repr(words).encode(), self._digest)

    # ---- blocks -------------------------------------------------------------------------------------------

    def _refcount(self, block: int) -> int:
        return self._raw.get(block, 0) + sum(s.table.count(block) for s in self._sequences.values())

    def _available(self) -> int:
        return len(self._blank) + len(self._lru)

    def _used(self) -> int:
        return self.num_blocks - self.reserved_blocks - self._available() - len(self._limbo)

    def _note_peak(self) -> None:
        self._counters["peak_used"] = max(self._counters["peak_used"], self._used())

    def _evict_oldest(self) -> int:
        block = self._lru.pop(0)
        self._committed.remove(block)
        self._dropped.append(block)
        self._counters["evictions"] += 1
        return block

    def _take(self) -> int:
        block = self._blank.pop() if self._blank else self._evict_oldest()
        self._counters["allocs"] += 1
        self._note_peak()
        return block

    def _release(self, block: int) -> None:
        """A reference or a hold went away: if it was the last one, the block leaves."""
        if self._refcount(block) or block in self._holds:
            return
        if self._pending:
            self._limbo.append((block, self._pending[-1].id))
        else:
            self._leave(block)

    def _leave(self, block: int) -> None:
        if block in self._committed:
            self._lru.append(block)
        else:
            self._blank.append(block)

    def _drain_limbo(self) -> None:
        while self._limbo and (not self._pending or self._limbo[0][1] < self._pending[0].id):
            self._leave(self._limbo.pop(0)[0])

    def _ids(self, call: str, values: Any) -> list[int]:
        return args.block_ids(call, values, self.num_blocks, self.reserved_blocks)

    def _out_of_blocks(
        self, call: str, needed: int, watermark: int = 0, row: int = -1, handle: int = -1, lost: int = 0
    ) -> None:
        short_by = needed + watermark + lost - self._available()
        where = f" at row {row}" if row >= 0 else ""
        raise OutOfBlocks(
            f"[{call}] {needed} blocks are needed{where}, {short_by} too many: {len(self._blank)} free, "
            f"{len(self._lru)} evictable, {len(self._limbo)} in limbo, watermark {watermark}",
            needed=needed,
            short_by=short_by,
            row=row,
            handle=handle,
            free=len(self._blank),
            evictable=len(self._lru) - lost,
            limbo=len(self._limbo),
        )

    @property
    def blocks(self) -> Any:
        """Blocks by name, in pools without a prefix cache."""
        from kvpool.testing.model_pool_blocks import ModelPoolBlocks  # which stands on this module

        if getattr(self, "prefix_cache", False):
            raise AttributeError("[blocks] the prefix cache looks after the blocks of this pool")
        return ModelPoolBlocks(self)

    def alloc(self, n: int | None = None, out: np.ndarray | None = None) -> int | np.ndarray:
        """Take one block and return its id, or `n` blocks as int32 ``[n]``; raw = refcount = 1."""
        blocks = self._alloc(n, lambda count: None if out is None else args.check_out("alloc", out, count))
        if out is not None:
            out[: len(blocks)] = blocks
            return out
        return blocks[0] if n is None else np.array(blocks, np.int32)

    @public_call
    def _alloc(self, n: int | None, check_out: Callable[[int], None]) -> list[int]:
        count = 1 if n is None else args.count("alloc", "n", n)
        check_out(count)
        if count > self._available():
            self._out_of_blocks("alloc", count)
        blocks = []
        for _ in range(count):
            blocks.append(self._take())
            self._raw[blocks[-1]] = 1
        self._chain("alloc", *blocks)
        return blocks

    @public_call
    def incref(self, ids: Any) -> None:
        """Add one raw reference to blocks that have a reference."""
        blocks = self._ids("incref", ids)
        for block in blocks:
            if not self._refcount(block):
                raise DoubleFree(f"[incref] block has no reference ({block})")
            if self._refcount(block) >= MAX_REFCOUNT:
                raise OverflowError(f"[incref] block has too many references ({block}), the most is 2^30")
        for block in blocks:
            self._raw[block] = self._raw.get(block, 0) + 1
        self._chain("incref", *blocks)

    def _drop_raw(self, blocks: list[int]) -> None:
        for block in blocks:
            self._raw[block] -= 1
            self._release(block)

    @public_call
    def decref(self, ids: Any) -> None:
        """Drop one raw reference of each block, in the order given."""
        blocks = self._ids("decref", ids)
        for block in blocks:
            if not self._raw.get(block):
                raise DoubleFree(f"[decref] block has no raw reference ({block})")
        self._drop_raw(blocks)
        self._chain("decref", *blocks)

    @public_call
    def free(self, ids: Any) -> None:
        """Drop the raw reference of blocks that nobody else uses."""
        blocks = self._ids("free", ids)
        for block in blocks:
            if not self._raw.get(block):
                raise DoubleFree(f"[free] block has no raw reference ({block})")
            if self._refcount(block) > 1:
                raise ValueError(f"[free] block is shared ({block}), refcount {self._refcount(block)}")
        self._drop_raw(blocks)
        self._chain("free", *blocks)

    @public_call
    def mark_committed(self, ids: Any) -> None:
        """Make blocks that have a reference immutable; they are evictable, not blank, once released."""
        self._mark_committed(ids)

    def _mark_committed(self, ids: Any) -> None:
        blocks = self._ids("mark_committed", ids)
        for block in blocks:
            if not self._refcount(block):
                raise DoubleFree(f"[mark_committed] block has no reference ({block})")
            if block in self._dropped:
                raise ValueError(f"[mark_committed] block was dropped ({block}), call take_dropped first")
        self._committed.update(blocks)
        self._chain("mark_committed", *blocks)

    @public_call
    def revive(self, ids: Any) -> None:
        """Add one raw reference to committed blocks, wherever they are."""
        self._revive(ids)

    def _revive(self, ids: Any) -> None:
        blocks = self._ids("revive", ids)
        for block in blocks:
            if block not in self._committed:
                raise ValueError(f"[revive] block is not committed ({block})")
            if self._refcount(block) >= MAX_REFCOUNT:
                raise OverflowError(f"[revive] block has too many references ({block}), the most is 2^30")
        for block in blocks:
            self._raw[block] = self._raw.get(block, 0) + 1
            self._lru = [b for b in self._lru if b != block]
            self._limbo = [(b, fence) for b, fence in self._limbo if b != block]
        self._note_peak()
        self._chain("revive", *blocks)

    @public_call
    def evict(self, n: int) -> int:
        """Turn up to `n` evictable blocks into blank ones, oldest first; returns how many."""
        count = min(args.count("evict", "n", n), len(self._lru))
        for _ in range(count):
            self._blank.append(self._evict_oldest())
        self._chain("evict", count)
        return count

    @public_call
    def take_dropped(self) -> np.ndarray:
        """Return the evicted blocks noted since the last call, oldest note first, int32."""
        return self._take_dropped()

    def _take_dropped(self) -> np.ndarray:
        dropped, self._dropped = self._dropped, []
        self._chain("take_dropped", *dropped)
        return np.array(dropped, np.int32)

    @public_call
    def refcount(self, block: int) -> int:
        """Return table entries plus raw references of a block."""
        args.integer("refcount", "block id", block)
        return self._refcount(self._ids("refcount", block)[0])
