"""The eviction half of `kvpool.testing.model`: tokens that leave a sequence which goes on."""

from __future__ import annotations

from typing import Any

from kvpool.errors import CapacityExceeded, PlanStateError
from kvpool.testing import model_args as args
from kvpool.testing.model_blocks import Sequence, Step, ceil_div, public_call
from kvpool.testing.model_plan import ModelPlan
from kvpool.testing.model_prefix import PrefixModel


class EvictionModel(PrefixModel):
    """`PrefixModel` with compaction and eviction of blocks; `ModelPool` adds steps."""

    # ---- what `ModelPool` knows of steps ------------------------------------------------------------------

    def _floor(self, block: int) -> int:
        raise NotImplementedError

    def _refuse_plan(self, call: str, plan: ModelPlan) -> None:
        raise NotImplementedError

    def _refuse_row(self, call: str, plan: ModelPlan, row: int, seq: Sequence, n: int) -> None:
        raise NotImplementedError

    def _begin(self, plan: ModelPlan, batch: list[Sequence], needs: list[Any]) -> Step:
        raise NotImplementedError

    def _started(self, call: str, step: Step, new: list[int]) -> None:
        raise NotImplementedError

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

    @public_call
    def unshare(self, plan: ModelPlan, handles: Any, lens: Any, first: int = 0) -> None:
        """Replace every block that `compact` would refuse to rewrite by a copy; a step without tokens."""
        self._refuse_plan("unshare", plan)
        if plan.is_pending:
            raise PlanStateError(f"[unshare] the plan is pending (step {plan.step_id})")
        names = args.handles("unshare", handles)
        lengths = args.per_row("unshare", "lens", lens, len(names), args.MIN_INT64)
        first = args.count("unshare", "first", first)
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
        step = self._begin(plan, batch, needs)
        plan._fill(batch, [0] * len(batch), [True] * len(batch), step.copies, None)
        self._started("unshare", step, lengths)

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
    def compact(self, handles: Any, lens: Any, first: int = 0) -> None:
        """Keep `lens` tokens at the front of each table, the first `first` where they are."""
        names = args.handles("compact", handles, alone=True)
        lengths = args.per_row("compact", "lens", lens, len(names), args.MIN_INT64)
        first = args.count("compact", "first", first)
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
    def evict_blocks(self, handle: int, indices: Any) -> None:
        """Full blocks leave the table, by ascending index."""
        places = args.integers("evict_blocks", "indices", indices, ("int32", "int64"))
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
    def kv_len(self, handle: int) -> int:
        """Return how many tokens of a sequence have a slot."""
        return self._one("kv_len", handle).num_tokens
