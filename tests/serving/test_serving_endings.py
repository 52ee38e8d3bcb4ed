"""How answers end: what was cut off, by whatever, is never told as a whole call, thought or answer."""

import importlib
import json
import pkgutil
import random
import re
from types import SimpleNamespace

import mlx_lm.tool_parsers
import numpy as np
import pytest
from fuzz_seed import fresh_seed

from kvpool.adapters.mlx_lm.engine import Completion, Sample, TokenEvent
from kvpool.serving.answers import ChatAnswer
from kvpool.serving.messages import MessageAnswer
from kvpool.serving.requests import ChatRequest
from kvpool.serving.responses import ResponseAnswer, ResponsesRequest
from kvpool.serving.speech import Manner

ARGUMENTS = {"path": "/tmp/a", "content": "x } ]"}
SPOKEN = json.dumps(ARGUMENTS)
KEYED = "<{0}arg_key>path</{0}arg_key><{0}arg_value>/tmp/a</{0}arg_value>\n" + (
    "<{0}arg_key>content</{0}arg_key><{0}arg_value>x }} ]</{0}arg_value>"
)
GOOD = {  # of each parser of mlx-lm, what its models write for this call of `write`
    "function_gemma": "call:write{path:<escape>/tmp/a<escape>,content:<escape>x ]<escape>}",
    "gemma4": 'call:write{path:<|"|>/tmp/a<|"|>,content:<|"|>x } ]<|"|>}',
    "glm47": "write" + KEYED.format(""),
    "json_tools": f'\n{{"name": "write", "arguments": {SPOKEN}}}\n',
    "kimi_k2": f"<|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>{SPOKEN}<|tool_call_end|>",
    "kimi_k3": '<|open|>call tool="write" index="1"<|sep|><|open|>argument key="path" type="string"<|sep|>/tmp/a'
    '<|close|>argument<|sep|><|open|>argument key="content" type="string"<|sep|>x } ]<|close|>argument<|sep|>'
    "<|close|>call<|sep|>",
    "laguna": "write" + KEYED.format(""),
    "longcat": "write" + KEYED.format("longcat_"),
    "minicpm5": '"write"><param name="path">/tmp/a</param><param name="content">x } ]</param>',
    "minimax_m2": '<invoke name="write"><parameter name="path">/tmp/a</parameter>'
    '<parameter name="content">x } ]</parameter></invoke>',
    "mistral": f"write[ARGS]{SPOKEN}",
    "muse_spark": '<atem:invoke name="write"><atem:parameter name="path">/tmp/a</atem:parameter>'
    '<atem:parameter name="content">x } ]</atem:parameter></atem:invoke>',
    "pythonic": '[write(path="/tmp/a", content="x } ]")]',
    "qwen3_coder": "\n<function=write>\n<parameter=path>\n/tmp/a\n</parameter>\n"
    "<parameter=content>\nx } ]\n</parameter>\n</function>\n",
}
STRINGS = {"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "write", "parameters": STRINGS}}]
ASKED = {"messages": [{"role": "user", "content": "a"}], "stop": ["STOP"], "stop_token_ids": [7], "tools": TOOLS}
BODY = ChatRequest.of(ASKED)
CUTS = {  # what ends an answer: the engine's reason, its last token, its stop string
    "length": ("length", 5, None),
    "stop string": ("stop", 5, "STOP"),
    "stop token": ("eos", 7, None),
    "deadline": ("deadline", 5, None),
    "cancel": ("cancelled", 5, None),
}
ITSELF = ("eos", 9, None)
REASONS = {"length": "length", "deadline": "length", "cancel": "length", "stop string": "stop", "stop token": "stop"}


def completion(text, end):
    reason, token, stop = end
    output = SimpleNamespace(index=0, num_cached=0)
    return Completion("a", (Sample(np.array([token], np.int32), None, text, reason, output, stop),))


def pieces(text, end, draw):
    """The same as the events of a stream. What is not an event, the completion has."""
    cuts = sorted(draw.randrange(len(text) + 1) for _ in range(3))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    events = [TokenEvent("a", 0, 5, -1.0, part, None) for part in parts]
    if end[0] not in ("deadline", "cancelled"):
        events[-1] = TokenEvent("a", 0, end[1], -1.0, parts[-1], end[0], (), end[2])
    return events


def events_of(answer, text, end, draw):
    told = answer.opening(1) + [event for one in pieces(text, end, draw) for event in answer.told(0, one)]
    told += answer.told(0, completion(text, end)) + answer.ending([completion(text, end)])
    said = re.findall(r"^data: (\{.*)$", b"".join(told).decode(), re.M)
    return [json.loads(one) for one in said]


def chat(manner):
    return ChatAnswer("m", BODY, 1, str, spell=str.encode, manner=manner)


def whole_chat(manner, text, end, draw):
    (choice,) = chat(manner).whole([completion(text, end)])["choices"]
    message = choice["message"]
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", ())]
    return message["content"] or "", message.get("reasoning_content", ""), calls, choice["finish_reason"]


def streamed_chat(manner, text, end, draw):
    said, calls, reason = {"content": "", "reasoning_content": ""}, {}, None
    for event in events_of(chat(manner), text, end, draw):
        for choice in event["choices"]:
            reason, delta = choice["finish_reason"] or reason, choice["delta"]
            for name in said:
                said[name] += delta.get(name, "")
            for one in delta.get("tool_calls", ()):
                name, arguments = calls.get(one["index"], ("", ""))
                told = one["function"]
                calls[one["index"]] = name + told.get("name", ""), arguments + told["arguments"]
    return *said.values(), list(calls.values()), reason


def whole_message(manner, text, end, draw):
    message = MessageAnswer("m", BODY, 1, manner).whole([completion(text, end)])
    return told_by(message["content"], message)


def streamed_message(manner, text, end, draw):
    blocks, closing = [], {}
    for event in events_of(MessageAnswer("m", BODY, 1, manner), text, end, draw):
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"input": ""})
        elif event["type"] == "content_block_delta":
            name = {"input_json_delta": "input", "text_delta": "text"}.get(event["delta"]["type"], "thinking")
            blocks[-1][name] += event["delta"].get("partial_json", event["delta"].get(name))
        elif event["type"] == "message_delta":
            closing = event["delta"]
    return told_by(blocks, closing)


