"""What a step of the scheduler holds: decodes first, chunks within the budget, top-up at once."""

import random

import numpy as np
import pytest
from schedules import VOCABULARY, Machine, greedy

from kvpool import Pool, Request, Scheduler
from kvpool.errors import RequestRejected


def random_scheduler(rng):
    size = rng.choice([1, 2, 4, 16])
    pool = Pool(
        rng.randint(12, 60) if size > 1 else 80,
        size,
        prefix_cache=rng.random() < 0.5,
        seed=1,
        in_order=rng.random() < 0.2,
    )
    scheduler = Scheduler(
        pool,
        max_running=rng.choice([1, 3, 8]),
        max_step_tokens=rng.choice([1, 5, 64]),
        prefill_chunk=rng.choice([1, 3, 64]),
        mixed=rng.random() < 0.6,
        preempt=rng.choice(["last", "longest", "grower", "priority"]),
        watermark=rng.choice([None, 0, 3]),
    )
    return pool, scheduler


@pytest.mark.parametrize("first_seed", range(0, 100, 25))
def test_outputs_random_workloads_equal_solo_greedy(first_seed):
    for seed in range(first_seed, first_seed + 25):
        rng = random.Random(seed)
        pool, scheduler = random_scheduler(rng)
        base = [rng.randrange(VOCABULARY) for _ in range(20)]
        requests = {}
        for _ in range(rng.randint(1, 15)):
            request = Request(
                base[: rng.randint(0, 20)] + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 10))],
                max_tokens=rng.randint(1, 12),
                eos=(rng.randrange(VOCABULARY),) if rng.random() < 0.3 else (),
                n=rng.choice([1, 1, 3]),
                priority=rng.randrange(2),
            )
            try:
                requests[scheduler.add(request)] = request
            except RequestRejected:
                continue
        outputs = Machine(scheduler, pool).run()
        assert set(outputs) == {(name, i) for name, request in requests.items() for i in range(request.n)}, f"{seed=}"
        for (name, _), output in outputs.items():
            assert (output.tokens.tolist(), output.finish_reason) == greedy(requests[name]), f"{seed=}"
        assert pool.stats().used == 0, f"{seed=}"
        pool.check()


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


@pytest.mark.parametrize("budget", [4, 5, 7, 40])
@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_schedule_chunks_keep_within_chunk_and_budget(budget, chunk):
    pool = Pool(400, 4)
    scheduler = Scheduler(pool, max_step_tokens=budget, prefill_chunk=chunk)
    machine = Machine(scheduler, pool)
    decoding(scheduler, machine, [[1], [2], [3]], max_tokens=300)
    for _ in range(4):
        scheduler.add(Request(range(30), max_tokens=1))
    for _ in range(200):
        if not scheduler.stats().prefilling + scheduler.stats().waiting:
            break
        step, _ = machine.step()
        chunks = step.num_new[step.num_decodes :]
        assert step.num_decodes >= 3
        assert chunks.max(initial=0) <= chunk and step.num_new.sum() <= max(budget, step.num_decodes)
        if scheduler.stats().waiting:  # nothing is left of the budget while somebody waits
            assert step.num_new.sum() == budget
    else:
        raise AssertionError("the prompts are not done")


def test_schedule_decode_is_never_stalled_by_a_prompt():
    """Ticks: while 1,000 tokens are prefilled, every decode gets a token in every step, none longer than a chunk."""
    pool = Pool(400, 4)
    scheduler = Scheduler(pool, max_step_tokens=66, prefill_chunk=32)
    machine = Machine(scheduler, pool)
    names = decoding(scheduler, machine, [[1], [2]])
    scheduler.add(Request(range(1000), max_tokens=1, id="long"))
    before = [len(scheduler.tokens_of(name)) for name in names]
    for tick in range(1, 32):
        step, _ = machine.step()
        assert step.num_decodes == 2 and step.num_new[2:].tolist() == [32]
        assert [len(scheduler.tokens_of(name)) for name in names] == [n + tick for n in before]
    assert machine.step()[1][0].id == "long"


