"""Streams, listeners, stop strings, failures and misuse of the engine; the others of a batch never notice."""

import random
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import tokenized_models
from fuzz_seed import fresh_seed
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NaiveStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)
from mlx_models import computing_on_cpu, ended, on_cpu, solo_tokens
from small_tokenizers import tokenizer_of
from tokenizers import AddedToken

import kvpool
from benchmarks import tiny_families
from kvpool.adapters.mlx_lm import tiny
from kvpool.adapters.mlx_lm.chat import Transcript, speller
from kvpool.adapters.mlx_lm.engine import Engine
from kvpool.adapters.mlx_lm.shapes import max_positions
from kvpool.errors import RequestRejected, UnknownRequest

cpu = pytest.fixture(computing_on_cpu, autouse=True)
BLOCK = 4
PROMPT = "The block table maps"


@pytest.fixture(scope="module")
def text_model():
    return tiny.make()


@pytest.fixture(scope="module")
def answer(text_model):
    """Text of the stock model alone."""
    model, tokenizer = text_model
    return tokenizer.decode(solo_tokens(model, tokenizer.encode(PROMPT), 40))


@pytest.fixture
def make(text_model):
    """Make an engine, in which nothing may be left when the test ends."""
    made = []

    def one(**options):
        model, tokenizer = text_model
        made.append(Engine(model, 100, block_size=BLOCK, tokenizer=tokenizer, **options))
        return made[-1]

    with on_cpu():
        yield one
        for engine in made:
            engine.close()
            engine.scheduler.check()
            engine.kv.pool.check()
            assert engine.kv.pool.stats().used == 0


@pytest.fixture
def engine(make):
    return make()


# ---------------------------------------------------------------------------------------------- text and streams


def test_a_stream_that_is_left_cancels_its_request(engine):
    other = engine.submit("abc", max_tokens=5)
    for heard in (0, 1):
        stream = engine.stream(PROMPT, max_tokens=40)
        assert len(list(islice(stream, heard))) == heard
        assert engine.num_unfinished == 2
        stream.close()
        assert engine.num_unfinished == 1
    assert len(ended(engine)[other].tokens) == 5


def test_calls_have_their_own_answers_and_leave_those_that_nobody_waits_for(engine, answer):
    engine.submit("abc", max_tokens=2, id="same")
    left, read = (engine.stream("abc", max_tokens=2) for _ in range(2))
    for id in (None, "same"):
        assert engine.generate(PROMPT, max_tokens=40, id=id).text == answer
    left.close()
    assert len(list(read)) == 2
    assert [(one.id, len(one.tokens)) for one in engine.step()] == [("same", 2)] and not engine.num_unfinished


def test_an_answer_ends_where_the_tokenizer_says(engine):
    options = {"max_tokens": 60, "logit_bias": {256: 1000.0}}  # whatever the model says
    (sample,) = engine.generate("Hello", min_tokens=7, **options).samples
    assert sample.finish_reason == "eos" and sample.tokens.tolist().index(256) == 7 == len(sample.tokens) - 1
    assert sample.text == engine.tokenizer.decode(sample.tokens[:7].tolist()) != ""
    assert engine.generate("Hello", eos=(), **options).tokens.tolist() == [256] * 60


def test_a_stop_string_ends_one_sample_wherever_tokens_end(engine, answer):
    heard = []
    stop = answer[10:13]
    completion = engine.generate(PROMPT, max_tokens=40, stop=[stop, "zzz"], on_token=heard.append)
    sample = completion.samples[0]
    assert sample.text == answer[: answer.index(stop)] == "".join(event.text for event in heard)
    assert (sample.finish_reason, heard[-1].finish_reason) == ("stop", "stop")
    assert len(sample.tokens) == len(sample.logprobs) == len(heard) == answer.index(stop) + 3
    tokens = engine.generate(PROMPT, max_tokens=40, stop=[engine.tokenizer.encode(stop)])
    assert tokens.text == answer[: answer.index(stop)] + stop and tokens.samples[0].finish_reason == "stop"


def test_samples_come_to_their_stop_strings_one_by_one(engine):
    options = {"temperature": 1.0, "seed": 3, "max_tokens": 60, "stop": ["e", "8"]}
    together = engine.generate(PROMPT, n=4, **options)
    alone = [engine.generate(PROMPT, **(options | {"seed": 3 + i})) for i in range(4)]
    assert [one.text for one in together.samples] == [one.text for one in alone]
    assert [one.tokens.tolist() for one in together.samples] == [one.tokens.tolist() for one in alone]
    assert "stop" in {one.finish_reason for one in together.samples}


