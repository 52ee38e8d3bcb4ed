"""Tokenizes texts: in the fair order of their tenants, and long ones in processes that can be killed."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import struct
import subprocess
import sys
import time
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
told(0, b"")
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
    """Work of tenants, `places` calls at a time, of these at most `most` of one tenant. The next is that of the tenant
    which got least for its weight, which is 1 unless `weights` has another.
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
    """Tokenizes in processes, by JSON of `tokenizers`. With `splits`, names of special tokens are text.

    They start with the first text, and end with `close` or with this process. If nobody waits for a text any more, its
    process is killed once it has read for longer than it took to load: another one loads as fast.
    """

    def __init__(self, tokenizer: str, splits: bool, places: int, most: int, weights: Mapping[str, float]) -> None:
        self._turns, self._places = Turns(places, most, weights), places
        data = tokenizer.encode()
        self._first = _HEAD.pack(len(data), splits) + data
        self._idle: list[_Reader] = []
        self._all: set[_Reader] = set()
        self._is_closed = False

    async def run(self, tenant: str | None, cost: float, text: str, special: bool) -> np.ndarray:
        """Return the tokens of a text, int32 ``[n]``, with or without those that begin and end a prompt.

        The place is taken until the text is read, or its process killed. Raise ValueError if the tokenizer does, and
        OSError if the process does not start, or died, or `close` was called.
        """
        await self._turns.enter(tenant, cost)
        loop = asyncio.get_running_loop()

        def ended(job: Any) -> None:
            self._turns.leave(tenant)
            if len(text) > HUGE:  # malloc keeps what was free between other things, 20 MB of a few such texts
                loop.run_in_executor(None, trim, 0)

        try:
            if self._is_closed:
                raise ChildProcessError("[serving] the processes that tokenize were ended")
            self._replace()
            reader = self._idle.pop()
        except OSError:
            self._turns.leave(tenant)
            raise
        job = asyncio.create_task(self._read(reader, text, special))
        job.add_done_callback(ended)
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            loop.call_at(reader.due, job.cancel)
            raise

    async def close(self) -> None:
        """Kill all processes, and wait for their end. No other one starts."""
        self._is_closed = True
        for reader in self._all:
            reader.kill()
        await asyncio.gather(*(reader.ended() for reader in self._all))

    async def _read(self, reader: _Reader, text: str, special: bool) -> np.ndarray:
        try:
            return await reader.encode(text.encode(), special)
        finally:
            if reader.is_reading:
                reader.kill()
            self._idle.append(reader)
            self._replace()

    def _replace(self) -> None:
        """Start a process for each place that has none, or a dead one."""
        self._all -= (dead := {reader for reader in self._idle if reader.is_dead})
        self._idle = [reader for reader in self._idle if reader not in dead]
        while len(self._all) < self._places and not self._is_closed:
            reader = _Reader(self._first)
            self._idle.insert(0, reader)  # the one that was started first has loaded
            self._all.add(reader)


class _Reader:
    """A process that tokenizes. It took `seconds` to load, and has read its text for so long when it is `due`."""

    def __init__(self, first: bytes) -> None:
        self.seconds, self.due = 0.0, 0.0
        self.is_reading = self._is_killed = False  # the first: it has a text of which it has not given the tokens
        self._process: asyncio.subprocess.Process | None = None
        self._loaded = asyncio.create_task(self._load(first))

    async def _load(self, first: bytes) -> None:
        began = time.monotonic()
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-c", READER),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a signal of the terminal is not for it
            env=os.environ | _FRUGAL,
        )
        if self._is_killed:
            self.kill()
        await self._ask(first)
        self.seconds = time.monotonic() - began

    async def _ask(self, *sent: bytes) -> tuple[int, bytes]:
        """Send something; return the answer."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.writelines(sent)
        try:
            (count,) = _COUNT.unpack(await self._process.stdout.readexactly(_COUNT.size))
            return count, await self._process.stdout.readexactly(4 * count if count >= 0 else -1 - count)
        except EOFError:
            raise ChildProcessError("[serving] the process that tokenizes died") from None

    async def encode(self, text: bytes, special: bool) -> np.ndarray:
        """Return the tokens of a text. The process is of no use if it is left in the middle of one."""
        await asyncio.shield(self._loaded)
        self.is_reading, self.due = True, asyncio.get_running_loop().time() + self.seconds
        count, data = await self._ask(_HEAD.pack(len(text), special), text)
        self.is_reading = False
        if count < 0:
            raise ValueError(data.decode())
        return np.frombuffer(data, np.int32)

    @property
    def is_dead(self) -> bool:
        """Whether it did not start, was killed, or has ended."""
        has_failed = self._loaded.done() and self._loaded.exception() is not None
        return has_failed or self._is_killed or (self._process is not None and self._process.returncode is not None)

    def kill(self) -> None:
        """End the process, also one that is about to start."""
        self._is_killed = True
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()

    async def ended(self) -> None:
        """Wait for the end of the process."""
        await asyncio.gather(self._loaded, return_exceptions=True)
        if self._process is not None:
            await self._process.wait()


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
