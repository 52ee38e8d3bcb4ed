"""``kvpool serve`` over loopback: many clients at a time, half of which hang up. No block stays in use.

By default a short form; with ``KVPOOL_LONG=1`` 64 clients for two minutes.
"""

import os
import random
import sys
import threading
import time

import pytest
from mlx_models import on_cpu, solo_tokens
from server_process import Server

from kvpool.adapters.mlx_lm import tiny

LONG = bool(os.environ.get("KVPOOL_LONG"))
CLIENTS, SECONDS, ROUNDS = (64, 120, None) if LONG else (16, None, 2)
BLOCKS, BLOCK = (160, 16) if LONG else (32, 16)
TOKENS, NUM_QUESTIONS = (48, 24) if LONG else (96, 10)
SYSTEM = "You are a block table. Answer in slots, never in bytes, and share what you have with whoever begins alike."
QUESTIONS = [f"Where is token {number} of sequence {number * 7 % 31}?" for number in range(NUM_QUESTIONS)]


def messages(question):
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


@pytest.fixture(scope="module")
def expected():
    """``{question: the whole answer of the stock model alone}``."""
    with on_cpu():
        model, tokenizer = tiny.make()
        answers = {}
        for question in QUESTIONS:
            prompt = tokenizer.apply_chat_template(messages(question), add_generation_prompt=True)
            tokens = solo_tokens(model, prompt, TOKENS)
            end = tokens.index(256) if 256 in tokens else len(tokens)
            answers[question] = tokenizer.decode(tokens[:end])
        assert len({answer for answer in answers.values() if len(answer) > 10}) > NUM_QUESTIONS // 2
        return answers


class Client(threading.Thread):
    """Asks one question after the other; hangs up in the middle of about half of the answers."""

    def __init__(self, server, expected, seed, is_over):
        super().__init__()
        self._server, self._expected, self._is_over = server, expected, is_over
        self._random = random.Random(seed)
        self.finished = self.hung_up = 0
        self.wrong = []

    def run(self):
        try:
            while not self._is_over(self.finished + self.hung_up):
                self.ask()
        except Exception as error:
            self.wrong.append(repr(error))

    def ask(self):
        question = self._random.choice(QUESTIONS)
        stop_after = self._random.randrange(20) if self._random.random() < 0.5 else None
        text, is_whole = self._server.stream(
            {"messages": messages(question), "max_tokens": TOKENS, "temperature": 0}, stop_after=stop_after
        )
        answer = self._expected[question]
        if text != (answer if is_whole else answer[: len(text)]):
            self.wrong.append((question, text, answer))
        self.finished += is_whole
        self.hung_up += not is_whole


def run_clients(server, expected, count, is_over, watch):
    """Let `count` clients run; returns them. `watch` is called now and then."""
    clients = [Client(server, expected, seed, is_over) for seed in range(count)]
    for client in clients:
        client.start()
    while any(client.is_alive() for client in clients):
        watch()
        clients[0].join(0.5)
        next((client for client in clients if client.is_alive()), clients[0]).join(0.5)
    return clients


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process from /proc")
def test_many_clients_get_the_stock_answers_and_leak_no_block(expected):
    server = Server("--num-blocks", str(BLOCKS), "--kv-block-size", str(BLOCK), "--chunk", "64")
    try:
        begin = time.monotonic()
        until = (lambda n: time.monotonic() - begin > SECONDS) if SECONDS else (lambda n: n >= ROUNDS)
        warm_up = run_clients(server, expected, CLIENTS, lambda n: n >= (4 if LONG else 1), lambda: None)
        server.idle_metrics()
        rss_before = server.rss()
        memory = []

        def watch():
            memory.append(server.rss())
            assert server.get("/metrics")[0] == 200

        clients = run_clients(server, expected, CLIENTS, until, watch)
        after, rss_after = server.idle_metrics(), server.rss()
    finally:
        status, errors = server.stop()
        print(errors)  # what it said is what explains a failure
    finished, hung_up = (sum(getattr(one, name) for one in clients) for name in ("finished", "hung_up"))
    print(f"{finished} answers, {hung_up} hung up, {after['kvpool_preemptions_total']:.0f} preemptions")
    print(f"RSS {rss_before >> 20} -> {rss_after >> 20} MiB, at most {max(memory, default=0) >> 20}")
    assert [wrong for one in [*warm_up, *clients] for wrong in one.wrong] == []
    assert finished >= CLIENTS // 2 and hung_up >= CLIENTS // 2
    assert after["kvpool_preemptions_total"] > 0, "the pool was never short: the test asks for nothing"
    assert after['kvpool_blocks{state="used"}'] == 0
    assert after["kvpool_prefix_hit_tokens_total"] > after["kvpool_prefix_query_tokens_total"] / 3
    if LONG:  # short runs are part of the warm-up: threads and arenas of the allocator are still being made
        assert rss_after <= rss_before * 1.1 + 2**24
    assert status == 0, errors
    assert "Traceback" not in errors and "stopped, 0 blocks in use" in errors
