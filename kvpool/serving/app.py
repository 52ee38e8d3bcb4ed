"""The ASGI application: routes, checks and errors, and how a request becomes an answer."""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from os.path import commonprefix
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
from asgi_correlation_id import CorrelationIdMiddleware, correlation_id
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from kvpool.adapters.mlx_lm.chat import speller
from kvpool.adapters.mlx_lm.engine import Completion, TokenEvent
from kvpool.adapters.mlx_lm.grammar import Grammar, Grammars, Trial
from kvpool.retention import Keep
from kvpool.serving import messages
from kvpool.serving.answers import Answer, BlockAnswer, ChatAnswer, TextAnswer, encode, refusal
from kvpool.serving.messages import CountRequest, MessageAnswer, MessagesRequest
from kvpool.serving.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Form,
    Generation,
    Refused,
    TokenizeRequest,
    parse,
)
from kvpool.serving.responses import ResponseAnswer, ResponsesRequest
from kvpool.serving.runner import Run, Runner, blocks_by_tenant, plain
from kvpool.serving.speech import Manner
from kvpool.serving.telemetry import ServerMetrics
from kvpool.serving.texts import Processes, Threads, shared

T = TypeVar("T")
PAGE = Path(__file__).with_name("page.html")
PING_SECONDS = 10  # between two comments in a stream: a prompt may be read for minutes, and proxies cut what is silent
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"  # of the page
LIVE = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", "Content-Type": "text/event-stream; charset=utf-8"}
LONGEST_PATH = 200  # bytes of a path in the log
HUNG_UP = "the client has hung up"
POLLED = {"/health", "/ready", "/metrics", "/status"}  # a line for each would hide the others
TWO_LENGTHS = {b"content-length", b"transfer-encoding"}  # RFC 9112, 6.3: after both, the connection is closed
BODY_SECONDS = 30  # for a client to send its body
LONG = 2**16  # bytes of a body that is read in a thread, and of a text that becomes tokens apart from shorter ones
LOGPROBS = 2**18  # of an answer that is sent as a whole
AT_A_TIME = 2  # calls of one kind, such as to tokenize long texts; if there are several tenants, one less of each
FORMED = 8  # samples of a request with a grammar: a token of each may take milliseconds, and others wait
FILLS = (  # marks of models that fill a gap: before the text, before what follows it, before the answer
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<\u2581PRE>", "<\u2581SUF>", "<\u2581MID>"),
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the server was started with. With `keys`, a client needs one, which says its tenant; else all are one."""

    names: tuple[str, ...]  # that clients use for the model
    hosts: frozenset[str]  # of `Host`, lower, no port: a web page elsewhere may have another name for this address
    keys: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)  # of tenants at threads and processes that tokenize
    max_tokens: int = 512  # of an answer, if a request does not say
    max_connections: int = 1024  # requests that are answered at a time; one more that has a body gets 503
    max_body: int = 4 * 2**20  # bytes
    origins: tuple[str, ...] = ()  # of web pages that may ask from a browser; "*": all
    is_strict: bool = False  # unknown fields are refused
    has_page: bool = True
    defaults: dict[str, Any] = field(default_factory=dict)  # of fields; they may be set until the server starts
    chat_template: str | None = None  # in place of the tokenizer's
    template_options: Mapping[str, Any] = field(default_factory=dict)  # if a request does not have others


class Service:
    """The endpoints, on a runner that has started.

    `active` requests are not answered yet, from their first line to the end of the answer, and `ids` has their ids. New
    ones are refused while it `is_draining`, because the server stops.
    """

    def __init__(self, runner: Runner, settings: Settings, metrics: ServerMetrics) -> None:
        self._runner, self._settings, self._metrics = runner, settings, metrics
        self._engine, weights = runner.engine, settings.weights
        self._tokenizer = tokenizer = runner.engine.tokenizer
        self._decode: Callable[[int], str] = lru_cache(2**18)(lambda token: tokenizer.decode([token]))
        self._spell: Callable[[int], bytes] = lru_cache(2**18)(speller(tokenizer))
        self._engine.grammars.trial = Trial(tokenizer, self._engine.vocab_size)
        self._newline = tokenizer.encode("\n")
        runner.weights = weights
        apart = AT_A_TIME - (len(weights) > 1)  # one tenant does not hold another one up
        self._short = Threads(AT_A_TIME, apart, weights)
        self._long = Threads(AT_A_TIME, apart, weights)  # of a tokenizer with code of its own
        self._grammars = Threads(1, 1, weights)
        os.environ["PYTHONSAFEPATH"] = "1"  # a process that starts takes no `token.py` of this folder for Python's
        how = shared(tokenizer)
        self._processes = None if how is None else Processes(how, AT_A_TIME, apart, weights)
        self._texts: Counter[str | None] = Counter()  # of each tenant at the tokenizer
        self.is_draining, self.active = False, 0
        self.ids: set[str] = set()
        posts = {"/v1/completions": self.completions, "/tokenize": self.tokenize, "/detokenize": self.detokenize}
        posts |= {"/v1/messages/count_tokens": self.count_tokens} | dict.fromkeys(CHATS, self.chat)
        gets = {"/v1/models": self.models, "/v1/models/{name:path}": self.models, "/metrics": self.statistics}
        gets |= {"/status": self.status, "/health": self.health, "/ready": self.ready}
        gets |= {"/": self.page} if settings.has_page else {}
        routes = [Route(path, self._guarded(endpoint), methods=["POST"]) for path, endpoint in posts.items()]
        routes += [Route(path, self._guarded(endpoint)) for path, endpoint in gets.items()]
        self._paths = posts.keys() | gets.keys()
        app: Any = Starlette(routes=routes, exception_handlers=dict.fromkeys((HTTPException, Exception), _refusal))
        app.router.redirect_slashes = False  # to where the client's Host says
        if settings.origins:
            app = CORSMiddleware(
                app,
                allow_origins=settings.origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["request-id", "retry-after", "x-ignored-fields", "x-request-id"],
            )
        self._app = CorrelationIdMiddleware(
            app, generator=lambda: f"req_{uuid4().hex}", validator=lambda text: text.isprintable() and len(text) <= 128
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, count the answer and log it."""
        status, began, state = 0, time.monotonic(), scope.setdefault("state", {})

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._metrics.answered(scope["path"] if scope["path"] in self._paths else "other", status)
                headers = [*message["headers"], (b"request-id", _id().encode())]  # as Anthropic calls it
                if ignored := state.get("ignored"):
                    headers.append((b"x-ignored-fields", ", ".join(ignored)[:LONGEST_PATH].encode()))
                if {name for name, _ in scope["headers"]} >= TWO_LENGTHS:  # a proxy may see another request behind it
                    headers = [pair for pair in headers if pair[0] != b"connection"] + [(b"connection", b"close")]
                message = {**message, "headers": headers}
            elif status == 400 and "error" not in state:  # of starlette's check of origins: what it sends says why
                origin = Headers(scope=scope).get("origin")
                state["error"] = f"{message['body'].decode()} by --allowed-origins: {origin}"[:LONGEST_PATH]
            await send(message)

        state["send"] = send
        self.active += 1
        try:
            await self._app(scope, receive, counted)
        except asyncio.CancelledError:  # uvicorn waits no longer
            if not status:
                await _error(scope, 503, "the server stops")(scope, receive, counted)
        finally:
            self.active -= 1
            self.ids.discard(_id())
            if status != 200 or scope["path"] not in POLLED:
                path = scope["raw_path"][:LONGEST_PATH].decode("ascii", "backslashreplace")
                told = {"id": _id(), "tenant": state.get("tenant"), "status": status or "no answer"}
                told |= {} if "run" not in state else state["run"].told | state.get("scored", {})
                told |= {"total": round(time.monotonic() - began, 3)}
                told |= {name: state.get(name) for name in ("ignored", "error")}
                _log.info("%s %s", scope["method"], path, extra={"told": told})

    # ------------------------------------------------------------------------------------------- endpoints

    async def completions(self, request: Request) -> Response:
        body, decode = await self._read(CompletionRequest, request), self._tokenizer.decode
        prompts: list[Sequence[int]] = []
        echo: list[str] = []
        for one in body.prompt:
            text = one if isinstance(one, str) else ""
            tokens: Sequence[int] = () if isinstance(one, str) else one
            if body.suffix is not None:
                tokens = await self._around_gap(request, text, body.suffix)
            elif text:
                tokens = await self._tokens(request, text)
            self._check_room(len(tokens))
            prompts.append(tokens)
            if body.echo:
                echo += [text or await self._aside(request, self._short, len(tokens), decode, tokens)] * body.n
        answer = TextAnswer(body.model, body, sum(map(len, prompts)), self._decode, echo=echo)
        if body.scores:
            completions = await self._score(request, body, answer, prompts)
            if body.max_tokens == 0:
                request.state.scored = {"prompt": sum(map(len, prompts)), "generated": 0}
                return _answered(answer.whole(completions))
        return await self._answer(request, body, answer, prompts, Manner())

    async def chat(self, request: Request) -> Response:
        """Answer a conversation, in the API that the path belongs to."""
        form = CHATS[request.url.path]
        asked = await self._read(form, request)
        body, name = asked.chat, asked.model
        prompt = await self._templated(request, body)
        tools = body.template_options.get("tools", [])
        manner = Manner.of(self._tokenizer, prompt, tools, body.by_grammar, not body.parallel_tool_calls)
        answer: Answer | BlockAnswer
        if form is ChatRequest:
            answer = ChatAnswer(name, body, len(prompt), self._decode, spell=self._spell, manner=manner)
        else:
            kind = MessageAnswer if form is MessagesRequest else ResponseAnswer
            answer = kind(name, body, len(prompt), manner, asked)
        return await self._answer(request, body, answer, [prompt], manner)

    async def count_tokens(self, request: Request) -> Response:
        body = (await self._read(CountRequest, request)).chat
        return JSONResponse({"input_tokens": len(await self._templated(request, body))})

    async def tokenize(self, request: Request) -> Response:
        body = await self._read(TokenizeRequest, request)
        tokens = [int(token) for token in await self._tokens(request, body.prompt, special=body.add_special_tokens)]
        return JSONResponse({"count": len(tokens), "max_model_len": self._engine.max_model_len, "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        tokens, decode = (await self._read(DetokenizeRequest, request)).tokens, self._tokenizer.decode
        return JSONResponse({"prompt": await self._aside(request, self._short, len(tokens), decode, tokens)})

    async def models(self, request: Request) -> Response:
        """Return the names of the model, or one of them, in the forms of both APIs."""
        names, most = self._settings.names, self._engine.max_model_len
        told = {"object": "model", "created": 0, "owned_by": "kvpool", "max_model_len": most, "type": "model"}
        told |= {"created_at": "1970-01-01T00:00:00Z", "max_input_tokens": most}
        data = [{"id": name, "display_name": name, **told} for name in names]
        if (one := request.path_params.get("name")) is not None:
            self._check_name(one)
            return JSONResponse(data[names.index(one)])
        ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return JSONResponse({"object": "list", "data": data, **ends})

    async def page(self, request: Request) -> Response:
        return Response(PAGE.read_bytes(), media_type="text/html", headers={"Content-Security-Policy": POLICY})

    async def status(self, request: Request) -> Response:
        """Return what the page shows."""
        engine, now = self._engine, self._engine.scheduler.stats()
        told = {"model": self._settings.names, "max_model_len": engine.max_model_len, "route": engine.kv.route}
        told |= {"running": now.prefilling + now.decoding, "waiting": now.waiting, "sampled": now.sampled_tokens}
        told |= {"prompts": now.hit_tokens + now.prefill_tokens, "found": now.hit_tokens}
        return JSONResponse(told | await self._runner.ask(blocks_by_tenant))

    async def health(self, request: Request) -> Response:
        if self._runner.failure is not None:
            raise Refused(503, "the engine is lost")
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        if self.is_draining:
            raise Refused(503, "the server stops")
        return await self.health(request)

    async def statistics(self, request: Request) -> Response:
        body, headers = self._metrics.text()
        return Response(body, headers=headers)

    # ------------------------------------------------------------------------------------------- a request comes in

    def _guarded(self, endpoint: Callable[[Request], Awaitable[Response]]) -> Any:
        """Return the endpoint with checks of ``Host`` and of the key before it."""
        needs_key = endpoint not in (self.health, self.ready, self.page)

        async def guarded(request: Request) -> Response:
            self.ids.add(_id())
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
                request.state.error = HUNG_UP
                return Response(status_code=499)  # nobody gets it, but the statistics and the log

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
        call = partial(parse, defaults=self._settings.defaults, is_strict=self._settings.is_strict)
        read = await self._aside(request, self._short, size, call, form, data) if size > LONG else call(form, data)
        body, request.state.ignored = read
        body.model = self._settings.names[0] if body.model is None else body.model
        self._check_name(body.model)
        return body

    def _check_name(self, name: str) -> None:
        names = self._settings.names
        if name not in names:
            text = f"model: there is no {name!r:.80}, this server has {', '.join(names)}"
            raise Refused(404, text, "model", "model_not_found")

    async def _aside(self, request: Request, place: Threads | Processes, cost: float, *call: Any) -> Any:
        """Run what may take long outside the event loop. `cost` counts as what its tenant got, see `Turns`."""
        tenant = request.state.tenant
        most = self._engine.scheduler.places(tenant)
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
        encode = self._tokenizer.encode
        call = encode if special else partial(encode, add_special_tokens=False)
        return list(await self._aside(request, self._long if len(text) > LONG else self._short, len(text), call, text))

    async def _around_gap(self, request: Request, before: str, after: str) -> Sequence[int]:
        """Return the tokens of a prompt whose answer is to stand between two texts."""
        vocab = self._tokenizer.get_vocab()
        marks = next((marks for marks in FILLS if vocab.keys() >= set(marks)), None)
        if marks is None:
            raise Refused(400, "suffix: the tokenizer of this model has no marks to fill a gap", "suffix")
        opens, closes, fills = (vocab[mark] for mark in marks)
        texts = [await self._tokens(request, text, special=False) for text in (before, after)]
        return [opens, *texts[0], closes, *texts[1], fills]

    @property
    def _room(self) -> float:
        """Tokens of the longest prompt and answer that the pool holds, if each of them stays in one group."""
        kv, pool = self._engine.kv, self._engine.kv.pool
        if kv.eviction is not None or [group.kind for group in pool.options.groups] != ["full"]:
            return math.inf
        return 1 + (pool.num_blocks - pool.options.reserved_blocks) * pool.block_size

    def _check_room(self, tokens: int) -> None:
        room = self._engine.max_model_len
        if room is not None and tokens >= room:
            text = f"{tokens} prompt tokens leave no room for an answer: the model takes {room} of both together"
            raise Refused(400, text, code="context_length_exceeded")

    async def _templated(self, request: Request, body: ChatRequest) -> Sequence[int]:
        """Return the tokens of a conversation. It may be longer than the model takes."""
        tokenizer, options = self._tokenizer, body.template_options
        if not tokenizer.has_chat_template:
            raise Refused(400, "messages: this model has no chat template", "messages")
        if options.get("tools") and not body.by_grammar and not tokenizer.has_tool_calling:
            text = "tools: this model does not mark its calls; tool_choice must force one, or the output be structured"
            raise Refused(400, text, "tools")
        template = partial(self._template(body), body.conversation)
        size, is_long = request.state.size, request.state.size > LONG
        if not is_long or self._processes is None:
            return list(await self._aside(request, self._long if is_long else self._short, size, template))
        text = await self._aside(request, self._short, size, partial(template, tokenize=False))
        return await self._tokens(request, text, special=False)

    def _template(self, body: ChatRequest) -> Callable[..., Any]:
        """Return the chat template, with the options of a request."""
        begins = body.add_generation_prompt and not body.continue_final_message
        options = {"add_generation_prompt": begins, **self._settings.template_options, **body.template_options}
        return partial(self._tokenizer.apply_chat_template, **options)

    async def _kept(self, request: Request, body: Generation) -> Keep | None:
        """Return what of a prompt stays in the prefix cache: nothing with a salt, because nobody else can find it."""
        if body.keep is None or body.cache_salt is not None:
            return None
        if not isinstance(body, ChatRequest) or body.kept_messages is None:
            return body.keep
        head, template = body.conversation[: body.kept_messages], self._template(body)
        role = "user" if head[-1]["role"] in ("assistant", "system") else "assistant"

        def common() -> str | None:
            """Return what this prompt has in common with one that goes on otherwise after these messages."""
            with suppress(Exception):  # the template refuses the other one
                told = (body.conversation, [*head, {"role": role, "content": "."}])
                return commonprefix([template(one, tokenize=False) for one in told])  # noqa: RUF071
            return None

        text = await self._aside(request, self._short, request.state.size, common)
        if text is None:
            return body.keep
        tokens = len(await self._tokens(request, text, special=False))
        return replace(body.keep, tokens=tokens) if tokens else None

    async def _grammar(
        self, request: Request, body: Generation, forms: list[tuple[str, Any, str]], samples: int, manner: Manner
    ) -> Grammar:
        """Return the grammar that the answer follows, compiled."""
        grammars, last = self._engine.grammars, forms[-1][2]
        after = manner.think[1] if manner.think and manner.thinks_first else ""
        if body.min_tokens or body.ignore_eos:
            name = "min_tokens" if body.min_tokens else "ignore_eos"
            raise Refused(400, f"{name} cannot be combined with {last}, which says where the answer ends", name)
        if samples > FORMED:
            raise Refused(400, f"n: {samples} samples of all prompts, the limit with {last} is {FORMED}", "n")

        def compiled(kind: str, text: Any, field: str) -> Grammar:
            try:
                read: Grammar = getattr(grammars, kind)(text(grammars.mark) if callable(text) else text, after)
                return read
            except (ImportError, ValueError) as error:
                raise Refused(400, f"{field}: {plain(error)}", field) from error

        made: list[Grammar] = [await self._aside(request, self._grammars, 1.0, compiled, *form) for form in forms]
        return made[-1]

    # ------------------------------------------------------------------------------------------- an answer goes out

    async def _answer(
        self, request: Request, body: Generation, answer: Any, prompts: list[Sequence[int]], manner: Manner
    ) -> Response:
        engine, state = self._engine, request.state
        places = engine.scheduler.places(state.tenant)
        if places is not None and len(prompts) > places:
            text = f"prompt: {len(prompts)} prompts in one request; at most {places} requests of this tenant may wait"
            raise Refused(400, text, "prompt")
        self._check_room(longest := max(map(len, prompts)))
        most = self._settings.max_tokens if body.max_tokens is None else body.max_tokens
        room = min(self._room, engine.max_model_len or math.inf) - longest
        most = int(max(1, min(most, room)))  # what the request wants, or what fits behind its prompt
        if body.min_tokens > most:
            raise Refused(400, f"min_tokens is {body.min_tokens}, more than max_tokens ({most})", "min_tokens")
        if body.tops is not None and not body.stream:
            told = len(prompts) * body.width * most * (1 + body.tops)
            if told > LOGPROBS:
                text = f"logprobs: up to {told} in one answer, the limit is {LOGPROBS}; stream the answer to get more"
                raise Refused(400, text, "logprobs")
        ends = tuple(self._tokenizer.eos_token_ids)
        options = body.options(ends, state.tenant, state.began) | {"max_tokens": most}
        options["stop"] = [*body.stop, *manner.stops]
        options["keep"] = await self._kept(request, body)
        if forms := body.forms:
            options["grammar"] = await self._grammar(request, body, forms, len(prompts) * body.width, manner)
        if body.xtc_probability:
            options["xtc_special_tokens"] = (*self._newline, *ends)
        state.run = run = Run(self._runner, prompts, body.stream or body.tops is not None, options)
        return Stream(run, answer) if body.stream else await _unless_gone(request.receive, _whole(run, answer))

    async def _score(
        self, request: Request, body: CompletionRequest, answer: TextAnswer, prompts: list[Sequence[int]]
    ) -> list[Completion]:
        """Have the engine say each prompt, and keep the logprobs of its tokens. Return what it said, as no tokens."""
        if body.stream and body.max_tokens == 0:
            raise Refused(400, "stream: a prompt that is only scored is not streamed", "stream")
        state, completions, grammars = request.state, [], self._engine.grammars
        options = body.options((), state.tenant, state.began) | {"n": 1, "eos": (), "min_tokens": 0}
        for prompt in prompts:
            own = {"max_tokens": max(1, len(prompt) - 1), "grammar": Given(prompt[1:], grammars)}
            state.run = run = Run(self._runner, [prompt[:1]], True, options | own)
            heard = [event for _, event in await _unless_gone(request.receive, _heard(run))]
            first = TokenEvent(None, 0, int(prompt[0]), -math.inf, "", None)  # it has no logprob
            answer.scored += [[first, *heard[: len(prompt) - 1]]] * body.n
            (sample,) = run.completions[0].samples
            none = replace(sample, tokens=sample.tokens[:0], text="", finish_reason="length")
            completions.append(replace(run.completions[0], samples=(none,) * body.n))
        return completions


class Given(Grammar):
    """A grammar whose only answer are these tokens: so the engine says a prompt, and what it thinks of each token.

    It follows its samples, too. All grammars have as many bits.
    """

    def __init__(self, tokens: Sequence[int], grammars: Grammars) -> None:
        super().__init__(None, frozenset())
        self._tokens, self._size = tokens, len(grammars.regex("a").follow().allowed(np.empty(0, np.int32)))

    def follow(self) -> Any:
        """Return what follows one sample."""
        return self

    def allowed(self, generated: np.ndarray) -> np.ndarray:
        """Return which tokens may come next, one bit each, the lowest first. Behind the last one, all may."""
        if len(generated) >= len(self._tokens):
            return np.full(self._size, 255, np.uint8)
        token, bits = int(self._tokens[len(generated)]), np.zeros(self._size, np.uint8)
        bits[token // 8] = 1 << token % 8
        return bits


CHATS: dict[str, Any] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
}


class Stream(Response):
    """The answer to a run, sent in pieces as they come. If the client hangs up, the run is cancelled."""

    def __init__(self, run: Run, answer: Answer | BlockAnswer) -> None:
        self.status_code, self.background, self._run, self._answer = 200, None, run, answer
        self.init_headers(LIVE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. Raise an error that comes before the first byte; send a later one as an event."""
        async with self._run:
            pings = asyncio.create_task(self._ping())
            try:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await _unless_gone(receive, self._pieces(scope["state"]))
            except ClientDisconnect:
                scope["state"]["error"] = HUNG_UP
            finally:
                pings.cancel()

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(0.9 * PING_SECONDS)
            self._run.look()
            await asyncio.sleep(0.1 * PING_SECONDS)
            self._run.put((0, None))

    async def _pieces(self, state: dict[str, Any]) -> None:
        """Send all that has come at a time, straight to the server: each token would go through all middleware."""
        answer, run, send = self._answer, self._run, state["send"]
        events = answer.opening(len(run.prompts))
        try:
            while len(run.completions) < len(run.prompts):
                if events:
                    await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
                events = []
                for number, item in await run.news():
                    events += answer.told(number, item) if item else self._sign()
            events += answer.ending([*run.completions.values()])
        except Refused as why:
            state["error"] = why.detail
            _log.warning("a stream ends early: %s", why.detail, extra={"told": {"id": _id()}})
            events += answer.failure(why.detail)
        await send({"type": "http.response.body", "body": b"".join(events)})

    def _sign(self) -> list[bytes]:
        """Return a comment, while a prompt is read with how far that is; and what this API has for that."""
        read, known = self._run.num_read, sum(map(len, self._run.prompts))
        comment = f"{read} of {known} prompt tokens are read" if read < known else "the answer goes on"
        return [f": {comment}\n".encode(), self._answer.ping or b"\n"]


async def _whole(run: Run, answer: Any) -> Response:
    """Return the answer to a run, once it is over."""
    for number, event in await _heard(run):
        answer.hear(number, event)
    ended = [completion for _, completion in sorted(run.completions.items())]
    return await asyncio.to_thread(lambda: _answered(answer.whole(ended)))  # it may be long


def _answered(data: Any) -> Response:
    return Response(encode(data), media_type="application/json")


async def _heard(run: Run) -> list[tuple[int, TokenEvent]]:
    """Return the tokens of a run, once it is over, and the numbers of their prompts; none if it does not listen."""
    async with run:
        return [(number, item) async for number, item in run if isinstance(item, TokenEvent)]


async def _unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`. If the client hangs up first, cancel `work` and raise `ClientDisconnect`."""
    job, gone = asyncio.ensure_future(work), asyncio.create_task(_hang_up(receive))
    try:
        await asyncio.wait((job, gone), return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            raise ClientDisconnect
        return await job
    finally:
        job.cancel()
        gone.cancel()
        await asyncio.wait((job, gone))


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _id() -> str:
    return correlation_id.get() or ""


def _error(scope: Scope, status: int, message: str, param: str | None = None, code: str | None = None) -> JSONResponse:
    """Return an error in the form of the API that the path belongs to."""
    is_anthropic = scope["path"].startswith("/v1/messages")
    scope["state"]["error"] = message
    told = messages.refusal(status, message, param) if is_anthropic else refusal(status, message, param, code)
    return JSONResponse(told, status)


async def _refusal(request: Request, error: Any) -> JSONResponse:
    """Answer in the event loop: starlette would start a thread for a plain function."""
    if not isinstance(error, HTTPException):
        error = Refused(500, f"the server failed: {type(error).__name__}")
    text = f"there is no such path: {request.url.path:.80}" if error.detail == "Not Found" else error.detail
    found = _error(request.scope, error.status_code, text, *(getattr(error, name, None) for name in ("param", "code")))
    found.headers.update(error.headers or {})  # Allow, with 405
    return found
