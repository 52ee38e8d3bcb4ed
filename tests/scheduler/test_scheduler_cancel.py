"""Cancelling: in every state, also while a step is out; nothing is lost for the others."""

import random

import numpy as np
import pytest
from schedules import VOCABULARY, Machine, greedy, next_token

from kvpool import Group, Pool, Request, Scheduler
from kvpool.errors import PlanStateError, StaleHandle, UnknownRequest


class Tier:
    """Keeps the content of a `Machine`'s blocks."""

    def __init__(self):
        self.machine = None

    def spill_to_host(self, handle, blocks):
        size, content = self.machine.pool.block_size, self.machine.content
        return [[content.get(block * size + i) for i in range(size)] for block in blocks.tolist()]

    def prefetch(self, kept, handle, blocks):
        size = self.machine.pool.block_size
        for block, tokens in zip(blocks.tolist(), kept, strict=True):
            self.machine.content.update({block * size + i: token for i, token in enumerate(tokens)})


def test_cancel_waiting_request_leaves_nothing():
    scheduler = Scheduler(Pool(64, 4))
    scheduler.add(Request([1, 2], id="a"))
    (output,) = scheduler.cancel("a")
    assert (output.id, output.index, output.tokens.tolist(), output.finish_reason) == ("a", 0, [], "cancelled")
    assert output.times.admitted is None
    assert scheduler.schedule() is None
    scheduler.check()


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_cancel_running_request_releases_its_blocks_at_once(steps):
    """Chunks of 4: after one or two steps it is prefilling, then decoding."""
    pool = Pool(64, 4)
    scheduler = Scheduler(pool, prefill_chunk=4)
    request = Request(range(10), max_tokens=20)
    scheduler.add(request)
    machine = Machine(scheduler, pool)
    for _ in range(steps):
        machine.step()
    (output,) = scheduler.cancel(0)
    assert output.tokens.tolist() == greedy(request)[0][: max(0, steps - 2)]
    assert pool.stats().used == 0
    assert scheduler.schedule() is None
    scheduler.check()


@pytest.mark.parametrize("ending", ["update", "fail"])
@pytest.mark.parametrize("steps", [0, 2, 4])
def test_cancel_while_a_step_is_out_ignores_its_tokens(steps, ending):
    pool = Pool(64, 4)
    scheduler = Scheduler(pool, prefill_chunk=4)
    requests = {name: Request(range(10), max_tokens=6, id=name) for name in "ab"}
    for request in requests.values():
        scheduler.add(request)
    machine = Machine(scheduler, pool)
    for _ in range(steps):
        machine.step()
    step = scheduler.schedule()
    before = scheduler.tokens_of("a").tolist()
    (output,) = scheduler.cancel("a")
    assert output.tokens.tolist() == before
    assert {request.id for request in step.requests} <= {"a", "b"}
    with pytest.raises(UnknownRequest):
        scheduler.cancel("a")
    scheduler.check()
    if ending == "fail":
        scheduler.fail(step)
    else:
        contexts = machine.execute(step)
        assert scheduler.update(step, np.array([next_token(c) for c in contexts], np.int32)) == []
    scheduler.check()
    outputs = machine.run()
    assert outputs["b", 0].tokens.tolist() == greedy(requests["b"])[0]
    assert pool.stats().used == 0


def test_cancel_slot_is_not_reused_before_the_step_is_in():
    """Samples are forked in `update`: not into the lane of a row that is still in the step."""
    pool = Pool(64, 4)
    scheduler = Scheduler(pool, max_running=3)
    scheduler.add(Request([1, 2, 3], id="a", max_tokens=8))
    machine = Machine(scheduler, pool)
    machine.step()
    fan = Request([5, 6], id="n", n=3, max_tokens=4)
    scheduler.add(fan)
    step = scheduler.schedule()
    scheduler.cancel("a")
    tokens = np.array([next_token(context) for context in machine.execute(step)], np.int32)
    scheduler.update(step, tokens)
    scheduler.check()
    outputs = machine.run()
    assert {index: outputs["n", index].tokens.tolist() for index in range(3)} == dict.fromkeys(range(3), greedy(fan)[0])


@pytest.mark.parametrize("after", [0, 1, 3])
def test_cancel_samples_gives_one_output_for_each(after):
    pool = Pool(64, 4)
    scheduler = Scheduler(pool, max_running=2)
    scheduler.add(Request([1, 2, 3], n=4, max_tokens=9))
    machine = Machine(scheduler, pool)
    for _ in range(after):
        machine.step()
    outputs = scheduler.cancel(0)
    assert [output.index for output in outputs] == [0, 1, 2, 3]
    assert {output.finish_reason for output in outputs} == {"cancelled"}
    assert scheduler.stats().cancelled == 4
    assert pool.stats().used == 0
    assert scheduler.schedule() is None
    scheduler.check()


