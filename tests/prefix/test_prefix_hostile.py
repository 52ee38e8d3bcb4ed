"""Callbacks, failures and neighbours that a prefix cache must survive. Each case was wrong once."""

import numpy as np
import pytest

from kvpool import Plan, Pool

A = [1, 2, 3, 4]


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
        pool.prefix.commit([handle], tokens, [Evil()])


def test_flush_tells_the_same_of_a_namespace_whether_others_pushed_it_out_or_not():
    told = []
    for others in (0, 3000):
        pool = Pool(16, 4, prefix_cache=True, events=8)
        pool.close(pool.open(A, b"mine"))
        for i in range(others):
            pool.close(pool.open(A, b"other %d" % i))
        assert pool.prefix.flush(b"mine") == 0
        told.append(pool.prefix.events())
    assert told[0] == told[1] == [("cleared", b"mine")]
