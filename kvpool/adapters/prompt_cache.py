"""`PromptCache`: a prompt cache for engines that keep mlx-lm's dense caches. docs/prompt-cache.md is the page.

Keys and values of every token lie in blocks of 16 tokens, one array of MLX each, that all prompts share. A pool with a
prefix cache is the index: a block's id names its array.
"""

from __future__ import annotations

import os
import struct
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ChunkedKVCache, can_trim_prompt_cache

import kvpool
from kvpool.adapters.dense_caches import (
    BLOCK,
    PER_TOKEN,
    STATES,
    CacheLayout,
    caches_of,
    copied,
    evaluate,
    layout_of,
    leaves_of,
    nbytes_of,
    owned,
    rows_of,
    shared,
    single,
)
from kvpool.adapters.prompt_store import PromptStore
from kvpool.store import BlockStore

TYPES = ("assistant", "user", "system")
"""Types of sequences, as in mlx-lm: what leaves first where `max_size` or `trim_to` counts them."""

_MAX_TOKEN = 2**30 - 1  # numbers above stand for media
_MAX_ATOM = 2**31 - 1
_UNKNOWN = _MAX_TOKEN + 1  # of media that were never inserted; no others get as far
_MAX_BLOCKS = 1 << 20
_MAX_SEQUENCES = 4096
_RECENT = 32  # sequences that a new one is compared with before the index is asked


@dataclass(eq=False)
class _Sequence:
    """An inserted sequence: an open row of the pool, and the caches that are valid at its end only.

    `parent` is its last full block (or the namespace), `tokens` are all its tokens.
    """

    shelf: _Shelf
    handle: int
    namespace: bytes
    parent: int | bytes
    tokens: np.ndarray
    kind: str
    kept: list[Any]
    nbytes: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    @property
    def tail(self) -> np.ndarray:
        """The tokens behind the last full block."""
        return self.tokens[self.length - self.length % BLOCK :]


@dataclass(eq=False)
class _Shelf:
    """The sequences of one layout.

    `rows`, `tokens` and `parents` tell of each block in use. `after` lists the blocks behind a block, `ends` the
    sequences that end behind it, before a whole block is full; `is_end` says which blocks have any.
    """

    layout: CacheLayout
    pool: kvpool.Pool
    plan: kvpool.Plan
    is_end: np.ndarray
    rows: dict[int, mx.array] = field(default_factory=dict)
    tokens: dict[int, np.ndarray] = field(default_factory=dict)
    parents: dict[int, int | bytes] = field(default_factory=dict)
    after: dict[int | bytes, dict[int, None]] = field(default_factory=dict)
    ends: dict[int | bytes, list[_Sequence]] = field(default_factory=dict)

    @property
    def prefix(self) -> Any:
        """The index of whole blocks."""
        return self.pool.prefix

    @property
    def is_dense(self) -> bool:
        """Whether every cache is one of keys and values per token: any prefix can be cut from them."""
        return all(leaf.parts for leaf in self.layout.leaves)

    def can_cut(self, kept: Sequence[Any]) -> bool:
        """Whether a shorter prefix can be made of a sequence with these caches kept whole."""
        if self.is_dense or self.layout.row_nbytes or any(type(cache) is ChunkedKVCache for cache in kept):
            return self.is_dense
        return can_trim_prompt_cache(list(kept))


class _Hit(NamedTuple):
    """`length` tokens that a shelf has: whole blocks, then a part of the last one."""

    length: int
    shelf: _Shelf
    blocks: list[int]
    sequence: _Sequence | None


