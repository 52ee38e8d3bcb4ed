"""The misuse matrix: every public call of every kind of pool with every kind of wrong argument.

Each case names the documented exception; the message begins with ``[call]`` and shows the value; the pool's
fingerprint, its digest and the plan's contents are what they were. Every case is quick, none is a crash.
"""

from decimal import Decimal
from itertools import product

import numpy as np
import pytest

from kvpool.errors import (
    CapacityExceeded,
    DoubleFree,
    ForeignHandle,
    OutOfBlocks,
    OutOfSequences,
    StaleHandle,
)


class ReprRaises:
    def __repr__(self):
        raise RuntimeError


class Scene:
    """Two pools, a plan of each; handles live, closed and foreign; one raw block."""

    def __init__(self, core, make_any, make_plan, grow):
        self.core = core
        self.pool, self.other = make_any(24, 4), make_any(24, 4)
        self.plan = make_plan(self.pool, 4, 16, table_width=8)
        self.foreign_plan = make_plan(self.other, 4, 16)
        self.a, self.b, self.dead = (self.pool.open() for _ in range(3))
        self.foreign = self.other.open(4)
        for handle in (self.a, self.b):
            grow(self.pool, handle, 6)
        self.pool.close(self.dead)
        self.raw = self.pool.blocks.alloc()
        self.pool.step(self.plan, [self.a, self.b], 1)
        self.pool.done(self.plan)


def make_wrong(scene, **options):
    return scene.core.Pool(**{"num_blocks": 24, "block_size": 4} | options)


@pytest.fixture
def scene(core, make_any, make_plan, grow):
    return Scene(core, make_any, make_plan, grow)


ONE_BLOCK = {
    "incref": lambda s, v: s.pool.blocks.incref(v),
    "decref": lambda s, v: s.pool.blocks.decref(v),
    "free": lambda s, v: s.pool.blocks.free(v),
    "mark_cached": lambda s, v: s.pool.blocks.mark_cached(v),
    "touch": lambda s, v: s.pool.blocks.touch(v),
    "refcount": lambda s, v: s.pool.blocks.refcount(v),
}
ONE_HANDLE = {
    "table": lambda s, v: s.pool.table(v),
    "num_tokens": lambda s, v: s.pool.num_tokens(v),
    "capacity": lambda s, v: s.pool.capacity(v),
    "is_open": lambda s, v: s.pool.is_open(v),
    "fork": lambda s, v: s.pool.fork(v),
    "close": lambda s, v: s.pool.close(v),
    "truncate": lambda s, v: s.pool.truncate(v, 0),
    "kv_len": lambda s, v: s.pool.kv_len(v),
    "compact": lambda s, v: s.pool.compact(v, 1),
    "evict_blocks": lambda s, v: s.pool.evict_blocks(v, [0]),
}
COUNTS = {  # "call parameter": an integer >= 0 is expected
    "alloc n": lambda s, v: s.pool.blocks.alloc(v),
    "evict n": lambda s, v: s.pool.blocks.evict(v),
    "open num_tokens": lambda s, v: s.pool.open(v),
    "fork n": lambda s, v: s.pool.fork(s.a, v),
    "truncate lens": lambda s, v: s.pool.truncate(s.a, v),
    "can num_new": lambda s, v: s.pool.can([s.a], v),
    "step num_new": lambda s, v: s.pool.step(s.plan, [s.a], v),
    "reserve num_new": lambda s, v: s.pool.reserve(s.plan, [s.a], v),
    "compact lens": lambda s, v: s.pool.compact(s.a, v),
    "compact first": lambda s, v: s.pool.compact(s.a, 1, v),
    "unshare lens": lambda s, v: s.pool.unshare(s.plan, [s.a], v),
    "unshare first": lambda s, v: s.pool.unshare(s.plan, [s.a], 1, v),
}
SIZES = ("num_blocks", "block_size", "max_seqs", "max_blocks_per_seq", "reserved_blocks", "watermark", "seed")
CONSTRUCTOR = {f"Pool {name}": (lambda s, v, name=name: make_wrong(s, **{name: v})) for name in SIZES}
HANDLE_BATCH = {
    "close": lambda s, v: s.pool.close(v),
    "truncate": lambda s, v: s.pool.truncate(v, 0),
    "close_finished": lambda s, v: s.pool.close_finished(v, np.ones(2, bool)),
    "can": lambda s, v: s.pool.can(v, 0),
    "step": lambda s, v: s.pool.step(s.plan, v, 0),
    "reserve": lambda s, v: s.pool.reserve(s.plan, v, 0),
    "compact": lambda s, v: s.pool.compact(v, 0),
    "unshare": lambda s, v: s.pool.unshare(s.plan, v, 0),
}
NUM_NEW = {  # one integer per row
    "truncate": lambda s, v: s.pool.truncate([s.a, s.b], v),
    "can": lambda s, v: s.pool.can([s.a, s.b], v),
    "step": lambda s, v: s.pool.step(s.plan, [s.a, s.b], v),
    "reserve": lambda s, v: s.pool.reserve(s.plan, [s.a, s.b], v),
    "compact": lambda s, v: s.pool.compact([s.a, s.b], v),
    "unshare": lambda s, v: s.pool.unshare(s.plan, [s.a, s.b], v),
}
ID_BATCH = {name: call for name, call in ONE_BLOCK.items() if name != "refcount"}
BATCHES = [
    *((kind, call) for kind, calls in (("ids", ID_BATCH), ("handles", HANDLE_BATCH)) for call in calls),
    *(("counts", call) for call in NUM_NEW),
]


