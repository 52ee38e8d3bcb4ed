"""Layer groups and sequences of `kvpool.testing.model`: ``docs/core.md``, line by line.

`Table` is what a sequence has in one group. A state group is a table of at most one entry of one slot.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from kvpool.errors import ForeignHandle, KVPoolError, OutOfSequences, PlanStateError, PoolClosed, StaleHandle
from kvpool.groups import Group
from kvpool.stats import PoolOptions, PoolStats
from kvpool.testing import model_args as args
from kvpool.testing.model_blocks import Arena, ModelBlocks, ceil_div, public_call

MAX_GROUPS, MAX_ARENAS, MULTIPLES = 8, 8, (1, 2, 4)
SLOT_BITS, GENERATION_BITS, NUM_TAGS = 20, 32, 2047
MAX_GENERATION = 2**GENERATION_BITS - 1
HOLE: list[int] = []  #: what a table has instead of an entry that was let go

_live_tags: set[int] = set()


@dataclass(eq=False)
class Layers:
    """A group as the pool knows it: its block size and its arena are settled."""

    index: int
    kind: str
    group: Group
    block_size: int
    columns: int
    arena: Arena

    def last_unread(self, p: int) -> int:
        """Tokens below this one, the kept ones apart, are read by no query at position p or later."""
        if self.kind == "window":
            return p - self.group.size + 1
        if self.kind == "chunk" and p >= 0:
            return self.group.size * (p // self.group.size)
        return 0

    def reads(self, p: int) -> set[int]:
        """The positions that a query at position p reads."""
        first = {"window": p - self.group.size + 1, "chunk": p - p % (self.group.size or 1)}.get(self.kind, 0)
        return set(range(max(first, 0), p + 1)) | set(range(min(self.group.keep, p + 1)))

    def needs(self, i: int, p: int) -> bool:
        """Whether a query at position p or later may read entry i, or it is kept for ever."""
        return i < ceil_div(self.group.keep, self.block_size) or (i + 1) * self.block_size > self.last_unread(p)


@dataclass(eq=False)
class Table:
    """What a sequence has in one group."""

    entries: list[list[int]] = field(default_factory=list)
    epoch: int = 0
    evicted: int = 0  # tokens that left by eviction


@dataclass(eq=False, slots=True)
class Sequence:
    """An open sequence, or one that is loaded."""

    handle: int
    num_tokens: int
    tables: list[Table]
    #: (handle forked from, newest step id at that moment), for all its ancestors
    ancestors: list[tuple[int, int]] = field(default_factory=list)
    #: (step, done tokens) when it was forked from a row of a pending step
    forked_in: tuple[int, int] | None = None
    point: int = 0  #: `num_tokens` when tokens were evicted last
    is_loading: bool = False  #: somebody writes its blocks, until `loaded`
    is_closed: bool = False  #: closed since then
    #: what the prefix cache knows: a namespace's root, committed tokens, and how many base blocks hits may find
    root: int | None = None
    tokens: list[int] = field(default_factory=list)
    published: int = 0
    node: Any = None  #: of its last committed base block
    wanted: list[int] = field(default_factory=list)  #: where checkpoints are taken
    load: int = 0  #: tokens that are loaded


def read_groups(groups: Any) -> tuple[Group, ...]:
    """Return the groups of a pool, judged by themselves."""
    if groups is None:
        return (Group.full(),)
    if not isinstance(groups, list | tuple):
        raise TypeError(f"[Pool] groups is a {type(groups).__name__}, a list of Group is needed")
    for group in groups:
        if not isinstance(group, Group):
            raise TypeError(f"[Pool] a group is a {type(group).__name__}, a Group is needed")
    if not 1 <= len(groups) <= MAX_GROUPS:
        raise ValueError(f"[Pool] {len(groups)} groups, 1 .. {MAX_GROUPS} are legal")
    return tuple(groups)


def arena_sizes(groups: tuple[Group, ...], num_blocks: int, block_size: int, reserved: int) -> list[int]:
    """Blocks of each arena that is not of states."""
    sizes = {0: num_blocks}
    kv = [group for group in groups if group.kind != "state"]
    for group in kv:
        if group.block_size not in (None, *(block_size * k for k in MULTIPLES)):
            raise ValueError(f"[Pool] block_size of a group is {group.block_size}, {block_size} x 1, 2 or 4 is legal")
        if group.arena >= MAX_ARENAS:
            raise ValueError(f"[Pool] arena of a group is {group.arena}, the most is {MAX_ARENAS - 1}")
        if group.arena == 0 and group.num_blocks is not None:
            raise ValueError(f"[Pool] num_blocks is {group.num_blocks}, but arena 0 has the pool's")
        if group.arena not in sizes and group.num_blocks is None:
            raise ValueError(f"[Pool] num_blocks of arena {group.arena} is missing")
        if group.num_blocks not in (None, sizes.setdefault(group.arena, group.num_blocks or 0)):
            raise ValueError(f"[Pool] num_blocks of arena {group.arena} is {sizes[group.arena]} and {group.num_blocks}")
    used = {group.arena for group in kv}
    if used != set(range(len(used))):
        raise ValueError(f"[Pool] arenas are {sorted(used)}, they must be 0, 1, 2, ... without a gap")
    for arena, size in sizes.items():
        if size <= reserved:
            raise ValueError(f"[Pool] num_blocks of arena {arena} is {size}, more than {reserved} are needed")
    return [sizes[arena] for arena in range(len(sizes))]


class PoolModel:
    """Layer groups, their arenas, and sequences over them.

    Parameters
    ----------
    num_blocks, block_size : int
        Blocks of arena 0, tokens in a base block.
    max_seqs, max_blocks_per_seq : int
        Limits on open sequences and on the tokens of one, in base blocks; the second defaults to
        ``min(num_blocks - reserved_blocks, max(1, 2**27 // max_seqs))``.
    reserved_blocks : int
        Ids below it are never allocated.
    watermark : int
        Blocks of arena 0 that `open` leaves for sequences that grow.
    in_order : bool
        Every step counts as done when it returns.
    seed : int, optional
        Accepted for symmetry; nothing in the model is random.
    prefix_cache : bool
        Whether committed blocks are found by their content.
    events : int
        How many events are kept for `events`.
    lookahead : int
        By how many tokens `truncate` may always shorten a sequence.
    groups : list of Group, optional
        The groups, in the order of the tables; one full group by default.
    """

    arena_class, blocks_class = Arena, ModelBlocks
    _closed = True  # until the constructor has seen that everything is legal

    def __init__(
        self, num_blocks: int, block_size: int, *, max_seqs: int = 1024, max_blocks_per_seq: int | None = None,
        reserved_blocks: int = 1, watermark: int = 0, in_order: bool = False, seed: int | None = None,
        prefix_cache: bool = False, events: int = 0, lookahead: int = 0, groups: Any = None, _hash_bits: int = 32,
    ) -> None:  # fmt: skip
        given = read_groups(groups)
        lookahead = args.integer("Pool", "lookahead", lookahead, 0)
        for group in given:
            if group.kind in ("window", "chunk") and lookahead >= group.size:
                raise ValueError(f"[Pool] lookahead is {lookahead}, not below {group.size}")
        args.boolean("Pool", "prefix_cache", prefix_cache)
        args.integer("Pool", "events", events, 0, 2**31 - 1)
        args.integer("Pool", "_hash_bits", _hash_bits, 0, 32)
        if events and not prefix_cache:
            raise ValueError(f"[Pool] events is {events}, but there are none without prefix_cache=True")
        reserved = args.integer("Pool", "reserved_blocks", reserved_blocks, 0, 2**31 - 2)
        num_blocks = args.integer("Pool", "num_blocks", num_blocks, reserved + 1, 2**31 - 1)
        block_size = args.integer("Pool", "block_size", block_size, 1, min(2**31 - 1, 2**62 // num_blocks))
        max_seqs = args.integer("Pool", "max_seqs", max_seqs, 1, 2**SLOT_BITS)
        watermark = args.integer("Pool", "watermark", watermark, 0, num_blocks - reserved)
        if max_blocks_per_seq is None:
            max_blocks_per_seq = min(num_blocks - reserved, max(1, 2**27 // max_seqs))
            if all(group.kind == "state" for group in given):
                max_blocks_per_seq = (2**31 - 1) // block_size
        most = args.integer("Pool", "max_blocks_per_seq", max_blocks_per_seq, 1, 2**31 - 1)
        args.boolean("Pool", "in_order", in_order)
        if seed is not None:
            args.integer("Pool", "seed", seed, 0, 2**64 - 1)
        sizes = arena_sizes(given, num_blocks, block_size, reserved)
        self.num_blocks, self.block_size, self.lookahead = num_blocks, block_size, lookahead
        self.hole, self.has_cache = 0 if reserved else -1, prefix_cache
        self.options = PoolOptions(
            *(num_blocks, block_size, max_seqs, most, reserved, watermark, in_order, seed or 0, prefix_cache, events),
            *(lookahead, given),
        )
        self.pending: list[Any] = []  # steps, oldest first
        self.arenas = [self.arena_class(self, k, size, reserved) for k, size in enumerate(sizes)]
        self.layers: list[Layers] = []
        for index, group in enumerate(given):
            home, size, columns = self.arenas[group.arena], group.block_size or block_size, group.columns
            if group.kind == "state":
                home, size, columns = self.arena_class(self, len(self.arenas), group.size, 0), 1, 1
                self.arenas.append(home)
            self.layers.append(Layers(index, group.kind, group, size, columns, home))
        self._next_step = 1
        self._generations: dict[int, int] = {}
        self._deferred: list[int] = []
        self._digest = self._evicted_tokens = 0
        self._empty()
        self._tag = self._take_tag()
        self._closed = False

    @staticmethod
    def _take_tag() -> int:
        for tag in range(1, NUM_TAGS + 1):
            if tag not in _live_tags:
                _live_tags.add(tag)
                return tag
        raise KVPoolError(f"[Pool] too many live pools ({NUM_TAGS}), shut one down first")

    def _empty(self) -> None:
        """Every block blank, every slot free, nothing pending."""
        self._sequences: dict[int, Sequence] = {}  # slot -> sequence
        self._free_slots = deque(
            s for s in range(self.options.max_seqs) if self._generations.get(s, 0) <= MAX_GENERATION
        )
        self.pending.clear()
        for arena in self.arenas:
            arena.empty()

    def refuse_closed(self, call: str) -> None:
        """Refuse a pool that was shut down."""
        if self._closed:
            raise PoolClosed(f"[{call}] the pool was shut down")

    @property
    def blocks(self) -> ModelBlocks:
        """Blocks by id, of arena 0."""
        return self.blocks_class(self.arenas[0])

    def arena_of(self, call: str, arena: Any) -> Arena:
        """An arena that a call names."""
        return self.arenas[args.integer(call, "arena", arena, 0, len(self.arenas) - 1)]

    def _layer(self, call: str, group: Any) -> Layers:
        """A group that a call names."""
        return self.layers[args.integer(call, "group", group, 0, len(self.layers) - 1)]

    def layers_in(self, arena: Arena) -> list[Layers]:
        """The groups of an arena."""
        return [layer for layer in self.layers if layer.arena is arena]

    def sequences(self) -> list[Sequence]:
        """All that have blocks."""
        return list(self._sequences.values())

    @property
    def _kv(self) -> list[Layers]:
        """The groups that have entries of blocks."""
        return [layer for layer in self.layers if layer.kind != "state"]

    def _local(self, handle: int) -> int:
        return handle & (2 ** (SLOT_BITS + GENERATION_BITS) - 1)

    def chain(self, *words: object) -> None:
        """Add a successful call to the digest."""
        self._digest = zlib.crc32(repr(words).encode(), self._digest)

    # ---- sequences ----------------------------------------------------------------------------------------

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

    def batch(self, call: str, handles: Any, any_: bool = False) -> list[Sequence]:
        """The sequences of a call."""
        return [self._sequence(call, handle, any_) for handle in args.handles(call, handles)]

    def one(self, call: str, handle: Any, any_: bool = False) -> Sequence:
        """The sequence of a call."""
        return self._sequence(call, args.integer(call, "handle", handle, 0, args.MAX_INT64), any_)

    def _create(self, num_tokens: int) -> Sequence:
        slot = self._free_slots.popleft()
        generation = self._generations.setdefault(slot, 0)
        handle = self._tag << (SLOT_BITS + GENERATION_BITS) | generation << SLOT_BITS | slot
        seq = self._sequences[slot] = Sequence(handle, num_tokens, [Table() for _ in self.layers])
        return seq

    def _refuse_slots(self, call: str, n: int) -> None:
        if n > len(self._free_slots):
            raise OutOfSequences(
                f"[{call}] {n} sequence slots are needed, {len(self._free_slots)} are free, "
                f"max_seqs is {self.options.max_seqs}"
            )

    def _pending_rows(self, handle: int) -> list[Any]:
        return [row for step in self.pending for row in step.rows if row.handle == handle]

    def _refuse_pending(self, call: str, seq: Sequence) -> None:
        if self._pending_rows(seq.handle):
            raise PlanStateError(f"[{call}] handle is a row of a pending plan ({seq.handle})")

    @public_call
    def fork(self, handle: int, n: int = 1) -> np.ndarray:
        """Open `n` children that share the parent's written entries and its states; their handles, int64 ``[n]``."""
        parent = self.one("fork", handle)
        n = args.count("fork", "n", n)
        self._refuse_slots("fork", n)
        children, room = [], self._rounded(parent.num_tokens)
        for _ in range(n):
            child = self._create(parent.num_tokens)
            child.ancestors = [*parent.ancestors, (parent.handle, self._next_step - 1)]
            child.point, child.forked_in = parent.point, self._fork_in(parent)
            child.root, child.tokens, child.published = parent.root, list(parent.tokens), parent.published
            child.node, child.wanted = parent.node, list(parent.wanted)
            for layer, table, own in zip(self.layers, parent.tables, child.tables, strict=True):
                shared = 1 if layer.kind == "state" else self._num_entries(layer, table, room)
                own.entries, own.evicted = table.entries[:shared], table.evicted
            children.append(child.handle)
        self.chain("fork", self._local(parent.handle), *map(self._local, children))
        return np.array(children, np.int64)

    def done_length(self, seq: Sequence) -> int:
        """Tokens that no pending step has still to write.

        A sequence that was forked in the middle of a step has what its parent had done, until that step passes.
        """
        pending = [row.old_length for row in self._pending_rows(seq.handle)]
        if seq.forked_in is not None and any(step.id == seq.forked_in[0] for step in self.pending):
            pending.append(seq.forked_in[1])
        return min([seq.num_tokens, *pending])

    def _fork_in(self, parent: Sequence) -> tuple[int, int] | None:
        """The newest pending step that what a child has may wait for, and how much the parent has done."""
        steps = [step.id for step in self.pending for row in step.rows if row.handle == parent.handle]
        if parent.forked_in is not None and any(step.id == parent.forked_in[0] for step in self.pending):
            steps.append(parent.forked_in[0])
        return (max(steps), self.done_length(parent)) if steps else None

    # ---- tables -------------------------------------------------------------------------------------------

    def _capacity(self, seq: Sequence) -> int:
        """The positions that all tables cover, evicted ones counted."""
        tables = [(layer.block_size, seq.tables[layer.index]) for layer in self._kv]
        rooms = [(len(table.entries) + table.evicted // size) * size for size, table in tables]
        return min(rooms, default=ceil_div(seq.num_tokens, self.block_size) * self.block_size)

    def _rounded(self, tokens: int) -> int:
        """The least capacity that has room for so many tokens: whole entries of the smallest block size."""
        unit = min((layer.block_size for layer in self._kv), default=self.block_size)
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

    def _pop_all(self, seq: Sequence) -> None:
        """Group by group, entries from the last to the first; the states at the end."""
        for layer in sorted(self.layers, key=lambda layer: layer.kind == "state"):
            self._pop_entries(seq, layer, 0)

    @public_call
    def truncate(self, handles: Any, lens: Any) -> None:
        """Shorten sequences to `lens` tokens; the entries past them are released, youngest first."""
        batch = self.batch("truncate", handles)
        lengths = args.per_row("truncate", "lens", lens, len(batch))
        for seq, length in zip(batch, lengths, strict=True):
            if not seq.point <= length <= seq.num_tokens:
                raise ValueError(f"[truncate] len is {length}, {seq.point} .. {seq.num_tokens} is legal")
            self._refuse_pending("truncate", seq)
            self._refuse_gone(seq, length)
        for seq, length in zip(batch, lengths, strict=True):
            self._shorten(seq, length)
        self.chain("truncate", *(self._local(seq.handle) for seq in batch), *lengths)

    def _refuse_gone(self, seq: Sequence, length: int) -> None:
        """Refuse a length at which a query would read what was let go, or a state that is gone."""
        for layer in self.layers:
            if layer.kind == "state":
                if length != seq.num_tokens:
                    raise ValueError(f"[truncate] len is {length}, only {seq.num_tokens} is left of the state")
                continue
            size, entries = layer.block_size, seq.tables[layer.index].entries
            gone = {i * size + k for i, entry in enumerate(entries) if entry == HOLE for k in range(size)}
            if gone and gone & layer.reads(length):
                legal = (n for n in range(length, seq.num_tokens) if not gone & layer.reads(n))
                least = next(legal, seq.num_tokens)
                raise ValueError(f"[truncate] len is {length}, the least that group {layer.index} has is {least}")

    def _shorten(self, seq: Sequence, length: int) -> None:
        for layer in self._kv:
            table = seq.tables[layer.index]
            keep = self._num_entries(layer, table, self._rounded(length))
            table.epoch += keep < len(table.entries)
            self._pop_entries(seq, layer, keep)
        seq.num_tokens = length

    # ---- loads and the end --------------------------------------------------------------------------------

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
        self.chain("loaded", self._local(handle), n)
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
            self.chain("close", self._local(seq.handle))
            return
        slot = seq.handle & (2**SLOT_BITS - 1)
        self._pop_all(seq)
        del self._sequences[slot]
        self._generations[slot] += 1
        if self._generations[slot] <= MAX_GENERATION:
            self._free_slots.append(slot)
        self.chain("close", self._local(seq.handle))

    @public_call
    def close(self, handles: Any) -> None:
        """Close sequences in the order given; each one's blocks are released youngest first."""
        for seq in self.batch("close", handles, any_=True):
            self._close(seq)

    @public_call
    def close_finished(self, handles: Any, mask: Any) -> int:
        """Close the rows whose mask byte is not zero; returns how many."""
        batch = self.batch("close_finished", handles, any_=True)
        finished = args.mask("close_finished", mask, len(batch))
        for seq, is_finished in zip(batch, finished, strict=True):
            if is_finished:
                self._close(seq)
        return sum(map(bool, finished))

    def defer_close(self, handle: int) -> None:
        """Close this sequence at the beginning of the next call; a dead handle is skipped then."""
        self._deferred.append(args.integer("defer_close", "handle", handle, 0, args.MAX_INT64))

    def drain(self) -> None:
        """Close the sequences whose close was deferred."""
        while self._deferred:
            seq = self._find(self._deferred.pop(0), True)
            if seq is not None:
                self._close(seq)

    @public_call
    def reset(self) -> None:
        """Forget every sequence, reference, pending plan and committed bit; generations and counters go on."""
        for slot in self._sequences:
            self._generations[slot] += 1
        for step in self.pending:
            step.plan.is_pending = False
        for arena in self.arenas:
            arena.dropped.extend(sorted(arena.marked))
        self._empty()
        self.chain("reset")

    def shutdown(self) -> None:
        """Release the tag; every later call raises `PoolClosed`. Idempotent."""
        if not self._closed:
            self._closed = True
            _live_tags.discard(self._tag)
            for step in self.pending:
                step.plan.is_pending = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        self.shutdown()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("[Pool] a pool cannot be pickled or copied")

    # ---- what is read -------------------------------------------------------------------------------------

    @public_call
    def table(self, handle: int, group: int | None = None) -> np.ndarray:
        """Return the entries of a sequence in a group, int32 ``[entries, columns]``; a state group: its slot.

        Without a group: of the only one, without columns if it has one.
        """
        seq = self.one("table", handle, True)
        if group is None and len(self.layers) > 1:
            raise ValueError(f"[table] the pool has {len(self.layers)} layer groups, each with a table: name one")
        layer = self._layer("table", 0 if group is None else group)
        shown = self.shown(layer, seq.tables[layer.index].entries)
        return shown.ravel() if layer.kind == "state" or (group is None and layer.columns == 1) else shown

    def shown(self, layer: Layers, entries: list[list[int]]) -> np.ndarray:
        """Entries as an array, holes filled in."""
        shown = [entry or [self.hole] * layer.columns for entry in entries]
        return np.array(shown, np.int32).reshape(-1, layer.columns)

    @public_call
    def num_tokens(self, handle: int) -> int:
        """Return the length of a sequence in tokens, evicted ones included."""
        return self.one("num_tokens", handle, True).num_tokens

    @public_call
    def kv_len(self, handle: int, group: int = 0) -> int:
        """Return how many tokens of a sequence have a slot in a group, or had one in a window."""
        seq = self.one("kv_len", handle, True)
        return self.held(seq, self._layer("kv_len", group))

    @public_call
    def capacity(self, handle: int) -> int:
        """Return the positions that the blocks of a sequence cover, evicted ones included."""
        return self._capacity(self.one("capacity", handle, True))

    @public_call
    def is_open(self, handle: int) -> bool:
        """Return whether the handle names an open sequence of this pool."""
        return self._find(args.integer("is_open", "handle", handle, 0, args.MAX_INT64), True) is not None

    @public_call
    def stats(self, arena: int = 0) -> PoolStats:
        """Return the counters of an arena, and of the pool."""
        one = self.arena_of("stats", arena)
        tokens = sum(seq.num_tokens for seq in self.sequences())
        capacity = sum(self._capacity(seq) for seq in self.sequences())
        return PoolStats(
            sequences=len(self._sequences),
            pending=len(self.pending),
            tokens=tokens,
            capacity=capacity,
            fragmentation=1.0 - tokens / capacity if capacity else 0.0,
            evicted_tokens=self._evicted_tokens,
            **one.figures(),
        )

    @public_call
    def digest(self) -> int:
        """Return a hash of all successful calls so far; another function than the core's."""
        return self._digest

    @public_call
    def fingerprint(self) -> int:
        """Return a hash of the whole state; another function than the core's."""
        return int.from_bytes(hashlib.blake2b(repr(self._state()).encode(), digest_size=8).digest(), "little")

    def _state(self) -> dict[str, Any]:
        """Everything as plain values, handles and step ids without what differs by pool."""
        local, now = self._local, self._next_step
        return {
            "options": self.options,
            "arenas": [
                (
                    *(list(one.blank), list(one.unused), [(block, fence - now) for block, fence in one.limbo]),
                    *(list(one.holds), sorted(+one.references()), sorted(one.raw.items()), sorted(one.marked)),
                    *(list(one.dropped), dict(one.counters)),
                )
                for one in self.arenas
            ],
            "sequences": {
                local(seq.handle): (
                    *(seq.num_tokens, seq.point, seq.is_loading, seq.is_closed, self.done_length(seq)),
                    [([list(entry) for entry in table.entries], table.epoch, table.evicted) for table in seq.tables],
                    [(local(parent), newest - now) for parent, newest in seq.ancestors],
                    (seq.root, list(seq.tokens), seq.published, list(seq.wanted), seq.load),
                )
                for _, seq in sorted(self._sequences.items())
            },
            "generations": {slot: g for slot, g in sorted(self._generations.items()) if g},
            "free_slots": list(self._free_slots),
            "pending": [
                (step.id - now, step.noted, list(step.copies), [row.shown(local(row.handle)) for row in step.rows])
                for step in self.pending
            ],
            "evicted_tokens": self._evicted_tokens,
        }
