"""Steps of `kvpool.testing.model`: needs, copy-on-write, pending plans, eviction, statistics."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Self

from kvpool.errors import CapacityExceeded, CorruptState, PlanStateError
from kvpool.stats import PoolStats
from kvpool.testing import model_args as args
from kvpool.testing.model_blocks import Row, Step, _live_tags, ceil_div, public_call
from kvpool.testing.model_plan import ModelPlan, Sequence
from kvpool.testing.model_prefix import PrefixModel


class StepModel(PrefixModel):
    """`PrefixModel` with steps: a whole pool with one table per sequence."""

    def __init__(self, *sizes: Any, lookahead: int = 0, two_classes: bool = False, **options: Any) -> None:
        args.integer("Pool", "lookahead", lookahead, 0)
        if args.boolean("Pool", "two_classes", two_classes):
            raise ValueError("[Pool] two_classes is True: it needs groups and prefix_cache=True")
        super().__init__(*sizes, **options)

    # ---- what a step needs --------------------------------------------------------------------------------

    def _floor(self, block: int) -> int:
        """Tokens of the block that pending copies still have to read."""
        reads = [tokens for step in self._pending for src, _, tokens in step.copies if src == block]
        return max(reads, default=0)

    def _row_needs(
        self, seq: Sequence, n: int, lost: dict[int, int], floors: dict[int, int]
    ) -> tuple[list[tuple[int, int]], int]:
        """Return which table entries `n` tokens replace, as (index, valid tokens), and how many they append.

        `lost` and `floors` are what the rows before this one did in the same step: references they gave up,
        and tokens their copies read.
        """
        bs, length = self.block_size, seq.num_tokens
        last = ceil_div(length + n, bs)
        replaced = []
        for i in range(length // bs, min(last, len(seq.table))) if n else ():
            valid = max(0, length - i * bs)
            block = seq.table[i]
            alone = self._refcount(block) - lost.get(block, 0) == 1
            floor = max(self._floor(block), floors.get(block, 0))
            if not (alone and block not in self._committed and valid >= floor):
                replaced.append((i, valid))
        return replaced, max(0, last - len(seq.table))

    def _needs(self, batch: list[Sequence], new: list[int], partial: bool) -> tuple[list[Any], int, int]:
        """Judge the batch: needs per row (None if not served), their sum, first row that does not fit."""
        lost: dict[int, int] = {}
        floors: dict[int, int] = {}
        rows: list[Any] = []
        total, short_row = 0, -1
        for seq, n in zip(batch, new, strict=True):
            replaced, num_appended = self._row_needs(seq, n, lost, floors)
            need = len(replaced) + num_appended
            if total + need > self._available():
                if partial:
                    rows.append(None)
                    continue
                if short_row < 0:
                    short_row = len(rows)
            total += need
            rows.append((replaced, num_appended))
            for i, valid in replaced:
                block = seq.table[i]
                lost[block] = lost.get(block, 0) + 1
                floors[block] = max(floors.get(block, 0), valid)
        return rows, total, short_row

    def _refuse_plan(self, call: str, plan: ModelPlan) -> None:
        if not isinstance(plan, ModelPlan):
            raise TypeError(f"[{call}] plan is a {type(plan).__name__}, a Plan is needed")
        if plan.pool is not self:
            raise ValueError(f"[{call}] the plan belongs to another pool")
        if plan.is_pending:
            raise PlanStateError(f"[{call}] the plan is pending (step {plan.step_id}), done or rollback is due")
        plan._refuse_moved(call)

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
        return seq.num_tokens + n <= self.options.max_blocks_per_seq * self.block_size

    def _refuse_row(self, call: str, plan: ModelPlan, row: int, seq: Sequence, n: int) -> None:
        """Refuse what neither the pool's nor the plan's tables can hold."""
        length = seq.num_tokens + n
        width = max(len(seq.table), ceil_div(length, self.block_size))
        if not self._fits_pool(seq, n):
            raise CapacityExceeded(f"[{call}] row {row} has {length} tokens, more than a sequence may have")
        if plan.has_contexts and length > plan.limits.kv_width:
            raise CapacityExceeded(f"[{call}] row {row} has {length} tokens, kv_width is {plan.limits.kv_width}")
        if width > plan.limits.table_width:
            raise CapacityExceeded(f"[{call}] row {row} has {width} blocks, table_width is {plan.limits.table_width}")

    def _refuse_tokens(self, total: int, plan: ModelPlan, shape: tuple[int, int] | None) -> None:
        if total > plan.limits.max_tokens:
            raise CapacityExceeded(f"[step] {total} new tokens, the plan's max_tokens is {plan.limits.max_tokens}")
        if shape is not None and total > shape[1]:
            raise ValueError(f"[step] pad_to has room for {shape[1]} tokens, the batch has {total}")

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
            if call == "step":
                self._refuse_tokens(sum(new[: row + 1]), plan, shape)
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
        rows = self._judge("step", batch, new, partial)
        served = [row is not None for row in rows]
        new = [n if ok else 0 for n, ok in zip(new, served, strict=True)]
        step = self._begin(plan, batch, rows)
        for seq, n in zip(batch, new, strict=True):
            seq.num_tokens += n
        plan._fill(batch, new, served, step.copies, shape)
        self._started("step", step, new)

    @public_call
    def reserve(self, plan: ModelPlan, handles: Any, num_new: Any) -> None:
        """Take the blocks for `num_new` more tokens per row and resolve COW; lengths do not move."""
        batch, new, _ = self._read_batch("reserve", plan, handles, num_new, None)
        rows = self._judge("reserve", batch, new, False)
        step = self._begin(plan, batch, rows)
        plan._fill(batch, [0] * len(batch), [True] * len(batch), step.copies, None)
        self._started("reserve", step, new)

    def _judge(self, call: str, batch: list[Sequence], new: list[int], partial: bool) -> list[Any]:
        rows, total, short = self._needs(batch, new, partial)
        if short >= 0:
            self._out_of_blocks(call, total, row=short, handle=batch[short].handle)
        return rows

    def _begin(self, plan: ModelPlan, batch: list[Sequence], needs: list[Any]) -> Step:
        """Take the blocks that were judged and change the tables; lengths stay."""
        step = Step(self._next_step, plan, [], [])
        for seq, need in zip(batch, needs, strict=True):
            row = Row(seq.handle, seq.num_tokens)
            step.rows.append(row)
            replaced, row.num_appended = need or ([], 0)
            for i, valid in replaced:
                old, new = seq.table[i], self._take()
                seq.table[i] = new
                self._holds.append(old)
                row.replaced.append((i, old, new))
                if valid:
                    step.copies.append((old, new, valid))
            seq.epoch += bool(replaced)
            seq.table.extend(self._take() for _ in range(row.num_appended))
        self._next_step += 1
        self._counters["cow_copies"] += len(step.copies)
        self._counters["cow_tokens"] += sum(tokens for _, _, tokens in step.copies)
        self._pending.append(step)
        return step

    def _started(self, call: str, step: Step, new: list[int]) -> None:
        step.plan.step_id = step.id
        step.plan._pending = True
        self._chain(call, step.id, [(self._local(r.handle), r.replaced, r.num_appended) for r in step.rows], new)
        if self.options.in_order:
            self._pass(step)

    def _pass(self, step: Step) -> None:
        """The oldest pending step is through: its holds go, limbo drains, and what waited for it is published."""
        self._pending.remove(step)
        step.plan._pending = False
        for block in step.held():
            self._holds.remove(block)
            self._release(block)
        self._drain_limbo()
        self._publish_waiting()

    def _pending_step(self, call: str, plan: ModelPlan) -> Step:
        if not isinstance(plan, ModelPlan):
            raise TypeError(f"[{call}] plan is a {type(plan).__name__}, a Plan is needed")
        if plan.pool is not self:
            raise ValueError(f"[{call}] the plan belongs to another pool")
        for step in self._pending:
            if step.plan is plan and not step.noted:
                return step
        raise PlanStateError(f"[{call}] the plan is not pending, or its done was already noted")

    @public_call
    def done(self, plan: ModelPlan) -> None:
        """The plan's work was executed; it passes as soon as all older ones have."""
        step = self._pending_step("done", plan)
        step.noted = True
        while self._pending and self._pending[0].noted:
            self._pass(self._pending[0])
        self._chain("done", step.id)

    @public_call
    def rollback(self, plan: ModelPlan) -> None:
        """Undo the newest pending step."""
        step = self._pending_step("rollback", plan)
        if step is not self._pending[-1]:
            raise PlanStateError(f"[rollback] step {step.id} is not the newest ({self._pending[-1].id})")
        rows = {row.handle for row in step.rows}
        for seq in self._sequences.values():
            if any(parent in rows and newest >= step.id for parent, newest in seq.ancestors):
                raise PlanStateError(f"[rollback] a fork of a row made after the step is open ({seq.handle})")
        self._pending.pop()
        plan._pending = False
        for block in self._held_back & {dst for *_, dst, _ in step.copies}:  # it will never hold what its row said
            self._blank_committed(block)
        self._undo_all(step)
        plan._carry(len(step.rows))
        self._drain_limbo()
        self._chain("rollback", step.id)

    def _undo_all(self, step: Step) -> None:
        for row in reversed(step.rows):
            self._undo(row)

    def _undo(self, row: Row) -> None:
        seq = self._find(row.handle)
        if seq is not None:
            seq.num_tokens = row.old_length
            seq.epoch += bool(row.replaced or row.num_appended)
            self._pop_blocks(seq, len(seq.table) - row.num_appended)
        for i, old, new in reversed(row.replaced):
            self._holds.remove(old)
            if seq is not None:
                seq.table[i] = old
                self._release(new)
            else:
                self._release(old)

    @public_call
    def can(self, handles: Any, num_new: Any = 1) -> bool:
        """Return whether a step of this batch would find its blocks and its table room."""
        names = args.handles("can", handles, False)
        new = args.per_row("can", "num_new", num_new, len(names), args.MIN_INT64)
        batch = [seq for _, seq in self._rows("can", names, [0] * len(names))]  # all handles before any count
        for row, n in enumerate(new):
            if n < 0:
                raise ValueError(f"[can] num_new[{row}] is negative ({n})")
        if not all(self._fits_pool(seq, n) for seq, n in zip(batch, new, strict=True)):
            return False
        return self._needs(batch, new, False)[2] < 0

    # ---- blocks of one's own ------------------------------------------------------------------------------

    def _rewritten(self, seq: Sequence, length: int, first: int) -> range:
        """Table indices that compaction to `length` tokens rewrites."""
        if length == seq.num_tokens:
            return range(0)
        return range(first // self.block_size, ceil_div(length, self.block_size))

    def _is_own(self, block: int, lost: dict[int, int], floors: dict[int, int]) -> bool:
        """Whether a token could be written at the beginning of the block."""
        alone = self._refcount(block) - lost.get(block, 0) == 1
        return alone and block not in self._committed and not self._floor(block) and not floors.get(block, 0)

    def _keep_lengths(self, call: str, batch: list[Sequence], lens: list[int]) -> None:
        for row, (seq, length) in enumerate(zip(batch, lens, strict=True)):
            if not 0 <= length <= seq.num_tokens:
                raise ValueError(f"[{call}] lens[{row}] is {length}, it must be in 0 .. {seq.num_tokens}")

    def _unshare_arguments(
        self, plan: ModelPlan, handles: Any, lens: Any, first: int
    ) -> tuple[list[int], list[int], int]:
        self._refuse_plan("unshare", plan)
        if plan.is_pending:
            raise PlanStateError(f"[unshare] the plan is pending (step {plan.step_id})")
        names = args.handles("unshare", handles)
        lengths = args.per_row("unshare", "lens", lens, len(names), args.MIN_INT64)
        return names, lengths, args.count("unshare", "first", first)

    def _start_unshare(self, plan: ModelPlan, batch: list[Sequence], needs: list[Any], lengths: list[int]) -> None:
        step = self._begin(plan, batch, needs)
        plan._fill(batch, [0] * len(batch), [True] * len(batch), step.copies, None)
        self._started("unshare", step, lengths)

    @public_call
    def unshare(self, plan: ModelPlan, handles: Any, lens: Any, first: int = 0, group: int = 0) -> None:
        """Replace every block that `compact` would refuse to rewrite by a copy; a step without tokens."""
        names, lengths, first = self._unshare_arguments(plan, handles, lens, first)
        args.integer("unshare", "group", group, 0, 0)
        if len(names) > plan.limits.max_rows:
            raise CapacityExceeded(f"[unshare] {len(names)} rows, the plan's max_rows is {plan.limits.max_rows}")
        batch: list[Sequence] = []
        needs: list[tuple[list[tuple[int, int]], int]] = []
        lost: dict[int, int] = {}
        floors: dict[int, int] = {}
        total, short = 0, -1
        for row, name in enumerate(names):
            seq = self._sequence("unshare", name)
            self._keep_lengths("unshare", [seq], lengths[row : row + 1])
            self._refuse_row("unshare", plan, row, seq, 0)
            batch.append(seq)
            replaced = []
            for i in self._rewritten(seq, lengths[row], first):
                block = seq.table[i]
                if not self._is_own(block, lost, floors):
                    valid = min(self.block_size, seq.num_tokens - i * self.block_size)
                    replaced.append((i, valid))
                    lost[block] = lost.get(block, 0) + 1
                    floors[block] = max(floors.get(block, 0), valid)
            total += len(replaced)
            if total > self._available() and short < 0:
                short = row
            needs.append((replaced, 0))
        if short >= 0:
            self._out_of_blocks("unshare", total, row=short, handle=batch[short].handle)
        self._start_unshare(plan, batch, needs, lengths)

    # ---- eviction -----------------------------------------------------------------------------------------

    def _judge_eviction(self, call: str, seq: Sequence, leaving: int) -> None:
        if any(row.handle == seq.handle for step in self._pending for row in step.rows):
            raise PlanStateError(f"[{call}] handle is a row of a pending plan ({seq.handle})")
        if leaving and seq.evicted + leaving + self.options.max_blocks_per_seq * self.block_size > 2**31 - 1:
            raise CapacityExceeded(f"[{call}] positions would pass 2^31 - 1 ({seq.handle})")

    def _lose(self, seq: Sequence, n: int) -> None:
        """Tokens left: the sequence counts them still, and the prefix cache forgets it."""
        seq.point = seq.num_tokens + seq.evicted
        seq.evicted += n
        seq.num_tokens -= n
        seq.epoch += 1
        seq.root, seq.tokens, seq.published = None, [], 0
        self._counters["evicted_tokens"] += n

    @public_call
    def compact(self, handles: Any, lens: Any, first: int = 0, group: int = 0) -> None:
        """Keep `lens` tokens at the front of each table, the first `first` where they are."""
        names = args.handles("compact", handles, alone=True)
        lengths = args.per_row("compact", "lens", lens, len(names), args.MIN_INT64)
        first = args.count("compact", "first", first)
        args.integer("compact", "group", group, 0, 0)
        batch = [self._sequence("compact", name) for name in names]
        for seq, length in zip(batch, lengths, strict=True):
            self._keep_lengths("compact", [seq], [length])
            self._judge_eviction("compact", seq, seq.num_tokens - length)
            for i in self._rewritten(seq, length, first):
                if not self._is_own(seq.table[i], {}, {}):
                    raise ValueError(f"[compact] block must not be rewritten ({seq.table[i]}), call unshare first")
        for seq, length in zip(batch, lengths, strict=True):
            if length < seq.num_tokens:
                self._pop_blocks(seq, ceil_div(length, self.block_size))
                self._lose(seq, seq.num_tokens - length)
        self._chain("compact", *map(self._local, names), *lengths)

    @public_call
    def evict_blocks(self, handle: int, indices: Any, group: int = 0) -> None:
        """Full blocks leave the table, by ascending index."""
        places = args.integers("evict_blocks", "indices", indices, ("int32", "int64"))
        args.integer("evict_blocks", "group", group, 0, 0)
        seq = self._one("evict_blocks", handle)
        for place in places:
            args.integer("evict_blocks", "index", place, 0, seq.num_tokens // self.block_size - 1)
        if places != sorted(set(places)):
            raise ValueError(f"[evict_blocks] indices must ascend ({places})")
        self._judge_eviction("evict_blocks", seq, len(places) * self.block_size)
        for place in reversed(places):
            self._release(seq.table.pop(place))
        if places:
            self._lose(seq, len(places) * self.block_size)
        self._chain("evict_blocks", self._local(seq.handle), *places)

    @public_call
    def kv_len(self, handle: int, group: int = 0) -> int:
        """Return how many tokens of a sequence have a slot."""
        seq = self._one("kv_len", handle, True)
        args.integer("kv_len", "group", group, 0, 0)
        return seq.num_tokens

    # ---- guards and statistics ----------------------------------------------------------------------------

    @public_call
    def stats(self, arena: int = 0) -> PoolStats:
        """Return the counters of an arena, and of the pool."""
        one = self._arena("stats", arena)
        seqs = self._sequences.values()
        tokens = sum(seq.num_tokens for seq in seqs)
        capacity = sum(self._capacity(seq) for seq in seqs)
        return PoolStats(
            shared=sum(one._refcount(b) > 1 for b in one._referenced()),
            sequences=len(seqs),
            pending=len(self._pending),
            tokens=tokens,
            capacity=capacity,
            fragmentation=1.0 - tokens / capacity if capacity else 0.0,
            **one._figures() | {"evicted_tokens": self._counters["evicted_tokens"]},
        )

    def _referenced(self) -> set[int]:
        tables = {block for seq in self._sequences.values() for block in seq.table}
        return tables | {block for block, count in self._raw.items() if count} | set(self._held_canonicals.values())

    @public_call
    def digest(self) -> int:
        """Return a hash of all successful calls so far; another function than the core's."""
        return self._digest

    @public_call
    def fingerprint(self) -> int:
        """Return a hash of the whole state; another function than the core's."""
        return int.from_bytes(hashlib.blake2b(repr(self._state()).encode(), digest_size=8).digest(), "little")

    @public_call
    def state(self) -> dict[str, Any]:
        """Return everything as plain comparable values, handles and step ids without what differs by pool."""
        return self._state()

    def _state(self) -> dict[str, Any]:
        local, now = self._local, self._next_step
        return {
            "blank": list(self._blank),
            "lru": list(self._lru),
            "limbo": [(block, fence - now) for block, fence in self._limbo],
            "refcounts": {b: self._refcount(b) for b in sorted(self._referenced())},
            "raw": {b: n for b, n in sorted(self._raw.items()) if n},
            "holds": list(self._holds),
            "committed": sorted(self._committed),
            "dropped": list(self._dropped),
            "sequences": {
                local(seq.handle): (
                    seq.num_tokens,
                    list(seq.table),
                    seq.epoch,
                    [(local(parent), newest - now) for parent, newest in seq.ancestors],
                    (seq.evicted, seq.point),
                )
                for _, seq in sorted(self._sequences.items())
                if not seq.is_closed
            },
            "loading": {local(seq.handle): seq.is_closed for seq in self._sequences.values() if seq.is_loading},
            "generations": {slot: g for slot, g in sorted(self._generations.items()) if g},
            "free_slots": list(self._free_slots),
            "pending": [
                (
                    step.id - now,
                    step.noted,
                    list(step.copies),
                    [(local(r.handle), r.old_length, list(r.replaced), r.num_appended) for r in step.rows],
                )
                for step in self._pending
            ],
            "counters": dict(self._counters),
            "prefix": self._prefix_state(),
        }

    @public_call
    def check(self) -> None:
        """Recompute what the bookkeeping implies; raises `CorruptState`."""
        used = self._referenced() | set(self._holds)
        places = self._blank + self._lru + [block for block, _ in self._limbo] + list(used)
        if sorted(places) != list(range(self.options.reserved_blocks, self.num_blocks)):
            raise CorruptState(f"[check] a block is in no place or in two: {sorted(places)}")
        if sorted(self._holds) != sorted(b for step in self._pending for b in step.held()):
            raise CorruptState("[check] holds differ from what the pending steps replaced")
        if not set(self._lru) <= self._committed or set(self._blank) & self._committed:
            raise CorruptState("[check] the LRU has an uncommitted block, or the blank stack a committed one")
        if self._limbo and not self._pending:
            raise CorruptState("[check] limbo is not empty though no step is pending")
        self._check_prefix()
        for seq in self._sequences.values():
            if seq.num_tokens > len(seq.table) * self.block_size or len(set(seq.table)) != len(seq.table):
                raise CorruptState(f"[check] table and length do not fit ({seq.handle})")

    # ---- the end ------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Release the tag; every later call raises `PoolClosed`. Idempotent."""
        if not self._closed:
            self._closed = True
            _live_tags.discard(self._tag)
            for step in self._pending:
                step.plan._pending = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        self.shutdown()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("[Pool] a pool cannot be pickled or copied")
