"""``POST /v1/messages``: requests and answers in the form of Anthropic's API."""

from __future__ import annotations

import json
import uuid
from typing import Annotated, Any, ClassVar

from anthropic.types import beta
from anthropic.types.beta.message_create_params import MessageCreateParamsBase
from pydantic import Field

from kvpool.adapters.mlx_lm.engine import Completion
from kvpool.serving.answers import BlockAnswer, End, call_id, event
from kvpool.serving.requests import MARKED, MOST, TOOLS, Dicts, Indirect, Refused, Stops, as_sdk, object_of, text_of

REASONS = {"eos": "end_turn", "stop": "stop_sequence", "length": "max_tokens"}
DELTAS = {  # of a piece: how its event is called, and the field
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "arguments": ("input_json_delta", "partial_json"),
}
KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
BILLING = "x-anthropic-billing-header:"  # a text of Claude Code that differs in each request, so no prefix were found


class CountRequest(Indirect):
    """The body of ``POST /v1/messages/count_tokens``: a conversation. A last message of the assistant goes on."""

    official: ClassVar = MessageCreateParamsBase.__annotations__
    not_done: ClassVar = {"mcp_servers": ([],), "output_format": (), "thread": ()}
    tool_types: ClassVar = ("custom",)
    names: ClassVar = {"response_format": "output_config.format", "reasoning_effort": "output_config.effort"}

    messages: Annotated[Dicts, as_sdk(list[beta.BetaMessageParam]), Field(min_length=1)]
    system: Annotated[Any, as_sdk(str | list[beta.BetaTextBlockParam])] = ""
    tools: Annotated[Dicts, as_sdk(list[beta.BetaToolParam]), Field(max_length=TOOLS)] = Field([])
    tool_choice: Annotated[dict[str, Any], as_sdk(beta.BetaToolChoiceParam)] = Field({})
    thinking: Annotated[dict[str, Any], as_sdk(beta.BetaThinkingConfigParam)] = Field({})
    output_config: Annotated[dict[str, Any], as_sdk(beta.BetaOutputConfigParam)] = Field({})
    cache_control: Annotated[dict[str, Any], as_sdk(beta.BetaCacheControlEphemeralParam)] = Field({})

    def asked(self) -> dict[str, Any]:
        turns = [_turn(one, f"messages.{number}.content") for number, one in enumerate(self.messages)]
        messages, system, told = [said for turn in turns for said in turn], self.system, {}
        if not isinstance(system, str):
            told = {"cache_control": _mark(system)}
            system = text_of([one for one in system if not one["text"].startswith(BILLING)], "system")
        if system:
            messages.insert(0, {"role": "system", "content": system, **told})
        messages[0]["cache_control"] = _mark([messages[0], *self.tools])  # tools are before all messages
        messages[-1]["cache_control"] = _mark([messages[-1], {"cache_control": self.cache_control}])
        asked: dict[str, Any] = {"messages": messages}
        names = {"name": "name", "description": "description", "parameters": "input_schema"}
        asked["tools"] = [{"function": {ours: one.get(name) for ours, name in names.items()}} for one in self.tools]
        last = messages[-1]
        is_begun = last["role"] == "assistant" and last["content"] and not last["tool_calls"]
        asked["continue_final_message"] = bool(is_begun)
        if self.tool_choice:
            named = {"type": "function", "function": {"name": self.tool_choice.get("name")}}
            asked["tool_choice"] = {"any": "required", "tool": named}.get(kind := self.tool_choice["type"], kind)
            asked["parallel_tool_calls"] = not self.tool_choice.get("disable_parallel_tool_use")
        if self.thinking:
            asked["chat_template_kwargs"] = {"enable_thinking": self.thinking["type"] != "disabled"}
        asked["reasoning_effort"] = self.output_config.get("effort")
        if form := self.output_config.get("format"):
            asked["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": form["schema"]}}
        return asked


class MessagesRequest(CountRequest):
    """The body of ``POST /v1/messages``."""

    not_done: ClassVar = CountRequest.not_done | {"compaction": ()}
    same = ("max_tokens", "temperature", "top_p", "top_k", "stream")

    max_tokens: int = Field(ge=1, le=MOST)
    temperature: float = Field(1.0, ge=0, le=1)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, le=MOST)
    stop_sequences: Stops = Field([])
    stream: bool = False

    def asked(self) -> dict[str, Any]:
        return super().asked() | {"stop": self.stop_sequences}


