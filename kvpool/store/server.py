"""`ServerStore`: blocks on a Redis or Valkey server, for the machines of one network."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import methodcaller
from threading import Lock, Timer
from typing import Any

import numpy as np

from kvpool.errors import install_command
from kvpool.spec import checked_int
from kvpool.store import segment_format as form
from kvpool.store.blocks import Blocks, Layout, Rows, TierStats, checked, checked_layout
from kvpool.store.outbox import Outbox, Waiting

_log = logging.getLogger(__name__)
_CHUNK_NBYTES = 16 << 20  # of answers that are asked for at once
_BATCH_NBYTES = 1 << 20  # of blocks that are sent at once
_MOST_RECORD = 512 << 20  # bytes of a value of Redis and Valkey, as they come
_GROWTH_NBYTES = 16 << 10  # that a batch grows by after each that was sent
_CLOSE_SECONDS = 10.0
_USER = r"(?:[^/?#]*@)?"
_PLACE = r"(?:(?:[\w.-]+|\[[\w:.]+\])(?::\d+)?)?(?:/[^?#@\s]*)?"
_URL = re.compile(rf"(\w+://){_USER}({_PLACE})(?:[?#][^@]*)?", re.ASCII)


class ServerStore:
    """Blocks on a server that speaks the protocol of Redis, which decides what leaves. See `BlockStore`.

    Parameters
    ----------
    url : str
        ``redis://``, ``rediss://`` or ``unix://``, as the package `redis` reads it.
    layout : Layout
    timeout : float
        Seconds until an answer must be here: all of it, for up to 16 MiB that are loaded, or 1 MiB that is sent, or one
        block. Later it is a miss, and what is sent next is half as much.
    pause : float
        Seconds without another try after the server failed.
    expire : int, optional
        Seconds after which the server forgets a block.
    queue_nbytes : int
        Most bytes of blocks that wait to be sent. What does not fit is dropped.

    Raises
    ------
    ImportError
        The package `redis` is missing.
    TypeError, ValueError
        Of a URL or number that is none.

    Notes
    -----
    The value of a block is a record as on disk, head and payload. Its name has the format's version and the kind of
    the checksums: machines with and without the package `xxhash` share nothing.
    """

    def __init__(
        self,
        url: str,
        layout: Layout,
        *,
        timeout: float = 2.0,
        pause: float = 10.0,
        expire: int | None = None,
        queue_nbytes: int = 256 << 20,
    ) -> None:
        for name, seconds in (("timeout", timeout), ("pause", pause)):
            if isinstance(seconds, bool) or not isinstance(seconds, int | float):
                raise TypeError(f"[ServerStore] {name} must be a number, got {type(seconds).__name__}")
            if not 0 < seconds < 3600:
                raise ValueError(f"[ServerStore] {name} is {seconds}, it must be > 0 and < 3600 seconds")
        self._expire = None if expire is None else checked_int("ServerStore", "expire", expire)
        queue_nbytes = checked_int("ServerStore", "queue_nbytes", queue_nbytes)
        self.layout, self._timeout, self._pause = checked_layout("ServerStore", layout), timeout, pause
        form.check_sizes("ServerStore", self.layout, _MOST_RECORD)
        self._reader, self._sender = _client(url, timeout), _client(url, timeout)
        self._place = without_password(url)
        self._prefix = b"kvpool:%d:%d:" % (form.VERSION, form.KIND) + layout.digest
        self._reading = Lock()  # one call at a time on the reader
        self._counting = Lock()
        self._counts = TierStats()
        self._paused_until = self._refused_until = 0.0  # for all calls, for those that write
        self._told: dict[str, str] = {}  # what fails now, reading or writing, and how
        self._is_closed = False
        self._outbox = Outbox(self._send, lambda: None, lambda: None, queue_nbytes, 3600.0, _BATCH_NBYTES)

    def __repr__(self) -> str:
        return f"<ServerStore on {self._place}>"

    @property
    def is_paused(self) -> bool:
        """Whether a pause runs, in which it takes nothing: the server failed, or refused to write."""
        return time.monotonic() < max(self._paused_until, self._refused_until)

    def lookup(self, blocks: Blocks) -> np.ndarray:
        """See `BlockStore.lookup`. The server is asked once."""
        checked("lookup", self.layout, blocks)
        found = np.zeros(len(blocks), bool)

        def ask(client: Any) -> Any:
            pipeline = client.pipeline(transaction=False)
            for name in self._names(blocks):
                pipeline.exists(name)
            return pipeline.execute()

        if len(blocks) and len(answers := self._ask(ask)) == len(blocks):
            found[:] = [answer == 1 for answer in answers]
        return found

    def load(self, blocks: Blocks, rows: Rows) -> np.ndarray:
        checked("load", self.layout, blocks, rows, writable=True)
        nbytes = self.layout.groups[blocks.group].nbytes
        loaded, step = np.zeros(len(blocks), bool), max(_CHUNK_NBYTES // nbytes, 1)
        damaged = 0
        for begin in range(0, len(blocks), step):
            some = blocks[begin : begin + step]
            answers = self._ask(methodcaller("mget", self._names(some)))
            if len(answers) != len(some):
                break
            heads = form.expected_heads(self.layout.digest, some, nbytes)
            for number, answer in enumerate(answers):
                if isinstance(answer, bytes):
                    loaded[begin + number] = _took(answer, *heads[number], rows[begin + number])
                    damaged += not loaded[begin + number]
        hits = int(loaded.sum())
        self._count(hits=hits, hit_nbytes=hits * nbytes, misses=len(blocks) - hits - damaged, damaged=damaged)
        return loaded

    def store(self, blocks: Blocks, rows: Rows) -> int:
        checked("store", self.layout, blocks, rows)
        took = waiting = 0
        if not (self._is_closed or self.is_paused):
            names = form.names_of(blocks.keys, blocks.group)
            took, waiting = self._outbox.put(self.layout.digest, blocks, rows, names)
        nbytes = took * self.layout.groups[blocks.group].nbytes
        self._count(stored=took, stored_nbytes=nbytes, dropped=len(blocks) - took - waiting)
        return took + waiting

    def touch(self, blocks: Blocks) -> None:
        """Do nothing: the server sees what is loaded."""
        checked("touch", self.layout, blocks)

    def drain(self, timeout: float = 60.0) -> bool:
        return self._outbox.drain(timeout)

    def stats(self) -> dict[str, TierStats]:
        """See `BlockStore.stats`. What the server holds is not known."""
        with self._counting:
            outbox = self._outbox
            return {"server": self._counts._replace(queued_nbytes=outbox.nbytes, write_seconds=outbox.seconds)}

    def close(self) -> None:
        """Send what waits, and hang up; see `BlockStore.close`."""
        self._is_closed = True
        self._count(dropped=self._outbox.close(_CLOSE_SECONDS))
        for client in (self._reader, self._sender):
            client.close()

    # ---------------------------------------------------------------------- internals

    def _name(self, key: bytes, group: int) -> bytes:
        return self._prefix + key + group.to_bytes(4, "little")

    def _names(self, blocks: Blocks) -> list[bytes]:
        return [self._name(key.tobytes(), blocks.group) for key in blocks.keys]

    def _send(self, items: list[Waiting]) -> None:
        """Write blocks in one pipeline; the thread does it. A server that refuses, full or a replica, is read on."""
        from redis.exceptions import ResponseError

        if self.is_paused:
            return self._count(dropped=len(items))
        began = time.monotonic()
        try:
            with self._deadline(self._sender) as client:
                pipeline, sizes = client.pipeline(transaction=False), []
                for item in items:
                    data = b"".join((form.packed_record(item.fields, item.tokens, item.row), item.row.data))
                    sizes.append(len(data))
                    pipeline.set(self._name(item.key, item.group), data, ex=self._expire)
                answers = pipeline.execute(raise_on_error=False)
                if len(answers) != len(items):
                    raise ValueError(f"{len(answers)} answers to {len(items)} writes")
        except Exception as error:  # whatever an answer that is garbage leads to
            self._paused_until = (now := time.monotonic()) + self._pause
            if now - began >= self._timeout:  # the link may be too slow for so much
                self._outbox.batch_nbytes = sum(item.row.nbytes for item in items) // 2
            self._failed("writing", error)
            return self._count(dropped=len(items))
        self._outbox.batch_nbytes = min(self._outbox.batch_nbytes + _GROWTH_NBYTES, _BATCH_NBYTES)
        refused = [answer for answer in answers if isinstance(answer, ResponseError)]
        if refused:
            self._sender.connection_pool.disconnect()  # the name may lead to another server by now, the connection not
            self._refused_until = time.monotonic() + self._pause
            self._failed("writing", refused[0])
        else:
            self._told.pop("writing", None)
        written = [size for size, answer in zip(sizes, answers, strict=True) if not isinstance(answer, ResponseError)]
        self._count(written_nbytes=sum(written), dropped=len(refused))

    def _ask(self, call: Callable[[Any], Any]) -> list[Any]:
        """Make a call on the reader within the timeout, and return its answers: none if it has failed."""
        is_paused = time.monotonic() < self._paused_until
        if self._is_closed or is_paused or not self._reading.acquire(timeout=self._timeout):
            return []
        try:
            with self._deadline(self._reader) as client:
                answers = list(call(client))
            self._told.pop("reading", None)
            return answers
        except Exception as error:  # whatever an answer that is garbage leads to
            self._paused_until = time.monotonic() + self._pause
            self._failed("reading", error)
            return []
        finally:
            self._reading.release()

    @contextmanager
    def _deadline(self, client: Any) -> Iterator[Any]:
        """Hang up when the time is over: a timeout of a socket begins anew with each byte."""
        timer = Timer(self._timeout, client.connection_pool.disconnect)
        timer.daemon = True
        timer.start()
        try:
            yield client
        except BaseException:
            client.connection_pool.disconnect()  # what is left of an answer must not answer the next call
            raise
        finally:
            timer.cancel()

    def _failed(self, what: str, error: Exception) -> None:
        """Count an error. The log has it once, not with each pause that follows; without its text, from the server."""
        self._count(errors=1)
        kind = type(error).__name__
        if self._told.get(what) != kind:
            _log.warning("[ServerStore] %s on %s fails: %s; pause of %g s", what, self._place, kind, self._pause)
        self._told[what] = kind

    def _count(self, **more: int) -> None:
        with self._counting:
            self._counts = self._counts.plus(**more)


def _took(answer: bytes, fields: bytes, tokens: bytes, row: np.ndarray) -> bool:
    """Copy the payload of a record, if it is the one that was asked for."""
    head, payload = answer[: form.RECORD.size + len(tokens)], memoryview(answer)[form.RECORD.size + len(tokens) :]
    if len(payload) != len(row) or not form.is_right(form.KIND, head, fields, tokens, payload):
        return False
    row[:] = np.frombuffer(payload, np.uint8)
    return True


def without_password(url: str) -> str:
    """Return the URL of a server without its user, password and options. Three dots stand for what is no such URL."""
    found = _URL.fullmatch(str(url))
    return found[1] + found[2] if found else "..."


def _client(url: str, timeout: float) -> Any:
    try:
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError:
        raise ImportError(f"[ServerStore] the package redis is missing, type: {install_command('redis')}") from None
    try:
        return Redis.from_url(
            url, socket_timeout=timeout, socket_connect_timeout=timeout, retry=Retry(NoBackoff(), 0), max_connections=1
        )
    except (AttributeError, TypeError, ValueError):  # its text may have a piece of the password
        need = "redis://HOST:PORT, rediss://HOST:PORT or unix://PATH, with options of the package redis"
        raise ValueError(f"[ServerStore] url is {without_password(url)}: it must be {need}") from None
