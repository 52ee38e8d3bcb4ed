"""How `kvpool.testing.model` reads its arguments: types first, then values, then duplicates.

Nothing here looks at the state of a pool. `own` comes first, before the call is judged: nothing that the caller's
code or another thread does afterwards to an argument changes what the call was given.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

MIN_INT64, MAX_INT64 = -(2**63), 2**63 - 1


def own(call: str, value: Any) -> Any:
    """Return the argument as the call's own: ints for what has an ``__index__``, copies of lists and arrays.

    What no call accepts stays as it is, and is refused where its turn comes.

    Raises
    ------
    ValueError
        A list changed its length while its items were read.
    """
    if isinstance(value, np.ndarray):
        return value.copy() if value.flags.c_contiguous and value.flags.aligned else value
    if isinstance(value, list | tuple):
        length = len(value)
        items = [own(call, item) for item in value]
        if len(items) != length or len(value) != length:
            raise ValueError(f"[{call}] a list changed its length while it was read ({length})")
        return items
    if hasattr(value, "__index__") and not isinstance(value, bool | np.bool_):
        return operator.index(value)
    return value


def boolean(call: str, name: str, value: Any) -> bool:
    """A flag."""
    if not isinstance(value, bool):
        raise TypeError(f"[{call}] {name} is a {type(value).__name__}, a bool is needed")
    return value


def integer(call: str, name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """Return `value` as an int within ``low .. high``; bools and floats are a TypeError."""
    if isinstance(value, bool):
        raise TypeError(f"[{call}] {name} is a bool ({value}), an int is needed")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"[{call}] {name} is a {type(value).__name__} ({value!r}), an int is needed") from None
    if low is not None and number < low:
        raise ValueError(f"[{call}] {name} is too small ({number}), the least is {low}")
    if high is not None and number > high:
        raise ValueError(f"[{call}] {name} is too large ({number}), the most is {high}")
    return number


def count(call: str, name: str, value: Any) -> int:
    """Return `value` as a number of blocks, tokens or sequences, ``0 .. 2^63 - 1``."""
    return integer(call, name, value, 0, MAX_INT64)


def _array(call: str, name: str, values: np.ndarray, dtypes: tuple[str, ...]) -> list[int]:
    if values.dtype not in [np.dtype(d) for d in dtypes]:
        raise TypeError(f"[{call}] {name} has dtype {values.dtype}, {' or '.join(dtypes)} is needed")
    if values.ndim != 1:
        raise ValueError(f"[{call}] {name} has {values.ndim} dimensions, 1 is needed")
    if not values.flags.c_contiguous:
        raise ValueError(f"[{call}] {name} is not contiguous")
    if not values.flags.aligned:
        raise ValueError(f"[{call}] {name} is not aligned")
    return values.tolist()


def integers(call: str, name: str, values: Any, dtypes: tuple[str, ...]) -> list[int]:
    """Return a batch of ints: a list, a tuple, or a 1-D contiguous array of one of `dtypes`."""
    if isinstance(values, np.ndarray):
        return _array(call, name, values, dtypes)
    if isinstance(values, str | bytes | dict | set) or not isinstance(values, Iterable):
        raise TypeError(f"[{call}] {name} is a {type(values).__name__}, a list or an array of ints is needed")
    return [integer(call, name, value) for value in values]


def refuse_duplicates(call: str, name: str, values: list[int]) -> None:
    """Raise ValueError if a value comes twice."""
    if len(set(values)) != len(values):
        twice = next(v for i, v in enumerate(values) if v in values[:i])
        raise ValueError(f"[{call}] {name} has a duplicate ({twice})")


def one_or_many(call: str, name: str, values: Any, dtypes: tuple[str, ...]) -> list[int]:
    """Return a batch of ints from an int or from a batch."""
    if isinstance(values, np.ndarray | list | tuple):
        return integers(call, name, values, dtypes)
    return [integer(call, name, values)]


def handles(call: str, values: Any, is_unique: bool = True) -> list[int]:
    """Return a batch of handles, not decoded yet; an int is a batch of one.

    Negative ones are refused where they must be unique; else whoever judges row by row meets them in their turn.
    """
    batch = one_or_many(call, "handles", values, ("int64",))
    for handle in batch:
        if not (0 if is_unique else MIN_INT64) <= handle <= MAX_INT64:
            raise ValueError(f"[{call}] handle is out of range ({handle}), 0 .. 2^63 - 1")
    if is_unique:
        refuse_duplicates(call, "handles", batch)
    return batch


def per_row(call: str, name: str, values: Any, num_rows: int, low: int = 0) -> list[int]:
    """Return one int >= `low` per row, from one int for all rows or one per row."""
    if not isinstance(values, np.ndarray | list | tuple) or np.ndim(values) == 0:
        return [integer(call, name, values, low, MAX_INT64)] * num_rows
    batch = integers(call, name, values, ("int32", "int64"))
    if len(batch) != num_rows:
        raise ValueError(f"[{call}] {name} has {len(batch)} entries, the batch has {num_rows} rows")
    for value in batch:
        integer(call, name, value, low, MAX_INT64)
    return batch


def tokens(call: str, values: Any) -> list[int]:
    """Return token ids, ``0 .. 2^31 - 1``, from a list, a tuple, or an int32 or int64 array."""
    batch = integers(call, "tokens", values, ("int32", "int64"))
    for i, token in enumerate(batch):
        integer(call, f"tokens[{i}]", token, 0, 2**31 - 1)
    return batch


def namespace(call: str, value: Any) -> bytes:
    """Return a namespace, which is bytes."""
    if not isinstance(value, bytes):
        raise TypeError(f"[{call}] namespace is a {type(value).__name__} ({value!r}), bytes are needed")
    return value


def is_count(tokens: Any) -> bool:
    """Whether what is to be opened is a number of tokens, no prompt."""
    return not isinstance(tokens, list | tuple | np.ndarray | str | bytes)


def how_to_open(call: str, tokens: Any, namespace_: Any, reserve: Any, load: Any) -> None:
    """Judge the flags of a call that opens a sequence, and the namespace."""
    boolean(call, "reserve", reserve)
    if boolean(call, "load", load) and not reserve:
        raise ValueError(f"[{call}] load is True and reserve is False")
    namespace(call, namespace_)
    if is_count(tokens) and not reserve:
        raise ValueError(f"[{call}] reserve is False for a count of {tokens} tokens, a prompt is needed")


def block_ids(call: str, values: Any, num_blocks: int, reserved: int) -> list[int]:
    """Return a batch of ids of unreserved blocks, without duplicates, from one id or a batch."""
    batch = one_or_many(call, "block id", values, ("int32", "int64"))
    for block in batch:
        if not 0 <= block < num_blocks:
            raise IndexError(f"[{call}] block id is out of range ({block}), the pool has {num_blocks} blocks")
        if block < reserved:
            raise ValueError(f"[{call}] block is reserved ({block}), ids below {reserved} are never allocated")
    refuse_duplicates(call, "block ids", batch)
    return batch


def mask(call: str, values: Any, num_rows: int) -> list[int]:
    """Return the bytes of a row mask: a bool or uint8 array of `num_rows` entries, or so many bools."""
    if isinstance(values, list | tuple) and all(isinstance(value, bool) for value in values):
        values = np.array(values, bool)
    if not isinstance(values, np.ndarray):
        raise TypeError(f"[{call}] mask is a {type(values).__name__}, a bool or uint8 array is needed")
    batch = _array(call, "mask", values, ("bool", "uint8"))
    if len(batch) != num_rows:
        raise ValueError(f"[{call}] mask has {len(batch)} entries, the batch has {num_rows} rows")
    return batch


def check_out(call: str, out: Any, count: int) -> None:
    """Refuse an array that cannot take `count` block ids."""
    if not isinstance(out, np.ndarray) or out.dtype != np.int32:
        raise TypeError(f"[{call}] out must be an int32 array")
    if out.ndim != 1 or len(out) < count or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(f"[{call}] out must be 1-D, contiguous, writable and hold {count} ids")