@pytest.mark.parametrize("tier", [False, True])
@pytest.mark.parametrize("first_seed", [0, 20])
def test_cancel_at_random_loses_nothing_for_the_others(first_seed, tier):
    states = set()
    for seed in range(first_seed, first_seed + 12):
        rng = random.Random(seed)
        pool = Pool(24, rng.choice([1, 2, 4]), prefix_cache=rng.random() < 0.5, seed=1)
        hook = Tier() if tier else None
        scheduler = Scheduler(
            pool, max_running=rng.choice([2, 6]), max_step_tokens=9, prefill_chunk=rng.choice([2, 9]), tier=hook
        )
        machine = Machine(scheduler, pool)
        if hook:
            hook.machine = machine
        requests, ended = {}, {}
        for _ in range(60):
            for _ in range(rng.choice([0, 0, 2])):
                prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 8))]
                request = Request(prompt, max_tokens=rng.randint(1, 9), n=rng.choice([1, 1, 2]))
                requests[scheduler.add(request)] = request
            if (step := scheduler.schedule()) is None:
                continue
            stats = scheduler.stats()
            states |= {name for name in ("waiting", "prefilling", "decoding", "spilled") if getattr(stats, name)}
            cancelled = []
            for name in list(requests):
                if rng.random() < 0.03 and (name, 0) not in ended:
                    try:
                        cancelled += scheduler.cancel(name)
                    except UnknownRequest:
                        continue
            scheduler.check()
            if rng.random() < 0.1:
                scheduler.fail(step)
                outputs = []
            else:
                outputs = scheduler.update(step, np.array([next_token(c) for c in machine.execute(step)], np.int32))
            for output in cancelled + outputs:
                assert (output.id, output.index) not in ended, f"{seed=}"
                ended[output.id, output.index] = output
            scheduler.check()
        ended.update(machine.run())
        assert set(ended) == {(name, i) for name, request in requests.items() for i in range(request.n)}, f"{seed=}"
        for (name, _), output in ended.items():
            expected, reason = greedy(requests[name])
            if output.finish_reason == "cancelled":
                assert output.tokens.tolist() == expected[: len(output.tokens)], f"{seed=}"
            else:
                assert (output.tokens.tolist(), output.finish_reason) == (expected, reason), f"{seed=}"
        assert pool.stats().used == 0, f"{seed=}"
    assert states == {"waiting", "prefilling", "decoding", *(["spilled"] if tier else [])}


RESET = {
    "one table": {},
    "in order": {"in_order": True},
    "prefix cache": {"prefix_cache": True},
    "groups": {"groups": [Group.full(), Group.window(4), Group.state(slots=20, blocks=2)], "prefix_cache": True},
}


@pytest.mark.parametrize("is_out", [False, True])
@pytest.mark.parametrize("kind", RESET)
def test_cancel_after_a_reset_of_the_pool_lets_the_others_go_on(kind, is_out):
    pool = Pool(80, 2, **RESET[kind])
    scheduler = Scheduler(pool, max_running=8, prefill_chunk=4)
    scheduler.add(Request(range(5), id="decodes", max_tokens=20))
    scheduler.add(Request(range(6), id="samples", max_tokens=20, n=2))
    scheduler.add(Request(range(7), id="beam", max_tokens=20, beam_width=3))
    scheduler.add(Request(range(30), id="prefills", max_tokens=20))
    wide = np.tile(np.int32(range(8)), (3, 1)), np.zeros((3, 8), np.float32) - 1

    def update(step):
        beams = tuple(part[: np.count_nonzero(step.beam_width)] for part in wide)
        return scheduler.update(step, np.ones(len(step.sample_at), np.int32), beams=beams)

    for _ in range(4):
        update(scheduler.schedule())
    scheduler.add(Request([3, 1], id="waits", max_tokens=3))
    step = scheduler.schedule() if is_out else None
    pool.reset()
    if is_out:
        before = scheduler.stats()
        with pytest.raises((PlanStateError, StaleHandle)):
            update(step)
        assert scheduler.stats() == before
        scheduler.fail(step)
    with pytest.raises(StaleHandle):
        scheduler.schedule()
    names = {"decodes", "samples", "beam", "prefills"} | ({"waits"} if is_out else set())
    cancelled = [one.id for name in sorted(names) for one in scheduler.cancel(name)]
    assert sorted(cancelled) == sorted(["beam", "decodes", "prefills", "samples", "samples"] + ["waits"] * is_out)
    scheduler.check()
    scheduler.add(Request([4, 1], id="new", max_tokens=3))
    ended = []
    while (step := scheduler.schedule()) is not None:
        ended += [one.id for one in update(step)]
        scheduler.check()
    assert set(ended) == {"new"} | ({"waits"} - names)
    assert pool.stats().used == 0
