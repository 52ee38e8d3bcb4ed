"""Blocks by id, as `kvpool.testing.model` counts them: an arena, and the calls on it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from kvpool.errors import DoubleFree, OutOfBlocks, PlanStateError
from kvpool.testing import model_args as args

MAX_REFCOUNT = 2**30


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def public_call(method: Callable) -> Callable:
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
        return method(self, *arguments, **options)

    return call


class Arena:
    """Blocks, or state slots, with ids ``reserved .. num_blocks - 1``. Who names one is recounted from the tables."""

    def __init__(self, pool: Any, number: int, num_blocks: int, reserved: int) -> None:
        self.pool, self.number, self.num_blocks, self.reserved = pool, number, num_blocks, reserved
        counted = ("cow_copies", "cow_tokens", "allocs", "evictions", "peak_used")
        self.counters = dict.fromkeys(counted, 0)  # a reset does not change them
        self.dropped: list[int] = []  # marked blocks that were evicted
        self.empty()

    def empty(self) -> None:
        """Every block is blank."""
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
        tables = [seq.tables[layer.index] for layer in self.pool.layers_in(self) for seq in self.pool.sequences()]
        return [block for table in tables for entry in table.entries for block in entry]

    def refcount(self, block: int) -> int:
        """Its references."""
        return self.raw.get(block, 0) + self.names().count(block)

    def references(self) -> Counter[int]:
        """Blocks that have a reference, and how many."""
        return Counter(self.names()) + Counter(self.raw)

    def is_idle(self, block: int) -> bool:
        """Nobody names the block, and no pending step may use it."""
        in_limbo = any(block == one for one, _ in self.limbo)
        return not self.refcount(block) and block not in self.holds and not in_limbo

    def available(self) -> int:
        """How many blocks can be taken."""
        return len(self.blank) + len(self.evictable)

    def used(self) -> int:
        """How many are in use."""
        return self.num_blocks - self.reserved - self.available() - len(self.limbo)

    def note_peak(self) -> None:
        """More blocks are in use."""
        self.counters["peak_used"] = max(self.counters["peak_used"], self.used())

    def evict_oldest(self) -> None:
        """What leaves first does, for a blank block."""
        if self.pool.has_cache:
            self.pool.evict_for(self)
            return
        block = self.unused.pop(0)
        if block in self.marked:  # else `uncache` left it in its place
            self.marked.remove(block)
            self.dropped.append(block)
            self.counters["evictions"] += 1
        self.blank.append(block)

    def take(self) -> int:
        """The next block."""
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
        """Nobody uses the block any more."""
        if self.pool.has_cache:
            self.pool.left.append((self, block))
        else:
            (self.unused if block in self.marked else self.blank).append(block)

    def drain_limbo(self) -> None:
        """Blocks leave that no pending step may use."""
        pending = self.pool.pending
        while self.limbo and (not pending or self.limbo[0][1] < pending[0].id):
            self.leave(self.limbo.pop(0)[0])

    def drop_raw(self, blocks: list[int]) -> None:
        """A raw reference of each goes away."""
        for block in blocks:
            self.raw[block] -= 1
            self.release(block)

    def out_of_blocks(
        self, call: str, needed: int, watermark: int = 0, row: int = -1, handle: int = -1, lost: int = 0
    ) -> None:
        """Refuse a call; `lost` evictable blocks are its own."""
        evictable = len(self.evictable) - lost
        short_by = needed + watermark - len(self.blank) - evictable
        where = f" at row {row}" if row >= 0 else ""
        raise OutOfBlocks(
            f"[{call}] {needed} blocks are needed{where}, {short_by} too many: {len(self.blank)} free, "
            f"{evictable} evictable, {len(self.limbo)} in limbo, watermark {watermark}",
            needed=needed,
            short_by=short_by,
            row=row,
            handle=handle,
            blank=len(self.blank),
            evictable=evictable,
            limbo=len(self.limbo),
            arena=self.number,
        )

    def figures(self) -> dict[str, int]:
        """What statistics say of the blocks."""
        return {
            "num_blocks": self.num_blocks,
            "reserved": self.reserved,
            "blank": len(self.blank),
            "evictable": len(self.evictable),
            "limbo": len(self.limbo),
            "used": self.used(),
            "shared": sum(count > 1 for count in self.references().values()),
            **self.counters,
        }


def _judge(blocks: list[int], call: str, refusal: Callable[[int], Exception | None]) -> None:
    """Refuse the first block that stands twice or for which there is a refusal."""
    for k, block in enumerate(blocks):
        error = refusal(block)
        if block in blocks[:k]:
            kind = DoubleFree if call == "release" else ValueError
            error = kind(f"[{call}] block stands twice ({block})")
        if error is not None:
            raise error


class ModelReferences:
    """See `kvpool._core.References`."""

    def __init__(self, blocks: ModelBlocks) -> None:
        self.blocks = blocks

    def __getitem__(self, block: int) -> int:
        """References of a block."""
        return int(self.blocks.refcounts([args.integer("references", "block", block)])[0])


class ModelBlocks:
    """The calls on the blocks of an arena, see `kvpool._core.BlockAPI`."""

    def __init__(self, arena: Arena) -> None:
        self.pool, self._arena = arena.pool, arena

    def arena(self, arena: int) -> ModelBlocks:
        """The blocks of another arena."""
        return type(self)(self.pool.arena_of("blocks", arena))

    @property
    def references(self) -> ModelReferences:
        """References of each block, by its id."""
        return ModelReferences(self)

    @property
    def num_free(self) -> int:
        """Blocks that `take` can give."""
        return self._arena.available()

    @property
    def num_blank(self) -> int:
        """Of these, those that hold nothing."""
        self.pool.refuse_closed("num_blank")
        self.pool.drain()
        return len(self._arena.blank)

    @property
    def usage(self) -> float:
        """Share of the blocks that are in use."""
        return self._arena.used() / (self._arena.num_blocks - self._arena.reserved)

    # ---- what a call names --------------------------------------------------------------------------------

    def _ids(self, call: str, values: Any) -> list[int]:
        return args.block_ids(call, values, self._arena.num_blocks, self._arena.reserved)

    def _all_named(self, call: str, ids: Any) -> list[int]:
        """The blocks that a call names."""
        named, most = args.one_or_many(call, "block id", ids, ("int32", "int64")), self._arena.num_blocks
        for block in named:
            if not 0 <= block < most:
                raise IndexError(f"[{call}] block id is out of range ({block}), the pool has {most} blocks")
        return named

    def _named(self, call: str, ids: Any) -> list[int]:
        """The same without reserved ones."""
        return [block for block in self._all_named(call, ids) if block >= self._arena.reserved]

    def _refuse_cache(self, call: str) -> None:
        if self.pool.has_cache:
            raise ValueError(f"[{call}] the prefix cache looks after the content of blocks in this pool")

    def _chain(self, *words: object) -> None:
        self.pool.chain(self._arena.number, *words)

    # ---- references ---------------------------------------------------------------------------------------

    def alloc(self, n: int | None = None, out: Any = None) -> Any:
        """Take one block and return its id, or `n` blocks as int32 ``[n]``; raw = refcount = 1."""
        blocks = self._alloc(n, lambda count: None if out is None else args.check_out("alloc", out, count))
        if out is not None:
            out[: len(blocks)] = blocks
            return out
        return blocks[0] if n is None else np.array(blocks, np.int32)

    @public_call
    def _alloc(self, n: int | None, check_out: Callable[[int], None]) -> list[int]:
        count, one = 1 if n is None else args.count("alloc", "n", n), self._arena
        check_out(count)
        lost = len(one.evictable) if self.pool.has_cache else 0
        if count > one.available() - lost:
            one.out_of_blocks("alloc", count, lost=lost)
        blocks = [one.take() for _ in range(count)]
        one.raw.update(dict.fromkeys(blocks, 1))
        self._chain("alloc", *blocks)
        return blocks

    @public_call
    def incref(self, ids: Any) -> None:
        """Add one raw reference to blocks that have a reference; with a prefix cache, one of `alloc`."""
        blocks, one = self._ids("incref", ids), self._arena
        for block in blocks:
            if self.pool.has_cache and not one.raw.get(block):
                raise ValueError(f"[incref] block was not taken with alloc ({block})")
            if not one.refcount(block):
                raise DoubleFree(f"[incref] block has no reference ({block})")
            if one.refcount(block) >= MAX_REFCOUNT:
                raise OverflowError(f"[incref] block has too many references ({block}), the most is 2^30")
        for block in blocks:
            one.raw[block] = one.raw.get(block, 0) + 1
        self._chain("incref", *blocks)

    @public_call
    def decref(self, ids: Any) -> None:
        """Drop one raw reference of each block, in the order given."""
        self._drop("decref", ids)

    @public_call
    def free(self, ids: Any) -> None:
        """Drop the raw reference of blocks that nobody else uses."""
        self._drop("free", ids)

    def _drop(self, call: str, ids: Any) -> None:
        blocks, one = self._ids(call, ids), self._arena
        for block in blocks:
            if not one.raw.get(block):
                raise DoubleFree(f"[{call}] block has no raw reference ({block})")
            if call == "free" and one.refcount(block) > 1:
                raise ValueError(f"[free] block is shared ({block}), refcount {one.refcount(block)}")
        one.drop_raw(blocks)
        self._chain(call, *blocks)

    @public_call
    def evict(self, n: int) -> int:
        """Make blocks blank, what leaves first before, until `n` more are or none is evictable; returns how many."""
        one = self._arena
        count = min(args.count("evict", "n", n), len(one.evictable))
        wanted = len(one.blank) + count
        while len(one.blank) < wanted:
            one.evict_oldest()
        self._chain("evict", count)
        return count

    # ---- content that somebody else looks after -----------------------------------------------------------

    @public_call
    def take(self, n: int) -> tuple[list[int], int]:
        """Blank blocks, then the oldest committed ones, which are not noted as dropped."""
        self._refuse_cache("take")
        count, one = args.count("take", "n", n), self._arena
        if count > one.available():
            one.out_of_blocks("take", count)
        noted = len(one.dropped)
        blocks = [one.take() for _ in range(count)]
        evicted = len(one.dropped) - noted
        del one.dropped[noted:]
        one.raw.update(dict.fromkeys(blocks, 1))
        self._chain("take", *blocks)
        return blocks, evicted

    @public_call
    def take_block(self, block: int) -> None:
        """A blank block, wherever it is on the stack."""
        self._refuse_cache("take_block")
        block, one = args.integer("take_block", "block", block), self._arena
        if not 0 <= block < one.num_blocks:
            raise IndexError(f"[take_block] block is out of range ({block}), the pool has {one.num_blocks} blocks")
        if block not in one.blank:
            raise ValueError(f"[take_block] block is not blank ({block})")
        one.blank.remove(block)
        one.raw[block] = 1
        one.counters["allocs"] += 1
        one.note_peak()
        self._chain("take_block", block)

    @public_call
    def touch(self, ids: Any, *, blank: bool = False) -> None:
        """One raw reference more on blocks in use and on committed ones, with `blank` on all free ones."""
        args.boolean("touch", "blank", blank)
        self._refuse_cache("touch")
        blocks, one = self._named("touch", ids), self._arena
        empty = [block for block in one.blank + one.unused if blank and block not in one.marked]

        def refusal(block: int) -> Exception | None:
            if not one.refcount(block) and block not in one.marked and block not in empty:
                return ValueError(f"[touch] block is neither in use nor cached ({block})")
            if one.refcount(block) >= MAX_REFCOUNT:
                return OverflowError(f"[touch] block has too many references ({block}), the most is 2^30")
            return None

        _judge(blocks, "touch", refusal)
        for block in blocks:
            one.raw[block] = one.raw.get(block, 0) + 1
            one.blank = [b for b in one.blank if b != block]
            one.unused = [b for b in one.unused if b != block]
            one.limbo = [(b, fence) for b, fence in one.limbo if b != block]
            one.counters["allocs"] += block in empty
        one.note_peak()
        self._chain("touch", blank, *blocks)

    @public_call
    def release(self, ids: Any, *, oldest: bool = False) -> None:
        """One raw reference less; who is named first is taken first."""
        self._refuse_cache("release")
        blocks, one = self._named("release", ids), self._arena
        if oldest and self.pool.pending:
            raise PlanStateError(f"[release] a step is pending ({self.pool.pending[-1].id})")

        def refusal(block: int) -> Exception | None:
            return None if one.raw.get(block) else DoubleFree(f"[release] block has no raw reference ({block})")

        _judge(blocks, "release", refusal)
        last_first = [block for block in blocks[::-1] if oldest or block not in one.marked]
        one.drop_raw(last_first + [block for block in blocks if block not in last_first])
        if oldest:
            ended = [block for block in blocks if block in one.unused]
            one.unused = ended + [block for block in one.unused if block not in ended]
        self._chain("release", oldest, *blocks)

    @public_call
    def mark_cached(self, ids: Any) -> None:
        """Blocks with a reference and without content become immutable."""
        self._refuse_cache("mark_cached")
        blocks, one = self._named("mark_cached", ids), self._arena

        def refusal(block: int) -> Exception | None:
            if not one.refcount(block):
                return DoubleFree(f"[mark_cached] block has no reference ({block})")
            if block in one.marked:
                return ValueError(f"[mark_cached] block is cached already ({block})")
            return ValueError(f"[mark_cached] block was dropped ({block})") if block in one.dropped else None

        _judge(blocks, "mark_cached", refusal)
        one.marked.update(blocks)
        self._chain("mark_cached", *blocks)

    @public_call
    def uncache(self, ids: Any, *, keep_place: bool = False) -> None:
        """Blocks lose their content; evictable ones stay where they are, or are blank, the first named on top."""
        args.boolean("uncache", "keep_place", keep_place)
        self._refuse_cache("uncache")
        blocks, one = self._named("uncache", ids), self._arena
        _judge(blocks, "uncache", lambda block: None)
        for block in blocks[::-1]:
            if block in one.unused and block in one.marked:
                one.counters["evictions"] += 1
                if not keep_place:
                    one.unused.remove(block)
                    one.blank.append(block)
            one.marked.discard(block)
        self._chain("uncache", keep_place, *blocks)

    @public_call
    def is_cached(self, ids: Any) -> np.ndarray:
        """Whether blocks are cached, or will be when they are released."""
        self._refuse_cache("is_cached")
        return np.array([block in self._arena.marked for block in self._all_named("is_cached", ids)], bool)

    @public_call
    def drain_evicted(self) -> np.ndarray:
        """Return the evicted blocks noted since the last call, oldest note first, int32."""
        self._refuse_cache("drain_evicted")
        dropped, self._arena.dropped = self._arena.dropped, []
        self._chain("drain_evicted", *dropped)
        return np.array(dropped, np.int32)

    # ---- what is read -------------------------------------------------------------------------------------

    @public_call
    def refcount(self, block: int) -> int:
        """Return table entries plus raw references of a block."""
        args.integer("refcount", "block id", block)
        return self._arena.refcount(self._ids("refcount", block)[0])

    @public_call
    def refcounts(self, ids: Any) -> np.ndarray:
        """References of blocks."""
        return np.array([self._arena.refcount(block) for block in self._all_named("refcounts", ids)], np.int32)

    @public_call
    def free_order(self, n: int | None = None) -> np.ndarray:
        """Who would be taken next."""
        order = self._arena.blank[::-1] + ([] if self.pool.has_cache else self._arena.unused)
        return np.array(order if n is None else order[: args.count("free_order", "n", n)], np.int32)

    @public_call
    def refcount_histogram(self) -> np.ndarray:
        """Return how many unreserved blocks have each refcount, int64 ``[max refcount + 1]``."""
        references, one = self._arena.references(), self._arena
        return np.bincount([references[block] for block in range(one.reserved, one.num_blocks)])
