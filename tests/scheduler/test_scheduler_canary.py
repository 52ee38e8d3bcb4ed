"""The random workloads convict: each fault planted here, one of a kind, makes one of them fail.

A fault is a context manager that breaks the scheduler or the pool in one place. Workloads are drawn by seed until one
convicts; a fault that survives all of them is a hole in the workloads.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from planted import Faults
from scheduler_workload import Runner, Workload, draw, draw_crowd

from kvpool import Plan, Scheduler
from kvpool.scheduler import beams, policy, results
from kvpool.scheduler.queue import WaitingQueue
from kvpool.scheduler.state import Core

WORKLOADS = 100
fault = Faults()
CROWDS: set[str] = set()  # faults that crowds show
WHERE: dict[str, Any] = {}  # which workloads can show it at all; all of them by default
FIRST = {  # where to begin, to be quick: all workloads are tried
    **{"cancelled_request_keeps_its_blocks": 6},
    **{"priority_is_ignored": 3, "tenant_gets_far_ahead_by_passing": 9},
}


def only_where(condition):
    """Say which workloads can show a fault, to look for it there."""

    def note(plant):
        WHERE[plant.__name__] = condition
        return plant

    return note


def in_crowds(plant):
    """Look for a fault in crowds: it is one of the order in which requests are admitted."""
    CROWDS.add(plant.__name__)
    return fault(plant)


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
def budget_is_ignored():
    init = Core.__init__

    def generous(self, pool, max_running, max_step_tokens, *rest):
        init(self, pool, max_running, max_step_tokens + 1, *rest)

    with _wider_plans(), mock.patch.object(Core, "__init__", generous):
        yield


@contextmanager
def _wider_plans():
    def wider(pool, rows, tokens, **how):
        return Plan(pool, rows + 8, tokens + 8, **how)

    with mock.patch("kvpool.scheduler.scheduler.Plan", wider):
        yield


@fault
def priority_is_ignored():
    enroll = WaitingQueue.enroll

    def plain(self, group):
        enroll(self, group)
        group.rank = (group.tenant.admitted, group.rank[1])

    with mock.patch.object(WaitingQueue, "enroll", plain):
        yield


@in_crowds
def tenant_gets_far_ahead_by_passing():
    other = policy.admit_other

    def boundless(core, head):
        core.max_step_tokens, own = 2**30, core.max_step_tokens
        try:
            return other(core, head)
        finally:
            core.max_step_tokens = own

    with mock.patch.object(policy, "admit_other", boundless):
        yield


@only_where(lambda workload: workload.patience)
@fault
def deadline_is_ignored():
    with mock.patch.object(results, "expire", lambda core: []):
        yield


@fault
def watermark_is_ignored():
    with mock.patch("kvpool.scheduler.policy.blocks_kept", lambda core: 0):
        yield


@fault
def decode_is_stalled_by_two_chunks():
    init = Core.__init__

    class Forgets(Core):
        was_chunk = property(lambda self: False, lambda self, value: None)

    def forget(self, *arguments):
        init(self, *arguments)
        self.__class__ = Forgets

    with mock.patch.object(Core, "__init__", forget):
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


@only_where(one_sequence_each)
@fault
def place_is_left_empty():
    """Every second admission finds nobody, though somebody waits."""
    admit, looks = policy.admit_next, [0]

    def sometimes(core):
        looks[0] += 1
        return admit(core) if looks[0] % 2 or not core.rows.running().size else None

    with mock.patch("kvpool.scheduler.scheduler.admit_next", sometimes):
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
        workloads = ((draw_crowd if name in CROWDS else draw)(seed) for seed in seeds)
        if any(convicted(workload) for workload in workloads if WHERE.get(name, lambda w: True)(workload)):
            return
    raise AssertionError(f"{name} survived {WORKLOADS} workloads")
