"""`GroupContent`: a memory that knows what every block of a pool with groups must hold. It asks no pool what is right.

Every token gets a stamp, which stands for all tokens of its sequence up to this one. Every sequence remembers its
stamps. So a hit in the prefix cache is right if its blocks hold the stamps of the prompt. A plan is executed as late as
a backend may run, when its `done` passes: copies and loads of states, reads of states, writes, then reads of whatever
its queries may read, then saves of states. Its arrays are read at that moment, not when the step was issued. A block
that is handed out is poisoned at once, so whoever still reads it is robbed. A step that is rolled back leaves garbage
where it was going to write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvpool.groups import Group

POISON, GARBAGE = "poison", "garbage"
Place = tuple[int, int, int]  # arena, block, offset


def read_at(group: Group, p: int) -> set[int]:
    """The positions that a query at position p reads."""
    everything = range(p + 1)
    if group.kind == "window":
        return {x for x in everything if p - x < group.size or x < group.keep}
    if group.kind == "chunk":
        return {x for x in everything if x // group.size == p // group.size}
    return set(everything)


def read_from(group: Group, p: int, length: int) -> set[int]:
    """The positions below `length` that queries at position p or later may read."""
    p = max(p, 0)
    return (read_at(group, p) | set(range(p, length))) & set(range(length))


@dataclass(frozen=True)
class Saved:
    """A part of a state, in a block of a checkpoint."""

    part: int
    state: Any


@dataclass
class Work:
    """What a backend does for one step: rows of (name, old length, new length, stamps)."""

    plan: Any
    rows: list[tuple[int, int, int, list[int]]]
    garbage: list[Place] | None = None  # all that is left of a step that was rolled back
    moves: dict[Place, Place] | None = None  # a compaction, which is no step: where what goes
    noted: bool = False


class GroupContent:
    """The memory, the stamps of every sequence, and the work not yet executed.

    Parameters
    ----------
    groups : sequence of Group
        The groups of the pool.
    block_size, reserved, lookahead : int
        What the pool was made with.
    """

    def __init__(self, groups: Any, block_size: int, reserved: int, lookahead: int) -> None:
        self.groups, self.reserved, self.lookahead = tuple(groups), reserved, lookahead
        self.sizes = [group.block_size or block_size for group in self.groups]
        self.kv = [g for g, group in enumerate(self.groups) if group.kind != "state"]
        num_shared = 1 + max((group.arena for group in self.groups if group.kind != "state"), default=0)
        own = iter(range(num_shared, num_shared + len(self.groups)))
        self.arenas = [next(own) if group.kind == "state" else group.arena for group in self.groups]
        self.memory: dict[Place, Any] = {}
        self.roots: dict[int, Any] = {}  # sequence -> what comes before its first token
        self.stamps: dict[int, list[int]] = {}  # sequence -> stamp of each position
        self.passed: dict[int, int] = {}  # sequence -> most tokens that it had in a step that passed
        self.evicted: dict[tuple[int, int], set[int]] = {}  # sequence, group -> stamps that left
        self.point: dict[int, int] = {}  # sequence -> its length when it was opened, or when tokens left last
        self.named: set[tuple[int, int]] = set()  # blocks in tables after the last call
        self.queue: list[Work] = []
        self.reads = 0  # how many tokens and states were verified
        self._known: dict[tuple[Any, int], int] = {}  # (stamp of the token before, token) -> stamp

    # ---- what happens -------------------------------------------------------------------------------------

    def opened(self, name: int, root: Any, hit: Sequence[int], found: set[tuple[int, int]]) -> None:
        """A sequence was opened with the tokens of a hit, in the blocks `found`. `root` comes before them."""
        self.roots[name], self.stamps[name] = root, []
        self._append(name, hit)
        self.passed[name] = self.point[name] = len(hit)
        self.named |= found

    def loading(self, bundle: set[int]) -> None:
        """Blocks of a checkpoint were handed out to be loaded."""
        self.poison({(0, block) for block in bundle})

    def loaded(
        self, name: int, tokens: Sequence[int], table: Callable[[int, int], Any], bundles: dict[int, Any]
    ) -> None:
        """These tokens of a sequence came from elsewhere, into the blocks that it has; states into bundles."""
        begin = len(self.stamps[name])
        self._append(name, tokens)
        stamps = self.stamps[name]
        self.passed[name] = self.point[name] = len(stamps)
        for g in self.kv:
            for i, entry in enumerate(table(name, g).tolist()):
                held = [block for block in entry if block >= max(self.reserved, 0)]
                for p in range(max(begin, i * self.sizes[g]), min(len(stamps), (i + 1) * self.sizes[g])):
                    places = [(self.arenas[g], block, p % self.sizes[g]) for block in held]
                    self.memory.update({place: (stamps[p], g, column) for column, place in enumerate(places)})
        for g, blocks in bundles.items() if len(stamps) > begin else ():
            state = (g, len(stamps), stamps[-1])
            self.memory.update({(0, block, 0): Saved(k, state) for k, block in enumerate(blocks)})

    def _append(self, name: int, tokens: Iterable[int]) -> None:
        stamps = self.stamps[name]
        for token in tokens:
            after = stamps[-1] if stamps else (self.roots[name],)
            stamps.append(self._known.setdefault((after, token), len(self._known)))

    def forked(self, parent: int, children: list[int]) -> None:
        """The children have what the parent has."""
        for child in children:
            self.stamps[child], self.passed[child] = list(self.stamps[parent]), self.passed[parent]
            self.roots[child], self.point[child] = self.roots[parent], self.point[parent]
            for g in range(len(self.groups)):
                self.evicted[child, g] = set(self.evicted.get((parent, g), ()))

    def held(self, name: int, group: int, stamps: list[int] | None = None) -> list[int]:
        """Stamps of a sequence that have a place in a group, in the order of their places."""
        gone = self.evicted.get((name, group), ())
        return [stamp for stamp in (self.stamps[name] if stamps is None else stamps) if stamp not in gone]

    def left(self, name: int, group: int, places: list[int]) -> None:
        """The tokens at these places left a sequence; those behind them moved up."""
        held = self.held(name, group)
        if places:
            self.evicted.setdefault((name, group), set()).update(held[place] for place in places)
            self.point[name] = len(self.stamps[name])

    def compacted(self, name: int, group: int, table: list[list[int]], keep: list[int]) -> None:
        """The tokens at `keep` moved to the front of the table as it was; it happens in the order of the steps."""
        arena, size = self.arenas[group], self.sizes[group]
        moves = {
            (arena, table[to // size][column], to % size): (arena, table[place // size][column], place % size)
            for to, place in enumerate(keep)
            for column in range(self.groups[group].columns)
            if to != place
        }
        self.queue.append(Work(None, [], moves=moves, noted=True))
        self.left(name, group, sorted(set(range(len(self.held(name, group)))) - set(keep)))
        self._execute()

    def truncated(self, name: int, length: int) -> None:
        """The sequence lost its end."""
        del self.stamps[name][length:]
        self.passed[name] = min(self.passed[name], length + self.lookahead)
        self.point[name] = min(self.point[name], length)

    def may_truncate(self, name: int, length: int) -> bool:
        """Whether the pool has promised that this length is left."""
        has_state = any(group.kind == "state" for group in self.groups)
        least = len(self.stamps[name]) if has_state else self.passed[name] - self.lookahead
        return name not in self.pending_rows() and max(least, self.point[name]) <= length <= len(self.stamps[name])

    def done_length(self, name: int) -> int:
        """Tokens of a sequence that no step has still to write, so far as its own steps say."""
        waiting = (row for work in self.queue if work.garbage is None for row in work.rows)
        return next((old for one, old, _, _ in waiting if one == name), len(self.stamps[name]))

    def pending_rows(self) -> set[int]:
        """Sequences that are rows of a step which has not passed."""
        return {row[0] for work in self.queue if work.garbage is None for row in work.rows}

    def tables(self, tables: dict[int, list[list[list[int]]]], took: bool) -> None:
        """The tables after a call; `took` says that blocks that are new in them were handed out."""
        now = {
            (arena, block)
            for groups in tables.values()
            for arena, table in zip(self.arenas, groups, strict=True)
            for entry in table
            for block in entry
        }
        if took:
            self.poison(now - self.named)
        self.named = now
        self.stamps = {name: stamps for name, stamps in self.stamps.items() if name in tables}

    def poison(self, blocks: set[tuple[int, int]]) -> None:
        """Blocks were handed out."""
        if blocks:
            self.memory.update({place: POISON for place in self.memory if place[:2] in blocks})

    def issued(self, plan: Any, names: list[int], new: list[list[int]]) -> None:
        """A step was issued, with these new tokens in its rows."""
        self._verify_sources(plan)
        self.poison({(0, block) for _, _, blocks in self._moved(plan, "state_saves") for block in blocks})
        rows = []
        for name, tokens in zip(names, new, strict=True):
            old = len(self.stamps[name])
            self._append(name, tokens)
            rows.append((name, old, old + len(tokens), list(self.stamps[name])))
        self.queue.append(Work(plan, rows))

    def _moved(self, plan: Any, name: str) -> list[tuple[int, int, list[int]]]:
        """The states that a plan loads or saves: (group, slot, blocks of the bundle)."""
        states = (g for g, group in enumerate(self.groups) if group.kind == "state")
        return [(g, slot, blocks) for g in states for slot, *blocks in getattr(plan.groups[g], name).tolist()]

    def done(self, plan: Any, table: Callable[[int, int], Any]) -> None:
        """`done` was called: all that passes by it is executed; `table` reads one of the pool, if it is open."""
        next(work for work in self.queue if work.plan is plan and work.garbage is None).noted = True
        passed = self._execute()
        for name, _, length, _ in passed:
            if name in self.stamps:
                self.passed[name] = max(self.passed[name], length)
        for name, _, length, _ in passed:
            if name in self.stamps:
                self._verify_holes(name, length, table)

    def _execute(self) -> list[tuple[int, int, int, list[int]]]:
        """All that waits for nothing more happens; returns the rows of the steps that did."""
        passed = []
        while self.queue and self.queue[0].noted:
            work = self.queue.pop(0)
            if work.moves is not None:
                self.memory.update({to: self.memory.get(place) for to, place in work.moves.items()})
            elif work.garbage is None:
                self._run(work)
                passed += work.rows
            else:
                self.memory.update(dict.fromkeys(work.garbage, GARBAGE))
        return passed

    def rolled_back(self, plan: Any) -> list[int]:
        """The newest step failed half way; returns its rows."""
        work = next(work for work in reversed(self.queue) if work.plan is plan and work.garbage is None)
        work.garbage, work.noted = [], True
        for arena, group, size, arrays in zip(self.arenas, self.groups, self.sizes, plan.groups, strict=True):
            if group.kind == "state":
                moved = zip(arrays.state_src.tolist(), arrays.state_dst.tolist(), strict=True)
                work.garbage += [(arena, dst, 0) for src, dst in moved if src != dst]
                work.garbage += [(arena, slot, 0) for slot in arrays.state_loads[:, 0].tolist()]
                work.garbage += [(0, block, 0) for block in arrays.state_saves[:, 1:].ravel().tolist()]
            else:
                work.garbage += [(arena, dst, k) for _, dst, n in arrays.copies.tolist() for k in range(n)]
                work.garbage += [(arena, *divmod(s, size)) for row in arrays.slot_mapping.tolist() for s in row]
        for name, old, _, _ in work.rows:
            if name in self.stamps:
                del self.stamps[name][old:]
        work.plan = None
        self._execute()
        return [name for name, _, _, _ in work.rows]

    def reset(self) -> None:
        """Everything is forgotten."""
        self.queue, self.stamps, self.named = [], {}, set()

    def _verify_sources(self, plan: Any) -> None:
        """A step writes nothing that a copy of an earlier plan has still to read."""
        for g, (arena, size) in enumerate(zip(self.arenas, self.sizes, strict=True)):
            if self.groups[g].kind == "state":
                continue
            written = {(arena, *divmod(s, size)) for row in plan.groups[g].slot_mapping.tolist() for s in row}
            for work in self.queue:
                copies = work.plan.groups[g].copies.tolist() if work.plan is not None else []
                read = {(arena, src, k) for src, _, tokens in copies for k in range(tokens)}
                assert not read & written, f"content: group {g}: the source of a copy is written, {read & written}"

    # ---- a step -------------------------------------------------------------------------------------------

    def _run(self, work: Work) -> None:
        if hasattr(work.plan, "seq_lens"):
            got = work.plan.seq_lens.tolist()[: len(work.rows)]
            assert got == [length for _, _, length, _ in work.rows], f"content: seq_lens {got}"
        for g, slot, blocks in self._moved(work.plan, "state_loads"):
            parts = [self.memory.get((0, block, 0)) for block in blocks]
            state = getattr(parts[0], "state", GARBAGE)
            is_whole = parts == [Saved(k, state) for k in range(len(blocks))]
            self.memory[self.arenas[g], slot, 0] = state if is_whole else GARBAGE
        for g, group in enumerate(self.groups):
            if group.kind == "state":
                self._run_state(g, work)
            else:
                self._run_blocks(g, work)
                self._verify_reads(g, work)
        for g, slot, blocks in self._moved(work.plan, "state_saves"):
            state = self.memory.get((self.arenas[g], slot, 0))
            self.memory.update({(0, block, 0): Saved(k, state) for k, block in enumerate(blocks)})

    def _run_state(self, g: int, work: Work) -> None:
        arrays, arena, written = work.plan.groups[g], self.arenas[g], {}
        read = arrays.state_src.tolist()
        for r, (name, old, new, stamps) in enumerate(work.rows):
            if new == old:
                continue
            src, dst = int(arrays.state_src[r]), int(arrays.state_dst[r])
            got = None if src < 0 else self.memory.get((arena, src, 0))
            want = (g, old, stamps[old - 1]) if old else None
            assert got == want, f"content: group {g}: row {name} reads the state {got} in slot {src}, due {want}"
            self.reads += 1
            assert dst >= 0 and dst not in written, f"content: group {g}: row {name} writes its state to {dst}"
            others = read[:r] + read[r + 1 :]
            assert dst not in others, f"content: group {g}: row {name} writes state {dst}, which another row reads"
            written[dst] = (g, new, stamps[new - 1])
        self.memory.update({(arena, dst, 0): state for dst, state in written.items()})

    def _run_blocks(self, g: int, work: Work) -> None:
        arrays, arena, size = work.plan.groups[g], self.arenas[g], self.sizes[g]
        for src, dst, tokens in arrays.copies.tolist():
            for k in range(tokens):
                self.memory[arena, dst, k] = self.memory.get((arena, src, k))
        at = 0
        for _, old, new, stamps in work.rows:
            for stamp in stamps[old:new]:
                for column, slot in enumerate(arrays.slot_mapping[:, at].tolist()):
                    assert slot >= self.reserved * size, f"content: group {g}: a token is written to slot {slot}"
                    self.memory[arena, slot // size, slot % size] = (stamp, g, column)
                at += 1

    def _verify_reads(self, g: int, work: Work) -> None:
        group, arrays, arena, size = self.groups[g], work.plan.groups[g], self.arenas[g], self.sizes[g]
        for r, (name, old, new, stamps) in enumerate(work.rows):
            row = arrays.block_tables[r].tolist()
            held = self.held(name, g, stamps)
            lost = len(stamps) - len(held)
            assert arrays.kv_lens[r] == len(held), f"content: group {g}: kv_lens of row {name}, due {len(held)}"
            for p in sorted(set().union(*(read_at(group, q) for q in range(old - lost, new - lost)))):
                for column, block in enumerate(row[p // size]):
                    got, want = self.memory.get((arena, block, p % size)), (held[p], g, column)
                    assert got == want, (
                        f"content: group {g}: row {name} of {old} + {new - old} tokens reads {got} at {p} "
                        f"in block {block}, due {want}"
                    )
                    self.reads += 1
            start, least = int(arrays.kv_starts[r]), max(self.reserved, 0)
            holes = [i for i, entry in enumerate(row[: -(-(new - lost) // size)]) if min(entry) < least]
            due = (max(holes, default=-1) + 1) * size
            assert start == due, f"content: group {g}: kv_starts of row {name} is {start}, due {due}"

    def _verify_holes(self, name: int, length: int, table: Callable[[int, int], Any]) -> None:
        """A row whose step has passed has let go of what nobody reads, and of nothing else."""
        for g, (group, size) in enumerate(zip(self.groups, self.sizes, strict=True)):
            if group.kind == "state":
                continue
            entries = table(name, g).tolist()
            end = max(len(entries) * size, length)
            needed = read_from(group, max(self.passed[name] - self.lookahead, self.point[name]), end)
            later = read_from(group, length - self.lookahead, end)
            for i, entry in enumerate(entries):
                tokens = set(range(i * size, (i + 1) * size))
                holes = [block < self.reserved or block < 0 for block in entry]
                assert all(holes) or not any(holes), f"content: group {g}: half an entry is left, {entry}"
                assert not (holes[0] and tokens & needed), f"content: group {g}: {name} let go of entry {i} early"
                assert holes[0] or tokens & later, f"content: group {g}: {name} has not let go of entry {i}"