def batch_of(scene, kind, call):
    """A call of a batch, two right elements for it, and whether they may be int32."""
    if kind == "ids":
        return ID_BATCH[call], [scene.raw, scene.pool.blocks.alloc()], np.int32
    if kind == "handles":
        return HANDLE_BATCH[call], [scene.a, scene.b], np.int64
    return NUM_NEW[call], [1, 1], np.int32


NOT_AN_INT = {
    "float": 2.0,
    "fraction": 2.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "complex": 2j,
    "bool": True,
    "numpy bool": np.True_,
    "numpy float64": np.float64(2.0),
    "numpy float32": np.float32(2.0),
    "str": "2",
    "bytes": b"2",
    "None": None,
    "Decimal": Decimal(2),
    "object": object(),
    "dict": {},
    "set": {2},
    "0-d float array": np.array(2.0),
}


# --- wrong types ------------------------------------------------------------------------------------------

MEANS_DEFAULT = {("alloc n", "None"), ("Pool max_blocks_per_seq", "None"), ("Pool seed", "None")}


@pytest.mark.parametrize("call", [*COUNTS, *CONSTRUCTOR])
def test_count_of_a_wrong_type_is_a_type_error(scene, refused, call):
    for value, wrong in NOT_AN_INT.items():
        if (call, value) in MEANS_DEFAULT:
            continue
        shown = repr(wrong) if value not in ("dict", "set", "bytes") else None
        with refused(scene.pool, TypeError, call.split()[0], shown, plans=[scene.plan]):
            (COUNTS | CONSTRUCTOR)[call](scene, wrong)


@pytest.mark.parametrize("call", [*ONE_BLOCK, *ONE_HANDLE])
def test_id_of_a_wrong_type_is_a_type_error(scene, refused, call):
    for value, wrong in NOT_AN_INT.items():
        shown = repr(wrong) if value not in ("dict", "set", "bytes", "0-d float array") else None
        with refused(scene.pool, TypeError, call, shown, plans=[scene.plan]):
            (ONE_BLOCK | ONE_HANDLE)[call](scene, wrong)


@pytest.mark.parametrize(("kind", "call"), BATCHES)
def test_wrong_type_inside_a_list_is_a_type_error(scene, refused, kind, call):
    make, (first, _), _ = batch_of(scene, kind, call)
    for value in ["float", "bool", "numpy bool", "numpy float64", "str", "None", "object"]:
        wrong = NOT_AN_INT[value]
        with refused(scene.pool, TypeError, call, repr(wrong), plans=[scene.plan]):
            make(scene, (first, wrong) if kind == "counts" else [first, wrong])


