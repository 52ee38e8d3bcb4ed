"""Dense caches of MLX servers as bytes: the layout of a list of caches, rows of blocks, copies.

No class is known by name. What a cache has, and what it holds now, decides how it is kept: `role_of`.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map

BLOCK = 16
"""Tokens of a block."""

ROLES = ("rows", "state", "whole", "list")
_PLACES = ("offset", "_idx")  # the number of tokens, in a cache that has a row for each
_BOUNDS = {"max_size", "chunk_size"}
_PIECE = 1 << 20  # bytes that are put in order together
_PAUSE = 2e-5  # seconds between two pieces: a thread that asks for the interpreter may wait 5 ms for it otherwise

_registered: dict[type, str] = {}
_told: set[type] = set()
_log = logging.getLogger(__name__)


def register_cache(cls: type, kind: str) -> None:
    """Say how caches of a class are kept, where their attributes do not tell.

    Parameters
    ----------
    cls : type
    kind : str
        ``"rows"``: `keys` and `values` have a row for each of the first `offset` tokens, so any prefix can be cut.
        ``"state"``: its arrays are valid at one position. ``"whole"``: `copy.deepcopy` copies it. ``"list"``: `caches`
        has other caches.
    """
    if kind not in ROLES:
        raise ValueError(f"[register_cache] kind is {kind!r}, it must be one of {', '.join(ROLES)}")
    _registered[cls] = kind


class Part(NamedTuple):
    """One array of a cache: what it holds of a token, and where that lies in a row of a block."""

    heads: int
    width: int
    dtype: mx.Dtype
    offset: int


class Leaf(NamedTuple):
    """A cache: its class and role; if it has a row per token, its other attributes when empty, and its arrays."""

    kind: type
    role: str
    fields: tuple[tuple[str, Any], ...] = ()
    parts: tuple[Part, ...] = ()

    def cache(self, planes: Sequence[mx.array] = (), length: int = 0) -> Any:
        """Return a cache with the rows of so many tokens."""
        half = len(planes) // 2
        keys, values = planes if half == 1 else (tuple(planes[:half]) or None, tuple(planes[half:]) or None)
        held = {name: length if planes and name in _PLACES else value for name, value in self.fields}
        return made(self.kind, keys=keys, values=values, **held)

    def differs(self, other: Leaf) -> bool:
        """Whether no layer of a model has both: other heads, or other widths in one class with the same attributes."""
        mine, others = ([(part.heads, part.width) for part in leaf.parts] for leaf in (self, other))
        return bool(mine and others) and (mine[0][0] != others[0][0] or (self[:3] == other[:3] and mine != others))


class CacheLayout(NamedTuple):
    """The parts of a list of caches. Sequences of one layout share blocks.

    `is_dense`: every cache has a row per token, so any prefix can be cut from them.
    """

    leaves: tuple[Leaf, ...]
    tree: tuple[Any, ...]
    row_nbytes: int
    is_dense: bool

    @property
    def needs_ends(self) -> bool:
        """Whether some cache has no row per token, or will not have in a longer sequence."""
        return any(leaf.role != "rows" or _BOUNDS & dict(leaf.fields).keys() for leaf in self.leaves)

    def is_of_another_model(self, other: CacheLayout) -> bool:
        """Whether no model has caches of both layouts. Windows that turn, and quantized caches, are of one model."""
        return self.tree != other.tree or any(map(Leaf.differs, self.leaves, other.leaves))

    @property
    def has_arrays(self) -> bool:
        """Whether it knows the arrays of some cache."""
        return any(leaf.role != "whole" for leaf in self.leaves)

    def kept_of(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the caches that are kept whole."""
        return [cache for cache, leaf in zip(leaves, self.leaves, strict=True) if leaf.role != "rows"]

    @property
    def roles(self) -> list[str]:
        """The roles of the caches that are kept whole."""
        return [leaf.role for leaf in self.leaves if leaf.role != "rows"]

    def rows_of(self, leaves: list[Any], begin: int, end: int) -> Iterator[mx.array]:
        """Yield the bytes of tokens begin .. end, one block after the other, each in memory of its own."""
        hosts = []
        for cache, leaf in zip(leaves, self.leaves, strict=True):
            for array, part in zip(arrays_of(cache), leaf.parts, strict=True) if leaf.parts else ():
                if part.heads * part.width:
                    hosts.append((part, host_of(array)[0]))
        piece = max(1, _PIECE // (BLOCK * self.row_nbytes or _PIECE)) * BLOCK
        memory = np.zeros((min(piece, end - begin), self.row_nbytes), np.uint8)
        for start in range(begin, end, piece):
            if start > begin:
                time.sleep(_PAUSE)
            stop = min(start + piece, end)
            rows = memory[: stop - start]
            for part, host in hosts:
                nbytes = part.heads * part.width * part.dtype.size
                place = rows[:, part.offset : part.offset + nbytes].view(host.dtype)
                place.reshape(stop - start, part.heads, part.width)[...] = host[:, start:stop].transpose(1, 0, 2)
            wide = rows.view(np.uint64)  # MLX copies wide numbers faster
            for at in range(0, stop - start, BLOCK):
                yield mx.array(wide[at : at + BLOCK])

    def caches_of(self, rows: np.ndarray, kept: list[Any], length: int) -> list[Any]:
        """Return caches of `length` tokens: views of one copy of the rows, and what was kept whole."""
        data = mx.concatenate(rows.tolist())[:length] if len(rows) and self.row_nbytes else None
        mx.eval([] if data is None else data)
        whole = iter(kept)
        leaves = []
        for leaf in self.leaves:
            planes = [_plane(data, part, 1) for part in leaf.parts] if data is not None else []
            leaves.append(leaf.cache(planes, length) if leaf.role == "rows" else next(whole))
        evaluate(leaves)
        return nested(self.tree, iter(leaves))

    def without_batch(self) -> type | None:
        """Return a class of these caches, or of the lists that they are in, that makes no batches, or None."""
        kinds = (*(leaf.kind for leaf in self.leaves), *_lists_in(self.tree))
        return next((kind for kind in kinds if not hasattr(kind, "merge")), None)

    def batch_of(self, rows: Sequence[np.ndarray | list[mx.array]], lengths: list[int]) -> list[Any] | None:
        """Return batches of sequences whose caches all have rows: views of one copy. None: a batch is of another kind.

        Every class has a batch.
        """
        most, pieces = max(lengths), []
        for each, length in zip(rows, lengths, strict=True):
            pieces += [mx.zeros((most - length, self.row_nbytes // 8), mx.uint64), *each[:-1]]
            pieces += [each[-1][: length - BLOCK * (len(each) - 1)]] if len(each) else []
        batches = []
        for leaf in self.leaves:
            kind: Any = leaf.kind
            batch: Any = kind.merge([leaf.cache() for _ in rows]) if len(leaf.parts) == 2 else None
            if not {"keys", "values", "offset", "left_padding", "_idx"} <= getattr(batch, "__dict__", {}).keys():
                return None
            batches.append(batch)
        data = mx.concatenate(pieces)
        mx.eval(data)
        for leaf, batch in zip(self.leaves, batches, strict=True):
            batch.keys, batch.values = (_plane(data, part, len(rows)) for part in leaf.parts)
            batch.left_padding = mx.array([most - length for length in lengths])
            batch.offset, batch._idx = mx.array(lengths), most
            if hasattr(batch, "_offset"):
                batch._offset = most
        evaluate(batches)
        return nested(self.tree, iter(batches))

    def empty_of(self, kept: Sequence[Any]) -> list[Any]:
        """Return caches of no tokens. `kept` are such as the layout keeps whole."""
        whole = [copied(cache, lambda array: None) for cache in kept]
        for cache in whole:
            vars(cache).update({name: 0 for name in (*_PLACES, "start_position") if name in vars(cache)})
        return self.caches_of(np.empty(0, object), whole, 0)


def bound_of(cache: Any) -> int | None:
    """Return the most tokens that a window or a chunk needs, None for other caches."""
    held = getattr(cache, "__dict__", {})
    if {"max_size", "keep", "_idx"} <= held.keys():
        return int(cache.max_size)
    return int(cache.chunk_size) if {"chunk_size", "start_position"} <= held.keys() else None


def place_of(cache: Any) -> int | None:
    """Return how many tokens a cache holds, None if it is empty or does not say."""
    held = getattr(cache, "__dict__", {})
    place = held.get("offset")
    return place if type(place) is int and held.get("keys", place) is not None else None


def is_empty(cache: Any) -> bool:
    """Whether a cache holds nothing yet."""
    return role_of(cache) != "whole" and not arrays_in(vars(cache))


def role_of(cache: Any, windows: bool = True) -> str:
    """Return how a cache is kept.

    A window that has not turned, and a chunk that begins at 0, have all rows. Without `windows` they are states.
    """
    held, known = getattr(cache, "__dict__", {}), _registered.get(type(cache))
    if known not in (None, "rows"):
        return str(known)
    if known is None and isinstance(held.get("caches"), (list, tuple)):
        return "list"
    if {"keys", "values", "offset"} <= held.keys() and _has_rows(cache, known == "rows", windows):
        return "rows"
    if all(map(_is_plain, held.values())) and not all(map(_is_scalar, held.values())):
        return "state"
    if type(cache) not in _told:
        _told.add(type(cache))
        name = type(cache).__qualname__
        _log.warning("[insert] %s is not known: it is kept whole, and found where a prompt ends", name)
    return "whole"


def _has_rows(cache: Any, is_registered: bool, windows: bool) -> bool:
    held, bound = vars(cache), bound_of(cache)
    others = (value for name, value in held.items() if name not in ("keys", "values"))
    if type(cache.offset) is not int or not (is_registered or all(map(_is_scalar, others))):
        return False
    if bound is None:
        can_trim = getattr(cache, "is_trimmable", lambda: True)()
        if not is_registered and ("max_size" in held or not can_trim):  # it may need that room
            return False
    elif not windows or cache.offset > bound or held.get("start_position") or held.get("_idx", 0) > cache.offset:
        return False
    if cache.keys is None:
        return not cache.offset
    return held.get("_idx", cache.offset) == cache.offset and all(
        isinstance(array, mx.array) and array.ndim == 4 and array.shape[0] == 1 and array.shape[2] >= cache.offset
        for array in arrays_of(cache)
    )


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float, str))


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (mx.array, int, float, str))


def leaves_of(caches: Sequence[Any]) -> tuple[list[Any], tuple[Any, ...]]:
    """Return the caches in one list, and the shape of the nested lists: None, or a class and the shape in it.

    A batch of one row is returned as the cache of that row.
    """
    leaves: list[Any] = []
    tree: list[Any] = []
    for cache in caches:
        if role_of(cache) == "list":
            below, shape = leaves_of(cache.caches)
            leaves += below
            tree.append((type(cache), shape))
        else:
            keys = getattr(cache, "keys", None)
            is_row = isinstance(keys, mx.array) and keys.shape[0] == 1 and hasattr(cache, "left_padding")
            leaves.append(cache.extract(0) if is_row else cache)
            tree.append(None)
    return leaves, tuple(tree)


def _lists_in(tree: tuple[Any, ...]) -> Iterator[type]:
    for node in filter(None, tree):
        yield node[0]
        yield from _lists_in(node[1])


def nested(tree: tuple[Any, ...], leaves: Iterator[Any]) -> list[Any]:
    """Return caches in the nested lists that they were in."""
    return [next(leaves) if node is None else made(node[0], caches=tuple(nested(node[1], leaves))) for node in tree]


def made(kind: type, /, **fields: Any) -> Any:
    """Return an object with these attributes."""
    new: Any = object.__new__(kind)
    vars(new).update(fields)
    return new


def arrays_of(cache: Any) -> list[mx.array]:
    """Return the arrays of a cache of keys and values."""
    if isinstance(cache.keys, mx.array) and isinstance(cache.values, mx.array):
        return [cache.keys, cache.values]
    found: Any = tree_flatten([cache.keys, cache.values])
    return [array for _, array in found]


def layout_of(leaves: list[Any], tree: tuple[Any, ...], windows: bool = True) -> CacheLayout:
    """Return the layout. Without `windows`, windows and chunks are states whatever they hold."""
    found, offset = [], 0
    for cache in leaves:
        role, parts = role_of(cache, windows), []
        if role != "rows":
            found.append(Leaf(type(cache), role))
            continue
        for array in arrays_of(cache) if cache.keys is not None else ():
            offset = -(-offset // array.dtype.size) * array.dtype.size
            parts.append(Part(array.shape[1], array.shape[3], array.dtype, offset))
            offset += array.shape[1] * array.shape[3] * array.dtype.size
        fields = vars(cache) | {name: 0 for name in _PLACES if name in vars(cache)}
        others = sorted((name, value) for name, value in fields.items() if name not in ("keys", "values"))
        found.append(Leaf(type(cache), role, tuple(others), tuple(parts)))
    return CacheLayout(tuple(found), tree, -(-offset // 8) * 8, all(leaf.role == "rows" for leaf in found))


def _plane(data: mx.array, part: Part, rows: int) -> mx.array:
    """Return the view ``[rows, heads, tokens, width]`` of one array of a cache."""
    size, first = part.heads * part.width, part.offset // part.dtype.size
    plane = data.view(part.dtype)[:, first : first + size]
    return plane.reshape(rows, data.shape[0] // rows, part.heads, part.width).transpose(0, 2, 1, 3)


def nbytes_of(cache: Any, role: str) -> int:
    """Bytes of a cache that is kept whole, after it is cut to what it needs."""
    held = compact(cache) if role == "state" else cache
    slots = [getattr(held, name, None) for kind in type(held).__mro__ for name in getattr(kind, "__slots__", ())]
    nbytes = sum(array.nbytes for array in arrays_in([getattr(held, "__dict__", None), slots]))
    try:
        return nbytes if role == "state" else max(nbytes, int(cache.nbytes))
    except (AttributeError, NotImplementedError):  # it has none, or mlx-lm's base class, which raises
        return nbytes


def evaluate(caches: Sequence[Any]) -> None:
    """Compute all arrays of these caches. Streams of MLX belong to a thread: another one could not do it later."""
    mx.eval([getattr(cache, "__dict__", None) for cache in caches])


def arrays_in(value: Any) -> list[mx.array]:
    """Return the arrays in dicts, lists and tuples."""
    found: Any = tree_flatten(value)
    return [item for _, item in found if isinstance(item, mx.array)]


def compact(cache: Any) -> Any:
    """Return a cache like this one without the tokens that it will not read again."""
    held, bound = vars(cache), bound_of(cache)
    if bound is None or not isinstance(cache.keys, mx.array) or len(held.keys() & {"_idx", "start_position"}) != 1:
        return cache
    cut = copy.copy(cache)
    planes = cache.keys, cache.values
    if "start_position" in held:
        end = cache.offset - cache.start_position
        begin = max(0, end - bound)
        cut.start_position += begin
        cut.keys, cut.values = (plane[..., begin:end, :] for plane in planes)
    elif cache.keys.shape[2] > bound:
        keep, first = cache.keep, cache.keys.shape[2] - bound + cache.keep
        cut.keys, cut.values = (
            mx.concatenate([plane[..., :keep, :], plane[..., first:, :]], axis=2) for plane in planes
        )
        cut._idx = bound
    else:
        cut.keys, cut.values = (plane[..., : cache.offset, :] for plane in planes)
    return cut


def copied(cache: Any, array: Callable[[mx.array], Any], role: str = "state") -> Any:
    """Return a copy of a cache that is kept whole, with ``array(x)`` for its arrays."""
    if role != "state":
        return copy.deepcopy(cache)
    twin = copy.copy(compact(cache))
    vars(twin).update(tree_map(lambda each: array(each) if isinstance(each, mx.array) else each, vars(twin)))
    return twin


def host_of(array: mx.array) -> np.ndarray:
    """Return the memory of an array as unsigned numbers."""
    known = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array  # NumPy has no bfloat16
    return np.asarray(known).view(f"u{array.dtype.size}")


def owned(array: mx.array) -> mx.array:
    """Return a copy in memory of its own."""
    twin = mx.array(np.asarray(host_of(array), order="C")).view(array.dtype)  # MLX takes no negative strides
    mx.eval(twin)  # or only this thread could use it
    return twin
