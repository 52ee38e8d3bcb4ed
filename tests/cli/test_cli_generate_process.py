"""``kvpool generate`` as a process: text comes while it is made, and Ctrl-C keeps it."""

import os
import signal
import subprocess
import sys

COMMAND = [sys.executable, "-m", "kvpool", "generate", "--model", "tiny", "--prompt", "Hello", "--stats"]
LONG = ["--max-tokens", "8000"]  # minutes of work for the tiny model


def test_text_comes_while_it_is_made_and_stays_after_an_interrupt():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen([*COMMAND, *LONG], **pipes) as process:
        try:
            text = b""
            while len(text) < 50:
                text += (piece := os.read(process.stdout.fileno(), 4096))
                assert piece, process.stderr.read().decode()
            assert process.poll() is None, "nothing came before the end"
            process.send_signal(signal.SIGINT)
            rest, said = process.communicate(timeout=120)
        finally:
            process.kill()
    text = (text + rest).decode()
    assert process.returncode == 130 and text.endswith("\n") and len(text) < 8000
    assert "tokens in" in said.decode() and said.decode().endswith("kvpool generate: interrupted\n")
