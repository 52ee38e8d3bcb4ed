"""The C interface: a status for every exception of `Pool`, and no change with it."""

import ctypes
import importlib.util
import threading

import numpy as np
import pytest
from capi_table import KV_TO_PYTHON, Array, C, Stats, at, call, call_without_gil, function, message

from kvpool import Group, OutOfBlocks, Plan, PlanStateError, Pool, StaleHandle

PROMPT = np.arange(50, dtype=np.int32)


def ints(*values):
    return np.array(values, np.int64)


def new(**options):
    """Return a pool and a plan."""
    pool = Pool(32, 4, max_seqs=8, max_blocks_per_seq=16, seed=7, prefix_cache=True, **options)
    return pool, Plan(pool, 4, 256)


def test_pools_with_layer_groups_give_no_table_and_no_array_to_c():
    """Their rows would be those of one group; all other calls work, and leave the same pool as Python's."""
    python, c = [Pool(32, 4, max_seqs=8, seed=7, groups=[Group.full(), Group.window(4), Group.state(4)])
                 for _ in range(2)]  # fmt: skip
    plans = [Plan(pool, 4, 32, formats=("block_tables", "seq_lens")) for pool in (python, c)]
    handle, handles = ctypes.c_int64(), ints(python.open(5))
    assert call("open", c, 5, handle) == 0
    python.step(plans[0], handles, 9)
    assert call("step", c, plans[1], ints(handle.value), ints(9), 1, 0) == 0
    python.done(plans[0])
    assert call("done", c, plans[1]) == 0
    assert c.digest() == python.digest() and c.fingerprint() == python.fingerprint()
    assert call("table", c, handle.value, ctypes.c_void_p(), ctypes.c_int64()) == C["KVPOOL_VALUE_ERROR"]
    assert "layer groups" in message()
    for name in ("block_tables", "slot_mapping", "copies", "seq_lens"):
        assert call("array", plans[1], C[f"KVPOOL_{name.upper()}"], Array()) == C["KVPOOL_VALUE_ERROR"]
        assert "plan.groups" in message()
    assert call("open_prompt", c, PROMPT, 8, None, 0, handle, None) == C["KVPOOL_VALUE_ERROR"]
    c.check()


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
    assert list((ctypes.c_int32 * n.value).from_address(blocks.value)) == pool.table(handle).tolist()
    assert call("num_free", pool, free) == 0
    assert free.value == pool.blocks.num_blank


def test_objects_of_python_become_pointers():
    pool, plan = new()
    out = ctypes.c_void_p()
    assert call("pool_from", pool, out) == 0 and out.value == id(pool)
    assert call("plan_from", plan, out) == 0 and out.value == id(plan)
    assert call("pool_from", plan, out) == C["KVPOOL_TYPE_ERROR"] and "no kvpool.Pool but Plan" in message()
    assert call("plan_from", pool, out) == C["KVPOOL_TYPE_ERROR"] and "no kvpool.Plan but Pool" in message()
    assert call("pool_from", None, out) == C["KVPOOL_VALUE_ERROR"]
    assert out.value == id(plan)


# -- failures


def failing():
    """Every way to fail: name -> (status, words of the message, what to do before, the call)."""
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
        "negative prompt": (value, "negative (-1)", "open_prompt", [PROMPT, -1, None, 0, "out", None]),
        "null prompt": (value, "tokens is NULL", "open_prompt", [None, 1, None, 0, "out", None]),
        "null name": (value, "name_space", "open_prompt", [PROMPT, 1, None, 4, "out", None]),
        "bad token": (value, "tokens[1]", "open_prompt", [np.array([1, -2], np.int32), 2, None, 0, "out", None]),
        "negative children": (value, "n is negative (-1)", "fork", ["one", -1, "children"]),
        "null children": (value, "children is NULL", "fork", ["one", 1, None]),
        "long": (value, "lens[0] is 99", "truncate", ["h", ints(99), 1]),
        "null lens": (value, "lens is NULL", "truncate", ["h", None, 1]),
        "not done": (value, "tokens from position", "commit", ["h", None, 1, PROMPT, 50]),
        "counts": (value, "counts use 0 of 2", "commit", ["h", ints(0), 1, PROMPT, 2]),
        "null tokens": (value, "tokens is NULL", "commit", ["h", None, 1, None, 2]),
        "bytes wrap": ("NO_MEMORY", f"no memory for {wraps} handles", "close", ["h", wraps]),
        "null table": (value, "blocks is NULL", "table", ["one", None, "out"]),
        "table of none": ("STALE_HANDLE", "stale", "table", ["gone", "out", "out"]),
        "null length": (value, "tokens is NULL", "num_tokens", ["one", None]),
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
    "name", ["open", "open_prompt", "fork", "truncate", "close", "commit", "table", "num_tokens", "num_free", "stats"]
)  # fmt: skip
def test_null_pool_is_refused(name):
    rest = [None] * (len(function(name).argtypes or ()) - 1)
    arguments = [0 if kind is ctypes.c_int64 else None for kind in function(name).argtypes[1:]] if rest else []
    assert call(name, None, *arguments) == C["KVPOOL_VALUE_ERROR"]
    assert message() == f"[{name}] pool is NULL"


