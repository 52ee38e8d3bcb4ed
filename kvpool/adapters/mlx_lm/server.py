"""mlx-lm's own HTTP server on paged caches: subclasses of four of its classes.

``mlx_lm.server.main`` looks up its classes by name. During `serve` the names of its model provider, its batch generator
and its ``run`` are bound to the classes below. The files of mlx-lm are not changed.

- `Provider` installs each loaded model on a pool (`install`).
- `AdmittingGenerator` admits a request when the pool has room for it up to its end. So an `OutOfBlocks` never reaches
  the engine in the middle of a step.
- `Responder` refuses a request that could never fit, with a message for its client.
- `Handler` answers ``GET /metrics``.
"""

from __future__ import annotations

import argparse
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from typing import Any

import mlx.core as mx
from mlx_lm import server
from mlx_lm.generate import BatchGenerator

from kvpool import Pool
from kvpool.adapters.mlx_lm.cache_hook import Hook
from kvpool.adapters.mlx_lm.chat import rewritten_from
from kvpool.adapters.mlx_lm.eviction import blocks_at_most
from kvpool.adapters.mlx_lm.host import PagedKV, install, require_evictable, require_tested_version
from kvpool.adapters.mlx_lm.loading import blocks_in
from kvpool.adapters.mlx_lm.prefix import PagedPromptCache
from kvpool.adapters.mlx_lm.shapes import inspect_model, leaves_of, max_positions
from kvpool.eviction import Policy
from kvpool.metrics import CONTENT_TYPE, Metric, counter, gauge, prometheus_text