@pytest.mark.parametrize("call", HANDLE_BATCH)
def test_batch_of_handles_that_is_no_batch_is_a_type_error(scene, refused, call):
    for value in ["float", "str", "None", "dict", "set", "object"]:
        with refused(scene.pool, TypeError, call, plans=[scene.plan]):
            HANDLE_BATCH[call](scene, NOT_AN_INT[value])


@pytest.mark.parametrize("call", ["step", "reserve", "unshare", "done", "rollback"])
def test_plan_of_a_wrong_type_or_of_another_pool_is_refused(scene, refused, call):
    arguments = ([scene.a], 1) if call in ("step", "reserve", "unshare") else ()
    for wrong in [None, 3, "plan", object(), np.zeros(3, np.int64)]:
        with refused(scene.pool, TypeError, call):
            getattr(scene.pool, call)(wrong, *arguments)
    with refused(scene.pool, ValueError, call, plans=[scene.foreign_plan]):
        getattr(scene.pool, call)(scene.foreign_plan, *arguments)


@pytest.mark.parametrize(
    "pad_to",
    [8, "ab", (8,), (8, 8, 8), (8.0, 8), (8, True), (None, 8), object()],
    ids=lambda value: type(value).__name__,
)
def test_pad_to_of_a_wrong_type_or_size(scene, refused, pad_to):
    with refused(scene.pool, (TypeError, ValueError), "step", plans=[scene.plan]):
        scene.pool.step(scene.plan, [scene.a], 1, pad_to=pad_to)


# --- wrong values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", COUNTS)
def test_count_that_is_negative_or_beyond_int64_is_a_value_error(scene, refused, call):
    for value in [-1, -(2**31) - 1, -(2**63), -(2**64), 2**63, 2**64, 10**30]:
        with refused(scene.pool, ValueError, call.split()[0], value, plans=[scene.plan]):
            COUNTS[call](scene, value)


HUGE = {  # what a count far beyond the pool, but inside int64, is refused with
    "alloc n": OutOfBlocks,
    "open num_tokens": (CapacityExceeded, ValueError),
    "fork n": (OutOfSequences, ValueError),
    "truncate lens": ValueError,
    "step num_new": CapacityExceeded,
    "reserve num_new": CapacityExceeded,
    "compact lens": ValueError,
    "unshare lens": ValueError,
}


@pytest.mark.parametrize("call", HUGE)
def test_huge_count_does_not_wrap(scene, refused, call):
    for value in [2**31 - 1, 2**31, 2**32 + 1, 2**62, 2**63 - 1]:
        with refused(scene.pool, HUGE[call], call.split()[0], plans=[scene.plan]):
            COUNTS[call](scene, value)


@pytest.mark.parametrize("call", ["step", "reserve"])
def test_sum_of_huge_counts_does_not_wrap(scene, refused, call):
    for values in [[2**62, 2**62], [2**63 - 1, 1], [2**63 - 1, 2**63 - 1], [2**32, 2**32]]:
        with refused(scene.pool, CapacityExceeded, call, plans=[scene.plan]):
            NUM_NEW[call](scene, values)
        with refused(scene.pool, CapacityExceeded, call, plans=[scene.plan]):
            NUM_NEW[call](scene, np.array(values, np.int64))


def test_huge_count_is_legal_where_it_asks_for_nothing(scene):
    for value in (2**31, 2**62, 2**63 - 1):
        assert scene.pool.can([scene.a], value) is scene.pool.can([scene.a, scene.b], [0, value]) is False
        assert scene.pool.blocks.evict(value) == 0


@pytest.mark.parametrize("call", NUM_NEW)
def test_negative_count_in_a_batch_is_a_value_error(scene, refused, call):
    for values in [[-1, 1], [1, -1], np.array([1, -5], np.int32), np.array([-(2**63), 1])]:
        with refused(scene.pool, ValueError, call, min(values), plans=[scene.plan]):
            NUM_NEW[call](scene, values)


@pytest.mark.parametrize("call", NUM_NEW)
def test_counts_of_another_length_than_the_batch_are_a_value_error(scene, refused, call):
    for values in [[], [1], [1, 1, 1], np.zeros(3, np.int32), np.zeros(0, np.int64)]:
        with refused(scene.pool, ValueError, call, len(values), plans=[scene.plan]):
            NUM_NEW[call](scene, values)


