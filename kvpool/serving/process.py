"""The process of a server: its socket, its signals, and an orderly end."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from h11 import LocalProtocolError
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvpool.adapters.mlx_lm.engine import Engine
from kvpool.serving.app import Service, Settings
from kvpool.serving.metrics import ServerMetrics
from kvpool.serving.runner import Runner

INTERRUPTED = 130  # exit status after a second signal
SAME_SIGNAL = 0.5  # seconds in which signals count as one: a shell and a wrapper may both send theirs
HEAD_SECONDS = 30  # for a client to send the first line and the headers of its next request
READ_SECONDS = 60  # in which a client reads something of its answer
SPARE = 64  # files of the process, and connections beyond the limit that get 503; more are closed without an answer


class _Connection(H11Protocol):
    """uvicorn's connection. It is closed if its client sends no request, or reads nothing of an answer, for too long.

    The timer of uvicorn waits only between two requests, and any byte stops it.
    """

    _unread = 0  # bytes that the client had not read when this was last looked at
    _reads: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > (self.limit_concurrency or 0) + SPARE:
            transport.abort()
        transport.set_write_buffer_limits(0)  # what is not read at once starts a timer
        self.timeout_keep_alive_task = self.loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        try:
            self.conn.receive_data(data)
            self.handle_events()  # it stops the timer if a request begins
        except LocalProtocolError:  # what came is no HTTP, and half of an answer is out: uvicorn sends another one
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.transport.get_write_buffer_size()
        self._reads = self.loop.call_later(READ_SECONDS, self._look)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reads is not None:
            self._reads.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        if self._reads is not None:
            self._reads.cancel()

    def _look(self) -> None:
        if self.transport.get_write_buffer_size() >= self._unread:
            self.transport.abort()
        else:
            self.pause_writing()


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: `serve` has its own."""

    def __init__(self, service: Service, connections: int) -> None:
        config = uvicorn.Config(
            service,
            http=_Connection,
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            limit_concurrency=connections + 1,  # uvicorn refuses the one that reaches it
            timeout_keep_alive=HEAD_SECONDS,
            timeout_graceful_shutdown=1,
        )
        super().__init__(config)
        _allow_files(connections + 2 * SPARE)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """Return a socket with this address. It takes connections when the server starts.

    Raises
    ------
    OSError
        The address is in use, or this machine does not have it.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family, kind)
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
    connections: int,
) -> int:
    """Serve until a signal. Return how many blocks are still in use, -1 if the engine was lost.

    After the first SIGTERM or SIGINT, new requests get 503, and running ones have `grace` seconds to end. The second
    signal ends the process at once. While the model is loaded, the first signal ends it: `make` may still run then.

    Raises
    ------
    Exception
        What `make` raises. The port takes no connections yet.
    OSError
        Another process listens at the address now.
    """
    metrics = ServerMetrics()
    runner = Runner(make, metrics.ended)
    loop = asyncio.get_running_loop()
    ended = asyncio.create_task(_signals(loop).wait())
    loaded = asyncio.create_task(runner.start())
    await asyncio.wait((loaded, ended), return_when=asyncio.FIRST_COMPLETED)
    if not loaded.done():
        return 0
    await loaded
    gc.freeze()  # no collection walks through what was imported and loaded
    try:
        sock.listen()
    except OSError:
        await runner.stop()
        raise
    metrics.watch(runner.engine)
    service = Service(runner, settings, metrics)
    server = _Server(service, connections)

    async def drain() -> int:
        lost = asyncio.create_task(runner.lost.wait())
        await asyncio.wait((ended, lost), return_when=asyncio.FIRST_COMPLETED)
        service.is_draining = True
        end = loop.time() + (0 if lost.done() else grace)
        while service.active and loop.time() < end:
            await asyncio.sleep(0.05)
        try:
            return await runner.stop()
        finally:
            server.config.timeout_graceful_shutdown = max(1, int(end - loop.time()))  # for clients that read slowly
            server.should_exit = True

    draining = asyncio.create_task(drain())
    serving = asyncio.create_task(server.serve([sock]))
    while not (server.started or serving.done()):
        await asyncio.sleep(0.01)
    if server.started:
        on_ready(runner.engine)
    await serving
    left = await draining
    return left if runner.failure is None else -1


def _signals(loop: asyncio.AbstractEventLoop) -> asyncio.Event:
    """Return what the first SIGTERM or SIGINT sets. The second one ends the process."""
    asked, first = asyncio.Event(), 0.0

    def interrupted() -> None:
        nonlocal first
        if asked.is_set() and loop.time() > first + SAME_SIGNAL:
            os._exit(INTERRUPTED)
        first = first or loop.time()
        asked.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, interrupted)
    return asked


def _allow_files(count: int) -> None:
    """Let the process open so many files, if the system does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