def test_samples_that_have_stopped_run_no_longer_than_the_last_other_one(engine):
    options = {"temperature": 1.0, "seed": 3, "max_tokens": 60, "n": 2}
    first, second = engine.generate(PROMPT, **options).samples
    end = next(token for token in second.tokens.tolist() if token not in first.tokens)
    stop = next(letter for letter in first.text if letter not in second.text)
    found = engine.generate(PROMPT, eos=end, stop=stop, **options).samples
    assert [one.finish_reason for one in found] == ["stop", "eos"]
    assert max(len(one.output.tokens) for one in found) == max(len(one.tokens) for one in found)


class Letters:
    """A detokenizer of one letter per token, or of several if the token is text."""

    def __init__(self):
        self.last_segment = ""

    def add_token(self, token):
        self.last_segment = token if isinstance(token, str) else chr(token)

    def finalize(self):
        self.last_segment = ""


def test_text_in_pieces_shows_all_that_begins_no_stop_string():
    draw = random.Random(fresh_seed())
    for _ in range(2000):
        stops = ["".join(draw.choices("ab", k=draw.randint(1, 6))) for _ in range(draw.randint(1, 4))]
        transcript, seen = Transcript(Letters(), stops), ""
        while len(seen) < 20 and not transcript.is_stopped:
            piece = "".join(draw.choices("abc", weights=(6, 6, 1), k=draw.randint(0, 4)))
            transcript.add(piece)
            seen += piece
            ends = [at for at in range(len(seen)) for stop in stops if seen[at : at + len(stop)] == stop]
            begins = [at for at in range(len(seen)) for stop in stops if stop[: len(seen) - at] == seen[at:]]
            assert transcript.is_stopped == bool(ends)
            assert transcript.text == seen[: min(ends or begins, default=len(seen))], (stops, seen)


def test_stop_strings_are_compared_with_new_text_only():
    compared = 0

    class Counted(str):
        def startswith(self, *where):
            nonlocal compared
            compared += 1
            return super().startswith(*where)

    for text in ("a" * 900, "z" * 900, ("z" * 60 + "a") * 15):
        transcript, compared = Transcript(Letters(), [Counted("z" * 119 + str(i)) for i in range(8)]), 0
        for letter in text:
            transcript.add(letter)
        assert compared <= 8 * 2 * len(text)


@pytest.mark.parametrize("kind", tokenized_models.KINDS)
def test_bytes_of_tokens_are_joined_to_their_text(kind):
    model, tokenizer = tokenized_models.make(kind)
    spell, draw = speller(tokenizer), random.Random(fresh_seed())
    parts = [*tokenizer.get_added_vocab(), *"a \u00e9\u6f22\U0001f642\n\x00<[\u2192", "weather", '"name": "']
    for _ in range(200):
        text = "".join(draw.choices(parts, k=draw.randint(1, 9)))
        assert b"".join(map(spell, tokenizer.encode(text))) == text.encode()
    spelled = [spell(token) for token in range(len(tokenizer))]
    assert {bytes([byte]) for byte in range(256)} <= set(spelled) and all(spelled)
    assert spell(model.args.vocab_size - 1) == b"" or kind == "bytes"


@pytest.mark.parametrize("kind", ["byte pairs", "pieces"])
def test_bytes_of_added_tokens_are_what_the_decoder_makes_of_them(kind):
    """Gemma has runs of spaces as added tokens, whose names have the sign for a space."""
    tokenizer = tokenizer_of(kind)
    tokenizer._tokenizer.add_tokens(
        [AddedToken(name, normalized=False) for name in ("\u2581\u2581", "a\u2581b", "\u00e9", "<a>")]
    )
    spell, some = speller(tokenizer), tokenizer.encode("the", add_special_tokens=False)
    for name, token in tokenizer.get_added_vocab().items():
        joined = b"".join(map(spell, [*some, token, *some]))
        assert joined.decode(errors="replace") == tokenizer.decode([*some, token, *some]), name


