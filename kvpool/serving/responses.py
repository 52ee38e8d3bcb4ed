"""``POST /v1/responses``: requests and answers in the form of OpenAI's newer API, without state."""

from __future__ import annotations

import json
import time
import uuid
from typing import Annotated, Any, ClassVar

from openai.types.responses.response_create_params import ResponseCreateParamsBase
from pydantic import Field

from kvpool.adapters.mlx_lm.engine import Completion
from kvpool.serving.answers import BlockAnswer, End, call_id, event
from kvpool.serving.requests import MOST, TOOLS, Dicts, Indirect, Refused, object_of, text_of

TYPES = {"text": "output_text", "thinking": "reasoning_text"}
MORE: dict[str, dict[str, Any]] = {"text": {"logprobs": []}, "thinking": {}}
ITEMS = {"text": "message", "thinking": "reasoning"}
PARTS = ("input_text", "output_text", "summary_text", "reasoning_text", "text", "refusal")
FREE = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
BROKEN = (AttributeError, KeyError, TypeError)  # of what is not whole


class ResponsesRequest(Indirect):
    """The body. A client sends its whole conversation: nothing is kept."""

    official: ClassVar = ResponseCreateParamsBase.__annotations__
    not_done: ClassVar = {"background": (False,), "top_logprobs": (0,)} | dict.fromkeys(
        ("conversation", "moderation", "previous_response_id", "prompt"), ()
    )
    tool_types: ClassVar = ("function", "custom")
    names: ClassVar = {"messages": "input", "reasoning_effort": "reasoning.effort", "response_format": "text.format"}
    same = ("temperature", "top_p", "parallel_tool_calls", "stream", "prompt_cache_retention")

    input: str | Annotated[Dicts, Field(min_length=1)]
    instructions: str = ""
    max_output_tokens: int | None = Field(None, ge=1, le=MOST)
    temperature: float = 1.0
    top_p: float = 1.0
    tools: Annotated[Dicts, Field(max_length=TOOLS)] = Field([])
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    reasoning: dict[str, Any] = Field({})
    text: dict[str, Any] = Field({})
    prompt_cache_retention: Any = None
    stream: bool = False

    def asked(self) -> dict[str, Any]:
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        told: Dicts = [{"role": "system", "content": self.instructions}] if self.instructions else []
        for number, item in enumerate(items):
            try:
                _add(told, item, f"input.{number}")
            except BROKEN as error:
                raise Refused(400, f"input.{number}: {_wrong(error)}", "input") from None
        asked: dict[str, Any] = {"messages": told, "reasoning_effort": self.reasoning.get("effort")}
        try:
            asked |= {"tools": [_tool(one) for one in self.tools], "tool_choice": _choice(self.tool_choice)}
        except BROKEN as error:
            raise Refused(400, f"tools: of a tool, or of tool_choice, {_wrong(error)}", "tools") from None
        if form := self.text.get("format"):
            is_schema = isinstance(form, dict) and form.get("type") == "json_schema"
            asked["response_format"] = {"type": "json_schema", "json_schema": form} if is_schema else form
        return asked | {"max_tokens": self.max_output_tokens or MOST}  # agents send none: then it is what fits


def _wrong(error: Exception) -> str:
    return f"the field {error} is missing" if isinstance(error, KeyError) else "a field has the wrong type"


