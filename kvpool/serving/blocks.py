"""Answers that are a list of blocks: thoughts, texts and calls, one after the other, whole or in pieces."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from kvpool.adapters.mlx_lm.engine import Completion, TokenEvent
from kvpool.serving.answers import End, Event
from kvpool.serving.requests import ChatRequest
from kvpool.serving.speech import Manner, Reader


class BlockAnswer(ABC):
    """The answer to one request. It is to blocks what `Answer` is to choices."""

    ping: Event = (None, None)  # of a stream that is silent: nothing but a comment

    def __init__(self, model: str, body: ChatRequest, prompt_tokens: int, manner: Manner) -> None:
        self._model, self._body, self._prompt_tokens, self._reader = model, body, prompt_tokens, Reader(manner)
        self._blocks: list[dict[str, Any]] = []  # as a stream begins them
        self._kinds: list[str] = []  # "thinking", "text" or "call"
        self._said: list[str] = []  # in each block
        self._sent, self._has_ended = 0, False  # characters of a stream

    def piece(self, number: int, token: TokenEvent) -> list[Event]:
        """Return the events of a token, none if it shows nothing."""
        return self._read(token.text, End.of_token(self._body, token))

    def closing(self, number: int, completion: Completion) -> list[Event]:
        """Return the last events of an answer whose last token came before it ended."""
        sample = completion.samples[0]
        return [] if self._has_ended else self._read(sample.text[self._sent :], End.of_sample(self._body, sample))

    def ending(self, completions: Sequence[Completion]) -> list[Event]:
        """Return what a stream ends with."""
        begun = [] if self._blocks else self._told("text", "")
        return [*begun, *self.close(len(self._blocks) - 1), *self.end(completions[0])]

    def hear(self, number: int, token: TokenEvent) -> None:  # noqa: B027
        """Do nothing: these forms have no logprobs."""

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the answer as one object."""
        self._read(completions[0].text, End.of_sample(self._body, completions[0].samples[0]))
        if self._reader.is_cut and self._kinds and self._kinds[-1] == "call" and arguments_of(self._said[-1]) is None:
            del self._blocks[-1], self._kinds[-1], self._said[-1]  # with any arguments the call would look whole
        if not self._blocks:
            self._told("text", "")
        return self.object(completions[0])

    def _read(self, text: str, end: End | None) -> list[Event]:
        """Keep what a text says. Return the events that say it."""
        self._sent, self._has_ended = self._sent + len(text), end is not None
        pieces = self._reader.read(text, end is not None, end is not None and end.is_whole)
        return [event for kind, said in pieces for event in self._told(kind, said)]

    def _told(self, kind: str, said: Any) -> list[Event]:
        """Keep a piece. Return the events that say it: perhaps a new block, and its text."""
        events: list[Event] = []
        if kind == "call" or not self._blocks or (self._kinds[-1] != kind and kind != "arguments"):
            events += self.close(len(self._blocks) - 1) if self._blocks else []
            self._blocks.append(self.begun(kind, said))
            self._kinds.append(kind)
            self._said.append("")
            events += self.open(len(self._blocks) - 1)
        if kind == "call":
            return events
        self._said[-1] += said
        return events + self.delta(len(self._blocks) - 1, kind, said)

    @abstractmethod
    def begun(self, kind: str, said: Any) -> dict[str, Any]:
        """Return a block without what it says. `said` is a `Call`, of a call."""

    @abstractmethod
    def opening(self, prompts: int) -> list[Event]:
        """Return what a stream begins with."""

    @abstractmethod
    def open(self, index: int) -> list[Event]:
        """Return the events with which a block begins."""

    @abstractmethod
    def delta(self, index: int, kind: str, said: str) -> list[Event]:
        """Return the events of more text in a block."""

    @abstractmethod
    def close(self, index: int) -> list[Event]:
        """Return the events with which a block ends."""

    @abstractmethod
    def end(self, completion: Completion) -> list[Event]:
        """Return the events behind the last block."""

    @abstractmethod
    def failure(self, message: str) -> list[Event]:
        """Return the events of a stream that ends with an error."""

    @abstractmethod
    def object(self, completion: Completion) -> dict[str, Any]:
        """Return the whole answer."""


def arguments_of(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call as an object. None: they are no such JSON."""
    try:
        read = json.loads(text)
        json.dumps(read, allow_nan=False)  # 1e999 is none
    except (ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) else None