@pytest.mark.parametrize("call", ONE_BLOCK)
def test_block_id_outside_the_pool_is_an_index_error(scene, refused, call):
    for value in [-1, 24, 2**31 - 1, 2**31, 2**32 + 5, 2**62, 2**63, 2**64, -(2**31), -(2**64)]:
        with refused(scene.pool, IndexError, call, value):
            ONE_BLOCK[call](scene, value)
        if call in ID_BATCH:
            with refused(scene.pool, IndexError, call, value):
                ONE_BLOCK[call](scene, [scene.raw, value])


@pytest.mark.parametrize("call", ["incref", "decref", "free", "refcount"])
def test_reserved_block_is_a_value_error_in_every_call(scene, refused, call):
    with refused(scene.pool, ValueError, call, 0):
        ONE_BLOCK[call](scene, 0)


@pytest.mark.parametrize("call", ["incref", "decref", "free", "mark_cached"])
def test_block_nobody_holds_is_double_free(scene, refused, call):
    with refused(scene.pool, DoubleFree, call, 20):
        ONE_BLOCK[call](scene, [scene.raw, 20])


@pytest.mark.parametrize("call", [*ONE_HANDLE, *HANDLE_BATCH])
def test_handle_outside_int64_is_a_value_error(scene, refused, call):
    for value in [-1, -(2**63), 2**63, 2**64 + 3]:
        for calls, given in ((ONE_HANDLE, value), (HANDLE_BATCH, [scene.a, value])):
            if call in calls:
                with refused(scene.pool, ValueError, call, value, plans=[scene.plan]):
                    calls[call](scene, given)


@pytest.mark.parametrize("call", HANDLE_BATCH)
def test_stale_foreign_and_duplicate_handles_in_a_batch(scene, refused, call):
    cases = (
        (scene.dead, StaleHandle),
        (scene.foreign, ForeignHandle),
        (0, ForeignHandle),
        (scene.a, ValueError),
    )
    for kind, (handle, exception) in product((list, tuple, np.array), cases):
        with refused(scene.pool, exception, call, handle, plans=[scene.plan]):
            HANDLE_BATCH[call](scene, kind([scene.a, handle]))


CONSTRUCTOR_VALUES = {
    "num_blocks": [0, 1, -1, 2**31, 2**63, 2**64],  # 1: not more than the reserved ones
    "block_size": [0, -16, 2**31, 2**58, 2**63, 2**64],  # 24 * 2^58 > 2^62
    "max_seqs": [0, -1, 2**20 + 1, 2**64],
    "max_blocks_per_seq": [0, -1, 2**63],
    "reserved_blocks": [-1, 24, 2**40],
    "watermark": [-1, 24, 2**64],  # 23 blocks can be allocated
}


@pytest.mark.parametrize("name", CONSTRUCTOR_VALUES)
def test_constructor_value_outside_its_limits_is_a_value_error(scene, refused, name):
    for value in CONSTRUCTOR_VALUES[name]:
        with refused(scene.pool, ValueError, "Pool", value):
            make_wrong(scene, **{name: value})


def test_constructor_product_just_inside_the_limit_is_legal(core):
    core.Pool(4, 2**31 - 1, max_seqs=1, max_blocks_per_seq=1).shutdown()


def test_constructor_without_the_memory_is_a_memory_error(core):
    with pytest.raises(MemoryError, match=r"^\[Pool\] "):
        core.Pool(24, 4, max_seqs=2**20, max_blocks_per_seq=2**31 - 1)  # 8 PiB of tables


# --- arrays -----------------------------------------------------------------------------------------------


