"""A pool beside its model: the same call on both, and everything that can be read compared.

`Pair` compares what a call returned or raised, then statistics, tables, lengths and reference counts, and every array
of a plan that was filled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvpool.errors import KVPoolError

LOCAL_BITS = 52  # of a handle; above them is the tag, which differs from pool to pool

#: What `Pair.both` returns when both sides raised the same.
RAISED = object()
#: The plans of every machine; together they have every format, both dtypes, own pads and tight limits.
PLANS: tuple[dict[str, Any], ...] = (
    {
        "max_rows": 8,
        "max_tokens": 64,
        "formats": ("block_tables", "seq_lens", "slot_mapping", "positions", "cu_q_lens", "slot_ids"),
    },
    {
        "max_rows": 8,
        "max_tokens": 96,
        "formats": ("csr", "kv_slots", "kv_slots_ragged", "block_tables"),
        "dtype": "int64",
        "pad": {"kv_slots": -7, "block_tables": -9},
    },
    {"max_rows": 6, "max_tokens": 24, "formats": ("page_batch_info",), "dtype": {"slot_mapping": "int64"}},
    {"max_rows": 3, "max_tokens": 9, "formats": ("csr", "kv_slots_ragged"), "table_width": 8, "kv_width": 40},
)
ARRAYS = (
    ("block_tables", "seq_lens", "slot_mapping", "positions", "cu_q_lens", "slot_ids"),
    ("indptr", "indices", "last_page_len", "kv_slots", "kv_slots_ragged", "kv_indptr", "block_tables"),
    ("slot_ids", "block_tables", "seq_lens", "cu_q_lens", "slot_mapping"),
    ("indptr", "indices", "last_page_len", "kv_slots_ragged", "kv_indptr"),
)
TOKEN_FIELDS = ("num_tokens", "is_pending", "step_id")
ALWAYS = ("copies", "dirty_rows", "served")


def local(handle: int) -> int:
    """The part of a handle that two equal pools agree on."""
    return int(handle) & (1 << LOCAL_BITS) - 1


class Side:
    """One pool with its plans; handles are named by their local part."""

    def __init__(
        self,
        make_pool: Callable,
        make_plan: Callable,
        options: dict[str, Any],
        plans: tuple[dict[str, Any], ...] = PLANS,
    ) -> None:
        self.pool = make_pool(**options)
        self._make_plan = make_plan
        first = self.pool.open()  # the only way to learn the tag
        self.pool.close(first)
        self._first = int(first)  # of row 0, with the tag and the first generation of this pool
        self.plans = [make_plan(self.pool, **plan) for plan in plans]
        self._foreign: list[Any] = []

    def handle(self, name: int) -> int:
        """The full handle of a local one."""
        return self._first + name

    def name(self, handle: int) -> int:
        """The local part of a handle: its row, and how many generations behind the first."""
        return int(handle) - self._first

    def batch(self, names: list[int], as_array: bool) -> Any:
        """Full handles, as a list or as an array."""
        handles = [self.handle(name) for name in names]
        return np.array(handles, np.int64) if as_array else handles

    def foreign_plan(self) -> Any:
        """An idle plan of another pool of the same kind."""
        if not self._foreign:
            other = type(self.pool)(4, 2)
            self._foreign = [other, self._make_plan(other, 2)]
        return self._foreign[1]

    def shutdown(self) -> None:
        """Give the tags back."""
        for pool in [self.pool, *self._foreign[:1]]:
            pool.shutdown()


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tolist())
    return value


def _outcome(call: Callable, side: Side) -> tuple[Any, Exception | None]:
    try:
        return call(side), None
    except Exception as error:  # whatever it is, the other side must raise it as well
        return None, error


_NUMBERS = ("needed", "short_by", "row", "blank", "evictable", "limbo", "arena")


def _same_error(got: Exception, want: Exception, test: Side, oracle: Side) -> bool:
    if type(got) is not type(want):
        return False
    for name in _NUMBERS:
        if getattr(got, name, None) != getattr(want, name, None):
            return False
    one, other = getattr(got, "handle", -1), getattr(want, "handle", -1)
    return one == other or test.name(one) == oracle.name(other)


class Pair:
    """The pool under test beside the oracle."""

    def __init__(self, test: Side, oracle: Side) -> None:
        self.test, self.oracle = test, oracle
        self._shown: dict[tuple[int, str], np.ndarray] = {}

    def both(self, call: Callable[[Side], Any], handles: bool = False) -> Any:
        """Make a call on both sides; returns what it returned, or `RAISED` when both raised the same.

        `handles` says that handles are returned: they are compared, and returned, by their local part.
        A call that raises must leave the fingerprint and the digest as they were.
        """
        want, error = _outcome(call, self.oracle)
        if error is not None:
            pool = self.test.pool
            before = pool.fingerprint(), pool.digest()
            got, raised = _outcome(call, self.test)
            if raised is None:
                raise AssertionError(f"returned {got!r}, {type(error).__name__} was due: {error}")
            if not _same_error(raised, error, self.test, self.oracle):
                raise AssertionError(
                    f"raised {type(raised).__name__}: {raised} {vars(raised)}, "
                    f"due was {type(error).__name__}: {error} {vars(error)}"
                ) from raised
            if isinstance(raised, KVPoolError):
                assert str(raised).startswith("["), f"message without its call: {raised}"
            assert (pool.fingerprint(), pool.digest()) == before, f"state changed by a call that raised: {raised}"
            return RAISED
        got = call(self.test)
        if handles:
            assert np.asarray(got).dtype == np.asarray(want).dtype
            want = list(map(self.oracle.name, np.atleast_1d(want)))
            got = list(map(self.test.name, np.atleast_1d(got)))
        assert _plain(got) == _plain(want), f"returned {got!r}, {want!r} was due"
        return got

    def could_open(self, *prompt: Any, **how: Any) -> Any:
        """Ask both sides whether a prompt could be opened: that changes nothing."""
        before = self.test.pool.fingerprint(), self.test.pool.digest()
        could = self.both(lambda side: side.pool.can(tokens=prompt[0], namespace=prompt[1], **how))
        assert before == (self.test.pool.fingerprint(), self.test.pool.digest()), "can(tokens=) changed the pool"
        return could

    def compare_state(self) -> dict[int, list[int]]:
        """Compare everything that can be read; returns the tables of the open sequences."""
        test, oracle = self.test.pool, self.oracle.pool
        got, want = test.stats(), oracle.stats()
        assert tuple(got) == tuple(want), f"stats: {got}, due {want}"
        if oracle.prefix is not None:
            got, want = test.prefix.stats(), oracle.prefix.stats()
            assert tuple(got) == tuple(want), f"prefix.stats: {got}, due {want}"
        state = oracle.state()
        tables = {}
        for name, (length, table, _, _, (evicted, _)) in state["sequences"].items():
            handle = self.test.handle(name)
            tables[name] = test.table(handle).tolist()
            assert tables[name] == table, f"table of {name}: {tables[name]}, due {table}"
            assert test.kv_len(handle) == length, f"kv_len of {name}"
            assert test.num_tokens(handle) == length + evicted, f"num_tokens of {name}"
            assert test.capacity(handle) == len(table) * test.block_size, f"capacity of {name}"
            assert test.is_open(handle), f"is_open of {name}"
        for block in range(test.options.reserved_blocks, test.num_blocks):
            count, due = test.blocks.refcount(block), state["refcounts"].get(block, 0)
            assert count == due, f"refcount of {block}: {count}, due {due}"
        for mine, due in zip(self.test.plans, self.oracle.plans, strict=True):
            assert mine.is_pending == due.is_pending, "is_pending"
        test.check()
        return tables

    def compare_histogram(self) -> None:
        """Compare the refcount histograms."""
        self.both(lambda side: side.pool.blocks.refcount_histogram())

    def compare_plan(self, index: int) -> None:
        """Compare every attribute of a plan that was just filled."""
        mine, due = self.test.plans[index], self.oracle.plans[index]
        for name in TOKEN_FIELDS:
            got, want = getattr(mine, name), getattr(due, name)
            assert got == want, f"plan {index} {name}: {got}, due {want}"
        got, want = list(map(self.test.name, mine.handles)), list(map(self.oracle.name, due.handles))
        assert got == want, f"plan {index} handles: {got}, due {want}"
        for name in ALWAYS + ARRAYS[index]:
            got, want = getattr(mine, name), getattr(due, name)
            assert got.dtype == want.dtype and got.shape == want.shape and (got == want).all(), (
                f"plan {index} {name}: {got.dtype} {got.tolist()}, due {want.dtype} {want.tolist()}"
            )
        for name in ARRAYS[index]:
            shown, key = getattr(mine, name), (index, name)
            before = self._shown.get(key)
            if before is not None and before.shape == shown.shape:
                assert before is shown, f"plan {index} {name} is a new array object though its shape is the same"
            self._shown[key] = shown

    def forget_shown(self, index: int) -> None:
        """Arrays were bound: the attributes are new objects."""
        for name in ARRAYS[index]:
            self._shown.pop((index, name), None)