LONGEST = 32768  # tokens that a request may be expected to have, when the pool is sized by itself


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Options of the pool of each served model.

    Attributes
    ----------
    num_blocks, memory
        Give at most one. By default the pool has as many blocks as concurrent requests may need and memory allows.
    names : mapping
        Names that clients may use for a model, and their paths.
    eviction : Policy, optional
        Keeps every sequence within a budget.
    quantization : pairs
        `kv_bits` and so on, see `install`.
    """

    block_size: int = 16
    num_blocks: int | None = None
    memory: str | None = None
    names: tuple[tuple[str, str], ...] = ()
    eviction: Policy | None = None
    quantization: tuple[tuple[str, int], ...] = ()


class Provider(server.ModelProvider):
    """mlx-lm's model provider. The models that it loads get their caches from a pool.

    Attributes
    ----------
    kv : PagedKV or None
        The pool and storage of the loaded model.
    prompts : PagedPromptCache or None
    engine : AdmittingGenerator or None
        The newest one.
    failure : Exception or None
        Why the model of the command line could not be loaded.
    ready : threading.Event
        Set after the attempt to load that model.
    """

    def __init__(self, cli_args: argparse.Namespace, options: PoolOptions) -> None:
        super().__init__(cli_args)
        self._model_map.update(options.names)
        self._options = options
        self._installed = ExitStack()
        self.kv: PagedKV | None = None
        self.prompts: PagedPromptCache | None = None
        self.engine: AdmittingGenerator | None = None
        self.failure: Exception | None = None
        self.ready = threading.Event()

    def load_default(self) -> None:
        """Load the model of the command line. Sets `failure` and `ready`."""
        try:
            super().load_default()
        except Exception as error:
            self.failure = error
        finally:
            self.ready.set()

    def reset(self) -> None:
        """Drop the model and its pool."""
        self.kv = self.prompts = self.engine = None
        self._installed.close()
        super().reset()

    def _load(self, *names: Any) -> None:
        if self._options.eviction is not None and names[2:] not in ((), (None,)):
            raise ValueError("a draft model and eviction exclude each other: what has left does not come back")
        super()._load(*names)
        try:
            kv = self._install(self.model)
            draft = None if self.draft_model is None else self._install(self.draft_model)
            self.prompts = PagedPromptCache(kv, draft)
            self.kv = kv
        except BaseException:
            self.reset()
            raise

    def _install(self, model: Any) -> PagedKV:
        options = self._options
        block_size, num_blocks, policy = options.block_size, options.num_blocks, options.eviction
        longest = min(max_positions(model) or LONGEST, LONGEST)
        bits: dict[str, Any] = dict(options.quantization)
        if num_blocks is None:
            at_a_time = self.cli_args.decode_concurrency + self.cli_args.prompt_concurrency
            keeps_all = policy is not None
            num_blocks = blocks_in(options.memory or "auto", model, block_size, at_a_time, keeps_all, **bits)
            if options.memory is None:
                each = -(-longest // block_size)
                if policy is not None:
                    each = blocks_at_most(policy, longest, self.cli_args.prefill_step_size, block_size)
                num_blocks = min(num_blocks, 1 + at_a_time * each)
        if policy is not None:
            needed = blocks_at_most(policy, min(policy.max_kv + 1, longest), 1, block_size)
            if needed >= num_blocks:
                raise ValueError(
                    f"{num_blocks} blocks of {block_size} tokens, one of them reserved, are too few: a sequence of "
                    f"{policy.max_kv} tokens needs {needed}, copies of what is shared included"
                )
        if policy is None:
            kv = install(model, num_blocks, block_size=block_size, prefix_cache=True, **bits)
        else:  # admission counts the blocks of one table
            require_evictable(inspect_model(model), policy, "serve")
            pool = Pool(num_blocks, block_size, max_seqs=4096, prefix_cache=True)
            kv = install(model, pool=pool, prefix_cache=True, eviction=policy, **bits)
        return self._installed.enter_context(kv)


class PromptCache:
    """Forwards to the prompt cache of the loaded model. The server makes it before there is a model.

    Attributes
    ----------
    cut : int or None
        Where the next turn may rewrite the prompt that is looked up next. The server reads a prompt, then looks it up.
    """

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self.cut: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._provider.prompts, name)

    def __len__(self) -> int:
        return len(self._provider.prompts or ())

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[list[Any], Sequence[int]]:
        """Look up a prompt."""
        assert self._provider.prompts is not None
        return self._provider.prompts.fetch_nearest_cache(model, tokens, cut=self.cut)

    def insert_cache(self, model: Any, tokens: list[int], prompt_cache: list[Any], **kind: Any) -> None:
        """Store the content of a cache. Skip a running request if another one has stored part of it.

        Otherwise the running request would hold those stored blocks until it ends. Admission counts them as free.
        """
        provider = self._provider
        kv, engine = provider.kv, provider.engine
        if kv is not None and kv.prefix_cache and engine is not None and engine.is_running(prompt_cache):
            known = next(leaves_of(prompt_cache)).batch.known[0]
            with kv.lock:
                if kv.pool.prefix.match([*tokens, 0], known.namespace) > known.num_tokens:
                    return
        assert provider.prompts is not None
        provider.prompts.insert_cache(model, tokens, prompt_cache, **kind)


class AdmittingGenerator(BatchGenerator):
    """mlx-lm's engine for a model with a pool. Requests wait until the pool has room for them up to their end.

    Admission is first come, first served. A request counts with all tokens that it may generate, so an admitted request
    never runs out of blocks. At the beginning of each step this invariant holds: the blocks that running requests may
    still take, with a copy of a shared tail for each, are at most the free and evictable blocks. Steps keep it. Between
    two steps, requests can hold evictable blocks in three ways:

    - A new request finds its beginning in the prefix cache. It gives those blocks back when it begins to wait, and
      looks the prompt up again when it is admitted. Blocks that it holds then are no longer part of its need.
    - A finished request stores its answer and may then refer to blocks that others have stored. It is emptied before
      the next step.
    - A running request stores its prompt. This is done only if it then refers to no blocks but its own, see
      `PromptCache`.

    With eviction a sequence gains and loses blocks, and shared blocks are copied first. There the invariant is that all
    blocks of the pool are enough for the maximum of each running request, as if nothing were shared (`blocks_at_most`).

    Caches that were handed out, with a response or by `extract_cache`, are emptied at the next step. The server has
    stored them by then, but its variables keep them alive.

    Raises
    ------
    RuntimeError
        The model is not installed on a pool.
    """

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self._hook = Hook.of(model, "serve")
        self._kv: PagedKV = self._hook.installed[-1]
        self._limits: dict[int, int] = {}  # tokens at most, by uid
        self._handed_out: list[list[Any]] = []
        self._extracted: list[list[Any]] = []
        self._last_held = -1
        self.num_waited = 0  # requests that found no room when they were first in line
        self._num_held = 0

    @property
    def num_requests(self) -> dict[str, int]:
        """Requests by state, from any thread."""
        return {
            "waiting": len(self._unprocessed_sequences) + self._num_held,
            "prefilling": len(self._prompt_batch),
            "decoding": len(self._generation_batch),
        }

    def insert_segments(self, *args: Any, **options: Any) -> list[int]:
        """Override mlx-lm's method: waiting sequences hold no blocks of the prefix cache.

        Raises
        ------
        RuntimeError
            Somebody has removed the hook: mlx-lm would make its own caches, outside of admission.
        """
        if lost := self._hook.lost(self.model):
            raise RuntimeError(f"[serve] {lost}: requests would get mlx-lm's own caches, outside the pool")
        uids: list[int] = super().insert_segments(*args, **options)
        queue = self._unprocessed_sequences
        for at in range(-len(uids), 0):
            queue[at] = _without_prefix(queue[at])
        return uids

    def extract_cache(self, uids: Sequence[int]) -> Any:
        """Override mlx-lm's method: remember what was handed out."""
        found = super().extract_cache(uids)
        self._extracted = [caches for caches, _ in found.values()]
        self._handed_out += self._extracted
        return found

    def is_running(self, caches: list[Any]) -> bool:
        """Whether `extract_cache` has just handed out these caches, so that their request still runs."""
        return any(caches is one for one in self._extracted)

    def _next(self) -> Any:
        self._extracted = []
        while self._handed_out:
            for cache in leaves_of(self._handed_out.pop()):
                cache.discard()
        held = self._hold_back(self._kv)
        self._num_held = len(held)
        try:
            prompt_responses, responses = super()._next()
        finally:
            self._unprocessed_sequences.extend(held)
            self._num_held = 0
        self._handed_out += [one.prompt_cache for one in responses if one.prompt_cache is not None]
        return prompt_responses, responses

    def _hold_back(self, kv: PagedKV) -> deque[Any]:
        """Leave in the queue the requests to admit now. Return the rest."""
        running = self._running()
        waiting, admitted = self._unprocessed_sequences, deque[Any]()
        most = min(
            self.prefill_batch_size - len(self._prompt_batch),
            self.completion_batch_size - len(self._generation_batch),
        )
        while waiting and len(admitted) < most:
            sequence = _with_prefix(kv, waiting[0])
            candidate = self._size(sequence)
            if not running and not self._have_room(kv, [candidate]):
                sequence = _without_prefix(sequence)  # a state that is not loaded yet takes blocks that it may need
                candidate = self._size(sequence)
            if not self._have_room(kv, [*running, candidate]):
                if sequence[0] != self._last_held:
                    self._last_held = sequence[0]
                    self.num_waited += 1
                _without_prefix(sequence)
                break
            running.append(candidate)
            admitted.append(sequence)
            waiting.popleft()
        self._unprocessed_sequences = admitted
        return waiting

    def _have_room(self, kv: PagedKV, requests: list[tuple[int, int]]) -> bool:
        """Return whether the pool has room for these requests, each (tokens now, tokens at most)."""
        policy = kv.eviction
        if policy is None:
            return kv.can_admit(0, 0, requests, chunk=self.prefill_step_size)
        size, chunk = kv.pool.block_size, self.prefill_step_size
        most = sum(blocks_at_most(policy, limit, chunk, size) for _, limit in requests)
        return most <= kv.pool.num_blocks - kv.pool.options.reserved_blocks

    def _running(self) -> list[tuple[int, int]]:
        """Return (tokens now, tokens at most) of each running sequence."""
        limits: dict[int, int] = {}
        sizes = []
        for batch in (self._prompt_batch, self._generation_batch):
            if len(batch):
                rows = next(leaves_of(batch.prompt_cache)).batch.rows
                for uid, length in zip(batch.uids, rows.lens.tolist(), strict=True):
                    limits[uid] = self._limits[uid]
                    sizes.append((length, max(length, limits[uid])))
        self._limits = limits  # without those that have left
        return sizes

    def _size(self, sequence: Any) -> tuple[int, int]:
        """Return the same for a waiting sequence, and record its limit."""
        uid, segments, max_tokens, caches = sequence[:4]
        cached = next(leaves_of(caches)).size()
        limit = cached + sum(map(len, segments)) + max_tokens
        self._limits[uid] = limit
        return cached, limit