def told_by(blocks, closing):
    """What a message says, in the same form as a chat."""
    said = ["".join(block.get(kind, "") for block in blocks if block["type"] == kind) for kind in ("text", "thinking")]
    calls = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    calls = [(name, told if isinstance(told, str) else json.dumps(told)) for name, told in calls]
    named = {"max_tokens": "length", "stop_sequence": "stop", "end_turn": "stop", "tool_use": "tool_calls"}
    assert (closing["stop_reason"] == "stop_sequence") == (closing["stop_sequence"] is not None)
    return *said, calls, named[closing["stop_reason"]]


def response(manner):
    return ResponseAnswer("m", BODY, 1, manner, ResponsesRequest(input="a"))


def whole_response(manner, text, end, draw):
    return told_by_response(response(manner).whole([completion(text, end)]), end)


def streamed_response(manner, text, end, draw):
    """What the deltas say, which is what the last event has."""
    said = {}
    *events, last = events_of(response(manner), text, end, draw)
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        if event["type"].endswith(".delta"):
            said[event["output_index"]] = said.get(event["output_index"], "") + event["delta"]
    for index, item in enumerate(last["response"]["output"]):
        due = item.get("arguments") or "".join(part["text"] for part in item.get("content", ()))
        assert said.get(index, "") == due
    return told_by_response(last["response"], end)


def told_by_response(answer, end):
    """What a response says, in the same form as a chat. Where a stop string was, it says nothing of it."""
    said = {"message": "", "reasoning": ""}
    for item in answer["output"]:
        if item["type"] in said:
            said[item["type"]] += "".join(part["text"] for part in item["content"])
    calls = [(item["name"], item["arguments"]) for item in answer["output"] if item["type"] == "function_call"]
    is_whole = [item["status"] for item in answer["output"]].count("incomplete") == 0
    reason = {"completed": "tool_calls" if calls else "stop", "incomplete": "length"}[answer["status"]]
    assert is_whole or answer["status"] == "incomplete"
    if answer["status"] == "incomplete" and end[0] in ("stop", "eos"):
        reason = "stop"
    return *said.values(), calls, reason


