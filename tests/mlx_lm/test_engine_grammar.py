"""Answers in the form of a grammar: each one fits, also in a batch, after a preemption, and among other samples."""

import json
import random

import json_forms
import numpy as np
import pytest
from fuzz_seed import fresh_seed
from mlx_models import on_cpu

from kvpool.adapters.mlx_lm import Engine, grammar, tiny
from kvpool.adapters.mlx_lm.grammar import Follower, GrammarFailed
from kvpool.adapters.mlx_lm.sampling import Sampling

FREE = {"max_tokens": 30, "temperature": 1.0}


@pytest.fixture(scope="module")
def model():
    with on_cpu():
        yield tiny.make()


def engine_of(model, num_blocks=400, **options):
    return Engine(model[0], num_blocks, block_size=4, tokenizer=model[1], seed=1, **options)


def program(model, draw, num_blocks=40):
    """Run requests with grammars among free ones. Return their samples that do not fit, and the preemptions."""
    forms, ids = [json_forms.form(draw) for _ in range(8)], {}
    with engine_of(model, num_blocks, max_running=8) as engine:
        for number, (schema, fits) in enumerate(forms):
            options = {"max_tokens": 140, "temperature": 1.0, "seed": 100 * number, "n": draw.randrange(1, 3)}
            ids[engine.submit(f"form {number}", grammar=engine.grammars.schema(schema), **options)] = fits
            engine.submit(f"free {number}", **FREE)
        wrong = []
        while engine.num_unfinished:
            for completion in engine.step():
                for sample in completion.samples:
                    if completion.id in ids and not is_right(sample, ids[completion.id]):
                        wrong.append((sample.text, sample.finish_reason, completion.error))
        return wrong, engine.scheduler.stats().preemptions


def is_right(sample, fits):
    """Whether a sample fits its form as a whole, or is cut off at its last token."""
    if sample.finish_reason == "length":
        return len(sample.tokens) == 140
    try:
        return sample.finish_reason == "eos" and fits(json.loads(sample.text))
    except ValueError:
        return False


@pytest.mark.parametrize("number", range(3))
def test_answers_in_a_crowded_batch_fit_their_schemas(model, number):
    wrong, preemptions = program(model, random.Random(fresh_seed() + number))
    assert not wrong and preemptions, (wrong, preemptions)


ALLOWED, TAKE = Engine._allowed, Follower.allowed


def of_another_row(self, step, requests):
    allowed = ALLOWED(self, step, requests)
    return dict(zip(allowed, [*list(allowed.values())[1:], *list(allowed.values())[:1]], strict=True))


