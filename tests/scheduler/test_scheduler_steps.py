"""What a step of the scheduler holds: decodes first, chunks within the budget, top-up at once."""

import numpy as np
import pytest
from schedules import Machine

from kvpool import Pool, Request, Scheduler


def decoding(scheduler, machine, prompts, max_tokens=100):
    """Add prompts and step until all of them decode; return their ids."""
    names = [scheduler.add(Request(prompt, max_tokens=max_tokens)) for prompt in prompts]
    while scheduler.stats().decoding < len(names):
        machine.step()
    return names


def test_schedule_decodes_come_first_in_order_of_admission_then_chunks():
    pool = Pool(200, 4)
    scheduler = Scheduler(pool, prefill_chunk=4)
    machine = Machine(scheduler, pool)
    first = decoding(scheduler, machine, [[1, 2], [3], [4, 5, 6]])
    later = [scheduler.add(Request(range(10), max_tokens=5)), scheduler.add(Request(range(3), max_tokens=5))]
    step = scheduler.schedule()
    assert [scheduler.request_of(lane) for lane in step.lanes.tolist()] == [
        scheduler.request_of(lane) for lane in range(5)
    ]
    assert [request.prompt.tolist() for request in step.requests] == [[1, 2], [3], [4, 5, 6], [0, 1, 2]]
    assert step.num_decodes == 3
    assert step.num_new.tolist() == [1, 1, 1, 4, 3]
    assert step.sample_at.tolist() == [0, 1, 2, 9]
    assert step.tokens[3:].tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert step.sample_position.tolist() == [len(scheduler.tokens_of(name)) for name in first] + [0]
    assert step.beam_width.tolist() == step.sample_index.tolist() == [0] * 4
    assert later == [3, 4]
    dtypes = {name: str(getattr(step, name).dtype) for name in ("handles", "num_new")}
    assert dtypes == {"handles": "int64", "num_new": "int64"}
    for name in ("tokens", "sample_at", "sample_lane", "sample_index", "sample_position", "beam_width"):
        assert str(getattr(step, name).dtype) == "int32", name


def test_update_logprobs_come_back_with_the_tokens():
    pool = Pool(64, 4)
    scheduler = Scheduler(pool)
    scheduler.add(Request([1], max_tokens=4, id="a"))
    given = [None, np.float32([-0.25]), None, np.float32([-0.5])]
    for logprobs in given:
        outputs = scheduler.update(scheduler.schedule(), np.int32([7]), logprobs)
    expected = np.float32([np.nan, -0.25, np.nan, -0.5])
    np.testing.assert_array_equal(outputs[0].logprobs, expected)
    scheduler.add(Request([1], max_tokens=1, id="b"))
    assert scheduler.update(scheduler.schedule(), np.int32([7]))[0].logprobs is None


def test_schedule_pad_to_gives_static_shapes():
    pool = Pool(64, 4)
    scheduler = Scheduler(pool, max_running=4, max_step_tokens=16, prefill_chunk=8, pad_to=(6, 20))
    scheduler.add(Request(range(5), max_tokens=3))
    step = scheduler.schedule()
    assert step.plan.block_tables.shape[0] == 6 and step.plan.slot_mapping.shape == (20,)
    scheduler.fail(step)
    scheduler = Scheduler(pool, max_running=4, max_step_tokens=16, pad_to=lambda rows, tokens: (rows, 2 * tokens))
    scheduler.add(Request(range(5), max_tokens=3))
    assert scheduler.schedule().plan.slot_mapping.shape == (10,)


def test_schedule_pad_to_that_raises_can_be_repeated():
    pool = Pool(64, 4)
    shapes = iter([(1, 1), "nonsense", (4, 8)])
    scheduler = Scheduler(pool, max_running=4, max_step_tokens=8, pad_to=lambda rows, tokens: next(shapes))
    scheduler.add(Request(range(5), max_tokens=2))
    for error in (ValueError, TypeError):
        with pytest.raises(error, match="pad_to"):
            scheduler.schedule()
        scheduler.check()
    assert scheduler.schedule().tokens.tolist() == list(range(5))
