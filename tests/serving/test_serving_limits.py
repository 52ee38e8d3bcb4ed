"""``kvpool serve``: who may send requests, how many at a time, and what happens when a client hangs up."""

import contextlib
import json
import signal
import threading
import time

import pydantic
import pytest
from server_process import Server

from kvpool.serving.messages import MessagesRequest
from kvpool.serving.requests import ChatRequest, CompletionRequest

ENDLESS = {"max_tokens": 6000, "logit_bias": {"256": -100}, "messages": [{"role": "user", "content": "go on"}]}
SHORT = {"prompt": "The block table maps positions to slots", "max_tokens": 3}
KEY = {"Authorization": "Bearer one"}


@pytest.fixture(scope="module")
def server():
    keys = ["--api-key", "one", "--api-key", "two"]
    options = "--max-running", "1", "--max-waiting", "1", "--allow-host", "Example.test", *keys, "--name", "mini"
    with Server(*options) as one:
        yield one


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
def asking(server, body, path="/v1/chat/completions", held=0, key="one"):
    """Open a connection and send a request, without its last `held` bytes. Nobody reads the answer."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {server.address}\r\nAuthorization: Bearer {key}\r\n"
    with server.opened() as connection:
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data[: len(data) - held])
        yield connection


def settled(server):
    """Wait until the server has read what was sent to it before."""
    for _ in range(3):
        server.get("/health")


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
    status = b" status=%d " % (200 if stream else 499)
    assert sum(b'error="the client has hung up"' in line and status in line for line in server.errors) == 2


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/completions", "/v1/messages"])
@pytest.mark.parametrize("text", [None, "Bearer three", "Bearer ", "o", "one", "Basic one"])
def test_stranger_is_refused(server, path, text):
    key = {} if text is None else {"Authorization": text}
    if path in ("/v1/models", "/metrics"):
        status = server.get(path, **key)[0]
    else:
        status, answer = server.post(path, SHORT, **key)
        assert (answer.get("type") == "error") == (path == "/v1/messages")
    assert status == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "bearer two"},
        {"x-api-key": "one"},
        {"x-api-key": "three", "Authorization": "Bearer one"},
        {"x-api-key": "two", "Authorization": "Bearer three"},
    ],
)
def test_either_header_may_have_the_key(server, headers):
    assert server.get("/v1/models", **headers)[0] == 200


@pytest.mark.parametrize(
    ("host", "due"),
    [("evil.example", 421), ("", 421), ("localhost.evil.example", 421), ("example.test:80", 200), ("[::1]", 200)],
)
def test_page_of_another_name_cannot_reach_the_server(server, host, due):
    kind = {"Content-Type": "application/json; charset=utf-8"}
    assert server.post("/v1/completions", SHORT, Host=host, **kind, **KEY)[0] == due
    assert server.get("/health", Host=host)[0] == server.get("/ready", Host=host)[0] == due, "without a key"


@pytest.mark.parametrize(
    ("path", "kind"), [("completions", "invalid_request_error"), ("messages", "request_too_large")]
)
def test_long_body_in_chunks_is_refused(server, path, kind):
    big, connection = b'{"prompt": "' + b"a" * (5 * 2**20) + b'"}', server.connect()
    with contextlib.suppress(ConnectionError):
        connection.request(
            "POST", f"/v1/{path}", iter([big]), KEY | {"Content-Type": "application/json"}, encode_chunked=True
        )
    response = connection.getresponse()
    assert (response.status, json.load(response)["error"]["type"]) == (413, kind)
    connection.close()


def test_paths_that_are_not_there_are_counted_as_one(server):
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


def listed(one, count):
    return ",".join([one] * count)


def named(count, value="1"):
    return ",".join(f'"x{i}":{value}' for i in range(count))


PARTS = '{"role":"user","content":[' + listed("{}", 1000) + "]}"


@pytest.mark.parametrize(
    ("form", "body"),
    [
        (ChatRequest, '{"messages":[' + listed(PARTS, 50) + "]}"),
        (ChatRequest, '{"messages":[' + listed("{}", 4000) + "]}"),
        (ChatRequest, '{"messages":[],"stream_options":{' + named(5000) + "}}"),
        (MessagesRequest, '{"messages":[' + listed(PARTS, 50) + "]}"),
        (MessagesRequest, '{"messages":[' + listed("{}", 4000) + "]}"),
        (MessagesRequest, '{"messages":[],"system":[' + listed("{}", 1000) + "]}"),
        (CompletionRequest, "{" + named(5000) + "}"),
        (CompletionRequest, '{"prompt":"a","logit_bias":{' + named(5000) + "}}"),
        (CompletionRequest, '{"prompt":"a","stop":[' + listed("1", 5000) + "]}"),
        (CompletionRequest, '{"prompt":"a","stop_token_ids":[' + listed("-1", 5000) + "]}"),
    ],
)
def test_errors_of_a_body_do_not_grow_with_it(form, body):
    with pytest.raises(pydantic.ValidationError) as wrong:
        form.model_validate_json(body)
    assert wrong.value.error_count() < 100


def test_whole_answer_with_too_many_logprobs_is_refused(server):
    body = {"prompt": "a", "n": 64, "max_tokens": 500, "logprobs": 20}
    status, answer = server.post("/v1/completions", body, **KEY)
    assert status == 400 and answer["error"]["param"] == "logprobs" and "672000" in answer["error"]["message"]
    assert server.post("/v1/completions", body | {"logprobs": 5, "n": 8}, **KEY)[0] in (200, 429)


@pytest.mark.parametrize("body", [SHORT, SHORT | {"stream": True}, {"no": "prompt"}])
def test_connection_is_closed_after_a_body_with_two_lengths(server, body):
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {server.address}\r\nx-api-key: one\r\n"
    head += "Content-Type: application/json"
    chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)
    hidden = f"GET /v1/models HTTP/1.1\r\nHost: {server.address}\r\nx-api-key: one\r\n\r\n".encode()
    for lengths, answers in ((f"Content-Length: {len(chunk)}\r\nTransfer-Encoding: chunked", 1), (TE, 2)):
        with server.opened() as connection:
            connection.sendall(f"{head}\r\n{lengths}\r\n\r\n".encode() + chunk + hidden)
            text = b""
            while text.count(b"HTTP/1.1 ") < 2 and (more := connection.recv(2**16)):
                text += more
            assert text.count(b"HTTP/1.1 ") == answers, text
            assert (b"connection: close" in text.lower()) == (answers == 1)


TE = "Transfer-Encoding: chunked"
HELD = """
from mlx_lm.tokenizer_utils import TokenizerWrapper
from kvpool.adapters.mlx_lm import tiny

