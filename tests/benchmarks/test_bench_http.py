"""``python -m benchmarks.http``: clients against servers that do wrong on purpose, the judge by hand, and the gates."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.command import main
from benchmarks.http import command, harm, report
from benchmarks.http.judge import Answer, Result, read, result
from benchmarks.http.servers import Server, send
from benchmarks.http.workload import Chat, Shape

SMALL = Shape(requests=3, rate=200.0, systems=2, system_tokens=8, user="5", output="uniform:3:6")


def piece(text):
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


def honest(asked):
    """The pieces of an answer: as many characters as were asked for, here and there two at a time."""
    yield from [b": waiting\n\n", piece("ab"), *([piece("c")] * (asked["max_tokens"] - 2)), b"data: [DONE]\n\n"]


def one_lost(asked):
    yield from honest(asked | {"max_tokens": asked["max_tokens"] - 1})


def cut(asked):
    yield from list(honest(asked))[:-1]


def silent(asked):
    yield piece("a")
    time.sleep(2)


def told_an_error(asked):
    yield from [piece("a"), b'data: {"error": {"message": "no"}}\n\n', b"data: [DONE]\n\n"]


def paused(asked):
    for number, one in enumerate(honest(asked)):
        if number == 2:  # the second piece of text
            time.sleep(0.2)
        yield one


@contextmanager
def serving(answer, status=b"200 OK", chunked=False):
    """A server of this process, which answers with the pieces that `answer` makes of a body."""

    def talk(line):
        with line, line.makefile("rb") as read:
            length = 0
            while (head := read.readline().strip()) != b"":
                if head.lower().startswith(b"content-length:"):
                    length = int(head.split()[1])
            asked = json.loads(read.read(length))
            framing = b"Transfer-Encoding: chunked\r\n" if chunked else b""
            line.sendall(b"HTTP/1.1 " + status + b"\r\n" + framing + b"Connection: close\r\n\r\n")
            for one in answer(asked):
                line.sendall(b"%x\r\n%b\r\n" % (len(one), one) if chunked else one)
            if chunked:
                line.sendall(b"0\r\n\r\n")

    def accept():
        while True:
            try:
                line, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=talk, args=(line,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield Server(os.getpid(), listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)


def run(answer, limit=20.0, **how):
    with serving(answer, **how) as server:
        return result(*send(server, SMALL.chats(), limit))


@pytest.mark.parametrize("chunked", [False, True])
def test_an_honest_server_has_no_failures_and_every_character_has_times(chunked):
    found = run(honest, chunked=chunked)
    assert found.failures == []
    assert [len(answer.text) for answer in found.answers] == [chat.max_tokens for chat in SMALL.chats()]
    for chat, answer in zip(SMALL.chats(), found.answers, strict=True):
        assert answer.due == chat.at
        assert len(answer.times) == len(answer.cpu_times) == len(answer.text)
        assert chat.at <= answer.times[0] and answer.times == sorted(answer.times)
        assert answer.due_cpu <= answer.cpu_times[0] and answer.cpu_times == sorted(answer.cpu_times)
    assert found.as_json()["tokens"] == sum(chat.max_tokens for chat in SMALL.chats())
    assert found.cpu > 0 and found.clients_cpu > 0


@pytest.mark.parametrize(
    ("answer", "how", "said"),
    [
        (one_lost, {}, "tokens of"),
        (cut, {}, "no end"),
        (cut, {"chunked": True}, "no end"),
        (silent, {"limit": 0.5}, "TimeoutError"),
        (told_an_error, {}, "an error in the stream"),
        (honest, {"status": b"503 Busy"}, "status 503"),
    ],
)
def test_a_server_that_does_wrong_is_a_failure_for_every_request(answer, how, said):
    found = run(answer, **how)
    assert len(found.failures) == SMALL.requests
    assert all(said in failure for failure in found.failures)
    assert found.num_tokens == 0


def test_a_pause_in_a_stream_is_between_its_tokens_and_takes_no_cpu_time():
    told = run(paused).as_json()
    assert told["itl_ms_p99"] >= 200 > told["itl_cpu_ms_p99"]


# ------------------------------------------------------------------------------------------- by hand


def test_an_answer_is_read_from_its_bytes_whatever_pieces_they_come_in():
    head = "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
    body = (piece("x") + piece("yz") + b"data: [DONE]\n\n").decode()
    cuts = (0, 1, len(head) + 20, len(head) + len(piece("x")), len(head) + len(body) - 3, len(head + body))
    pieces = [(float(i), 10.0 + i, (head + body)[a:b]) for i, (a, b) in enumerate(pairwise(cuts))]
    asked = Chat(0.5, "s", "u", 3).as_json()
    found = read(asked, {"sent": 0.6, "sent_cpu": 9.0, "pieces": pieces, "error": None})
    assert found == Answer(0.5, 9.0, "xyz", [2.0, 3.0, 3.0], [12.0, 13.0, 13.0], None)


def test_latencies_are_counted_from_the_time_when_a_request_was_due():
    answers = [Answer(1.0, 5.0, "abc", [3.0, 4.0, 6.0], [7.0, 7.5, 8.0], None), Answer(0, 0, "a", [9], [9], "wrong")]
    told = Result(answers, wall=6.0, cpu=2.0, clients_cpu=0.1).as_json()
    assert (told["tokens"], told["tokens_per_sec"], told["tokens_per_cpu_sec"]) == (3, 0.5, 1.5)
    assert (told["ttft_ms_p99"], told["ttft_cpu_ms_p50"], told["whole_ms_p50"]) == (2000, 2000, 5000)
    assert (told["itl_ms_p50"], told["itl_cpu_ms_p99"]) == (1500, 500)
    assert told["failures"] == ["wrong"]


def test_chats_are_seeded_share_systems_and_have_lengths_in_tokens():
    shape = Shape(200, 50.0, 8, 64, user="uniform:3:9", output="uniform:1:5", seed=4)
    chats = shape.chats()
    assert chats == shape.chats() != replace(shape, seed=5).chats()
    assert len({chat.system for chat in chats}) == 8 and len({chat.user for chat in chats}) == 200
    assert {len(chat.system.encode()) for chat in chats} == {64}
    assert {len(chat.user.encode()) for chat in chats} == set(range(3, 10))
    assert {chat.max_tokens for chat in chats} == set(range(1, 6))
    gaps = np.diff([chat.at for chat in chats])
    assert (gaps > 0).all() and 0.7 < 50 * gaps.mean() < 1.3


# ------------------------------------------------------------------------------------------------- gates


def made(ttft=1.0, gaps=(0.1, 0.1, 0.1), cpu=1.0, text="abcd", failure=None):
    times = np.cumsum([ttft, *gaps]).tolist()
    return Result([Answer(0.0, 0.0, text, times, times, failure)], wall=cpu, cpu=cpu, clients_cpu=0.0)


GOOD = {"kvpool": [made()], "stock": [made(ttft=9.0, cpu=9.0)], "stock, tuned": [made(ttft=4.0, cpu=4.0)]}


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, []),
        ({"kvpool": [made(failure="3 tokens of 4")]}, ["failures"]),
        ({"stock": [made(ttft=9.0, cpu=9.0, text="abcx")]}, ["the same text"]),
        ({"stock": [made(ttft=9.0, cpu=9.0, text="ab", failure="the stream has no end")]}, []),
        ({"kvpool": [made(cpu=3.5)]}, ["tokens/s over", "tokens/s of CPU"]),
        ({"kvpool": [made(ttft=2.1)]}, ["p99 to first token over stock's", "p99 to first token over stock's, CPU"]),
        ({"kvpool": [made(gaps=(0.1, 0.1, 0.5))]}, ["between tokens"]),
    ],
)
def test_each_gate_is_missed_by_its_own_fault(change, missed):
    gates = report.gates(GOOD | change)
    wrong = [gate.name for gate in gates if not gate.holds]
    assert all(any(name.startswith(one) for name in wrong) for one in missed)
    if "failures" not in missed:  # a wrong answer has no figures
        assert len(wrong) == len(missed)


def test_a_request_that_holds_others_up_misses_its_gate(monkeypatch):
    """Time of the process passes in a server that computes a long answer before all others."""
    turn = threading.Lock()

    def in_turn(asked):
        with turn:
            end = time.process_time() + asked["max_tokens"] / 4e3
            while time.process_time() < end:
                pass
        yield from honest(asked)

    monkeypatch.setattr(harm, "OTHERS", SMALL)
    monkeypatch.setattr(harm, "HARM", {"a long answer": Chat(0.0, "", "a", 1600)})
    with serving(in_turn) as server:
        monkeypatch.setattr(harm, "started", lambda *_: nullcontext(server))
        (gate,) = harm.gates("it", (), "", 1)
    assert not gate.holds and gate.value > 1.2, gate
    with serving(one_lost) as server:
        monkeypatch.setattr(harm, "started", lambda *_: nullcontext(server))
        (gate,) = harm.gates("it", (), "", 1)
    assert not gate.holds and "tokens of" in gate.note


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--servers", "x"], "--servers x: there are kvpool"),
        (["--rate", "0"], "--rate 0: has to be more than 0"),
    ],
)
def test_bad_values_are_named_in_one_line(capsys, options, said):
    assert main(command, options) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and len(err.splitlines()) == 1


@pytest.mark.long
def test_both_servers_answer_the_same_chats_with_the_same_text(capsys):
    few = ["--requests", "4", "--systems", "2", "--system-tokens", "40", "--user", "8", "--output", "6", "--rate", "20"]
    assert main(command, [*few, "--servers", "kvpool;stock", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["same_texts"] == 1.0
    for name in ("kvpool", "stock"):
        (told,) = found["runs"][name]
        assert told["failures"] == [] and told["tokens"] == 24 and told["cpu_seconds"] > 0
