"""`Engine`: runs requests to an mlx-lm model. Prefill chunks and decodes share a forward pass.

    with Engine(model, num_blocks=4096, tokenizer=tokenizer) as engine:
        print(engine.generate("Once upon a time", max_tokens=100).text)
        for event in engine.stream("def main", temperature=0.7, seed=1):
            print(event.text, end="")
        answers = engine.batch(prompts, n=4, temperature=1.0)

Other requests, chunks, preemption and the prefix cache change when tokens come, and not which. With an eviction policy
this holds as long as no sequence exceeds its budget. Beyond it, the attention of a token depends on where chunks end.
"""

from __future__ import annotations

import copy
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from math import isfinite
from operator import attrgetter
from threading import current_thread
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from kvpool import Request, Scheduler
from kvpool.adapters.mlx_lm.chat import Transcript, encoded, is_conversation, rewritten_from
from kvpool.adapters.mlx_lm.eviction import Eviction
from kvpool.adapters.mlx_lm.grammar import Follower, GrammarFailed, Grammars
from kvpool.adapters.mlx_lm.host import BackendFactory, PagedKV, install
from kvpool.adapters.mlx_lm.passes import FORMATS, LayerCache, Part, Rows, Turn, cut, in_parts, together, with_writes
from kvpool.adapters.mlx_lm.sampling import SEED_MAX, LogitsNotFinite, Sampling, best, sample
from kvpool.adapters.mlx_lm.shapes import max_positions
from kvpool.adapters.mlx_lm.states import Held, SlotStates, arrays_of
from kvpool.adapters.mlx_lm.stored import StoredPrefixes, StoreFactory
from kvpool.errors import OutOfBlocks, OutOfSequences, UnknownRequest
from kvpool.eviction import Policy, SlidingWindow
from kvpool.metrics import Metric, counter, gauge
from kvpool.scheduler import Decoding, Output, Step
from kvpool.scheduler.drafts import Propose
from kvpool.scheduler.request import token_array
from kvpool.store import BlockStore

_log = logging.getLogger(__name__)
Listener = Callable[["TokenEvent"], None]
Prompt = str | Iterable[int] | Sequence[Mapping[str, Any]]
Top = tuple[tuple[int, float], ...]
Row = tuple[Request, int, int, int, float, Top]
"""Request, sample, number of the token, token, logprob, likeliest tokens."""
_user = attrgetter("user")
_looks_back = attrgetter("user.looks_back")
MOST_EVENTS = 1 << 16  # of the prefix cache between two steps
_SAMPLING = tuple(field.name for field in fields(Sampling))


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One new token of a request, for its listener.

    Attributes
    ----------
    id, index
        The request, and the number of the sample.
    token, logprob
        The token, and the logarithm of its probability by the model.
    text : str
        Text that may be shown now. An incomplete character and a possible stop string are held back.
    finish_reason : str or None
        "eos", "stop", "length" or "deadline" with the last token of the sample.
    top : tuple of (token, logprob)
        The `Sampling.top_logprobs` likeliest tokens at its place, the likeliest first.
    stop : str or None
        The stop string that ended the sample.
    """

    id: Hashable
    index: int
    token: int
    logprob: float
    text: str
    finish_reason: str | None
    top: Top = ()
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished sequence of a request. ``output`` is the scheduler's result.

    Attributes
    ----------
    tokens : int32 ``[n]``
    logprobs : float32 ``[n]`` or None
        By the model's own probabilities. None for beams.
    text : str
        The text without the end token and without stop strings. "" if the engine has no tokenizer.
    finish_reason : str
        "eos", "stop", "length", "cancelled" or "deadline".
    stop : str or None
        The stop string that ended it.
    """

    tokens: np.ndarray
    logprobs: np.ndarray | None
    text: str
    finish_reason: str
    output: Output
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """All samples of a request that has ended, by index. For beams the best comes first.

    Attributes
    ----------
    error : Exception or None
        What ended the request: of its listener or its grammar, or `LogitsNotFinite`; the samples have what came before.
        Or that of its tokenizer: then there is no text.
    """

    id: Hashable
    samples: tuple[Sample, ...]
    error: Exception | None = None

    @property
    def text(self) -> str:
        """The text of the first sample."""
        return self.samples[0].text

    @property
    def tokens(self) -> np.ndarray:
        """The tokens of the first sample."""
        return self.samples[0].tokens


