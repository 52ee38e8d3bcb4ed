"""Bodies as agents and chat programs send them, the official clients of `/v1/responses`, and what a stream shows.

The bodies in ``bodies`` are written after public sources and reports of these programs. They say which of their fields
are not obeyed.
"""

import contextlib
import copy
import json
import re
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest
from server_process import Server

from kvpool.serving.messages import MessagesRequest
from kvpool.serving.requests import ChatRequest, Refused, parse
from kvpool.serving.responses import ResponsesRequest

OPTIONS = ("--num-blocks", "800", "--kv-block-size", "8", "--name", "tiny", "--name", "other")  # of the server
BODIES = {path.stem: json.loads(path.read_text()) for path in sorted(Path(__file__).parent.glob("bodies/*.json"))}
FORMS = {"/v1/messages": MessagesRequest, "/v1/chat/completions": ChatRequest, "/v1/responses": ResponsesRequest}
ASKED = [{"role": "user", "content": "How warm is it?"}]
each_body = pytest.mark.parametrize("program", BODIES)


def sent(request):
    """Return path and body."""
    return request["path"].partition("?")[0], request["body"]


def form_of(program):
    return FORMS[sent(BODIES[program])[0]]


@each_body
def test_body_of_a_client_is_answered_and_found_in_the_cache(server, program):
    """A second time, all of its prompt but the last token is found, in whole blocks."""
    path, body, usages = BODIES[program]["path"], BODIES[program]["body"] | {"stream": False}, []
    limits = ("max_completion_tokens", "max_output_tokens", "max_tokens")
    body[next((name for name in limits if name in body), "max_output_tokens" if "input" in body else "max_tokens")] = 8
    for _ in range(2):
        status, headers, text = server.ask("POST", path, body)
        assert status == 200, text
        usages.append(json.loads(text)["usage"])
    usage, names = usages[1], ("cached_tokens", "cache_read_input_tokens")
    details = usage | usage.get("prompt_tokens_details", {}) | usage.get("input_tokens_details", {})
    (cached,) = [details[name] for name in names if name in details]
    prompt = usage.get("prompt_tokens") or usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    assert cached == (prompt - 1) // 8 * 8
    told = headers.get("x-ignored-fields", "").split(", ")
    assert [name for name in told if name and not name.startswith("tools:")] == BODIES[program]["ignored"]


@each_body
def test_field_of_a_client_is_obeyed_or_has_no_effect_or_is_named(program):
    form, body = form_of(program), BODIES[program]["body"]
    _, ignored = parse(form, json.dumps(body).encode())
    assert [name for name in ignored if not name.startswith("tools:")] == BODIES[program]["ignored"]
    others = [name for name in body if name not in form.model_fields and name not in ignored]
    assert others == BODIES[program]["no_effect"]
    if ignored:
        with pytest.raises(Refused, match="not supported") as refusal:
            parse(form, json.dumps(body).encode(), is_strict=True)
        assert refusal.value.param in ignored


