"""Records of `PromptCache` in a store of blocks.

Group 0 has the rows of whole blocks. The last group has a record for each position where a sequence ended: the rows
after the last whole block, the windows and the states. Its name has the tokens of that block, filled up to 16.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import mlx.core as mx
import numpy as np

from kvpool.adapters.dense_caches import (
    BLOCK,
    CacheLayout,
    bound_of,
    compact,
    host_of,
    is_empty,
    layout_of,
    leaves_of,
    made,
    nbytes_of,
)
from kvpool.store import BlockLayout, Blocks, BlockStore, Layout, leading, prefix_keys
from kvpool.store.tiers import lacking

_FILL = 2**31 - 1  # no token
_HEAD = 1024  # most bytes of the text about one cache
_SCANNED = 512  # positions that a store is asked about at a time
_layouts: dict[str, CacheLayout] = {}  # that this process has made, by the content of their first group


Rows = Callable[[int, int], Iterator[mx.array]]
"""Yields the rows of the tokens begin .. end, block by block."""

_Found = tuple[int, list[mx.array], list[Any]]


def store_layout(caches: Sequence[Any], weights: bytes | str) -> Layout:
    """Return the layout of a store for prompts of one model.

    Parameters
    ----------
    caches : list
        Caches of one sequence that the model has filled, with one token or more.
    weights : bytes or str
        A name for the weights, and for everything else but the tokens that decides the content of a cache.

    Raises
    ------
    ValueError
        A cache is empty, or of a class that a store cannot have.
    """
    leaves, tree = leaves_of(caches)
    layout = layout_of(leaves, tree, windows=False)
    groups = []
    content = json.dumps(layout, default=str)  # names of classes and dtypes
    if layout.row_nbytes:
        groups.append(BlockLayout(BLOCK, BLOCK * layout.row_nbytes, content))
    kept = layout.kept_of(leaves)
    for cache, role in zip(kept, layout.roles, strict=True):
        if role != "state" or is_empty(cache):
            name = type(cache).__name__
            raise ValueError(f"[store_layout] {name} is empty or unknown, caches must hold one token at least")
    if kept:
        nbytes = BLOCK * layout.row_nbytes + _HEAD + sum(_HEAD + _most_nbytes(cache) for cache in kept)
        releases = sorted({_release(type(cache)) for cache in kept})  # another one may have other fields
        groups.append(BlockLayout(BLOCK, -(-nbytes // 8) * 8, f"ends of {', '.join(releases)}: {content}"))
    _layouts[groups[0].content] = layout
    return Layout(tuple(groups), weights, BLOCK)


class PromptStore:
    """A store of blocks as `PromptCache` uses it. Any thread may call any method."""

    def __init__(self, store: BlockStore) -> None:
        self.store, content = store, store.layout.groups[0].content
        if content not in _layouts:
            raise ValueError("[PromptCache] the layout of the store is not one of store_layout")
        self.layout = _layouts[content]
        self._has_ends = not self.layout.is_dense
        self._ends = len(store.layout.groups) - 1

    def longest(self, known: np.ndarray, begin: int, least: int, namespace: bytes) -> _Found | None:
        """Load the longest prefix of a prompt that leaves a token to compute: length, rows that are new, caches.

        `begin` tokens, whole blocks, have rows already. None: no prefix here is longer than `least`.
        """
        known = known[:-1]
        reach, blocks = len(known), self.store.layout.blocks(known, namespace)[0]
        held, blocks = blocks[: begin // BLOCK], blocks[begin // BLOCK :]
        if self.layout.row_nbytes:
            self.store.touch(held)  # or the store would drop the blocks that are used most
            reach = begin + BLOCK * leading(self.store.lookup(blocks))
        if not self._has_ends:
            rows = self._rows(blocks[: (reach - begin) // BLOCK]) if reach > least else []
            length = begin + BLOCK * len(rows)
            return (length, rows, []) if length > least else None
        if least:
            self.store.touch(self._names(known, [least], prefix_keys(known[:least], BLOCK, namespace)))
        for length, tail, kept in self._states(known[: reach + BLOCK - 1], least, namespace):
            whole = max(0, length // BLOCK - begin // BLOCK) if self.layout.row_nbytes else 0
            rows = self._rows(blocks[:whole])
            if len(rows) == whole:
                return length, rows + tail, kept
        return None

    def put(self, known: np.ndarray, rows: Rows, kept: Sequence[Any] | None, namespace: bytes) -> None:
        """Offer the rows of a prompt that the store does not have, and the caches at its end."""
        whole = len(known) // BLOCK
        if whole and self.layout.row_nbytes:
            blocks = self.store.layout.blocks(known, namespace)[0]
            missing = np.flatnonzero(lacking(self.store, blocks))
            new = [row for number in missing.tolist() for row in rows(number * BLOCK, (number + 1) * BLOCK)]
            if new:
                self.store.store(blocks[missing], list(map(_as_bytes, new)))
        if self._has_ends and kept is not None and len(known):
            packed = self._packed(list(rows(whole * BLOCK, len(known))), kept)
            if packed is not None:
                names = self._names(known, [len(known)], prefix_keys(known, BLOCK, namespace))
                self.store.store(names, packed[None])

    def _rows(self, blocks: Blocks) -> list[mx.array]:
        """Load blocks up to the first one that is missing."""
        rows = np.empty((len(blocks), BLOCK * self.layout.row_nbytes), np.uint8)
        found = rows[: leading(self.store.load(blocks, rows))].view(np.uint64)
        return [mx.array(row.reshape(BLOCK, -1)) for row in found]

    def _states(self, known: np.ndarray, least: int, namespace: bytes) -> Iterator[_Found]:
        """Load states of prefixes longer than `least`, the longest first: length, rows of the tail, caches."""
        keys = prefix_keys(known, BLOCK, namespace)
        for stop in range(len(known), least, -_SCANNED):
            lengths = list(range(stop, max(stop - _SCANNED, least), -1))
            names = self._names(known, lengths, keys)
            for number in np.flatnonzero(self.store.lookup(names)).tolist():
                row = np.empty((1, self.store.layout.groups[self._ends].nbytes), np.uint8)
                if self.store.load(names[number : number + 1], row)[0]:
                    yield (lengths[number], *self._unpacked(row[0]))

    def _names(self, known: np.ndarray, lengths: list[int], keys: np.ndarray) -> Blocks:
        """Name the records of states at these lengths."""
        ends = np.array(lengths)[:, None]
        starts = (ends - 1) // BLOCK * BLOCK
        at = starts + np.arange(BLOCK)
        tokens = np.where(at < ends, known[np.minimum(at, len(known) - 1)], _FILL).astype("<i4")
        parents = keys[starts[:, 0] // BLOCK]
        named = np.concatenate([parents, tokens.view(np.uint8)], axis=1)
        digests = b"".join(hashlib.sha256(row).digest()[: keys.shape[1]] for row in named)
        own = np.frombuffer(digests, np.uint8).reshape(parents.shape)
        return Blocks(own, parents, tokens, keys[0].tobytes(), self._ends)

    def _packed(self, tail: list[mx.array], kept: Sequence[Any]) -> np.ndarray | None:
        """Return the bytes of one record: length of the text, text, arrays. None if it does not fit."""
        arrays: list[mx.array] = []
        try:
            text = json.dumps(_described([tail, [vars(compact(cache)) for cache in kept]], arrays)).encode()
        except TypeError:
            return None
        record = b"".join([len(text).to_bytes(8, "little"), text, *(_as_bytes(array).tobytes() for array in arrays)])
        nbytes = self.store.layout.groups[self._ends].nbytes
        return np.frombuffer(record.ljust(nbytes, b"\0"), np.uint8) if len(record) <= nbytes else None

    def _unpacked(self, row: np.ndarray) -> tuple[list[mx.array], list[Any]]:
        begin = 8 + int.from_bytes(row[:8].tobytes(), "little")
        tail, kept = _read(json.loads(row[8:begin].tobytes()), row, [begin])
        mx.eval(tail)
        kinds = [leaf.kind for leaf in self.layout.leaves if leaf.role != "rows"]
        return tail, [made(kind, **fields) for kind, fields in zip(kinds, kept, strict=True)]


def _most_nbytes(cache: Any) -> int:
    """Bytes of a cache of states, or of a full window."""
    most = bound_of(cache)
    if most is None or not isinstance(cache.keys, mx.array):
        return nbytes_of(cache, "state")
    most = max(most, cache.keys.shape[2] if compact(cache) is cache else 0)
    return sum(plane.nbytes // plane.shape[2] * most for plane in (cache.keys, cache.values))


def _release(kind: type) -> str:
    """Return the name and release of the package that a class is from."""
    name = kind.__module__.partition(".")[0]
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return name


def _described(value: Any, arrays: list[mx.array]) -> Any:
    """Return what JSON can have of a value. Its arrays go to `arrays`."""
    if isinstance(value, mx.array):
        arrays.append(value)
        return {"array": [str(value.dtype).rpartition(".")[2], list(value.shape)]}
    if isinstance(value, dict):
        return {"dict": [[name, _described(item, arrays)] for name, item in value.items()]}
    if isinstance(value, (list, tuple)):
        items = [_described(item, arrays) for item in value]
        return items if isinstance(value, list) else {"tuple": items}
    return value


def _read(value: Any, row: np.ndarray, place: list[int]) -> Any:
    """Return a value from its description. The bytes of arrays are at `place`, which moves behind them."""
    if isinstance(value, list):
        return [_read(item, row, place) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, given),) = value.items()
    if kind != "array":
        items = _read(given, row, place)
        return dict(items) if kind == "dict" else tuple(items)
    dtype, shape, begin = getattr(mx, given[0]), given[1], place[0]
    place[0] += math.prod(shape) * dtype.size
    return mx.array(row[begin : place[0]]).view(dtype).reshape(shape) if all(shape) else mx.zeros(shape, dtype)


def _as_bytes(array: mx.array) -> np.ndarray:
    return np.asarray(host_of(array), order="C").reshape(-1).view(np.uint8)
