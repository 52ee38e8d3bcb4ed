"""``kvpool serve`` as a process of its own, and clients for it, by the standard library."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from urllib.parse import urlsplit

JSON = {"Content-Type": "application/json"}
PATCHED = """import os, sys, time
from kvpool.cli import main
{}
sys.exit(main(sys.argv[1:]))"""


class Server:
    """A process that serves the tiny model; `facts` is what it said when it was ready.

    `patch` is Python that it runs first, `variables` are its environment. With a working `folder` it is a session.

    At the end of its ``with`` block it must end well, with all blocks free and no traceback, unless the test has
    stopped it.
    """

    def __init__(self, *arguments, **how):
        self.start(*arguments, **how)
        line = self.process.stdout.readline()
        assert line, self.stop()
        self.facts = json.loads(line)
        self.address = urlsplit(self.facts["url"]).netloc

    def start(self, *arguments, model="tiny", patch=None, folder=None, **variables):
        """Start the process, and read what it writes to stderr."""
        program = ("-m", "kvpool") if patch is None else ("-c", PATCHED.format(patch))
        command = [sys.executable, *program, "serve", "--model", model, "--port", "0", "--json", *arguments]
        usual = {"PYTHONPATH": os.getcwd(), "HF_HUB_OFFLINE": "1", "MLX_DEFAULT_DEVICE": "cpu"}
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": folder, "start_new_session": bool(folder)}
        self.process = subprocess.Popen(command, **how, env=os.environ | usual | variables)
        self.errors = []
        self._reader = threading.Thread(target=lambda: self.errors.extend(self.process.stderr), daemon=True)
        self._reader.start()

    def __enter__(self):
        return self

    def __exit__(self, error, *_):
        if self.process.stdout.closed:
            return
        status, errors = self.stop()
        is_good = status == 0 and "stopped, 0 blocks in use" in errors and "Traceback" not in errors
        assert error or is_good, (status, errors)

    def opened(self):
        """A connection that holds few bytes nobody has read."""
        host, _, port = self.address.partition(":")
        connection = socket.socket()
        connection.settimeout(300)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        return connection

    def connect(self):
        return http.client.HTTPConnection(self.address, timeout=300)

    def ask(self, method, path, body=None, **headers):
        """Status, headers and text of the answer."""
        with contextlib.closing(self.connect()) as connection:
            body = body if body is None or isinstance(body, bytes) else json.dumps(body)
            connection.request(method, path, body, (JSON if method == "POST" else {}) | headers)
            response = connection.getresponse()
            return response.status, response.headers, response.read().decode()

    def get(self, path, **headers):
        status, told, text = self.ask("GET", path, **headers)
        return status, told["Content-Type"], text

    def post(self, path, body, **headers):
        """Status and answer, read as JSON."""
        status, text = self.raw(path, body, **headers)
        return status, json.loads(text)

    def raw(self, path, body, **headers):
        """Status and text of the answer."""
        status, _, text = self.ask("POST", path, body, **headers)
        return status, text

    def metrics(self, **headers):
        """{"name{labels}": value} of GET /metrics."""
        lines = self.get("/metrics", **headers)[2].splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    def idle_metrics(self, **headers):
        """The same, once no request is left in the engine. Asks at leisure: questions take time from the engine."""
        pause = threading.Event()
        for _ in range(2000):
            found = self.metrics(**headers)
            assert self.get("/health")[0] == 200, b"".join(self.errors).decode()
            if not any(value for name, value in found.items() if name.startswith("kvpool_requests{")):
                return found
            pause.wait(0.1)
        raise AssertionError(f"requests are left: {found}")

    def stop(self):
        """End it; returns (status, what it wrote to stderr)."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self._reader.join(10)
        self.process.stdout.close()
        self.process.stderr.close()
        return status, b"".join(self.errors).decode()
