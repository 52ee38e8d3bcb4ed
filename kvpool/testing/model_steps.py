"""Prefix caches and steps of `kvpool.testing.model`, for pools with one table per sequence.

Reference counts and floors are recounted from the tables and the pending steps whenever they are needed.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from kvpool.errors import CapacityExceeded, CorruptState, OutOfBlocks, OutOfSequences, PlanStateError
from kvpool.stats import PoolStats, PrefixStats
from kvpool.testing import model_args as args
from kvpool.testing.model_blocks import Part, Row, SequenceModel, Step, _live_tags, ceil_div, public_call
from kvpool.testing.model_plan import ModelPlan, Sequence


@dataclass(eq=False, slots=True)
class Node:
    """An indexed block."""

    uid: int
    root: int
    block: int
    key: bytes


class PrefixModel(SequenceModel):
    """`SequenceModel` with a prefix cache; `StepModel` adds steps.

    Parameters
    ----------
    prefix_cache : bool
        Whether committed blocks are found by their content.
    events : int
        How many events are kept for `events`.
    """

    def __init__(
        self, *sizes: Any, prefix_cache: bool = False, events: int = 0, _hash_bits: int = 64, **options: Any
    ) -> None:
        args.boolean("Pool", "prefix_cache", prefix_cache)
        args.integer("Pool", "events", events, 0, 2**31 - 1)
        args.integer("Pool", "_hash_bits", _hash_bits, 0, 64)
        if events and not prefix_cache:
            raise ValueError(f"[Pool] events is {events}, but there are none without prefix_cache=True")
        self._next_uid = 1
        lookups = ("queries", "query_tokens", "hit_tokens")
        self._use = dict.fromkeys((*lookups, *(f"again_{name}" for name in lookups)), 0)
        self._use |= dict.fromkeys(("inserted", "duplicates", "evicted"), 0)
        self._gaps: list[int] = []  # blocks taken between a release and a revival, one entry per revival
        self._events: deque[tuple] = deque(maxlen=events)
        self._lost_events = 0
        super().__init__(*sizes, **options)
        self.options = self.options._replace(prefix_cache=prefix_cache, events=events)

    def _empty(self) -> None:
        super()._empty()
        self._last_root: dict[bytes, int] = {}  # namespace -> uid of the last root it was given
        self._nodes: dict[tuple[int, tuple[int, ...]], Node] = {}  # (uid of the parent, tokens) -> node
        self._stands_for: dict[int, int] = {}  # committed block -> uid of its node, its own or its canonical block's
        self._block_tokens: dict[int, tuple[int, ...]] = {}  # committed block -> what it was committed with
        self._held_back: set[int] = set()  # committed blocks that the index was not offered yet
        self._held_canonicals: dict[int, int] = {}  # duplicate -> canonical block that it holds
        self._cached_at: dict[int, int] = {}  # evictable block -> blocks taken before it became that

    # ---- looking up ---------------------------------------------------------------------------------------

    def _uid_node(self, uid: int | None) -> Node | None:
        return next((node for node in self._nodes.values() if node.uid == uid), None)

    def _block_node(self, block: int) -> Node | None:
        return next((node for node in self._nodes.values() if node.block == block), None)

    def _root(self, namespace: bytes) -> int:
        """Return the uid of a namespace's root; a namespace that was forgotten gets a new one."""
        if namespace not in self._roots:
            self._last_root[namespace] = self._new_uid()
        return self._last_root[namespace]

    @property
    def _roots(self) -> dict[bytes, int]:
        """Uid of the root of each namespace that has a node or an open sequence; the others are forgotten."""
        used = {node.root for node in self._nodes.values()} | {seq.root for seq in self._sequences.values()}
        return {name: root for name, root in self._last_root.items() if root in used}

    def _new_uid(self) -> int:
        self._next_uid += 1
        return self._next_uid - 1

    def _block_of(self, tokens: list[int], i: int) -> tuple[int, ...]:
        return tuple(tokens[i * self.block_size : (i + 1) * self.block_size])

    def _hits(self, tokens: list[int], namespace: bytes, most: int) -> list[int]:
        """Return the canonical blocks of the longest cached prefix, at most `most`."""
        parent = self._roots.get(namespace)
        hits: list[int] = []
        while parent is not None and len(hits) < most:
            node = self._nodes.get((parent, self._block_of(tokens, len(hits))))
            if node is None:
                break
            hits.append(node.block)
            parent = node.uid
        return hits

    def _prompt_hits(self, tokens: list[int], namespace: bytes) -> list[int]:
        """The hits of a prompt: its last token is always computed."""
        most = min((len(tokens) - 1) // self.block_size, self.options.max_blocks_per_seq)
        return self._hits(tokens, namespace, most)

    def _touch(self, block: int) -> None:
        """The block has one more reference: it leaves the LRU or limbo."""
        self._cached_at.pop(block, None)
        self._lru = [b for b in self._lru if b != block]
        self._limbo = [(b, fence) for b, fence in self._limbo if b != block]
        self._note_peak()

    def _open_hits(self, hits: list[int], tokens: list[int], namespace: bytes, need: int) -> Sequence:
        length = len(hits) * self.block_size
        self._gaps += [self._counters["allocs"] - self._cached_at[b] for b in hits if b in self._cached_at]
        seq = self._create(length, list(hits))
        seq.root, seq.tokens, seq.published = self._root(namespace), tokens[:length], len(hits)
        for block in hits:
            self._touch(block)
        for _ in range(need):
            seq.table.append(self._take())
        return seq

    def _refuse_too_long(self, call: str, tokens: list[int]) -> int:
        """Return how many blocks the tokens fill."""
        num_blocks = ceil_div(len(tokens), self.block_size)
        if num_blocks > self.options.max_blocks_per_seq:
            raise CapacityExceeded(
                f"[{call}] {num_blocks} blocks, max_blocks_per_seq is {self.options.max_blocks_per_seq}"
            )
        return num_blocks

    def _refuse_prompt(self, call: str, prompt: list[int], namespace: bytes, reserve: bool) -> tuple[list[int], int]:
        """Return the hits of a prompt and how many blocks it takes beside them, if there are so many."""
        num_blocks = self._refuse_too_long(call, prompt)
        hits = self._prompt_hits(prompt, namespace)
        need = num_blocks - len(hits) if reserve else 0
        lost = len(set(hits) & set(self._lru))
        if need and need + self.options.watermark > self._available() - lost:
            self._out_of_blocks(call, need, self.options.watermark, lost=lost)
        self._refuse_slots(call, 1)
        return hits, need

    def _refuse_open(self, call: str, tokens: Any, namespace: bytes, load: bool, reserve: bool) -> None:
        """Refuse what `open` would refuse."""
        if args.is_count(tokens):
            self._refuse_blank(call, tokens)
        else:
            self._refuse_prompt(call, args.tokens(call, tokens), namespace, reserve)

    def _can_open(self, tokens: Any, namespace: Any, reserve: Any, load: Any) -> bool:
        args.how_to_open("can", tokens, namespace, reserve, load)
        try:
            self._refuse_open("can", tokens, namespace, load, reserve)
        except (OutOfBlocks, OutOfSequences, CapacityExceeded):
            return False
        return True

    @public_call
    def open(
        self, tokens: Any = 0, namespace: bytes = b"", cut: int | None = None, *, reserve: bool = True,
        load: bool = False, again: bool = False,
    ) -> int:  # fmt: skip
        """Open a sequence for a prompt, or with blocks for a number of tokens; returns its handle."""
        args.how_to_open("open", tokens, namespace, reserve, load)
        args.boolean("open", "again", again)
        if cut is not None and (args.is_count(tokens) or not self.options.prefix_cache):
            raise ValueError(f"[open] cut is {cut}: it needs a prompt and a prefix cache")
        if args.is_count(tokens):
            seq = self._open_blank(tokens)
            seq.root, seq.is_loading = self._root(namespace), load
            return seq.handle
        prompt = args.tokens("open", tokens)
        if cut is not None:  # and nothing else: every block is a place to begin at
            args.integer("open", "cut", cut, 0, len(prompt))
        hits, need = self._refuse_prompt("open", prompt, namespace, reserve)
        seq = self._open_hits(hits, prompt, namespace, need)
        seq.is_loading = load
        if self.options.prefix_cache and not load:
            self._count_lookup(len(prompt), seq.num_tokens, again)
        self._chain("open", prompt, namespace, self._local(seq.handle), *seq.table)
        return seq.handle

    def _count_lookup(self, tokens: int, hit: int, again: bool) -> None:
        """Count a prompt that was looked up; those of sequences that were open before count apart."""
        for name, count in (("queries", 1), ("query_tokens", tokens), ("hit_tokens", hit)):
            self._use[f"again_{name}" if again else name] += count

    # ---- committing ---------------------------------------------------------------------------------------

    def _done_length(self, seq: Sequence) -> int:
        """Tokens that no pending step has still to write.

        A sequence that was forked in the middle of a step has what its parent had done, until that step passes.
        """
        pending = [row.old_length for step in self._pending for row in step.rows if row.handle == seq.handle]
        if seq.forked_in is not None and any(step.id == seq.forked_in[0] for step in self._pending):
            pending.append(seq.forked_in[1])
        return min([seq.num_tokens, *pending])

    def _fork_in(self, parent: Sequence) -> tuple[int, int] | None:
        """The newest pending step that what a child has may wait for, and how much the parent has done."""
        steps = [step.id for step in self._pending for row in step.rows if row.handle == parent.handle]
        if parent.forked_in is not None and any(step.id == parent.forked_in[0] for step in self._pending):
            steps.append(parent.forked_in[0])
        return (max(steps), self._done_length(parent)) if steps else None

    def _row_counts(self, counts: Any, num_rows: int, num_tokens: int) -> list[int]:
        if counts is None:
            if num_tokens % max(1, num_rows) or (num_tokens and not num_rows):
                raise ValueError(f"[commit] {num_tokens} tokens for {num_rows} rows, give counts")
            return [num_tokens // max(1, num_rows)] * num_rows
        batch = args.per_row("commit", "counts", counts, num_rows)
        if sum(batch) != num_tokens:
            raise ValueError(f"[commit] counts sum up to {sum(batch)}, there are {num_tokens} tokens")
        return batch

    def _said(self) -> dict[Any, tuple[int, ...]]:
        """What was said of each block."""
        return dict(self._block_tokens)

    def _commit_from(self, seq: Sequence, first: int) -> None:
        """Blocks of a row from `first` on are known now."""
        for i in range(first, len(seq.tokens) // self.block_size):
            self._commit_block(seq.table[i], self._block_of(seq.tokens, i))
        self._publish(seq)

    def _refuse_commit(self, seq: Sequence, row: list[int], told: dict[Any, tuple[int, ...]]) -> None:
        """Refuse tokens that are not computed, or that contradict what was `told` of a block; adds to `told`."""
        known = seq.tokens + row
        if row and seq.evicted:
            raise ValueError(f"[commit] tokens were evicted from {seq.handle}, it commits no more")
        if row and len(known) > self._done_length(seq):
            raise ValueError(
                f"[commit] {len(known)} tokens would be committed, {self._done_length(seq)} are done ({seq.handle})"
            )
        for i in range(len(seq.tokens) // self.block_size, len(known) // self.block_size):
            if told.setdefault(seq.table[i], self._block_of(known, i)) != self._block_of(known, i):
                raise ValueError(f"[commit] block {seq.table[i]} was committed with other tokens ({seq.handle})")

    def _forget_tokens(self, seq: Sequence, left: int) -> None:
        """Cut into a committed block, a row goes on from what that holds, whatever it said of a copy since undone."""
        (whole, tail), full = divmod(left, self.block_size), len(seq.tokens) // self.block_size
        super()._forget_tokens(seq, left)
        if tail and whole < full and seq.table[whole] in self._committed:
            seq.tokens[-tail:] = self._block_tokens[seq.table[whole]][:tail]

    def _commit_block(self, block: int, tokens: tuple[int, ...]) -> None:
        """The block is full and known: immutable from now on, and held back until a row publishes it."""
        if block not in self._committed:  # else shared, and committed by another sequence
            self._committed.add(block)
            self._held_back.add(block)
            self._block_tokens[block] = tokens

    def _publish(self, seq: Sequence) -> None:
        """Offer the index the blocks of a row, in order, as far as it can be certain of their content."""
        unwritten = {dst for step in self._pending for _, dst, _ in step.copies}
        while seq.published < len(seq.tokens) // self.block_size:
            block = seq.table[seq.published]
            is_held = block in self._held_back
            if block not in self._committed or (is_held and block in unwritten):
                return
            if is_held:
                self._held_back.remove(block)
                self._index(seq, seq.published)
            seq.published += 1

    def _publish_waiting(self) -> None:
        """A step has passed: what waited for it is published, rows in the order of their slots."""
        for _, seq in sorted(self._sequences.items()):
            self._publish(seq)

    def _index(self, seq: Sequence, i: int) -> None:
        block, tokens = seq.table[i], self._block_of(seq.tokens, i)
        parent = self._parent(seq, i)
        if seq.root is None or parent is None:
            return
        node = self._nodes.get((parent, tokens))
        if node is None:
            self._hold_canonicals(seq, i)
            parent = self._parent(seq, i)
            if parent is None:
                return
            node = self._nodes.get((parent, tokens))
        if node is None:
            self._insert(seq, i)
        else:
            self._stands_for[block] = node.uid
            self._use["duplicates"] += 1

    def _parent(self, seq: Sequence, i: int) -> int | None:
        return self._stands_for.get(seq.table[i - 1]) if i else seq.root

    def _is_duplicate(self, block: int) -> bool:
        return block in self._stands_for and self._block_node(block) is None

    def _hold_canonicals(self, seq: Sequence, at: int) -> None:
        """A node is due below ``table[at - 1]``: the duplicates above it must not lose their nodes any more."""
        first = at
        while first and self._is_duplicate(seq.table[first - 1]):
            first -= 1
        is_broken = False
        for i in range(first, at):
            block = seq.table[i]
            node = self._uid_node(self._stands_for[block])
            is_broken = is_broken or node is None
            if is_broken:  # the canonical block is gone: the chain goes by what is indexed now
                parent = self._parent(seq, i)
                if parent is None:  # above it is a copy that `unshare` made
                    del self._stands_for[block]
                    continue
                node = self._nodes.get((parent, self._block_of(seq.tokens, i)))
                if node is None:
                    self._insert(seq, i)
                    continue
                self._stands_for[block] = node.uid
            assert node is not None
            if block not in self._held_canonicals:
                self._held_canonicals[block] = node.block
                self._touch(node.block)

    def _insert(self, seq: Sequence, i: int) -> None:
        parent, tokens, block = self._parent(seq, i), self._block_of(seq.tokens, i), seq.table[i]
        assert parent is not None and seq.root is not None
        namespace = next(name for name, root in self._roots.items() if root == seq.root)
        above = self._uid_node(parent)
        before = above.key if above else hashlib.sha256(namespace).digest()[:16]
        key = hashlib.sha256(before + np.array(tokens, "<i4").tobytes()).digest()[:16]
        node = Node(self._new_uid(), seq.root, block, key)
        self._nodes[parent, tokens] = node
        self._stands_for[block] = node.uid
        self._use["inserted"] += 1
        self._note("stored", key, above.key if above else None, tokens, self.block_size, namespace)

    # ---- releasing and forgetting -------------------------------------------------------------------------

    def _names(self) -> list[int]:
        return super()._names() + list(self._held_canonicals.values())

    def _release(self, block: int) -> None:
        super()._release(block)
        if block in self._held_canonicals and not self._refcount(block) and block not in self._holds:
            self._release(self._held_canonicals.pop(block))

    def _leave(self, block: int) -> None:
        if self.options.prefix_cache and self._block_node(block) is None:
            self._blank_committed(block)
            self._blank.append(block)
            return
        self._cached_at[block] = self._counters["allocs"]
        super()._leave(block)

    def _blank_committed(self, block: int) -> None:
        """The block's content is of no use any more."""
        self._committed.discard(block)
        self._held_back.discard(block)
        self._stands_for.pop(block, None)
        self._block_tokens.pop(block, None)
        self._cached_at.pop(block, None)

    def _forget(self, node: Node) -> None:
        self._nodes = {key: other for key, other in self._nodes.items() if other is not node}

    def _evict_oldest(self) -> int:
        block = super()._evict_oldest()
        if self.options.prefix_cache:
            self._dropped.remove(block)
            node = self._block_node(block)
            assert node is not None
            self._forget(node)
            self._blank_committed(block)
            self._use["evicted"] += 1
            self._note("removed", node.key)
        return block

    def _take_over(self, seq: Sequence, n: int) -> None:
        if self.options.prefix_cache and seq.root is None:  # flushed meanwhile: what it has is of other weights
            self._shorten(seq, 0)
        else:
            super()._take_over(seq, n)

    def _flush(self, namespace: bytes | None) -> int:
        roots = [root for name, root in self._roots.items() if namespace in (None, name)]
        gone = [node for node in self._nodes.values() if node.root in roots]
        blank = [block for block in self._lru if any(node.block == block for node in gone)]
        order = blank + sorted(node.block for node in gone)
        gone = sorted(gone, key=lambda node: order.index(node.block))
        for node in gone:
            self._forget(node)
            self._note("removed", node.key)
        for seq in self._sequences.values():
            if seq.root in roots:
                seq.root = None
        for block in blank:
            self._lru.remove(block)
            self._blank_committed(block)
            self._blank.append(block)
        uids = [node.uid for node in gone]
        self._stands_for = {block: uid for block, uid in self._stands_for.items() if uid not in uids}
        self._note("cleared", namespace)
        self._chain("flush", namespace, *blank)
        return len(blank)

    @public_call
    def reset(self) -> None:
        """Forget everything; the generations and the counters of use go on."""
        if self.options.prefix_cache:
            self._flush(None)
        self._reset()
        if self.options.prefix_cache:
            self._dropped.clear()

    # ---- events and statistics ----------------------------------------------------------------------------

    def _note(self, *event: Any) -> None:
        self._lost_events += len(self._events) == self._events.maxlen
        self._events.append(event)

    def _prefix_state(self) -> dict[str, Any]:
        return {
            "roots": dict(self._roots),
            "nodes": {key: (node.uid, node.block) for key, node in self._nodes.items()},
            "stands_for": dict(self._stands_for),
            "held_back": sorted(self._held_back),
            "held_canonicals": dict(self._held_canonicals),
            "sequences": [(seq.root, list(seq.tokens), seq.published) for _, seq in sorted(self._sequences.items())],
            "use": dict(self._use),
        }

    def _check_prefix(self) -> None:
        canonical = [node.block for node in self._nodes.values()]
        if len(set(canonical)) != len(canonical) or not set(canonical) <= self._committed:
            raise CorruptState(f"[check] nodes without a block of their own: {sorted(canonical)}")
        unwritten = {dst for step in self._pending for _, dst, _ in step.copies}
        if unwritten & set(canonical):
            raise CorruptState(f"[check] indexed before it is written: {sorted(unwritten & set(canonical))}")
        if not self._held_back <= self._committed - set(canonical):
            raise CorruptState(f"[check] held back, but indexed or not committed: {sorted(self._held_back)}")
        if self.options.prefix_cache and not set(self._lru) <= set(canonical):
            raise CorruptState("[check] the LRU has a block that is not indexed")
        for seq in self._sequences.values():
            if len(seq.tokens) > seq.num_tokens:
                raise CorruptState(f"[check] more tokens are committed than there are ({seq.handle})")
            if seq.published > len(seq.tokens) // self.block_size:
                raise CorruptState(f"[check] more blocks are published than committed ({seq.handle})")

    @property
    def prefix(self) -> Part | None:
        """The prefix cache; None in a pool that has none."""
        return Part(self, "prefix") if self.options.prefix_cache else None

    @public_call
    def _prefix_match(self, tokens: Any, namespace: bytes = b"") -> int:
        """Return how many tokens of the prompt `open` would find."""
        prompt = args.tokens("match", tokens)
        return len(self._prompt_hits(prompt, args.namespace("match", namespace))) * self.block_size

    @public_call
    def _prefix_pin(self, tokens: Any, namespace: bytes = b"") -> int:
        """Open a sequence that holds the cached blocks of a prefix, all of them; returns its handle."""
        prefix = args.tokens("pin", tokens)
        self._refuse_too_long("pin", prefix)
        hits = self._hits(prefix, args.namespace("pin", namespace), len(prefix) // self.block_size)
        self._refuse_slots("pin", 1)
        seq = self._open_hits(hits, prefix, namespace, 0)
        self._chain("pin", prefix, namespace, self._local(seq.handle), *seq.table)
        return seq.handle

    @public_call
    def _prefix_unpin(self, handle: int) -> None:
        """Close a sequence that `pin` opened."""
        self._close(self._one("unpin", handle, True))

    @public_call
    def _prefix_commit(self, handles: Any, tokens: Any, counts: Any = None) -> None:
        """Make the tokens of computed positions known; the blocks that become full can be found."""
        names = args.handles("commit", handles)
        given = args.tokens("commit", tokens)
        lengths = self._row_counts(counts, len(names), len(given))
        batch = [self._sequence("commit", name) for name in names]
        rows = []
        told = self._said()  # as if the rows before had been committed
        for seq, count in zip(batch, lengths, strict=True):
            row, given = given[:count], given[count:]
            self._refuse_commit(seq, row, told)
            rows.append(row)
        for seq, row in zip(batch, rows, strict=True):
            first = len(seq.tokens) // self.block_size
            seq.tokens += row
            self._commit_from(seq, first)
        self._chain("commit", *map(self._local, names), *rows)

    @public_call
    def _prefix_committed(self, handle: int) -> int:
        """Return the committed length of a sequence: where the next `commit` goes on."""
        return len(self._one("committed", handle, True).tokens)

    @public_call
    def _prefix_wanted(self, handles: Any) -> np.ndarray:
        """Return the next position of each row at which a step should end, -1: none; int64 ``[S]``."""
        return np.full(len(self._batch("wanted", handles)), -1, np.int64)

    @public_call
    def _prefix_flush(self, namespace: bytes | None = None) -> int:
        """Forget every node of a namespace, or of all; returns how many blocks became blank."""
        if namespace is not None:
            args.namespace("flush", namespace)
        if namespace is not None and namespace not in self._roots:
            self._note("cleared", namespace)
        return self._flush(namespace) if namespace in (None, *self._roots) else 0

    @public_call
    def _prefix_events(self) -> list[tuple]:
        """Return and forget the events, oldest first."""
        lost = [("lost", self._lost_events)] if self._lost_events and self._events.maxlen else []
        events = lost + list(self._events)
        self._events.clear()
        self._lost_events = 0
        return events

    @public_call
    def _prefix_stats(self) -> PrefixStats:
        """Return the counters of the prefix cache."""
        return PrefixStats(
            hit_rate=self._use["hit_tokens"] / max(1, self._use["query_tokens"]),
            nodes=len(self._nodes),
            namespaces=len(self._roots),
            reuse_gap=sum(self._gaps) / max(1, len(self._gaps)),
            **self._use,
        )


class StepModel(PrefixModel):
    """`PrefixModel` with steps: a whole pool with one table per sequence."""

    def __init__(self, *sizes: Any, lookahead: int = 0, **options: Any) -> None:
        args.integer("Pool", "lookahead", lookahead, 0)
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
        names = args.handles("compact", handles)
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
        places = args.one_or_many("evict_blocks", "indices", indices, ("int32", "int64"))
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
            shared=sum(count > 1 for count in one._references().values()),
            sequences=len(seqs),
            pending=len(self._pending),
            tokens=tokens,
            capacity=capacity,
            fragmentation=1.0 - tokens / capacity if capacity else 0.0,
            **one._figures() | {"evicted_tokens": self._counters["evicted_tokens"]},
        )

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
            "refcounts": dict(sorted(self._references().items())),
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
        used = self._references().keys() | set(self._holds)
        places = self._blank + self._lru + [block for block, _ in self._limbo] + list(used)
        if sorted(places) != list(range(self.options.reserved_blocks, self.num_blocks)):
            raise CorruptState(f"[check] a block is in no place or in two: {sorted(places)}")
        if sorted(self._holds) != sorted(b for step in self._pending for b in step.held()):
            raise CorruptState("[check] holds differ from what the pending steps replaced")
        if set(self._blank) & self._committed:  # the LRU may have blocks that `uncache` left in their place
            raise CorruptState("[check] the blank stack has a committed block")
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
