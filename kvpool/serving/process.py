"""The process of a server: its socket, its signals, and an orderly end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from kvpool.adapters.mlx_lm.engine import Engine
from kvpool.serving.app import Service, Settings
from kvpool.serving.metrics import ServerMetrics
from kvpool.serving.runner import Runner

INTERRUPTED = 130  # exit status after a second signal
SAME_SIGNAL = 0.5  # seconds in which signals count as one: a shell and a wrapper may both send theirs


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: `serve` has its own."""

    def __init__(self, service: Service, connections: int) -> None:
        config = uvicorn.Config(
            service,
            http="h11",
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            limit_concurrency=connections + 1,  # uvicorn refuses the one that reaches it
            timeout_keep_alive=30,
            timeout_graceful_shutdown=1,
        )
        super().__init__(config)

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
    signal ends the process at once.

    Raises
    ------
    Exception
        What `make` raises. The port takes no connections yet.
    OSError
        Another process listens at the address now.
    """
    metrics = ServerMetrics()
    runner = Runner(make, metrics.ended)
    await runner.start()
    try:
        sock.listen()
    except OSError:
        await runner.stop()
        raise
    metrics.watch(runner.engine)
    service = Service(runner, settings, metrics)
    server = _Server(service, connections)
    loop, asked, first = asyncio.get_running_loop(), asyncio.Event(), 0.0

    def interrupted() -> None:
        nonlocal first
        if asked.is_set() and loop.time() > first + SAME_SIGNAL:
            os._exit(INTERRUPTED)
        first = first or loop.time()
        asked.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, interrupted)

    async def drain() -> None:
        lost = asyncio.create_task(runner.lost.wait())
        await asyncio.wait((asyncio.create_task(asked.wait()), lost), return_when=asyncio.FIRST_COMPLETED)
        service.is_draining = True
        end = loop.time() + (0 if lost.done() else grace)
        while service.active and loop.time() < end:
            await asyncio.sleep(0.05)
        server.should_exit = True

    draining = asyncio.create_task(drain())
    serving = asyncio.create_task(server.serve([sock]))
    while not (server.started or serving.done()):
        await asyncio.sleep(0.01)
    if server.started:
        on_ready(runner.engine)
    await serving
    await draining
    left = await runner.stop()
    return left if runner.failure is None else -1
