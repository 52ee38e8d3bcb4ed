"""The half of `kvpool.testing.model` for pools with layer groups: ``docs/groups.md``, line by line.

`Arena` is a set of blocks, `Table` is what a sequence has in one group. A state group is a table of at most one entry
of one slot. Who names a block is recounted from the tables whenever it is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvpool.errors import CapacityExceeded, CorruptState, PlanStateError
from kvpool.groups import Group
from kvpool.testing import model_args as args
from kvpool.testing.model_blocks import BlockSet, Step, ceil_div, public_call
from kvpool.testing.model_plan import ModelPlan, Sequence, dirty_rows
from kvpool.testing.model_steps import StepModel

MAX_GROUPS, MAX_ARENAS, MULTIPLES = 8, 8, (1, 2, 4)
HOLE: list[int] = []  #: what a table has instead of an entry that was let go


class Arena(BlockSet):
    """A set of blocks, or of state slots, of a pool with groups."""

    def __init__(self, pool: GroupModel, index: int, num_blocks: int, reserved: int) -> None:
        self._pool, self._number, self.num_blocks, self._reserved = pool, index, num_blocks, reserved
        self._count()
        self._empty_blocks()

    @property
    def _pending(self) -> list[Any]:  # type: ignore[override]
        return self._pool._pending

    def _names(self) -> list[int]:
        return [
            block
            for seq in self._pool._sequences.values()
            for layer in self._pool.layers
            if layer.arena is self
            for entry in seq.tables[layer.index].entries
            for block in entry
        ]

    def is_idle(self, block: int) -> bool:
        """Nobody names the block, and no pending step may use it."""
        in_limbo = any(block == one for one, _ in self._limbo)
        return not self._refcount(block) and block not in self._holds and not in_limbo

    def _arena(self, call: str, arena: Any) -> BlockSet:
        return self._pool._arena(call, arena)

    def _has_own_cache(self) -> bool:
        return False

    def _refuse_closed(self, call: str) -> None:
        self._pool._refuse_closed(call)

    def _drain(self) -> None:
        self._pool._drain()

    def _chain(self, *words: object) -> None:
        self._pool._chain(self._number, *words)


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

    @property
    def num_kept(self) -> int:
        """Entries that are never let go."""
        return ceil_div(self.group.keep, self.block_size)


@dataclass(eq=False)
class Table:
    """What a sequence has in one group."""

    entries: list[list[int]] = field(default_factory=list)
    epoch: int = 0
    evicted: int = 0  # tokens that left by eviction


@dataclass(eq=False)
class Change:
    """What a step did to one row in one group."""

    replaced: list[tuple[int, list[int], list[int]]] = field(default_factory=list)  # index, old entry, new entry
    num_appended: int = 0


@dataclass(eq=False)
class GroupRow:
    """What a step did to one sequence."""

    handle: int
    old_length: int
    length: int
    changes: list[Change]


#: What a row needs in one group: entries to replace as (index, valid tokens), and how many to append.
Need = tuple[list[tuple[int, int]], int]


def read_groups(groups: Any) -> tuple[Group, ...]:
    """Return the groups of a pool, judged by themselves."""
    if not isinstance(groups, list | tuple):
        raise TypeError(f"[Pool] groups is a {type(groups).__name__}, a list of Group is needed")
    for group in groups:
        if not isinstance(group, Group):
            raise TypeError(f"[Pool] a group is a {type(group).__name__}, a Group is needed")
    if not 1 <= len(groups) <= MAX_GROUPS:
        raise ValueError(f"[Pool] {len(groups)} groups, 1 .. {MAX_GROUPS} are legal")
    return tuple(groups)


def make_layers(
    pool: GroupModel, groups: tuple[Group, ...], num_blocks: int, block_size: int, reserved: int
) -> tuple[list[Layers], list[Arena]]:
    """Settle block sizes and arenas."""
    sizes = {0: num_blocks}
    for group in groups:
        if group.kind == "state":
            continue
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
    used = {group.arena for group in groups if group.kind != "state"}
    if used != set(range(len(used))):
        raise ValueError(f"[Pool] arenas are {sorted(used)}, they must be 0, 1, 2, ... without a gap")
    for arena, size in sizes.items():
        if size <= reserved:
            raise ValueError(f"[Pool] num_blocks of arena {arena} is {size}, more than {reserved} are needed")
    arenas = [pool.arena_class(pool, i, sizes[i], reserved) for i in range(len(sizes))]
    layers = []
    for index, group in enumerate(groups):
        if group.kind == "state":
            arenas.append(pool.arena_class(pool, len(arenas), group.size, 0))
            layers.append(Layers(index, "state", group, 1, 1, arenas[-1]))
        else:
            size = group.block_size or block_size
            layers.append(Layers(index, group.kind, group, size, group.columns, arenas[group.arena]))
    return layers, arenas


class GroupModel(StepModel):
    """A pool of several layer groups: ``ModelPool(..., groups=[...])`` makes one.

    Parameters
    ----------
    groups : list of Group
        The groups, in the order of the tables.
    lookahead : int
        By how many tokens `truncate` may always shorten a sequence.
    """

    arena_class, may_cache = Arena, False

    def __init__(self, *sizes: Any, groups: Any = None, lookahead: int = 0, **options: Any) -> None:
        given = read_groups(groups)
        lookahead = args.integer("Pool", "lookahead", lookahead, 0)
        for group in given:
            if group.kind in ("window", "chunk") and lookahead >= group.size:
                raise ValueError(f"[Pool] lookahead is {lookahead}, not below {group.size}")
        if options.get("prefix_cache") is True and not self.may_cache:
            raise ValueError("[Pool] prefix_cache is not for pools with groups")
        self.layers: list[Layers] = []
        self.arenas: list[Arena] = []
        self.plan_class = GroupPlan
        super().__init__(*sizes, **options)
        plain = self.options
        if all(group.kind == "state" for group in given) and options.get("max_blocks_per_seq") is None:
            plain = plain._replace(max_blocks_per_seq=(2**31 - 1) // plain.block_size)
        try:
            self.layers, self.arenas = make_layers(
                self, given, plain.num_blocks, plain.block_size, plain.reserved_blocks
            )
        except ValueError:
            self.shutdown()
            raise
        self.options = plain._replace(lookahead=lookahead, groups=given)
        self.lookahead = lookahead
        self.hole = 0 if plain.reserved_blocks else -1
        self._empty()

    def _empty(self) -> None:
        super()._empty()
        for arena in self.arenas:
            arena._empty_blocks()

    @property
    def _with_entries(self) -> list[Layers]:
        """The groups that have entries of blocks."""
        return [layer for layer in self.layers if layer.kind != "state"]

    def _reset(self) -> None:
        for arena in self.arenas:
            arena._dropped.extend(sorted(arena._committed))
        super()._reset()

    def _arena(self, call: str, arena: Any) -> BlockSet:
        return self.arenas[args.integer(call, "arena", arena, 0, len(self.arenas) - 1)]

    # ---- references ---------------------------------------------------------------------------------------

    def _release_in(self, arena: Arena, block: int) -> None:
        """A reference or a hold went away: if it was the last one, the block leaves."""
        arena._release(block)

    def _drain_limbo(self) -> None:
        for arena in self.arenas:
            arena._drain_limbo()

    def _pop_entries(self, seq: Sequence, layer: Layers, length: int) -> None:
        """Drop entries from the end until `length` are left, columns descending."""
        entries = seq.tables[layer.index].entries
        while len(entries) > length:
            for block in reversed(entries.pop()):
                self._release_in(layer.arena, block)

    def _make_room(self, entries: list[tuple[Layers, int]]) -> None:
        """Make room for entries of groups that a call is about to take."""

    def _take_entry(self, layer: Layers) -> list[int]:
        return [layer.arena._take() for _ in range(layer.columns)]

    # ---- sequences ----------------------------------------------------------------------------------------

    def _refuse_count(self, call: str, tokens: Any) -> int:
        """Return a count of tokens, if there are blocks for them."""
        if isinstance(tokens, list | tuple | np.ndarray):
            raise ValueError(f"[{call}] a prompt is not for pools with groups, a count of tokens is needed")
        count = args.count(call, "tokens", tokens)
        if count > self.options.max_blocks_per_seq * self.block_size:
            raise CapacityExceeded(f"[{call}] {count} tokens, max_blocks_per_seq is {self.options.max_blocks_per_seq}")
        kv = self._with_entries
        for arena in self.arenas:
            need = sum(ceil_div(count, layer.block_size) * layer.columns for layer in kv if layer.arena is arena)
            watermark = 0 if arena._number else self.options.watermark
            if need and need + watermark > arena._available():
                arena._out_of_blocks(call, need, watermark)
        self._refuse_slots(call, 1)
        return count

    def _refuse_open(self, call: str, tokens: Any, namespace: bytes, load: bool, reserve: bool) -> None:
        if load:
            raise ValueError(f"[{call}] load is not for pools with groups and no prefix cache")
        self._refuse_count(call, tokens)

    @public_call
    def open(self, tokens: Any = 0, namespace: bytes = b"") -> int:
        """Open an empty sequence with entries for a number of tokens; returns its handle."""
        args.namespace("open", namespace)
        count, kv = self._refuse_count("open", tokens), self._with_entries
        seq = self._create(0, [])
        self._make_room([(layer, ceil_div(count, layer.block_size)) for layer in kv])
        for layer in kv:
            table = seq.tables[layer.index]
            table.entries = [self._take_entry(layer) for _ in range(ceil_div(count, layer.block_size))]
        self._chain("open", count, self._local(seq.handle), [table.entries for table in seq.tables])
        return seq.handle

    def _create(self, num_tokens: int, table: list[int]) -> Sequence:
        seq = super()._create(num_tokens, table)
        seq.tables = [Table() for _ in self.layers]
        return seq

    def _share_tables(self, parent: Sequence, child: Sequence) -> None:
        """Entries below the length, and states."""
        room = self._rounded(parent.num_tokens)
        for layer in self.layers:
            table = parent.tables[layer.index]
            shared = 1 if layer.kind == "state" else self._num_entries(layer, table, room)
            child.tables[layer.index].entries = list(table.entries[:shared])
            child.tables[layer.index].evicted = table.evicted

    def _refuse_gone(self, seq: Sequence, length: int) -> None:
        """Refuse a length at which a query would read what was let go, or a state that is gone."""
        for layer in self.layers:
            if layer.kind == "state":
                if length != seq.num_tokens:
                    raise ValueError(f"[truncate] len is {length}, only {seq.num_tokens} is left of the state")
                continue
            entries = seq.tables[layer.index].entries
            size = layer.block_size
            gone = {i * size + k for i, entry in enumerate(entries) if entry == HOLE for k in range(size)}
            if gone & layer.reads(length):
                legal = (n for n in range(length, seq.num_tokens) if not gone & layer.reads(n))
                least = next(legal, seq.num_tokens)
                raise ValueError(f"[truncate] len is {length}, the least that group {layer.index} has is {least}")

    def _shorten(self, seq: Sequence, length: int) -> None:
        for layer in self._with_entries:
            table = seq.tables[layer.index]
            keep = self._num_entries(layer, table, self._rounded(length))
            table.epoch += keep < len(table.entries)
            self._pop_entries(seq, layer, keep)
        seq.num_tokens = length

    def _pop_all(self, seq: Sequence) -> None:
        """Group by group, entries from the last to the first; the states at the end."""
        for layer in sorted(self.layers, key=lambda layer: layer.kind == "state"):
            self._pop_entries(seq, layer, 0)

    # ---- what a step needs --------------------------------------------------------------------------------

    def _group_need(self, seq: Sequence, n: int, layer: Layers, lost: list[int], reads: dict[int, int]) -> Need:
        """What `n` tokens need in a group; `lost` and `reads` are what rows before gave up and copy, in its arena."""
        table, arena, size = seq.tables[layer.index], layer.arena, layer.block_size
        entries, length = table.entries, seq.num_tokens - table.evicted
        named = arena._names()

        def is_own(block: int) -> bool:
            count = named.count(block) + arena._raw.get(block, 0) - lost.count(block)
            return count == 1 and block not in arena._committed

        if n == 0:
            return [], 0
        if layer.kind == "state":
            if not entries:
                return [], 1
            ((slot,),) = entries
            in_place = self.options.in_order and is_own(slot) and slot not in lost  # of rows that read it
            return ([], 0) if in_place else ([(0, 0)], 0)
        last = ceil_div(length + n, size)
        replaced = []
        for i in range(length // size, min(last, len(entries))):
            valid = max(0, length - i * size)
            if any(
                not is_own(block) or valid < max(self._floor_in(layer, block), reads.get(block, 0))
                for block in entries[i]
            ):
                replaced.append((i, valid))
        room = max(self._capacity(seq), self._rounded(seq.num_tokens + n))
        return replaced, self._num_entries(layer, table, room) - len(entries)

    def _floor_in(self, layer: Layers, block: int) -> int:
        """Tokens of the block that pending copies still have to read."""
        reads = [
            tokens
            for step in self._pending
            for index, src, _, tokens in step.copies
            if src == block and self.layers[index].arena is layer.arena
        ]
        return max(reads, default=0)

    def _group_needs(
        self, batch: list[Any], new: list[int], partial: bool, states: bool
    ) -> tuple[list[list[Need] | None], tuple[int, Arena, int] | None]:
        """Judge the batch: needs per row (None if not served), and (row, arena, needed) of the first that is short."""
        lost: dict[int, list[int]] = {arena._number: [] for arena in self.arenas}
        reads: dict[int, dict[int, int]] = {arena._number: {} for arena in self.arenas}
        total = dict.fromkeys(lost, 0)
        rows: list[list[Need] | None] = []
        short: tuple[int, Arena] | None = None
        for seq, n in zip(batch, new, strict=True):
            needs: list[Need] = []
            for layer in self.layers:
                where = layer.arena._number
                asked = n if states or layer.kind != "state" else 0
                needs.append(self._group_need(seq, asked, layer, lost[where], reads[where]))
            after = dict(total)
            for layer, (replaced, appended) in zip(self.layers, needs, strict=True):
                after[layer.arena._number] += (len(replaced) + appended) * layer.columns
            lacking = [arena for arena in self.arenas if after[arena._number] > arena._available()]
            if lacking and partial:
                rows.append(None)
                continue
            if lacking and short is None:
                short = len(rows), lacking[0]
            total = after
            rows.append(needs)
            for layer, (replaced, _) in zip(self.layers, needs, strict=True):
                for i, valid in replaced:
                    for block in seq.tables[layer.index].entries[i]:
                        lost[layer.arena._number].append(block)
                        copied = reads[layer.arena._number]
                        copied[block] = max(copied.get(block, 0), valid)
        return rows, None if short is None else (*short, total[short[1]._number])

    def _judge(self, call: str, batch: list[Any], new: list[int], partial: bool) -> list[Any]:
        rows, short = self._group_needs(batch, new, partial, call == "step")
        if short is not None:
            row, arena, needed = short
            arena._out_of_blocks(call, needed, row=row, handle=batch[row].handle)
        return rows

    def _refuse_row(self, call: str, plan: ModelPlan, row: int, seq: Any, n: int) -> None:
        length = seq.num_tokens + n
        if not self._fits_pool(seq, n):
            raise CapacityExceeded(f"[{call}] row {row} has {length} tokens, more than a sequence may have")
        for layer in self.layers:
            if layer.kind != "state":
                table = seq.tables[layer.index]
                width = self._num_entries(layer, table, max(self._capacity(seq), self._rounded(length)))
                if width > plan.groups[layer.index].width:
                    raise CapacityExceeded(f"[{call}] row {row} has {width} entries in group {layer.index}")

    def _needs(self, batch: list[Any], new: list[int], partial: bool) -> tuple[list[Any], int, int]:
        rows, short = self._group_needs(batch, new, partial, True)
        return rows, 0, -1 if short is None else short[0]

    # ---- steps --------------------------------------------------------------------------------------------

    def _begin(self, plan: ModelPlan, batch: list[Any], needs: list[Any]) -> Step:
        """Take the blocks that were judged, group by group, and change the tables; lengths stay."""
        rows = [GroupRow(seq.handle, seq.num_tokens, seq.num_tokens, [Change() for _ in self.layers]) for seq in batch]
        step = Step(self._next_step, plan, rows, [])
        taken = [zip(self.layers, need, strict=True) for need in needs if need is not None]
        self._make_room([(layer, len(replaced) + more) for row in taken for layer, (replaced, more) in row])
        for layer in self.layers:
            for seq, row, need in zip(batch, rows, needs, strict=True):
                replaced, num_appended = need[layer.index] if need is not None else ([], 0)
                self._change(step, layer, seq.tables[layer.index], row.changes[layer.index], replaced, num_appended)
        self._next_step += 1
        for index, _, _, tokens in step.copies:
            counters = self.layers[index].arena._counters
            counters["cow_copies"] += 1
            counters["cow_tokens"] += tokens
        self._pending.append(step)
        return step

    def _change(
        self, step: Step, layer: Layers, table: Table, change: Change, replaced: list[tuple[int, int]], appended: int
    ) -> None:
        for i, valid in replaced:
            old, new = table.entries[i], self._take_entry(layer)
            table.entries[i] = new
            layer.arena._holds.extend(old)
            change.replaced.append((i, old, new))
            if valid:
                step.copies.extend((layer.index, a, b, valid) for a, b in zip(old, new, strict=True))
        table.epoch += bool(replaced)
        table.entries.extend(self._take_entry(layer) for _ in range(appended))
        change.num_appended = appended

    def _started(self, call: str, step: Step, new: list[int]) -> None:
        for row in step.rows:
            row.length = self._sequence(call, row.handle).num_tokens
        plan: Any = step.plan
        plan.step_id, plan._pending = step.id, True
        plan.fill_states(step, self)
        changes = [(c.replaced, c.num_appended) for row in step.rows for c in row.changes]
        self._chain(call, step.id, [self._local(row.handle) for row in step.rows], changes, new)
        if self.options.in_order:
            self._pass(step)

    def _pass(self, step: Step) -> None:
        """The oldest pending step is through: holds go, rows let go of what nobody reads, limbo drains."""
        self._pending.remove(step)
        step.plan._pending = False
        for layer in self.layers:
            for row in step.rows:
                for _, old, _ in row.changes[layer.index].replaced:
                    for block in old:
                        layer.arena._holds.remove(block)
                        self._release_in(layer.arena, block)
        for row in step.rows:
            seq = self._find(row.handle)
            if seq is not None:
                for layer in self.layers:
                    self._let_go(seq, layer, row.length - self.lookahead)
        self._drain_limbo()

    def _let_go(self, seq: Any, layer: Layers, p: int) -> None:
        """Entries that no query at position p or later reads become holes."""
        table = seq.tables[layer.index]
        for i, entry in enumerate(table.entries):
            if entry != HOLE and i >= layer.num_kept and (i + 1) * layer.block_size <= layer.last_unread(p):
                table.entries[i] = HOLE
                table.epoch += 1
                for block in entry:
                    self._release_in(layer.arena, block)

    def _undo_all(self, step: Step) -> None:
        """What was taken last is given back first."""
        for row in step.rows:
            seq = self._find(row.handle)
            if seq is not None:
                seq.num_tokens = row.old_length
        for layer in reversed(self.layers):
            for row in reversed(step.rows):
                self._undo_change(self._find(row.handle), layer, row.changes[layer.index])

    def _undo_change(self, seq: Any, layer: Layers, change: Change) -> None:
        if seq is not None:
            table = seq.tables[layer.index]
            table.epoch += bool(change.replaced or change.num_appended)
            self._pop_entries(seq, layer, len(table.entries) - change.num_appended)
        for i, old, new in reversed(change.replaced):
            if seq is not None:
                seq.tables[layer.index].entries[i] = old
            for k in reversed(range(layer.columns)):
                layer.arena._holds.remove(old[k])
                self._release_in(layer.arena, old[k] if seq is None else new[k])

    # ---- tokens leave a sequence that goes on --------------------------------------------------------------

    def _full_layers(self, call: str, group: Any) -> Layers:
        """The group that tokens are to leave."""
        layer = self.layers[args.integer(call, "group", group, 0, len(self.layers) - 1)]
        if layer.kind != "full":
            raise ValueError(f"[{call}] group {group} is a {layer.kind}, tokens leave full groups only")
        return layer

    def _held(self, seq: Sequence, layer: Layers) -> int:
        return seq.num_tokens - seq.tables[layer.index].evicted

    def _judge_length(self, call: str, seq: Sequence, layer: Layers, length: int) -> None:
        if not 0 <= length <= self._held(seq, layer):
            raise ValueError(f"[{call}] len is {length}, 0 .. {self._held(seq, layer)} is legal")

    def _not_own(
        self, seq: Sequence, layer: Layers, length: int, first: int, before: list[tuple[int, int]]
    ) -> list[int]:
        """Entries that compaction to `length` tokens rewrites and must not; `before` is what rows before replaced."""
        arena, entries = layer.arena, seq.tables[layer.index].entries
        named, given = arena._names(), [block for block, _ in before]
        if length == self._held(seq, layer):
            return []

        def is_own(block: int) -> bool:
            count = named.count(block) + arena._raw.get(block, 0) - given.count(block)
            read = max((tokens for other, tokens in before if other == block), default=0)
            return count == 1 and block not in arena._committed and max(read, self._floor_in(layer, block)) == 0

        rewritten = range(first // layer.block_size, ceil_div(length, layer.block_size))
        return [i for i in rewritten if not all(map(is_own, entries[i]))]

    @public_call
    def unshare(self, plan: ModelPlan, handles: Any, lens: Any, first: int = 0, group: int = 0) -> None:
        """Replace every entry of a group that `compact` would refuse to rewrite by a copy; a step without tokens."""
        names, lengths, first = self._unshare_arguments(plan, handles, lens, first)
        if len(names) > plan.limits.max_rows:
            raise CapacityExceeded(f"[unshare] {len(names)} rows, the plan's max_rows is {plan.limits.max_rows}")
        layer = self._full_layers("unshare", group)
        batch: list[Sequence] = []
        needs: list[list[Need]] = []
        before: list[tuple[int, int]] = []  # block, tokens that its copy reads
        short = -1
        for row, name in enumerate(names):
            seq = self._sequence("unshare", name)
            self._judge_length("unshare", seq, layer, lengths[row])
            self._refuse_row("unshare", plan, row, seq, 0)
            batch.append(seq)
            held, size = self._held(seq, layer), layer.block_size
            replaced = [(i, min(size, held - i * size)) for i in self._not_own(seq, layer, lengths[row], first, before)]
            entries = seq.tables[layer.index].entries
            before += [(block, tokens) for i, tokens in replaced for block in entries[i]]
            needs.append([(replaced, 0) if other is layer else ([], 0) for other in self.layers])
            if len(before) > layer.arena._available() and short < 0:
                short = row
        if short >= 0:
            layer.arena._out_of_blocks("unshare", len(before), row=short, handle=batch[short].handle)
        self._start_unshare(plan, batch, needs, lengths)

    def _judge_eviction(self, call: str, seq: Sequence, leaving: int) -> None:
        if any(row.handle == seq.handle for step in self._pending for row in step.rows):
            raise PlanStateError(f"[{call}] handle is a row of a pending plan ({seq.handle})")

    def _lose_in(self, layer: Layers, seq: Sequence, n: int, left: int) -> None:
        """Tokens left a table, of which the first `left` entries stay where they are."""
        table = seq.tables[layer.index]
        seq.point = seq.num_tokens
        table.evicted += n
        table.epoch += 1
        self._counters["evicted_tokens"] += n

    @public_call
    def compact(self, handles: Any, lens: Any, first: int = 0, group: int = 0) -> None:
        """Keep `lens` tokens at the front of each table of a group, the first `first` where they are."""
        names = args.handles("compact", handles)
        lengths = args.per_row("compact", "lens", lens, len(names), args.MIN_INT64)
        first = args.count("compact", "first", first)
        layer = self._full_layers("compact", group)
        batch = [self._sequence("compact", name) for name in names]
        for seq, length in zip(batch, lengths, strict=True):
            self._judge_length("compact", seq, layer, length)
            self._judge_eviction("compact", seq, self._held(seq, layer) - length)
            if self._not_own(seq, layer, length, first, []):
                raise ValueError("[compact] an entry must not be rewritten, call unshare first")
        for seq, length in zip(batch, lengths, strict=True):
            leaving, room = self._held(seq, layer) - length, self._capacity(seq)
            if leaving:
                table = seq.tables[layer.index]
                stay = ceil_div(room, layer.block_size) - (table.evicted + leaving) // layer.block_size
                self._pop_entries(seq, layer, stay)
                self._lose_in(layer, seq, leaving, stay)
        self._chain("compact", layer.index, *map(self._local, names), *lengths)

    @public_call
    def evict_blocks(self, handle: int, indices: Any, group: int = 0) -> None:
        """Full entries leave the table of a group, by ascending index."""
        places = args.one_or_many("evict_blocks", "indices", indices, ("int32", "int64"))
        layer = self._full_layers("evict_blocks", group)
        seq = self._one("evict_blocks", handle)
        for place in places:
            args.integer("evict_blocks", "index", place, 0, self._held(seq, layer) // layer.block_size - 1)
        if places != sorted(set(places)):
            raise ValueError(f"[evict_blocks] indices must ascend ({places})")
        self._judge_eviction("evict_blocks", seq, len(places) * layer.block_size)
        entries = seq.tables[layer.index].entries
        for place in reversed(places):
            for block in reversed(entries.pop(place)):
                self._release_in(layer.arena, block)
        if places:
            self._lose_in(layer, seq, len(places) * layer.block_size, places[0])
        self._chain("evict_blocks", layer.index, self._local(seq.handle), *places)

    @public_call
    def kv_len(self, handle: int, group: int = 0) -> int:
        """Return how many tokens of a sequence have a slot in a group, or had one in a window."""
        seq = self._one("kv_len", handle, True)
        return self._held(seq, self.layers[args.integer("kv_len", "group", group, 0, len(self.layers) - 1)])

    # ---- what is read -------------------------------------------------------------------------------------

    @public_call
    def table(self, handle: int, group: int = 0) -> np.ndarray:
        """Return the entries of a sequence in a group, int32 ``[entries, columns]``; a state group: its slot."""
        seq = self._one("table", handle, True)
        layer = self.layers[args.integer("table", "group", group, 0, len(self.layers) - 1)]
        entries = seq.tables[layer.index].entries
        if layer.kind == "state":
            return np.array([slot for entry in entries for slot in entry], np.int32)
        return self.shown(layer, entries)

    def shown(self, layer: Layers, entries: list[list[int]]) -> np.ndarray:
        """Entries as an array, holes filled in."""
        shown = [entry or [self.hole] * layer.columns for entry in entries]
        return np.array(shown, np.int32).reshape(-1, layer.columns)

    def _capacity(self, seq: Any) -> int:
        tables = [(layer.block_size, seq.tables[layer.index]) for layer in self._with_entries]
        rooms = [(len(table.entries) + table.evicted // size) * size for size, table in tables]
        return min(rooms, default=ceil_div(seq.num_tokens, self.block_size) * self.block_size)

    def _rounded(self, tokens: int) -> int:
        """The least capacity that has room for so many tokens: whole entries of the smallest block size."""
        unit = min((layer.block_size for layer in self._with_entries), default=self.block_size)
        return ceil_div(tokens, unit) * unit

    def _num_entries(self, layer: Layers, table: Table, capacity: int) -> int:
        """Entries of a table in a sequence of this capacity."""
        return ceil_div(capacity, layer.block_size) - table.evicted // layer.block_size

    def _state(self) -> dict[str, Any]:
        local, now = self._local, self._next_step
        return {
            "groups": (self.options.groups, self.lookahead),
            "arenas": [
                (
                    *(list(arena._blank), list(arena._lru), [(block, fence - now) for block, fence in arena._limbo]),
                    *(list(arena._holds), sorted(arena._raw.items()), sorted(arena._committed), list(arena._dropped)),
                )
                for arena in self.arenas
            ],
            "sequences": {
                local(seq.handle): (
                    seq.num_tokens,
                    seq.point,
                    [([list(entry) for entry in table.entries], table.epoch, table.evicted) for table in seq.tables],
                    [(local(parent), newest - now) for parent, newest in seq.ancestors],
                )
                for _, seq in sorted(self._sequences.items())
            },
            "generations": {slot: g for slot, g in sorted(self._generations.items()) if g},
            "free_slots": list(self._free_slots),
            "pending": [
                (step.id - now, step.noted, [(local(r.handle), r.old_length, r.length) for r in step.rows])
                for step in self._pending
            ],
        }

    @public_call
    def check(self) -> None:
        """Recompute what the bookkeeping implies; raises `CorruptState`."""
        for arena in self.arenas:
            used = arena._references().keys() | set(arena._holds)
            places = arena._blank + arena._lru + [block for block, _ in arena._limbo] + list(used)
            if sorted(places) != list(range(arena._reserved, arena.num_blocks)):
                raise CorruptState(f"[check] arena {arena._number}: a block is in no place or in two: {sorted(places)}")
            if arena._limbo and not self._pending:
                raise CorruptState(f"[check] limbo of arena {arena._number} is not empty though no step is pending")
            held = [
                block
                for step in self._pending
                for row in step.rows
                for layer, change in zip(self.layers, row.changes, strict=True)
                for _, old, _ in change.replaced
                for block in old
                if layer.arena is arena
            ]
            if sorted(held) != sorted(arena._holds):
                raise CorruptState(f"[check] holds of arena {arena._number} differ from what pending steps replaced")
        for seq in self._sequences.values():
            if seq.num_tokens > self._capacity(seq):
                raise CorruptState(f"[check] table and length do not fit ({seq.handle})")


class GroupArrays:
    """The arrays of one group: an element of ``plan.groups``."""

    def __init__(self, plan: GroupPlan, layer: Layers) -> None:
        self._plan, self._layer, self._pool = plan, layer, plan.pool
        self.width = ceil_div(plan.limits.table_width * plan.pool.block_size, layer.block_size)
        # row -> (handle, epoch, entries written); None if carried; rows that show padding are not in it
        self._memory: dict[int, tuple[int, int, int] | None] = {}
        self.carry(plan.limits.max_rows)
        if layer.kind == "state":
            self.state_src = self.state_dst = np.zeros(0, np.int32)
            self.state_loads = self.state_saves = np.zeros((0, 1 + layer.group.blocks), np.int32)
        else:
            self.fill([], [], [], 0, 0)

    def carry(self, num_rows: int) -> None:
        """These rows are dirty when they are shown next."""
        self._memory.update(dict.fromkeys(range(num_rows)))

    def fill(self, batch: list[Any], new: list[int], copies: list[Any], num_rows: int, num_tokens: int) -> None:
        """Write everything: `batch` as it is after the step."""
        layer, hole = self._layer, self._pool.hole
        if layer.kind == "state":
            return
        self.copies = np.array([copy[1:] for copy in copies if copy[0] == layer.index], np.int32).reshape(-1, 3)
        self.kv_starts, self.kv_lens = np.zeros((2, num_rows), np.int32)
        for row, seq in enumerate(batch):
            entries = seq.tables[layer.index].entries
            self.kv_lens[row] = seq.num_tokens - seq.tables[layer.index].evicted
            last_hole = max((i for i, entry in enumerate(entries) if entry == HOLE), default=-1)
            self.kv_starts[row] = (last_hole + 1) * layer.block_size
        if "slot_mapping" in self._plan.formats:
            self.slot_mapping = np.full((layer.columns, num_tokens), -1, np.int32)
            fresh = [(seq, p) for seq, n in zip(batch, new, strict=True) for p in range(seq.num_tokens)[-n:] if n]
            for t, (seq, position) in enumerate(fresh):
                table = seq.tables[layer.index]
                p = position - table.evicted
                entry = table.entries[p // layer.block_size]
                for column, block in enumerate(entry):
                    self.slot_mapping[column, t] = block * layer.block_size + p % layer.block_size
        self.dirty_rows = np.zeros(0, np.int32)
        if "block_tables" in self._plan.formats:
            self.block_tables = np.full((num_rows, self.width, layer.columns), hole, np.int32)
            for row, seq in enumerate(batch):
                entries = seq.tables[layer.index].entries
                self.block_tables[row, : len(entries)] = self._pool.shown(layer, entries)
            shown = [(seq.handle, seq.tables[layer.index]) for seq in batch]
            now = [(handle, table.epoch, len(table.entries)) for handle, table in shown]
            self.dirty_rows = np.array(dirty_rows(self._memory, now, num_rows), np.int32)

    def fill_states(self, rows: list[GroupRow], pool: GroupModel, num_rows: int) -> None:
        """Which slot every row with new tokens reads, and which one it writes."""
        self.state_src = np.full(num_rows, -1, np.int32)
        self.state_dst = np.full(num_rows, -1, np.int32)
        for r, row in enumerate(rows):
            if row.length > row.old_length:
                change, seq = row.changes[self._layer.index], pool._sequence("step", row.handle)
                ((slot,),) = seq.tables[self._layer.index].entries
                self.state_dst[r] = slot
                if change.replaced:
                    ((_, (old,), _),) = change.replaced
                    self.state_src[r] = old
                elif not change.num_appended:
                    self.state_src[r] = slot


GROUP_FORMATS = ("block_tables", "seq_lens", "slot_mapping", "positions", "cu_q_lens", "slot_ids")
OWN_FORMATS = ("block_tables", "slot_mapping")  #: what is not as in a pool with one table


def _of_groups(name: str) -> property:
    def refuse(plan: GroupPlan) -> None:
        raise ValueError(f"[Plan] {name} is an array of each group, see plan.groups")

    return property(refuse)


class GroupPlan(ModelPlan):
    """`ModelPlan` of a pool with groups: ``ModelPlan(pool, ...)`` makes one."""

    def __init__(
        self, pool: Any, max_rows: int, max_tokens: int | None = None, *, formats: Any = GROUP_FORMATS[:3],
        **options: Any,
    ) -> None:  # fmt: skip
        wanted = (formats,) if isinstance(formats, str) else tuple(formats)
        for name in wanted:
            if name not in GROUP_FORMATS:
                raise ValueError(f"[Plan] format {name!r} is not for pools with groups")
        if options.get("backend") is not None:
            raise ValueError("[Plan] backend is not for pools with groups")
        if "slot_mapping" in wanted:
            for layer in pool.layers:
                if layer.kind != "state" and layer.arena.num_blocks * layer.block_size > 2**31 - 1:
                    raise ValueError(f"[Plan] slot_mapping is int32: group {layer.index} has more slots")
        self.groups = ()
        common = tuple(name for name in wanted if name not in OWN_FORMATS)
        super().__init__(pool, max_rows, max_tokens, formats=common, **options)
        self.formats = wanted
        self.groups = tuple(GroupArrays(self, layer) for layer in pool.layers)
        for layer, arrays in zip(pool.layers, self.groups, strict=True):
            if layer.kind != "state" and arrays.width * layer.columns > 2**31 - 1:
                raise ValueError(f"[Plan] a row of group {layer.index} has more than 2^31 - 1 block ids")

    block_tables = _of_groups("block_tables")
    slot_mapping = _of_groups("slot_mapping")
    copies = _of_groups("copies")
    dirty_rows = _of_groups("dirty_rows")

    def _carry(self, num_rows: int) -> None:
        for group in self.groups:
            group.carry(num_rows)

    def _remember_batch(self, batch: list[Any], new: list[int], served: list[bool], copies: list[Any]) -> None:
        self.num_tokens = sum(new)
        self.handles = np.array([seq.handle for seq in batch], np.int64)
        self.served = np.array(served, np.uint8)

    def _fill(
        self, batch: list[Any], new: list[int], served: list[bool], copies: list[Any],
        pad_to: tuple[int, int] | None,
    ) -> None:  # fmt: skip
        rows, tokens = self._shape = pad_to or (len(batch), sum(new))
        self._remember_batch(batch, new, served, copies)
        for group in self.groups:
            group.fill(batch, new, copies, rows, tokens)
        self._show(rows, tokens, self._write(batch, new, rows, tokens))

    def fill_states(self, step: Step, pool: GroupModel) -> None:
        """The arrays of state groups, which stand in the rows of a step."""
        for group in self.groups:
            if group._layer.kind == "state":
                group.fill_states(step.rows, pool, self._shape[0])
