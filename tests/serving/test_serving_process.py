"""``kvpool serve`` as a process: connections that send or read nothing, signals at any time, what is left behind."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from server_process import Server

ENDLESS = {"max_tokens": 6000, "logit_bias": {"256": -100}, "prompt": "go on", "stream": True}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
SET = """
import socket, sys
from kvpool.cli import main
from kvpool.serving import process, runner

def listen(host, port, listen=process.listen):
    found = listen(host, port)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return found

process.listen = listen
{what}
sys.exit(main(sys.argv[1:]))
"""
LOADS = """
import sys, time
from kvpool.adapters.mlx_lm import tiny
from kvpool.cli import main

def make(arch=None):
    print("in make", file=sys.stderr, flush=True)
    time.sleep(600)

tiny.make = make
sys.exit(main(sys.argv[1:]))
"""


def told(what):
    """Arguments of Python that serve with other constants. The system keeps few bytes of an answer."""
    return "-c", SET.format(what=what)


def opened(server):
    """A connection that holds few bytes nobody has read."""
    host, _, port = server.address.partition(":")
    connection = socket.socket()
    connection.settimeout(60)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    return connection


def streaming(server, body=ENDLESS):
    """A connection whose answer has begun. Nobody reads more of it than its first bytes."""
    data = json.dumps(body).encode()
    connection = opened(server)
    connection.sendall(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
    assert connection.recv(12) == b"HTTP/1.1 200"
    return connection


def read_to_the_end(connection):
    return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.long
def test_request_longer_than_the_time_between_two_keeps_its_connection():
    server = Server("--num-blocks", "400", program=told("process.HEAD_SECONDS = 0.2"))
    try:
        body = json.dumps(ENDLESS | {"max_tokens": 200, "stream": False}).encode()
        one = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
        with opened(server) as connection:
            connection.sendall(one + one + one)  # uvicorn reads the second after the first is answered
            begin, found = time.monotonic(), b""
            while found.count(b'"usage"') < 3:
                piece = connection.recv(65536)
                assert piece, f"closed after {found.count(b'usage')} answers, {time.monotonic() - begin:.1f} s"
                found += piece
            assert time.monotonic() - begin > 0.4, "too short to say anything"
    finally:
        assert server.stop()[0] == 0


@pytest.mark.long
def test_more_connections_than_have_an_answer_are_closed():
    server = Server("--num-blocks", "40", "--max-connections", "2", program=told("process.SPARE = 3"))
    try:
        with contextlib.ExitStack() as stack:
            ends = []
            for _ in range(12):
                connection = stack.enter_context(opened(server))
                with contextlib.suppress(ConnectionError):
                    connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n")
                ends.append(connection)
            time.sleep(0.5)
            for connection in ends:
                with contextlib.suppress(ConnectionError):
                    connection.sendall(b"\r\n")
            found = []
            for connection in reversed(ends):
                with contextlib.suppress(ConnectionError):
                    found.append(read_to_the_end(connection)[9:12])
            assert found.count(b"200") + found.count(b"503") == 6, found
            assert found.count(b"503") >= 3
        assert server.get("/health")[0] == 200
    finally:
        assert server.stop()[0] == 0


@pytest.mark.long
def test_answer_that_is_not_read_does_not_keep_its_connection():
    server = Server("--num-blocks", "3000", program=told("process.READ_SECONDS = 0.3"))
    try:
        body = ENDLESS | {"max_tokens": 400, "logprobs": 20, "stream": False}
        data = json.dumps(body).encode()
        with opened(server) as connection:
            connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data)
            while not server.metrics().get('kvpool_http_answers_total{path="/v1/completions",status="200"}'):
                time.sleep(0.05)
            head = connection.recv(1000)
            length = int(re.findall(rb"content-length: (\d+)", head)[0])
            time.sleep(2)
            found = len(head)
            with contextlib.suppress(ConnectionError):
                while piece := connection.recv(65536):
                    found += len(piece)
            assert length > 100_000 and found < length, "all of it came"
    finally:
        assert server.stop()[0] == 0


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_the_model_loads_ends_the_process_at_once(number):
    command = [sys.executable, "-c", LOADS, "serve", "--model", "tiny", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert "loading tiny" in process.stderr.readline() and "in make" in process.stderr.readline()
    process.send_signal(number)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and not out and "Traceback" not in errors, errors


@pytest.mark.long
@pytest.mark.parametrize(("number", "grace"), [(signal.SIGTERM, "0"), (signal.SIGINT, "0"), (signal.SIGTERM, "0.5")])
def test_requests_that_outlive_their_grace_get_an_error(number, grace):
    server = Server("--num-blocks", "400", "--grace", grace, "--max-running", "1")
    whole = []
    waits = threading.Thread(target=lambda: whole.append(server.post("/v1/completions", ENDLESS | {"stream": False})))
    with streaming(server) as connection:
        waits.start()
        while not server.metrics()['kvpool_requests{state="waiting"}']:
            time.sleep(0.02)
        server.process.send_signal(number)
        last = json.loads(re.findall(rb"data: (.*)\n\n", read_to_the_end(connection))[-1])
    waits.join()
    assert last["error"] == {"message": "the server stops", "type": "server_error", "param": None, "code": None}
    assert whole[0][0] == 503 and whole[0][1]["error"]["message"] == "the server stops"
    server.process.wait(60)
    status, errors = server.stop()
    assert status == 0 and "stopped, 0 blocks in use" in errors and "Traceback" not in errors, errors


@pytest.mark.long
def test_body_that_never_comes_ends_with_the_grace():
    server = Server("--num-blocks", "40", "--grace", "0")
    with opened(server) as connection:
        connection.sendall(HEAD + b"Content-Length: 2\r\n\r\n")
        for _ in range(3):
            server.get("/health")
        server.process.send_signal(signal.SIGTERM)
        assert connection.recv(12) == b"HTTP/1.1 503"
    server.process.wait(60)
    status, errors = server.stop()
    assert status == 0 and "Traceback" not in errors, errors
