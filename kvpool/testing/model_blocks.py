"""Blocks and sequences as `kvpool.testing.model` counts them.

`BlockSet` has the calls on blocks by id. It is what a pool of one table has, and each arena of a pool with layer
groups. The sequences over them follow below.
"""

from __future__ import annotations

import functools
import zlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvpool.errors import (
    CapacityExceeded,
    DoubleFree,
    ForeignHandle,
    KVPoolError,
    OutOfBlocks,
    OutOfSequences,
    PlanStateError,
    PoolClosed,
    StaleHandle,
)
from kvpool.stats import PoolOptions
from kvpool.testing import model_args as args
from kvpool.testing.model_plan import ModelPlan, Sequence

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

    Who has one says what names a block (`_names`), which steps are pending, and what a public call
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

    def _names(self) -> list[int]:
        """A block for every table entry that names it, and whatever else of the pool does."""
        raise NotImplementedError

    def _has_own_cache(self) -> bool:
        """Whether the pool looks after the content of blocks."""
        raise NotImplementedError

    def _refcount(self, block: int) -> int:
        return self._raw.get(block, 0) + self._names().count(block)

    def _references(self) -> Counter[int]:
        """Blocks that have a reference, and how many."""
        return Counter(self._names()) + Counter(self._raw)

    def _available(self) -> int:
        return len(self._blank) + len(self._lru)

    def _used(self) -> int:
        return self.num_blocks - self._reserved - self._available() - len(self._limbo)

    def _note_peak(self) -> None:
        self._counters["peak_used"] = max(self._counters["peak_used"], self._used())

    def _evict_oldest(self) -> int:
        block = self._lru.pop(0)
        if block in self._committed:  # else `uncache` left it in its place
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
        evicted = len(self._committed & set(self._lru[: max(count - len(self._blank), 0)]))
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
    def _blocks_touch(self, ids: Any, *, blank: bool = False) -> None:
        """One raw reference more on blocks in use and on committed ones, with `blank` on all free ones."""
        args.boolean("touch", "blank", blank)
        self._refuse_own_cache("touch")
        blocks = self._named("touch", ids)
        empty = [block for block in self._blank + self._lru if blank and block not in self._committed]

        def refusal(block: int) -> Exception | None:
            if not self._refcount(block) and block not in self._committed and block not in empty:
                return ValueError(f"[touch] block is neither in use nor cached ({block})")
            if self._refcount(block) >= MAX_REFCOUNT:
                return OverflowError(f"[touch] block has too many references ({block}), the most is 2^30")
            return None

        _judge(blocks, "touch", refusal)
        for block in blocks:
            self._raw[block] = self._raw.get(block, 0) + 1
            self._blank = [b for b in self._blank if b != block]
            self._lru = [b for b in self._lru if b != block]
            self._limbo = [(b, fence) for b, fence in self._limbo if b != block]
            self._counters["allocs"] += block in empty
        self._note_peak()
        self._chain("touch", blank, *blocks)

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
    def _blocks_uncache(self, ids: Any, *, keep_place: bool = False) -> None:
        """Blocks lose their content; evictable ones stay where they are, or are blank, the first named on top."""
        args.boolean("uncache", "keep_place", keep_place)
        self._refuse_own_cache("uncache")
        blocks = self._named("uncache", ids)
        _judge(blocks, "uncache", lambda block: None)
        for block in blocks[::-1]:
            if block in self._lru and block in self._committed:
                self._counters["evictions"] += 1
                if not keep_place:
                    self._lru.remove(block)
                    self._blank.append(block)
            self._committed.discard(block)
        self._chain("uncache", keep_place, *blocks)

    @public_call
    def _blocks_is_cached(self, ids: Any) -> np.ndarray:
        """Whether blocks are cached, or will be when they are released."""
        self._refuse_own_cache("is_cached")
        return np.array([block in self._committed for block in self._all_named("is_cached", ids)], bool)

    @public_call
    def _blocks_reference(self, block: int) -> int:
        """References of a block."""
        return self._refcount(self._all_named("references", args.integer("references", "block", block))[0])

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
        references = self._references()
        return np.bincount([references[block] for block in range(self._reserved, self.num_blocks)])


class Part:
    """Calls that stand on an object of their own: its `alloc` is `_blocks_alloc` of a pool, or of an arena."""

    def __init__(self, pool: Any, name: str) -> None:
        self._pool, self._name = pool, name

    def __getattr__(self, call: str) -> Callable:
        return getattr(self._pool, f"_{self._name}_{call}")


