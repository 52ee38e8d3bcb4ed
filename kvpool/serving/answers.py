"""Answers in the form of OpenAI's API: completions and chats, whole or in pieces."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from kvpool.adapters.mlx_lm.engine import Completion, Sample, TokenEvent, Top
from kvpool.serving.requests import Generation
from kvpool.serving.speech import Manner, Reader

Tokens = Sequence[TokenEvent] | None
Event = tuple[str | None, Any]  # of a stream: its name, if it has one, and its data
GOES_ON = {"finish_reason": None}
FIELDS = {"thinking": "reasoning_content", "text": "content"}
LEAST = -9999.0  # in place of a logprob of minus infinity, which JSON does not have


@dataclass(frozen=True, slots=True)
class End:
    """The end of an answer.

    Attributes
    ----------
    reason : str
        "eos": by itself. "stop": the client's stop string or stop token came. "length": anything else ended it.
    by : str, int or None
        That stop string or token.
    """

    reason: str
    by: str | int | None = None

    @classmethod
    def of_token(cls, body: Generation, one: TokenEvent) -> End | None:
        """Return how the answer to a request ended with a token. None: it goes on."""
        return None if one.finish_reason is None else cls._of(body, one.finish_reason, one.token, one.stop)

    @classmethod
    def of_sample(cls, body: Generation, sample: Sample) -> End:
        """Return how the answer to a request ended."""
        token = int(sample.tokens[-1]) if len(sample.tokens) else None
        return cls._of(body, sample.finish_reason, token, sample.stop)

    @classmethod
    def _of(cls, body: Generation, reason: str, token: int | None, stop: str | None) -> End:
        by = stop if stop in body.stop else token if reason == "eos" and token in body.stop_token_ids else None
        if by is not None:
            return cls("stop", by)
        return cls("eos" if reason in ("eos", "stop") else "length")

    @property
    def is_whole(self) -> bool:
        """Whether the model has said all that it wanted to say."""
        return self.reason == "eos"

    def told(self, calls: bool = False) -> dict[str, Any]:
        """Return the fields of a choice. `calls`: the answer ends with calls that are whole."""
        why = "length" if self.reason == "length" else "tool_calls" if calls else "stop"
        return {"finish_reason": why} | ({} if self.by is None else {"stop_reason": self.by})


class TextForm:
    """Choices of ``/v1/completions``.

    Parameters
    ----------
    decode : callable
        Makes text of a token.
    echo : sequence of str
        What each choice begins with. Empty: nothing.

    Attributes
    ----------
    scored : list
        The tokens of that text for each choice, where their logprobs are wanted. The first has none.
    """

    prefix, whole, piece = "cmpl", "text_completion", "text_completion"

    def __init__(self, decode: Callable[[int], str], echo: Sequence[str] = ()) -> None:
        self._decode, self._echo = decode, echo
        self._offsets: dict[int, int] = {}  # where the next token of a choice begins
        self.scored: list[list[TokenEvent]] = []

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Return what a stream begins with."""
        return [self.delta(index, self._echo[index], None, self._before(index, None))] if self._echo else []

    def choice(self, index: int, text: str, end: End, tokens: Tokens) -> dict[str, Any]:
        """Return a choice. `tokens` have the logprobs; None: it has none."""
        return self.delta(index, self._echo[index] + text if self._echo else text, end, self._before(index, tokens))

    def _before(self, index: int, tokens: Tokens) -> Tokens:
        """Return the tokens of the prompt, if their logprobs are wanted, and these."""
        return [*self.scored[index], *(tokens or ())] if self.scored else tokens

    def delta(self, index: int, text: str, end: End | None, tokens: Tokens) -> dict[str, Any]:
        """Return a piece of a choice."""
        logprobs = None if tokens is None else self._logprobs(index, tokens)
        return {"index": index, "text": text, "logprobs": logprobs} | (GOES_ON if end is None else end.told())

    def _logprobs(self, index: int, tokens: Sequence[TokenEvent]) -> dict[str, Any]:
        texts, begin = [self._decode(one.token) for one in tokens], self._offsets.get(index, 0)
        *offsets, self._offsets[index] = accumulate(map(len, texts), initial=begin)
        known = [None if one.id is None else one for one in tokens]  # the first token of a prompt has no logprob
        return {
            "tokens": texts,
            "token_logprobs": [one and _finite(one.logprob) for one in known],
            "top_logprobs": [one and self._likeliest(one.top) for one in known],
            "text_offset": offsets,
        }

    def _likeliest(self, top: Top) -> dict[str, float]:
        """Return likely tokens by their text. Another token with a text that is there already goes by its number."""
        named: dict[str, float] = {}
        for token, logprob in top:
            text = self._decode(token)
            named[f"token_id:{token}" if text in named else text] = _finite(logprob)
        return named


