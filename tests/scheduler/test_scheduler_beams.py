"""Beams: blocks, preemption, ends. Random workloads compare them with a plain search, which is judged here too."""

import numpy as np
import pytest
from schedules import MODEL, Machine
from token_model import TokenModel

from kvpool import Pool, Request, Scheduler


class Search(Machine):
    """One beam of width 3 in a pool of a few sequences."""

    def __init__(self, request):
        self.request, self.pool = request, Pool(64, 2, max_seqs=4)
        super().__init__(Scheduler(self.pool), self.pool)
        self.scheduler.add(request)

    def update(self, step):
        states = self.execute(step)
        beams = MODEL.top(states, 6) if len(states) else None
        return self.scheduler.update(step, np.zeros(len(states), np.int32), beams=beams)

    def ends_as_alone(self):
        outputs = []
        while (step := self.scheduler.schedule()) is not None:
            self.scheduler.check()
            outputs += self.update(step)
        self.scheduler.check()
        expected = MODEL.beam(self.request.prompt, self.request.max_tokens, 3, 3)
        same = [output.tokens.tolist() for output in outputs] == [one.tokens.tolist() for one in expected]
        return same and self.pool.stats().used == 0


def test_beams_reorder_copies_no_more_than_the_shared_tail():
    """All hypotheses come from one parent in every step: width - 1 copies of a tail, none at a block's edge."""
    pool = Pool(64, 4)
    scheduler = Scheduler(pool)
    scheduler.add(Request(range(4), max_tokens=9, beam_width=3))
    logprobs = np.float32([[-1, -2, -3, -9, -9, -9], [-90] * 6, [-90] * 6])
    copies = []
    while (step := scheduler.schedule()) is not None:
        rows = len(step.sample_at)
        copies.append(len(step.plan.copies))
        tokens = np.tile(np.arange(6, dtype=np.int32), (rows, 1))
        scheduler.update(step, np.zeros(rows, np.int32), beams=(tokens, logprobs[:rows]))
        scheduler.check()
    assert copies == [0, 0, 2, 2, 2, 0, 2, 2, 2]


def test_beams_of_impossible_continuations_return_what_there_is():
    pool = Pool(64, 4)
    scheduler = Scheduler(pool)
    scheduler.add(Request([1], max_tokens=3, beam_width=2, n=2))
    only = np.float32([[-0.5, -np.inf, -np.inf, -np.inf]])
    outputs = []
    while (step := scheduler.schedule()) is not None:
        assert len(step.sample_at) == 1
        outputs += scheduler.update(step, np.int32([0]), beams=(np.int32([[3, 4, 5, 6]]), only))
        scheduler.check()
    assert [output.tokens.tolist() for output in outputs] == [[3, 3, 3]]


@pytest.mark.parametrize("after", [0, 1])
def test_beam_without_any_continuation_ends_with_what_it_has(after):
    scheduler = Scheduler(Pool(64, 4))
    scheduler.add(Request([1], max_tokens=3, beam_width=2, n=2))
    outputs = []
    for number in range(after + 1):
        step = scheduler.schedule()
        rows = len(step.sample_at)
        logprobs = np.full((rows, 4), -np.inf if number == after else -1, np.float32)
        tokens = np.tile(np.int32([3, 4, 5, 6]), (rows, 1))
        outputs += scheduler.update(step, np.zeros(rows, np.int32), beams=(tokens, logprobs))
        scheduler.check()
    assert [(one.tokens.tolist(), one.finish_reason) for one in outputs] == [
        ([token] * after, "cancelled") for token in (3, 4)
    ]
    assert scheduler.stats().cancelled == 2 and scheduler.schedule() is None


@pytest.mark.parametrize("after", [0, 1, 3])
def test_beams_cancelled_give_the_best_so_far(after):
    pool = Pool(64, 4)
    scheduler = Scheduler(pool)
    scheduler.add(Request([1, 2], max_tokens=9, beam_width=3, n=2))

    def update(step):
        rows = len(step.sample_at)
        continuations = np.tile(np.int32(range(6)), (rows, 1)), np.tile(np.float32([-1, -2, -3, -9, -9, -9]), (rows, 1))
        return scheduler.update(step, np.zeros(rows, np.int32), beams=continuations)

    for _ in range(after):
        update(scheduler.schedule())
    step = scheduler.schedule() if after else None
    outputs = scheduler.cancel(0)
    scheduler.check()
    assert [output.finish_reason for output in outputs] == ["cancelled"] * 2
    assert outputs[0].tokens.tolist() == [0] * after
    assert outputs[0].score >= outputs[1].score
    assert step is None or update(step) == []
    assert scheduler.schedule() is None and pool.stats().used == 0
    scheduler.check()


def test_beams_sequences_taken_by_others_restart_without_loss():
    """Somebody else opens the sequences that the forks need: the beam waits, and is right in the end."""
    search = Search(Request([1, 2, 3], max_tokens=6, beam_width=3, n=3))
    step = search.scheduler.schedule()
    held = [search.pool.open() for _ in range(4 - search.pool.stats().sequences)]
    search.update(step)
    search.scheduler.check()
    search.pool.close(held)
    assert search.ends_as_alone() and search.scheduler.stats().preemptions >= 3


class Crowded:
    """A pool in which somebody is faster: when sequences are forked, all others are open for a moment."""

    def __init__(self, pool):
        self._pool = pool

    def __getattr__(self, name):
        return getattr(self._pool, name)

    def fork(self, handle, n=1):
        others = [self._pool.open() for _ in range(self._pool.options.max_seqs - self._pool.stats().sequences)]
        try:
            return self._pool.fork(handle, n)
        finally:
            self._pool.close(others)


def test_beams_that_come_back_and_cannot_fork_wait_without_loss():
    search = Search(Request([1, 2, 3, 4, 5], max_tokens=6, beam_width=3, n=3))
    scheduler, pool = search.scheduler, search.pool
    for _ in range(3):
        search.update(scheduler.schedule())
    core = scheduler._core
    core.beams[0].preempt(core)
    before = scheduler.stats().preemptions
    search.update(scheduler.schedule())  # what all have in common, if it is not in the cache
    core.pool = Crowded(pool)
    try:
        step = scheduler.schedule()
    finally:
        core.pool = pool
    assert scheduler.stats().preemptions > before
    scheduler.check()
    scheduler.fail(step)
    assert search.ends_as_alone()


@pytest.mark.parametrize("eos", [(), (2,)])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_wide_beam_finds_the_best_of_all_continuations(eos, length_penalty):
    """With a beam as wide as the tree nothing is pruned: the result is the best of every possible text."""
    model = TokenModel(vocabulary=4, seed=8)
    prompt, longest = [1, 3, 0], 4

    def texts(tokens):
        for token in range(4):
            text = [*tokens, token]
            if token in eos or len(text) == longest:
                yield text
            else:
                yield from texts(text)

    def score(text):
        states = model.states([*prompt, *text])[len(prompt) - 1 : -1]
        return float(model.logprobs(states)[np.arange(len(text)), text].sum()) / len(text) ** length_penalty

    best = sorted(texts([]), key=score, reverse=True)[:3]
    found = model.beam(prompt, longest, 256, 3, eos=eos, length_penalty=length_penalty)
    assert [g.tokens.tolist() for g in found] == best
    assert [g.score for g in found] == pytest.approx([score(text) for text in best])
