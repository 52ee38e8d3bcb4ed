"""Cancelling: in every state, also while a step is out; nothing is lost for the others."""

import numpy as np
import pytest
from schedules import Machine, greedy, next_token

from kvpool import Group, Pool, Request, Scheduler
from kvpool.errors import PlanStateError, StaleHandle


def test_cancel_waiting_request_leaves_nothing():
    scheduler = Scheduler(Pool(64, 4))
    scheduler.add(Request([1, 2], id="a"))
    (output,) = scheduler.cancel("a")
    assert (output.id, output.index, output.tokens.tolist(), output.finish_reason) == ("a", 0, [], "cancelled")
    assert output.times.admitted is None
    assert scheduler.schedule() is None
    scheduler.check()


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