def _add(told: Dicts, item: dict[str, Any], place: str) -> None:
    """Add an item to the messages of a chat: what an assistant thinks, says and calls in a row is one of them."""
    kind = item.get("type", "message")
    if kind == "message" and item["role"] != "assistant":
        told.append({"role": item["role"], "content": text_of(item["content"], place, PARTS)})
        return
    if kind in ("function_call_output", "custom_tool_call_output"):
        said = text_of(item["output"], place, PARTS)
        told.append({"role": "tool", "tool_call_id": item["call_id"], "content": said})
        return
    if kind not in ("message", "reasoning", "function_call", "custom_tool_call"):
        raise Refused(400, f"{place}: an item {kind!r:.80} is not supported, the model takes text", "input")
    if not told or told[-1]["role"] != "assistant" or (kind == "message" and told[-1]["content"]):
        told.append({"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []})
    if kind == "message":
        told[-1]["content"] = text_of(item["content"], place, PARTS)
    elif kind == "reasoning":
        told[-1]["reasoning_content"] += text_of(item.get("content") or item.get("summary"), place, PARTS)
    else:
        said = item["arguments"] if kind == "function_call" else json.dumps({"input": item["input"]})
        told[-1]["tool_calls"].append({"id": item["call_id"], "function": {"name": item["name"], "arguments": said}})


def _tool(one: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as chats have it. One that takes free text has it as an argument."""
    kept = {name: one.get(name) for name in ("name", "description", "parameters", "strict")}
    if one["type"] == "custom":
        grammar = (one.get("format") or {}).get("definition")
        kept |= {"parameters": FREE, "description": "\n".join(filter(None, (one.get("description"), grammar)))}
    return {"type": "function", "function": kept}


def _choice(choice: Any) -> Any:
    """Return the choice of a tool as chats have it."""
    if isinstance(choice, str):
        return choice
    if choice["type"] == "allowed_tools":
        tools = [{"type": "function", "function": {"name": one["name"]}} for one in choice["tools"]]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice["mode"], "tools": tools}}
    return {"type": "function", "function": {"name": choice["name"]}}


class ResponseAnswer(BlockAnswer):
    """The answer to one request."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        asked = self._asked
        self._free = {one.get("name") for one in asked.tools if one["type"] == "custom"}
        self._number = -1  # of the last event
        body = self._body
        self._head: dict[str, Any] = {
            **dict.fromkeys(("error", "incomplete_details", "previous_response_id", "usage", "user")),
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "instructions": asked.instructions or None,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": {},
            "model": self._model,
            "output": [],
            "parallel_tool_calls": asked.parallel_tool_calls,
            "reasoning": {"effort": body.reasoning_effort, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}, **asked.text},
            "tool_choice": asked.tool_choice,
            "tools": asked.tools,
            "top_p": body.top_p,
            "truncation": "disabled",
        }

    def _event(self, name: str, /, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": name, "sequence_number": self._number, **fields}, name)

    def opening(self, prompts: int) -> list[bytes]:
        return [self._event(f"response.{name}", response=self._head) for name in ("created", "in_progress")]

    def begun(self, kind: str, said: str) -> dict[str, Any]:
        if kind == "call":
            is_free = said in self._free
            head = {"type": "custom_tool_call", "input": ""} if is_free else {"type": "function_call", "arguments": ""}
            return head | {"id": f"fc_{uuid.uuid4().hex}", "call_id": call_id(), "name": said, "status": "in_progress"}
        own: dict[str, Any] = {"summary": []} if kind == "thinking" else {"role": "assistant"}
        name = ITEMS[kind]
        return {"type": name, "id": f"{name[:3]}_{uuid.uuid4().hex}", "status": "in_progress", "content": [], **own}

    def _part(self, kind: str, text: str) -> dict[str, Any]:
        more: dict[str, Any] = {"annotations": []} if kind == "text" else {}
        return {"type": TYPES[kind], "text": text, **more, **MORE[kind]}

    def _of(self, index: int, name: str, /, **fields: Any) -> bytes:
        """Return an event of a block."""
        place = {} if self._kinds[index] == "call" else {"content_index": 0}
        fields = {"item_id": self._blocks[index]["id"], "output_index": index} | place | fields
        return self._event(f"response.{name}", **fields)

    def open(self, index: int) -> list[bytes]:
        block, kind = self._blocks[index], self._kinds[index]
        events = [self._event("response.output_item.added", output_index=index, item=block)]
        return events if kind == "call" else [*events, self._of(index, "content_part.added", part=self._part(kind, ""))]

    def delta(self, index: int, kind: str, said: str) -> list[bytes]:
        """Return the events of more text. The input of a tool that takes free text is told at its end."""
        if self._blocks[index]["type"] == "custom_tool_call":
            return []
        name = "function_call_arguments" if kind == "arguments" else TYPES[kind]
        return [self._of(index, f"{name}.delta", delta=said, **MORE.get(kind, {}))]

    def close(self, index: int) -> list[bytes]:
        item, kind, told = self._item(index), self._kinds[index], self._of
        if item["type"] == "custom_tool_call":
            name, said = "custom_tool_call_input", item["input"]
            events = [told(index, f"{name}.delta", delta=said), told(index, f"{name}.done", input=said)]
        elif kind == "call":
            own = {"name": item["name"], "arguments": item["arguments"]}
            events = [told(index, "function_call_arguments.done", **own)]
        else:
            part = item["content"][0]
            events = [told(index, f"{TYPES[kind]}.done", text=part["text"], **MORE[kind])]
            events += [told(index, "content_part.done", part=part)]
        return [*events, self._event("response.output_item.done", output_index=index, item=item)]

    def _item(self, index: int) -> dict[str, Any]:
        """Return a block with what it says."""
        block, kind, said = self._blocks[index], self._kinds[index], self._said[index]
        is_cut = self._has_ended and self._reader.is_cut and index == len(self._blocks) - 1
        own: dict[str, Any] = {"status": "incomplete" if is_cut else "completed"}
        if block["type"] == "custom_tool_call":
            own["input"] = (object_of(said) or {}).get("input", said)
        elif kind == "call":
            own["arguments"] = said
        else:
            own["content"] = [self._part(kind, said)]
        return block | own

    def end(self, completion: Completion) -> list[bytes]:
        response = self.object(completion)
        return [self._event(f"response.{response['status']}", response=response)]

    def failure(self, message: str) -> list[bytes]:
        response = self._head | {"status": "failed", "error": {"code": "server_error", "message": message}}
        return [self._event("response.failed", response=response)]

    def object(self, completion: Completion) -> dict[str, Any]:
        sample, told = completion.samples[0], self._head
        cached, written = sample.output.num_cached, len(sample.tokens)
        usage = {
            "input_tokens": self._prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": self._manner.num_reasoned(sample)},
            "total_tokens": self._prompt_tokens + written,
        }
        items = [self._item(index) for index in range(len(self._blocks))]
        told = told | {"status": "completed", "output": items, "usage": usage}
        if End.of(self._body, sample).reason == "length" or self._reader.is_cut:
            told |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        return told