WRONG = (None, True, -1, 1.5, 2**70, "", "x", [], {}, [None], [{}], [[]], {"type": "text"}, {"type": []}, {"a": [{}]})
SYSTEM = {"role": "system", "content": [{"type": "text", "text": "a"}]}
CHOICES = [{"type": kind, kind: {"name": "f"}} for kind in ("function", "custom")]
CHOICES += [{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": CHOICES[:1]}}]
MORE = [
    *(("chat/completions", {"messages": [SYSTEM, *ASKED], "tools": CHOICES[:1], "tool_choice": x}) for x in CHOICES),
    ("messages", {"max_tokens": 5, "system": SYSTEM["content"], "messages": [*ASKED, SYSTEM]}),
]


def places(value, *at):
    """Iterate over all places in a body."""
    for name in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield *at, name
        yield from places(value[name], *at, name)


@pytest.mark.parametrize(("path", "body"), [*((f"/v1/{to}", body) for to, body in MORE), *map(sent, BODIES.values())])
def test_body_with_one_wrong_value_is_read_or_refused(path, body):
    for *above, last in places(body):
        for wrong in (*WRONG, "left out"):
            changed = copy.deepcopy(body)
            at = reduce(getitem, above, changed)
            at[last] = wrong
            if wrong == "left out":
                del at[last]
            with contextlib.suppress(Refused):
                chat = parse(FORMS[path], json.dumps(changed).encode())[0].chat
                for name in ("conversation", "forms", "callable_tools", "template_options", "keep", "kept_messages"):
                    getattr(chat, name)
                chat.options((1,), None, 0.0)


def test_conversation_of_codex_is_one_turn_of_the_assistant_after_the_other():
    told = ResponsesRequest.of(BODIES["codex"]["body"] | {"tools": []}).chat.conversation
    roles = ["system", "system", "user", "assistant", "tool", "tool", "assistant", "tool", "assistant", "user"]
    assert [one["role"] for one in told] == roles
    turn = told[3]
    assert turn["reasoning_content"] == "The test is red." and not turn["content"]
    calls = [call["function"]["arguments"] for call in turn["tool_calls"]]
    assert calls == [{"command": ["ls"]}, {"arguments": '{"command":["ca'}], "the second one was cut off"
    assert told[6]["tool_calls"][0]["function"]["arguments"] == {"input": "*** Begin Patch\n*** End Patch"}


def test_billing_text_of_claude_code_is_not_in_the_prompt():
    told = MessagesRequest.of(BODIES["claude_code"]["body"] | {"tools": []}).chat.conversation
    assert told[0] == {"role": "system", "content": "You work in a terminal."} and told[-1]["role"] == "system"


TOOLS = [
    {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {"days": {"enum": [1, 2]}}}},
    {"type": "custom", "name": "note"},
]


@pytest.mark.parametrize("tool", [{"type": "function", "name": "weather"}, {"type": "custom", "name": "note"}], ids=str)
def test_official_client_of_responses_calls_tools_and_sends_the_results_back(client, tool):
    items, options = list(ASKED), {"model": "other", "tools": TOOLS, "tool_choice": tool, "max_output_tokens": 700}
    for _ in range(2):
        with client.responses.stream(input=items, **options) as stream:
            events = list(stream)
        answer = events[-1].response  # the client's own call for it takes whole answers only
        assert events[-1].type == f"response.{answer.status}"
        (call,) = answer.output
        kind = {"function": "function_call", "custom": "custom_tool_call"}[tool["type"]]
        assert (call.type, call.name, answer.model) == (kind, tool["name"], "other")
        said = call.arguments if kind == "function_call" else call.input
        deltas = [event.delta for event in events if event.type.endswith(".delta")]
        assert "".join(deltas) == said
        if answer.status == "completed" and kind == "function_call":
            assert json.loads(said).get("days", 1) in (1, 2)
        items.append(call.model_dump(exclude_none=True))
        items.append({"type": f"{kind}_output", "call_id": call.call_id, "output": "12"})
    cut = client.responses.create(input=items, **options | {"max_output_tokens": 5})  # no call is whole by then
    assert cut.status == "incomplete" and cut.usage.output_tokens == 5
    assert cut.incomplete_details.reason == "max_output_tokens"
    text = client.responses.create(input=items, **options | {"tool_choice": "auto", "max_output_tokens": 5})
    assert text.output_text or text.usage.output_tokens == 1  # the end
    assert text.status == "incomplete" or text.usage.output_tokens <= 5
    assert text.usage.input_tokens_details.cached_tokens > 0


def test_response_has_the_form_that_is_wanted(client):
    form = {"type": "json_schema", "name": "a", "schema": {"enum": [1, 2]}}
    answer = client.responses.create(model="tiny", input="x", text={"format": form}, instructions="be brief")
    assert json.loads(answer.output_text) in (1, 2) and answer.status == "completed"


@pytest.mark.parametrize(
    ("param", "body"),
    [
        (
            "input",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1:1/x"}]}]},
        ),
        ("input", {"input": [{"type": "item_reference", "id": "a"}]}),
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("background", {"background": True}),
        ("tool_choice", {"tool_choice": "required"}),
        ("text.format", {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "no"}}}}),
    ],
    ids=str,
)
def test_response_that_cannot_be_made_is_refused_with_the_field(server, param, body):
    status, answer = server.post("/v1/responses", {"input": "x"} | body)
    assert status == 400 and answer["error"]["param"] == param and answer["error"]["message"].startswith(param), answer


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_last_message_of_the_assistant_is_continued_as_one_prompt(server, path):
    """The answer is what the same prompt as text gets, and the template opens no new turn."""
    turns, begun = [{"role": "user", "content": "x"}], {"role": "assistant", "content": '{"a": '}
    body = {"messages": [*turns, begun], "max_tokens": 9, "temperature": 0}
    body |= {"continue_final_message": True} if "chat" in path else {}
    due = server.post("/v1/completions", {"prompt": '[user] x[assistant] {"a": ', "max_tokens": 9, "temperature": 0})
    status, answer = server.post(path, body)
    said = answer["choices"][0]["message"]["content"] if "chat" in path else answer["content"][0]["text"]
    assert (status, said) == (200, due[1]["choices"][0]["text"])


