"""The ASGI application: routes, checks and errors, and how a request becomes an answer."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from kvpool.adapters.mlx_lm.chat import speller
from kvpool.adapters.mlx_lm.engine import Completion
from kvpool.adapters.mlx_lm.grammar import Grammar, Trial
from kvpool.errors import RequestRejected
from kvpool.serving import messages
from kvpool.serving.answers import Answer, ChatForm, TextForm, refusal
from kvpool.serving.messages import CountRequest, MessageAnswer, MessagesRequest
from kvpool.serving.metrics import ServerMetrics
from kvpool.serving.requests import ChatRequest, CompletionRequest, Form, Generation, Refused, parse
from kvpool.serving.runner import DeadlinePassed, EngineFailed, Run, Runner
from kvpool.serving.speech import Manner
from kvpool.serving.texts import Processes, Threads, most_bytes, shared

T = TypeVar("T")
LONGEST_PATH = 200  # bytes of a path in the log
LONGEST_WAIT = 60  # seconds until a client that was refused may come again, at most
REJECTED = {"queue_full": 429, "deadline": 504}
POLLED = {"/health", "/ready", "/metrics"}  # a line for each would hide the others
_log = logging.getLogger(__name__)
TWO_LENGTHS = {b"content-length", b"transfer-encoding"}  # RFC 9112, 6.3: after both, the connection is closed
BODY_SECONDS = 30  # for a client to send its body
LONG = 2**16  # bytes of a body that is read in a thread, and of a text that becomes tokens apart from shorter ones
LOGPROBS = 2**18  # of an answer that is sent as a whole
AT_A_TIME = 2  # calls of one kind, such as to tokenize long texts; if there are several tenants, one less of each
FORMED = 8  # samples of a request with a grammar: a token of each may take milliseconds, and others wait


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that the server was started with.

    Attributes
    ----------
    model : str
        The name that clients use.
    hosts : frozenset of str
        Names that ``Host`` may have, in lower case and without a port. Others are refused: the request may come from
        a web page that has another name for this address.
    keys : mapping of keys to tenants
        A client needs one of them. Empty: no key is needed, and all clients are one tenant.
    weights : mapping of tenants to numbers
        Their shares of the threads and processes that tokenize.
    max_tokens : int
        Tokens to generate for a request that does not say how many.
    max_connections : int
        Requests that are answered at a time. One more that has a body gets status 503.
    max_body : int
        Bytes of a body, at most.
    """

    model: str
    hosts: frozenset[str]
    keys: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    max_tokens: int = 512
    max_connections: int = 1024
    max_body: int = 4 * 2**20


