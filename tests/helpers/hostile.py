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
    "max_tokens": ((1, 2, 5), (0, 2**31, 1e30)),
    "temperature": ((0, 0.0, 1, 0.7, 100, 1e-300), (100.5, "1")),
    "top_p": ((1, 0.5, 1e-9), (0, 1.01)),
    "top_k": ((0, 1, 5, 256, 257, 10**6, 2**31 - 1), (2**31,)),
    "min_p": ((0, 0.3, 1), (1.01,)),
    "seed": ((0, 7, 2**63 - 1), (2**63,)),
    "n": ((1, 2, 4), (0, 65, 10**9)),
    "frequency_penalty": ((0, 2, -2, -1, 1.5), (2.01,)),
    "presence_penalty": ((0, 2, -2, -1, 1.5), (-2.01,)),
    "repetition_penalty": ((1, 0.1, 10, 1.5), (0, 11, 1e-300)),
    "logit_bias": (
        ({}, {"0": 5}, {"256": -100, "3": 100.0}),
        ({"257": 1}, {"999999": 5}, {str(2**40): 5}, {str(2**70): 5}, {"-5": 5}, {"3": NAN}, {"3": 101}, {"3": [1]}),
    ),
    "stop": (([], "e", ["a", "ab"], ["\u202e💥"]), (5, [1], [""], ["a"] * 9, [["a"]], "x" * 129, {"a": "b"})),
    "stop_token_ids": (([], [5, 6], [256]), ([-1], [257], [2**31 - 1], [2**31], ["a"], 5)),
    "stream": ((True, False), ("true", 1, 0)),
    "stream_options": (({}, {"include_usage": True}), ({"include_usage": 1}, {"other": True}, "x")),
    "model": (("tiny",), ()),
    "user": (("", "somebody"), (5,)),
    "cache_salt": (("a", "\u202e"), ("y" * 513,)),
    "xtc_probability": ((0, 0.5, 1), (1.01,)),
    "xtc_threshold": ((0, 0.1, 0.5), (0.51,)),
    "ignore_eos": ((True, False), (1, "true")),
    "min_tokens": ((0, 1), (6, 2**31)),
    "response_format": (
        ({"type": "text"},),
        (
            *({}, {"type": "x"}, {"type": "json_schema"}, {"type": "regex"}, {"type": "regex", "regex": "a("}),
            *({"type": "grammar", "grammar": "start: nobody"}, {"type": "regex", "regex": "a" * 2**17}),
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "http://127.0.0.1:1/x"}}},
        ),
    ),
}
LEGAL_TOO = {  # values of WRONG that are legal in these fields
    "temperature": (1.5,),
    "stop": ("x", "\0"),
    "user": ("x", "\0"),
    "cache_salt": ("x", "\0"),
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
        ([ONE], [{"role": "system", "content": "be"}, ONE], [ONE | {"content": [{"type": "text", "text": "a"}]}]),
        (
            *([], "hi", 5, {}, [5], [[]], [None], [{}], [{"role": "user"}], [{"content": "x"}]),
            *([ONE | {"role": "pope"}], [ONE | {"content": 5}], [ONE | {"content": []}], [ONE | {"x": 1}]),
            [ONE | {"content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x"}}]}],
            [ONE] * 4097,
            [ONE | {"content": "x" * 9000}],
        ),
    ),
    "logprobs": ((True, False), (1, "true", [])),
    "max_completion_tokens": ((1, 3), (0, True, 2**31)),
    "tools": (
        ([], [TOOL], [{"function": {"name": "f"}}]),
        ([TOOL, TOOL], [TOOL | {"type": "x"}], [{"type": "function"}], [{"function": {"name": "a b"}}], [TOOL] * 129),
    ),
    "tool_choice": (("none", "auto"), ("required", "all", {"type": "function", "function": {"name": "g"}})),
    "parallel_tool_calls": ((True, False), (1, "true")),
    "chat_template_kwargs": (({}, {"enable_thinking": False}), ({"tokenize": False}, {"enable_thinking": 1})),
}
UNKNOWN = ("suffix", "guided_json", "adapters", "draft_model", "functions", "x" * 300, "", "\0")


def is_wrong(fields, field, value):
    """Whether a value of `WRONG` is refused in a field."""
    legal = fields[field][0] + LEGAL_TOO.get(field, ())
    return not any(type(value) is type(one) and value == one for one in legal)


def request(draw):
    """(path, body, statuses that are right) of a random request with at most one thing wrong."""
    is_chat = draw.random() < 0.4
    own = CHAT if is_chat else TEXT
    needed = "messages" if is_chat else "prompt"
    fields = own | SAMPLING
    body = {"max_tokens": draw.choice((1, 2, 5))}
    for field in [needed, *draw.sample(sorted(fields), draw.randrange(6))]:
        body[field] = draw.choice(fields[field][0] + (NULL if field != needed and draw.random() < 0.1 else ()))
    right = {200}
    if draw.random() < 0.7:
        body, right = _spoiled(draw, body, fields, needed)
    return f"/v1/{'chat/' if is_chat else ''}completions", body, right


def _spoiled(draw, body, fields, needed):
    kind = draw.randrange(8)
    if kind == 0:
        return body | {draw.choice(UNKNOWN): draw.choice((1, "x", False, [], {}))}, {400}
    if kind == 1:
        return body | {"model": draw.choice(("gpt-4o-mini", "/etc", "../..", "a\0b", ""))}, {404}
    if kind == 2:
        return draw.choice([one for one in WRONG if one != {"a": 1}]), {400}
    if kind == 3:
        return {name: value for name, value in body.items() if name != needed}, {400}
    field = draw.choice(sorted(fields))
    wrong = [] if field in ("model", "prompt", "messages") else [one for one in WRONG if is_wrong(fields, field, one)]
    value = draw.choice([*fields[field][1], *wrong] or [5])
    return body | {field: value}, {400}


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
