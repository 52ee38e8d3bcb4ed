"""Planted bugs that the state machine must find: a judge that never convicts is no judge.

Each broken pool is the model with one mistake. It is run against the sound model, and, where the mistake
corrupts what a sequence reads, also against itself, so that only the fake backend can notice.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest

from kvpool.testing import ModelPlan, ModelPool
from kvpool.testing.model_blocks import Row, Sequence, Step, public_call
from proof.machine.machine import findings


class Unchecked(ModelPool):
    """A pool that does not notice by itself what is wrong with it."""

    def check(self) -> None:
        """See nothing."""


class NoHold(Unchecked):
    """The source of a pending copy is given up with its last reference."""

    def _release(self, block: int) -> None:
        holds, self._holds = self._holds, []
        super()._release(block)
        self._holds = holds


class FloorIgnored(Unchecked):
    """A block is written in place below what a pending copy still reads."""

    def _floor(self, block: int) -> int:
        return 0

    def _row_needs(self, seq: Sequence, n: int, lost: dict, floors: dict) -> Any:
        return super()._row_needs(seq, n, lost, {})


class LimboSkipped(Unchecked):
    """A freed block is reused under a step that still reads it."""

    def _release(self, block: int) -> None:
        if not self._refcount(block) and block not in self._holds:
            self._leave(block)


class CommittedWrittenInPlace(Unchecked):
    """A committed block is not copied before it is written."""

    def _row_needs(self, seq: Sequence, n: int, lost: dict, floors: dict) -> Any:
        committed, self._committed = self._committed, set()
        try:
            return super()._row_needs(seq, n, lost, floors)
        finally:
            self._committed = committed


class SharedWrittenInPlace(Unchecked):
    """A shared tail is not copied before it is written."""

    def _row_needs(self, seq: Sequence, n: int, lost: dict, floors: dict) -> Any:
        _, num_appended = super()._row_needs(seq, n, lost, floors)
        return [], num_appended


class CopyOneTokenShort(Unchecked):
    """A copy leaves out the last valid token."""

    def _begin(self, *args: Any) -> Step:
        step = super()._begin(*args)
        step.copies[:] = [(src, dst, max(1, tokens - 1)) for src, dst, tokens in step.copies]
        return step


class RollbackForgetsBlock(Unchecked):
    """Rollback drops an appended block from the table but not from the books."""

    def _undo(self, row: Row) -> None:
        seq = self._find(row.handle)
        if seq is not None and row.num_appended:
            row.num_appended -= 1
            self._limbo.append((seq.table.pop(), 0))
        super()._undo(row)


class RollbackKeepsReplacement(Unchecked):
    """Rollback restores lengths, but leaves the row on the uncopied block."""

    def _undo(self, row: Row) -> None:
        seq = self._find(row.handle)
        if seq is not None:
            for i, old, new in row.replaced:
                self._holds.remove(old)
                seq.table[i] = new
                self._release(old)
            row.replaced = []
        super()._undo(row)


class ReleaseOldestFirst(Unchecked):
    """Blocks leave a table from its front."""

    def _pop_blocks(self, seq: Sequence, length: int) -> None:
        dropped = seq.table[length:]
        del seq.table[length:]
        for block in dropped:
            self._release(block)


class EpochNotBumped(Unchecked):
    """A replaced entry goes unnoticed by other plans."""

    def _begin(self, plan: ModelPlan, batch: list[Sequence], needs: list) -> Step:
        epochs = [seq.epoch for seq in batch]
        step = super()._begin(plan, batch, needs)
        for seq, epoch in zip(batch, epochs, strict=True):
            seq.epoch = epoch
        return step


class DoubleFreeClamped(Unchecked):
    """A reference count stops at zero instead of telling."""

    @public_call
    def _blocks_decref(self, ids: Any) -> None:
        """Drop what is there."""
        blocks = [block for block in self._ids("decref", ids) if self._raw.get(block)]
        self._drop_raw(blocks)
        self._chain("decref", *blocks)


class OutOfBlocksLeaks(Unchecked):
    """A step that fails keeps a block."""

    def _judge(self, call: str, batch: list, new: list, partial: bool) -> list:
        try:
            return super()._judge(call, batch, new, partial)
        except MemoryError:
            if self._blank:
                self._raw[self._blank.pop()] = 1
            raise


class GenerationNotBumped(Unchecked):
    """A reused slot gets the handle of the sequence before."""

    def _close(self, seq: Sequence) -> None:
        super()._close(seq)
        self._generations[seq.handle & 0xFFFFF] -= 1


class ForkSharesReserved(Unchecked):
    """Children get the parent's reserved blocks too."""

    @public_call
    def fork(self, handle: int, n: int = 1) -> np.ndarray:
        """Share the whole table."""
        parent = self._one("fork", handle)
        self._refuse_slots("fork", n)
        children = [self._create(parent.num_tokens, list(parent.table)) for _ in range(n)]
        for child in children:
            child.ancestors = [*parent.ancestors, (parent.handle, self._next_step - 1)]
        return np.array([child.handle for child in children], np.int64)


