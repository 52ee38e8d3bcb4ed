"""`Request.keep`: what stays in the prefix cache after a request, and until when."""

import numpy as np
import pytest
from schedules import drain

from kvpool import Pool, Request, Scheduler
from kvpool.groups import Group
from kvpool.retention import Keep

PROMPT = np.arange(32)
OTHERS = [np.arange(32) + 100 * number for number in range(1, 9)]  # they fill the pool twice


def found_later(pool, request, passed, **options):
    """Run `request`, then others that fill the pool `passed` seconds later. Return what is cached of the prompt."""
    seconds = [1000.0]
    scheduler = Scheduler(pool, clock=lambda: seconds[0], **options)
    scheduler.add(request)
    drain(scheduler)
    seconds[0] += passed
    for other in OTHERS:
        scheduler.add(Request(other, max_tokens=2))
        drain(scheduler)
    return 0 if pool.prefix is None else pool.prefix.match([*PROMPT, 0])


@pytest.mark.parametrize("groups", [None, [Group.full(), Group.window(8)]], ids=["full", "window"])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize(
    ("keep", "passed", "stays"),
    [
        (None, 0, 0),
        (Keep(1, 300), 299, 32),
        (Keep(1, 300), 300, 0),
        (Keep(7, 10**9, tokens=16), 299, 16),
    ],
    ids=["no directive", "in time", "too late", "first tokens"],
)
def test_prompt_is_cached_as_long_as_its_request_said(groups, samples, keep, passed, stays):
    pool = Pool(48, 4, groups=groups, prefix_cache=True, seed=1)
    request = Request(PROMPT, max_tokens=2, keep=keep, cut=16 if groups and keep and keep.tokens else 32, n=samples)
    assert found_later(pool, request, passed) == stays


def test_keep_without_a_prefix_cache_changes_nothing():
    assert found_later(Pool(48, 4), Request(PROMPT, max_tokens=2, keep=Keep(1, 300)), 0) == 0


def test_keep_ends_while_there_is_always_a_step_out():
    seconds, pool = [5.0], Pool(48, 4, prefix_cache=True, seed=1)
    scheduler = Scheduler(pool, clock=lambda: seconds[0], plans=2)
    scheduler.add(Request(PROMPT, max_tokens=1, keep=Keep(1, 60)))
    drain(scheduler)
    scheduler.add(Request(OTHERS[0], max_tokens=30))
    step = scheduler.schedule()
    assert pool.prefix.stats().kept == 8
    while pool.prefix.stats().kept and seconds[0] < 70:
        seconds[0] += 10
        following = scheduler.schedule()
        scheduler.update(step, np.ones(len(step.sample_at), np.int32))
        step = following or scheduler.schedule()
    assert seconds[0] == 65.0
    scheduler.fail(step)


def test_keep_that_ended_while_nothing_ran_is_the_first_to_leave_a_smaller_pool():
    seconds, pool = [5.0], Pool(48, 4, prefix_cache=True, seed=1)
    scheduler = Scheduler(pool, clock=lambda: seconds[0])
    scheduler.add(Request(PROMPT, max_tokens=1, keep=Keep(1, 60)))
    drain(scheduler)
    scheduler.add(Request(OTHERS[0], max_tokens=1))
    drain(scheduler)
    seconds[0] += 60
    scheduler.require_fit("resize", {0: 9})
    pool.resize(9)
    assert [pool.prefix.match([*prompt, 0]) for prompt in (PROMPT, OTHERS[0])] == [0, 32]
