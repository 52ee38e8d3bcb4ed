"""Anthropic's own client, unmodified, against ``kvpool serve``."""

import anthropic
import pytest
from mlx_models import on_cpu
from server_process import Server

from kvpool.adapters.mlx_lm import Engine, tiny

SYSTEM = [{"type": "text", "text": "Answer in slots.", "cache_control": {"type": "ephemeral"}}]
ASKED = [{"role": "user", "content": "Where is token 7?"}]
BODY = {"model": "tiny", "max_tokens": 24, "system": SYSTEM, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def server():
    one = Server("--num-blocks", "400", "--kv-block-size", "8", "--api-key", "mine")
    yield one
    assert one.idle_metrics(Authorization="Bearer mine")['kvpool_blocks{state="used"}'] == 0
    assert one.stop()[0] == 0


@pytest.fixture(scope="module")
def client(server):
    return anthropic.Anthropic(base_url=server.facts["url"], api_key="mine", max_retries=0)


@pytest.fixture(scope="module")
def say():
    """What the engine answers in a conversation with this system prompt."""
    with on_cpu():
        model, tokenizer = tiny.make()
        with Engine(model, 400, block_size=8, tokenizer=tokenizer) as engine:
            system = {"role": "system", "content": SYSTEM[0]["text"]}
            yield lambda turns, **options: engine.generate([system, *turns], max_tokens=24, **options)


def test_conversation_goes_on_and_finds_what_was_said(client, say):
    turns, cached = list(ASKED), []
    for _ in range(3):
        answer = client.messages.create(messages=turns, **BODY)
        due = say(turns)
        assert [block.text for block in answer.content] == [due.text]
        assert answer.stop_reason == {"eos": "end_turn", "length": "max_tokens"}[due.samples[0].finish_reason]
        assert answer.usage.output_tokens == len(due.tokens)
        cached.append(answer.usage.cache_read_input_tokens)
        turns += [{"role": "assistant", "content": due.text or "-"}, {"role": "user", "content": "And then?"}]
    assert cached[0] == 0 and cached[1] < cached[2], cached


def test_stream_tells_the_same_piece_by_piece(client, say):
    with client.messages.stream(messages=ASKED, **BODY) as stream:
        pieces = list(stream.text_stream)
        message = stream.get_final_message()
    assert "".join(pieces) == say(ASKED).text == message.content[0].text and len(pieces) > 3
    assert message.stop_reason in ("end_turn", "max_tokens") and message.usage.output_tokens > 3


def test_stop_sequence_that_came_is_named(client, say):
    text = say(ASKED).text
    stops = ["never", text[6:8], text[9:]]
    answer = client.messages.create(messages=ASKED, stop_sequences=stops, **BODY)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", text[6:8])
    assert answer.content[0].text == text[: text.index(text[6:8])]


@pytest.mark.parametrize(
    ("error", "field", "body"),
    [
        (anthropic.NotFoundError, "model", {"model": "claude"}),
        (anthropic.BadRequestError, "max_tokens", {"max_tokens": 0}),
        (anthropic.BadRequestError, "temperature", {"extra_body": {"temperature": 1.5}}),
        (anthropic.BadRequestError, "tools", {"tools": [{"name": "a b", "input_schema": {"type": "object"}}]}),
        (anthropic.BadRequestError, "tool_choice", {"tool_choice": {"type": "any"}}),
        (anthropic.BadRequestError, "tool_choice", {"tool_choice": {"type": "tool"}}),
        (anthropic.BadRequestError, "image", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
        (anthropic.BadRequestError, "messages", {"messages": []}),
        (anthropic.BadRequestError, "prompt tokens", {"max_tokens": 8192}),
    ],
    ids=str,
)
def test_refusal_has_the_form_and_names_the_field(client, error, field, body):
    with pytest.raises(error, match=field) as refusal:
        client.messages.create(**({"messages": ASKED} | BODY | body))
    assert refusal.value.body["type"] == "error"


def test_stranger_is_refused(server):
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=server.facts["url"], api_key="other", max_retries=0).messages.create(
            messages=ASKED, **BODY
        )
