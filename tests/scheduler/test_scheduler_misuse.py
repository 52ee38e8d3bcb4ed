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


IDS, SCORES = np.zeros((1, 4), np.int32), np.zeros((1, 4), np.float32)
WRONG_TOKENS = [
    *((tokens, TypeError) for tokens in (None, [1], 1, np.float32([1]), np.array([True]), np.array(["1"]))),
    *((tokens, ValueError) for tokens in (np.int32([]), np.int32([1, 2]), np.int32([[1]]), np.int32([-1]))),
    *((tokens, ValueError) for tokens in (np.int64([2**31]), np.uint64([2**64 - 1]))),
]
WRONG_LOGPROBS = [
    *((logprobs, TypeError) for logprobs in ([0.5], np.int32([1]))),
    *((logprobs, ValueError) for logprobs in (np.float32([1, 2]), np.float32([[1]]))),
]
WRONG_BEAMS = [
    *((beams, TypeError) for beams in (np.zeros(3), (IDS,), (SCORES, SCORES), (IDS, IDS))),
    *((beams, ValueError) for beams in (None, (IDS[:, :3], SCORES[:, :3]), (IDS[0], SCORES[0]), (IDS - 1, SCORES))),
    *((tuple(np.repeat(part, 2, axis=0) for part in (IDS, SCORES)), ValueError),),
    *(((IDS, scores), ValueError) for scores in (np.zeros((1, 5), np.float32), NAN, -NAN * np.inf, SCORES + np.inf)),
]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        *(({"tokens": tokens}, error) for tokens, error in WRONG_TOKENS),
        *(({"logprobs": logprobs}, error) for logprobs, error in WRONG_LOGPROBS),
        *(({"beams": beams}, error) for beams, error in WRONG_BEAMS),
    ],
    ids=repr,
)
def test_update_of_wrong_arrays_is_refused_and_the_step_stays_out(wrong, error):
    pool, scheduler, step = running(beam_width=2 if "beams" in wrong else 0)
    before = pool.fingerprint(), scheduler.stats()
    with pytest.raises(error, match=r"^\[update\] " + ("logprobs" if "logprobs" in wrong else "")):
        scheduler.update(step, **{"tokens": ONE} | wrong)
    assert (pool.fingerprint(), scheduler.stats()) == before
    scheduler.check()
    scheduler.update(step, ONE, beams=(np.arange(4, dtype=np.int32)[None], SCORES) if "beams" in wrong else None)
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


@pytest.mark.parametrize("plans", [1, 2])
def test_call_that_comes_too_early_or_names_nobody_is_refused_while_steps_are_out(plans):
    pool = Pool(64, 4)
    scheduler = Scheduler(pool, plans=plans)
    scheduler.add(Request([1, 2, 3], max_tokens=4))
    steps = [scheduler.schedule() for _ in range(plans)]
    before = pool.fingerprint(), scheduler.stats()
    wrong = [
        (RuntimeError, r"^\[schedule\] .* out; call update or fail first", scheduler.schedule),
        (ValueError, r"^\[tokens_of\] index", lambda: scheduler.tokens_of(0, 1)),
        (ValueError, r"^\[request_of\] nothing runs in lane 1", lambda: scheduler.request_of(1)),
        (ValueError, r"^\[request_of\] lane", lambda: scheduler.request_of(10**6)),
        (TypeError, r"^\[request_of\] lane", lambda: scheduler.request_of(1.0)),
    ]
    if plans == 2:
        wrong.append((RuntimeError, "the step before this one is out", lambda: scheduler.update(steps[1], ONE)))
    for error, said, call in wrong:
        with pytest.raises(error, match=said):
            call()
        assert (pool.fingerprint(), scheduler.stats()) == before
        scheduler.check()


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
    assert machine.run()[0, 0].tokens.tolist() == greedy(request)


def test_update_tokens_of_other_integer_types_are_taken():
    for dtype in (np.int64, np.uint32, np.int16):
        _, scheduler, step = running()
        scheduler.update(step, np.array([5], dtype))
        assert scheduler.tokens_of(0).tolist() == [5]
