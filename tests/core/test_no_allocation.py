"""After warm-up a step creates no Python object: neither one that stays nor one that is gone at once."""

import gc
import sys
import tracemalloc
from array import array

import numpy as np
import pytest

import kvpool

ROWS = 32
WARM_UP_STEPS = 20
STEPS = 200


def nothing():
    """Create nothing: what the measure itself costs."""


def decoding(in_order, groups, handle_array=lambda handles: np.array(handles, np.int64)):
    """Return a function without arguments that makes one decode step of `ROWS` rows."""
    pool = kvpool.Pool(ROWS * 64 + 1, 16, max_seqs=ROWS, max_blocks_per_seq=32, in_order=in_order, groups=groups)
    plan = kvpool.Plan(pool, ROWS)
    handles = handle_array([pool.open() for _ in range(ROWS)])
    step, done = pool.step, pool.done

    def decode():
        step(plan, handles, 1)
        if not in_order:
            done(plan)

    for _ in range(WARM_UP_STEPS):
        decode()
    return decode


def peak(function):
    """Return how many bytes of Python's memory a call of `function` held at most, more than before it."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    function()
    return tracemalloc.get_traced_memory()[1] - before


@pytest.fixture(autouse=True)
def collector_off():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def traced():
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.parametrize("in_order", [True, False])
def test_step_leaves_no_object_behind(in_order, groups):
    decode = decoding(in_order, groups)
    before = sys.getallocatedblocks()
    for _ in range(STEPS):
        decode()
    assert sys.getallocatedblocks() - before <= 1  # the int `before` itself


@pytest.mark.parametrize("in_order", [True, False])
def test_step_makes_no_object_for_a_moment(in_order, groups, traced):
    """Seen as a peak of memory; 40 steps hold the ones that take blocks too.

    The handles are no numpy array: numpy itself allocates 40 bytes whenever it lends its memory.
    """
    decode = decoding(in_order, groups, lambda handles: array("q", handles))
    for function in (nothing, decode) * 3:
        peak(function)
    assert max(peak(decode) for _ in range(40)) <= peak(nothing)


def test_measure_sees_an_object_that_lives_for_a_moment(traced):
    """The test above can fail."""
    peak(nothing)
    assert peak(lambda: sum([1.5] * 4)) > peak(nothing)
