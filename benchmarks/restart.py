"""A server that is killed and started again finds its conversation on disk.

Both times it is ``kvpool serve --store`` with the tiny model.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import sys
import tempfile
import time
from collections.abc import Iterator

from benchmarks.command import main
from benchmarks.gate import Gate
from benchmarks.http import Server, started
from kvpool.cli.options import TINY

TURN = "What was computed once need not be computed again, whoever asks. "
TURNS, ANSWER = 60, 16  # sentences of the prompt, tokens of the answer
TOKENS = len(TURN * TURNS)  # the tiny model has one for each byte
BLOCK_SIZE = 16  # of kvpool serve
SECONDS = 60.0  # for whatever one waits for
ARGUMENTS = ("-m", "kvpool", "serve", "--model", "{model}", "--port", "{port}", "--num-blocks", "1000", "--store")


def ask(server: Server) -> tuple[str, float, int]:
    """Return the answer to the conversation, the seconds until its first token, and the cached tokens of the prompt."""
    body = {"prompt": TURN * TURNS, "max_tokens": ANSWER, "temperature": 0, "stream": True, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=SECONDS)) as connection:
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


def wait_for_the_disk(server: Server) -> None:
    """Wait until the disk has the blocks of the prompt."""
    name, end = 'kvpool_store_tier_blocks{tier="disk"} ', time.monotonic() + SECONDS
    while time.monotonic() < end:
        lines = server.get("/metrics").splitlines()
        if next(float(line.removeprefix(name)) for line in lines if line.startswith(name)) >= TOKENS // BLOCK_SIZE:
            return
        time.sleep(0.05)


def gates(args: argparse.Namespace) -> Iterator[Gate]:
    """Ask a server, kill it, start it again and ask the same."""
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            with started((*ARGUMENTS, f"{folder}/store"), TINY) as server:
                answers.append(ask(server))
                wait_for_the_disk(server)
    (text, computed, _), (again, loaded, cached) = answers
    yield Gate("the same answer", float(bool(text) and again == text), 1, note=f"{len(text)} characters")
    yield Gate("found on disk", 100 * cached / TOKENS, 90, note=f"{cached} of {TOKENS} tokens of the prompt", unit="%")
    note = f"first token after {1000 * loaded:.0f} ms, computed {1000 * computed:.0f} ms"
    yield Gate("sooner", computed / loaded, 1, note=note, unit="times")


if __name__ == "__main__":
    sys.exit(main())