def test_bytes_of_tokens_of_a_tokenizer_without_a_decoder_are_those_of_their_text():
    class Slow:
        names = ("\u00e9t", "<0xC3>", "<0xA9>", None)

        def get_added_vocab(self):
            return {"<s>": 4}

        def convert_ids_to_tokens(self, token):
            return self.names[token]

        def decode(self, tokens):
            return self.names[tokens[0]]

    assert [*map(speller(Slow()), range(5))] == ["\u00e9t".encode(), b"\xc3", b"\xa9", b"", b"<s>"]


@pytest.mark.parametrize("kind", tokenized_models.KINDS)
def test_character_that_is_cut_off_is_not_made_whole(kind):
    model, tokenizer = tokenized_models.make(kind)
    spell, word = speller(tokenizer), "\u00e9\u6f22\U0001f642\u00e9"
    with Engine(model, 64, block_size=BLOCK, tokenizer=tokenizer, seed=1) as engine:
        options = {"grammar": engine.grammars.regex(word), "temperature": 1.0, "seed": 5}
        many = len(engine.generate("a", max_tokens=40, **options).tokens)
        for most in range(1, many):
            shown, came = [], []
            cut = engine.generate("a", max_tokens=most, on_token=shown.append, **options)
            engine.submit("a", id="gone", max_tokens=40, on_token=came.append, **options)
            while len(came) < most:
                engine.step()
            for one in (cut, engine.cancel("gone")):
                whole = b"".join(map(spell, one.tokens.tolist()[:most])).decode(errors="ignore")
                assert one.text.rstrip("\ufffd") == whole and word.startswith(whole)
            assert "".join(event.text for event in shown) == cut.text


# ----------------------------------------------------------------------------------------------------- failures


def test_a_listener_that_raises_ends_its_own_request_only(engine, answer):
    class Broken(Exception):
        pass

    def listener(event):
        if len(heard) == 3:
            raise Broken
        heard.append(event)

    heard = []
    broken = engine.submit(PROMPT, max_tokens=40, on_token=listener)
    other = engine.submit(PROMPT, max_tokens=40)
    done = ended(engine)
    assert isinstance(done[broken].error, Broken) and done[broken].samples[0].finish_reason == "cancelled"
    assert len(heard) == 3 and done[other].text == answer and done[other].error is None
    heard.clear()
    with pytest.raises(Broken):
        engine.generate(PROMPT, max_tokens=40, on_token=listener)
    assert engine.num_unfinished == 0


def test_requests_that_end_in_a_step_that_a_listener_interrupts_are_returned_by_the_next(engine):
    def interrupted(event):
        raise KeyboardInterrupt

    ids = [engine.submit(PROMPT, max_tokens=1, on_token=listener) for listener in (interrupted, None)]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.num_unfinished == 2
    assert [(one.id, len(one.tokens)) for one in engine.step()] == [(ids[0], 1), (ids[1], 1)]


def test_call_whose_request_is_cancelled_returns(engine, answer):
    def listener(event):
        heard.append(event)
        if len(heard) == 3:
            engine.cancel(event.id)

    heard = []
    assert engine.generate(PROMPT, max_tokens=40, on_token=listener).text == answer[:3]
    stream = engine.stream(PROMPT, max_tokens=40)
    engine.cancel(next(stream).id)
    assert not list(stream) and engine.num_unfinished == 0


def test_a_listener_may_submit_and_cancel_but_not_step_or_resize(engine, answer):
    ids, heard = [], []

    def listener(event):
        heard.append(event)
        if len(heard) == 2:
            ids.append(engine.submit("abc", max_tokens=4))
            cut = engine.cancel(victim)  # before its listener hears of its token
            assert cut.text == engine.tokenizer.decode(cut.tokens.tolist()) != ""
            with pytest.raises(RuntimeError, match=r"\[step\] a listener cannot run the engine"):
                engine.step()
            with pytest.raises(RuntimeError, match=r"\[resize\] a listener cannot resize the engine"):
                engine.resize(90)

    first = engine.submit(PROMPT, max_tokens=40, on_token=listener)
    victim = engine.submit(PROMPT, max_tokens=40, on_token=lambda event: None)
    done = ended(engine)
    assert done.keys() == {first, ids[0]}
    assert done[first].text == answer and len(done[ids[0]].tokens) == 4


