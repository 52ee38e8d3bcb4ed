"""The C interface: a status for every exception of `Pool`, and no change with it."""

import ctypes
import importlib.util
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from capi_table import KV_TO_PYTHON, Array, C, Keep, Stats, api, at, call, call_without_gil, function, message

from kvpool import Group, OutOfBlocks, Plan, PlanStateError, Pool, StaleHandle

PROMPT = np.arange(50, dtype=np.int32)


def ints(*values):
    return np.array(values, np.int64)


def new(**options):
    """Return a pool and a plan."""
    pool = Pool(32, 4, max_seqs=8, max_blocks_per_seq=16, seed=7, prefix_cache=True, **options)
    return pool, Plan(pool, 4, 256)


GROUPS = [Group.full(), Group.window(4, columns=2), Group.state(4)]


@pytest.fixture
def grouped():
    """A pool of three layer groups, a plan of it after a step, and a handle."""
    pool = Pool(64, 4, max_seqs=8, seed=7, groups=GROUPS)
    plan, handle = Plan(pool, 4, 32, formats=("block_tables", "seq_lens", "csr", "slot_ids")), pool.open(5)
    pool.step(plan, [handle], 9)
    pool.done(plan)
    return pool, plan, handle


def ids(blocks, n):
    return list((ctypes.c_int32 * n.value).from_address(blocks.value)) if n.value else []


def test_table_of_each_layer_group_is_that_of_python(grouped):
    """An entry is as many ids as the group has columns, holes included; without a group only where there is one."""
    pool, _plan, handle = grouped
    blocks, n = ctypes.c_void_p(), ctypes.c_int64()
    for group in range(3):
        assert call("group_table", pool, handle, group, blocks, n) == 0
        assert ids(blocks, n) == pool.table(handle, group).ravel().tolist()
    assert call("group_table", pool, pool.open(), 2, blocks, n) == 0 and n.value == 0  # no state yet
    n.value = 77
    for group in (-1, 3, 2**31 - 1, -(2**31)):
        assert call("group_table", pool, handle, group, blocks, n) == C["KVPOOL_VALUE_ERROR"]
        assert message() == f"[group_table] group is out of range ({group}), it must be in 0 .. 2"
    assert call("table", pool, handle, blocks, n) == C["KVPOOL_VALUE_ERROR"] and n.value == 77
    assert message() == "[table] the pool has 3 layer groups, each with a table: name one"
    pool.close(handle)
    assert call("group_table", pool, handle, 0, blocks, n) == C["KVPOOL_STALE_HANDLE"]
    one = Pool(16, 4, groups=[Group.window(4, columns=2)])
    row = one.open(5)
    assert call("table", one, row, blocks, n) == 0 and ids(blocks, n) == [1, 2, 3, 4]
    assert call("group_table", one, row, 0, blocks, n) == 0 and ids(blocks, n) == [1, 2, 3, 4]


def test_array_without_a_group_is_refused_in_a_pool_of_several_unless_it_is_common(grouped):
    """An engine must not run layers on the tables of others."""
    pool, plan, handle = grouped
    array, before = Array(), pool.fingerprint()
    for name in ("block_tables", "seq_lens", "slot_mapping", "indptr", "indices", "last_page_len", "copies",
                 "dirty_rows", "kv_starts", "state_src", "state_dst"):  # fmt: skip
        assert call("array", plan, C[f"KVPOOL_{name.upper()}"], array) == C["KVPOOL_VALUE_ERROR"]
        assert message() == "[array] the pool has 3 layer groups: group_array has those of one"
    assert array.data is None and pool.fingerprint() == before
    for name in ("slot_ids", "served", "handles"):
        for call_, more in (("array", []), ("group_array", [0]), ("group_array", [2])):
            assert call(call_, plan, *more, C[f"KVPOOL_{name.upper()}"], array) == 0 and array.length == 1
    assert ctypes.c_int64.from_address(array.data).value == handle