def _without_prefix(sequence: Any) -> Any:
    """Return a waiting sequence without blocks of the prefix cache: the cached part returns to its prompt."""
    uid, segments, max_tokens, caches, tokens, *rest = sequence
    first = next(leaves_of(caches))
    batch, size = first.batch, first.size()
    if not 0 < size == batch.known[0].num_tokens == len(tokens):
        return sequence  # nothing to give back, or something that could not be found again
    for cache in leaves_of(caches):
        cache.discard()
    begin = [[*tokens, *segments[0]]] if len(segments) > 1 else [list(tokens), segments[0]]
    return (uid, [*begin, *segments[1:]], max_tokens, caches, [], *rest)


def _with_prefix(kv: PagedKV, sequence: Any) -> Any:
    """Return the same sequence with the blocks that the prefix cache has of its prompt now."""
    uid, segments, max_tokens, caches, tokens, *rest = sequence
    if not kv.prefix_cache or tokens or next(leaves_of(caches)).size():
        return sequence
    prompt = [token for segment in segments for token in segment]
    known = next(leaves_of(caches)).batch.known[0]
    caches, num_cached = kv.pinned(prompt, known.namespace, known.cut)
    skip, left = num_cached, []
    for segment in segments:
        if skip < len(segment):
            left.append(segment[skip:])
        skip = max(0, skip - len(segment))
    return (uid, left, max_tokens, caches, prompt[:num_cached], *rest)