class ModelReferences(Part):
    """See `kvpool._core.References`."""

    def __getitem__(self, block: int) -> int:
        """References of a block."""
        count: int = self._pool._blocks_reference(block)
        return count


class ModelBlocks(Part):
    """See `kvpool._core.BlockAPI`."""

    @property
    def references(self) -> ModelReferences:
        """References of each block, by its id."""
        return ModelReferences(self._pool, "blocks")

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


SLOT_BITS, GENERATION_BITS, NUM_TAGS = 20, 32, 2047
MAX_GENERATION = 2**GENERATION_BITS - 1

_live_tags: set[int] = set()


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
    rows: list[Any]  #: of `Row`
    copies: list[Any]  #: (source, destination, tokens)
    noted: bool = False

    def held(self) -> list[int]:
        """Blocks that this step keeps alive, in the order the holds were made."""
        return [old for row in self.rows for _, old, _ in row.replaced]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class BlockModel(BlockSet):
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
        args.boolean("Pool", "in_order", in_order)
        if seed is not None:
            args.integer("Pool", "seed", seed, 0, 2**64 - 1)
        self.num_blocks = num_blocks
        self.block_size = block_size
        most = args.integer("Pool", "max_blocks_per_seq", max_blocks_per_seq, 1, 2**31 - 1)
        self.options = PoolOptions(
            num_blocks, block_size, max_seqs, most, reserved_blocks, watermark, in_order, seed or 0, False, 0
        )
        self._reserved = reserved_blocks
        self._tag = self._take_tag()
        self._closed = False
        self._next_step = 1
        self._generations: dict[int, int] = {}
        self._count()
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
        self._empty_blocks()
        self._sequences: dict[int, Sequence] = {}  # slot -> sequence
        self._free_slots = deque(
            s for s in range(self.options.max_seqs) if self._generations.get(s, 0) <= MAX_GENERATION
        )
        self._pending: list[Step] = []  # oldest first

    def _refuse_closed(self, call: str) -> None:
        if self._closed:
            raise PoolClosed(f"[{call}] the pool was shut down")

    def _drain(self) -> None:
        """Close the sequences whose close was deferred."""
        raise NotImplementedError

    @property
    def blocks(self) -> ModelBlocks:
        """Blocks by id, of arena 0."""
        return self._blocks_arena(0)

    def _names(self) -> list[int]:
        return [block for seq in self._sequences.values() for block in seq.table]

    def _arena(self, call: str, arena: Any) -> BlockSet:
        args.integer(call, "arena", arena, 0, 0)
        return self

    def _has_own_cache(self) -> bool:
        return self.options.prefix_cache

    def _local(self, handle: int) -> int:
        return handle & (2 ** (SLOT_BITS + GENERATION_BITS) - 1)

    def _chain(self, *words: object) -> None:
        """Add a successful call to the digest."""
        self._digest = zlib.crc32(repr(words).encode(), self._digest)


