"""What an answer says, read from its text in pieces of any size: reasoning, text and calls."""

import json
import random

import pytest
from fuzz_seed import fresh_seed

from kvpool.adapters.mlx_lm import tiny
from kvpool.serving.speech import Manner, Reader

THINK, CALL = ("<think>", "</think>"), ("<tool_call>", "</tool_call>")
ONE = '{"name": "f", "arguments": {"a": 1}}'
CALLS = f"<tool_call>{ONE}</tool_call>"
FORCED = '<tool_call>\n{"name": "f", "arguments": {"a":1}}\n</tool_call>'
FREE = Manner(call=CALL, names={"f"})
CALLED = ("call", ("f", {"a": 1}))


def read(manner, pieces):
    """What a reader says, with neighbours of one kind joined, and whether it was a call."""
    reader, said = Reader(manner), []
    for number, piece in enumerate(pieces):
        for kind, what in reader.read(piece, "eos" if number == len(pieces) - 1 else ""):
            if kind == "call":
                said.append((kind, (what, "")))
            elif kind == "arguments":
                said[-1] = ("call", (said[-1][1][0], said[-1][1][1] + what))
            elif said and said[-1][0] == kind:
                said[-1] = (kind, said[-1][1] + what)
            else:
                said.append((kind, what))
    assert reader.num_calls == sum(kind == "call" for kind, _ in said)
    return [(kind, (what[0], json.loads(what[1])) if kind == "call" else what) for kind, what in said]


CASES = [
    (Manner(), f"a <think>b</think> <tool_call>{ONE}</tool_call>", None),
    (Manner(THINK), "<think>\nb c</think>\n\nd <think> e", [("thinking", "b c"), ("text", "d <think> e")]),
    (Manner(THINK), " \n<think>b</think>", [("text", " \n"), ("thinking", "b")]),
    (Manner(THINK, thinks_first=True), "\nb</think>c</think>", [("thinking", "b"), ("text", "c</think>")]),
    (Manner(THINK, thinks_first=True), "b</thin", [("thinking", "b</thin")]),
    (FREE, f"<tool_call>\n{ONE}\n</tool_call>", [CALLED]),
    (FREE, f"{CALLS}\n{CALLS} b", [CALLED, CALLED, ("text", "b")]),
    (FREE, f"a<tool_call>{ONE}</tool_call>", [("text", "a"), CALLED]),
    (FREE, f"<tool_call>{ONE}", [CALLED]),
    (FREE, "a <tool_call>{oh}</tool_call> b", [("text", "a <tool_call>{oh}</tool_call>"), ("text", "b")]),
    (FREE, '<tool_call>{"name": 5}</tool_call>', [("text", '<tool_call>{"name": 5}</tool_call>')]),
    (Manner(THINK, True, by_grammar=True), "a</think>" + FORCED, [("thinking", "a"), CALLED]),
    (Manner(by_grammar=True), f"{FORCED}\n{FORCED}", [CALLED, CALLED]),
    (Manner(by_grammar=True), FORCED[:15], [("text", FORCED[:15])]),
    (Manner(by_grammar=True), FORCED[:26], [("text", FORCED[:26])]),
    (Manner(by_grammar=True), '{"a": "<tool_call>"}', None),
    (FREE, "a <tool_c <", [("text", "a <tool_c <")]),
    (FREE, "<tool_call>", [("text", "<tool_call>")]),
    (Manner(THINK, True, CALL, {"f"}), f"<tool_call></think>\n{CALLS}", [("thinking", "<tool_call>"), CALLED]),
    (Manner(call=CALL, names={"f"}, is_one=True), f"<tool_call>[{ONE},{ONE}]</tool_call>", [CALLED]),
]


