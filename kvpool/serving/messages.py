"""``POST /v1/messages``: requests and answers in the form of Anthropic's API."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from kvpool.adapters.mlx_lm.engine import Completion, TokenEvent
from kvpool.serving.answers import End
from kvpool.serving.requests import MOST, TOOLS, Addressed, ChatRequest, Inputs, Label, Name, Part, Stops, Strict, Text
from kvpool.serving.speech import Manner, Reader

REASONS = {"eos": "end_turn", "stop": "stop_sequence", "length": "max_tokens"}
DELTAS = {  # of a piece: how its event is called, and the field
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "arguments": ("input_json_delta", "partial_json"),
}
KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


class CacheControl(Strict):
    """A hint to cache a prefix. It has no effect: every prefix is cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class Block(Part):
    """A block of text."""

    cache_control: CacheControl | None = None


class ThinkingBlock(Strict):
    """Earlier reasoning of the model. Its signature has no effect."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


class ToolUse(Strict):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: Label
    name: Name
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolResult(Strict):
    """The result of a tool."""

    type: Literal["tool_result"]
    tool_use_id: Label
    content: Text | Annotated[list[Block], Field(max_length=1024, fail_fast=True)] = ""
    is_error: bool = False
    cache_control: CacheControl | None = None


AnyBlock = Annotated[Block | ThinkingBlock | ToolUse | ToolResult, Field(discriminator="type")]


class Turn(Strict):
    """A message of a conversation."""

    role: Literal["user", "assistant"]
    content: Text | Annotated[list[AnyBlock], Field(min_length=1, max_length=1024, fail_fast=True)]

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        if sum(isinstance(block, ToolUse) for block in self.content) > TOOLS:
            raise ValueError(f"a message has at most {TOOLS} calls")
        wrong = ToolResult if self.role == "assistant" else ThinkingBlock | ToolUse
        if any(isinstance(block, wrong) for block in self.content):
            raise ValueError("results of tools come from the user, calls and thinking from the assistant")
        return self

    def as_chat(self) -> list[dict[str, Any]]:
        """Return the messages of a chat that say the same: results of tools come first."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results = [block for block in self.content if isinstance(block, ToolResult)]
        told = [{"role": "tool", "tool_call_id": one.tool_use_id, "content": _text(one.content)} for one in results]
        texts = [block.text for block in self.content if isinstance(block, Block)]
        calls = [
            {"id": one.id, "function": {"name": one.name, "arguments": json.dumps(one.input, ensure_ascii=False)}}
            for one in self.content
            if isinstance(one, ToolUse)
        ]
        thoughts = "".join([block.thinking for block in self.content if isinstance(block, ThinkingBlock)])
        own = {"tool_calls": calls, "reasoning_content": thoughts or None} if self.role == "assistant" else {}
        return [*told, *([{"role": self.role, "content": "".join(texts), **own}] if texts or own else [])]


class UserTool(Strict):
    """A tool of the client."""

    type: Literal["custom"] = "custom"
    name: Name
    description: Text | None = None
    input_schema: Inputs
    strict: bool = False
    cache_control: CacheControl | None = None

    def as_chat(self) -> dict[str, Any]:
        """Return the tool as chats have it."""
        described = {} if self.description is None else {"description": self.description}
        return {"function": {"name": self.name, **described, "parameters": self.input_schema}}


class ToolChoice(Strict):
    """The tool to call."""

    type: Literal["auto", "any", "none", "tool"]
    name: Name | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _names_a_tool(self) -> Self:
        if (self.name is not None) != (self.type == "tool"):
            raise ValueError('tool_choice of type "tool" must have a name, and no other type may')
        return self

    def as_chat(self) -> Any:
        """Return the choice as chats have it."""
        named = {"type": "function", "function": {"name": self.name}}
        return named if self.type == "tool" else "required" if self.type == "any" else self.type


