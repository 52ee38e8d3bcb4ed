"""Tokenizes texts: in the fair order of their tenants, and long ones in processes that can be killed.

These processes import this module, so it imports neither MLX nor transformers before it needs them.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from array import array
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
from anyio import BrokenWorkerProcess, CapacityLimiter, to_thread
from anyio.to_process import run_sync
from tokenizers import Tokenizer

T = TypeVar("T")
OVERRIDDEN = ("encode", "__call__", "_encode_plus", "apply_chat_template")
HUGE = 2**20  # characters of a text whose memory is given back to the system
LOADS = 1.0  # seconds that a process goes on with a text of nobody: another one takes about as long to load
trim: Callable[[int], Any] = getattr(ctypes.CDLL(None), "malloc_trim", lambda kept: None)  # glibc has it
_made: dict[str, Tokenizer] = {}  # of a process that tokenizes, by name


class Turns:
    """Work of tenants, `places` calls at a time, of these at most `most` of one tenant. The next is that of the tenant
    which got least for its weight, which is 1 unless `weights` has another.
    """

    def __init__(self, places: int, most: int, weights: Mapping[str, float]) -> None:
        self._free, self._most, self._weights = places, most, weights
        self._lines: dict[str | None, deque[tuple[asyncio.Future[None], float]]] = {}
        self._held: Counter[str | None] = Counter()
        self._got: dict[str | None, float] = {}  # costs by weights. There are as many tenants as keys
        self._now = 0.0  # what the tenant had got that was the last to begin: nobody who comes has got less

    async def hold(
        self, tenant: str | None, cost: float, work: Callable[[], Awaitable[T]], patience: float | None = None
    ) -> T:
        """Return the result of `work`, or raise what it raises. It has a place until it ends.

        If nobody waits for it any more, it goes on for `patience` seconds at most. None: to its end.
        """
        line, turn = self._lines.setdefault(tenant, deque()), asyncio.get_running_loop().create_future()
        if not line:
            self._got[tenant] = max(self._got.get(tenant, 0.0), self._now)
        line.append((turn, cost))
        self._next()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn had come
                self._leave(tenant)
            raise
        job = asyncio.ensure_future(work())
        job.add_done_callback(lambda job: self._leave(tenant))
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            if patience is not None:
                job.get_loop().call_later(patience, job.cancel)
            raise

    def _leave(self, tenant: str | None) -> None:
        self._free += 1
        self._held[tenant] -= 1
        self._next()

    def _next(self) -> None:
        while self._free:
            for line in self._lines.values():
                while line and line[0][0].done():  # cancelled
                    line.popleft()
            ready = [tenant for tenant, line in self._lines.items() if line and self._held[tenant] < self._most]
            if not ready:
                return
            tenant = min(ready, key=self._got.__getitem__)
            turn, cost = self._lines[tenant].popleft()
            self._now = self._got[tenant]
            self._got[tenant] += cost / self._weights.get(tenant or "", 1.0)
            self._free -= 1
            self._held[tenant] += 1
            turn.set_result(None)


class Threads(Turns):
    """Runs calls in threads. A call that has begun runs to its end."""

    async def run(self, tenant: str | None, cost: float, call: Callable[..., T], *args: Any) -> T:
        """Return the result of a call, or raise what it raises."""
        return await self.hold(tenant, cost, partial(to_thread.run_sync, call, *args))


class Processes(Turns):
    """Tokenizes in processes, which make the tokenizer by `how`: see `shared`.

    They start as texts come, import the program's main module as `multiprocessing` does, and end with the event loop.
    If nobody waits for a text any more, its process is killed `LOADS` seconds later, unless it is still loading.
    """

    def __init__(self, how: tuple[bytes, bool], places: int, most: int, weights: Mapping[str, float]) -> None:
        super().__init__(places, most, weights)
        self._limit = CapacityLimiter(places)
        self._name, self._how = uuid4().hex, how

    async def run(self, tenant: str | None, cost: float, text: str, special: bool) -> np.ndarray:
        """Return the tokens of a text, int32 ``[n]``, with or without those that begin and end a prompt.

        Raise ValueError if the tokenizer does, and OSError if the process does not start, or died.
        """
        return await self.hold(tenant, cost, partial(self._read, text, special), LOADS)

    async def _read(self, text: str, special: bool) -> np.ndarray:
        try:
            await asyncio.shield(asyncio.create_task(self._load()))
            found = await self._ask(text, special)
            if found is None:
                found = await self._ask(text, special, *self._how)
        except BrokenWorkerProcess:
            raise ChildProcessError("[serving] the process that tokenizes died") from None
        finally:
            if len(text) > HUGE:  # malloc keeps what was free between other things, 20 MB of a few such texts
                asyncio.get_running_loop().run_in_executor(None, trim, 0)
        return np.array(found, np.int32)

    async def _load(self) -> None:
        """Make sure that a process has the tokenizer. Nothing cancels this: anyio would not end the process then."""
        if await self._ask("", False) is None:
            await self._ask("", False, *self._how)

    async def _ask(self, *text: Any) -> Any:
        return await run_sync(read, self._name, *text, cancellable=True, limiter=self._limit)


def shared(tokenizer: Any) -> tuple[bytes, bool] | None:
    """Return a tokenizer as JSON, and whether names of special tokens are text. None: it has code of its own."""
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from transformers import PreTrainedTokenizerFast

    inner = getattr(tokenizer, "_tokenizer", None)
    if type(tokenizer) is not TokenizerWrapper or not isinstance(inner, PreTrainedTokenizerFast):
        return None
    if any(getattr(type(inner), name) is not getattr(PreTrainedTokenizerFast, name) for name in OVERRIDDEN):
        return None
    return inner.backend_tokenizer.to_str().encode(), inner.split_special_tokens


def _load(tokenizer: bytes, splits: bool) -> Tokenizer:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a thread of its own would have an arena of malloc of its own
    for sent in (signal.SIGINT, signal.SIGHUP):  # by the terminal, also to the server, which ends this process
        signal.signal(sent, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a pipe that nobody reads: what Rust says of a panic would fill it
    made = Tokenizer.from_buffer(tokenizer)
    made.no_truncation()
    made.no_padding()
    made.encode_special_tokens = splits
    return made


def read(name: str, text: str, special: bool, *how: Any) -> array[int] | None:
    """Tokenize in a process of its own, with or without what begins and ends a prompt. Raise ValueError if that fails.

    None: the tokenizer of this name has to be made, by `how`: its JSON, and whether names of special tokens are text.
    """
    try:
        if how:
            _made[name] = _load(*how)
        if name not in _made:
            return None
        return array("i", _made[name].encode_batch_fast([text], add_special_tokens=special)[0].ids)
    except BaseException as error:  # a panic in Rust cannot be pickled
        raise ValueError(str(error)[:1000]) from None
    finally:
        trim(0)
