"""A pool that records refuses a call for want of memory as any other does: nothing is changed."""

import pytest

import kvpool

testcapi = pytest.importorskip("_testcapi")


def test_fork_while_any_allocation_of_python_fails_leaves_the_pool_as_it_was():
    refused = 0
    for k in range(1, 60):
        pool = kvpool.Pool(70, 6, max_seqs=64, record=1 << 12)
        parent = pool.open(5)
        before = pool.fingerprint()
        try:
            testcapi.set_nomemory(k, k + 1)
            try:
                pool.fork(parent, 39)
            finally:
                testcapi.remove_mem_hooks()
        except MemoryError:
            refused += 1
            assert pool.fingerprint() == before, k
        pool.shutdown()
    assert refused
