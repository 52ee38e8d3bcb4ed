"""Hostile requests, drawn from a grammar that knows which of them are legal."""

import json

NAN, INF = float("nan"), float("inf")
WRONG = (
    *(True, False, -1, 2**70, -(2**70), 10**400, 1.5, -1e308, NAN, INF),
    *("", "x", "\0", [], [None], [[]], {}, {"a": 1}),
)
NULL = (None,)
#: field: (values that are served, values that are refused beside those of `WRONG`)
SAMPLING = {
    "max_tokens": ((1, 2, 5, -1), (0, 2**31, 1e30)),
    "temperature": ((0, 0.0, 1, 0.7, 100, 1e-300), (100.5, "1")),
    "top_p": ((1, 0.5, 1e-9), (0, 1.01)),
    "top_k": ((0, 1, 5, 256, 257, 10**6, 2**31 - 1, -1), (2**31, -2)),
    "min_p": ((0, 0.3, 1), (1.01,)),
    "seed": ((0, 7, 2**63 - 1, -1), (2**63, -2)),
    "n": ((1, 2, 4), (0, 65, 10**9)),
    "frequency_penalty": ((0, 2, -2, -1, 1.5), (2.01,)),
    "presence_penalty": ((0, 2, -2, -1, 1.5), (-2.01,)),
    "repetition_penalty": ((1, 0.1, 10, 1.5), (0, 11, 1e-300)),
    "logit_bias": (
        ({}, {"0": 5}, {"256": -100, "3": 100.0}),
        ({"257": 1}, {"999999": 5}, {str(2**40): 5}, {str(2**70): 5}, {"-5": 5}, {"3": NAN}, {"3": 101}, {"3": [1]}),
    ),
    "stop": (([], "", "e", ["a", "ab"], ["\u202e💥"]), (5, [1], [""], ["a"] * 9, [["a"]], "x" * 129, {"a": "b"})),
    "stop_token_ids": (([], [5, 6], [256]), ([-1], [257], [2**31 - 1], [2**31], ["a"], 5)),
    "stream": ((True, False), ("true", 1, 0)),
    "stream_options": (({}, {"include_usage": True}), ({"include_usage": 1}, "x")),
    "model": (("tiny",), ()),
    "cache_salt": (("a", "\u202e"), ("y" * 513,)),
    "retention_directives": (
        (
            [],
            [{"priority": 0}],
            [{"priority": 100, "start": 5, "end": 2, "duration": 1e-9}, {"priority": 1, "end": None}],
        ),
        (
            [{}],
            [{"priority": 101}],
            [{"priority": 1, "end": 0}],
            [{"priority": 1, "duration": 86401}],
            [{"priority": 1}] * 65,
        ),
    ),
    "priority": ((0, -1, 2**31 - 1, 1 - 2**31), (2**31, -(2**31), "1")),
    "timeout": ((3600, 86400.0), (0, 86400.5, "1")),
    "use_beam_search": ((False,), (1, "true")),
    "length_penalty": ((1, 1.0), (0.5, 33, -33, "1")),
    "xtc_probability": ((0, 0.5, 1), (1.01,)),
    "xtc_threshold": ((0, 0.1, 0.5), (0.51,)),
    "ignore_eos": ((True, False), (1, "true")),
    "min_tokens": ((0, 1), (6, 2**31)),
    "response_format": (
        ({"type": "text"},),
        (
            *({"type": "x"}, {"type": "json_schema"}, {"type": "regex"}, {"type": "regex", "regex": "a("}),
            *({"type": "grammar", "grammar": "start: nobody"}, {"type": "regex", "regex": "a" * 2**17}),
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "http://127.0.0.1:1/x"}}},
        ),
    ),
}
LEGAL_TOO = {  # values of WRONG that are legal in these fields
    "temperature": (1.5,),
    "stop": ("x", "\0"),
    "reasoning_effort": ("", "x", "\0"),
    "stream_options": ({"a": 1},),
    "chat_template_kwargs": ({"a": 1},),
    "cache_salt": ("x", "\0"),
    "timeout": (1.5,),
    "use_beam_search": (True,),
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TEXT = {
    "prompt": (
        ("a", "The block table", [1, 2, 3], ["a", "b"], [[1], [2, 3]], "\u202e💥é漢字", "x" * 3000),
        ("", [], [[]], [""], 5, ["a", [1]], [1, "a"], [999], [-1], [True], [1.5], {"a": 1}, "x" * 9000, ["a"] * 65),
    ),
    "logprobs": ((0, 1, 5), (21, -1, True, "1", 1.5)),
    "best_of": ((None,), (0, 65, "2")),
}
ONE = {"role": "user", "content": "hi"}
CHAT = {
    "messages": (
        (
            *([ONE], [{"role": "system", "content": "be"}, ONE], [ONE | {"content": [{"type": "text", "text": "a"}]}]),
            *([ONE | {"content": []}], [ONE | {"x": 1, "content": None}], [ONE, ONE | {"role": "assistant"}]),
            *([ONE | {"cache_control": one}, ONE] for one in (5, {}, {"ttl": []}, {"ttl": "1h"})),
        ),
        (
            *([], "hi", 5, {}, [5], [[]], [None], [{}], [{"role": "user"}], [{"content": "x"}]),
            *([ONE | {"role": "pope"}], [ONE | {"content": 5}], [ONE | {"content": [{}]}]),
            [ONE | {"content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x"}}]}],
            [ONE] * 4097,
            [ONE | {"content": "x" * 9000}],
        ),
    ),
    "logprobs": ((True, False), (1, "true", [])),
    "max_completion_tokens": ((1, 3, -1), (0, True, 2**31)),
    "tools": (
        ([], [TOOL], [{"function": {"name": "f"}}], [TOOL | {"type": "x"}]),
        ([TOOL, TOOL], [{"type": "function"}], [{"function": {"name": "a b"}}], [TOOL] * 129),
    ),
    "tool_choice": (("none", "auto"), ("required", "all", {"type": "function", "function": {"name": "g"}})),
    "parallel_tool_calls": ((True, False), (1, "true")),
    "chat_template_kwargs": (({}, {"enable_thinking": 1, "x": []}), ({"tokenize": False}, {"messages": []})),
    "reasoning_effort": (("low", "none"), ("y" * 65,)),
    "add_generation_prompt": ((True, False), (1, "true")),
    "continue_final_message": ((False,), (True, 1, "true")),
}
BLOCK, INPUT = {"type": "text", "text": "a"}, {"type": "input_text", "text": "a"}
THOUGHT = {"type": "thinking", "thinking": "a", "signature": ""}
USER_TOOL = {"name": "f", "input_schema": {"type": "object"}}
COUNT = {
    "messages": (
        (
            *([ONE], [ONE, ONE | {"role": "assistant"}], [ONE | {"content": [BLOCK, BLOCK | {"cache_control": None}]}]),
            *([ONE | {"role": "system"}], [ONE | {"content": []}]),
            *([ONE, {"role": "assistant", "content": [THOUGHT | {"cache_control": one}]}] for one in (5, {"ttl": []})),
        ),
        (
            *([], "hi", 5, {}, [5], [[]], [None], [{}], [{"role": "user"}], [{"content": "x"}], [ONE] * 4097),
            *([ONE | {"role": "pope"}], [ONE | {"content": [{}]}], [ONE | {"content": [{"type": "image"}]}]),
            [ONE | {"content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}],
        ),
    ),
    "system": (("", "x", "\0", [], [BLOCK], [BLOCK | {"x": 1}]), (5, {}, [5], [{"type": "text"}])),
    "tools": (([], [USER_TOOL]), ([{}], [USER_TOOL] * 2, [USER_TOOL] * 129, [USER_TOOL | {"name": ""}])),
    "tool_choice": (({"type": "none"}, {"type": "auto", "x": 1}), ("none", {"type": "any"}, {"type": "tool"})),
    "thinking": (({"type": "disabled"}, {"type": "enabled", "budget_tokens": 1}), ({"type": "x"}, "enabled")),
    "cache_control": (({}, {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}), ({"type": "x"}, {"ttl": "2h"})),
    "output_config": (({}, {"effort": "low"}, {"a": 1}), ({"format": {"type": "x"}}, {"effort": "x"}, "low")),
    "model": (("tiny",), ()),
}
MESSAGES = COUNT | {
    "max_tokens": ((1, 2, 5), (0, 2**31, 1e30)),
    "temperature": ((0, 0.0, 1, 0.7, 1e-300), (1.01, "1")),
    "top_p": SAMPLING["top_p"],
    "top_k": SAMPLING["top_k"],
    "stop_sequences": (([], ["e"], ["a", "ab"]), (5, "e", [1], [""], ["a"] * 9)),
    "stream": SAMPLING["stream"],
}
CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}
RESPONSES = {
    "input": (
        ("hi", [ONE], [ONE, {"type": "reasoning", "summary": []}, CALL], [{"role": "user", "content": [INPUT]}]),
        (
            *(5, [], {}, [5], [[]], [None], [{}], [{"role": "user"}], [ONE | {"role": "pope"}], [ONE | {"content": 5}]),
            *([ONE | {"content": [{}]}], [ONE | {"content": [5]}], [ONE | {"content": [INPUT | {"text": 5}]}]),
            *([ONE | {"content": [{"type": "input_image"}]}], [CALL | {"type": "x"}], [CALL | {"name": 5}]),
            *([{"type": "function_call"}], [{"type": "item_reference", "id": "a"}], [CALL | {"arguments": []}]),
        ),
    ),
    "instructions": (("", "x", "\0"), (5, [])),
    "max_output_tokens": ((1, 3, -1), (0, True, 2**31)),
    "tools": (
        ([], [{"type": "function", "name": "f"}], [{"type": "web_search"}, {"type": "custom", "name": "g"}]),
        ([{"type": "function"}], [{"type": "function", "name": "f f"}], [{"type": "function", "name": []}]),
    ),
    "tool_choice": (
        ("none", "auto"),
        ("required", "all", {"type": "function", "name": "g"}, {"type": "allowed_tools"}),
    ),
    "reasoning": (({}, {"effort": "low", "summary": "auto"}, {"a": 1}), ({"effort": 5}, "low")),
    "text": (({}, {"verbosity": "low"}, {"format": {"type": "text"}}, {"a": 1}), ({"format": {"type": "x"}}, "x")),
    "temperature": ((0, 1, 0.7), (100.5, "1")),
    "top_p": SAMPLING["top_p"],
    "stream": SAMPLING["stream"],
    "parallel_tool_calls": ((True, False), (1, "true")),
    "background": ((False,), (True,)),
}
#: path: (its fields, the fields that it needs, values of `WRONG` that it takes)
PATHS = {
    "/v1/completions": (TEXT | SAMPLING, ("prompt",), LEGAL_TOO),
    "/v1/chat/completions": (CHAT | SAMPLING, ("messages",), LEGAL_TOO),
    "/v1/responses": (RESPONSES, ("input",), LEGAL_TOO | {"stop": ()}),
    "/v1/messages": (MESSAGES, ("max_tokens", "messages"), {"cache_control": ({"a": 1},)}),
    "/v1/messages/count_tokens": (COUNT, ("messages",), {}),
}
SHARES = (5, 4, 2, 2, 1)  # of the requests
UNKNOWN = ("draft_model", "num_ctx", "user", "metadata", "x" * 300, "", "\0", "a\r\nb: c", "\u00e9")
NOT_DONE = {"/v1/completions": ("guided_json", "suffix"), "/v1/chat/completions": ("adapters", "audio")}
NOT_DONE |= {"/v1/responses": ("conversation", "prompt"), "/v1/messages": ("thread",)}
#: Forms of answers that a grammar library may refuse or break off, but that may stop nobody else.
NESTED = "a"
for _ in range(6):
    NESTED = f"({NESTED}|b{{1,99}})*"
FORMS = (
    *({"type": "json_object"}, {"type": "regex", "regex": "[a-z]+"}, {"type": "regex", "regex": NESTED}),
    *({"type": "regex", "regex": one} for one in ("((a{1,99}){1,99}){1,99}", "a{1,60000}", "(a|aa|aaa)*b", "(?=a)")),
    *({"type": "grammar", "grammar": f"start: {one}"} for one in ('start "a" | "b"', '(("a"?)*)*', '"a"? ' * 9000)),
    *(
        {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        for schema in (
            *({"$ref": "#"}, {"enum": ["x" * 90] * 500}, {"type": "string", "maxLength": 2**40}, {"minItems": 10**9}),
            *({"type": "number", "multipleOf": 1e-300}, {"type": "string", "pattern": NESTED}, {"const": 10**400}),
            {"type": "object", "properties": {f"x{i}": {"type": "integer"} for i in range(1500)}},
            {"anyOf": [{"type": "object", "properties": {f"x{i}": {"$ref": "#"}}} for i in range(200)]},
        )
    ),
)


def is_wrong(path, field, value):
    """Whether a value of `WRONG` is refused in a field."""
    fields, _, legal_too = PATHS[path]
    legal = fields[field][0] + legal_too.get(field, ())
    return not any(type(value) is type(one) and value == one for one in legal)


def request(draw):
    """(path, body, statuses that are right) of a random request with at most one thing wrong."""
    path = draw.choices(list(PATHS), SHARES)[0]
    fields, needed, _ = PATHS[path]
    body = {"max_tokens": draw.choice((1, 2, 5))} if "max_tokens" in fields else {}
    for field in [*needed, *draw.sample(sorted(fields), draw.randrange(6))]:
        body[field] = draw.choice(fields[field][0] + (NULL if field not in needed and draw.random() < 0.1 else ()))
    right = {200}
    if draw.random() < 0.7:
        body, right = _spoiled(draw, body, path)
    return path, body, right


def _spoiled(draw, body, path):
    kind, (fields, needed, _) = draw.randrange(8), PATHS[path]
    if kind == 0:
        name = draw.choice(UNKNOWN + NOT_DONE.get(path, ()))
        return body | {name: draw.choice((1, "x", False, [], {}))}, {200 if name in UNKNOWN else 400}
    if kind == 1:
        return body | {"model": draw.choice(("gpt-4o-mini", "/etc", "../..", "a\0b", ""))}, {404}
    if kind == 2:
        return draw.choice([one for one in WRONG if one != {"a": 1}]), {400}
    if kind == 3:
        return {name: value for name, value in body.items() if name != needed[-1]}, {400}
    field = draw.choice(sorted(fields))
    if field == "tool_choice":  # some are wrong only without tools
        body = {name: value for name, value in body.items() if name != "tools"}
    is_free = field in ("model", "prompt", "messages", "input")
    wrong = [] if is_free else [one for one in WRONG if is_wrong(path, field, one)]
    value = draw.choice([*fields[field][1], *wrong] or [5])
    return body | {field: value}, {400}


def formed(draw):
    """A request with a form that may be too much. It may be refused, or end in an error."""
    body = {"prompt": "a", "max_tokens": draw.choice((1, 5, 30)), "response_format": draw.choice(FORMS)}
    return "/v1/completions", body, {200, 400, 500}


LONG = 4 * 2**20 - 200
PARTS = '{"role":"user","content":[' + ",".join(['{"type":"text","text":"a"}'] * 1000) + "]}"
LONG_BODIES = (  # nearly as long as a body may be, and refused after they were read
    *(b'{"prompt":"' + b"a" * LONG + b'"}', b'{"prompt":"' + b"\\u00e9" * (LONG // 6) + b'"}'),
    *(b'{"prompt":[1' + b",1" * (LONG // 2) + b"]}", b'{"prompt":["a"' + b',"a"' * (LONG // 4) + b"]}"),
    *(b'{"prompt":{"a":1' + b',"a":1' * (LONG // 6) + b"}}", b"{" + b'"a":1,' * (LONG // 6) + b'"b":1}'),
    *(b'{"prompt":[' + b"[1]," * (LONG // 4) + b"[1]]}", b'{"prompt":[[' + b"[]," * (LONG // 3) + b"[]]]}"),
    ('{"messages":[' + ",".join([PARTS] * (LONG // len(PARTS))) + "]}").encode(),
    ('{"max_tokens":1,"messages":[' + ",".join([PARTS] * (LONG // len(PARTS))) + "]}").encode(),
    ('{"messages":[' + ",".join([json.dumps(ONE)] * 4096) + "]}").encode(),
    b'{"prompt":"a","response_format":{"type":"regex","regex":"' + b"a" * LONG + b'"}}',
    b'{"prompt":"a","logit_bias":{' + b'"3":1,' * (LONG // 6) + b'"-4":1}}',
)
HEAD = b"Host: localhost\r\nContent-Type: application/json\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + HEAD
NO_ANSWER = 0
#: What a client may send instead of a request, and the statuses of the answer. Where there may be none, it hangs up.
WIRE = (
    (b"GET /health HTTP/1.1\r\n\r\n", {400}),
    (b"GET /health HTTP/1.0\r\n\r\n", {421}),
    (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n", {400}),
    (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", {200}),
    (b"GET /%68ealth?x=%00 HTTP/1.1\r\nHost: LOCALHOST:1\r\n\r\n", {200}),
    (b"GET //health HTTP/1.1\r\nHost: localhost\r\n\r\n", {404}),
    (b"GET /health HTTP/1.1\r\nHost: localhost.evil\r\n\r\n", {421}),
    (b"GET /health HTTP/1.1\r\nHost: \xb2\r\n\r\n", {421}),
    (b"GET http://evil/health HTTP/1.1\r\nHost: localhost\r\n\r\n", {404}),
    (b"OPTIONS /v1/messages HTTP/1.1\r\n" + HEAD + b"Origin: http://evil\r\n\r\n", {405}),
    (b"DELETE /v1/models HTTP/1.1\r\n" + HEAD + b"\r\n", {405}),
    (b"PUT /v1/completions HTTP/1.1\r\n" + HEAD + b"Content-Length: 2\r\n\r\n{}", {405}),
    (POST.replace(b"application/json", b"text/plain") + b"Content-Length: 2\r\n\r\n{}", {415}),
    (POST.replace(b"localhost", b"evil.example") + b"Content-Length: 2\r\n\r\n{}", {421}),
    (POST + b"\r\n", {400}),
    (POST + b"Content-Length: -1\r\n\r\n", {400}),
    (POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", {400}),
    (POST + b"Content-Length: 99999999999999999999\r\n\r\n{}", {NO_ANSWER}),
    (POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", {400}),
    (POST + b"Transfer-Encoding: gzip\r\n\r\n{}", {400}),
    (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", {400}),
    (POST + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffffff\r\n{}", {400, NO_ANSWER}),
    (POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}", {100, 400}),
    (POST + b"X: " + b"y" * 100_000 + b"\r\n\r\n", {400, NO_ANSWER}),
    (POST + b"X: y\r\n" * 20_000 + b"\r\n", {400, NO_ANSWER}),
    (POST + b"X: \0\r\n\r\n", {400}),
    (POST + b"Content-Length: 5242880\r\n\r\n" + b" " * 5242880, {413}),
    (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", {400, NO_ANSWER}),
    (b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", {200}),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", {400, NO_ANSWER}),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400, 404, NO_ANSWER}),
    (b"\0" * 1000, {400, NO_ANSWER}),
    (b"\r\n" * 10_000, {400, NO_ANSWER}),
    (b"", {NO_ANSWER}),
)


def message(path, body):
    """A request as bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"POST %s HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n%s" % (path.encode(), HEAD, len(data), data)


def raw_body(draw):
    """Bytes that are mostly no JSON: cut, doubled, reversed, too deep, or not UTF-8."""
    text = json.dumps(request(draw)[1]).encode()
    kind = draw.randrange(7)
    if kind == 0:
        return text[: draw.randrange(len(text) + 1)]
    if kind == 1:
        return bytes(byte ^ (1 << draw.randrange(8) if draw.random() < 0.02 else 0) for byte in text)
    if kind == 2:
        return draw.choice((b"[", b'{"a":', b'{"messages":[')) * 100_000
    if kind == 3:
        return b'{"prompt":"\\ud800","max_tokens":2}'
    if kind == 4:
        return draw.randbytes(draw.randrange(200))
    if kind == 5:
        return b"9" * 50_000
    return text + text
