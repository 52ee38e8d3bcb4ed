"""Hostile requests to ``kvpool serve``: it lives, answers rightly, stalls nobody, and keeps nothing.

``tests/helpers/hostile.py`` draws them, and knows which answers are right from the documentation alone.
"""

import contextlib
import ctypes
import json
import os
import random
import re
import signal
import socket
import struct
import threading
import time

import hostile
import pytest
from server_process import Server

if not hasattr(ctypes.CDLL(None), "mallinfo2"):
    pytest.skip("glibc 2.33 tells how much memory it has given out", allow_module_level=True)

FEW, MANY = 400, 10_000  # requests
SEED = int(os.environ.get("KVPOOL_FUZZ_SEED", 7))
CLIENTS = 6
STALL = 1.0  # seconds: of the event loop, or a step of the engine
GROWTH = 16 * 2**20  # bytes that the allocator of libc has given out, from half of the requests to all
GOOD = {"prompt": "The block table maps", "max_tokens": 5, "temperature": 0}
#: The server, with a watch on its event loop and its engine. A stall is no longer than the process computed meanwhile:
#: other processes of the machine cause no stalls. Memory is what libc has given out (Python asks it too, see `attack`):
#: how much of it stays resident besides depends on which large bodies came together.
WATCHED = """
import asyncio, ctypes, gc, signal
import mlx.core as mx
from kvpool.adapters.mlx_lm import engine
from kvpool.serving import app, process, requests, runner

stalls = [0.0, 0.0]

def since(begin):
    return min(time.monotonic() - begin[0], time.process_time() - begin[1])

async def watch():
    while True:
        begin = time.monotonic(), time.process_time()
        await asyncio.sleep(0.005)
        stalls[0] = max(stalls[0], since(begin) - 0.005)

def step(self, step=engine.Engine.step):
    begin = time.monotonic(), time.process_time()
    try:
        return step(self)
    finally:
        stalls[1] = max(stalls[1], since(begin))

class Given(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena b c d mapped f g used free top".split()]

def weigh(*ignored, given=ctypes.CDLL(None).mallinfo2):
    gc.collect()
    mx.clear_cache()
    given.restype = Given
    now = given()
    print("memory", now.used + now.mapped, file=sys.stderr, flush=True)

async def serve(*args, serve=process.serve):
    signal.signal(signal.SIGUSR1, weigh)
    watching = asyncio.create_task(watch())
    try:
        return await serve(*args)
    finally:
        print("stalls", *stalls, file=sys.stderr)

engine.Engine.step, process.serve = step, serve
{planted}
"""
#: Servers with one check less, or one fault more: one for each judge.
PLANTED = {
    "any field": "requests.few = lambda data: data\nfor form in (requests.CompletionRequest, requests.ChatRequest):\n"
    "    form.not_done = {}",
    "a slow check": "P = app.parse\n"
    "def parse(form, body, **how):\n    end = time.process_time() + 1.2 * (len(body) > 40000)\n"
    "    while time.process_time() < end: pass\n    return P(form, body, **how)\napp.parse = parse",
    "a kept body": "P, kept = app.parse, []\ndef parse(form, body, **how):\n    kept.append(bytearray(2**18))\n"
    "    return P(form, body, **how)\napp.parse = parse",
    "a kept request": "runner.Run._end = lambda self: None\n"
    "D = engine.Engine.submit\ndef submit(self, *a, **k):\n    self.kv.pool.blocks.alloc(1)\n"
    "    return D(self, *a, **k)\n"
    "engine.Engine.submit = submit",
}


