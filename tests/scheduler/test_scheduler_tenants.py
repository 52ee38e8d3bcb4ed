"""Tenants, deadlines and places in the queue, one by one. Whole workloads are in test_scheduler_workloads."""

from types import SimpleNamespace

import numpy as np
import pytest
from schedules import Machine, greedy

from kvpool import Pool, Request, Scheduler
from kvpool.errors import RequestRejected


def made(blocks=40, **options):
    """Return a scheduler, what executes its steps, and its clock, which shows the time that it was set to."""
    pool, clock = Pool(blocks, 4), SimpleNamespace(now=0.0)
    scheduler = Scheduler(pool, clock=lambda: clock.now, **{"watermark": 0, "prefill_chunk": 4} | options)
    return scheduler, Machine(scheduler, pool), clock


def test_deadline_of_an_id_that_is_used_again_is_that_of_the_new_request():
    scheduler, machine, clock = made()
    scheduler.add(Request([1, 2], max_tokens=2, id="x", deadline=5))
    assert [output.finish_reason for output in machine.run().values()] == ["length"]
    request = Request([1, 2], max_tokens=4, id="x", deadline=100)
    scheduler.add(request)
    clock.now = 50.0
    ((_, output),) = machine.run().items()
    assert output.tokens.tolist() == greedy(request)
    assert scheduler.stats().expired == 0


def test_deadline_that_has_passed_is_refused_and_nothing_changes():
    scheduler, machine, clock = made()
    clock.now = 3.0
    for deadline in (3, 2.5, -1):
        with pytest.raises(RequestRejected, match="deadline has passed") as caught:
            scheduler.add(Request([1], id="x", deadline=deadline, tenant="t"))
        assert caught.value.reason == "deadline"
    assert "t" not in scheduler._core.queue.tenants and machine.step() is None


def test_deadlines_of_requests_that_ended_take_no_room():
    scheduler, machine, _ = made()
    for _ in range(1000):
        scheduler.add(Request([1], max_tokens=1, deadline=10**9))
        machine.step()
    assert len(scheduler._core.deadlines) < 80


def test_place_in_the_queue_is_by_weight_and_strangers_take_what_is_left():
    scheduler, machine, clock = made(max_running=1, max_waiting=8, weights={"a": 3, "b": 1})
    assert [scheduler.places(name) for name in ("a", "b", "c")] == [6, 2, 8]
    scheduler.add(Request([1], max_tokens=30, tenant="a"))
    machine.step()
    taken = {"a": 6, "b": 2}
    for tenant, places in taken.items():
        for _ in range(places):
            scheduler.add(Request([1], tenant=tenant))
            clock.now += 1
        with pytest.raises(RequestRejected, match="wait, ") as caught:
            scheduler.add(Request([1], tenant=tenant))
        assert caught.value.reason == "queue_full" and caught.value.wait == places
    with pytest.raises(RequestRejected, match="8 requests wait, the limit is 8"):
        scheduler.add(Request([1], tenant="c"))
    assert "c" not in scheduler._core.queue.tenants
    assert scheduler.stats().rejected == 3


def test_samples_that_wait_take_no_place_in_the_queue():
    scheduler, machine, _ = made(max_running=2, max_waiting=4, weights={"a": 1, "b": 1})
    scheduler.add(Request([1, 2, 3], max_tokens=9, n=8, tenant="a"))
    machine.step()
    assert scheduler.stats().waiting == 6 and scheduler.tenants()["a"].waiting == 0
    for tenant in "aabb":
        scheduler.add(Request([1], tenant=tenant))
    with pytest.raises(RequestRejected, match="4 requests wait, the limit is 4"):
        scheduler.add(Request([1], tenant="a"))
    scheduler.check()
    assert len(machine.run()) == 8 + 4


def test_samples_without_a_lane_wait_for_the_turn_of_their_tenant():
    """One tenant asks for many samples, the other for many answers. They take turns."""
    scheduler, machine, _ = made(max_running=2)
    scheduler.add(Request([1, 2, 3, 4], max_tokens=9, n=12, tenant="a", id="samples"))
    machine.step()
    scheduler.add(Request([1, 2, 3, 4], max_tokens=9, tenant="a", id="later"))
    for number in range(12):
        scheduler.add(Request([9, number, 9, 9], max_tokens=9, tenant="b", id=number))
    order = []
    while (done := machine.step()) is not None:
        order += [output.id for output in done[1]]
        scheduler.check()
    assert order[:2] == ["samples", "samples"] and "samples" not in order[order.index("later") :], order
    for end in range(4, 20):
        behind = order[2:end].count("samples") - sum(type(name) is int for name in order[2:end])
        assert abs(behind) <= 4, order


def test_refused_tenant_learns_how_long_its_requests_waited():
    scheduler, machine, clock = made(max_running=1, max_waiting=1)
    scheduler.add(Request([1], max_tokens=2))
    machine.step()
    scheduler.add(Request([1], max_tokens=2))
    clock.now = 7.0
    machine.step()
    machine.step()  # the second one is admitted, seven seconds after it came
    scheduler.add(Request([1], max_tokens=2))
    clock.now = 8.0
    with pytest.raises(RequestRejected) as caught:
        scheduler.add(Request([1]))
    assert caught.value.wait == 7.0


def test_tenants_that_are_gone_are_forgotten_and_nobody_notices():
    """A tenant for each request, some of them again: the same order as with a queue that forgets nobody."""

    def served(sweep_at):
        rng = np.random.default_rng(7)
        scheduler, machine, _ = made(max_running=2)
        queue, order, most = scheduler._core.queue, [], 0
        queue._sweep_at = sweep_at
        for number in range(800):
            tenant = int(rng.integers(max(1, number - 30), number + 2))
            scheduler.add(Request([1] * int(rng.integers(1, 9)), max_tokens=int(rng.integers(1, 4)), tenant=tenant))
            while scheduler.stats().waiting > 6:
                order += [output.id for output in machine.step()[1]]
            most = max(most, len(queue.tenants))
        return order, most

    (kept, many), (forgotten, few) = served(10**9), served(64)
    assert kept == forgotten and few < 200 < many
