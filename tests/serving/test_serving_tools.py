"""Tools, forms of answers and reasoning over HTTP: by the official clients, unmodified, against ``kvpool serve``.

The model has tokenizers of three kinds.
"""

import contextlib
import json
import os
import random
import resource
import signal
import threading
import time
from pathlib import Path

import json_forms
import pytest
import tokenized_models
from fuzz_seed import fresh_seed
from mlx_models import on_cpu
from server_process import Server

ASKED = [{"role": "user", "content": "How warm is it?"}]
CITY, DAYS = {"enum": ["Oslo", "Rom\u00e9"]}, {"type": "integer", "minimum": -99, "maximum": 99}
WEATHER = {"type": "object", "properties": {"city": CITY, "days": DAYS}} | {
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "How warm it is.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "clock-2.0"}},
]
OURS = [
    {"name": "weather", "description": "How warm it is.", "input_schema": WEATHER},
    {"name": "clock-2.0", "input_schema": {"type": "object", "additionalProperties": False}},
]
THINKS = """
from kvpool.adapters.mlx_lm import tiny

make = tiny.make

def thinking():
    model, tokenizer = make()
    for name, text in (("start", "<think>"), ("end", "</think>")):
        setattr(tokenizer, f"_think_{name}", text)
        setattr(tokenizer, f"_think_{name}_tokens", tuple(tokenizer.encode(text)))
    return model, tokenizer

tiny.make = thinking
"""


@pytest.fixture(scope="module", params=tokenized_models.KINDS)
def server(request):
    how = {"patch": THINKS} if request.param == "bytes" else {"model": tokenized_models.folder(request.param)}
    with Server("--num-blocks", "600", "--kv-block-size", "8", "--name", "tiny", **how) as one:
        one.kind = request.param
        yield one
        assert one.idle_metrics()['kvpool_blocks{state="used"}'] == 0


@pytest.fixture
def tokenizer(server):
    with on_cpu():
        return tokenized_models.make(server.kind)[1]


def on(*kinds):
    """Runs a test with these tokenizers only."""
    return pytest.mark.parametrize("server", kinds, indirect=True)


def is_call(name, arguments):
    """Whether a call is one of the tools, with arguments that it takes."""
    if name == "clock-2.0":
        return arguments == {}
    fits = isinstance(arguments, dict) and set(arguments) == {"city", "days"}
    return name == "weather" and fits and arguments["city"] in ("Oslo", "Rom\u00e9") and type(arguments["days"]) is int


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
def test_openai_client_holds_a_conversation_with_tools(client, choice):
    turns, options = list(ASKED), {"model": "tiny", "tools": TOOLS, "max_tokens": 1500}
    for seed in range(2):
        body = options | {"messages": turns, "tool_choice": choice, "seed": seed}
        whole = client.chat.completions.create(**body).choices[0]
        calls = [(one.function.name, one.function.arguments) for one in whole.message.tool_calls]
        assert all(is_call(name, json.loads(arguments)) for name, arguments in calls), calls
        assert whole.finish_reason in ("tool_calls", "length") and whole.message.content is None
        assert choice == "required" or [name for name, _ in calls] == ["weather"]
        parts, reason, ids = {}, None, set()
        for chunk in client.chat.completions.create(**body, stream=True):
            for call in chunk.choices[0].delta.tool_calls or ():
                name, arguments = parts.get(call.index, ("", ""))
                parts[call.index] = name + (call.function.name or ""), arguments + (call.function.arguments or "")
                ids |= {call.id} - {None}
            reason = chunk.choices[0].finish_reason or reason
            assert not chunk.choices[0].delta.content or reason == "length"
        assert [parts[index] for index in sorted(parts)] == calls and reason == whole.finish_reason
        assert len(ids) == len(calls) and sorted(parts) == list(range(len(calls)))
        turns += [whole.message.model_dump(exclude_none=True)]
        turns += [{"role": "tool", "tool_call_id": one.id, "content": "12"} for one in whole.message.tool_calls]
    free = client.chat.completions.create(messages=turns, **options | {"max_tokens": 8}, tool_choice="none")
    assert free.choices[0].message.tool_calls is None