def _mark(blocks: Dicts) -> dict[str, Any] | None:
    """Return the `cache_control` of some blocks that asks for the longest time."""
    marks = [mark for one in blocks if isinstance(mark := one.get("cache_control"), dict) and mark]
    return max(marks, key=lambda mark: MARKED.get(str(mark.get("ttl")), 0), default=None)


def _turn(one: dict[str, Any], place: str) -> Dicts:
    """Return the messages of a chat that say the same: results of tools come first."""
    role, blocks = one["role"], one.get("content") or ""
    if isinstance(blocks, str):
        blocks = [{"type": "text", "text": blocks}]
    texts, calls, thoughts, told = [], [], "", []
    for number, block in enumerate(blocks):
        kind, at = block.get("type", "text"), f"{place}.{number}"
        if role == "user" and kind == "tool_result":
            text = text_of(block.get("content"), f"{at}.content")
            told.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text})
        elif role == "assistant" and kind == "tool_use":
            arguments = json.dumps(block["input"], ensure_ascii=False)
            calls.append({"id": block["id"], "function": {"name": block["name"], "arguments": arguments}})
        elif role == "assistant" and kind in ("thinking", "redacted_thinking"):
            thoughts += block.get("thinking") or ""
        elif kind == "text":
            texts.append(block["text"])
        else:
            raise Refused(400, f"{at}: {kind} is not supported here, the {role} may say text", "messages")
    said = {"role": role, "content": "".join(texts)}
    if role == "assistant":
        turn = [{**said, "tool_calls": calls, "reasoning_content": thoughts}]
    else:
        turn = [*told, said] if texts or not told else told
    turn[-1]["cache_control"] = _mark(blocks)
    return turn


class MessageAnswer(BlockAnswer):
    """The answer to one request."""

    ping = event({"type": "ping"}, "ping")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        own = {"type": "message", "role": "assistant", "model": self._model}
        self._head: dict[str, Any] = {"id": f"msg_{uuid.uuid4().hex}", **own}

    def opening(self, prompts: int) -> list[bytes]:
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}  # what was cached is known at the end
        end = {"stop_reason": None, "stop_sequence": None}
        return [_event("message_start", message={**self._head, "content": [], **end, "usage": usage})]

    def begun(self, kind: str, said: str) -> dict[str, Any]:
        if kind == "call":
            return {"type": "tool_use", "id": call_id(), "name": said, "input": {}}
        return {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})

    def open(self, index: int) -> list[bytes]:
        return [_event("content_block_start", index=index, content_block=self._blocks[index])]

    def delta(self, index: int, kind: str, said: str) -> list[bytes]:
        name, field = DELTAS[kind]
        return [_event("content_block_delta", index=index, delta={"type": name, field: said})]

    def close(self, index: int) -> list[bytes]:
        return [_event("content_block_stop", index=index)]

    def end(self, completion: Completion) -> list[bytes]:
        end = _event("message_delta", delta=self._end(completion), usage=self._usage(completion))
        return [end, _event("message_stop")]

    def failure(self, message: str) -> list[bytes]:
        return [_event("error", error=refusal(500, message)["error"])]

    def object(self, completion: Completion) -> dict[str, Any]:
        for block, said in zip(self._blocks, self._said, strict=True):
            if block["type"] == "tool_use":
                block["input"] = object_of(said) or {}
            else:
                block[block["type"]] = said
        end, usage = self._end(completion), self._usage(completion)
        return {**self._head, "content": self._blocks, **end, "usage": usage}

    def _end(self, completion: Completion) -> dict[str, Any]:
        end = End.of(self._body, completion.samples[0])
        if self._reader.num_calls and end.reason != "length" and not self._reader.is_cut:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        return {"stop_reason": REASONS[end.reason], "stop_sequence": end.by}

    def _usage(self, completion: Completion) -> dict[str, int]:
        sample = completion.samples[0]
        cached = sample.output.num_cached
        told = {"input_tokens": self._prompt_tokens - cached, "cache_creation_input_tokens": 0}
        return told | {"cache_read_input_tokens": cached, "output_tokens": len(sample.tokens)}


def refusal(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """Return an error in this form. The official client goes on without a `thread` if its details say so."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    more = {"details": {"error_code": "thread_unsupported_request"}} if param == "thread" else {}
    return {"type": "error", "error": {"type": kind, "message": message, **more}}


def _event(name: str, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)
