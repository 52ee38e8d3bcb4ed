"""Ctrl-C in a long call: it ends within 100 ms of CPU time, and the pool is as it was.

No call looks for signals once it has the lock of its pool; what reads a list does, however long the list is.
docs/numbers.md has the times for which calls hold the lock.
"""

import ctypes
import functools
import gc
import itertools
import signal
import time

import numpy as np
import pytest

from kvpool import Plan, Pool

NUM_BLOCKS = 300_000
LATENCY = 0.1  # seconds of CPU time


@pytest.fixture
def large_pool():
    """Every block in a table, committed: all that `check` has to look at."""
    pool = Pool(NUM_BLOCKS, 1, max_seqs=4, max_blocks_per_seq=NUM_BLOCKS, in_order=True, prefix_cache=True)
    plan, handle = Plan(pool, 1, NUM_BLOCKS, formats=()), pool.open()
    pool.step(plan, [handle], NUM_BLOCKS - 1)
    pool.prefix.commit(handle, np.arange(NUM_BLOCKS - 1, dtype=np.int32))
    return pool


def test_check_of_a_large_pool_is_interrupted_soon(large_pool):
    before = large_pool.fingerprint()
    large_pool.check()  # the first one touches new memory
    whole = 1e9  # the fastest of a few: the machine may be faster in a moment
    for _ in range(4):
        start = time.process_time()
        large_pool.check()
        whole = min(whole, time.process_time() - start)
    latencies = []

    def interrupt(signum, frame):
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGPROF, interrupt)
    gc.disable()  # an interrupt inside a callback of the collector would be swallowed there
    try:
        for part in (0.02, 0.05, 0.1, 0.15, 0.2, 0.25):  # a busy machine may be four times as fast the next moment
            start = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, part * whole)
            with pytest.raises(KeyboardInterrupt):
                large_pool.check()
            latencies.append(time.process_time() - start - part * whole)
    finally:
        gc.enable()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, former)
    assert max(latencies) < max(LATENCY, whole / 6), (whole, latencies)
    assert large_pool.fingerprint() == before
    large_pool.check()


def test_signal_handler_uses_the_pool_when_the_call_that_it_interrupts_is_over(large_pool):
    used = []

    def use(signum, frame):
        used.append(large_pool.stats().used)
        large_pool.reset()

    former = signal.signal(signal.SIGPROF, use)
    try:
        signal.setitimer(signal.ITIMER_PROF, 0.02)
        while not used:
            large_pool.check()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, former)
    assert used == [NUM_BLOCKS - 1] and large_pool.stats().used == 0
    large_pool.check()


class Rings:
    """An int that raises a signal when it is read. No bytecode runs here that could handle it: only C."""

    __index__ = staticmethod(functools.partial(ctypes.CDLL(None)["raise"], signal.SIGUSR1))  # returns 0


LISTS = {
    "match": lambda pool, plan, handle, ints: pool.prefix.match(ints),
    "open": lambda pool, plan, handle, ints: pool.open(ints),
    "commit": lambda pool, plan, handle, ints: pool.prefix.commit(handle, ints),
    "free": lambda pool, plan, handle, ints: pool.blocks.free(ints),
    "close": lambda pool, plan, handle, ints: pool.close(ints),
    "step": lambda pool, plan, handle, ints: pool.step(plan, [handle], ints),
}


@pytest.mark.parametrize("call", LISTS.values(), ids=LISTS)
def test_reading_a_long_list_is_interrupted_after_65536_items_at_most(call):
    read = itertools.count()

    class Counted:
        """An int that counts how often it is read, in C too."""

        __index__ = staticmethod(functools.partial(next, read))

    pool = Pool(64, 1, prefix_cache=True)
    plan, handle = Plan(pool, 1, 16), pool.open()
    pool.step(plan, [handle], 8)
    pool.done(plan)
    before, inside = pool.fingerprint(), []

    def interrupt(signum, frame):
        inside.append(pool.stats().used)
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            call(pool, plan, handle, [Rings()] + [Counted()] * 300_000)
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert inside == [8]
    assert next(read) <= 1 << 16
    assert pool.fingerprint() == before
    pool.check()
