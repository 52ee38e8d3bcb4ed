"""Steps of `kvpool.testing.model`: what rows need, what a plan changes, how it passes or is undone; and eviction.

Reference counts and floors are recounted from the tables and the pending steps whenever they are needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvpool.errors import CapacityExceeded, PlanStateError
from kvpool.testing import model_args as args
from kvpool.testing.model_blocks import Arena, ceil_div, public_call
from kvpool.testing.model_groups import HOLE, Layers, PoolModel, Sequence, Table
from kvpool.testing.model_plan import ModelPlan

#: What a row needs in one group: entries to replace as (index, valid tokens), and how many to append.
Need = tuple[list[tuple[int, int]], int]


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

    def shown(self, handle: int) -> tuple[Any, ...]:
        """As plain values."""
        return handle, self.old_length, self.length, [(c.replaced, c.num_appended) for c in self.changes]


@dataclass(eq=False, slots=True)
class Step:
    """A pending step."""

    id: int
    plan: ModelPlan
    rows: list[Row]
    copies: list[tuple[int, int, int, int]] = field(default_factory=list)  #: (group, source, destination, tokens)
    noted: bool = False  #: its `done` was called


class Judged:
    """An arena as it is, and what the rows that were judged before will give up in it, and copy."""

    def __init__(self, arena: Arena) -> None:
        self.references, self.committed = arena.references(), arena.committed
        self.lost: Counter[int] = Counter()
        self.reads: dict[int, int] = {}  # block -> tokens that copies of it read

    def is_own(self, block: int) -> bool:
        """Whether one row alone has the block then, and it is not committed."""
        return self.references[block] - self.lost[block] == 1 and block not in self.committed

    def replace(self, entry: list[int], tokens: int) -> None:
        """A row gives an entry up for a copy of its first tokens."""
        for block in entry:
            self.lost[block] += 1
            self.reads[block] = max(self.reads.get(block, 0), tokens)


class StepModel(PoolModel):
    """`PoolModel` with steps."""

    # ---- what a step needs --------------------------------------------------------------------------------

    def _floor(self, arena: Arena, block: int) -> int:
        """Tokens of the block that pending copies still have to read."""
        copies = [copy for step in self.pending for copy in step.copies]
        reads = [n for group, src, _, n in copies if src == block and self.layers[group].arena is arena]
        return max(reads, default=0)

    def is_unwritten(self, layer: Layers, block: int) -> bool:
        """Whether a pending plan has still to fill a block by a copy."""
        copies = [copy for step in self.pending for copy in step.copies]
        return any(dst == block and self.layers[group].arena is layer.arena for group, _, dst, _ in copies)

    def _row_need(self, seq: Sequence, n: int, layer: Layers, judged: Judged) -> Need:
        """What `n` tokens need in a group."""
        table, arena, size = seq.tables[layer.index], layer.arena, layer.block_size
        entries, length = table.entries, self.held(seq, layer)
        if n == 0:
            return [], 0
        if layer.kind == "state":
            if not entries:
                return [], 1
            ((slot,),) = entries  # in place, unless a row before reads it
            in_place = self.options.in_order and judged.is_own(slot) and not judged.lost[slot]
            return ([], 0) if in_place else ([(0, 0)], 0)
        replaced = []
        for i in range(length // size, min(ceil_div(length + n, size), len(entries))):
            valid = max(0, length - i * size)
            floors = [max(self._floor(arena, block), judged.reads.get(block, 0)) for block in entries[i]]
            if not all(map(judged.is_own, entries[i])) or valid < max(floors):
                replaced.append((i, valid))
        room = max(self._capacity(seq), self._rounded(seq.num_tokens + n))
        return replaced, self._num_entries(layer, table, room) - len(entries)

    def _needs(
        self, batch: list[Sequence], new: list[int], partial: bool, states: bool
    ) -> tuple[list[list[Need] | None], tuple[int, Arena, int] | None]:
        """Judge the batch: needs per row (None if not served), and (row, arena, needed) of the first that is short."""
        judged = [Judged(arena) for arena in self.arenas]
        room = [arena.available() for arena in self.arenas]
        total = [0] * len(self.arenas)
        rows: list[list[Need] | None] = []
        short: tuple[int, Arena] | None = None
        for seq, n in zip(batch, new, strict=True):
            needs: list[Need] = []
            after = list(total)
            for layer in self.layers:
                asked = n if states or layer.kind != "state" else 0
                needs.append(self._row_need(seq, asked, layer, judged[layer.arena.number]))
                replaced, appended = needs[-1]
                after[layer.arena.number] += (len(replaced) + appended) * layer.columns
            lacking = [arena for arena in self.arenas if after[arena.number] > room[arena.number]]
            if lacking and partial:
                rows.append(None)
                continue
            if lacking and short is None:
                short = len(rows), lacking[0]
            total = after
            rows.append(needs)
            for layer, (replaced, _) in zip(self.layers, needs, strict=True):
                for i, valid in replaced:
                    judged[layer.arena.number].replace(seq.tables[layer.index].entries[i], valid)
        return rows, None if short is None else (*short, total[short[1].number])

    def _judge(self, call: str, batch: list[Sequence], new: list[int], partial: bool) -> list[Any]:
        rows, short = self._needs(batch, new, partial, call == "step")
        if short is not None:
            row, arena, needed = short
            arena.out_of_blocks(call, needed, row=row, handle=batch[row].handle)
        return rows

    # ---- what a step refuses ------------------------------------------------------------------------------

    def _refuse_plan(self, call: str, plan: ModelPlan) -> None:
        if not isinstance(plan, ModelPlan):
            raise TypeError(f"[{call}] plan is a {type(plan).__name__}, a Plan is needed")
        if plan.pool is not self:
            raise ValueError(f"[{call}] the plan belongs to another pool")
        if plan.is_pending:
            raise PlanStateError(f"[{call}] the plan is pending (step {plan.step_id}), done or rollback is due")
        plan.refuse_moved(call)

    def _shape(self, pad_to: Any, plan: ModelPlan, num_rows: int) -> tuple[int, int] | None:
        if pad_to is None:
            return None
        if not isinstance(pad_to, tuple | list) or len(pad_to) != 2:
            raise TypeError(f"[step] pad_to is {pad_to!r}, (rows, tokens) is needed")
        return (
            args.integer("step", "pad_to[0]", pad_to[0], num_rows, plan.limits.max_rows),
            args.integer("step", "pad_to[1]", pad_to[1], 0, plan.limits.max_tokens),
        )

    def _rows(self, call: str, handles: list[int], new: list[int]) -> Iterator[tuple[int, Sequence]]:
        """Decode the rows of a batch in order; what is wrong with a row is found before the next one is read."""
        seen = set()
        for row, (handle, n) in enumerate(zip(handles, new, strict=True)):
            seq = self._sequence(call, handle)
            if handle in seen:
                raise ValueError(f"[{call}] handles[{row}] is a duplicate ({handle})")
            if n < 0:
                raise ValueError(f"[{call}] num_new[{row}] is negative ({n}), the least is 0")
            seen.add(handle)
            yield row, seq

    def _fits_pool(self, seq: Sequence, n: int) -> bool:
        """Whether a sequence may hold `n` tokens more: in no group of blocks more than the pool allows."""
        held = max((self.held(seq, layer) for layer in self._kv), default=seq.num_tokens)
        longest = (2**31 - 1) * self.block_size
        return held + n <= self.options.max_blocks_per_seq * self.block_size and seq.num_tokens + n <= longest

    def _refuse_row(self, call: str, plan: ModelPlan, row: int, seq: Sequence, n: int) -> None:
        """Refuse what neither the pool's nor the plan's tables can hold."""
        length = seq.num_tokens + n
        if not self._fits_pool(seq, n) or length > plan.longest:
            raise CapacityExceeded(f"[{call}] row {row} has {length} tokens, more than a sequence may have")
        for layer in self._kv:
            room = max(self._capacity(seq), self._rounded(length))
            width = self._num_entries(layer, seq.tables[layer.index], room)
            if width > plan.groups[layer.index].width:
                raise CapacityExceeded(f"[{call}] row {row} has {width} entries in group {layer.index}")

    def _read_batch(
        self, call: str, plan: ModelPlan, handles: Any, num_new: Any, pad_to: Any
    ) -> tuple[list[Sequence], list[int], tuple[int, int] | None]:
        """Read the arguments of a step or a reservation and refuse what cannot be, the needs apart."""
        self._refuse_plan(call, plan)
        names = args.handles(call, handles, False)
        new = args.per_row(call, "num_new", num_new, len(names), args.MIN_INT64)
        if len(names) > plan.limits.max_rows:
            raise CapacityExceeded(f"[{call}] {len(names)} rows, the plan's max_rows is {plan.limits.max_rows}")
        shape = self._shape(pad_to, plan, len(names))
        batch: list[Sequence] = []
        for row, seq in self._rows(call, names, new):
            self._refuse_row(call, plan, row, seq, new[row])
            total, most = sum(new[: row + 1]), plan.limits.max_tokens
            if call == "step" and total > most:
                raise CapacityExceeded(f"[step] {total} new tokens, the plan's max_tokens is {most}")
            if call == "step" and shape is not None and total > shape[1]:
                raise ValueError(f"[step] pad_to has room for {shape[1]} tokens, the batch has {total}")
            batch.append(seq)
        return batch, new, shape

    # ---- steps --------------------------------------------------------------------------------------------

    @public_call
    def step(
        self, plan: ModelPlan, handles: Any, num_new: Any = 1, *, partial: bool = False, pad_to: Any = None
    ) -> None:
        """Grow every sequence of the batch by its new tokens and fill `plan`; the plan is pending then.

        Raises
        ------
        OutOfBlocks, CapacityExceeded, PlanStateError, StaleHandle, ForeignHandle, TypeError, ValueError
            State unchanged.
        """
        batch, new, shape = self._read_batch("step", plan, handles, num_new, pad_to)
        needs = self._judge("step", batch, new, partial)
        self._start("step", plan, batch, needs, new, shape)

    @public_call
    def reserve(self, plan: ModelPlan, handles: Any, num_new: Any) -> None:
        """Take the blocks for `num_new` more tokens per row and resolve COW; lengths do not move."""
        batch, new, _ = self._read_batch("reserve", plan, handles, num_new, None)
        self._start("reserve", plan, batch, self._judge("reserve", batch, new, False), new)

    def _start(
        self, call: str, plan: ModelPlan, batch: list[Sequence], needs: list[Any], new: list[int],
        shape: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        """Take the blocks that were judged, grow the rows of a step that are served, and fill the plan."""
        step = self._begin(plan, batch, needs)
        grown = [n if call == "step" and need is not None else 0 for n, need in zip(new, needs, strict=True)]
        for seq, row, n in zip(batch, step.rows, grown, strict=True):
            seq.num_tokens += n
            row.length = seq.num_tokens
        plan.fill(batch, grown, [need is not None for need in needs], step, shape)
        plan.step_id, plan.is_pending = step.id, True
        self._move_states(step)
        self.chain(call, step.id, [row.shown(self._local(row.handle)) for row in step.rows], new)
        if self.options.in_order:
            self._pass(step)

    def _move_states(self, step: Step) -> None:
        """What a step has to do with checkpoints."""

    def _make_room(self, entries: list[tuple[Layers, int]], bundle: int = 0) -> None:
        """Make room for entries of groups that a call is about to take."""

    def _begin(self, plan: ModelPlan, batch: list[Sequence], needs: list[Any]) -> Step:
        """Take the blocks that were judged, group by group, and change the tables; lengths stay."""
        rows = [Row(seq.handle, seq.num_tokens, seq.num_tokens, [Change() for _ in self.layers]) for seq in batch]
        step = Step(self._next_step, plan, rows)
        taken = [zip(self.layers, need, strict=True) for need in needs if need is not None]
        self._make_room([(layer, len(replaced) + more) for row in taken for layer, (replaced, more) in row])
        for layer in self.layers:
            for seq, row, need in zip(batch, rows, needs, strict=True):
                if need is not None:
                    self._change(step, layer, seq.tables[layer.index], row.changes[layer.index], *need[layer.index])
        self._next_step += 1
        for index, _, _, tokens in step.copies:
            counters = self.layers[index].arena.counters
            counters["cow_copies"] += 1
            counters["cow_tokens"] += tokens
        self.pending.append(step)
        return step

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
        table.epoch += bool(replaced)
        table.entries.extend(self._take_entry(layer) for _ in range(appended))
        change.num_appended = appended

    def _pass(self, step: Step) -> None:
        """The oldest pending step is through: holds go, rows let go of what nobody reads, limbo drains."""
        self.pending.remove(step)
        step.plan.is_pending = False
        for layer in self.layers:
            for row in step.rows:
                for _, old, _ in row.changes[layer.index].replaced:
                    for block in old:
                        layer.arena.holds.remove(block)
                        layer.arena.release(block)
        for layer in self._kv:
            for row in step.rows:
                seq = self._find(row.handle)
                if seq is not None:
                    self._let_go(seq, layer, row.length - self.lookahead)
        for arena in self.arenas:
            arena.drain_limbo()

    def _let_go(self, seq: Sequence, layer: Layers, p: int) -> None:
        """Entries that no query at position p or later reads become holes."""
        table = seq.tables[layer.index]
        for i, entry in enumerate(table.entries):
            if entry != HOLE and not layer.needs(i, p):
                table.entries[i] = HOLE
                table.epoch += 1
                for block in entry:
                    layer.arena.release(block)

    def _pending_step(self, call: str, plan: ModelPlan) -> Step:
        if not isinstance(plan, ModelPlan):
            raise TypeError(f"[{call}] plan is a {type(plan).__name__}, a Plan is needed")
        if plan.pool is not self:
            raise ValueError(f"[{call}] the plan belongs to another pool")
        for step in self.pending:
            if step.plan is plan and not step.noted:
                return step
        raise PlanStateError(f"[{call}] the plan is not pending, or its done was already noted")

    @public_call
    def done(self, plan: ModelPlan) -> None:
        """The plan's work was executed; it passes as soon as all older ones have."""
        step = self._pending_step("done", plan)
        step.noted = True
        while self.pending and self.pending[0].noted:
            self._pass(self.pending[0])
        self.chain("done", step.id)

    @public_call
    def rollback(self, plan: ModelPlan) -> None:
        """Undo the newest pending step."""
        step = self._pending_step("rollback", plan)
        if step is not self.pending[-1]:
            raise PlanStateError(f"[rollback] step {step.id} is not the newest ({self.pending[-1].id})")
        rows = {row.handle for row in step.rows}
        for seq in self.sequences():
            if any(parent in rows and newest >= step.id for parent, newest in seq.ancestors):
                raise PlanStateError(f"[rollback] a fork of a row made after the step is open ({seq.handle})")
        self.pending.pop()
        plan.is_pending = False
        self._undo(step)
        plan.carry(len(step.rows))
        for arena in self.arenas:
            arena.drain_limbo()
        self.chain("rollback", step.id)

    def _undo(self, step: Step) -> None:
        """What was taken last is given back first."""
        for row in step.rows:
            seq = self._find(row.handle)
            if seq is not None:
                seq.num_tokens = row.old_length
        for layer in reversed(self.layers):
            for row in reversed(step.rows):
                self._undo_change(self._find(row.handle), layer, row.changes[layer.index])

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

    def _can_step(self, handles: Any, num_new: Any) -> bool:
        names = args.handles("can", handles, False)
        new = args.per_row("can", "num_new", num_new, len(names), args.MIN_INT64)
        batch = [seq for _, seq in self._rows("can", names, [0] * len(names))]  # all handles before any count
        for row, n in enumerate(new):
            if n < 0:
                raise ValueError(f"[can] num_new[{row}] is negative ({n})")
        if not all(self._fits_pool(seq, n) for seq, n in zip(batch, new, strict=True)):
            return False
        return self._needs(batch, new, False, True)[1] is None

    # ---- tokens leave a sequence that goes on --------------------------------------------------------------

    def _full_layer(self, call: str, group: Any) -> Layers:
        """The group that tokens are to leave."""
        layer = self._layer(call, group)
        if layer.kind != "full":
            raise ValueError(f"[{call}] group {group} is a {layer.kind}, tokens leave full groups only")
        return layer

    def _judge_length(self, call: str, seq: Sequence, layer: Layers, length: int) -> None:
        if not 0 <= length <= self.held(seq, layer):
            raise ValueError(f"[{call}] len is {length}, 0 .. {self.held(seq, layer)} is legal")

    def _not_own(self, seq: Sequence, layer: Layers, length: int, first: int, judged: Judged) -> list[int]:
        """Entries that compaction to `length` tokens rewrites and must not."""
        if length == self.held(seq, layer):
            return []

        def is_own(block: int) -> bool:
            return judged.is_own(block) and not judged.reads.get(block) and not self._floor(layer.arena, block)

        rewritten = range(first // layer.block_size, ceil_div(length, layer.block_size))
        return [i for i in rewritten if not all(map(is_own, seq.tables[layer.index].entries[i]))]

    @public_call
    def unshare(self, plan: ModelPlan, handles: Any, lens: Any, first: int = 0, group: int = 0) -> None:
        """Replace every entry of a group that `compact` would refuse to rewrite by a copy; a step without tokens."""
        names = args.handles("unshare", handles)
        lengths = args.per_row("unshare", "lens", lens, len(names), args.MIN_INT64)
        first = args.count("unshare", "first", first)
        layer = self._full_layer("unshare", group)
        self._refuse_plan("unshare", plan)
        if len(names) > plan.limits.max_rows:
            raise CapacityExceeded(f"[unshare] {len(names)} rows, the plan's max_rows is {plan.limits.max_rows}")
        batch: list[Sequence] = []
        needs: list[list[Need]] = []
        judged, needed, short = Judged(layer.arena), 0, -1
        for row, name in enumerate(names):
            seq = self._sequence("unshare", name)
            self._judge_length("unshare", seq, layer, lengths[row])
            self._refuse_row("unshare", plan, row, seq, 0)
            batch.append(seq)
            held, size = self.held(seq, layer), layer.block_size
            replaced = [(i, min(size, held - i * size)) for i in self._not_own(seq, layer, lengths[row], first, judged)]
            for i, tokens in replaced:
                judged.replace(seq.tables[layer.index].entries[i], tokens)
            needs.append([(replaced, 0) if other is layer else ([], 0) for other in self.layers])
            needed += len(replaced) * layer.columns
            if needed > layer.arena.available() and short < 0:
                short = row
        if short >= 0:
            layer.arena.out_of_blocks("unshare", needed, row=short, handle=batch[short].handle)
        self._start("unshare", plan, batch, needs, lengths)

    def _lose(self, layer: Layers, seq: Sequence, n: int) -> None:
        """Tokens left a table."""
        table = seq.tables[layer.index]
        seq.point = seq.num_tokens
        table.evicted += n
        table.epoch += 1
        self._evicted_tokens += n

    @public_call
    def compact(self, handles: Any, lens: Any, first: int = 0, group: int = 0) -> None:
        """Keep `lens` tokens at the front of each table of a group, the first `first` where they are."""
        names = args.handles("compact", handles)
        lengths = args.per_row("compact", "lens", lens, len(names), args.MIN_INT64)
        first = args.count("compact", "first", first)
        layer = self._full_layer("compact", group)
        batch = [self._sequence("compact", name) for name in names]
        for seq, length in zip(batch, lengths, strict=True):
            self._judge_length("compact", seq, layer, length)
            self._refuse_pending("compact", seq)
            if self._not_own(seq, layer, length, first, Judged(layer.arena)):
                raise ValueError("[compact] an entry must not be rewritten, call unshare first")
        for seq, length in zip(batch, lengths, strict=True):
            leaving, room = self.held(seq, layer) - length, self._capacity(seq)
            if leaving:
                gone = (seq.tables[layer.index].evicted + leaving) // layer.block_size
                self._pop_entries(seq, layer, ceil_div(room, layer.block_size) - gone)
                self._lose(layer, seq, leaving)
        self.chain("compact", layer.index, *map(self._local, names), *lengths)

    @public_call
    def evict_blocks(self, handle: int, indices: Any, group: int = 0) -> None:
        """Full entries leave the table of a group, by ascending index."""
        places = args.one_or_many("evict_blocks", "indices", indices, ("int32", "int64"))
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
        self.chain("evict_blocks", layer.index, self._local(seq.handle), *places)
