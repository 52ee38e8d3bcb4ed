"""Answers to one request, whole or in pieces: choices as OpenAI's older APIs have them, or a list of blocks."""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Callable, Sequence
from itertools import accumulate
from json.encoder import encode_basestring_ascii as quote
from typing import Any, NamedTuple

from kvpool.adapters.mlx_lm.engine import Completion, Sample, TokenEvent
from kvpool.serving.requests import ChatRequest, Generation, object_of
from kvpool.serving.speech import Manner, Reader

Tokens = Sequence[TokenEvent] | None  # that have the logprobs of a text. None: nobody wants them
Told = dict[str, Any]
FIELDS = {"thinking": "reasoning_content", "text": "content"}
LEAST = -9999.0  # in place of a logprob of minus infinity, which JSON does not have
encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode  # in ASCII: a model may say half a character


def call_id() -> str:
    """Return an id for a call of a tool."""
    return f"call_{uuid.uuid4().hex[:24]}"


def event(data: Any, name: str | None = None) -> bytes:
    """Return an event of a stream."""
    text = f"data: {data if isinstance(data, str) else encode(data)}\n\n"
    return (text if name is None else f"event: {name}\n{text}").encode()


class End(NamedTuple):
    """The end of an answer. `reason` is "eos": by itself; "stop": `by` a stop of the client; "length": by all else."""

    reason: str = ""  # "": it goes on
    by: str | int | None = None

    @classmethod
    def of(cls, body: Generation, one: TokenEvent | Sample) -> End:
        """Return it by what the engine says of the last token, or of a sample."""
        if one.finish_reason is None:
            return cls()
        if one.stop in body.stop:
            return cls("stop", one.stop)
        last = one.token if isinstance(one, TokenEvent) else int(one.tokens[-1]) if len(one.tokens) else None
        if one.finish_reason == "eos" and last in body.stop_token_ids:
            return cls("stop", last)
        return cls("eos" if one.finish_reason in ("eos", "stop") else "length")

    def named(self, calls: bool = False) -> Told:
        """Return the fields of a choice. `calls`: it ends with calls that are whole."""
        if not self.reason:
            return {"finish_reason": None}
        why = "length" if self.reason == "length" else "tool_calls" if calls else "stop"
        return {"finish_reason": why} | ({} if self.by is None else {"stop_reason": self.by})


class Answer:
    """An answer of choices: sample i of prompt p is the choice p * n + i, the best first if there are more than n."""

    ping = b""  # of a stream that is silent, beside a comment
    prefix, kind, piece_kind = "cmpl", "text_completion", "text_completion"
    first: Callable[[int], list[Told]]  # of a choice's number: what it begins with in a stream
    delta: Callable[[int, str, End, Tokens], Told]  # a piece of a choice
    plain: Callable[[int, str], str | None]  # what a piece says as JSON, if it is nothing but text: most pieces are
    choice: Callable[[int, str, End, Tokens], Told]  # a whole choice

    def __init__(self, model: str, body: Generation, prompt_tokens: int, decode: Callable[[int], str]) -> None:
        self._n, self._body, self._decode, self._prompt_tokens = body.n, body, decode, prompt_tokens
        self._wants_usage = bool(body.stream_options.get("include_usage"))
        self._nothing: Tokens = None if body.tops is None else []
        self._tokens: dict[tuple[int, int], list[TokenEvent]] = {}  # of each sample, if the request wants logprobs
        self._sent: dict[int, int | None] = {}  # characters of each choice of a stream, None: it has ended
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        usage = {"usage": None} if self._wants_usage else {}
        self._begin = f'data: {encode(self._head | {"object": self.piece_kind} | usage)[:-1]},"choices":['

    def opening(self, prompts: int) -> list[bytes]:
        """Return what a stream begins with."""
        return [self._event(choice) for i in range(prompts * self._n) for choice in self.first(i)]

    def told(self, number: int, item: TokenEvent | Completion) -> list[bytes]:
        """Return the events of an item of a stream: a token, or the end of a prompt, if a sample had no last token."""
        if isinstance(item, Completion):
            samples = [(self._n * number + one.output.index, one) for one in item.samples]
            left = [(index, self._sent.get(index, 0), one) for index, one in samples]
            ends = [(index, one.text[at:], End.of(self._body, one)) for index, at, one in left if at is not None]
            return [self._event(self.delta(*one, self._nothing)) for one in ends]
        index, tokens, is_plain = self._n * number + item.index, self._nothing, item.finish_reason is None
        is_plain = is_plain and tokens is None
        if is_plain and not item.text:
            return []
        self._sent[index] = None if item.finish_reason else (self._sent.get(index) or 0) + len(item.text)
        if is_plain and (said := self.plain(index, item.text)):
            text = f'{self._begin}{{"index":{index},{said},"logprobs":null,"finish_reason":null}}]}}\n\n'
            return [text.encode()]
        if tokens is not None and item.finish_reason != "eos":
            tokens = [item]
        delta = self.delta(index, item.text, End.of(self._body, item), tokens)
        return [] if is_plain and delta.get("delta") == {} else [self._event(delta)]

    def hear(self, number: int, item: TokenEvent) -> None:
        """Keep a token for a whole answer with logprobs."""
        if item.finish_reason != "eos":
            self._tokens.setdefault((number, item.index), []).append(item)

    def _event(self, choice: Told) -> bytes:
        return f"{self._begin}{encode(choice)}]}}\n\n".encode()

    def whole(self, completions: Sequence[Completion]) -> Told:
        """Return the answer as one object. `completions` are those of the prompts, in order."""
        best = [(n, one) for n, completion in enumerate(completions) for one in _best(completion.samples, self._n)]
        heard = [self._tokens.get((number, one.output.index), self._nothing) for number, one in best]
        choices = [
            self.choice(index, one.text, End.of(self._body, one), tokens)
            for index, ((_, one), tokens) in enumerate(zip(best, heard, strict=True))
        ]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage(completions)}

    def ending(self, completions: Sequence[Completion]) -> list[bytes]:
        """Return what a stream ends with."""
        if not self._wants_usage:
            return [event("[DONE]")]
        last = {**self._head, "object": self.piece_kind, "choices": [], "usage": self._usage(completions)}
        return [event(last), event("[DONE]")]

    def failure(self, message: str) -> list[bytes]:
        """Return the events of a stream that ends with an error."""
        return [event(refusal(500, message))]

    def _usage(self, completions: Sequence[Completion]) -> Told:
        """Return how many tokens were in the prompts, were generated, and were found in the prefix cache."""
        written = sum(len(sample.tokens) for completion in completions for sample in completion.samples)
        cached = sum(completion.samples[0].output.num_cached for completion in completions)
        told = {"prompt_tokens": self._prompt_tokens, "completion_tokens": written}
        return told | {"total_tokens": sum(told.values()), "prompt_tokens_details": {"cached_tokens": cached}}


