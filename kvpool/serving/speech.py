"""Reasoning, text and tool calls of an answer, read from its text piece by piece; the grammar of calls."""

from __future__ import annotations

import json
from bisect import bisect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from kvpool.adapters.mlx_lm.chat import TAIL
from kvpool.adapters.mlx_lm.engine import Sample
from kvpool.adapters.mlx_lm.grammar import SPACES

MOST_CALLS = 16  # of an answer whose calls a grammar forces
OPENS, NAMED, CLOSES = '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"
"""What stands before the name, before the arguments and behind them in a call that a grammar forces. No JSON that the
grammar allows has a new line, so these marks are not part of arguments."""
Piece = tuple[str, str]  # "thinking", "text", "arguments" with a string; "call" with its name, before its arguments


@dataclass(frozen=True, slots=True)
class Manner:
    """The marks of a model for reasoning and calls."""

    think: tuple[str, str] | None = None  # what opens and closes reasoning
    thinks_first: bool = False  # the prompt has opened it
    call: tuple[str, str] | None = None  # the same of calls that it writes freely. An empty end: that of the answer
    names: Collection[str] = ()  # the tools that they may call
    parse: Callable[[str], Any] = json.loads  # reads what is between the marks
    is_one: bool = False  # the answer ends with its first call
    by_grammar: bool = False  # calls are those of `grammar_of_calls`, in any model
    decode: Callable[[Sequence[int]], str] = str  # the tokenizer's

    @classmethod
    def of(cls, tokenizer: Any, prompt: Sequence[int], tools: Sequence[Any], by_grammar: bool, is_one: bool) -> Manner:
        """Return the manner of an answer to this prompt."""
        manner = cls(by_grammar=by_grammar and bool(tools), decode=tokenizer.decode)
        if tokenizer.has_thinking:
            think, tail = (tokenizer.think_start, tokenizer.think_end), len(prompt) - TAIL
            thinks_first = tokenizer.rfind_think_start(prompt, tail) > tokenizer.rfind_think_end(prompt, tail)
            manner = replace(manner, think=think, thinks_first=thinks_first)
        if not tools or by_grammar:
            return manner
        own = (tokenizer.tool_call_start, tokenizer.tool_call_end)
        names = {tool["function"]["name"] for tool in tools}
        return replace(
            manner, call=own, names=names, parse=lambda text: tokenizer.tool_parser(text, tools), is_one=is_one
        )

    def num_reasoned(self, sample: Sample) -> int:
        """Return how many tokens of a sample are reasoning, with the mark that closes it."""
        if not self.think or not (self.thinks_first or sample.text.lstrip().startswith(self.think[0])):
            return 0
        tokens, closes = sample.tokens.tolist(), self.think[1]
        return bisect(range(len(tokens)), 0, key=lambda number: closes in self.decode(tokens[:number]))

    @property
    def stops(self) -> list[str]:
        """Texts that end the answer."""
        return [self.call[1]] if self.is_one and self.call and self.call[1] else []

    @property
    def marks(self) -> dict[str, dict[str, str]]:
        """For each part of an answer, what ends it and what comes then."""
        marks: dict[str, dict[str, str]] = {"text": {}, "thinking": {}, "call": {}}
        if self.think:
            marks["text"][self.think[0]], marks["thinking"][self.think[1]] = "thinking", "text"
        if self.by_grammar:
            marks["text"][OPENS], marks["name"], marks["arguments"] = "name", {NAMED: "arguments"}, {CLOSES: "text"}
        if self.call:
            marks["text"][self.call[0]] = "call"
            marks["call"] = {self.call[1]: "text"} if self.call[1] else {}
        return marks

    def calls(self, text: str) -> list[tuple[str, str]]:
        """Return names and arguments of the calls in the text between two marks, none if one of them is wrong."""
        with suppress(Exception):  # of the parsers of mlx-lm, on whatever a model has written
            parsed = self.parse(text)
            calls = [self._call(one) for one in (parsed if isinstance(parsed, list) else [parsed])]
            return calls[:1] if self.is_one else calls
        return []

    def _call(self, parsed: Any) -> tuple[str, str]:
        name, arguments = parsed["name"], parsed.get("arguments", {})
        read = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        if name not in self.names or not isinstance(read, dict):
            raise ValueError("no call")
        return name, json.dumps(read, allow_nan=False)


