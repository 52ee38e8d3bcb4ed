"""The process of a server: its socket, its signals, and an orderly end."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import uvicorn
from h11 import LocalProtocolError
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvpool.adapters.mlx_lm.engine import Engine
from kvpool.serving.app import Service, Settings
from kvpool.serving.log import report
from kvpool.serving.metrics import ServerMetrics
from kvpool.serving.runner import Runner

INTERRUPTED = 130  # exit status after a second signal
SAME_SIGNAL = 0.5  # seconds in which signals count as one: a shell and a wrapper may both send theirs
HEAD_SECONDS = 30  # for a client to send the first line and the headers of its next request
READ_SECONDS = 60  # in which a client reads something of its answer
SPARE = 64  # connections beyond the limit, which idle or get 503; and files that the process has besides connections
BACKLOG = 2048  # connections that the system keeps until they are accepted
RETRY_SECONDS = 0.01  # until the next try to accept one, if the system has no file for it
SAID_SECONDS = 60  # between two lines in the log that files are short
_log = logging.getLogger(__name__)


class _Connection(H11Protocol):
    """uvicorn's connection. It is closed if its client sends no request, or reads nothing of an answer, for too long.

    The timer of uvicorn waits only between two requests, and any byte stops it.
    """

    _unread = 0  # bytes that the client had not read when this was last looked at
    _reads: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # what is not read at once starts a timer
        self.timeout_keep_alive_task = self.loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def idles_until(self) -> float:
        """Return when the loop closes it because no request came. inf: a request is here, or its answer is not read."""
        timer, transport = self.timeout_keep_alive_task, self.transport
        if timer is None or transport.is_closing() or transport.get_write_buffer_size():
            return math.inf
        return timer.when()

    def data_received(self, data: bytes) -> None:
        try:
            self.conn.receive_data(data)
            self.handle_events()  # it stops the timer if a request begins
        except LocalProtocolError:  # what came is not HTTP, and half of an answer is out: uvicorn sends another one
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
    """uvicorn's server, but `serve` has the signals, and clients come in by `_accept`.

    If there are too many connections or too few files, the connection that idles longest makes room. It may be the new
    one: then all others are busy.
    """

    def __init__(self, service: Service, connections: int) -> None:
        config = uvicorn.Config(
            service,
            http=_Connection,
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=HEAD_SECONDS,
            timeout_graceful_shutdown=1,
        )
        super().__init__(config)
        self._most = connections + SPARE
        self._said = -math.inf

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self._accepting = [asyncio.create_task(self._accept(one)) for one in sockets or ()]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        await super().shutdown(sockets)

    async def _accept(self, sock: socket.socket) -> None:
        """Take clients as they come. asyncio's own way logs a lack of files without end, and does nothing else."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(sock)
            except ConnectionError:  # the client is gone again
                continue
            except OSError as error:
                if loop.time() > self._said + SAID_SECONDS:
                    self._said = loop.time()
                    _log.warning("a connection has to wait: %s", error.strerror)
                self._close_idle()
                await asyncio.sleep(RETRY_SECONDS)
                continue
            try:
                await loop.connect_accepted_socket(self._connection, client)
            except OSError:
                client.close()
            if len(self.server_state.connections) > self._most:
                self._close_idle()

    def _connection(self) -> _Connection:
        return _Connection(self.config, self.server_state, self.lifespan.state)

    def _close_idle(self) -> None:
        own = [one for one in self.server_state.connections if isinstance(one, _Connection)]
        first = min(own, key=_Connection.idles_until, default=None)
        if first is not None and first.idles_until() < math.inf:
            first.timeout_keep_alive_handler()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket with this address. It takes connections when the server starts.

    Raises
    ------
    OSError
        The address is in use, or this machine does not have it.
    """
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
) -> int:
    """Serve until a signal. Return how many blocks are still in use, -1 if the engine was lost.

    After the first SIGTERM, SIGINT or SIGHUP, new requests get 503, and running ones have `grace` seconds to end. The
    second signal ends the process at once. While the model is loaded, the first one does: `make` may still run then.

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
        sock.listen(BACKLOG)
    except OSError:
        await runner.stop()
        raise
    metrics.watch(runner.engine)
    service = Service(runner, settings, metrics)
    server = _Server(service, settings.max_connections)

    async def drain() -> int:
        lost = asyncio.create_task(runner.lost.wait())
        await asyncio.wait((ended, lost), return_when=asyncio.FIRST_COMPLETED)
        service.is_draining = True
        end = loop.time() + (0 if lost.done() else grace)
        while service.active and loop.time() < end:
            await asyncio.sleep(0.05)
        if service.active:
            _log.warning("requests cut off after %g s of grace: %d", grace, service.active)
        try:
            return await runner.stop()
        finally:
            await service.close()
            server.config.timeout_graceful_shutdown = max(1, int(end - loop.time()))  # for clients that read slowly
            server.should_exit = True

    draining = asyncio.create_task(drain())
    serving = asyncio.create_task(server.serve([sock]))
    while not (server.started or serving.done()):
        await asyncio.sleep(0.01)
    if server.started:
        on_ready(runner.engine)
    reporting = asyncio.create_task(report(runner.engine))
    await serving
    reporting.cancel()
    left = await draining
    return left if runner.failure is None else -1


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
