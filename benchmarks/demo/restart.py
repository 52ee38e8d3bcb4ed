"""The part with a server that is killed and started again finds its conversation in a store."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from benchmarks.demo.settings import AllSettings
from kvpool.cli.console import NotRun
from kvpool.cli.demo.report import Claim, Outcome, Part
from kvpool.errors import install_command

TURN = "What was computed once need not be computed again, whoever asks. "
TURNS, ANSWER = 60, 16  # sentences of the prompt, tokens of the answer
BLOCK_SIZE = 16  # of kvpool serve
SECONDS = 60.0  # for whatever one waits for


@contextlib.contextmanager
def server(folder: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``kvpool serve`` in a process of its own, and its address. It is killed in the end."""
    command = [sys.executable, "-m", "kvpool", "serve", "--model", "tiny", "--port", "0", "--json", "--store", folder]
    process = subprocess.Popen([*command, "--num-blocks", "1000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})  # fmt: skip
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"kvpool serve ended: {process.stderr.read()[-200:]}")
        yield process, urlsplit(json.loads(line)["url"]).netloc
    finally:
        process.kill()
        process.communicate()


def ask(address: str) -> tuple[str, float, int]:
    """Return the answer to the conversation, the seconds until its first token, and the cached tokens of the prompt."""
    body = {"prompt": TURN * TURNS, "max_tokens": ANSWER, "temperature": 0, "stream": True, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True}
    with contextlib.closing(http.client.HTTPConnection(address, timeout=SECONDS)) as connection:
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        text, first, cached = "", 0.0, 0
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - began
                event = json.loads(line[6:])
                text += event["choices"][0]["text"] if event["choices"] else ""
                if event.get("usage"):
                    cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        return text, first, cached


def wait_for_the_disk(address: str, blocks: int) -> None:
    """Wait until the disk has so many blocks."""
    name, end = 'kvpool_store_tier_blocks{tier="disk"} ', time.monotonic() + SECONDS
    while time.monotonic() < end:
        with contextlib.closing(http.client.HTTPConnection(address, timeout=SECONDS)) as connection:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        if next(float(line.removeprefix(name)) for line in lines if line.startswith(name)) >= blocks:
            return
        time.sleep(0.05)


def run_restart(settings: AllSettings, say: Callable[[str], None]) -> Outcome:
    """Ask a server, kill it, start it again and ask the same."""
    if any(importlib.util.find_spec(name) is None for name in ("mlx", "mlx_lm", "uvicorn")):
        raise NotRun(f"needs mlx-lm and a web server: {install_command('serve')}")
    answers: list[tuple[str, float, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, what in enumerate(("first", "second")):
            say(f"kvpool serve --store, {what} start")
            with server(os.path.join(folder, "store")) as (_, address):
                answers.append(ask(address))
                if number == 0:
                    wait_for_the_disk(address, len(TURN * TURNS) // BLOCK_SIZE)
    (text, computed, _), (again, loaded, cached) = answers
    tokens = len(TURN * TURNS)  # the tiny model has one for each byte
    claims = {
        "same_answer": Claim(
            again == text and bool(text), f"{len(text)} characters, {'equal' if again == text else 'different'}"
        ),
        "found_on_disk": Claim(cached >= 0.9 * tokens, f"{cached} of {tokens} tokens of the prompt"),
        "sooner": Claim(
            loaded < computed,
            f"first token after {1000 * loaded:.0f} ms, computed {1000 * computed:.0f} ms: {computed / loaded:.1f}x",
        ),
    }
    numbers: dict[str, Any] = {"tokens": tokens, "cached": cached, "computed_s": computed, "loaded_s": loaded}
    return Outcome(claims, numbers, ("kvpool serve --store DIR was killed (SIGKILL) and started again",))


PART = Part(
    "restart",
    "a server that is killed and started again",
    {
        "same_answer": "the same answer after the restart",
        "found_on_disk": "the conversation is found on disk",
        "sooner": "its first token comes sooner",
    },
    run_restart,
)
