"""Records of `PromptCache` in a store of blocks: rows of 16 tokens, and caches that are valid at one position only.

Group 0 has the rows of whole blocks. The last group has a record for each position where a sequence ended. The record
has the rows after the last whole block, the windows and the states. Its name has the tokens of that block, filled up
to 16.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from kvpool.adapters.dense_caches import (
    BLOCK,
    UNSIGNED,
    CacheLayout,
    Leaf,
    Part,
    bound_of,
    compact,
    is_empty,
    layout_of,
    leaves_of,
    nbytes_of,
    single,
)
from kvpool.store import BlockLayout, Blocks, BlockStore, Layout, leading, prefix_keys
from kvpool.store.tiers import lacking

_FILL = 2**31 - 1  # no token
_ENDS = "ends of "
_HEAD = 1024  # most bytes of the text about one cache
_SCANNED = 512  # positions that a store is asked about at a time
_kinds: dict[str, type] = {}  # of the layouts that this process has made


class Found(NamedTuple):
    """The part of a prompt that a store has: its first `length` tokens, the rows that were not known, caches."""

    length: int
    rows: list[mx.array]
    kept: list[Any]


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
    leaves, tree = leaves_of([single(cache) for cache in caches])
    layout = layout_of(leaves, tree, windows=False)
    groups = []
    content = _text(layout)
    if layout.row_nbytes:
        groups.append(BlockLayout(BLOCK, BLOCK * layout.row_nbytes, content))
    kept = layout.kept_of(leaves)
    for cache, role in zip(kept, layout.roles, strict=True):
        if role != "state" or is_empty(cache):
            name = type(cache).__name__
            raise ValueError(f"[store_layout] {name} is empty or unknown, caches must hold one token at least")
    if kept:
        nbytes = BLOCK * layout.row_nbytes + sum(_HEAD + _most_nbytes(cache) for cache in kept)
        releases = sorted({_release(type(cache)) for cache in kept})  # another one may have other fields
        groups.append(BlockLayout(BLOCK, -(-nbytes // 8) * 8, f"{_ENDS}{', '.join(releases)}: {content}"))
    return Layout(tuple(groups), weights, BLOCK)


class PromptStore:
    """A store of blocks as `PromptCache` uses it. Any thread may call any method."""

    def __init__(self, store: BlockStore) -> None:
        self.store = store
        try:
            content = store.layout.groups[0].content
            self.layout = _layout_from(content.partition(": ")[2] if content.startswith(_ENDS) else content)
        except (ValueError, KeyError, TypeError) as exc:
            raise ValueError("[PromptCache] the layout of the store is not one of store_layout") from exc
        self._has_ends = not self.layout.is_dense
        self._ends = len(store.layout.groups) - 1

    def longest(self, known: np.ndarray, begin: int, least: int, namespace: bytes) -> Found | None:
        """Load the longest prefix of a prompt that leaves a token to compute.

        `begin` tokens, whole blocks, have rows already. None: no prefix here is longer than `least`.
        """
        known = known[:-1]
        reach = begin
        blocks = self.store.layout.blocks(known, namespace)[0]
        if self.layout.row_nbytes:
            self.store.touch(blocks[: begin // BLOCK])  # or the store would drop the blocks that are used most
        if self._has_ends and least:
            self.store.touch(self._names(known, [least], prefix_keys(known[:least], BLOCK, namespace)))
        blocks = blocks[begin // BLOCK :]
        if self.layout.row_nbytes and len(blocks):
            reach += BLOCK * leading(self.store.lookup(blocks))
        if not self._has_ends:
            rows = self._rows(blocks[: (reach - begin) // BLOCK]) if reach > least else []
            length = begin + BLOCK * len(rows)
            return Found(length, rows, []) if length > least else None
        most = min(len(known), reach + BLOCK - 1) if self.layout.row_nbytes else len(known)
        for length, tail, kept in self._states(known[:most], least, namespace):
            whole = max(0, length // BLOCK - begin // BLOCK) if self.layout.row_nbytes else 0
            rows = self._rows(blocks[:whole])
            if len(rows) == whole:
                return Found(length, rows + tail, kept)
        return None

    def put(
        self,
        known: np.ndarray,
        rows: Callable[[int, int], Iterator[mx.array]],
        kept: Sequence[Any] | None,
        namespace: bytes,
    ) -> None:
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
        if not len(blocks):
            return []
        rows = np.empty((len(blocks), BLOCK * self.layout.row_nbytes), np.uint8)
        return [_as_row(row, BLOCK) for row in rows[: leading(self.store.load(blocks, rows))]]

    def _states(
        self, known: np.ndarray, least: int, namespace: bytes
    ) -> Iterator[tuple[int, list[mx.array], list[Any]]]:
        """Load states of prefixes longer than `least`, the longest first: length, rows of the tail, caches."""
        keys = prefix_keys(known, BLOCK, namespace)
        for stop in range(len(known), least, -_SCANNED):
            lengths = list(range(stop, max(stop - _SCANNED, least), -1))
            names = self._names(known, lengths, keys)
            for number in np.flatnonzero(self.store.lookup(names)).tolist():
                row = np.empty((1, self.store.layout.groups[self._ends].nbytes), np.uint8)
                if self.store.load(names[number : number + 1], row)[0]:
                    yield (lengths[number], *self._unpacked(row[0], lengths[number]))

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
        """Return the bytes of one record: tail, length of the text, text, arrays. None if it does not fit."""
        nbytes, tail_nbytes = self.store.layout.groups[self._ends].nbytes, BLOCK * self.layout.row_nbytes
        arrays: list[mx.array] = []
        try:
            text = json.dumps([_described(vars(compact(cache)), arrays) for cache in kept]).encode()
        except TypeError:
            return None
        rows = b"".join(_as_bytes(row).tobytes() for row in tail)
        record = rows.ljust(tail_nbytes, b"\0") + len(text).to_bytes(8, "little") + text
        record += b"".join(_host(array).tobytes() for array in arrays)
        if len(record) > nbytes:
            return None
        return np.frombuffer(record.ljust(nbytes, b"\0"), np.uint8)

    def _unpacked(self, row: np.ndarray, length: int) -> tuple[list[mx.array], list[Any]]:
        tail_nbytes = BLOCK * self.layout.row_nbytes
        count = length % BLOCK
        tail = [_as_row(row[: count * self.layout.row_nbytes], count)] if count else []
        begin = tail_nbytes + 8
        end = begin + int.from_bytes(row[tail_nbytes:begin].tobytes(), "little")
        place, kept = [end], []
        kinds = [leaf.kind for leaf in self.layout.leaves if leaf.role != "rows"]
        for kind, fields in zip(kinds, json.loads(row[begin:end].tobytes()), strict=True):
            cache: Any = object.__new__(kind)
            vars(cache).update(_read(fields, row, place))
            kept.append(cache)
        return tail, kept


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


def _name(kind: type) -> str:
    name = f"{kind.__module__}.{kind.__qualname__}"
    _kinds[name] = kind
    return name


def _text(layout: CacheLayout) -> str:
    def shape(tree: Any) -> Any:
        return [None if node is None else [_name(node[0]), shape(node[1])] for node in tree]

    leaves = [
        [
            *(_name(leaf.kind), leaf.role, leaf.fields, leaf.places),
            [[*part[:2], _dtype_text(part.dtype), part.offset] for part in leaf.parts],
        ]
        for leaf in layout.leaves
    ]
    return json.dumps({"leaves": leaves, "tree": shape(layout.tree), "row_nbytes": layout.row_nbytes})


def _layout_from(text: str) -> CacheLayout:
    def tree(shape: Any) -> Any:
        return tuple(None if node is None else (_kinds[node[0]], tree(node[1])) for node in shape)

    read = json.loads(text)
    leaves = [
        Leaf(
            *(_kinds[kind], role, _tuples(fields), tuple(places)),
            tuple(Part(p[0], p[1], getattr(mx, p[2]), p[3]) for p in parts),
        )
        for kind, role, fields, places, parts in read["leaves"]
    ]
    return CacheLayout(tuple(leaves), tree(read["tree"]), read["row_nbytes"])


def _tuples(tree: Any) -> Any:
    return tuple(map(_tuples, tree)) if isinstance(tree, list) else tree


def _dtype_text(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _described(value: Any, arrays: list[mx.array]) -> Any:
    """Return what JSON can have of a value. Its arrays go to `arrays`."""
    if isinstance(value, mx.array):
        arrays.append(value)
        return {"dtype": _dtype_text(value.dtype), "shape": list(value.shape)}
    if isinstance(value, dict):
        return {"dict": [[name, _described(item, arrays)] for name, item in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_described(item, arrays) for item in value]}
    return [_described(item, arrays) for item in value] if isinstance(value, list) else value


def _read(value: Any, row: np.ndarray, place: list[int]) -> Any:
    """Return a value from its description. The bytes of arrays are at `place`, which moves behind them."""
    if isinstance(value, list):
        return [_read(item, row, place) for item in value]
    if not isinstance(value, dict):
        return value
    if "dict" in value:
        return {name: _read(item, row, place) for name, item in value["dict"]}
    if "tuple" in value:
        return tuple(_read(item, row, place) for item in value["tuple"])
    dtype, begin = getattr(mx, value["dtype"]), place[0]
    if not all(value["shape"]):
        return mx.zeros(value["shape"], dtype)
    place[0] += int(np.prod(value["shape"], dtype=np.int64)) * dtype.size
    return mx.array(row[begin : place[0]]).view(dtype).reshape(value["shape"])


def _host(array: mx.array) -> np.ndarray:
    return np.asarray(array.view(UNSIGNED[array.dtype.size])) if array.size else np.empty(0, np.uint8)


def _as_bytes(row: mx.array) -> np.ndarray:
    return np.asarray(row).reshape(-1).view(np.uint8)


def _as_row(row: np.ndarray, tokens: int) -> mx.array:
    return mx.array(row.view(np.uint64).reshape(tokens, len(row) // tokens // 8))
