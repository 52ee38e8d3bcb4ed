"""The prefix half of `kvpool.testing.model`: which committed blocks are indexed, and who finds them.

It follows ``docs/prefix.md`` and has no hash: a node is an entry of a dict under (uid of its parent, its tokens), and
everything else (which block is canonical, who is alive) is looked up there when it is needed. A block that `commit`
filled is *held back* until its row may publish it: nobody finds it, and what is behind it waits.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpool.errors import CapacityExceeded, CorruptState
from kvpool.stats import PrefixStats
from kvpool.testing import model_args as args
from kvpool.testing.model_arena import Part, public_call
from kvpool.testing.model_blocks import SequenceModel, ceil_div
from kvpool.testing.model_plan import Sequence


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
        self._sweep_at = 1024  # namespaces
        self._use = dict.fromkeys(("queries", "query_tokens", "hit_tokens", "inserted", "duplicates", "evicted"), 0)
        self._gaps: list[int] = []  # blocks taken between a release and a revival, one entry per revival
        self._events: deque[tuple] = deque(maxlen=events)
        self._lost_events = 0
        super().__init__(*sizes, **options)
        self.options = self.options._replace(prefix_cache=prefix_cache, events=events)

    def _empty(self) -> None:
        super()._empty()
        self._roots: dict[bytes, int] = {}  # namespace -> uid of its root
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
        """Return the uid of a namespace's root; a namespace that is used again after a flush gets a new one."""
        if namespace not in self._roots:
            if len(self._roots) >= self._sweep_at:
                self._sweep_namespaces()
            self._roots[namespace] = self._new_uid()
        return self._roots[namespace]

    def _sweep_namespaces(self) -> None:
        """Forget the namespaces without a node and without an open sequence."""
        live = {node.root for node in self._nodes.values()} | {seq.root for seq in self._sequences.values()}
        self._roots = {name: root for name, root in self._roots.items() if root in live}
        self._sweep_at = max(1024, 2 * len(self._roots))

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

    @public_call
    def open(self, tokens: Any = 0, namespace: bytes = b"", *, load: bool = False) -> int:
        """Open a sequence for a prompt, or with blocks for a number of tokens; returns its handle."""
        args.boolean("open", "load", load)
        args.namespace("open", namespace)
        if not isinstance(tokens, list | tuple | np.ndarray | str | bytes):
            seq = self._open_blank(tokens)
            seq.root, seq.is_loading = self._root(namespace), load
            return seq.handle
        prompt = args.tokens("open", tokens)
        num_blocks = self._refuse_too_long("open", prompt)
        hits = self._prompt_hits(prompt, namespace)
        need = num_blocks - len(hits)
        lost = len(set(hits) & set(self._lru))
        if need and need + self.options.watermark > self._available() - lost:
            self._out_of_blocks("open", need, self.options.watermark, lost=lost)
        self._refuse_slots("open", 1)
        seq = self._open_hits(hits, prompt, namespace, need)
        seq.is_loading = load
        if self.options.prefix_cache and not load:
            self._use["queries"] += 1
            self._use["query_tokens"] += len(prompt)
            self._use["hit_tokens"] += seq.num_tokens
        self._chain("open", prompt, namespace, self._local(seq.handle), *seq.table)
        return seq.handle

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

    def _refcount(self, block: int) -> int:
        return super()._refcount(block) + list(self._held_canonicals.values()).count(block)

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
        self._roots = {name: root for name, root in self._roots.items() if root not in roots}
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
        names = args.handles("commit", handles, alone=True)
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