class Reader:
    """Reads one answer. Text that may turn out to be the beginning of a mark is held back.

    A call without its end is one only if the model itself has ended the answer there. Of what a grammar forces, the
    arguments are told as they come, and the call with the first of them: a call that has none looks whole. What is left
    of a mark, or of a name, is not told. `num_calls` came; `is_cut`: the answer was cut off in one.
    """

    def __init__(self, manner: Manner) -> None:
        self._manner, self._marks = manner, manner.marks
        self._kind = "thinking" if manner.thinks_first else "text"
        self._opened = ""  # the mark before the present part
        self._held = ""
        self._is_fresh = manner.thinks_first  # no text since the last mark: spaces there are not said
        self._may_think = True  # reasoning opens before any text
        self._name = ""  # of a forced call that is not told yet
        self.num_calls = 0
        self.is_cut = False

    def plain(self, text: str) -> str | None:
        """Return the kind of a text, if all of it is said now and nothing else. None: `read` has to see it."""
        is_known = self._kind == "thinking" or (self._kind == "text" and not self._may_think)
        if not is_known or self._held or self._is_fresh or any(mark[0] in text for mark in self._marks[self._kind]):
            return None
        return self._kind

    def read(self, text: str, end: str = "") -> list[Piece]:
        """Return what is said now, in order. `end` says why no text follows; "eos": the model itself has ended it."""
        self._held += text
        pieces: list[Piece] = []
        while (found := self._next_mark()) is not None:
            at, mark = found
            pieces += self._said(self._held[:at], mark)
            self._held = self._held[at + len(mark) :]
            self._kind, self._opened, self._is_fresh = self._marks[self._kind][mark], mark, True
        if end not in ("", "eos"):
            return pieces + self._rest()
        if self._kind in ("call", "name") and not end:
            return pieces
        size = len(self._held) - (0 if end else self._beginning())
        ready, self._held = self._held[:size], self._held[size:]
        return pieces + self._said(ready, "")

    def _rest(self) -> list[Piece]:
        """Return what is left of an answer that was cut off."""
        held = self._held
        if self._manner.by_grammar and self._kind in ("text", "arguments"):
            held = held[: len(held) - self._beginning()]
            if self._kind == "text" and (held.strip() or not self._may_think):
                held = self._held  # no call begins behind text
        self.is_cut = self._kind in ("call", "name", "arguments") or len(held) < len(self._held)
        if self._kind == "call":
            return [("text", self._opened + held)]
        return [] if self._kind == "name" else self._said(held, "")

    def _next_mark(self) -> tuple[int, str] | None:
        found = ((self._held.find(mark), mark) for mark in self._marks[self._kind])
        return min(((at, mark) for at, mark in found if at >= 0 and self._may_come(mark, at)), default=None)

    def _may_come(self, mark: str, at: int) -> bool:
        """Whether a mark is one at this place: reasoning does not open behind text."""
        opens = self._kind == "text" and self._marks["text"][mark] == "thinking"
        return not opens or (self._may_think and not self._held[:at].strip())

    def _beginning(self) -> int:
        """Characters at the end that a mark may begin with."""
        held, marks = self._held, self._marks[self._kind]
        for at in range(max(0, len(held) - max(map(len, marks), default=0)), len(held)):
            if any(mark.startswith(held[at:]) and self._may_come(mark, at) for mark in marks):
                return len(held) - at
        return 0

    def _said(self, text: str, mark: str) -> list[Piece]:
        """Return what a part says that goes on, or that this mark ends."""
        if self._kind == "name" and mark:
            self._name = text
            return []
        if self._kind in ("call", "name"):
            calls = self._manner.calls(text) if self._kind == "call" else []
            return [piece for call in calls for piece in self._called(*call)] or [("text", self._opened + text + mark)]
        text = text.lstrip() if self._is_fresh else text
        self._is_fresh = self._is_fresh and not text
        if self._kind == "text" and text.strip():
            self._may_think = False
        if self._name and text:
            name, self._name = self._name, ""
            return self._called(name, text)
        return [(self._kind, text)] if text else []

    def _called(self, name: str, arguments: str) -> list[Piece]:
        self.num_calls += 1
        return [("call", name), ("arguments", arguments)]


def grammar_of_calls(mark: Callable[[str], str], tools: Mapping[str, Any], most: int, other: Any = None) -> str:
    """Return a grammar, in llguidance's form of Lark, of 1 to `most` calls of tools, which have schemas by their names.

    `mark` is `Grammars.mark`, and `other` the JSON schema of what an answer may be instead.
    """
    nothing, compact = {"additionalProperties": False}, {"x-guidance": {"whitespace_flexible": False}}
    schemas = [{"type": "object"} | (schema or nothing) | compact for schema in tools.values()]
    opens, named, closes = map(mark, (OPENS, NAMED, CLOSES))
    lines = [
        "start: calls" + ("" if other is None else f" | %json {json.dumps(other | {'x-guidance': SPACES})}"),
        "calls: call" + (f' ("\\n" call){{0,{most - 1}}}' if most > 1 else ""),
        "call: " + " | ".join([f'{opens} "{name}" {named} arguments_{i} {closes}' for i, name in enumerate(tools)]),
        *(f"arguments_{i}: %json {json.dumps(schema)}" for i, schema in enumerate(schemas)),
    ]
    return "\n".join(lines)