class Thinking(Strict):
    """Whether the model thinks first, where its chat template leaves the choice. A budget has no effect."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, le=MOST)


class OutputFormat(Strict):
    """The JSON schema of the answer."""

    type: Literal["json_schema"]
    given: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """The form of the answer."""

    format: OutputFormat | None = None


class Metadata(Strict):
    """The sender of the request. It has no effect."""

    user_id: Label | None = None


class _Chat(ChatRequest):
    """A chat that messages ask for. Its errors name their field."""

    format_field = "output_config.format"


class CountRequest(Addressed):
    """The body of ``POST /v1/messages/count_tokens``: a conversation."""

    messages: Annotated[list[Turn], Field(min_length=1, max_length=4096, fail_fast=True)]
    system: Text | Annotated[list[Block], Field(max_length=1024, fail_fast=True)] | None = None
    tools: Annotated[list[UserTool], Field(max_length=TOOLS, fail_fast=True)] = Field([])
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None

    _chat: ChatRequest = PrivateAttr()

    def agree(self) -> None:
        """Make `chat`, the chat that asks for the same. See `Addressed`."""
        messages = [message for turn in self.messages for message in turn.as_chat()]
        if self.system:
            messages.insert(0, {"role": "system", "content": _text(self.system)})
        asked: dict[str, Any] = {"messages": messages, "tools": [tool.as_chat() for tool in self.tools]}
        if self.tool_choice is not None:
            asked["tool_choice"] = self.tool_choice.as_chat()
            asked["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        if self.thinking is not None:
            asked["chat_template_kwargs"] = {"enable_thinking": self.thinking.type != "disabled"}
        if self.output_config is not None and self.output_config.format is not None:
            form = {"name": "answer", "schema": self.output_config.format.given}
            asked["response_format"] = {"type": "json_schema", "json_schema": form}
        self._chat = _Chat.model_validate(asked | self.sampling())
        self._chat.agree()

    @property
    def chat(self) -> ChatRequest:
        """The chat that asks for the same."""
        return self._chat

    def sampling(self) -> dict[str, Any]:
        """Return the other fields of the chat."""
        return {}


class MessagesRequest(CountRequest):
    """The body of ``POST /v1/messages``."""

    max_tokens: int = Field(ge=1, le=MOST)
    temperature: float = Field(1.0, ge=0, le=1)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, le=MOST)
    stop_sequences: Stops = Field([])
    stream: bool = False
    metadata: Metadata | None = None

    def sampling(self) -> dict[str, Any]:
        """See `CountRequest`."""
        names = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")
        return {name: getattr(self, name) for name in names} | {"stop": self.stop_sequences}


class MessageAnswer:
    """The answer to one request. It is to messages what `Answer` is to OpenAI's forms."""

    def __init__(self, model: str, body: ChatRequest, prompt_tokens: int, manner: Manner) -> None:
        self._body, self._prompt_tokens, self._reader = body, prompt_tokens, Reader(manner)
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}
        self._blocks: list[dict[str, Any]] = []  # as a stream begins them
        self._said: list[str] = []  # in each block
        self._sent, self._has_ended = 0, False  # characters of a stream

    def opening(self, prompts: int) -> bytes:
        """Return what a stream begins with."""
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}  # what was cached is known at the end
        end = {"stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**self._head, "content": [], **end, "usage": usage})

    def piece(self, number: int, token: TokenEvent) -> bytes:
        """Return the events of a token, nothing if it shows nothing."""
        return self._read(token.text, End.of_token(self._body, token))

    def closing(self, number: int, completion: Completion) -> bytes:
        """Return the last events of an answer whose last token came before it ended."""
        sample = completion.samples[0]
        return b"" if self._has_ended else self._read(sample.text[self._sent :], End.of_sample(self._body, sample))

    def _read(self, text: str, end: End | None) -> bytes:
        """Keep what a text says. Return the events that say it."""
        self._sent, self._has_ended = self._sent + len(text), end is not None
        pieces = self._reader.read(text, end is not None, end is not None and end.is_whole)
        return b"".join([self._told(kind, said) for kind, said in pieces])

    def ending(self, completions: Sequence[Completion]) -> bytes:
        """Return what a stream ends with."""
        begun = b"" if self._blocks else self._told("text", "")
        end = _event("message_delta", delta=self._end(completions[0]), usage=self._usage(completions[0]))
        return begun + self._closed() + end + _event("message_stop")

    def failure(self, message: str) -> bytes:
        """Return the event of a stream that ends with an error."""
        return _event("error", error=refusal(500, message)["error"])

    def hear(self, number: int, token: TokenEvent) -> None:
        """Do nothing: this form has no logprobs."""

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the answer as one object."""
        self._read(completions[0].text, End.of_sample(self._body, completions[0].samples[0]))
        blocks = self._blocks
        if self._reader.is_cut and blocks and blocks[-1]["type"] == "tool_use" and _object(self._said[-1]) is None:
            del blocks[-1], self._said[-1]  # with any input the call would look whole
        if not blocks:
            self._told("text", "")
        for block, said in zip(blocks, self._said, strict=True):
            if block["type"] == "tool_use":
                block["input"] = _object(said) or {}
            else:
                block[block["type"]] = said
        end, usage = self._end(completions[0]), self._usage(completions[0])
        return {**self._head, "content": self._blocks, **end, "usage": usage}

    def _told(self, kind: str, said: Any) -> bytes:
        """Keep a piece. Return the events that say it: perhaps a new block, and its text."""
        events = b""
        if kind == "call" or not self._blocks or (self._blocks[-1]["type"] != kind and kind != "arguments"):
            events = self._closed() if self._blocks else b""
            self._blocks.append(_begun(kind, said))
            self._said.append("")
            events += _event("content_block_start", index=len(self._blocks) - 1, content_block=self._blocks[-1])
        if kind == "call":
            return events
        self._said[-1] += said
        name, field = DELTAS[kind]
        return events + _event("content_block_delta", index=len(self._blocks) - 1, delta={"type": name, field: said})

    def _closed(self) -> bytes:
        return _event("content_block_stop", index=len(self._blocks) - 1)

    def _end(self, completion: Completion) -> dict[str, Any]:
        end = End.of_sample(self._body, completion.samples[0])
        if self._reader.num_calls and end.reason != "length" and not self._reader.is_cut:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        return {"stop_reason": REASONS[end.reason], "stop_sequence": end.by}

    def _usage(self, completion: Completion) -> dict[str, int]:
        sample = completion.samples[0]
        cached = sample.output.num_cached
        return {
            "input_tokens": self._prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "output_tokens": len(sample.tokens),
        }


def _begun(kind: str, said: Any) -> dict[str, Any]:
    """Return a block without what it says."""
    if kind == "call":
        return {"type": "tool_use", "id": said.id, "name": said.name, "input": {}}
    return {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})


def _object(arguments: str) -> dict[str, Any] | None:
    """Return the arguments of a call as an object. None: they are no such JSON."""
    try:
        read = json.loads(arguments)
        json.dumps(read, allow_nan=False)  # 1e999 is none
    except (ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) else None


def _text(content: str | Sequence[Block]) -> str:
    return content if isinstance(content, str) else "".join([block.text for block in content])


def refusal(status: int, message: str) -> dict[str, Any]:
    """Return an error in this form."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _event(name: str, **fields: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n".encode()
