"""How `kvpool.testing.model` reads its arguments: types first, then values, then duplicates.

Nothing here looks at the state of a pool.
"""

from __future__ import annotations

import operator
from math import inf
from typing import Any

import numpy as np

MIN_INT64, MAX_INT64 = -(2**63), 2**63 - 1
INTS = ("int32", "int64")
BATCH = (list, tuple, np.ndarray)  #: what has items; else an argument is one


def own(call: str, value: Any) -> Any:
    """An argument as the call's own, before it is judged: what its owner does to it later changes nothing.

    Numbers become ints, lists and arrays are copied. What no call accepts is refused where its turn comes.
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


def typed(call: str, name: str, value: Any, kind: Any) -> Any:
    """A value of this type, or of one of several."""
    if not isinstance(value, kind):
        needed = getattr(kind, "__name__", kind)
        raise TypeError(f"[{call}] {name} is a {type(value).__name__} ({value!r}), it must be {needed}")
    return value


def integer(call: str, name: str, value: Any, low: float = -inf, high: float = inf) -> int:
    """An int within ``low .. high``; bools and floats are none."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"[{call}] {name} is a {type(value).__name__} ({value!r}), an int is needed")
    if not low <= number <= high:
        raise ValueError(f"[{call}] {name} is out of range ({number}), {low} .. {high} is legal")
    return number


def count(call: str, name: str, value: Any) -> int:
    return integer(call, name, value, 0, MAX_INT64)


def integers(call: str, name: str, values: Any, dtypes: tuple[str, ...] = INTS) -> list[int]:
    """A batch: a list, a tuple, or a 1-D contiguous array of one of `dtypes`; an int is a batch of one."""
    if not isinstance(values, np.ndarray):
        return [integer(call, name, value) for value in (values if isinstance(values, BATCH) else [values])]
    if values.dtype not in [np.dtype(d) for d in dtypes]:
        raise TypeError(f"[{call}] {name} has dtype {values.dtype}, {' or '.join(dtypes)} is needed")
    if values.ndim != 1 or not values.flags.c_contiguous or not values.flags.aligned:
        raise ValueError(f"[{call}] {name} must be aligned, contiguous and have one dimension ({values.ndim})")
    return values.tolist()


def refuse_duplicates(call: str, name: str, values: list[int]) -> None:
    for place, value in enumerate(values):
        if value in values[:place]:
            raise ValueError(f"[{call}] {name} has a duplicate ({value})")


def handles(call: str, values: Any, is_unique: bool = True) -> list[int]:
    """A batch of handles, not decoded yet.

    Negative ones are refused where they must be unique; else whoever judges row by row meets them in their turn.
    """
    batch = integers(call, "handles", values, ("int64",))
    for handle in batch:
        integer(call, "handle", handle, 0 if is_unique else MIN_INT64, MAX_INT64)
    if is_unique:
        refuse_duplicates(call, "handles", batch)
    return batch


def per_row(call: str, name: str, values: Any, num_rows: int, low: int = 0) -> list[int]:
    """One int >= `low` per row, from one int for all rows or one per row."""
    if not isinstance(values, BATCH) or np.ndim(values) == 0:
        return [integer(call, name, values, low, MAX_INT64)] * num_rows
    batch = integers(call, name, values)
    if len(batch) != num_rows:
        raise ValueError(f"[{call}] {name} has {len(batch)} entries, the batch has {num_rows} rows")
    return [integer(call, name, value, low, MAX_INT64) for value in batch]


def tokens(call: str, values: Any) -> list[int]:
    """Token ids, ``0 .. 2^31 - 1``."""
    if not isinstance(values, BATCH):
        raise TypeError(f"[{call}] tokens is a {type(values).__name__}, a list or an array of ints is needed")
    return [integer(call, "a token", token, 0, 2**31 - 1) for token in integers(call, "tokens", values)]


def how_to_open(call: str, tokens: Any, namespace: Any, reserve: Any, load: Any) -> None:
    """Judge the flags of a call that opens a sequence, and the namespace."""
    typed(call, "reserve", reserve, bool)
    if typed(call, "load", load, bool) and not reserve:
        raise ValueError(f"[{call}] load is True and reserve is False")
    typed(call, "namespace", namespace, bytes)
    if isinstance(tokens, int) and not reserve:
        raise ValueError(f"[{call}] reserve is False for a count of {tokens} tokens, a prompt is needed")
