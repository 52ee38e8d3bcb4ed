"""Guards: calls inside of calls, no pickling, a closed pool stays closed, counters are read only."""

import array
import contextlib
import copy
import gc
import multiprocessing
import operator
import pickle
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from kvpool.errors import ConcurrentUse, KVPoolError, PlanStateError, PoolClosed
from kvpool.spec import KVSpec
from kvpool.testing import ModelPlan, ModelPool
from kvpool.testing.model_state import ModelBlocks
from kvpool_backends import load_backend


class Reenter:
    """An integer whose conversion runs something else first."""

    def __init__(self, value, action):
        self.value, self.action = value, action

    def __index__(self):
        self.action()
        return self.value


INSIDE = {  # calls that convert an argument
    "alloc": lambda pool, plan, h, n: pool.blocks.alloc(n),
    "evict": lambda pool, plan, h, n: pool.blocks.evict(n),
    "open": lambda pool, plan, h, n: pool.open(n),
    "fork": lambda pool, plan, h, n: pool.fork(h, n),
    "truncate": lambda pool, plan, h, n: pool.truncate([h], [n]),
    "can": lambda pool, plan, h, n: pool.can([h], [n]),
    "step": lambda pool, plan, h, n: pool.step(plan, [h], [n]),
    "reserve": lambda pool, plan, h, n: pool.reserve(plan, [h], n),
    "refcount": lambda pool, plan, h, n: pool.blocks.refcount(n),
    "incref": lambda pool, plan, h, n: pool.blocks.incref([n]),
    "unshare": lambda pool, plan, h, n: pool.unshare(plan, [h], [n]),
    "unshare, first": lambda pool, plan, h, n: pool.unshare(plan, [h], 1, n),
    "compact": lambda pool, plan, h, n: pool.compact([h], [n]),
    "compact, first": lambda pool, plan, h, n: pool.compact(h, 1, n),
    "evict_blocks": lambda pool, plan, h, n: pool.evict_blocks(h, [n]),
    "commit": lambda pool, plan, h, n: pool.prefix.commit(h, [n]),
    "commit, counts": lambda pool, plan, h, n: pool.prefix.commit([h], [5], [n]),
    "match": lambda pool, plan, h, n: pool.prefix.match([n]),
    "pin": lambda pool, plan, h, n: pool.prefix.pin([n]),
}
SECOND = {
    "alloc": lambda pool, plan, h: pool.blocks.alloc(),
    "close": lambda pool, plan, h: pool.close(h),
    "step": lambda pool, plan, h: pool.step(plan, [h], 1),
    "bind": lambda pool, plan, h: plan.bind(),
    "stats": lambda pool, plan, h: pool.stats(),
    "digest": lambda pool, plan, h: pool.digest(),
    "table": lambda pool, plan, h: pool.table(h, 0).ravel(),
    "reset": lambda pool, plan, h: pool.reset(),
    "shutdown": lambda pool, plan, h: pool.shutdown(),
    "check": lambda pool, plan, h: pool.check(),
    "unshare": lambda pool, plan, h: pool.unshare(plan, [h], 1),
    "compact": lambda pool, plan, h: pool.compact(h, 1),
    "evict_blocks": lambda pool, plan, h: pool.evict_blocks(h, [0]),
    "commit": lambda pool, plan, h: pool.prefix.commit(h, [5]),
    "match": lambda pool, plan, h: pool.prefix.match([5]),
    "pin": lambda pool, plan, h: pool.prefix.pin([5]),
}


def make_written(core, groups=None):
    """A pool, a plan of it and a sequence of two full blocks: every call of `INSIDE` is legal with the number 1."""
    pool = core.Pool(16, 4, max_seqs=64, seed=1, prefix_cache=True, groups=groups)
    plan, handle = core.Plan(pool, 8, 64), pool.open(12)
    pool.step(plan, [handle], 8)
    pool.done(plan)
    return pool, plan, handle


@pytest.fixture
def written(core, groups):
    """As `make_written`, for pools of each kind; the pool is checked when the test ends."""
    pool, plan, handle = make_written(core, groups)
    yield pool, plan, handle
    with contextlib.suppress(PoolClosed):
        pool.check()
    pool.shutdown()