def arrays_of(dtype, values, narrow):
    """Arrays that hold the right values in a wrong form: name -> (exception, array)."""
    right = np.array(values, dtype)
    spread = np.zeros(4, dtype)
    spread[::2] = values
    cases = {
        "float64": (TypeError, right.astype(np.float64)),
        "float32": (TypeError, right.astype(np.float32)),
        "float16": (TypeError, np.ones(2, np.float16)),
        "complex": (TypeError, right.astype(complex)),
        "int8": (TypeError, np.ones(2, np.int8)),
        "int16": (TypeError, np.ones(2, np.int16)),
        "uint32": (TypeError, right.astype(np.uint32)),
        "uint64": (TypeError, right.astype(np.uint64)),
        "bool": (TypeError, np.ones(2, bool)),
        "object": (TypeError, right.astype(object)),
        "str": (TypeError, np.array(["1", "2"])),
        "datetime": (TypeError, right.astype("M8[s]")),
        "structured": (TypeError, np.zeros(2, [("x", dtype)])),
        "byte swapped": ((TypeError, ValueError), right.astype(np.dtype(dtype).newbyteorder(">"))),
        "strided": (ValueError, spread[::2]),
        "reversed": (ValueError, right[::-1]),
        "two dimensions": (ValueError, right.reshape(1, 2)),
        "empty, two dimensions": (ValueError, np.zeros((0, 2), dtype)),
        "broadcast": (ValueError, np.broadcast_to(right[:1], (2,))),
    }
    if not narrow:
        cases["int32"] = (TypeError, np.array([1, 2], np.int32))
    return cases


@pytest.mark.parametrize(("kind", "call"), BATCHES)
def test_array_in_a_wrong_form_is_refused(scene, refused, kind, call):
    make, values, dtype = batch_of(scene, kind, call)
    if call == "touch":
        scene.pool.blocks.mark_cached(values)
    for exception, array in arrays_of(dtype, values, narrow=kind != "handles").values():
        with refused(scene.pool, exception, call, plans=[scene.plan]):
            make(scene, array)


def mask_forms():
    return {
        "None": (TypeError, None),
        "int": (TypeError, 1),
        "str": (TypeError, "ab"),
        "int32": (TypeError, np.ones(2, np.int32)),
        "int8": (TypeError, np.ones(2, np.int8)),
        "float": (TypeError, np.ones(2)),
        "object": (TypeError, np.ones(2, object)),
        "too short": (ValueError, np.ones(1, bool)),
        "too long": (ValueError, np.ones(3, np.uint8)),
        "two dimensions": (ValueError, np.ones((1, 2), bool)),
        "strided": (ValueError, np.ones(4, bool)[::2]),
        "no dimension": ((TypeError, ValueError), np.array(True)),
    }


@pytest.mark.parametrize("form", mask_forms())
def test_mask_in_a_wrong_form_is_refused(scene, refused, form):
    exception, mask = mask_forms()[form]
    with refused(scene.pool, exception, "close_finished"):
        scene.pool.close_finished([scene.a, scene.b], mask)


def out_forms():
    read_only = np.zeros(4, np.int32)
    read_only.flags.writeable = False
    return {
        "int64": (TypeError, np.zeros(4, np.int64)),
        "uint32": (TypeError, np.zeros(4, np.uint32)),
        "float32": (TypeError, np.zeros(4, np.float32)),
        "object": (TypeError, np.zeros(4, object)),
        "list": (TypeError, [0, 0, 0, 0]),
        "int": (TypeError, 4),
        "too short": (ValueError, np.zeros(2, np.int32)),
        "empty": (ValueError, np.zeros(0, np.int32)),
        "read only": (ValueError, read_only),
        "two dimensions": (ValueError, np.zeros((2, 2), np.int32)),
        "no dimension": ((TypeError, ValueError), np.array(0, np.int32)),
        "strided": (ValueError, np.zeros(8, np.int32)[::2]),
        "reversed": (ValueError, np.zeros(4, np.int32)[::-1]),
        "byte swapped": ((TypeError, ValueError), np.zeros(4, ">i4")),
    }


@pytest.mark.parametrize("form", out_forms())
def test_alloc_out_in_a_wrong_form_is_refused_before_a_byte_is_written(scene, refused, form):
    exception, out = out_forms()[form]
    with refused(scene.pool, exception, "alloc"):
        scene.pool.blocks.alloc(3, out=out)
    assert not np.any(out) or form == "int"


