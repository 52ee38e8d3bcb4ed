"""`ModelPool` and `ModelPlan`: the core's contract in plain Python, slow and obviously right.

The independent oracle of `kvpool.Pool` and `kvpool.Plan`: it follows ``docs/core.md`` and ``docs/prefix.md`` line by
line and shares no code with the core. It has only lists and dicts. References to a block are recounted from the tables
and the pending steps whenever they are needed, and a step rebuilds its plan from scratch. Words and blocks by id are in
`model_state`, the prefix cache is in `model_prefix`; here are plans and the other calls, which have the docs of
`kvpool.Pool`.

One difference from the core: `digest` and `fingerprint` are other functions, which say only whether something changed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvpool.errors import CapacityExceeded, CorruptState, OutOfBlocks, OutOfSequences, PlanStateError
from kvpool.retention import Keep
from kvpool.stats import PlanLimits, PoolStats
from kvpool.testing import model_args as args
from kvpool.testing.model_prefix import LOADED, CacheModel, Entry, ModelPrefix, Node
from kvpool.testing.model_state import (
    HOLE,
    LOCAL_BITS,
    SLOT_BITS,
    Arena,
    Change,
    Judged,
    Layers,
    ModelBlocks,
    Row,
    Sequence,
    Step,
    Table,
    ceil_div,
    public_call,
    reading_call,
)

TAIL = 16  #: tokens at the end of a prompt that the next turn may rewrite, unless `cut` says more
#: What a row needs in one group: entries to replace as (index, valid tokens), and how many to append.
Need = tuple[list[tuple[int, int]], int]


@dataclass(eq=False)
class Opening:
    """What a call that opens a sequence was given, what it finds and what it takes."""

    length: int
    prompt: list[int]  #: empty for a count
    namespace: bytes
    path: list[Node]  #: the longest one of the prompt that is in the cache
    hit: int  #: tokens
    rest: list[tuple[Layers, list[bool]]]  #: for each entry beside the hit, whether it is taken, or a hole
    bundle: int  #: blocks for the states of a load

    @property
    def nodes(self) -> list[Node]:
        return [node for node in self.path if len(node.prefix) <= self.hit]


class ModelPool(CacheModel, AbstractContextManager):
    """A pool of KV blocks in plain Python; same constructor, methods and errors as `kvpool.Pool`."""

    @property
    def blocks(self) -> ModelBlocks:
        return ModelBlocks(self.arenas[0])

    @property
    def prefix(self) -> ModelPrefix | None:
        """The prefix cache; None in a pool that has none."""
        return ModelPrefix(self) if self.has_cache else None

    # ---- sequences --------------------------------------------------------------------------------------

    def _judge_opening(
        self, call: str, tokens: Any, namespace: bytes, reserve: bool, load: bool, all_of_it: bool = False
    ) -> Opening:
        prompt = [] if isinstance(tokens, int) else args.tokens(call, tokens)
        length = args.count(call, "tokens", tokens) if isinstance(tokens, int) else len(prompt)
        if load and not self.has_cache and self._is_cut:
            raise ValueError(f"[{call}] load is for full groups only without a prefix cache")
        if length > self.options.max_blocks_per_seq * self.block_size:
            raise CapacityExceeded(f"[{call}] {length} tokens, max_blocks_per_seq is {self.options.max_blocks_per_seq}")
        is_cut = load and self._is_cut
        if is_cut:
            self._refuse_load(call, length)
        path, hit = self._found([] if is_cut else prompt, namespace, all_of_it)
        rest = [(layer, [True]) for layer in self.states if load or hit]
        for layer in self.kv:
            first, end = hit // layer.block_size, ceil_div(length if reserve else hit, layer.block_size)
            is_whole = not is_cut or layer.kind == "full"
            rest.append((layer, [is_whole or layer.needs(i, length) for i in range(first, end)]))
        found = Opening(length, prompt, namespace, path, hit, rest, self._bundle_size if load else 0)
        own = (*found.nodes, *(node.checkpoint for node in found.nodes[-1:]))
        for arena in self.arenas:
            need = sum(sum(taken) * layer.columns for layer, taken in rest if layer.arena is arena)
            need += 0 if arena.number else found.bundle
            watermark = 0 if arena.number else self.options.watermark
            lost = len(arena.evictable) - len(self.evictable_in(arena, own)) if hit else 0
            if need and need + watermark > arena.available() - lost:
                arena.out_of_blocks(call, need, watermark, lost=lost)
        self._refuse_slots(call, 1)
        return found

    def _refuse_load(self, call: str, length: int) -> None:
        if not self._can_restore:
            raise ValueError(f"[{call}] a state group has no blocks")
        if length > 2**31 - 1:
            raise CapacityExceeded(f"[{call}] {length} tokens are loaded, no plan steps so long a sequence")
        if not length or length % self._grain:
            raise ValueError(f"[{call}] {length} tokens are loaded, {self._grain} is the grain")
        if self.states and self._is_crowded() and not any(map(self._is_free, self._taken)):
            raise OutOfSequences(f"[{call}] all checkpoints are in use")

    @public_call
    def open(
        self, tokens: Any = 0, namespace: bytes = b"", cut: int | None = None, *, reserve: bool = True,
        load: bool = False, again: bool = False, keep: Any = None,
    ) -> int:  # fmt: skip
        args.how_to_open("open", tokens, namespace, reserve, load)
        args.typed("open", "again", again, bool)
        if args.typed("open", "keep", keep, Keep | None) and not self.has_cache:
            raise ValueError(f"[open] keep is {keep}, the pool has no prefix cache")
        if cut is not None:
            args.integer("open", "cut", cut, 0, tokens if isinstance(tokens, int) else len(tokens))
            if not self.has_cache or load or isinstance(tokens, int):
                raise ValueError(f"[open] cut is {cut}: it needs a prompt and a prefix cache, and no load")
        found = self._judge_opening("open", tokens, namespace, reserve, load)
        seq = self._begin_at("load" if load else "open", found)
        if load:
            seq.load = found.length
            seq.wanted = self._positions(0, [], found.length)
            if found.bundle and self._has_room():
                self._take_mark(LOADED, seq, found.length)
        elif self.has_cache and not isinstance(tokens, int):
            seq.wanted = self._positions(found.hit, found.path, max(0, found.length - TAIL) if cut is None else cut)
            for name, n in (("queries", 1), ("query_tokens", found.length), ("hit_tokens", found.hit)):
                self.counters[f"again_{name}" if again else name] += n
        seq.keep = keep
        self._keep(seq, keep)
        return seq.handle

    def _begin_at(self, call: str, found: Opening) -> Sequence:
        seq, hit, nodes = self._create(found.hit), found.hit, found.nodes
        if self.has_cache:
            seq.root = self._root(found.namespace)
            seq.tokens, seq.node = found.prompt[:hit], nodes[-1] if nodes else None
            seq.published = len(nodes)
        for layer in self._full:
            for node in nodes:
                if layer.index in node.kv:
                    self._share(seq.tables[layer.index], node.kv[layer.index])
        mark: Any = nodes[-1].checkpoint if nodes and self._is_cut else None
        for layer in self._tailed if mark else ():
            ends = {len(entry.node.prefix): entry for entry in mark.tails if entry.layer is layer}
            for end in range(layer.block_size, hit + 1, layer.block_size):
                self._share(seq.tables[layer.index], ends.get(end))
        if mark is not None:
            self._use(mark)
            if call == "open":  # a pin is no hit
                self.counters["checkpoints_used"] += not mark.was_hit
                mark.was_hit = True
        self._make_room([(layer, sum(rest)) for layer, rest in found.rest], found.bundle)
        for layer, rest in found.rest:
            seq.tables[layer.index].entries += [self._take_entry(layer) if taken else HOLE for taken in rest]
        if mark is not None:
            self._begin_load(seq, mark)
        for arena in self.arenas:
            arena.note_peak()
        return seq

    def _share(self, table: Table, entry: Entry | None) -> None:
        """A table has an entry of the cache; None: a hole."""
        table.entries.append(list(entry.blocks) if entry else HOLE)
        if entry is not None:
            arena = entry.layer.arena
            arena.limbo = [(block, fence) for block, fence in arena.limbo if block not in entry.blocks]

    @public_call
    def fork(self, handle: int, n: int = 1) -> np.ndarray:
        parent = self.one("fork", handle)
        n = args.count("fork", "n", n)
        self._refuse_slots("fork", n)
        children, room = [], self._rounded(parent.num_tokens)
        for _ in range(n):
            child = self._create(parent.num_tokens)
            child.ancestors = [*parent.ancestors, (parent.handle, self._next_step - 1, self.done_length(parent))]
            child.point, child.root, child.node = parent.point, parent.root, parent.node
            child.tokens, child.published, child.wanted = list(parent.tokens), parent.published, list(parent.wanted)
            child.keep = parent.keep
            for layer, table, own in zip(self.layers, parent.tables, child.tables, strict=True):
                shared = 1 if layer.kind == "state" else self._num_entries(layer, table, room)
                own.entries, own.evicted = table.entries[:shared], table.evicted
            children.append(child.handle)
        return np.array(children, np.int64)

    @public_call
    def loaded(self, handle: int, n: int) -> bool:
        args.integer("loaded", "handle", handle, args.MIN_INT64, args.MAX_INT64)
        n = args.count("loaded", "n", n)
        seq = self._made(handle)
        if seq is None or seq.load is None:
            self._sequence("loaded", handle)
            raise PlanStateError(f"[loaded] the sequence is not being loaded ({handle})")
        least, most = (seq.load, seq.load) if self._is_cut else (seq.num_tokens, self._capacity(seq))
        if n and not least <= n <= most:
            raise ValueError(f"[loaded] n is {n}, 0 or {least} .. {most} is legal")
        seq.load = None
        if seq.is_closed:
            self._close(seq)
            return False
        is_flushed = self.has_cache and seq.root is None  # what it has is of other weights
        if is_flushed or (self._is_cut and n == 0):
            self._pop_all(seq)
            for table in seq.tables:
                table.epoch += 1
            seq.num_tokens, seq.tokens, seq.published = 0, [], 0
            return True
        seq.num_tokens = n or seq.num_tokens
        for mark in self._marks_of(seq):
            mark.step, mark.stamp = None, self._tick()
            self._begin_load(seq, mark)
        return True

    def _pop_all(self, seq: Sequence) -> None:
        """A sequence has nothing more: group by group, entries from the last to the first; the states at the end."""
        for mark in self._marks_of(seq):
            self._give_up(mark)
        for layer in (*self.kv, *self.states):
            self._pop_entries(seq, layer, 0)
        self._end_idle_loads()
        seq.node = None

    def _close(self, seq: Sequence) -> None:
        if seq.load is not None:
            seq.is_closed = True
            return
        self._pop_all(seq)
        slot = seq.handle & (2**SLOT_BITS - 1)
        del self._sequences[slot]
        self._generations[slot] += 1
        self._free_slots.append(slot)

    @public_call
    def close(self, handles: Any) -> None:
        for seq in self.batch("close", handles, any_=True):
            self._close(seq)

    def defer_close(self, handle: int) -> None:
        self._deferred.append(args.integer("defer_close", "handle", handle, 0, args.MAX_INT64))

    def drain(self) -> None:
        """Close the sequences whose close was deferred, and settle."""
        while self._deferred:
            seq = self._find(self._deferred.pop(0), True)
            if seq is not None:
                self._close(seq)
                self.changed("close")
        super().drain()

    @public_call
    def resize(self, num_blocks: Any, arena: int = 0) -> Any:
        moves: dict[int, Any] = {}
        sizes = [one.num_blocks for one in self.arenas]
        for number, size in (num_blocks if isinstance(num_blocks, dict) else {arena: num_blocks}).items():
            one = self.arena_of("resize", number)
            moves[one.number] = None
            sizes[one.number] = args.integer("resize", "num_blocks", size, 1, 2**31 - 1)
        if self.pending:
            raise PlanStateError(f"[resize] step {self.pending[-1].id} is pending")
        if any(seq.load is not None for seq in self.sequences()):
            raise PlanStateError("[resize] a sequence is being loaded")
        for one, size in zip(self.arenas, sizes, strict=True):
            self._refuse_size(one, size)
        for one, size in zip(self.arenas, sizes, strict=True):
            name = one.resize(size)
            for layer in [layer for layer in self.layers if layer.arena is one]:
                for table in [seq.tables[layer.index] for seq in self.sequences()]:
                    entries = [[name.get(block, block) for block in entry] for entry in table.entries]
                    table.epoch += entries != table.entries
                    table.entries = entries
            self._rename(one, name)
            if one.number in moves:
                moves[one.number] = np.array(list(name.items()), np.int32).reshape(-1, 2)
        self._most_nodes = max(self._most_nodes, self._nodes_for_all())
        groups = list(self.options.groups)
        for layer in self.layers:
            if layer.kind == "state":
                groups[layer.index] = replace(layer.group, size=layer.arena.num_blocks)
            elif layer.group.num_blocks is not None:
                groups[layer.index] = replace(layer.group, num_blocks=layer.arena.num_blocks)
        self.options = self.options._replace(num_blocks=sizes[0], groups=tuple(groups))
        return moves if isinstance(num_blocks, dict) else moves[args.integer("resize", "arena", arena)]

    def _refuse_size(self, arena: Arena, size: int) -> None:
        """Whether an arena can have so many blocks."""
        least = 1 if arena.number else max(1, self.options.watermark, self._bundle_size * self.has_cache)
        if size - arena.reserved < least:
            raise ValueError(f"[resize] {size} blocks for arena {arena.number}, {arena.reserved + least} are the least")
        slots = max((layer.block_size for layer in self.kv if layer.arena is arena), default=1)
        if size > arena.num_blocks and size * slots > 2**31 - 1 >= arena.num_blocks * slots:
            raise CapacityExceeded(f"[resize] {size} blocks of {slots} tokens have more slots than int32 names")
        if arena.used() > size - arena.reserved:
            arena.out_of_blocks("resize", arena.used(), room=size - arena.reserved)
        if any(block >= size for block, count in arena.raw.items() if count):
            raise ValueError(f"[resize] a block behind {size} has raw references")

    @public_call
    def reset(self) -> None:
        if self.has_cache:
            self._flush(None)
        for slot in self._sequences:
            self._generations[slot] += 1
        for step in self.pending:
            step.plan.is_pending = False
        for arena in self.arenas:
            arena.dropped.extend(sorted(arena.marked))
        self._empty()

    # ---- tokens leave a sequence ------------------------------------------------------------------------

    @public_call
    def truncate(self, handles: Any, lens: Any) -> None:
        batch = self.batch("truncate", handles)
        lengths = args.per_row("truncate", "lens", lens, len(batch))
        for seq, length in zip(batch, lengths, strict=True):
            if not seq.point <= length <= seq.num_tokens:
                raise ValueError(f"[truncate] len is {length}, {seq.point} .. {seq.num_tokens} is legal")
            self._refuse_pending("truncate", seq)
            self._refuse_gone(seq, length)
        for seq, length in zip(batch, lengths, strict=True):
            for layer in self.kv:
                table = seq.tables[layer.index]
                keep = self._num_entries(layer, table, self._rounded(length))
                table.epoch += keep < len(table.entries)
                self._pop_entries(seq, layer, keep)
            seq.num_tokens = length
            for mark in self._marks_of(seq):
                if mark.position > length:
                    self._give_up(mark)
            del seq.tokens[length:]
            while seq.node is not None and len(seq.node.prefix) > length:
                seq.node = seq.node.parent
            seq.published = min(seq.published, length // self.block_size)

    def _refuse_gone(self, seq: Sequence, length: int) -> None:
        """Refuse a length at which a query would read what was let go, or a state that is gone."""
        if self.states and length != seq.num_tokens:
            raise ValueError(f"[truncate] len is {length}, only {seq.num_tokens} is left of the state")
        for layer in self.kv:
            size, entries = layer.block_size, seq.tables[layer.index].entries
            gone = {i * size + k for i, entry in enumerate(entries) if entry == HOLE for k in range(size)}
            if gone & layer.reads(length):
                legal = (n for n in range(length, seq.num_tokens) if not gone & layer.reads(n))
                least = next(legal, seq.num_tokens)
                raise ValueError(f"[truncate] len is {length}, the least that group {layer.index} has is {least}")

    def _full_layer(self, call: str, group: Any) -> Layers:
        layer = self._layer(call, group)
        if layer.kind != "full":
            raise ValueError(f"[{call}] group {group} is a {layer.kind}, tokens leave full groups only")
        return layer

    def _read_lengths(
        self, call: str, handles: Any, lens: Any, first: Any, group: Any
    ) -> tuple[list[int], list[int], Layers]:
        names = args.handles(call, handles)
        lengths = args.per_row(call, "lens", lens, len(names), args.MIN_INT64)
        args.count(call, "first", first)
        return names, lengths, self._full_layer(call, group)

    def _judge_length(self, call: str, seq: Sequence, layer: Layers, length: int) -> None:
        if not 0 <= length <= self.held(seq, layer):
            raise ValueError(f"[{call}] len is {length}, 0 .. {self.held(seq, layer)} is legal")

    def _not_own(self, seq: Sequence, layer: Layers, length: int, first: int, judged: Judged) -> list[int]:
        """Entries that compaction to `length` tokens rewrites and must not."""
        if length == self.held(seq, layer):
            return []
        rewritten = range(first // layer.block_size, ceil_div(length, layer.block_size))
        return [i for i in rewritten if not judged.may_write(seq.tables[layer.index].entries[i], 0)]

    def _lose(self, layer: Layers, seq: Sequence, n: int) -> None:
        table = seq.tables[layer.index]
        seq.point = seq.num_tokens
        table.evicted += n
        table.epoch += 1
        self._evicted_tokens += n
        self._forget_row(seq)
        seq.tokens, seq.published = [], 0

    @public_call
    def compact(self, handles: Any, lens: Any, first: int = 0, group: int = 0) -> None:
        names, lengths, layer = self._read_lengths("compact", handles, lens, first, group)
        batch = [self._sequence("compact", name) for name in names]
        for seq, length in zip(batch, lengths, strict=True):
            self._judge_length("compact", seq, layer, length)
            self._refuse_pending("compact", seq)
            if self._not_own(seq, layer, length, first, Judged(self, layer.arena)):
                raise ValueError("[compact] an entry must not be rewritten, call unshare first")
        for seq, length in zip(batch, lengths, strict=True):
            leaving, room = self.held(seq, layer) - length, self._capacity(seq)
            if leaving:
                gone = (seq.tables[layer.index].evicted + leaving) // layer.block_size
                self._pop_entries(seq, layer, ceil_div(room, layer.block_size) - gone)
                self._lose(layer, seq, leaving)

    @public_call
    def evict_blocks(self, handle: int, indices: Any, group: int = 0) -> None:
        places = args.integers("evict_blocks", "indices", indices)
        layer = self._full_layer("evict_blocks", group)
        seq = self.one("evict_blocks", handle)
        for place in places:
            args.integer("evict_blocks", "index", place, 0, self.held(seq, layer) // layer.block_size - 1)
        if places != sorted(set(places)):
            raise ValueError(f"[evict_blocks] indices must ascend ({places})")
        self._refuse_pending("evict_blocks", seq)
        entries = seq.tables[layer.index].entries
        for place in reversed(places):
            for block in reversed(entries.pop(place)):
                layer.arena.release(block)
        if places:
            self._lose(layer, seq, len(places) * layer.block_size)

    # ---- steps ------------------------------------------------------------------------------------------

    def _row_need(self, call: str, seq: Sequence, n: int, layer: Layers, judged: Judged) -> Need:
        """What a row needs for new tokens; a reservation takes no states."""
        table, size, length = seq.tables[layer.index], layer.block_size, self.held(seq, layer)
        entries = table.entries
        if n == 0 or (call == "reserve" and layer.kind == "state"):
            return [], 0
        if layer.kind == "state":
            if not entries:
                return [], 1
            ((slot,),) = entries  # in place, unless a row before reads it
            in_place = self.options.in_order and judged.is_own(slot) and not judged.lost[slot]
            return ([], 0) if in_place else ([(0, 0)], 0)
        written = range(length // size, min(ceil_div(length + n, size), len(entries)))
        valid = [(i, max(0, length - i * size)) for i in written]
        room = max(self._capacity(seq), self._rounded(seq.num_tokens + n))
        appended = self._num_entries(layer, table, room) - len(entries)
        return [(i, tokens) for i, tokens in valid if not judged.may_write(entries[i], tokens)], appended

    def _judge(self, call: str, batch: list[Sequence], ask: Callable[..., Need], partial: bool = False) -> list[Any]:
        """What rows need in each group, None if they are not served; refuses the first that is short otherwise.

        `ask` tells it of a row in a layer, where those before have what they need.
        """
        judged = [Judged(self, arena) for arena in self.arenas]
        room = [arena.available() for arena in self.arenas]
        total = [0] * len(self.arenas)
        rows: list[list[Need] | None] = []
        short: tuple[int, Arena] | None = None
        for row, seq in enumerate(batch):
            needs = [ask(row, layer, judged[layer.arena.number]) for layer in self.layers]
            after = list(total)
            for layer, (replaced, appended) in zip(self.layers, needs, strict=True):
                after[layer.arena.number] += (len(replaced) + appended) * layer.columns
            lacking = [arena for arena in self.arenas if after[arena.number] > room[arena.number]]
            if lacking and partial:
                rows.append(None)
                continue
            if lacking and short is None:
                short = row, lacking[0]
            total = after
            rows.append(needs)
            for layer, (replaced, _) in zip(self.layers, needs, strict=True):
                for i, valid in replaced:
                    judged[layer.arena.number].replace(seq.tables[layer.index].entries[i], valid)
        if short is not None:
            row, arena = short
            arena.out_of_blocks(call, total[arena.number], row=row, handle=batch[row].handle)
        return rows

    def _refuse_plan(self, call: str, plan: ModelPlan) -> None:
        if not isinstance(plan, ModelPlan):
            raise TypeError(f"[{call}] plan is a {type(plan).__name__}, a Plan is needed")
        if plan.pool is not self:
            raise ValueError(f"[{call}] the plan belongs to another pool")

    def _refuse_busy(self, call: str, plan: ModelPlan) -> None:
        self._refuse_plan(call, plan)
        if plan.is_pending:
            raise PlanStateError(f"[{call}] the plan is pending (step {plan.step_id}), done or rollback is due")

    def _refuse_rows(self, call: str, plan: ModelPlan, num_rows: int) -> None:
        if num_rows > plan.limits.max_rows:
            raise CapacityExceeded(f"[{call}] {num_rows} rows, the plan's max_rows is {plan.limits.max_rows}")

    def _rows(self, call: str, handles: list[int], new: list[int]) -> Iterator[tuple[int, Sequence]]:
        """Decode the rows of a batch in order; what is wrong with a row is found before the next one is read."""
        for row, (handle, n) in enumerate(zip(handles, new, strict=True)):
            seq = self._sequence(call, handle)
            if handle in handles[:row]:
                raise ValueError(f"[{call}] handles[{row}] is a duplicate ({handle})")
            args.integer(call, f"num_new[{row}]", n, 0)
            yield row, seq

    def _fits_pool(self, seq: Sequence, n: int) -> bool:
        """Whether a sequence may hold `n` tokens more: in no group of blocks more than the pool allows."""
        held = max((self.held(seq, layer) for layer in self.kv), default=seq.num_tokens)
        longest = (2**31 - 1) * self.block_size
        fits = held + n <= self.options.max_blocks_per_seq * self.block_size
        return fits and self._rounded(seq.num_tokens + n) <= longest

    def _refuse_row(self, call: str, plan: ModelPlan, row: int, seq: Sequence, n: int) -> None:
        """Refuse what neither the pool's nor the plan's tables can hold."""
        length = seq.num_tokens + n
        if not self._fits_pool(seq, n) or length > 2**31 - 1:
            raise CapacityExceeded(f"[{call}] row {row} has {length} tokens, more than a sequence may have")
        for layer in self.kv:
            room = max(self._capacity(seq), self._rounded(length))
            width = self._num_entries(layer, seq.tables[layer.index], room)
            if width > plan.groups[layer.index].width:
                raise CapacityExceeded(f"[{call}] row {row} has {width} entries in group {layer.index}")

    @public_call
    def step(
        self, plan: ModelPlan, handles: Any, num_new: Any = 1, *, partial: bool = False, pad_to: Any = None
    ) -> None:
        self._grow("step", plan, handles, num_new, partial, pad_to)

    @public_call
    def reserve(self, plan: ModelPlan, handles: Any, num_new: Any) -> None:
        self._grow("reserve", plan, handles, num_new)

    def _grow(
        self, call: str, plan: ModelPlan, handles: Any, num_new: Any, partial: bool = False, pad_to: Any = None
    ) -> None:
        self._refuse_busy(call, plan)
        names = args.handles(call, handles, False)
        new = args.per_row(call, "num_new", num_new, len(names), args.MIN_INT64)
        self._refuse_rows(call, plan, len(names))
        shape, most = None, plan.limits.max_tokens
        if pad_to is not None:
            if not isinstance(pad_to, tuple | list) or len(pad_to) != 2:
                raise TypeError(f"[step] pad_to is {pad_to!r}, (rows, tokens) is needed")
            rows = args.integer("step", "pad_to[0]", pad_to[0], len(names), plan.limits.max_rows)
            shape = rows, args.integer("step", "pad_to[1]", pad_to[1], 0, most)
        batch: list[Sequence] = []
        for row, seq in self._rows(call, names, new):
            self._refuse_row(call, plan, row, seq, new[row])
            total = sum(new[: row + 1])
            if call == "step" and total > most:
                raise CapacityExceeded(f"[step] {total} new tokens, the plan's max_tokens is {most}")
            if call == "step" and shape is not None and total > shape[1]:
                raise ValueError(f"[step] pad_to has room for {shape[1]} tokens, the batch has {total}")
            batch.append(seq)
        needs = self._judge(
            call, batch, lambda row, *where: self._row_need(call, batch[row], new[row], *where), partial
        )
        self._start(plan, batch, needs, new if call == "step" else [0] * len(batch), shape)

    @public_call
    def unshare(self, plan: ModelPlan, handles: Any, lens: Any, first: int = 0, group: int = 0) -> None:
        """Replace every entry of a group that `compact` would refuse to rewrite by a copy; a step without tokens."""
        names, lengths, layer = self._read_lengths("unshare", handles, lens, first, group)
        self._refuse_busy("unshare", plan)
        self._refuse_rows("unshare", plan, len(names))
        batch: list[Sequence] = []
        for row, (name, length) in enumerate(zip(names, lengths, strict=True)):
            batch.append(self._sequence("unshare", name))
            self._judge_length("unshare", batch[row], layer, length)
            self._refuse_row("unshare", plan, row, batch[row], 0)

        def ask(row: int, other: Layers, judged: Judged) -> Need:
            seq, size = batch[row], other.block_size
            held = self.held(seq, other)
            places = self._not_own(seq, layer, lengths[row], first, judged) if other is layer else []
            return [(i, min(size, held - i * size)) for i in places], 0

        needs = self._judge("unshare", batch, ask)
        self._start(plan, batch, needs, [0] * len(batch), None)

    def _start(
        self, plan: ModelPlan, batch: list[Sequence], needs: list[Any], new: list[int], shape: tuple[int, int] | None
    ) -> None:
        """Take the blocks that were judged, group by group; then grow the rows that are served, and fill the plan."""
        served = [need is not None for need in needs]
        grown = [n if is_served else 0 for n, is_served in zip(new, served, strict=True)]
        lengths = [(seq.num_tokens, seq.num_tokens + n) for seq, n in zip(batch, grown, strict=True)]
        rows = [Row(seq.handle, *of, [Change() for _ in self.layers]) for seq, of in zip(batch, lengths, strict=True)]
        step = Step(self._next_step, plan, rows)
        taken = [zip(self.layers, need, strict=True) for need in needs if need is not None]
        self._make_room([(layer, len(replaced) + more) for row in taken for layer, (replaced, more) in row])
        for layer in self.layers:
            for seq, row, need in zip(batch, rows, needs, strict=True):
                if need is not None:
                    self._change(step, layer, seq.tables[layer.index], row.changes[layer.index], *need[layer.index])
        self._next_step += 1
        self.pending.append(step)
        for seq, row in zip(batch, rows, strict=True):
            seq.num_tokens = row.length
        plan.fill(batch, grown, served, step, shape)
        plan.step_id, plan.is_pending = step.id, True
        self._move_states(step)
        if self.options.in_order:
            self._pass(step)

    def _change(
        self, step: Step, layer: Layers, table: Table, change: Change, replaced: list[tuple[int, int]], appended: int
    ) -> None:
        for i, valid in replaced:
            old, new = table.entries[i], self._take_entry(layer)
            table.entries[i] = new
            layer.arena.holds.extend(old)
            change.replaced.append((i, old, new))
            if valid:
                step.copies.extend((layer.index, a, b, valid) for a, b in zip(old, new, strict=True))
                layer.arena.counters["cow_copies"] += layer.columns
                layer.arena.counters["cow_tokens"] += layer.columns * valid
        table.epoch += bool(replaced)
        table.entries.extend(self._take_entry(layer) for _ in range(appended))
        change.num_appended = appended

    def _pending_step(self, call: str, plan: ModelPlan) -> Step:
        self._refuse_plan(call, plan)
        for step in self.pending:
            if step.plan is plan and not step.noted:
                return step
        raise PlanStateError(f"[{call}] the plan is not pending, or its done was already noted")

    @public_call
    def done(self, plan: ModelPlan) -> None:
        self._pending_step("done", plan).noted = True
        while self.pending and self.pending[0].noted:
            self._pass(self.pending[0])

    def _pass(self, step: Step) -> None:
        """The oldest pending step is through: holds go, rows let go of what nobody reads, limbo drains."""
        for mark in [mark for mark in self._taken if mark.step == step.id]:
            mark.step, mark.stamp = None, self._tick()
        self.pending.remove(step)
        step.plan.is_pending = False
        for layer in self.layers:
            for row in step.rows:
                for block in [block for _, old, _ in row.changes[layer.index].replaced for block in old]:
                    layer.arena.holds.remove(block)
                    layer.arena.release(block)
        for layer in self.kv:
            for row in step.rows:
                seq = self._find(row.handle)
                if seq is not None:
                    self._let_go(seq, layer, row.length - self.lookahead)
        for arena in self.arenas:
            arena.drain_limbo()
        for load in [load for load in self._loads if load.step == step.id]:
            self._end_load(load)
        self._publish_waiting()
        self._tell()

    def _let_go(self, seq: Sequence, layer: Layers, p: int) -> None:
        """Entries that no query at position p or later reads become holes."""
        table = seq.tables[layer.index]
        for i, entry in enumerate(table.entries):
            if entry != HOLE and not layer.needs(i, p):
                table.entries[i] = HOLE
                table.epoch += 1
                for block in entry:
                    layer.arena.release(block)

    @public_call
    def rollback(self, plan: ModelPlan) -> None:
        step = self._pending_step("rollback", plan)
        if step is not self.pending[-1]:
            raise PlanStateError(f"[rollback] step {step.id} is not the newest ({self.pending[-1].id})")
        rows = {row.handle for row in step.rows}
        for seq in self.sequences():
            if any(parent in rows and newest >= step.id for parent, newest, _ in seq.ancestors):
                raise PlanStateError(f"[rollback] a fork of a row made after the step is open ({seq.handle})")
        self.pending.pop()
        plan.is_pending = False
        for mark in [mark for mark in self._taken if mark.step == step.id]:
            self._drop(mark)
        for load in [load for load in self._loads if load.step == step.id]:
            load.step = None
        for row in step.rows:
            one = self._find(row.handle)
            if one is not None:
                one.num_tokens = row.old_length
        for layer in reversed(self.layers):  # what was taken last is given back first
            for row in reversed(step.rows):
                self._undo_change(self._find(row.handle), layer, row.changes[layer.index])
        self._end_idle_loads()
        self._publish_waiting()
        for group in plan.groups:
            group.carry(len(step.rows))
        for arena in self.arenas:
            arena.drain_limbo()

    def _undo_change(self, seq: Sequence | None, layer: Layers, change: Change) -> None:
        if seq is not None:
            table = seq.tables[layer.index]
            table.epoch += bool(change.replaced or change.num_appended)
            self._pop_entries(seq, layer, len(table.entries) - change.num_appended)
        for i, old, new in reversed(change.replaced):
            if seq is not None:
                seq.tables[layer.index].entries[i] = old
            for k in reversed(range(layer.columns)):
                layer.arena.holds.remove(old[k])
                layer.arena.release(old[k] if seq is None else new[k])

    @reading_call
    def can(
        self, handles: Any = None, num_new: Any = 1, *, tokens: Any = None, namespace: Any = b"",
        reserve: Any = True, load: Any = False,
    ) -> bool:  # fmt: skip
        if (handles is None) == (tokens is None):
            raise TypeError("[can] handles or tokens are needed, one of them")
        if num_new != 1 if handles is None else (namespace, reserve, load) != (b"", True, False):
            raise TypeError("[can] num_new belongs to handles; namespace, reserve and load belong to tokens")
        try:
            if tokens is not None:
                args.how_to_open("can", tokens, namespace, reserve, load)
                self._judge_opening("can", tokens, namespace, reserve, load)
                return True
            names = args.handles("can", handles, False)
            new = args.per_row("can", "num_new", num_new, len(names), args.MIN_INT64)
            batch = [seq for _, seq in self._rows("can", names, [0] * len(names))]  # all handles before any count
            counts = [args.integer("can", "num_new", n, 0) for n in new]
            self._judge("can", batch, lambda row, *where: self._row_need("can", batch[row], counts[row], *where))
            return all(map(self._fits_pool, batch, counts))
        except (OutOfBlocks, OutOfSequences, CapacityExceeded):
            return False

    # ---- what is read -----------------------------------------------------------------------------------

    @reading_call
    def table(self, handle: int, group: int | None = None) -> np.ndarray:
        seq = self.one("table", handle, True)
        if group is None and len(self.layers) > 1:
            raise ValueError(f"[table] the pool has {len(self.layers)} layer groups, each with a table: name one")
        layer = self._layer("table", 0 if group is None else group)
        shown = self.shown(layer, seq.tables[layer.index].entries)
        return shown.ravel() if layer.kind == "state" or (group is None and layer.columns == 1) else shown

    def shown(self, layer: Layers, entries: list[list[int]]) -> np.ndarray:
        shown = [entry or [self.hole] * layer.columns for entry in entries]
        return np.array(shown, np.int32).reshape(-1, layer.columns)

    @reading_call
    def num_tokens(self, handle: int) -> int:
        return self.one("num_tokens", handle, True).num_tokens

    @reading_call
    def kv_len(self, handle: int, group: int = 0) -> int:
        return self.held(self.one("kv_len", handle, True), self._layer("kv_len", group))

    @reading_call
    def capacity(self, handle: int) -> int:
        return self._capacity(self.one("capacity", handle, True))

    @reading_call
    def is_open(self, handle: int) -> bool:
        return self._find(args.integer("is_open", "handle", handle, 0, args.MAX_INT64), True) is not None

    @reading_call
    def stats(self, arena: int = 0) -> PoolStats:
        one = self.arena_of("stats", arena)
        tokens = sum(seq.num_tokens for seq in self.sequences())
        capacity = sum(self._capacity(seq) for seq in self.sequences())
        now: dict[str, Any] = {"num_blocks": one.num_blocks, "reserved": one.reserved, "blank": len(one.blank)}
        now |= {"evictable": len(one.evictable), "limbo": len(one.limbo), "used": one.used()}
        now |= {"shared": sum(count > 1 for count in one.references().values()), "tokens": tokens, "capacity": capacity}
        now |= {"sequences": len(self._sequences), "pending": len(self.pending), "evicted_tokens": self._evicted_tokens}
        now["fragmentation"] = 1.0 - tokens / capacity if capacity else 0.0
        return PoolStats(**{name: now.get(name, one.counters[name]) for name in PoolStats._fields})

    @reading_call
    def digest(self) -> int:
        """Return a hash of the names of all calls so far that may change the pool."""
        return self._digest

    @reading_call
    def fingerprint(self) -> int:
        """Return a hash of the whole state, in which handles have no tag."""
        arenas = [{name: value for name, value in vars(one).items() if name != "pool"} for one in self.arenas]
        rest = {name: value for name, value in vars(self).items() if name not in ("arenas", "_tag", "_digest")}
        state = re.sub(r"\d{16,}", lambda handle: str(int(handle[0]) % 2**LOCAL_BITS), repr((arenas, rest)))
        return int.from_bytes(hashlib.blake2b(state.encode(), digest_size=8).digest(), "little")

    @reading_call
    def check(self) -> None:
        """Recompute what the bookkeeping implies; raises `CorruptState`."""
        for arena in self.arenas:
            limbo, named = [block for block, _ in arena.limbo], {*arena.references(), *arena.holds}
            cached = {block for number, block in self.entries if number == arena.number}
            bundles = {block for mark in self._taken for block in mark.blocks() if arena.number == 0}
            kept = named | bundles | cached | set(arena.unused)
            places = sorted(arena.blank + limbo + list(kept - set(limbo)))
            if places != list(range(arena.reserved, arena.num_blocks)) or (limbo and not self.pending):
                raise CorruptState(f"[check] arena {arena.number}: a block is in no place or in two: {places}, {limbo}")
        for seq in self.sequences():
            if seq.num_tokens > self._capacity(seq) or len(seq.tokens) > seq.num_tokens:
                raise CorruptState(f"[check] table and length do not fit ({seq.handle})")
        for node in self._nodes.values():
            for group, entry in node.kv.items():
                if any(self.is_unwritten(self.layers[group], block) for block in entry.blocks):
                    raise CorruptState(f"[check] found before it is written: {entry.blocks}")

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        self.shutdown()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("[Pool] a pool cannot be pickled or copied")


# ---- plans ---------------------------------------------------------------------------------------------

# Nothing is incremental here: the only memory is the three numbers per row and group that the contract names (handle,
# epoch, entries written), and they decide `dirty_rows`, never the contents.
COMMON = ("positions", "cu_q_lens", "slot_ids")  #: the others are arrays of each layer group
ARRAYS = (*COMMON, "block_tables", "seq_lens", "slot_mapping", "indptr", "indices", "last_page_len")
#: The arrays of each format.
FORMATS: dict[str, tuple[str, ...]] = {name: (name,) for name in ARRAYS[:6]}
FORMATS["csr"] = "indptr", "indices", "last_page_len"
FORMATS["page_batch_info"] = "slot_ids", "block_tables", "seq_lens", "cu_q_lens", "slot_mapping"
ALWAYS = ("copies", "dirty_rows")  #: that each group of blocks has, whatever the formats
BY_COLUMN = {"slot_mapping": 0, "block_tables": 2, "indices": 1}  #: the axis of columns
ROW_FORMATS = {"block_tables", "csr", "page_batch_info"}  #: that `dirty_rows` speaks about
MOST = 2**31 - 1


def _sums(counts: list[int], padding: int) -> list[int]:
    return [sum(counts[:i]) for i in range(len(counts) + 1)] + [sum(counts)] * padding


def _padded(values: list[int], length: int, pad: int = 0) -> np.ndarray:
    return np.array(values + [pad] * (length - len(values)), np.int32)


class GroupArrays:
    """What a plan has for one layer group: an element of ``plan.groups``."""

    def __init__(self, plan: ModelPlan, layer: Any) -> None:
        self._plan, self._layer = plan, layer
        self.width = ceil_div(plan.limits.table_width * plan.pool.block_size, layer.block_size)
        # row -> (handle, epoch, entries written); None if carried; rows that show padding are not in it
        self._memory: dict[int, tuple[int, int, int] | None] = dict.fromkeys(range(plan.limits.max_rows))
        if layer.kind == "state":
            self.state_loads = self.state_saves = np.zeros((0, 1 + layer.group.blocks), np.int32)

    def fill(self, batch: list[Any], fresh: list[tuple[Any, int]], step: Any, num_rows: int, num_tokens: int) -> None:
        """Write everything: `batch` as it is after the step, `fresh` the new tokens as (sequence, position)."""
        layer, pool = self._layer, self._plan.pool
        g, size, columns = layer.index, layer.block_size, layer.columns
        tables = [seq.tables[g] for seq in batch]
        held = [pool.held(seq, layer) for seq in batch]
        padding = num_rows - len(batch)
        self._show({"kv_lens": _padded(held, num_rows)})
        if layer.kind == "state":
            moves = [pool.state_move(row, layer) for row in step.rows] + [(-1, -1)] * padding
            self.state_src, self.state_dst = np.array(moves, np.int32).reshape(-1, 2).T.copy()
            return
        places = [(seq.tables[g].entries, p - seq.tables[g].evicted) for seq, p in fresh]
        slots = [[block * size + p % size for block in entries[p // size]] for entries, p in places]
        slots += [[-1] * columns] * (num_tokens - len(slots))
        pages = [[e for e in t.entries[: ceil_div(n, size)] if e] for t, n in zip(tables, held, strict=True)]
        rows = np.full((num_rows, self.width, columns), self._plan.pad, np.int32)
        for row, table in zip(rows, tables, strict=False):
            row[: len(table.entries)] = pool.shown(layer, table.entries)
        indices = [entry for row in pages for entry in row]
        self._show({
            "block_tables": rows,
            "slot_mapping": np.array(slots, np.int32).reshape(-1, columns).T,
            "indptr": np.array(_sums([len(row) for row in pages], padding), np.int32),
            "indices": np.array(indices, np.int32).reshape(-1, columns),
            "last_page_len": _padded([(n - 1) % size + 1 if n else 0 for n in held], num_rows),
        })  # fmt: skip
        starts = [max((i + 1 for i, entry in enumerate(t.entries) if not entry), default=0) * size for t in tables]
        self.kv_starts = np.array(starts + [0] * padding, np.int32)
        self.copies = np.array([copy[1:] for copy in step.copies if copy[0] == g], np.int32).reshape(-1, 3)
        self.copies.flags.writeable = False
        self.dirty_rows = np.array(self._dirty(batch, num_rows), np.int32)

    def _dirty(self, batch: list[Any], num_rows: int) -> list[int]:
        """Rows that changed since they were shown last."""
        if not ROW_FORMATS & set(self._plan.formats):
            return []
        tables = [(seq.handle, seq.tables[self._layer.index]) for seq in batch]
        now = [(handle, table.epoch, len(table.entries)) for handle, table in tables]
        dirty = [row for row, shown in enumerate(now) if self._memory.get(row) != shown]
        self._memory.update(enumerate(now))
        padding = [row for row in range(len(now), num_rows) if row in self._memory]
        for row in padding:
            del self._memory[row]
        return dirty + padding

    def carry(self, num_rows: int) -> None:
        """Distrust what was written, so that these rows are dirty when they are shown next."""
        self._memory.update(dict.fromkeys(range(num_rows)))

    def _show(self, arrays: dict[str, np.ndarray]) -> None:
        """Arrays of the plan's formats are attributes."""
        names = {"kv_lens" if name == "seq_lens" else name for name in self._plan.names}
        vars(self).update({name: array for name, array in arrays.items() if name in names})


