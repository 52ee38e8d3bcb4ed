"""What clients may send. The official SDKs say which fields there are, and what is in messages and tools."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property, partial, reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, NotRequired, Required, Self, TypeVar, Union, get_args, get_origin

import pydantic
from openai.types import chat as sdk
from openai.types import completion_create_params
from openai.types.chat.completion_create_params import CompletionCreateParamsBase, ResponseFormat
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from transformers import PreTrainedTokenizerBase
from typing_extensions import TypedDict, get_type_hints, is_typeddict

from kvpool import namespace
from kvpool.retention import MOST_PRIORITY, Keep
from kvpool.serving.speech import MOST_CALLS, grammar_of_calls

MOST = 2**31 - 1
PROMPTS = 64  # of one request
TOPS = 20
FIELDS = 300  # of one body, and biases
BRACKETS = 2**18
TOOLS = 128
LISTED = 4096
HOUR, DAY = 3600, 86400
MARKED, MARKED_PRIORITY = {"5m": 300, "1h": HOUR}, 4  # seconds of a `cache_control`, by its `ttl`
LONGEST_WAIT = 60  # seconds until a client that was refused may come again, at most
Dicts = list[dict[str, Any]]
Stop = Annotated[str, Field(min_length=1, max_length=128)]  # each token of an answer is compared with all of them
Stops = Annotated[list[Stop], Field(max_length=8)]
Token = Annotated[int, Field(ge=0, le=MOST)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]  # JSON's keys are text
Bias = Annotated[float, Field(ge=-100, le=100)]
SAMPLED = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "xtc_probability", "xtc_threshold"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)
NOT_IN_BEAMS = (*SAMPLED, "logit_bias", "stop", "stream", "logprobs", "response_format", "tools")
NOT_DONE = ("adapters", "grammar", "guided_choice", "guided_grammar", "guided_json", "guided_regex")
OFF = {"stop": ""} | dict.fromkeys(("max_completion_tokens", "max_output_tokens", "max_tokens", "seed", "top_k"), -1)
KEPT = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}
PLAIN = re.compile(r"[\w.:-]{1,64}", re.ASCII)
UNIONS = (Union, UnionType)
T = TypeVar("T")
Form = TypeVar("Form", bound="Request")


class Refused(HTTPException):
    """A request gets an error: the HTTP status, a message for the client, the field that is wrong, and a code.

    With 429 and 503 it is told after how many seconds it may come again.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, wait: float = 0
    ) -> None:
        seconds = str(max(1, min(LONGEST_WAIT, math.ceil(wait))))
        super().__init__(status, message, {"Retry-After": seconds} if status in (429, 503) else None)
        self.param, self.code = param, code


# ----------------------------------------------------------------------------------------------- types of the SDKs


def as_sdk(kind: Any) -> pydantic.GetPydanticSchema:
    """Return an annotation that has pydantic read a field as a type of an SDK, see `_eager`."""
    return pydantic.GetPydanticSchema(lambda source, handler: handler.generate_schema(_eager(kind)))


@cache
def _eager(kind: Any) -> Any:
    """Return a type of an SDK as clients send it.

    It has lists in place of iterables, which pydantic would read while they are used. Fields may be null, dictionaries
    may have more of them, and one that must be there and has a single possible value is added where it is left out.
    """
    origin, args = get_origin(kind), get_args(kind)
    if is_typeddict(kind):
        hints = get_type_hints(kind, include_extras=True)
        made = TypedDict("made", {name: _field(name, hint) for name, hint in hints.items()})  # type: ignore[misc]
        needed = {name: _tags(hint) for name, hint in hints.items() if get_origin(hint) is Required}
        known = {name: tags[0] for name, tags in needed.items() if len(tags) == 1}
        whole = BeforeValidator(lambda one: known | one if isinstance(one, dict) else one)
        return Annotated[pydantic.with_config(ConfigDict(extra="allow", strict=True))(made), whole]
    if origin in (Annotated, *UNIONS):
        return _union(list(_members(kind)))
    if isinstance(origin, type) and issubclass(origin, Iterable) and not issubclass(origin, Mapping):
        return Annotated[list[_eager(args[0])], Field(max_length=LISTED, fail_fast=True)]  # type: ignore[misc]
    return kind if kind in (str, int, float, bool, type(None)) or origin in (Literal, dict) else Any


