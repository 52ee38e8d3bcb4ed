"""`Runner` runs the engine in a thread of its own. A `Run` is one request of a client, in the event loop."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, Self, TypeVar

from kvpool.adapters.mlx_lm.engine import Completion, Engine, TokenEvent
from kvpool.errors import RequestRejected
from kvpool.groups import arenas_of
from kvpool.serving.requests import Refused

REJECTED = {"queue_full": 429, "deadline": 504}
KEPT = 1 / 8  # of a pool: docs/numbers.md#prompts-that-stay-cached says what others lose by it
UNREAD = 2**16  # tokens and likely tokens of a stream that wait for its client
T = TypeVar("T")
_log = logging.getLogger(__name__)


class Runner:
    """Runs an engine in a thread of its own. Call all methods in the event loop.

    `make` makes the engine, in the thread, because MLX needs that. `on_end` is called in the event loop with every
    completion. Only the thread calls `engine`; others may read its attributes. `failure` says why the engine is lost:
    it failed, and its pool is damaged.
    """

    def __init__(self, make: Callable[[], Engine], on_end: Callable[[Completion], None] = lambda completion: None):
        self._make, self._on_end, self.is_stopping = make, on_end, False
        self._calls: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
        self._news: list[tuple[Run, Any]] = []  # of the thread, until the step is over
        self._owners: dict[Hashable, tuple[Run, int]] = {}  # of the thread: by the engine's id
        self._thread = threading.Thread(target=self._work, name="kvpool-engine", daemon=True)
        self.engine: Engine
        self.failure: BaseException | None = None
        self.weights: Mapping[str, float] = {}  # of tenants: they share out what the pool may keep
        self.lost = asyncio.Event()

    async def start(self) -> None:
        """Make the engine. Raises what `make` raises."""
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Engine] = self._loop.create_future()
        self._thread.start()
        self.engine = await self._ready

    async def stop(self) -> int:
        """Cancel what runs, end the thread and the trial of grammars. Return the blocks that are still in use."""
        self.is_stopping = True
        self._calls.put(None)
        await asyncio.to_thread(self._thread.join)
        if self.engine.grammars.trial is not None:
            self.engine.grammars.trial.close()
        pool = self.engine.kv.pool
        return sum(pool.stats(arena).used for arena in set(arenas_of(pool.options.groups)))

    # ------------------------------------------------------------------------------------------- the thread

    def _work(self) -> None:
        try:
            engine = self._make()
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._ready.set_exception, error)
            return
        self._loop.call_soon_threadsafe(self._ready.set_result, engine)
        while True:
            is_idle = self.failure is not None or not (engine.num_unfinished or engine.is_saving)
            calls = [self._calls.get()] if is_idle else []
            calls += [self._calls.get() for _ in range(self._calls.qsize())]
            for call in [*calls, self._step]:
                if call is None:
                    self._tell_all(Refused(503, "the server stops"))
                    if self.failure is None:
                        engine.close()
                    self._tell()
                    return
                try:
                    call(engine)
                except BaseException as error:  # libraries in Rust raise others than Exception
                    _log.error("the engine failed", exc_info=error)
                    self._tell_all(Refused(500, f"the engine failed: {type(error).__name__}"))
                    self._recover(engine)
            self._tell()

    def _tell_all(self, why: Refused) -> None:
        self._news += [(run, why) for run in {run for run, _ in self._owners.values()}]
        self._owners.clear()

    def _recover(self, engine: Engine) -> None:
        """Drop all requests and the prefix cache. If the pool is damaged, set `failure`."""
        try:
            engine.kv.pool.check()
            engine.reset()
            engine.scheduler.check()
        except BaseException as broken:
            _log.error("the engine is lost", exc_info=broken)
            self.failure = self.failure or broken
            self._loop.call_soon_threadsafe(self.lost.set)

    def _step(self, engine: Engine) -> None:
        for completion in engine.step() if self.failure is None else ():
            if completion.id in self._owners:
                run, number = self._owners.pop(completion.id)
                self._news.append((run, _wrong(completion) or (number, completion)))

    def begin(self, run: Run, engine: Engine) -> None:
        """Submit all prompts of a run, or none."""
        if self.failure is not None:
            self._news.append((run, Refused(500, "the engine is lost")))
            return
        try:
            if run.options.get("keep") is not None:
                self._limit_kept(engine, run.options)
            for number, prompt in enumerate(run.prompts):
                id = engine.submit(prompt, on_token=run.listener(number, self._news), **run.options)
                self._owners[id] = run, number
                run.ids.append(id)
        except BaseException as error:
            self._news.append((run, _refusal(error)))  # first: to cancel may fail, too
            self.cancel(run, engine)
        else:
            self._news.append((run, None))

    def _limit_kept(self, engine: Engine, options: Mapping[str, Any]) -> None:
        """Limit what the tenant of a run keeps to its share. It is set each time, because the pool may be resized."""
        tenant, pool, blocks = options["tenant"], engine.kv.pool, engine.kv.pool.num_blocks * KEPT
        if pool.prefix is not None:
            blocks *= self.weights.get(tenant, 1) / sum(self.weights.values()) if self.weights else 1
            own = engine.kv.own_namespace(options["namespace"])
            pool.prefix.limit_kept(own, int(blocks / engine.kv.layout.columns(0)))

    def cancel(self, run: Run, engine: Engine) -> None:
        """Cancel the prompts of a run that have not ended."""
        for id in run.ids:
            if self._owners.pop(id, None) is not None and id in engine:
                engine.cancel(id)

    def _tell(self) -> None:
        """Give the events of a step to the event loop, in one call."""
        if self._news:
            self._loop.call_soon_threadsafe(self._told, list(self._news))
            self._news.clear()

    # ------------------------------------------------------------------------------------------- the event loop

    def _told(self, news: list[tuple[Run, Any]]) -> None:
        for run, item in news:
            run.put(item)
            if isinstance(item, tuple) and isinstance(item[1], Completion):
                self._on_end(item[1])

    def call(self, what: Callable[..., Any], *args: Any) -> None:
        """Have the thread call something with the engine, between two steps. You may call it at any time."""
        self._calls.put(partial(what, *args))

    async def ask(self, question: Callable[[Engine], T]) -> T:
        """Return what a function says of the engine, or raise what it raises. The engine's thread calls it."""
        answer: Future[T] = Future()

        def say(engine: Engine) -> None:
            if answer.set_running_or_notify_cancel():  # somebody still waits
                try:
                    answer.set_result(question(engine))
                except Exception as error:
                    answer.set_exception(error)

        self.call(say)
        return await asyncio.wrap_future(answer)


