"""Anthropic's own client, unmodified, against ``kvpool serve``."""

import asyncio
import json
from unittest.mock import Mock

import pytest
from mlx_models import on_cpu
from test_serving_endings import ITSELF, completion

from kvpool.adapters.mlx_lm import Engine, tiny
from kvpool.serving import app
from kvpool.serving.messages import MessageAnswer
from kvpool.serving.requests import ChatRequest
from kvpool.serving.runner import Run
from kvpool.serving.speech import CLOSES, NAMED, OPENS, Manner

OPTIONS = ("--num-blocks", "400", "--kv-block-size", "8", "--api-key", "mine")  # of the server
SYSTEM = [{"type": "text", "text": "Answer in slots.", "cache_control": {"type": "ephemeral"}}]
ASKED = [{"role": "user", "content": "Where is token 7?"}]
BODY = {"model": "tiny", "max_tokens": 24, "system": SYSTEM, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def say():
    """What the engine answers in a conversation with this system prompt."""
    with on_cpu():
        model, tokenizer = tiny.make()
        with Engine(model, 400, block_size=8, tokenizer=tokenizer) as engine:
            system = {"role": "system", "content": SYSTEM[0]["text"]}
            yield lambda turns, **options: engine.generate([system, *turns], max_tokens=24, **options)


def test_stream_tells_the_same_piece_by_piece(messenger, say):
    with messenger.messages.stream(messages=ASKED, **BODY) as stream:
        pieces = list(stream.text_stream)
        message = stream.get_final_message()
    due = say(ASKED)
    assert "".join(pieces) == due.text == message.content[0].text and len(pieces) > 3
    assert message.stop_reason == {"eos": "end_turn", "length": "max_tokens"}[due.samples[0].finish_reason]
    assert message.usage.output_tokens == len(due.tokens)


def test_stop_sequence_that_came_is_named(messenger, say):
    text = say(ASKED).text
    stops = ["never", text[6:8], text[9:]]
    answer = messenger.messages.create(messages=ASKED, stop_sequences=stops, **BODY)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", text[6:8])
    assert answer.content[0].text == text[: text.index(text[6:8])]


def test_runner_of_tools_goes_on_without_a_thread(messenger):
    """It asks for one, of which the server keeps nothing, and then sends whole conversations."""
    runner = messenger.beta.messages.tool_runner(messages=ASKED, tools=[], **BODY | {"max_tokens": 5})
    assert [message.usage.output_tokens for message in runner] == [5]


CHAT = ChatRequest.of({"messages": ASKED})


def ended(text):
    """A run that is over, with this text."""
    run = Run(Mock(is_stopping=False), [[1]], False, {})
    run.put(None)
    run.put((0, completion(text, ITSELF)))
    return run


@pytest.mark.parametrize(
    ("arguments", "due"),
    [
        (r'{"a": "\ud800"}', {"a": "\ud800"}),
        ('{"a": 1e999}', {}),
        ('{"a": "cut', {}),
        ("[1]", {}),
        ('{"a":' + "[" * 200_000 + "]" * 200_000 + "}", {}),
    ],
    ids=lambda one: str(one)[:20],
)
def test_call_is_an_object_of_json_whatever_the_model_has_written(arguments, due):
    run = ended(OPENS + "f" + NAMED + arguments + CLOSES)
    response = asyncio.run(app._whole(run, MessageAnswer("tiny", CHAT, 3, Manner(by_grammar=True))))
    (block,) = json.loads(response.body)["content"]
    assert response.status_code == 200 and block["name"] == "f" and block["input"] == due


def test_answer_that_cannot_be_told_does_not_blame_the_client(monkeypatch):
    monkeypatch.setattr(MessageAnswer, "whole", lambda self, completions: json.loads("{"))
    with pytest.raises(json.JSONDecodeError):  # not `Refused`
        asyncio.run(app._whole(ended("a"), MessageAnswer("tiny", CHAT, 3, Manner())))


def wants(schema):
    return {"extra_body": {"output_config": {"format": {"type": "json_schema", "schema": schema}}}}


def called(*inputs):
    calls = [{"type": "tool_use", "id": f"{i}", "name": "f", "input": one} for i, one in enumerate(inputs)]
    return {"role": "assistant", "content": calls}


FORCED = {"tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"}}


@pytest.mark.parametrize(
    ("error", "field", "body"),
    [
        ("NotFoundError", "model", {"model": "messenger"}),
        ("BadRequestError", "max_tokens", {"max_tokens": 0}),
        ("BadRequestError", "temperature", {"extra_body": {"temperature": 1.5}}),
        ("BadRequestError", "tools", {"tools": [{"name": "a b", "input_schema": {"type": "object"}}]}),
        ("BadRequestError", "tools: 0: its schema", {"tools": [{"name": "f", "input_schema": {"type": "string"}}]}),
        ("BadRequestError", "tool_choice", {"tool_choice": {"type": "any"}}),
        ("BadRequestError", "tool_choice", {"tool_choice": {"type": "tool"}}),
        ("BadRequestError", r"output_config\.format: ", wants({"type": "no"})),
        ("BadRequestError", r"output_config\.format cannot", wants({}) | FORCED),
        ("BadRequestError", "leave no room", {"messages": [ASKED[0], called({"a": "\u00e9" * 700_000})]}),
        ("BadRequestError", "image", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
        ("BadRequestError", "compaction", {"extra_body": {"compaction": {"type": "summarize"}}}),
        ("BadRequestError", "messages", {"messages": []}),
    ],
    ids=str,
)
def test_refusal_has_the_form_and_names_the_field(messenger, error, field, body):
    import anthropic

    with pytest.raises(getattr(anthropic, error), match=field) as refusal:
        messenger.messages.create(**({"messages": ASKED} | BODY | body))
    assert refusal.value.body["type"] == "error"