def test_anthropic_client_holds_a_conversation_with_tools(messenger):
    turns, options = list(ASKED), {"model": "tiny", "tools": OURS, "max_tokens": 300}
    choice = {"type": "tool", "name": "weather"}
    for _ in range(2):
        with messenger.messages.stream(messages=turns, tool_choice=choice, **options) as stream:
            kinds = [event.type for event in stream]
            message = stream.get_final_message()
        assert message.stop_reason == "tool_use" and "input_json" in kinds
        (call,) = message.content
        assert call.type == "tool_use" and is_call(call.name, call.input)
        counted = messenger.messages.count_tokens(messages=turns, tools=OURS, model="tiny").input_tokens
        usage = message.usage
        assert counted == usage.input_tokens + usage.cache_read_input_tokens
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "12"}]}
        turns += [{"role": "assistant", "content": [call.model_dump(include={"type", "id", "name", "input"})]}]
        turns += [{"role": "user", "content": [result, {"type": "text", "text": "And then?"}]}]
    one = {"type": "any", "disable_parallel_tool_use": True}
    whole = messenger.messages.create(messages=turns, tool_choice=one, **options)
    assert [block.type for block in whole.content] == ["tool_use"] and whole.stop_reason == "tool_use"
    free = messenger.messages.create(messages=turns, **options | {"max_tokens": 5})
    assert free.stop_reason in ("max_tokens", "end_turn")


def test_answers_of_all_apis_fit_their_schemas(client, messenger):
    draw, judged = random.Random(fresh_seed()), 0
    for seed in range(6):
        schema, fits = json_forms.record(draw)
        wanted = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema, "strict": True}}
        body = {"model": "tiny", "max_tokens": 300, "seed": seed, "response_format": wanted}
        chat = client.chat.completions.create(messages=ASKED, n=2, **body)
        body["extra_body"] = {"response_format": body.pop("response_format")}
        text = client.completions.create(prompt="x", **body)
        config = {"format": {"type": "json_schema", "schema": schema}}
        message = messenger.messages.create(model="tiny", max_tokens=300, messages=ASKED, output_config=config)
        ended = [(one.message.content, one.finish_reason) for one in chat.choices]
        ended += [(one.text, one.finish_reason) for one in text.choices]
        ended += [(message.content[0].text, "length" if message.stop_reason == "max_tokens" else "stop")]
        for said, reason in ended:
            judged += reason == "stop"
            assert reason == "length" or fits(json.loads(said)), (schema, said)
    assert judged > 10


def test_arguments_of_calls_fit_the_schemas_of_drawn_tools(client):
    draw = random.Random(fresh_seed())
    for seed in range(4):
        forms = {f"tool{i}": json_forms.record(draw) for i in range(3)}
        named = [{"name": name, "parameters": schema} for name, (schema, _) in forms.items()]
        tools = [{"type": "function", "function": one} for one in named]
        body = {"model": "tiny", "messages": ASKED, "max_tokens": 400, "seed": seed, "tools": tools}
        answer = client.chat.completions.create(**body, tool_choice="required", parallel_tool_calls=False).choices[0]
        assert answer.finish_reason == "tool_calls", answer
        (call,) = answer.message.tool_calls
        assert forms[call.function.name][1](json.loads(call.function.arguments)), (call, tools)


def test_answer_is_a_form_or_calls_if_both_are_wanted(client, tokenizer):
    body = {"model": "tiny", "messages": ASKED, "max_tokens": 400, "tools": TOOLS[:1]}
    body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [1, 2]}}}
    opens = [str(token) for token in range(len(tokenizer)) if tokenizer.decode([token]).startswith("<")]
    for bias, due in ((100, {"calls"}), (-100, {"1", "2"})):
        found = set()
        for seed in range(3):
            answer = client.chat.completions.create(seed=seed, logit_bias=dict.fromkeys(opens, bias), **body).choices[0]
            found.add("calls" if answer.message.tool_calls else answer.message.content)
            assert answer.finish_reason in ("tool_calls" if bias > 0 else "stop", "length")
        assert found and found <= due


