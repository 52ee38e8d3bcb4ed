"""The prefix cache of `kvpool.testing.model`: ``docs/prefix.md``.

A node is one base block of tokens below another node. It has an entry of each full group whose block ends there, and
a checkpoint, or lacks them. Nothing is kept in order: what leaves first is found by stamps, who names a block is
recounted.
"""

from __future__ import annotations

import hashlib
import itertools
import zlib
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvpool.retention import Keep
from kvpool.stats import PrefixStats
from kvpool.testing import model_args as args
from kvpool.testing.model_state import (
    HOLE,
    Arena,
    Layers,
    PoolModel,
    Row,
    Sequence,
    Step,
    ceil_div,
    public_call,
    reading_call,
)

MOST_TAKEN = 2  #: checkpoints that a row has taken and not published
NODES_PER_CHECKPOINT = 4  #: there is room for one checkpoint per so many nodes
LOADED = 0  #: in place of a step
MOST_TIME = 2**62 - 1


@dataclass(eq=False)
class Entry:
    """An entry of a group that is committed, or in a checkpoint."""

    layer: Layers = field(repr=False)
    blocks: list[int]
    node: Any = field(repr=False)  #: what it holds; None: flushed
    waits: bool  #: committed, and not published

    def is_idle(self) -> bool:
        """Nobody names its blocks, and no pending step may use them."""
        return all(map(self.layer.arena.is_idle, self.blocks))


@dataclass(eq=False)
class Checkpoint:
    """What a hit at its position needs beside the entries of full groups."""

    position: int
    bundles: dict[int, list[int]]  #: blocks of arena 0 of each state group
    stamp: int
    step: int | None  #: the pending step that saves the states, LOADED: none does
    owner: Any  #: the row that took it, until `commit` publishes it
    tails: list[Entry] = field(default_factory=list)  #: entries of windows and chunks, of a published one
    node: Any = field(default=None, repr=False)
    was_hit: bool = False
    turn: int = 0  #: when it was set aside, 0: it was not

    def blocks(self) -> list[int]:
        return [block for bundle in self.bundles.values() for block in bundle]


@dataclass(eq=False)
class Node:
    """One base block of tokens, below another one."""

    root: int
    prefix: tuple[int, ...] = field(repr=False)  #: all tokens from the first one on
    parent: Any = field(repr=False)
    kv: dict[int, Entry] = field(default_factory=dict)  #: group -> the canonical entry that ends here
    checkpoint: Checkpoint | None = None
    stamp: int = 0
    priority: int = 0  #: the highest of directives for it, or for nodes below, since it was last not kept
    ends: tuple[int, int] = (0, 0)  #: when the directive ends that ends at this node, and its number; 0: there is none
    turn: int = 0  #: when its unit was set aside, 0: it was not

    def is_idle(self) -> bool:
        return any(entry.is_idle() for entry in self.kv.values())

    def path(self) -> list[Node]:
        """The node and those above it, the deepest first."""
        found = [self]
        while found[-1].parent is not None:
            found.append(found[-1].parent)
        return found


@dataclass(eq=False)
class Load:
    """A checkpoint whose states were not copied to slots yet."""

    mark: Checkpoint
    slots: list[int]  #: of each state group; the first tells whose they are
    step: int | None = None  #: the pending step that does it


