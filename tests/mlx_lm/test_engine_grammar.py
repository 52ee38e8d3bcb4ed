"""Answers in the form of a grammar: each one fits, also in a batch, after a preemption, and among other samples.

All of it holds with tokenizers of three kinds.
"""

import json
import random
import re

import json_forms
import numpy as np
import pytest
import tokenized_models
from fuzz_seed import fresh_seed
from mlx_models import ended, ended_with_failures, on_cpu

from kvpool.adapters.mlx_lm import Engine, grammar
from kvpool.adapters.mlx_lm.grammar import GrammarFailed
from kvpool.adapters.mlx_lm.sampling import Sampling
from kvpool.serving.speech import grammar_of_calls

FREE = {"max_tokens": 80, "temperature": 1.0}


@pytest.fixture(scope="module", params=tokenized_models.KINDS)
def model(request):
    with on_cpu():
        yield tokenized_models.make(request.param)


only_merges = pytest.mark.parametrize("model", ["merges"], indirect=True)


def engine_of(model, num_blocks=400, **options):
    return Engine(model[0], num_blocks, block_size=4, tokenizer=model[1], seed=1, **options)


@pytest.fixture(scope="module")
def engine(model):
    with engine_of(model) as one:
        yield one
        assert one.num_unfinished == one.kv.pool.stats().used == 0


def program(model, draw, num_blocks=40):
    """Run requests with grammars among free ones. Return their samples that do not fit, and the preemptions."""
    forms, ids = [json_forms.form(draw) for _ in range(8)], {}
    with engine_of(model, num_blocks, max_running=8) as engine:
        for number, (schema, fits) in enumerate(forms):
            options = {"max_tokens": 140, "temperature": 1.0, "seed": 100 * number, "n": draw.randrange(1, 3)}
            ids[engine.submit(f"form {number}", grammar=engine.grammars.schema(schema), **options)] = fits
            engine.submit(f"free {number}", **FREE)
        done = ended(engine)
        samples = [(sample, done[id].error, fits) for id, fits in ids.items() for sample in done[id].samples]
        wrong = [(one.text, one.finish_reason, error) for one, error, fits in samples if not is_right(one, fits)]
        return wrong, engine.scheduler.stats().preemptions


def is_right(sample, fits):
    """Whether a sample fits its form as a whole, or is cut off at its last token."""
    if sample.finish_reason == "length":
        return len(sample.tokens) == 140
    try:
        return sample.finish_reason == "eos" and fits(json.loads(sample.text))
    except ValueError:
        return False


def test_answers_in_a_crowded_batch_fit_their_schemas(model):
    wrong, preemptions = program(model, random.Random(fresh_seed()))
    assert not wrong and preemptions, (wrong, preemptions)


def walk(follower, tokenizer, draw, most, goal=""):
    """Draw tokens from those that may come, mostly such that spell `goal`. Yield the tokens, and what may come next."""
    tokens, names = [], [tokenizer.decode([token]) for token in range(len(tokenizer))] if goal else ()
    while len(tokens) < most:
        offered = np.flatnonzero(np.unpackbits(follower.allowed(np.array(tokens, np.int32)), bitorder="little"))
        yield tokens, offered.tolist()
        if set(offered) & tokenizer.eos_token_ids and draw.random() < 0.5:
            return
        ready = [token for token in offered.tolist() if token not in tokenizer.eos_token_ids]
        if goal and draw.random() < 0.9:
            text = tokenizer.decode(tokens)
            rest = goal[max(size for size in range(len(goal)) if text.endswith(goal[:size])) :]
            ready = [one for one in ready if names[one].startswith(rest) or rest.startswith(names[one] or "?")] or ready
        if not ready:
            return
        tokens.append(draw.choice(ready))


def test_token_that_may_come_is_taken_and_the_end_comes_where_the_form_fits(model, engine):
    draw, ends = random.Random(fresh_seed()), model[1].eos_token_ids
    any_text = {"type": "string"}, lambda value: isinstance(value, str)
    for schema, fits in [any_text, (True, lambda value: True), *(json_forms.form(draw) for _ in range(8))]:
        follower, ended = engine.grammars.schema(schema).follow(), 0
        for tokens, offered in walk(follower, model[1], draw, 60):
            refused = [one for one in offered if one not in ends and not follower._matcher.validate_tokens([one])]
            assert not refused, (schema, tokens, refused)
            if ends & set(offered):
                ended += 1
                assert ends <= set(offered) and fits(json.loads(model[1].decode(tokens))), (schema, tokens)
        assert ended or len(tokens) > 50


