"""``kvpool serve``: who may send requests, how many at a time, and what happens when a client hangs up."""

import contextlib
import json
import socket
import threading
import time

import pytest
from server_process import Server

ENDLESS = {"max_tokens": 6000, "logit_bias": {"256": -100}, "messages": [{"role": "user", "content": "go on"}]}
SHORT = {"prompt": "The block table maps positions to slots", "max_tokens": 3}
KEY = {"Authorization": "Bearer one"}


@pytest.fixture(scope="module")
def server():
    keys = ["--api-key", "one", "--api-key", "two"]
    one = Server("--max-running", "1", "--max-waiting", "1", "--allow-host", "Example.test", *keys, "--name", "mini")
    yield one
    status, errors = one.stop()
    assert status == 0 and "stopped, 0 blocks in use" in errors and "Traceback" not in errors, errors


def running(server):
    """Sequences by state."""
    states = ("waiting", "prefilling", "decoding")
    found = server.metrics(**KEY)
    return {state: found[f'kvpool_requests{{state="{state}"}}'] for state in states}


def wait_for(server, **due):
    for _ in range(600):
        if running(server).items() >= due.items():
            return
        time.sleep(0.02)
    raise AssertionError(f"{running(server)}, never {due}")


@contextlib.contextmanager
def asking(server, body):
    """Open a connection and send a request. Nobody reads the answer."""
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {server.address}\r\nAuthorization: Bearer one\r\n"
    host, _, port = server.address.partition(":")
    with socket.create_connection((host, int(port))) as connection:
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        yield connection


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_hangs_up_is_cancelled(server, stream):
    before = server.metrics(**KEY)
    with asking(server, ENDLESS | {"stream": stream}):
        wait_for(server, decoding=1)
        with asking(server, ENDLESS | {"stream": stream}):
            wait_for(server, decoding=1, waiting=1)
        wait_for(server, decoding=1, waiting=0)
    wait_for(server, decoding=0, waiting=0)
    after = server.metrics(**KEY)
    assert after['kvpool_blocks{state="used"}'] == 0
    assert after["kvpool_requests_cancelled_total"] == before["kvpool_requests_cancelled_total"] + 2
    assert after["kvpool_sampled_tokens_total"] < before["kvpool_sampled_tokens_total"] + 6000


def test_full_queue_tells_clients_to_come_again(server):
    with asking(server, ENDLESS):
        wait_for(server, decoding=1)
        with asking(server, ENDLESS):
            wait_for(server, waiting=1)
            connection = server.connect()
            connection.request("POST", "/v1/completions", json.dumps(SHORT), KEY | {"Content-Type": "application/json"})
            response = connection.getresponse()
            assert response.status == 429 and int(response.getheader("Retry-After")) >= 1
            assert json.loads(response.read())["error"]["code"] == "queue_full"
            many = SHORT | {"prompt": ["a", "b"]}
            assert server.post("/v1/completions", many, **KEY)[0] == 429, "all of its prompts or none"
            connection.close()
    wait_for(server, decoding=0, waiting=0)
    assert server.post("/v1/completions", SHORT, **KEY)[0] == 200


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/completions"])
@pytest.mark.parametrize("text", [None, "Bearer three", "Bearer ", "o"])
def test_stranger_is_refused(server, path, text):
    key = {} if text is None else {"Authorization": text}
    status = server.post(path, SHORT, **key)[0] if path == "/v1/completions" else server.get(path, **key)[0]
    assert status == 401


def test_health_needs_no_key(server):
    assert server.get("/health")[0] == server.get("/ready")[0] == 200


@pytest.mark.parametrize(
    ("host", "due"),
    [("evil.example", 421), ("", 421), ("localhost.evil.example", 421), ("example.test:80", 200), ("[::1]", 200)],
)
def test_page_of_another_name_cannot_reach_the_server(server, host, due):
    assert server.post("/v1/completions", SHORT, Host=host, **KEY)[0] == due
    assert server.get("/health", Host=host)[0] == due


def test_only_json_is_read(server):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        assert server.post("/v1/completions", SHORT, **{"Content-Type": kind}, **KEY)[0] == 415
    assert server.post("/v1/completions", SHORT, **{"Content-Type": "application/json; charset=utf-8"}, **KEY)[0] == 200


def test_long_bodies_are_refused_however_they_come(server):
    big = b'{"prompt": "' + b"a" * (5 * 2**20) + b'"}'
    assert server.post("/v1/completions", big, **KEY)[0] == 413
    connection = server.connect()
    with contextlib.suppress(ConnectionError):
        connection.request(
            "POST", "/v1/completions", iter([big]), KEY | {"Content-Type": "application/json"}, encode_chunked=True
        )
    assert connection.getresponse().status == 413
    connection.close()


def test_other_methods_and_paths_are_refused(server):
    assert server.get("/v1/completions", **KEY)[0] == 405
    assert server.get("/nothing", **KEY)[0] == 404
    answers = {name for name in server.metrics(**KEY) if name.startswith("kvpool_http_answers_total")}
    assert 'kvpool_http_answers_total{path="other",status="404"}' in answers, "clients make no labels"


def test_prefixes_are_found_within_a_tenant_and_a_salt_only(server):
    prompt = "Our merger price is 4711 million, do not tell anybody outside the board! " * 2
    body = {"prompt": prompt, "max_tokens": 1}

    def cached(key, **more):
        status, answer = server.post("/v1/completions", body | more, Authorization=f"Bearer {key}")
        assert status == 200, answer
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached("one"), cached("two"), cached("one", cache_salt="a"), cached("one", cache_salt="b")] == [0] * 4
    assert [cached("one"), cached("two"), cached("one", cache_salt="a")] == [len(prompt) // 16 * 16] * 3


def test_half_open_connections_hold_nobody_up(server):
    host, _, port = server.address.partition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            one = stack.enter_context(socket.create_connection((host, int(port))))
            one.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Le")
        assert server.post("/v1/completions", SHORT, **KEY)[0] == 200


def test_crowd_is_served_one_after_the_other_or_told_to_come_again(server):
    statuses = []

    def ask():
        statuses.append(server.post("/v1/completions", SHORT, **KEY)[0])

    threads = [threading.Thread(target=ask) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) <= {200, 429} and statuses.count(200) >= 2 and len(statuses) == 24