def outcome(call):
    """What a call returned or raised, without what differs from pool to pool."""
    try:
        got = call()
    except (KVPoolError, ValueError) as error:
        return type(error).__name__
    if type(got) is int and got > 1 << 52:
        return got & 0xFFFFF  # the slot of a handle
    return got.tolist() if isinstance(got, np.ndarray) and got.dtype == np.int32 else type(got).__name__


def end_of(pool):
    """The whole state, as far as one can tell."""
    with contextlib.suppress(PoolClosed):
        pool.check()
        return pool.fingerprint(), pool.digest(), tuple(pool.stats())
    return None


def refuse_to_be_earlier(core, first, second, groups=None):
    """Make `second` while `first` reads its number, and before it: the outcomes must be the same."""
    ends = []
    for is_inside in (True, False):
        pool, plan, handle = make_written(core, groups)
        results = {}

        def earlier(pool=pool, plan=plan, handle=handle, results=results):
            results["second"] = outcome(lambda: SECOND[second](pool, plan, handle))

        if not is_inside:
            earlier()
        number = Reenter(1, earlier) if is_inside else 1
        results["first"] = outcome(lambda: INSIDE[first](pool, plan, handle, number))  # noqa: B023
        ends.append((sorted(results.items()), end_of(pool)))
        pool.shutdown()
    assert ends[0] == ends[1], f"{second} inside of {first}, and before it"


@pytest.mark.parametrize("first", INSIDE)
def test_call_made_while_another_reads_its_arguments_is_an_earlier_call(core, first, groups):
    for second in SECOND:
        refuse_to_be_earlier(core, first, second, groups)


class Busy(ModelPool):
    """A pool that refuses a call inside of another."""

    is_busy = False
    blocks = property(lambda pool: BusyBlocks(pool.arenas[0]))

    def close(self, handles):
        """Refuse."""
        if self.is_busy:
            raise ConcurrentUse("[close] the pool is inside another call")
        super().close(handles)


class BusyBlocks(ModelBlocks):
    def alloc(self, n=None):
        """Keep others out while the argument is read."""
        self.pool.is_busy = True
        n = operator.index(n)
        self.pool.is_busy = False
        return super().alloc(n)


def test_pool_that_refuses_a_call_inside_of_another_is_detected():
    with pytest.raises(AssertionError, match="close inside of alloc"):
        refuse_to_be_earlier(SimpleNamespace(Pool=Busy, Plan=ModelPlan), "alloc", "close")


@pytest.mark.parametrize("first", INSIDE)
def test_exception_from_an_argument_passes_through_and_changes_nothing(written, first):
    pool, plan, handle = written
    before = pool.fingerprint()

    def fail():
        raise RuntimeError("from the caller")

    with pytest.raises(RuntimeError, match="from the caller"):
        INSIDE[first](pool, plan, handle, Reenter(1, fail))
    assert pool.fingerprint() == before
    pool.step(plan, [handle], 1)


def test_finalizer_in_the_middle_of_a_call_only_defers_and_may_use_other_pools(make_pool):
    """The garbage collector runs while an argument is converted, and finds an owner of a sequence."""
    pool, other = make_pool(), make_pool()

    class Owner:
        def __init__(self):
            self.handle, self.cycle = pool.open(4), self

        def __del__(self):
            pool.defer_close(self.handle)
            assert other.blocks.alloc() == 1

    handle = Owner().handle
    pool.blocks.alloc(Reenter(1, gc.collect))
    assert not pool.is_open(handle) and other.stats().used == 1


SECOND_ARGUMENT = {  # `handles` is the caller's memory, and written while another argument is read
    "truncate": lambda pool, plan, handles, write: pool.truncate(handles, [Reenter(0, write), 0]),
    "can": lambda pool, plan, handles, write: pool.can(handles, [Reenter(1, write), 1]),
    "unshare": lambda pool, plan, handles, write: pool.unshare(plan, handles, [Reenter(1, write), 1]),
    "unshare, first": lambda pool, plan, handles, write: pool.unshare(plan, handles, 1, Reenter(0, write)),
    "compact": lambda pool, plan, handles, write: pool.compact(handles, [Reenter(0, write), 0]),
    "compact, first": lambda pool, plan, handles, write: pool.compact(handles, 0, Reenter(0, write)),
    "commit": lambda pool, plan, handles, write: pool.prefix.commit(handles, [Reenter(5, write), *[5] * 11], [6, 6]),
    "commit, counts": lambda pool, plan, handles, write: pool.prefix.commit(handles, [5] * 12, [Reenter(6, write), 6]),
}


