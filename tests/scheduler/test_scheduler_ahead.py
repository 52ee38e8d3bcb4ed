"""Two steps out: the second is planned before the tokens of the first are known, and nobody's tokens change."""

import numpy as np
import pytest
from scheduler_workload import ONLY, Runner, draw, numbers
from schedules import drain

from kvpool import Group, Pool, Request, Scheduler

PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_random_workload_with_two_steps_out_gives_what_decoding_alone_gives(part):
    steps = steps_ahead = 0
    for seed in numbers(20, 1000)[part::PARTS]:
        runner = Runner(draw(seed), ahead=True).run()
        steps, steps_ahead = steps + runner.steps, steps_ahead + runner.steps_ahead
    assert ONLY or 3 * steps_ahead > steps, f"{steps_ahead} of {steps} steps were planned ahead"


def make(num_blocks=64, block_size=4, **options):
    of_pool = {name: options.pop(name) for name in ("prefix_cache", "groups") if name in options}
    pool = Pool(num_blocks, block_size, **of_pool)
    return pool, Scheduler(pool, **{"max_running": 4, "plans": 2, **options})


def tokens(step, value=7):
    return np.full(len(step.sample_at), value, np.int32)


def test_sequence_in_the_lane_of_a_cancelled_one_does_not_follow_it():
    _, two = make(prefix_cache=True, max_running=1, plans=3)
    two.add(Request([1, 2, 3, 4, 5], 1))
    two.update(step := two.schedule(), tokens(step))
    cancelled = two.add(Request([7, 7, 7], 9))
    two.schedule()
    two.cancel(cancelled)
    two.add(Request([1, 2, 3, 4, 5], 3))
    two.fail(two.schedule())  # it was admitted with a hit, so now it decodes
    step = two.schedule()
    assert (step.num_decodes, step.tokens.tolist(), step.follows.tolist()) == (1, [5], [-1])


@pytest.mark.parametrize(
    ("request_options", "options"),
    [
        ({"n": 2, "user": 1}, {}),  # samples that are not forked
        ({"beam_width": 2}, {}),
        ({}, {"groups": (Group.full(), Group.window(8))}),
        ({}, {"speculate": lambda rows: [[] for _ in rows]}),
    ],
)
def test_step_is_not_planned_ahead_of_what_its_tokens_decide(request_options, options):
    _, two = make(**options)
    two.add(Request([1, 2, 3], 4, id=0, **request_options))
    two.schedule()
    assert two.schedule() is None


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_request_is_admitted_while_every_step_is_planned_ahead(prefix_cache):
    """Running ahead starves nobody, also where its blocks are those that a hit does not need."""
    _, two = make(num_blocks=13, block_size=4, prefix_cache=prefix_cache, watermark=0)
    if prefix_cache:
        two.add(Request([3] * 25, 1, id="before"))
        two.update(step := two.schedule(), tokens(step))
    two.add(Request([1] * 4, 13, id="running"))
    out = [two.schedule()]
    two.add(Request([3] * 25, 2, id="waiting"))
    seen = []
    for _ in range(12):
        following = two.schedule()
        out += [following] if following is not None else []
        step = out.pop(0)
        seen += [request.id for request in step.requests]
        two.update(step, tokens(step))
        if not out:
            out = [two.schedule()]
    assert "waiting" in seen


def test_request_admitted_ahead_beside_a_last_token_has_the_whole_pool():
    """The one before it publishes a block that it computes, too: that leaves, as nobody needs it."""
    _, two = make(num_blocks=9, prefix_cache=True, watermark=0)
    two.add(Request([1] * 4, 6, id="before"))
    for _ in range(5):
        two.update(step := two.schedule(), tokens(step))
    first = two.schedule()
    two.add(Request([1] * 4 + [7] * 4 + [3] * 5, 20, id="whole pool"))
    second = two.schedule()
    two.update(first, tokens(first))
    two.update(second, tokens(second))
    drain(two, 7)
    assert (two.stats().preemptions, two.stats().finished) == (0, 2)
