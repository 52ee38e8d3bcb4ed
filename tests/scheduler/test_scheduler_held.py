"""`Scheduler.add(held=True)`: a request that keeps its place while something that it needs is on its way."""

import pytest
from schedules import drain

from kvpool import Pool, Request, Scheduler
from kvpool.errors import RequestRejected


def scheduler(**options):
    return Scheduler(Pool(64, 4), max_running=1, **options)


def run(one):
    """Run to the end; returns the ids in the order in which they ended."""
    return [output.id for output in drain(one)]


def test_held_request_runs_after_its_release_only():
    one = scheduler()
    one.add(Request([1, 2], 2, id="held"), held=True)
    one.add(Request([1, 2], 2, id="other"))
    assert run(one) == ["other"] and one.stats().waiting == 1
    one.check()
    one.release("held")
    assert run(one) == ["held"]
    one.release("held")  # now that it has ended, nothing happens
    assert run(one) == []


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


def test_held_request_that_is_cancelled_or_late_is_gone():
    now = [0.0]
    one = scheduler(clock=lambda: now[0])
    for name in ("dropped", "late"):
        one.add(Request([1, 2], 2, id=name, deadline=5.0), held=True)
    assert [output.finish_reason for output in one.cancel("dropped")] == ["cancelled"]
    one.release("dropped")
    one.check()
    assert one.expire() == []
    now[0] = 6.0
    assert [(output.id, output.finish_reason) for output in one.expire()] == [("late", "deadline")]
    one.check()
    assert one.schedule() is None