class ChatForm:
    """Choices of ``/v1/chat/completions``.

    Parameters
    ----------
    decode : callable
        Makes text of a token.
    spell : callable
        Gives the bytes of a token.
    manner : Manner
        How the model marks what it says.
    """

    prefix, whole, piece = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, decode: Callable[[int], str], spell: Callable[[int], bytes], manner: Manner) -> None:
        self._decode, self._spell, self._manner = decode, spell, manner
        self._readers: dict[int, Reader] = {}

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Return what a stream begins with."""
        self._readers[index] = Reader(self._manner)
        return [{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]

    def delta(self, index: int, text: str, end: End | None, tokens: Tokens) -> dict[str, Any]:
        """Return a piece of a choice."""
        reader = self._readers[index]
        return self._choice(index, "delta", self._said(reader, text, end), end, tokens, reader)

    def choice(self, index: int, text: str, end: End, tokens: Tokens) -> dict[str, Any]:
        """Return a choice. `tokens` have the logprobs; None: it has none."""
        reader = Reader(self._manner)
        said = self._said(reader, text, end)
        for call in said.get("tool_calls", ()):
            del call["index"]
        told = {"role": "assistant", "content": None if reader.num_calls else "", **said}
        return self._choice(index, "message", told, end, tokens, reader)

    def _said(self, reader: Reader, text: str, end: End | None) -> dict[str, Any]:
        said: dict[str, Any] = {}
        last = reader.num_calls - 1
        for kind, piece in reader.read(text, end is not None, end is not None and end.is_whole):
            if kind in FIELDS:
                said[FIELDS[kind]] = said.get(FIELDS[kind], "") + piece
                continue
            calls = said.setdefault("tool_calls", [])
            if kind == "call":
                function = {"name": piece.name, "arguments": ""}
                calls.append({"index": piece.index, "id": piece.id, "type": "function", "function": function})
            elif calls:
                calls[-1]["function"]["arguments"] += piece
            else:
                calls.append({"index": last, "function": {"arguments": piece}})
        return said

    def _choice(
        self, index: int, name: str, said: dict[str, Any], end: End | None, tokens: Tokens, reader: Reader
    ) -> dict[str, Any]:
        logprobs = None if tokens is None else {"content": [self._logprob(one) for one in tokens], "refusal": None}
        told = GOES_ON if end is None else end.told(calls=reader.num_calls > 0 and not reader.is_cut)
        return {"index": index, name: said, "logprobs": logprobs} | told

    def _logprob(self, one: TokenEvent) -> dict[str, Any]:
        return self._named(one.token, one.logprob) | {"top_logprobs": [self._named(*pair) for pair in one.top]}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._decode(token), "logprob": _finite(logprob), "bytes": list(self._spell(token))}


class Answer:
    """The answer to one request.

    Parameters
    ----------
    form : TextForm or ChatForm
    model : str
        The name of the model.
    body : Generation
        The request. Sample i of prompt p is the choice p * n + i, the best sample first if there are more than n.
    prompt_tokens : int
        Of all prompts.
    """

    ping: Event = (None, None)  # of a stream that is silent: nothing but a comment

    def __init__(self, form: TextForm | ChatForm, model: str, body: Generation, prompt_tokens: int) -> None:
        self.form, self.n, self._body = form, body.n, body
        self.wants_usage, self.wants_logprobs = body.stream_options.get("include_usage"), body.tops is not None
        self._tokens: dict[tuple[int, int], list[TokenEvent]] = {}  # of each sample, if the request wants logprobs
        self._sent: dict[int, int | None] = {}  # characters of each choice of a stream, None: it has ended
        self._prompt_tokens = prompt_tokens
        self._head = {"id": f"{form.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def opening(self, prompts: int) -> list[Event]:
        """Return what a stream begins with."""
        return [self._event([choice]) for i in range(prompts * self.n) for choice in self.form.opening(i)]

    def piece(self, number: int, token: TokenEvent) -> list[Event]:
        """Return the event of a token, none if it shows nothing."""
        if not token.text and token.finish_reason is None and not self.wants_logprobs:
            return []
        index, tokens = self.n * number + token.index, None
        self._sent[index] = None if token.finish_reason else (self._sent.get(index) or 0) + len(token.text)
        if self.wants_logprobs:
            tokens = [token] if token.finish_reason != "eos" else []
        delta = self.form.delta(index, token.text, End.of_token(self._body, token), tokens)
        is_silent = tokens is None and token.finish_reason is None and delta.get("delta") == {}
        return [] if is_silent else [self._event([delta])]

    def closing(self, number: int, completion: Completion) -> list[Event]:
        """Return the last events of the samples whose last token came before they ended."""
        nothing: Tokens = [] if self.wants_logprobs else None
        events = []
        for sample in completion.samples:
            index = self.n * number + sample.output.index
            if (sent := self._sent.get(index, 0)) is not None:
                end = End.of_sample(self._body, sample)
                events.append(self._event([self.form.delta(index, sample.text[sent:], end, nothing)]))
        return events

    def hear(self, number: int, token: TokenEvent) -> None:
        """Keep a token for a whole answer with logprobs."""
        if token.finish_reason != "eos":
            self._tokens.setdefault((number, token.index), []).append(token)

    def _event(self, choices: list[dict[str, Any]]) -> Event:
        usage = {"usage": None} if self.wants_usage else {}
        return None, {**self._head, "object": self.form.piece, "choices": choices, **usage}

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the answer as one object. `completions` are those of the prompts, in order."""
        nothing: Tokens = [] if self.wants_logprobs else None
        best = [
            (number, sample)
            for number, completion in enumerate(completions)
            for sample in _best(completion.samples, self.n)
        ]
        choices = [
            self.form.choice(
                index,
                sample.text,
                End.of_sample(self._body, sample),
                self._tokens.get((number, sample.output.index), nothing),
            )
            for index, (number, sample) in enumerate(best)
        ]
        return {**self._head, "object": self.form.whole, "choices": choices, "usage": self.usage(completions)}

    def ending(self, completions: Sequence[Completion]) -> list[Event]:
        """Return what a stream ends with."""
        last = [(None, self._event([])[1] | {"usage": self.usage(completions)})] if self.wants_usage else []
        return [*last, (None, "[DONE]")]

    def failure(self, message: str) -> list[Event]:
        """Return the event of a stream that ends with an error."""
        return [(None, refusal(500, message))]

    def usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return how many tokens were in the prompts, were generated, and were found in the prefix cache."""
        written = sum(len(sample.tokens) for completion in completions for sample in completion.samples)
        cached = sum(completion.samples[0].output.num_cached for completion in completions)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self._prompt_tokens + written,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def refusal(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error in this form."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _best(samples: Sequence[Sample], count: int) -> Sequence[Sample]:
    """Return so many samples, those with the highest mean logprob first if there are more."""
    if len(samples) == count:
        return samples
    return sorted(samples, key=lambda one: -math.inf if one.logprobs is None else -float(one.logprobs.mean()))[:count]


def _finite(logprob: float) -> float:
    """Return a logprob that JSON can hold. NaN is none: the engine gives no such token."""
    return LEAST if logprob == -math.inf else logprob
