"""Blocks by id, as `kvpool.testing.model` counts them: an arena, and the calls on it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from kvpool.errors import CorruptState, DoubleFree, OutOfBlocks
from kvpool.testing import model_args as args


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def public_call(method: Callable, changes: bool = True) -> Callable:
    """Every public call: read the arguments, refuse a closed pool, drain the deferred closes, then run.

    Reading may run the caller's code; a call that this code makes is an earlier call.
    """
    name = method.__name__.lstrip("_")

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        pool = getattr(self, "pool", self)
        pool.refuse_closed(name)
        arguments = tuple(args.own(name, value) for value in arguments)
        options = {key: args.own(name, value) for key, value in options.items()}
        pool.refuse_closed(name)
        pool.drain()
        result = method(self, *arguments, **options)
        if changes:
            pool.changed(name)
        return result

    return call


def reading_call(method: Callable) -> Callable:
    """A public call that changes nothing."""
    return public_call(method, False)


#: What a call refuses of a block: the error, what is wrong, and whether it is so.
Refusal = tuple[type[Exception], str, Callable[[int], Any]]


class Arena:
    """Blocks, or state slots, with ids ``reserved .. num_blocks - 1``. Who names one is recounted from the tables."""

    def __init__(self, pool: Any, number: int, num_blocks: int, reserved: int) -> None:
        self.pool, self.number, self.num_blocks, self.reserved = pool, number, num_blocks, reserved
        self.counters: Counter[str] = Counter()  # of `PoolStats`; a reset does not change them
        self.dropped: list[int] = []  # marked blocks that were evicted
        self.empty()

    def empty(self) -> None:
        self.blank = list(range(self.num_blocks - 1, self.reserved - 1, -1))  # top = end
        self.limbo: list[tuple[int, int]] = []  # (block, fence), oldest first
        self.raw: dict[int, int] = {}
        self.holds: list[int] = []  # one entry per hold
        self.marked: set[int] = set()  # by `mark_cached`
        self.unused: list[int] = []  # of these, those without a reference, oldest first

    @property
    def evictable(self) -> list[int]:
        """Blocks that may leave; oldest first, but for those of a prefix cache."""
        return sorted(self.pool.evictable_in(self)) if self.pool.has_cache else self.unused

    @property
    def committed(self) -> set[int]:
        """Blocks that are never written in place."""
        return self.marked | {block for number, block in self.pool.entries if number == self.number}

    def names(self) -> list[int]:
        """A block for every table entry that names it."""
        layers = [layer.index for layer in self.pool.layers if layer.arena is self]
        tables = [seq.tables[index] for index in layers for seq in self.pool.sequences()]
        return [block for table in tables for entry in table.entries for block in entry]

    def refcount(self, block: int) -> int:
        return self.raw.get(block, 0) + self.names().count(block)

    def references(self) -> Counter[int]:
        return Counter(self.names()) + Counter(self.raw)

    def is_idle(self, block: int) -> bool:
        """Nobody names the block, and no pending step may use it."""
        in_limbo = any(block == one for one, _ in self.limbo)
        return not self.refcount(block) and block not in self.holds and not in_limbo

    def available(self) -> int:
        return len(self.blank) + len(self.evictable)

    def used(self) -> int:
        return self.num_blocks - self.reserved - self.available() - len(self.limbo)

    def note_peak(self) -> None:
        self.counters["peak_used"] = max(self.counters["peak_used"], self.used())

    def figures(self) -> dict[str, int]:
        where = {"num_blocks": self.num_blocks, "reserved": self.reserved, "blank": len(self.blank)}
        where |= {"evictable": len(self.evictable), "limbo": len(self.limbo), "used": self.used()}
        where["shared"] = sum(count > 1 for count in self.references().values())
        counted = ("cow_copies", "cow_tokens", "allocs", "evictions", "peak_used")
        return where | {name: self.counters[name] for name in counted}

    def evict_oldest(self) -> None:
        """What leaves first does, for a blank block."""
        if self.pool.has_cache:
            if not self.pool.evict_for(self):
                raise CorruptState(f"[evict] nothing may leave arena {self.number}, a call was judged wrongly")
            return
        block = self.unused.pop(0)
        self.marked.remove(block)
        self.dropped.append(block)
        self.counters["evictions"] += 1
        self.blank.append(block)

    def take(self) -> int:
        while not self.blank:
            self.evict_oldest()
        block = self.blank.pop()
        self.counters["allocs"] += 1
        self.note_peak()
        return block

    def release(self, block: int) -> None:
        """A reference or a hold went away: if it was the last one, the block leaves."""
        if self.refcount(block) or block in self.holds:
            return
        if self.pool.pending:
            self.limbo.append((block, self.pool.pending[-1].id))
        else:
            self.leave(block)

    def leave(self, block: int) -> None:
        if self.pool.has_cache:
            self.pool.left.append((self, block))
        else:
            (self.unused if block in self.marked else self.blank).append(block)

    def drain_limbo(self) -> None:
        """Blocks leave that no pending step may use."""
        pending = self.pool.pending
        while self.limbo and (not pending or self.limbo[0][1] < pending[0].id):
            self.leave(self.limbo.pop(0)[0])

    def resize(self, size: int) -> dict[int, int]:
        """So many blocks from now on; returns where those went that are behind the end. No step is pending."""
        self.blank = [*range(size - 1, self.num_blocks - 1, -1), *self.blank]
        while len(self.blank) < self.num_blocks - size:
            self.evict_oldest()
        behind = [block for block in range(size, self.num_blocks) if block not in self.blank]
        self.blank = [block for block in self.blank if block < size]
        name = {block: self.blank.pop() for block in behind}
        self.num_blocks = size
        self.raw = {name.get(block, block): count for block, count in self.raw.items()}
        self.marked = {name.get(block, block) for block in self.marked}
        self.unused = [name.get(block, block) for block in self.unused]
        self.dropped = [block for block in self.dropped if block < size and block not in name.values()]
        return name

    def add_raw(self, blocks: list[int]) -> list[int]:
        """A raw reference of each is added."""
        for block in blocks:
            self.raw[block] = self.raw.get(block, 0) + 1
        return blocks

    def drop_raw(self, blocks: list[int]) -> None:
        """A raw reference of each goes away."""
        for block in blocks:
            self.raw[block] -= 1
            self.release(block)

    def out_of_blocks(
        self, call: str, needed: int, watermark: int = 0, row: int = -1, handle: int = -1, lost: int = 0
    ) -> NoReturn:
        """Refuse a call; `lost` evictable blocks are its own."""
        evictable = len(self.evictable) - lost
        short_by = needed + watermark - len(self.blank) - evictable
        state = {"blank": len(self.blank), "evictable": evictable, "limbo": len(self.limbo), "arena": self.number}
        message = f"[{call}] {needed} blocks are needed, {short_by} too many: {state}, watermark {watermark}"
        raise OutOfBlocks(message, needed=needed, short_by=short_by, row=row, handle=handle, **state)


class ModelBlocks:
    """The calls on the blocks of an arena, see `kvpool._core.BlockAPI`."""

    def __init__(self, arena: Arena) -> None:
        self.pool, self._arena = arena.pool, arena
        self._not_raw: Refusal = DoubleFree, "has no raw reference", lambda block: not arena.raw.get(block)
        self._unreferenced: Refusal = DoubleFree, "has no reference", lambda block: not arena.refcount(block)
        self._overflowing: Refusal = OverflowError, "has 2^30 references", lambda block: arena.refcount(block) >= 2**30

    def arena(self, arena: int) -> ModelBlocks:
        return type(self)(self.pool.arena_of("blocks", arena))

    def _named(self, call: str, ids: Any) -> list[int]:
        named, most = args.integers(call, "block id", ids), self._arena.num_blocks
        for block in named:
            if not 0 <= block < most:
                raise IndexError(f"[{call}] block id is out of range ({block}), the pool has {most} blocks")
        return named

    def _judged(self, call: str, ids: Any, *refusals: Refusal) -> list[int]:
        """The same; reserved blocks and duplicates are wrong, and then what a refusal is true of."""
        named, reserved = self._named(call, ids), self._arena.reserved
        for block in named:
            if block < reserved:
                raise ValueError(f"[{call}] block is reserved ({block}), ids below {reserved} are never allocated")
        args.refuse_duplicates(call, "block ids", named)
        for block in named:
            self._refuse(call, block, refusals)
        return named

    def _judged_in_turn(self, call: str, ids: Any, *refusals: Refusal) -> list[int]:
        """The same, block by block; reserved ones are skipped."""
        self._refuse_cache(call)
        named = [block for block in self._named(call, ids) if block >= self._arena.reserved]
        for k, block in enumerate(named):
            if block in named[:k]:
                raise ValueError(f"[{call}] block stands twice ({block})")
            self._refuse(call, block, refusals)
        return named

    def _refuse(self, call: str, block: int, refusals: tuple[Refusal, ...]) -> None:
        for error, what, is_so in refusals:
            if is_so(block):
                raise error(f"[{call}] block {what} ({block})")

    def _refuse_cache(self, call: str) -> None:
        if self.pool.has_cache:
            raise ValueError(f"[{call}] the prefix cache looks after the content of blocks in this pool")

    @public_call
    def alloc(self, n: int | None = None) -> Any:
        count, one = 1 if n is None else args.count("alloc", "n", n), self._arena
        lost = len(one.evictable) if self.pool.has_cache else 0
        if count > one.available() - lost:
            one.out_of_blocks("alloc", count, lost=lost)
        blocks = one.add_raw([one.take() for _ in range(count)])
        return blocks[0] if n is None else np.array(blocks, np.int32)

    @public_call
    def incref(self, ids: Any) -> None:
        one = self._arena
        not_taken = ValueError, "was not taken with alloc", lambda block: self.pool.has_cache and not one.raw.get(block)
        one.add_raw(self._judged("incref", ids, not_taken, self._unreferenced, self._overflowing))

    @public_call
    def decref(self, ids: Any) -> None:
        self._arena.drop_raw(self._judged("decref", ids, self._not_raw))

    @public_call
    def free(self, ids: Any) -> None:
        one = self._arena
        shared: Refusal = ValueError, "is shared", lambda block: one.refcount(block) > 1
        one.drop_raw(self._judged("free", ids, self._not_raw, shared))

    @public_call
    def evict(self, n: int) -> int:
        one = self._arena
        count = min(args.count("evict", "n", n), len(one.evictable))
        wanted = len(one.blank) + count
        while len(one.blank) < wanted:
            one.evict_oldest()
        return count

    @public_call
    def touch(self, ids: Any) -> None:
        """One raw reference more on blocks in use and on committed ones."""
        one = self._arena
        known = one.references().keys() | one.marked
        unknown = ValueError, "is neither in use nor cached", lambda block: block not in known
        blocks = one.add_raw(self._judged_in_turn("touch", ids, unknown, self._overflowing))
        one.unused = [block for block in one.unused if block not in blocks]
        one.limbo = [(block, fence) for block, fence in one.limbo if block not in blocks]
        one.note_peak()

    @public_call
    def mark_cached(self, ids: Any) -> None:
        one = self._arena
        known = ValueError, "is cached already, or was dropped", lambda block: block in one.marked.union(one.dropped)
        one.marked.update(self._judged_in_turn("mark_cached", ids, self._unreferenced, known))

    @public_call
    def drain_evicted(self) -> np.ndarray:
        self._refuse_cache("drain_evicted")
        dropped, self._arena.dropped = self._arena.dropped, []
        return np.array(dropped, np.int32)

    @reading_call
    def refcount(self, block: int) -> int:
        args.integer("refcount", "block id", block)
        return self._arena.refcount(self._judged("refcount", block)[0])

    @reading_call
    def refcount_histogram(self) -> np.ndarray:
        references, one = self._arena.references(), self._arena
        return np.bincount([references[block] for block in range(one.reserved, one.num_blocks)])

    @property
    @reading_call
    def num_blank(self) -> int:
        return len(self._arena.blank)

    @property
    @reading_call
    def num_free(self) -> int:
        return self._arena.available()