def test_request_with_the_id_of_a_cancelled_one_hears_its_own_tokens_only(engine):
    """The second sample of the cancelled one has a token in the same step."""
    heard, how = [], {"max_tokens": 4, "id": "same", "eos": ()}

    def listener(event):
        engine.cancel("same")
        engine.submit("abc", on_token=heard.append, **how)

    engine.submit(PROMPT, n=2, temperature=1.0, seed=1, on_token=listener, **how)
    done = ended(engine)
    assert [event.token for event in heard] == done["same"].tokens.tolist() and len(heard) == 4


def test_request_that_has_ended_gives_its_id_to_another_at_its_last_token(engine):
    done = []

    def listener(event):
        if event.finish_reason is not None:
            assert "same" not in engine
            with pytest.raises(UnknownRequest):
                engine.cancel("same")
            engine.submit("abc", max_tokens=4, id="same", eos=())

    engine.submit(PROMPT, max_tokens=2, id="same", eos=(), on_token=listener)
    while engine.num_unfinished:
        done += engine.step()
    assert [(one.id, len(one.tokens), one.error) for one in done] == [("same", 2, None), ("same", 4, None)]


@pytest.mark.parametrize("kind", [SPMStreamingDetokenizer, BPEStreamingDetokenizer, NaiveStreamingDetokenizer])
def test_tokens_that_the_tokenizer_does_not_have_add_no_text(kind):
    tokenizer = TokenizerWrapper(tiny.byte_tokenizer(), kind)
    if kind is BPEStreamingDetokenizer:  # it has text for tokens behind its last one, and none in gaps
        tokenizer._detokenizer.tokenmap[200] = None
    bias = {200 if kind is BPEStreamingDetokenizer else 300: 100}
    model = tiny_families.build("llama", tiny.CONFIG | {"vocab_size": 320})
    tiny.randomize(model)
    with Engine(model, 100, block_size=BLOCK, tokenizer=tokenizer) as engine:
        due = engine.generate("ab", max_tokens=9)
        ids = [engine.submit("ab", max_tokens=3, logit_bias=bias, stop=stop) for stop in ((), "never")]
        other = engine.submit("ab", max_tokens=9)
        done = ended(engine)
        for id in ids:
            assert done[id].tokens.tolist() == list(bias) * 3 and (done[id].text, done[id].error) == ("", None)
        assert done[other].text == due.text != ""


def test_text_that_cannot_be_made_ends_its_own_request_only(text_model):
    class Torn(SPMStreamingDetokenizer):
        def add_token(self, token):
            if token == 70:
                raise RuntimeError("torn")
            super().add_token(token)

    model, tokenizer = text_model
    with Engine(model, 100, block_size=BLOCK, tokenizer=TokenizerWrapper(tokenizer._tokenizer, Torn)) as engine:
        due = engine.generate("ab", max_tokens=1)
        torn = [engine.submit("a", max_tokens=1, n=n, logit_bias={70: 100}) for n in (1, 2)]
        other, later = engine.submit("ab", max_tokens=1), engine.submit("a", max_tokens=9, logit_bias={70: 100})
        done = {one.id: one for one in engine.step()}
        assert done.keys() == {*torn, other} and engine.num_unfinished == 1
        done[later] = engine.cancel(later)
        for id in (*torn, later):
            assert done[id].tokens.tolist() == [70] and done[id].text == ""
            assert isinstance(done[id].error, RuntimeError)
        assert done[other].text == due.text and done[other].error is None
        assert engine.num_unfinished == engine.kv.pool.stats().used == 0


def test_request_of_a_call_in_which_the_model_raises_is_taken_back_alone(engine, answer, monkeypatch):
    id = engine.submit(PROMPT, max_tokens=40)
    for _ in range(5):
        engine.step()
    before = engine.scheduler.tokens_of(id).tolist()
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(engine.kv.backend, "attend", lambda *arguments, **options: 1 / 0)
        engine.generate("abc")
    assert engine.num_unfinished == 1 and engine.scheduler.tokens_of(id).tolist() == before
    assert ended(engine)[id].text == answer


def test_listeners_hear_the_likeliest_tokens(engine):
    events = []
    engine.generate(PROMPT, max_tokens=9, on_token=events.append, top_logprobs=np.int8(3))
    engine.generate(PROMPT, max_tokens=9, on_token=events.append, top_logprobs=300)
    assert [len(event.top) for event in events] == [3] * 9 + [257] * 9
    for few, every in zip(events[:9], events[9:], strict=True):
        tokens = [token for token, _ in every.top]
        assert [token for token, _ in few.top] == tokens[:3] and len(set(tokens)) == 257
    for event in events:
        assert event.top[0] == (event.token, pytest.approx(event.logprob, abs=1e-5))
        assert sorted(event.top, key=lambda one: -one[1]) == list(event.top)
    assert sum(np.exp([logprob for _, logprob in events[-1].top])) == pytest.approx(1, abs=1e-4)


