"""Programs of calls that are refused, each for one thing that is wrong, and of forms of arguments that are not.

What is wrong is made by `Wrong`, at the moment of the call: an object with an `__index__`, or an array that lies as no
array should, cannot stand on a tape.
"""

from __future__ import annotations

import array
import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

import kvpool
from kvpool.groups import Group
from proof.mutation.scenarios import ARRAYS, FORMATS, core_only, look, place, scenario, tried


class Index:
    """Counts as an integer."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class Failing:
    """Counts as one, but fails when asked; and nobody can show it."""

    def __index__(self) -> int:
        raise ZeroDivisionError("asked for its index")

    def __repr__(self) -> str:
        raise ZeroDivisionError("asked to show itself")


class Growing(list):
    """A list whose first element makes it longer when it is read."""

    def __init__(self, values: list) -> None:
        super().__init__(values)
        outer = self

        class Element:
            def __index__(self) -> int:
                outer.append(7)
                return int(values[0])

        self[:1] = [Element()]


class Lying(list):
    """A list that says it is shorter."""

    def __len__(self) -> int:
        return 0


def misaligned(values: list, kind: str) -> np.ndarray:
    """An array whose elements begin between two places for them."""
    kind_ = np.dtype(kind)
    memory = np.zeros(len(values) * kind_.itemsize + 1, np.uint8)
    found = memory[1:].view(kind_) if values else memory[:0].view(kind_)
    found[:] = values
    return found


NUMBERS: dict[str, Callable[[int], Any]] = {
    "right": lambda n: n,
    "index": Index,
    "numpy": np.int64,
    "bool": lambda n: True,
    "numpy bool": lambda n: np.bool_(True),
    "float": float,
    "text": str,
    "bytes": lambda n: b"1",
    "none": lambda n: None,
    "failing": lambda n: Failing(),
    "negative": lambda n: -1,
    "far negative": lambda n: -(2**63),
    "beyond negative": lambda n: -(2**63) - 1,
    "large": lambda n: 2**31,
    "larger": lambda n: 2**32,
    "huge": lambda n: 2**63 - 1,
    "beyond": lambda n: 2**63,
    "far beyond": lambda n: 10**5000,
    "more": lambda n: n + 1,
    "less": lambda n: n - 1,
    "list": lambda n: [n],
    "zero": lambda n: 0,
}
BATCHES: dict[str, Callable[[list], Any]] = {
    "right": list,
    "tuple": tuple,
    "wide": lambda v: np.array(v, np.int64),
    "narrow": lambda v: np.array(v, np.int64).astype(np.int32),
    "memoryview": lambda v: memoryview(np.array(v, np.int64)),
    "array": lambda v: array.array("q", v),
    "one wide": lambda v: np.array(v[:1], np.int64)[::2],
    "indices": lambda v: [Index(n) for n in v],
    "lying": Lying,
    "growing": Growing,
    "failing": lambda v: [*v[:-1], Failing()],
    "bools": lambda v: [True for _ in v],
    "floats": lambda v: [float(n) for n in v],
    "nested": lambda v: [v],
    "none": lambda v: None,
    "text": lambda v: "12",
    "bytes": lambda v: b"12",
    "set": set,
    "dict": lambda v: dict.fromkeys(v),
    "iterator": iter,
    "object": lambda v: Failing(),
    "beyond": lambda v: [*v[:-1], 2**64],
    "negative": lambda v: [*v[:-1], -1],
    "large": lambda v: [*v[:-1], 2**31],
    "unsigned": lambda v: np.array(v, np.int64).astype(np.uint64),
    "short": lambda v: np.array(v, np.int64).astype(np.int16),
    "real": lambda v: np.array(v, np.float64),
    "real narrow": lambda v: np.array(v, np.float32),
    "foreign order": lambda v: np.array(v, ">i8"),
    "dates": lambda v: np.array(v, "M8[s]"),
    "flat": lambda v: np.array(v[0], np.int64),
    "deep": lambda v: np.array([v], np.int64),
    "strided": lambda v: np.repeat(np.array(v, np.int64), 2)[::2],
    "backwards": lambda v: np.array(v[::-1], np.int64)[::-1],
    "misaligned": lambda v: misaligned(v, "int64"),
    "empty": lambda v: [],
    "empty wide": lambda v: np.zeros(0, np.int64),
    "short by one": lambda v: v[:-1],
    "one more": lambda v: [*v, v[0] + 1],
    "twice": lambda v: [*v, v[0]],
    "one": lambda v: v[0],
    "zeros": lambda v: [0 for _ in v],
}
MASKS: dict[str, Callable[[list], Any]] = {
    "right": lambda v: np.array(v, np.bool_),
    "bytes": lambda v: np.array(v, np.uint8) * 3,
    "raw": bytes,
    "wide": lambda v: np.array(v, np.int64),
    "list": list,
    "none": lambda v: None,
    "short": lambda v: np.array(v[:-1], np.bool_),
    "deep": lambda v: np.array([v], np.bool_),
    "strided": lambda v: np.repeat(np.array(v, np.bool_), 2)[::2],
    "signed": lambda v: np.array(v, np.int8),
}
OUTS: dict[str, Callable[[list], Any]] = {
    "right": lambda v: np.zeros(len(v), np.int32),
    "longer": lambda v: np.zeros(len(v) + 3, np.int32),
    "shorter": lambda v: np.zeros(len(v) - 1, np.int32),
    "wide": lambda v: np.zeros(len(v), np.int64),
    "unsigned": lambda v: np.zeros(len(v), np.uint32),
    "deep": lambda v: np.zeros((1, len(v)), np.int32),
    "strided": lambda v: np.zeros(2 * len(v), np.int32)[::2],
    "locked": lambda v: np.frombuffer(bytes(4 * len(v)), np.int32),
    "list": list,
    "number": lambda v: 3,
}
ZOO: dict[str, dict[str, Callable[[Any], Any]]] = {
    "number": NUMBERS,
    "batch": BATCHES,
    "mask": MASKS,
    "out": OUTS,
    "flag": {"true": lambda v: True, "1": lambda v: 1, "nothing": lambda v: None, "no": lambda v: "no"},
    "name": {
        "right": lambda v: v,
        "text": lambda v: "a",
        "none": lambda v: None,
        "array": lambda v: bytearray(b"a"),
        "derived": lambda v: type("Name", (bytes,), {})(b"a"),
    },
    "plan": {"none": lambda v: None, "number": lambda v: 3, "type": lambda v: int},
    "pad": {
        "right": lambda v: v,
        "list": list,
        "none": lambda v: None,
        "number": lambda v: 3,
        "short": lambda v: (1,),
        "long": lambda v: (1, 2, 3),
        "text": lambda v: ("a", 2),
        "float": lambda v: (2, 3.0),
        "bool": lambda v: (True, 4),
        "few rows": lambda v: (0, v[1]),
        "few tokens": lambda v: (v[0], 0),
        "negative": lambda v: (v[0], -1),
        "rows": lambda v: (99, v[1]),
        "tokens": lambda v: (v[0], 9999),
    },
}


#: Forms of which the model has no word: it reads arrays of numpy and lists, and judges a call in an order of its own.
ONLY_CORE = {
    *("memoryview", "array", "growing", "lying", "flat", "misaligned", "iterator", "zeros", "derived", "raw"),
    *("1", "nothing", "no", "far beyond", "object"),
}


class Wrong:
    """Makes calls with arguments of which one may be wrong."""

    def call(self, target: Any, name: str, *arguments: Any, **named: Any) -> Any:
        """Arguments as they are, or (kind, which, value): made here."""
        method = target if not name else getattr(target, name)
        made = [self.made(value) for value in arguments]
        found = method(*made, **{key: self.made(value) for key, value in named.items()})
        return None if not name else found

    def entered(self, pool: Any) -> bool:
        """Whether a `with` statement gets the pool itself."""
        return pool.__enter__() is pool

    def same(self, thing: Any, name: str) -> bool:
        """Whether an attribute is the same object twice."""
        return getattr(thing, name) is getattr(thing, name)

    def parts(self, plan: Any) -> list[str]:
        """What nobody makes or copies but a plan: its arrays of a layer group."""
        refused = []
        for call in (type(plan.groups[0]), plan.groups[0].__reduce__, plan.groups[1].__reduce__):
            try:
                call()
            except TypeError as error:
                refused.append(str(error))
        return refused

    def half_made(self) -> list[str]:
        """What a pool that is refused while it is made is to its own `__del__`."""
        found = []

        class Refused(kvpool.Pool):
            def __del__(self) -> None:
                try:
                    self.digest()
                except Exception as error:
                    found.append(type(error).__name__)

        tried(Refused, 8, 4, watermark=99)
        gc.collect()
        return found

    @staticmethod
    def made(value: Any) -> Any:
        """What an argument stands for."""
        if isinstance(value, tuple) and len(value) == 3 and isinstance(value[0], str):
            return ZOO[value[0]][value[1]](value[2])
        return value


def each_wrong(wrong: Any, odd: bool, target: Any, name: str, *arguments: Any, **named: Any) -> Iterator[Callable]:
    """One call for each form of each argument that is (kind, value), the others right; `odd`: those of ONLY_CORE."""
    fixed = [(value[0], "right", value[1]) if is_open(value) else value for value in arguments]
    for at, value in enumerate(arguments):
        for which in forms_of(value, odd):
            given = [*fixed[:at], (value[0], which, value[1]), *fixed[at + 1 :]]
            yield lambda given=given: wrong.call(target, name, *given)
    for key, value in named.items():
        for which in forms_of(value, odd):
            yield lambda key=key, which=which, value=value: wrong.call(
                target, name, *fixed, **{key: (value[0], which, value[1])}
            )


def forms_of(value: Any, odd: bool) -> list[str]:
    """The names of the forms that an argument stands for."""
    return [which for which in ZOO[value[0]] if (which in ONLY_CORE) == odd] if is_open(value) else []


def is_open(value: Any) -> bool:
    """Whether an argument stands for all of its forms."""
    return isinstance(value, tuple) and len(value) == 2 and value[0] in ZOO


def calls_of_every_form(plan: Any, rows: list[int], ids: list[int], text: np.ndarray, odd: bool) -> list[tuple]:
    """Public calls that are right, with what may be wrong in them."""
    return [
        ("open", ("number", 3)),
        ("open", ("batch", [5, 6, 7]), ("name", b"a")),
        ("prefix.match", ("batch", [5, 6, 7]), ("name", b"a")),
        ("prefix.pin", ("batch", [5, 6, 7]), ("name", b"a")),
        ("fork", ("number", rows[0]), ("number", 1)),
        ("truncate", ("batch", rows), ("batch", [2, 2, 2])),
        ("truncate", ("number", rows[0]), ("number", 2)),
        ("close_finished", ("batch", rows), ("mask", [0, 0, 0])),
        ("can", ("batch", rows), ("batch", [1, 2, 3])),
        ("can", ("batch", rows), ("number", 2)),
        ("step", plan, ("batch", rows), ("batch", [1, 0, 1])),
        ("step", plan, ("batch", rows), ("number", 1)),
        ("step", ("plan", None), rows, 1),
        ("reserve", plan, ("batch", rows), ("batch", [1, 0, 2])),
        ("reserve", plan, ("batch", rows), ("number", 1)),
        ("unshare", plan, ("batch", rows), ("batch", [2, 2, 2]), ("number", 0)),
        ("done", ("plan", None)),
        ("rollback", ("plan", None)),
        ("compact", ("batch", rows), ("batch", [3, 3, 3]), ("number", 0)),
        ("compact", ("number", rows[0]), ("number", 3), ("number", 0)),
        ("evict_blocks", ("number", rows[1]), ("batch", [0])),
        ("prefix.commit", ("batch", rows), ("batch", text[:3].tolist()), ("batch", [1, 1, 1])),
        ("prefix.commit", ("number", rows[0]), ("batch", [5]), ("number", 1)),
        ("prefix.flush", ("name", b"a")),
        ("blocks.evict", ("number", 1)),
        *([("defer_close", ("number", 1 << 51))] if odd else []),
        ("blocks.alloc", ("number", 2)),
        ("blocks.alloc", ("number", 3)),
        ("blocks.incref", ("batch", ids)),
        ("blocks.incref", ("number", 3)),
        ("blocks.decref", ("batch", ids)),
        ("blocks.mark_cached", ("batch", ids)),
        ("blocks.touch", ("batch", ids)),
        ("blocks.free", ("batch", ids)),
        ("blocks.refcount", ("number", 1)),
        *((name, ("number", rows[2])) for name in ("table", "num_tokens", "kv_len", "capacity", "is_open")),
        *([("close", ("batch", rows[2:])), ("close", ("number", rows[1]))] if odd else []),
    ]


def arguments_of_every_call(Pool: Any, Plan: Any, Wrong: Any, odd: bool = False) -> None:
    """Every public call, every argument, every form of it; `odd`: forms that only the core reads."""
    wrong = Wrong()
    for cached in (False, True):
        pool = Pool(40, 4, max_seqs=8, prefix_cache=cached)
        plan, other = (Plan(pool, 3, 12, formats=FORMATS) for _ in range(2))
        rows = [pool.open(2) for _ in range(3)]
        pool.step(plan, rows, [3, 4, 5])
        pool.done(plan)
        ids = [] if cached else pool.blocks.alloc(3).tolist()
        text = np.arange(9, dtype=np.int32)
        calls = calls_of_every_form(plan, rows, ids, text, odd)
        for name, *arguments in calls:
            if name.startswith("prefix.") and not cached:
                continue
            target, call_name = place(pool, name)
            if cached and any(value == ("batch", []) for value in arguments):
                tried(getattr(target, call_name), [3])
                continue
            named = {"partial": ("flag", False), "pad_to": ("pad", (3, 12))} if name == "step" else {}
            named |= {"out": ("out", [0, 0, 0])} if arguments == [("number", 3)] and call_name == "alloc" else {}
            for call in each_wrong(wrong, odd, target, call_name, *arguments, **named):
                made = tried_all(call)
                if made is not None and call_name in ("open", "pin", "fork", "alloc"):
                    back = pool.blocks.free if call_name == "alloc" else pool.close
                    back(made if isinstance(made, int) else [int(n) for n in made if n > 0])
                if plan.is_pending:
                    look(pool, plan)
                    pool.rollback(plan)
            look(pool, plan, other)
        pool.shutdown()
        for name, *arguments in calls:
            if name not in ("step", "reserve", "unshare", "done", "rollback") and (cached or "prefix" not in name):
                given = [(value[0], "right", value[1]) if is_open(value) else value for value in arguments]
                target, call_name = place(pool, name)
                tried_all(lambda to=target, name=call_name, given=given: wrong.call(to, name, *given))


def tried_all(call: Callable[[], Any]) -> Any:
    """What a call returns that may fail in any way."""
    try:
        return call()
    except Exception:  # a mutant may raise anything; the recording has it
        return None


@scenario
def sizes_of_pools(Pool: Any, Plan: Any) -> None:
    """Every parameter of a pool at its limits and beyond."""
    limits = {
        "max_seqs": (0, 1, 1 << 20, (1 << 20) + 1),
        "max_blocks_per_seq": (0, 1, 9, 10, 1 << 31, None),
        "reserved_blocks": (-1, 0, 1, 9, 10, 11),
        "watermark": (-1, 0, 9, 10, 11),
        "in_order": (0, 1, None, True, "no"),
        "seed": (0, 2**63 - 1),
        "prefix_cache": (0, 1, None, True, "no"),
        "events": (-1, 0, 1, (1 << 30) + 1),
    }
    for blocks, size in ((0, 4), (-1, 4), (1 << 31, 4), ("10", 4), (10, 0), (10, -1), (10, 1 << 62), (10, True)):
        made = tried(Pool, blocks, size)
        if made is not None:
            made.shutdown()
    for name, values in limits.items():
        for value in values:
            pool = tried(Pool, 10, 4, **{"max_seqs": 4} | {name: value})
            if pool is not None:
                _ = (
                    pool.num_blocks,
                    pool.block_size,
                    pool.options.max_seqs,
                    pool.options.max_blocks_per_seq,
                    pool.options.reserved_blocks,
                )
                _ = pool.options.watermark, pool.options.in_order, pool.blocks.num_blank
                rows = [tried(pool.open, n) for n in (0, 9, 36, 40)]
                tried(pool.table, rows[1])
                look(pool)
                pool.shutdown()
    for value in (1, 100):
        pool = tried(Pool, 10, 4, events=value, prefix_cache=True)
        tried(lambda pool=pool: pool.prefix.events())
        pool.shutdown()


def words_about_pools(Pool: Any, Plan: Any, Wrong: Any) -> None:
    """What pools and plans show of themselves, and parameters that only the core has."""
    for name, values in {
        "seed": (-1, 2**63, "1", None),
        "_hash_bits": (-1, 65, 64),
    }.items():
        for value in values:
            made = tried(Pool, 10, 4, **{name: value})
            if made is not None:
                made.shutdown()
    wrong = Wrong()
    pool = Pool(10, 4, max_seqs=4, reserved_blocks=2, watermark=1, in_order=True)
    plan = Plan(pool, 3, 7, kv_width=9, formats=("kv_slots", "block_tables"), table_width=3)
    indexed = Pool(10, 4, max_seqs=4, prefix_cache=True)
    for thing in (pool, plan, pool.blocks, indexed.prefix):
        for name in ("__repr__", "__reduce__"):
            tried(wrong.call, thing, name)
    indexed.shutdown()
    grouped = Pool(10, 4, groups=[Group.full(), Group.state(2)])
    tried(wrong.parts, Plan(grouped, 2, 4))
    grouped.shutdown()
    wrong.same(plan, "block_tables")
    wrong.half_made()
    for size, blocks in ((4, 10), (5, 10), (4, 11)):
        backend = SimpleNamespace(
            spec=SimpleNamespace(block_size=size), num_blocks=blocks, required_formats=("seq_lens",)
        )
        made = tried(Plan, pool, 3, formats=(), backend=backend)
        if made is not None:
            tried(lambda made=made: made.seq_lens.shape)
    look(pool, plan)
    full = Plan(pool, 3, 7, formats=FORMATS)
    for name in (*ARRAYS, "no such"):
        tried_all(lambda name=name: getattr(full, name).shape)
        tried_all(lambda name=name: getattr(plan, name).shape)
    _ = plan.limits, plan.step_id, plan.handles
    wrong.entered(pool)
    pool.step(plan, [pool.open(3)], 2)
    _ = plan.num_tokens, plan.step_id, plan.handles
    wrong.call(pool, "__exit__", None, None, None)
    wrong.call(pool, "__repr__")
    tried(plan.bind)
    tried(lambda: pool.blocks.num_free)
    pool.shutdown()


#: Of plans: what the model reads as the core does, and what it has no words for.
FORMS: tuple[dict[str, Any], ...] = (
    {"max_rows": 0}, {"max_rows": "3"}, {"max_tokens": -1},
    {"formats": "seq_lens"}, {"formats": ("no such",)},
    {"formats": ()}, {"table_width": 0}, {"kv_width": 0},
    {"dtype": "int16"}, {"dtype": "float32"}, {"dtype": {"seq_lens": "int64"}},
    {"dtype": {"no such": "int64"}}, {"dtype": {"seq_lens": "uint32"}},
    {"pad": {"no such": 3}}, {"pad": {"seq_lens": 7}},
    {"pad": {"seq_lens": -(1 << 31)}}, {"out": {"no such": np.zeros(3, np.int32)}},
    {"out": {"seq_lens": np.zeros(3, np.int64)}},
    {"out": {"seq_lens": np.zeros(3, np.int32)}}, {"out": {"seq_lens": np.zeros(4, np.int32)}},
    {"out": {"seq_lens": np.zeros(3, np.uint32)}},
    {"out": {"seq_lens": np.zeros(6, np.int32)[::2]}}, {"formats": FORMATS}, {"formats": ("page_batch_info",)},
)  # fmt: skip
FORMS_OF_THE_CORE: tuple[dict[str, Any], ...] = (
    {"max_rows": 1 << 21}, {"max_tokens": 1 << 31}, {"max_tokens": 0},
    {"table_width": 1 << 31}, {"dtype": np.int64}, {"formats": 3}, {"formats": (3,)}, {"pad": 3}, {"out": 3},
    {"out": {"no such": 3}}, {"out": {"seq_lens": [1, 2]}},
    {"pad": {"seq_lens": "7"}}, {"out": {"seq_lens": np.zeros(3, ">i4")}}, {"pad": {"seq_lens": 1 << 31}},
    {"pad": {"block_tables": -(1 << 31) - 1}}, {"dtype": 3.5}, {"kv_width": (1 << 40) + 1},
    {"formats": ["seq_lens"]}, {"dtype": {"seq_lens": "no such"}},
)  # fmt: skip


@scenario
def plans_of_every_form(Pool: Any, Plan: Any) -> None:
    """Every parameter of a plan right and wrong; arrays of the caller's that fit, and that do not."""
    plans_of(Pool, Plan, FORMS)


