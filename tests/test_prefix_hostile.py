"""Callbacks, failures and neighbours that a prefix cache must survive. Each case was wrong once."""

import gc
import hashlib

import numpy as np
import pytest

from kvpool import ConcurrentUse, Plan, Pool

A, B = [1, 2, 3, 4], [5, 6, 7, 8]


def test_pool_entered_while_namespaces_are_swept_refuses_and_stays_whole():
    """The sweep of dead namespaces allocates, so a collection and its callbacks can run inside `open`."""
    pool = Pool(8, 4, max_seqs=4, prefix_cache=True)
    caught = []

    def callback(phase, info):
        try:
            pool.close(pool.open(0))
        except ConcurrentUse:
            caught.append(phase)

    threshold = gc.get_threshold()
    gc.callbacks.append(callback)
    gc.set_threshold(1)
    try:
        for i in range(3000):
            pool.close(pool.open(i % 2, b"tenant %d" % i))
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(callback)
    pool.check()
    assert pool.stats().sequences == 0 and pool.prefix_stats().namespaces < 3000


def test_events_that_cannot_be_made_are_lost_and_the_pool_goes_on(monkeypatch):
    pool = Pool(16, 4, prefix_cache=True, events=8)
    plan = Plan(pool, 1, 16)
    handle = pool.open(A)
    pool.step(plan, [handle], 4)
    pool.done(plan)
    pool.commit(handle, A)

    def fails(*args):
        raise MemoryError

    monkeypatch.setattr(hashlib, "sha256", fails)
    assert pool.stats().sequences == 1  # publishes what the commit did, in vain
    monkeypatch.undo()
    pool.close(handle)
    assert pool.evict(1) == 1
    assert pool.drain_events() == [("lost", 2)]  # that it came, and that it went
    pool.check()


def test_counts_that_change_the_tokens_while_they_are_read_are_judged_on_the_change():
    pool = Pool(16, 4, prefix_cache=True, in_order=True)
    plan = Plan(pool, 1, 16)
    handle = pool.open(0)
    pool.step(plan, [handle], 4)
    tokens = np.array(A, np.int32)

    class Evil:
        def __index__(self):
            tokens[0] = -7
            return 4

    with pytest.raises(ValueError, match=r"tokens\[0\] is out of range \(-7\)"):
        pool.commit([handle], tokens, [Evil()])


def test_tokens_that_cannot_be_shared_out_evenly_are_refused_by_that_name():
    pool = Pool(16, 4, prefix_cache=True, in_order=True)
    handles = [pool.open(0), pool.open(0)]
    with pytest.raises(ValueError, match="evenly"):
        pool.commit(handles, [1, 2, 3])


def test_flush_tells_the_same_of_a_namespace_whether_others_pushed_it_out_or_not():
    told = []
    for others in (0, 3000):
        pool = Pool(16, 4, prefix_cache=True, events=8)
        pool.close(pool.open(A, b"mine"))
        for i in range(others):
            pool.close(pool.open(A, b"other %d" % i))
        assert pool.flush(b"mine") == 0
        told.append(pool.drain_events())
    assert told[0] == told[1] == [("cleared", b"mine")]


@pytest.mark.parametrize("count", [6, np.int64(6), np.array(6)])
def test_open_takes_a_count_in_any_form_of_an_int(count):
    pool = Pool(16, 4, prefix_cache=True)
    assert len(pool.table(pool.open(count))) == 2


def test_node_numbers_that_run_out_flush_the_index():
    pool = Pool(16, 4, prefix_cache=True, in_order=True)
    plan = Plan(pool, 1, 16)
    handle = pool.open(A + B)
    pool.step(plan, [handle], 8)
    pool.commit(handle, A)
    assert pool.match(A + B) == 4
    pool._set_next_uid(2**32 - 40)
    pool.commit(handle, B)  # the pool noticed on entry: all is forgotten, the sequence goes on unindexed
    assert pool.match(A + B + A) == 0
    pool.check()
    pool.close(handle)
    handle = pool.open(A + B)
    pool.step(plan, [handle], 8)
    pool.commit(handle, A + B)
    assert pool.match(A + B + A) == 8
