"""The random workloads convict: each fault planted here makes one of them fail.

A fault is a context manager that breaks the scheduler or the pool in one place. Workloads are drawn by seed until one
convicts; a fault that survives all of them is a hole in the workloads.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
from planted import Faults
from scheduler_workload import Runner, Workload, draw, draw_crowd

from kvpool import Plan, Pool, Scheduler
from kvpool.scheduler import beams, policy, results
from kvpool.scheduler.queue import WaitingQueue
from kvpool.scheduler.state import Core, DecodeBatch

WORKLOADS = 100
fault = Faults()
CROWDS: set[str] = set()  # faults that crowds show
WHERE: dict[str, Any] = {}  # which workloads can show it at all; all of them by default
FIRST = {  # where to begin, to be quick: all workloads are tried
    **{"copy_is_forgotten": 5, "prefix_hit_is_one_block_too_long": 6, "cancelled_request_keeps_its_blocks": 6},
    **{"preempted_sequence_loses_a_token": 8, "priority_is_ignored": 3, "waiting_does_not_make_up_for_priority": 4},
    **{"tenant_gets_far_ahead_by_passing": 9, "preempted_request_is_charged_again": 5},
    **{"share_of_the_queue_is_ignored": 7, "chunk_is_cut_though_there_is_budget": 17},
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
def copy_is_forgotten():
    """A fork writes into the block that it shares."""
    with mock.patch("token_model.TokenMemory._copy", lambda self, copies: None):
        yield


@fault
def fork_has_blocks_of_its_own():
    """A child gets the right length, and blocks that nobody has written."""

    def fork(core: Core, handle: int) -> int | None:
        own = core.pool.open(core.pool.num_tokens(handle))
        core.set_length(own, core.pool.num_tokens(handle))
        return own

    with mock.patch.object(results, "fork", fork):
        yield


@only_where(lambda workload: workload.pool["prefix_cache"])
@fault
def prefix_of_another_namespace():
    class Pool_(Pool):
        def open(self, tokens=0, namespace=b"", **options):
            return super().open(tokens, b"", **options)

    with mock.patch("scheduler_workload.Pool", Pool_):
        yield


@fault
def prefix_hit_is_one_block_too_long():
    start = Core.start

    def wrong(self, sequence, lane, handle, computed, admitted):
        size = self.pool.block_size
        if computed and computed + size < len(sequence.group.request.prompt):
            self.set_length(handle, size)
            computed += size
        return start(self, sequence, lane, handle, computed, admitted)

    with mock.patch.object(Core, "start", wrong):
        yield


@fault
def block_is_committed_before_it_is_written():
    """With the tokens of the prompt ahead of what is computed."""
    commit = Core.commit

    def early(self, lane):
        if self.caches and self.rows.remaining(lane) > 0:
            self.rows.computed[lane] += self.pool.block_size
            try:
                commit(self, lane)
            finally:
                self.rows.computed[lane] -= self.pool.block_size
        else:
            commit(self, lane)

    with mock.patch.object(Core, "commit", early):
        yield


@fault
def cancelled_request_keeps_its_blocks():
    release = Core.release

    def leak(self, sequence):
        if sequence.lane >= 0:
            self.pool.fork(int(self.rows.handle[sequence.lane]))
        return release(self, sequence)

    with mock.patch.object(Core, "release", leak):
        yield


@fault
def finished_request_keeps_a_block():
    finish = Core.finish

    def leak(self, sequence, reason, now, *rest):
        if sequence.lane >= 0 and self.available():
            self.pool.blocks.alloc()
        return finish(self, sequence, reason, now, *rest)

    with mock.patch.object(Core, "finish", leak):
        yield


# ---- faults of tokens


@fault
def preempted_sequence_loses_a_token():
    preempt = Core.preempt

    def lose(self, sequence):
        preempt(self, sequence)
        if sequence.lane < 0 and sequence.group.beam is None:
            sequence.tokens = sequence.tokens[:-1]

    with mock.patch.object(Core, "preempt", lose):
        yield


@fault
def preempted_sequence_counts_a_token_twice():
    preempt = Core.preempt

    def twice(self, sequence):
        preempt(self, sequence)
        if sequence.lane < 0 and sequence.group.beam is None and sequence.tokens.size:
            sequence.tokens = np.append(sequence.tokens, sequence.tokens[-1])

    with mock.patch.object(Core, "preempt", twice):
        yield


@fault
def stop_sequence_is_off_by_one():
    with mock.patch.object(
        results, "ends_with", lambda tokens, stops: any(tokens[-len(s) + 1 :].tolist() == list(s[1:]) for s in stops)
    ):
        yield


@fault
def ends_are_not_looked_for():
    """Neither eos nor stop sequences: everything goes on to its length."""
    from kvpool.scheduler.state import LaneRows

    with mock.patch.object(LaneRows, "_put_watch", lambda self, lane, tokens: None):
        yield


@fault
def eos_at_the_last_token_counts_as_length():
    why = results.why_ended

    def short(group, tokens):
        return "length" if len(tokens) >= group.request.max_tokens else why(group, tokens)

    with mock.patch.object(results, "why_ended", short):
        yield


@fault
def one_token_more_than_asked_for():
    from kvpool.scheduler.state import LaneRows

    put = LaneRows.put

    def longer(self, lane, sequence, *rest):
        put(self, lane, sequence, *rest)
        self.limit[lane] += 1

    with mock.patch.object(LaneRows, "put", longer):
        yield


@fault
def samples_all_have_the_index_of_the_first():
    fan_out = results.fan_out

    def same(core, at, lane, index):
        at, lane, index = fan_out(core, at, lane, index)
        return at, lane, np.zeros_like(index)

    with mock.patch.object(results, "fan_out", same):
        yield


@fault
def failed_step_counts_as_computed():
    fail = Scheduler.fail

    def wrong(self, step):
        fail(self, step)
        lanes = step.lanes[step.num_decodes :]
        for lane in lanes.tolist():
            if self._core.rows.sequences[lane] is not None and self._core.rows.remaining(lane) > 1:
                self._core.rows.computed[lane] += 1
                break

    with mock.patch.object(Scheduler, "fail", wrong):
        yield


@only_where(lambda workload: workload.tier)
@fault
def spilled_sequence_comes_back_without_its_content():
    with mock.patch("scheduler_workload.Tier.prefetch", lambda self, kept, handle, blocks: None):
        yield


# ---- faults of policy


@fault
def budget_is_ignored():
    init = Core.__init__

    def generous(self, pool, max_running, max_step_tokens, *rest):
        init(self, pool, max_running, max_step_tokens + 1, *rest)

    with _wider_plans(), mock.patch.object(Core, "__init__", generous):
        yield


@fault
def chunk_is_one_token_too_long():
    init = Core.__init__

    def long(self, *arguments):
        init(self, *arguments)
        self.chunk += 1

    with mock.patch.object(Core, "__init__", long):
        yield


@contextmanager
def _wider_plans():
    def wider(pool, rows, tokens, **how):
        return Plan(pool, rows + 8, tokens + 8, **how)

    with mock.patch("kvpool.scheduler.scheduler.Plan", wider):
        yield


@fault
def head_of_the_queue_is_overtaken():
    head = WaitingQueue.head

    def second(self):
        first = head(self)
        line = [] if first is None or self.is_back(first) else first.group.tenant.line
        return line[1] if len(line) > 1 else first

    with mock.patch.object(WaitingQueue, "head", second):
        yield


@fault
def priority_is_ignored():
    enroll = WaitingQueue.enroll

    def plain(self, group):
        enroll(self, group)
        group.rank = (group.tenant.admitted, group.rank[1])

    with mock.patch.object(WaitingQueue, "enroll", plain):
        yield


@contextmanager
def _order_made_with(**other):
    """Queues that are told something else than their schedulers."""

    def make(weights, ageing, overtake):
        return WaitingQueue(*({"weights": weights, "ageing": ageing, "overtake": overtake} | other).values())

    with mock.patch("kvpool.scheduler.scheduler.WaitingQueue", make):
        yield


@in_crowds
def waiting_does_not_make_up_for_priority():
    with _order_made_with(ageing=2**30):
        yield


@in_crowds
def weight_is_ignored():
    with _order_made_with(weights={}):
        yield


@in_crowds
def request_that_finds_no_room_is_passed_by_all():
    with mock.patch("kvpool.scheduler.check.check_tenants", lambda core: None), _order_made_with(overtake=2**30):
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


@in_crowds
def tenant_that_returns_has_saved_its_share():
    with mock.patch.object(WaitingQueue, "_least", lambda self: 0.0):
        yield


@in_crowds
def decodes_are_not_charged():
    make = DecodeBatch.__init__

    def free(self, *arguments):
        make(self, *arguments)
        self.tenants = []

    with mock.patch.object(DecodeBatch, "__init__", free):
        yield


@in_crowds
def preempted_request_is_charged_again():
    preempt = Core.preempt

    def again(self, sequence):
        preempt(self, sequence)
        sequence.paid = 0

    with mock.patch.object(Core, "preempt", again):
        yield


@in_crowds
def hits_are_charged():
    count = policy.count_admission
    with mock.patch.object(policy, "count_admission", lambda core, one, computed, known: count(core, one, 0, known)):
        yield


@in_crowds
def share_of_the_queue_is_ignored():
    with mock.patch.object(WaitingQueue, "share", lambda self, name, places: places):
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


@fault
def decode_is_left_out_for_a_chunk():
    decide = Scheduler._decide

    def without_the_last(self, plan):
        decodes, chunks = decide(self, plan)
        return (decodes[:-1], chunks) if chunks and len(decodes) > 1 else (decodes, chunks)

    with mock.patch.object(Scheduler, "_decide", without_the_last):
        yield


@fault
def victim_is_never_admitted_again():
    wait = Core.wait

    def lose(self, sequence, *, front=False):
        if not front:
            wait(self, sequence)

    with mock.patch.object(Core, "wait", lose):
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

    def churn(self, plan):
        for lane in self._core.rows.running().tolist():
            sequence = self._core.rows.sequences[lane]
            if sequence is not None and sequence.group.beam is None:
                self._core.preempt(sequence)
        return decide(self, plan)

    with mock.patch.object(Scheduler, "_decide", churn):
        yield


@fault
def make_room_spares_nobody():
    """All that run are preempted where one would do, so that nobody gets a token."""
    preempt = Core.preempt

    def all_of_them(self, sequence):
        preempt(self, sequence)
        for lane in self.rows.running().tolist():
            other = self.rows.sequences[lane]
            if other is not None and other.group.beam is None:
                preempt(self, other)

    with mock.patch.object(Core, "preempt", all_of_them):
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


@fault
def chunk_is_cut_though_there_is_budget():
    wanted = Scheduler._wanted
    with mock.patch.object(Scheduler, "_wanted", lambda self, lane: max(1, wanted(self, lane) - 1)):
        yield


# ---- faults of beams


@only_where(has_a_beam)
@fault
def beam_ends_with_the_first_finished_hypotheses():
    with mock.patch.object(beams, "decided", lambda beam, best, length: bool(beam.done)):
        yield


@only_where(has_a_beam)
@fault
def beam_score_is_not_divided_by_length():
    made = beams.Hypothesis

    def total(score, tokens, *rest):
        return made(score * len(tokens), tokens, *rest)

    with mock.patch.object(beams, "Hypothesis", total):
        yield


@only_where(has_a_beam)
@fault
def beam_gives_children_the_blocks_of_the_first_parent():
    """The tokens are those of the right parent, the KV is not."""
    reorder = beams.reorder

    def wrong(core, beam, chosen):
        first = chosen[0][0].parent
        return reorder(core, beam, [(one._replace(parent=first), *rest) for one, *rest in chosen])

    with mock.patch.object(beams, "reorder", wrong):
        yield


@pytest.mark.parametrize("name", fault)
def test_planted_fault_is_detected(name):
    with fault[name]():
        seeds = ((FIRST.get(name, 0) + number) % WORKLOADS for number in range(WORKLOADS))
        workloads = ((draw_crowd if name in CROWDS else draw)(seed) for seed in seeds)
        if any(convicted(workload) for workload in workloads if WHERE.get(name, lambda w: True)(workload)):
            return
    raise AssertionError(f"{name} survived {WORKLOADS} workloads")
