"""The device of `proof.simulation.simulator`: executes plans in order, late, and checks what it reads.

Its memory holds one stamp per layer and slot: which content was written there. A stamp stands for a token and all
tokens before it, so two sequences have equal stamps exactly where their contexts are equal. Work is done in small
operations (per layer: copies, writes, reads), so that the host can act between any two of them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

POISON = -1
OPERATIONS = ("copies", "writes", "reads")  # of one layer


class Violation(AssertionError):
    """The pool broke its contract."""


@dataclass(eq=False, slots=True)
class Work:
    """What the device has to do for one plan."""

    ticket: int
    plan: Any  # its arrays are read when the work is executed, not before
    num_rows: int
    stamps: np.ndarray  # of the new tokens, int64
    context: np.ndarray  # stamps that the rows have to read, one row after the other, int64
    lens: np.ndarray  # tokens of each row's context
    next_operation: int = 0


@dataclass(eq=False, slots=True)
class Move:
    """Tokens to move to the front of their table."""

    ticket: int
    table: np.ndarray  # as it was
    keep: list[int]
    next_operation: int = 0


@dataclass(eq=False, slots=True)
class Poison:
    """Blocks that have a new owner once what is before it in the queue has read them."""

    ticket: int
    blocks: list[int]
    next_operation: int = 0


@dataclass(slots=True)
class Arrays:
    """A plan's arrays as they were when it was issued: for pools whose plans are not pending afterwards."""

    copies: np.ndarray
    slot_mapping: np.ndarray
    kv_slots_ragged: np.ndarray

    @classmethod
    def of(cls, plan: Any) -> Arrays:
        """Copy them."""
        return cls(plan.copies.copy(), plan.slot_mapping.copy(), plan.kv_slots_ragged.copy())


class Device:
    """A queue of work and a memory of stamps.

    Parameters
    ----------
    num_blocks, block_size, num_layers : int
        Shape of the memory.
    by_tables : bool
        Read through block tables that are kept between steps and updated in the dirty rows only; else through the
        slots of the plan.
    """

    def __init__(self, num_blocks: int, block_size: int, num_layers: int, by_tables: bool) -> None:
        self.block_size = block_size
        self.num_layers = num_layers
        self.memory = np.full((num_layers, num_blocks * block_size), POISON, np.int64)
        self.blocks = self.memory.reshape(num_layers, num_blocks, block_size)
        self.queue: deque[Any] = deque()  # of Work, Move and Poison
        self._by_tables = by_tables
        self._tables: dict[int, np.ndarray] = {}  # id of a plan -> its rows as last uploaded
        self.reads = 0  # tokens that were read and compared

    def submit(self, work: Work) -> None:
        """Put work at the end of the queue."""
        self.queue.append(work)

    def submit_move(self, move: Move) -> None:
        """The same for what eviction leaves to do."""
        self.queue.append(move)

    def advance(self) -> Work | None:
        """Do the next small operation; returns the work that it completed, if any."""
        if not self.queue:
            return None
        work = self.queue[0]
        if not isinstance(work, Work):
            self.queue.popleft()
            if isinstance(work, Move):
                self._move(work)
            else:
                self.blocks[:, work.blocks] = POISON
            return None
        layer, operation = divmod(work.next_operation, len(OPERATIONS))
        (self._copy, self._write, self._read)[operation](work, self.memory[layer])
        work.next_operation += 1
        if work.next_operation < self.num_layers * len(OPERATIONS):
            return None
        return self.queue.popleft()

    def cancel(self, work: Work) -> None:
        """Drop what is left of it; what was executed stays, as garbage."""
        if work in self.queue:
            self.queue.remove(work)

    def clear(self) -> None:
        """Become idle."""
        self.queue.clear()

    def is_settled(self, ticket: int) -> bool:
        """Tell whether everything up to this ticket was executed or cancelled."""
        return not self.queue or self.queue[0].ticket > ticket

    def poison(self, blocks: Any) -> None:
        """These blocks have a new owner: nobody may need what they hold, but a move that comes first."""
        moving = {block for move in self.queue if isinstance(move, Move) for block in move.table.tolist()}
        later = [block for block in map(int, blocks) if block in moving]
        self.blocks[:, [block for block in map(int, blocks) if block not in moving]] = POISON
        if later:
            self.queue.append(Poison(self.queue[-1].ticket, later))

    def expect(self, table: np.ndarray, stamps: list[int], who: str) -> None:
        """Compare what a sequence reads through its table with what it must read."""
        want = np.array(stamps, np.int64)
        for layer in range(self.num_layers):
            got = self.blocks[layer, table].ravel()[: want.size]
            if got.size != want.size or (got != want).any():
                raise Violation(f"stale read: {who} has {got.tolist()}, wrote {want.tolist()}, blocks {table.tolist()}")
        self.reads += want.size * self.num_layers

    # ---- operations ---------------------------------------------------------------------------------------

    def _copy(self, work: Work, memory: np.ndarray) -> None:
        size = self.block_size
        if self._by_tables and not work.next_operation:
            self._upload(work.plan)
        for src, dst, tokens in self._copies(work):
            memory[dst * size : dst * size + tokens] = memory[src * size : src * size + tokens]

    def _write(self, work: Work, memory: np.ndarray) -> None:
        if work.stamps.size:
            slots = work.plan.slot_mapping[: work.stamps.size]
            if slots.min() < 0:
                raise Violation(f"step {work.ticket}: a token has no slot: {slots.tolist()}")
            memory[slots] = work.stamps

    def _read(self, work: Work, memory: np.ndarray) -> None:
        if not work.context.size:
            return
        got = memory[self._context_slots(work)]
        if (got != work.context).any():
            at = int(np.flatnonzero(got != work.context)[0])
            row = int(np.searchsorted(np.cumsum(work.lens), at, side="right"))
            raise Violation(
                f"stale read: step {work.ticket}, row {row}, token {at - int(work.lens[:row].sum())} is {got[at]}, "
                f"must be {work.context[at]} ({(got != work.context).sum()} wrong)"
            )
        self.reads += got.size

    def _move(self, move: Move) -> None:
        slots = (move.table[:, None] * self.block_size + np.arange(self.block_size)).ravel()
        self.memory[:, slots[: len(move.keep)]] = self.memory[:, slots[move.keep]]

    def _copies(self, work: Work) -> list[list[int]]:
        return work.plan.copies.tolist()

    def _dirty(self, plan: Any) -> np.ndarray:
        return plan.dirty_rows

    def _context_slots(self, work: Work) -> np.ndarray:
        if not self._by_tables:
            return work.plan.kv_slots_ragged[: work.context.size]
        tables = self._tables[id(work.plan)]
        rows = np.repeat(np.arange(work.num_rows), work.lens)
        starts = np.cumsum(work.lens) - work.lens
        positions = np.arange(work.context.size) - starts[rows]
        return tables[rows, positions // self.block_size] * self.block_size + positions % self.block_size

    def _upload(self, plan: Any) -> None:
        """Bring the kept tables of a plan up to date."""
        tables = self._tables.setdefault(id(plan), np.zeros((plan.limits.max_rows, plan.limits.table_width), np.int64))
        dirty = self._dirty(plan)
        tables[dirty] = plan.block_tables[dirty]
