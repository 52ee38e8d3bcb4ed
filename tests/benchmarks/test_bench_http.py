"""``python -m benchmarks.http``: the judge by hand, the gates, and both servers."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.command import main
from benchmarks.http import command, report
from benchmarks.http.judge import Answer, Result, read
from benchmarks.http.workload import Chat, Shape

SMALL = Shape(requests=3, rate=200.0, systems=2, system_tokens=8, user="5", output="uniform:3:6")


def piece(text):
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


# ------------------------------------------------------------------------------------------- by hand


def test_an_answer_is_read_from_its_bytes_whatever_pieces_they_come_in():
    head = "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
    body = (piece("x") + piece("yz") + b"data: [DONE]\n\n").decode()
    cuts = (0, 1, len(head) + 20, len(head) + len(piece("x")), len(head) + len(body) - 3, len(head + body))
    pieces = [(float(i), 10.0 + i, (head + body)[a:b]) for i, (a, b) in enumerate(pairwise(cuts))]
    asked = Chat(0.5, "s", "u", 3).as_json()
    given = {"sent": 0.6, "sent_cpu": 9.0, "error": None}
    assert read(asked, given | {"pieces": pieces}) == Answer(0.5, 9.0, "xyz", [2.0, 3.0, 3.0], [12.0, 13.0, 13.0], None)
    for wrong, said in (
        ((head + body).replace("yz", "y"), "tokens of"),
        (head + body.replace("data: [DONE]\n\n", ""), "no end"),
        ((head + body).replace("200 OK", "503 Busy"), "status 503"),
        (head + 'data: {"error": {"message": "no"}}\n\n' + body, "an error in the stream"),
    ):
        assert said in read(asked, given | {"pieces": [(1.0, 11.0, wrong)]}).failure


def test_latencies_are_counted_from_the_time_when_a_request_was_due():
    answers = [Answer(1.0, 5.0, "abc", [3.0, 4.0, 6.0], [7.0, 7.5, 8.0], None), Answer(0, 0, "a", [9], [9], "wrong")]
    told = Result(answers, wall=6.0, cpu=2.0, clients_cpu=0.1).as_json()
    assert (told["tokens"], told["tokens_per_sec"], told["tokens_per_cpu_sec"]) == (3, 0.5, 1.5)
    assert (told["ttft_ms_p99"], told["ttft_cpu_ms_p50"], told["whole_ms_p50"]) == (2000, 2000, 5000)
    assert (told["itl_ms_p50"], told["itl_cpu_ms_p99"]) == (1500, 500)
    assert told["failures"] == ["wrong"]


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
