"""fork(2): the child has its own pool and its own store, also when another thread was inside a call of theirs."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
POOL = """
    import os, signal, threading
    import numpy as np
    from kvpool import Plan, Pool
    signal.alarm(60)                    # a deadlock ends here
    pool = Pool(64, 4, max_seqs=16, prefix_cache=True, events=8)
    plan = Plan(pool, 4, 16)
    handles = [pool.open(), pool.open()]
    pool.step(plan, handles, 5)
    before = pool.fingerprint()

    def use():
        pool.check()
        assert pool.fingerprint() == before
        pool.done(plan)
        child = pool.fork(handles[0], 2)
        pool.step(plan, child, 1)
        pool.rollback(plan)
        pool.close(handles)
        pool.reset()
        pool.check()
        Pool(8, 4).open()

    def in_a_child(action):
        pid = os.fork()
        if pid == 0:
            try:
                action()
            except BaseException as error:
                print(repr(error), flush=True)
                os._exit(1)
            os._exit(0)
        return os.waitpid(pid, 0)[1]
"""
INSIDE = """
    inside, leave = threading.Event(), threading.Event()

    class Slow:
        def __index__(self):
            inside.set()
            leave.wait()
            return 1

    def caller():
        try:
            pool.blocks.alloc(Slow())
        finally:
            leave.set()

    thread = threading.Thread(target=caller)
    thread.start()
    inside.wait()
    status = in_a_child(use)
    leave.set()
    thread.join()
    assert status == 0
    assert pool.stats().used == 5       # the parent's call went on: one block more
"""
STORE = """
    import sys
    sys.path[:0] = ["tests/cpu", "tests/helpers"]
    from test_cpu_store import Case
    case = Case(num_threads=2)
    expected = case.attend()
    inside = threading.Event()
    stop = threading.Event()

    def caller():
        while not stop.is_set():
            inside.set()
            case.attend()

    def same():
        assert np.array_equal(case.attend(), expected)
        case.store.zero(np.arange(20))

    thread = threading.Thread(target=caller)
    thread.start()
    inside.wait()
    failed = [in_a_child(same) for _ in range(60)]
    stop.set()
    thread.join()
    assert not any(failed), failed
"""


def run(*parts):
    """Run a program; it must end well."""
    code = "".join(textwrap.dedent(part) for part in parts)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=dict(os.environ))
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


@pytest.mark.parametrize(
    "rest",
    [
        "assert in_a_child(use) == 0\nuse()\n",
        INSIDE,
        "assert in_a_child(lambda: os._exit(in_a_child(use) != 0)) == 0\n",
    ],
    ids=["child", "another thread was inside a call", "grandchild"],
)
def test_child_uses_its_copy_of_the_pool(rest):
    run(POOL, rest)


@pytest.mark.skipif(sys.platform == "darwin", reason="frameworks of macOS do not survive a fork with threads")
def test_store_of_the_cpu_backend_is_free_in_a_child():
    run(POOL, STORE)


EVENTS = """
    import itertools, time

    SIZE = 2048                         # tokens of a block: to hash them takes a while
    pool = Pool(128, SIZE, max_seqs=4, prefix_cache=True, events=256, in_order=True)
    plan = Plan(pool, 1, 100 * SIZE)

    def tell(k):
        tokens = np.arange(100 * SIZE, dtype=np.int32) + 1000 * k
        handle = pool.open(tokens)
        pool.step(plan, [handle], 100 * SIZE)
        pool.prefix.commit(handle, tokens)
        pool.close(handle)

    def told():
        # Whatever was not drained before the fork is there, or is said to be lost.
        events = [*pool.prefix.events(), *itertools.chain(*drained)]
        stored = sum(event[0] == "stored" for event in events)
        assert stored + sum(event[1] for event in events if event[0] == "lost") == 100, (stored, events[:1])

    for k in range(40):
        pool.reset()
        pool.prefix.events()
        drained = []                    # as soon as the call returns, without a chance to fork in between
        thread = threading.Thread(target=lambda: drained.extend(map(type(pool.prefix).events, [pool.prefix])))
        tell(k)
        thread.start()
        time.sleep(k % 5 / 1000)
        status = in_a_child(told)
        thread.join()
        assert status == 0, k
"""
SLOW_DRAIN = """
    import kvpool, time

    class SlowDrain(kvpool._core.PrefixCache):
        def events(self):
            events = super().events()
            time.sleep(0.01)            # a child that is forked now finds neither the events nor that they are lost
            return events

    class Pool(kvpool.Pool):
        prefix = property(lambda pool: SlowDrain(pool))
"""


def test_child_forked_while_events_are_drained_has_them_or_counts_them_lost():
    run(POOL, EVENTS)


def test_events_that_vanish_in_a_fork_are_noticed():
    with pytest.raises(AssertionError, match="AssertionError"):
        run(POOL, SLOW_DRAIN, EVENTS)


FINALIZER = """
    import gc

    pool = Pool(64, 4, max_seqs=16, prefix_cache=True, events=300, in_order=True)
    plan = Plan(pool, 1, 200)
    ends = []                           # of the child
    children = []                       # what a child got by a call of its own

    class ForksWhenItGoes:
        def __init__(self):
            self.itself = self

        def __del__(self):
            child = os.fork()
            if child:
                ends.append(os.waitpid(child, 0)[1])
            else:
                children.append(pool.prefix.events())

    handle = pool.open()
    pool.step(plan, [handle], 200)
    pool.prefix.commit(handle, np.arange(200, dtype=np.int32))
    prefix = pool.prefix
    ForksWhenItGoes()
    gc.set_threshold(1)                 # it goes while the events become Python objects
    events = prefix.events()
    gc.set_threshold(700)
    assert len(events) == 50
    if children:                        # the child comes here too
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(pool.prefix.events() != [])
        os._exit(children != [[("lost", 50)]] or os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
    assert ends == [0]
"""


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="the collector runs between two bytecodes, in no call")
def test_fork_by_a_finalizer_inside_of_drain_events_counts_nothing_twice():
    run(POOL, FINALIZER)
