"""The prefix cache of `kvpool.testing.model`: ``docs/prefix.md``, and how a sequence is opened.

A node is one base block of tokens below another node. It has an entry of each full group whose block ends there, and
a checkpoint, or lacks them. Nothing is kept in order: what leaves first is found by stamps, who names a block is
recounted.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvpool.errors import CapacityExceeded, CorruptState, OutOfBlocks, OutOfSequences
from kvpool.stats import PrefixStats
from kvpool.testing import model_args as args
from kvpool.testing.model_blocks import Arena, ceil_div, public_call
from kvpool.testing.model_groups import HOLE, Layers, Sequence, Table
from kvpool.testing.model_steps import Row, Step, StepModel

MOST_TAKEN = 2  #: checkpoints that a row has taken and not published
NODES_PER_CHECKPOINT = 4  #: there is room for one checkpoint per so many nodes
LOADED = 0  #: in place of a step
TAIL = 16  #: tokens at the end of a prompt that the next turn may rewrite, unless `cut` says more


@dataclass(eq=False)
class Entry:
    """An entry of a group that is committed, or in a checkpoint."""

    layer: Layers
    blocks: list[int]
    node: Node | None = None  #: what it holds; None: not known yet, or flushed
    waits: bool = False  #: told, and not published
    left: set[int] = field(default_factory=set)  #: its blocks that nobody names any more


@dataclass(eq=False)
class Checkpoint:
    """What a hit at its position needs beside the entries of full groups."""

    position: int
    bundles: dict[int, list[int]]  #: blocks of arena 0 of each state group
    stamp: int
    step: int | None  #: the pending step that saves the states, LOADED: none does
    owner: int | None  #: the row that took it, until `commit` publishes it
    tails: list[Entry] = field(default_factory=list)  #: entries of windows and chunks, of a published one
    node: Node | None = None
    was_hit: bool = False


@dataclass(eq=False)
class Node:
    """One base block of tokens, below another one."""

    uid: int
    root: int
    parent: Node | None
    prefix: tuple[int, ...]  #: all tokens from the first one on
    kv: dict[int, Entry] = field(default_factory=dict)  #: group -> the canonical entry that ends here
    checkpoint: Checkpoint | None = None
    stamp: int = 0


@dataclass(eq=False)
class Load:
    """A checkpoint whose states were not copied to slots yet."""

    mark: Checkpoint
    slots: dict[int, int]  #: state group -> slot
    step: int | None = None  #: the pending step that does it


@dataclass(eq=False)
class Opening:
    """What a call that opens a sequence was given, what it finds and what it takes."""

    prompt: list[int]  #: empty for a count
    length: int
    namespace: bytes
    path: list[Node]  #: the longest one of the prompt that is in the cache
    hit: int  #: tokens
    room: int  #: tokens that tables have entries for then
    is_cut: bool  #: a load: windows and chunks have what a query at its end reads
    bundle: int  #: blocks for the states of a load

    def has(self, layer: Layers, i: int) -> bool:
        """Whether entry i of a table is no hole."""
        return not self.is_cut or layer.kind == "full" or layer.needs(i, self.length)

    @property
    def nodes(self) -> list[Node]:
        """Those of the hit."""
        return [node for node in self.path if len(node.prefix) <= self.hit]


class ModelPrefix:
    """The calls on a prefix cache, see `kvpool._core.PrefixCache`."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    @public_call
    def match(self, tokens: Any, namespace: bytes = b"") -> int:
        """Return how many tokens of the prompt `open` would find."""
        prompt = args.tokens("match", tokens)
        hit: int = self.pool._found(prompt, args.namespace("match", namespace))[1]
        return hit

    @public_call
    def pin(self, tokens: Any, namespace: bytes = b"") -> int:
        """Open a sequence that holds the largest hit of a prefix, all of which may be one; returns its handle."""
        pool, prompt = self.pool, args.tokens("pin", tokens)
        found = pool._judge_opening("pin", prompt, args.namespace("pin", namespace), False, all_of_it=True)
        seq: Sequence = pool._begin_at("pin", found)
        pool.chain("pin", prompt, namespace, pool._local(seq.handle))
        return seq.handle

    @public_call
    def unpin(self, handle: int) -> None:
        """Close a sequence that `pin` opened."""
        self.pool._close(self.pool.one("unpin", handle, True))

    @public_call
    def commit(self, handles: Any, tokens: Any, counts: Any = None) -> None:
        """Make the tokens of computed positions known; the blocks that become full can be found."""
        pool = self.pool
        names = args.handles("commit", handles)
        given = args.tokens("commit", tokens)
        lengths = self._counts(counts, len(names), len(given))
        batch = [pool._sequence("commit", name) for name in names]
        # what was said of each block, as if the rows before had been committed
        told = {key: entry.node.prefix for key, entry in pool.entries.items() if entry.node is not None}
        rows = []
        for seq, count in zip(batch, lengths, strict=True):
            row, given = given[:count], given[count:]
            pool._refuse_commit(seq, row, told)
            rows.append(row)
        for seq, row in zip(batch, rows, strict=True):
            first = len(seq.tokens) // pool.block_size
            seq.tokens += row
            pool._commit_from(seq, first)
        pool.chain("commit", *map(pool._local, names), *rows)

    def _counts(self, counts: Any, num_rows: int, num_tokens: int) -> list[int]:
        if counts is None:
            if num_tokens % max(1, num_rows) or (num_tokens and not num_rows):
                raise ValueError(f"[commit] {num_tokens} tokens for {num_rows} rows, give counts")
            return [num_tokens // max(1, num_rows)] * num_rows
        batch = args.per_row("commit", "counts", counts, num_rows)
        if sum(batch) != num_tokens:
            raise ValueError(f"[commit] counts sum up to {sum(batch)}, there are {num_tokens} tokens")
        return batch

    @public_call
    def committed(self, handle: int) -> int:
        """Return the committed length of a sequence: where the next `commit` goes on."""
        return len(self.pool.one("committed", handle, True).tokens)

    @public_call
    def wanted(self, handles: Any) -> np.ndarray:
        """Return the next position of each row at which a step should end, -1: none; int64 ``[S]``."""
        batch = self.pool.batch("wanted", handles)
        return np.array([min([p for p in s.wanted if p > s.num_tokens], default=-1) for s in batch], np.int64)

    @public_call
    def bundle(self, handle: int, group: int) -> np.ndarray:
        """Return the blocks of a state that a loader fills, or that no step has loaded yet."""
        pool, seq = self.pool, self.pool.one("bundle", handle, True)
        if group not in [layer.index for layer in pool._states]:
            raise ValueError(f"[bundle] group {group} is no group of states")
        slots = [slot for entry in seq.tables[group].entries for slot in entry]
        marks = [load.mark for load in pool._loads if load.slots[group] in slots]
        if seq.is_loading:
            marks = pool._marks_of(seq)
        return np.array(marks[0].bundles[group] if marks else [], np.int32)

    @public_call
    def flush(self, namespace: bytes | None = None) -> int:
        """Forget every node of a namespace, or of all; returns how many blocks became blank."""
        if namespace is None or args.namespace("flush", namespace) in self.pool._roots:
            count: int = self.pool._flush(namespace)
            return count
        self.pool._note("cleared", namespace)
        return 0

    @public_call
    def events(self) -> list[tuple]:
        """Return and forget the events, oldest first."""
        pool = self.pool
        lost = [("lost", pool._lost_events)] if pool._lost_events and pool._events.maxlen else []
        events = lost + list(pool._events)
        pool._events.clear()
        pool._lost_events = 0
        return events

    @public_call
    def stats(self) -> PrefixStats:
        """Return the counters of the prefix cache."""
        pool, use = self.pool, self.pool._use
        return PrefixStats(
            hit_rate=use["hit_tokens"] / max(1, use["query_tokens"]),
            nodes=len(pool._nodes),
            namespaces=len(pool._roots),
            checkpoints=sum(mark.node is not None for mark in pool._taken),
            **use,
            **{f"checkpoints_{name}": n for name, n in pool._marks.items()},
        )


class CacheModel(StepModel):
    """`StepModel` with a prefix cache, which has nothing in it without ``prefix_cache=True``."""

    prefix_class = ModelPrefix

    def __init__(self, *sizes: Any, **options: Any) -> None:
        self._marks = dict.fromkeys(("taken", "published", "used", "skipped", "evicted"), 0)
        self._next_uid = 1
        lookups = ("queries", "query_tokens", "hit_tokens")
        self._use = dict.fromkeys((*lookups, *(f"again_{name}" for name in lookups)), 0)
        self._use |= dict.fromkeys(("inserted", "duplicates", "evicted"), 0)
        super().__init__(*sizes, **options)
        room = self.arenas[0].num_blocks - self.arenas[0].reserved
        if self.has_cache and self._bundle_size > room:
            self.shutdown()
            raise ValueError(f"[Pool] a checkpoint has {self._bundle_size} blocks, arena 0 has {room}")
        self._events: deque[tuple] = deque(maxlen=self.options.events)
        self._lost_events = 0

    def _empty(self) -> None:
        super()._empty()
        self._clock = self._coldest = 0
        self._last_root: dict[bytes, int] = {}  # namespace -> uid of the last root it was given
        self._nodes: dict[tuple[int, tuple[int, ...]], Node] = {}  # (root, prefix) -> node
        self.entries: dict[tuple[int, int], Entry] = {}  # (arena, block) -> committed entry
        self._taken: list[Checkpoint] = []  # all checkpoints
        self._loads: list[Load] = []
        self.left: list[tuple[Arena, int]] = []  # blocks that nobody names since the last call
        self._told: dict[tuple[int, int, tuple[int, ...]], bytes] = {}  # what events have told of, and its key
        self._grain = max((layer.block_size for layer in self._kv), default=self.block_size)
        self._full = [layer for layer in self.layers if layer.kind == "full"]
        self._tailed = [layer for layer in self._kv if layer.kind != "full"]
        self._states = [layer for layer in self.layers if layer.kind == "state"]
        self._bundle_size = sum(layer.group.blocks for layer in self._states)
        self._can_restore = all(layer.group.blocks for layer in self._states)
        self._is_cut = len(self._full) < len(self.layers)  # a hit needs a checkpoint
        self._most_marks = self._most_nodes() // NODES_PER_CHECKPOINT + 1

    # ---- namespaces ---------------------------------------------------------------------------------------

    @property
    def _roots(self) -> dict[bytes, int]:
        """Uid of the root of each namespace that has a node or an open sequence; the others are forgotten."""
        used = {node.root for node in self._nodes.values()} | {seq.root for seq in self.sequences()}
        return {name: root for name, root in self._last_root.items() if root in used}

    def _root(self, namespace: bytes) -> int:
        """Return the uid of a namespace's root; a namespace that was forgotten gets a new one."""
        if namespace not in self._roots:
            self._last_root[namespace] = self._new_uid()
        return self._last_root[namespace]

    def _new_uid(self) -> int:
        self._next_uid += 1
        return self._next_uid - 1

    # ---- what leaves first --------------------------------------------------------------------------------

    def _most_nodes(self) -> int:
        """Base blocks of all that full groups hold, and of one entry of each row."""
        per_arena: dict[int, int] = {}
        for layer in self._full:
            held = layer.arena.num_blocks // layer.columns * (layer.block_size // self.block_size)
            per_arena[layer.arena.number] = max(held, per_arena.get(layer.arena.number, 0))
        return (sum(per_arena.values()) or 2**20) + self.options.max_seqs * (self._grain // self.block_size)

    def _has_room(self) -> bool:
        """Whether there is room for one more checkpoint, if what may leave makes room."""
        free = [mark for mark in self._taken if self._is_free(mark)]
        is_full = len(self._taken) == self._most_marks
        if is_full and free:
            self._evict_mark(self._oldest(free))
        return bool(free) or not is_full

    def _oldest(self, marks: list[Checkpoint], units: Iterable[Node] = ()) -> Any:
        """What leaves first. `max` takes the first of equal ages: never a hit, other checkpoints, units."""
        victims: list[Node | Checkpoint] = [*sorted(marks, key=lambda mark: mark.was_hit), *units]
        return max(victims, key=self._age)

    def _age(self, one: Node | Checkpoint) -> int:
        """Twice the age of a unit or checkpoint; three times for a checkpoint that was never a hit."""
        return (3 if isinstance(one, Checkpoint) and not one.was_hit else 2) * (self._clock - one.stamp)

    def _evict_mark(self, mark: Checkpoint) -> None:
        self._drop(mark)
        self._marks["evicted"] += 1

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    # ---- what the cache holds -----------------------------------------------------------------------------

    def _is_unit_idle(self, node: Node) -> bool:
        return any(self._is_idle(entry) for entry in node.kv.values())

    def _is_idle(self, entry: Entry) -> bool:
        return all(entry.layer.arena.is_idle(block) for block in entry.blocks)

    def _is_free(self, mark: Checkpoint) -> bool:
        """Whether a checkpoint may leave."""
        return mark.step is None and all(load.mark is not mark for load in self._loads)

    def _marks_of(self, seq: Sequence) -> list[Checkpoint]:
        """What a row took and did not publish."""
        return [mark for mark in self._taken if mark.owner == seq.handle]

    def _covering(self, entry: Entry) -> list[Checkpoint]:
        return [mark for mark in self._taken if entry in mark.tails]

    def _below(self, node: Node) -> int:
        """Published checkpoints at a node or below it."""
        return sum(
            mark.node.root == node.root and mark.node.prefix[: len(node.prefix)] == node.prefix
            for mark in self._taken
            if mark.node is not None
        )

    def evictable_in(self, arena: Arena, without: tuple[Any, ...] = ()) -> set[int]:
        """Blocks of an arena that leave if all leaves that may; `without` some nodes and checkpoints."""
        found = set()
        for node in self._nodes.values():
            if node not in without and self._is_unit_idle(node):
                found |= {
                    block
                    for entry in node.kv.values()
                    if entry.layer.arena is arena and self._is_idle(entry)
                    for block in entry.blocks
                }
        for mark in self._taken:
            if mark in without or not self._is_free(mark):
                continue
            if arena.number == 0:
                found |= {block for bundle in mark.bundles.values() for block in bundle}
            for entry in mark.tails:
                if entry.layer.arena is arena and all(
                    self._is_free(other) and other not in without for other in self._covering(entry)
                ):
                    found |= {block for block in entry.blocks if arena.is_idle(block)}
        return found

    def evict_for(self, arena: Arena) -> None:
        """Evict what leaves first, for a block of this arena."""
        homes = {layer.arena.number for layer in self._tailed} | ({0} if self._bundle_size else set())
        self._evict_next(any(layer.arena is arena for layer in self._full), arena.number in homes)

    def _evict_next(self, has_units: bool, has_marks: bool) -> bool:
        """Evict what leaves first of the units, of the checkpoints, or of both. Returns whether anything may leave."""
        units = [n for n in self._nodes.values() if has_units and self._is_unit_idle(n)]
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
        for group, entry in list(node.kv.items()):
            if not self._is_idle(entry):
                continue
            del node.kv[group]
            self._use["evicted"] += 1
            entry.layer.arena.counters["evictions"] += len(entry.blocks)
            self._blank_entry(entry)
        self._sweep()

    def _blank_entry(self, entry: Entry) -> None:
        for block in reversed(entry.blocks):
            del self.entries[entry.layer.arena.number, block]
            entry.layer.arena.blank.append(block)

    def _drop(self, mark: Checkpoint) -> None:
        """A checkpoint is gone."""
        self._taken.remove(mark)
        for bundle in mark.bundles.values():
            for block in bundle:
                if mark.step is None:
                    self.arenas[0].blank.append(block)
                else:
                    self.arenas[0].release(block)
        for entry in mark.tails:
            if not self._covering(entry) and all(entry.layer.arena.is_idle(block) for block in entry.blocks):
                self._blank_entry(entry)
        node, mark.node = mark.node, None
        if node is not None:
            node.checkpoint = None
            chain = []
            while node is not None:
                if self._is_unit_idle(node) and not self._below(node):
                    chain.append(node)
                node = node.parent
            for one in reversed(chain):
                self._coldest -= 1
                one.stamp = self._coldest
        self._sweep()

    def _give_up(self, mark: Checkpoint) -> None:
        """A row has no use for a checkpoint that it has not published. Who has still to load it keeps it."""
        if any(load.mark is mark for load in self._loads):
            mark.owner = None
        else:
            self._drop(mark)

    def _sweep(self) -> None:
        """Forget nodes that nobody needs."""
        needed: set[int] = set()
        rows = [seq.node for seq in self._sequences.values()]
        for node in [*self._nodes.values(), *(entry.node for entry in self.entries.values()), *rows]:
            if node is None or not (node.kv or node.checkpoint or node in rows or self._stands(node)):
                continue
            while node is not None and node.uid not in needed:
                needed.add(node.uid)
                node = node.parent
        self._nodes = {key: node for key, node in self._nodes.items() if node.uid in needed}

    def _stands(self, node: Node) -> bool:
        return any(entry.node is node for entry in self.entries.values())

    def drain(self) -> None:
        """Close what was deferred. Then settle the blocks that the last call released, one arena after the other."""
        super().drain()
        left, self.left = self.left, []
        for arena, block in sorted(left, key=lambda one: one[0].number):
            self._block_left(arena, block)
        if left:
            self._tell()

    def _block_left(self, arena: Arena, block: int) -> None:
        entry = self.entries.get((arena.number, block))
        if entry is None:
            arena.blank.append(block)
            return
        entry.left.add(block)
        if len(entry.left) < len(entry.blocks):
            return
        entry.left.clear()
        node = entry.node
        if self._covering(entry):
            self._hand_over(entry)
            return
        if node is None or entry.waits or entry.layer.kind != "full":
            self._blank_entry(entry)
        else:
            if node.kv.setdefault(entry.layer.index, entry) is not entry:
                self._blank_entry(entry)
            if self._is_unit_idle(node):
                node.stamp = self._tick()
        self._sweep()

    def _hand_over(self, entry: Entry) -> None:
        """Nobody names an entry of checkpoints: the first row that has still to load one has its own in its place."""
        assert entry.node is not None
        depth = len(entry.node.prefix) // self.block_size
        for _, seq in sorted(self._sequences.items()):
            if not self._has_load(seq):
                continue
            for layer, blocks in self._ending(seq, depth):
                own = self.entries.get((layer.arena.number, blocks[0]))
                if layer is entry.layer and own is not None and own is not entry and own.node is entry.node:
                    self._replace_tails([own])  # which blanks the other one
                    return

    def _has_load(self, seq: Sequence) -> bool:
        """Whether a checkpoint has still to be copied to the states of a row."""
        states = {(layer.index, slot) for layer in self._states for (slot,) in seq.tables[layer.index].entries}
        return any(place in states for load in self._loads for place in load.slots.items())

    # ---- hits ---------------------------------------------------------------------------------------------

    def _path(self, tokens: list[int], namespace: bytes, most: int) -> list[Node]:
        """The nodes of a prefix whose full groups are all there."""
        found: list[Node] = []
        root = self._roots.get(namespace)
        while root is not None and len(found) < most:
            length = (len(found) + 1) * self.block_size
            node = self._nodes.get((root, tuple(tokens[:length])))
            if node is None or any(length % g.block_size == 0 and g.index not in node.kv for g in self._full):
                break
            found.append(node)
        return found

    def _usable(self, path: list[Node]) -> int:
        """The largest hit on a path, in tokens."""
        for depth in range(len(path), 0, -1):
            length = depth * self.block_size
            if length % self._grain == 0 and (not self._is_cut or path[depth - 1].checkpoint is not None):
                return length
        return 0

    def _found(self, prompt: list[int], namespace: bytes, all_of_it: bool = False) -> tuple[list[Node], int]:
        """The path of a prompt, and how much of it is a hit."""
        most = (len(prompt) - (not all_of_it)) // self.block_size
        path = self._path(prompt, namespace, min(most, self.options.max_blocks_per_seq))
        return path, self._usable(path)

    def _spacing(self) -> int:
        """Distance of the first checkpoint inside a long prompt: 3 times its bytes in keys and values."""
        kv = sum(layer.columns * self.block_size / layer.block_size for layer in self._full)
        held = [(layer, layer.group.size - 1) for layer in self._tailed] + [(g, g.group.keep) for g in self._tailed]
        tails = sum(ceil_div(tokens, layer.block_size) * layer.columns for layer, tokens in held)
        least, spacing = 3 * (self._bundle_size + tails) * self.block_size, 1
        if not kv or not least:
            return 0
        while spacing * kv < least:
            spacing *= 2
        return spacing

    def _positions(self, hit: int, path: list[Node], cut: int) -> list[int]:
        """Where a prompt takes checkpoints: the cut, the junction, doubling distances; none behind the cut."""
        places, distance = {cut, min(len(path) * self.block_size, cut)}, self._spacing()
        while distance and distance <= cut:
            places.add(distance)
            distance *= 2
        aligned = {place // self._grain * self._grain for place in places}
        return sorted(place for place in aligned if place > hit) if self._is_cut and self._can_restore else []

    # ---- opening a sequence -------------------------------------------------------------------------------

    def _judge_opening(
        self, call: str, tokens: Any, namespace: bytes, reserve: bool, load: bool = False, all_of_it: bool = False
    ) -> Opening:
        """What opening a sequence finds and takes, if it is there."""
        prompt = [] if args.is_count(tokens) else args.tokens(call, tokens)
        length = args.count(call, "tokens", tokens) if args.is_count(tokens) else len(prompt)
        if load and not self.has_cache and self._is_cut:
            raise ValueError(f"[{call}] load is for full groups only without a prefix cache")
        if length > self.options.max_blocks_per_seq * self.block_size:
            raise CapacityExceeded(f"[{call}] {length} tokens, max_blocks_per_seq is {self.options.max_blocks_per_seq}")
        is_cut = load and self._is_cut
        if is_cut:
            self._refuse_load(call, length)
        path, hit = self._found([] if is_cut else prompt, namespace, all_of_it)
        bundle = self._bundle_size if load else 0
        found = Opening(prompt, length, namespace, path, hit, length if reserve else hit, is_cut, bundle)
        own = (*found.nodes, *(node.checkpoint for node in found.nodes[-1:]))
        for arena in self.arenas:
            need = sum(n * layer.columns for layer, n in self._rest(found) if layer.arena is arena)
            need += (load or hit > 0) * sum(layer.arena is arena for layer in self._states)
            need += 0 if arena.number else found.bundle
            watermark = 0 if arena.number else self.options.watermark
            lost = len(arena.evictable) - len(self.evictable_in(arena, own)) if hit else 0
            if need and need + watermark > arena.available() - lost:
                arena.out_of_blocks(call, need, watermark, lost=lost)
        self._refuse_slots(call, 1)
        return found

    def _refuse_load(self, call: str, length: int) -> None:
        if not self._can_restore:
            raise ValueError(f"[{call}] a state group has no blocks")
        if length > 2**31 - 1:
            raise CapacityExceeded(f"[{call}] {length} tokens are loaded, no plan steps so long a sequence")
        if not length or length % self._grain:
            raise ValueError(f"[{call}] {length} tokens are loaded, {self._grain} is the grain")
        if self._states and len(self._taken) == self._most_marks and not any(map(self._is_free, self._taken)):
            raise OutOfSequences(f"[{call}] all checkpoints are in use")

    def _rest(self, found: Opening) -> list[tuple[Layers, int]]:
        """How many entries each group takes beside those of the hit."""
        rest = [(layer, ceil_div(found.room, layer.block_size) - found.hit // layer.block_size) for layer in self._kv]
        if found.is_cut:
            rest = [(layer, sum(found.has(layer, i) for i in range(count))) for layer, count in rest]
        return rest

    @public_call
    def open(
        self, tokens: Any = 0, namespace: bytes = b"", cut: int | None = None, *, reserve: bool = True,
        load: bool = False, again: bool = False,
    ) -> int:  # fmt: skip
        """Open a sequence for a prompt, or with entries for a number of tokens; returns its handle."""
        args.how_to_open("open", tokens, namespace, reserve, load)
        args.boolean("open", "again", again)
        if cut is not None:
            args.integer("open", "cut", cut, 0, tokens if args.is_count(tokens) else len(tokens))
            if not self.has_cache or load or args.is_count(tokens):
                raise ValueError(f"[open] cut is {cut}: it needs a prompt and a prefix cache, and no load")
        found = self._judge_opening("open", tokens, namespace, reserve, load)
        seq = self._begin_at("load" if load else "open", found)
        states = [(layer, 1) for layer in self._states] if load and self._is_cut else []
        self._make_room(self._rest(found) + states, found.bundle)
        for layer, _ in states:
            seq.tables[layer.index].entries.append(self._take_entry(layer))
        for layer in self._kv:
            entries = seq.tables[layer.index].entries
            for i in range(len(entries), ceil_div(found.room, layer.block_size)):
                entries.append(self._take_entry(layer) if found.has(layer, i) else HOLE)
        if load:
            self._begin_load(seq, found)
        elif self.has_cache and not args.is_count(tokens):
            seq.wanted = self._positions(found.hit, found.path, max(0, found.length - TAIL) if cut is None else cut)
            for name, n in (("queries", 1), ("query_tokens", found.length), ("hit_tokens", found.hit)):
                self._use[f"again_{name}" if again else name] += n
        shown = [table.entries for table in seq.tables]
        self.chain("open", found.prompt, namespace, self._local(seq.handle), shown, seq.wanted, load)
        return seq.handle

    def _begin_load(self, seq: Sequence, found: Opening) -> None:
        """The blocks are filled from elsewhere; the states go to a checkpoint."""
        seq.is_loading, seq.load = True, found.length
        if self._is_cut:
            seq.wanted = self._positions(0, [], found.length)
        if found.bundle:
            assert self._has_room()
            self._taken.append(Checkpoint(found.length, self._take_bundles(), self._clock, LOADED, seq.handle))

    def _take_bundles(self) -> dict[int, list[int]]:
        home = self.arenas[0]
        return {layer.index: [home.take() for _ in range(layer.group.blocks)] for layer in self._states}

    def _can_open(self, tokens: Any, namespace: Any, reserve: Any, load: Any) -> bool:
        args.how_to_open("can", tokens, namespace, reserve, load)
        try:
            self._judge_opening("can", tokens, namespace, reserve, load)
        except (OutOfBlocks, OutOfSequences, CapacityExceeded):
            return False
        return True

    @public_call
    def can(
        self, handles: Any = None, num_new: Any = 1, *, tokens: Any = None, namespace: Any = b"",
        reserve: Any = True, load: Any = False,
    ) -> bool:  # fmt: skip
        """Return whether a step of this batch, or an `open`, would find its blocks and its room."""
        if (handles is None) == (tokens is None):
            raise TypeError("[can] handles or tokens are needed, one of them")
        if num_new != 1 if handles is None else (namespace, reserve, load) != (b"", True, False):
            raise TypeError("[can] num_new belongs to handles; namespace, reserve and load belong to tokens")
        if tokens is not None:
            return self._can_open(tokens, namespace, reserve, load)
        return self._can_step(handles, num_new)

    def _loadable(self, seq: Sequence) -> tuple[int, int]:
        return (seq.load, seq.load) if self._is_cut else super()._loadable(seq)

    def _take_over(self, seq: Sequence, n: int) -> None:
        is_flushed = self.has_cache and seq.root is None  # what it has is of other weights
        if is_flushed or (self._is_cut and n == 0):
            self._pop_all(seq)
            for table in seq.tables:
                table.epoch += 1
            seq.num_tokens, seq.tokens, seq.published = 0, [], 0
            return
        super()._take_over(seq, n)
        for mark in self._marks_of(seq):
            mark.step, mark.stamp = None, self._tick()
            slots = {layer.index: seq.tables[layer.index].entries[0][0] for layer in self._states}
            self._loads.append(Load(mark, slots))

    def _make_room(self, entries: list[tuple[Layers, int]], bundle: int = 0) -> None:
        """Evict for all entries before any is taken: what leaves for one arena may have blocks of others."""
        for arena in self.arenas if self.has_cache else ():
            need = sum(n * layer.columns for layer, n in entries if layer.arena is arena)
            while need + (0 if arena.number else bundle) > len(arena.blank):
                self.evict_for(arena)

    def _begin_at(self, call: str, found: Opening) -> Sequence:
        """Open a sequence over a hit."""
        seq, hit, nodes = self._create(found.hit), found.hit, found.nodes
        if self.has_cache:
            seq.root = self._root(found.namespace)
        if not nodes:
            return seq
        seq.tokens, seq.node, seq.published = found.prompt[:hit], nodes[-1], len(nodes)
        mark = nodes[-1].checkpoint if self._is_cut else None
        for layer in self._full:
            for node in nodes:
                if layer.index in node.kv:
                    self._share(seq.tables[layer.index], node.kv[layer.index])
        for layer in self._tailed:
            table = seq.tables[layer.index]
            table.entries = [HOLE] * (hit // layer.block_size)
            for entry in mark.tails if mark else ():
                if entry.layer is layer:
                    assert entry.node is not None
                    table.entries[len(entry.node.prefix) // layer.block_size - 1] = list(entry.blocks)
                    self._leave_limbo(entry)
        if mark is not None:
            mark.stamp = self._tick()
        if mark is not None and call == "open":  # a pin is no hit
            self._marks["used"] += not mark.was_hit
            mark.was_hit = True
        if mark is not None and self._states:
            slots = {}
            for layer in self._states:
                seq.tables[layer.index].entries.append(self._take_entry(layer))
                ((slots[layer.index],),) = seq.tables[layer.index].entries
            self._loads.append(Load(mark, slots))
            self.arenas[0].note_peak()
        return seq

    def _share(self, table: Table, entry: Entry) -> None:
        table.entries.append(list(entry.blocks))
        self._leave_limbo(entry)

    def _leave_limbo(self, entry: Entry) -> None:
        arena = entry.layer.arena
        arena.limbo = [(block, fence) for block, fence in arena.limbo if block not in entry.blocks]
        entry.left.clear()
        arena.note_peak()

    def _lose(self, layer: Layers, seq: Sequence, n: int) -> None:
        super()._lose(layer, seq, n)
        for mark in self._marks_of(seq):
            self._give_up(mark)
        seq.root, seq.tokens, seq.published, seq.node, seq.wanted = None, [], 0, None, []
        self._sweep()

    # ---- commit -------------------------------------------------------------------------------------------

    def _ending(self, seq: Sequence, depth: int) -> list[tuple[Layers, list[int]]]:
        """The entries of a row whose blocks end with its first `depth` base blocks."""
        length, found = depth * self.block_size, []
        for layer in self._kv:
            if length % layer.block_size == 0:
                place, entries = length // layer.block_size - 1, seq.tables[layer.index].entries
                if place < len(entries) and entries[place] != HOLE:
                    found.append((layer, entries[place]))
        return found

    def _refuse_commit(self, seq: Sequence, row: list[int], told: dict[Any, tuple[int, ...]]) -> None:
        known = seq.tokens + row
        if row and seq.point:
            raise ValueError(f"[commit] tokens were evicted from {seq.handle}, it commits no more")
        if row and len(known) > self.done_length(seq):
            raise ValueError(f"[commit] {len(known)} tokens, {self.done_length(seq)} are done ({seq.handle})")
        for depth in range(len(seq.tokens) // self.block_size + 1, len(known) // self.block_size + 1):
            prefix = tuple(known[: depth * self.block_size])
            for layer, entry in self._ending(seq, depth):
                if told.setdefault((layer.arena.number, entry[0]), prefix) != prefix:
                    raise ValueError(f"[commit] block {entry[0]} was committed with other tokens ({seq.handle})")

    def _commit_from(self, seq: Sequence, first: int) -> None:
        self._publish(seq, first)
        for depth in range(first + 1, len(seq.tokens) // self.block_size + 1):
            if seq.root is not None:
                self._tell_at(seq.root, seq, depth)
                self._publish(seq, depth)

    def _tell_at(self, root: int, seq: Sequence, depth: int) -> None:
        """Base block `depth` - 1 of a row is known: it is a node, and its entries stand for it."""
        prefix = tuple(seq.tokens[: depth * self.block_size])
        node = self._nodes.get((root, prefix))
        if node is None:
            self._sweep()
            while len(self._nodes) >= self._most_nodes() and self._evict_next(True, True):
                pass
            node = self._nodes[root, prefix] = Node(self._new_uid(), root, seq.node, prefix)
            self._use["inserted"] += 1
        seq.node = node
        for layer, blocks in self._ending(seq, depth):
            first = layer.arena.number, blocks[0]
            if first not in self.entries:
                entry = Entry(layer, list(blocks), node, layer.kind == "full")
                self.entries.update({(layer.arena.number, block): entry for block in blocks})

    def _publish(self, seq: Sequence, most: int | None = None) -> None:
        """Hits may find the blocks of a row, the first `most` or all, as far as their content is there."""
        full = len(seq.tokens) // self.block_size if most is None else most
        while seq.root is not None and seq.published < full and self._publish_at(seq, seq.published + 1):
            seq.published += 1
        self._sweep()

    def _publish_waiting(self) -> None:
        """A step has ended: what waited for it is published, rows in the order of their slots."""
        for _, seq in sorted(self._sequences.items()) if self.has_cache else ():
            self._publish(seq)

    def _publish_at(self, seq: Sequence, depth: int) -> bool:
        """Publish what ends with the first `depth` base blocks of a row, if all of it may be found."""
        length = depth * self.block_size
        ending = [(layer, blocks[0]) for layer, blocks in self._ending(seq, depth) if layer.kind == "full"]
        entries = [self.entries.get((layer.arena.number, block)) for layer, block in ending]
        if None in entries or any(self.is_unwritten(layer, block) for layer, block in ending):
            return False
        for entry in entries:
            if entry is not None and entry.waits:
                assert entry.node is not None
                entry.waits = False
                self._use["duplicates"] += entry.layer.index in entry.node.kv
                entry.node.kv.setdefault(entry.layer.index, entry)
        if length in seq.wanted and seq.root is not None:
            self._publish_mark(seq, length, self._nodes[seq.root, tuple(seq.tokens[:length])])
        return True

    def _publish_mark(self, seq: Sequence, position: int, node: Node) -> None:
        """The checkpoint of a row can be found, unless its node has one, or a window has passed on."""
        mark = next((one for one in self._taken if one.owner == seq.handle and one.position == position), None)
        if mark is None and self._states:
            return
        tails = self._tails(seq, position)
        if node.checkpoint is not None or tails is None:
            if node.checkpoint is not None:
                node.checkpoint.stamp = self._tick()
            else:
                self._marks["skipped"] += 1
            if mark is not None:
                self._give_up(mark)
            return
        if mark is None:
            if not self._has_room():
                self._marks["skipped"] += 1
                return
            mark = Checkpoint(position, {}, 0, None, None)
            self._taken.append(mark)
        self._marks["published"] += 1
        mark.stamp = self._tick()
        known = [entry for other in self._taken if other.node is not None for entry in other.tails]
        if any(load.mark is mark for load in self._loads):
            self._replace_tails(tails)
            known = []
        mark.tails = [next((one for one in known if one.layer is e.layer and one.node is e.node), e) for e in tails]
        mark.owner, mark.node, node.checkpoint = None, node, mark
        above: Node | None = node
        while above is not None:
            if self._is_unit_idle(above) and self._below(above) == 1:
                above.stamp = self._tick()
            above = above.parent

    def _replace_tails(self, own: list[Entry]) -> None:
        """A row that has still to load its checkpoint: its entries take the place of equal ones in others."""
        for mark in self._taken:
            for place, entry in enumerate(mark.tails):
                other = next((e for e in own if e.layer is entry.layer and e.node is entry.node), entry)
                mark.tails[place] = other
                if other is not entry and not self._covering(entry) and self._is_idle(entry):
                    self._blank_entry(entry)

    def _tails(self, seq: Sequence, position: int) -> list[Entry] | None:
        """What a row has of windows and chunks that a hit at a position needs; None: not all of it."""
        found = []
        for layer in self._tailed:
            for i, blocks in enumerate(seq.tables[layer.index].entries[: position // layer.block_size]):
                if layer.needs(i, position):
                    if blocks == HOLE:
                        return None
                    found.append(self.entries[layer.arena.number, blocks[0]])
        return found

    # ---- steps --------------------------------------------------------------------------------------------

    def _move_states(self, step: Step) -> None:
        """Checkpoints that rows have still to load, and those that are wanted where they end."""
        if not self.has_cache:
            return
        begun = []  # in the order of the rows
        for row in step.rows:
            seq = self._sequence("step", row.handle)
            if row.length == row.old_length:
                continue
            for load in self._loads:
                if load.step is None and self._reads(row, seq, load):
                    load.step = step.id
                    begun.append(load)
                    if load.mark.node is not None:  # what others have may leave while the step is pending
                        self._replace_tails(self._tails(seq, load.mark.position) or [])
            if self._states and seq.num_tokens in seq.wanted:
                self._take_mark(step, seq)
        for layer in self._states:
            loads = [(load.mark, load.slots[layer.index]) for load in begun]
            saves = [(mark, self._state_of(mark.owner, layer)) for mark in self._taken if mark.step == step.id]
            group, width = step.plan.groups[layer.index], 1 + layer.group.blocks
            group.state_loads, group.state_saves = (
                np.array([[slot, *mark.bundles[layer.index]] for mark, slot in moves], np.int32).reshape(-1, width)
                for moves in (loads, saves)
            )

    def _state_of(self, handle: Any, layer: Layers) -> int:
        ((slot,),) = self._sequence("step", handle).tables[layer.index].entries
        return slot

    def _take_mark(self, step: Step, seq: Sequence) -> None:
        """The row ends where a checkpoint is wanted."""
        home = self.arenas[0]
        if len(self._marks_of(seq)) == MOST_TAKEN or self._bundle_size > home.available() or not self._has_room():
            self._marks["skipped"] += 1
            return
        self._taken.append(Checkpoint(seq.num_tokens, self._take_bundles(), self._clock, step.id, seq.handle))
        self._marks["taken"] += 1

    def _pass(self, step: Step) -> None:
        for mark in self._taken:
            if mark.step == step.id:
                mark.step, mark.stamp = None, self._tick()
        super()._pass(step)
        for load in [load for load in self._loads if load.step == step.id]:
            self._end_load(load)
        self._publish_waiting()
        self._tell()

    def _reads(self, row: Row, seq: Sequence, load: Load) -> bool:
        """Whether a row reads the slots of a load in a step that has begun."""
        group, slot = next(iter(load.slots.items()))
        replaced = row.changes[group].replaced
        read = replaced[0][1] if replaced else seq.tables[group].entries[0]
        return bool(read[0] == slot)

    def _end_load(self, load: Load) -> None:
        self._loads.remove(load)
        self._drop_orphan(load.mark)

    def _end_idle_loads(self) -> None:
        """Nobody will read what these would load."""
        for load in list(self._loads):
            group, slot = next(iter(load.slots.items()))
            if load.step is None and not self.layers[group].arena.refcount(slot):
                self._end_load(load)

    def _drop_orphan(self, mark: Checkpoint) -> None:
        if mark in self._taken and mark.node is None and mark.owner is None and self._is_free(mark):
            self._drop(mark)

    def _undo(self, step: Step) -> None:
        for mark in [mark for mark in self._taken if mark.step == step.id]:
            self._drop(mark)
        for load in self._loads:
            if load.step == step.id:
                load.step = None
        super()._undo(step)
        self._end_idle_loads()
        self._publish_waiting()

    def _pop_all(self, seq: Sequence) -> None:
        for mark in self._marks_of(seq):
            self._give_up(mark)
        super()._pop_all(seq)
        self._end_idle_loads()
        seq.node = None
        self._sweep()

    def _shorten(self, seq: Sequence, length: int) -> None:
        super()._shorten(seq, length)
        for mark in self._marks_of(seq):
            if mark.position > length:
                self._give_up(mark)
        del seq.tokens[length:]
        while seq.node is not None and len(seq.node.prefix) > len(seq.tokens):
            seq.node = seq.node.parent
        seq.published = min(seq.published, length // self.block_size)
        self._sweep()

    # ---- forgetting ---------------------------------------------------------------------------------------

    def _flush(self, namespace: bytes | None) -> int:
        """Forget a namespace, None: all; returns how many blocks became blank."""
        roots = [root for name, root in self._roots.items() if namespace in (None, name)]
        before = sum(len(arena.blank) for arena in self.arenas)
        for seq in self.sequences():
            if seq.root in roots:
                seq.root = seq.node = None
                seq.wanted = []
                for mark in self._marks_of(seq) if not seq.is_loading else ():
                    self._give_up(mark)
        gone = [node for node in self._nodes.values() if node.root in roots]
        self._nodes = {key: node for key, node in self._nodes.items() if node.root not in roots}
        for mark in [mark for mark in self._taken if mark.node in gone]:
            mark.node = None
            if self._is_free(mark):
                self._drop(mark)
            mark.tails = []
        for entry in {id(entry): entry for entry in self.entries.values()}.values():
            if entry.node in gone:
                is_canonical = entry.layer.kind == "full" and entry.node.kv.get(entry.layer.index) is entry
                entry.node = None
                if is_canonical and all(entry.layer.arena.is_idle(block) for block in entry.blocks):
                    self._blank_entry(entry)
        self.chain("flush", namespace)
        self._note("cleared", namespace)
        return sum(len(arena.blank) for arena in self.arenas) - before

    @public_call
    def reset(self) -> None:
        """Forget everything; the generations and the counters of use go on."""
        if self.has_cache:
            self._flush(None)
        super().reset()

    # ---- events and statistics ----------------------------------------------------------------------------

    def _note(self, *event: Any) -> None:
        self._lost_events += len(self._events) == self._events.maxlen
        self._events.append(event)

    def chain(self, *words: object) -> None:
        """Add a successful call to the digest."""
        super().chain(*words)
        self._tell()

    def _tell(self) -> None:
        """Make events of what a call changed in what hits can find."""
        if not self.options.events:
            return
        held = self._held_by_nodes()
        for group, root, prefix in sorted(self._told.keys() - held.keys()):
            self._note("removed", self._told.pop((group, root, prefix)), group)
        for group, root, prefix in sorted(held.keys() - self._told.keys()):
            layer, size = self.layers[group], held[group, root, prefix]
            namespace = next(name for name, uid in self._roots.items() if uid == root)
            keys = [hashlib.sha256(namespace).digest()[:16]]
            for i in range(0, len(prefix), self.block_size):
                tokens = np.array(prefix[i : i + self.block_size], "<i4").tobytes()
                keys.append(hashlib.sha256(keys[-1] + tokens).digest()[:16])
            above = keys[-1 - size // self.block_size] if len(prefix) > size else None
            window = layer.group.size if layer in self._tailed else None
            self._told[group, root, prefix] = keys[-1]
            self._note("stored", keys[-1], above, list(prefix[-size:]), size, namespace, group, layer.kind, window)

    def _held_by_nodes(self) -> dict[tuple[int, int, tuple[int, ...]], int]:
        """(group, root, prefix) of every entry and state that a hit can use, and its tokens."""
        found = {}
        for node in self._nodes.values():
            for group in node.kv:
                found[group, node.root, node.prefix] = self.layers[group].block_size
        for mark in self._taken:
            if mark.node is None:
                continue
            for group in mark.bundles:
                found[group, mark.node.root, mark.node.prefix] = self.block_size
            for entry in mark.tails:
                if entry.node is not None:
                    found[entry.layer.index, entry.node.root, entry.node.prefix] = entry.layer.block_size
        return found

    # ---- what is read -------------------------------------------------------------------------------------

    @property
    def prefix(self) -> ModelPrefix | None:
        """The prefix cache; None in a pool that has none."""
        return self.prefix_class(self) if self.has_cache else None

    def _state(self) -> dict[str, Any]:
        return super()._state() | {
            "roots": self._roots,
            "nodes": {
                key: (node.uid, node.stamp, sorted((g, entry.blocks) for g, entry in node.kv.items()))
                for key, node in self._nodes.items()
            },
            "entries": {key: entry.waits for key, entry in self.entries.items()},
            "checkpoints": [(mark.position, mark.bundles, mark.stamp, mark.was_hit) for mark in self._taken],
            "loads": [(load.slots, load.step) for load in self._loads],
            "use": (dict(self._use), dict(self._marks)),
        }

    @public_call
    def check(self) -> None:
        """Recompute what the bookkeeping implies; raises `CorruptState`."""
        for arena in self.arenas:
            self._check_arena(arena)
        held = sorted(
            (layer.arena.number, block)
            for step in self.pending
            for row in step.rows
            for layer, change in zip(self.layers, row.changes, strict=True)
            for _, old, _ in change.replaced
            for block in old
        )
        if held != sorted((arena.number, block) for arena in self.arenas for block in arena.holds):
            raise CorruptState("[check] holds differ from what pending steps replaced")
        for seq in self.sequences():
            if seq.num_tokens > self._capacity(seq) or len(seq.tokens) > seq.num_tokens:
                raise CorruptState(f"[check] table and length do not fit ({seq.handle})")
        for mark in self._taken:
            if mark.node is not None and mark.node.checkpoint is not mark:
                raise CorruptState("[check] a checkpoint and its node differ")
        for node in self._nodes.values():
            if node.parent is not None and self._nodes.get((node.root, node.parent.prefix)) is not node.parent:
                raise CorruptState("[check] a node is there without the one above")
            for group, entry in node.kv.items():
                if any(self.is_unwritten(self.layers[group], block) for block in entry.blocks):
                    raise CorruptState(f"[check] found before it is written: {entry.blocks}")

    def _check_arena(self, arena: Arena) -> None:
        named = arena.references().keys() | set(arena.holds)
        cached = {block for number, block in self.entries if number == arena.number} | set(arena.unused)
        if arena.number == 0:
            cached |= {block for mark in self._taken for bundle in mark.bundles.values() for block in bundle}
        limbo = [block for block, _ in arena.limbo]
        if limbo and not self.pending:
            raise CorruptState(f"[check] limbo of arena {arena.number} is not empty though no step is pending")
        places = arena.blank + limbo + list((named | cached) - set(limbo))
        if sorted(places) != list(range(arena.reserved, arena.num_blocks)):
            raise CorruptState(f"[check] arena {arena.number}: a block is in no place or in two: {sorted(places)}")
        for block in cached - named - set(limbo):
            entry = self.entries.get((arena.number, block))
            if entry is None or self._covering(entry):
                continue
            if entry.node is None or entry.node.kv.get(entry.layer.index) is not entry:
                raise CorruptState(f"[check] block {block} of arena {arena.number} is kept for nothing")
