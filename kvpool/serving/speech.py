"""What an answer says: reasoning, text and tool calls, read from its text piece by piece. And the grammar of calls."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kvpool.adapters.mlx_lm.chat import TAIL

MOST_CALLS = 16  # of an answer whose calls a grammar forces
TAGS = ("<tool_call>", "</tool_call>")
Piece = tuple[str, Any]  # "thinking" or "text" with a string, or "call" with a `Call`


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool. `arguments` are JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


@dataclass(frozen=True, slots=True)
class Manner:
    """How a model marks what it says.

    Attributes
    ----------
    think : tuple of str, optional
        What opens and closes reasoning.
    thinks_first : bool
        Whether the prompt has opened it.
    call : tuple of str, optional
        What opens and closes calls. None: all is text. An empty end: they end with the answer.
    parse : callable
        Reads what is between them.
    is_one : bool
        Whether the answer ends with its first call.
    """

    think: tuple[str, str] | None = None
    thinks_first: bool = False
    call: tuple[str, str] | None = None
    parse: Callable[[str], Any] = json.loads
    is_one: bool = False

    @classmethod
    def of(cls, tokenizer: Any, prompt: Sequence[int], tools: Sequence[Any], by_grammar: bool, is_one: bool) -> Manner:
        """Return the manner of an answer to this prompt. Calls that follow a grammar are JSON in any model."""
        think, thinks_first = None, False
        if tokenizer.has_thinking:
            think, tail = (tokenizer.think_start, tokenizer.think_end), len(prompt) - TAIL
            thinks_first = tokenizer.rfind_think_start(prompt, tail) > tokenizer.rfind_think_end(prompt, tail)
        if not tools:
            return cls(think, thinks_first)
        own = (tokenizer.tool_call_start, tokenizer.tool_call_end)
        if by_grammar:
            return cls(think, thinks_first, TAGS, is_one=is_one)
        return cls(think, thinks_first, own, lambda text: tokenizer.tool_parser(text, tools), is_one)

    @property
    def stops(self) -> list[str]:
        """Texts that end the answer."""
        return [self.call[1]] if self.is_one and self.call and self.call[1] else []

    def calls(self, text: str) -> list[Call]:
        """Return the calls in the text between two marks, none if it has no such form."""
        with suppress(Exception):  # of the parsers of mlx-lm, on whatever a model has written
            parsed = self.parse(text)
            calls = [_call(one) for one in (parsed if isinstance(parsed, list) else [parsed])]
            return calls[:1] if self.is_one else calls
        return []


def _call(parsed: Any) -> Call:
    name, arguments = parsed["name"], parsed.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, str | dict):
        raise TypeError("no call")
    return Call(name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


class Reader:
    """Reads one answer. Text that may turn out to be the beginning of a mark is held back.

    Attributes
    ----------
    has_called : bool
        Whether a call came.
    """

    def __init__(self, manner: Manner) -> None:
        self._manner = manner
        self._kind = "thinking" if manner.thinks_first else "text"
        self._held = ""
        self._is_fresh = manner.thinks_first  # no text since the last mark: spaces there are not said
        self._may_think = manner.think is not None  # only before any text
        self.has_called = False

    def read(self, text: str, is_last: bool) -> list[Piece]:
        """Return what is said now, in order."""
        self._held += text
        pieces: list[Piece] = []
        while (found := self._next_mark()) is not None:
            at, mark = found
            before, self._held = self._held[:at], self._held[at + len(mark) :]
            pieces += self._said(before, mark)
            opens = self._kind == "text"
            is_call = self._manner.call is not None and mark == self._manner.call[0] and opens
            self._kind = ("call" if is_call else "thinking") if opens else "text"
            self._is_fresh = True
        held = 0 if is_last else len(self._held) if self._kind == "call" else self._beginning()
        ready, self._held = self._held[: len(self._held) - held], self._held[len(self._held) - held :]
        return pieces + self._said(ready, "")

    def _marks(self) -> list[str]:
        """Return what may end the present part."""
        think, call = self._manner.think, self._manner.call
        if self._kind == "thinking":
            return [think[1]] if think else []
        if self._kind == "call":
            return [call[1]] if call and call[1] else []
        return [*([call[0]] if call else []), *([think[0]] if think and self._may_think else [])]

    def _next_mark(self) -> tuple[int, str] | None:
        return min(((at, mark) for mark in self._marks() if (at := self._held.find(mark)) >= 0), default=None)

    def _beginning(self) -> int:
        """Characters at the end that a mark may begin with."""
        marks, held = self._marks(), self._held
        most = min(len(held), max(map(len, marks), default=0))
        return next((n for n in range(most, 0, -1) if any(mark.startswith(held[-n:]) for mark in marks)), 0)

    def _said(self, text: str, mark: str) -> list[Piece]:
        """Return what a part says that goes on, or that this mark ends."""
        if self._kind == "call":
            if not text and not mark:
                return []
            calls = self._manner.calls(text)
            self.has_called = self.has_called or bool(calls)
            told = self._manner.call[0] + text + mark if self._manner.call else text
            return [("call", call) for call in calls] or [("text", told)]
        text = text.lstrip() if self._is_fresh else text
        self._is_fresh = self._is_fresh and not text
        if self._kind == "text" and text.strip():
            self._may_think = False
        return [(self._kind, text)] if text else []


def grammar_of_calls(tools: Mapping[str, Any], most: int, other: Any = None) -> str:
    """Return a grammar, in llguidance's form of Lark, of 1 to `most` calls.

    Parameters
    ----------
    tools : mapping
        Of names to the JSON schemas of their arguments.
    other : mapping, optional
        The JSON schema of what an answer may be instead.
    """
    opens, closes = (json.dumps(one) for one in (TAGS[0] + "\n", "\n" + TAGS[1]))
    calls = [f'"{{\\"name\\": \\"{name}\\", \\"arguments\\": " arguments_{i} "}}"' for i, name in enumerate(tools)]
    compact = {"x-guidance": {"whitespace_flexible": False}}
    schemas = [{"type": "object"} | schema | compact for schema in tools.values()]
    lines = [
        "start: calls" + ("" if other is None else f" | %json {json.dumps(other)}"),
        "calls: call" + (f' ("\\n" call){{0,{most - 1}}}' if most > 1 else ""),
        f"call: {opens} body {closes}",
        "body: " + " | ".join(calls),
        *(f"arguments_{i}: %json {json.dumps(schema)}" for i, schema in enumerate(schemas)),
    ]
    return "\n".join(lines)
