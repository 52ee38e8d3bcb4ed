"""What the core has taken from malloc it gives back: the bytes that are in use are the same after many rounds."""

import ctypes
import gc
import sys

import numpy as np
import pytest

from kvpool import Group, Plan, Pool

ROUNDS = 40
FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


def bytes_in_use():
    """Of malloc, arenas of Python's small objects apart, which come and go by 256 KiB and more."""
    gc.collect()
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = Info
    return ask().uordblks


def is_counted():
    """Whether malloc is that of glibc."""
    if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallinfo2"):
        return False
    before = bytes_in_use()
    kept = np.zeros(500)
    return bytes_in_use() - before >= kept.nbytes


pytestmark = pytest.mark.skipif(not is_counted(), reason="only malloc of glibc counts; one of a sanitizer does not")


def grown(life, *given):
    """Bytes that rounds of a life leave behind, after some that come first."""
    for number in range(2 * ROUNDS):
        if number == ROUNDS:
            before = bytes_in_use()
        life(*given)
    return bytes_in_use() - before


def pools_of_every_kind():
    groups = [Group.full(), Group.window(8), Group.state(4, blocks=16)]
    for options in ({}, {"prefix_cache": True, "events": 8}, {"groups": groups, "prefix_cache": True}):
        pool = Pool(64, 4, max_seqs=16, **options)
        plan = Plan(pool, 4, 64)
        handles = [pool.open() for _ in range(4)]
        pool.step(plan, handles, 9)
        pool.done(plan)
        if options:
            pool.prefix.commit(handles, np.tile(np.arange(9, dtype=np.int32), 4), [9] * 4)
        pool.close(handles)


def prompts_of_namespaces(pool, plan):
    for number in range(8):
        tokens = [number] * 9
        handle = pool.open(tokens, b"%d" % number * 100)
        pool.step(plan, [handle], 9 - pool.num_tokens(handle))
        pool.done(plan)
        pool.prefix.commit([handle], tokens)
        pool.close([handle])
    pool.prefix.events()
    pool.prefix.flush()
    pool.prefix.events()


def batches_as_lists(pool, plan):
    handles = [pool.open() for _ in range(16)]
    pool.step(plan, handles, [2] * 16)
    pool.done(plan)
    pool.prefix.commit(handles, [7] * 32, [2] * 16)
    pool.truncate(handles, [1] * 16)
    pool.close(handles)


def test_pools_of_every_kind_give_their_memory_back():
    assert grown(pools_of_every_kind) < 4096


@pytest.mark.parametrize("life", [prompts_of_namespaces, batches_as_lists])
def test_calls_give_their_memory_back(life):
    pool = Pool(64, 4, max_seqs=32, prefix_cache=True, events=64)
    assert grown(life, pool, Plan(pool, 16, 64)) < 1024


def test_memory_that_is_kept_is_seen():
    kept = []
    assert grown(lambda: kept.append(np.zeros(100))) >= ROUNDS * 800