def not_advanced(self, generated):
    return TAKE(self, generated[: len(generated) // 2 * 2])


def lost_at_preemption(self, step, requests):
    preemptions = self.scheduler.stats().preemptions
    if preemptions > getattr(self, "seen", 0):
        for at, request in enumerate(requests):
            followers = self._jobs[request.id].followers
            if followers:
                followers[int(step.sample_index[at])] = fresh = request.user.grammar.follow()
                fresh._taken = len(step.generated(at))
    self.seen = preemptions
    return ALLOWED(self, step, requests)


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (Engine, "_allowed", of_another_row),
        (Engine, "_allowed", lost_at_preemption),
        (Follower, "allowed", not_advanced),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_planted_fault_shows_in_answers(model, monkeypatch, owner, name, fault):
    monkeypatch.setattr(owner, name, fault)
    assert program(model, random.Random(7))[0]


def test_answer_is_that_of_the_request_alone(model):
    with engine_of(model) as engine:
        form = {"type": "array", "items": {"enum": ["a", "bc", 1]}, "minItems": 3, "maxItems": 6}
        options = {"grammar": engine.grammars.schema(form), "max_tokens": 90, "temperature": 1.0}
        alone = [engine.generate(f"prompt {seed}", seed=seed, **options).text for seed in range(6)]
    with engine_of(model, 30) as engine:
        ids = [engine.submit(f"prompt {seed}", seed=seed, **options) for seed in range(6)]
        found = {}
        while engine.num_unfinished:
            found |= {one.id: one.text for one in engine.step()}
        assert [found[id] for id in ids] == alone and engine.scheduler.stats().preemptions


def test_step_that_failed_leaves_the_grammar_where_it_was(model, monkeypatch):
    with engine_of(model) as engine:
        options = {"grammar": engine.grammars.regex("(abc|xyz){5}"), "max_tokens": 40, "temperature": 1.0, "seed": 5}
        due = engine.generate("a", **options).text
        run, count = engine._run, iter(range(1000))

        def fails(step, requests):
            result = run(step, requests)
            if next(count) % 3 == 2:
                raise MemoryError("planted")
            return result

        monkeypatch.setattr(engine, "_run", fails)
        engine.submit("a", **options)
        found = []
        while engine.num_unfinished:
            try:
                found += engine.step()
            except MemoryError:
                continue
        assert found[0].text == due and next(count) > 20


def test_grammar_that_is_too_complex_ends_its_request_alone(model, monkeypatch):
    monkeypatch.setattr(grammar, "LIMITS", {"step_max_items": 60, "step_lexer_fuel": 5000, "max_lexer_states": 100})
    with engine_of(model) as engine:
        due = engine.generate("free", max_tokens=30).text
        heavy = engine.grammars.regex("(a|b)*a(a|b){12}")
        ids = [engine.submit("x", max_tokens=200, grammar=heavy, temperature=1.0, n=2)]
        ids.append(engine.submit("free", max_tokens=30))
        found = {}
        while engine.num_unfinished:
            found |= {one.id: one for one in engine.step()}
        assert isinstance(found[ids[0]].error, GrammarFailed) and found[ids[0]].samples[0].finish_reason == "cancelled"
        assert found[ids[1]].error is None and found[ids[1]].text == due
        assert engine.kv.pool.stats().used == 0


@pytest.mark.parametrize("program", ["", "raise MemoryError"])
def test_trial_that_does_not_start_is_no_fault_of_the_grammar(model, monkeypatch, program):
    with on_cpu(), engine_of(model) as engine:
        engine.grammars.trial = trial = grammar.Trial()
        monkeypatch.setattr(grammar, "TRIAL", program)
        with pytest.raises(OSError, match="does not start"):
            engine.grammars.regex("[ab]")
        monkeypatch.undo()
        engine.grammars.regex("[ab]")
        trial.close()


def test_grammar_holds_after_the_tokens_that_end_a_think_block(model):
    with engine_of(model) as engine:
        after = model[1].encode("ab")
        follower = engine.grammars.regex("[xy]{2}", after).follow()
        tokens = np.array(model[1].encode("zaabxy"), np.int32)

        def names(count):
            bits = follower.allowed(tokens[:count])
            tokens_of = np.flatnonzero(np.unpackbits(bits, bitorder="little")) if bits is not None else []
            return None if bits is None else {model[1].decode([token]) for token in tokens_of}

        found = [names(count) for count in (0, 1, 3, 4, 5, 6)]
    assert found == [None, None, None, {"x", "y"}, {"x", "y"}, {tiny.END}]


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("schema", {"type": "nothing"}, "nothing"),
        ("schema", {"$ref": "http://127.0.0.1:1/x"}, "not present"),
        ("schema", {"enum": ["x" * 2**16]}, "limit is 65536"),
        ("regex", "a(b", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("lark", "start: nobody", "nobody"),
    ],
)
def test_grammar_that_cannot_be_read_says_why(model, kind, text, says):
    with engine_of(model) as engine, pytest.raises(ValueError, match=says):
        getattr(engine.grammars, kind)(text)


def test_request_without_an_end_or_in_a_beam_has_no_grammar(model):
    with engine_of(model) as engine:
        form = engine.grammars.regex("a+")
        for options in ({"eos": ()}, {"beam_width": 2}):
            with pytest.raises(ValueError, match="grammar"):
                engine.submit("x", grammar=form, **options)
        with pytest.raises(ValueError, match="min_tokens"):
            Sampling(grammar=form, min_tokens=3)
        with pytest.raises(TypeError, match="grammar"):
            engine.submit("x", grammar="a+")
        assert not engine.num_unfinished


def test_end_comes_only_after_the_fewest_tokens(model):
    with engine_of(model) as engine:
        options = {"max_tokens": 60, "temperature": 1.0, "logit_bias": {256: 12}, "seed": 3}
        assert len(engine.generate("a", **options).tokens) < 4
        assert len(engine.generate("a", min_tokens=17, **options).tokens) == 18
