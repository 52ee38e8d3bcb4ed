"""Dense caches of mlx-lm as bytes: the layout of a list of caches, rows of blocks, copies.

`prompt_cache` keeps such rows and copies in memory, `prompt_store` in a store.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    trim_prompt_cache,
)

BLOCK = 16
"""Tokens of a block."""

PER_TOKEN = (KVCache, ConcatenateKVCache, QuantizedKVCache)
STATES = (ArraysCache, RotatingKVCache, ChunkedKVCache)
UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


class Part(NamedTuple):
    """One array of a cache: what it holds of a token, and where that lies in a row of a block."""

    heads: int
    width: int
    dtype: mx.Dtype
    offset: int


class Leaf(NamedTuple):
    """A cache of keys and values per token (its class, the arguments of a new one, its arrays), or one kept whole."""

    kind: type
    arguments: tuple[int, ...]
    parts: tuple[Part, ...]


class CacheLayout(NamedTuple):
    """The parts of a list of caches. Sequences of one layout share blocks."""

    leaves: tuple[Leaf, ...]
    tree: tuple[Any, ...]
    row_nbytes: int


def single(cache: Any) -> Any:
    """Return the one row of a batch as a cache of its own."""
    if isinstance(cache, CacheList):
        return CacheList(*map(single, cache.caches))
    if type(cache) in (BatchKVCache, BatchRotatingKVCache) and not cache.empty() and cache.keys.shape[0] == 1:
        return cache.extract(0)
    return cache


def leaves_of(caches: Sequence[Any]) -> tuple[list[Any], tuple[Any, ...]]:
    """Return the caches in one list, and the shape of the nested lists."""
    leaves: list[Any] = []
    tree: list[Any] = []
    for cache in caches:
        if type(cache) is CacheList:
            below, shape = leaves_of(cache.caches)
            leaves += below
            tree.append(shape)
        else:
            leaves.append(cache)
            tree.append(None)
    return leaves, tuple(tree)


def arrays_of(cache: Any) -> list[mx.array]:
    """Return the arrays of a cache of keys and values per token."""
    planes = [cache.keys, cache.values]
    return [array for plane in planes for array in (plane if isinstance(plane, (list, tuple)) else [plane])]


def layout_of(leaves: list[Any], tree: tuple[Any, ...], length: int) -> CacheLayout:
    """Return the layout. A cache that has not one entry per token and sequence is kept whole."""
    found, offset = [], 0
    for cache in leaves:
        parts: list[Part] = []
        is_dense = type(cache) in PER_TOKEN and cache.keys is not None and cache.offset == length
        for array in arrays_of(cache) if is_dense and arrays_of(cache)[0].shape[0] == 1 else ():
            offset = -(-offset // array.dtype.size) * array.dtype.size
            parts.append(Part(array.shape[1], array.shape[3], array.dtype, offset))
            offset += array.shape[1] * array.shape[3] * array.dtype.size
        arguments = (cache.group_size, cache.bits) if parts and type(cache) is QuantizedKVCache else ()
        found.append(Leaf(type(cache), arguments, tuple(parts)))
    return CacheLayout(tuple(found), tree, -(-offset // 8) * 8)


def rows_of(layout: CacheLayout, leaves: list[Any], begin: int, end: int) -> Iterator[mx.array]:
    """Yield the bytes of tokens begin .. end, one block after the other, each in memory of its own."""
    hosts = []
    for cache, leaf in zip(leaves, layout.leaves, strict=True):
        for array, part in zip(arrays_of(cache), leaf.parts, strict=True) if leaf.parts else ():
            plain = array.view(UNSIGNED[part.dtype.size])
            hosts.append((part, np.asarray(plain)[0] if part.heads * part.width else None))
    for start in range(begin, end, BLOCK):
        stop = min(start + BLOCK, end)
        row = np.zeros((stop - start, layout.row_nbytes), np.uint8)
        for part, host in hosts:
            if host is not None:
                nbytes = part.heads * part.width * part.dtype.size
                place = row[:, part.offset : part.offset + nbytes].view(host.dtype)
                place.reshape(stop - start, part.heads, part.width)[...] = host[:, start:stop].transpose(1, 0, 2)
        yield mx.array(row.view(np.uint64))  # MLX copies wide numbers faster


def caches_of(
    layout: CacheLayout, rows: list[mx.array], kept: list[Any], length: int, excess: int
) -> tuple[list[Any], int]:
    """Return caches of `length` tokens: views of one copy of the rows, and what was kept whole."""
    data = mx.concatenate(rows)[:length] if rows and layout.row_nbytes else None
    mx.eval([] if data is None else data)
    whole = iter(kept)
    leaves = []
    for leaf in layout.leaves:
        if not leaf.parts:
            leaves.append(next(whole))
            continue
        cache = leaf.kind(*leaf.arguments)
        planes = [_plane(data, part) for part in leaf.parts] if data is not None else []
        half = len(planes) // 2
        if half:
            cache.keys, cache.values = planes if half == 1 else (planes[:half], planes[half:])
            cache.offset = length
        leaves.append(cache)
    if excess:
        trim_prompt_cache(kept, excess)
    evaluate(leaves)
    return _nested(layout.tree, iter(leaves)), length


def _plane(data: mx.array, part: Part) -> mx.array:
    """Return the view ``[1, heads, tokens, width]`` of one array of a cache."""
    size, first = part.heads * part.width, part.offset // part.dtype.size
    plane = data.view(part.dtype)[:, first : first + size]
    return plane.reshape(data.shape[0], part.heads, part.width).transpose(1, 0, 2)[None]


def _nested(tree: tuple[Any, ...], leaves: Iterator[Any]) -> list[Any]:
    return [next(leaves) if node is None else CacheList(*_nested(node, leaves)) for node in tree]


def nbytes_of(cache: Any) -> int:
    """Bytes of a cache that is kept whole, after it is cut to what it needs."""
    return sum(array.nbytes for array in _arrays_in(vars(compact(cache)))) if type(cache) in STATES else cache.nbytes


def evaluate(caches: Sequence[Any]) -> None:
    """Compute all arrays of these caches. Streams of MLX belong to a thread: another one could not do it later."""
    mx.eval(_arrays_in([getattr(cache, "__dict__", None) for cache in caches]))


def _arrays_in(value: Any) -> list[mx.array]:
    if isinstance(value, mx.array):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [array for item in items for array in _arrays_in(item)]


def compact(cache: Any) -> Any:
    """Return a cache like this one without the tokens that it will not read again."""
    if type(cache) not in (RotatingKVCache, ChunkedKVCache) or cache.keys is None:
        return cache
    cut = copy.copy(cache)
    planes = cache.keys, cache.values
    if type(cache) is ChunkedKVCache:
        end = cache.offset - cache.start_position
        begin = max(0, end - cache.chunk_size)
        cut.start_position += begin
        cut.keys, cut.values = (plane[..., begin:end, :] for plane in planes)
    elif cache.keys.shape[2] > cache.max_size:
        keep, first = cache.keep, cache.keys.shape[2] - cache.max_size + cache.keep
        cut.keys, cut.values = (
            mx.concatenate([plane[..., :keep, :], plane[..., first:, :]], axis=2) for plane in planes
        )
        cut._idx = cache.max_size
    else:
        cut.keys, cut.values = (plane[..., : cache.offset, :] for plane in planes)
    return cut


def copied(cache: Any, array: Any) -> Any:
    """Return a copy of a cache that is kept whole, with ``array(x)`` for its arrays."""
    if type(cache) not in STATES:
        return copy.deepcopy(cache)
    twin = copy.copy(compact(cache))
    for name, value in vars(twin).items():
        if isinstance(value, (list, tuple)):
            setattr(twin, name, type(value)(array(x) if isinstance(x, mx.array) else x for x in value))
        elif isinstance(value, mx.array):
            setattr(twin, name, array(value))
    return twin


def owned(array: mx.array) -> mx.array:
    """Return a copy in memory of its own."""
    if array.size == 0:
        return array
    twin = mx.array(np.array(array.view(UNSIGNED[array.dtype.size]))).view(array.dtype)
    mx.eval(twin)  # or only this thread could use it
    return twin


def shared(array: mx.array) -> mx.array:
    """Return another array on the same memory: MLX copies it before anybody writes."""
    return copy.deepcopy(array)