def _field(name: str, hint: Any) -> Any:
    inner = get_args(hint)[0] if get_origin(hint) in (Required, NotRequired) else hint
    if get_origin(hint) is not Required:
        return NotRequired[_eager(inner) | None]
    return Required[_eager(inner) | None] if name == "content" else Required[_eager(inner)]


def _tags(hint: Any) -> tuple[str, ...]:
    """Return the values that a field may have, of one that tells types apart."""
    while get_origin(hint) in (Required, NotRequired, Annotated):
        hint = get_args(hint)[0]
    if get_origin(hint) in UNIONS:
        return tuple(tag for one in get_args(hint) for tag in _tags(one))
    return get_args(hint) if get_origin(hint) is Literal else ()


def _members(kind: Any) -> Iterator[Any]:
    """Iterate over the types of a union, without those that only answers have."""
    if get_origin(kind) in (Annotated, *UNIONS):
        for one in get_args(kind)[: 1 if get_origin(kind) is Annotated else None]:
            yield from _members(one)
    elif not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        yield kind


def _union(kinds: list[Any]) -> Any:
    """Return a union whose dictionaries are told apart by their role or type: an error then has one line."""
    dicts = [one for one in kinds if is_typeddict(one)]
    others = [_eager(one) for one in kinds if one not in dicts]
    if len(dicts) < 2:
        return Union[(*others, *map(_eager, dicts))] if kinds else Any
    hints = [get_type_hints(one, include_extras=True) for one in dicts]
    name = "role" if "role" in hints[0] else "type"
    tags: dict[str, Any] = {}
    for one, hint in zip(dicts, hints, strict=True):
        tags |= {tag: one for tag in _tags(hint[name]) if tag not in tags}
    usual = "function" if name == "type" and "function" in tags else None  # calls of tools often have no type
    tagged: Any = reduce(or_, (Annotated[_eager(one), pydantic.Tag(tag)] for tag, one in tags.items()))
    told_apart = pydantic.Discriminator(
        lambda one: one.get(name, usual) if isinstance(one, dict) else None,
        custom_error_type="tag",
        custom_error_message=f"must be an object whose {name} is one of {', '.join(tags)}",
    )
    return Union[(*others, Annotated[tagged, told_apart])]


# ----------------------------------------------------------------------------------------------- forms