@pytest.mark.parametrize(("group", "names"), [
    (0, ["slot_mapping", "kv_starts", "state_src", "state_dst"]),
    (1, ["slot_mapping", "state_src", "state_dst"]),
    (2, ["block_tables", "slot_mapping", "indptr", "indices", "last_page_len", "copies", "dirty_rows", "kv_starts"]),
])  # fmt: skip
def test_array_that_a_layer_group_or_the_plan_lacks_is_refused(grouped, group, names):
    _pool, plan, _handle = grouped
    for name in names:
        assert call("group_array", plan, group, C[f"KVPOOL_{name.upper()}"], Array()) == C["KVPOOL_VALUE_ERROR"], name
        assert "no such array" in message() or "is not there, this plan fills" in message()
    for wrong in (-1, 3, 2**31 - 1, -(2**31)):
        assert call("group_array", plan, wrong, C["KVPOOL_SEQ_LENS"], Array()) == C["KVPOOL_VALUE_ERROR"]
        assert "there is no layer group" in message()
    assert call("group_array", plan, group, C["KVPOOL_SEQ_LENS"], None) == C["KVPOOL_VALUE_ERROR"]
    assert call("group_array", None, group, C["KVPOOL_SEQ_LENS"], Array()) == C["KVPOOL_VALUE_ERROR"]


def test_stats_table_and_num_free_are_those_of_the_pool():
    pool, plan = new()
    cached, handle = pool.open(PROMPT), pool.open()
    pool.step(plan, [cached, handle], [50, 30])
    pool.done(plan)
    pool.prefix.commit(cached, PROMPT[:48])
    pool.close(cached)
    pool.step(plan, [handle], 1)
    stats, expected = Stats(), pool.stats()
    assert expected.evictable == 12
    assert call("stats", pool, stats, ctypes.sizeof(Stats)) == 0
    assert stats.free == pool.blocks.num_blank == expected.free - expected.evictable
    names = {"pending_plans": "pending"}
    assert {n: getattr(stats, n) for n, _ in Stats._fields_ if n != "free"} == {
        n: getattr(expected, names.get(n, n)) for n, _ in Stats._fields_ if n != "free"
    }
    blocks, n, free = ctypes.c_void_p(), ctypes.c_int64(), ctypes.c_int64()
    assert call("table", pool, handle, blocks, n) == 0
    assert ids(blocks, n) == pool.table(handle).tolist()
    assert call("num_free", pool, free) == 0
    assert free.value == pool.blocks.num_blank
    assert call("num_tokens", pool, handle, n) == 0 and n.value == pool.num_tokens(handle) == 31


def test_objects_of_python_become_pointers():
    pool, plan = new()
    out = ctypes.c_void_p()
    assert call("pool_from", pool, out) == 0 and out.value == id(pool)
    assert call("plan_from", plan, out) == 0 and out.value == id(plan)
    assert call("pool_from", plan, out) == C["KVPOOL_TYPE_ERROR"] and "not a kvpool.Pool but Plan" in message()
    assert call("plan_from", pool, out) == C["KVPOOL_TYPE_ERROR"] and "not a kvpool.Plan but Pool" in message()
    assert call("pool_from", None, out) == C["KVPOOL_VALUE_ERROR"]
    assert out.value == id(plan)


# -- retention, and the size


