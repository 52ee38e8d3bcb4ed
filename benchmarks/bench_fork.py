"""Fork and close of a sequence of 4,096 tokens (256 blocks of 16): 64 children, in one call or in 64.

A round is always 64 children: reading the clock costs a round about as much as forking one child does.
"""

import numpy as np
import pytest

import kvpool
from benchmarks.baselines import Floor
from kvpool.cli.bench import PlainAllocator

TOKENS = 4096
BLOCK_SIZE = 16
BLOCKS = TOKENS // BLOCK_SIZE
CHILDREN = 64


def kvpool_actions(per_call):
    """Return fork and close of all children on a pool, `per_call` in a call."""
    pool = kvpool.Pool(2 * BLOCKS, BLOCK_SIZE, max_seqs=2 * CHILDREN, in_order=True)
    parent, calls = pool.open(), range(CHILDREN // per_call)
    pool.step(kvpool.Plan(pool, 1, TOKENS), [parent], TOKENS)
    forked = [None for _ in calls]

    def fork():
        for call in calls:
            forked[call] = pool.fork(parent, per_call)

    def close():
        for handles in forked:
            pool.close(handles)

    return {"fork": fork, "close": close}


def floor_actions(per_call):
    """Return the same of the C floor, in one call."""
    assert per_call == CHILDREN
    floor = Floor(2 * BLOCKS, rows=CHILDREN + 1, width=BLOCKS, block_size=BLOCK_SIZE)
    floor.set_lengths(np.array([TOKENS]))
    return {"fork": lambda: floor.fork(CHILDREN), "close": lambda: floor.close(CHILDREN)}


def python_actions(per_call):
    """Return the same of the Python allocator, which knows one child a call only."""
    pool, forked = PlainAllocator(2 * BLOCKS, BLOCK_SIZE), []
    parent = pool.open()
    pool.step([parent], TOKENS)

    def fork():
        forked[:] = [pool.fork(parent) for _ in range(CHILDREN)]

    def close():
        for child in forked:
            pool.close(child)

    return {"fork": fork, "close": close}


ACTIONS = {"kvpool": kvpool_actions, "floor": floor_actions, "python": python_actions}


# One child a call is not asked of the floor: this would time the call of C from Python.
@pytest.mark.benchmark(group="fork and close")
@pytest.mark.parametrize("verb", ["fork", "close"])
@pytest.mark.parametrize(
    ("who", "per_call"),
    [("kvpool", 1), ("python", 1), ("kvpool", CHILDREN), ("floor", CHILDREN), ("python", CHILDREN)],
)
def bench_children(measure, who, per_call, verb):
    actions = ACTIONS[who](per_call)
    run = actions.pop(verb)
    (undo,) = actions.values()
    if verb == "fork":
        run()
    measure(run, CHILDREN, row=f"{verb} of 4k tokens, {per_call} a call", who=who, setup=undo, rounds=200)
