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
SIZES = {  # of a pool, and values outside their limits
    "num_blocks": [0, 1, -1, 2**31, 2**63, 2**64],  # 1: not more than the reserved ones
    "block_size": [0, -16, 2**31, 2**58, 2**63, 2**64],  # 24 * 2^58 > 2^62
    "max_seqs": [0, -1, 2**20 + 1, 2**64],
    "max_blocks_per_seq": [0, -1, 2**63],
    "reserved_blocks": [-1, 24, 2**40],
    "watermark": [-1, 24, 2**64],  # 23 blocks can be allocated
    "seed": [],
}
CONSTRUCTOR = {f"Pool {name}": (lambda s, v, name=name: make_wrong(s, **{name: v})) for name in SIZES}
HANDLE_BATCH = {
    "close": lambda s, v: s.pool.close(v),
    "truncate": lambda s, v: s.pool.truncate(v, 0),
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
EITHER = (TypeError, ValueError)
NOT_AN_INT = (
    *(2.0, 2.5, float("nan"), float("inf"), 2j, True, np.True_, np.float64(2.0), np.float32(2.0), "2", b"2", None),
    *(Decimal(2), object(), {}, {2}, np.array(2.0)),
)
TOO_LARGE = (2**63, 2**64, 10**30)
OUTSIDE_INT64 = (-1, -(2**31) - 1, -(2**63), -(2**64), *TOO_LARGE)
MEANS_DEFAULT = ("alloc n", "Pool max_blocks_per_seq", "Pool seed")  # None does


def shown(value):
    """How a message shows a value, where it does so in one way."""
    return None if isinstance(value, (dict, set, bytes, np.ndarray)) else repr(value)


def wrong_counts(scene, call):
    for value in NOT_AN_INT:
        if value is not None or call not in MEANS_DEFAULT:
            yield TypeError, value, shown(value)
    for value in OUTSIDE_INT64 if call in COUNTS else SIZES[call.split()[1]]:
        yield ValueError, value, value


def wrong_blocks(scene, call):
    for value in NOT_AN_INT:
        yield TypeError, value, shown(value)
    for value in (-1, 24, 2**31 - 1, 2**31, 2**32 + 5, 2**62, *TOO_LARGE, -(2**31), -(2**64)):
        yield IndexError, value, value
    if call in ("incref", "decref", "free", "refcount"):
        yield ValueError, 0, 0  # a reserved block


def wrong_handles(scene, call):
    for value in NOT_AN_INT:
        yield TypeError, value, shown(value)
    for value in (-1, -(2**63), 2**63, 2**64 + 3):
        yield ValueError, value, value


def wrong_id_batches(scene, call):
    raw, more = scene.raw, scene.pool.blocks.alloc()
    if call == "touch":
        scene.pool.blocks.mark_cached([raw, more])
    yield from wrong_items(raw)
    for value in (-1, 24, 2**31, 2**32 + 5, 2**63, -(2**64)):
        yield IndexError, [raw, value], value
    for value in (-1, 2**31, 2**32 + 5):
        yield IndexError, np.array([raw, value]), value
    if call in ("incref", "decref", "free", "mark_cached"):
        yield DoubleFree, [raw, 20], 20  # which nobody holds
    yield from wrong_arrays(np.int32, [raw, more], narrow=True)


def wrong_handle_batches(scene, call):
    yield from wrong_items(scene.a)
    for value in (2.0, "2", None, {}, {2}, object()):
        yield TypeError, value, None
    for value in (-1, -(2**63), 2**63, 2**64 + 3):
        yield ValueError, [scene.a, value], value
    cases = ((scene.dead, StaleHandle), (scene.foreign, ForeignHandle), (0, ForeignHandle), (scene.a, ValueError))
    for kind, (handle, exception) in product((list, tuple, np.array), cases):
        yield exception, kind([scene.a, handle]), handle
    many = (CapacityExceeded, StaleHandle, ValueError)
    yield many, np.full(50_000, scene.dead), None
    yield many, [scene.a] * 100_000, None
    yield from wrong_arrays(np.int64, [scene.a, scene.b], narrow=False)


def wrong_counts_per_row(scene, call):
    yield from wrong_items(1, kind=tuple)
    for values in ([-1, 1], [1, -1], np.array([1, -5], np.int32), np.array([-(2**63), 1])):
        yield ValueError, values, min(values)
    for values in ([], [1], [1, 1, 1], np.zeros(3, np.int32), np.zeros(0, np.int64)):
        yield ValueError, values, len(values)
    if call in ("step", "reserve"):  # whose sums do not wrap
        for values in ([2**62, 2**62], [2**63 - 1, 1], [2**63 - 1, 2**63 - 1], [2**32, 2**32]):
            yield CapacityExceeded, values, None
            yield CapacityExceeded, np.array(values, np.int64), None
    yield from wrong_arrays(np.int32, [1, 1], narrow=True)


def wrong_items(first, kind=list):
    for value in (2.0, True, np.True_, np.float64(2.0), "2", None, object()):
        yield TypeError, kind([first, value]), repr(value)


def wrong_arrays(dtype, values, narrow):
    """Arrays that hold the right values in a wrong form. `narrow`: they may be int32."""
    right, spread = np.array(values, dtype), np.zeros(4, dtype)
    spread[::2] = values
    for kind in (np.float64, np.float32, complex, np.uint32, np.uint64, object, "M8[s]"):
        yield TypeError, right.astype(kind), None
    for kind in (np.float16, np.int8, np.int16, bool, [("x", dtype)], *([] if narrow else [np.int32])):
        yield TypeError, np.ones(2, kind), None
    yield TypeError, np.array(["1", "2"]), None
    yield EITHER, right.astype(np.dtype(dtype).newbyteorder(">")), None
    two_dimensions = (right.reshape(1, 2), np.zeros((0, 2), dtype))
    for array in (spread[::2], right[::-1], *two_dimensions, np.broadcast_to(right[:1], (2,))):
        yield ValueError, array, None


MATRIX = {
    wrong_counts: COUNTS | CONSTRUCTOR,
    wrong_blocks: ONE_BLOCK,
    wrong_handles: ONE_HANDLE,
    wrong_id_batches: ID_BATCH,
    wrong_handle_batches: HANDLE_BATCH,
    wrong_counts_per_row: NUM_NEW,
}


@pytest.mark.parametrize(("wrong", "call"), [(wrong, call) for wrong, calls in MATRIX.items() for call in calls])
def test_wrong_argument_is_refused_by_name_and_value(scene, refused, wrong, call):
    for exception, value, named in wrong(scene, call):
        with refused(scene.pool, exception, call.split()[0], named, plans=[scene.plan]):
            MATRIX[wrong][call](scene, value)


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


def test_huge_count_is_legal_where_it_asks_for_nothing(scene):
    for value in (2**31, 2**62, 2**63 - 1):
        assert scene.pool.can([scene.a], value) is scene.pool.can([scene.a, scene.b], [0, value]) is False
        assert scene.pool.blocks.evict(value) == 0


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


def test_constructor_product_just_inside_the_limit_is_legal(core):
    core.Pool(4, 2**31 - 1, max_seqs=1, max_blocks_per_seq=1).shutdown()


def test_constructor_without_the_memory_is_a_memory_error(core):
    with pytest.raises(MemoryError, match=r"^\[Pool\] "):
        core.Pool(24, 4, max_seqs=2**20, max_blocks_per_seq=2**31 - 1)  # 8 PiB of tables


def read_only():
    array = np.zeros(4, np.int32)
    array.flags.writeable = False
    return array


OUTS = {
    TypeError: [*(np.zeros(4, kind) for kind in (np.int64, np.uint32, np.float32, object)), [0, 0, 0, 0], 4],
    ValueError: [
        *(np.zeros(shape, np.int32) for shape in (2, 0, (2, 2))),
        *(read_only(), np.zeros(8, np.int32)[::2], np.zeros(4, np.int32)[::-1]),
    ],
    EITHER: [np.array(0, np.int32), np.zeros(4, ">i4")],
}


@pytest.mark.parametrize("exception", OUTS)
def test_alloc_out_in_a_wrong_form_is_refused_before_a_byte_is_written(scene, refused, exception):
    for out in OUTS[exception]:
        with refused(scene.pool, exception, "alloc"):
            scene.pool.blocks.alloc(3, out=out)
        assert not np.any(out) or out == 4


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


def test_fork_of_more_children_than_slots(scene, refused):
    with refused(scene.pool, OutOfSequences, "fork", 63):
        scene.pool.fork(scene.a, 63)


def test_refusals_name_the_row_and_what_is_wrong_with_it(scene, refused):
    pool, plan = scene.pool, scene.core.Plan(scene.pool, 4)
    for call in ("close", "truncate"):
        with refused(pool, ValueError, call, f"handles[1] is a duplicate ({scene.a})"):
            getattr(pool, call)([scene.a, scene.a], *([0] if call == "truncate" else []))
    with refused(pool, ValueError, "unshare", "lens[0] is 1000, it must be in 0 .. "):
        pool.unshare(plan, [scene.a], [1000])
