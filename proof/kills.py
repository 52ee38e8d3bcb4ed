"""``kvpool serve`` ended under load, by SIGKILL and by SIGTERM: the next start serves, and nothing is left behind.

The rounds are counted in ``build/kills-SEED.json``: a run that was broken off goes on where it was.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from proof.builds import ROOT
from proof.figure import FULL, Budget, Figure
from proof.hostile import missing as missing

NAME = "kills"
TARGET = "500 SIGKILLs and 500 SIGTERMs under load: the next start serves, nothing is left behind"
COMMAND = "python -m proof kills"
ROUNDS = 500  # of each signal
CLIENTS = 4
HARD = -signal.SIGKILL
BODY = {"prompt": "The block table maps", "max_tokens": 60, "temperature": 0, "logit_bias": {"256": -100}}
PROGRAM = "import os, subprocess, sys, tempfile, kvpool.cli.serve\n{planted}\nsys.exit(kvpool.cli.main(sys.argv[1:]))"
PLANTED = {
    "a folder stays": "tempfile.mkdtemp()",
    "a child stays": "subprocess.Popen(['sleep', '20'])",
    "another status": "kvpool.cli.serve.leave = lambda status: os._exit(3)",
}


class Killed:
    """A server whose home, temporary folder and working folder is `folder`. MLX keeps compiled kernels there."""

    def __init__(self, port: int, folder: str, planted: str, grace: float) -> None:
        names = ("TMPDIR", "HOME", "XDG_CACHE_HOME")
        environment = os.environ | dict.fromkeys(names, folder) | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        arguments = ["--model", "tiny", "--port", str(port), "--json", "--num-blocks", "300", "--grace", str(grace)]
        self.port, self._folder = port, folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(planted=planted), "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )

    def is_ready(self) -> bool:
        """Wait until it serves. False: it ended before."""
        assert self.process.stdout is not None
        return bool(self.process.stdout.readline())

    def ask(self, stream: bool) -> str | None:
        """The text of an answer. None: there is none, because the server ends."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            try:
                body = json.dumps(BODY | {"stream": stream})
                connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                text = response.read().decode()
            except (OSError, http.client.HTTPException):
                return None
        if response.status != 200:
            return None if response.status == 503 else f"status {response.status}: {text}"
        if not stream:
            return str(json.loads(text)["choices"][0]["text"])
        pieces = text.split("\n\n")
        if pieces[-2:] != ["data: [DONE]", ""]:
            return None
        return "".join(json.loads(piece[6:])["choices"][0]["text"] for piece in pieces[:-2])

    def end(self) -> tuple[int, str]:
        """Exit status and stderr, once it has ended."""
        try:
            return self.process.wait(120), self.process.communicate(timeout=10)[1]
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            return 99, "it does not end, or a child of it holds its stderr"

    def left(self) -> list[str]:
        """What it left behind: processes and files."""
        found = [path.name for path in Path(self._folder).iterdir() if path.name != "mlx"]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
            found.append("a process")
        return found


def one_round(
    port: int, folder: str, seed: str, number: signal.Signals, due: str | None, planted: str = ""
) -> tuple[str, list[str]]:
    """Start a server, put it under load, end it. Return the right text, and what is wrong."""
    draw, wrong = random.Random(seed), []
    grace, early = draw.choice((0, 5)), draw.random() < 0.2 and due is not None
    server = Killed(port, folder, planted, grace)
    if early:
        time.sleep(draw.random() * 2)
    elif not server.is_ready():
        return due or "", [f"{seed}: the server does not start: {server.end()}"]
    else:
        due, wrong = _under_load(server, draw, due)
    server.process.send_signal(number)
    status, errors = server.end()
    right = {HARD} if number == signal.SIGKILL else {0, -signal.SIGTERM} if early else {0}
    if status not in right or "Traceback" in errors:
        wrong.append(f"exit status {status}: {errors[-500:]}")
    if 0 in right and not early and "stopped, 0 blocks in use" not in errors:
        wrong.append(f"the last words are {errors[-200:]}")
    wrong += [f"left behind: {one}" for one in server.left()]
    return due or "", [f"{number.name}, {seed}: {one}" for one in wrong]


def _under_load(server: Killed, draw: random.Random, due: str | None) -> tuple[str, list[str]]:
    """Let clients ask until some time is over. They go on when this returns."""
    due, wrong = due or server.ask(False) or "", []

    def client(stream: bool) -> None:
        while (text := server.ask(stream)) is not None:
            if text != due:
                wrong.append(f"{text!r} is not {due!r}")
                return

    for number in range(CLIENTS):
        threading.Thread(target=client, args=(number % 2 == 0,), daemon=True).start()
    time.sleep(draw.random() * 0.5)
    return due, wrong


def free_port() -> int:
    """A port that nobody has now. All servers get it, one after the other."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def kill(rounds: int, seed: int, planted: str = "", kept: Path | None = None) -> dict[str, Any]:
    """End servers, so many by each signal. With `kept`, go on where that file says, and keep it up to date."""
    state: dict[str, Any] = {"rounds": 0, "wrong": []}
    if kept is not None and kept.exists():
        state = json.loads(kept.read_text())
    port, due = free_port(), None
    with tempfile.TemporaryDirectory(prefix="kvpool-killed-") as folder:
        while state["rounds"] < 2 * rounds and len(state["wrong"]) < 20:
            number = (signal.SIGKILL, signal.SIGTERM)[state["rounds"] % 2]
            due, wrong = one_round(port, folder, f"{seed} {state['rounds']}", number, due, PLANTED.get(planted, ""))
            state = {"rounds": state["rounds"] + 1, "wrong": state["wrong"] + wrong}
            if kept is not None:
                kept.write_text(json.dumps(state))
                print(f"  seed {seed}, {state['rounds']} of {2 * rounds}, {len(state['wrong'])} wrong", file=sys.stderr)
    return state


def measure(budget: Budget) -> Figure:
    """End one server after the other."""
    start, rounds = time.monotonic(), max(3, budget.of(ROUNDS))
    kept = ROOT / "build" / f"kills-{budget.seed}.json" if budget == FULL or rounds == ROUNDS else None
    found = kill(rounds, budget.seed, kept=kept)
    measured = f"{found['rounds']} ended, half by each, seed {budget.seed}: {len(found['wrong'])} findings"
    holds = not found["wrong"] and found["rounds"] == 2 * rounds
    return Figure(NAME, TARGET, measured, holds, COMMAND, time.monotonic() - start, "; ".join(found["wrong"][:5]))


def planted(budget: Budget) -> list[Figure]:
    """Servers that leave something behind, or end with another status."""
    rows = []
    for name in PLANTED:
        found = kill(1, budget.seed, name)
        rows.append(Figure(NAME, TARGET, f"{name}: {found['wrong'][:1]}", not found["wrong"], COMMAND, 0.0))
    return rows