class DoneOutOfOrder(Unchecked):
    """A younger step that is done first does not wait for the older ones."""

    @public_call
    def done(self, plan: ModelPlan) -> None:
        """Pass at once."""
        self._pass(self._pending_step("done", plan))


class DrainIgnoresFence(Unchecked):
    """Limbo is emptied whenever any step passes."""

    def _drain_limbo(self) -> None:
        while self._limbo:
            self._leave(self._limbo.pop(0)[0])


class EvictsNewest(Unchecked):
    """The block used last is evicted first."""

    def _evict_oldest(self) -> int:
        self._lru.reverse()
        block = super()._evict_oldest()
        self._lru.reverse()
        return block


class WatermarkIgnored(Unchecked):
    """`open` takes the blocks that growth needs."""

    def __init__(self, *args: Any, watermark: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)


class DeferredForgotten(Unchecked):
    """A deferred close never happens."""

    def _drain(self) -> None:
        self._deferred.clear()


class DirtyRowMissed(ModelPlan):
    """A row that only grew is not reported."""

    def _dirty(self, batch: list[Sequence], num_rows: int) -> list[int]:
        memory = dict(self._memory)
        dirty = super()._dirty(batch, num_rows)
        return [row for row in dirty if (memory.get(row) or ())[:2] != (self._memory.get(row) or ())[:2]]


class RollbackNotCarried(ModelPlan):
    """A rolled back row is believed to be up to date."""

    def _carry(self, num_rows: int) -> None:
        pass


SOUND = (ModelPool, ModelPlan)
CORRUPTING = [
    FloorIgnored,
    LimboSkipped,
    CommittedWrittenInPlace,
    SharedWrittenInPlace,
    CopyOneTokenShort,
    RollbackKeepsReplacement,
    DrainIgnoresFence,
]


@pytest.mark.parametrize("pool", Unchecked.__subclasses__())
def test_machine_broken_pool_is_detected_by_the_model(pool: type) -> None:
    assert any(findings(pool, ModelPlan, SOUND))


@pytest.mark.parametrize("plan", [DirtyRowMissed, RollbackNotCarried])
def test_machine_broken_plan_is_detected_by_the_model(plan: type) -> None:
    assert any(findings(ModelPool, plan, SOUND))


@pytest.mark.long
@pytest.mark.parametrize("pool", CORRUPTING)
def test_machine_corrupting_pool_is_detected_by_its_content_alone(pool: type) -> None:
    found = islice(findings(pool, ModelPlan, (pool, ModelPlan)), 8)
    assert any("content:" in str(finding) for finding in found)  # the others broke in their own ways first


def test_machine_stale_table_is_detected_by_its_mirror_alone() -> None:
    found = next(findings(ModelPool, DirtyRowMissed, (ModelPool, DirtyRowMissed)))
    assert "dirty_rows" in str(found), found
