"""``python -m benchmarks.http``: the judge by hand, the gates, and both servers."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from benchmarks import http
from benchmarks.command import main
from benchmarks.http import Answer, Chat, Result, read


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
    assert (told["ttft_ms_p99"], told["ttft_cpu_ms_p50"]) == (2000, 2000)
    assert (told["itl_ms_p50"], told["itl_cpu_ms_p99"]) == (1500, 500)
    assert told["failures"] == ["wrong"]


# ------------------------------------------------------------------------------------------------- gates


@pytest.mark.long
def test_both_servers_answer_the_same_chats_with_the_same_text(capsys):
    few = ["--requests", "4", "--systems", "2", "--system-tokens", "40", "--user", "8", "--output", "6", "--rate", "20"]
    assert main(http, [*few, "--servers", "kvpool;stock", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["same_texts"] == 1.0
    for name in ("kvpool", "stock"):
        (told,) = found["runs"][name]
        assert told["failures"] == [] and told["tokens"] == 24 and told["cpu_seconds"] > 0
