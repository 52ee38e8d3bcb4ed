"""``kvpool serve`` as a process: connections that send or read nothing, signals at any time, what is left behind."""

import contextlib
import fcntl
import http.client
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from server_process import PATCHED, Server

from kvpool.serving import process as serving

ENDLESS = {"max_tokens": 6000, "logit_bias": {"256": -100}, "prompt": "go on", "stream": True}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
SET = """
import socket
from kvpool.serving import process, runner

def listen(host, port, listen=process.listen):
    found = listen(host, port)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return found

process.listen = listen
"""
LOADS = """
from kvpool.adapters.mlx_lm import tiny

def make():
    print("in make", file=sys.stderr, flush=True)
    time.sleep(600)

tiny.make = make
"""


def told(what):
    """Python that serves with other constants. The system keeps few bytes of an answer."""
    return SET + what


def streaming(server, body=ENDLESS):
    """A connection whose answer has begun. Nobody reads more of it than its first bytes."""
    data = json.dumps(body).encode()
    connection = server.opened()
    connection.sendall(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
    assert connection.recv(12) == b"HTTP/1.1 200"
    return connection


def read_to_the_end(connection):
    return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.long
@pytest.mark.parametrize("begun", [b"", b"G", HEAD, HEAD + b"Content-Length: 2\r\n"], ids=len)
def test_connection_without_a_request_is_closed(begun):
    with Server("--num-blocks", "40", patch=told("process.HEAD_SECONDS = 0.5")) as server:
        with server.opened() as connection:
            for byte in begun:
                connection.sendall(bytes([byte]))
            assert read_to_the_end(connection) == b""
        with contextlib.closing(server.connect()) as slow:  # uvicorn's own timer, after an answer
            slow.request("GET", "/health")
            assert slow.getresponse().read()
            assert slow.sock.recv(1) == b""


@pytest.mark.long
def test_request_longer_than_the_time_between_two_keeps_its_connection():
    with Server("--num-blocks", "400", patch=told("process.HEAD_SECONDS = 0.2")) as server:
        body = json.dumps(ENDLESS | {"max_tokens": 200, "stream": False}).encode()
        one = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
        with server.opened() as connection:
            connection.sendall(one + one + one)  # uvicorn reads the second after the first is answered
            begin, found = time.monotonic(), b""
            while found.count(b'"usage"') < 3:
                piece = connection.recv(65536)
                assert piece, f"closed after {found.count(b'usage')} answers, {time.monotonic() - begin:.1f} s"
                found += piece
            assert time.monotonic() - begin > 0.4, "too short to say anything"


@pytest.mark.long
def test_connection_beyond_all_places_closes_the_one_that_idles_longest():
    with Server("--num-blocks", "40", "--max-connections", "2", patch=told("process.SPARE = 3")) as server:
        with contextlib.ExitStack() as stack:
            ends = []
            for _ in range(12):
                connection = stack.enter_context(server.opened())
                with contextlib.suppress(ConnectionError):
                    connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n")
                ends.append(connection)
            time.sleep(0.5)
            for connection in ends:
                with contextlib.suppress(ConnectionError):
                    connection.sendall(b"\r\n")
            found = []
            for connection in ends:
                try:
                    found.append(read_to_the_end(connection)[9:12])
                except ConnectionError:
                    found.append(b"")
            assert found == [b""] * 7 + [b"200"] * 5
        assert server.get("/health")[0] == 200


def test_connection_beyond_all_places_is_closed_if_the_others_are_busy():
    patient = told("process.SPARE, process.HEAD_SECONDS = 0, 600")  # it is not closed because it sends nothing
    with (
        Server("--num-blocks", "3000", "--max-connections", "2", patch=patient) as server,
        streaming(server),
        streaming(server),
        server.opened() as newest,
    ):
        assert newest.recv(1) == b""


@pytest.fixture(scope="module")
def full():
    """A server that answers as many requests as it may, beside connections that idle; and how many it may answer."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Server("--num-blocks", "3000", "--max-connections", "2"))
        for _ in range(8):
            stack.enter_context(server.opened())
        yield server, [stack.enter_context(streaming(server)) for _ in range(2)]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
def test_request_beyond_the_limit_is_told_to_come_again_and_is_counted(full, path):
    server, name = full[0], f'kvpool_http_answers_total{{path="{path}",status="503"}}'
    before = server.metrics().get(name, 0)
    with contextlib.closing(server.connect()) as connection:
        for _ in range(2):
            connection.request("POST", path, b"{}", {"Content-Type": "application/json"})
            answer = connection.getresponse()
            body = json.loads(answer.read())
            assert (answer.status, answer.getheader("Retry-After")) == (503, "1")
            kind = "api_error" if path == "/v1/messages" else "server_error"
            assert body["error"]["type"] == kind and "2 requests" in body["error"]["message"]
            assert ("type" in body) == (path == "/v1/messages")
    assert server.metrics()[name] == before + 2


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/models"])
def test_server_that_answers_as_many_requests_as_it_may_says_how_it_is(full, path):
    assert full[0].get(path)[0] == 200


def test_requests_are_served_again_when_others_have_ended(full):
    server, streams = full
    for connection in streams:
        connection.close()
    server.idle_metrics()
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200


@pytest.mark.long
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs prlimit, which this system has not")
def test_server_short_of_files_answers_all_clients_in_few_words():
    with Server("--num-blocks", "400") as server, contextlib.ExitStack() as stack:
        files = len(os.listdir(f"/proc/{server.process.pid}/fd"))
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (files + 10, files + 10))
        held = [stack.enter_context(streaming(server)) for _ in range(3)]
        for _ in range(60):
            stack.enter_context(server.opened())
        for _ in range(5):
            assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
            assert server.get("/health")[0] == 200
        assert all(connection.recv(100) for connection in held), "streams go on"
        for _ in range(20):  # it stops while connections have to wait
            stack.enter_context(server.opened())
    errors = b"".join(server.errors)
    assert errors.count(b"Too many open files") == 1 and len(errors) < 2000, errors[-2000:]


def test_retry_to_accept_is_a_fault_unless_the_server_has_closed_its_socket():
    """asyncio retries a second after files were short."""
    told, sock = [], socket.socket()
    loop, handle = SimpleNamespace(default_exception_handler=told.append), serving._shortage(sock, set())
    error = ValueError("Invalid file descriptor: -1")
    retry = {"message": "Exception in callback BaseSelectorEventLoop._start_serving()", "exception": error}
    other = {"message": "Exception in callback told()", "exception": error}
    handle(loop, retry)
    sock.close()
    handle(loop, retry)
    handle(loop, other)
    assert told == [retry, other]


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "allowed", "raised"),
    [
        (256, 4096, 1024, 1024, 1152),
        (2048, 4096, 8000, 3968, 4096),
        (2048, 2048, 1024, 1024, None),
        (100, 100, 1024, 1, None),
        (2048, resource.RLIM_INFINITY, 8000, 8000, 8128),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 8000, 8000, None),
        (256, resource.RLIM_INFINITY, 1024, 256 - 2 * serving.SPARE, "refused"),
    ],
)
def test_connections_are_as_many_as_there_are_files(monkeypatch, soft, hard, wanted, allowed, raised):
    limits = [(soft, hard)]

    def limited(kind, both):
        if raised == "refused":
            raise ValueError("current limit exceeds maximum limit")
        limits.append(both)

    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", limited)
    assert serving.allowed_connections(wanted) == allowed
    assert limits[1:] == ([(raised, hard)] if type(raised) is int else [])


@pytest.mark.long
def test_more_connections_than_files_are_said_at_the_start():
    _, errors = Server("--num-blocks", "40", "--max-connections", "1000000000").stop()
    assert re.search(r"^kvpool serve: --max-connections 1000000000: the system allows files for \d+$", errors, re.M)


@pytest.mark.long
def test_stream_whose_client_falls_behind_ends():
    with Server("--num-blocks", "3000", patch=told("runner.UNREAD = 500")) as server:
        with streaming(server, ENDLESS | {"n": 16, "logprobs": 20}) as connection:
            while not server.metrics()["kvpool_requests_cancelled_total"]:
                time.sleep(0.02)
            assert b"reads too slowly" in read_to_the_end(connection)[-400:]
        assert server.idle_metrics()['kvpool_blocks{state="used"}'] == 0


@pytest.mark.long
def test_answer_that_is_not_read_does_not_keep_its_connection():
    with Server("--num-blocks", "3000", patch=told("process.READ_SECONDS = 0.3")) as server:
        body = ENDLESS | {"max_tokens": 400, "logprobs": 20, "stream": False}
        data = json.dumps(body).encode()
        with server.opened() as connection:
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


@pytest.mark.long
@pytest.mark.parametrize("half", [b"zz\r\n", b"5\r\nhello\r\nzz\r\n"], ids=len)
def test_garbage_after_an_answer_has_begun_closes_the_connection_quietly(half):
    with Server("--num-blocks", "400") as server:
        data = json.dumps(ENDLESS).encode()
        with server.opened() as connection:
            chunk = b"%x\r\n%s\r\n" % (len(data), data)
            connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk + half)
            with contextlib.suppress(ConnectionError):
                assert read_to_the_end(connection)[9:12] in (b"400", b"")
        with streaming(server) as connection:
            connection.sendall(b"\0\r\n\r\n" * 100)
        assert server.idle_metrics()['kvpool_blocks{state="used"}'] == 0


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_the_model_loads_ends_the_process_at_once(number):
    command = [sys.executable, "-c", PATCHED.format(LOADS), "serve", "--model", "tiny", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert "loading tiny" in process.stderr.readline() and "in make" in process.stderr.readline()
    process.send_signal(number)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and not out and "Traceback" not in errors, errors


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "grace"),
    [(signal.SIGTERM, "0"), (signal.SIGINT, "0"), (signal.SIGHUP, "0"), (signal.SIGTERM, "0.5")],
)
def test_requests_that_outlive_their_grace_get_an_error(number, grace):
    patch = told("import signal\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)")  # tests may run under nohup
    with Server("--num-blocks", "400", "--grace", grace, "--max-running", "1", patch=patch) as server:
        whole, body = [], ENDLESS | {"stream": False}
        waits = threading.Thread(target=lambda: whole.append(server.post("/v1/completions", body)))
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
        errors = server.stop()[1]
    assert f"the server stops: 2 requests have {grace} s to end\n" in errors
    assert re.search(rf"requests cut off after {grace} s of grace: 2 ids=req_\w+,req_\w+\n", errors), errors
    assert "a stream ends early: the server stops" in errors and "stopped, 0 blocks in use" in errors
    assert not re.search("status=503.* generated=", errors), "nobody counts the tokens of an answer that is whole"


@pytest.mark.long
def test_server_under_nohup_serves_when_its_terminal_closes():
    with Server(
        "--num-blocks", "40", patch=told("import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)")
    ) as server:
        server.process.send_signal(signal.SIGHUP)
        for _ in range(3):
            assert server.get("/ready")[0] == 200


def logging_to(write):
    """A server that logs to a pipe, and a function that waits for its address."""
    command = [sys.executable, "-m", "kvpool", "serve", "--model", "tiny", "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=write)
    os.close(write)
    return process, lambda: urlsplit(json.loads(process.stdout.readline())["url"])


@pytest.mark.long
@pytest.mark.parametrize("when", ["at once", "later"])
def test_server_whose_words_nobody_reads_serves_and_ends_as_others(when):
    read, write = os.pipe()
    process, address = logging_to(write)
    if when == "at once":
        os.close(read)
    port = address().port
    if when == "later":
        os.close(read)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"nonsense\r\n\r\n")  # uvicorn logs it
        assert connection.recv(12) == b"HTTP/1.1 400"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    process.stdout.close()


@pytest.mark.long
def test_server_whose_log_fills_its_pipe_serves_and_ends_as_others():
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    process, address = logging_to(write)
    connection = http.client.HTTPConnection(address().netloc, timeout=60)
    for _ in range(200):  # some 50 bytes each
        connection.request("GET", "/nowhere")
        response = connection.getresponse()
        assert response.read() and response.status == 404
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert len(os.read(read, 10_000)) >= 4096 - 200
    os.close(read)
    process.stdout.close()


@pytest.mark.long
def test_body_that_never_comes_ends_with_the_grace():
    with Server("--num-blocks", "40", "--grace", "0") as server:
        with server.opened() as connection:
            connection.sendall(HEAD + b"Content-Length: 2\r\n\r\n")
            for _ in range(3):
                server.get("/health")
            server.process.send_signal(signal.SIGTERM)
            assert connection.recv(12) == b"HTTP/1.1 503"
        server.process.wait(60)


@pytest.mark.long
def test_second_signal_ends_the_process_at_once():
    server = Server("--num-blocks", "400", "--grace", "600")
    with streaming(server):
        server.process.send_signal(signal.SIGINT)
        while server.get("/ready")[0] != 503:
            time.sleep(0.02)
        time.sleep(0.7)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 130
    server.stop()
