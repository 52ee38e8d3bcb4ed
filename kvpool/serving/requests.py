"""Requests of clients: strict types and ranges, checked before the engine sees a request."""

from __future__ import annotations

import json
from abc import abstractmethod
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvpool import namespace
from kvpool.serving.speech import MOST_CALLS, grammar_of_calls

MOST = 2**31 - 1
PROMPTS = 64  # of one request
TOPS = 20
BIASES = 300
BRACKETS = 2**18
Text = Annotated[str, Field(max_length=2**22)]
Stop = Annotated[str, Field(min_length=1, max_length=128)]  # each token of an answer is compared with all of them
Stops = Annotated[list[Stop], Field(max_length=8)]
TOOLS = 128
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Label = Annotated[str, Field(max_length=512)]
Token = Annotated[int, Field(ge=0, le=MOST)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]  # JSON's keys are text
Bias = Annotated[float, Field(ge=-100, le=100)]
SAMPLED = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "xtc_probability", "xtc_threshold"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)
NOT_IN_BEAMS = (*SAMPLED, "logit_bias", "stop", "stream", "logprobs", "response_format", "tools")
Form = TypeVar("Form", bound="Addressed")


class Refused(Exception):
    """A request gets an error: the HTTP status, a message for the client, the field that is wrong, and a code.

    With 429 and 503 it is told after how many seconds it may come again.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, wait: float = 0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.wait = status, message, param, code, wait


def few(data: Any) -> Any:
    """Refuse a long mapping before each of its items becomes an error."""
    if isinstance(data, dict) and len(data) > BIASES:
        raise ValueError(f"{len(data)} names, the limit is {BIASES}")
    return data


def of_object(schema: Any) -> Any:
    """Refuse a schema of another type."""
    if isinstance(schema, dict) and schema.get("type", "object") != "object":
        raise ValueError('must be the schema of an object: {"type": "object", ...}')
    return schema


Inputs = Annotated[dict[str, Any], BeforeValidator(of_object)]


class Strict(BaseModel):
    """Refuses unknown fields, other types, NaN and infinity. A field that is null counts as left out.

    Long lists of its forms have ``fail_fast``: to tell all that is wrong in a body takes half a minute.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in few(data).items() if value is not None}


class Addressed(Strict):
    """A request may name the model of this server."""

    model: str | None = None

    def agree(self) -> None:
        """Raise `Refused` if two fields contradict each other."""


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool = False


class Schema(Strict):
    """The schema of an answer. Its name and description have no effect, and every schema is strict."""

    name: Label
    description: Text | None = None
    given: dict[str, Any] = Field({}, alias="schema")
    strict: bool = False


class AnyForm(Strict):
    """An answer of any text, or of any JSON object."""

    type: Literal["text", "json_object"]


class SchemaForm(Strict):
    """An answer that fits a JSON schema."""

    type: Literal["json_schema"]
    json_schema: Schema


class RegexForm(Strict):
    """An answer that a regular expression matches as a whole."""

    type: Literal["regex"]
    regex: Text


class GrammarForm(Strict):
    """An answer of a context-free grammar, in llguidance's form of Lark."""

    type: Literal["grammar"]
    grammar: Text


AnswerForm = Annotated[AnyForm | SchemaForm | RegexForm | GrammarForm, Field(discriminator="type")]