def test_text_of_a_token_is_text(model, engine):
    ends, options = model[1].eos_token_ids, {"temperature": 1.0, "max_tokens": 80}
    names = sorted(model[1].get_added_vocab())
    for seed, text in enumerate([*names, f"a {names[0]}{names[-1]} b"]):
        forms = [
            (engine.grammars.schema({"enum": [text]}), json.dumps(text)),
            (engine.grammars.regex(re.escape(text)), text),
            (engine.grammars.lark(f"start: {json.dumps(text)}"), text),
        ]
        for form, due in forms:
            answer = engine.generate("x", grammar=form, seed=seed, **options)
            assert answer.text == due and answer.samples[0].finish_reason == "eos"
            assert len(ends & set(answer.tokens.tolist())) == 1


def test_token_that_a_grammar_names_comes_as_that_token(model, engine):
    added = {name: token for name, token in model[1].get_added_vocab().items() if token not in model[1].eos_token_ids}
    for name, token in added.items():
        form = engine.grammars.lark(f'start: "a" <[{token}]> "b"')
        tokens = engine.generate("x", grammar=form, temperature=1.0).tokens.tolist()
        assert tokens[1] == token and model[1].decode(tokens[:-1]) == f"a{name}b", name


def test_marks_of_forced_calls_are_tokens_where_the_tokenizer_has_them(model, engine):
    mark, schema = model[1].get_added_vocab().get("<tool_call>"), {"properties": {"a": {"enum": [1, "<tool_call>"]}}}
    closed = schema | {"additionalProperties": False}
    form = engine.grammars.lark(grammar_of_calls(engine.grammars.mark, {"f": closed}, 1))
    for seed in range(4):
        answer = engine.generate("x", grammar=form, seed=seed, temperature=1.0, max_tokens=200)
        call = answer.text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
        assert re.fullmatch('{"name": "f", "arguments": {("a":(1|"<tool_call>"))?}}', call)
        assert answer.tokens.tolist().count(mark) == (mark is not None) and (answer.tokens[0] == mark) == bool(mark)


def test_answer_begins_where_the_thought_is_seen_to_end(model, engine):
    mark, draw, ended = "</think>", random.Random(fresh_seed()), 0
    form = engine.grammars.regex("[xy]{2}", after=mark)
    for _ in range(20):
        for tokens, offered in walk(form.follow(), model[1], draw, 30, goal=mark):
            thought, _, said = model[1].decode(tokens).partition(mark)
            is_whole = re.fullmatch("[xy]{2}", said) is not None
            assert is_whole or re.fullmatch("[xy]?", said), (thought, said)
            assert is_whole == bool(model[1].eos_token_ids & set(offered)), (thought, said)
            ended += is_whole
    assert ended > 5