@on("merges")
def test_form_and_calls_begin_behind_the_thought_that_the_prompt_opens(client, tokenizer):
    turns, schema = [{"role": "user", "content": "Think: how warm is it?"}], {"enum": ["</think>", "<tool_call>", 3]}
    likely, thoughts = dict.fromkeys(map(str, tokenizer.encode("ab</think>")), 15), []
    body = {"model": "tiny", "messages": turns, "max_tokens": 400, "logit_bias": likely}
    wanted = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    for seed in range(4):
        answer = client.chat.completions.create(seed=seed, response_format=wanted, **body).choices[0]
        assert answer.finish_reason == "stop" and json.loads(answer.message.content) in schema["enum"]
        choice = {"tools": TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False}
        called = client.chat.completions.create(seed=seed, **choice, **body).choices[0]
        (call,) = called.message.tool_calls
        assert is_call("weather", json.loads(call.function.arguments)) and called.finish_reason == "tool_calls"
        assert not called.message.content
        thoughts += [getattr(one.message, "reasoning_content", "") for one in (answer, called)]
    assert any(thoughts) and not any("</think>" in one for one in thoughts)


@on("bytes", "merges")
def test_reasoning_is_told_apart_in_both_apis(client, messenger, tokenizer):
    form = {"type": "regex", "regex": "<think>\n[ab]{3,9}</think>\n\n[xy]{2,5}"}
    body = {"model": "tiny", "messages": ASKED, "max_tokens": 60, "seed": 3, "extra_body": {"response_format": form}}
    answer = client.chat.completions.create(**body)
    message = answer.choices[0].message
    thought, rest = f"<think>\n{message.reasoning_content}</think>", f"\n\n{message.content}"
    told, usage = answer.usage.completion_tokens_details.reasoning_tokens, answer.usage
    assert 1 < told <= len(thought) and 0 < usage.completion_tokens - told <= len(rest) + 1, told  # a byte each at most
    assert set(message.reasoning_content) <= set("ab") and set(message.content) <= set("xy") and message.content
    said = {"reasoning_content": "", "content": ""}
    for chunk in client.chat.completions.create(**body, stream=True):
        for name in said:
            said[name] += getattr(chunk.choices[0].delta, name, None) or ""
    assert said == {"reasoning_content": message.reasoning_content, "content": message.content}
    back = [*ASKED, message.model_dump(exclude_none=True), *ASKED]
    client.chat.completions.create(model="tiny", messages=back, max_tokens=2)
    thought = {"type": "thinking", "thinking": "a", "signature": ""}
    turns = [*ASKED, {"role": "assistant", "content": [thought, {"type": "text", "text": "b"}]}, *ASKED]
    options = {"model": "tiny", "max_tokens": 2048, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    assert messenger.messages.create(messages=turns, **options).type == "message"


@pytest.mark.parametrize("stream", [False, True])
def test_bytes_of_logprobs_are_joined_to_the_text(client, stream):
    form = {"type": "regex", "regex": "(\u00e9|\u6f22|\U0001f642)a[bc]{2}(\u00e9|\u6f22|\U0001f642)"}
    body = {"model": "tiny", "messages": ASKED, "logprobs": True, "top_logprobs": 2, "stream": stream}
    for seed in range(4):
        for stop in (None, "a"):
            how = {"seed": seed, "stop": stop, "extra_body": {"response_format": form}}
            answer = client.chat.completions.create(**body, **how)
            choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
            text = "".join([(one.delta if stream else one.message).content or "" for one in choices])
            tokens = [token for one in choices if one.logprobs for token in one.logprobs.content]
            joined = b"".join([bytes(token.bytes) for token in tokens]).decode()
            assert text == (joined if stop is None else joined[:1]) and len(joined) == (5 if stop is None else 2)
            assert all(token.top_logprobs[0].bytes for token in tokens)


@on("bytes")
def test_best_samples_are_those_with_the_highest_mean_logprob(client):
    body = {"model": "tiny", "prompt": "The block", "max_tokens": 12, "seed": 5, "logprobs": 0}
    body["logit_bias"] = {"256": -100}
    every = client.completions.create(n=6, **body).choices
    ranked = sorted(every, key=lambda one: -sum(one.logprobs.token_logprobs) / len(one.logprobs.token_logprobs))[:2]
    best = client.completions.create(n=2, best_of=6, **body)
    assert [one.text for one in best.choices] == [one.text for one in ranked] != [one.text for one in every[:2]]
    for one, due in zip(best.choices, ranked, strict=True):
        assert one.logprobs.token_logprobs == pytest.approx(due.logprobs.token_logprobs, abs=1e-4)
    assert best.usage.completion_tokens == 6 * 12 and [one.index for one in best.choices] == [0, 1]


@on("bytes")
@pytest.mark.parametrize("prompt", ["The block", [84, 72], ["a", "bc"]], ids=str)
def test_echo_says_the_prompt_first_whole_and_in_pieces(client, prompt):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 5, "temperature": 0, "n": 2}
    plain, echoed = (client.completions.create(**body, echo=echo).choices for echo in (False, True))
    texts = [""] * len(plain)
    for chunk in client.completions.create(**body, echo=True, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [one.text for one in echoed] == texts
    begun = [text.removesuffix(one.text) for text, one in zip(texts, plain, strict=True)]
    if not isinstance(prompt[0], int):
        assert begun == [one for one in ([prompt] if isinstance(prompt, str) else prompt) for _ in range(2)]
    assert len(begun[0]) == len(prompt if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt[0])


@on("bytes")
def test_beams_differ_and_one_of_width_one_is_greedy(client):
    body = {"model": "tiny", "prompt": "The block", "max_tokens": 6}
    beams = client.completions.create(**body, n=3, extra_body={"use_beam_search": True, "length_penalty": 0.5})
    assert len({one.text for one in beams.choices}) == 3
    greedy = client.completions.create(**body, temperature=0).choices[0].text
    assert client.completions.create(**body, extra_body={"use_beam_search": True}).choices[0].text == greedy


def test_form_that_becomes_too_complex_ends_its_request_alone(server, client, tokenizer):
    form = {"type": "grammar", "grammar": 'start: a{1,100000}\na: b{1,100000}\nb: "x" | "y" | ""'}
    bias = {str(token): -100 for token in tokenizer.eos_token_ids}
    body = {"messages": ASKED, "max_tokens": 50, "n": 4, "response_format": form, "logit_bias": bias}
    with client.chat.completions.create(model="tiny", messages=ASKED, max_tokens=300, stream=True) as other:
        status, answer = server.post("/v1/chat/completions", body)
        assert status == 500 and "GrammarFailed" in answer["error"]["message"]
        status, text = server.raw("/v1/chat/completions", body | {"stream": True})
        assert "GrammarFailed" in text and "[DONE]" not in text
        assert [chunk.choices[0].finish_reason for chunk in other][-1] in ("stop", "length")


SLOW = {"type": "string", "allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(40)]}


def child_of(server):
    """The process that reads grammars, by its id."""
    tasks = Path(f"/proc/{server.process.pid}/task").iterdir()
    return int("".join((task / "children").read_text() for task in tasks))


def wait_for_end(process):
    for _ in range(300):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":
            return
        time.sleep(0.05)
    raise AssertionError(f"process {process} is left")


def test_form_that_is_slow_to_read_is_refused_and_others_do_not_wait(server):
    body, answers = {"messages": ASKED, "max_tokens": 9}, []
    fine, slow = body | schema_form({"enum": [1, 2]}), body | schema_form(SLOW)
    assert server.post("/v1/chat/completions", fine)[0] == 200
    sender = threading.Thread(target=lambda: answers.append(server.post("/v1/chat/completions", slow)), daemon=True)
    sender.start()
    assert server.post("/v1/chat/completions", body)[0] == 200 and server.post("/v1/chat/completions", fine)[0] == 200
    sender.join(30)
    [(status, answer)] = answers
    assert status == 400 and answer["error"]["param"] == "response_format" and "complex" in answer["error"]["message"]
    assert server.post("/v1/chat/completions", body | schema_form({"enum": [3, 4]}))[0] == 200, "another process reads"


def test_process_that_reads_grammars_may_die_and_leaves_with_the_server():
    body = {"prompt": "a", "max_tokens": 3}
    with Server() as server:
        forms = [{"response_format": {"type": "regex", "regex": text}} for text in ("a|b", "c|d")]
        assert server.post("/v1/completions", body | forms[0])[0] == 200
        os.kill(child := child_of(server), signal.SIGKILL)
        wait_for_end(child)
        assert server.post("/v1/completions", body | forms[1])[0] == 200
        child = child_of(server)
        server.process.kill()
        wait_for_end(child)
        server.stop()


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs prlimit, which this system has not")
def test_form_that_no_process_can_be_started_to_read_is_refused_for_now():
    body, found = {"prompt": "a", "max_tokens": 3}, []
    with Server() as server:
        assert server.post("/v1/completions", body | {"response_format": {"type": "regex", "regex": "a|b"}})[0] == 200
        os.kill(child := child_of(server), signal.SIGKILL)
        wait_for_end(child)
        limits = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        data = json.dumps(body | {"response_format": {"type": "regex", "regex": "c|d"}})
        with contextlib.closing(server.connect()) as connection:
            for limit in (limits, (3, limits[1]), limits):
                resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, limit)
                path = "/v1/completions" if found else "/health"
                connection.request("POST" if found else "GET", path, data, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                found.append((answer.status, answer.getheader("Retry-After")))
                assert b"tokenized" not in answer.read()
        server.stop()
    assert found == [(200, None), (503, "1"), (200, None)]


def schema_form(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


REGEX = {"response_format": {"type": "regex", "regex": "("}}


def tool(parameters):
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("tools", {"tools": [*TOOLS, TOOLS[0]]}),
        ("tools", {"tools": tool({"properties": {"a": {"type": "no"}}}), "tool_choice": "required"}),
        ("tools", {"tools": tool({"type": "string"})}),
        ("tools", {"tools": tool({"type": ["object", "null"]})}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": "maybe"}),
        ("messages", {"messages": [{"role": "tool", "content": "12"}]}),
        ("response_format", schema_form({"type": "no"})),
        ("response_format", {"response_format": {"type": "regex", "regex": "(?=a)"}}),
        ("response_format", {"response_format": {"type": "regex", "regex": "a"}, "tools": TOOLS}),
        ("response_format", schema_form({"type": "no"}) | {"tools": TOOLS}),
        ("response_format", schema_form({"enum": [1]}) | {"tools": TOOLS, "tool_choice": "required"}),
        ("response_format", REGEX | {"tools": TOOLS, "tool_choice": "required"}),
        ("n", schema_form({"enum": [1]}) | {"n": 9}),
        ("min_tokens", {"response_format": {"type": "json_object"}, "min_tokens": 2}),
        ("ignore_eos", {"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}),
        ("tools", {"tools": TOOLS, "use_beam_search": True}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"chat_template": "x"}}),
    ],
    ids=str,
)
def test_refusal_names_the_field(server, param, body):
    status, answer = server.post("/v1/chat/completions", {"messages": ASKED, "max_tokens": 9} | body)
    assert status == 400 and answer["error"]["param"] == param, answer
    assert answer["error"]["message"].startswith(param), answer
