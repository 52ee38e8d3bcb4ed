"""The scheduler's calls in any order, right and wrong ones: wrong ones change nothing, right ones keep every promise.

A Hypothesis state machine over a `Runner` of the random workloads, whose judgement of steps and outputs it uses: what
fails comes with the shortest program found.
"""

import os

import numpy as np
import pytest
from fuzz_seed import fresh_seed
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from scheduler_workload import Flight, Runner, Workload, expected_of

from kvpool import Request, Scheduler
from kvpool.errors import RequestRejected, UnknownRequest

EXAMPLES = max(1, int(os.environ.get("KVPOOL_FUZZ_EXAMPLES", "1000")) // 20)
POOLS = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(4, 24),
        "block_size": st.integers(1, 5),
        "reserved_blocks": st.integers(0, 1),
        "watermark": st.integers(0, 1),
        "prefix_cache": st.booleans(),
        "in_order": st.booleans(),
        "max_seqs": st.integers(6, 40),
    }
)
SCHEDULERS = st.fixed_dictionaries(
    {
        "max_running": st.integers(1, 6),
        "prefill_chunk": st.integers(1, 12),
        "max_step_tokens": st.integers(1, 16),
        "mixed": st.booleans(),
        "preempt": st.sampled_from(["last", "longest", "grower", "priority"]),
        "watermark": st.sampled_from([None, 0, 1, 3]),
        "plans": st.integers(1, 2),
        "max_waiting": st.sampled_from([None, None, 2]),
    }
)
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=14)  # three tokens: prefixes are met again


