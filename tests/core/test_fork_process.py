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