class Generation(Addressed):
    """The fields that completions and chats have in common. Errors call `response_format` by `format_field`."""

    format_field: ClassVar[str] = "response_format"

    max_tokens: int | None = Field(None, ge=1, le=MOST)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, le=MOST)
    min_p: float = Field(0.0, ge=0, le=1)
    xtc_probability: float = Field(0.0, ge=0, le=1)
    xtc_threshold: float = Field(0.1, ge=0, le=0.5)
    min_tokens: int = Field(0, ge=0, le=MOST)
    ignore_eos: bool = False
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0.1, le=10)
    logit_bias: Annotated[dict[TokenKey, Bias], BeforeValidator(few)] = {}
    seed: int | None = Field(None, ge=0, le=2**63 - 1)
    n: int = Field(1, ge=1, le=64)
    use_beam_search: bool = False
    length_penalty: float = Field(1.0, ge=-32, le=32)
    response_format: AnswerForm | None = None
    stop: Stop | Stops | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=64)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Label | None = None
    cache_salt: Annotated[Label, Field(min_length=1)] | None = None
    priority: int = Field(0, ge=-MOST, le=MOST)
    timeout: float | None = Field(None, gt=0, le=86400)

    def keep_ends(self, eos: tuple[int, ...]) -> None:
        """Take the model's own end tokens out of the stop tokens: with one of them, the model ends its answer itself.

        With `ignore_eos` they stay, and stop the answer as other tokens do.
        """
        if not self.ignore_eos:
            self.stop_token_ids = [token for token in self.stop_token_ids if token not in eos]

    def options(self, eos: tuple[int, ...], tenant: str | None, began: float) -> dict[str, Any]:
        """Return the options of `Engine.submit` except `max_tokens`. Tenant and salt decide who shares prefixes."""
        how = {name: getattr(self, name) for name in SAMPLED}
        if self.use_beam_search:
            how = {"beam_width": self.width, "length_penalty": self.length_penalty}
        return how | {
            "n": self.width,
            "eos": (*(() if self.ignore_eos else eos), *self.stop_token_ids),
            "logit_bias": {int(token): bias for token, bias in self.logit_bias.items()},
            "top_logprobs": self.tops or 0,
            "namespace": namespace(salt=self.cache_salt, tenant=None if tenant is None else tenant.encode()),
            "tenant": tenant,
            "priority": -self.priority,  # in this form of requests the lower goes first
            "deadline": None if self.timeout is None else began + self.timeout,
        }

    def agree(self) -> None:
        """See `Addressed`."""
        if not self.use_beam_search:
            if self.length_penalty != 1:
                raise Refused(400, "length_penalty: needs use_beam_search", "length_penalty")
            return
        plain = type(self).model_fields
        wrong = [name for name in NOT_IN_BEAMS if name in self.model_fields_set and getattr(self, name)]
        wrong = [name for name in wrong if getattr(self, name) != plain[name].default or name == "temperature"]
        if wrong:
            raise Refused(400, f"{wrong[0]}: not with use_beam_search, which takes the likeliest", wrong[0])

    @property
    def most(self) -> int | None:
        """Tokens to generate at most, if the request says so."""
        return self.max_tokens

    @property
    def width(self) -> int:
        """Samples of each prompt. The answer has `n` of them."""
        return self.n

    @property
    def forms(self) -> list[tuple[str, Any, str]]:
        """Grammars: a method of `Grammars`, its argument, and the field that asks for it. The answer has the last.

        The argument may be a function of `Grammars.mark`, which returns it.
        """
        wanted, field = self.response_format, self.format_field
        if isinstance(wanted, SchemaForm):
            return [("schema", wanted.json_schema.given, field)]
        if isinstance(wanted, RegexForm):
            return [("regex", wanted.regex, field)]
        if isinstance(wanted, GrammarForm):
            return [("lark", wanted.grammar, field)]
        return [] if wanted is None or wanted.type == "text" else [("schema", {"type": "object"}, field)]

    @property
    def stops(self) -> list[str]:
        """Texts that end the answer."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    @abstractmethod
    def tops(self) -> int | None:
        """The number of likeliest tokens at each place of the answer. None: the answer has no logprobs."""

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(Generation):
    """``POST /v1/completions``."""

    prompt: Any
    logprobs: int | None = Field(None, ge=0, le=TOPS)
    best_of: int | None = Field(None, ge=1, le=64)
    echo: bool = False

    def agree(self) -> None:
        """See `Addressed`."""
        super().agree()
        if self.width < self.n:
            raise Refused(400, f"best_of is {self.best_of}, less than n ({self.n})", "best_of")
        if self.width > self.n and self.stream:
            raise Refused(400, "best_of: cannot be streamed, the best is known at the end", "best_of")
        if self.echo and self.logprobs is not None:
            raise Refused(400, "echo cannot be combined with logprobs", "echo")

    @property
    def width(self) -> int:
        """See `Generation`."""
        return self.best_of or self.n

    @property
    def tops(self) -> int | None:
        """See `Generation`."""
        return self.logprobs

    @field_validator("prompt")
    @classmethod
    def _prompts(cls, value: Any) -> list[str] | list[list[int]]:
        """Return texts or lists of tokens. The check stops at the first error."""
        many = [value] if isinstance(value, str) else value
        if not isinstance(many, list) or not many:
            raise ValueError("must be text, tokens, or a list of texts or of lists of tokens")
        if not isinstance(many[0], str | list):
            many = [many]
        if len(many) > PROMPTS:
            raise ValueError(f"{len(many)} prompts, the limit is {PROMPTS}")
        for prompt in many:
            if not isinstance(prompt, type(many[0])) or not prompt:
                raise ValueError("every prompt must be text or a list of tokens, all of one kind, none empty")
            if isinstance(prompt, list) and not all(type(token) is int and 0 <= token <= MOST for token in prompt):
                raise ValueError("tokens must be integers from 0")
        return many


class Part(Strict):
    """A part of a message. Only text is supported."""

    type: Literal["text"]
    text: Text


class Function(Strict):
    """A tool. `parameters` are a JSON schema. A call that is free may not fit it, even with `strict`."""

    name: Name
    description: Text | None = None
    parameters: Inputs = {}
    strict: bool = False


class Tool(Strict):
    """A tool that the model may call."""

    type: Literal["function"] = "function"
    function: Function


class Chosen(Strict):
    """The name of a function."""

    name: Name


class Choice(Strict):
    """The tool to call."""

    type: Literal["function"]
    function: Chosen


class CalledFunction(Strict):
    """A call in a conversation. Its arguments are a JSON object."""

    name: Name
    arguments: Text

    @field_validator("arguments")
    @classmethod
    def _is_object(cls, value: str) -> str:
        try:
            is_object = isinstance(json.loads(value or "{}"), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            raise ValueError("must be a JSON object, as text")
        return value or "{}"


class ToolCall(Strict):
    """A call of a tool in a conversation."""

    id: Label
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """Return the call as chat templates take it."""
        function = {"name": self.function.name, "arguments": json.loads(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": function}


class Message(Strict):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[Part], Field(min_length=1, max_length=1024, fail_fast=True)] | None = None
    name: Annotated[str, Field(max_length=64)] | None = None
    reasoning_content: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=TOOLS, fail_fast=True)] = []
    tool_call_id: Label | None = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs content, or tool_calls")
        if (self.tool_calls or self.reasoning_content) and self.role != "assistant":
            raise ValueError("only messages of the assistant have tool_calls and reasoning_content")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("a message with the role tool must have a tool_call_id, and no other message may")
        return self

    def plain(self) -> dict[str, Any]:
        """Return the message as chat templates take it."""
        content = self.content or ""
        told = {name: value for name in ("name", "reasoning_content", "tool_call_id") if (value := getattr(self, name))}
        if self.tool_calls:
            told["tool_calls"] = [call.plain() for call in self.tool_calls]
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text, **told}


class TemplateOptions(Strict):
    """Options of the chat template."""

    enable_thinking: bool | None = None


class ChatRequest(Generation):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1, le=MOST)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=TOPS)
    tools: Annotated[list[Tool], Field(max_length=TOOLS, fail_fast=True)] = []
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: TemplateOptions | None = None

    def agree(self) -> None:
        """See `Addressed`."""
        super().agree()
        if self.top_logprobs and not self.logprobs:
            raise Refused(400, "top_logprobs: needs logprobs to be true", "top_logprobs")
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise Refused(400, "tools: two tools have the same name", "tools")
        if self.must_call and not self.callable_tools:
            text = "tools has none of this name" if self.tools else "there are no tools to call"
            raise Refused(400, f"tool_choice: {text}", "tool_choice")

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The messages as chat templates take them. Results of tools have the names that their calls have."""
        names = {call.id: call.function.name for message in self.messages for call in message.tool_calls}
        named = [{"name": names[one.tool_call_id]} if one.tool_call_id in names else {} for one in self.messages]
        return [name | one.plain() for name, one in zip(named, self.messages, strict=True)]

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that the answer may call."""
        if isinstance(self.tool_choice, Choice):
            return [tool for tool in self.tools if tool.function.name == self.tool_choice.function.name]
        return [] if self.tool_choice == "none" else self.tools

    @property
    def must_call(self) -> bool:
        """Whether the answer is calls of tools and nothing else."""
        return self.tool_choice not in (None, "none", "auto")

    @property
    def by_grammar(self) -> bool:
        """Whether calls in the answer are those of a grammar."""
        return self.must_call or bool(self.forms)

    @property
    def forms(self) -> list[tuple[str, Any, str]]:
        """See `Generation`. Where the answer may be calls instead of text in a form, its grammar is both."""
        forms, field = super().forms, self.format_field
        if forms and self.must_call:
            raise Refused(400, f"{field} cannot be combined with a tool_choice that forces a call", field)
        if not self.callable_tools or not (forms or self.must_call):
            return forms
        if forms and forms[0][0] != "schema":
            raise Refused(400, f"{field}: beside tools, it must be json_schema or json_object", field)
        schemas = {tool.function.name: tool.function.parameters for tool in self.callable_tools}
        is_one = isinstance(self.tool_choice, Choice) or not self.parallel_tool_calls
        most, other = 1 if is_one else MOST_CALLS, forms[0][1] if forms else None
        return [*forms, ("lark", partial(grammar_of_calls, tools=schemas, most=most, other=other), "tools")]

    @property
    def template_options(self) -> dict[str, Any]:
        """Arguments of a chat template besides the messages."""
        thinks = None if self.chat_template_kwargs is None else self.chat_template_kwargs.enable_thinking
        tools = [tool.model_dump(exclude_unset=True) for tool in self.tools] if self.callable_tools else []
        return {**({"tools": tools} if tools else {}), **({} if thinks is None else {"enable_thinking": thinks})}

    @property
    def most(self) -> int | None:
        """See `Generation`."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def tops(self) -> int | None:
        """See `Generation`."""
        return self.top_logprobs if self.logprobs else None


def parse(form: type[Form], body: bytes) -> Form:
    """Read a body of JSON. If it is wrong, raise `Refused` with one of the errors."""
    if (count := body.count(b"[") + body.count(b"{")) > BRACKETS:  # while they are read, no other thread runs
        raise Refused(400, f"the body has {count} opening brackets, the limit is {BRACKETS}")
    try:
        read = form.model_validate_json(body)
        read.agree()
        return read
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
    worst = max(found, key=lambda one: len(one["loc"]))  # if a field may have several types, the one that fits best
    place = ".".join(str(part) for part in worst["loc"] if not str(part).startswith(("constrained-", "list[")))[:100]
    if not place:
        raise Refused(400, f"the body is not a valid request: {worst['msg'].removeprefix('Value error, ')}")
    field = str(worst["loc"][0])[:100]
    if worst["type"] == "extra_forbidden":
        raise Refused(400, f"{place}: not supported by this server", field, "unsupported_parameter")
    raise Refused(400, f"{place}: {worst['msg'].removeprefix('Value error, ')}", field)
