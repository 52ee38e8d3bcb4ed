"""The servers as processes, each started afresh for a run, and the process of the clients."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.http.judge import Result, result
from benchmarks.http.workload import Chat
from kvpool.cli.console import CommandError

PATH = "/v1/chat/completions"
LOAD_SECONDS = 120.0
LIMIT_SECONDS = 240.0
RUNNING, CHUNK = 64, 32  # requests at a time; tokens of prompts in a step
_STOCK = ("-m", "mlx_lm.server", "--port", "{port}", "--log-level", "ERROR", "--model", "{model}")
_KVPOOL = ("-m", "kvpool", "serve", "--port", "{port}", "--model", "{model}")
SERVERS: dict[str, tuple[str, ...]] = {
    "kvpool": (*_KVPOOL, "--max-running", f"{RUNNING}", "--chunk", f"{CHUNK}"),
    "kvpool, defaults": _KVPOOL,
    "stock, tuned": (
        *(*_STOCK, "--decode-concurrency", f"{RUNNING}", "--prompt-cache-size", "256"),
        *("--prompt-concurrency", "1", "--prefill-step-size", "256"),
    ),
    "stock": _STOCK,
}
"""Arguments of the interpreter. "stock" is mlx-lm's server as it ships, and "stock, tuned" the fastest of twelve
settings that we tried with the default workload and the tiny model.
"""


@dataclass(frozen=True)
class Server:
    """A process that serves.

    Attributes
    ----------
    pid, port : int
    """

    pid: int
    port: int

    def get(self, path: str) -> str:
        """Return the text of an answer."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
            return str(answer.read().decode())

    def kilobytes(self, name: str) -> int:
        """Return a field of the process's status, such as VmHWM."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


@contextmanager
def started(arguments: Sequence[str], model: str) -> Iterator[Server]:
    """Yield a server that answers ``/health``. Raise `CommandError` if it does not."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    filled = [argument.format(port=port, model=model) for argument in arguments]
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "MLX_DEFAULT_DEVICE": "cpu"}
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen([sys.executable, *filled], stdout=said, stderr=said, env=offline)
        server = Server(process.pid, port)
        try:
            end = time.monotonic() + LOAD_SECONDS
            while not _is_ready(server):
                if process.poll() is not None or time.monotonic() > end:
                    said.seek(0)
                    last = said.read().decode(errors="replace").strip().rpartition("\n")[2]
                    raise CommandError(f"{' '.join(filled[:3])}: did not start: {last[:200]}")
                time.sleep(0.1)
            yield server
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def _is_ready(server: Server) -> bool:
    with suppress(OSError):
        server.get("/health")
        return True
    return False


def send(server: Server, chats: Sequence[Chat], limit: float = LIMIT_SECONDS) -> tuple[dict[str, Any], dict[str, Any]]:
    """Send chats from the process of the clients. Return what was asked and what came."""
    asked = {"address": ["127.0.0.1", server.port], "pid": server.pid, "path": PATH, "limit": limit}
    asked["requests"] = [chat.as_json() for chat in chats]
    clients = [sys.executable, "-m", "benchmarks.http.clients"]
    done = subprocess.run(clients, input=json.dumps(asked), capture_output=True, text=True, check=True)
    return asked, json.loads(done.stdout)


def measure(arguments: Sequence[str], model: str, chats: Sequence[Chat], warm_up: Sequence[Chat]) -> Result:
    """Return a run of a fresh server."""
    with started(arguments, model) as server:
        send(server, warm_up)
        before = server.kilobytes("VmRSS")
        asked, got = send(server, chats)
        grown = 1024 * (server.kilobytes("VmHWM") - before)
        return replace(result(asked, got), nbytes=grown)