class PromptCache:
    """Prefixes of prompts for engines that keep mlx-lm's own caches::

        prompts = PromptCache(max_bytes=8 << 30)
        caches, n = prompts.fetch(tokens)
        caches = caches or make_prompt_cache(model)
        ...                                    # the model computes tokens[n:] and the answer
        prompts.insert([*tokens, *answer[:-1]], caches)   # the last one was not computed into the caches

    It has the methods of mlx-lm's `LRUPromptCache` too, so it can take its place.

    Parameters
    ----------
    max_bytes : int
        Most bytes of MLX arrays that it holds.
    store : BlockStore, optional
        Keeps prompts when this process ends. Its layout is that of `store_layout`. The caller closes it.
    max_size : int, optional
        Most sequences. By default as many as fit.
    checkpoint_bytes : int, optional
        Most bytes of caches that are kept whole, out of `max_bytes`. By default there is no such limit. A prompt with
        more of them is neither kept nor stored.

    Notes
    -----
    Any thread may call any method. What `fetch` returns belongs to the caller; what `insert` is given stays the
    caller's.
    """

    def __init__(
        self,
        max_bytes: int = 1 << 63,
        *,
        store: BlockStore | None = None,
        max_size: int | None = None,
        checkpoint_bytes: int | None = None,
    ) -> None:
        for name, value in (("max_bytes", max_bytes), ("max_size", max_size), ("checkpoint_bytes", checkpoint_bytes)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise TypeError(f"[PromptCache] {name} must be an int, got {type(value).__name__}")
            if value is not None and value < 0:
                raise ValueError(f"[PromptCache] {name} is {value}, it must not be negative")
        self.max_bytes = max_bytes
        self.max_size = _MAX_SEQUENCES if max_size is None else min(max_size, _MAX_SEQUENCES)
        self.checkpoint_bytes = max_bytes if checkpoint_bytes is None else checkpoint_bytes
        self._stored = None if store is None else PromptStore(store)
        self._lock = threading.RLock()
        self._shelves: dict[CacheLayout, _Shelf] = {}
        self._order: dict[str, OrderedDict[int, _Sequence]] = {kind: OrderedDict() for kind in TYPES}
        self._nbytes = 0
        self._kept_nbytes = 0
        self._names: dict[Hashable, bytes] = {}
        self._salt = os.urandom(16)
        self._atoms: dict[Hashable, int] = {}

    # -------------------------------------------------------------------------------------- fetch and insert

    def fetch(
        self, tokens: Sequence[int], namespace: bytes = b"", *, media: Sequence[tuple[int, int, Hashable]] = ()
    ) -> tuple[list[Any] | None, int]:
        """Return caches with the longest prefix of a prompt that is known, and its length.

        At least one token is left to compute. Without any prefix the caches are None.

        Parameters
        ----------
        tokens : sequence of int
            The whole prompt. Negative numbers stand for the tokens of an image, as in mlx-lm's server.
        namespace : bytes
            Of `kvpool.namespace`. Only prompts of one namespace share anything.
        media : sequence of (start, stop, digest)
            Spans of images and other media. A prefix never ends inside one, and has it only with an equal digest and
            length.
        """
        return self._fetch(tokens, namespace, media, False)

    def insert(
        self,
        tokens: Sequence[int],
        caches: Sequence[Any],
        namespace: bytes = b"",
        *,
        media: Sequence[tuple[int, int, Hashable]] = (),
        cache_type: str = "assistant",
    ) -> None:
        """Copy what is new in the caches of one sequence.

        Parameters
        ----------
        tokens : sequence of int
            All tokens of the sequence. Those behind the caches' own length are ignored. Caches without an offset
            (`ArraysCache` alone) must be at the end of `tokens`.
        caches : list
            One sequence, any class. Other than keys and values per token, a cache can be used only where the sequence
            ends.
        namespace, media
            As for `fetch`.
        cache_type : str
            ``"assistant"``, ``"user"`` or ``"system"``.
        """
        if cache_type not in TYPES:
            raise ValueError(f"[insert] cache_type is {cache_type!r}, it must be one of {', '.join(TYPES)}")
        known, spans = self._known("insert", tokens, media)
        leaves, tree = leaves_of([single(cache) for cache in caches])
        offsets = [cache.offset for cache in leaves if type(cache) in PER_TOKEN]
        offsets = offsets or [cache.offset for cache in leaves if type(cache) in STATES and hasattr(cache, "offset")]
        length = min(len(known), max(offsets, default=len(known)))
        layout = layout_of(leaves, tree, max(offsets, default=0))
        kept = [cache for cache, leaf in zip(leaves, layout.leaves, strict=True) if not leaf.parts]
        evaluate(leaves)
        places = {getattr(cache, "offset", length) for cache in kept if type(cache) in STATES}
        if kept and (max(offsets, default=length) != length or places - {length} or (offsets and not length)):
            return  # empty, or a state of another position: that says nothing about these tokens
        known = known[:length]
        with self._lock:
            shelf = self._shelf(layout)
            rows = lambda begin, end: rows_of(layout, leaves, begin, end)  # noqa: E731
            one = self._insert(shelf, known, rows, kept, namespace, cache_type)
            if self._stored is None or one is None or layout != self._stored.layout:
                return
            held = [shelf.rows[block] for block in shelf.pool.table(one.handle).tolist()]
        text = known[: min((start for start, _ in spans), default=one.length)]
        self._stored.put(text[: one.length], held, None if spans else kept, namespace)

    def fetch_nearest_cache(self, model: Hashable, tokens: Sequence[int]) -> tuple[list[Any] | None, Sequence[int]]:
        """Return caches and the tokens to compute, as mlx-lm's `LRUPromptCache`."""
        caches, length = self._fetch(tokens, self._namespace(model), (), True)
        return caches, tokens[length:]

    def insert_cache(
        self, model: Hashable, tokens: Sequence[int], prompt_cache: Sequence[Any], *, cache_type: str = "assistant"
    ) -> None:
        """Insert as mlx-lm's `LRUPromptCache`. The caches are copied, not kept."""
        self.insert(tokens, prompt_cache, self._namespace(model), cache_type=cache_type)

    # ------------------------------------------------------------------------------------------------- sizes

    def __len__(self) -> int:
        """Number of sequences. Blocks of others may be known still."""
        return sum(map(len, self._order.values()))

    def __bool__(self) -> bool:
        """True, empty or not."""
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that it holds."""
        return self._nbytes

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Let sequences go until there are at most so many, with at most so many bytes in all."""
        with self._lock:
            if n_sequences is not None:
                self._trim_sequences(max(0, n_sequences))
            if n_bytes is not None:
                self._make_room(self.max_bytes - max(0, n_bytes))

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Return sequences and bytes per type. A shared block counts for the first type that has it."""
        with self._lock:
            seen: dict[_Shelf, set[int]] = {shelf: set() for shelf in self._shelves.values()}
            stats = {}
            for kind, order in self._order.items():
                nbytes = 0
                for one in order.values():
                    fresh = set(one.shelf.pool.table(one.handle).tolist()) - seen[one.shelf]
                    seen[one.shelf] |= fresh
                    nbytes += one.nbytes + sum(one.shelf.rows[block].nbytes for block in fresh)
                stats[kind] = {"n_sequences": len(order), "n_bytes": nbytes}
            return stats

    # ------------------------------------------------------------------------------------------------- fetch

    def _fetch(
        self, tokens: Sequence[int], namespace: bytes, media: Sequence[tuple[int, int, Hashable]], whole: bool
    ) -> tuple[list[Any] | None, int]:
        known, spans = self._known("fetch", tokens, media)
        if self._stored is not None:
            text = min((start + 1 for start, _ in spans), default=None)  # a span leaves more than one token to compute
            self._load(self._stored, known[:text], namespace)
        with self._lock:
            hits = [self._longest(shelf, known, namespace, spans, whole) for shelf in self._shelves.values()]
            hit = max((hit for hit in hits if hit is not None), key=lambda hit: hit.length, default=None)
            if hit is None:
                return None, 0
            if hit.sequence is not None:
                self._order[hit.sequence.kind].move_to_end(id(hit.sequence))
            rows = [hit.shelf.rows[block] for block in hit.blocks]
            kept = [] if hit.shelf.is_dense or hit.sequence is None else hit.sequence.kept
            excess = hit.sequence.length - hit.length if kept and hit.sequence is not None else 0
        return caches_of(hit.shelf.layout, rows, [copied(cache, shared) for cache in kept], hit.length, excess)

    def _load(self, stored: PromptStore, known: np.ndarray, namespace: bytes) -> None:
        """Insert the part of a prompt that the store has and the cache lacks. Other calls do not wait for the store."""
        with self._lock:
            shelf = self._shelf(stored.layout)
            hit = self._longest(shelf, known, namespace, [], False)
            begin = self._whole(shelf, known, namespace)
        least = 0 if hit is None else hit.length
        found = stored.longest(known, begin, least, namespace)
        if found is None:
            return
        with self._lock:
            if self._whole(shelf, known, namespace) >= begin:
                rows = lambda first, end: iter(found.rows[(first - begin) // BLOCK :])  # noqa: E731
                self._insert(shelf, known[: found.length], rows, found.kept, namespace, "assistant")

    @staticmethod
    def _whole(shelf: _Shelf, known: np.ndarray, namespace: bytes) -> int:
        """Return how many tokens of a prompt the index has, in whole blocks."""
        handle = shelf.prefix.pin(known, namespace)
        length = shelf.pool.num_tokens(handle)
        shelf.prefix.unpin(handle)
        return length

    def _longest(
        self, shelf: _Shelf, known: np.ndarray, namespace: bytes, spans: list[tuple[int, int]], whole: bool
    ) -> _Hit | None:
        handle = shelf.prefix.pin(known, namespace)  # what it holds becomes the most recent
        blocks = shelf.pool.table(handle).tolist()
        shelf.prefix.unpin(handle)
        for count in range(len(blocks), -1, -1):
            parent = blocks[count - 1] if count else namespace
            behind = known[count * BLOCK : (count + 1) * BLOCK]
            for one in shelf.ends.get(parent, ()) if whole else ():
                if one.length == len(known) and np.array_equal(one.tail, behind):
                    return _Hit(len(known), shelf, shelf.pool.table(one.handle).tolist(), one)
            hit = self._behind(shelf, known, count, parent, spans)
            if hit is not None:
                return hit if shelf.is_dense else hit._replace(blocks=blocks[:count] + hit.blocks)
            if shelf.is_dense:
                return self._cut(shelf, known, namespace, blocks, spans)
        return None

    def _behind(
        self, shelf: _Shelf, known: np.ndarray, count: int, parent: int | bytes, spans: list[tuple[int, int]]
    ) -> _Hit | None:
        """Return the longest hit of a sequence that is kept whole and ends behind `parent`."""
        best = None
        behind = known[count * BLOCK : (count + 1) * BLOCK]
        for one in shelf.ends.get(parent, ()) if not shelf.is_dense else ():
            common = _common(one.tail, behind)
            length = min(count * BLOCK + common, len(known) - 1)
            can_cut = shelf.can_cut(one.kept)
            fits = length == one.length or (can_cut and common > 0)
            is_longer = best is None or length > best.length
            if fits and is_longer and (length or can_cut) and _outside(length, spans) == length:
                best = _Hit(length, shelf, shelf.pool.table(one.handle).tolist()[count:], one)
        return best

    def _cut(
        self, shelf: _Shelf, known: np.ndarray, namespace: bytes, blocks: list[int], spans: list[tuple[int, int]]
    ) -> _Hit | None:
        """Return the longest hit of keys and values per token: whole blocks, and the beginning of one more."""
        length = len(blocks) * BLOCK
        behind = known[length : length + BLOCK]
        nearest, common = None, 0
        for block in shelf.after.get(blocks[-1] if blocks else namespace, ()):
            if (same := _common(shelf.tokens[block], behind)) > common:
                nearest, common = block, same
        if nearest is not None:
            blocks = [*blocks, nearest]
        length = _outside(max(0, min(length + common, len(known) - 1)), spans)
        blocks = blocks[: -(-length // BLOCK)]
        used = next((one for one in shelf.ends.get(blocks[-1], ()) if blocks), None) if length else None
        return _Hit(length, shelf, blocks, used) if length else None

    # ------------------------------------------------------------------------------------------------ insert

    def _insert(
        self,
        shelf: _Shelf,
        known: np.ndarray,
        rows: Callable[[int, int], Iterator[mx.array]],
        kept: Sequence[Any],
        namespace: bytes,
        kind: str,
    ) -> _Sequence | None:
        """Make a sequence of tokens, of which ``rows(begin, end)`` has the new ones.

        None: there is no room for it, or it was dropped again.
        """
        pool, row_nbytes = shelf.pool, shelf.layout.row_nbytes
        nbytes = sum(nbytes_of(cache) for cache in kept)
        handle = self._opened(shelf, known, namespace)
        try:
            begin = pool.num_tokens(handle)
            for one in self._replaced(shelf, known, pool.table(handle), namespace, kept):
                self._drop(one)
            if kept and nbytes > min(self.checkpoint_bytes, self.max_bytes - row_nbytes * len(known)):
                pool.close(handle)
                return None
            while self._kept_nbytes + nbytes > self.checkpoint_bytes:
                self._drop(next(one for order in self._order.values() for one in order.values() if one.nbytes))
            length = len(known)
            if nbytes + row_nbytes * length > self.max_bytes:
                length = max(begin, self.max_bytes // row_nbytes // BLOCK * BLOCK)
            length = min(length, pool.num_blocks * BLOCK)
            count = -(-(length - begin) // BLOCK)
            self._make_room(row_nbytes * (length - begin) + nbytes, shelf, count)
            copies = list(islice(rows(begin, length), count))  # what may fail comes before the pool changes
            ours = [copied(cache, owned) for cache in kept]
            pool.step(shelf.plan, [handle], length - begin)
        except BaseException:
            pool.close(handle)
            raise
        full = length - length % BLOCK
        shelf.prefix.commit(handle, known[begin:full])
        table = pool.table(handle)
        parent: int | bytes = int(table[begin // BLOCK - 1]) if begin else namespace
        starts, blocks = range(begin, length, BLOCK), table[begin // BLOCK :].tolist()
        for start, block, row in zip(starts, blocks, copies, strict=True):
            self._put(shelf, block, parent, known[start : min(start + BLOCK, length)], row)
            parent = block
        last = int(table[full // BLOCK - 1]) if full else -1
        parent = last if full else namespace
        one = _Sequence(shelf, handle, namespace, parent, known[:length], kind, ours, nbytes)
        shelf.ends.setdefault(parent, []).append(one)
        if full:
            shelf.is_end[last] = True
        self._order[kind][id(one)] = one
        self._nbytes += nbytes
        self._kept_nbytes += nbytes
        self._trim_sequences(self.max_size)
        return one if id(one) in self._order[kind] else None

    def _opened(self, shelf: _Shelf, known: np.ndarray, namespace: bytes) -> int:
        """Open a row of the pool with the whole blocks that are known.

        The next turn of a recent sequence is a fork of it. To compare tokens takes a tenth of the time of the index.
        """
        for order in self._order.values():
            for one in islice(reversed(order.values()), _RECENT):
                least = min(one.length, len(known))
                probe = least * 7 // 8
                if (
                    not least
                    or known[probe] != one.tokens[probe]
                    or one.shelf is not shelf
                    or one.namespace != namespace
                ):
                    continue
                begin = _common(known, one.tokens) // BLOCK * BLOCK
                if begin <= probe:
                    continue
                table, following = shelf.pool.table(one.handle), known[begin : begin + BLOCK]
                behind = shelf.after.get(int(table[begin // BLOCK - 1]), ())
                if not any(np.array_equal(shelf.tokens[block], following) for block in behind):
                    (handle,) = shelf.pool.fork(one.handle).tolist()
                    shelf.pool.truncate(handle, begin)
                    return handle
        full = len(known) - len(known) % BLOCK
        more = known[: full + 1] if full < len(known) else np.append(known, np.int32(0))  # one is never a hit
        return shelf.pool.open(more, namespace, reserve=False)

    def _put(self, shelf: _Shelf, block: int, parent: int | bytes, tokens: np.ndarray, row: mx.array) -> None:
        shelf.rows[block] = row
        shelf.tokens[block] = tokens.copy()
        shelf.parents[block] = parent
        shelf.after.setdefault(parent, {})[block] = None
        self._nbytes += row.nbytes

    def _replaced(
        self, shelf: _Shelf, known: np.ndarray, table: np.ndarray, namespace: bytes, kept: Sequence[Any]
    ) -> list[_Sequence]:
        """Return the sequences that a new one makes useless: the same tokens, or a prefix of what can be cut."""
        can_cut = shelf.can_cut(kept)
        found = []
        for parent in (namespace, *table[shelf.is_end[table]].tolist()):
            for one in shelf.ends.get(parent, ()):
                same = np.array_equal(one.tail, known[one.length - len(one.tail) : one.length])
                if same and (can_cut or one.length == len(known)):
                    found.append(one)
        return found

    # ------------------------------------------------------------------------------------------ what leaves first

    def _make_room(self, nbytes: int, shelf: _Shelf | None = None, blocks: int = 0) -> None:
        """Let blocks go, then sequences, until there is room for so many bytes and blocks."""
        while self._nbytes + nbytes > self.max_bytes or (shelf is not None and shelf.pool.blocks.num_blank < blocks):
            idle = [one for one in self._shelves.values() if self._idle(one)]
            if idle:
                self._forget(idle[0] if shelf is None or shelf not in idle else shelf)
            elif len(self):
                self._drop(self._oldest())
            else:
                return

    @staticmethod
    def _idle(shelf: _Shelf) -> int:
        return shelf.pool.blocks.num_free - shelf.pool.blocks.num_blank

    def _forget(self, shelf: _Shelf) -> None:
        """Evict the least recently used block that no sequence has."""
        shelf.pool.blocks.evict(1)
        self._clear(shelf, int(shelf.pool.blocks.free_order(1)[0]))  # what was evicted is taken next

    def _clear(self, shelf: _Shelf, block: int) -> None:
        self._nbytes -= shelf.rows.pop(block).nbytes
        del shelf.tokens[block]
        parent = shelf.parents.pop(block)
        siblings = shelf.after.get(parent, {})
        siblings.pop(block, None)
        if not siblings:
            shelf.after.pop(parent, None)
        shelf.after.pop(block, None)

    def _drop(self, one: _Sequence) -> None:
        """Close a sequence: its whole blocks stay until something else needs their room."""
        shelf = one.shelf
        tail = shelf.pool.table(one.handle)[one.length // BLOCK :].tolist()
        shelf.pool.close(one.handle)
        for block in tail:
            self._clear(shelf, block)
        shelf.ends[one.parent].remove(one)
        if not shelf.ends[one.parent]:
            del shelf.ends[one.parent]
            if isinstance(one.parent, int):
                shelf.is_end[one.parent] = False
        del self._order[one.kind][id(one)]
        self._nbytes -= one.nbytes
        self._kept_nbytes -= one.nbytes

    def _oldest(self) -> _Sequence:
        """Return the sequence that leaves first, as in mlx-lm: its type must not be rarer than the next one."""
        orders = list(self._order.values())
        for order, following in pairwise(orders):
            if order and len(order) >= len(following):
                return next(iter(order.values()))
        return next(one for order in reversed(orders) for one in order.values())

    def _trim_sequences(self, count: int) -> None:
        while len(self) > count:
            one = self._oldest()
            self._drop(one)
            while self._idle(one.shelf):
                self._forget(one.shelf)

    # --------------------------------------------------------------------------------------------- internals

    def _shelf(self, layout: CacheLayout) -> _Shelf:
        if layout not in self._shelves:
            if self._stored is not None and layout != self._stored.layout:
                warnings.warn("[insert] caches of another layout than the store's are not stored", stacklevel=3)
            block_nbytes = BLOCK * layout.row_nbytes
            most = min(self.max_bytes, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
            blocks = min(_MAX_BLOCKS, most // block_nbytes + _MAX_SEQUENCES if block_nbytes else _MAX_BLOCKS)
            pool = kvpool.Pool(
                blocks, BLOCK, max_seqs=_MAX_SEQUENCES + 2, in_order=True, prefix_cache=True, reserved_blocks=0
            )
            plan = kvpool.Plan(pool, 1, blocks * BLOCK, formats=())
            self._shelves[layout] = _Shelf(layout, pool, plan, np.zeros(blocks, bool))
        return self._shelves[layout]

    def _namespace(self, model: Hashable) -> bytes:
        """Return the same bytes in every process for names of models, and bytes of this process for other objects."""
        names = model if isinstance(model, tuple) else (model,)
        if all(name is None or isinstance(name, str | int) for name in names):
            return kvpool.namespace(model=repr(model))
        with self._lock:
            return self._names.setdefault(model, kvpool.namespace(salt=self._salt, key=str(len(self._names))))

    def _known(
        self, call: str, tokens: Sequence[int], media: Sequence[tuple[int, int, Hashable]]
    ) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Return tokens for the pool, media as numbers beyond any vocabulary, and the spans of media.

        A digest that occurs in spans of two lengths has two numbers: what a model makes of it is not the same.
        """
        given: Any = _numbers(call, tokens)
        adds = call == "insert"
        low, high = (int(given.min()), int(given.max())) if given.size else (0, 0)
        if high > _MAX_TOKEN:
            raise ValueError(f"[{call}] a token is {high}, the limit is {_MAX_TOKEN}")
        known = given.astype(np.int64 if low < 0 else np.int32)
        spans = []
        for start, stop, digest in media:
            if not 0 <= start < stop <= len(known):
                raise ValueError(f"[{call}] a span of media is {start} .. {stop}, the prompt has {len(known)} tokens")
            known[start:stop] = _MAX_ATOM - self._atom((digest, stop - start), adds)
            spans.append((start, stop))
        for token in np.unique(known[known < 0]).tolist() if low < 0 else ():
            places = np.flatnonzero(known == token)
            for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1):
                spans.append((int(run[0]), int(run[-1]) + 1))
            known[places] = _MAX_ATOM - self._atom(token, adds)
        return known.astype(np.int32, copy=False), spans

    def _atom(self, name: Hashable, adds: bool) -> int:
        with self._lock:
            return self._atoms.setdefault(name, len(self._atoms)) if adds else self._atoms.get(name, _UNKNOWN)


def _numbers(call: str, tokens: Sequence[int]) -> np.ndarray:
    """Return tokens as integers of some width."""
    if isinstance(tokens, list):
        try:
            return np.frombuffer(struct.pack(f"{len(tokens)}i", *tokens), np.int32)  # a third of the time of np.array
        except struct.error:
            pass
    given = np.asarray(tokens).reshape(-1)
    if given.size and given.dtype.kind not in "iu":
        raise TypeError(f"[{call}] tokens must be integers, got {given.dtype}")
    return given


def _outside(length: int, spans: list[tuple[int, int]]) -> int:
    """Return the longest prefix, at most `length`, that ends inside no span."""
    for start, stop in sorted(spans, reverse=True):
        if start < length < stop:
            length = start
    return length


def _common(a: np.ndarray, b: np.ndarray) -> int:
    count = min(len(a), len(b))
    differ = a[:count] != b[:count]
    first = int(differ.argmax()) if count else 0
    return first if count and differ[first] else count