@pytest.mark.parametrize("change", ["stale", "foreign", "duplicate", "negative"])
@pytest.mark.parametrize("call", SECOND_ARGUMENT)
def test_handles_changed_after_they_were_checked_do_no_harm(core, call, change):
    """In a process of its own: the harm would be a write outside the pool's memory."""
    child = multiprocessing.get_context("fork").Process(target=change_while_reading, args=(core, call, change))
    child.start()
    child.join(60)
    assert child.exitcode == 0


def change_while_reading(core, call, change):
    pool = core.Pool(16, 4, max_seqs=4, prefix_cache=True)
    plan = core.Plan(pool, 2, 12)
    live, dead = [pool.open(), pool.open()], pool.open()
    pool.close(dead)
    pool.step(plan, live, 6)
    pool.done(plan)
    before = pool.fingerprint()
    handles = np.array(live)
    value = {"stale": dead, "foreign": 5, "duplicate": live[1], "negative": -1}[change]

    def write():
        handles[0] = value

    try:
        SECOND_ARGUMENT[call](pool, plan, handles, write)
    except (KVPoolError, ValueError):
        assert pool.fingerprint() == before
    pool.check()
    for handle in live:  # a call that went through did to each sequence what it was asked for, or nothing
        assert not pool.is_open(handle) or {pool.num_tokens(handle), pool.kv_len(handle)} <= {0, 6}
    pool.reset()
    pool.check()
    pool.shutdown()


@pytest.mark.parametrize("indices", [[0], [1], [1, 0], [-1], [2], [10**9]])
def test_indices_changed_while_the_handle_is_read_do_no_harm(written, indices):
    """They are judged when nothing of the caller's runs any more."""
    pool, _, handle = written
    before, given = pool.fingerprint(), np.arange(len(indices))

    def write():
        given[:] = indices

    try:
        pool.evict_blocks(Reenter(handle, write), given)
    except ValueError:
        assert pool.fingerprint() == before and indices not in ([0], [1])
    else:
        assert pool.table(handle, 0).ravel().tolist() == [block for block in (1, 2, 3) if block - 1 not in indices]


@pytest.mark.parametrize("call", ["can", "step", "reserve"])
def test_array_may_be_resized_once_it_was_read(make_pool, make_plan, call):
    """A call keeps a copy and lets go of the buffer: what the owner does to it later is his own business."""
    pool = make_pool()
    plan, handles = make_plan(pool), array.array("q", [pool.open(4), pool.open(4)])
    arguments = () if call == "can" else (plan,)
    getattr(pool, call)(*arguments, handles, [1, Reenter(1, lambda: handles.append(0))])
    assert len(handles) == 3 and len(plan.handles) == (0 if call == "can" else 2)


MISALIGNED = {
    "step": lambda pool, plan, h, ints: pool.step(plan, ints([h], "q")),
    "step, num_new": lambda pool, plan, h, ints: pool.step(plan, [h], ints([1], "i")),
    "truncate": lambda pool, plan, h, ints: pool.truncate([h], ints([1], "q")),
    "close": lambda pool, plan, h, ints: pool.close(ints([h], "q")),
    "commit, tokens": lambda pool, plan, h, ints: pool.prefix.commit(h, ints([5], "i")),
    "commit, counts": lambda pool, plan, h, ints: pool.prefix.commit([h], [5], ints([1], "i")),
    "match": lambda pool, plan, h, ints: pool.prefix.match(ints([5], "i")),
    "incref": lambda pool, plan, h, ints: pool.blocks.incref(ints([1], "i")),
    "evict_blocks": lambda pool, plan, h, ints: pool.evict_blocks(h, ints([0], "q")),
    "alloc": lambda pool, plan, h, ints: pool.blocks.alloc(1, out=ints([0], "i")),
}