class Responder(server.ResponseGenerator):
    """mlx-lm's link between HTTP and engine. It refuses a request that could never fit, with a message."""

    model_provider: Provider

    def __init__(self, provider: Provider) -> None:
        self._prompts = PromptCache(provider)
        prompts: Any = self._prompts
        super().__init__(provider, prompts)

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        found = super()._tokenize(tokenizer, request, args)
        if not found[0]:  # nobody would catch the exception of BatchGenerator, and the server would stop serving
            raise ValueError("the prompt is empty, it needs at least one token")
        self._prompts.cut = rewritten_from(tokenizer, found[0])
        kv = self.model_provider.kv
        if kv is not None:
            tokens, size = len(found[0]) + args.max_tokens, kv.pool.block_size
            usable = min(kv.pool.num_blocks - kv.pool.options.reserved_blocks, kv.pool.options.max_blocks_per_seq) - 2
            needed = kv.blocks_for(tokens)
            if kv.eviction is not None:  # with copies, see `AdmittingGenerator`
                usable, chunk = usable + 2, self.model_provider.cli_args.prefill_step_size
                needed = blocks_at_most(kv.eviction, tokens, chunk, size)
            if needed > usable:
                raise ValueError(
                    f"{len(found[0])} prompt tokens and {args.max_tokens} more need {needed} blocks, "
                    f"this server has {usable}: ask for fewer max_tokens"
                )
        return found


class Handler(server.APIHandler):
    """mlx-lm's requests, and ``GET /metrics``."""

    response_generator: Responder

    def _validate(self, name: str, *args: Any, **options: Any) -> None:
        """Check one parameter. Python's JSON parser accepts NaN, which passes mlx-lm's comparisons."""
        super()._validate(name, *args, **options)
        value = getattr(self, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} must be finite")

    def do_GET(self) -> None:
        """Answer a GET."""
        if self.path.partition("?")[0] != "/metrics":
            super().do_GET()
            return
        body = metrics_text(self.response_generator.model_provider).encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


