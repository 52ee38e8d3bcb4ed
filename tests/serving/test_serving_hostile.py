"""Hostile requests from a seeded grammar: the server lives, statuses are right, all blocks come back.

``KVPOOL_HOSTILE=10000 python -m pytest tests/serving/test_serving_hostile.py`` sends so many.
"""

import contextlib
import json
import os
import random
import socket
import threading
import time

import pytest
from hostile import raw_body, request
from server_process import Server

COUNT = int(os.environ.get("KVPOOL_HOSTILE", 400))
SEED = int(os.environ.get("KVPOOL_FUZZ_SEED", 7))
CLIENTS = 6
GOOD = {"prompt": "The block table maps", "max_tokens": 5, "temperature": 0}
WIRE = (
    b"GET / HTTP/1.1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"\0" * 1000,
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
)


class Attacker(threading.Thread):
    """Sends its share of the requests. `wrong` has the answers with a wrong status."""

    def __init__(self, server, seed, count):
        super().__init__()
        self._server, self._draw, self._count = server, random.Random(seed), count
        self.statuses, self.wrong, self.longest = [], [], (0.0, "")

    def run(self):
        try:
            for number in range(self._count):
                begin = time.monotonic()
                self._one(number)
                self.longest = max(self.longest, (time.monotonic() - begin, self._last))
        except Exception as error:
            self.wrong.append(repr(error))

    def _one(self, number):
        kind = self._draw.random()
        if kind < 0.05:
            data = self._draw.choice(WIRE)
            self._last = repr(data)[:100]
            self._wire(data)
            return
        if kind < 0.2:
            path, body, right = "/v1/completions", raw_body(self._draw), {200, 400, 404}
        else:
            path, body, right = request(self._draw)
        self._last = repr(body)[:100]
        status, text = self._server.raw(path, body)
        self.statuses.append(status)
        is_told = status == 200 or json.loads(text)["error"]["message"]
        if status not in right or not is_told or '"server_error"' in text:
            self.wrong.append((number, path, repr(body)[:300], right, status, text[:300]))

    def _wire(self, data):
        host, _, port = self._server.address.partition(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1000)


@pytest.mark.long
def test_hostile_requests_harm_nobody():
    print(f"seed {SEED}, {COUNT} requests")
    server = Server("--num-blocks", "3000", "--max-waiting", "100000")
    try:
        due = server.post("/v1/completions", GOOD)[1]["choices"][0]["text"]
        attackers = [Attacker(server, f"{SEED} {number}", COUNT // CLIENTS) for number in range(CLIENTS)]
        for one in attackers:
            one.start()
        while any(one.is_alive() for one in attackers):
            status, answer = server.post("/v1/completions", GOOD)
            assert status == 200 and answer["choices"][0]["text"] == due
            time.sleep(0.05)
        wrong = [wrong for one in attackers for wrong in one.wrong]
        assert not wrong, "\n".join(map(str, wrong))
        found = server.idle_metrics()
    finally:
        status, errors = server.stop()
    statuses = [status for one in attackers for status in one.statuses]
    print({status: statuses.count(status) for status in sorted(set(statuses))})
    print(f"the longest took {max(one.longest for one in attackers)}")
    assert min(statuses.count(status) for status in (200, 400, 404)) > COUNT // 50
    assert found['kvpool_blocks{state="used"}'] == 0
    assert status == 0 and "Traceback" not in errors and "stopped, 0 blocks in use" in errors, errors
