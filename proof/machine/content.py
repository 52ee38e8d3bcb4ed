"""A fake backend that knows what every slot must hold, so that an allocator bug shows as wrong content.

Nothing here asks the model. Every token ever written gets its own stamp (an int), every sequence remembers
the stamps it wrote or inherited, and two memories are kept:

- *now*: a step's copies and writes happen when the step is issued. Every open sequence must read its own
  stamps after every call.
- *late*: they happen when the step passes, as late as a backend may run, in step order. The rows of the step
  must read their own stamps then, closed since or not.

A block that is handed out is poisoned in both at once: whoever still reads it was robbed. What a pending copy
reads must not change until its step has passed. A step that is rolled back was partly executed: it leaves
garbage wherever it was going to write.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

POISON, GARBAGE, ANY = -1, -2, None


@dataclass
class Work:
    """What a backend does for one step (or, after a rollback, the garbage it left)."""

    plan: int
    copies: list[tuple[list[int], list[int]]] = field(default_factory=list)  # source slots, destination slots
    writes: list[tuple[int, int]] = field(default_factory=list)  # slot, stamp
    reads: list[tuple[int, list[int], list[int]]] = field(default_factory=list)  # handle, slots, stamps
    sources: list[tuple[list[int], list[int | None]]] = field(default_factory=list)  # slots, what they held
    noted: bool = False

    def run(self, memory: list[int | None]) -> None:
        """Copies, then writes."""
        for src, dst in self.copies:
            for s, d in zip(src, dst, strict=True):
                memory[d] = memory[s]
        for slot, stamp in self.writes:
            memory[slot] = stamp

    def spoil(self) -> None:
        """Turn into the garbage of a step that failed half way."""
        slots = [slot for slot, _ in self.writes] + [d for _, dst in self.copies for d in dst]
        self.copies, self.reads, self.sources, self.noted = [], [], [], True
        self.writes = [(slot, GARBAGE) for slot in slots]


class Content:
    """The two memories, the stamps of every sequence, and the work not yet executed."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.now: list[int | None] = [POISON] * (num_blocks * block_size)
        self.late = list(self.now)
        self.queue: list[Work] = []
        self.stamps: dict[int, list[int]] = {}  # handle -> stamp of each position
        self.frozen: dict[int, list[int | None]] = {}  # block -> content that must not change
        self._next = 0

    def _slots(self, block: int) -> range:
        return range(block * self.block_size, (block + 1) * self.block_size)

    def _context(self, table: list[int], length: int) -> list[int]:
        return [slot for block in table for slot in self._slots(block)][:length]

    def _stamp(self) -> int:
        self._next += 1
        return self._next

    # ---- what happens -------------------------------------------------------------------------------------

    def took(self, blocks: Iterable[int]) -> None:
        """These blocks were handed out: whatever they held is gone."""
        for block in blocks:
            self.frozen.pop(block, None)
            for slot in self._slots(block):
                self.now[slot] = self.late[slot] = POISON

    def opened(self, handle: int) -> None:
        """A new empty sequence."""
        self.stamps[handle] = []

    def forked(self, parent: int, children: list[int]) -> None:
        """The children have what the parent has."""
        for child in children:
            self.stamps[child] = list(self.stamps[parent])

    def truncated(self, handle: int, length: int) -> None:
        """The sequence lost its end."""
        del self.stamps[handle][length:]

    def compacted(self, handle: int, table: list[int], keep: list[int]) -> None:
        """The sequence keeps these of its tokens, moved to the front of `table`, after all that was issued."""
        stamps = self.stamps[handle]
        work = Work(-1, noted=True)
        if len(keep) < len(stamps):
            at = self._context(table, len(stamps))
            work.copies.append(([at[k] for k in keep], at[: len(keep)]))
            self.stamps[handle] = [stamps[k] for k in keep]
        work.reads.append((handle, self._context(table, len(keep)), list(self.stamps[handle])))
        self.queue.append(work)
        work.run(self.now)
        self._verify_reads(work, self.now, "when tokens were moved")
        self._run_queue()

    def lost_blocks(self, handle: int, places: list[int]) -> None:
        """Whole blocks of a sequence left."""
        stamps, bs = self.stamps[handle], self.block_size
        self.stamps[handle] = [stamp for i, stamp in enumerate(stamps) if i // bs not in places]

    def closed(self, handle: int) -> None:
        """The sequence is gone; a second time changes nothing."""
        self.stamps.pop(handle, None)

    def wrote_raw(self, block: int) -> None:
        """An engine with own tables wrote the whole block; nobody may touch it while it is referenced."""
        for slot in self._slots(block):
            self.now[slot] = self.late[slot] = self._stamp()
        self.freeze(block)

    def freeze(self, block: int) -> None:
        """The content of this block must not change until it is handed out again."""
        if block not in self.frozen:
            self.frozen[block] = [self.now[slot] for slot in self._slots(block)]

    def started(
        self,
        plan: int,
        rows: list[tuple[int, list[int]]],
        new_slots: list[list[int]],
        copies: list[list[int]],
    ) -> None:
        """A step was issued: `rows` of (handle, table after the step), slots of the new tokens per row."""
        work = Work(plan)
        for src, dst, tokens in copies:
            work.copies.append((list(self._slots(src)[:tokens]), list(self._slots(dst)[:tokens])))
        for (handle, table), slots in zip(rows, new_slots, strict=True):
            stamps = self.stamps[handle]
            for slot in slots:
                stamps.append(self._stamp())
                work.writes.append((slot, stamps[-1]))
            work.reads.append((handle, self._context(table, len(stamps)), list(stamps)))
        work.sources = [(src, [self.now[s] for s in src]) for src, _ in work.copies]
        self.queue.append(work)
        work.run(self.now)
        self._verify_reads(work, self.now, "when it was issued")

    def finished(self, plan: int) -> None:
        """`done` was called: everything up to the first step not yet done is executed now."""
        next(work for work in self.queue if work.plan == plan and not work.noted).noted = True
        self._run_queue()

    def rolled_back(self, plan: int, lengths: dict[int, int]) -> None:
        """The newest step of `plan` failed; `lengths` of its open rows are what they were before."""
        work = next(work for work in reversed(self.queue) if work.plan == plan and not work.noted)
        self._verify_sources(work)
        work.spoil()
        work.run(self.now)
        for slot, _ in work.writes:
            block, offset = divmod(slot, self.block_size)
            if block in self.frozen:
                self.frozen[block][offset] = ANY
        for handle, length in lengths.items():
            del self.stamps[handle][length:]
        self._run_queue()

    def reset(self) -> None:
        """Everything is forgotten; the backend is idle."""
        self.queue.clear()
        self.stamps.clear()
        self.frozen.clear()

    def _run_queue(self) -> None:
        while self.queue and self.queue[0].noted:
            work = self.queue.pop(0)
            self._verify_sources(work)
            work.run(self.late)
            self._verify_reads(work, self.late, "when it was executed")

    # ---- what must hold -----------------------------------------------------------------------------------

    def _verify_reads(self, work: Work, memory: list[int | None], when: str) -> None:
        for handle, slots, stamps in work.reads:
            got = [memory[slot] for slot in slots]
            assert got == stamps, f"content: plan {work.plan} {when}: row {handle} reads {got}, wrote {stamps}"

    def _verify_sources(self, work: Work) -> None:
        for slots, held in work.sources:
            got = [self.now[slot] for slot in slots]
            assert got == held, f"content: plan {work.plan}: the source of a pending copy changed, {held} to {got}"

    def verify(self, tables: dict[int, list[int]]) -> None:
        """Every open sequence reads what it wrote, and no frozen block has changed."""
        for handle, table in tables.items():
            stamps = self.stamps[handle]
            got = [self.now[slot] for slot in self._context(table, len(stamps))]
            assert got == stamps, f"content: sequence {handle} reads {got}, wrote {stamps} (table {table})"
        for block, held in self.frozen.items():
            for slot, want in zip(self._slots(block), held, strict=True):
                assert want is ANY or self.now[slot] == want, f"content: immutable block {block} was written"
