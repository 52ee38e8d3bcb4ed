"""`PromptCache`: a prompt cache for engines that keep dense caches of MLX. docs/prompt-cache.md is the page."""

from __future__ import annotations

import copy
import logging
import os
import struct
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, pairwise, takewhile
from math import inf
from operator import eq
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

import kvpool
from kvpool.adapters.dense_caches import (
    BLOCK,
    CacheLayout,
    copied,
    evaluate,
    is_empty,
    layout_of,
    leaves_of,
    nbytes_of,
    owned,
    place_of,
    register_cache,
)
from kvpool.adapters.prompt_store import PromptStore, Rows
from kvpool.retention import Keep
from kvpool.store import BlockStore

__all__ = ["TYPES", "Fetched", "PromptCache", "register_cache"]

TYPES = ("assistant", "user", "system")
"""Types of sequences, as in mlx-lm: what leaves first where `max_size` or `trim_to` counts them."""

INDEX_NBYTES = 912
"""Bytes of memory that a block takes beside its rows."""

_MAX_TOKEN = 2**30 - 1  # numbers above stand for media
_MAX_ATOM = 2**31 - 1
_UNKNOWN = _MAX_TOKEN  # of media that were never inserted; no others get as far, and no token is the same
_MAX_MEDIA = 1 << 16  # digests that are remembered
_FIRST_BLOCKS, _MAX_BLOCKS = 1024, 1 << 20  # of the index
_MAX_SEQUENCES = 4096
_MAX_LAYOUTS = 64
_CALLS = 512  # at the same time
_PATIENCE = 0.01  # seconds that a fetch waits for an insertion that begins with the same tokens
_GUARD = 16  # tokens at the end of a prompt that the next turn may rewrite, as in docs/prefix.md
_log = logging.getLogger(__name__)

Media = Sequence[tuple[int, int, Hashable]]
"""Spans of images and other media: start, stop, digest."""

Spans = list[tuple[int, int]]

Tokens = list[int] | np.ndarray


class Fetched(tuple[Any, int]):
    """What `PromptCache.fetch` returns: caches and their length. `extra` is what `insert` was given."""

    extra: Any = None


@dataclass(eq=False)
class CachedSequence:
    """An inserted sequence: an open row of the pool, and the caches that are valid at its end only.

    `parent` is its last full block (or the root), `tail` the tokens behind it. Until `until` it is kept with
    `priority`.
    """

    layout: CacheLayout
    root: bytes
    kind: str = "assistant"
    extra: Any = None
    media_end: int = 0  # behind the last span of media
    priority: int = 0
    until: float = 0.0
    handle: int = -1
    parent: int | bytes = b""
    length: int = 0
    tail: list[int] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    kept_nbytes: int = 0
    nbytes: int = 0
    can_cut: bool = True  # a shorter prefix can be made of it

    def priority_at(self, now: float) -> int:
        """Return how late it leaves: 0 unless it is kept."""
        return self.priority if now < self.until else 0

    def keep(self, priority: int, until: float, now: float) -> None:
        """Keep it until `until` with `priority`, and never shorter or with less than it is kept now."""
        self.priority = max(priority, self.priority_at(now))
        self.until = max(until, self.until)

    def is_prefix_of(self, known: Tokens) -> bool:
        """Whether a prompt that has its whole blocks begins with it."""
        return not self.tail or self.tail == list(known[self.length - len(self.tail) : self.length])


class _Hit(NamedTuple):
    """`length` tokens that are known: whole blocks, then a part of the last one.

    `rows` and `kept` are references to all that it needs, so that others may evict it meanwhile.
    """

    length: int
    layout: CacheLayout
    rows: np.ndarray
    sequence: CachedSequence | None
    kept: list[Any]
    extra: Any