class Service:
    """The endpoints.

    Parameters
    ----------
    runner : Runner
        Started already.
    settings : Settings

    Attributes
    ----------
    is_draining : bool
        Whether new requests are refused because the server stops.
    active : int
        Requests that are not answered yet, from their first line to the end of the answer.
    """

    def __init__(self, runner: Runner, settings: Settings, metrics: ServerMetrics) -> None:
        self._runner, self._settings, self._metrics = runner, settings, metrics
        tokenizer, weights = runner.engine.tokenizer, settings.weights
        self._decode: Callable[[int], str] = lru_cache(2**18)(lambda token: tokenizer.decode([token]))
        self._spell: Callable[[int], bytes] = lru_cache(2**18)(speller(tokenizer))
        runner.engine.grammars.trial = Trial(tokenizer, runner.engine.vocab_size)
        self._newline = tokenizer.encode("\n")
        apart = AT_A_TIME - (len(weights) > 1)  # one tenant does not hold another one up
        self._short = Threads("tokenizer", AT_A_TIME, apart, weights)
        self._long = Threads("long-texts", AT_A_TIME, apart, weights)  # of a tokenizer with code of its own
        self._grammars = Threads("grammars", 1, 1, weights)
        made = shared(tokenizer)
        self._most_bytes = None if made is None else most_bytes(made)
        self._processes = None
        if made is not None:
            self._processes = Processes(made, tokenizer.split_special_tokens, AT_A_TIME, apart, weights)
        self._texts: Counter[str | None] = Counter()  # of each tenant at the tokenizer
        self.is_draining = False
        self.active = 0
        self._routes = [
            Route("/v1/completions", self._guarded(self.completions), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self.chat), methods=["POST"]),
            Route("/v1/messages", self._guarded(self.messages), methods=["POST"]),
            Route("/v1/messages/count_tokens", self._guarded(self.count_tokens), methods=["POST"]),
            Route("/v1/models", self._guarded(self.models)),
            Route("/metrics", self._guarded(self.statistics)),
            Route("/health", self._guarded(self.health, needs_key=False)),
            Route("/ready", self._guarded(self.ready, needs_key=False)),
        ]
        self._app = Starlette(
            routes=self._routes,
            exception_handlers={Refused: _refusal, HTTPException: _wrong_path, Exception: _failure},
        )

        self._app.router.redirect_slashes = False  # to where the client's Host says

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, count the answer and log it."""
        status, began = 0, time.monotonic()

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                known = any(scope["path"] == route.path for route in self._routes)
                self._metrics.answered(scope["path"] if known else "other", status)
                if {name for name, _ in scope["headers"]} >= TWO_LENGTHS:  # a proxy may see another request behind it
                    message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        self.active += 1
        try:
            await self._app(scope, receive, counted)
        except asyncio.CancelledError:  # uvicorn waits no longer
            if not status:
                await _error(503, "the server stops")(scope, receive, counted)
        finally:
            self.active -= 1
            if status != 200 or scope["path"] not in POLLED:
                path = scope["raw_path"][:LONGEST_PATH].decode("ascii", "backslashreplace")
                said, seconds = status or "no answer", time.monotonic() - began
                _log.info("%s %s %s, %.3f s", scope["method"], path, said, seconds)

    async def close(self) -> None:
        """End the processes that tokenize."""
        if self._processes is not None:
            await self._processes.close()

    # ------------------------------------------------------------------------------------------- endpoints

    async def completions(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        body = await self._read(CompletionRequest, request)
        decode = self._runner.engine.tokenizer.decode
        for one in body.prompt:
            self._check_room(self._fewest(one), "or more ")
        prompts: list[Sequence[int]] = []
        echo = []
        for one in body.prompt:
            prompts.append(await self._tokens(request, one) if isinstance(one, str) else one)
            if body.echo:
                text = one if isinstance(one, str) else await self._aside(request, self._short, len(one), decode, one)
                echo += [text] * body.n
        answer = Answer(TextForm(self._decode, echo), self._settings.model, body, sum(map(len, prompts)))
        return await self._answer(request, body, answer, prompts, Manner())

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        body = await self._read(ChatRequest, request)
        prompt = await self._templated(request, body)
        manner = self._manner(body, prompt)
        answer = Answer(ChatForm(self._decode, self._spell, manner), self._settings.model, body, len(prompt))
        return await self._answer(request, body, answer, [prompt], manner)

    async def messages(self, request: Request) -> Response:
        """``POST /v1/messages``."""
        body = (await self._read(MessagesRequest, request)).chat
        prompt = await self._templated(request, body)
        manner = self._manner(body, prompt)
        answer = MessageAnswer(self._settings.model, body, len(prompt), manner)
        return await self._answer(request, body, answer, [prompt], manner)

    async def count_tokens(self, request: Request) -> Response:
        """``POST /v1/messages/count_tokens``."""
        prompt = await self._templated(request, (await self._read(CountRequest, request)).chat, counts=True)
        return JSONResponse({"input_tokens": len(prompt)})

    async def models(self, request: Request) -> Response:
        """``GET /v1/models``."""
        one = {"id": self._settings.model, "object": "model", "created": 0, "owned_by": "kvpool"}
        return JSONResponse({"object": "list", "data": [one]})

    async def health(self, request: Request) -> Response:
        """``GET /health``: 200 while the engine lives."""
        return JSONResponse({"status": "ok"}) if self._runner.failure is None else _error(503, "the engine is lost")

    async def ready(self, request: Request) -> Response:
        """``GET /ready``: 200 while new requests are served."""
        return _error(503, "the server stops") if self.is_draining else await self.health(request)

    async def statistics(self, request: Request) -> Response:
        """``GET /metrics``."""
        body, headers = self._metrics.text()
        return Response(body, headers=headers)

    # ------------------------------------------------------------------------------------------- a request comes in

    def _guarded(
        self, endpoint: Callable[[Request], Coroutine[Any, Any, Response]], needs_key: bool = True
    ) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the endpoint with checks of ``Host`` and of the key before it."""

        async def guarded(request: Request) -> Response:
            host = request.headers.get("host", "")
            name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
            if name.lower() not in self._settings.hosts:
                raise Refused(421, "Host: this server has another name")
            request.state.began, request.state.tenant = time.monotonic(), self._tenant(request)
            if needs_key and self._settings.keys and request.state.tenant is None:
                text = "a key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
                raise Refused(401, text, code="invalid_api_key")
            try:
                return await endpoint(request)
            except ClientDisconnect:
                return Response(status_code=499)  # the client is gone

        return guarded

    def _tenant(self, request: Request) -> str | None:
        """Return the tenant whose key a client has. None: it has none of the server's keys."""
        headers = request.headers
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = (headers.get("x-api-key", "").encode(), bearer.encode() if scheme.lower() == "bearer" else b"")
        keys = [(key.encode(), tenant) for key, tenant in self._settings.keys.items()]
        return next(iter([tenant for key, tenant in keys for one in given if hmac.compare_digest(one, key)]), None)

    async def _read(self, form: type[Form], request: Request) -> Form:
        """Read and check the body."""
        if self.is_draining:
            raise Refused(503, "the server stops")
        if self.active > (most := self._settings.max_connections):
            raise Refused(503, f"{most} requests are answered at a time, at most")
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refused(415, "Content-Type: application/json is needed")
        chunks, size = [], 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    chunks.append(chunk)
                    size += len(chunk)
                    if size > self._settings.max_body:
                        raise Refused(413, f"the body is longer than {self._settings.max_body} bytes")
        except TimeoutError:
            raise Refused(408, f"the body took longer than {BODY_SECONDS} seconds") from None
        data, request.state.size = b"".join(chunks), size
        body = await self._aside(request, self._short, size, parse, form, data) if size > LONG else parse(form, data)
        if body.model not in (None, self._settings.model):
            raise Refused(404, f"model: this server has {self._settings.model}", "model", "model_not_found")
        return body

    async def _aside(self, request: Request, place: Threads | Processes, cost: float, *call: Any) -> Any:
        """Run what may take long outside the event loop. `cost` counts as what its tenant got, see `Turns`."""
        tenant = request.state.tenant
        most = self._runner.engine.scheduler.places(tenant)
        if most is not None and self._texts[tenant] > most:
            raise Refused(429, f"{self._texts[tenant]} requests wait to be read", code="queue_full")
        self._texts[tenant] += 1
        try:
            return await _unless_gone(request.receive, place.run(tenant, cost, *call))
        except (ClientDisconnect, Refused):
            raise
        except (OSError, MemoryError) as error:  # of processes that read grammars or texts
            raise Refused(503, f"the server is short of files, processes or memory: {type(error).__name__}") from error
        except Exception as error:  # mostly of a chat template, or of the tokenizer
            raise Refused(400, f"the request cannot be read: {str(error)[:200]}") from error
        finally:
            self._texts[tenant] -= 1

    async def _tokens(self, request: Request, text: str, *, special: bool = True) -> Sequence[int]:
        """Return the tokens of a text, with or without those that begin and end a prompt."""
        if len(text) > LONG and self._processes is not None:
            tokens: Sequence[int] = await self._aside(request, self._processes, len(text), text, special)
            return tokens  # an array: they may be too many for a list
        place = self._long if len(text) > LONG else self._short
        encode = self._runner.engine.tokenizer.encode
        call = encode if special else partial(encode, add_special_tokens=False)
        return list(await self._aside(request, place, len(text), call, text))

    def _fewest(self, prompt: str | list[int]) -> int:
        """Return how many tokens a prompt has at least, without tokenizing it."""
        if isinstance(prompt, list):
            return len(prompt)
        return 1 if self._most_bytes is None else -(-len(prompt.encode()) // self._most_bytes)

    def _check_room(self, tokens: int, more: str = "") -> None:
        room = self._runner.engine.max_model_len
        if room is not None and tokens >= room:
            text = f"{tokens} {more}prompt tokens leave no room for an answer: the model takes {room} of both together"
            raise Refused(400, text, code="context_length_exceeded")

    async def _templated(self, request: Request, body: ChatRequest, *, counts: bool = False) -> Sequence[int]:
        """Return the tokens of a conversation. With `counts` it may be longer than the model takes."""
        tokenizer, options = self._runner.engine.tokenizer, body.template_options
        if not tokenizer.has_chat_template:
            raise Refused(400, "messages: this model has no chat template", "messages")
        if options.get("tools") and not body.by_grammar and not tokenizer.has_tool_calling:
            text = "tools: this model does not mark its calls; tool_choice must force one, or the output be structured"
            raise Refused(400, text, "tools")
        template = partial(tokenizer.apply_chat_template, body.conversation, add_generation_prompt=True, **options)
        size, is_long = request.state.size, request.state.size > LONG
        if not is_long or self._processes is None:
            return list(await self._aside(request, self._long if is_long else self._short, size, template))
        text = await self._aside(request, self._short, size, partial(template, tokenize=False))
        if not counts:
            self._check_room(self._fewest(text), "or more ")
        return await self._tokens(request, text, special=False)

    def _manner(self, body: ChatRequest, prompt: Sequence[int]) -> Manner:
        """Return how the model will mark what it says."""
        tools = body.template_options.get("tools", [])
        return Manner.of(self._runner.engine.tokenizer, prompt, tools, body.by_grammar, not body.parallel_tool_calls)

    async def _grammar(
        self, request: Request, body: Generation, forms: list[tuple[str, Any, str]], samples: int, manner: Manner
    ) -> Grammar:
        """Return the grammar that the answer follows, compiled."""
        engine, last = self._runner.engine, forms[-1][2]
        after = manner.think[1] if manner.think and manner.thinks_first else ""
        if body.min_tokens or body.ignore_eos:
            name = "min_tokens" if body.min_tokens else "ignore_eos"
            raise Refused(400, f"{name} cannot be combined with {last}, which says where the answer ends", name)

        if samples > FORMED:
            raise Refused(400, f"n: {samples} samples of all prompts, the limit with {last} is {FORMED}", "n")

        def compiled(kind: str, text: Any, field: str) -> Grammar:
            try:
                read = text(engine.grammars.mark) if callable(text) else text
                made: Grammar = getattr(engine.grammars, kind)(read, after)
                return made
            except (ImportError, ValueError) as error:
                raise Refused(400, f"{field}: {_plain(error)}", field) from error

        made: Grammar
        for form in forms:
            made = await self._aside(request, self._grammars, 1.0, compiled, *form)
        return made

    # ------------------------------------------------------------------------------------------- an answer goes out

    async def _answer(
        self,
        request: Request,
        body: Generation,
        answer: Answer | MessageAnswer,
        prompts: list[Sequence[int]],
        manner: Manner,
    ) -> Response:
        engine = self._runner.engine
        longest, room = max(map(len, prompts)), engine.max_model_len
        places = engine.scheduler.places(request.state.tenant)
        if places is not None and len(prompts) > places:
            text = f"prompt: {len(prompts)} prompts in one request; at most {places} requests of this tenant may wait"
            raise Refused(400, text, "prompt")
        self._check_room(longest)
        most = body.most
        if most is None:
            most = self._settings.max_tokens if room is None else min(self._settings.max_tokens, room - longest)
        if body.min_tokens > most:
            raise Refused(400, f"min_tokens is {body.min_tokens}, more than max_tokens ({most})", "min_tokens")
        if body.tops is not None and not body.stream:
            told = len(prompts) * body.width * most * (1 + body.tops)
            if told > LOGPROBS:
                text = f"logprobs: up to {told} in one answer, the limit is {LOGPROBS}; stream the answer to get more"
                raise Refused(400, text, "logprobs")
        eos, state = tuple(engine.tokenizer.eos_token_ids), request.state
        body.keep_ends(eos)
        options = body.options(eos, state.tenant, state.began) | {"max_tokens": most}
        options["stop"] = [*body.stops, *manner.stops]
        if forms := body.forms:
            options["grammar"] = await self._grammar(request, body, forms, len(prompts) * body.width, manner)
        if body.xtc_probability:
            options["xtc_special_tokens"] = (*self._newline, *engine.tokenizer.eos_token_ids)
        run = self._runner.run(prompts, body.stream or body.tops is not None, options)
        if body.stream:
            return EventStream(run, answer)
        return await _unless_gone(request.receive, _whole(run, answer))


class EventStream(Response):
    """The answer to a run, sent in pieces as they come. If the client hangs up, the run is cancelled."""

    media_type = "text/event-stream"

    def __init__(self, run: Run, answer: Answer | MessageAnswer) -> None:
        super().__init__(headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._run, self._answer = run, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. Raise an error that comes before the first byte; send a later one as an event."""
        with suppress(ClientDisconnect):
            await _unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        answer, completions = self._answer, {}

        async def write(body: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        with _refusals():
            async with self._run as run:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await write(answer.opening(len(run.prompts)))
                try:
                    async for number, item in run:
                        if isinstance(item, Completion):
                            completions[number] = item
                            await write(answer.closing(number, item))
                        else:
                            await write(answer.piece(number, item))
                except EngineFailed as error:
                    _log.warning("a stream ends early: %s", error)
                    await write(answer.failure(str(error)), more=False)
                    return
        await write(answer.ending(list(completions.values())), more=False)


async def _whole(run: Run, answer: Answer | MessageAnswer) -> Response:
    """Return the answer to a run, once it is over."""
    with _refusals():
        async with run:
            completions = {}
            async for number, item in run:
                if isinstance(item, Completion):
                    completions[number] = item
                else:
                    answer.hear(number, item)
    ended = [completions[number] for number in sorted(completions)]

    def told() -> str:  # in ASCII: a model may escape half of a character
        return json.dumps(answer.whole(ended), allow_nan=False, separators=(",", ":"))

    return Response(await asyncio.to_thread(told), media_type="application/json")  # it may be long


async def _unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`. If the client hangs up first, cancel `work` and raise `ClientDisconnect`."""
    job, gone = asyncio.ensure_future(work), asyncio.create_task(_hang_up(receive))
    try:
        await asyncio.wait((job, gone), return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            raise ClientDisconnect
        return await job
    finally:
        for task in (job, gone):
            task.cancel()
        await asyncio.wait((job, gone))


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn exceptions of the engine into `Refused`, which its client gets."""
    try:
        yield
    except RequestRejected as error:
        status = REJECTED.get(error.reason, 400)
        raise Refused(status, _plain(error), code=error.reason, wait=error.wait) from error
    except (TypeError, ValueError) as error:
        raise Refused(400, _plain(error)) from error
    except EngineFailed as error:
        code = "deadline" if isinstance(error, DeadlinePassed) else None
        raise Refused(error.status, str(error), code=code) from error


def _plain(error: Exception) -> str:
    """Return a message without the ``[call]`` at its beginning."""
    return str(error).partition("] ")[2] or str(error)


def _error(status: int, message: str) -> JSONResponse:
    return _told(refusal(status, message), status)


async def _wrong_path(request: Request, error: Any) -> JSONResponse:
    """Answer in the event loop, as the next two do: starlette would start a thread for a plain function."""
    return _error(error.status_code, error.detail)


async def _failure(request: Request, error: Exception) -> JSONResponse:
    return _error(500, f"the server failed: {type(error).__name__}")


async def _refusal(request: Request, error: Any) -> JSONResponse:
    if request.url.path.startswith("/v1/messages"):
        return _told(messages.refusal(error.status, error.message), error.status, error.wait)
    return _told(refusal(error.status, error.message, error.param, error.code), error.status, error.wait)


def _told(body: dict[str, Any], status: int, wait: float = 0) -> JSONResponse:
    seconds = max(1, min(LONGEST_WAIT, math.ceil(wait)))
    return JSONResponse(body, status, {"Retry-After": str(seconds)} if status in (429, 503) else None)