@pytest.mark.parametrize(("manner", "text", "due"), CASES)
def test_text_in_pieces_of_any_size_says_the_same(manner, text, due):
    draw = random.Random(fresh_seed())
    due = [("text", text)] if due is None else joined(due)
    assert joined(read(manner, [text])) == due
    assert joined(read(manner, [*text, ""])) == due
    for _ in range(50):
        cuts = sorted(draw.randrange(len(text) + 1) for _ in range(draw.randrange(6)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert joined(read(manner, pieces)) == due, pieces


def joined(said):
    """The same with neighbours of one kind joined."""
    whole = []
    for kind, what in said:
        if whole and kind != "call" and whole[-1][0] == kind:
            whole[-1] = (kind, whole[-1][1] + what)
        else:
            whole.append((kind, what))
    return whole


DEEP = 200_000
WRONG = [
    *('{"a": NaN}', '{"a": 1e999}', '"[1]"', '"[1"', '"oh"', "[1]", "5", "null", '"{\\"a\\": NaN}"'),
    *('{"a": ' + "[" * DEEP + "]" * DEEP + "}", json.dumps('{"a":' * DEEP + "1" + "}" * DEEP)),
]


@pytest.mark.parametrize("arguments", WRONG, ids=lambda text: text[:20])
def test_free_call_without_an_object_of_json_stays_text(arguments):
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert read(FREE, [text]) == [("text", text)]


@pytest.mark.parametrize("name", ["g", "", "\\ud800"])
def test_free_call_of_no_tool_stays_text(name):
    one = f'{{"name": "{name}", "arguments": {{}}}}'
    for text in (f"<tool_call>{one}</tool_call>", f"<tool_call>[{ONE}, {one}]</tool_call>"):
        assert read(FREE, [text]) == [("text", text)]


@pytest.mark.parametrize(
    ("arguments", "due"), [('{"a": "\\ud800\u00e9"}', {"a": "\ud800\u00e9"}), ('"{\\"a\\": 1}"', {"a": 1}), ('""', {})]
)
def test_arguments_of_a_free_call_are_told_in_ascii(arguments, due):
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    (_, call), (_, told) = Reader(FREE).read(text, "eos")
    assert call == "f" and told.isascii() and json.loads(told) == due


def test_text_is_shown_as_soon_as_it_can_be_no_mark():
    reader = Reader(Manner(THINK, call=CALL, names={"f"}))
    shown = [reader.read(letter) for letter in "a<tool!<too"]
    assert ["".join(what for _, what in one) for one in shown] == ["a", "", "", "", "", "", "<tool!", "", "", "", ""]


def test_arguments_of_a_forced_call_are_told_as_they_come():
    reader = Reader(Manner(by_grammar=True))
    told = [kind for letter in FORCED for kind, _ in reader.read(letter)]
    assert told[0] == "call" and told.count("arguments") > 4


@pytest.fixture(scope="module")
def tokenizer():
    one = tiny.make()[1]
    one._think_start, one._think_end = "<t>", "</t>"
    one._think_start_tokens, one._think_end_tokens = tuple(one.encode("<t>")), tuple(one.encode("</t>"))
    return one


@pytest.mark.parametrize(
    ("prompt", "thinks"), [("a<t>", True), ("a<t></t>", False), ("a</t><t>\n", True), ("a", False)]
)
def test_answer_begins_with_reasoning_if_the_prompt_leaves_it_open(tokenizer, prompt, thinks):
    manner = Manner.of(tokenizer, tokenizer.encode(prompt), [], False, False)
    assert manner.thinks_first == thinks and manner.think == ("<t>", "</t>") and manner.call is None
    assert read(manner, ["b</t>c"])[0] == (("thinking", "b") if thinks else ("text", "b</t>c"))


def test_free_answer_with_one_call_ends_behind_it(tokenizer):
    tools = [{"function": {"name": "f"}}]
    ways = ((False, True), (False, False), (True, True))
    one, many, forced = (Manner.of(tokenizer, [1], tools, *how) for how in ways)
    assert (one.stops, many.stops, forced.stops) == (["</tool_call>"], [], [])
    assert read(one, [f"<tool_call>{ONE}"]) == [CALLED] and read(forced, [FORCED]) == [CALLED]