class Request(BaseModel):
    """The fields of a request that are obeyed. Null counts as left out."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    official: ClassVar[Iterable[str]] = ()  # fields of this API. Those that are not obeyed have no effect
    #: Fields that would change the answer, but are not supported. With one of these values they change nothing.
    not_done: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    tool_types: ClassVar[tuple[str, ...]] = ("function",)  # tools of a client. Others would be those of a server

    model: str | None = None

    @classmethod
    def of(cls, data: dict[str, Any], defaults: Mapping[str, Any] | None = None) -> Self:
        """Return the request of a body. Raise `Refused` with one of the errors."""
        if not data.get("use_beam_search"):  # beams have no options of sampling
            data = {name: one for name, one in (defaults or {}).items() if name in cls.model_fields} | data
        try:
            read = cls.model_validate(data)
        except pydantic.ValidationError as error:
            found = error.errors(include_url=False, include_context=False)
        else:
            read.agree(defaults or {})
            return read
        # of several types of a field, the one that fits best
        worst = max(found, key=lambda one: (len(one["loc"]), (one["type"] == "tag") == isinstance(one["input"], dict)))
        parts = [part for part in map(str, worst["loc"]) if "[" not in part and not part.startswith("constrained-")]
        place, text = ".".join(parts)[:100], worst["msg"].removeprefix("Value error, ")
        raise Refused(400, f"{place}: {text}", parts[0][:100])

    def agree(self, defaults: Mapping[str, Any]) -> None:
        """Raise `Refused` if two fields contradict each other."""


class TokenizeRequest(Request):
    """``POST /tokenize``."""

    prompt: str
    add_special_tokens: bool = True


class DetokenizeRequest(Request):
    """``POST /detokenize``."""

    tokens: Annotated[list[Token], Field(fail_fast=True)]


class _Regex(TypedDict, total=False):
    type: Literal["regex"]
    regex: Required[str]


class _Lark(TypedDict, total=False):
    type: Literal["grammar"]
    grammar: Required[str]


class _Name(TypedDict, total=False):
    name: Required[str]


class _Function(TypedDict, total=False):
    type: Required[Literal["function"]]
    function: Required[_Name]


class _Tools(TypedDict, total=False):
    mode: Required[Literal["auto", "required"]]
    tools: Required[list[_Function]]


class _Allowed(TypedDict, total=False):
    type: Required[Literal["allowed_tools"]]
    allowed_tools: Required[_Tools]


class _Retention(TypedDict, total=False):
    start: Annotated[int, Field(ge=0, le=MOST)]
    end: Annotated[int, Field(ge=1, le=MOST)] | None
    priority: Required[Annotated[int, Field(ge=0, le=100)]]
    duration: Annotated[float, Field(gt=0, le=DAY)] | None


class Generation(Request):
    """The fields that completions and chats have in common. Errors call `response_format` by `_format_field`."""

    _format_field: str = "response_format"
    not_done: ClassVar = dict.fromkeys((*NOT_DONE, "structured_outputs"), ())

    max_tokens: int | None = Field(None, ge=0, le=MOST)
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
    logit_bias: Annotated[dict[TokenKey, Bias], BeforeValidator(lambda data: few(data))] = {}
    seed: int | None = Field(None, ge=0, le=2**63 - 1)
    n: int = Field(1, ge=1, le=64)
    use_beam_search: bool = False
    length_penalty: float = Field(1.0, ge=-32, le=32)
    response_format: Annotated[dict[str, Any], as_sdk(ResponseFormat | _Regex | _Lark)] = {}
    stop: Annotated[Stops, BeforeValidator(lambda one: [one] if isinstance(one, str) else one)] = []
    stop_token_ids: Annotated[list[Token], Field(max_length=64, fail_fast=True)] = []
    stream: bool = False
    stream_options: Annotated[dict[str, Any], as_sdk(sdk.ChatCompletionStreamOptionsParam)] = {}
    cache_salt: str | None = Field(None, min_length=1, max_length=512)
    priority: int = Field(0, ge=-MOST, le=MOST)
    timeout: float | None = Field(None, gt=0, le=DAY)
    retention_directives: Annotated[list[_Retention], Field(max_length=64)] = []

    def options(self, eos: tuple[int, ...], tenant: str | None, began: float) -> dict[str, Any]:
        """Return the options of `Engine.submit` except `max_tokens`. Tenant and salt decide who shares prefixes.

        The model's own end tokens are no stop tokens: with one of them, the model ends its answer itself. With
        `ignore_eos` they stop the answer as other tokens do.
        """
        how = {name: getattr(self, name) for name in SAMPLED}
        if not self.ignore_eos:
            self.stop_token_ids = [token for token in self.stop_token_ids if token not in eos]
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

    def agree(self, defaults: Mapping[str, Any]) -> None:
        if self.max_tokens == 0 and not self.scores:
            raise Refused(400, "max_tokens: must be 1 or more; 0 only scores a prompt, with echo", "max_tokens")
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
    def width(self) -> int:
        """Samples of each prompt. The answer has `n` of them."""
        return self.n

    @property
    def scores(self) -> bool:
        """Whether the answer begins with the logprobs of the prompt."""
        return False

    @property
    def tops(self) -> int | None:
        """The number of likeliest tokens at each place of the answer. None: the answer has no logprobs."""
        raise NotImplementedError

    @property
    def keep(self) -> Keep | None:
        """What stays in the prefix cache: all up to the last end, for the longest time, at the highest priority."""
        asked = [one for one in self.retention_directives if one["priority"]]
        if not asked:
            return None
        seconds = max(one.get("duration") or HOUR for one in asked)
        ends = [one.get("end") or math.inf for one in asked]
        tokens = None if math.inf in ends else int(max(ends))
        return Keep(1 + max(one["priority"] for one in asked) * (MOST_PRIORITY - 1) // 100, math.ceil(seconds), tokens)

    @property
    def forms(self) -> list[tuple[str, Any, str]]:
        """Grammars: a method of `Grammars`, its argument, and the field that asks for it. The answer has the last.

        The argument may be a function of `Grammars.mark`, which returns it.
        """
        wanted, field = self.response_format, self._format_field
        kind = wanted.get("type", "text")
        if kind == "json_schema":
            return [("schema", wanted["json_schema"].get("schema") or {}, field)]
        if kind in ("regex", "grammar"):
            return [("lark" if kind == "grammar" else kind, wanted[kind], field)]
        return [] if kind == "text" else [("schema", {"type": "object"}, field)]


_Text = Annotated[str, Field(min_length=1)]
_Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
_Prompts = Annotated[list[T], Field(min_length=1, max_length=PROMPTS, fail_fast=True)]


def _listed(prompt: Any) -> Any:
    """Return a prompt, which is text or a list of tokens, as a list of one."""
    is_one = isinstance(prompt, str) or (isinstance(prompt, list) and prompt and type(prompt[0]) is int)
    return [prompt] if is_one else prompt


class CompletionRequest(Generation):
    """``POST /v1/completions``."""

    official: ClassVar = completion_create_params.CompletionCreateParamsBase.__annotations__

    prompt: Annotated[_Prompts[_Text] | _Prompts[_Tokens], BeforeValidator(_listed)]
    suffix: str | None = None
    logprobs: int | None = Field(None, ge=0, le=TOPS)
    best_of: int | None = Field(None, ge=1, le=64)
    echo: bool = False

    def agree(self, defaults: Mapping[str, Any]) -> None:
        super().agree(defaults)
        if self.width < self.n:
            raise Refused(400, f"best_of is {self.best_of}, less than n ({self.n})", "best_of")
        if self.width > self.n and self.stream:
            raise Refused(400, "best_of: cannot be streamed, the best is known at the end", "best_of")
        if self.suffix is not None and (self.echo or not isinstance(self.prompt[0], str)):
            raise Refused(400, "suffix: needs a prompt that is text, and no echo", "suffix")

    @property
    def width(self) -> int:
        return self.best_of or self.n

    @property
    def scores(self) -> bool:
        return self.echo and (self.logprobs is not None or self.max_tokens == 0)

    @property
    def tops(self) -> int | None:
        return self.logprobs


def named(tools: Dicts) -> Dicts:
    """Check the names and schemas of tools. Return what the chat template is told of them."""
    told: Dicts = []
    for number, one in enumerate(tools):
        function = {name: value for name, value in one["function"].items() if value is not None}
        name, schema = function["name"], function.get("parameters", {})
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
            text = "a name has 1 to 64 letters, digits, dots, dashes and underscores"
            raise ValueError(f"{number}: {text} ({name!r:.80})")
        if schema.get("type", "object") != "object":
            raise ValueError(f'{number}: its schema must be that of an object: {{"type": "object", ...}}')
        kept = ("name", "description", "parameters", "strict")
        told.append({"type": "function", "function": {name: function[name] for name in kept if name in function}})
    if len({one["function"]["name"] for one in told}) < len(told):
        raise ValueError("two tools have the same name")
    return told


class ChatRequest(Generation):
    """``POST /v1/chat/completions``."""

    official: ClassVar = CompletionCreateParamsBase.__annotations__
    not_done: ClassVar = Generation.not_done | {
        **{"audio": (), "functions": ([],), "function_call": ("none",), "modalities": (["text"],)},
        **{"moderation": (), "web_search_options": ()},
    }

    messages: Annotated[Dicts, as_sdk(list[sdk.ChatCompletionMessageParam]), Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=1, le=MOST)
    max_completion_tokens: int | None = Field(None, ge=1, le=MOST)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=TOPS)
    tools: Annotated[
        Dicts, as_sdk(list[sdk.ChatCompletionFunctionToolParam]), Field(max_length=TOOLS), AfterValidator(named)
    ] = []
    tool_choice: Annotated[Any, as_sdk(Literal["none", "auto", "required"] | _Function | _Allowed)] = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = Field(None, max_length=64)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    prompt_cache_retention: Any = None

    def agree(self, defaults: Mapping[str, Any]) -> None:
        self.max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        super().agree(defaults)
        if self.top_logprobs and not self.logprobs:
            raise Refused(400, "top_logprobs: needs logprobs to be true", "top_logprobs")
        if self.must_call and not self.callable_tools:
            text = "tools has none of this name" if self.tools else "there are no tools to call"
            raise Refused(400, f"tool_choice: {text}", "tool_choice")
        if wrong := KEPT & self.chat_template_kwargs.keys():
            raise Refused(400, f"chat_template_kwargs: {min(wrong)} is the server's", "chat_template_kwargs")
        if self.conversation[-1]["role"] != "assistant" and self.continue_final_message:
            text = "continue_final_message: the last message must be the assistant's"
            raise Refused(400, text, "continue_final_message")

    @property
    def chat(self) -> ChatRequest:
        """The chat that a request asks for."""
        return self

    @cached_property
    def conversation(self) -> Dicts:
        """The messages as chat templates take them. Results of tools have the names that their calls have."""
        told = [_plain(one, f"messages.{number}") for number, one in enumerate(self.messages)]
        names = {call["id"]: call["function"]["name"] for one in told for call in one.get("tool_calls", ())}
        for one in told:
            if one.get("tool_call_id") in names:
                one.setdefault("name", names[one["tool_call_id"]])
        return told

    @cached_property
    def marks(self) -> dict[int, int]:
        """The messages with a `cache_control`, by number, and for how many seconds each wants to be cached."""
        found = {}
        for number, one in enumerate(self.messages):
            parts = one["content"] if isinstance(one.get("content"), list) else []
            marks = [mark for part in (one, *parts) if isinstance(mark := part.get("cache_control"), dict)]
            if marks:
                found[number] = max(MARKED.get(str(mark.get("ttl")), MARKED["5m"]) for mark in marks)
        return found

    @property
    def keep(self) -> Keep | None:
        """See `Generation`. Without directives, the longest time of the other wishes; see `kept_messages`."""
        seconds = [*self.marks.values(), *([DAY] if self.prompt_cache_retention == "24h" else [])]
        return super().keep or (Keep(MARKED_PRIORITY, max(seconds)) if seconds else None)

    @property
    def kept_messages(self) -> int | None:
        """How many messages `keep` holds for: up to the last mark. None: for all, or for the tokens that it says."""
        last = max(self.marks, default=len(self.messages) - 1) + 1
        is_all = self.retention_directives or self.prompt_cache_retention == "24h" or last == len(self.messages)
        return None if is_all else last

    @property
    def callable_tools(self) -> Dicts:
        """The tools that the answer may call."""
        choice, names = self.tool_choice, None
        if isinstance(choice, dict):
            listed = choice["allowed_tools"]["tools"] if choice["type"] == "allowed_tools" else [choice]
            names = {one["function"]["name"] for one in listed}
        return [one for one in self.tools if choice != "none" and (names is None or one["function"]["name"] in names)]

    @property
    def must_call(self) -> bool:
        """Whether the answer is calls of tools and nothing else."""
        choice = self.tool_choice
        if isinstance(choice, dict):
            return choice["type"] == "function" or choice["allowed_tools"]["mode"] == "required"
        return bool(choice == "required")

    @property
    def by_grammar(self) -> bool:
        """Whether calls in the answer are those of a grammar."""
        return self.must_call or bool(self.forms)

    @property
    def forms(self) -> list[tuple[str, Any, str]]:
        """See `Generation`. Where the answer may be calls instead of text in a form, its grammar is both."""
        forms, field = super().forms, self._format_field
        if forms and self.must_call:
            raise Refused(400, f"{field} cannot be combined with a tool_choice that forces a call", field)
        if not self.callable_tools or not (forms or self.must_call):
            return forms
        if forms and forms[0][0] != "schema":
            raise Refused(400, f"{field}: beside tools, it must be json_schema or json_object", field)
        functions = [tool["function"] for tool in self.callable_tools]
        schemas = {function["name"]: function.get("parameters", {}) for function in functions}
        is_one = not self.parallel_tool_calls or (self.must_call and self.tool_choice != "required")
        most, other = 1 if is_one else MOST_CALLS, forms[0][1] if forms else None
        return [*forms, ("lark", partial(grammar_of_calls, tools=schemas, most=most, other=other), "tools")]

    @property
    def template_options(self) -> dict[str, Any]:
        """Arguments of a chat template besides the messages."""
        told: dict[str, Any] = {"tools": self.tools} if self.callable_tools else {}
        told |= {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        told |= {"enable_thinking": False} if self.reasoning_effort == "none" else {}
        told |= {"continue_final_message": True} if self.continue_final_message else {}
        return told | self.chat_template_kwargs

    @property
    def tops(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class Indirect(Request):
    """A request that asks for what a chat can ask for: `chat`, which `asked` says, and whose errors name its fields."""

    names: ClassVar[Mapping[str, str]]  # of its fields, by those of the chat
    same: ClassVar[tuple[str, ...]] = ()  # fields that the chat has, too
    _chat: ChatRequest = pydantic.PrivateAttr()

    def asked(self) -> dict[str, Any]:
        """Return the body of the chat, without the fields that are the same."""
        raise NotImplementedError

    def agree(self, defaults: Mapping[str, Any]) -> None:
        asked = {name: getattr(self, name) for name in self.same if name in self.model_fields_set} | self.asked()
        try:
            self._chat = ChatRequest.of({name: one for name, one in asked.items() if one is not None}, defaults)
        except Refused as error:  # a place within a field of the chat says nothing of the field here
            own = self.names.get(error.param or "")
            raise Refused(400, f"{own}: {error.detail.partition(': ')[2]}", own) if own else error from None
        self._chat._format_field = self.names["response_format"]

    @property
    def chat(self) -> ChatRequest:
        return self._chat


def text_of(content: Any, place: str, kinds: tuple[str, ...] = ("text", "refusal")) -> str:
    """Return the text of a content, which may be null, text, or parts. Refuse parts that are no text."""
    if content is None or isinstance(content, str):
        return content or ""
    for number, part in enumerate(content):
        if part["type"] not in kinds:
            text = f"{place}.{number}: {part['type']} is not supported, the model takes text"
            raise Refused(400, text, place.partition(".")[0])
    return "".join([part.get("text") or part.get("refusal") or "" for part in content])


def object_of(text: str) -> dict[str, Any] | None:
    """Return an object of JSON, such as the arguments of a call. None: the text is none."""
    try:
        read = json.loads(text)
        json.dumps(read, allow_nan=False)  # 1e999 is none
    except (ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) else None


def _plain(one: dict[str, Any], place: str) -> dict[str, Any]:
    """Return a message as chat templates take it. Broken arguments of a call become the text of one."""
    role = {"developer": "system", "function": "tool"}.get(one["role"], one["role"])
    told = {"role": role, "content": text_of(one.get("content"), f"{place}.content")}
    told |= {name: one[name] for name in ("name", "tool_call_id") if one.get(name)}
    if role == "assistant" and isinstance(thought := one.get("reasoning_content") or one.get("reasoning"), str):
        told["reasoning_content"] = thought
    calls = []
    for call in one.get("tool_calls") or ():
        said = call.get("function") or call.get("custom") or {}
        text = said.get("arguments") or json.dumps({"input": said["input"]} if "input" in said else {})
        read = object_of(text)
        function = {"name": said["name"], "arguments": {"arguments": text} if read is None else read}
        calls.append({"id": call["id"], "type": "function", "function": function})
    return told | ({"tool_calls": calls} if calls else {})


# ----------------------------------------------------------------------------------------------- a body is read


def few(data: Any) -> Any:
    """Refuse a long mapping before each of its items becomes an error."""
    if isinstance(data, dict) and len(data) > FIELDS:
        raise ValueError(f"{len(data)} names, the limit is {FIELDS}")
    return data


def parse(
    form: type[Form], body: bytes, defaults: Mapping[str, Any] | None = None, is_strict: bool = False
) -> tuple[Form, list[str]]:
    """Read a body of JSON, with `defaults` of what it leaves out. Return the request, and the fields that are ignored
    because the API has no such ones; if `is_strict`, they are refused instead. Raise `Refused` of one wrong field.
    """
    if (count := body.count(b"[") + body.count(b"{")) > BRACKETS:  # while they are read, no other thread runs
        raise Refused(400, f"the body has {count} opening brackets, the limit is {BRACKETS}")
    try:
        sent = few(from_json(body, allow_inf_nan=False))
        if not isinstance(sent, dict):
            raise ValueError("it must be an object")
    except ValueError as error:
        raise Refused(400, f"the body is not a valid request: {error}") from None
    off = {name: (type(value), value) for name, value in OFF.items()}  # True == 1, and is not -1
    data = {name: one for name, one in sent.items() if one is not None and (type(one), one) != off.get(name)}
    known, ignored = form.model_fields.keys(), []
    for name, value in data.items():
        if value not in form.not_done.get(name, (value,)):
            taken = " or ".join(map(json.dumps, form.not_done[name]))
            text = f"{name}: not supported by this server{taken and f', which takes {taken}'}"
            raise Refused(400, text, name, "unsupported_parameter")
        if name not in known and name not in form.official:
            ignored.append(name if PLAIN.fullmatch(name) else "?")
    if isinstance(tools := data.get("tools"), list):
        kinds = [one.get("type") if isinstance(one, dict) else None for one in tools]
        data["tools"] = [one for one, kind in zip(tools, kinds, strict=True) if kind in (None, *form.tool_types)]
        others = {str(kind) for kind in kinds if kind not in (None, *form.tool_types)}
        ignored += sorted(f"tools:{kind}" if PLAIN.fullmatch(kind) else "tools:?" for kind in others)
    if is_strict and ignored:
        raise Refused(400, f"{ignored[0]}: not supported by this server", ignored[0], "unsupported_parameter")
    return form.of(data, defaults), ignored