class TextAnswer(Answer):
    """Of ``/v1/completions``. Each choice begins with its text in `echo`, whose tokens `scored` has if it is scored."""

    def __init__(self, *args: Any, echo: Sequence[str] = ()) -> None:
        super().__init__(*args)
        self._echo, self._offsets = echo, dict[int, int]()  # where the next token of a choice begins
        self.scored: list[list[TokenEvent]] = []

    def first(self, index: int) -> list[Told]:
        return [self.delta(index, self._echo[index], End(), self._before(index, None))] if self._echo else []

    def choice(self, index: int, text: str, end: End, tokens: Tokens) -> Told:
        return self.delta(index, self._echo[index] + text if self._echo else text, end, self._before(index, tokens))

    def plain(self, index: int, text: str) -> str:
        return f'"text":{quote(text)}'

    def _before(self, index: int, tokens: Tokens) -> Tokens:
        return [*self.scored[index], *(tokens or ())] if self.scored else tokens

    def delta(self, index: int, text: str, end: End, tokens: Tokens) -> Told:
        listed = None if tokens is None else self._logprobs(index, tokens)
        return {"index": index, "text": text, "logprobs": listed} | end.named()

    def _logprobs(self, index: int, tokens: Sequence[TokenEvent]) -> Told:
        texts, known = [self._decode(one.token) for one in tokens], [one.id is not None and one for one in tokens]
        *offsets, self._offsets[index] = accumulate(map(len, texts), initial=self._offsets.get(index, 0))
        return {
            "tokens": texts,
            "token_logprobs": [_finite(one.logprob) if one else None for one in known],  # none of a prompt's first
            "top_logprobs": [self._likeliest(one) if one else None for one in known],
            "text_offset": offsets,
        }

    def _likeliest(self, one: TokenEvent) -> dict[str, float]:
        """Return likely tokens by their text. Another token with a text that is there already goes by its number."""
        named: dict[str, float] = {}
        for token, logprob in one.top:
            text = self._decode(token)
            named[f"token_id:{token}" if text in named else text] = _finite(logprob)
        return named