class ModelPlan:
    """The arrays that one step fills, all int32: attributes and errors as `kvpool.Plan` has them."""

    def __init__(
        self, pool: Any, max_rows: int, max_tokens: int | None = None, *,
        formats: Any = ("block_tables", "seq_lens", "slot_mapping"), table_width: int | None = None,
    ) -> None:  # fmt: skip
        if not hasattr(pool, "options"):
            raise TypeError(f"[Plan] pool is a {type(pool).__name__}, a pool is needed")
        self.pool = pool
        pool.refuse_closed("Plan")
        rows = args.integer("Plan", "max_rows", max_rows, 1, 2**20)
        tokens = args.integer("Plan", "max_tokens", rows if max_tokens is None else max_tokens, 0, MOST)
        width = pool.options.max_blocks_per_seq if table_width is None else table_width
        self.limits = PlanLimits(rows, tokens, args.integer("Plan", "table_width", width, 1, MOST))
        self.formats = (formats,) if isinstance(formats, str) else tuple(formats)
        for name in self.formats:
            if name not in FORMATS:
                raise ValueError(f"[Plan] unknown format ({name!r}), one of {', '.join(FORMATS)}")
        self.names = [name for name in ARRAYS if any(name in FORMATS[one] for one in self.formats)]
        self.pad = -1 if "page_batch_info" in self.formats else pool.hole  #: of block tables
        self.groups = tuple(GroupArrays(self, layer) for layer in pool.layers)
        self.is_pending, self.step_id = False, 0
        self.fill([], [], [], Step(0, self, []), None)

    def bind(self) -> None:
        """Every row is dirty in the next step."""
        if self.is_pending:
            raise PlanStateError("[bind] the plan is pending, call done or rollback first")
        for group in self.groups:
            group.carry(self.limits.max_rows)

    def fill(
        self, batch: list[Any], new: list[int], served: list[bool], step: Any, shape: tuple[int, int] | None
    ) -> None:
        """Write everything: `batch` as it is after the step, `new` tokens served per row."""
        rows, tokens = shape or (len(batch), sum(new))
        self.num_tokens = sum(new)
        self.handles = np.array([seq.handle for seq in batch], np.int64)
        self.served = np.array(served, np.uint8)
        fresh = [(seq, p) for seq, n in zip(batch, new, strict=True) for p in range(seq.num_tokens)[-n:] if n]
        arrays = {
            "positions": _padded([p for _, p in fresh], tokens),
            "cu_q_lens": np.array(_sums(new, rows - len(batch)), np.int32),
            "slot_ids": _padded([seq.handle & 0xFFFFF for seq in batch], rows, -1),
        }
        vars(self).update({name: array for name, array in arrays.items() if name in self.names})
        for group in self.groups:
            group.fill(batch, fresh, step, rows, tokens)

    def __getattr__(self, name: str) -> np.ndarray:
        """An array of the only group; without columns, if it has one."""
        if name in COMMON or name not in (*ARRAYS, *ALWAYS):
            raise AttributeError(f"the plan has no {name!r}: its formats are {self.formats}")
        if len(self.groups) > 1:
            raise ValueError(f"[Plan] {name} differs between layer groups, see plan.groups")
        array: np.ndarray = getattr(self.groups[0], "kv_lens" if name == "seq_lens" else name)
        if name in BY_COLUMN and array.shape[BY_COLUMN[name]] == 1:
            return array.squeeze(BY_COLUMN[name])
        return array

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("[Plan] a plan cannot be pickled or copied")
