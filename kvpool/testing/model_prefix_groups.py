"""The prefix cache of pools with layer groups in `kvpool.testing.model`: ``docs/prefix.md``, "Layer groups".

A node is one base block of tokens below another node. It has an entry of each full group whose block ends there, and
a checkpoint, or lacks them. Nothing is kept in order: what leaves first is found by stamps, who names a block is
recounted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvpool.errors import CapacityExceeded, CorruptState, OutOfSequences
from kvpool.stats import PrefixStats
from kvpool.testing import model_args as args
from kvpool.testing.model_blocks import Part, Step, ceil_div, public_call
from kvpool.testing.model_groups import HOLE, Arena, GroupModel, Layers, Table
from kvpool.testing.model_plan import Sequence

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
class Known:
    """What the prefix cache knows of a row."""

    node: Node | None = None  #: of its last committed base block
    wanted: list[int] = field(default_factory=list)  #: where checkpoints are taken
    load: int = 0  #: tokens that are loaded


@dataclass(eq=False)
class Load:
    """A checkpoint whose states were not copied to slots yet."""

    mark: Checkpoint
    slots: dict[int, int]  #: state group -> slot
    step: int | None = None  #: the pending step that does it


class CachedArena(Arena):
    """An arena whose unnamed blocks may belong to the prefix cache of the pool."""

    _pool: Any

    @property
    def _lru(self) -> list[int]:
        """Blocks that the cache would give up."""
        return sorted(self._pool.evictable_in(self)) if hasattr(self._pool, "_clock") else []

    @_lru.setter
    def _lru(self, blocks: list[int]) -> None:
        pass

    @property
    def _committed(self) -> set[int]:
        """Blocks that are never written in place."""
        return {block for number, block in getattr(self._pool, "_entries", {}) if number == self._number}

    @_committed.setter
    def _committed(self, blocks: set[int]) -> None:
        pass

    def _evict_oldest(self) -> int:
        while not self._blank:
            self._pool.evict_for(self)
        return self._blank.pop()

    def _leave(self, block: int) -> None:
        self._pool.left.append((self, block))

    @public_call
    def _blocks_incref(self, ids: Any) -> None:
        """Add one raw reference to blocks that were taken with `alloc`."""
        for block in self._ids("incref", ids):
            if not self._raw.get(block):
                raise ValueError(f"[incref] block was not taken with alloc ({block})")
        super()._blocks_incref(ids)

    @public_call
    def _alloc(self, n: int | None, check_out: Any) -> list[int]:
        count = 1 if n is None else args.count("alloc", "n", n)
        if count > len(self._blank):
            check_out(count)
            self._out_of_blocks("alloc", count, lost=len(self._lru))
        return super()._alloc(n, check_out)

    @public_call
    def _blocks_evict(self, n: int) -> int:
        """Turn at least `n` evictable blocks into blank ones, or all that there are."""
        count = min(args.count("evict", "n", n), len(self._lru))
        wanted = len(self._blank) + count
        while len(self._blank) < wanted:
            self._pool.evict_for(self)
        self._chain("evict", count)
        return count

    def _has_own_cache(self) -> bool:
        return True


class CheckpointModel(GroupModel):
    """`GroupModel` with a prefix cache: ``ModelPool(..., groups=[...], prefix_cache=True)`` makes one."""

    arena_class, may_cache = CachedArena, True

    def __init__(self, *sizes: Any, **options: Any) -> None:
        self._marks = dict.fromkeys(("taken", "published", "used", "skipped", "evicted"), 0)
        super().__init__(*sizes, **options)
        room = self.arenas[0].num_blocks - self.arenas[0]._reserved
        if self._bundle_size > room:
            self.shutdown()
            raise ValueError(f"[Pool] a checkpoint has {self._bundle_size} blocks, arena 0 has {room}")

    def _empty(self) -> None:
        super()._empty()
        self._clock = self._coldest = 0
        self._nodes: dict[tuple[int, tuple[int, ...]], Node] = {}  # type: ignore[assignment]  # (root, prefix) -> node
        self._entries: dict[tuple[int, int], Entry] = {}  # (arena, block) -> committed entry
        self._taken: list[Checkpoint] = []  # all checkpoints
        self._loads: list[Load] = []
        self.left: list[tuple[Arena, int]] = []  # blocks that nobody names since the last call
        self._told: set[tuple[int, int, tuple[int, ...]]] = set()  # what events have told of
        self._told_keys: dict[tuple[int, int, tuple[int, ...]], bytes] = {}
        kv = self._with_entries
        self._grain = max((layer.block_size for layer in kv), default=self.block_size)
        self._full = [layer for layer in self.layers if layer.kind == "full"]
        self._tailed = [layer for layer in kv if layer.kind != "full"]
        self._states = [layer for layer in self.layers if layer.kind == "state"]
        self._is_cut = len(self._full) < len(self.layers)  # a hit needs a checkpoint
        self._most_marks = self._most_nodes() // NODES_PER_CHECKPOINT + 1

    def _most_nodes(self) -> int:
        """Base blocks of all that full groups hold, and of one entry of each row."""
        per_arena: dict[int, int] = {}
        for layer in self._full:
            held = layer.arena.num_blocks // layer.columns * (layer.block_size // self.block_size)
            per_arena[layer.arena._number] = max(held, per_arena.get(layer.arena._number, 0))
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
            if arena._number == 0:
                found |= {block for bundle in mark.bundles.values() for block in bundle}
            for entry in mark.tails:
                if entry.layer.arena is arena and all(
                    self._is_free(other) and other not in without for other in self._covering(entry)
                ):
                    found |= {block for block in entry.blocks if arena.is_idle(block)}
        return found

    def evict_for(self, arena: Arena) -> None:
        """Evict what leaves first, for a block of this arena."""
        units = [n for n in self._nodes.values() if self._is_unit_idle(n)]
        if not any(layer.arena is arena for layer in self._full):
            units = []
        cold = [node for node in units if self._is_cut and not self._below(node)]
        if cold:
            self._evict_unit(min(cold, key=lambda node: node.stamp))
            return
        homes = {layer.arena._number for layer in self._tailed} | ({0} if self._bundle_size else set())
        marks = [mark for mark in self._taken if self._is_free(mark)] if arena._number in homes else []
        victim = self._oldest(marks, units)
        if isinstance(victim, Node):
            self._evict_unit(victim)
        else:
            self._evict_mark(victim)

    @property
    def _bundle_size(self) -> int:
        return sum(layer.group.blocks for layer in self._states)

    def _evict_unit(self, node: Node) -> None:
        if node.checkpoint is not None and self._is_free(node.checkpoint):
            self._evict_mark(node.checkpoint)
        for group, entry in list(node.kv.items()):
            if not self._is_idle(entry):
                continue
            del node.kv[group]
            self._use["evicted"] += 1
            entry.layer.arena._counters["evictions"] += len(entry.blocks)
            self._blank_entry(entry)
        self._sweep()

    def _blank_entry(self, entry: Entry) -> None:
        for block in reversed(entry.blocks):
            del self._entries[entry.layer.arena._number, block]
            entry.layer.arena._blank.append(block)

    def _drop(self, mark: Checkpoint) -> None:
        """A checkpoint is gone."""
        self._taken.remove(mark)
        for bundle in mark.bundles.values():
            for block in bundle:
                if mark.step is None:
                    self.arenas[0]._blank.append(block)
                else:
                    self.arenas[0]._release(block)
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
        rows = [seq.known.node for seq in self._sequences.values()]
        for node in [*self._nodes.values(), *(entry.node for entry in self._entries.values()), *rows]:
            if node is None or not (node.kv or node.checkpoint or node in rows or self._stands(node)):
                continue
            while node is not None and node.uid not in needed:
                needed.add(node.uid)
                node = node.parent
        self._nodes = {key: node for key, node in self._nodes.items() if node.uid in needed}

    def _stands(self, node: Node) -> bool:
        return any(entry.node is node for entry in self._entries.values())

    def _drain(self) -> None:
        """Close what was deferred. Then settle the blocks that the last call released, one arena after the other."""
        super()._drain()
        left, self.left = self.left, []
        for arena, block in sorted(left, key=lambda one: one[0]._number):
            self._block_left(arena, block)
        if left:
            self._tell()

    def _block_left(self, arena: Arena, block: int) -> None:
        entry = self._entries.get((arena._number, block))
        if entry is None:
            arena._blank.append(block)
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
                own = self._entries.get((layer.arena._number, blocks[0]))
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
        tails = sum(
            (ceil_div(layer.group.size - 1, layer.block_size) + layer.num_kept) * layer.columns
            for layer in self._tailed
        )
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
        can_restore = all(layer.group.blocks for layer in self._states)
        return sorted(place for place in aligned if place > hit) if self._is_cut and can_restore else []

    def _create(self, num_tokens: int, table: list[int]) -> Sequence:
        seq = super()._create(num_tokens, table)
        seq.known = Known()
        return seq

    @public_call
    def open(
        self, tokens: Any = 0, namespace: bytes = b"", cut: int | None = None, *, reserve: bool = True,
        load: bool = False, again: bool = False,
    ) -> int:  # fmt: skip
        """Open a sequence for a prompt, or with entries for a number of tokens; returns its handle."""
        args.how_to_open("open", tokens, namespace, reserve, load)
        args.boolean("open", "again", again)
        if load:
            return self._open_load(args.tokens("open", tokens), namespace)
        if args.is_count(tokens):
            if cut is not None:
                raise ValueError(f"[open] cut is {cut}, there is no prompt")
            handle: int = super().open(tokens, namespace)
            self._sequence("open", handle).root = self._root(namespace)
            return handle
        prompt = args.tokens("open", tokens)
        place = max(0, len(prompt) - TAIL) if cut is None else args.integer("open", "cut", cut, 0, len(prompt))
        path, hit = self._found(prompt, namespace)
        self._refuse_found("open", prompt, path, hit, reserve)
        seq = self._open_found("open", prompt, namespace, path, hit)
        rest = [
            (layer, ceil_div(len(prompt), layer.block_size) - len(seq.tables[layer.index].entries))
            for layer in (self._with_entries if reserve else ())
        ]
        self._make_room(rest)
        for layer, count in rest:
            seq.tables[layer.index].entries.extend(self._take_entry(layer) for _ in range(count))
        seq.known.wanted = self._positions(hit, path, place)
        self._count_lookup(len(prompt), hit, again)
        shown = [table.entries for table in seq.tables]
        self._chain("open", prompt, namespace, self._local(seq.handle), shown, seq.known.wanted)
        return seq.handle

    def _refuse_load(
        self, call: str, prompt: list[int], namespace: bytes
    ) -> tuple[list[Node], int, int, dict[int, Any], list[tuple[Layers, int]]]:
        """Return what a load finds and takes, if it is there: path, hit, blocks of the bundle, entries by group."""
        path: list[Node] = []
        length, hit, bundle = len(prompt), 0, 0
        self._refuse_too_long(call, prompt)
        if self._is_cut:
            if not all(layer.group.blocks for layer in self._states):
                raise ValueError(f"[{call}] a state group has no blocks")
            if not length or length % self._grain:
                raise ValueError(f"[{call}] {length} tokens are loaded, {self._grain} is the grain")
            if self._states and len(self._taken) == self._most_marks and not any(map(self._is_free, self._taken)):
                raise OutOfSequences(f"[{call}] all checkpoints are in use")
            bundle = self._bundle_size
        else:
            path, hit = self._found(prompt, namespace)
        wanted = {layer.index: self._loaded_entries(layer, length) for layer in self._with_entries}
        rest = [(layer, len(wanted[layer.index]) - hit // layer.block_size) for layer in self._with_entries]
        rest += [(layer, 1) for layer in self._states]
        own = tuple(path[: hit // self.block_size])
        for arena in self.arenas:
            need = sum(n * layer.columns for layer, n in rest if layer.arena is arena)
            need += 0 if arena._number else bundle
            watermark = 0 if arena._number else self.options.watermark
            lost = len(arena._lru) - len(self.evictable_in(arena, own))
            if need and need + watermark > arena._available() - lost:
                arena._out_of_blocks(call, need, watermark, lost=lost)
        self._refuse_slots(call, 1)
        return path, hit, bundle, wanted, rest

    def _open_load(self, prompt: list[int], namespace: bytes) -> int:
        """Open a sequence whose blocks are filled from elsewhere. It shares none if hits need checkpoints."""
        length = len(prompt)
        path, hit, bundle, wanted, rest = self._refuse_load("open", prompt, namespace)
        seq = self._open_found("load", prompt, namespace, path, hit)
        self._make_room(rest, bundle)
        for layer in self.layers:
            table = seq.tables[layer.index]
            if layer.kind == "state":
                table.entries.append(self._take_entry(layer))
                continue
            places = range(len(table.entries), ceil_div(length, layer.block_size))
            table.entries.extend(self._take_entry(layer) if i in wanted[layer.index] else HOLE for i in places)
        seq.known.wanted, seq.known.load = self._positions(hit, [], length), length
        if bundle:
            assert self._has_room()
            home = self.arenas[0]
            bundles = {layer.index: [home._take() for _ in range(layer.group.blocks)] for layer in self._states}
            self._taken.append(Checkpoint(length, bundles, self._clock, LOADED, seq.handle))
        seq.is_loading = True
        self._chain("open", prompt, namespace, self._local(seq.handle), "load")
        return seq.handle

    def _loaded_entries(self, layer: Layers, length: int) -> set[int]:
        """The entries of a group that a sequence needs which begins with `length` tokens."""
        size, every = layer.block_size, range(ceil_div(length, layer.block_size))
        if layer.kind == "full" or not self._is_cut:
            return set(every)
        return {i for i in every if i < layer.num_kept or (i + 1) * size > layer.last_unread(length)}

    def _loadable(self, seq: Sequence) -> tuple[int, int]:
        least, most = (seq.known.load, seq.known.load) if self._is_cut else super()._loadable(seq)
        return least, min(most, 2**31 - 1)

    def _take_over(self, seq: Sequence, n: int) -> None:
        mine = [mark for mark in self._taken if mark.owner == seq.handle]
        if seq.root is None or (self._is_cut and n == 0):
            self._pop_all(seq)
            for table in seq.tables:
                table.epoch += 1
            seq.num_tokens, seq.tokens, seq.published = 0, [], 0
            return
        super()._take_over(seq, n)
        for mark in mine:
            mark.step, mark.stamp = None, self._tick()
            slots = {layer.index: seq.tables[layer.index].entries[0][0] for layer in self._states}
            self._loads.append(Load(mark, slots))

    def _make_room(self, entries: list[tuple[Layers, int]], bundle: int = 0) -> None:
        """Evict for all entries before any is taken: what leaves for one arena may have blocks of others."""
        for arena in self.arenas:
            need = sum(n * layer.columns for layer, n in entries if layer.arena is arena)
            while need + (0 if arena._number else bundle) > len(arena._blank):
                self.evict_for(arena)

    def _refuse_open(self, call: str, tokens: Any, namespace: bytes, load: bool, reserve: bool) -> None:
        if load:
            self._refuse_load(call, args.tokens(call, tokens), namespace)
        elif args.is_count(tokens):
            self._refuse_count(call, tokens)
        else:
            prompt = args.tokens(call, tokens)
            self._refuse_found(call, prompt, *self._found(prompt, namespace), reserve)

    def _refuse_found(self, call: str, prompt: list[int], path: list[Node], hit: int, reserve: bool) -> None:
        if len(prompt) > self.options.max_blocks_per_seq * self.block_size:
            raise CapacityExceeded(f"[{call}] {len(prompt)} tokens, max_blocks_per_seq is too small")
        nodes = path[: hit // self.block_size]
        own = (*nodes, *(node.checkpoint for node in nodes[-1:]))
        for arena in self.arenas:
            need = sum(
                (ceil_div(len(prompt), layer.block_size) - hit // layer.block_size) * layer.columns
                for layer in self._with_entries
                if layer.arena is arena and reserve
            )
            need += hit > 0 and any(layer.arena is arena for layer in self._states)
            watermark = 0 if arena._number else self.options.watermark
            lost = len(arena._lru) - len(self.evictable_in(arena, own))
            if need and need + watermark > arena._available() - lost:
                arena._out_of_blocks(call, need, watermark, lost=lost)
        self._refuse_slots(call, 1)

    def _open_found(self, call: str, prompt: list[int], namespace: bytes, path: list[Node], hit: int) -> Sequence:
        """Open a sequence over a hit."""
        seq = self._create(hit, [])
        seq.root, seq.tokens = self._root(namespace), prompt[:hit]
        nodes = path[: hit // self.block_size]
        if not nodes:
            return seq
        seq.known.node, seq.published = nodes[-1], len(nodes)
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
            self.arenas[0]._note_peak()
        return seq

    def _share(self, table: Table, entry: Entry) -> None:
        table.entries.append(list(entry.blocks))
        self._leave_limbo(entry)

    def _leave_limbo(self, entry: Entry) -> None:
        arena = entry.layer.arena
        arena._limbo = [(block, fence) for block, fence in arena._limbo if block not in entry.blocks]
        entry.left.clear()
        arena._note_peak()

    @public_call
    def fork(self, handle: int, n: int = 1) -> np.ndarray:
        """Open `n` children that share the parent's entries, its states, and what the cache knows of it."""
        parent = self._one("fork", handle)
        children: np.ndarray = super().fork(handle, n)
        for child in map(self._find, children.tolist()):
            assert child is not None
            child.root, child.tokens, child.published = parent.root, list(parent.tokens), parent.published
            child.forked_in = self._fork_in(parent)
            child.known = Known(parent.known.node, list(parent.known.wanted))
        return children

    def _lose_in(self, layer: Any, seq: Sequence, n: int, left: int) -> None:
        super()._lose_in(layer, seq, n, left)
        for mark in [mark for mark in self._taken if mark.owner == seq.handle]:
            self._give_up(mark)
        seq.root, seq.tokens, seq.published, seq.known = None, [], 0, Known()
        self._sweep()

    # ---- commit -------------------------------------------------------------------------------------------

    def _ending(self, seq: Sequence, depth: int) -> list[tuple[Layers, list[int]]]:
        """The entries of a row whose blocks end with its first `depth` base blocks."""
        length, found = depth * self.block_size, []
        for layer in self._with_entries:
            if length % layer.block_size == 0:
                place, entries = length // layer.block_size - 1, seq.tables[layer.index].entries
                if place < len(entries) and entries[place] != HOLE:
                    found.append((layer, entries[place]))
        return found

    def _said(self) -> dict[Any, tuple[int, ...]]:
        return {key: entry.node.prefix for key, entry in self._entries.items() if entry.node is not None}

    def _refuse_commit(self, seq: Sequence, row: list[int], told: dict[Any, tuple[int, ...]]) -> None:
        known = seq.tokens + row
        if row and seq.point:
            raise ValueError(f"[commit] tokens were evicted from {seq.handle}, it commits no more")
        if row and len(known) > self._done_length(seq):
            raise ValueError(f"[commit] {len(known)} tokens, {self._done_length(seq)} are done ({seq.handle})")
        for depth in range(len(seq.tokens) // self.block_size + 1, len(known) // self.block_size + 1):
            prefix = tuple(known[: depth * self.block_size])
            for layer, entry in self._ending(seq, depth):
                if told.setdefault((layer.arena._number, entry[0]), prefix) != prefix:
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
            node = self._nodes[root, prefix] = Node(self._new_uid(), root, seq.known.node, prefix)
            self._use["inserted"] += 1
        seq.known.node = node
        for layer, blocks in self._ending(seq, depth):
            first = layer.arena._number, blocks[0]
            if first not in self._entries:
                entry = Entry(layer, list(blocks), node, layer.kind == "full")
                self._entries.update({(layer.arena._number, block): entry for block in blocks})

    def _publish(self, seq: Sequence, most: int | None = None) -> None:
        """Hits may find the blocks of a row, the first `most` or all, as far as their content is there."""
        full = len(seq.tokens) // self.block_size if most is None else most
        while seq.root is not None and seq.published < full and self._publish_at(seq, seq.published + 1):
            seq.published += 1
        self._sweep()

    def _publish_at(self, seq: Sequence, depth: int) -> bool:
        """Publish what ends with the first `depth` base blocks of a row, if all of it may be found."""
        length = depth * self.block_size
        ending = [(layer, blocks[0]) for layer, blocks in self._ending(seq, depth) if layer.kind == "full"]
        entries = [self._entries.get((layer.arena._number, block)) for layer, block in ending]
        if None in entries or any(self._is_unwritten(layer, block) for layer, block in ending):
            return False
        for entry in entries:
            if entry is not None and entry.waits:
                assert entry.node is not None
                entry.waits = False
                self._use["duplicates"] += entry.layer.index in entry.node.kv
                entry.node.kv.setdefault(entry.layer.index, entry)
        if length in seq.known.wanted and seq.root is not None:
            self._publish_mark(seq, length, self._nodes[seq.root, tuple(seq.tokens[:length])])
        return True

    def _is_unwritten(self, layer: Layers, block: int) -> bool:
        """Whether a pending plan has still to fill a block by a copy."""
        return any(
            dst == block and self.layers[index].arena is layer.arena
            for step in self._pending
            for index, _, dst, _ in step.copies
        )

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
                if i < layer.num_kept or (i + 1) * layer.block_size > layer.last_unread(position):
                    if blocks == HOLE:
                        return None
                    found.append(self._entries[layer.arena._number, blocks[0]])
        return found

    # ---- steps --------------------------------------------------------------------------------------------

    def _started(self, call: str, step: Step, new: list[int]) -> None:
        begun = []  # in the order of the rows
        for row, n in zip(step.rows, new, strict=True):
            seq = self._sequence(call, row.handle)
            if call != "step" or not n:
                continue
            for load in self._loads:
                if load.step is None and self._reads(row, seq, load):
                    load.step = step.id
                    begun.append(load)
                    if load.mark.node is not None:  # what others have may leave while the step is pending
                        self._replace_tails(self._tails(seq, load.mark.position) or [])
            if self._states and seq.num_tokens in seq.known.wanted:
                self._take_mark(step, seq)
        for layer in self._states:
            loads = [(load.mark, load.slots[layer.index]) for load in begun]
            saves = [(mark, self._state_of(mark.owner, layer)) for mark in self._taken if mark.step == step.id]
            group = step.plan.groups[layer.index]
            group.state_loads, group.state_saves = (
                np.array([[slot, *mark.bundles[layer.index]] for mark, slot in moves], np.int32).reshape(
                    -1, 1 + layer.group.blocks
                )
                for moves in (loads, saves)
            )
        super()._started(call, step, new)

    def _state_of(self, handle: Any, layer: Layers) -> int:
        ((slot,),) = self._sequence("step", handle).tables[layer.index].entries
        return slot

    def _take_mark(self, step: Step, seq: Sequence) -> None:
        """The row ends where a checkpoint is wanted."""
        home = self.arenas[0]
        taken = [mark for mark in self._taken if mark.owner == seq.handle]
        if len(taken) == MOST_TAKEN or self._bundle_size > home._available() or not self._has_room():
            self._marks["skipped"] += 1
            return
        bundles = {layer.index: [home._take() for _ in range(layer.group.blocks)] for layer in self._states}
        self._taken.append(Checkpoint(seq.num_tokens, bundles, self._clock, step.id, seq.handle))
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

    def _reads(self, row: Any, seq: Sequence, load: Load) -> bool:
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
            if load.step is None and not self.layers[group].arena._refcount(slot):
                self._end_load(load)

    def _drop_orphan(self, mark: Checkpoint) -> None:
        if mark in self._taken and mark.node is None and mark.owner is None and self._is_free(mark):
            self._drop(mark)

    def _undo_all(self, step: Step) -> None:
        for mark in [mark for mark in self._taken if mark.step == step.id]:
            self._drop(mark)
        for load in self._loads:
            if load.step == step.id:
                load.step = None
        super()._undo_all(step)
        self._end_idle_loads()
        self._publish_waiting()

    def _pop_all(self, seq: Sequence) -> None:
        for mark in [mark for mark in self._taken if mark.owner == seq.handle]:
            self._give_up(mark)
        super()._pop_all(seq)
        self._end_idle_loads()
        seq.known.node = None
        self._sweep()

    @public_call
    def truncate(self, handles: Any, lens: Any) -> None:
        """Shorten sequences to `lens` tokens."""
        super().truncate(handles, lens)
        for seq in self._batch("truncate", handles):
            for mark in [m for m in self._taken if m.owner == seq.handle and m.position > seq.num_tokens]:
                self._give_up(mark)
            del seq.tokens[seq.num_tokens :]
            node = seq.known.node
            while node is not None and len(node.prefix) > len(seq.tokens):
                node = node.parent
            seq.known.node = node
            seq.published = min(seq.published, seq.num_tokens // self.block_size)
        self._sweep()

    # ---- calls of the cache -------------------------------------------------------------------------------

    @property
    def prefix(self) -> Part:
        """The prefix cache."""
        return Part(self, "prefix")

    @public_call
    def _prefix_match(self, tokens: Any, namespace: bytes = b"") -> int:
        """Return how many tokens of the prompt `open` would find."""
        prompt = args.tokens("match", tokens)
        return self._found(prompt, args.namespace("match", namespace))[1]

    @public_call
    def _prefix_wanted(self, handles: Any) -> np.ndarray:
        """Return the next position of each row at which a step should end, -1: none; int64 ``[S]``."""
        batch = self._batch("wanted", handles)
        return np.array([min([p for p in s.known.wanted if p > s.num_tokens], default=-1) for s in batch], np.int64)

    @public_call
    def _prefix_bundle(self, handle: int, group: int) -> np.ndarray:
        """Return the blocks of a state that a loader fills, or that no step has loaded yet."""
        seq = self._one("bundle", handle, True)
        slots = [slot for entry in seq.tables[group].entries for slot in entry]
        marks = [load.mark for load in self._loads if load.slots[group] in slots]
        if seq.is_loading:
            marks = [mark for mark in self._taken if mark.owner == seq.handle]
        return np.array(marks[0].bundles[group] if marks else [], np.int32)

    @public_call
    def _prefix_pin(self, tokens: Any, namespace: bytes = b"") -> int:
        """Open a sequence that holds the largest hit of a prefix, all of which may be one."""
        prompt = args.tokens("pin", tokens)
        self._refuse_too_long("pin", prompt)
        path, hit = self._found(prompt, args.namespace("pin", namespace), all_of_it=True)
        self._refuse_found("pin", prompt[:hit], path, hit, False)
        seq = self._open_found("pin", prompt, namespace, path, hit)
        self._chain("pin", prompt, namespace, self._local(seq.handle))
        return seq.handle

    def _flush(self, namespace: bytes | None) -> int:
        roots = [root for name, root in self._roots.items() if namespace in (None, name)]
        before = sum(len(arena._blank) for arena in self.arenas)
        for seq in self._sequences.values():
            if seq.root in roots:
                seq.root = seq.known.node = None
                seq.known.wanted = []
                for mark in [mark for mark in self._taken if mark.owner == seq.handle and not seq.is_loading]:
                    self._give_up(mark)
        gone = [node for node in self._nodes.values() if node.root in roots]
        self._nodes = {key: node for key, node in self._nodes.items() if node.root not in roots}
        for mark in [mark for mark in self._taken if mark.node in gone]:
            mark.node = None
            if self._is_free(mark):
                self._drop(mark)
            mark.tails = []
        for entry in {id(entry): entry for entry in self._entries.values()}.values():
            if entry.node in gone:
                is_canonical = entry.layer.kind == "full" and entry.node.kv.get(entry.layer.index) is entry
                entry.node = None
                if is_canonical and all(entry.layer.arena.is_idle(block) for block in entry.blocks):
                    self._blank_entry(entry)
        self._chain("flush", namespace)
        self._chain("flush", namespace)
        self._note("cleared", namespace)
        return sum(len(arena._blank) for arena in self.arenas) - before

    # ---- events and statistics ----------------------------------------------------------------------------

    def _chain(self, *words: object) -> None:
        super()._chain(*words)
        self._tell()

    def _tell(self) -> None:
        """Make events of what a call changed in what hits can find."""
        if not self.options.events:
            return
        held = self._held_by_nodes()
        for group, root, prefix in sorted(self._told - held.keys()):
            self._note("removed", self._told_keys.pop((group, root, prefix)), group)
        for group, root, prefix in sorted(held.keys() - self._told):
            layer, size = self.layers[group], held[group, root, prefix]
            namespace = next(name for name, uid in self._roots.items() if uid == root)
            keys = [hashlib.sha256(namespace).digest()[:16]]
            for i in range(0, len(prefix), self.block_size):
                tokens = np.array(prefix[i : i + self.block_size], "<i4").tobytes()
                keys.append(hashlib.sha256(keys[-1] + tokens).digest()[:16])
            above = keys[-1 - size // self.block_size] if len(prefix) > size else None
            window = layer.group.size if layer in self._tailed else None
            self._told_keys[group, root, prefix] = keys[-1]
            self._note(
                "stored", keys[-1], above, list(prefix[-size:]), size, namespace, group, layer.kind, window
            )  # fmt: skip
        self._told = set(held)

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

    @public_call
    def _prefix_stats(self) -> PrefixStats:
        """Return the counters of the prefix cache."""
        stats: PrefixStats = super()._prefix_stats()
        there = sum(mark.node is not None for mark in self._taken)
        return stats._replace(checkpoints=there, **{f"checkpoints_{name}": n for name, n in self._marks.items()})

    # ---- what is read -------------------------------------------------------------------------------------

    @public_call
    def check(self) -> None:
        """Recompute what the bookkeeping implies; raises `CorruptState`."""
        for arena in self.arenas:
            named = arena._references().keys() | set(arena._holds)
            cached = {b for (index, b) in self._entries if index == arena._number}
            if arena._number == 0:
                cached |= {b for mark in self._taken for bundle in mark.bundles.values() for b in bundle}
            limbo = [block for block, _ in arena._limbo]
            places = arena._blank + limbo + list((named | cached) - set(limbo))
            if sorted(places) != list(range(arena._reserved, arena.num_blocks)):
                raise CorruptState(f"[check] arena {arena._number}: a block is in no place or in two: {sorted(places)}")
            for block in cached - named - set(limbo):
                entry = self._entries.get((arena._number, block))
                if entry is None or self._covering(entry):
                    continue
                if entry.node is None or entry.node.kv.get(entry.layer.index) is not entry:
                    raise CorruptState(f"[check] block {block} of arena {arena._number} is kept for nothing")
        for mark in self._taken:
            if mark.node is not None and mark.node.checkpoint is not mark:
                raise CorruptState("[check] a checkpoint and its node differ")
        for node in self._nodes.values():
            if node.parent is not None and self._nodes.get((node.root, node.parent.prefix)) is not node.parent:
                raise CorruptState("[check] a node is there without the one above")