FORMS = [whole_chat, streamed_chat, whole_message, streamed_message, whole_response, streamed_response]
each_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
each_cut = pytest.mark.parametrize("cut", CUTS)


def manner_of(parser):
    module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
    marks = module.tool_call_start, module.tool_call_end
    return Manner(call=marks, names={"write"}, parse=lambda text: module.parse_tool_call(text, TOOLS)), *marks


def test_every_parser_of_mlx_lm_is_here():
    assert set(GOOD) == {module.name for module in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)}


@each_form
@pytest.mark.parametrize("parser", GOOD)
def test_free_call_is_one_only_if_all_of_it_came(parser, form):
    manner, opens, closes = manner_of(parser)
    text, draw = opens + GOOD[parser] + closes, random.Random(fresh_seed())
    due = ARGUMENTS if parser != "function_gemma" else ARGUMENTS | {"content": "x ]"}
    content, _, ((name, arguments),), reason = form(manner, text, ITSELF, draw)
    assert (content, name, json.loads(arguments), reason) == ("", "write", due, "tool_calls")
    for cut, end in CUTS.items():
        for size in range(len(text)):
            assert form(manner, text[:size], end, draw) == (text[:size], "", [], REASONS[cut]), (cut, text[:size])
        if closes:
            content, _, calls, reason = form(manner, text + " b", end, draw)
            assert (content, len(calls), reason) == ("b", 1, "length" if REASONS[cut] == "length" else "tool_calls")


UNSPOKEN = '<tool_call>\n{"name": "write", "arguments": '
FORCED = UNSPOKEN + '{"path":"}","content":3}}\n</tool_call>'
CLOSED = {"path": "}", "content": 3}


@each_cut
@each_form
@pytest.mark.parametrize("before", ["", FORCED + "\n"], ids=["first", "second"])
def test_forced_call_that_is_cut_off_is_told_as_far_as_it_came(form, cut, before):
    manner, draw, spoken = Manner(by_grammar=True), random.Random(fresh_seed()), '{"path":"}","content":3}'
    _, _, [*first, (name, arguments)], reason = form(manner, before + FORCED, ITSELF, draw)
    assert (name, json.loads(arguments), reason, len(first)) == ("write", CLOSED, "tool_calls", len(before) > 0)
    for size in range(len(FORCED)):
        content, _, calls, reason = form(manner, before + FORCED[:size], CUTS[cut], draw)
        is_object = form in (whole_message, whole_response)  # or not told at all
        least = len(UNSPOKEN + spoken) if is_object else len(UNSPOKEN)
        assert calls[: len(first)] == first and len(calls) - len(first) == (size > least)
        assert reason == ("tool_calls" if first and not size and REASONS[cut] == "stop" else REASONS[cut]), size
        assert not content
        for name, arguments in calls[len(first) :]:
            is_whole = size > len(UNSPOKEN + spoken)
            assert name == "write" and arguments
            assert json.loads(arguments) == CLOSED if is_whole else spoken.startswith(arguments), arguments


@each_cut
@each_form
def test_thought_that_is_cut_off_is_no_answer(form, cut):
    manner, text, draw = Manner(("<think>", "</think>"), True), "a b</think>c", random.Random(fresh_seed())
    for size in range(len(text)):
        content, thought, calls, reason = form(manner, text[:size], CUTS[cut], draw)
        assert content == "" and not calls and reason == REASONS[cut] and text.startswith(thought) == (size <= 11)
    assert form(manner, text, CUTS[cut], draw) == ("c", "a b", [], REASONS[cut])


@each_cut
@each_form
def test_json_that_is_cut_off_says_so(form, cut):
    text, draw = '{"a": 12, "b": "<tool_call>"}', random.Random(fresh_seed())
    for manner in (Manner(), Manner(by_grammar=True)):
        for size in range(len(text)):
            assert form(manner, text[:size], CUTS[cut], draw) == (text[:size], "", [], REASONS[cut])
        assert form(manner, text, ITSELF, draw) == (text, "", [], "stop")