def test_directive_limit_and_clock_are_those_of_python():
    """NULL is no directive, no tokens are all; programs of the fuzzer compare the rest."""
    pool, plan = new()
    handle, cached = ctypes.c_int64(), ctypes.c_int64()
    assert call("limit_kept", pool, ctypes.create_string_buffer(b"a"), 1, 3) == 0
    for name, keep, due in ((b"", None, 0), (b"", Keep(5, 8, 2), 2), (b"a", Keep(9, 0, 2), 5)):
        space = ctypes.create_string_buffer(name)
        assert call("open_prompt", pool, PROMPT, 18, space, len(name), keep, handle, cached) == 0
        pool.step(plan, [handle.value], 18 - cached.value)
        pool.done(plan)
        assert call("commit", pool, ints(handle.value), None, 1, PROMPT[cached.value :], 18 - cached.value, None) == 0
        assert pool.prefix.stats().kept == due
    assert call("commit", pool, ints(handle.value), None, 1, PROMPT, 0, None) == 0
    assert call("tick", pool, 5) == 0 and pool.prefix.stats().kept == 3
    assert call("limit_kept", pool, ctypes.create_string_buffer(b"a"), 1, -1) == 0
    assert call("commit", pool, ints(handle.value), None, 1, PROMPT, 0, Keep(1, 0, 7)) == 0
    assert pool.prefix.stats().kept == 4
    assert call("tick", pool, 4) == C["KVPOOL_VALUE_ERROR"] and "the clock was at 5" in message()
    assert call("tick", pool, 9) == 0 and pool.prefix.stats().kept == 0
    pool.check()


def test_resize_gives_the_moves_of_python_into_room_that_is_enough():
    (pool, _), (other, _) = new(), new()
    moves, n = np.full((9, 2), -1, np.int32), ctypes.c_int64(7)
    for one in (pool, other):
        rows = [one.open(12) for _ in range(5)]
        one.close(rows[0])
        one.close(rows[2])
    before = pool.fingerprint()
    assert call("resize", pool, 10, 0, moves, 5, n) == C["KVPOOL_VALUE_ERROR"] and n.value == 7
    assert message() == "[resize] there is room for 5 moves, there may be 6"
    assert pool.fingerprint() == before and (moves == -1).all()
    assert call("resize", pool, 10, 0, moves, 6, n) == 0
    due = other.resize(10)
    assert moves[: n.value].tolist() == due.tolist() and n.value == 6 and (moves[6:] == -1).all()
    assert pool.num_blocks == 10 and pool.digest() == other.digest()
    assert call("resize", pool, 64, 0, None, 0, n) == 0 and n.value == 0 and pool.num_blocks == 64
    pool.check()


