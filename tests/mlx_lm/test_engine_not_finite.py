"""Logits that are not finite end their request with an error: whatever it asked for, and nobody else's.

The model computes infinity from one letter, so every sample that has it in its prompt or samples it goes wrong there.
"""

import mlx.core as mx
import numpy as np
import pytest
from mlx_models import ROUTES, computing_on_cpu, ended, on_cpu

from kvpool.adapters.mlx_lm import DraftModel, Engine, LogitsNotFinite, PromptLookup, tiny
from kvpool.adapters.mlx_lm import engine as engine_module
from kvpool.adapters.mlx_lm.grammar import Follower, GrammarFailed
from kvpool.adapters.mlx_lm.sampling import Sampling, sample
from kvpool.store import MemoryStore

cpu = pytest.fixture(computing_on_cpu, autouse=True)
BAD = 90  # the letter
HARMED, GOOD = [65, BAD, 66], [65, 66]
OPTIONS = {"max_tokens": 6, "eos": ()}
KINDS = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 3},
    "filtered": {"temperature": 1.0, "seed": 3, "top_p": 0.9, "min_p": 0.01, "xtc_probability": 0.5},
    "penalized": {"repetition_penalty": 1.3, "logit_bias": {7: 2.0}, "min_tokens": 2, "eos": (256,)},
    "likeliest": {"top_logprobs": 3},
    "samples": {"temperature": 1.0, "seed": 3, "n": 3},
    "beam": {"beam_width": 3, "n": 2},
    "one token": {"max_tokens": 1},
    "one beam": {"beam_width": 2, "max_tokens": 1},
    "first letter ends it": {"eos": (0,)},
    "stop string": {"stop": "zzz"},
}


@pytest.fixture(scope="module")
def loaded():
    with on_cpu():
        model, tokenizer = tiny.make()
        weight = np.array(model.model.embed_tokens.weight)
        weight[BAD] = np.inf
        model.model.embed_tokens.weight = mx.array(weight)
        yield model, tokenizer


@pytest.fixture(params=["fused", "plain"])  # what is computed at once, and what runs ahead
def engine(request, loaded):
    with Engine(loaded[0], 400, block_size=4, tokenizer=loaded[1], max_running=8, **ROUTES[request.param]) as one:
        yield one
        one.scheduler.check()
    one.kv.pool.check()
    assert one.kv.pool.stats().used == 0


def tokens_of(completion):
    assert completion.error is None
    return [one.tokens.tolist() for one in completion.samples]


@pytest.mark.parametrize("kind", KINDS)
def test_request_that_the_model_gives_no_number_ends_with_an_error_alone(engine, kind):
    options = OPTIONS | KINDS[kind]
    due = tokens_of(engine.generate(GOOD, **options))
    ids = [engine.submit(prompt, **options) for prompt in (GOOD, HARMED, GOOD, HARMED)]
    done = ended(engine)
    for id in ids[1::2]:
        assert isinstance(done[id].error, LogitsNotFinite)
        assert len(done[id].samples) == options.get("n", 1)
        assert all(not len(one.tokens) and not one.text for one in done[id].samples)
    assert [tokens_of(done[id]) for id in ids[::2]] == [due, due]
    assert engine.num_not_finite == 2
    assert tokens_of(engine.generate(GOOD, **options)) == due


def test_request_with_a_grammar_ends_with_the_same_error_and_another_is_not_counted(engine, monkeypatch):
    options = {"max_tokens": 6, "grammar": engine.grammars.regex("[a-z]{4}"), "temperature": 1.0, "seed": 1}
    bad, good = engine.submit(HARMED, **options), engine.submit(GOOD, **options)
    done = ended(engine)
    assert isinstance(done[bad].error, LogitsNotFinite) and engine.num_not_finite == 1
    assert done[good].text.islower() and len(done[good].text) == 4

    def fails(self, generated):
        raise GrammarFailed("no token may come next")

    monkeypatch.setattr(Follower, "allowed", fails)
    id = engine.submit(HARMED, **options)
    assert isinstance(ended(engine)[id].error, GrammarFailed) and engine.num_not_finite == 1
    with pytest.raises(GrammarFailed):
        list(engine.stream(GOOD, **options))


@pytest.mark.parametrize("is_drafted", [False, True])
def test_listener_hears_what_came_before_and_nothing_behind(engine, loaded, is_drafted):
    """Also where a draft that was right comes before the logits that are no numbers."""
    heard = []
    if is_drafted:
        propose = lambda rows: [np.array([BAD] * 3, np.int32) for _ in rows]  # noqa: E731
        engine = Engine(loaded[0], 400, tokenizer=loaded[1], speculate=propose)
    id = engine.submit(GOOD, on_token=heard.append, logit_bias={BAD: 1000.0}, **OPTIONS)
    done = ended(engine)[id]
    assert isinstance(done.error, LogitsNotFinite)
    assert [event.token for event in heard] == [BAD] and np.isfinite(heard[0].logprob)
    (sample,) = done.samples
    assert sample.tokens.tolist() == [BAD] and sample.finish_reason == "cancelled"
    assert sample.text == heard[0].text != ""
    assert np.isfinite(sample.logprobs).all() and len(sample.logprobs) == 1


