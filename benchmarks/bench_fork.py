"""Fork and close of a sequence of 4,096 tokens (256 blocks of 16)."""

import numpy as np
import pytest

import kvpool
from benchmarks.baselines import Floor, PythonPool

TOKENS = 4096
BLOCK_SIZE = 16
BLOCKS = TOKENS // BLOCK_SIZE
CHILDREN = 64


def kvpool_actions(children):
    """Return fork and close of `children` children on a pool."""
    pool = kvpool.Pool(2 * BLOCKS, BLOCK_SIZE, max_seqs=2 * CHILDREN, in_order=True)
    parent, handles = pool.open(), np.empty(children, np.int64)
    pool.step(kvpool.Plan(pool, 1, TOKENS), [parent], TOKENS)

    def fork():
        handles[:] = pool.fork(parent, children)

    return {"fork": fork, "close": lambda: pool.close(handles)}


def floor_actions(children):
    """Return the same of the C floor."""
    floor = Floor(2 * BLOCKS, rows=children + 1, width=BLOCKS, block_size=BLOCK_SIZE)
    floor.set_lengths(np.array([TOKENS]))
    return {"fork": lambda: floor.fork(children), "close": lambda: floor.close(children)}


def python_actions(children):
    """Return the same of the Python allocator."""
    pool, forked = PythonPool(2 * BLOCKS, BLOCK_SIZE), []
    parent = pool.open()
    pool.step([parent], TOKENS)

    def fork():
        forked[:] = [pool.fork(parent) for _ in range(children)]

    def close():
        for child in forked:
            pool.close(child)

    return {"fork": fork, "close": close}


ACTIONS = {"kvpool": kvpool_actions, "floor": floor_actions, "python": python_actions}


# One child a call is not asked of the floor: this would time the call of C from Python.
@pytest.mark.benchmark(group="fork and close")
@pytest.mark.parametrize("verb", ["fork", "close"])
@pytest.mark.parametrize(
    ("who", "children"),
    [("kvpool", 1), ("python", 1), ("kvpool", CHILDREN), ("floor", CHILDREN), ("python", CHILDREN)],
)
def bench_children(measure, who, children, verb):
    actions = ACTIONS[who](children)
    run = actions.pop(verb)
    (undo,) = actions.values()
    if verb == "fork":
        run()
    measure(run, children, row=f"{verb} of 4k tokens, {children} a call", who=who, setup=undo, rounds=200)
