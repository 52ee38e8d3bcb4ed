"""OpenAI's own client, unmodified, against ``kvpool serve``. The answers are compared with those of the engine."""

import math

import pytest
from mlx_models import on_cpu

from kvpool.adapters.mlx_lm import Engine, tiny
from kvpool.adapters.mlx_lm.engine import TokenEvent
from kvpool.serving.answers import End, TextAnswer
from kvpool.serving.requests import CompletionRequest

OPTIONS = ("--num-blocks", "400", "--kv-block-size", "8")  # of the server
PROMPT = "The block table maps"
MESSAGES = [
    {"role": "system", "content": "Answer in slots."},
    {"role": "user", "content": [{"type": "text", "text": "Where is "}, {"type": "text", "text": "token 7?"}]},
]


@pytest.fixture(scope="module")
def engine():
    with on_cpu():
        model, tokenizer = tiny.make()
        with Engine(model, 400, block_size=8, tokenizer=tokenizer) as one:
            yield one


SETTINGS = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 7, "n": 3},
    {"temperature": 1.0, "seed": 7, "top_p": 0.8},
    {"temperature": 0, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"temperature": 0, "stop": ["5r", "never"]},
    {"temperature": 1.0, "seed": 1, "logit_bias": {"70": 5, "71": 5}},
]
MORE = [{"top_k": 5, "min_p": 0.01, "temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.3, "temperature": 0}]


def options_of(settings):
    """The same options for `Engine.submit`."""
    bias = {int(token): value for token, value in settings.get("logit_bias", {}).items()}
    return settings | ({"logit_bias": bias} if bias else {})


@pytest.mark.parametrize("settings", SETTINGS + MORE, ids=str)
def test_completion_says_what_the_engine_says_whole_and_in_pieces(client, engine, settings):
    with on_cpu():
        due = engine.generate(PROMPT, max_tokens=24, **options_of(settings)).samples
    extra = {"extra_body": settings} if settings in MORE else settings
    whole = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, **extra)
    reasons = {"eos": "stop", "stop": "stop", "length": "length"}
    expected = [(one.text, reasons[one.finish_reason]) for one in due]
    assert [(one.text, one.finish_reason) for one in whole.choices] == expected
    assert [one.index for one in whole.choices] == list(range(len(due)))
    assert whole.usage.completion_tokens == sum(len(one.tokens) for one in due)
    assert whole.usage.prompt_tokens == len(PROMPT)
    texts, ends, pieces = [""] * len(due), [None] * len(due), 0
    stream = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=24, stream=True, stream_options={"include_usage": True}, **extra
    )
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason
            pieces += 1
    assert list(zip(texts, ends, strict=True)) == expected
    assert pieces > 2 * len(due) or len(due[0].tokens) < 4
    assert chunk.usage.model_dump(exclude={"prompt_tokens_details"}) == whole.usage.model_dump(
        exclude={"prompt_tokens_details"}
    )


def test_chat_says_what_the_engine_says_of_its_template(client, engine):
    plain = [MESSAGES[0], {"role": "user", "content": "Where is token 7?"}]
    with on_cpu():
        due = engine.generate(plain, max_tokens=24)
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=24, temperature=0)
    assert answer.choices[0].message.content == due.text and answer.choices[0].message.role == "assistant"
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=24, temperature=0, stream=True
    )
    deltas = [choice.delta for chunk in stream for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == due.text and deltas[0].role == "assistant"


def test_prompts_may_be_tokens_and_many(client):
    texts = ["a", "The block", PROMPT]
    options = {"model": "tiny", "max_tokens": 6, "temperature": 0}
    alone = [client.completions.create(prompt=text, **options).choices[0].text for text in texts]
    many = client.completions.create(prompt=texts, n=2, **options)
    assert [one.text for one in many.choices] == [text for text in alone for _ in range(2)]
    assert many.usage.completion_tokens == 6 * 6 and many.usage.prompt_tokens == sum(map(len, texts))
    with on_cpu():
        encode = tiny.make()[1].encode
    tokens = [list(encode(text)) for text in texts]
    assert [one.text for one in client.completions.create(prompt=tokens, **options).choices] == alone
    assert client.completions.create(prompt=tokens[1], **options).choices[0].text == alone[1]


def test_stop_token_ends_the_text_before_it(client):
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 9, "temperature": 0, "logit_bias": {"70": 100}}
    (letter,) = set(client.completions.create(**body).choices[0].text)
    assert client.completions.create(**body, stop=letter * 3).choices[0].text == ""
    ended = client.completions.create(**body, extra_body={"stop_token_ids": [70]}).choices[0]
    assert (ended.text, ended.finish_reason, ended.stop_reason) == ("", "stop", 70)


