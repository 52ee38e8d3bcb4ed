"""The process of a server: its socket, its signals, and a graceful shutdown."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, ClassVar

import uvicorn
from h11 import LocalProtocolError
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvpool.adapters.mlx_lm.engine import Engine
from kvpool.serving.app import Service, Settings
from kvpool.serving.memory import Memory
from kvpool.serving.runner import Runner
from kvpool.serving.telemetry import ServerMetrics, report

INTERRUPTED = 130  # exit status after a second signal
SAME_SIGNAL = 0.5  # seconds in which signals count as one: a shell and a wrapper may both send theirs
HEAD_SECONDS = 30  # for a client to send the first line and the headers of its next request
READ_SECONDS = 60  # in which a client reads something of its answer
SPARE = 64  # connections beyond the limit, which idle or get 503; and files that the process has besides connections
BACKLOG = 2048  # connections that the system keeps until they are accepted
LOOKS = 10  # at a connection in these seconds
SAID_SECONDS = 60  # between two lines in the log that files are short
_log = logging.getLogger(__name__)


class _Connection(H11Protocol):
    """uvicorn's connection, closed if its client sends no request, or reads nothing of an answer, for too long.

    uvicorn waits between two requests only, and any byte stops it. If there are too many connections, the one that has
    idled longest makes room. It may be the new one: then all others are busy.
    """

    most: ClassVar[int]  # connections
    metrics: ClassVar[ServerMetrics]
    connections: set[Any]  # uvicorn's: all that there are

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._line = transport
        self._unread, self._seen = 0, time.monotonic()  # bytes for the client; when it last was busy, or read some
        idle = [one for one in self.connections if not one.is_busy]
        if len(self.connections) > self.most and idle:
            min(idle, key=lambda one: one._seen).drop()

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except LocalProtocolError:  # what came is not HTTP, and half of an answer is out: uvicorn sends another one
            self.drop()

    def send_400_response(self, msg: str) -> None:
        self.metrics.answered("invalid", 400)
        super().send_400_response(msg)

    @property
    def is_busy(self) -> bool:
        """Whether a request is here, or its answer is not read."""
        is_asked = self.cycle is not None and not self.cycle.response_complete
        return is_asked or self._line.get_write_buffer_size() > 0

    def drop(self) -> None:
        """Close it at once."""
        self.connections.discard(self)
        self._line.abort()

    @staticmethod
    async def look_after(connections: set[_Connection]) -> None:
        """Close connections on which nothing has come for too long, or nothing was read."""
        while True:
            await asyncio.sleep(min(READ_SECONDS, HEAD_SECONDS) / LOOKS)
            now = time.monotonic()
            for one in list(connections):
                left = one._line.get_write_buffer_size()
                if left < one._unread or (not left and one.is_busy):
                    one._seen = now
                one._unread = left
                if now > one._seen + (READ_SECONDS if left else HEAD_SECONDS):
                    one.drop()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket with this address, or raise OSError. It takes connections when the server starts."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family, kind)
    found.setblocking(False)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(address)
    except OSError:
        found.close()
        raise
    return found


async def serve(
    make: Callable[[], Engine],
    settings: Settings,
    sock: socket.socket,
    on_ready: Callable[[Engine], None],
    grace: float,
    memory: Sequence[Memory] = (),
) -> int:
    """Serve until a signal. Return how many blocks are still in use, -1 if the engine was lost. `make` fills `memory`.

    After the first SIGTERM, SIGINT or SIGHUP, new requests get 503, and running ones have `grace` seconds to end. The
    second signal ends the process at once. While the model is loaded, the first one does: `make` may still run then.

    It raises what `make` raises, and OSError if another process listens at the address by now.
    """
    metrics, loop = ServerMetrics(settings.names[0]), asyncio.get_running_loop()
    runner = Runner(make, metrics.ended)
    ended = asyncio.create_task(_signals(loop).wait())
    loaded = asyncio.create_task(runner.start())
    await asyncio.wait((loaded, ended), return_when=asyncio.FIRST_COMPLETED)
    if not loaded.done():
        return 0
    await loaded
    gc.freeze()  # no collection walks through what was imported and loaded
    try:
        sock.listen(BACKLOG)
    except OSError:
        await runner.stop()
        raise
    metrics.watch(runner.engine, memory)
    service = Service(runner, settings, metrics)
    _Connection.most, _Connection.metrics = settings.max_connections + SPARE, metrics
    server = _server(service)
    connections: set[Any] = server.server_state.connections

    async def drain() -> int:
        lost = asyncio.create_task(runner.lost.wait())
        await asyncio.wait((ended, lost), return_when=asyncio.FIRST_COMPLETED)
        service.is_draining = True
        end = loop.time() + (0 if lost.done() else grace)
        if service.active and not lost.done():
            _log.info("the server stops: %d requests have %g s to end", service.active, grace)
        while service.active and loop.time() < end:
            await asyncio.sleep(0.05)
        if service.active:
            told = {"ids": sorted(service.ids)}
            _log.warning("requests cut off after %g s of grace: %d", grace, service.active, extra={"told": told})
        try:
            return await runner.stop()
        finally:
            server.config.timeout_graceful_shutdown = max(1, int(end - loop.time()))  # for clients that read slowly
            server.should_exit = True

    draining, serving = asyncio.create_task(drain()), asyncio.create_task(server.serve([sock]))
    while not (server.started or serving.done()):
        await asyncio.sleep(0.01)
    if server.started:
        sock.listen(BACKLOG)  # again: with uvicorn's, asyncio would try to accept as many in a row
        on_ready(runner.engine)
    loop.set_exception_handler(_shortage(sock, connections))
    works = (report(runner.engine), _Connection.look_after(connections), *(one.watch(runner) for one in memory))
    beside = [*map(loop.create_task, works)]
    await serving
    for task in beside:
        task.cancel()
    left = await draining
    return left if runner.failure is None else -1


def _server(service: Service) -> uvicorn.Server:
    """Return uvicorn's server. `serve` has the signals."""
    config = uvicorn.Config(
        service,
        http=_Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=1,
        timeout_keep_alive=HEAD_SECONDS,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    server.capture_signals = nullcontext  # type: ignore[assignment, method-assign]
    return server


def _shortage(
    sock: socket.socket, connections: set[_Connection]
) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """Return what handles exceptions of the loop: if the system has no file for a connection, others that idle close.

    asyncio tries to accept it again in a second. It does so too if the socket is closed by then, which is no fault.
    """
    said = -math.inf

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal said
        error = context.get("exception")
        if isinstance(error, OSError) and "accept" in context["message"]:
            for one in [one for one in connections if not one.is_busy]:
                one.drop()
            if loop.time() > said + SAID_SECONDS:
                said = loop.time()
                _log.warning("a connection has to wait: %s", error.strerror)
        elif not (sock.fileno() < 0 and "_start_serving" in context["message"]):
            loop.default_exception_handler(context)

    return handle


def _signals(loop: asyncio.AbstractEventLoop) -> asyncio.Event:
    """Return what the first SIGTERM, SIGINT or SIGHUP sets. The second one ends the process."""
    asked, first = asyncio.Event(), 0.0

    def interrupted() -> None:
        nonlocal first
        if asked.is_set() and loop.time() > first + SAME_SIGNAL:
            os._exit(INTERRUPTED)
        first = first or loop.time()
        asked.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
            loop.add_signal_handler(number, interrupted)
    return asked


def allowed_connections(wanted: int) -> int:
    """Let the process open as many files as it needs for so many connections. Return for how many the system does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + 2 * SPARE
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # macOS has a lower limit than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - 2 * SPARE))