class ModelPrefix:
    """The calls on a prefix cache, see `kvpool._core.PrefixCache`."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    @reading_call
    def match(self, tokens: Any, namespace: bytes = b"") -> int:
        prompt = args.tokens("match", tokens)
        return int(self.pool._found(prompt, args.typed("match", "namespace", namespace, bytes))[1])

    @public_call
    def pin(self, tokens: Any, namespace: bytes = b"", *, ttl: int | None = None) -> int:
        pool = self.pool
        until = 0 if ttl is None else pool._now + args.integer("pin", "ttl", ttl, 1, MOST_TIME)
        prompt = args.tokens("pin", tokens)
        found = pool._judge_opening("pin", prompt, args.typed("pin", "namespace", namespace, bytes), False, False, True)
        seq: Sequence = pool._begin_at("pin", found)
        pool._directives += 1
        seq.ends = until, pool._directives
        return seq.handle

    @public_call
    def unpin(self, handle: int) -> None:
        self.pool._close(self.pool.one("unpin", handle, True))

    @public_call
    def commit(self, handles: Any, tokens: Any, counts: Any = None, *, keep: Any = None) -> None:
        pool = self.pool
        args.typed("commit", "keep", keep, Keep | None)
        names = args.handles("commit", handles)
        given = args.tokens("commit", tokens)
        counts = len(given) // max(1, len(names)) if counts is None else counts
        lengths = args.per_row("commit", "counts", counts, len(names))
        if sum(lengths) != len(given):
            raise ValueError(f"[commit] counts sum up to {sum(lengths)}, there are {len(given)} tokens")
        told = {key: entry.node.prefix for key, entry in pool.entries.items() if entry.node is not None}
        batch = []
        for seq, n in zip([pool._sequence("commit", name) for name in names], lengths, strict=True):
            batch.append((seq, given[:n]))
            given = given[n:]
            pool._refuse_commit(*batch[-1], told)
        for seq, row in batch:
            known = len(seq.tokens)
            pool._commit(seq, row)
            own = seq.keep if seq.keep and known < (seq.keep.tokens or known + 1) else None
            pool._keep(seq, keep or own)

    @public_call
    def tick(self, now: int) -> None:
        pool = self.pool
        args.integer("tick", "now", now, pool._now, MOST_TIME)
        pool._now = now
        for node in sorted(pool._nodes.values(), key=lambda node: node.ends):
            if 0 < node.ends[0] <= now:
                node.ends = 0, 0
                for above in node.path():
                    if not any(one.ends[0] and above in one.path() for one in pool._nodes.values()):
                        pool._set_priority(above, 0)
        for seq in sorted(pool.sequences(), key=lambda seq: seq.ends):
            if 0 < seq.ends[0] <= now:
                pool._close(seq)

    @public_call
    def limit_kept(self, namespace: bytes, blocks: int | None) -> None:
        args.typed("limit_kept", "namespace", namespace, bytes)
        limit = None if blocks is None else args.integer("limit_kept", "blocks", blocks, 0, 2**30)
        self.pool._limits.pop(namespace, None)
        if limit is not None:
            self.pool._limits[namespace] = limit

    @reading_call
    def committed(self, handle: int) -> int:
        return len(self.pool.one("committed", handle, True).tokens)

    @reading_call
    def wanted(self, handles: Any) -> np.ndarray:
        batch = self.pool.batch("wanted", handles)
        return np.array([min([p for p in s.wanted if p > s.num_tokens], default=-1) for s in batch], np.int64)

    @reading_call
    def bundle(self, handle: int, group: int) -> np.ndarray:
        pool, seq = self.pool, self.pool.one("bundle", handle, True)
        if group not in [layer.index for layer in pool.states]:
            raise ValueError(f"[bundle] group {group} is no group of states")
        marks = pool._marks_of(seq)
        if seq.load is None:
            slots = seq.tables[pool.states[0].index].entries
            marks = [load.mark for load in pool._loads if [load.slots[0]] in slots]
        return np.array(marks[0].bundles[group] if marks else [], np.int32)

    @public_call
    def flush(self, namespace: bytes | None = None) -> int:
        args.typed("flush", "namespace", namespace, bytes | None)
        return int(self.pool._flush(namespace))

    @public_call
    def events(self) -> list[tuple]:
        pool = self.pool
        lost = [("lost", pool._lost_events)] if pool._lost_events and pool.options.events else []
        events = lost + list(pool._events)
        pool._events.clear()
        pool._lost_events = 0
        return events

    @reading_call
    def stats(self) -> PrefixStats:
        pool, counted = self.pool, self.pool.counters
        now = {"nodes": len(pool._nodes), "namespaces": len(pool._roots.keys() | pool._limits)}
        now["kept"] = sum(node.priority > 0 for node in pool._nodes.values())
        now["checkpoints"] = sum(mark.node is not None for mark in pool._taken)
        now["hit_rate"] = counted["hit_tokens"] / max(1, counted["query_tokens"])
        return PrefixStats(**{name: now.get(name, counted[name]) for name in PrefixStats._fields})


class CacheModel(PoolModel):
    """`PoolModel` with a prefix cache, which has nothing in it without ``prefix_cache=True``."""

    def __init__(self, *sizes: Any, **options: Any) -> None:
        self.counters: Counter[str] = Counter()  # of `PrefixStats`; a reset does not change them
        self._next_root = 1
        self._now = 0  # the caller's clock
        self._limits: dict[bytes, int] = {}  # namespace -> how many nodes it may keep
        super().__init__(*sizes, **options)
        room = self.arenas[0].num_blocks - self.arenas[0].reserved
        if self.has_cache and self._bundle_size > room:
            self.shutdown()
            raise ValueError(f"[Pool] a checkpoint has {self._bundle_size} blocks, arena 0 has {room}")
        self._most_nodes = self._nodes_for_all()  # it never becomes less
        self._events: deque[tuple] = deque(maxlen=self.options.events)
        self._lost_events = 0

    def _empty(self) -> None:
        super()._empty()
        self._clock = self._coldest = self._directives = 0
        self._turns = itertools.count(1)
        self._last_root: dict[bytes, int] = {}  # namespace -> the last root it was given
        self._nodes: dict[tuple[int, tuple[int, ...]], Node] = {}  # (root, prefix) -> node
        self.entries: dict[tuple[int, int], Entry] = {}  # (arena, block) -> committed entry
        self._taken: list[Checkpoint] = []  # all checkpoints
        self._loads: list[Load] = []
        self.left: list[tuple[Arena, int]] = []  # blocks that nobody names since the last call
        self._unsettled: list[Any] = []  # their entries, those that `drain` has not settled yet
        self._told: dict[tuple[int, int, tuple[int, ...]], bytes] = {}  # what events have told of, and its key
        self._grain = max((layer.block_size for layer in self.kv), default=self.block_size)
        self._full = [layer for layer in self.layers if layer.kind == "full"]
        self._tailed = [layer for layer in self.kv if layer.kind != "full"]
        self._bundle_size = sum(layer.group.blocks for layer in self.states)
        self._can_restore = all(layer.group.blocks for layer in self.states)
        self._is_cut = len(self._full) < len(self.layers)  # a hit needs a checkpoint

    def changed(self, call: str) -> None:
        """A call has changed the pool."""
        self._digest = zlib.crc32(call.encode(), self._digest)
        self._sweep()
        self._tell()

    # ---- namespaces and nodes -----------------------------------------------------------------------------

    @property
    def _roots(self) -> dict[bytes, int]:
        """The root of each namespace that has a node or an open sequence; the others are forgotten."""
        used = {node.root for node in self._nodes.values()} | {seq.root for seq in self.sequences()}
        return {name: root for name, root in self._last_root.items() if root in used}

    def _root(self, namespace: bytes) -> int:
        """The root of a namespace; one that was forgotten gets a new one."""
        if namespace not in self._roots:
            self._last_root[namespace] = self._next_root
            self._next_root += 1
        return self._last_root[namespace]

    def _nodes_for_all(self) -> int:
        """Base blocks of all that full groups hold, and of one entry of each row."""
        held = [0] * len(self.arenas)
        for layer in self._full:
            most = layer.arena.num_blocks // layer.columns * (layer.block_size // self.block_size)
            held[layer.arena.number] = max(held[layer.arena.number], most)
        return (sum(held) or 2**20) + self.options.max_seqs * (self._grain // self.block_size)

    def _sweep(self) -> None:
        needed: set[Node] = set()
        ends = [node for node in self._nodes.values() if node.kv or node.checkpoint]
        for node in [*ends, *(entry.node for entry in self.entries.values()), *(s.node for s in self.sequences())]:
            while node is not None and node not in needed:
                needed.add(node)
                node = node.parent
        for node in [node for node in self._nodes.values() if node not in needed]:
            for heir in [above for above in node.path() if above in needed][:1]:
                heir.ends = max(heir.ends, node.ends)
        self._nodes = {key: node for key, node in self._nodes.items() if node in needed}

    # ---- hits ---------------------------------------------------------------------------------------------

    def _found(self, prompt: list[int], namespace: bytes, all_of_it: bool = False) -> tuple[list[Node], int]:
        """The nodes of a prompt whose full groups are all there, and how many of its tokens are a hit."""
        path: list[Node] = []
        most, root = (len(prompt) - (not all_of_it)) // self.block_size, self._roots.get(namespace)
        while root is not None and len(path) < min(most, self.options.max_blocks_per_seq):
            length = (len(path) + 1) * self.block_size
            node = self._nodes.get((root, tuple(prompt[:length])))
            if node is None or any(length % g.block_size == 0 and g.index not in node.kv for g in self._full):
                break
            path.append(node)
        ends = [node for node in path if node.checkpoint is not None or not self._is_cut]
        return path, max([n for n in (len(node.prefix) for node in ends) if n % self._grain == 0], default=0)

    def _spacing(self) -> int:
        """Distance of the first checkpoint inside a long prompt: 3 times its bytes in keys and values."""
        kv = sum(layer.columns * self.block_size / layer.block_size for layer in self._full)
        held = [(layer, n) for layer in self._tailed for n in (layer.group.size - 1, layer.group.keep)]
        tails = sum(ceil_div(tokens, layer.block_size) * layer.columns for layer, tokens in held)
        least, spacing = 3 * (self._bundle_size + tails) * self.block_size, 1
        while kv and spacing * kv < least:
            spacing *= 2
        return spacing if kv and least else 0

    def _positions(self, hit: int, path: list[Node], cut: int) -> list[int]:
        """Where a prompt takes checkpoints: the cut, the junction, doubling distances; none behind the cut."""
        places, distance = {cut, min(len(path) * self.block_size, cut)}, self._spacing()
        while distance and distance <= cut:
            places.add(distance)
            distance *= 2
        aligned = {place // self._grain * self._grain for place in places}
        return sorted(place for place in aligned if place > hit) if self._is_cut and self._can_restore else []

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _age(self, one: Node | Checkpoint) -> int:
        """Twice the age of a unit or checkpoint; three times for a checkpoint that was never a hit."""
        return (3 if isinstance(one, Checkpoint) and not one.was_hit else 2) * (self._clock - one.stamp)

    def _oldest(self, marks: list[Checkpoint], units: Iterable[Node] = ()) -> Any:
        """What leaves first. `max` takes the first of equal ages: never a hit, other checkpoints, units.

        What is kept is set aside when it is its turn.
        """
        victims: list[Node | Checkpoint] = [*sorted(marks, key=lambda mark: mark.was_hit), *units]
        line = [one for one in victims if not one.turn]
        due = [one for one in victims if one.turn and not self._priority(one)]
        while line and not due:
            victim = max(line, key=self._age)
            if not self._priority(victim):
                return victim
            victim.turn = next(self._turns)
            line.remove(victim)
        return min(due or victims, key=lambda one: (self._priority(one), one.turn))

    def _use(self, one: Node | Checkpoint) -> None:
        one.stamp, one.turn = self._tick(), 0

    # ---- retention ----------------------------------------------------------------------------------------

    def _priority(self, one: Node | Checkpoint) -> int:
        node = one.node if isinstance(one, Checkpoint) else one
        return node.priority if node is not None else 0

    def _set_priority(self, node: Node, priority: int) -> None:
        node.priority = priority
        for one in (node, node.checkpoint):
            if one is not None and one.turn:
                one.turn = next(self._turns)

    def _keep(self, seq: Sequence, keep: Any) -> None:
        """A directive for what a row has committed, as far as its namespace may keep it."""
        if keep is None or seq.node is None:
            return
        self._sweep()
        limits = [self._limits[name] for name, root in self._roots.items() if root == seq.root and name in self._limits]
        kept = sum(node.priority > 0 for node in self._nodes.values() if node.root == seq.root)
        path = [node for node in seq.node.path()[::-1] if keep.tokens is None or len(node.prefix) <= keep.tokens]
        fresh = [node for node in path if not node.priority]
        if limits:
            path = path[: len(path) - len(fresh) + max(0, min(limits[0] - kept, len(fresh)))]
        self._directives += 1
        if path:
            path[-1].ends = max(path[-1].ends, (self._now + keep.ttl, self._directives))
        for node in path[::-1]:
            if node.priority < keep.priority:
                self._set_priority(node, keep.priority)

    def _is_free(self, mark: Checkpoint) -> bool:
        return mark.step is None and not self._is_loaded(mark)

    def _is_loaded(self, mark: Checkpoint) -> bool:
        """Whether a row has to load a checkpoint, or a pending step does."""
        return any(load.mark is mark for load in self._loads)

    def _covering(self, entry: Entry) -> list[Checkpoint]:
        return [mark for mark in self._taken if entry in mark.tails]

    def _below(self, node: Node) -> int:
        """Published checkpoints at a node or below it."""
        return sum(mark.node is not None and node in mark.node.path() for mark in self._taken)

    def evictable_in(self, arena: Arena, without: tuple[Any, ...] = ()) -> set[int]:
        """Blocks of an arena that leave if all leaves that may; `without` some nodes and checkpoints."""
        marks = [mark for mark in self._taken if mark not in without and self._is_free(mark)]
        leaving = [entry for node in self._nodes.values() if node not in without for entry in node.kv.values()]
        leaving += [entry for mark in marks for entry in mark.tails if set(self._covering(entry)) <= set(marks)]
        found = {b for entry in leaving if entry.layer.arena is arena and entry.is_idle() for b in entry.blocks}
        return found if arena.number else found.union(*(mark.blocks() for mark in marks))

    def evict_for(self, arena: Arena | None) -> bool:
        """Evict what leaves first, for a block of this arena, None: for a node. Returns whether anything may leave."""
        has_units = arena is None or any(layer.arena is arena for layer in self._full)
        has_marks = arena is None or any(layer.arena is arena for layer in self._tailed)
        has_marks = has_marks or (arena is self.arenas[0] and self._bundle_size > 0)
        units = [node for node in self._nodes.values() if has_units and node.is_idle()]
        marks = [mark for mark in self._taken if has_marks and self._is_free(mark)]
        cold = [node for node in units if self._is_cut and not self._below(node)]
        if not units and not marks:
            return False
        victim = min(cold, key=lambda node: node.stamp) if cold else self._oldest(marks, units)
        if isinstance(victim, Node):
            self._evict_unit(victim)
        else:
            self._evict_mark(victim)
        return True

    def _evict_unit(self, node: Node) -> None:
        if node.checkpoint is not None and self._is_free(node.checkpoint):
            self._evict_mark(node.checkpoint)
        for group, entry in [(group, entry) for group, entry in node.kv.items() if entry.is_idle()]:
            del node.kv[group]
            self.counters["evicted"] += 1
            entry.layer.arena.counters["evictions"] += len(entry.blocks)
            self._blank_entry(entry)

    def _evict_mark(self, mark: Checkpoint) -> None:
        self._drop(mark)
        self.counters["checkpoints_evicted"] += 1

    def _blank_entry(self, entry: Entry) -> None:
        for block in reversed(entry.blocks):
            del self.entries[entry.layer.arena.number, block]
            entry.layer.arena.blank.append(block)

    def _make_room(self, entries: list[tuple[Layers, int]], bundle: int = 0) -> None:
        """Evict for all entries that a call takes: what leaves for one arena may have blocks of others."""
        for arena in self.arenas if self.has_cache else ():
            need = sum(n * layer.columns for layer, n in entries if layer.arena is arena)
            while need + (0 if arena.number else bundle) > len(arena.blank):
                arena.evict_oldest()

    def drain(self) -> None:
        """Settle the blocks that the last call released, one arena after the other, and forget nodes."""
        left = [(arena, block, self.entries.get((arena.number, block))) for arena, block in self.left]
        left.sort(key=lambda one: one[0].number)
        self.left = []
        self._unsettled = [entry for _, block, entry in left if entry is not None and block == entry.blocks[0]]
        for arena, block, entry in left:
            if entry is None:
                arena.blank.append(block)
            elif block == entry.blocks[0]:  # they leave together
                self._unsettled.remove(entry)
                self._settle(entry)
        if left:
            self._sweep()
            self._tell()

    def _settle(self, entry: Entry) -> None:
        """Nobody names an entry any more."""
        if self._covering(entry):
            self._hand_over(entry)
        elif entry.node is None or entry.waits or entry.layer.kind != "full":
            self._blank_entry(entry)
        else:
            if entry.node.kv.setdefault(entry.layer.index, entry) is not entry:
                self._blank_entry(entry)
            if any(one.is_idle() and one not in self._unsettled for one in entry.node.kv.values()):
                self._use(entry.node)

    def _hand_over(self, entry: Entry) -> None:
        """Nobody names an entry of checkpoints: the first row that has still to load one has its own in its place."""
        slots = [load.slots[:1] for load in self._loads]
        for seq in self.sequences() if slots else ():
            waits = any(slot in slots for slot in seq.tables[self.states[0].index].entries)
            for layer, blocks in self._ending(seq, len(entry.node.prefix)) if waits else ():
                own = self.entries.get((layer.arena.number, blocks[0]))
                if layer is entry.layer and own is not None and own is not entry and own.node is entry.node:
                    self._replace_tails([own])  # which blanks the other one
                    return

    # ---- commit -------------------------------------------------------------------------------------------

    def _ending(self, seq: Sequence, length: int) -> list[tuple[Layers, list[int]]]:
        """The entries of a row whose blocks end with its first `length` tokens."""
        found = []
        for layer in self.kv:
            place, entries = length // layer.block_size - 1, seq.tables[layer.index].entries
            if length % layer.block_size == 0 and place < len(entries) and entries[place] != HOLE:
                found.append((layer, entries[place]))
        return found

    def _refuse_commit(self, seq: Sequence, row: list[int], told: dict[Any, tuple[int, ...]]) -> None:
        """`told`: what was said of each block, as if the rows before had been committed."""
        known, size = seq.tokens + row, self.block_size
        if row and seq.point:
            raise ValueError(f"[commit] tokens were evicted from {seq.handle}, it commits no more")
        if row and len(known) > self.done_length(seq):
            raise ValueError(f"[commit] {len(known)} tokens, {self.done_length(seq)} are done ({seq.handle})")
        for length in range((len(seq.tokens) // size + 1) * size, len(known) + 1, size):
            prefix = tuple(known[:length])
            for layer, entry in self._ending(seq, length):
                if told.setdefault((layer.arena.number, entry[0]), prefix) != prefix:
                    raise ValueError(f"[commit] block {entry[0]} was committed with other tokens ({seq.handle})")

    def _commit(self, seq: Sequence, row: list[int]) -> None:
        first = len(seq.tokens) // self.block_size
        seq.tokens += row
        self._publish(seq, first)
        for depth in range(first + 1, len(seq.tokens) // self.block_size + 1) if seq.root is not None else ():
            self._tell_at(seq, depth * self.block_size)
            self._publish(seq, depth)

    def _tell_at(self, seq: Sequence, length: int) -> None:
        """A base block of a row is known: it is a node, and the entries that end there stand for it."""
        self._sweep()
        key: Any = seq.root, tuple(seq.tokens[:length])
        if key not in self._nodes:
            while len(self._nodes) >= self._most_nodes and self.evict_for(None):
                self._sweep()
            self._nodes[key] = Node(key[0], key[1], seq.node)
            self.counters["inserted"] += 1
        seq.node = self._nodes[key]
        for layer, blocks in self._ending(seq, length):
            if (layer.arena.number, blocks[0]) not in self.entries:
                entry = Entry(layer, list(blocks), seq.node, layer.kind == "full")
                self.entries.update({(layer.arena.number, block): entry for block in blocks})

    def _publish(self, seq: Sequence, most: int | None = None) -> None:
        """Hits may find the base blocks of a row, the first `most` or all, as far as their content is there."""
        full = len(seq.tokens) // self.block_size if most is None else most
        while seq.root is not None and seq.published < full:
            length = (seq.published + 1) * self.block_size
            ending = [(layer, blocks[0]) for layer, blocks in self._ending(seq, length) if layer.kind == "full"]
            entries = [self.entries.get((layer.arena.number, block)) for layer, block in ending]
            if None in entries or any(self.is_unwritten(layer, block) for layer, block in ending):
                return
            for entry in entries:
                if entry is not None and entry.waits:
                    entry.waits = False
                    self.counters["duplicates"] += entry.layer.index in entry.node.kv
                    entry.node.kv.setdefault(entry.layer.index, entry)
            if length in seq.wanted:
                self._publish_mark(seq, length, self._nodes[seq.root, tuple(seq.tokens[:length])])
            seq.published += 1

    def _publish_waiting(self) -> None:
        """A step has ended: what waited for it is published, rows in the order of their slots."""
        for seq in self.sequences():
            self._publish(seq)

    # ---- checkpoints --------------------------------------------------------------------------------------

    def _rename(self, arena: Arena, name: dict[int, int]) -> None:
        """Blocks of an arena have other names: what the cache knows of them."""
        for entry in {entry for (number, _), entry in self.entries.items() if number == arena.number}:
            entry.blocks = [name.get(block, block) for block in entry.blocks]
        self.entries = {(e.layer.arena.number, block): e for e in self.entries.values() for block in e.blocks}
        for mark in self._taken if not arena.number else ():
            for bundle in mark.bundles.values():
                bundle[:] = [name.get(block, block) for block in bundle]
        for load in self._loads:
            for k in [k for k, layer in enumerate(self.states) if layer.arena is arena]:
                load.slots[k] = name.get(load.slots[k], load.slots[k])

    def _marks_of(self, seq: Sequence) -> list[Checkpoint]:
        return [mark for mark in self._taken if mark.owner == seq.handle]

    def _is_crowded(self) -> bool:
        return len(self._taken) == self._most_nodes // NODES_PER_CHECKPOINT + 1

    def _has_room(self) -> bool:
        """Whether there is room for one more checkpoint, if what may leave makes room."""
        free = [mark for mark in self._taken if self._is_free(mark)]
        if self._is_crowded() and free:
            self._evict_mark(self._oldest(free))
        return not self._is_crowded()

    def _take_mark(self, step: int, seq: Sequence, position: int) -> None:
        bundles = {layer.index: [self.arenas[0].take() for _ in range(layer.group.blocks)] for layer in self.states}
        self._taken.append(Checkpoint(position, bundles, self._clock, step, seq.handle))

    def _publish_mark(self, seq: Sequence, position: int, node: Node) -> None:
        """The checkpoint of a row can be found, unless its node has one, or a window has passed on."""
        mark = next((one for one in self._marks_of(seq) if one.position == position), None)
        if mark is None and self.states:
            return
        tails = self._tails(seq, position)
        if node.checkpoint is not None:
            self._use(node.checkpoint)
        elif tails is None or (mark is None and not self._has_room()):
            self.counters["checkpoints_skipped"] += 1
        else:
            if mark is None:
                mark = Checkpoint(position, {}, 0, None, None)
                self._taken.append(mark)
            self.counters["checkpoints_published"] += 1
            self._use(mark)
            known = [entry for other in self._taken if other.node is not None for entry in other.tails]
            if self._is_loaded(mark):
                self._replace_tails(tails)
                known = []
            mark.tails = [next((one for one in known if one.layer is e.layer and one.node is e.node), e) for e in tails]
            mark.owner, mark.node, node.checkpoint = None, node, mark
            for above in node.path():
                if above.is_idle() and self._below(above) == 1:
                    self._use(above)
            return
        if mark is not None:
            self._give_up(mark)

    def _tails(self, seq: Sequence, position: int) -> list[Entry] | None:
        """What a row has of windows and chunks that a hit at a position needs; None: not all of it."""
        tables = [(g, enumerate(seq.tables[g.index].entries[: position // g.block_size])) for g in self._tailed]
        needed = [(layer, entry) for layer, entries in tables for i, entry in entries if layer.needs(i, position)]
        if any(entry == HOLE for _, entry in needed):
            return None
        return [self.entries[layer.arena.number, entry[0]] for layer, entry in needed]

    def _replace_tails(self, own: list[Entry]) -> None:
        """A row that has still to load its checkpoint: its entries take the place of equal ones in others."""
        for mark in self._taken:
            for place, entry in enumerate(mark.tails):
                other = next((e for e in own if e.layer is entry.layer and e.node is entry.node), entry)
                mark.tails[place] = other
                if other is not entry and not self._covering(entry) and entry.is_idle():
                    self._blank_entry(entry)

    def _give_up(self, mark: Checkpoint) -> None:
        """A row has no use for a checkpoint that it has not published. Who has still to load it keeps it."""
        mark.owner = None
        if not self._is_loaded(mark):
            self._drop(mark)

    def _drop(self, mark: Checkpoint) -> None:
        """A checkpoint is gone. Its blocks are blank, or leave with the step that saves it."""
        self._taken.remove(mark)
        for block in mark.blocks():
            if mark.step is None:
                self.arenas[0].blank.append(block)
            else:
                self.arenas[0].release(block)
        for entry in mark.tails:
            if not self._covering(entry) and entry.is_idle():
                self._blank_entry(entry)
        if mark.node is not None:
            mark.node.checkpoint, path, mark.node = None, mark.node.path(), None
            for one in reversed([node for node in path if node.is_idle() and not self._below(node)]):
                self._coldest -= 1
                one.stamp, one.turn = self._coldest, 0

    def _begin_load(self, seq: Sequence, mark: Checkpoint) -> None:
        """The first step that reads the states of a row copies them from a checkpoint."""
        if self.states:
            self._loads.append(Load(mark, [seq.tables[g.index].entries[0][0] for g in self.states]))

    def _end_load(self, load: Load) -> None:
        mark = load.mark
        self._loads.remove(load)
        if mark in self._taken and mark.node is None and mark.owner is None and self._is_free(mark):
            self._drop(mark)

    def _end_idle_loads(self) -> None:
        """Nobody will read what these would load."""
        for load in list(self._loads):
            if load.step is None and not self.states[0].arena.refcount(load.slots[0]):
                self._end_load(load)

    def state_move(self, row: Row, layer: Layers) -> tuple[int, int]:
        """The slot that a row of a new step reads, and the one that it writes; -1: none."""
        seq, change = self._find(row.handle), row.changes[layer.index]
        if seq is None or row.length == row.old_length:
            return -1, -1
        ((slot,),) = seq.tables[layer.index].entries
        if change.replaced:
            return change.replaced[0][1][0], slot
        return -1 if change.num_appended else slot, slot

    def _move_states(self, step: Step) -> None:
        """Checkpoints that rows have still to load, and those that are wanted where they end."""
        loads: list[Load] = []  # in the order of the rows
        for row in step.rows:
            seq = self._sequence("step", row.handle)
            if row.length == row.old_length:
                continue
            for load in self._loads:
                if load.step is None and self.state_move(row, self.states[0])[0] == load.slots[0]:
                    load.step = step.id
                    loads.append(load)
                    if load.mark.node is not None:  # what others have may leave while the step is pending
                        self._replace_tails(self._tails(seq, load.mark.position) or [])
            if self.states and seq.num_tokens in seq.wanted:
                is_short = len(self._marks_of(seq)) == MOST_TAKEN or self._bundle_size > self.arenas[0].available()
                if is_short or not self._has_room():
                    self.counters["checkpoints_skipped"] += 1
                else:
                    self._take_mark(step.id, seq, seq.num_tokens)
                    self.counters["checkpoints_taken"] += 1
        rows = {row.handle: row for row in step.rows}
        saved = [(mark, rows[mark.owner]) for mark in self._taken if mark.step == step.id]
        for k, g in enumerate(self.states):
            part, width = step.plan.groups[g.index], 1 + g.group.blocks
            begun = [[load.slots[k], *load.mark.bundles[g.index]] for load in loads]
            ended = [[self.state_move(row, g)[1], *mark.bundles[g.index]] for mark, row in saved]
            part.state_loads = np.array(begun, np.int32).reshape(-1, width)
            part.state_saves = np.array(ended, np.int32).reshape(-1, width)

    def _forget_row(self, seq: Sequence) -> None:
        """A row goes on without the cache."""
        seq.root, seq.node, seq.wanted = None, None, []
        for mark in self._marks_of(seq) if seq.load is None else ():
            self._give_up(mark)

    def _flush(self, namespace: bytes | None) -> int:
        """Forget a namespace, None: all; returns how many blocks became blank."""
        roots = [root for name, root in self._roots.items() if namespace in (None, name)]
        before = sum(len(arena.blank) for arena in self.arenas)
        for seq in self.sequences():
            if seq.root in roots:
                self._forget_row(seq)
        gone = [node for node in self._nodes.values() if node.root in roots]
        self._nodes = {key: node for key, node in self._nodes.items() if node.root not in roots}
        for mark in [mark for mark in self._taken if mark.node in gone]:
            mark.node = None
            if self._is_free(mark):
                self._drop(mark)
            mark.tails = []
        for entry in dict.fromkeys(self.entries.values()):
            if entry.node in gone:
                is_canonical = entry.node.kv.get(entry.layer.index) is entry
                entry.node = None
                if is_canonical and entry.is_idle():
                    self._blank_entry(entry)
        self._tell()
        self._note("cleared", namespace)
        return sum(len(arena.blank) for arena in self.arenas) - before

    def _note(self, *event: Any) -> None:
        self._lost_events += len(self._events) == self._events.maxlen
        self._events.append(event)

    def _tell(self) -> None:
        """Make events of what a call changed in what hits can find."""
        if not self.options.events:
            return
        held = {}  # (group, root, prefix) of every entry and state that a hit can use, and its tokens
        for node in self._nodes.values():
            mark = node.checkpoint
            for entry in [*node.kv.values(), *(mark.tails if mark else [])]:
                held[entry.layer.index, node.root, entry.node.prefix] = entry.layer.block_size
            held |= {(group, node.root, node.prefix): self.block_size for group in (mark.bundles if mark else ())}
        for group, root, prefix in sorted(self._told.keys() - held.keys()):
            self._note("removed", self._told.pop((group, root, prefix)), group)
        for group, root, prefix in sorted(held.keys() - self._told.keys()):
            layer, size = self.layers[group], held[group, root, prefix]
            namespace = next(name for name, one in self._roots.items() if one == root)
            keys = [hashlib.sha256(namespace).digest()[:16]]
            for i in range(0, len(prefix), self.block_size):
                tokens = np.array(prefix[i : i + self.block_size], "<i4").tobytes()
                keys.append(hashlib.sha256(keys[-1] + tokens).digest()[:16])
            above = keys[-1 - size // self.block_size] if len(prefix) > size else None
            window = layer.group.size if layer in self._tailed else None
            self._told[group, root, prefix] = keys[-1]
            self._note("stored", keys[-1], above, list(prefix[-size:]), size, namespace, group, layer.kind, window)
