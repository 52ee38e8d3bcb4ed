"""Programs of arguments in forms that the model reads as lists, and at the ends of what they may be."""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any

import numpy as np

from proof.mutation.scenarios import look, tried

FORMS: dict[str, Callable[[list[int]], Any]] = {
    "memoryview": lambda v: memoryview(np.array(v, np.int64)),
    "native": lambda v: memoryview(np.array(v, np.int64).tobytes()).cast("@q"),
    "native narrow": lambda v: memoryview(np.array(v, np.int32).tobytes()).cast("@i"),
    "native long": lambda v: memoryview(np.array(v, np.int64).tobytes()).cast("@l"),
    "array": lambda v: array.array("q", v),
    "array of longs": lambda v: array.array("l", v),
    "array of ints": lambda v: array.array("i", v),
    "one of two": lambda v: memoryview(array.array("q", [*v[:1], 77]))[::2],
    "locked": lambda v: np.frombuffer(np.array(v, np.int64).tobytes(), np.int64),
    "indices": lambda v: [np.int64(n) for n in v],
    "no dimension": lambda v: np.array(v[0], np.int64),
    "bytes": lambda v: b"12345678",
    "bytes of eight": lambda v: memoryview(b"12345678" * len(v)).cast("b"),
    "unsigned": lambda v: array.array("Q", v),
    "real": lambda v: array.array("d", v),
    "strided": lambda v: memoryview(array.array("q", [n for n in v for _ in range(2)]))[::2],
    "backwards": lambda v: memoryview(array.array("q", v[::-1]))[::-1],
    "deep": lambda v: memoryview(np.array([v], np.int64)),
    "short": lambda v: array.array("h", v),
}  # fmt: skip
REFUSED = {"bytes": TypeError, "bytes of eight": TypeError, "unsigned": TypeError, "real": TypeError,
           "strided": ValueError, "backwards": ValueError, "deep": ValueError, "short": TypeError}  # fmt: skip
FIRST = ("one of two", "no dimension")


class Forms:
    """Makes calls with a batch in one of many forms."""

    def call(self, thing: Any, name: str, form: str, values: list[int], *more: Any) -> Any:
        """The batch is the first argument."""
        return getattr(thing, name)(FORMS[form](values), *more)

    def release(self, blocks: Any, ids: list[int], oldest: Any) -> None:
        """With whatever it is for a flag."""
        blocks.release(ids, oldest=oldest)

    def calling(self, pool: Any, thing: Any, name: str, values: list[int], *more: Any) -> Any:
        """Each integer of the batch makes a call of its own when it is read."""
        return getattr(thing, name)([Calling(pool, n) for n in values], *more)


class FormsOfModel:
    """Makes the same calls with lists."""

    def call(self, thing: Any, name: str, form: str, values: list[int], *more: Any) -> Any:
        """The batch is the first argument."""
        if form in REFUSED and (len(values) > 1 or form not in ("strided", "backwards")):
            raise REFUSED[form](form)
        return getattr(thing, name)(values[0] if form == "no dimension" else values[:1] if form in FIRST else values,
                                    *more)  # fmt: skip

    def release(self, blocks: Any, ids: list[int], oldest: Any) -> None:
        """A flag is a bool."""
        if not isinstance(oldest, bool):
            raise TypeError(oldest)
        blocks.release(ids, oldest=oldest)

    def calling(self, pool: Any, thing: Any, name: str, values: list[int], *more: Any) -> Any:
        """A list."""
        return getattr(thing, name)(list(values), *more)


class Calling:
    """An integer that asks a pool something when it is read."""

    def __init__(self, pool: Any, value: int) -> None:
        self.pool, self.value = pool, value

    def __index__(self) -> int:
        self.pool.blocks.refcount(2)
        return self.value


def batches_in_other_forms(Pool: Any, Plan: Any, Forms: Any) -> None:
    """Buffers of all kinds, each of which is a list of the same numbers; integers that call the pool."""
    forms = Forms()
    pool = Pool(40, 2, max_seqs=4)
    blocks = pool.blocks
    ids = pool.blocks.alloc(20).tolist()
    row = pool.open(5)
    for form in FORMS:
        for some in (ids[:1], ids[:3], ids):
            if some != ids[:1] and form in FIRST and form != "one of two":
                continue
            for name in ("incref", "decref", "touch", "mark_cached", "release", "uncache", "refcounts"):
                tried(forms.call, blocks, name, form, some)
            blocks.refcounts(ids)
    for some in (ids[:1], ids[:3], ids):
        for name in ("incref", "decref", "touch", "mark_cached", "release", "uncache", "refcounts"):
            tried(forms.calling, pool, blocks, name, some)
        blocks.refcounts(ids)
    for oldest in (0, 1, None, "no", True, False):
        tried(forms.release, blocks, ids[:2], oldest)
        blocks.refcounts(ids)
    for name, more in (("can", (1,)), ("truncate", ([0],)), ("close", ())):
        tried(forms.calling, pool, pool, name, [row], *more)
    look(pool)
    pool.shutdown()


def tokens_at_their_limits(Pool: Any, Plan: Any) -> None:
    """The largest token, and the first number that is none."""
    pool = Pool(20, 2, max_seqs=4, prefix_cache=True)
    plan = Plan(pool, 1, 20, formats=("block_tables",))
    for last in (0, 2**31 - 1, 2**31, 2**31 + 1, 2**32, 2**62, -1, -(2**31), -(2**63)):
        for text in ([last], [0, last], [last, 0, 0], [5, last, 7]):
            given = [text, np.array(text, np.int64)]
            given += [np.array(text, np.int32)] if -(2**31) <= last < 2**31 else []
            for form in given:
                tried(pool.prefix.match, form)
                row = tried(pool.open, form)
                if row is None:
                    continue
                new = len(text) - pool.num_tokens(row)
                pool.step(plan, [row], new)
                pool.done(plan)
                pool.prefix.commit(row, form[len(text) - new :])
                pool.prefix.match(form)
                pool.close(row)
    pool.prefix.flush()
    pool.shutdown()


def texts_of_every_length(Pool: Any, Plan: Any) -> None:
    """What is refused is shown, and cut where it is long; numbers around the ends of what C can hold."""
    pool = Pool(8, 2, max_seqs=2)
    blocks = pool.blocks
    for length in (0, 3, 77, 78, 79, 80, 200):
        tried(blocks.take_block, "x" * length)
        tried(blocks.touch, {"x" * length})
    for number in (-1, 0, 7, 8, 2**31, 2**32 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, True, None, 1.0):
        tried(blocks.take_block, number)
        tried(pool.blocks.refcount, number)
        tried(blocks.touch, number)
        tried(blocks.refcounts, number)
        tried(blocks.release, number)
    tried(pool.blocks.alloc, 1)
    pool.shutdown()
