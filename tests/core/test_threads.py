"""Threads on one pool: an array that is written while a call reads it, readers, and callers that wait.

Short by default; ``KVPOOL_LONG=1`` runs a hundred times as many rounds. Nothing here goes by the clock: a call is
accepted as a whole or refused without a trace. What calls of several threads give, each caller's own account says
(`tests/verify/slow/test_threads_at_once.py`).
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import numpy as np
import pytest
from tests.verify._hooks import release_lock, take_lock

from kvpool import Group, Plan, Pool
from kvpool.errors import ConcurrentUse, KVPoolError
from kvpool.testing import ModelPlan, ModelPool

LONG = 100 if os.environ.get("KVPOOL_LONG") else 1
MANY = 50_000  # sequences: numpy writes this many without the GIL


@contextlib.contextmanager
def running(*loops: Callable[[], Any]) -> Iterator[list[BaseException]]:
    """Threads that do these things over and over while the body runs; yields what they raised."""
    stop, raised = threading.Event(), []

    def turn(loop: Callable[[], Any]) -> None:
        try:
            while not stop.is_set():
                loop()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=turn, args=(loop,), daemon=True) for loop in loops]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        yield raised
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
        sys.setswitchinterval(before)
    assert not any(thread.is_alive() for thread in threads)


# ---- an array that is written while a call reads it --------------------------------------------------------


class Target:
    """A pool with many sequences of one block each, and arrays that a hostile thread writes."""

    def __init__(self, Pool: Any, Plan: Any, many: int) -> None:
        self.pool = Pool(4 * many, 4, max_seqs=many, max_blocks_per_seq=2, prefix_cache=True, seed=1)
        self.plan = Plan(self.pool, many, 5 * many, formats=("seq_lens",))
        self.raw = Pool(2 * many, 4, seed=1)
        self.handles = np.array([self.pool.open(4) for _ in range(many)], np.int64)
        self.pool.step(self.plan, self.handles, 4)
        self.pool.done(self.plan)
        self.ids = self.raw.blocks.alloc(many)
        self.counts = np.ones(many, np.int32)
        self.tokens = np.arange(many, dtype=np.int32) % 1000

    def undo(self) -> None:
        """Every sequence has four tokens again, and nothing is pending."""
        if self.plan.is_pending:
            self.pool.rollback(self.plan)


def wrong_half(good: np.ndarray, wrong: np.ndarray | int) -> np.ndarray:
    """The second half is wrong."""
    bad = good.copy()
    half = len(bad) // 2
    bad[half:] = wrong[half:] if isinstance(wrong, np.ndarray) else wrong
    return bad


#: name -> (which array is written, what its second half becomes, the call, what undoes it)
CALLS: dict[str, tuple[str, Any, Callable, Callable]] = {
    "step": ("handles", 0xFFFFF, lambda t, a: t.pool.step(t.plan, a, 0), Target.undo),
    "step, num_new": ("counts", 2**31 - 1, lambda t, a: t.pool.step(t.plan, t.handles, a), Target.undo),
    "reserve": ("handles", 0xFFFFF, lambda t, a: t.pool.reserve(t.plan, a, 1), Target.undo),
    "reserve, num_new": ("counts", -1, lambda t, a: t.pool.reserve(t.plan, t.handles, a), Target.undo),
    "unshare": ("handles", 0xFFFFF, lambda t, a: t.pool.unshare(t.plan, a, 3), Target.undo),
    "unshare, lens": ("counts", 5, lambda t, a: t.pool.unshare(t.plan, t.handles, a), Target.undo),
    "can": ("handles", 0xFFFFF, lambda t, a: t.pool.can(a, 1), Target.undo),
    "can, num_new": ("counts", -1, lambda t, a: t.pool.can(t.handles, a), Target.undo),
    "truncate": ("handles", 0xFFFFF, lambda t, a: t.pool.truncate(a, 3), lambda t: regrow(t)),
    "truncate, lens": ("counts", 9, lambda t, a: t.pool.truncate(t.handles, a), lambda t: regrow(t)),
    "compact": ("handles", 0xFFFFF, lambda t, a: t.pool.compact(a, 3), lambda t: regrow(t)),
    "compact, lens": ("counts", 9, lambda t, a: t.pool.compact(t.handles, a), lambda t: regrow(t)),
    "close": ("handles", 0xFFFFF, lambda t, a: t.pool.close(a), lambda t: reopen(t)),
    "commit": ("handles", 0xFFFFF, lambda t, a: t.pool.prefix.commit(a, []), Target.undo),
    "commit, tokens": (
        "tokens",
        -1,
        lambda t, a: t.pool.prefix.commit(t.handles[: len(a) // 4], a),
        lambda t: recommit(t),
    ),
    "commit, counts": ("counts", 99, lambda t, a: t.pool.prefix.commit(t.handles, t.tokens, a), lambda t: recommit(t)),
    "open": ("tokens", -1, lambda t, a: t.pool.close(t.pool.open(a[:8])), Target.undo),
    "match": ("tokens", -1, lambda t, a: t.pool.prefix.match(a), Target.undo),
    "pin": ("tokens", -1, lambda t, a: t.pool.prefix.unpin(t.pool.prefix.pin(a[:8])), Target.undo),
    "incref": ("ids", 2**31 - 1, lambda t, a: t.raw.blocks.incref(a), lambda t: settle(t)),
    "decref": ("ids", 2**31 - 1, lambda t, a: t.raw.blocks.decref(a), lambda t: settle(t)),
    "free": ("ids", 0, lambda t, a: t.raw.blocks.free(a), lambda t: settle(t)),
    "mark_cached": ("ids", -1, lambda t, a: t.raw.blocks.mark_cached(a), lambda t: settle(t)),
    "touch": ("ids", 2**31 - 1, lambda t, a: t.raw.blocks.touch(a), lambda t: settle(t)),
}


def regrow(target: Target) -> None:
    """Sequences that were shortened are replaced by new ones."""
    if target.pool.stats().tokens != 4 * len(target.handles):
        reopen(target)


def reopen(target: Target) -> None:
    """All sequences anew; the array that is written keeps its own handles, which are stale from now on."""
    target.undo()
    target.pool.reset()
    target.handles[:] = [target.pool.open(4) for _ in target.handles]
    target.pool.step(target.plan, target.handles, 4)
    target.pool.done(target.plan)


def recommit(target: Target) -> None:
    """Sequences that were committed are replaced by new ones."""
    if target.pool.prefix.stats().nodes:
        reopen(target)


def settle(target: Target) -> None:
    """Every block has one raw reference again."""
    target.raw.reset()
    target.raw.blocks.drain_evicted()
    target.ids[:] = target.raw.blocks.alloc(len(target.ids))


def attack(Pool: Any, Plan: Any, call: str, many: int, rounds: int) -> None:
    """Make one call over and over while a thread writes its array: good, bad, good, bad."""
    name, wrong, make, undo = CALLS[call]
    target = Target(Pool, Plan, many)
    array = getattr(target, name).copy()

    def write() -> None:
        good = getattr(target, name)
        bad = wrong_half(good, good | wrong if name == "handles" else wrong)
        for source in (bad, good) * 10:  # threads change at the end of a turn: the array is bad for half of the time
            array[:] = source

    pools = (target.pool, target.raw)
    with running(write) as raised:
        for _ in range(rounds):
            before = [pool.fingerprint() for pool in pools]
            time.sleep(0)  # the writer is in the middle of it when the call begins
            try:
                make(target, array)
            except (KVPoolError, ValueError, IndexError, OverflowError):
                assert [pool.fingerprint() for pool in pools] == before, f"{call} was refused, and left a trace"
            for pool in pools:
                pool.check()
            undo(target)
    assert not raised, raised
    for pool in pools:
        pool.reset()
        pool.check()
        pool.shutdown()


@pytest.mark.parametrize("call", CALLS)
def test_array_written_by_another_thread_is_accepted_as_a_whole_or_refused(call):
    attack(Pool, Plan, call, MANY, 12 * LONG)


class JudgesThenReads(ModelPool):
    """A call reads the caller's memory twice: to judge it, and to do what it says."""

    def truncate(self, handles: Any, lens: Any) -> None:
        """Judge, give way, read again and go on."""
        judged = self.batch("truncate", handles)
        time.sleep(0)
        for handle, _ in zip(handles, judged, strict=True):
            super().truncate(int(handle), lens)