@only_merges
def test_grammar_that_names_a_token_is_tried_first(model):
    slow = {"type": "string", "allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(40)]}
    tokenizer, size = model[1], model[0].args.vocab_size
    trial = grammar.Trial(tokenizer, size)
    small = grammar.Trial(tokenizer, 4)  # a model with fewer tokens than its tokenizer
    small.check('start: <tool_call> "a"')
    small.close()
    for one in (f"<[{size - 1}]>", "<tool_call>", "<|im_start|>"):
        trial.check(f'start: {one} "a"')
    with pytest.raises(ValueError, match="too complex"):  # takes as long as a trial may
        trial.check(f"start: {one} %json {json.dumps(slow)}")
    trial.close()


def test_answer_is_that_of_the_request_alone(model, engine):
    form = {"type": "array", "items": {"enum": ["a", "bc", 1]}, "minItems": 3, "maxItems": 6}
    options = {"grammar": engine.grammars.schema(form), "max_tokens": 90, "temperature": 1.0}
    done = [engine.generate(f"prompt {seed}", seed=seed, **options) for seed in range(6)]
    alone, longest = [one.text for one in done], max(len(one.tokens) for one in done)
    most = len(engine.tokenizer.encode("prompt 0")) + longest
    with engine_of(model, 3 + most // 4, watermark=0) as engine:  # room for the longest answer, and for no two
        ids = [engine.submit(f"prompt {seed}", seed=seed, **options | {"max_tokens": longest}) for seed in range(6)]
        found = ended(engine)
        assert [found[id].text for id in ids] == alone and engine.scheduler.stats().preemptions


def test_step_that_failed_leaves_the_grammar_where_it_was(model, engine):
    options = {"grammar": engine.grammars.regex("(abc|xyz){8}"), "max_tokens": 60, "temperature": 1.0, "seed": 5}
    due = engine.generate("a", **options).text
    id = engine.submit("a", **options)
    assert ended_with_failures(engine, engine, "_run")[id].text == due


def test_grammar_that_is_too_complex_ends_its_request_alone(model, engine, monkeypatch):
    monkeypatch.setattr(grammar, "LIMITS", {"step_max_items": 60, "step_lexer_fuel": 5000, "max_lexer_states": 100})
    due = engine.generate("free", max_tokens=30).text
    heavy = engine.grammars.regex("(a|b)*a(a|b){12}")
    bias = dict.fromkeys(model[1].eos_token_ids, -100)
    ids = [engine.submit("x", max_tokens=200, grammar=heavy, temperature=1.0, n=2, logit_bias=bias)]
    ids.append(engine.submit("free", max_tokens=30))
    found = ended(engine)
    assert isinstance(found[ids[0]].error, GrammarFailed) and found[ids[0]].samples[0].finish_reason == "cancelled"
    assert all(one.text == engine.tokenizer.decode(one.tokens.tolist()) for one in found[ids[0]].samples)
    assert set("".join(one.text for one in found[ids[0]].samples)) == {"a", "b"}, "no token that it does not allow"
    assert found[ids[1]].error is None and found[ids[1]].text == due
    assert engine.kv.pool.stats().used == 0


@pytest.mark.parametrize("program", ["", "raise MemoryError"])
def test_trial_that_does_not_start_is_no_fault_of_the_grammar(model, monkeypatch, program):
    with on_cpu(), engine_of(model) as engine:
        engine.grammars.trial = trial = grammar.Trial(engine.tokenizer, engine.vocab_size)
        monkeypatch.setattr(grammar, "TRIAL", program)
        with pytest.raises(OSError, match="does not start"):
            engine.grammars.regex("[ab]")
        monkeypatch.undo()
        engine.grammars.regex("[ab]")
        trial.close()


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("schema", {"type": "nothing"}, "nothing"),
        ("schema", False, r"^\[grammar\] Unsatisfiable"),
        ("schema", {"$ref": "http://127.0.0.1:1/x"}, "not present"),
        ("schema", {"enum": ["x" * 2**16]}, "limit is 65536"),
        ("regex", "a(b", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("lark", "start: nobody", "nobody"),
    ],
)
def test_grammar_that_cannot_be_read_says_why(model, engine, kind, text, says):
    with pytest.raises(ValueError, match=says):
        getattr(engine.grammars, kind)(text)


def test_request_without_an_end_or_in_a_beam_has_no_grammar(model, engine):
    form = engine.grammars.regex("a+")
    for options in ({"eos": ()}, {"beam_width": 2}):
        with pytest.raises(ValueError, match="grammar"):
            engine.submit("x", grammar=form, **options)
    with pytest.raises(ValueError, match="min_tokens"):
        Sampling(grammar=form, min_tokens=3)
    with pytest.raises(TypeError, match="grammar"):
        engine.submit("x", grammar="a+")
    assert not engine.num_unfinished


def test_end_comes_only_after_the_fewest_tokens(model, engine):
    bias = dict.fromkeys(model[1].eos_token_ids, 40)
    options = {"max_tokens": 60, "temperature": 1.0, "logit_bias": bias, "seed": 3}
    assert len(engine.generate("a", **options).tokens) < 4
    assert len(engine.generate("a", min_tokens=17, **options).tokens) == 18