class Calls(RuleBasedStateMachine):
    """One scheduler; `out` are the steps that are out, `old` is one that was."""

    @initialize(pool=POOLS, options=SCHEDULERS, drafts=st.sampled_from([None, None, 0.8]))
    def begin(self, pool, options, drafts):
        workload = Workload(0, pool, options, [], drafts=drafts)
        self.runner = Runner(workload)
        self.runner.watch.strict = False
        self.scheduler, self.pool = self.runner.scheduler, self.runner.pool
        self.out, self.old = [], None
        self.most = options["plans"]
        self.next_id = 0

    def state(self):
        """Everything a later call could depend on, and what was counted (rejections aside)."""
        tokens = {}
        for name in self.waiting():
            tokens[name] = self.scheduler.tokens_of(name).tolist()
        stats = self.scheduler.stats()._replace(rejected=0)
        return self.pool.fingerprint(), self.pool.digest(), stats, tokens, repr(self.scheduler), self.arrays()

    def arrays(self):
        """What the steps that are out show."""
        names = ("handles", "num_new", "tokens", "sample_at", "sample_lane", "sample_index", "sample_position")
        steps = [flight.step for flight in self.out]
        return [([getattr(s, name).tolist() for name in names], s.plan.block_tables.tolist()) for s in steps]

    def waiting(self):
        """Requests that have not ended."""
        ended = {}
        for name, _ in self.runner.outputs:
            ended[name] = ended.get(name, 0) + 1
        return [name for name in self.runner.added if ended.get(name, 0) < self.runner.requests[name].n]

    def refused(self, error, call, *arguments, **more):
        """The call raises, and nothing has changed."""
        before = self.state()
        with pytest.raises(error) as caught:
            call(*arguments, **more)
        assert str(caught.value).startswith("["), f"no call is named: {caught.value}"
        assert self.state() == before, f"{call.__name__} raised and changed the state"

    @invariant()
    def checks_hold(self):
        if hasattr(self, "runner"):
            self.scheduler.check()
            self.pool.check()

    # ---- right calls

    @rule(prompt=PROMPTS, max_tokens=st.integers(1, 9), kind=st.integers(0, 5), priority=st.integers(0, 1))
    def add(self, prompt, max_tokens, kind, priority):
        name, self.next_id = self.next_id, self.next_id + 1
        how = {}
        if kind == 0:
            how = {"n": 3, "user": name}
        elif kind == 1:
            how = {"beam_width": 2, "n": 2}
        elif kind == 2:
            how = {"eos": (5, 6, 7, 8, 9, 10, 11), "stop": [[1, 2], [0]], "namespace": b"lora-1"}
        request = Request(prompt, max_tokens, id=name, priority=priority, **how)
        before = self.state()
        try:
            assert self.scheduler.add(request) == name
        except RequestRejected as error:
            assert error.reason in ("too_large", "queue_full")
            assert self.state() == before
            return
        self.runner.requests[name] = request
        self.runner.expected[name] = expected_of(self.runner.model, request)
        self.runner.added[name] = self.runner.now

    @rule(data=st.data())
    def cancel(self, data):
        if self.waiting():
            name = data.draw(st.sampled_from(self.waiting()))
            self.runner.cancelled.add(name)
            outputs = self.scheduler.cancel(name)
            assert outputs and all(output.id == name for output in outputs)
            self.runner._collect(outputs)

    @precondition(lambda self: not self.out)
    @rule()
    def schedule(self):
        self.runner.watch.door = {name: self.runner.requests[name] for name in self.runner.added}
        step = self.scheduler.schedule()
        assert (step is None) == (not self.waiting())
        if step is not None:
            assert len(step.handles)
            self.begin_step(Flight(self.scheduler, step))

    def begin_step(self, flight):
        """Judge a step that is first in line now."""
        self.out = [flight]
        self.runner.watch.step(flight.step, flight.requests)

    @precondition(lambda self: len(self.out) == 1 < self.most)
    @rule()
    def schedule_ahead(self):
        step = self.scheduler.schedule()
        if step is not None:
            self.out.append(Flight(self.scheduler, step, self.computed()[0]))

    def computed(self):
        step, runner = self.out[0].step, self.runner
        return runner.sample(step, self.out[0].run(runner.memory)[step.sample_at])

    @precondition(lambda self: self.out)
    @rule()
    def update(self):
        step, arguments = self.out[0].step, self.computed()
        if step.follows is not None:
            self.runner.watch.dropped += not all(map(self.pool.is_open, step.handles.tolist()))
        outputs = self.scheduler.update(step, *arguments)
        self.runner.watch.updated(len(step.sample_at), self.runner.requests)
        self.runner._collect(outputs)
        self.old = self.out.pop(0).step
        if self.out:
            self.begin_step(self.out[0])
        else:
            self.runner._poison()

    @precondition(lambda self: self.out)
    @rule(which=st.integers(0, 1))
    def fail(self, which):
        failed = self.out[min(which, len(self.out) - 1) :]
        self.old = failed[0].step
        self.runner.memory.spoil(self.old.plan)
        self.scheduler.fail(self.old)
        del self.out[-len(failed) :]
        self.runner.watch.failed()

    # ---- wrong calls

    @precondition(lambda self: self.out and len(self.out) == self.most)
    @rule()
    def schedule_once_more(self):
        self.refused(RuntimeError, self.scheduler.schedule)

    @precondition(lambda self: len(self.out) == 2)
    @rule()
    def update_the_second(self):
        step = self.out[1].step
        self.refused(RuntimeError, self.scheduler.update, step, np.zeros(len(step.sample_at), np.int32))

    @precondition(lambda self: self.old is not None)
    @rule()
    def take_an_old_step(self):
        count = len(self.old.sample_at)
        self.refused(RuntimeError, self.scheduler.update, self.old, np.zeros(count, np.int32))
        self.refused(RuntimeError, self.scheduler.fail, self.old)

    @precondition(lambda self: self.out)
    @rule(which=st.integers(0, 3))
    def wrong_arguments_of_update(self, which):
        """Each with many values: test_scheduler_misuse."""
        step, (tokens, logprobs, beams) = self.out[0].step, self.computed()
        update = self.scheduler.update
        if which == 0:
            self.refused(ValueError, update, step, np.append(tokens, np.int32(1)), logprobs, beams)
        elif which == 1 and tokens.size:
            self.refused(ValueError, update, step, np.where(np.arange(tokens.size) == 0, -1, tokens), logprobs, beams)
        elif which == 2:
            self.refused(TypeError, update, step, tokens, logprobs.astype(np.int32), beams)
        elif beams is not None:
            self.refused(ValueError, update, step, tokens, logprobs, (beams[0], np.full_like(beams[1], np.nan)))

    @rule()
    def wrong_ids(self):
        for call in (self.scheduler.cancel, self.scheduler.tokens_of):
            self.refused(UnknownRequest, call, "never there")
        gone = [name for name in self.runner.added if name not in self.waiting()]
        if gone:
            self.refused(UnknownRequest, self.scheduler.cancel, gone[0])
            self.refused(UnknownRequest, self.scheduler.tokens_of, gone[0])
        for name in self.waiting()[:1]:
            self.refused(ValueError, self.scheduler.add, Request([1], 1, id=name))
            self.refused(ValueError, self.scheduler.tokens_of, name, 1000)
        self.refused(TypeError, self.scheduler.add, [1, 2, 3])
        self.refused(ValueError, self.scheduler.request_of, 10**6)
        self.refused(TypeError, self.scheduler.request_of, 1.0)

    @rule(extra=st.integers(0, 3))
    def too_large(self, extra):
        usable = self.runner.usable() * self.pool.block_size
        self.refused(RequestRejected, self.scheduler.add, Request([1], usable + 1 + extra))

    # ---- the end

    def teardown(self):
        """Drained, everybody has what he would have alone, and the pool is empty."""
        if not hasattr(self, "runner"):
            return
        while self.out:
            self.update()
        for _ in range(3000):
            if not self.waiting():
                break
            self.schedule()
            self.update()
        assert not self.waiting(), "not drained"
        assert self.scheduler.schedule() is None
        self.runner.refused = set(self.runner.requests) - set(self.runner.added)
        self.runner._finish()
        self.pool.shutdown()


def run(number, examples):
    profile = settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        database=None,
        print_blob=False,
        phases=(Phase.generate, Phase.shrink) if examples == EXAMPLES else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seed(number)(type("Calls", (Calls,), {})), settings=profile)


def test_calls_in_any_order_keep_every_promise():
    run(fresh_seed(), EXAMPLES)


def test_refused_request_that_stays_in_the_queue_is_detected(monkeypatch):
    judge = Scheduler._judge

    def keep(self, request):
        try:
            judge(self, request)
        except RequestRejected:
            self._core.new_group(request, False)
            raise

    monkeypatch.setattr(Scheduler, "_judge", keep)
    with pytest.raises(BaseException) as caught:  # AssertionError, the Failed of pytest.raises, or a group
        run(1, 240)
    assert not isinstance(caught.value, KeyboardInterrupt)