class SequenceModel(BlockModel):
    """`BlockModel` with sequences; `StepModel` adds steps."""

    def _made(self, handle: int) -> Sequence | None:
        """The sequence of a handle that has blocks, whatever its state."""
        seq = self._sequences.get(handle & (2**SLOT_BITS - 1))
        return seq if seq is not None and seq.handle == handle else None

    def _find(self, handle: int, any_: bool = False) -> Sequence | None:
        """The open sequence of a handle, with `any_` also one that is loaded."""
        seq = self._made(handle)
        return None if seq is None or seq.is_closed or (seq.is_loading and not any_) else seq

    def _sequence(self, call: str, handle: int, any_: bool = False) -> Sequence:
        if handle < 0:
            raise ValueError(f"[{call}] handle is negative ({handle})")
        seq = self._find(handle, any_)
        if seq is None and self._find(handle, True) is not None:
            raise PlanStateError(f"[{call}] the sequence is being loaded ({handle})")
        if seq is None and handle >> (SLOT_BITS + GENERATION_BITS) != self._tag:
            raise ForeignHandle(f"[{call}] handle of another pool ({handle})")
        if seq is None:
            raise StaleHandle(f"[{call}] handle of a closed sequence ({handle})")
        return seq

    def _batch(self, call: str, handles: Any, any_: bool = False) -> list[Sequence]:
        return [self._sequence(call, handle, any_) for handle in args.handles(call, handles)]

    def _one(self, call: str, handle: Any, any_: bool = False) -> Sequence:
        return self._sequence(call, args.integer(call, "handle", handle, 0, args.MAX_INT64), any_)

    def _create(self, num_tokens: int, table: list[int]) -> Sequence:
        slot = self._free_slots.popleft()
        generation = self._generations.setdefault(slot, 0)
        handle = self._tag << (SLOT_BITS + GENERATION_BITS) | generation << SLOT_BITS | slot
        seq = self._sequences[slot] = Sequence(handle, num_tokens, table)
        return seq

    def _refuse_slots(self, call: str, n: int) -> None:
        if n > len(self._free_slots):
            raise OutOfSequences(
                f"[{call}] {n} sequence slots are needed, {len(self._free_slots)} are free, "
                f"max_seqs is {self.options.max_seqs}"
            )

    def _refuse_blank(self, call: str, num_tokens: int) -> int:
        """Return how many blocks a sequence for so many tokens takes, if there are so many."""
        need = ceil_div(args.count(call, "num_tokens", num_tokens), self.block_size)
        if need > self.options.max_blocks_per_seq:
            raise CapacityExceeded(f"[{call}] {need} blocks, max_blocks_per_seq is {self.options.max_blocks_per_seq}")
        if need and need + self.options.watermark > self._available():
            self._out_of_blocks(call, need, self.options.watermark)
        self._refuse_slots(call, 1)
        return need

    def _open_blank(self, num_tokens: int) -> Sequence:
        need = self._refuse_blank("open", num_tokens)
        seq = self._create(0, [self._take() for _ in range(need)])
        self._chain("open", num_tokens, self._local(seq.handle), *seq.table)
        return seq

    def _fork_in(self, parent: Sequence) -> tuple[int, int] | None:
        raise NotImplementedError

    @public_call
    def fork(self, handle: int, n: int = 1) -> np.ndarray:
        """Open `n` children that share the parent's written blocks; returns their handles, int64 ``[n]``."""
        parent = self._one("fork", handle)
        n = args.count("fork", "n", n)
        self._refuse_slots("fork", n)
        children = []
        for _ in range(n):
            child = self._create(parent.num_tokens, [])
            child.ancestors = [*parent.ancestors, (parent.handle, self._next_step - 1)]
            child.point = parent.point
            self._share_tables(parent, child)
            children.append(child.handle)
        self._chain("fork", self._local(parent.handle), *map(self._local, children))
        return np.array(children, np.int64)

    def _share_tables(self, parent: Sequence, child: Sequence) -> None:
        """A child has what its parent has written."""
        child.table = parent.table[: ceil_div(parent.num_tokens, self.block_size)]
        child.root, child.tokens, child.published = parent.root, list(parent.tokens), parent.published
        child.evicted, child.forked_in = parent.evicted, self._fork_in(parent)

    def _pop_blocks(self, seq: Sequence, length: int) -> None:
        """Drop table entries from the end until `length` are left."""
        while len(seq.table) > length:
            self._release(seq.table.pop())

    def _pop_all(self, seq: Sequence) -> None:
        self._pop_blocks(seq, 0)

    @public_call
    def truncate(self, handles: Any, lens: Any) -> None:
        """Shorten sequences to `lens` tokens; the blocks past them are released, youngest first."""
        batch = self._batch("truncate", handles)
        lengths = args.per_row("truncate", "lens", lens, len(batch))
        for seq, length in zip(batch, lengths, strict=True):
            if not seq.point <= length <= seq.num_tokens + seq.evicted:
                raise ValueError(f"[truncate] len is {length}, {seq.point} .. {seq.num_tokens + seq.evicted} is legal")
            if any(row.handle == seq.handle for step in self._pending for row in step.rows):
                raise PlanStateError(f"[truncate] handle is a row of a pending plan ({seq.handle})")
            self._refuse_gone(seq, length)
        for seq, length in zip(batch, lengths, strict=True):
            self._shorten(seq, length)
        self._chain("truncate", *(self._local(seq.handle) for seq in batch), *lengths)

    def _refuse_gone(self, seq: Sequence, length: int) -> None:
        """Refuse a length at which a query would read what was let go."""

    def _shorten(self, seq: Sequence, length: int) -> None:
        left = length - seq.evicted
        keep = ceil_div(left, self.block_size)
        seq.epoch += keep < len(seq.table)
        self._pop_blocks(seq, keep)
        seq.num_tokens = left
        self._forget_tokens(seq, left)
        seq.published = min(seq.published, left // self.block_size)

    def _forget_tokens(self, seq: Sequence, left: int) -> None:
        """What was told of a sequence, but for its first tokens."""
        del seq.tokens[left:]

    @public_call
    def loaded(self, handle: int, n: int) -> bool:
        """End the load of a sequence: its first `n` tokens are there, 0: no more than before. Closes a closed one."""
        args.integer("loaded", "handle", handle, args.MIN_INT64, args.MAX_INT64)
        n = args.count("loaded", "n", n)
        seq = self._made(handle)
        if seq is None or not seq.is_loading:
            self._sequence("loaded", handle)
            raise PlanStateError(f"[loaded] the sequence is not being loaded ({handle})")
        least, most = self._loadable(seq)
        if n and not least <= n <= most:
            raise ValueError(f"[loaded] n is {n}, 0 or {least} .. {most} is legal")
        seq.is_loading = False
        self._chain("loaded", self._local(handle), n)
        if seq.is_closed:
            seq.is_closed = False
            self._close(seq)
            return False
        self._take_over(seq, n)
        return True

    def _loadable(self, seq: Sequence) -> tuple[int, int]:
        """The lengths that a load may end with."""
        return seq.num_tokens, self._capacity(seq)

    def _take_over(self, seq: Sequence, n: int) -> None:
        """The bytes of `n` tokens were loaded."""
        seq.num_tokens = n or seq.num_tokens

    def _close(self, seq: Sequence) -> None:
        if seq.is_loading:
            seq.is_closed = True
            self._chain("close", self._local(seq.handle))
            return
        slot = seq.handle & (2**SLOT_BITS - 1)
        self._pop_all(seq)
        del self._sequences[slot]
        self._generations[slot] += 1
        if self._generations[slot] <= MAX_GENERATION:
            self._free_slots.append(slot)
        self._chain("close", self._local(seq.handle))

    @public_call
    def close(self, handles: Any) -> None:
        """Close sequences in the order given; each one's blocks are released youngest first."""
        for seq in self._batch("close", handles, any_=True):
            self._close(seq)

    @public_call
    def close_finished(self, handles: Any, mask: Any) -> int:
        """Close the rows whose mask byte is not zero; returns how many."""
        batch = self._batch("close_finished", handles, any_=True)
        finished = args.mask("close_finished", mask, len(batch))
        for seq, is_finished in zip(batch, finished, strict=True):
            if is_finished:
                self._close(seq)
        return sum(map(bool, finished))

    def defer_close(self, handle: int) -> None:
        """Close this sequence at the beginning of the next call; a dead handle is skipped then."""
        self._deferred.append(args.integer("defer_close", "handle", handle, 0, args.MAX_INT64))

    def _drain(self) -> None:
        while self._deferred:
            seq = self._find(self._deferred.pop(0), True)
            if seq is not None:
                self._close(seq)

    @public_call
    def reset(self) -> None:
        """Forget every sequence, reference, pending plan and committed bit; generations go on."""
        self._reset()

    def _reset(self) -> None:
        for slot in self._sequences:
            self._generations[slot] += 1
        for step in self._pending:
            step.plan._pending = False
        self._dropped.extend(sorted(self._committed))
        self._empty()
        self._chain("reset")

    @public_call
    def table(self, handle: int, group: int = 0) -> np.ndarray:
        """Return the blocks of a sequence, int32 ``[blocks]``, a copy."""
        seq = self._one("table", handle, True)
        args.integer("table", "group", group, 0, 0)
        return np.array(seq.table, np.int32)

    @public_call
    def num_tokens(self, handle: int) -> int:
        """Return the length of a sequence in tokens, evicted ones included."""
        seq = self._one("num_tokens", handle, True)
        return seq.num_tokens + seq.evicted

    @public_call
    def capacity(self, handle: int) -> int:
        """Return the tokens that the blocks of a sequence can hold."""
        return self._capacity(self._one("capacity", handle, True))

    def _capacity(self, seq: Sequence) -> int:
        return len(seq.table) * self.block_size

    @public_call
    def is_open(self, handle: int) -> bool:
        """Return whether the handle names an open sequence of this pool."""
        return self._find(args.integer("is_open", "handle", handle, 0, args.MAX_INT64), True) is not None
