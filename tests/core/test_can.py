"""`can`: prompts, what is refused, and the price of one look at each row. What steps find, the fuzzer compares."""

import time
from typing import Any

import numpy as np

from kvpool import Group, Plan, Pool

ROWS = 2048


def test_can_tokens_counts_what_is_free_once_the_hits_are_revived():
    """Of 8 blocks 4 hold a prompt that nobody uses, and 4 are blank."""
    pool = Pool(9, 4, prefix_cache=True, watermark=1, seed=1, max_seqs=2)
    plan, prompt = Plan(pool, 1, 16), [7] * 16
    handle = pool.open(prompt)
    pool.step(plan, [handle], 16)
    pool.done(plan)
    pool.prefix.commit(handle, prompt)
    pool.close(handle)
    before = pool.fingerprint(), pool.digest(), pool.prefix.stats()
    assert pool.can(tokens=[*prompt, *[1] * 12]) is True  # 3 blocks beside the hit, of 4, and the watermark
    assert pool.can(tokens=np.array([*prompt, *[1] * 13], np.int32)) is False
    assert pool.can(tokens=[2] * 28) and not pool.can(tokens=[2] * 29)  # without a hit all 8 may be taken
    assert pool.can(tokens=28) and not pool.can(tokens=29)
    assert not pool.can(tokens=[*prompt, *[1] * 13], namespace=b"other") and pool.can(tokens=prompt, namespace=b"other")
    assert pool.can(tokens=[*prompt, *[1] * 16], reserve=False) and not pool.can(tokens=[1] * 33, reserve=False)
    assert pool.can(tokens=[*prompt, *[1] * 12], load=True) and not pool.can(tokens=[*prompt, *[1] * 13], load=True)
    assert (pool.fingerprint(), pool.digest(), pool.prefix.stats()) == before
    pool.open(0), pool.open(0)
    assert not pool.can(tokens=0)  # there is no room for a third sequence
    pool.check()


def test_can_tokens_asks_every_arena_of_a_pool_with_layer_groups():
    groups = [Group.full(), Group.window(8, arena=1, num_blocks=12), Group.state(3, blocks=1)]
    pool = Pool(20, 4, groups=groups, prefix_cache=True, seed=1)
    assert pool.can(tokens=[1] * 44) and not pool.can(tokens=[1] * 45)  # 11 blocks of the window
    held = pool.blocks.alloc(10)
    assert pool.can(tokens=[1] * 36) and not pool.can(tokens=[1] * 37)
    assert pool.can(tokens=[1] * 32, load=True) and not pool.can(tokens=[1] * 36, load=True)  # and the checkpoint
    pool.blocks.free(held)
    without = Pool(20, 4, groups=groups[:2], seed=1)
    assert without.can(tokens=44) and not without.can(tokens=45)
    assert without.can(tokens=[1] * 44) and not without.can(tokens=[1] * 45)  # a prompt takes as much as a count


def test_can_needs_handles_or_tokens_and_what_belongs_to_them(make_pool, refused):
    pool = make_pool(prefix_cache=True)
    handle = pool.open()
    for wrong in (
        {},
        {"handles": [handle], "tokens": [1]},
        {"tokens": [1], "num_new": 2},
        {"tokens": [1], "num_new": 1.0},
        {"handles": [handle], "namespace": b"a"},
        {"handles": [handle], "namespace": ""},
        {"handles": [handle], "reserve": False},
        {"handles": [handle], "load": True},
        {"tokens": [1], "namespace": "a"},
        {"tokens": [1], "reserve": 1},
        {"tokens": [1], "load": None},
        {"tokens": "text"},
        {"tokens": [1.5]},
    ):
        with refused(pool, TypeError, "can"):
            pool.can(**wrong)
    for wrong in ({"tokens": [-1]}, {"tokens": -1}, {"tokens": 1, "reserve": False}):
        with refused(pool, ValueError, "can"):
            pool.can(**wrong)
    with refused(pool, ValueError, "can"):
        pool.can(tokens=[1], reserve=False, load=True)
    states = Pool(64, 4, groups=[Group.full(), Group.state(4)])
    with refused(states, ValueError, "can"):
        states.can(tokens=8, load=True)


def cpu_seconds(*calls: Any) -> list[float]:
    """The best of some rounds of each call, in CPU time; they take turns, for a CPU may slow down in between."""
    best = [float("inf")] * len(calls)
    for _ in range(40):
        for k, call in enumerate(calls):
            start = time.process_time()
            for _ in range(10):
                call()
            best[k] = min(best[k], time.process_time() - start)
    return [max(seconds, 1e-6) for seconds in best]


def test_can_with_a_first_row_of_no_tokens_costs_what_it_costs_otherwise():
    """It took the slow way through the whole batch once."""
    pool = Pool(4 * ROWS + 1, 16, max_seqs=ROWS, max_blocks_per_seq=4, seed=1)
    handles = np.array([pool.open(16) for _ in range(ROWS)], np.int64)
    ones = np.ones(ROWS, np.int32)
    zero_first = ones.copy()
    zero_first[0] = 0
    first, others = cpu_seconds(lambda: pool.can(handles, zero_first), lambda: pool.can(handles, ones))
    assert first < 1.6 * others