@core_only
def plans_of_other_forms(Pool: Any, Plan: Any) -> None:
    """The same of what is no dict, no name and no array at all."""
    plans_of(Pool, Plan, FORMS_OF_THE_CORE)


def plans_of(Pool: Any, Plan: Any, forms: tuple[dict[str, Any], ...]) -> None:
    """Plans of these forms, in pools with and without reserved blocks and with slots beyond int32."""
    pool = Pool(20, 4, max_seqs=4)
    bare = Pool(20, 4, max_seqs=4, reserved_blocks=0)
    wide = Pool(1 << 12, 1 << 20, max_seqs=4)
    for arguments in forms:
        for of in (pool, bare):
            given = {"max_rows": 3} | arguments
            plan = tried(Plan, of, given.pop("max_rows"), given.pop("max_tokens", None), **given)
            if plan is None:
                continue
            handle = of.open()
            tried(of.step, plan, [handle], 2, pad_to=(3, 3))
            look(of, plan)
            if "page_batch_info" in arguments.get("formats", ()):
                _ = plan.slot_ids, plan.block_tables, plan.seq_lens, plan.cu_q_lens, plan.slot_mapping
            if plan.is_pending:
                of.done(plan)
            of.close(handle)
    for wrong in (None, 3, "pool"):
        tried(Plan, wrong, 3)
    for formats, dtype in (
        (("slot_mapping",), "int32"), (("kv_slots",), "int32"), (("kv_slots_ragged",), "int32"),
        (("slot_mapping",), "int64"), (("csr",), "int32"), (("seq_lens", "positions"), "int32"),
    ):  # fmt: skip
        for of in (wide, pool):
            for rows, width in ((2, 3), (1 << 11, 1 << 20), (1 << 11, (1 << 20) - 1)):
                if width < 9 or formats == ("csr",):
                    tried(Plan, of, rows, 4, formats=formats, dtype=dtype, table_width=width) if width < 9 else None
    for one in (pool, bare, wide):
        one.shutdown()


