"""Tokenizes texts: in the fair order of their tenants, and long ones in processes that can be killed."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import struct
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

T = TypeVar("T")
OVERRIDDEN = ("encode", "__call__", "_encode_plus", "apply_chat_template")
NFC = 4  # bytes of a text for one byte of its NFC, at most: 3.5, of U+0390 made of three characters
KEEPS = {"ByteLevel", "Digits", "FixedLength", "Metaspace", "Prepend", "UnicodeScripts"}  # steps that lose no character
HUGE = 2**20  # characters of a text whose memory is given back to the system
trim: Callable[[int], Any] = getattr(ctypes.CDLL(None), "malloc_trim", lambda kept: None)  # glibc has it
_HEAD, _COUNT = struct.Struct("<IB"), struct.Struct("<q")
_FRUGAL = {"TOKENIZERS_PARALLELISM": "false"}  # a thread of its own would have an arena of malloc of its own
READER = """
import array, ctypes, struct, sys
from tokenizers import Tokenizer
head, source, sink = struct.Struct("<IB"), sys.stdin.buffer, sys.stdout.buffer
trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda kept: None)
def taken():
    size, flag = head.unpack(source.read(head.size) or sys.exit())
    return source.read(size).decode(), bool(flag)
def told(count, data):
    sink.write(struct.pack("<q", count))
    sink.write(data)
    sink.flush()
text, splits = taken()
tokenizer = Tokenizer.from_str(text)
tokenizer.no_truncation()
tokenizer.no_padding()
tokenizer.encode_special_tokens = splits
while True:
    text, special = taken()
    try:
        ids = array.array("i", tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)
        told(len(ids), ids)
    except Exception as error:
        data = str(error)[:1000].encode()
        told(-1 - len(data), data)
    text = ids = None
    trim(0)