class PromptCache:
    """Prefixes of prompts for engines that keep dense caches of mlx-lm, mlx-vlm and their relatives::

        prompts = PromptCache(max_bytes=8 << 30)
        caches, n = prompts.fetch(tokens)
        caches = caches or make_prompt_cache(model)
        ...                                    # the model computes tokens[n:] and the answer
        prompts.insert([*tokens, *answer[:-1]], caches)   # the last one was not computed into the caches

    It has the methods of mlx-lm's `LRUPromptCache` too, so it can take its place.

    Parameters
    ----------
    max_bytes : int
        Most bytes that it holds, the index included.
    store : BlockStore, optional
        Keeps prompts when this process ends. Its layout is that of `store_layout`. The caller closes it.
    max_size : int, optional
        Most sequences. By default as many as fit.
    checkpoint_bytes : int, optional
        Most bytes of caches that are kept whole, out of `max_bytes`. By default there is no such limit. A prompt with
        more of them is neither kept nor stored.
    clock : callable, default `time.monotonic`
        Seconds, for `Keep`.

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not callable(clock):
            raise TypeError(f"[PromptCache] clock must be callable, not {type(clock).__name__}")
        self.max_bytes = _limit("PromptCache", "max_bytes", max_bytes)
        self.max_size = min(_limit("PromptCache", "max_size", max_size), _MAX_SEQUENCES)
        self.checkpoint_bytes = _limit("PromptCache", "checkpoint_bytes", checkpoint_bytes)
        self._stored = None if store is None else PromptStore(store)
        self._clock, self._now = clock, 0.0  # `_now`: when the last call came that may let something go
        self._promoter = ThreadPoolExecutor(1, thread_name_prefix="kvpool-promote")
        self._lock = threading.RLock()
        self._arrival = threading.Condition(self._lock)
        self._coming: list[list[int]] = []  # how the sequences begin that are being inserted
        self._index = BlockIndex(_MAX_BLOCKS, _MAX_SEQUENCES + _CALLS)
        self._block_nbytes = INDEX_NBYTES  # of a block of the layout with the largest ones
        self._layouts: dict[CacheLayout, bytes] = {}
        self._order: dict[str, OrderedDict[CachedSequence, None]] = {kind: OrderedDict() for kind in TYPES}
        self._nbytes = 0  # of sequences and insertions, not of blocks
        self._kept_nbytes = 0
        self._spacing = 1
        self._has_told = False  # of models in one namespace
        self._names: dict[Hashable, bytes] = {}
        self._atoms: dict[Hashable, int] = {}
        self._num_atoms = 0  # that there ever were

    # -------------------------------------------------------------------------------------- fetch and insert

    def fetch(
        self, tokens: Sequence[int], namespace: bytes = b"", *, media: Media = (), take: bool = False, load: bool = True
    ) -> Fetched:
        """Return caches with the longest prefix of a prompt that is known, and its length.

        At least one token is left to compute. Without any prefix the caches are None.

        Parameters
        ----------
        tokens : sequence of int
            The whole prompt. Negative numbers stand for the tokens of an image, as in mlx-lm's server.
        namespace : bytes
            Of `kvpool.namespace`. Only prompts of one namespace share anything, and all of them are of one model. While
            it has caches that no model has together (other lists, heads or widths), nothing of it is found, and the
            log says so. Other models are not told apart: ``kvpool.namespace(model=...)`` has to.
        media : sequence of (start, stop, digest)
            Spans of images and other media. A prefix never ends inside one, and has it only with an equal digest and
            length.
        take : bool
            The sequence whose end was found leaves the cache, as the caller will insert a longer one. Its whole
            blocks stay until their room is needed. What is kept does not leave.
        load : bool
            Look in the store, too, and wait for it. See `promote`.
        """
        return _caches(self._find(tokens, namespace, media, take=take, load=load))

    def fetch_many(
        self, prompts: Sequence[Sequence[int]], namespace: bytes = b"", *, media: Sequence[Media] | None = None
    ) -> tuple[list[Any] | None, list[int]]:
        """Return batches of caches with a row for each prompt, and the lengths of the prefixes in them.

        The batches are those that the caches' own ``merge`` makes. Where all caches have a row per token, the tokens
        of all prompts are copied once. Without any prefix the caches are None.

        Raises
        ------
        TypeError
            A class of the caches has no ``merge``, as mlx-lm's `ChunkedKVCache` and `QuantizedKVCache`: `fetch` each
            prompt. Nothing was copied.
        """
        spans = media or [()] * len(prompts)
        found = [self._find(tokens, namespace, each) for tokens, each in zip(prompts, spans, strict=True)]
        lengths = [one.length if one else 0 for one in found]
        first = next(filter(None, found), None)
        if first is None:
            return None, lengths
        if (kind := first.layout.without_batch()) is not None:
            raise TypeError(f"[fetch_many] {kind.__name__} has no merge, so its rows make no batch: fetch each prompt")
        if first.layout.is_dense and all(one is None or one.layout == first.layout for one in found):
            batch = first.layout.batch_of([one.rows if one else [] for one in found], lengths)
            if batch is not None:
                return batch, lengths
        rows = [_caches(one)[0] if one else first.layout.empty_of(first.kept) for one in found]
        return [type(caches[0]).merge(list(caches)) for caches in zip(*rows, strict=True)], lengths

    def promote(self, tokens: Sequence[int], namespace: bytes = b"", *, media: Media = ()) -> Future[int]:
        """Bring the longest prefix of a prompt from the store in the background.

        The result is its length in memory. A server polls ``done()``, and fetches with ``load=False`` meanwhile.
        """

        def bring() -> int:
            found = self._find(tokens, namespace, media)
            return found.length if found else 0

        return self._promoter.submit(bring)

    def insert(
        self,
        tokens: Sequence[int],
        caches: Sequence[Any],
        namespace: bytes = b"",
        *,
        media: Media = (),
        cache_type: str = "assistant",
        extra: Any = None,
        keep: Keep | None = None,
    ) -> bool:
        """Copy what is new in the caches of one sequence. False: nothing of it is kept.

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
        extra : object
            What else belongs to the sequence, such as the RoPE deltas of images. It is kept as it is, and comes back
            as ``fetch(...).extra`` with a prefix that has all media of the sequence. A store does not have it.
        keep : Keep, optional
            For `ttl` seconds the sequence leaves after all that is not kept, the lowest priority first. With fewer
            `tokens` than the sequence has, only that beginning is kept: its whole blocks if every cache has a row per
            token, else the longest prefix of it that `fetch` finds now.

        Raises
        ------
        TypeError, ValueError
            A token, a span, `cache_type` or `keep` is wrong. State unchanged.
        """
        if cache_type not in TYPES:
            raise ValueError(f"[insert] cache_type is {cache_type!r}, it must be one of {', '.join(TYPES)}")
        if not isinstance(keep, Keep | None):
            raise TypeError(f"[insert] keep must be a Keep, not {type(keep).__name__} ({keep!r})")
        with self._announced(tokens):
            known, spans = self._known("insert", tokens, media)
            leaves, tree = leaves_of(caches)
            if all(map(is_empty, leaves)):
                return False
            places = {place for cache in leaves if (place := place_of(cache)) is not None}
            layout = layout_of(leaves, tree)
            length = min([len(known), *places])
            if len(places) > 1 or (places != {length} and places and not layout.is_dense):
                _log.warning(
                    "[insert] caches of %s tokens, %d tokens given: nothing is kept", sorted(places), len(known)
                )
                return False
            evaluate(leaves)
            known, rows = known[:length], partial(layout.rows_of, leaves)
            media_end = max((stop for _, stop in spans), default=0)
            one = CachedSequence(layout, self._root(layout, namespace), cache_type, extra, media_end)
            if keep is not None and (keep.tokens or length) < length:
                self._keep_beginning(one, known[: keep.tokens], rows, namespace, spans, keep)
            elif keep is not None:
                one.priority, one.until = keep.priority, self._clock() + keep.ttl
            is_kept = self._insert(one, known, rows, layout.kept_of(leaves))
            if is_kept and self._stored is not None:
                self._store(self._stored, leaves, tree, known, spans, namespace)
            return is_kept

    def fetch_nearest_cache(self, model: Hashable, tokens: Sequence[int]) -> tuple[list[Any] | None, Sequence[int]]:
        """Return caches and the tokens to compute, as mlx-lm's `LRUPromptCache`."""
        caches, length = _caches(self._find(tokens, self._namespace(model), whole=True))
        return caches, tokens[length:]

    def insert_cache(
        self, model: Hashable, tokens: Sequence[int], prompt_cache: Sequence[Any], *, cache_type: str = "assistant"
    ) -> None:
        """Insert as mlx-lm's `LRUPromptCache`. The caches are copied, not kept."""
        self.insert(tokens, prompt_cache, self._namespace(model), cache_type=cache_type)

    def wanted(
        self, tokens: Sequence[int], n: int = 0, step: int = 2048, namespace: bytes = b"", *, media: Media = ()
    ) -> list[int]:
        """Return where to end a chunk of the prefill and `insert`, ascending.

        Windows and states are found only where a sequence ends. These are the positions at which a pool with layer
        groups takes its checkpoints (docs/prefix.md), so that prompts that share a beginning find most of it: before
        the part that the next turn may rewrite, where this prompt parts from what is known, and at doubling
        distances. None if a prompt is known that begins like this one, and its caches have a row per token.

        Parameters
        ----------
        tokens, namespace, media
            As for `fetch`.
        n : int
            The length that `fetch` found.
        step : int
            The chunk of the prefill: doubling distances begin there.
        """
        known, spans = self._known("wanted", tokens, media)
        with self._lock:
            paths = {each: len(self._index.path(name + namespace, known)) for each, name in self._layouts.items()}
            spacing = 1 << (max(step, self._spacing, 1) - 1).bit_length()
        if any(paths.values()) and not any(paths[each] for each in paths if each.needs_ends):
            return []
        cut, places = max(0, len(known) - _GUARD), [BLOCK * max(paths.values(), default=0)]
        while spacing <= cut:
            places.append(spacing)
            spacing *= 2
        places = [_outside(place // BLOCK * BLOCK, spans) for place in (*places, cut)]
        return sorted({place for place in places if n < place <= cut})

    # ------------------------------------------------------------------------------------------------- sizes

    def __len__(self) -> int:
        """Number of sequences. Blocks of others may be known still."""
        return sum(map(len, self._order.values()))

    def __bool__(self) -> bool:
        """True, empty or not."""
        return True

    @property
    def nbytes(self) -> int:
        """Bytes that it holds: arrays, and the index of those that have rows or states."""
        return self._nbytes + self._index.nbytes

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Let sequences go until there are at most so many, with at most so many bytes in all."""
        with self._lock:
            self._now = self._clock()
            if n_sequences is not None:
                self._trim_sequences(max(0, n_sequences))
            if n_bytes is not None:
                self._make_room(self.max_bytes - max(0, n_bytes))

    def resize(self, max_bytes: int) -> None:
        """Hold at most so many bytes from now on. What leaves first goes at once, and its memory is free.

        Raises
        ------
        TypeError, ValueError
            `max_bytes` is not an int, or negative. State unchanged.
        """
        limit = _limit("resize", "max_bytes", max_bytes)
        with self._lock:
            self._now, self.max_bytes = self._clock(), limit
            self._make_room(0)
        mx.clear_cache()

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Return sequences and bytes per type. A shared block counts for the first type that has it."""
        with self._lock:
            seen: set[int] = set()
            stats = {}
            for kind, order in self._order.items():
                blocks = {block for one in order for block in self._index.pool.table(one.handle).tolist()} - seen
                seen |= blocks
                nbytes = sum(one.nbytes for one in order) + self._index.nbytes_of(list(blocks))
                stats[kind] = {"n_sequences": len(order), "n_bytes": nbytes}
            return stats

    # ------------------------------------------------------------------------------------------------- fetch

    def _find(
        self,
        tokens: Sequence[int],
        namespace: bytes,
        media: Media = (),
        *,
        whole: bool = False,
        take: bool = False,
        load: bool = True,
    ) -> _Hit | None:
        known: Any = tokens  # the pool takes them as they are, much faster, unless something else is needed
        spans: Spans = []
        stored = self._stored if load else None
        if not isinstance(tokens, (list, np.ndarray)) or media or self._atoms or stored or not self._layouts:
            known, spans = self._known("fetch", tokens, media)
        if stored is not None:
            text = min((start + 1 for start, _ in spans), default=None)  # a span leaves more than one token to compute
            self._load(stored, known[:text], namespace)
        with self._lock:
            if self._coming:
                begin = np.ravel(tokens[:BLOCK])[:BLOCK].tolist()
                self._arrival.wait_for(lambda: begin not in self._coming, _PATIENCE)
            try:
                hit = self._longest(known, namespace, spans, whole)
            except (TypeError, ValueError):  # there is what is no token
                known, spans = self._known("fetch", tokens, media)
                hit = self._longest(known, namespace, spans, whole)
            if hit is None:
                return None
            one = hit.sequence
            if one is not None:
                self._order[one.kind].move_to_end(one)
                if take and one.length == hit.length and not one.priority_at(self._clock()):
                    self._drop(one)
        if not hit.kept:
            return hit
        kept = [copied(cache, copy.deepcopy, role) for cache, role in zip(hit.kept, hit.layout.roles, strict=True)]
        if one is not None and one.length > hit.length:
            for cache in kept:
                cache.trim(one.length - hit.length)
        return hit._replace(kept=kept)

    def _load(self, stored: PromptStore, known: np.ndarray, namespace: bytes) -> None:
        """Insert the part of a prompt that the store has and the cache lacks. Other calls do not wait for the store."""
        with self._lock:
            hit = self._longest(known, namespace, [], False)
            one = CachedSequence(stored.layout, self._root(stored.layout, namespace))
            begin = BLOCK * len(self._index.path(one.root, known))
        found = stored.longest(known, begin, 0 if hit is None else hit.length, namespace)
        if found is not None:
            length, loaded, kept = found
            have = min(begin, length // BLOCK * BLOCK)
            rows = lambda first, end: iter(loaded[(first - have) // BLOCK :])  # noqa: E731
            self._insert(one, known[:length], rows, kept, have)

    def _longest(self, known: Tokens, namespace: bytes, spans: Spans, whole: bool) -> _Hit | None:
        """Return the longest hit of all layouts. With `whole` no token is left where a sequence ends with the last."""
        best: _Hit | None = None
        for layout, name in self._layouts.items():
            find = self._cut if layout.is_dense else self._ended
            hit = find(layout, name + namespace, known, spans, whole)
            if hit is not None and (best is None or hit.length > best.length):
                best = hit
        if best is not None and len(self._layouts) > 1 and self._is_mixed(best.layout, namespace):
            return None
        return best

    def _is_mixed(self, layout: CacheLayout, namespace: bytes) -> bool:
        """Whether a namespace has caches of another model, too. Nobody knows which of them asks."""
        here = (each for each, name in self._layouts.items() if name + namespace in self._index.chains)
        if not any(map(layout.is_of_another_model, here)):
            return False
        if not self._has_told:
            self._has_told = True
            _log.warning("[fetch] a namespace has caches of two models, none is found: use namespace(model=...)")
        return True

    def _cut(self, layout: CacheLayout, root: bytes, known: Tokens, spans: Spans, whole: bool) -> _Hit | None:
        """Return the longest hit of keys and values per token: whole blocks, and the beginning of one more."""
        index, most = self._index, len(known)
        blocks = index.path(root, known)
        full = len(blocks)
        parent = blocks.item(-1) if full else root
        nearest, common = index.nearest(parent, known[BLOCK * full : BLOCK * (full + 1)])
        if not (whole and any(one.length == most and one.is_prefix_of(known) for one in index.ends.get(parent, ()))):
            most -= 1
        length = _outside(min(BLOCK * full + common, most), spans)
        if length <= 0:
            return None
        if common:
            blocks = np.append(blocks, nearest)
        full = length // BLOCK
        if length <= BLOCK * (len(blocks) - 1):
            blocks = blocks[: -(-length // BLOCK)]
        used, least = None, 0
        for one in index.ends.get(blocks.item(full - 1) if full else root, ()):
            if least <= one.length <= length and one.is_prefix_of(known):
                used, least = one, one.length + 1
        origin = index.origins.get(blocks.item(-1))
        extra = origin.extra if origin and length >= origin.media_end else None
        return _Hit(length, layout, index.rows.take(blocks), used, [], extra)

    def _ended(self, layout: CacheLayout, root: bytes, known: Tokens, spans: Spans, whole: bool) -> _Hit | None:
        """Return the longest hit of a sequence that is kept whole."""
        blocks = self._index.path(root, known)
        best, length = None, -1
        for count, one in self._index.ending(root, blocks):
            behind = map(int, known[BLOCK * count : BLOCK * (count + 1)])
            common = sum(takewhile(bool, map(eq, one.tail, behind)))
            reach = min(BLOCK * count + common, len(known) - (not (whole and one.length == len(known))))
            fits = reach == one.length or (one.can_cut and common > 0)
            if fits and reach > length and (reach or one.can_cut) and _outside(reach, spans) == reach:
                best, length = one, reach
        if best is None:
            return None
        rows = self._index.rows.take(self._index.pool.table(best.handle)[: -(-length // BLOCK)])
        return _Hit(length, layout, rows, best, best.kept, best.extra)

    # ------------------------------------------------------------------------------------------------ insert

    @contextmanager
    def _announced(self, tokens: Sequence[int]) -> Iterator[None]:
        """Have fetches of prompts that begin like this one wait a moment."""
        begin = np.ravel(tokens[:BLOCK])[:BLOCK].tolist()
        with self._lock:
            self._coming.append(begin)
        try:
            yield
        finally:
            with self._lock:
                self._coming.remove(begin)
                self._arrival.notify_all()

    def _store(
        self, stored: PromptStore, leaves: list[Any], tree: Any, known: np.ndarray, spans: Spans, namespace: bytes
    ) -> None:
        """Offer the store what was inserted, up to the first span of media."""
        layout = layout_of(leaves, tree, windows=False)
        if layout == stored.layout:
            text = known[: min((start for start, _ in spans), default=len(known))]
            stored.put(text, partial(layout.rows_of, leaves), None if spans else layout.kept_of(leaves), namespace)
        else:
            warnings.warn("[insert] caches of another layout than the store's are not stored", stacklevel=3)

    def _keep_beginning(
        self, whole: CachedSequence, known: np.ndarray, rows: Rows, namespace: bytes, spans: Spans, keep: Keep
    ) -> None:
        """Keep the whole blocks of a beginning as a sequence of their own, or else the sequence that ends last in it.

        Without a row per token only what is known already can be found, such as a window that had not turned.
        """
        layout, length, have, until = whole.layout, len(known), 0, self._clock() + keep.ttl
        with self._lock:
            if not layout.is_dense:
                hit = self._longest(known, namespace, spans, whole=True)
                if hit is None:
                    return
                if hit.kept and hit.sequence is not None:
                    return hit.sequence.keep(keep.priority, until, self._clock())
                layout, length, have = hit.layout, hit.length, hit.length // BLOCK * BLOCK
                rows = lambda begin, end: iter(())  # noqa: E731
            one = CachedSequence(layout, self._root(layout, namespace), whole.kind, None, 0, keep.priority, until)
        if length >= BLOCK:
            self._insert(one, known[: length // BLOCK * BLOCK], rows, (), have)

    def _insert(self, one: CachedSequence, known: np.ndarray, rows: Rows, kept: Sequence[Any], have: int = 0) -> bool:
        """Make a sequence of tokens, of which ``rows(begin, end)`` has those from `have` on. False: there is no room.

        Room is taken first. Then rows and caches are copied, while other calls go on. Then all of it is made known.
        """
        layout, index = one.layout, self._index
        one.kept_nbytes = sum(map(nbytes_of, kept, layout.roles))
        one.nbytes = one.kept_nbytes + (INDEX_NBYTES if layout.has_arrays else 0)
        can_trim = all(getattr(cache, "is_trimmable", bool)() for cache in kept)
        one.can_cut = layout.is_dense or (not layout.has_arrays and can_trim)
        block_nbytes = _nbytes_of(layout, BLOCK)
        with self._lock:
            self._now, handle = self._clock(), index.open(one.root, known)
            begin, length, most = index.pool.num_tokens(handle), len(known), self._most_blocks()
            num_puts = index.num_puts
            if block_nbytes:
                most = min(most, max(0, self.max_bytes - one.nbytes) // block_nbytes)
            if length > BLOCK * most and layout.is_dense:
                length = max(begin, BLOCK * most)
            count = -(-(length - begin) // BLOCK)
            nbytes = one.nbytes + _nbytes_of(layout, length - begin)
            fits = begin >= have and length <= BLOCK * most and one.nbytes <= self.max_bytes
            if not (fits and (length or not len(known)) and self._make_room(nbytes, count, one.kept_nbytes)):
                index.pool.close(handle)
                return False
            self._reserve(nbytes, one.kept_nbytes)
        try:
            copies = list(islice(rows(begin, length), count)) if block_nbytes else [mx.array([], mx.uint64)] * count
            one.kept = [copied(cache, owned, role) for cache, role in zip(kept, layout.roles, strict=True)]
        except BaseException:
            with self._lock:
                self._reserve(-nbytes, -one.kept_nbytes)
                index.pool.close(handle)
                self._make_room(0)
            raise
        known = known[:length]
        with self._lock:
            self._reserve(-nbytes, -one.kept_nbytes)
            one.handle, one.length = handle, length
            if index.num_puts != num_puts:  # others have inserted meanwhile
                one.handle = index.open(one.root, known)
                index.pool.close(handle)
                copies = copies[(index.pool.num_tokens(one.handle) - begin) // BLOCK :]
            if not self._make_room(nbytes, len(copies), one.kept_nbytes):
                index.pool.close(one.handle)
                self._make_room(0)  # `resize` could not evict what this call held
                return False
            one.tail = known[length - length % BLOCK :].tolist()
            self._replace(one, known)
            index.put(one, known, copies)
            self._order[one.kind][one] = None
            self._reserve(one.nbytes, one.kept_nbytes)
            self._trim_sequences(self.max_size, one)
            if one.kept_nbytes and layout.row_nbytes:
                self._spacing = 3 * one.kept_nbytes // layout.row_nbytes
        return True

    def _reserve(self, nbytes: int, kept_nbytes: int) -> None:
        self._nbytes += nbytes
        self._kept_nbytes += kept_nbytes

    def _replace(self, one: CachedSequence, known: np.ndarray) -> None:
        """Drop the sequences that a new one makes useless: the same tokens, or a prefix of what can be cut.

        The same tokens stay kept as they are. A prefix that is kept for longer, or with a higher priority, stays.
        """
        for _, end in list(self._index.ending(one.root, self._index.pool.table(one.handle))):
            priority, is_same = end.priority_at(self._now), end.length == one.length
            if not (one.can_cut or is_same) or not end.is_prefix_of(known):
                continue
            if priority and is_same:
                one.keep(priority, end.until, self._now)
            elif priority > one.priority or (priority and end.until > one.until):
                continue
            self._drop(end)

    # ------------------------------------------------------------------------------------------ what leaves first

    def _make_room(self, nbytes: int, blocks: int = 0, kept_nbytes: int = 0) -> bool:
        """Let blocks go, then sequences, until there is room for so many bytes and blocks. False: there is not."""
        if kept_nbytes > self.checkpoint_bytes:
            return False
        while self._kept_nbytes + kept_nbytes > self.checkpoint_bytes:
            kept = (one for order in self._order.values() for one in order if one.kept_nbytes)
            if (one := first(kept, self._now)) is None:
                return False
            self._drop(one)
        while True:
            excess = self.nbytes + nbytes - self.max_bytes
            lacking = blocks - self._index.pool.blocks.num_blank if blocks else 0
            if excess <= 0 < lacking:
                self._index.grow(lacking, self._most_blocks())
                lacking = blocks - self._index.pool.blocks.num_blank
            if max(lacking, excess) <= 0:
                return True
            count = max(lacking, excess // self._block_nbytes, 1)
            if self._index.num_idle:
                self._index.evict(count)
            elif len(self):
                self._let_go(oldest(self._order, self._now), count)
            else:
                return False

    def _most_blocks(self) -> int:
        """Blocks that the index may grow to: four times what the budget has bytes for, as others may be smaller."""
        return min(_MAX_BLOCKS, 4 * self.max_bytes // self._block_nbytes + 64)

    def _let_go(self, one: CachedSequence, count: int) -> None:
        """Drop a sequence, or so many blocks at the end of one that is kept and can be cut: its beginning stays."""
        left = -(-one.length // BLOCK) - count
        if left <= 0 or not one.layout.is_dense or not one.priority_at(self._now):
            self._drop(one)
        else:
            self._index.drop(one, left)

    def _drop(self, one: CachedSequence) -> None:
        """Close a sequence: its whole blocks stay until something else needs their room."""
        self._index.drop(one)
        del self._order[one.kind][one]
        self._reserve(-one.nbytes, -one.kept_nbytes)

    def _trim_sequences(self, count: int, new: CachedSequence | None = None) -> None:
        while len(self) > count:
            one = oldest(self._order, self._now)
            if one is new and oldest(self._order, inf) is not new:  # nothing that is kept makes the new one go
                one = oldest(self._order, self._now, new)
            self._drop(one)
            self._index.evict(self._index.num_idle)

    # --------------------------------------------------------------------------------------------- internals

    def _root(self, layout: CacheLayout, namespace: bytes) -> bytes:
        """Return the root of the sequences of a layout and a namespace."""
        with self._lock:
            self._block_nbytes = max(self._block_nbytes, _nbytes_of(layout, BLOCK))
            name = self._layouts.setdefault(layout, os.urandom(8))
            if len(self._layouts) > _MAX_LAYOUTS:
                del self._layouts[next(iter(self._layouts))]
        return name + namespace

    def _namespace(self, model: Hashable) -> bytes:
        """Return the same bytes in every process for names of models, and bytes of this process for other objects."""
        names = model if isinstance(model, tuple) else (model,)
        if all(name is None or isinstance(name, str | int) for name in names):
            return kvpool.namespace(model=repr(model))
        with self._lock:
            return self._names.setdefault(model, os.urandom(16))

    def _known(self, call: str, tokens: Sequence[int], media: Media) -> tuple[np.ndarray, Spans]:
        """Return tokens for the pool, media as numbers beyond any vocabulary, and the spans of media.

        A digest that occurs in spans of two lengths has two numbers: what a model makes of it is not the same.
        """
        given, adds, spans = _numbers(call, tokens), call == "insert", []
        low, high = (int(given.min()), int(given.max())) if given.size else (0, 0)
        if high > _MAX_TOKEN:
            raise ValueError(f"[{call}] a token is {high}, the limit is {_MAX_TOKEN}")
        known: Any = given.astype(np.int64 if low < 0 else np.int32)
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
            if adds and name not in self._atoms:
                self._atoms[name] = self._num_atoms
                self._num_atoms += 1
                if len(self._atoms) > _MAX_MEDIA:
                    del self._atoms[next(iter(self._atoms))]
            return self._atoms.get(name, _UNKNOWN)


def _limit(call: str, name: str, value: int | None) -> int:
    """Return a number of bytes or sequences; None: any."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise TypeError(f"[{call}] {name} must be an int, got {type(value).__name__}")
    if value is not None and value < 0:
        raise ValueError(f"[{call}] {name} is {value}, it must not be negative")
    return 1 << 63 if value is None else value


def _nbytes_of(layout: CacheLayout, length: int) -> int:
    """Bytes of the blocks of so many tokens, those of the index included."""
    return layout.row_nbytes * length + INDEX_NBYTES * -(-length // BLOCK) if layout.row_nbytes else 0


def _numbers(call: str, tokens: Sequence[int]) -> np.ndarray:
    """Return tokens as integers of some width."""
    if isinstance(tokens, list):
        try:
            packed = struct.Struct(f"{len(tokens)}i").pack(*tokens)  # `struct.pack` would copy the arguments again
            return np.frombuffer(packed, np.int32)  # a fifth of the time of np.array
        except struct.error:
            pass
    given = np.asarray(tokens).reshape(-1)
    if given.size and given.dtype.kind not in "iu":
        raise TypeError(f"[{call}] tokens must be integers, got {given.dtype}")
    return given


def _outside(length: int, spans: Spans) -> int:
    """Return the longest prefix, at most `length`, that ends inside no span."""
    for start, stop in sorted(spans, reverse=True) if spans else ():
        if start < length < stop:
            length = start
    return length


def _caches(found: _Hit | None) -> Fetched:
    if found is None:
        return Fetched((None, 0))
    hit = Fetched((found.layout.caches_of(found.rows, found.kept, found.length), found.length))
    hit.extra = found.extra
    return hit


def first(sequences: Iterable[CachedSequence], now: float) -> CachedSequence | None:
    """Return the first one that is not kept, or else the first one of the lowest priority."""
    best: CachedSequence | None = None
    for one in sequences:
        if best is None or one.priority_at(now) < best.priority_at(now):
            best = one
        if not best.priority_at(now):
            break
    return best


def oldest(
    order: dict[str, OrderedDict[CachedSequence, None]], now: float, but: CachedSequence | None = None
) -> CachedSequence:
    """Return the sequence that leaves first, of those of the lowest priority: its type is not rarer than the next one.

    `order` has the sequences of each type in the order of use. `but` is passed over. At the time `inf` nothing is kept.
    """
    orders = list(order.values())
    firsts = [first((one for one in each if one is not but), now) for each in orders]
    lowest = min(one.priority_at(now) for one in firsts if one)
    found = [one if one and one.priority_at(now) == lowest else None for one in firsts]
    for one, (own, following) in zip(found, pairwise(orders), strict=False):
        if one and len(own) >= len(following):
            return one
    return next(one for one in reversed(found) if one)


class BlockIndex:
    """Blocks of 16 tokens, or fewer at the end of a sequence. The caller has a lock.

    A pool's tree finds the whole blocks. The blocks behind them that are not full, the states and the windows are
    found here, not by layer groups with checkpoints: a checkpoint stands at the end of a whole block, but a server
    inserts caches where an answer ended. With those at ends of blocks alone, 200 conversations of 12 turns of a model
    with states find 532,448 tokens, not 2,040,900.
    """

    def __init__(self, max_blocks: int, max_sequences: int) -> None:
        self.pool = kvpool.Pool(
            _FIRST_BLOCKS,
            BLOCK,
            max_seqs=max_sequences,
            max_blocks_per_seq=max_blocks,
            in_order=True,
            prefix_cache=True,
            reserved_blocks=0,
        )
        self._most = max_blocks * BLOCK  # tokens of a sequence of the pool
        self._prefix: Any = self.pool.prefix  # what it calls a namespace is the root of a tree of blocks
        self._plan = kvpool.Plan(self.pool, 1, self._most, formats=())
        self.rows = np.empty(_FIRST_BLOCKS, object)  # what each block holds, None if it is not in use
        self.origins: dict[int, CachedSequence] = {}  # of blocks in use: the last sequence that has an `extra` for them
        self.nbytes = 0  # of the blocks in use and their index
        self.num_puts = 0
        self.ends: dict[int | bytes, list[CachedSequence]] = {}  # behind a block or a root, before another one is full
        # Of all blocks that there may be: what nobody has touched takes no memory.
        self._is_end = np.zeros(max_blocks, bool)
        self._tokens = np.empty((max_blocks, BLOCK), np.int32)  # -1 where a block has no token
        self._links = np.zeros((max_blocks, 2), np.int32)  # 1 + the block before and behind in a chain, if they agree
        self._parents: dict[int, int | bytes] = {}  # of the first blocks of chains: a call of `put` makes one
        self.chains: dict[int | bytes, list[int]] = {}  # the first blocks of the chains behind a block or a root

    @property
    def num_idle(self) -> int:
        """Blocks that no sequence has."""
        return self.pool.blocks.num_free - self.pool.blocks.num_blank

    def grow(self, more: int, most: int) -> None:
        """Have so many more blocks, or twice as many, but `most` at most."""
        had = self.pool.num_blocks
        new = min(most, had + max(had, more)) - had
        if new > 0:
            rows = np.append(self.rows, np.empty(new, object))
            self.pool.resize(had + new)
            self.rows = rows

    def open(self, root: bytes, known: Tokens) -> int:
        """Open a sequence with the whole blocks that a prompt begins with. They become the most recent."""
        return self._prefix.pin(known if len(known) <= self._most else known[: self._most], root)

    def path(self, root: bytes, known: Tokens) -> np.ndarray:
        """Return the whole blocks that a prompt begins with. They become the most recent."""
        handle = self.open(root, known)
        blocks = self.pool.table(handle)
        self.pool.close(handle)
        return blocks

    def nearest(self, parent: int | bytes, behind: Tokens) -> tuple[int, int]:
        """Return the block behind `parent` that begins with the most of these tokens, and how many these are."""
        blocks = self.chains.get(parent, [])
        if isinstance(parent, int):
            following = self._links.item(parent, 1) - 1
            if following >= 0 and self._links.item(following, 0) == parent + 1:
                blocks = [*blocks, following]
        if not blocks or not len(behind):
            return -1, 0
        same = self._tokens[blocks, : len(behind)] == behind
        counts = np.where(same.all(axis=1), len(behind), same.argmin(axis=1))
        best = int(counts.argmax())
        return blocks[best], int(counts[best])

    def ending(self, root: bytes, blocks: np.ndarray) -> Iterator[tuple[int, CachedSequence]]:
        """Yield what ends behind one of these blocks, or the root, and how many blocks are before; the last first."""
        for count in (*(np.flatnonzero(self._is_end[blocks])[::-1] + 1).tolist(), 0):
            for one in self.ends.get(int(blocks[count - 1]) if count else root, ()):
                yield count, one

    def end(self, one: CachedSequence) -> None:
        """Note where an open sequence ends."""
        full = one.length // BLOCK
        one.parent = int(self.pool.table(one.handle)[full - 1]) if full else one.root
        self.ends.setdefault(one.parent, []).append(one)
        if isinstance(one.parent, int):
            self._is_end[one.parent] = True

    def put(self, one: CachedSequence, known: np.ndarray, rows: list[mx.array]) -> None:
        """Make the rest of these tokens blocks of an open sequence, with `rows`."""
        begin = self.pool.num_tokens(one.handle)
        self.pool.step(self._plan, [one.handle], len(known) - begin)
        self._prefix.commit(one.handle, known[begin : len(known) - len(known) % BLOCK])
        self.num_puts += 1
        blocks = self.pool.table(one.handle)
        new, parent = blocks[begin // BLOCK :], int(blocks[begin // BLOCK - 1]) if begin else one.root
        if len(new):
            tokens = np.full(len(new) * BLOCK, -1, np.int32)
            tokens[: len(known) - begin] = known[begin:]
            self._tokens[new] = tokens.reshape(-1, BLOCK)
            self.rows[new] = np.fromiter(rows, object, len(rows))
            self._links[new[1:], 0], self._links[new[:-1], 1] = new[:-1] + 1, new[1:] + 1
            self._parents[new.item(0)] = parent
            self.chains.setdefault(parent, []).append(new.item(0))
            self.nbytes += _nbytes_of(one.layout, len(known) - begin)
        if one.extra is not None and one.layout.is_dense:
            self.origins.update(dict.fromkeys(blocks[max(0, one.media_end - 1) // BLOCK :].tolist(), one))
        self.end(one)

    def drop(self, one: CachedSequence, left: int = 0) -> None:
        """Close a sequence, or let it end behind so many whole blocks. Its other whole blocks stay till they leave."""
        self.ends[one.parent].remove(one)
        if not self.ends[one.parent]:
            del self.ends[one.parent]
            if isinstance(one.parent, int):
                self._is_end[one.parent] = False
        tail = self.pool.table(one.handle)[one.length // BLOCK :]
        if left:
            one.length, one.tail = BLOCK * left, []
            self.pool.truncate([one.handle], [one.length])
            self.end(one)
        else:
            self.pool.close(one.handle)
        self._clear(tail)

    def evict(self, count: int) -> None:
        """Evict blocks that no sequence has, the least recently used first."""
        before = self.pool.blocks.num_blank
        self.pool.blocks.evict(count)
        self._clear(self.pool.blocks.free_order(self.pool.blocks.num_blank - before))  # they are taken next

    def nbytes_of(self, blocks: np.ndarray | list[int]) -> int:
        """Bytes of blocks, those of the index included."""
        return sum(row.nbytes + INDEX_NBYTES for row in self.rows[blocks] if row.nbytes)

    def _clear(self, blocks: np.ndarray) -> None:
        """Forget blocks. None that is behind one of them stays."""
        self.nbytes -= self.nbytes_of(blocks)
        self.rows[blocks], self._links[blocks] = None, 0
        for block in blocks.tolist():
            self.origins.pop(block, None)
            if block in self._parents:
                chains = self.chains[parent := self._parents.pop(block)]
                chains.remove(block)
                if not chains:
                    del self.chains[parent]
