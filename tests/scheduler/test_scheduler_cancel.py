"""Cancelling: in every state, also while a step is out; nothing is lost for the others."""

import numpy as np
import pytest

from kvpool import Group, Pool, Request, Scheduler
from kvpool.errors import PlanStateError, StaleHandle

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


@pytest.mark.parametrize("is_out", [False, True])
def test_request_that_is_cancelled_leaves_what_it_has_computed_to_the_next_one(is_out):
    pool = Pool(40, 2, prefix_cache=True)
    scheduler = Scheduler(pool, prefill_chunk=4)
    scheduler.add(Request(range(5), id="decodes", max_tokens=20))
    scheduler.add(Request(range(9, 29), id="prefills"))
    for _ in range(4):
        step = scheduler.schedule()
        scheduler.update(step, np.full(len(step.sample_at), 7, np.int32))
    step = scheduler.schedule() if is_out else None
    for name in ("decodes", "prefills"):
        scheduler.cancel(name)
    scheduler.check()
    if is_out:
        scheduler.update(step, np.full(len(step.sample_at), 7, np.int32))
    pool.check()
    assert pool.stats().used == 0
    assert pool.prefix.match([*range(5), 7, 7, 7, 7]) == 6
    assert pool.prefix.match(list(range(9, 29))) == 16
