"""``kvpool generate`` as a process: text comes while it is made, Ctrl-C keeps it, what cannot end is refused."""

import os
import signal
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-m", "kvpool", "generate", "--model", "tiny", "--prompt", "Hello"]
LONG = ["--max-tokens", "8000"]  # minutes of work for the tiny model
PATIENCE = 120


@pytest.fixture
def start():
    """Start the command; end what is left of it."""
    running = []

    def begin(*arguments):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
        running.append(subprocess.Popen([*COMMAND, *arguments], **pipes))
        return running[-1]

    yield begin
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


def read_some(process, least):
    """Read at least so many bytes of the text, which is not complete."""
    found = b""
    while len(found) < least:
        piece = os.read(process.stdout.fileno(), 4096)
        assert piece, process.stderr.read().decode()
        found += piece
    return found


def test_text_comes_while_it_is_made_and_stays_after_an_interrupt(start):
    process = start(*LONG, "--stats")
    begun = read_some(process, 50)
    assert process.poll() is None, "nothing came before the end"
    process.send_signal(signal.SIGINT)
    rest, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    text = (begun + rest).decode()
    assert text.endswith("\n") and 50 <= len(text) < 8000
    assert "tokens in" in said.decode() and said.decode().endswith("kvpool generate: interrupted\n")