def test_one_of_two_samples_ends_its_request_and_the_other_keeps_what_it_has(engine):
    options = OPTIONS | {"n": 2, "temperature": 1.0, "max_tokens": 40, "logit_bias": {BAD: 3.0}}
    for seed in range(40):
        id = engine.submit(GOOD, seed=seed, **options)
        samples = ended(engine)[id].samples
        ends = [one.tokens.tolist().index(BAD) if BAD in one.tokens else None for one in samples]
        if None in ends and len(samples[ends.index(None)].tokens) > 1:
            break
    bad = 1 - ends.index(None)
    assert samples[bad].tokens.tolist()[-1] == BAD and samples[bad].finish_reason == "cancelled"
    assert len(samples[1 - bad].tokens) in (ends[bad] + 1, ends[bad] + 2)


@pytest.mark.parametrize("kind", ["samples of all", "draft model", "lookup"])
def test_drafts_that_give_no_number_are_only_wrong_drafts(loaded, kind):
    def of_the_bad_letter(rows):
        return [np.array([BAD, 66, 67], np.int32) for _ in rows]

    damaged = DraftModel(loaded[0], 200, num_drafts=3)
    speculate = {"samples of all": of_the_bad_letter, "draft model": damaged, "lookup": PromptLookup(3)}[kind]
    options = {"block_size": 4, "tokenizer": loaded[1]}
    with Engine(loaded[0], 400, **options) as plain, Engine(loaded[0], 400, speculate=speculate, **options) as fast:
        for prompt in (GOOD, [65, 66, 67] * 5):
            due = tokens_of(plain.generate(prompt, **OPTIONS))
            assert tokens_of(fast.generate(prompt, **OPTIONS)) == due
        with pytest.raises(LogitsNotFinite):
            fast.generate([*HARMED, 65, 66, 65, 66], **OPTIONS)
        assert fast.num_not_finite == 1
        assert kind != "samples of all" or fast.scheduler.stats().drafted_tokens


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("is_drafted", [False, True])
def test_logits_behind_a_stop_string_do_not_matter(loaded, n, is_drafted, monkeypatch):
    """With drafts in the same step, with another sample that goes on in later ones."""
    (stop,) = loaded[1].encode("e")
    script = [65, stop, BAD, 66, 66, 66], [65, 66, 67, 65, 66, 67]

    def as_written(logits, settings, indices, positions, *more):
        places = zip(indices.tolist(), positions.tolist(), strict=True)
        logprobs = sample(logits, settings, indices, positions, *more)[1]
        return mx.array([script[index][at] for index, at in places]), logprobs

    monkeypatch.setattr(engine_module, "sample", as_written)
    speculate = (lambda rows: [np.array(script[0][1:4], np.int32) for _ in rows]) if is_drafted else None
    with Engine(loaded[0], 400, tokenizer=loaded[1], speculate=speculate) as one:
        id = one.submit(GOOD, n=n, stop="e", **OPTIONS)
        done = ended(one)[id]
    assert tokens_of(done) == [script[0][:2], script[1]][:n] and one.num_not_finite == 0
    assert [sample.finish_reason for sample in done.samples] == ["stop", "length"][:n]


def test_prompt_of_such_a_request_is_not_saved(loaded):
    with Engine(loaded[0], 400, block_size=4, store=lambda layout: MemoryStore(layout, 2**24)) as engine:
        saved = []
        for prompt in ([65, BAD] * 12, [65, 66] * 12):
            engine.submit(prompt, **OPTIONS)
            ended(engine)
            engine.kv.stored.flush(20)
            saved.append(engine.kv.stored.stats().saved_blocks)
        assert saved[0] == 0 < saved[1] and engine.num_not_finite == 1


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("more", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}])
def test_one_logit_that_is_no_number_harms_its_row_alone(number, more):
    settings = Sampling(seed=1, **more)
    rng = np.random.default_rng(4)
    for size in (3, 40, 1000, 32_000):
        logits = rng.normal(size=(5, size)).astype(np.float32)
        zeros, positions = np.zeros(5, np.int64), np.arange(5)
        due = [np.array(x) for x in sample(mx.array(logits), [settings] * 5, zeros, positions)]
        for place in {0, size // 2, size - 1}:
            bad = logits.copy()
            bad[2, place] = number
            tokens, logprobs = map(np.array, sample(mx.array(bad), [settings] * 5, zeros, positions))
            assert np.isfinite(logprobs).tolist() == [True, True, False, True, True]
            assert 0 <= tokens[2] < size
            others = [0, 1, 3, 4]
            assert tokens[others].tolist() == due[0][others].tolist()


def test_row_of_which_nothing_may_come_is_not_finite():
    logits = np.zeros((3, 16), np.float32)
    logits[1, 8:] = -np.inf
    upper = np.array([0, 0xFF], np.uint8)  # tokens 8 to 15
    given = mx.array(logits), [Sampling()] * 3, np.zeros(3, np.int64), np.zeros(3, np.int64)
    tokens, logprobs = map(np.array, sample(*given, allowed={1: upper, 2: upper}))
    assert np.isfinite(logprobs).tolist() == [True, False, True] and tokens[2] == 8