# ------------------------------------------------------------------------------------------------------- misuse


@pytest.mark.parametrize(
    ("prompt", "options", "error", "text"),
    [
        ("", {}, ValueError, "prompt is empty"),
        ([1, 257], {}, ValueError, r"the prompt has token 257, the model has tokens 0 \.\. 256"),
        ([1.5], {}, TypeError, "1.5"),
        ("a", {"max_tokens": 9000}, RequestRejected, "the model takes 8192"),
        ("a", {"max_tokens": 1000}, RequestRejected, "the pool has|a sequence has at most"),
        ("a", {"top_p": 0}, ValueError, "top_p is 0"),
        ("a", {"logit_bias": {257: 1}}, ValueError, r"logit_bias has token 257, the model has tokens 0 \.\. 256"),
        ("a", {"stop": ""}, ValueError, "a stop string is empty"),
        ("a", {"stop": 5}, TypeError, "stop"),
        ("a", {"beam_width": 2, "stop": "x"}, ValueError, "leave on_token, stop strings and options"),
        ("a", {"beam_width": 2, "on_token": print}, ValueError, "leave on_token, stop strings and options"),
        ("a", {"beam_width": 2, "temperature": 0.5}, ValueError, "leave on_token, stop strings and options"),
        ("a", {"beam_width": 2, "logit_bias": {5: 1}}, ValueError, "leave on_token, stop strings and options"),
        ("a", {"on_token": 5}, TypeError, "on_token must be callable"),
        ("a", {"heat": 1}, TypeError, "there is no option heat"),
        ("a", {"user": 1}, TypeError, "there is no option user"),
        ("a", {"id": "taken"}, ValueError, "the id is in use"),
        (kvpool.Request([1], user="hot"), {}, TypeError, "must be a Sampling or None"),
        (kvpool.Request([1]), {"n": 2}, TypeError, "has options of its own"),
        (kvpool.Request([1]), {"max_tokens": 256}, TypeError, "has options of its own"),
    ],
)
def test_wrong_requests_are_refused_and_nothing_is_lost(engine, answer, prompt, options, error, text):
    engine.submit(PROMPT, id="taken", max_tokens=40)
    engine.step()
    fingerprint = engine.kv.pool.fingerprint()
    with pytest.raises(error, match=text):
        engine.submit(prompt, **options)
    assert engine.kv.pool.fingerprint() == fingerprint
    assert ended(engine)["taken"].text == answer


def test_model_with_learned_positions_gives_no_more_tokens_than_it_has_of_them():
    model = tiny_families.build("gpt2", tiny_families.config_of("gpt2") | {"n_positions": 16})
    engine = Engine(model, 40, block_size=BLOCK)
    with pytest.raises(RequestRejected, match="the model takes 16"):
        engine.generate([1, 2, 3], max_tokens=15)
    assert len(engine.generate([1, 2, 3], max_tokens=14).tokens) == 14
    assert max_positions(SimpleNamespace(args=SimpleNamespace(text_config={"max_position_embeddings": 9}))) == 9


def test_batch_takes_no_single_text_and_every_prompt_ends_with_the_same_stops(engine, answer):
    with pytest.raises(TypeError, match=r"\[batch\] prompts must be a list of prompts, not one text"):
        engine.batch(PROMPT)
    found = engine.batch([PROMPT, PROMPT], stop=iter([answer[2]]), max_tokens=40)
    assert [one.text for one in found] == [answer[: answer.index(answer[2])]] * 2


def test_request_that_is_unknown_is_not_cancelled_and_a_beam_not_streamed(engine):
    id = engine.submit("abc", max_tokens=2)
    ended(engine)
    for unknown in (id, "never", None):
        with pytest.raises(UnknownRequest, match=repr(unknown)):
            engine.cancel(unknown)
    with pytest.raises(ValueError, match="a beam cannot be streamed"):
        engine.stream(PROMPT, beam_width=2)


