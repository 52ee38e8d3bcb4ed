"""Blocks as `kvpool.testing.model` counts them, and the calls on them by id.

`BlockSet` is what a pool of one table has, and each arena of a pool with layer groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from kvpool.errors import DoubleFree, OutOfBlocks, PlanStateError
from kvpool.testing import model_args as args

MAX_REFCOUNT = 2**30


def public_call(method: Callable) -> Callable:
    """Every public call: read the arguments, refuse a closed pool, drain the deferred closes, then run.

    Reading may run the caller's code; a call that this code makes is an earlier call.
    """

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        name = method.__name__.lstrip("_").removeprefix("blocks_").removeprefix("prefix_")
        self._refuse_closed(name)
        arguments = tuple(args.own(name, value) for value in arguments)
        options = {key: args.own(name, value) for key, value in options.items()}
        self._refuse_closed(name)
        self._drain()
        return method(self, *arguments, **options)

    return call


def _judge(blocks: list[int], call: str, refusal: Callable[[int], Exception | None]) -> None:
    """Refuse the first block that stands twice or for which there is a refusal."""
    for k, block in enumerate(blocks):
        error = refusal(block)
        if block in blocks[:k]:
            kind = DoubleFree if call == "release" else ValueError
            error = kind(f"[{call}] block stands twice ({block})")
        if error is not None:
            raise error


class BlockSet:
    """Blocks with ids ``_reserved .. num_blocks - 1``: references, the blank ones, the evictable ones, limbo.

    Who has one says what names a block besides (`_named_in_tables`), which steps are pending, and what a public call
    does before it reads anything (`public_call`).
    """

    _number = 0  # of the arena
    num_blocks: int
    _reserved: int
    _pending: list[Any]  # steps, oldest first

    def _count(self) -> None:
        """Counters, which a reset does not change."""
        counted = ("cow_copies", "cow_tokens", "allocs", "evictions", "peak_used", "evicted_tokens")
        self._counters = dict.fromkeys(counted, 0)
        self._dropped: list[int] = []

    def _empty_blocks(self) -> None:
        """Every block is blank."""
        self._blank = list(range(self.num_blocks - 1, self._reserved - 1, -1))  # top = end
        self._lru: list[int] = []  # oldest first
        self._limbo: list[tuple[int, int]] = []  # (block, fence), oldest first
        self._raw: dict[int, int] = {}
        self._holds: list[int] = []  # one entry per hold
        self._committed: set[int] = set()

    def _refuse_closed(self, call: str) -> None:
        raise NotImplementedError

    def _drain(self) -> None:
        """Close the sequences whose close was deferred."""
        raise NotImplementedError

    def _chain(self, *words: object) -> None:
        """Add a successful call to the digest."""
        raise NotImplementedError

    def _arena(self, call: str, arena: Any) -> BlockSet:
        """An arena of the pool."""
        raise NotImplementedError

    def _blocks_arena(self, arena: int) -> ModelBlocks:
        return ModelBlocks(self._arena("blocks", arena), "blocks")

    def _figures(self) -> dict[str, int]:
        """What statistics say of the blocks."""
        return {
            "num_blocks": self.num_blocks,
            "reserved": self._reserved,
            "blank": len(self._blank),
            "evictable": len(self._lru),
            "limbo": len(self._limbo),
            "used": self._used(),
            **self._counters,
        }

    # ---- who has which block ------------------------------------------------------------------------------

    def _named_in_tables(self, block: int) -> int:
        """How many table entries name a block."""
        raise NotImplementedError

    def _referenced(self) -> set[int]:
        """Blocks with a reference."""
        raise NotImplementedError

    def _has_own_cache(self) -> bool:
        """Whether the pool looks after the content of blocks."""
        raise NotImplementedError

    def _refcount(self, block: int) -> int:
        return self._raw.get(block, 0) + self._named_in_tables(block)

    def _available(self) -> int:
        return len(self._blank) + len(self._lru)

    def _used(self) -> int:
        return self.num_blocks - self._reserved - self._available() - len(self._limbo)

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
        return args.block_ids(call, values, self.num_blocks, self._reserved)

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
            blank=len(self._blank),
            evictable=len(self._lru) - lost,
            limbo=len(self._limbo),
            arena=self._number,
        )

    def _drop_raw(self, blocks: list[int]) -> None:
        for block in blocks:
            self._raw[block] -= 1
            self._release(block)

    def _all_named(self, call: str, ids: Any) -> list[int]:
        """The blocks that a call names."""
        named = args.one_or_many(call, "block id", ids, ("int32", "int64"))
        for block in named:
            if not 0 <= block < self.num_blocks:
                raise IndexError(f"[{call}] block id is out of range ({block}), the pool has {self.num_blocks} blocks")
        return named

    def _named(self, call: str, ids: Any) -> list[int]:
        """The same without reserved ones."""
        return [block for block in self._all_named(call, ids) if block >= self._reserved]

    def _refuse_own_cache(self, call: str) -> None:
        if self._has_own_cache():
            raise ValueError(f"[{call}] the prefix cache looks after the content of blocks in this pool")

    def _blocks_alloc(self, n: int | None = None, out: np.ndarray | None = None) -> int | np.ndarray:
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
    def _blocks_incref(self, ids: Any) -> None:
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

    @public_call
    def _blocks_decref(self, ids: Any) -> None:
        """Drop one raw reference of each block, in the order given."""
        self._drop_named("decref", ids)

    @public_call
    def _blocks_free(self, ids: Any) -> None:
        """Drop the raw reference of blocks that nobody else uses."""
        self._drop_named("free", ids)

    def _drop_named(self, call: str, ids: Any) -> None:
        blocks = self._ids(call, ids)
        for block in blocks:
            if not self._raw.get(block):
                raise DoubleFree(f"[{call}] block has no raw reference ({block})")
            if call == "free" and self._refcount(block) > 1:
                raise ValueError(f"[free] block is shared ({block}), refcount {self._refcount(block)}")
        self._drop_raw(blocks)
        self._chain(call, *blocks)

    @public_call
    def _blocks_evict(self, n: int) -> int:
        """Turn up to `n` evictable blocks into blank ones, oldest first; returns how many."""
        count = min(args.count("evict", "n", n), len(self._lru))
        for _ in range(count):
            self._blank.append(self._evict_oldest())
        self._chain("evict", count)
        return count

    @public_call
    def _blocks_take(self, n: int) -> tuple[list[int], int]:
        """Blank blocks, then the oldest committed ones, which are not noted as dropped."""
        self._refuse_own_cache("take")
        count = args.count("take", "n", n)
        if count > self._available():
            self._out_of_blocks("take", count)
        evicted = max(count - len(self._blank), 0)
        blocks = [self._take() for _ in range(count)]
        del self._dropped[len(self._dropped) - evicted :]
        self._raw.update(dict.fromkeys(blocks, 1))
        self._chain("take", *blocks)
        return blocks, evicted

    @public_call
    def _blocks_take_block(self, block: int) -> None:
        """A blank block, wherever it is on the stack."""
        self._refuse_own_cache("take_block")
        block = args.integer("take_block", "block", block)
        if not 0 <= block < self.num_blocks:
            raise IndexError(f"[take_block] block is out of range ({block}), the pool has {self.num_blocks} blocks")
        if block not in self._blank:
            raise ValueError(f"[take_block] block is not blank ({block})")
        self._blank.remove(block)
        self._raw[block] = 1
        self._counters["allocs"] += 1
        self._note_peak()
        self._chain("take_block", block)

    @public_call
    def _blocks_touch(self, ids: Any) -> None:
        """One raw reference more on blocks in use and on committed ones."""
        self._refuse_own_cache("touch")
        blocks = self._named("touch", ids)

        def refusal(block: int) -> Exception | None:
            if not self._refcount(block) and block not in self._committed:
                return ValueError(f"[touch] block is neither in use nor cached ({block})")
            if self._refcount(block) >= MAX_REFCOUNT:
                return OverflowError(f"[touch] block has too many references ({block}), the most is 2^30")
            return None

        _judge(blocks, "touch", refusal)
        for block in blocks:
            self._raw[block] = self._raw.get(block, 0) + 1
            self._lru = [b for b in self._lru if b != block]
            self._limbo = [(b, fence) for b, fence in self._limbo if b != block]
        self._note_peak()
        self._chain("touch", *blocks)

    @public_call
    def _blocks_release(self, ids: Any, *, oldest: bool = False) -> None:
        """One raw reference less; who is named first is taken first."""
        self._refuse_own_cache("release")
        blocks = self._named("release", ids)
        if oldest and self._pending:
            raise PlanStateError(f"[release] a step is pending ({self._pending[-1].id})")

        def refusal(block: int) -> Exception | None:
            held = self._raw.get(block)
            return None if held else DoubleFree(f"[release] block has no raw reference ({block})")

        _judge(blocks, "release", refusal)
        last_first = [block for block in blocks[::-1] if oldest or block not in self._committed]
        first_first = [block for block in blocks if block not in last_first]
        self._drop_raw(last_first + first_first)
        if oldest:
            ended = [block for block in blocks if block in self._lru]
            self._lru = ended + [block for block in self._lru if block not in ended]
        self._chain("release", oldest, *blocks)

    @public_call
    def _blocks_mark_cached(self, ids: Any) -> None:
        """Blocks with a reference and without content become immutable."""
        self._refuse_own_cache("mark_cached")
        blocks = self._named("mark_cached", ids)

        def refusal(block: int) -> Exception | None:
            if not self._refcount(block):
                return DoubleFree(f"[mark_cached] block has no reference ({block})")
            if block in self._committed:
                return ValueError(f"[mark_cached] block is cached already ({block})")
            return ValueError(f"[mark_cached] block was dropped ({block})") if block in self._dropped else None

        _judge(blocks, "mark_cached", refusal)
        self._committed.update(blocks)
        self._chain("mark_cached", *blocks)

    @public_call
    def _blocks_uncache(self, ids: Any) -> None:
        """Blocks lose their content; evictable ones are blank, the first named on top."""
        self._refuse_own_cache("uncache")
        blocks = self._named("uncache", ids)
        _judge(blocks, "uncache", lambda block: None)
        for block in blocks[::-1]:
            self._committed.discard(block)
            if block in self._lru:
                self._lru.remove(block)
                self._blank.append(block)
                self._counters["evictions"] += 1
        self._chain("uncache", *blocks)

    @public_call
    def _blocks_refcounts(self, ids: Any) -> np.ndarray:
        """References of blocks."""
        return np.array([self._refcount(block) for block in self._all_named("refcounts", ids)], np.int32)

    @public_call
    def _blocks_free_order(self, n: int | None = None) -> np.ndarray:
        """Who would be taken next."""
        order = self._blank[::-1] + self._lru
        return np.array(order if n is None else order[: args.count("free_order", "n", n)], np.int32)

    @public_call
    def _blocks_drain_evicted(self) -> np.ndarray:
        """Return the evicted blocks noted since the last call, oldest note first, int32."""
        self._refuse_own_cache("drain_evicted")
        dropped, self._dropped = self._dropped, []
        self._chain("drain_evicted", *dropped)
        return np.array(dropped, np.int32)

    @public_call
    def _blocks_refcount(self, block: int) -> int:
        """Return table entries plus raw references of a block."""
        args.integer("refcount", "block id", block)
        return self._refcount(self._ids("refcount", block)[0])

    @public_call
    def _blocks_refcount_histogram(self) -> np.ndarray:
        """Return how many unreserved blocks have each refcount, int64 ``[max refcount + 1]``."""
        return np.bincount([self._refcount(b) for b in range(self._reserved, self.num_blocks)])


class Part:
    """Calls that stand on an object of their own: its `alloc` is `_blocks_alloc` of a pool, or of an arena."""

    def __init__(self, pool: Any, name: str) -> None:
        self._pool, self._name = pool, name

    def __getattr__(self, call: str) -> Callable:
        return getattr(self._pool, f"_{self._name}_{call}")


class ModelBlocks(Part):
    """See `kvpool._core.BlockAPI`."""

    @property
    def num_free(self) -> int:
        """Blocks that `take` can give."""
        return self._pool._available()

    @property
    def num_blank(self) -> int:
        """Of these, those that hold nothing."""
        self._pool._refuse_closed("num_blank")
        self._pool._drain()
        return len(self._pool._blank)

    @property
    def usage(self) -> float:
        """Share of the blocks that are in use."""
        return self._pool._used() / (self._pool.num_blocks - self._pool._reserved)
