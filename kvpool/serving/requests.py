"""What clients may send: strict types and ranges, checked before the engine sees a request."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvpool import namespace

MOST = 2**31 - 1
PROMPTS = 64  # of one request
TOPS = 20
BIASES = 300
Text = Annotated[str, Field(max_length=2**22)]
Stop = Annotated[str, Field(min_length=1, max_length=128)]  # each token of an answer is compared with all of them
Stops = Annotated[list[Stop], Field(max_length=8)]
Label = Annotated[str, Field(max_length=512)]
Token = Annotated[int, Field(ge=0, le=MOST)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]  # JSON's keys are text
Bias = Annotated[float, Field(ge=-100, le=100)]
PASSED_ON = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "n"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)
Form = TypeVar("Form", bound="Addressed")


class Refused(Exception):
    """A request gets an error: the HTTP status, a message for the client, the field that is wrong, and a code."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


def few(data: Any) -> Any:
    """Refuse a long mapping before each of its items becomes an error."""
    if isinstance(data, dict) and len(data) > BIASES:
        raise ValueError(f"{len(data)} names, the limit is {BIASES}")
    return data


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


class StreamOptions(Strict):
    """How to stream."""

    include_usage: bool = False


class Generation(Addressed):
    """The fields that completions and chats have in common."""

    max_tokens: int | None = Field(None, ge=1, le=MOST)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, le=MOST)
    min_p: float = Field(0.0, ge=0, le=1)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0.1, le=10)
    logit_bias: Annotated[dict[TokenKey, Bias], BeforeValidator(few)] = {}
    seed: int | None = Field(None, ge=0, le=2**63 - 1)
    n: int = Field(1, ge=1, le=64)
    stop: Stop | Stops | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=64)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Label | None = None
    cache_salt: Annotated[Label, Field(min_length=1)] | None = None

    def options(self, eos: tuple[int, ...], tenant: bytes) -> dict[str, Any]:
        """Return the options of `Engine.submit` except `max_tokens`. Tenant and salt decide who shares prefixes."""
        return {name: getattr(self, name) for name in PASSED_ON} | {
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop or (),
            "eos": (*eos, *self.stop_token_ids),
            "logit_bias": {int(token): bias for token, bias in self.logit_bias.items()},
            "top_logprobs": self.tops or 0,
            "namespace": namespace(salt=self.cache_salt, tenant=tenant or None),
        }

    @property
    def most(self) -> int | None:
        """Tokens to generate at most, if the request says so."""
        return self.max_tokens

    @property
    @abstractmethod
    def tops(self) -> int | None:
        """How many of the likeliest tokens the answer names at each place. None: the answer has no logprobs."""

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(Generation):
    """``POST /v1/completions``."""

    prompt: Any
    logprobs: int | None = Field(None, ge=0, le=TOPS)

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


class Message(Strict):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[Part], Field(min_length=1, max_length=1024, fail_fast=True)]
    name: Annotated[str, Field(max_length=64)] | None = None

    def plain(self) -> dict[str, str]:
        """Return the message as chat templates take it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        named = {} if self.name is None else {"name": self.name}
        return {"role": "system" if self.role == "developer" else self.role, "content": content, **named}


class ChatRequest(Generation):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1, le=MOST)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=TOPS)

    @model_validator(mode="after")
    def _asks_for_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self

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
    try:
        return form.model_validate_json(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
    worst = max(found, key=lambda one: len(one["loc"]))  # if a field may have several types, the one that fits best
    place = ".".join(str(part) for part in worst["loc"] if not str(part).startswith(("constrained-", "list[")))[:100]
    if not place:
        raise Refused(400, f"the body is no request: {worst['msg'].removeprefix('Value error, ')}")
    field = str(worst["loc"][0])[:100]
    if worst["type"] == "extra_forbidden":
        raise Refused(400, f"{place}: not supported by this server", field, "unsupported_parameter")
    raise Refused(400, f"{place}: {worst['msg'].removeprefix('Value error, ')}", field)