class Engine:
    """Continuous batching for an mlx-lm model, or for a model with the same interface.

    Parameters
    ----------
    model
        As loaded by ``mlx_lm.load``. Between two steps it is unchanged.
    num_blocks, block_size, pool, prefix_cache, fused, backend, kernels, store
        See `install`. With a prefix cache, which is the default, prompts with a common beginning share its blocks.
    tokenizer
        A tokenizer of mlx-lm or transformers. It is used for text prompts, stop strings, the text of answers and the
        end tokens. None: tokens in, tokens out.
    max_running, max_step_tokens, prefill_chunk, scheduler options
        See `kvpool.Scheduler`. Give `max_model_len`, which is what the model takes by default, if requests are to be
        longer than what `num_blocks` hold once `resize` has made room for them.
    eviction : kvpool.eviction.Policy or SlidingWindow, optional
        Keeps the full layers of every sequence within a budget of tokens. See `install` and docs/eviction.md.
    kv_bits, k_bits, v_bits, quant_group_size : int, optional
        See `install`.
    speculate : callable, optional
        `PromptLookup`, `DraftModel`, or what `kvpool.Scheduler` takes. Decodes compute its drafts in the same pass, and
        keep those that are equal to the sampled tokens. The tokens are the same as without.
    seed : int, optional
        Seed of the generator that makes seeds for requests without one.
    on_events : callable, optional
        Gets the events of the prefix cache after each step, such as `kvpool.kv_events.EventPublisher.publish`.

    Notes
    -----
    One thread at a time. All calls take effect between two steps, also calls from a listener.

    Attributes
    ----------
    kv : PagedKV
        Its ``summary`` covers caches of mlx-lm's engines only. Use ``kv.pool.stats()`` and ``scheduler.stats()``.
    scheduler : kvpool.Scheduler
    vocab_size : int
        The model has tokens 0 .. vocab_size - 1.
    max_model_len : int or None
        Most tokens of a prompt and its answer together. None: the model has no limit that is known.
    grammars : Grammars
        Compiles what `submit` takes as ``grammar``.
    num_not_finite : int
        Requests that ended with `LogitsNotFinite`.
    wired_nbytes : int
        Memory that macOS may not page out, for `metrics`: what the process has told MLX, 0 for no limit.
    """

    def __init__(
        self,
        model: Any,
        num_blocks: int | None = None,
        *,
        tokenizer: Any = None,
        pool: Any = None,
        block_size: int = 16,
        prefix_cache: bool = True,
        max_running: int = 64,
        max_step_tokens: int = 512,
        prefill_chunk: int = 256,
        fused: bool | None = None,
        backend: str | BackendFactory | None = None,
        kernels: bool | None = None,
        seed: int | None = None,
        eviction: Policy | SlidingWindow | None = None,
        kv_bits: int | None = None,
        k_bits: int | None = None,
        v_bits: int | None = None,
        quant_group_size: int | None = None,
        speculate: Propose | None = None,
        store: BlockStore | StoreFactory | None = None,
        on_events: Callable[[list[Any]], object] | None = None,
        **scheduling: Any,
    ) -> None:
        how: dict[str, Any] = {"prefix_cache": prefix_cache, "fused": fused, "kernels": kernels}
        how |= {"backend": backend, "block_size": block_size, "max_seqs": 2 * max_running + 16, "eviction": eviction}
        how |= {"store": store, "kv_bits": kv_bits, "events": MOST_EVENTS if on_events is not None else 0}
        how |= {"k_bits": k_bits, "v_bits": v_bits, "quant_group_size": quant_group_size}
        how["max_model_len"] = scheduling.get("max_model_len")
        self.kv = install(model, num_blocks, pool=pool, **how)
        if tokenizer is not None and not hasattr(tokenizer, "detokenizer"):
            from mlx_lm.tokenizer_utils import TokenizerWrapper

            tokenizer = TokenizerWrapper(tokenizer)
        self.tokenizer = tokenizer
        self.vocab_size = int(model(mx.zeros((1, 1), mx.int32)).shape[-1])  # traced, not computed
        self.grammars = Grammars(self.tokenizer, self.vocab_size)
        self.max_model_len: int | None = scheduling.setdefault("max_model_len", max_positions(model))
        sizes = {"max_running": max_running, "max_step_tokens": max_step_tokens, "prefill_chunk": prefill_chunk}
        drafts = None if speculate is None else partial(_drafts, speculate, self.vocab_size)
        self._scheduling: dict[str, Any] = sizes | {"speculate": drafts, "plans": 2} | scheduling
        may_wait = num_blocks is not None and scheduling.get("plans", 2) > 1  # nobody else steps the pool meanwhile
        self._runs_ahead = self.kv.passes.is_lazy and speculate is None and may_wait
        self._numbers = itertools.count()
        self._seeds = np.random.default_rng(seed)
        self.num_not_finite = self.wired_nbytes = 0
        self._on_events = on_events if self.kv.prefix_cache else None
        self._start()

    def _start(self) -> None:
        """Begin without requests, on a pool that is empty or shared."""
        self._forward = RaggedForward(self.kv)
        self.scheduler = Scheduler(
            self.kv.pool,
            mixed=self._forward.is_ragged,
            formats=FORMATS,
            pad_to=None,
            eviction=self._forward.eviction,
            **self._scheduling,
        )
        self._flight: _Flight | None = None  # a step that was begun, and of which nothing is known yet
        self._jobs: dict[Hashable, _Job] = {}
        self._is_delivering = False
        self._ended: list[_Job] = []  # to be returned by the next `step`

    # ------------------------------------------------------------------------------------------- whole answers

    def generate(self, prompt: Prompt, *, on_token: Listener | None = None, **options: Any) -> Completion:
        """Run one request to its end, together with all others in the engine. Options: see `submit`."""
        return self.batch([prompt], on_token=on_token, **options)[0]

    def batch(self, prompts: Sequence[Prompt], *, on_token: Listener | None = None, **options: Any) -> list[Completion]:
        """Run several requests with the same options to their end.

        Raises
        ------
        TypeError
            `prompts` is one text.
        Exception
            An exception of the model, of the listener or of `submit`. None of these requests is left in the engine.
        """
        if isinstance(prompts, str):  # each of its letters would be a prompt
            raise TypeError(f"[batch] prompts must be a list of prompts, not one text ({prompts!r:.80})")
        if isinstance(options.get("stop"), Iterator):
            options["stop"] = tuple(options["stop"])  # the first request would use it up
        jobs: list[_Job] = []
        try:
            for prompt in prompts:
                jobs.append(self._jobs[self.submit(prompt, on_token=on_token, **options)])
            while any(map(self._is_in, jobs)):
                self._advance()
        finally:
            self._drop(jobs)
        completions = [job.completion() for job in jobs]
        for completion in completions:
            if completion.error is not None:
                raise completion.error
        return completions

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[TokenEvent]:
        """Run one request, yield its tokens, and raise what ends it. Closing the iterator cancels it. Not for beams."""
        if options.get("beam_width"):
            raise ValueError(f"[stream] beam_width is {options['beam_width']}, a beam cannot be streamed: generate()")
        events = self._streamed(prompt, options)
        next(events)  # a generator that has not begun does nothing when it is closed
        return events

    def _streamed(self, prompt: Prompt, options: dict[str, Any]) -> Iterator[Any]:
        events: deque[TokenEvent] = deque()
        job = self._jobs[self.submit(prompt, on_token=events.append, **options)]
        try:
            yield
            while events or self._is_in(job):
                if events:
                    yield events.popleft()
                else:
                    self._advance()
        finally:
            self._drop([job])
        if (error := job.completion().error) is not None:
            raise error

    # ---------------------------------------------------------------------------------------------- low level

    def submit(
        self,
        prompt: Prompt | Request,
        *,
        on_token: Listener | None = None,
        stop: str | Sequence[str | Sequence[int]] = (),
        max_tokens: int | None = None,
        namespace: bytes = b"",
        **options: Any,
    ) -> Hashable:
        """Put a request in the queue and return its id. `step` runs it.

        Parameters
        ----------
        prompt : str, ints, messages or Request
            Messages are a conversation for the chat template: mappings with role and content. A `kvpool.Request` has
            all options itself. Its ``user`` is a `Sampling`, or None for greedy.
        on_token : callable
            Called with a `TokenEvent` for every token. If it raises, only this request ends.
        stop : str, or sequence of str or of tokens
            A stop string is removed from the text. A stop sequence of tokens stays in the answer.
        max_tokens, id, eos, n, beam_width, length_penalty, priority, tenant, deadline, namespace, cut, keep
            See `kvpool.Request`. ``max_tokens`` is 256 by default, ``eos`` the end tokens of the tokenizer, ``cut`` a
            think block that the prompt opens at its end.
        temperature, top_p, top_k, min_p, xtc, seed, logit_bias, penalties, top_logprobs, min_tokens, grammar
            See `Sampling`.

        Raises
        ------
        TypeError, ValueError
            The request is invalid, or its id is in use. The text says more.
        RequestRejected
            The request is too long for the pool, or comes too late. The engine is unchanged.
        """
        texts: tuple[str, ...] = ()
        if isinstance(prompt, Request):
            if stop or options or namespace or max_tokens is not None:
                raise TypeError("[submit] a Request has options of its own: give none beside it")
            request = prompt
        else:
            texts, request = self._request(prompt, stop, 256 if max_tokens is None else max_tokens, options)
            request = replace(request, namespace=namespace)
        job = self._job(request, on_token, texts)
        job.namespace = request.namespace
        self.scheduler.add(job.request, held=self.kv.stored is not None)
        self._jobs[job.request.id] = job
        if self.kv.stored is not None:
            try:
                given = (job.request.id, job.request.prompt, job.namespace, job.request.namespace)
                if not self.kv.stored.begin(*given):
                    self.scheduler.release(job.request.id)
            except BaseException:
                self._cancelled(job)
                raise
        return job.request.id

    def cancel(self, id: Hashable) -> Completion:
        """End a request now and return what it has so far. `UnknownRequest` if it has ended or never existed."""
        if id not in self._jobs:
            raise UnknownRequest(f"[cancel] no request {id!r}: it has ended, or was never submitted")
        job = self._jobs[id]
        self._cancelled(job)
        return job.completion()

    def step(self) -> list[Completion]:
        """Run the model once, for as many requests as fit. Return the requests that have ended.

        Raises
        ------
        Exception
            An exception of the model. Every request is as before the step, and the engine can go on.
        """
        self._advance()
        ended, self._ended = self._ended, []
        return [*map(_Job.completion, ended)]

    def _advance(self) -> None:
        if self._is_delivering:
            raise RuntimeError("[step] a listener cannot run the engine that it listens to")
        self.kv.passes.last_driver = current_thread()
        began = time.monotonic()
        if self.kv.stored is not None:
            self._poll(self.kv.stored)
        try:
            flight, self._flight = self._flight or self._begun(), None
            found = None if flight is None else self._finished(flight)
        except BaseException:
            self._take_back()
            raise
        finally:
            if self._forward.states_are_held:
                self._forward.keep_states(self.scheduler.handles)
        if found is not None:
            rows, outputs = found
            if self.kv.stored is not None and flight is not None:
                self._save(self.kv.stored, flight.step, outputs, time.monotonic() - began)
            self._is_delivering = True
            try:
                self._deliver(rows, outputs)
            finally:
                self._is_delivering = False
            if self._flight is not None and not self._jobs:  # nobody waits for its tokens
                self._take_back()
        elif self._jobs:  # all are held
            self._deliver((), self.scheduler.expire())
        if self._on_events is not None:
            self._tell_events(self._on_events)

    def resize(self, num_blocks: int) -> None:
        """Have another number of blocks of tokens, between two steps. All requests go on and give the same tokens.

        A step that was begun ahead is taken back and computed again. See `PagedKV.resize`.

        Raises
        ------
        OutOfBlocks
            What is in use, or a request that has not ended, does not fit. No request is changed.
        RuntimeError
            Called by a listener. State unchanged.
        ValueError, CapacityExceeded, MemoryError
            See `PagedKV.resize`. Every request is as before.
        """
        if self._is_delivering:
            raise RuntimeError("[resize] a listener cannot resize the engine that it listens to")
        sizes = self.kv.sizes("resize", num_blocks)
        self.scheduler.require_fit("resize", sizes)
        if self._flight is not None:
            self._take_back()
        try:
            self.kv.resize(num_blocks)
        finally:
            if self.kv.stored is not None:
                for id in self.kv.stored.take_ended():
                    self.scheduler.release(id)

    def _tell_events(self, listener: Callable[[list[Any]], object]) -> None:
        """Pass the events of the prefix cache on. Who gets them must not end requests."""
        try:
            listener(self.kv.pool.prefix.events())
        except Exception:
            _log.exception("[step] on_events failed, its events are lost")

    def _scheduled_beside(self, stored: StoredPrefixes) -> Step | None:
        """Decide the next step. If blocks are short, loads and saves give theirs back."""
        running = self.scheduler.handles
        if len(running) and not self.kv.pool.can(running):  # before one of them is preempted
            self._make_way(stored)
        try:
            return self.scheduler.schedule()
        except (OutOfBlocks, OutOfSequences):
            self._make_way(stored)
            return self.scheduler.schedule()

    def _make_way(self, stored: StoredPrefixes) -> None:
        stored.let_go()
        for job in self._jobs.values():
            job.saved = 0  # what comes behind it is found with it alone
        for id in stored.take_ended():
            self.scheduler.release(id)

    def _poll(self, stored: StoredPrefixes) -> None:
        """Move blocks from and to the store. Wait a little if there is nothing else to do."""
        runs = len(self._jobs) > stored.num_loads
        if not runs and (self._jobs or stored.is_saving):
            stored.wait(0.005)
        stored.move(runs)
        for id in stored.take_ended():
            self.scheduler.release(id)

    def _save(self, stored: StoredPrefixes, step: Step, outputs: list[Output], seconds: float) -> None:
        """Save the prompts that a step has completed, and the sequences that have ended."""
        stored.note(seconds, len(step.tokens) - step.num_decodes)
        known = [(output.id, output.tokens) for output in outputs]
        if not step.sample_position.all():
            first = zip(step.requests, step.sample_position.tolist(), strict=True)
            ids = {request.id for request, position in first if position == 0} - {output.id for output in outputs}
            known += [(id, np.zeros(0, np.int32)) for id in ids]
        for id, tokens in known:
            job = self._jobs.get(id)
            if job is not None and job.error is None and not job.ends:
                whole, own = np.concatenate([job.request.prompt, tokens]), job.request.namespace
                try:
                    saved = stored.save(whole, job.namespace, own, job.saved)
                    job.saved = min(saved, len(job.request.prompt))  # what is behind it is one sample's alone
                except Exception:  # the tokens of the step are known, their requests have to get them
                    _log.exception("[step] request %r was not saved", id)

    @property
    def is_saving(self) -> bool:
        """Whether `step` has blocks to copy for the store, though no request may be left."""
        return self.kv.stored is not None and self.kv.stored.is_saving

    @property
    def num_unfinished(self) -> int:
        """Requests whose completion was not returned yet."""
        return len(self._jobs) + len(self._ended)

    def metrics(self) -> list[Metric]:
        """Counters of this engine and its store, for `kvpool.metrics`. Any thread may ask."""
        text = "Requests that ended because the logits of the model were not finite."
        wired = "MLX's limit of memory that macOS may not page out, 0 for none."
        own = [
            counter("kvpool_requests_not_finite_total", text, self.num_not_finite),
            gauge("kvpool_wired_limit_bytes", wired, self.wired_nbytes),
        ]
        return own if self.kv.stored is None else own + self.kv.stored.metrics()

    def __contains__(self, id: Hashable) -> bool:
        """Whether this request was submitted and has not ended."""
        return id in self._jobs

    def close(self) -> None:
        """Cancel all requests, return their blocks, and wait for MLX. The pool stays usable, the store is closed."""
        self._drop(list(self._jobs.values()))
        self.kv.close()

    def reset(self) -> None:
        """Drop all requests, the prefix cache and everything else in the pool, and begin anew with another `scheduler`.

        For after an exception that may have come anywhere, such as `MemoryError`. `close` needs an engine in order.
        """
        self.kv.pool.reset()
        if self.kv.stored is not None:
            self.kv.stored.forget()
        if self._on_events is not None:
            self._tell_events(self._on_events)
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------- requests in

    def _request(
        self, prompt: Any, stop: Any, max_tokens: int, options: dict[str, Any]
    ) -> tuple[tuple[str, ...], Request]:
        """The request that `submit` was asked for, and its stop strings."""
        if isinstance(prompt, str):
            prompt = self._require_tokenizer("a prompt that is text").encode(prompt)
        elif is_conversation(prompt):
            prompt = encoded(self._require_tokenizer("a prompt of messages"), prompt)
        prompt = token_array("submit", "prompt", prompt)
        if not isinstance(stop, Iterable):
            raise TypeError(f"[submit] stop must be text, or a sequence of text or of tokens, got {stop!r}")
        stops = [stop] if isinstance(stop, str) else list(stop)
        texts = tuple(one for one in stops if isinstance(one, str))
        if "" in texts:
            raise ValueError("[submit] a stop string is empty")
        if texts:
            self._require_tokenizer("a stop string")
        if self.tokenizer is not None:
            options.setdefault("eos", tuple(self.tokenizer.eos_token_ids))
            options.setdefault("cut", rewritten_from(self.tokenizer, prompt.tolist()))
        sampling = Sampling(**{name: options.pop(name) for name in _SAMPLING if name in options})
        unknown = options.keys() - {field.name for field in fields(Request)}
        if unknown or "user" in options:
            raise TypeError(f"[submit] there is no option {', '.join(sorted(unknown)) or 'user'}")
        stops = [one for one in stops if not isinstance(one, str)]
        return texts, Request(prompt, max_tokens, stop=stops, user=sampling, **options)

    def _job(self, request: Request, on_token: Listener | None, texts: tuple[str, ...]) -> _Job:
        sampling = Sampling() if request.user is None else request.user
        if not isinstance(sampling, Sampling):
            raise TypeError(f"[submit] user of a request must be a Sampling or None, got {sampling!r}")
        if on_token is not None and not callable(on_token):
            raise TypeError(f"[submit] on_token must be callable, got {on_token!r}")
        if request.beam_width and (on_token is not None or texts or sampling.alters or not sampling.is_greedy):
            raise ValueError("[submit] a beam is a search: leave on_token, stop strings and options of sampling out")
        if sampling.seed is None and not sampling.is_greedy:
            sampling = replace(sampling, seed=int(self._seeds.integers(SEED_MAX)))
        if sampling.grammar is not None and (request.beam_width or not sampling.grammar.eos <= set(request.eos)):
            raise ValueError("[submit] a grammar needs the end tokens of the tokenizer in eos, and no beam")
        id = request.id
        while id is None or (request.id is None and id in self._jobs):
            id = next(self._numbers)
        biased = max((token for token, _ in sampling.logit_bias), default=0)
        largest = (int(request.prompt.max()), biased, max(request.eos, default=0))
        for name, token in zip(("the prompt", "logit_bias", "eos"), largest, strict=True):
            if token >= self.vocab_size:
                raise ValueError(f"[submit] {name} has token {token}, the model has tokens 0 .. {self.vocab_size - 1}")
        request = replace(request, id=id, user=sampling, namespace=self.kv.own_namespace(request.namespace))
        return _Job(request, on_token, texts, self.tokenizer)

    def _require_tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            raise TypeError(f"[submit] {what} needs a tokenizer: Engine(..., tokenizer=)")
        return self.tokenizer

    # ------------------------------------------------------------------------------------------------ one step

    def _begun(self, before: _Flight | None = None) -> _Flight | None:
        """Let MLX compute the next step, `before` being the one that is out, and do not wait for it."""
        stored = self.kv.stored
        if before is None and stored is not None and (stored.num_loads or stored.is_saving):
            step = self._scheduled_beside(stored)
        else:
            step = self.scheduler.schedule()
        return None if step is None else self._run(step, before)

    def _finished(self, flight: _Flight) -> tuple[Iterable[Row], list[Output]]:
        """Give the tokens of a step to the scheduler, all or nothing. Return the arguments of `_deliver`."""
        step = flight.step
        if self._runs_ahead and not any(map(_looks_back, step.requests)):
            self._flight = self._begun(flight)
        tokens, logprobs = np.array(flight.tokens), np.array(flight.logprobs)
        beams = None if flight.beams is None else (np.array(flight.beams[0]), np.array(flight.beams[1]))
        tops = [()] * len(step.requests) if flight.tops is None else _likeliest(step.requests, *flight.tops)
        not_finite = ~np.isfinite(logprobs)
        if beams is not None:  # of a beam that ends anyway the scheduler takes any number
            beams[1][not_finite[step.beam_width > 0]] = 0
        outputs = self.scheduler.update(step, tokens, logprobs, beams)
        if not_finite.any():
            self._note_not_finite(step, not_finite)
        indices = step.sample_index.tolist()
        found = (step.requests, indices, step.sample_position.tolist(), tokens.tolist(), logprobs.tolist())
        rows: Iterable[Row] = zip(*found, tops, strict=True)
        return rows if step.taken is None else itertools.compress(rows, step.taken.tolist()), outputs

    def _note_not_finite(self, step: Step, not_finite: np.ndarray) -> None:
        """Note which samples cannot go on. Drafts that were wrong are not part of a sample."""
        for at in np.flatnonzero(not_finite if step.taken is None else not_finite & step.taken).tolist():
            request, index, position = step.requests[at], int(step.sample_index[at]), int(step.sample_position[at])
            job = self._jobs.get(request.id)
            if job is not None and job.request is request:
                samples = range(request.n) if request.beam_width else (index,)
                job.ends = dict.fromkeys(samples, position) | job.ends

    def _take_back(self) -> None:
        """Take back every step that is out, also one that a signal has kept from its caller."""
        self._flight = None
        for first in self.scheduler.out[:1]:
            self.scheduler.fail(first)

    def _run(self, step: Step, before: _Flight | None) -> _Flight:
        """Put a step into MLX's graph, which evaluates it."""
        requests = step.requests
        inputs: mx.array | np.ndarray = step.tokens
        if not len(inputs):
            return _Flight(step, mx.array(inputs), mx.zeros(0))
        if self._forward.eviction is not None:
            self._forward.eviction.begin_pass(step.plan, step.lanes, step.num_new)
        if before is not None:
            inputs = _inputs(step, before)
        logits = self._forward(inputs, step.plan, step.sample_at)
        samplings: list[Sampling] = list(map(_user, requests))
        changes = {}
        if any(map(attrgetter("alters"), samplings)):
            altered = [at for at, one in enumerate(samplings) if one.alters]
            some = [(at, requests[at]) for at in altered]
            changes = {at: one.user.changes(one.prompt, step.generated(at), one.eos) for at, one in some}
        allowed = self._allowed(step, requests) if any(map(attrgetter("grammar"), samplings)) else {}
        flight = _Flight(step, *sample(logits, samplings, step.sample_index, step.sample_position, changes, allowed))
        (in_beams,) = step.beam_width.nonzero()
        if len(in_beams):
            width = int(step.beam_width.max())
            ends = max(len(requests[at].eos) + len(requests[at].stop) for at in in_beams.tolist())
            flight.beams = best(logits[mx.array(in_beams)], width + max(width, ends))
        counts = list(map(attrgetter("top_logprobs"), samplings))
        if any(counts):
            flight.tops = best(logits, min(max(counts), logits.shape[-1]))
        mx.async_eval(flight.tokens, flight.logprobs, flight.beams, flight.tops, self._forward.late)
        return flight

    def _allowed(self, step: Step, requests: list[Request]) -> dict[int, np.ndarray]:
        """Return the rows whose grammar holds, and the tokens that may come there. Note where one has failed."""
        allowed, nothing = {}, np.zeros(-(-self.vocab_size // 32) * 4, np.uint8)
        for at, request in enumerate(requests):
            job = self._jobs.get(request.id)
            if request.user.grammar is None or job is None:
                continue
            index = int(step.sample_index[at])
            if index not in job.followers:
                job.followers[index] = request.user.grammar.follow()
            try:
                allowed[at] = job.followers[index].allowed(step.generated(at)) if job.error is None else nothing
            except GrammarFailed as error:
                job.error, allowed[at] = error, nothing
        return allowed

    def _deliver(self, rows: Iterable[Row], outputs: list[Output]) -> None:
        """Call the listeners and end requests."""
        reasons: dict[tuple[Hashable, int, int], str] = {}  # of the last token
        ended: dict[Hashable, _Job] = {}
        for output in outputs:
            reasons[output.id, output.index, len(output.tokens) - 1] = output.finish_reason
            job = self._jobs[output.id]
            job.outputs[output.index] = output
            if len(job.outputs) == job.request.n or job.request.beam_width:  # a beam may find fewer
                ended[output.id] = job
        for id in ended:
            del self._jobs[id]
            if self.kv.stored is not None:
                self.kv.stored.drop(id)
        self._ended.extend(ended.values())  # before a listener may interrupt it
        stopped: list[_Job] = []
        for request, index, position, token, logprob, top in rows:
            current = ended.get(request.id) or self._jobs.get(request.id)
            if current is None or current.request is not request:  # a listener has cancelled it, and may use its id
                continue
            if not isfinite(logprob):
                self.num_not_finite += current.fail_not_finite(index, position)
            elif not current.listens:
                continue
            elif current.error is None:
                try:
                    current.on_token(index, token, logprob, reasons.get((request.id, index, position)), top)
                except Exception as error:
                    current.error = error
            if (current.error is not None or current.is_stopped) and request.id not in ended:
                stopped.append(current)
        for job in filter(self._is_in, stopped):
            self._cancelled(job)
            self._ended.append(job)

    def _cancelled(self, job: _Job) -> None:
        """End a request that runs or waits."""
        del self._jobs[job.request.id]
        if self.kv.stored is not None:
            self.kv.stored.drop(job.request.id)
        for output in self.scheduler.cancel(job.request.id):
            job.outputs[output.index] = output
        self._forward.keep_states(self.scheduler.handles)
        if self._flight is not None and not self._jobs and not self._is_delivering:
            self._take_back()

    def _is_in(self, job: _Job) -> bool:
        """Whether a request has not ended."""
        return self._jobs.get(job.request.id) is job

    def _drop(self, jobs: Sequence[_Job]) -> None:
        """End requests whose completions nobody is to get from `step`."""
        for job in filter(self._is_in, jobs):
            with suppress(UnknownRequest):
                self._cancelled(job)
        self._ended = [job for job in self._ended if job not in jobs]


@dataclass(slots=True)
class _Flight:
    """A step that is out: arrays that MLX computes."""

    step: Step
    tokens: mx.array
    logprobs: mx.array
    beams: tuple[mx.array, mx.array] | None = None  # what continues each sample of a beam best
    tops: tuple[mx.array, mx.array] | None = None  # the likeliest tokens, as many as any sample asks for


class _Job:
    """A request in the engine, and the state of its samples."""

    def __init__(self, request: Request, on_token: Listener | None, stops: tuple[str, ...], tokenizer: Any) -> None:
        self.request = request
        self.namespace = b""  # that the client gave
        self.saved = 0  # tokens of the prompt that the store was given
        self.outputs: dict[int, Output] = {}
        self.error: Exception | None = None
        self.listens = on_token is not None or bool(stops) or request.user.grammar is not None
        self.followers: dict[int, Follower] = {}
        self.ends: dict[int, int] = {}  # of each output: tokens before the logits were not finite
        self._on_token = on_token
        self._stops = stops
        self._tokenizer = tokenizer
        self._transcripts: dict[int, Transcript] = {}

    @property
    def is_stopped(self) -> bool:
        """Whether all samples have ended, some of them with a stop string."""
        stopped = {index for index, one in self._transcripts.items() if one.is_stopped}
        return len(stopped | self.outputs.keys()) == self.request.n

    def fail_not_finite(self, index: int, position: int) -> bool:
        """End the request with such a token, unless its sample has stopped before. Return whether it is the cause."""
        transcript = self._transcripts.get(index)
        if self.error is not None or (transcript is not None and transcript.is_stopped):
            return False
        self.error = LogitsNotFinite(
            f"[step] the logits for token {position} of sample {index} are not finite: the weights are damaged, a sum "
            "overflows its dtype, or no token that may come is possible"
        )
        return True

    def on_token(self, index: int, token: int, logprob: float, reason: str | None, top: Top) -> None:
        """Take one token of a sample and call the listener."""
        transcript = self._transcript(index)
        if transcript.is_stopped:
            return
        text = "" if reason == "eos" else transcript.add(token)
        if reason is not None:
            text += transcript.finish()
        if transcript.is_stopped:
            reason = "stop"
        if self._on_token is not None:
            self._on_token(TokenEvent(self.request.id, index, token, logprob, text, reason, top, transcript.stop))

    def completion(self) -> Completion:
        """Return the result of the request, whose outputs are complete."""
        samples = [self._sample(self.outputs[index]) for index in sorted(self.outputs)]
        return Completion(self.request.id, tuple(samples), self.error)

    def _sample(self, output: Output) -> Sample:
        tokens, logprobs, reason = output.tokens, output.logprobs, output.finish_reason
        if (end := self.ends.get(output.index, len(tokens))) < len(tokens):
            tokens, reason = tokens[:end], "cancelled"
            logprobs = None if logprobs is None else logprobs[:end]
        try:
            transcript = self._transcript(output.index)
            for token in tokens[transcript.count : len(tokens) - (reason == "eos")].tolist():  # that no listener got
                transcript.add(token)
            transcript.finish()
        except Exception as error:  # of the tokenizer
            self.error, transcript = self.error or error, Transcript(None)
        if transcript.is_stopped:
            tokens, reason = tokens[: transcript.count], "stop"
            logprobs = None if logprobs is None else logprobs[: transcript.count]
        if self.request.beam_width:
            logprobs = None
        return Sample(tokens, logprobs, transcript.text, reason, output, transcript.stop)

    def _transcript(self, index: int) -> Transcript:
        if index not in self._transcripts:
            detokenizer = None if self._tokenizer is None else self._tokenizer.detokenizer
            self._transcripts[index] = Transcript(detokenizer, self._stops)
        return self._transcripts[index]


def _drafts(propose: Propose, vocab_size: int, rows: list[Decoding]) -> list[np.ndarray]:
    """Return the drafts of a proposer, up to the first token that the model does not have. A grammar has none."""
    free = [at for at, row in enumerate(rows) if row.request.user.grammar is None]
    found = [row.generated[:0] for row in rows]
    given = propose([rows[at] for at in free]) if free else ()
    for at, drafts in zip(free, given, strict=True):
        tokens = token_array("speculate", "drafts", drafts)
        found[at] = tokens[: np.append(tokens >= vocab_size, True).argmax()]
    return found


def _likeliest(requests: list[Request], tokens: mx.array, logprobs: mx.array) -> list[Top]:
    """Return as many of the likeliest tokens of each sample as its request asks for."""
    counts = [request.user.top_logprobs for request in requests]
    found: Any = zip(counts, np.array(tokens).tolist(), np.array(logprobs).tolist(), strict=True)
    return [tuple(zip(a[:n], b[:n], strict=True)) for n, a, b in found]


def _inputs(step: Step, before: _Flight) -> mx.array | np.ndarray:
    """Return the inputs of a step. MLX has still to compute those that `before` samples."""
    follows = step.follows
    if follows is None or not before.tokens.size:
        return step.tokens
    if follows.tolist() == list(range(before.tokens.size)):
        return before.tokens
    at = mx.array(follows)
    return mx.where(at < 0, mx.array(step.tokens), before.tokens[at])


class RaggedForward:
    """Run the plans of a pool through a model, one at a time.

    A model of mlx-lm takes a rectangle of tokens and one cache per layer. Where all layers attend over the pool, only
    attention looks at more than one token, and its kernels read from the plan which token belongs to which sequence. So
    the T tokens of a plan are T rows of one column, each at its own position, without padding. Other models (the gather
    route, recurrent layers, caches that are held whole) see a sequence in each row, as everywhere in mlx-lm. There a
    plan has one token for each sequence, or one chunk of a single sequence.

    Parameters
    ----------
    kv : PagedKV
        From `install`. The caller need not enter it: each pass installs the attention hook for its own duration.

    Attributes
    ----------
    is_ragged : bool
        Whether a pass takes any plan: all layers attend over the pool, and rows may share a pass.
    eviction : Eviction or None
        Receives the attention scores of the layers. Call its `begin_pass` before each pass. The code that makes the
        plans evicts tokens between two of them, as `kvpool.Scheduler` does.
    late : list of mx.array
        Of the last pass, what MLX has to evaluate beside its logits: writes that are lazy, and states.
    """

    def __init__(self, kv: PagedKV) -> None:
        self.kv = kv
        self.eviction = Eviction.of(kv.eviction, kv.passes)
        layout = kv.layout
        self.is_ragged = bool(kv.passes.sites) and not (layout.held or layout.is_apart or layout.has_latents)
        self._state_group = layout.state_group
        self.states_are_held = self._state_group >= 0
        self.states = SlotStates(layout)
        self.late: list[mx.array] = []

    def __call__(self, tokens: mx.array | np.ndarray, plan: Any, rows: np.ndarray) -> mx.array:
        """Return the logits of some tokens of a plan that was stepped, float32 ``[M, V]``.

        All copies, writes and reads of the plan are done when the call returns, or they are in MLX's graph. The caller
        evaluates the logits and `late`, calls `done` or `rollback`, then `keep_states`.

        Parameters
        ----------
        tokens : int32 ``[T]``
            In the order of the plan's rows.
        plan : Plan
            With the formats `passes.FORMATS`.
        rows : int32 ``[M]``
            Which of the T tokens. An index may occur twice. Without any the result is ``[0, V]`` or ``[0, 1]``.

        Raises
        ------
        ValueError
            A plan that is neither decodes only nor one chunk of one sequence, where passes are not ragged.
        """
        kv = self.kv
        # The rows of the turn are tokens where passes are ragged, else sequences.
        starts, num_columns = np.array(plan.positions[: plan.num_tokens], np.int64), 1
        if not self.is_ragged:
            new = np.diff(np.asarray(plan.cu_q_lens, np.int64)[: len(plan.handles) + 1])
            if len(new) == 1:
                starts, num_columns = starts[:1], len(starts)
            elif (new != 1).any():
                raise ValueError(
                    f"[forward] the plan has {len(new)} rows with up to {new.max()} tokens: a pass of this model is "
                    "one token for each row, or one row"
                )
        before, after = Rows(starts), Rows(starts + num_columns)
        turn = Turn(kv.passes, plan, before, after, num_columns, num_columns == 1, eviction=self.eviction)
        kv.passes.hook()
        try:
            if self.states_are_held:
                self.states.write(*kv.passes.checkpoints.loaded(plan))
            inputs = mx.array(tokens.reshape(len(turn.new), turn.num_columns))
            logits, held_by = self._logits(inputs, turn, rows)
        finally:
            kv.passes.unhook()
        self.late = [x for _, held in held_by for x in arrays_of(held)] if self.states_are_held else []
        if kv.passes.is_lazy:
            layers = [(backend, i) for backend in kv.backends for i in range(backend.spec.num_layers)]
            self.late += [x for backend, i in layers for x in backend.queued(i)]
        if self.states_are_held:
            for part, held in held_by:
                self.states.write(self._slots(plan, "state_dst", part), held)
            kv.passes.checkpoints.save(plan, self.states.read)
        return logits

    def keep_states(self, handles: np.ndarray) -> None:
        """Forget the states of all sequences but these."""
        if self.states_are_held:
            table = self.kv.pool.table
            self.states.keep(slot for handle in handles for slot in table(int(handle), self._state_group).tolist())

    def _slots(self, plan: Any, name: str, part: Part) -> list[int]:
        """Return the state slots of a part's rows: ``state_src`` or ``state_dst``."""
        slots: list[int] = getattr(plan.groups[self._state_group], name)[part.rows].tolist()
        return slots

    def _logits(self, inputs: mx.array, turn: Turn, rows: np.ndarray) -> tuple[mx.array, list[tuple[Part, Held]]]:
        """Run the model over all tokens and its head over the tokens that were asked for."""
        model = self.kv.model
        is_whole = len(rows) == inputs.size and rows.tolist() == list(range(inputs.size))
        is_taken = is_whole or (len(rows) and type(model).__module__ in _HEADS)
        if is_taken and not is_whole:
            # A policy with scores needs the last layer's attention of every row's last token, sampled or not.
            splits = len(rows) < inputs.size and self.is_ragged and self.eviction is None
            model = _with_rows(model, mx.array(rows), partial(_LastLayer, turn, rows) if splits else None)

        def run(own: list[Any], part: Part) -> Any:
            return model(inputs if part.takes_input_whole else cut(inputs, part), cache=own)

        found, held_by = in_parts(turn, lambda part: self.states.read(self._slots(turn.plan, "state_src", part)), run)
        logits = found[0][1] if len(found) == 1 else together(found, len(turn.new), turn.num_columns)
        if turn.passes.layout.nested:
            logits = with_writes(turn.passes, logits)
        if not len(rows):  # MLX never evaluates it
            return mx.zeros((0, logits.shape[-1]), mx.float32), held_by
        logits = logits.reshape(-1, logits.shape[-1])
        return (logits if is_taken else logits[mx.array(rows)]).astype(mx.float32), held_by


# ------------------------------------------------------------------------------------ logits of some rows only


class _RowsOf:
    """A model's body that returns the hidden states of some rows only. All attributes are those of the body."""

    def __init__(self, body: nn.Module, rows: mx.array) -> None:
        self._body = body
        self._rows = rows

    def __call__(self, *args: Any, **options: Any) -> mx.array:
        hidden: mx.array = self._body(*args, **options)
        return hidden.reshape(-1, 1, hidden.shape[-1])[self._rows]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)


class _LastLayer:
    """The last layer of a model. It computes only keys and values of tokens that are not sampled.

    The wrapped layer runs twice: for the keys and values of all tokens, where MLX never computes the rest, and for the
    rows that were asked for. Each of these is a sequence of its own that ends with its token.
    """

    def __init__(self, turn: Turn, rows: np.ndarray, layer: nn.Module) -> None:
        self._turn = turn.of_queries(rows)
        self._rows = mx.array(rows)
        self._layer = layer

    def __call__(self, x: mx.array, *args: Any, **options: Any) -> Any:
        (whole,) = (one for one in (*args, *options.values()) if type(one) is LayerCache)
        place = whole.place
        whole.part.forward(place).attends = False
        self._layer(x, *args, **options)
        (part,) = self._turn.parts()
        some = LayerCache(part, whole.number)
        given = [some if one is whole else one for one in args]
        named = {name: some if one is whole else one for name, one in options.items()}
        result = self._layer(x[self._rows], *given, **named)
        part.end()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _with_rows(model: nn.Module, rows: mx.array, last: Callable[[nn.Module], _LastLayer] | None) -> nn.Module:
    """Return a copy of `model` whose head sees `rows` only. It shares every weight, and lives for one pass.

    The head of a large vocabulary costs as much as several layers, and a chunk of a prompt needs one row of it. `last`
    wraps the last layer, so that it only stores keys and values of the other tokens.
    """
    one, body = copy.copy(model), model["model"]
    if last is None or type(model).__module__ in _PER_TOKEN:
        body = _RowsOf(body, rows)
    else:
        body = copy.copy(body)
        dict.__setitem__(body, "layers", [*body.layers[:-1], last(body.layers[-1])])
    dict.__setitem__(one, "model", body)
    return one


_PER_TOKEN = frozenset({"mlx_lm.models.ministral3"})
"""Modules of `_HEADS` that pass a layer a second argument per token, besides its input."""
_FAMILIES = "gemma gemma2 gemma3_text gpt_oss llama ministral3 mixtral qwen2 qwen3 qwen3_moe"
_HEADS = frozenset(f"mlx_lm.models.{name}" for name in _FAMILIES.split())
"""Modules whose ``Model`` computes the head from ``self.model(...)`` token by token."""
