"""`Scheduler.add(held=True)`: a request that keeps its place while something that it needs is on its way."""

import pytest

from kvpool import Pool, Request, Scheduler
from kvpool.errors import RequestRejected


def scheduler(**options):
    return Scheduler(Pool(64, 4), max_running=1, **options)


def run(one):
    """Run to the end; returns the ids in the order in which they ended."""
    ended = []
    while (step := one.schedule()) is not None:
        ended += [output.id for output in one.update(step, step.sample_position + 7)]
        one.check()
    return ended


def test_held_request_runs_after_its_release_only():
    one = scheduler()
    one.add(Request([1, 2], 2, id="held"), held=True)
    one.add(Request([1, 2], 2, id="other"))
    assert run(one) == ["other"] and one.stats().waiting == 1
    one.check()
    one.release("held")
    assert run(one) == ["held"]


def test_held_request_keeps_its_place_in_the_queue():
    one = scheduler()
    for name in ("first", "held", "last"):
        one.add(Request([1, 2], 2, id=name), held=name == "held")
    one.release("held")
    assert run(one) == ["first", "held", "last"]


def test_held_request_counts_as_one_that_waits_and_in_the_share_of_its_tenant():
    one = scheduler(max_waiting=4, weights={"a": 1, "b": 1})
    for tenant, said in (("a", "its share of 4 is 2"), ("b", "4 requests wait")):
        for _ in range(2):
            one.add(Request([1, 2], 2, tenant=tenant), held=True)
        with pytest.raises(RequestRejected, match=said):
            one.add(Request([1, 2], 2, tenant=tenant))


def test_cancelled_request_that_is_held_is_gone():
    one = scheduler()
    one.add(Request([1, 2], 2, id="held"), held=True)
    assert [output.finish_reason for output in one.cancel("held")] == ["cancelled"]
    one.release("held")
    one.check()
    assert one.schedule() is None


def test_deadline_of_a_held_request_is_seen_by_expire():
    now = [0.0]
    one = scheduler(clock=lambda: now[0])
    one.add(Request([1, 2], 2, deadline=5.0), held=True)
    assert one.expire() == []
    now[0] = 6.0
    assert [output.finish_reason for output in one.expire()] == ["deadline"]
    one.check()


def test_release_of_what_is_not_held_does_nothing():
    one = scheduler()
    one.release("nobody")
    one.add(Request([1, 2], 2, id=1))
    one.release(1)
    one.check()
    assert run(one) == [1]
