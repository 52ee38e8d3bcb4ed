"""The state of `kvpool.testing.model`: arenas of blocks, layer groups, sequences, steps, and the pool that has them.

`Table` is what a sequence has in one group. A state group is a table of at most one entry of one slot. `ModelBlocks`
has the calls on blocks by id.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any, NoReturn

import numpy as np

from kvpool import errors
from kvpool.groups import Group
from kvpool.stats import PoolOptions
from kvpool.testing import model_args as args

MAX_GROUPS, MULTIPLES = 8, (1, 2, 4)
SLOT_BITS, LOCAL_BITS, NUM_TAGS = 20, 52, 2047
HOLE: list[int] = []  #: what a table has instead of an entry that was let go

_live_tags: set[int] = set()


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


reading_call = functools.partial(public_call, changes=False)


# ---- blocks ---------------------------------------------------------------------------------------------

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
        return not self.refcount(block) and block not in [*self.holds, *(one for one, _ in self.limbo)]

    def available(self) -> int:
        return len(self.blank) + len(self.evictable)

    def used(self) -> int:
        return self.num_blocks - self.reserved - self.available() - len(self.limbo)

    def note_peak(self) -> None:
        self.counters["peak_used"] = max(self.counters["peak_used"], self.used())

    def evict_oldest(self) -> None:
        """What leaves first does, for a blank block."""
        if self.pool.has_cache:
            if not self.pool.evict_for(self):
                raise errors.CorruptState(f"[evict] nothing may leave arena {self.number}, a call was judged wrongly")
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
        self, call: str, needed: int, watermark: int = 0, row: int = -1, handle: int = -1, lost: int = 0,
        room: int | None = None,
    ) -> NoReturn:  # fmt: skip
        """Refuse a call; `lost` evictable blocks are its own. There is `room` for so many, or for all that are free."""
        evictable = len(self.evictable) - lost
        short_by = needed + watermark - (len(self.blank) + evictable if room is None else room)
        state = {"blank": len(self.blank), "evictable": evictable, "limbo": len(self.limbo), "arena": self.number}
        message = f"[{call}] {needed} blocks are needed, {short_by} too many: {state}, watermark {watermark}"
        raise errors.OutOfBlocks(message, needed=needed, short_by=short_by, row=row, handle=handle, **state)


class ModelBlocks:
    """The calls on the blocks of an arena, see `kvpool._core.BlockAPI`."""

    def __init__(self, arena: Arena) -> None:
        self.pool, self._arena = arena.pool, arena
        self._not_raw: Refusal = errors.DoubleFree, "has no raw reference", lambda block: not arena.raw.get(block)
        self._unreferenced: Refusal = errors.DoubleFree, "has no reference", lambda block: not arena.refcount(block)

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
            args.refuse_duplicates(call, "block ids", named[: k + 1])
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
        one.add_raw(self._judged("incref", ids, not_taken, self._unreferenced))

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
        blocks = one.add_raw(self._judged_in_turn("touch", ids, unknown))
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


# ---- sequences ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Layers:
    """A group as the pool knows it: its block size and its arena are settled."""

    index: int
    kind: str
    group: Group
    block_size: int
    columns: int
    arena: Arena = field(repr=False)

    def first(self, p: int) -> int:
        """The first position that a query at position p reads, the kept ones apart."""
        if self.kind == "window":
            return p - self.group.size + 1
        return p - p % self.group.size if self.kind == "chunk" else 0

    def reads(self, p: int) -> set[int]:
        """The positions that a query at position p reads."""
        return set(range(max(self.first(p), 0), p + 1)) | set(range(min(self.group.keep, p + 1)))

    def needs(self, i: int, p: int) -> bool:
        """Whether a query at position p or later may read entry i, or it is kept for ever."""
        return i < ceil_div(self.group.keep, self.block_size) or (i + 1) * self.block_size > self.first(p)


@dataclass(eq=False)
class Table:
    entries: list[list[int]] = field(default_factory=list)
    epoch: int = 0
    evicted: int = 0  # tokens that left by eviction


@dataclass(eq=False)
class Sequence:
    handle: int
    num_tokens: int
    tables: list[Table]
    #: (handle forked from, newest step then, tokens that were done then), for all its ancestors
    ancestors: list[tuple[int, int, int]] = field(default_factory=list)
    point: int = 0  #: `num_tokens` when tokens were evicted last
    load: int | None = None  #: tokens that somebody writes into its blocks, until `loaded`
    is_closed: bool = False  #: closed since then
    #: what the prefix cache knows: a namespace's root, committed tokens, and how many base blocks hits may find
    root: int | None = None
    tokens: list[int] = field(default_factory=list)
    published: int = 0
    node: Any = field(default=None, repr=False)  #: of its last committed base block
    wanted: list[int] = field(default_factory=list)  #: where checkpoints are taken
    keep: Any = None  #: the directive of `open`
    ends: tuple[int, int] = (0, 0)  #: when a pin with a ttl is closed, and its number; 0: it has none


@dataclass(eq=False)
class Change:
    """What a step did to one row in one group."""

    replaced: list[tuple[int, list[int], list[int]]] = field(default_factory=list)  # index, old entry, new entry
    num_appended: int = 0


@dataclass(eq=False)
class Row:
    """What a step did to one sequence."""

    handle: int
    old_length: int
    length: int
    changes: list[Change]


@dataclass(eq=False)
class Step:
    id: int
    plan: Any = field(repr=False)
    rows: list[Row]
    copies: list[tuple[int, int, int, int]] = field(default_factory=list)  #: (group, source, destination, tokens)
    noted: bool = False  #: its `done` was called


class Judged:
    """An arena as it is when the rows that were judged before have replaced what they must."""

    def __init__(self, pool: PoolModel, arena: Arena) -> None:
        self.references, self.committed = arena.references(), arena.committed
        self.lost: Counter[int] = Counter()
        self.floors: dict[int, int] = {}  # block -> tokens that copies have still to read
        for src, _, tokens in pool.copies_in(arena):
            self.floors[src] = max(self.floors.get(src, 0), tokens)

    def is_own(self, block: int) -> bool:
        """Whether one row alone has the block then, and it is not committed."""
        return self.references[block] - self.lost[block] == 1 and block not in self.committed

    def may_write(self, entry: list[int], valid: int) -> bool:
        """Whether an entry may be written in place, behind so many tokens."""
        return all(self.is_own(block) and valid >= self.floors.get(block, 0) for block in entry)

    def replace(self, entry: list[int], tokens: int) -> None:
        """A row gives an entry up for a copy of its first tokens."""
        for block in entry:
            self.lost[block] += 1
            self.floors[block] = max(self.floors.get(block, 0), tokens)


def read_groups(groups: Any) -> tuple[Group, ...]:
    """The groups of a pool, judged by themselves."""
    if groups is None:
        return (Group.full(),)
    if not isinstance(groups, list | tuple) or not all(isinstance(group, Group) for group in groups):
        raise TypeError(f"[Pool] groups is a {type(groups).__name__}, a list of Group is needed")
    if not 1 <= len(groups) <= MAX_GROUPS:
        raise ValueError(f"[Pool] {len(groups)} groups, 1 .. {MAX_GROUPS} are legal")
    return tuple(groups)


def arena_sizes(groups: tuple[Group, ...], num_blocks: int, block_size: int, reserved: int) -> list[int]:
    """Blocks of each arena that is not of states."""
    sizes: dict[int, Any] = {0: num_blocks}
    for group in groups:
        where, told = group.arena, group.num_blocks
        if group.block_size not in (None, *(block_size * k for k in MULTIPLES)):
            raise ValueError(f"[Pool] block_size of a group is {group.block_size}, {block_size} x 1, 2 or 4 is legal")
        if (where == 0 and told is not None) or (where not in sizes and told is None):
            raise ValueError(f"[Pool] num_blocks of arena {where} is {told}: arena 0 has the pool's, others need it")
        if told not in (None, sizes.setdefault(where, told)) or sizes[where] <= reserved:
            raise ValueError(f"[Pool] num_blocks of arena {where}: {told}, {sizes[where]}, above {reserved} is legal")
    used = {group.arena for group in groups if group.kind != "state"}
    if used != set(range(len(used))):
        raise ValueError(f"[Pool] arenas are {sorted(used)}, they must be 0, 1, 2, ... without a gap")
    return [sizes[arena] for arena in sorted(sizes)]


class PoolModel:
    """A pool without calls: its arenas and groups, its sequences and tables, and its pending steps.

    The parameters are those of `kvpool.Pool`. Nothing is random, so `seed` and `_hash_bits` mean nothing.
    """

    _closed = True  # until the constructor has seen that everything is legal

    def __init__(
        self, num_blocks: int, block_size: int, *, max_seqs: int = 1024, max_blocks_per_seq: int | None = None,
        reserved_blocks: int = 1, watermark: int = 0, in_order: bool = False, seed: int | None = None,
        prefix_cache: bool = False, events: int = 0, lookahead: int = 0, groups: Any = None, _hash_bits: int = 32,
    ) -> None:  # fmt: skip
        judge = functools.partial(args.integer, "Pool")
        given = read_groups(groups)
        sizes = [group.size for group in given if group.kind in ("window", "chunk")]
        lookahead = judge("lookahead", lookahead, 0, min(sizes, default=2**63) - 1)
        args.typed("Pool", "in_order", in_order, bool)
        args.typed("Pool", "prefix_cache", prefix_cache, bool)
        judge("events", events, 0, 2**31 - 1 if prefix_cache else 0)
        judge("_hash_bits", _hash_bits, 0, 32)
        judge("seed", 0 if seed is None else seed, 0, 2**64 - 1)
        reserved = judge("reserved_blocks", reserved_blocks, 0, 2**31 - 2)
        num_blocks = judge("num_blocks", num_blocks, reserved + 1, 2**31 - 1)
        block_size = judge("block_size", block_size, 1, min(2**31 - 1, 2**62 // num_blocks))
        max_seqs = judge("max_seqs", max_seqs, 1, 2**SLOT_BITS)
        watermark = judge("watermark", watermark, 0, num_blocks - reserved)
        if max_blocks_per_seq is None:
            max_blocks_per_seq = min(num_blocks - reserved, max(1, 2**27 // max_seqs))
            if all(group.kind == "state" for group in given):
                max_blocks_per_seq = (2**31 - 1) // block_size
        most = judge("max_blocks_per_seq", max_blocks_per_seq, 1, 2**31 - 1)
        sizes = arena_sizes(given, num_blocks, block_size, reserved)
        self.arenas = [Arena(self, k, size, reserved) for k, size in enumerate(sizes)]
        self.layers: list[Layers] = []
        for index, group in enumerate(given):
            home, size, columns = self.arenas[group.arena], group.block_size or block_size, group.columns
            if group.kind == "state":
                home, size, columns = Arena(self, len(self.arenas), group.size, 0), 1, 1
                self.arenas.append(home)
            self.layers.append(Layers(index, group.kind, group, size, columns, home))
        self.kv = [layer for layer in self.layers if layer.kind != "state"]
        self.states = [layer for layer in self.layers if layer.kind == "state"]
        self.options = PoolOptions(
            *(num_blocks, block_size, max_seqs, most, reserved, watermark, in_order, seed or 0, prefix_cache, events),
            *(lookahead, given),
        )
        self.block_size, self.lookahead = block_size, lookahead
        self.hole, self.has_cache = 0 if reserved else -1, prefix_cache
        self.pending: list[Step] = []  # oldest first
        self._next_step = 1
        self._generations: dict[int, int] = {}
        self._deferred: list[int] = []
        self._digest = self._evicted_tokens = 0
        self._empty()
        free_tags = (tag for tag in range(1, NUM_TAGS + 1) if tag not in _live_tags)
        self._tag = next(free_tags, 0)
        if not self._tag:
            raise errors.KVPoolError(f"[Pool] too many live pools ({NUM_TAGS}), shut one down first")
        _live_tags.add(self._tag)
        self._closed = False

    def _empty(self) -> None:
        """Every block blank, every slot free, nothing pending."""
        self._sequences: dict[int, Sequence] = {}  # slot -> sequence
        self._free_slots = deque(range(self.options.max_seqs))
        self.pending.clear()
        for arena in self.arenas:
            arena.empty()

    def shutdown(self) -> None:
        """Release the tag; every later call raises `PoolClosed`. Idempotent."""
        if not self._closed:
            self._closed = True
            _live_tags.discard(self._tag)
            for step in self.pending:
                step.plan.is_pending = False

    def refuse_closed(self, call: str) -> None:
        if self._closed:
            raise errors.PoolClosed(f"[{call}] the pool was shut down")

    def arena_of(self, call: str, arena: Any) -> Arena:
        return self.arenas[args.integer(call, "arena", arena, 0, len(self.arenas) - 1)]

    def _layer(self, call: str, group: Any) -> Layers:
        return self.layers[args.integer(call, "group", group, 0, len(self.layers) - 1)]

    def sequences(self) -> list[Sequence]:
        """All that have blocks, by their slots."""
        return [seq for _, seq in sorted(self._sequences.items())]

    def _made(self, handle: int) -> Sequence | None:
        """The sequence of a handle that has blocks, whatever its state."""
        seq = self._sequences.get(handle & (2**SLOT_BITS - 1))
        return seq if seq is not None and seq.handle == handle else None

    def _find(self, handle: int, any_: bool = False) -> Sequence | None:
        """The open sequence of a handle, with `any_` also one that is loaded."""
        seq = self._made(handle)
        return None if seq is None or seq.is_closed or (seq.load is not None and not any_) else seq

    def _sequence(self, call: str, handle: int, any_: bool = False) -> Sequence:
        if handle < 0:
            raise ValueError(f"[{call}] handle is negative ({handle})")
        seq = self._find(handle, True)
        if seq is None and handle >> LOCAL_BITS != self._tag:
            raise errors.ForeignHandle(f"[{call}] handle of another pool ({handle})")
        if seq is None:
            raise errors.StaleHandle(f"[{call}] handle of a closed sequence ({handle})")
        if seq.load is not None and not any_:
            raise errors.PlanStateError(f"[{call}] the sequence is being loaded ({handle})")
        return seq

    def batch(self, call: str, handles: Any, any_: bool = False) -> list[Sequence]:
        return [self._sequence(call, handle, any_) for handle in args.handles(call, handles)]

    def one(self, call: str, handle: Any, any_: bool = False) -> Sequence:
        return self._sequence(call, args.integer(call, "handle", handle, 0, args.MAX_INT64), any_)

    def _create(self, num_tokens: int) -> Sequence:
        slot = self._free_slots.popleft()
        generation = self._generations.setdefault(slot, 0)
        handle = self._tag << LOCAL_BITS | generation << SLOT_BITS | slot
        seq = self._sequences[slot] = Sequence(handle, num_tokens, [Table() for _ in self.layers])
        return seq

    def _refuse_slots(self, call: str, n: int) -> None:
        if n > len(self._free_slots):
            raise errors.OutOfSequences(f"[{call}] {n} slots are needed, {len(self._free_slots)} are free")

    def _pending_rows(self, handle: int, newest: float = inf) -> list[Row]:
        """What pending steps, none after the `newest`, do to a sequence."""
        return [row for step in self.pending if step.id <= newest for row in step.rows if row.handle == handle]

    def _refuse_pending(self, call: str, seq: Sequence) -> None:
        if self._pending_rows(seq.handle):
            raise errors.PlanStateError(f"[{call}] handle is a row of a pending plan ({seq.handle})")

    def done_length(self, seq: Sequence) -> int:
        """Tokens that no pending step has still to write; of a fork, those that its parent had done."""
        before = [row.old_length for row in self._pending_rows(seq.handle)]
        before += [done for parent, newest, done in seq.ancestors if self._pending_rows(parent, newest)]
        return min([seq.num_tokens, *before])

    def copies_in(self, arena: Arena) -> list[tuple[int, int, int]]:
        """Pending copies: (source, destination, tokens)."""
        copies = [copy for step in self.pending for copy in step.copies]
        return [(src, dst, n) for group, src, dst, n in copies if self.layers[group].arena is arena]

    def is_unwritten(self, layer: Layers, block: int) -> bool:
        """Whether a pending plan has still to fill a block by a copy."""
        return block in [dst for _, dst, _ in self.copies_in(layer.arena)]

    def _capacity(self, seq: Sequence) -> int:
        """The positions that all tables cover, evicted ones counted."""
        tables = [(layer.block_size, seq.tables[layer.index]) for layer in self.kv]
        rooms = [(len(table.entries) + table.evicted // size) * size for size, table in tables]
        return min(rooms, default=ceil_div(seq.num_tokens, self.block_size) * self.block_size)

    def _rounded(self, tokens: int) -> int:
        """The least capacity that has room for so many tokens: whole entries of the smallest block size."""
        unit = min((layer.block_size for layer in self.kv), default=self.block_size)
        return ceil_div(tokens, unit) * unit

    def _num_entries(self, layer: Layers, table: Table, capacity: int) -> int:
        """Entries of a table in a sequence of this capacity."""
        return ceil_div(capacity, layer.block_size) - table.evicted // layer.block_size

    def held(self, seq: Sequence, layer: Layers) -> int:
        """Tokens that were not evicted from a group: its `kv_len`."""
        return seq.num_tokens - seq.tables[layer.index].evicted

    def _take_entry(self, layer: Layers) -> list[int]:
        return [layer.arena.take() for _ in range(layer.columns)]

    def _pop_entries(self, seq: Sequence, layer: Layers, length: int) -> None:
        """Drop entries from the end until `length` are left, columns descending."""
        entries = seq.tables[layer.index].entries
        while len(entries) > length:
            for block in reversed(entries.pop()):
                layer.arena.release(block)