def test_input_arrays_may_be_read_only(scene):
    handles, new, ids = (
        np.array([scene.a, scene.b]),
        np.array([1, 1], np.int32),
        np.array([scene.raw], np.int32),
    )
    for array in (handles, new, ids):
        array.flags.writeable = False
    scene.pool.step(scene.plan, handles, new)
    scene.pool.blocks.incref(ids)
    assert scene.pool.blocks.refcount(scene.raw) == 2


def test_input_arrays_may_be_the_plans_own(scene):
    """A step reads all its arguments before it writes the arrays of its plan."""
    pool, plan = scene.pool, scene.plan
    pool.step(plan, [scene.b, scene.a], [1, 0])  # lengths 8 and 7
    pool.done(plan)
    lens = plan.groups[0].kv_lens
    assert lens.tolist() == [8, 7]
    pool.truncate(plan.handles, 2)
    pool.step(plan, plan.handles, lens[:2])
    assert plan.handles.tolist() == [scene.b, scene.a]
    assert plan.groups[0].kv_lens.tolist() == [10, 9] and plan.num_tokens == 15


@pytest.mark.parametrize("first, last", [(1, 4), (0, 3), (1, 3), (3, 4)])
def test_handles_may_be_a_part_of_the_plans_own(make_any, make_plan, first, last):
    """The batch without its first row, taken from the array that the step will write the batch to."""
    pool = make_any(24, 4)
    plan = make_plan(pool, 4, 16)
    handles = [pool.open() for _ in range(4)]
    pool.step(plan, handles, 3)
    pool.done(plan)
    pool.step(plan, plan.handles[first:last], 1)
    assert plan.handles.tolist() == handles[first:last]
    assert [pool.num_tokens(h) for h in handles] == [4 if first <= row < last else 3 for row in range(4)]


@pytest.mark.parametrize(("value", "shown"), [("x" * 99, "'" + "x" * 76 + r"\.\.\."), (ReprRaises(), "<ReprRaises>")])
def test_value_that_is_long_or_cannot_be_shown_is_shown_in_part(scene, value, shown):
    with pytest.raises(TypeError, match=rf"\({shown}\)"):
        scene.pool.blocks.alloc(value)


def test_step_with_arguments_missing_or_unknown_is_a_type_error(scene):
    pool = scene.pool
    before = pool.fingerprint()
    for call in (
        lambda: pool.step(),
        lambda: pool.step(scene.plan),
        lambda: pool.step(scene.plan, [scene.a], 1, True),  # partial is keyword only
        lambda: pool.step(scene.plan, [scene.a], 1, nonsense=1),
        lambda: pool.step(scene.plan, [scene.a], 1, partial=1),
        lambda: pool.evict_blocks(scene.a, 1.5),
        lambda: pool.blocks.alloc(1, 2, 3),
        lambda: pool.close(),
        lambda: scene.core.Pool(24),
        lambda: scene.core.Pool(24, 4, 64),  # max_seqs is keyword only
        lambda: scene.core.Plan(pool),
    ):
        with pytest.raises(TypeError):
            call()
    assert pool.fingerprint() == before


# --- batches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["step", "reserve"])
def test_batch_larger_than_the_plan_is_refused(scene, refused, call):
    for handles in ([scene.pool.open() for _ in range(5)], [scene.a] * 100_000):
        with refused(scene.pool, (CapacityExceeded, ValueError), call, plans=[scene.plan]):
            HANDLE_BATCH[call](scene, handles)


def test_fork_of_more_children_than_slots(scene, refused):
    with refused(scene.pool, OutOfSequences, "fork", 63):
        scene.pool.fork(scene.a, 63)


@pytest.mark.parametrize("call", ["close", "truncate", "step", "reserve", "can", "close_finished"])
def test_long_batch_of_dead_handles_is_refused_quickly(scene, refused, call):
    handles = np.full(50_000, scene.dead)
    with refused(scene.pool, (StaleHandle, ValueError, CapacityExceeded), call, plans=[scene.plan]):
        HANDLE_BATCH[call](scene, handles)


@pytest.mark.parametrize("name", ["PLAN", "block_tables ", "", "dirty_rows"])
def test_unknown_format_is_a_value_error(scene, refused, name):
    with refused(scene.pool, ValueError, "Plan", repr(name)):
        scene.core.Plan(scene.pool, 4, formats=(name,))