@pytest.mark.parametrize("stream", [False, True])
def test_model_that_ends_its_answer_is_not_stopped_by_a_stop_token(client, stream):
    """Which is the same token, unless the client wants to hear no end of the model."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 9, "logit_bias": {"256": 100}, "stream": stream}
    for ignore_eos in (False, True):
        answer = client.completions.create(**body, extra_body={"stop_token_ids": [256], "ignore_eos": ignore_eos})
        (ended,) = [one.choices[0] for one in answer][-1:] if stream else answer.choices
        assert ended.finish_reason == "stop" and getattr(ended, "stop_reason", None) == (256 if ignore_eos else None)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_name_the_tokens_of_the_text(client, stream):
    body = {"model": "tiny", "max_tokens": 8, "temperature": 0, "logit_bias": {"256": -100}, "stream": stream}
    text = client.completions.create(prompt="abc", logprobs=3, **body)
    chat = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **body)
    found = [one.choices[0].logprobs for one in text] if stream else [text.choices[0].logprobs]
    tokens = [token for one in found for token in one.tokens]
    tops = [top for one in found for top in one.top_logprobs]
    offsets = [offset for one in found for offset in one.text_offset]
    values = [value for one in found for value in one.token_logprobs]
    assert len(tokens) == len(tops) == len(values) == 8
    assert offsets == [sum(map(len, tokens[:i])) for i in range(8)]
    for top, value in zip(tops, values, strict=True):
        assert len(top) <= 3 and max(top.values()) == pytest.approx(value, abs=1e-5)
    chunks = list(chat) if stream else [chat]
    found = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
    content = [one for logprobs in found for one in logprobs.content]
    assert len(content) == 8
    for one in content:
        assert bytes(one.bytes).decode(errors="replace") == one.token and len(one.top_logprobs) == 2
        assert one.top_logprobs[0].logprob == pytest.approx(one.logprob, abs=1e-5) and one.logprob <= 0
        assert math.exp(one.top_logprobs[0].logprob) + math.exp(one.top_logprobs[1].logprob) <= 1 + 1e-6


def test_likely_tokens_with_one_text_are_all_told():
    top = ((127, -0.1), (102, -9.0), (65, -9.2), (3, -9.5))
    event = TokenEvent("a", 0, 127, -0.1, "", None, top)
    body = CompletionRequest.of({"prompt": "a", "logprobs": 4})
    form = TextAnswer("m", body, 1, lambda token: "A" if token == 65 else "\ufffd")
    (told,) = form.delta(0, "", End(), [event])["logprobs"]["top_logprobs"]
    assert told == {"\ufffd": -0.1, "token_id:102": -9.0, "A": -9.2, "token_id:3": -9.5}


def test_more_tokens_than_the_model_takes_are_as_many_as_fit(client):
    answer = client.completions.create(model="tiny", prompt="x", max_tokens=10**9, logit_bias={"256": 100})
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("error", "param", "body"),
    [
        ("NotFoundError", "model", {"model": "gpt-4o-mini"}),
        ("BadRequestError", "temperature", {"temperature": 1000}),
        ("BadRequestError", "top_p", {"top_p": True}),
        ("BadRequestError", "best_of", {"best_of": 2, "n": 3}),
        ("BadRequestError", "best_of", {"best_of": 2, "stream": True}),
        ("BadRequestError", "min_tokens", {"extra_body": {"min_tokens": 5}}),
        ("BadRequestError", "top_k", {"extra_body": {"use_beam_search": True, "top_k": 5}}),
        ("BadRequestError", "stream", {"stream": True, "extra_body": {"use_beam_search": True}}),
        ("BadRequestError", "length_penalty", {"extra_body": {"length_penalty": 0.5}}),
        ("BadRequestError", "suffix", {"suffix": "x"}),
        ("BadRequestError", "prompt", {"prompt": ""}),
        ("BadRequestError", "prompt", {"prompt": [[1, 2], "a"]}),
        ("BadRequestError", "prompt", {"prompt": [1, -2]}),
        ("BadRequestError", None, {"prompt": [999]}),
        ("BadRequestError", None, {"logit_bias": {"999999": 5}}),
        ("BadRequestError", None, {"extra_body": {"stop_token_ids": [5, 257]}}),
        ("BadRequestError", None, {"prompt": "a" * 10000}),
    ],
    ids=str,
)
def test_refusal_names_the_field_and_changes_nothing(client, server, error, param, body):
    client.completions.create(model="tiny", prompt=PROMPT, max_tokens=2)
    before = server.idle_metrics()
    import openai

    with pytest.raises(getattr(openai, error)) as refusal:
        client.completions.create(**({"model": "tiny", "prompt": "x", "max_tokens": 4} | body))
    assert refusal.value.param == param, refusal.value
    assert refusal.value.code == "context_length_exceeded" or len(body.get("prompt", "")) < 10000
    after = server.idle_metrics()
    for name in ('kvpool_blocks{state="evictable"}', "kvpool_prefix_nodes", "kvpool_steps_total"):
        assert after[name] == before[name]