POOL_LOOKUPS = tuple(f"kvpool_prefix_{name}_total" for name in ("queries", "query_tokens", "hit_tokens"))
"""Counters of `Pool.open`. This server looks prompts up in another way and counts ``kvpool_prompt_*``."""


def metrics_text(provider: Provider) -> str:
    """Return the statistics of the pool for Prometheus. Without a model the text says so."""
    kv = provider.kv
    if kv is None:
        return "# no model is loaded\n"
    engine = provider.engine
    numbers = {"waiting": 0, "prefilling": 0, "decoding": 0} if engine is None else engine.num_requests
    waited = 0 if engine is None else engine.num_waited
    summary = kv.summary()
    extra = [
        Metric(
            "kvpool_requests",
            "gauge",
            "Requests of the server, by state.",
            tuple(({"state": state}, number) for state, number in numbers.items()),
        ),
        gauge("kvpool_blocks_leaked", "Blocks in use that belong to no request.", summary.blocks_leaked),
        gauge("kvpool_mlx_active_bytes", "Memory that MLX holds, weights and pool included.", mx.get_active_memory()),
        counter("kvpool_requests_waited_total", "Requests that had to wait for blocks.", waited),
        counter("kvpool_prompt_tokens_total", "Tokens of prompts that were looked up.", kv.query_tokens),
        counter("kvpool_prompt_cached_tokens_total", "Of these, tokens that were found.", kv.hit_tokens),
    ]
    with kv.lock:
        return prometheus_text(kv.pool, extra=extra, without=POOL_LOOKUPS)


def serve(arguments: Sequence[str], options: PoolOptions, on_ready: Callable[[Any, Provider], None]) -> Provider:
    """Run mlx-lm's server with its own command-line arguments, until it is interrupted.

    Parameters
    ----------
    arguments
        The arguments of ``mlx_lm.server``, without its name. It reports errors in them itself.
    on_ready : callable
        Called with the HTTP server and the provider when clients may connect.

    Returns
    -------
    Provider
        The provider after the end. Its model is dropped.

    Raises
    ------
    RuntimeError
        mlx-lm is of another series than `SUPPORTED_VERSIONS`.
    Exception
        The model of the command line could not be loaded.
    """
    require_tested_version("serve")
    providers: list[Provider] = []

    def make_provider(cli_args: argparse.Namespace) -> Provider:
        providers.append(Provider(cli_args, options))
        return providers[0]

    def make_generator(model: Any, **options: Any) -> AdmittingGenerator:
        engine, before = AdmittingGenerator(model, **options), providers[0].engine
        engine.num_waited = 0 if before is None else before.num_waited
        providers[0].engine = engine
        return engine

    def run(host: str, port: int, provider: Provider) -> None:
        responder = Responder(provider)
        try:
            provider.ready.wait()
            if provider.failure is not None:
                raise provider.failure
            server._run_http_server(host, port, responder, _http_server(provider, on_ready), Handler)
        finally:
            responder.stop_and_join()

    with _bound(server, ModelProvider=make_provider, BatchGenerator=make_generator, run=run):
        before, sys.argv = sys.argv, ["kvpool serve", *arguments]
        try:
            server.main()
        finally:
            sys.argv = before
            for provider in providers:
                provider.reset()
    return providers[0]


def _http_server(provider: Provider, on_ready: Callable[[Any, Provider], None]) -> type[ThreadingHTTPServer]:
    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # clients that connect at the same moment
        daemon_threads = True

        def serve_forever(self, poll_interval: float = 0.5) -> None:
            try:
                on_ready(self, provider)
                super().serve_forever(poll_interval)
            finally:
                self.server_close()

        def handle_error(self, request: Any, client_address: Any) -> None:
            if not isinstance(sys.exception(), ConnectionError):  # a client has disconnected: not an error
                super().handle_error(request, client_address)

    return Server


@contextmanager
def _bound(module: Any, **names: Any) -> Iterator[None]:
    """Bind names of a module to other objects inside the block."""
    before = {name: getattr(module, name) for name in names}
    for name, value in names.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