@scenario
def arrays_that_are_bound(Pool: Any, Plan: Any) -> None:
    """Arrays that do not fit, overlap, or come while the plan is pending; nothing is bound then, or all is."""
    pool = Pool(20, 4, max_seqs=4)
    plan = Plan(pool, 3, 6, formats=("block_tables", "seq_lens", "cu_q_lens"), table_width=4)
    rows = [pool.open() for _ in range(3)]
    memory = np.zeros(40, np.int32)
    right = {"seq_lens": np.zeros(3, np.int32), "cu_q_lens": np.zeros(4, np.int32)}
    locked = np.zeros(3, np.int32)
    locked.flags.writeable = False
    turned = np.zeros((4, 3), np.int32).T
    for arrays in (
        {}, {"no such": right["seq_lens"]}, {"positions": np.zeros(6, np.int32)}, {"seq_lens": None},
        {"seq_lens": np.zeros(3, np.int64)}, {"seq_lens": np.zeros(3, np.float32)}, {"seq_lens": np.zeros(2, np.int32)},
        {"seq_lens": np.zeros((3, 1), np.int32)}, {"seq_lens": np.zeros(3, ">i4")}, {"seq_lens": memory[0:6:2]},
        {"seq_lens": locked}, {"block_tables": turned}, {"seq_lens": memory[:3], "cu_q_lens": memory[2:6]},
        {"seq_lens": memory[:3], "cu_q_lens": memory[3:7]}, {"seq_lens": right["seq_lens"], "cu_q_lens": 3},
        {"block_tables": np.zeros((3, 4), np.int32)}, {"block_tables": np.zeros((3, 5), np.int32)}, right,
    ):  # fmt: skip
        tried(plan.bind, **arrays)
        for new in (1, 0):
            tried(pool.step, plan, rows, new)
            look(pool, plan)
            tried(plan.bind, **arrays)
            tried(plan.bind)
            pool.rollback(plan)
        pool.step(plan, rows, 0)
        look(pool, plan)
        pool.done(plan)
        plan.bind()
    pool.shutdown()
