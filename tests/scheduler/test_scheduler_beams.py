"""Beam search against a plain one, and against all sequences there are; blocks, preemption, ends."""

import itertools
import random

import numpy as np
import pytest
from schedules import Machine, logprobs_of

from kvpool import Pool, Request, Scheduler
from kvpool.errors import RequestRejected

VOCABULARY = 9


def ends(request, tokens):
    stopped = any(tuple(tokens[-len(stop) :]) == stop for stop in request.stop)
    return tokens[-1] in request.eos or stopped or len(tokens) == request.max_tokens


def plain_beam_search(request, vocabulary=VOCABULARY):
    """Return [(score, tokens)] as docs/scheduling.md has it, with lists and sorting alone."""
    prompt, width, penalty = request.prompt.tolist(), request.beam_width, request.length_penalty
    live, done = [(0.0, [])], []
    while live:
        candidates = []
        for row, (total, tokens) in enumerate(live):
            scores = logprobs_of(prompt + tokens, vocabulary).tolist()
            order = sorted(range(vocabulary), key=lambda token, scores=scores: (-scores[token], token))
            candidates += [(-(total + scores[token]), row, place, token) for place, token in enumerate(order)]
        unfinished = []
        for total, row, _, token in sorted(candidates):
            if len(unfinished) == width:
                break
            tokens = [*live[row][1], token]
            if ends(request, tokens):
                done.append((-total / len(tokens) ** penalty, tokens))
            else:
                unfinished.append((-total, tokens))
        done = sorted(done, key=lambda hypothesis: -hypothesis[0])[:width]
        live = unfinished
        if live and len(done) == width:
            best, length = live[0][0], len(live[0][1])
            if done[-1][0] >= max(best / n**penalty for n in range(length + 1, request.max_tokens + 1)):
                break
    return done[: request.n]


def everything(request, vocabulary):
    """Return all sequences that can be generated, best first."""
    found, prompt = [], request.prompt.tolist()
    for length in range(1, request.max_tokens + 1):
        for tokens in itertools.product(range(vocabulary), repeat=length):
            whole = [ends(request, list(tokens[: i + 1])) for i in range(length)]
            if whole[-1] and not any(whole[:-1]):
                total = 0.0
                for i, token in enumerate(tokens):
                    total += float(logprobs_of(prompt + list(tokens[:i]), vocabulary)[token])
                found.append((total / length**request.length_penalty, list(tokens)))
    return sorted(found, key=lambda hypothesis: -hypothesis[0])


def run(scheduler, pool, vocabulary=VOCABULARY, fail=lambda: False, candidates=8):
    machine, outputs = Machine(scheduler, pool), {}
    while (step := scheduler.schedule()) is not None:
        scheduler.check()
        if fail():
            scheduler.fail(step)
            continue
        tokens, logprobs = [], []
        for context in machine.execute(step):
            scores = logprobs_of(context, vocabulary)
            order = np.argsort(-scores, kind="stable")[:candidates]
            tokens.append(np.pad(order, (0, candidates - len(order))))
            logprobs.append(np.pad(scores[order], (0, candidates - len(order)), constant_values=-np.inf))
        shape = (len(tokens), candidates)
        given = np.array(tokens, np.int32).reshape(shape), np.array(logprobs, np.float32).reshape(shape)
        for output in scheduler.update(step, np.zeros(shape[0], np.int32), beams=given if tokens else None):
            outputs.setdefault(output.id, []).append(output)
    scheduler.check()
    assert pool.stats().used == 0
    return outputs


@pytest.mark.parametrize("first_seed", range(0, 60, 15))
def test_beams_random_workloads_equal_plain_beam_search(first_seed):
    preemptions = 0
    for seed in range(first_seed, first_seed + 15):
        rng = random.Random(seed)
        pool = Pool(
            rng.randint(20, 70),
            rng.choice([1, 2, 4]),
            prefix_cache=rng.random() < 0.5,
            seed=1,
            in_order=rng.random() < 0.2,
        )
        scheduler = Scheduler(
            pool,
            max_running=rng.choice([4, 8]),
            max_step_tokens=rng.choice([1, 5, 64]),
            prefill_chunk=rng.choice([1, 3, 64]),
            mixed=rng.random() < 0.6,
            preempt=rng.choice(["last", "longest", "grower", "priority"]),
            watermark=rng.choice([None, 0, 3]),
        )
        base = [rng.randrange(VOCABULARY) for _ in range(10)]
        requests = {}
        for _ in range(rng.randint(1, 8)):
            width = rng.randint(1, 4)
            request = Request(
                base[: rng.randint(0, 10)] + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 6))],
                max_tokens=rng.randint(1, 8),
                eos=(rng.randrange(VOCABULARY),) if rng.random() < 0.5 else (),
                stop=[[1, 2]] if rng.random() < 0.2 else (),
                beam_width=width,
                n=rng.randint(1, width),
                length_penalty=rng.choice([1, 0, 2, -1]),
            )
            try:
                requests[scheduler.add(request)] = request
            except RequestRejected:
                continue
        outputs = run(scheduler, pool, fail=lambda rng=rng: rng.random() < 0.1)
        for name, request in requests.items():
            expected = plain_beam_search(request)
            assert [output.tokens.tolist() for output in outputs[name]] == [tokens for _, tokens in expected], (
                f"{seed=}"
            )
            assert [output.score for output in outputs[name]] == pytest.approx([score for score, _ in expected])
            assert [output.index for output in outputs[name]] == list(range(request.n))
            for output in outputs[name]:
                total = float(output.logprobs.astype(np.float64).sum())
                assert output.score == pytest.approx(total / len(output.tokens) ** request.length_penalty)
        preemptions += scheduler.stats().preemptions
    assert preemptions > 0