def is_child(request):
    """Whether this is the process in which allocations of Python may fail. Elsewhere it runs the test in one."""
    if "KVPOOL_IS_CHILD" in os.environ:
        return True
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", request.node.nodeid]
    child = {"cwd": request.config.rootpath, "env": os.environ | {"KVPOOL_IS_CHILD": "1"}}
    done = subprocess.run(command, **child, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    return False


@pytest.mark.skipif(importlib.util.find_spec("_testcapi") is None, reason="this Python has no _testcapi")
def test_resize_for_which_there_is_no_memory_changes_nothing(request):
    if not is_child(request):
        return
    pool, _ = new()
    moves, n, resize = np.zeros((32, 2), np.int32), ctypes.c_int64(7), function("resize")
    rows = [pool.open(12) for _ in range(5)]
    pool.close(rows[:2])
    before, statuses = pool.fingerprint(), []
    while not statuses or statuses[-1] != C["KVPOOL_OK"]:
        assert pool.fingerprint() == before and n.value == 7
        statuses.append(starved(len(statuses) + 1, len(statuses) + 1000, resize, *map(at, (pool, 10, 0, moves, 32, n))))
    assert set(statuses) - {MemoryError, ctypes.ArgumentError} == {C["KVPOOL_NO_MEMORY"], C["KVPOOL_OK"]}
    assert n.value == 6 and pool.num_blocks == 10
    pool.check()


# -- failures


def failing():
    """Every way to fail: name -> (status, words of the message, the call, its arguments behind pool and plan)."""
    return failing_of_requests() | failing_of_retention_and_size()


def failing_of_retention_and_size():
    value = "VALUE_ERROR"
    return {
        "priority": (
            value,
            "keep.priority is out of range (8), it must be in 1 .. 7",
            "open_prompt",
            [PROMPT, 4, None, 0, Keep(1, 0, 8), "out", None],
        ),
        "ttl": (value, "keep.ttl is out of range (0)", "open_prompt", [PROMPT, 4, None, 0, Keep(0, 0, 1), "out", None]),
        "kept tokens": (
            value,
            "keep.tokens is out of range (-1)",
            "commit",
            ["h", ints(0), 1, PROMPT, 0, Keep(1, -1, 1)],
        ),
        "kept and not done": (value, "tokens from position", "commit", ["h", None, 1, PROMPT, 50, Keep(1, 0, 1)]),
        "negative time": (value, "now is out of range (-1)", "tick", [-1]),
        "late": (value, f"now is out of range ({2**62})", "tick", [2**62]),
        "negative limit": (value, "blocks is out of range (-2), it must be in -1", "limit_kept", [None, 0, -2]),
        "limit of no name": (value, "name_space", "limit_kept", [None, 3, 1]),
        "no blocks": (value, "num_blocks is out of range (0)", "resize", [0, 0, None, 0, "out"]),
        "arena that is not there": (value, "arena is out of range (1)", "resize", [40, 1, None, 0, "out"]),
        "blocks in use": ("OUT_OF_BLOCKS", "3 blocks", "resize", [3, 0, None, 0, "out"]),
        "negative room": (value, "room is out of range (-1)", "resize", [40, 0, None, -1, "out"]),
        "null moves": (value, "moves is NULL", "resize", [40, 0, None, 1, "out"]),
        "null number of moves": (value, "n is NULL", "resize", [40, 0, None, 0, None]),
    }


def failing_of_requests():
    big = 1 << 40
    wraps = (1 << 61) + 1  # handles: their bytes are 8 in 64 bits
    value = "VALUE_ERROR"
    return {
        "out of blocks": ("OUT_OF_BLOCKS", "blocks needed", "step", ["h3", ints(60, 60, 60), 3, 0]),
        "open without blocks": ("CAPACITY_EXCEEDED", "open", "open", [big, "out"]),
        "stale handle": ("STALE_HANDLE", "stale", "step", ["closed", None, 1, 0]),
        "foreign handle": ("FOREIGN_HANDLE", "not of this pool", "close", ["foreign", 1]),
        "too many rows": ("CAPACITY_EXCEEDED", "the plan holds 4", "step", ["h", None, 5, 0]),
        "sequences": ("OUT_OF_SEQUENCES", "the limit is 8", "fork", ["one", 9, "children"]),
        "not pending": ("PLAN_STATE", "not pending", "done", []),
        "rollback of nothing": ("PLAN_STATE", "not pending", "rollback", []),
        "negative rows": (value, "negative (-1)", "step", ["h", None, -1, 0]),
        "negative count": (value, "num_new[0] is negative (-2)", "step", ["h", ints(-2), 1, 0]),
        "duplicates": (value, "duplicate", "close", ["twice", 2]),
        "null handles": (value, "handles is NULL", "step", [None, None, 1, 0]),
        "null counts": (value, "num_new is NULL", "reserve", ["h", None, 1]),
        "flags": (value, "flags are unknown (6)", "step", ["h", None, 1, 6]),
        "pad rows": (value, "pad_to[0]", "step_padded", ["h", None, 1, 0, 5, 8]),
        "pad tokens": (value, "pad_to[1]", "step_padded", ["h", None, 1, 0, 4, -8]),
        "small pad": (value, "room for 0 tokens", "step_padded", ["h", None, 1, 0, 4, 0]),
        "negative tokens": (value, "tokens is negative (-5)", "open", [-5, "out"]),
        "null out": (value, "handle is NULL", "open", [1, None]),
        "negative prompt": (value, "negative (-1)", "open_prompt", [PROMPT, -1, None, 0, None, "out", None]),
        "null prompt": (value, "tokens is NULL", "open_prompt", [None, 1, None, 0, None, "out", None]),
        "null name": (value, "name_space", "open_prompt", [PROMPT, 1, None, 4, None, "out", None]),
        "negative name": (value, "name_space", "open_prompt", [PROMPT, 1, None, -1, None, "out", None]),
        "bad token": (value, "tokens[1]", "open_prompt", [np.array([1, -2], np.int32), 2, None, 0, None, "out", None]),
        "negative children": (value, "n is negative (-1)", "fork", ["one", -1, "children"]),
        "null children": (value, "children is NULL", "fork", ["one", 1, None]),
        "long": (value, "lens[0] is 99", "truncate", ["h", ints(99), 1]),
        "null lens": (value, "lens is NULL", "truncate", ["h", None, 1]),
        "not done": (value, "tokens from position", "commit", ["h", None, 1, PROMPT, 50, None]),
        "counts": (value, "counts use 0 of 2", "commit", ["h", ints(0), 1, PROMPT, 2, None]),
        "null tokens": (value, "tokens is NULL", "commit", ["h", None, 1, None, 2, None]),
        "bytes wrap": ("NO_MEMORY", f"no memory for {wraps} handles", "close", ["h", wraps]),
        "null table": (value, "blocks is NULL", "table", ["one", None, "out"]),
        "null table of a group": (value, "n is NULL", "group_table", ["one", 0, "out", None]),
        "group that is not there": (value, "group is out of range (1)", "group_table", ["one", 1, "out", "out"]),
        "table of none": ("STALE_HANDLE", "stale", "table", ["gone", "out", "out"]),
        "null length": (value, "tokens is NULL", "num_tokens", ["one", None]),
        "length of none": ("STALE_HANDLE", "stale", "num_tokens", ["gone", "out"]),
        "null free": (value, "blocks is NULL", "num_free", [None]),
        "null stats": (value, "stats is NULL", "stats", [None, 80]),
        "small stats": (value, "size is 72", "stats", ["out", 72]),
        "null digest": (value, "digest is NULL", "digest", [None]),
    }


@pytest.fixture
def world():
    """A pool with three sequences and names for what calls take."""
    pool, plan = new()
    handles = ints(*(pool.open() for _ in range(5)))
    pool.step(plan, handles[:3], 2)
    pool.done(plan)
    pool.prefix.commit(handles[:1], PROMPT[:2])
    gone = pool.open()
    pool.close([gone])
    given = {
        "h": handles, "h3": handles[:3].copy(), "one": int(handles[0]), "twice": ints(handles[0], handles[0]),
        "closed": ints(gone), "gone": gone, "foreign": ints(Pool(4, 4).open()), "children": np.zeros(9, np.int64),
        "out": ctypes.create_string_buffer(8),
    }  # fmt: skip
    return pool, plan, given


@pytest.mark.parametrize("way", failing())
def test_failure_is_a_status_and_changes_nothing(world, way):
    pool, plan, given = world
    status, words, name, arguments = failing()[way]
    plans = [plan] if name in ("step", "step_padded", "reserve", "done", "rollback") else []
    before, out = pool.fingerprint(), bytes(given["out"])
    arguments = [given[a] if isinstance(a, str) else a for a in arguments]
    arguments = [ctypes.addressof(a) if isinstance(a, ctypes.Array) else a for a in arguments]
    assert call(name, pool, *plans, *arguments) == C[f"KVPOOL_{status}"], message()
    assert words in message() and message().startswith(f"[{name}] ")
    assert pool.fingerprint() == before and bytes(given["out"]) == out
    kind = KV_TO_PYTHON[C[f"KVPOOL_{status}"]]
    with pytest.raises(kind) as raised:
        function("raise_error")()
    assert type(raised.value) is kind and str(raised.value) == message()
    with pytest.raises(SystemError, match="no failure is kept"):
        function("raise_error")()  # it was handed over: nothing here keeps the frames that it saw
    pool.check()


@pytest.mark.parametrize(
    "name", ["open", "open_prompt", "fork", "truncate", "close", "commit", "table", "group_table", "num_tokens",
             "num_free", "stats", "tick", "limit_kept", "resize"]
)  # fmt: skip
def test_null_pool_is_refused(name):
    rest = [None] * (len(function(name).argtypes or ()) - 1)
    arguments = [None if kind is ctypes.c_void_p else 0 for kind in function(name).argtypes[1:]] if rest else []
    assert call(name, None, *arguments) == C["KVPOOL_VALUE_ERROR"]
    assert message() == f"[{name}] pool is NULL"


def test_pool_or_plan_that_does_not_fit_is_refused():
    (pool, _), (_, other), (closed, late), bare = new(), new(), new(), Pool(8, 4)
    closed.shutdown()
    row, null, value = ints(pool.open()), "[{}] plan is NULL", "VALUE_ERROR"
    bare_said = "[{}] the pool has no prefix cache"
    for name, arguments, status, said in (
        ("step", [pool, None, None, None, 0, 0], value, null),
        ("done", [pool, None], value, null),
        ("rollback", [pool, None], value, null),
        ("step", [pool, other, row, None, 1, 0], value, "[{}] the plan belongs to another pool"),
        ("step", [closed, late, ints(0), None, 1, 0], "CLOSED", "[{}] the pool was shut down"),
        ("commit", [bare, ints(bare.open()), None, 1, PROMPT, 0, None], value, bare_said),
        ("open_prompt", [bare, PROMPT, 4, None, 0, Keep(1, 0, 1), row, None], value, bare_said),
        ("tick", [bare, 1], value, bare_said),
        ("limit_kept", [bare, None, 0, 1], value, bare_said),
        ("tick", [closed, 1], "CLOSED", "[{}] the pool was shut down"),
        ("resize", [closed, 9, 0, None, 0, row], "CLOSED", "[{}] the pool was shut down"),
    ):
        assert call(name, *arguments) == C[f"KVPOOL_{status}"]
        assert message().startswith(said.format(name)), message()


def test_error_keeps_its_attributes(world):
    pool, plan, given = world
    call("step", pool, plan, given["h3"], ints(60, 60, 60), 3, 0)
    with pytest.raises(OutOfBlocks) as raised:
        function("raise_error")()
    assert raised.value.needed == 45 and raised.value.row >= 0


def test_array_of_a_format_that_the_plan_lacks_is_refused():
    pool = Pool(8, 4)
    plan = Plan(pool, 2)
    assert call("array", plan, C["KVPOOL_POSITIONS"], Array()) == C["KVPOOL_VALUE_ERROR"]
    assert message() == "[array] array 3 is not there, this plan fills block_tables, seq_lens, slot_mapping"
    for number in (-1, 16, 1 << 30):
        assert call("array", plan, number, Array()) == C["KVPOOL_VALUE_ERROR"]
        assert f"no such array ({number})" in message()
    assert call("array", plan, C["KVPOOL_SEQ_LENS"], None) == C["KVPOOL_VALUE_ERROR"]
    assert call("array", None, C["KVPOOL_SEQ_LENS"], Array()) == C["KVPOOL_VALUE_ERROR"]


def test_stats_of_a_newer_caller_are_filled_with_zeros():
    pool, _ = new()
    memory = ctypes.create_string_buffer(b"\xff" * 96, 96)
    assert call("stats", pool, ctypes.addressof(memory), 88) == 0
    assert Stats.from_buffer(memory).num_blocks == 32
    assert memory.raw[80:] == b"\0" * 8 + b"\xff" * 8


class Intruder:
    """An integer that uses the pool while a call of Python reads it, by this thread or by another one."""

    def __init__(self, act, threaded):
        self.act, self.threaded = act, threaded

    def __index__(self):
        if self.threaded:
            thread = threading.Thread(target=self.act)
            thread.start()
            thread.join()
        else:
            self.act()
        return 1


@pytest.mark.parametrize("threaded", [False, True])
def test_call_made_while_arguments_are_read_is_an_earlier_call(threaded):
    pool, plan = new()
    handle, found = pool.open(), []

    def act():
        found.append(call("step", pool, plan, ints(handle), None, 1, 0))

    with pytest.raises(PlanStateError, match="pending"):
        pool.step(plan, [handle], [Intruder(act, threaded)])
    assert found == [C["KVPOOL_OK"]]
    assert plan.num_tokens == 1 and pool.num_tokens(handle) == 1
    pool.done(plan)
    pool.check()


def test_failure_belongs_to_its_thread():
    pool, plan = new()
    assert call("done", pool, plan) == C["KVPOOL_PLAN_STATE"]
    before, others = message(), []

    def act():
        others.append(message())
        call("close", pool, ints(-4), 1)
        others.append(message())

    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    assert others == ["no failure is kept in this thread", "[close] handles[0] is negative (-4)"]
    assert message() == before


def starved(k, last, act, *given):
    """What a call gives or raises while allocations `k` to `last` of Python fail; `ctypes` may raise before it."""
    import _testcapi

    _testcapi.set_nomemory(k, last)
    try:
        return act(*given)
    except Exception as error:
        return type(error)
    finally:
        _testcapi.remove_mem_hooks()


@pytest.mark.skipif(importlib.util.find_spec("_testcapi") is None, reason="this Python has no _testcapi")
@pytest.mark.parametrize("more", [1, 1000])
def test_failure_for_which_there_is_no_memory_is_a_status_all_the_same(request, more):
    """One allocation fails, or all from some on: those of the exception, its traceback and its message among them."""
    if not is_child(request):
        return
    pool, plan = new()
    gone, row = ints(pool.open()), ints(pool.open())
    pool.close(gone)
    close, done, hand_over = (function(name) for name in ("close", "done", "raise_error"))
    stale, no_memory, kept = C["KVPOOL_STALE_HANDLE"], C["KVPOOL_NO_MEMORY"], set()
    before = pool.fingerprint()
    for one, arguments, due in (
        (close, (id(pool), gone.ctypes.data, 1), stale),
        (done, (id(pool), id(plan)), C["KVPOOL_PLAN_STATE"]),
    ):
        statuses = {starved(k, k + more, one, *arguments) for k in range(1, 80)}
        assert {due, no_memory} <= statuses <= {due, no_memory, MemoryError, ctypes.ArgumentError}
    for k in range(1, 20):
        assert close(id(pool), gone.ctypes.data, 1) == stale
        kept.add(starved(k, k + more, hand_over))
    assert {StaleHandle, MemoryError} == kept
    assert pool.fingerprint() == before and pool.num_tokens(int(row[0])) == 0


def test_caller_without_the_lock_of_python_is_refused():
    """Every function; what they would change is as it was."""
    pool, plan = new()
    handle = ints(pool.open())
    before = pool.fingerprint()
    for name in ("step", "done", "close", "open", "digest", "array", "stats", "pool_from", "fork", "reserve",
                 "open_prompt", "commit", "tick", "limit_kept", "resize"):  # fmt: skip
        kinds = function(name).argtypes
        arguments = [at(handle) if kind is ctypes.c_void_p else 0 for kind in kinds]
        arguments[0] = at(plan if name == "array" else pool)
        assert call_without_gil(name, *arguments) == C["KVPOOL_NO_GIL"], name
    assert call_without_gil("error_message") == b"the caller does not hold the GIL"
    assert ctypes.CFUNCTYPE(ctypes.c_void_p)(api.raise_error)() is None
    assert pool.fingerprint() == before
