"""Programs that go through the C interface: the same pools, whose calls arrive as C arrays and leave as a status."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import numpy as np

import kvpool
from kvpool._core import PrefixCache
from kvpool.groups import Group
from kvpool.testing import ModelPlan, ModelPool
from proof.mutation.scenarios import ARRAYS, FORMATS, tried
from tests.helpers.capi_table import KV_TO_PYTHON, Array, C, Stats, api, call, call_without_gil, function, message

#: Parameters that say how long an array is: nobody can be told that it is longer than it is.
LENGTHS = {
    *(("open_prompt", 2), ("open_prompt", 4), ("step", 4), ("step_padded", 4), ("reserve", 4)),
    *(("commit", 3), ("commit", 5), ("truncate", 3), ("close", 2)),
}


def checked(name: str, *arguments: Any) -> None:
    """Make a call; what it refuses is raised with its words."""
    status = call(name, *arguments)
    if status:
        raise KV_TO_PYTHON[status](message())


def wide(values: Any) -> np.ndarray:
    """The int64 array that C takes."""
    return np.ascontiguousarray(values, np.int64)


class PrefixByC(PrefixCache):
    """The prefix cache of such a pool."""

    def commit(self, handles: Any, tokens: Any, counts: Any = None) -> None:
        rows, known = wide(np.atleast_1d(handles)), np.ascontiguousarray(tokens, np.int32)
        checked("commit", self.pool, rows, None if counts is None else wide(counts), len(rows), known, len(known))


class PoolByC(kvpool.Pool):
    """A pool whose calls go through C, where C has them."""

    def open(self, tokens: Any = 0, namespace: bytes = b"") -> int:
        handle, cached = ctypes.c_int64(), ctypes.c_int64()
        if isinstance(tokens, int):
            checked("open", self, tokens, handle)
        else:
            name = ctypes.create_string_buffer(namespace)
            prompt = np.ascontiguousarray(tokens, np.int32)
            checked("open_prompt", self, prompt, len(prompt), name, len(namespace), handle, cached)
            if cached.value != super().num_tokens(handle.value):
                raise ValueError(f"{cached.value} tokens are cached, says open_prompt")
        return handle.value

    def fork(self, handle: int, n: int = 1) -> np.ndarray:
        children = np.zeros(max(n, 1), np.int64)
        checked("fork", self, handle, n, children)
        return children[: max(n, 0)]

    def truncate(self, handles: Any, lens: Any) -> None:
        rows = wide(np.atleast_1d(handles))
        checked("truncate", self, rows, wide(np.broadcast_to(lens, rows.shape)), len(rows))

    def close(self, handles: Any) -> None:
        rows = wide(np.atleast_1d(handles))
        checked("close", self, rows, len(rows))

    @property
    def prefix(self) -> PrefixByC | None:
        return PrefixByC(self) if self.options.prefix_cache else None

    def step(self, plan: Any, handles: Any, num_new: Any = 1, *, partial: bool = False, pad_to: Any = None) -> None:
        rows = wide(handles)
        new = None if isinstance(num_new, int) and num_new == 1 else wide(np.broadcast_to(num_new, rows.shape))
        flags = C["KVPOOL_PARTIAL"] * partial
        name, *padding = ("step",) if pad_to is None else ("step_padded", *pad_to)
        checked(name, self, plan, rows, new, len(rows), flags, *padding)

    def reserve(self, plan: Any, handles: Any, num_new: Any) -> None:
        rows = wide(handles)
        checked("reserve", self, plan, rows, wide(np.broadcast_to(num_new, rows.shape)), len(rows))

    def done(self, plan: Any) -> None:
        checked("done", self, plan)

    def rollback(self, plan: Any) -> None:
        checked("rollback", self, plan)

    def table(self, handle: int) -> np.ndarray:
        blocks, n = ctypes.c_void_p(), ctypes.c_int64()
        checked("table", self, handle, blocks, n)
        return np.ctypeslib.as_array((ctypes.c_int32 * n.value).from_address(blocks.value or 0)).copy()

    def num_tokens(self, handle: int) -> int:
        tokens = ctypes.c_int64()
        checked("num_tokens", self, handle, tokens)
        return tokens.value


class ReaderByC:
    """Arrays of plans as C sees them."""

    def read(self, plan: Any, name: str) -> np.ndarray:
        """What the last step filled of an array."""
        found = Array()
        checked("array", plan, C[f"KVPOOL_{name.upper()}"], found)
        kind = {1: ctypes.c_uint8, 4: ctypes.c_int32, 8: ctypes.c_int64}[found.itemsize]
        flat = np.ctypeslib.as_array((kind * (found.length * found.width)).from_address(found.data)).copy()
        return flat.reshape(found.length, found.width) if name in ("block_tables", "kv_slots", "copies") else flat


class ReaderOfModel:
    """The same of the model."""

    def read(self, plan: Any, name: str) -> np.ndarray:
        """What the last step filled of an array."""
        return getattr(plan, name)


def arrays_that_c_reads(Pool: Any, Plan: Any, Reader: Any) -> None:
    """Each array after steps of all kinds, padded, partial and empty; and of a plan that has few."""
    reader = Reader()
    for dtype in ("int32", "int64"):
        pool = Pool(40, 4, max_seqs=6, max_blocks_per_seq=6)
        plan, few = Plan(pool, 4, 24, formats=FORMATS, dtype=dtype, kv_width=20), Plan(pool, 4, formats=("seq_lens",))
        rows = [pool.open() for _ in range(4)]
        for new, pad in ((3, None), ([0, 2, 5, 1], None), (1, (4, 24)), (0, (4, 4)), ([1, 1, 1, 2], None)):
            for plan_ in (plan, few):
                tried(pool.step, plan_, rows, new, pad_to=pad)
                for name in ARRAYS if plan_ is plan else ("seq_lens", "copies", "served"):
                    tried(reader.read, plan_, name)
                if plan_.is_pending:
                    pool.done(plan_)
            pool.close(rows[0])
            rows = [*rows[1:], *pool.fork(rows[1], 1).tolist()]
        for handle in rows:
            tried(pool.evict_blocks, handle, [0])
        for handle in (*rows, 7, -1):
            tried(pool.table, handle)
            tried(pool.num_tokens, handle)
        pool.shutdown()


def is_room(value: Any) -> bool:
    """Whether an argument stands for memory that C may write to."""
    return isinstance(value, str)


class Raw:
    """Calls of the table with whatever a C program can get wrong."""

    def call(self, name: str, *arguments: Any) -> tuple:
        """(status, its words, what it wrote)."""
        given = [np.zeros(8, np.int64) if is_room(value) else value for value in arguments]
        status = call(name, *given)
        wrote = [value for value, asked in zip(given, arguments, strict=True) if asked is not value]
        if name == "array" and wrote:
            wrote[0][3] &= 0xFFFFFFFF  # the other half fills the structure
        numbers = [["address" if 1 << 40 < n < 1 << 48 else n for n in value.tolist()] for value in wrote]
        return status, message() if status else "", numbers

    def without_gil(self, name: str, *arguments: Any) -> int:
        """The status."""
        return call_without_gil(name, *arguments)

    def words_without_gil(self) -> bytes:
        """What error_message says then."""
        return function("error_message", ctypes.CFUNCTYPE)()

    def raised_without_gil(self) -> Any:
        """What raise_error returns then: nothing can be raised."""
        return ctypes.CFUNCTYPE(ctypes.c_void_p)(api.raise_error)()

    def raised(self) -> str:
        """What raise_error raises, twice: it is kept once."""
        found = []
        for _ in range(2):
            try:
                function("raise_error")()
            except Exception as error:
                found.append((type(error).__name__, str(error)))
        return str(found)

    def pool_from(self, thing: Any, is_plan: bool = False) -> tuple:
        """Status of a conversion, and whether the pointer is the object."""
        made = ctypes.c_void_p()
        status = call("plan_from" if is_plan else "pool_from", id(thing), made)
        return status, message() if status else "", made.value == id(thing)

    def stats(self, pool: Any, size: int) -> tuple:
        """The numbers, in a structure of so many bytes."""
        memory = ctypes.create_string_buffer(b"\x55" * 5000, 5000)
        status = call("stats", pool, ctypes.addressof(memory), size)
        return status, message() if status else "", memory.raw[: max(0, min(size, 4500))] if not status else b""

    def about(self) -> tuple:
        """Version and size."""
        return api.magic, api.abi_version, api.struct_size, ctypes.sizeof(Stats)


def what_c_can_get_wrong(Pool: Any, Plan: Any, Raw: Any) -> None:
    """NULL in each place, negative sizes, no GIL, flags that nobody knows, failures that are raised later."""
    raw = Raw()
    raw.about()
    pool = Pool(30, 4, max_seqs=4, prefix_cache=True)
    plain = Pool(30, 4, max_seqs=4)
    plan, foreign = Plan(pool, 3, 12, formats=("block_tables", "seq_lens")), Plan(plain, 3, 12)
    handle = pool.open(3)
    one, tokens, ones = np.array([handle]), np.arange(5, dtype=np.int32), np.array([1])
    legal: dict[str, tuple] = {
        "open": (pool, 3, "room"),
        "open_prompt": (pool, tokens, 5, ctypes.create_string_buffer(b"name"), 4, "room", "room"),
        "fork": (pool, handle, 1, "room"),
        "step": (pool, plan, one, ones, 1, 0),
        "step_padded": (pool, plan, one, ones, 1, 0, 2, 4),
        "reserve": (pool, plan, one, ones, 1),
        "done": (pool, plan),
        "rollback": (pool, plan),
        "commit": (pool, one, ones, 1, tokens, 1),
        "truncate": (pool, one, ones, 1),
        "table": (pool, handle, "room", "room"),
        "num_tokens": (pool, handle, "room"),
        "num_free": (pool, "room"),
        "digest": (pool, "room"),
        "array": (plan, 0, "room"),
        "close": (pool, one, 1),
    }
    for name, arguments in legal.items():
        raw.without_gil(name, *(0 if is_room(value) else value for value in arguments))
        for place, value in enumerate(arguments):
            wrongs = (-1, 0) if (name, place) in LENGTHS else (-1, 0, 2, 99, 1 << 40)
            for wrong in wrongs if isinstance(value, int) else (None,):
                given = [*arguments[:place], wrong, *arguments[place + 1 :]]
                raw.call(name, *given)
                if plan.is_pending:
                    raw.call("rollback", pool, plan)
        raw.call("step", pool, plan, one, ones, 1, 0) if name in ("done", "rollback") else None
    for name in ("step", "done", "rollback"):
        raw.call(name, *((plain, plan, one, ones, 1, 0) if name == "step" else (plain, plan)))
        raw.call(name, *((plain, foreign, one, ones, 1, 2) if name == "step" else (plain, foreign)))
    raw.call("commit", plain, one, ones, 1, tokens, 1)
    for name in range(-1, 20):
        raw.call("array", plan, name, "room")
    raw.call("num_tokens", pool, handle ^ 1 << 53, "room")
    raw.raised()
    raw.words_without_gil()
    raw.raised_without_gil()
    for thing in (pool, plan, 5):
        for is_plan in (False, True):
            raw.pool_from(thing, is_plan)
    for size in (-1, 0, 79, 80, 88, 4096, 4097):
        raw.stats(pool, size)
    raw.call("stats", pool, None, 80)
    pool.shutdown()
    for name, arguments in legal.items():
        raw.call(name, *arguments)
    plain.shutdown()
    grouped = Pool(30, 4, max_seqs=4, groups=[Group.full(), Group.window(5, arena=1, num_blocks=20)])
    parts, row = Plan(grouped, 3, 12, formats=("block_tables", "seq_lens")), np.array([grouped.open(3)])
    for name, *more in (("step", row, ones, 1, 0), ("done",), ("reserve", row, ones, 1), ("rollback",)):
        raw.call(name, grouped, parts, *more)
        for asked in ("num_free", "digest"):
            raw.call(asked, grouped, "room")
        raw.call("table", grouped, int(row[0]), "room", "room")
        raw.call("num_tokens", grouped, int(row[0]), "room")
        for array in range(-1, 20):
            raw.call("array", parts, array, "room")
    raw.stats(grouped, 80)
    grouped.shutdown()


class StatusByC:
    """Statuses of the table, and what calls wrote: nothing that another implementation would put otherwise."""

    def __init__(self) -> None:
        self.raw = Raw()
        self.raised()  # what another program left

    def call(self, name: str, *arguments: Any) -> tuple:
        """(status, numbers that it wrote)."""
        status, _, numbers = self.raw.call(name, *arguments)
        return status, [found[:4] if name == "array" else found for found in numbers]

    def kind(self, is_plan: bool, thing: Any, null: str) -> tuple:
        """Status of a conversion, and whether the pointer is the object; `null`: which pointer is none."""
        made = ctypes.c_void_p()
        name = "plan_from" if is_plan else "pool_from"
        status = call(name, 0 if null == "object" else id(thing), 0 if null == "place" else made)
        return status, made.value == id(thing)

    def without_gil(self, name: str, *arguments: Any) -> int:
        """The status."""
        return call_without_gil(name, *arguments)

    def raised(self) -> list[str]:
        """The classes of what is raised when the last failure is asked for twice."""
        found = []
        for _ in range(2):
            try:
                function("raise_error")()
            except Exception as error:
                found.append(type(error).__name__)
        return found

    def counters(self, pool: Any, size: int) -> tuple:
        """The numbers, in a structure of so many bytes, and what is behind them."""
        status, _, memory = self.raw.stats(pool, size)
        return status, np.frombuffer(memory[:80], np.int64).tolist(), memory[80:].count(0), len(memory)


class StatusOfModel:
    """What the contract says of the same calls, made on the model."""

    def __init__(self) -> None:
        self.last = "SystemError"

    def call(self, name: str, *arguments: Any) -> tuple:
        """(status, numbers): of a call that is refused, as they were."""
        rooms = [[0] * 8 for value in arguments if is_room(value)]
        status, made = self.outcome(lambda: getattr(self, name)(*arguments))
        for room, numbers in zip(rooms, made or (), strict=False):
            room[: len(numbers)] = numbers
        if name == "array":
            rooms = [room[:4] for room in rooms]
        return status, rooms

    def outcome(self, call: Any) -> tuple:
        """(status, what came back)."""
        try:
            return 0, call()
        except Exception as error:
            self.last = type(error).__name__
            return next(status for status, kind in KV_TO_PYTHON.items() if isinstance(error, kind)), None

    def kind(self, is_plan: bool, thing: Any, null: str) -> tuple:
        """What a conversion gives."""
        fits = type(thing) is (ModelPlan if is_plan else ModelPool)
        if null or not fits:
            self.last = "ValueError" if null else "TypeError"
            return C["KVPOOL_VALUE_ERROR" if null else "KVPOOL_TYPE_ERROR"], False
        return 0, True

    def without_gil(self, name: str, *arguments: Any) -> int:
        """No call does anything."""
        return C["KVPOOL_NO_GIL"]

    def raised(self) -> list[str]:
        """It is raised once."""
        found, self.last = [self.last, "SystemError"], "SystemError"
        return found

    def counters(self, pool: Any, size: int) -> tuple:
        """The ten numbers, and zeros behind them."""
        if not 80 <= size <= 4096:
            return C["KVPOOL_VALUE_ERROR"], [], 0, 0
        s = pool.stats()
        numbers = [s.num_blocks, s.reserved, s.blank, s.evictable, s.limbo, s.used, s.shared]
        return 0, [*numbers, s.sequences, s.pending, s.tokens], size - 80, size

    @staticmethod
    def needs(*values: Any) -> None:
        """None of these may be NULL."""
        if any(value is None for value in values):
            raise ValueError("NULL")

    @staticmethod
    def batch(values: Any, n: int, is_needed: bool = True) -> Any:
        """The first `n` of an array."""
        if n < 0 or (values is None and n and is_needed):
            raise ValueError("no array")
        return np.zeros(0, np.int64) if values is None else values[:n]

    def open(self, pool: Any, n: int, room: Any) -> list:
        self.needs(pool, room)
        return [[pool.open(n)]]

    def open_prompt(self, pool: Any, prompt: Any, n: int, name: Any, size: int, room: Any, cached: Any) -> list:
        self.needs(pool, room)
        if size < 0 or (size and name is None):
            raise ValueError("no name")
        handle = pool.open(self.batch(prompt, n), name.raw[:size] if name is not None else b"")
        return [[handle], [pool.num_tokens(handle)]]

    def fork(self, pool: Any, handle: int, n: int, room: Any) -> list:
        self.needs(pool, *([room] if n > 0 else []))
        return [pool.fork(handle, n).tolist()]

    def step(self, pool: Any, plan: Any, handles: Any, new: Any, n: int, flags: int, *pad: int) -> None:
        self.needs(pool, plan)
        rows = self.batch(handles, n)
        flags = ctypes.c_int32(flags).value
        if flags & ~1:
            raise ValueError("flags")
        counts = 1 if new is None else self.batch(new, n)
        pool.step(plan, rows, counts, partial=bool(flags), pad_to=pad or None)

    step_padded = step

    def reserve(self, pool: Any, plan: Any, handles: Any, new: Any, n: int) -> None:
        self.needs(pool, plan)
        pool.reserve(plan, self.batch(handles, n), self.batch(new, n))

    def done(self, pool: Any, plan: Any) -> None:
        self.needs(pool, plan)
        pool.done(plan)

    def rollback(self, pool: Any, plan: Any) -> None:
        self.needs(pool, plan)
        pool.rollback(plan)

    def commit(self, pool: Any, rows: Any, counts: Any, n: int, tokens: Any, size: int) -> None:
        self.needs(pool)
        given = None if counts is None else self.batch(counts, n)
        if pool.prefix is None:
            raise ValueError("no prefix cache")
        pool.prefix.commit(self.batch(rows, n), self.batch(tokens, size).astype(np.int32), given)

    def truncate(self, pool: Any, rows: Any, lens: Any, n: int) -> None:
        self.needs(pool)
        pool.truncate(self.batch(rows, n), self.batch(lens, n))

    def close(self, pool: Any, rows: Any, n: int) -> None:
        self.needs(pool)
        pool.close(self.batch(rows, n))

    def table(self, pool: Any, handle: int, blocks: Any, n: Any) -> list:
        self.needs(pool, blocks, n)
        return [["address"], [len(pool.table(handle))]]

    def num_tokens(self, pool: Any, handle: int, room: Any) -> list:
        self.needs(pool, room)
        return [[pool.num_tokens(handle)]]

    def num_free(self, pool: Any, room: Any) -> list:
        self.needs(pool, room)
        return [[pool.stats().blank]]

    def array(self, plan: Any, name: int, room: Any) -> list:
        self.needs(plan, room)
        name = ctypes.c_int32(name).value
        if not 0 <= name < len(C_ARRAYS):
            raise ValueError("no such array")
        found = getattr(plan, C_ARRAYS[name], None)
        if found is None:
            raise ValueError("not asked for")
        return [["address", len(found), found.shape[1] if found.ndim > 1 else 1, found.itemsize]]


#: Arrays in the order of kvpool.h.
C_ARRAYS = (*ARRAYS, "handles")


def statuses(pool: Any, plan: Any, rows: Any, ones: Any, lens: Any, tokens: Any, name: Any) -> tuple[tuple, ...]:
    """Calls of C that are right."""
    one = rows[:1].copy()
    return (
        ("open", pool, 3, "room"),
        ("open_prompt", pool, tokens, 9, name, 4, "room", "room"),
        ("open_prompt", pool, tokens, 5, None, 0, "room", "room"),
        ("fork", pool, int(rows[0]), 2, "room"),
        ("step", pool, plan, rows, ones, 3, 0),
        ("step", pool, plan, rows, None, 2, 1),
        ("step_padded", pool, plan, one, ones, 1, 0, 2, 4),
        ("step_padded", pool, plan, rows, ones, 3, 0, 3, 12),
        ("step_padded", pool, plan, rows, ones, 0, 0, 0, 0),
        ("reserve", pool, plan, rows, ones, 3),
        ("done", pool, plan),
        ("rollback", pool, plan),
        ("commit", pool, one, ones, 1, tokens, 1),
        ("commit", pool, one, None, 1, tokens, 1),
        ("truncate", pool, rows, lens, 3),
        ("table", pool, int(rows[0]), "room", "room"),
        ("num_tokens", pool, int(rows[0]), "room"),
        ("num_free", pool, "room"),
        ("array", plan, 0, "room"),
    )


def with_wrong_arguments(verb: str, arguments: list) -> list[list]:
    """The call as it is, and with each pointer NULL and each number wrong."""
    changed = [arguments]
    for place, value in enumerate(arguments):
        wrongs = (-1, 0) if (verb, place) in LENGTHS else (-1, 0, 2, 5, 99, 1 << 40)
        if (verb, place) in (("fork", 1), ("table", 1), ("num_tokens", 1)):
            wrongs = (0, 1 << 40)
        for wrong in wrongs if isinstance(value, int) else (None,):
            changed.append([*arguments[:place], wrong, *arguments[place + 1 :]])
    return [*changed, arguments]


def statuses_of_every_call(Pool: Any, Plan: Any, Status: Any) -> None:
    """Each call right, with each pointer NULL, each number wrong, the lock not held; what it changed is looked at."""
    status = Status()
    pool, plain = Pool(60, 4, max_seqs=12, prefix_cache=True), Pool(30, 4, max_seqs=4)
    plan = Plan(pool, 3, 12, formats=FORMATS, dtype={"positions": "int64"}, kv_width=30)
    few = Plan(pool, 3, 12, formats=("seq_lens",))
    foreign = Plan(plain, 3, 12)
    status.raised()
    rows = np.array([pool.open(3), pool.open(), pool.open(9)])
    tokens, ones, lens = np.arange(9, dtype=np.int32), np.array([1, 2, 1]), np.array([1, 1, 0])
    name = ctypes.create_string_buffer(b"name")
    legal = statuses(pool, plan, rows, ones, lens, tokens, name)
    ends = ("done", "rollback")
    for turn, (verb, *arguments) in enumerate(legal):
        given = [0 if is_room(value) else value for value in arguments]
        status.without_gil(verb, *given)
        for given in with_wrong_arguments(verb, arguments):
            if verb in ends:
                status.call("step", pool, plan, rows, ones, 3, 0)
            done, made = status.call(verb, *given)
            if plan.is_pending:
                for which in range(-1, 17):
                    status.call("array", plan, which, "room")
                    status.call("array", few, which, "room")
                pool.rollback(plan)
            if done:
                status.raised()
            if not done and verb in ("open", "open_prompt", "fork"):
                pool.close([n for n in made[0] if n])
            for row in rows.tolist():
                pool.num_tokens(row)
                pool.table(row)
        pool.prefix.match(tokens, b"name")
        if turn == 11:
            pool.step(plan, rows, 3)
            pool.done(plan)
    statuses_of_strangers(status, (pool, plan), (plain, foreign), rows, ones, tokens, name)
    counters_of_every_size(status, {pool: plan, plain: foreign})
    pool.shutdown()
    for verb, *arguments in legal:
        if verb != "array":
            status.call(verb, *arguments)
            status.raised()
    plain.shutdown()


def statuses_of_strangers(
    status: Any, own: tuple, strange: tuple, rows: Any, ones: Any, tokens: Any, name: Any
) -> None:
    """Plans of another pool, objects that are none, names and tokens that are wrong."""
    (pool, plan), (plain, foreign), one = own, strange, rows[:1].copy()
    for verb in ("step", "done", "rollback"):
        status.call(verb, *((plain, plan, one, ones, 1, 0) if verb == "step" else (plain, plan)))
        status.call(verb, *((pool, foreign, one, ones, 1, 0) if verb == "step" else (pool, foreign)))
    status.call("commit", plain, one, ones, 1, tokens, 1)
    status.call("close", pool, None, 2)
    status.call("close", None, one, 1)
    status.call("close", pool, one, -1)
    status.call("close", pool, one, 1)
    status.call("close", pool, one, 1)
    for thing, is_plan, null in itertools.product((pool, plan, 5, foreign), (False, True), ("", "object", "place")):
        status.kind(is_plan, thing, null)
        status.raised()
    for given in ((tokens - 1, 9, None, 1), (tokens - 1, 9, name, 4), (tokens, 9, None, 1), (tokens, 9, name, 1)):
        status.call("open_prompt", pool, *given, "room", "room")
        status.raised()
    status.call("commit", pool, rows[1:2].copy(), None, 1, tokens - 1, 1)
    status.raised()


def counters_of_every_size(status: Any, plans: dict[Any, Any]) -> None:
    """What C is told of pools in all states, in structures of any size."""
    for size in (-1, 0, 79, 80, 88, 4096, 4097):
        for of, plan in plans.items():
            twin, ids = of.open(5), of.blocks.alloc(2)
            tried(of.blocks.mark_cached, ids)
            of.blocks.free(ids)
            of.step(plan, [twin], 3)
            of.fork(twin, 1)
            if size == 88:
                of.defer_close(twin)
            status.counters(of, size)
            status.call("num_free", of, "room")
            tried(of.done if size == 80 else of.rollback, plan)
            of.reset()