@pytest.mark.parametrize("penalty", [0.0, 1.0, 1.5, -1.0])
@pytest.mark.parametrize("eos", [(), (2,)])
def test_beams_as_wide_as_the_tree_find_the_best_of_all(penalty, eos):
    """Three tokens, four steps: 27 hypotheses hold every unfinished one, so the search is exhaustive."""
    pool = Pool(400, 2)
    scheduler = Scheduler(pool)
    request = Request([4, 2], max_tokens=4, beam_width=27, n=9, eos=eos, length_penalty=penalty)
    scheduler.add(request)
    outputs = run(scheduler, pool, vocabulary=3, candidates=54)[0]
    expected = everything(request, 3)[:9]
    assert [output.tokens.tolist() for output in outputs] == [tokens for _, tokens in expected]
    assert [output.score for output in outputs] == pytest.approx([score for score, _ in expected])


def test_beams_ties_take_the_lower_row_then_the_lower_candidate():
    pool = Pool(64, 4)
    scheduler = Scheduler(pool)
    scheduler.add(Request([1], max_tokens=3, beam_width=2, n=2))
    flat = np.full((1, 4), -1.0, np.float32)
    step = scheduler.schedule()
    scheduler.update(step, np.int32([0]), beams=(np.int32([[5, 6, 7, 8]]), flat))
    assert [scheduler.tokens_of(0, i).tolist() for i in range(2)] == [[5], [6]]
    step = scheduler.schedule()
    assert step.tokens.tolist() == [5, 6] and step.sample_index.tolist() == [0, 1]
    assert step.beam_width.tolist() == [2, 2]
    scheduler.update(step, np.int32([0, 0]), beams=(np.int32([[1, 2, 3, 4], [5, 6, 7, 8]]), np.repeat(flat, 2, 0)))
    assert [scheduler.tokens_of(0, i).tolist() for i in range(2)] == [[5, 1], [5, 2]]
    scheduler.check()


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


@pytest.mark.parametrize("after", [0, 1, 3])
def test_beams_cancelled_give_the_best_so_far(after):
    pool = Pool(64, 4)
    scheduler = Scheduler(pool)
    scheduler.add(Request([1, 2], max_tokens=9, beam_width=3, n=2))
    logprobs = np.float32([[-1, -2, -3, -9, -9, -9]])
    for _ in range(after):
        rows = len((step := scheduler.schedule()).sample_at)
        tokens = np.tile(np.arange(6, dtype=np.int32), (rows, 1))
        scheduler.update(step, np.zeros(rows, np.int32), beams=(tokens, np.repeat(logprobs, rows, 0)))
    step = scheduler.schedule() if after else None
    outputs = scheduler.cancel(0)
    scheduler.check()
    assert [output.finish_reason for output in outputs] == ["cancelled"] * 2
    assert outputs[0].tokens.tolist() == [0] * after
    assert outputs[0].score >= outputs[1].score
    if step:
        rows = len(step.sample_at)
        tokens = np.tile(np.arange(6, dtype=np.int32), (rows, 1))
        assert scheduler.update(step, np.zeros(rows, np.int32), beams=(tokens, np.repeat(logprobs, rows, 0))) == []
    assert scheduler.schedule() is None and pool.stats().used == 0
    scheduler.check()


def test_beams_sequences_taken_by_others_restart_without_loss():
    """Somebody else opens the sequences that the forks need: the beam waits, and is right in the end."""
    pool = Pool(64, 2, max_seqs=4)
    scheduler = Scheduler(pool)
    request = Request([1, 2, 3], max_tokens=6, beam_width=3, n=3)
    scheduler.add(request)
    machine, held, outputs = Machine(scheduler, pool), [], []
    for turn in itertools.count():
        step = scheduler.schedule()
        if step is None:
            break
        scores = [logprobs_of(context, VOCABULARY) for context in machine.execute(step)]
        order = [np.argsort(-s, kind="stable") for s in scores]
        given = (np.int32(order), np.float32([s[o] for s, o in zip(scores, order, strict=True)])) if scores else None
        if turn == 0:
            held = [pool.open() for _ in range(pool.options.max_seqs - pool.stats().sequences)]
        outputs += scheduler.update(step, np.zeros(len(scores), np.int32), beams=given)
        scheduler.check()
        if held:
            pool.close(held)
            held = []
    assert scheduler.stats().preemptions >= 3
    assert [output.tokens.tolist() for output in outputs] == [tokens for _, tokens in plain_beam_search(request)]


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
    pool = Pool(64, 2, max_seqs=4)
    scheduler = Scheduler(pool)
    request = Request([1, 2, 3, 4, 5], max_tokens=6, beam_width=3, n=3)
    scheduler.add(request)
    machine = Machine(scheduler, pool)
    for _ in range(3):
        step = scheduler.schedule()
        scores = [logprobs_of(context, VOCABULARY) for context in machine.execute(step)]
        order = [np.argsort(-s, kind="stable") for s in scores]
        given = np.int32(order), np.float32([s[o] for s, o in zip(scores, order, strict=True)])
        scheduler.update(step, np.zeros(len(scores), np.int32), beams=given)
    core = scheduler._core
    core.beams[0].preempt(core)
    before = scheduler.stats().preemptions
    step = scheduler.schedule()  # what all have in common, if it is not in the cache
    machine.execute(step)
    scheduler.update(step, np.zeros(0, np.int32))
    core.pool = Crowded(pool)
    try:
        step = scheduler.schedule()
    finally:
        core.pool = pool
    assert scheduler.stats().preemptions > before
    scheduler.check()
    scheduler.fail(step)
    (outputs,) = run(scheduler, pool, candidates=9).values()
    assert [output.tokens.tolist() for output in outputs] == [tokens for _, tokens in plain_beam_search(request)]
