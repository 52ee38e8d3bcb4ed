"""``kvpool serve --store``: what one process computed, the next one finds."""

import json
import signal
import subprocess
import sys
import time

import pytest
from key_server import KINDS, KeyServer
from server_process import Server

from benchmarks import tiny_families

QUESTION = "All of this is said again and again, until it fills more than one block. " * 6
OPTIONS = ("--num-blocks", "200", "--max-tokens", "24")
CHAT = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24, "seed": 3, "temperature": 0.7}


def ask(server):
    """The text of the answer, and how many tokens of the prompt were cached."""
    status, answer = server.post("/v1/chat/completions", CHAT)
    assert status == 200, answer
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def of_tier(found, name):
    """The counter of the one tier that there is."""
    return next(value for key, value in found.items() if key.startswith(f"kvpool_store_tier_{name}{{"))


def saved(server):
    """Wait until the store has written what the server gave it."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        found = server.metrics()
        written, waiting = of_tier(found, "stored_nbytes_total"), of_tier(found, "queued_nbytes")
        if found["kvpool_store_saves_total"] >= 1 and written and not waiting:
            return
        time.sleep(0.05)
    raise AssertionError(f"nothing was saved: {found}")


@pytest.fixture
def place(request, tmp_path):
    """Where a store is: a directory, or the address of a key server."""
    if request.param == "a directory":
        yield str(tmp_path / "store")
        return
    keys = KeyServer(request.param, str(tmp_path))
    yield keys.url
    keys.stop()


@pytest.mark.parametrize(
    ("place", "ending"),
    [
        (KINDS[0], signal.SIGKILL),
        pytest.param(KINDS[1], signal.SIGKILL, marks=pytest.mark.long),
        *(pytest.param("a directory", how, marks=pytest.mark.long) for how in (signal.SIGKILL, signal.SIGTERM)),
    ],
    indirect=["place"],
)
def test_conversation_after_a_restart_comes_from_the_store(place, ending):
    with Server(*OPTIONS, "--store", place) as first:
        text, cached = ask(first)
        assert cached == 0
        saved(first)
        first.process.send_signal(ending)
        first.process.wait(60)
        first.stop()
    with Server(*OPTIONS, "--store", place) as second:
        again, cached = ask(second)
        found = second.metrics()
    assert again == text
    assert cached >= 448, "most of the prompt was computed again"
    assert found["kvpool_store_loaded_tokens_total"] == cached
    assert of_tier(found, "hits_total") >= cached // 16


@pytest.mark.long
def test_store_of_another_model_is_refused_at_the_start(tmp_path):
    place = str(tmp_path / "store")
    with Server(*OPTIONS, "--store", place):
        pass
    tiny_families.save(tmp_path / "model", "qwen3")
    command = [sys.executable, "-m", "kvpool", "serve", "--model", str(tmp_path / "model"), "--port", "0"]
    ended = subprocess.run([*command, *OPTIONS, "--store", place], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and f"--store {place}: " in ended.stderr, ended.stderr


@pytest.mark.long
def test_password_of_the_store_is_told_to_nobody():
    with Server(*OPTIONS, "--store", "redis://user:SECRET@127.0.0.1:1/0?protocol=3") as server:
        ask(server)
        told = json.dumps(server.facts) + str(server.metrics())
        assert server.facts["store"] == "redis://127.0.0.1:1/0"
        told += server.stop()[1]
    assert "SECRET" not in told and "user" not in told