class Attacker(threading.Thread):
    """Sends its share of the requests. `wrong` has the answers that are not right."""

    def __init__(self, server, seed, count):
        super().__init__(daemon=True)
        self._server, self._draw, self._count = server, random.Random(seed), count
        self.statuses = []
        self.wrong = []
        self.sent = 0

    def run(self):
        """Send everything."""
        kinds = (self._judged, self._raw, self._wire, self._broken_off, self._form, self._long)
        try:
            while self.sent < self._count:
                self._draw.choices(kinds, (60, 12, 12, 12, 3, 1))[0]()
                self.sent += 1
        except Exception as error:
            self.wrong.append(f"request {self.sent}: {error!r}")

    def _ask(self, path, body, right):
        status, text = self._server.raw(path, body)
        self.statuses.append(status)
        told = status == 200 or json.loads(text)["error"]["message"]
        if status not in right or not told or ('"server_error"' in text and 500 not in right):
            self.wrong.append(f"{path} {repr(body)[:300]}: {status}, due {sorted(right)}: {text[:300]}")

    def _judged(self):
        self._ask(*hostile.request(self._draw))

    def _form(self):
        self._ask(*hostile.formed(self._draw))

    def _raw(self):
        self._ask("/v1/completions", hostile.raw_body(self._draw), {200, 400, 404})

    def _long(self):
        path = self._draw.choice(list(hostile.PATHS))
        right = {400, 200} if path.endswith("count_tokens") else {400}
        self._ask(path, self._draw.choice(hostile.LONG_BODIES), right)

    def _connected(self):
        host, _, port = self._server.address.partition(":")
        return socket.create_connection((host, int(port)), timeout=300)

    def _wire(self):
        """Something that is no request, or hardly one."""
        data, right = self._draw.choice(hostile.WIRE)
        answer = b""
        with self._connected() as connection, contextlib.suppress(ConnectionError):
            connection.sendall(data)
            if hostile.NO_ANSWER in right:  # to the server, it has hung up
                connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(100)
        status = int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else hostile.NO_ANSWER
        self.statuses.append(status)
        if status not in right and (answer or 413 not in right):
            self.wrong.append(f"{data[:200]!r}: {answer!r}, due {sorted(right)}")

    def _broken_off(self):
        """A request, or part of one, perhaps slowly; perhaps the beginning of its answer; then nothing more."""
        path, body, _ = hostile.request(self._draw)
        if isinstance(body, dict):
            body = body | ({"stream": True, "max_tokens": 2000} if self._draw.random() < 0.5 else {})
        data = hostile.message(path, body)
        part = data[: self._draw.choice((len(data), self._draw.randrange(len(data) + 1)))]
        with self._connected() as connection, contextlib.suppress(ConnectionError, TimeoutError):
            if self._draw.random() < 0.3:
                for begin in range(0, len(part), 40):
                    connection.sendall(part[begin : begin + 40])
                    time.sleep(0.001)
            else:
                connection.sendall(part)
            if self._draw.random() < 0.5:
                connection.settimeout(self._draw.choice((0.001, 0.1, 1)))
                connection.recv(self._draw.choice((1, 100, 100_000)))
            if self._draw.random() < 0.5:  # it ends with a reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def beside(server, attackers, due):
    """Let them attack, and ask what has one right answer meanwhile. Return the longest time that it took."""
    longest = 0.0
    for one in attackers:
        one.start()
    while any(one.is_alive() for one in attackers):
        begin = time.monotonic()
        status, answer = server.post("/v1/completions", GOOD)
        longest = max(longest, time.monotonic() - begin)
        if status != 200 or answer["choices"][0]["text"] != due:
            raise RuntimeError(f"a good request: {status}, {answer}")
        time.sleep(0.05)
    return longest


def attack(count, planted=""):
    """Send so many requests to one server, and say what came of it. `planted` is of `PLANTED`."""
    program = WATCHED.format(planted=PLANTED.get(planted, ""))
    options = ("--num-blocks", "3000", "--max-waiting", "100000")
    server = Server(*options, patch=program, PYTHONMALLOC="malloc")
    found = {"wrong": [], "statuses": {}, "grown": 0, "good": 0.0}
    try:
        due = server.post("/v1/completions", GOOD)[1]["choices"][0]["text"]
        for half in range(2):
            share = count // 2 // CLIENTS
            attackers = [Attacker(server, f"{SEED} {half} {number}", share) for number in range(CLIENTS)]
            found["good"] = max(found["good"], beside(server, attackers, due))
            for status in [status for one in attackers for status in one.statuses]:
                found["statuses"][status] = found["statuses"].get(status, 0) + 1
            found["wrong"] += [wrong for one in attackers for wrong in one.wrong]
            server.idle_metrics()
            server.process.send_signal(signal.SIGUSR1)
            time.sleep(1)
            server.get("/health")
        left = server.idle_metrics()['kvpool_blocks{state="used"}']
        found["wrong"] += [f"{left:.0f} blocks are used"] if left else []
    except Exception as error:
        found["wrong"].append(f"no service: {error!r}")
    status, errors = server.stop()
    found["stalls"] = [float(one) for one in (re.findall(r"^stalls (\S+) (\S+)$", errors, re.M) or [("9", "9")])[-1]]
    sizes = [int(size) for size in re.findall(r"^memory (\d+)$", errors, re.M)]
    found["grown"] = sizes[1] - sizes[0] if len(sizes) == 2 else 2**40
    if status or "Traceback" in errors or "stopped, 0 blocks in use" not in errors:
        found["wrong"].append(f"exit status {status}: {errors[-2000:]}")
    return found


def is_sound(found):
    """Whether nothing is wrong."""
    return not found["wrong"] and max(found["stalls"]) <= STALL and found["grown"] <= GROWTH


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_hostile_requests_harm_nobody(count):
    print(f"seed {SEED}")
    found = attack(count)
    print(found)
    assert not found["wrong"], "\n".join(found["wrong"])
    assert is_sound(found), found
    assert min(found["statuses"][status] for status in (200, 400, 404)) > count // 50


@pytest.mark.parametrize("fault", PLANTED)
def test_server_with_a_fault_is_convicted(fault):
    assert not is_sound(attack(300, fault))