def test_call_that_reads_its_array_twice_is_detected():
    with pytest.raises(AssertionError, match="left a trace"):
        attack(Traced, ModelPlan, "truncate", 12, 2_000)


class Traced(JudgesThenReads):
    """The fingerprint sees how often the pool was changed."""

    def fingerprint(self) -> int:
        """Return the digest too."""
        return hash((super().fingerprint(), self.digest()))


@pytest.mark.parametrize("count", [1, 3, 500])
def test_alloc_out_that_another_thread_writes_leaves_the_pool_sound(count):
    """`alloc(out=)` writes the caller's memory and never reads it."""
    pool, out = Pool(2048, 4, seed=1), np.zeros(count, np.int32)
    with running(lambda: out.fill(-7)) as raised:
        for _ in range(200 * LONG):
            assert pool.blocks.alloc(count, out=out) is out
            assert pool.stats().used == count
            pool.check()
            pool.reset()
    assert not raised


# ---- readers, and callers that wait ------------------------------------------------------------------------


class Finalized:
    """A cycle with a finalizer, as sockets and futures are: the collector runs it inside of anything."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        sum(range(100))


def test_reader_is_never_refused_and_never_in_the_way():
    """A thread that reads beside an engine, while finalizers run."""
    pool = Pool(256, 4, max_seqs=16, prefix_cache=True, events=64, seed=1)
    plan, handles = Plan(pool, 16), [pool.open(4) for _ in range(16)]

    def read() -> None:
        stats = pool.stats()
        assert stats.free + stats.limbo + stats.used == 255 and stats.sequences == 16
        pool.num_tokens(handles[3]), pool.table(handles[3]), pool.is_open(handles[3]), pool.digest()
        pool.prefix.match([1, 2, 3]), pool.prefix.stats(), pool.prefix.events(), pool.check(), pool.fingerprint()

    with running(read, read, Finalized) as raised:
        for _ in range(500 * LONG):
            pool.step(plan, handles, 1)
            pool.done(plan)
            pool.truncate(handles, 0)
    assert not raised, raised
    assert not plan.is_pending


def test_caller_waits_for_the_lock_and_is_refused_by_its_own_thread():
    pool = Pool(16, 4)
    assert take_lock(pool)
    try:
        with pytest.raises(ConcurrentUse, match=r"\[stats\] this thread is inside another call"):
            pool.stats()
        with futures.ThreadPoolExecutor(1) as others:
            found = others.submit(pool.stats)
            with pytest.raises(futures.TimeoutError):
                found.result(0.05)
            release_lock(pool)
            assert found.result().free == 15
    finally:
        assert take_lock(pool)
        release_lock(pool)


def test_thread_that_waits_for_a_pool_blocks_no_other_thread():
    """One pool is used by four threads; a fifth, on another pool, goes on."""
    pool, other, moved = Pool(1 << 16, 4, seed=1), Pool(8, 4, seed=1), [0]

    def apart() -> None:
        other.blocks.free(other.blocks.alloc(1))
        moved[0] += 1

    with running(
        pool.check, pool.check, pool.fingerprint, lambda: pool.blocks.free(pool.blocks.alloc(50)), apart
    ) as raised:
        while moved[0] < 100 * LONG and not raised:
            time.sleep(0.001)
    assert not raised, raised


def test_plan_that_two_threads_step_is_garbage_at_worst():
    """A plan belongs to one thread; misused it may hold garbage, and the pool stays whole."""
    pool = Pool(256, 4, max_seqs=8, seed=1)
    plan, handles = Plan(pool, 8, 64), [pool.open() for _ in range(8)]

    def use() -> None:
        for call in (lambda: pool.step(plan, handles, 3), lambda: pool.rollback(plan), plan.bind):
            with contextlib.suppress(KVPoolError, ValueError):
                call()

    with running(use, use) as raised:
        for _ in range(300 * LONG):
            use()
            pool.check()
    assert not raised, raised
    if plan.is_pending:
        pool.rollback(plan)
    pool.close(handles)
    assert pool.blocks.num_blank == 255


# ---- code that runs in the middle of a call ----------------------------------------------------------------


def test_finalizer_calls_the_pool_whenever_the_collector_runs():
    """Not even a finalizer that closes at once, instead of deferring, finds the pool in the middle of a call."""
    pool = Pool(2048, 4, max_seqs=2048, prefix_cache=True, seed=1)
    plan, handles, closed = Plan(pool, 64), [pool.open(4) for _ in range(8)], []

    class Owner:
        def __init__(self) -> None:
            self.handle, self.me = pool.open(4), self

        def __del__(self) -> None:
            pool.close(self.handle)
            pool.check()
            closed.append(self.handle)

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for i in range(1200):
            Owner()
            pool.step(plan, handles, 1)
            pool.done(plan)
            pool.truncate(handles, 0)
            pool.close(pool.open(i % 2, b"tenant %d" % i))
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert len(closed) == 1200 and pool.stats().sequences == 8
    pool.check()


def read_while(read: Callable[[], None], write: Callable[[], None], rounds: int) -> None:
    """Two threads read over and over while this one writes. Without a GIL a reader may hold on to what is let go of."""
    over = threading.Event()

    def reads() -> None:
        while not over.is_set():
            read()

    with futures.ThreadPoolExecutor(2) as readers:
        reading = [readers.submit(reads) for _ in range(2)]
        for _ in range(rounds * LONG):
            write()
        over.set()
    assert [reader.result() for reader in reading] == [None, None]


def test_plan_read_while_another_thread_binds_shows_an_array_of_its_own_or_of_the_other():
    pool = Pool(64, 4)
    plan = Plan(pool, 4, table_width=2, formats=("block_tables", "positions"))

    def read() -> None:
        assert not plan.block_tables.any() and not plan.positions.any()

    def bind() -> None:
        plan.bind(block_tables=np.zeros((4, 2), np.int32), positions=np.zeros(4, np.int32))

    read_while(read, bind, 3000)


def test_group_of_a_plan_read_while_another_thread_makes_room_for_copies_shows_whole_arrays():
    """`unshare` exchanges the array of copies."""
    pool = Pool(64, 4, groups=[Group.full()], max_seqs=4)
    parent = pool.open(32)
    plan = Plan(pool, 1, 32)
    pool.step(plan, [parent], 32)
    pool.done(plan)
    (child,) = pool.fork(parent).tolist()
    shown = [plan]

    def read() -> None:
        copies = shown[-1].groups[0].copies
        assert copies.shape[1] == 3 and len(copies.tolist()) == len(copies)

    def unshare() -> None:
        shown.append(Plan(pool, 1, 4))  # it has room for one
        pool.unshare(shown[-1], [child], 31)
        assert len(shown[-1].groups[0].copies) == 8
        pool.rollback(shown[-1])
        del shown[:-1]

    read_while(read, unshare, 300)