def misaligned(values, code):
    """An array that begins at an odd address."""
    memory = np.zeros(len(values) * 8 + 1, np.uint8)
    memory = memory[1 - memory.ctypes.data % 2 :]
    ints = memory[: len(values) * np.dtype(code).itemsize].view(code)
    ints[:] = values
    assert ints.ctypes.data % 2 == 1
    return ints


def misaligned_view(values, code):
    """The same as a memoryview, which names its format in another way than numpy does."""
    ints = misaligned(values, code)
    return memoryview(ints.view(np.uint8)).cast(code)


@pytest.mark.parametrize("memory", [misaligned, misaligned_view])
@pytest.mark.parametrize("call", MISALIGNED)
def test_misaligned_memory_is_refused(written, refused, call, memory):
    pool, plan, handle = written
    with refused(pool, ValueError, call.split(",")[0], plans=[plan]):
        MISALIGNED[call](pool, plan, handle, memory)


def test_misaligned_array_is_not_bound(written, refused):
    pool, plan, _ = written
    with refused(pool, ValueError, "bind", plans=[plan]):
        plan.bind(positions=misaligned([0] * 64, "i"))


IN_ANOTHER_INTERPRETER = """
import sys
sys.path[:] = {path!r}
try:
    import kvpool
except ImportError as error:
    assert "interpreter" in str(error).lower(), error
else:
    raise AssertionError("a second interpreter imported kvpool")
"""