def test_prompt_is_scored_as_an_answer_is(server):
    """By its own logprobs: a greedy answer, sent back as a prompt, has those that it had."""
    body = {"prompt": "The block", "max_tokens": 12, "temperature": 0, "logprobs": 2, "logit_bias": {"256": -100}}
    answer = server.post("/v1/completions", body)[1]["choices"][0]
    tokens = [*b"The block"]
    scoring = body | {"prompt": "The block" + answer["text"], "echo": True, "max_tokens": 0}
    status, scored = server.post("/v1/completions", scoring)
    found = scored["choices"][0]
    assert status == 200 and found["text"] == "The block" + answer["text"] and scored["usage"]["completion_tokens"] == 0
    server.idle_metrics()
    count = scored["usage"]["prompt_tokens"]
    assert any(b"prompt=%d cached=" % count in line and b" generated=0 " in line for line in server.errors)
    told = found["logprobs"]
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    assert told["token_logprobs"][len(tokens) :] == pytest.approx(answer["logprobs"]["token_logprobs"], abs=1e-4)
    both = server.post("/v1/completions", body | {"echo": True})[1]["choices"][0]["logprobs"]
    assert both["tokens"] == told["tokens"]
    assert both["token_logprobs"][1:] == pytest.approx(told["token_logprobs"][1:], abs=1e-4)


def test_tokens_of_a_text_become_the_text_again(server):
    status, told = server.post("/tokenize", {"prompt": "a\u00e9"})
    assert status == 200 and told["count"] == len(told["tokens"]) == 3 and told["max_model_len"] == 8192
    assert server.post("/detokenize", {"tokens": told["tokens"]})[1] == {"prompt": "a\u00e9"}


def test_model_has_all_its_names(server, client):
    assert [one.id for one in client.models.list()] == ["tiny", "other"]
    assert client.models.retrieve("other").max_model_len == 8192
    assert server.ask("GET", "/v1/models/none")[0] == 404


@pytest.mark.parametrize(
    ("method", "path", "due"),
    [
        ("GET", "/v1/messages", (405, "POST")),
        ("OPTIONS", "/v1/responses", (405, "POST")),
        ("GET", "/v1/messages/x", (404, None)),
    ],
)
def test_wrong_path_or_method_is_told_in_the_form_of_its_api(server, method, path, due):
    status, headers, text = server.ask(method, path)
    assert (status, headers.get("allow")) == due and headers["x-request-id"] == headers["request-id"] != ""
    assert ("type" in json.loads(text)) == path.startswith("/v1/messages") and (status != 404 or path in text)


def test_request_id_comes_back_and_stands_in_the_log(server):
    mine = {"X-Request-Id": "mine-1"}
    _, headers, _ = server.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2}, **mine)
    assert headers["x-request-id"] == headers["request-id"] == "mine-1"
    assert server.ask("GET", "/health")[1]["x-request-id"].startswith("req_")
    server.idle_metrics()
    (line,) = [line.decode() for line in server.errors if b"id=mine-1" in line]
    for part in ("POST /v1/completions", "status=200", "prompt=1", "cached=0", "generated=2", "first=", "total="):
        assert part in line, line


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_stream_of_a_long_prompt_says_how_far_it_is_read(path):
    """By a comment, and in Anthropic's form an event, while nothing else can be sent."""
    often = "from kvpool.serving import app; app.PING_SECONDS = 0.02"
    body = {"max_tokens": 2, "stream": True}
    body |= {"input": "x" * 4000} if "responses" in path else {"messages": [{"role": "user", "content": "x" * 4000}]}
    with Server("--num-blocks", "600", "--chunk", "16", patch=often) as one:
        status, text = one.raw(path, body)
    comments = [line for line in text.splitlines() if line.startswith(":")]
    read = [int(line.split()[1]) for line in comments if "prompt tokens are read" in line]
    assert status == 200 and len(read) > 2 and read == sorted(read) and read[-1] > 0
    assert ("event: ping" in text) == (path == "/v1/messages")