def test_schedule_not_mixed_a_decode_waits_for_one_chunk_at_most():
    pool = Pool(400, 4)
    scheduler = Scheduler(pool, prefill_chunk=8, mixed=False)
    machine = Machine(scheduler, pool)
    decoding(scheduler, machine, [[1], [2]])
    for _ in range(3):
        scheduler.add(Request(range(20), max_tokens=3))
    kinds = []
    while scheduler.stats().waiting or scheduler.stats().prefilling:
        step, _ = machine.step()
        kinds.append("decode" if step.num_decodes else "chunk")
        if step.num_decodes:
            assert step.num_decodes == len(step.lanes)
        else:
            assert len(step.lanes) == 1 and step.num_new[0] <= 8
    assert "chunk chunk" not in " ".join(kinds)
    assert kinds.count("chunk") == 9


def test_schedule_finished_request_is_replaced_in_the_very_next_step():
    pool = Pool(400, 4)
    scheduler = Scheduler(pool, max_running=4, prefill_chunk=8)
    machine = Machine(scheduler, pool)
    for _ in range(40):
        scheduler.add(Request([5, 6], max_tokens=3))
    while scheduler.stats().waiting:
        step, _ = machine.step()
        assert len(step.lanes) == 4


def test_schedule_without_requests_is_none_and_idle_is_no_error():
    pool = Pool(64, 4)
    scheduler = Scheduler(pool)
    assert scheduler.schedule() is None
    scheduler.add(Request([1], max_tokens=1))
    assert len(Machine(scheduler, pool).run()) == 1
    assert scheduler.schedule() is None
    assert scheduler.stats().steps == 1


def test_schedule_stop_sequences_and_eos_end_and_are_part_of_the_output():
    free = greedy(Request([3, 1, 4], max_tokens=12))[0]
    at = next(i for i in range(3, 12) if free[i] not in free[:i])
    pool = Pool(64, 4)
    scheduler = Scheduler(pool)
    scheduler.add(Request([3, 1, 4], max_tokens=12, stop=[[1] * 9, free[at - 1 : at + 1]], id="stop"))
    scheduler.add(Request([3, 1, 4], max_tokens=12, stop=[free[at - 1 : at + 1]], eos=[free[at], 10**6], id="eos"))
    scheduler.add(Request([3, 1, 4], max_tokens=at, eos=free[at], id="length"))
    outputs = Machine(scheduler, pool).run()
    assert {name: output.finish_reason for (name, _), output in outputs.items()} == {
        n: n for n in ("stop", "eos", "length")
    }
    assert outputs["stop", 0].tokens.tolist() == outputs["eos", 0].tokens.tolist() == free[: at + 1]
    assert outputs["length", 0].tokens.tolist() == free[:at]


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


def test_output_times_come_from_the_clock_and_decide_nothing():
    ticks = iter(range(1000))
    pool = Pool(64, 4)
    scheduler = Scheduler(pool, clock=lambda: next(ticks), prefill_chunk=2)
    scheduler.add(Request(range(5), max_tokens=3))
    output = Machine(scheduler, pool).run()[0, 0]
    times = output.times
    assert times.arrived < times.admitted < times.first_token < times.finished


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


def test_schedule_same_calls_same_steps():
    """Steps, ids of blocks and outputs are a function of the calls and the pool's seed; the clock has no say."""
    traces = []
    for clock in (lambda: 0.0, iter(range(10**6)).__next__):
        rng = random.Random(5)
        pool = Pool(20, 2, prefix_cache=True, seed=3)
        scheduler = Scheduler(pool, max_running=5, max_step_tokens=12, prefill_chunk=5, clock=clock)
        machine, trace = Machine(scheduler, pool), []
        for _ in range(12):
            scheduler.add(
                Request([rng.randrange(3) for _ in range(rng.randint(1, 9))], max_tokens=9, n=rng.randint(1, 2))
            )
        while (done := machine.step()) is not None:
            step, outputs = done
            trace.append(
                (step.lanes.tolist(), step.num_new.tolist(), step.tokens.tolist(), step.plan.block_tables.tolist())
            )
            trace.append([(output.id, output.index, output.tokens.tolist()) for output in outputs])
        traces.append((trace, pool.digest(), scheduler.stats()))
    assert traces[0] == traces[1]
    assert traces[0][2].preemptions > 0


def test_schedule_plans_in_turn_keep_the_arrays_of_the_step_before():
    pool = Pool(64, 4)
    scheduler = Scheduler(pool, plans=2)
    scheduler.add(Request(range(5), max_tokens=9))
    machine = Machine(scheduler, pool)
    first = machine.step()[0]
    lanes = first.plan.slot_mapping.tolist()
    second = machine.step()[0]
    assert second.plan is not first.plan and first.plan.slot_mapping.tolist() == lanes
    assert machine.step()[0].plan is first.plan


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
