"""The random workloads of the scheduler on a real model: every answer is what mlx-lm gives a request alone.

The token model proves the scheduler; here the same kind of workload goes through the adapter, its forward passes and
its sampler. Odd ones have drafts, of which some are wrong. ``KVPOOL_LONG=1`` runs 100 of them, ``KVPOOL_WORKLOAD=17``
number 17 alone.
"""

import os
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_models import ROUTES, VOCAB, computing_on_cpu, logprobs_of, tiny_llama
from scheduler_workload import Guest, draw
from token_model import why_finished

from kvpool import Pool
from kvpool.adapters.mlx_lm.engine import Engine
from kvpool.adapters.mlx_lm.sampling import Sampling, sample
from kvpool.errors import OutOfBlocks, RequestRejected

cpu = pytest.fixture(computing_on_cpu, autouse=True)
COUNT = 100 if os.environ.get("KVPOOL_LONG") else 12
ONLY = os.environ.get("KVPOOL_WORKLOAD")
SEEDS = [int(ONLY)] if ONLY else range(COUNT)


class Broken(Exception):
    """The planted failure of a forward pass."""


class Alone:
    """What the stock model gives a request by itself, with mlx-lm's own cache."""

    def __init__(self, model):
        self.model = model

    def logits(self, tokens, cache):
        return self.model(mx.array([tokens]), cache=cache)[:, -1, :].astype(mx.float32)

    def tokens(self, request, index=0):
        """Sample `index` of a request, the logprobs of its tokens, and why it ended."""
        cache, fed, out, logprobs, reason = make_prompt_cache(self.model), request.prompt.tolist(), [], [], None
        while reason is None:
            at, generated = (np.array([index]), np.array([len(out)])), np.array(out, np.int32)
            changes = {0: request.user.changes(request.prompt, generated)} if request.user.alters else {}
            picked, logprob = sample(self.logits(fed, cache), [request.user], *at, changes)
            out.append(int(picked[0]))
            logprobs.append(float(logprob[0]))
            fed = out[-1:]
            reason = why_finished(out, request.max_tokens, request.eos, request.stop)
        return out, logprobs, reason

    def score(self, request, tokens):
        """Of a hypothesis of a beam: the model's own, of the tokens that were found."""
        logprobs = logprobs_of(self.model, request.prompt.tolist(), tokens)
        return logprobs.sum() / len(tokens) ** request.length_penalty


def on_model(alone, request, rng):
    """The request with sampling parameters, and with ends that the model does reach."""
    how = {} if request.user is None else {"temperature": 1.0, "seed": request.user}
    if how and rng.random() < 0.7:
        how |= {"top_p": 0.9, "top_k": 40}
    if rng.random() < 0.3:
        how |= {"frequency_penalty": 0.4, "repetition_penalty": 1.2, "logit_bias": {5: 2.0}}
    how["top_logprobs"] = int(rng.choice([0, 0, 3]))
    request = replace(request, user=Sampling(**how), eos=(), stop=())
    if not request.beam_width and rng.random() < 0.5:
        text, *_ = alone.tokens(request)
        at = int(rng.integers(len(text)))
        end = {"eos": (text[at],)} if rng.random() < 0.5 else {"stop": [text[max(0, at - 1) : at + 1]]}
        request = replace(request, **end)
    return request


class Drafts:
    """Drafts of known answers, of which some are wrong."""

    def __init__(self, answers, rng):
        self.answers, self.rng = answers, rng

    def __call__(self, rows):
        found = []
        for row in rows:
            known = self.answers[row.request.id, row.index][0][len(row.generated) :]
            tokens = np.append(known, self.rng.integers(VOCAB, size=4))[: self.rng.integers(9)]
            is_wrong = self.rng.random(len(tokens)) > 0.85
            found.append(np.where(is_wrong, self.rng.integers(VOCAB, size=len(tokens)), tokens))
        return found


def judge(request, one, answer, events, is_cancelled):
    """Compare a sample with that of the request alone, and with what its listener heard."""
    found, (expected, logprobs, reason) = one.tokens.tolist(), answer
    if one.finish_reason == "cancelled":
        assert is_cancelled and found == expected[: len(found)]
    else:
        assert (found, one.finish_reason) == (expected, reason)
    assert [event.token for event in events] == found
    assert [len(event.top) for event in events] == [request.user.top_logprobs] * len(found)
    if events:
        np.testing.assert_allclose(one.logprobs, logprobs[: len(found)], atol=1e-3)
        *before, last = [event.finish_reason for event in events]
        assert not any(before) and one.finish_reason in (last, "cancelled")


@pytest.mark.parametrize("seed", SEEDS)
def test_random_workload_on_a_model_gives_what_it_gives_alone(seed):
    workload = draw(seed)
    print(workload)
    rng = np.random.default_rng([seed, 9])
    model = tiny_llama()
    alone = Alone(model)
    requests = {r.id: on_model(alone, r, rng) for _, r in workload.arrivals}
    answers = {(r.id, i): alone.tokens(r, i) for r in requests.values() if not r.beam_width for i in range(r.n)}
    pool = Pool(seed=1, **(workload.pool | {"reserved_blocks": 1, "num_blocks": workload.pool["num_blocks"] + 1}))
    names = ("max_running", "max_step_tokens", "prefill_chunk", "watermark", "preempt", "max_model_len", "plans")
    options = {name: workload.scheduler[name] for name in names if name in workload.scheduler}
    route = ROUTES[str(rng.choice(list(ROUTES), p=[0.6, 0.2, 0.2]))]
    drafts = {"speculate": Drafts(answers, rng)} if seed % 2 else {}
    engine = Engine(model, pool=pool, prefix_cache=workload.pool["prefix_cache"], **drafts, **options, **route)
    logits_of, guest = engine._forward._logits, Guest(pool, rng)

    def sometimes(*arguments):
        logits, held = logits_of(*arguments)
        if rng.random() < workload.fail_rate:
            mx.eval(logits)
            raise Broken
        return logits, held

    engine._forward._logits = sometimes
    done, events, cancelled, refused, tick = {}, {}, set(), set(), 0
    arrivals = [(when, requests[request.id]) for when, request in workload.arrivals]
    while arrivals or engine.num_unfinished:
        while arrivals and arrivals[0][0] <= tick:
            request = arrivals.pop(0)[1]
            heard = events.setdefault(request.id, [])
            try:
                engine.submit(request, on_token=None if request.beam_width else heard.append)
            except RequestRejected:
                refused.add(request.id)
        for name, (when, _) in workload.cancels.items():
            if when <= tick and name in engine:
                cancelled.add(name)
                done[name] = engine.cancel(name)
        if workload.guests:
            guest.visit()
        try:
            done |= {completion.id: completion for completion in engine.step()}
        except Broken:
            pass
        except OutOfBlocks:
            assert guest.leave(), "out of blocks without guests"
        tick += 1
        assert tick < 20_000
    assert set(done) | refused == set(requests)
    for name, completion in done.items():
        request = requests[name]
        for index, one in enumerate(completion.samples):
            if not request.beam_width:
                mine = [event for event in events[name] if event.index == index]
                judge(request, one, answers[name, index], mine, name in cancelled)
            elif len(one.tokens) and one.finish_reason != "cancelled":
                assert one.output.score == pytest.approx(alone.score(request, one.tokens.tolist()), abs=1e-3)
    guest.leave()
    engine.scheduler.check()
    pool.check()
    stats = pool.stats()
    assert (stats.used, stats.limbo, stats.sequences, stats.pending) == (0, 0, 0, 0)