"""


class Turns:
    """Work of tenants, some of it at a time. The next is that of the tenant which got least for its weight.

    Parameters
    ----------
    places : int
        Calls that run at a time.
    most : int
        Of these, calls of one tenant.
    weights : mapping of tenants to numbers
        Tenants that are not there have 1.
    """

    def __init__(self, places: int, most: int, weights: Mapping[str, float]) -> None:
        self._free, self._most, self._weights = places, most, weights
        self._lines: dict[str | None, deque[tuple[asyncio.Future[None], float]]] = {}
        self._held: Counter[str | None] = Counter()
        self._got: dict[str | None, float] = {}  # costs by weights. There are as many tenants as keys
        self._now = 0.0  # what the tenant had got that was the last to begin: nobody who comes has got less

    async def enter(self, tenant: str | None, cost: float) -> None:
        """Wait for a place; `leave` gives it back."""
        line, turn = self._lines.setdefault(tenant, deque()), asyncio.get_running_loop().create_future()
        if not line:
            self._got[tenant] = max(self._got.get(tenant, 0.0), self._now)
        line.append((turn, cost))
        self._next()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn had come
                self.leave(tenant)
            raise

    def leave(self, tenant: str | None) -> None:
        """Give a place back."""
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


class Threads:
    """Runs calls in threads. A call that has begun runs to its end."""

    def __init__(self, name: str, places: int, most: int, weights: Mapping[str, float]) -> None:
        self._turns = Turns(places, most, weights)
        self._pool = ThreadPoolExecutor(places, f"kvpool-{name}")

    async def run(self, tenant: str | None, cost: float, call: Callable[..., T], *args: Any) -> T:
        """Return the result of a call, or raise what it raises. The place is taken until it ends."""
        loop = asyncio.get_running_loop()

        def ended(job: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._turns.leave, tenant)

        await self._turns.enter(tenant, cost)
        try:
            job = self._pool.submit(call, *args)
        except BaseException:  # there may be no more threads
            self._turns.leave(tenant)
            raise
        job.add_done_callback(ended)
        return await asyncio.wrap_future(job)


class Processes:
    """Tokenizes in processes. If nobody waits for a text any more, its process is killed and replaced.

    They start with the first text, and end with `close` or with this process.

    Parameters
    ----------
    tokenizer : str
        JSON of `tokenizers`.
    splits : bool
        Whether the names of special tokens are text.
    places, most, weights
        See `Turns`.
    """

    def __init__(self, tokenizer: str, splits: bool, places: int, most: int, weights: Mapping[str, float]) -> None:
        self._turns, self._places = Turns(places, most, weights), places
        data = tokenizer.encode()
        self._first = _HEAD.pack(len(data), splits) + data
        self._idle: list[_Reader] = []
        self._all: set[_Reader] = set()

    async def run(self, tenant: str | None, cost: float, text: str, special: bool) -> np.ndarray:
        """Return the tokens of a text, int32 ``[n]``, with or without those that begin and end a prompt.

        Raises
        ------
        ValueError
            The tokenizer says why.
        OSError
            The process does not start, or it died.
        """
        await self._turns.enter(tenant, cost)
        while len(self._all) < self._places:
            self._start()
        reader = self._idle.pop()
        try:
            found = await reader.encode(text.encode(), special)
        except ValueError:
            self._idle.append(reader)
            raise
        except BaseException:
            reader.kill()
            self._all.discard(reader)
            self._start()
            raise
        else:
            self._idle.append(reader)
            return found
        finally:
            self._turns.leave(tenant)
            if len(text) > HUGE:  # malloc keeps what was free between other things, 20 MB of a few such texts
                asyncio.get_running_loop().run_in_executor(None, trim, 0)

    async def close(self) -> None:
        """Kill all processes, and wait for their end."""
        for reader in self._all:
            reader.kill()
        await asyncio.gather(*(reader.ended() for reader in self._all), return_exceptions=True)

    def _start(self) -> None:
        reader = _Reader(self._first)
        self._idle.insert(0, reader)  # the one that was started first has started up
        self._all.add(reader)


class _Reader:
    """A process that tokenizes."""

    def __init__(self, first: bytes) -> None:
        self._started = asyncio.create_task(self._start(first))

    @staticmethod
    async def _start(first: bytes) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-c", READER),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a signal of the terminal is not for it
            env=os.environ | _FRUGAL,
        )
        assert process.stdin is not None
        process.stdin.write(first)
        return process

    async def encode(self, text: bytes, special: bool) -> np.ndarray:
        process = await asyncio.shield(self._started)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.writelines([_HEAD.pack(len(text), special), text])
        try:
            (count,) = _COUNT.unpack(await process.stdout.readexactly(_COUNT.size))
            data = await process.stdout.readexactly(4 * count if count >= 0 else -1 - count)
        except EOFError:
            raise ChildProcessError("[serving] the process that tokenizes died") from None
        if count < 0:
            raise ValueError(data.decode())
        return np.frombuffer(data, np.int32)

    def kill(self) -> None:
        """End the process, also one that is about to start."""
        if self._started.done():
            self._kill(self._started)
        else:
            self._started.add_done_callback(self._kill)

    async def ended(self) -> None:
        """Wait for the end of the process."""
        await (await self._started).wait()

    @staticmethod
    def _kill(started: asyncio.Task[asyncio.subprocess.Process]) -> None:
        if not started.cancelled() and started.exception() is None:
            with suppress(ProcessLookupError):
                started.result().kill()


def shared(tokenizer: Any) -> str | None:
    """Return a tokenizer as JSON, for a process that does with it what this one does. None: it has code of its own."""
    inner = getattr(tokenizer, "_tokenizer", None)
    if type(tokenizer) is not TokenizerWrapper or not isinstance(inner, PreTrainedTokenizerFast):
        return None
    plain = all(getattr(type(inner), name) is getattr(PreTrainedTokenizerFast, name) for name in OVERRIDDEN)
    return str(inner.backend_tokenizer.to_str()) if plain else None


def most_bytes(tokenizer: str) -> int | None:
    """Return how many bytes of a text become one token, at most. None: this is not certain.

    It is certain of byte-pair encodings that know every byte, where no step takes characters away.
    """
    made = json.loads(tokenizer)
    model, added = made["model"], made["added_tokens"]
    steps = [*_steps(made["normalizer"]), *_steps(made["pre_tokenizer"])]
    is_known = model["type"] == "BPE" and not (model["continuing_subword_prefix"] or model["end_of_word_suffix"])
    if not (is_known and all(map(_keeps, steps))) or any(one["lstrip"] or one["rstrip"] for one in added):
        return None  # a token that takes the spaces beside it has no end
    vocab: list[str] = list(model["vocab"])
    if any(step["type"] == "ByteLevel" for step in steps):  # a letter is a byte
        sizes, letters = [len(one) for one in vocab], pre_tokenizers.ByteLevel.alphabet()
    elif model["byte_fallback"]:
        sizes, letters = [len(one.encode()) for one in vocab], [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        return None
    if not set(letters) <= set(vocab):
        return None  # characters that it does not know may all be one token, or none
    longest = max(*sizes, *(len(one["content"].encode()) for one in added))
    return longest * (NFC if any(step["type"] == "NFC" for step in steps) else 1)


def _steps(step: Any) -> Iterator[dict[str, Any]]:
    if step is not None and step["type"] == "Sequence":
        for inner in step.get("normalizers", step.get("pretokenizers", ())):
            yield from _steps(inner)
    elif step is not None:
        yield step


def _keeps(step: dict[str, Any]) -> bool:
    """Whether a step makes no text shorter, or by `NFC` at most."""
    if step["type"] in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    if step["type"] == "Replace":
        old = step["pattern"].get("String")
        return old is not None and len(step["content"].encode()) >= len(old.encode())
    return step["type"] in KEEPS or step["type"] == "NFC"
