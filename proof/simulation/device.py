"""The device of `proof.simulation.simulator`: executes plans in order, late, and checks what it reads.

Its memory holds one mark per layer and slot: which content was written there. A mark is that of a stamp, of a group and
of a column. A stamp stands for a token and all tokens before it, so two sequences have equal stamps exactly where their
contexts are equal. Work is done in small operations (per layer: copies, writes, reads), so that the host can act
between any two of them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from proof.simulation.layers import Layers

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
    slots: np.ndarray  # the rows of tables that belong to the handles
    stamps: np.ndarray  # of the new tokens, int64
    context: np.ndarray  # stamps of all tokens of the rows, one row after the other, int64
    before: np.ndarray  # tokens of each row before the step
    lens: np.ndarray  # and with it
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
    """Blocks of an arena that have a new owner once what is before it in the queue has read them."""

    ticket: int
    arena: int
    blocks: list[int]
    next_operation: int = 0


def frozen(plan: Any, layers: list[Layers], by_updates: bool) -> Any:
    """A plan's arrays as they are when it is issued: for pools whose plans are not pending afterwards."""
    names = ("state_src", "state_dst", "copies", "slot_mapping", "kv_slots_ragged", "block_tables")

    def copied(of: Any) -> SimpleNamespace:
        return SimpleNamespace(**{name: getattr(of, name).copy() for name in names if hasattr(of, name)})

    if layers[0].alone:
        return copied(plan)
    updates = {"table_updates": plan.table_updates.copy()} if by_updates else {}
    return SimpleNamespace(groups=[copied(each) for each in plan.groups], **updates)