class Held(TokenizerWrapper):
    def encode(self, text):
        os.write(2, f"reads {text}\\n".encode())  # whole lines, also from two threads at a time
        while text == "slow" and not os.path.exists(os.environ["GO"]):
            time.sleep(0.01)
        return self._tokenizer.encode(text)

make = tiny.make
tiny.make = lambda: (make()[0], Held(tiny.byte_tokenizer()))
"""


@pytest.mark.long
def test_requests_at_the_tokenizer_end_with_their_clients_and_are_counted(tmp_path):
    path, statuses = "/v1/completions", []
    with Server("--num-blocks", "400", "--max-waiting", "3", patch=HELD, GO=str(tmp_path / "go")) as one:
        threads = [
            threading.Thread(target=lambda text=text: statuses.append(one.post(path, SHORT | {"prompt": text})[0]))
            for text in ("slow", "slow", "quick")
        ]
        for thread in threads[:2]:  # as many as are read at a time
            thread.start()
        while one.errors.count(b"reads slow\n") < 2:
            time.sleep(0.01)
        gone = SHORT | {"prompt": "gone"}
        with asking(one, gone, path), asking(one, gone, path):
            settled(one)
            status, answer = one.post(path, SHORT)
            assert (status, answer["error"]["code"]) == (429, "queue_full")
        settled(one)
        threads[2].start()
        settled(one)
        (tmp_path / "go").touch()
        for thread in threads:
            thread.join()
    assert statuses == [200, 200, 200]
    assert b"reads quick\n" in one.errors and b"reads gone\n" not in one.errors


def test_request_whose_body_is_on_its_way_is_served_after_sigterm():
    with Server("--num-blocks", "400") as one:
        with asking(one, SHORT, "/v1/completions", held=5) as connection:
            settled(one)
            one.process.send_signal(signal.SIGTERM)
            while one.get("/ready")[0] != 503:
                time.sleep(0.01)
            time.sleep(1.5)  # longer than connections without a request have
            connection.sendall(json.dumps(SHORT).encode()[-5:])
            assert connection.recv(12) == b"HTTP/1.1 200"
        one.process.wait(60)