class ChatAnswer(Answer):
    """Of ``/v1/chat/completions``. `spell` gives the bytes of a token."""

    prefix, kind, piece_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, *args: Any, spell: Callable[[int], bytes], manner: Manner) -> None:
        super().__init__(*args)
        self._spell, self._manner, self._readers = spell, manner, dict[int, Reader]()

    def first(self, index: int) -> list[Told]:
        self._readers[index] = Reader(self._manner)
        return [{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]

    def choice(self, index: int, text: str, end: End, tokens: Tokens) -> Told:
        self.first(index)
        told = self.delta(index, text, end, tokens)
        said = told.pop("delta")
        for call in said.get("tool_calls", ()):
            del call["index"]
        return told | {"message": {"role": "assistant", "content": None if "tool_calls" in said else "", **said}}

    def plain(self, index: int, text: str) -> str | None:
        kind = self._readers[index].plain(text)
        return None if kind is None else f'"delta":{{"{FIELDS[kind]}":{quote(text)}}}'

    def delta(self, index: int, text: str, end: End, tokens: Tokens) -> Told:
        reader, said = self._readers[index], dict[str, Any]()
        last = reader.num_calls - 1
        for kind, piece in reader.read(text, end.reason):
            if kind in FIELDS:
                said[FIELDS[kind]] = said.get(FIELDS[kind], "") + piece
                continue
            calls = said.setdefault("tool_calls", [])
            if kind == "call":
                last += 1
                function = {"name": piece, "arguments": ""}
                calls.append({"index": last, "id": call_id(), "type": "function", "function": function})
            elif calls:
                calls[-1]["function"]["arguments"] += piece
            else:
                calls.append({"index": last, "function": {"arguments": piece}})
        listed = None if tokens is None else {"content": [self._logprob(one) for one in tokens], "refusal": None}
        is_called = reader.num_calls > 0 and not reader.is_cut
        return {"index": index, "delta": said, "logprobs": listed} | end.named(is_called)

    def _usage(self, completions: Sequence[Completion]) -> Told:
        told = sum(self._manner.num_reasoned(sample) for one in completions for sample in one.samples)
        return super()._usage(completions) | {"completion_tokens_details": {"reasoning_tokens": told}}

    def _logprob(self, one: TokenEvent) -> Told:
        return self._named(one.token, one.logprob) | {"top_logprobs": [self._named(*pair) for pair in one.top]}

    def _named(self, token: int, logprob: float) -> Told:
        return {"token": self._decode(token), "logprob": _finite(logprob), "bytes": list(self._spell(token))}


class BlockAnswer:
    """An answer that is a list of blocks: thoughts, texts and calls. It is told as `Answer` is, without logprobs."""

    ping = b""
    begun: Callable[[str, str], Told]  # of "thinking", "text" or "call" with its name: a block that says nothing yet
    opening: Callable[[int], list[bytes]]
    open: Callable[[int], list[bytes]]  # of a block's number: the events with which it begins
    delta: Callable[[int, str, str], list[bytes]]  # number, kind and text: the events of more text in it
    close: Callable[[int], list[bytes]]
    end: Callable[[Completion], list[bytes]]  # the events behind the last block
    failure: Callable[[str], list[bytes]]
    object: Callable[[Completion], Told]  # the whole answer

    def __init__(self, model: str, body: ChatRequest, prompt_tokens: int, manner: Manner, asked: Any = None) -> None:
        self._asked = asked  # the request, of which `body` is the chat
        self._model, self._body, self._prompt_tokens, self._manner = model, body, prompt_tokens, manner
        self._reader = Reader(manner)
        self._blocks: list[Told] = []  # as a stream begins them
        self._kinds: list[str] = []
        self._said: list[str] = []  # in each block
        self._sent, self._has_ended = 0, False  # characters of a stream

    def told(self, number: int, item: TokenEvent | Completion) -> list[bytes]:
        if isinstance(item, TokenEvent):
            return self._read(item.text, End.of(self._body, item))
        sample = item.samples[0]
        return [] if self._has_ended else self._read(sample.text[self._sent :], End.of(self._body, sample))

    def ending(self, completions: Sequence[Completion]) -> list[bytes]:
        begun = [] if self._blocks else self._add("text", "")
        return [*begun, *self.close(len(self._blocks) - 1), *self.end(completions[0])]

    def whole(self, completions: Sequence[Completion]) -> Told:
        self._read(completions[0].text, End.of(self._body, completions[0].samples[0]))
        if self._reader.is_cut and self._kinds and self._kinds[-1] == "call" and object_of(self._said[-1]) is None:
            del self._blocks[-1], self._kinds[-1], self._said[-1]  # with any arguments the call would look whole
        if not self._blocks:
            self._add("text", "")
        return self.object(completions[0])

    def _read(self, text: str, end: End) -> list[bytes]:
        """Keep what a text says. Return the events that say it."""
        self._sent, self._has_ended = self._sent + len(text), bool(end.reason)
        return [one for kind, said in self._reader.read(text, end.reason) for one in self._add(kind, said)]

    def _add(self, kind: str, said: str) -> list[bytes]:
        """Keep a piece. Return the events that say it: perhaps a new block, and its text."""
        events: list[bytes] = []
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


def refusal(status: int, message: str, param: str | None = None, code: str | None = None) -> Told:
    """Return an error in OpenAI's form."""
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