def running(engine: Engine) -> list[tuple[Any, int]]:
    """Return the requests that run, and the handles of their sequences. Only the thread of the engine may ask."""
    handles, lanes = engine.scheduler.handles.tolist(), count()
    found: list[Any] = []
    while len(found) < len(handles):
        with suppress(ValueError):  # nothing runs in this lane
            found.append(engine.scheduler.request_of(next(lanes)))
    return list(zip(found, handles, strict=True))


def blocks_by_tenant(engine: Engine) -> dict[str, Any]:
    """Return how the blocks of the pool are used, as far as a tenant has them alone. For `Runner.ask`."""
    pool = engine.kv.pool
    stats, tenants = pool.stats(), Counter[str]()
    for request, handle in running(engine):
        tenants[str(request.tenant or "")] += -(-pool.num_tokens(handle) // pool.block_size)
    told = {"used": stats.used, "cached": stats.evictable, "free": stats.blank + stats.limbo}
    return told | {"tenants": tenants, "block_size": pool.block_size}


def _look(run: Run, engine: Engine) -> None:
    pool, ids = engine.kv.pool, set(run.ids)
    run.num_read = sum(pool.num_tokens(handle) for request, handle in running(engine) if request.id in ids)


def plain(error: BaseException) -> str:
    """Return a message without the ``[call]`` at its beginning."""
    return str(error).partition("] ")[2] or str(error)


def _refusal(error: BaseException) -> Refused:
    """Return what the client of a request is told that could not begin."""
    if isinstance(error, RequestRejected):
        return Refused(REJECTED.get(error.reason, 400), plain(error), code=error.reason, wait=error.wait)
    if isinstance(error, TypeError | ValueError):
        return Refused(400, plain(error))
    _log.error("a request failed", exc_info=error)
    return Refused(500, f"the request failed: {type(error).__name__}")


def _wrong(completion: Completion) -> Refused | None:
    if completion.error is not None:
        return Refused(500, f"the answer cannot be made: {type(completion.error).__name__}")
    if all(sample.finish_reason == "deadline" and not len(sample.tokens) for sample in completion.samples):
        return Refused(504, "the deadline passed before the first token", code="deadline")
    return None


class Run:
    """One or more prompts of a client with the same options: ``async with run: async for number, item in run``.

    An item is a `TokenEvent`, of a run that `listens`. The last item of each prompt is a `Completion`. If you leave the
    block early, what still runs is cancelled. Entering and iterating raise `Refused` if the engine, or the server, does
    not begin a prompt or ends it.
    """

    def __init__(self, runner: Runner, prompts: Sequence[Sequence[int]], listens: bool, options: dict[str, Any]):
        self.prompts, self.options, self._runner, self._listens = prompts, options, runner, listens
        self.ids: list[Hashable] = []  # of the thread: the engine's
        self.completions: dict[int, Completion] = {}  # of the prompts, by number
        self.num_read = self._num_heard = 0  # tokens: of the prompts, after `look`; of the answer
        self._most = UNREAD // (1 + options.get("top_logprobs", 0))
        self._items: list[Any] = []  # that nobody has read
        self._came = asyncio.Event()

    def listener(self, number: int, news: list[tuple[Run, Any]]) -> Callable[[TokenEvent], None] | None:
        """Return the listener that the engine calls with each token of a prompt."""
        return (lambda event: news.append((self, (number, event)))) if self._listens else None

    def put(self, item: Any) -> None:
        """Take an item. Behind an exception comes nothing more."""
        if not (self._items and isinstance(self._items[-1], Refused)):
            if len(self._items) >= self._most:
                item = Refused(503, "the client reads too slowly")
                self._end()
            self._items.append(item)
            self._came.set()

    def _end(self) -> None:
        self._runner.call(self._runner.cancel, self)

    def look(self) -> None:
        """Have the engine count the prompt tokens that it has read, behind its present step: `num_read`."""
        self._runner.call(_look, self)

    @property
    def told(self) -> dict[str, Any]:
        """What the log says of it."""
        ended = self.completions.values()
        samples = [sample for completion in ended for sample in completion.samples]
        times = [sample.output.times for sample in samples]
        written = sum(len(sample.tokens) for sample in samples)
        first = min((one.first_token - one.arrived for one in times if one.first_token is not None), default=None)
        return {
            "prompt": sum(map(len, self.prompts)),
            "cached": sum(one.samples[0].output.num_cached for one in ended) if ended else None,
            "generated": written or self._num_heard if ended or self._listens else None,
            "first": None if first is None else round(first, 3),
        }

    async def __aenter__(self) -> Self:
        if self._runner.is_stopping:
            raise Refused(503, "the server stops")
        self._runner.call(self._runner.begin, self)
        try:
            await self._came.wait()
            if isinstance(item := self._items.pop(0), Refused):
                raise item
        except BaseException:
            self._end()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._end()

    async def news(self) -> list[tuple[int, Any]]:
        """Return all that has come since the last time, once there is something."""
        while not self._items:
            self._came.clear()
            await self._came.wait()
        items, self._items = self._items, []
        if isinstance(items[-1], Refused):
            self._items.append(why := items.pop())
            if not items:
                raise why
        for number, item in items:
            if isinstance(item, Completion):
                self.completions[number] = item
            elif item:
                self._num_heard += 1
        return items

    async def __aiter__(self) -> AsyncIterator[tuple[int, TokenEvent | Completion]]:
        while len(self.completions) < len(self.prompts):
            for one in await self.news():
                yield one
