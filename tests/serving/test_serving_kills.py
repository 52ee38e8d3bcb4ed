"""``kvpool serve`` ended under load, by SIGKILL and by SIGTERM: the next start serves, and nothing is left behind."""

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from server_process import Server

FEW, MANY = 10, 200  # servers that are ended, half of them by each signal
SEED = int(os.environ.get("KVPOOL_FUZZ_SEED", 7))
CLIENTS = 4
HARD = -signal.SIGKILL
BODY = {"prompt": "The block table maps", "max_tokens": 60, "temperature": 0, "logit_bias": {"256": -100}}
PLANTED = {
    "a folder stays": "import tempfile\ntempfile.mkdtemp()",
    "a child stays": "import subprocess\nsubprocess.Popen(['sleep', '20'])",
    "another status": "import kvpool.cli.serve\nkvpool.cli.serve.leave = lambda status: os._exit(3)",
}


class Killed(Server):
    """A server whose home, temporary folder and working folder is `folder`. MLX keeps compiled kernels there."""

    def __init__(self, port, folder, planted, grace):
        variables = dict.fromkeys(("TMPDIR", "HOME", "XDG_CACHE_HOME"), folder)
        arguments = ["--port", str(port), "--num-blocks", "300", "--grace", str(grace)]
        self.address, self._folder = f"127.0.0.1:{port}", folder
        self.start(*arguments, patch=planted, folder=folder, **variables)

    def is_ready(self):
        """Wait until it serves. False: it ended before."""
        return bool(self.process.stdout.readline())

    def said(self, stream):
        """The text of an answer. None: there is none, because the server ends."""
        try:
            status, text = self.raw("/v1/completions", BODY | {"stream": stream})
        except (OSError, http.client.HTTPException):
            return None
        if status != 200:
            return None if status == 503 else f"status {status}: {text}"
        if not stream:
            return json.loads(text)["choices"][0]["text"]
        pieces = text.split("\n\n")
        if pieces[-2:] != ["data: [DONE]", ""]:
            return None
        return "".join(json.loads(piece[6:])["choices"][0]["text"] for piece in pieces[:-2])

    def end(self):
        """Exit status and stderr, once it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(120)
        self._reader.join(10)
        if self.process.returncode is None or self._reader.is_alive():
            os.killpg(self.process.pid, signal.SIGKILL)
            return 99, "it does not end, or a child of it holds its stderr"
        return self.process.returncode, b"".join(self.errors).decode()

    def left(self):
        """What it left behind: processes and files."""
        found = [path.name for path in Path(self._folder).iterdir() if path.name != "mlx"]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
            found.append("a process")
        return found


def one_round(port, folder, number, due, planted=""):
    """Start a server, put it under load, end it. Return the right text, and what is wrong."""
    draw, wrong = random.Random(f"{SEED} {number}"), []
    ended_by = (signal.SIGKILL, signal.SIGTERM)[number % 2]
    grace, early = draw.choice((0, 5)), draw.random() < 0.2 and due is not None
    server = Killed(port, folder, planted, grace)
    if early:
        time.sleep(draw.random() * 2)
    elif not server.is_ready():
        return due or "", [f"round {number}: the server does not start: {server.end()}"]
    else:
        due, wrong = under_load(server, draw, due)
    server.process.send_signal(ended_by)
    status, errors = server.end()
    right = {HARD} if ended_by == signal.SIGKILL else {0, -signal.SIGTERM} if early else {0}
    if status not in right or "Traceback" in errors:
        wrong.append(f"exit status {status}: {errors[-500:]}")
    if 0 in right and not early and "stopped, 0 blocks in use" not in errors:
        wrong.append(f"the last words are {errors[-200:]}")
    wrong += [f"left behind: {one}" for one in server.left()]
    return due or "", [f"round {number}, {ended_by.name}: {one}" for one in wrong]


def under_load(server, draw, due):
    """Let clients ask until some time is over. They go on when this returns."""
    due, wrong = due or server.said(False) or "", []

    def client(stream):
        while (text := server.said(stream)) is not None:
            if text != due:
                wrong.append(f"{text!r} is not {due!r}")
                return

    for number in range(CLIENTS):
        threading.Thread(target=client, args=(number % 2 == 0,), daemon=True).start()
    time.sleep(draw.random() * 0.5)
    return due, wrong


def kill(rounds, folder, planted=""):
    """End so many servers, which have one port and one folder, one after the other. Return what is wrong."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = int(found.getsockname()[1])
    due, wrong = None, []
    for number in range(rounds):
        due, found = one_round(port, folder, number, due, PLANTED.get(planted, ""))
        wrong += found
    return wrong


@pytest.mark.parametrize("rounds", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_server_that_was_killed_leaves_nothing_and_serves_again(rounds, tmp_path):
    print(f"seed {SEED}")
    assert kill(rounds, str(tmp_path)) == []


@pytest.mark.parametrize("fault", PLANTED)
def test_server_that_leaves_something_is_convicted(fault, tmp_path):
    assert kill(2, str(tmp_path), fault)
