"""Wrong calls of `schedule`, `update` and `fail`: a precise error, and the state is what it was."""

import numpy as np
import pytest
from schedules import Machine, greedy

from kvpool import OutOfBlocks, Pool, Request, Scheduler

ONE = np.int32([1])
NAN = np.full((1, 4), np.nan, np.float32)


def running(**request):
    """Return pool, scheduler and a step that is out, of one request."""
    pool = Pool(64, 4)
    scheduler = Scheduler(pool)
    scheduler.add(Request([1, 2, 3], max_tokens=4, **request))
    return pool, scheduler, scheduler.schedule()


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        (None, TypeError),
        ([1], TypeError),
        (1, TypeError),
        (np.float32([1]), TypeError),
        (np.array([True]), TypeError),
        (np.array(["1"]), TypeError),
        (np.int32([]), ValueError),
        (np.int32([1, 2]), ValueError),
        (np.int32([[1]]), ValueError),
        (np.int32([-1]), ValueError),
        (np.int64([2**31]), ValueError),
        (np.uint64([2**64 - 1]), ValueError),
    ],
    ids=repr,
)
def test_update_wrong_tokens_are_refused_and_the_step_stays_out(tokens, error):
    pool, scheduler, step = running()
    before = pool.fingerprint(), scheduler.stats()
    with pytest.raises(error, match=r"^\[update\] "):
        scheduler.update(step, tokens)
    assert (pool.fingerprint(), scheduler.stats()) == before
    scheduler.check()
    scheduler.update(step, ONE)


@pytest.mark.parametrize(
    ("logprobs", "error"),
    [
        ([0.5], TypeError),
        (np.int32([1]), TypeError),
        (np.float32([1, 2]), ValueError),
        (np.float32([[1]]), ValueError),
    ],
    ids=repr,
)
def test_update_wrong_logprobs_are_refused(logprobs, error):
    _, scheduler, step = running()
    with pytest.raises(error, match=r"^\[update\] logprobs"):
        scheduler.update(step, ONE, logprobs)
    scheduler.update(step, ONE)


@pytest.mark.parametrize(
    ("beams", "error"),
    [
        (None, ValueError),
        (np.zeros(3), TypeError),
        ((np.zeros((1, 4), np.int32),), TypeError),
        ((np.zeros((1, 3), np.int32), np.zeros((1, 3), np.float32)), ValueError),
        ((np.zeros((2, 4), np.int32), np.zeros((2, 4), np.float32)), ValueError),
        ((np.zeros(4, np.int32), np.zeros(4, np.float32)), ValueError),
        ((np.zeros((1, 4), np.float32), np.zeros((1, 4), np.float32)), TypeError),
        ((np.zeros((1, 4), np.int32), np.zeros((1, 4), np.int32)), TypeError),
        ((np.zeros((1, 4), np.int32), np.zeros((1, 5), np.float32)), ValueError),
        ((np.full((1, 4), -1, np.int32), np.zeros((1, 4), np.float32)), ValueError),
        ((np.zeros((1, 4), np.int32), NAN), ValueError),
        ((np.zeros((1, 4), np.int32), -NAN * np.inf), ValueError),
        ((np.zeros((1, 4), np.int32), np.full((1, 4), np.inf, np.float32)), ValueError),
    ],
    ids=repr,
)
def test_update_wrong_beams_are_refused(beams, error):
    pool, scheduler, step = running(beam_width=2)
    before = pool.fingerprint()
    with pytest.raises(error, match=r"^\[update\] "):
        scheduler.update(step, ONE, beams=beams)
    assert pool.fingerprint() == before
    scheduler.check()
    scheduler.update(step, ONE, beams=(np.arange(4, dtype=np.int32)[None], np.zeros((1, 4), np.float32)))
    scheduler.check()


@pytest.mark.parametrize("call", ["update", "fail"])
def test_step_that_is_not_out_is_refused(call):
    _, scheduler, old = running()
    scheduler.update(old, ONE)
    step = scheduler.schedule()
    other = running()[2]
    arguments = (ONE,) if call == "update" else ()
    for wrong in (old, other):
        with pytest.raises(RuntimeError, match=rf"^\[{call}\] this step is not out"):
            getattr(scheduler, call)(wrong, *arguments)
    for wrong in (None, step.plan):
        with pytest.raises(TypeError, match=rf"^\[{call}\] step must be"):
            getattr(scheduler, call)(wrong, *arguments)
    scheduler.check()
    scheduler.update(step, ONE)


@pytest.mark.parametrize("running_before", [False, True])
def test_schedule_blocks_held_by_others_is_out_of_blocks_and_can_be_repeated(running_before):
    pool = Pool(9, 2)
    scheduler = Scheduler(pool)
    machine = Machine(scheduler, pool)
    request = Request([1, 2, 3], max_tokens=9)
    scheduler.add(request)
    if running_before:
        machine.step()
    held = pool.open(2 * pool.stats().blank)
    for _ in range(2):
        with pytest.raises(OutOfBlocks, match=r"^\[schedule\] .*others of the pool hold"):
            for _ in range(20):
                machine.step()
        scheduler.check()
    pool.close(held)
    assert machine.run()[0, 0].tokens.tolist() == greedy(request)[0]


def test_update_tokens_of_other_integer_types_are_taken():
    for dtype in (np.int64, np.uint32, np.int16):
        _, scheduler, step = running()
        scheduler.update(step, np.array([5], dtype))
        assert scheduler.tokens_of(0).tolist() == [5]