def test_page_of_another_origin_may_ask_if_it_is_allowed():
    page, refused = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}, []
    with Server("--num-blocks", "40", "--allowed-origins", "https://chat.example,https://b.example") as one:
        for origin, more, why in (
            ("https://chat.example", {}, ""),
            ("https://evil.example", {}, "Disallowed CORS origin"),
            ("https://b.example", {"Access-Control-Request-Method": "BREW"}, "Disallowed CORS method"),
            ("https://b.example", {"Access-Control-Request-Private-Network": "true"}, "CORS private-network"),
        ):
            status, headers, text = one.ask("OPTIONS", "/v1/messages", **page | {"Origin": origin} | more)
            assert (status, why in text) == (400 if why else 200, True) and headers["x-request-id"].startswith("req_")
            assert ("evil" in origin) == (headers.get("access-control-allow-origin") != origin)
            refused += [f"{headers['request-id']} status=400", f"{why} by --allowed-origins: {origin}"] if why else []
        headers = one.ask("GET", "/health", Origin="https://b.example")[1]
        assert headers["access-control-allow-origin"] == "https://b.example"
    log = b"".join(one.errors).decode()
    assert len(refused) == 6 and all(part in log for part in refused), log


def test_options_of_the_server_are_the_defaults_of_requests(tmp_path):
    (tmp_path / "template").write_text("{{ messages[0].content }}{{ style }}{% if add_generation_prompt %}>{% endif %}")
    options = ["--temp", "0", "--chat-template", str(tmp_path / "template"), "--chat-template-args", '{"style": "!"}']
    with Server("--num-blocks", "40", "--log", "json", "--strict", "--no-page", *options) as one:
        plain = {"prompt": "hi!>", "max_tokens": 9, "temperature": 0}
        due = one.post("/v1/completions", plain)[1]["choices"][0]["text"]
        for more in ({}, {"chat_template_kwargs": {"style": "?"}}):
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9} | more
            answer = one.post("/v1/chat/completions", body)[1]
            assert (answer["choices"][0]["message"]["content"] == due) == (not more)
        assert one.post("/v1/completions", {"prompt": "a", "num_ctx": 1})[0] == 400 and one.get("/")[0] == 404
    told = [json.loads(line) for line in one.errors]
    assert told[0]["message"].startswith("kvpool serve: loading") and told[-1]["message"].endswith("0 blocks in use")
    assert "num_ctx: not supported by this server" in [line.get("error") for line in told]


def test_request_that_is_not_http_is_counted(server):
    with server.opened() as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 400"
    assert server.metrics()['kvpool_http_answers_total{path="invalid",status="400"}'] == 1


def test_statistics_have_the_names_of_vllm_too(server):
    server.post("/v1/completions", {"prompt": "a" * 40, "max_tokens": 5})
    _, kind, text = server.get("/metrics")
    assert kind.startswith("text/plain; version=") and text.count("# TYPE kvpool_blocks gauge") == 1
    found = server.idle_metrics()
    for theirs, ours in (
        ("generation_tokens_total", "kvpool_sampled_tokens_total"),
        ("num_preemptions_total", "kvpool_preemptions_total"),
        ("e2e_request_latency_seconds_count", "kvpool_request_seconds_count"),
        ("time_to_first_token_seconds_sum", "kvpool_time_to_first_token_seconds_sum"),
    ):
        assert found[f'vllm:{theirs}{{model_name="tiny"}}'] == found[ours]
    label = '{model_name="tiny"}'
    assert found[f"vllm:prompt_tokens_total{label}"] >= 40 and found[f"vllm:num_requests_running{label}"] == 0


def test_dashboard_shows_statistics_that_there_are(server):
    server.post("/v1/completions", {"prompt": "a", "max_tokens": 3})
    dashboard = (Path(__file__).parents[2] / "docs" / "grafana" / "kvpool-serve.json").read_text()
    shown = set(re.findall(r"\b(kvpool_\w+?)(?=\{|,)", dashboard))
    there = {name.partition("{")[0] for name in server.metrics()}
    assert len(shown) > 10 and {name for name in shown if "tenant" not in name} <= there