def test_an_engine_without_a_tokenizer_takes_tokens_only(text_model):
    engine = Engine(text_model[0], 40, block_size=BLOCK)
    for options in ({"prompt": "text"}, {"prompt": [1], "stop": "x"}):
        with pytest.raises(TypeError, match="needs a tokenizer"):
            engine.submit(**options)
    assert engine.generate([1, 2], max_tokens=3).text == ""


def test_engines_are_refused_that_could_not_work(text_model):
    for options in ({}, {"num_blocks": 20, "pool": kvpool.Pool(20, 4)}):
        with pytest.raises(TypeError, match="either num_blocks or pool"):
            Engine(text_model[0], **options)
    with pytest.raises(TypeError, match="pad_to"):
        Engine(text_model[0], 20, pad_to=(4, 8))
    for options in ({"max_running": 0}, {"prefill_chunk": -1}, {"num_blocks": 0}, {"preempt": "nobody"}):
        with pytest.raises(ValueError):
            Engine(text_model[0], **({"num_blocks": 20} | options))


# ------------------------------------------------------------------------------------------- deadlines and tenants


def test_deadline_ends_requests_with_what_they_have_and_no_other(make, text_model):
    model, tokenizer = text_model
    now, events = [0.0], []
    engine = make(max_running=3, max_step_tokens=64, prefill_chunk=8, clock=lambda: now[0])
    alone = solo_tokens(model, tokenizer.encode(PROMPT), 40)
    engine.submit(PROMPT, id="free", max_tokens=40, eos=())
    engine.submit(PROMPT, id="runs", max_tokens=40, eos=(), deadline=5, on_token=events.append)
    for _ in range(12):
        engine.step()
    engine.submit(PROMPT * 8, id="reads", max_tokens=40, deadline=5)
    engine.submit(PROMPT, id="waits", max_tokens=40, deadline=5, n=2, temperature=1.0, seed=3)
    engine.step()
    now[0] = 5.0
    done = ended(engine)
    reasons = {id: {sample.finish_reason for sample in one.samples} for id, one in done.items()}
    assert reasons == {"free": {"length"}, **{id: {"deadline"} for id in ("runs", "reads", "waits")}}
    assert done["free"].tokens.tolist() == alone
    cut = done["runs"].tokens.tolist()
    assert 5 < len(cut) < 40 and cut == alone[: len(cut)]
    assert done["runs"].text == "".join(event.text for event in events)
    assert events[-1].finish_reason == "deadline" and len(events) == len(cut)
    assert [len(done[id].samples) for id in ("reads", "waits")] == [1, 2]
    assert not any(len(sample.tokens) for id in ("reads", "waits") for sample in done[id].samples)
    with pytest.raises(RequestRejected, match="deadline has passed"):
        engine.submit(PROMPT, deadline=4.0)


def test_events_tell_what_the_next_prompt_will_find_and_a_reset_at_once(make):
    told = []
    engine = make(on_events=told.extend)
    engine.generate(PROMPT, max_tokens=4)
    stored = [event for event in told if event[0] == "stored"]
    tokens = engine.tokenizer.encode(PROMPT)
    assert [list(event[3]) for event in stored[: len(tokens) // BLOCK]] == [
        tokens[at : at + BLOCK] for at in range(0, len(tokens) // BLOCK * BLOCK, BLOCK)
    ]
    engine.reset()
    assert told[-1] == ("cleared", None)


def test_listener_of_events_that_raises_ends_no_request(make, answer, caplog):
    def fail(events):
        raise OSError("the reader is gone")

    assert make(on_events=fail).generate(PROMPT, max_tokens=40).text == answer
    assert "on_events failed" in caplog.text


def steps_of_others(*before):
    """Steps that short requests need behind those of `before`, which have run for a while."""
    with Engine(tiny.make()[0], 600, max_running=16) as engine:
        for options in before:
            engine.submit([40] * 16, **options)
            for _ in range(3):
                engine.step()
        prompts = [[7 * number + place for place in range(16)] for number in range(12)]
        others, steps = {engine.submit(prompt, max_tokens=20) for prompt in prompts}, 0
        while others:
            others -= {one.id for one in engine.step()}
            steps += 1
            assert steps < 2000
    return steps


def test_others_need_as_many_steps_beside_a_long_request_with_a_seed():
    long = {"max_tokens": 1500, "seed": 3, "temperature": 1.0}
    assert steps_of_others(long) <= 1.2 * steps_of_others()