class Device:
    """A queue of work and a memory of stamps.

    Parameters
    ----------
    layers : list of Layers
        What the memory holds.
    num_blocks : list of int
        Blocks of every arena.
    depth : int
        Layers of each group; what is copied, written and read is so in every one of them.
    by_tables : bool
        Read through block tables that are kept between steps and updated in the dirty rows only; else through those of
        the plan, without groups through its slots.
    mirror : tuple of int, optional
        Sequences and blocks of the longest one: read through one copy of all tables, kept by ``table_updates`` alone.
    """

    def __init__(
        self,
        layers: list[Layers],
        num_blocks: list[int],
        depth: int,
        by_tables: bool,
        mirror: tuple[int, int] | None = None,
    ) -> None:
        self.layers = layers
        self.depth = depth
        room = [max(each.size for each in layers if each.arena == arena) for arena in range(len(num_blocks))]
        self.arenas = [np.full((depth, n, size), POISON, np.int64) for n, size in zip(num_blocks, room, strict=True)]
        self.queue: deque[Any] = deque()  # of Work, Move and Poison
        self._by_tables = by_tables
        self._mirror = [np.full((*(mirror or (0, 0)), each.columns), POISON, np.int64) for each in layers]
        self._by_updates = mirror is not None
        self._tables: dict[tuple[int, int], np.ndarray] = {}  # plan and group -> its rows as last uploaded
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
                self.arenas[work.arena][:, work.blocks] = POISON
            return None
        depth, operation = divmod(work.next_operation, len(OPERATIONS))
        if not work.next_operation:
            self._upload(work)
        for layers in self.layers:
            if layers.kind == "state":
                (self._nothing, self._step_states, self._nothing)[operation](work, layers, depth)
            else:
                (self._copy, self._write, self._read)[operation](work, layers, depth)
        work.next_operation += 1
        if work.next_operation < self.depth * len(OPERATIONS):
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

    def poison(self, arena: int, blocks: set[int]) -> None:
        """These blocks have a new owner: nobody may need what they hold, but a move that comes first."""
        moving = {block for move in self.queue if isinstance(move, Move) for block in move.table.tolist()}
        later = sorted(blocks & moving) if arena == 0 else []
        self.arenas[arena][:, sorted(blocks - set(later))] = POISON
        if later:
            self.queue.append(Poison(self.queue[-1].ticket, arena, later))

    def expect(self, layers: Layers, table: np.ndarray, stamps: np.ndarray, low: int, who: str) -> None:
        """Compare what a sequence reads through its table with what it must read: from `low` on, and what is kept."""
        at = np.arange(stamps.size)
        at = at[(at >= low) | (at < layers.keep)]
        want = layers.mark(stamps[at])
        if at.size and at[-1] // layers.size >= len(table):
            raise Violation(f"{who} has {stamps.size} tokens, and a table of {len(table)} blocks")
        blocks = table[at // layers.size]
        if (blocks < layers.low).any():
            raise Violation(f"{who} has lost a token of group {layers.number} that it reads, blocks {table.tolist()}")
        for memory in self.arenas[layers.arena]:
            got = memory[blocks, (at % layers.size)[:, None]]
            if (got != want).any():
                where = at[(got != want).any(axis=1)].tolist()
                raise Violation(
                    f"stale read: {who} reads others' tokens in group {layers.number} at {where}, "
                    f"blocks {table.tolist()}"
                )
        self.reads += want.size * self.depth

    def expect_state(self, layers: Layers, slot: int, stamp: int, who: str) -> None:
        """The same for a state: it is that after a token with this stamp."""
        if slot < 0 or (self.arenas[layers.arena][:, slot, 0] != layers.mark(np.array([stamp]))[0, 0]).any():
            raise Violation(f"stale read: {who} has not its state in slot {slot} of group {layers.number}")
        self.reads += self.depth

    # ---- operations ---------------------------------------------------------------------------------------

    def _nothing(self, work: Work, layers: Layers, depth: int) -> None:
        """States are not copied, and read as they are written."""

    def _copy(self, work: Work, layers: Layers, depth: int) -> None:
        memory = self.arenas[layers.arena][depth]
        for src, dst, tokens in self._copies(work, layers):
            memory[dst, :tokens] = memory[src, :tokens]

    def _write(self, work: Work, layers: Layers, depth: int) -> None:
        if work.stamps.size:
            slots = layers.arrays(work.plan).slot_mapping.reshape(layers.columns, -1)[:, : work.stamps.size].T
            if slots.min() < layers.low * layers.size:
                raise Violation(f"step {work.ticket}: a token has no slot in group {layers.number}: {slots.tolist()}")
            self.arenas[layers.arena][depth, slots // layers.size, slots % layers.size] = layers.mark(work.stamps)

    def _read(self, work: Work, layers: Layers, depth: int) -> None:
        if not work.context.size:
            return
        rows = np.repeat(np.arange(work.num_rows), work.lens)
        starts = np.cumsum(work.lens) - work.lens
        at = np.arange(work.context.size) - starts[rows]
        if layers.kind in ("window", "chunk"):
            seen = (at >= layers.first_read(work.before)[rows]) | (at < layers.keep)
            rows, at = rows[seen], at[seen]
        blocks, offsets = self._places(work, layers, rows, at)
        want = layers.mark(work.context[starts[rows] + at])
        got = self.arenas[layers.arena][depth, blocks, offsets]
        if (got != want).any():
            wrong = (got != want).any(axis=1)
            first = int(np.flatnonzero(wrong)[0])
            raise Violation(
                f"stale read: step {work.ticket}, row {rows[first]}, token {at[first]} of group {layers.number} is "
                f"{got[first].tolist()}, must be {want[first].tolist()} ({wrong.sum()} wrong)"
            )
        self.reads += got.size

    def _step_states(self, work: Work, layers: Layers, depth: int) -> None:
        """Every row reads its state, then every row writes one."""
        memory, arrays = self.arenas[layers.arena][depth, :, 0], layers.arrays(work.plan)
        ends = np.cumsum(work.lens)
        starts = ends - work.lens
        rows = np.flatnonzero(work.lens > work.before)
        src, dst = arrays.state_src[rows], arrays.state_dst[rows]
        later = work.before[rows] > 0
        if (src[~later] != -1).any() or (src[later] < 0).any() or (dst < 0).any():
            raise Violation(f"step {work.ticket}: states {src.tolist()} become {dst.tolist()} in group {layers.number}")
        want = layers.mark(work.context[starts[rows[later]] + work.before[rows[later]] - 1])[:, 0]
        if (memory[src[later]] != want).any():
            raise Violation(f"stale read: step {work.ticket} reads other states in group {layers.number}")
        others = dst[:, None] == src[None, :]
        np.fill_diagonal(others, False)
        if others.any() or len(set(dst.tolist())) < len(dst):
            raise Violation(f"step {work.ticket} writes a state of another row in group {layers.number}")
        memory[dst] = layers.mark(work.context[ends[rows] - 1])[:, 0]
        self.reads += int(later.sum())

    def _move(self, move: Move) -> None:
        memory = self.arenas[0]
        size = memory.shape[2]
        slots = (move.table[:, None] * size + np.arange(size)).ravel()
        memory.reshape(self.depth, -1)[:, slots[: len(move.keep)]] = memory.reshape(self.depth, -1)[:, slots[move.keep]]

    def _copies(self, work: Work, layers: Layers) -> list[list[int]]:
        return layers.arrays(work.plan).copies.tolist()

    def _dirty(self, arrays: Any) -> np.ndarray:
        return arrays.dirty_rows

    def _places(self, work: Work, layers: Layers, rows: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Block and offset of these tokens of these rows, by the plan."""
        if layers.alone and not self._by_tables:
            slots = work.plan.kv_slots_ragged[: at.size, None]
            return slots // layers.size, slots % layers.size
        if self._by_updates:
            tables, rows = self._mirror[layers.number], work.slots[rows]
        elif self._by_tables:
            tables = self._tables[id(work.plan), layers.number]
        else:
            tables = self._shown(work.plan, layers)
        return tables[rows, at // layers.size], (at % layers.size)[:, None]

    def _shown(self, plan: Any, layers: Layers) -> np.ndarray:
        tables = layers.arrays(plan).block_tables
        return tables.reshape(*tables.shape[:2], layers.columns)

    def _upload(self, work: Work) -> None:
        """Bring the kept tables up to date before a plan is executed."""
        for slot, group, index, column, block in self._updates(work.plan) if self._by_updates else ():
            self._mirror[group][slot, index, column] = block
        for layers in self.layers if self._by_tables else ():
            if layers.kind != "state":
                self._upload_rows(work.plan, layers)

    def _updates(self, plan: Any) -> list[list[int]]:
        return plan.table_updates.tolist()

    def _upload_rows(self, plan: Any, layers: Layers) -> None:
        shown, key = self._shown(plan, layers), (id(plan), layers.number)
        if key not in self._tables:
            self._tables[key] = np.zeros((plan.limits.max_rows, *shown.shape[1:]), np.int64)
        dirty = self._dirty(layers.arrays(plan))
        self._tables[key][dirty] = shown[dirty]
