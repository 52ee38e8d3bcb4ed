"""What a step of the scheduler holds: decodes first, chunks within the budget, top-up at once."""

import numpy as np
import pytest
from schedules import Machine

from kvpool import Pool, Request, Scheduler


def test_schedule_decodes_come_first_in_order_of_admission_then_chunks():
    pool = Pool(200, 4)
    scheduler = Scheduler(pool, prefill_chunk=4)
    machine = Machine(scheduler, pool)
    first = [scheduler.add(Request(prompt, max_tokens=100)) for prompt in ([1, 2], [3], [4, 5, 6])]
    while scheduler.stats().decoding < 3:
        machine.step()
    later = [scheduler.add(Request(range(length), max_tokens=5)) for length in (10, 3)]
    step = scheduler.schedule()
    assert [scheduler.request_of(lane).id for lane in step.lanes.tolist()] == first + later
    assert [request.id for request in step.requests] == [*first, later[1]]
    assert step.num_decodes == 3 and step.num_new.tolist() == [1, 1, 1, 4, 3]
    assert step.tokens[3:].tolist() == [0, 1, 2, 3, 0, 1, 2] and step.sample_at.tolist() == [0, 1, 2, 9]
    assert step.sample_position.tolist() == [len(scheduler.tokens_of(name)) for name in first] + [0]
    assert {array.dtype for array in (step.handles, step.num_new)} == {np.dtype(np.int64)}
    names = ("tokens", "lanes", "sample_at", "sample_lane", "sample_index", "sample_position", "beam_width")
    assert {getattr(step, name).dtype for name in names} == {np.dtype(np.int32)}


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


def test_schedule_pad_to_gives_static_shapes_and_can_be_repeated_when_it_raises():
    pool = Pool(64, 4)
    fixed = Scheduler(pool, max_running=4, max_step_tokens=16, prefill_chunk=8, pad_to=(6, 20))
    fixed.add(Request(range(5), max_tokens=3))
    step = fixed.schedule()
    assert step.plan.block_tables.shape[0] == 6 and step.plan.slot_mapping.shape == (20,)
    shapes = iter([lambda rows, tokens: (1, 1), lambda *_: "nonsense", lambda rows, tokens: (rows, 2 * tokens)])
    called = Scheduler(pool, max_running=4, max_step_tokens=16, pad_to=lambda *shape: next(shapes)(*shape))
    called.add(Request(range(5), max_tokens=3))
    for error in (ValueError, TypeError):
        with pytest.raises(error, match="pad_to"):
            called.schedule()
        called.check()
    step = called.schedule()
    assert step.tokens.tolist() == list(range(5)) and step.plan.slot_mapping.shape == (10,)


def test_admission_counts_prefix_hits():
    """The second prompt needs 1 block of its own, 3 are shared: it is admitted where a stranger is not."""
    for own in (True, False):
        pool = Pool(8, 4, prefix_cache=True, seed=1)
        scheduler = Scheduler(pool, watermark=2)
        machine = Machine(scheduler, pool)
        scheduler.add(Request(range(14), max_tokens=6))
        machine.step()
        prompt = np.arange(14) + (0 if own else 100)
        scheduler.add(Request(prompt, max_tokens=1, id="b"))
        step = scheduler.schedule()
        assert len(step.lanes) == (2 if own else 1)
        assert step.num_new.tolist() == ([1, 2] if own else [1])
        scheduler.fail(step)
        output = machine.run()["b", 0]
        assert output.num_cached == (12 if own else 0)
        assert scheduler.stats().hit_tokens == output.num_cached