def test_null_plan_is_refused():
    pool, _ = new()
    for name, rest in {"step": [None, None, 0, 0], "done": [], "rollback": []}.items():
        assert call(name, pool, None, *rest) == C["KVPOOL_VALUE_ERROR"]
        assert message() == f"[{name}] plan is NULL"


def test_plan_of_another_pool_is_refused():
    pool, _ = new()
    _, other = new()
    assert call("step", pool, other, ints(pool.open()), None, 1, 0) == C["KVPOOL_VALUE_ERROR"]
    assert "belongs to another pool" in message()


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
    assert "positions was not asked for" in message()
    for number in (-1, 16, 1 << 30):
        assert call("array", plan, number, Array()) == C["KVPOOL_VALUE_ERROR"]
        assert f"no such array ({number})" in message()
    assert call("array", plan, C["KVPOOL_SEQ_LENS"], None) == C["KVPOOL_VALUE_ERROR"]
    assert call("array", None, C["KVPOOL_SEQ_LENS"], Array()) == C["KVPOOL_VALUE_ERROR"]


def test_bound_array_that_was_resized_is_refused():
    pool, lens = Pool(8, 4), np.zeros(2, np.int32)
    plan, handle = Plan(pool, 2, formats=["seq_lens"], out={"seq_lens": lens}), ints(pool.open())
    before = pool.fingerprint()
    lens.resize(4096, refcheck=False)
    for arguments in (["step", pool, plan, handle, None, 1, 0], ["reserve", pool, plan, handle, ints(1), 1]):
        assert call(*arguments) == C["KVPOOL_VALUE_ERROR"] and "seq_lens was resized or moved" in message()
        with pytest.raises(BufferError, match="seq_lens"):
            function("raise_error")()
    assert pool.fingerprint() == before


def test_stats_of_a_newer_caller_are_filled_with_zeros():
    pool, _ = new()
    memory = ctypes.create_string_buffer(b"\xff" * 96, 96)
    assert call("stats", pool, ctypes.addressof(memory), 88) == 0
    assert Stats.from_buffer(memory).num_blocks == 32
    assert memory.raw[80:] == b"\0" * 8 + b"\xff" * 8


def test_closed_pool_is_refused():
    pool, plan = new()
    pool.shutdown()
    assert call("step", pool, plan, ints(0), None, 1, 0) == C["KVPOOL_CLOSED"]
    assert message() == "[step] the pool was shut down"


def test_pool_without_a_prefix_cache_commits_nothing():
    pool = Pool(8, 4)
    assert call("commit", pool, ints(pool.open()), None, 1, PROMPT, 0) == C["KVPOOL_VALUE_ERROR"]
    assert message() == "[commit] the pool has no prefix cache (prefix_cache=False)"


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
def test_failure_for_which_there_is_no_memory_is_a_status_all_the_same(more):
    """One allocation fails, or all from some on: those of the exception, its traceback and its message among them."""
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
    for name in ("step", "done", "close", "open", "digest", "array", "stats", "pool_from", "fork", "reserve"):
        kinds = function(name).argtypes
        arguments = [at(handle) if kind is ctypes.c_void_p else 0 for kind in kinds]
        arguments[0] = at(plan if name == "array" else pool)
        assert call_without_gil(name, *arguments) == C["KVPOOL_NO_GIL"], name
    assert call_without_gil("error_message") == b"the caller does not hold the GIL"
    assert pool.fingerprint() == before