def test_second_interpreter_may_not_import_kvpool():
    """And the first one goes on as if nothing had been."""
    module = "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
    program = f"""
import kvpool, {module} as interpreters
pool = kvpool.Pool(8, 4)
held = pool.blocks.alloc(2)
other = interpreters.create()
failed = interpreters.run_string(other, {IN_ANOTHER_INTERPRETER.format(path=sys.path)!r})
assert failed is None, failed
interpreters.destroy(other)
pool.blocks.free(held)
pool.check()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_list_shortened_while_it_is_read_is_refused(make_pool, refused):
    pool = make_pool()
    pool.blocks.alloc(3)
    ids = [1, 2, 3]
    ids[1] = Reenter(2, lambda: ids.clear())
    with refused(pool, (ValueError, IndexError), "incref"):
        pool.blocks.incref(ids)


# --- copies of the objects --------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_pool_and_plan_cannot_be_copied(make_pool, make_plan, duplicate):
    pool = make_pool(prefix_cache=True)
    plan = make_plan(pool)
    for thing in (pool, plan, pool.prefix, pool.blocks, pool.blocks.references, *plan.groups):
        with pytest.raises(TypeError):
            duplicate(thing)
    assert pool.stats().used == 0


def test_second_init_changes_nothing(core, make_pool, make_plan):
    pool = make_pool()
    plan, handle = make_plan(pool), pool.open(8)
    before = pool.fingerprint()
    for init, arguments in ((pool.__init__, (4, 4)), (plan.__init__, (pool, 2))):
        with contextlib.suppress(RuntimeError, TypeError):
            init(*arguments)
    assert pool.fingerprint() == before
    assert pool.num_blocks == 16 and pool.table(handle, 0).ravel().tolist() == [1, 2]
    pool.step(plan, [handle], 1)
    assert plan.slot_mapping.tolist() == [4]


def test_instance_without_constructor_is_refused(core):
    with pytest.raises(TypeError):
        core.Pool.__new__(core.Pool)
    with pytest.raises(TypeError):
        core.Plan.__new__(core.Plan)


def test_prefix_cache_of_a_pool_that_has_none_is_refused(core):
    cached = core.Pool(8, 4, prefix_cache=True)
    with pytest.raises(ValueError, match="no prefix cache"):
        type(cached.prefix)(core.Pool(8, 4))
    assert type(cached.prefix)(cached).match([1]) == 0


def test_attributes_and_statistics_are_read_only(make_pool, make_plan):
    pool = make_pool()
    plan, stats = make_plan(pool), pool.stats()
    of_plan = ("limits", "num_tokens", "is_pending", "step_id", "block_tables", "copies", "dirty_rows")
    for thing, names in (
        (pool, ("num_blocks", "block_size", "options", "prefix")),
        (plan, of_plan),
        (stats, ("blank",)),
    ):
        for name in names:
            with pytest.raises(AttributeError):
                setattr(thing, name, 99)
    pool.blocks.alloc(3)
    assert (pool.num_blocks, stats.blank, pool.stats().blank) == (16, 15, 12)  # a snapshot


@pytest.mark.parametrize(
    "num_blocks, max_seqs, expected",
    [(16, 64, 15), (1000, 1024, 999), (200_000, 1024, 2**17), (300, 2**20, 128)],
)
def test_max_blocks_per_seq_default_bounds_the_memory_of_the_tables(make_pool, num_blocks, max_seqs, expected):
    assert make_pool(num_blocks, 4, max_seqs=max_seqs).options.max_blocks_per_seq == expected


# --- life of a pool ---------------------------------------------------------------------------------------


def test_2047_pools_may_be_alive_and_no_more(core):
    gc.collect()
    pools = []
    try:
        with pytest.raises((ValueError, KVPoolError), match=r"\[Pool\].*2,?047"):
            for _ in range(2048):
                pools.append(core.Pool(2, 1, max_seqs=1))
        assert len(pools) <= 2047 and len({pool.open() >> 52 for pool in pools}) == len(pools)
        pools.pop(1000).shutdown()
        pools.append(core.Pool(2, 1, max_seqs=1))
    finally:
        for pool in pools:
            pool.shutdown()


def dropped(core):
    core.Pool(2, 1, max_seqs=1).open()


def failed(core):
    for options in ({"seed": "x"}, {"in_order": 3}):
        with pytest.raises(TypeError):
            core.Pool(2, 1, max_seqs=1, **options)


def lost_in_a_cycle(core):
    pool = core.Pool(4, 1, max_seqs=1)
    plan = core.Plan(pool, 1)
    pool.step(plan, [pool.open()], 1)  # pending: pool and plan keep each other alive


@pytest.mark.parametrize("life", [dropped, failed, lost_in_a_cycle])
def test_pools_that_nobody_holds_give_their_tags_back(core, life):
    gc.disable()
    try:
        for _ in range(2100):
            life(core)
    finally:
        gc.enable()


@pytest.mark.parametrize("end", ["dropped", "shutdown"])
def test_arrays_of_a_plan_outlive_its_pool_and_a_plan_keeps_its_pool_alive(core, end):
    pool = core.Pool(8, 4, max_seqs=4)
    plan = core.Plan(pool, 2, 8, table_width=2)
    pool.step(plan, [pool.open(), pool.open()], [5, 2])
    table, slots, copies = plan.block_tables, plan.slot_mapping, plan.copies
    if end == "shutdown":
        pool.shutdown()
    del pool
    gc.collect()
    assert plan.slot_mapping.tolist() == slots.tolist() and plan.is_pending == (end == "dropped")
    with pytest.raises(PoolClosed if end == "shutdown" else PlanStateError):
        plan.bind(seq_lens=np.zeros(2, np.int32))
    del plan
    gc.collect()
    assert table.tolist() == [[1, 2], [3, 0]] and slots.tolist() == [4, 5, 6, 7, 8, 12, 13]
    assert copies.shape == (0, 3)


def test_repr_names_the_class_and_survives_shutdown(make_pool, make_plan):
    pool = make_pool(prefix_cache=True)
    plan = make_plan(pool)
    things = {"Pool": pool, "Plan": plan, "prefix": pool.prefix, "blocks": pool.blocks}
    pool.step(plan, [pool.open()], 1)
    assert repr(plan).endswith("pending as step 1>")
    for _ in range(2):
        assert all(name in repr(thing) for name, thing in things.items())
        pool.shutdown()


def test_backend_of_other_sizes_is_refused_by_a_plan(core):
    pool = core.Pool(8, 4)
    for num_blocks, block_size, named in ((8, 2, "block_size"), (9, 4, "num_blocks")):
        backend = load_backend("numpy")(KVSpec(1, 1, 8, "float32", block_size=block_size), num_blocks)
        with pytest.raises(ValueError, match=named):
            core.Plan(pool, 2, backend=backend)
    backend = load_backend("numpy")(KVSpec(1, 1, 8, "float32", block_size=4), 8)
    plan = core.Plan(pool, 2, formats="positions", backend=backend)
    pool.step(plan, [pool.open()])
    assert plan.positions.tolist() == [0] and plan.block_tables.shape[0] == 1
