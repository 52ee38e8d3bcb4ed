"""The clients, a process of their own: ``python -m benchmarks.http_clients`` reads requests, sends each when it is due.

Each request has a connection of its own. While a run goes on, the process only keeps the bytes that come, with two
times: its clock, and the CPU time of the server's process. They are read afterwards. It imports nothing but the
standard library, so that its own CPU time is small.

Standard input has one JSON object: `address` (host and port), `pid` of the server, `path`, `limit` (seconds that an
answer may take), and `requests`, each with `at` (seconds) and `body`. Standard output gets one: `cpu` of this process,
`server_cpu` and `wall` of the run, and `answers`, each with `sent` (seconds), `sent_cpu`, `pieces` (seconds, CPU
seconds, text of the bytes) and `error`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

CPU_CLOCK = 2  # CPUCLOCK_SCHED of Linux: nanoseconds of CPU time


class Clocks:
    """Two clocks that begin at 0: of this machine, and of the CPU time of another process, all of its threads."""

    def __init__(self, pid: int) -> None:
        self._cpu_clock = (~pid << 3) | CPU_CLOCK
        self.begin()

    def begin(self) -> None:
        """Set both to 0."""
        self._start, self._start_cpu = time.perf_counter(), time.clock_gettime(self._cpu_clock)

    def now(self) -> tuple[float, float]:
        """Return the seconds of both. The CPU time of a process that has ended is NaN."""
        try:
            cpu = time.clock_gettime(self._cpu_clock) - self._start_cpu
        except OSError:
            cpu = float("nan")
        return time.perf_counter() - self._start, cpu


class Exchange(asyncio.Protocol):
    """One request and its answer, on a connection of its own."""

    def __init__(self, clocks: Clocks, request: bytes) -> None:
        self.clocks, self.request = clocks, request
        self.pieces: list[tuple[float, float, bytes]] = []
        self.sent = (0.0, 0.0)
        self.ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        """Keep what came."""
        self.pieces.append((*self.clocks.now(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        """The server has closed the connection, as it was asked to."""
        if not self.ended.done():
            self.ended.set_result(None if exc is None else type(exc).__name__)


async def exchange(asked: dict[str, Any], begin: float, clocks: Clocks, one: dict[str, Any]) -> dict[str, Any]:
    """Send a request when it is due, and return its answer."""
    host, port = asked["address"]
    body = json.dumps(one["body"]).encode()
    head = f"POST {asked['path']} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
    loop, line = asyncio.get_running_loop(), Exchange(clocks, request)
    await asyncio.sleep(begin + one["at"] - loop.time())
    sent = clocks.now()
    try:
        async with asyncio.timeout(asked["limit"]):
            transport, _ = await loop.create_connection(lambda: line, host, port)
            try:
                error = await line.ended
            finally:
                transport.close()
    except (OSError, TimeoutError) as exc:
        error = type(exc).__name__
    pieces = [(wall, cpu, data.decode("latin-1")) for wall, cpu, data in line.pieces]
    return {"sent": sent[0], "sent_cpu": sent[1], "pieces": pieces, "error": error}


async def run(asked: dict[str, Any]) -> dict[str, Any]:
    """Send all requests, and return what came."""
    clocks, own = Clocks(asked["pid"]), time.process_time()
    begin = asyncio.get_running_loop().time()
    answers = await asyncio.gather(*[exchange(asked, begin, clocks, one) for one in asked["requests"]])
    wall, cpu = clocks.now()
    return {"cpu": time.process_time() - own, "server_cpu": cpu, "wall": wall, "answers": answers}


if __name__ == "__main__":
    json.dump(asyncio.run(run(json.load(sys.stdin))), sys.stdout)
