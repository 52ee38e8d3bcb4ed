"""The random workloads find faults: one of each kind is planted here, and makes one of them fail.

A fault is a context manager that breaks the scheduler or the pool in one place. Workloads are drawn by seed until one
fails; a fault that survives all of them is a hole in the workloads.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from planted import Faults
from scheduler_workload import Runner, Workload, draw

from kvpool import Scheduler
from kvpool.scheduler import beams, results
from kvpool.scheduler.queue import WaitingQueue
from kvpool.scheduler.state import Core

WORKLOADS = 100
fault = Faults()
WHERE: dict[str, Any] = {}  # which workloads can show it at all; all of them by default
FIRST = {"cancelled_request_keeps_its_blocks": 6, "priority_is_ignored": 3}  # where to begin, to be quick


def only_where(condition):
    """Say which workloads can show a fault, to look for it there."""

    def note(plant):
        WHERE[plant.__name__] = condition
        return plant

    return note


def one_sequence_each(workload: Workload) -> bool:
    requests = [request for _, request in workload.arrivals]
    return len(requests) > 3 and all(request.n == 1 and not request.beam_width for request in requests)


def has_a_beam(workload: Workload) -> bool:
    return any(request.beam_width > 1 for _, request in workload.arrivals)


def convicted(workload: Workload) -> bool:
    try:
        Runner(workload, check_every=1).run()
    except AssertionError:
        return True
    return False


# ---- faults of memory


@fault
def cancelled_request_keeps_its_blocks():
    release = Core.release

    def leak(self, sequence):
        if sequence.lane >= 0:
            self.pool.fork(int(self.rows.handle[sequence.lane]))
        return release(self, sequence)

    with mock.patch.object(Core, "release", leak):
        yield


# ---- faults of tokens


@fault
def eos_at_the_last_token_counts_as_length():
    why = results.why_ended

    def short(group, tokens):
        return "length" if len(tokens) >= group.request.max_tokens else why(group, tokens)

    with mock.patch.object(results, "why_ended", short):
        yield


# ---- faults of policy


@fault
def priority_is_ignored():
    enroll = WaitingQueue.enroll

    def plain(self, group):
        enroll(self, group)
        group.rank = (group.tenant.admitted, group.rank[1])

    with mock.patch.object(WaitingQueue, "enroll", plain):
        yield


@only_where(one_sequence_each)
@fault
def victim_goes_to_the_end_of_the_queue():
    """Not a wrong token anywhere: what was admitted first would wait for all who came later."""
    wait = Core.wait
    with mock.patch.object(Core, "wait", lambda self, sequence, *, front=False: wait(self, sequence)):
        yield


@fault
def everybody_is_preempted_in_every_step():
    """A livelock."""
    decide = Scheduler._decide

    def churn(self):
        for lane in self._core.rows.running().tolist():
            sequence = self._core.rows.sequences[lane]
            if sequence is not None and sequence.group.beam is None:
                self._core.preempt(sequence)
        return decide(self)

    with mock.patch.object(Scheduler, "_decide", churn):
        yield


# ---- faults of beams


@only_where(has_a_beam)
@fault
def beam_ends_with_the_first_finished_hypotheses():
    with mock.patch.object(beams, "decided", lambda beam, best, length: bool(beam.done)):
        yield


@pytest.mark.parametrize("name", fault)
def test_planted_fault_is_detected(name):
    with fault[name]():
        seeds = ((FIRST.get(name, 0) + number) % WORKLOADS for number in range(WORKLOADS))
        workloads = map(draw, seeds)
        if any(convicted(workload) for workload in workloads if WHERE.get(name, lambda w: True)(workload)):
            return
    raise AssertionError(f"{name} survived {WORKLOADS} workloads")
