"""``POST /v1/messages``: requests and answers in the form of Anthropic's API."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from kvpool.adapters.mlx_lm.engine import Completion, TokenEvent
from kvpool.serving.requests import MOST, Addressed, ChatRequest, Label, Message, Part, Stops, Strict, Text

REASONS = {"eos": "end_turn", "stop": "stop_sequence", "length": "max_tokens", "cancelled": "end_turn"}
KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


class CacheControl(Strict):
    """Where a client wants a prefix to be cached. It has no effect: every prefix is cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class Block(Part):
    """A block of text."""

    cache_control: CacheControl | None = None


class Turn(Strict):
    """A message of a conversation."""

    role: Literal["user", "assistant"]
    content: Text | Annotated[list[Block], Field(min_length=1, max_length=1024, fail_fast=True)]


class Metadata(Strict):
    """Who sends the request. It has no effect."""

    user_id: Label | None = None


class MessagesRequest(Addressed):
    """The body of a request."""

    max_tokens: int = Field(ge=1, le=MOST)
    messages: Annotated[list[Turn], Field(min_length=1, max_length=4096, fail_fast=True)]
    system: Text | Annotated[list[Block], Field(max_length=1024, fail_fast=True)] | None = None
    temperature: float = Field(1.0, ge=0, le=1)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, le=MOST)
    stop_sequences: Stops = Field([])
    stream: bool = False
    metadata: Metadata | None = None
    cache_control: CacheControl | None = None

    def as_chat(self) -> ChatRequest:
        """Return the chat that asks for the same."""
        turns: list[tuple[str, Any]] = [(one.role, one.content) for one in self.messages]
        if self.system:
            turns.insert(0, ("system", self.system))
        names = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")
        return ChatRequest.model_construct(
            messages=[Message.model_construct(role=role, content=content) for role, content in turns],
            stop=self.stop_sequences,
            **{name: getattr(self, name) for name in names},
        )


class MessageAnswer:
    """The answer to one request. It is to messages what `Answer` is to OpenAI's forms."""

    def __init__(self, model: str, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}

    def opening(self, prompts: int) -> bytes:
        """Return what a stream begins with."""
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}  # what was cached is known at the end
        end = {"stop_reason": None, "stop_sequence": None}
        message: dict[str, Any] = {**self._head, "content": [], **end, "usage": usage}
        block = {"type": "text", "text": ""}
        return _event("message_start", message=message) + _event("content_block_start", index=0, content_block=block)

    def piece(self, number: int, token: TokenEvent) -> bytes:
        """Return the event of a token, nothing if it shows nothing."""
        delta = {"type": "text_delta", "text": token.text}
        return _event("content_block_delta", index=0, delta=delta) if token.text else b""

    def ending(self, completions: Sequence[Completion]) -> bytes:
        """Return what a stream ends with."""
        delta, usage = self._end(completions[0]), self._usage(completions[0])
        return (
            _event("content_block_stop", index=0)
            + _event("message_delta", delta=delta, usage=usage)
            + _event("message_stop")
        )

    def failure(self, message: str) -> bytes:
        """Return the event of a stream that ends with an error."""
        return _event("error", error=refusal(500, message)["error"])

    def hear(self, number: int, token: TokenEvent) -> None:
        """Do nothing: this form has no logprobs."""

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the answer as one object."""
        content = [{"type": "text", "text": completions[0].text}]
        return {**self._head, "content": content, **self._end(completions[0]), "usage": self._usage(completions[0])}

    def _end(self, completion: Completion) -> dict[str, Any]:
        sample = completion.samples[0]
        return {"stop_reason": REASONS[sample.finish_reason], "stop_sequence": sample.stop}

    def _usage(self, completion: Completion) -> dict[str, int]:
        sample = completion.samples[0]
        cached = sample.output.num_cached
        return {
            "input_tokens": self._prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "output_tokens": len(sample.tokens),
        }


def refusal(status: int, message: str) -> dict[str, Any]:
    """Return an error in this form."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _event(name: str, **fields: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n".encode()
