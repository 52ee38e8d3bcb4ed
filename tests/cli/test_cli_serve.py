"""``kvpool serve``: mlx-lm's server as a process, its answers, its statistics, and how nonsense is refused."""

import sys

import mlx_lm
import pytest
from mlx_lm import server as mlx_server
from mlx_models import on_cpu, solo_tokens
from server_process import Server

from kvpool.adapters.mlx_lm import tiny
from kvpool.cli import main

PROMPT = "The block table maps"


@pytest.fixture(scope="module")
def server():
    one = Server("--num-blocks", "40", "--kv-block-size", "8", "--max-tokens", "30")
    yield one
    status, errors = one.stop()
    assert status == 0 and "stopped, 0 blocks in use" in errors, errors


@pytest.fixture(scope="module")
def expected():
    with on_cpu():
        model, tokenizer = tiny.make()
        return tokenizer.decode(solo_tokens(model, tokenizer.encode(PROMPT), 30))


def test_answers_are_those_of_the_stock_model(server, expected):
    for options in ({}, {"seed": 1}, {"model": "tiny"}):  # with a seed mlx-lm serves one at a time
        status, answer = server.post("/v1/completions", {"prompt": PROMPT} | options)
        assert status == 200
        assert answer["choices"][0]["text"] == expected, options


@pytest.mark.parametrize("arch", ["qwen3_5", "falcon_h1"])
def test_server_of_a_model_with_states_answers_as_the_stock_model(arch, tmp_path):
    one = Server("--arch", arch, "--num-blocks", "40", "--kv-block-size", "8")
    tiny.save(tmp_path, arch)  # as the server does; some models change their weights when they are loaded
    with on_cpu():
        model, tokenizer = mlx_lm.load(str(tmp_path))[:2]
        expected = tokenizer.decode(solo_tokens(model, tokenizer.encode(PROMPT), 12))
    for _ in range(2):
        status, answer = one.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 12})
        assert (status, answer["choices"][0]["text"]) == (200, expected)
    status, errors = one.stop()
    assert status == 0 and "stopped, 0 blocks in use" in errors, errors


def test_server_prints_its_address_and_model(server):
    assert server.facts["model"] == "tiny" and server.facts["route"] == "fused"
    assert (server.facts["num_blocks"], server.facts["block_size"]) == (40, 8)
    assert server.get("/health")[0] == 200


def test_metrics_are_served_as_prometheus_wants_them(server):
    server.post("/v1/completions", {"prompt": PROMPT})
    status, content_type, text = server.get("/metrics")
    assert status == 200 and content_type.startswith("text/plain; version=0.0.4")
    assert text.count("# TYPE kvpool_blocks gauge") == 1
    found = server.idle_metrics()
    assert sum(value for name, value in found.items() if name.startswith("kvpool_blocks{")) == 40
    assert found['kvpool_blocks{state="used"}'] == 0
    assert found["kvpool_prompt_tokens_total"] >= len(PROMPT)
    assert "kvpool_prefix_queries_total" not in text, "it would stay 0 for ever"


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"prompt": PROMPT, "max_tokens": 400}, 404, "more need 53 blocks, this server has 37"),
        ({"prompt": "x" * 500}, 404, "500 prompt tokens and 30 more need 67 blocks"),
        ({"prompt": PROMPT, "max_tokens": -1}, 400, "max_tokens must be at least 1"),
        ({"prompt": ""}, 404, "the prompt is empty"),
        ({"prompt": PROMPT, "temperature": "hot"}, 400, "temperature must be of type"),
        ({"prompt": PROMPT, "temperature": float("nan")}, 400, "temperature must be finite"),
        ({"prompt": PROMPT, "temperature": float("inf")}, 400, "temperature must be finite"),
        ({"prompt": PROMPT, "model": "/no/such/model"}, 404, "/no/such/model"),
        (b"{", 400, "Invalid JSON"),
    ],
)
def test_bad_requests_are_refused_and_the_next_one_is_served(server, expected, body, status, text):
    found, answer = server.post("/v1/completions", body)
    assert found == status and text in answer["error"], answer
    assert server.post("/v1/completions", {"prompt": PROMPT})[1]["choices"][0]["text"] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/no/such/folder"], "--model /no/such/folder: no such folder"),
        (["--model", "tiny", "--port", "x"], "--port x: not a whole number"),
        (["--model", "tiny", "--port", "65536"], "--port 65536: out of range, 0..65535"),
        (["--model", "tiny", "--num-blocks", "2"], "--num-blocks 2: out of range"),
        (["--model", "tiny", "--num-blocks", "20", "--memory", "1MiB"], "--memory and --num-blocks exclude each other"),
        (["--model", "tiny", "--memory", "lots", "--port", "0"], "lots"),
    ],
)
def test_nonsense_is_refused_in_one_line(capsys, arguments, message):
    names = ("ModelProvider", "BatchGenerator", "run")
    before = [getattr(mlx_server, name) for name in names], sys.argv
    with on_cpu():
        assert main(["serve", *arguments, "--log-level", "ERROR"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err and captured.err.count("\n") == 1, captured.err
    assert ([getattr(mlx_server, name) for name in names], sys.argv) == before


def test_a_model_that_cannot_be_loaded_is_reported_in_one_line(capsys, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with on_cpu():
        assert main(["serve", "--model", str(tmp_path), "--port", "0", "--log-level", "ERROR"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_unknown_server_arguments_are_refused_by_mlx_lm(capsys):
    with pytest.raises(SystemExit) as status:
        main(["serve", "--model", "tiny", "--no-such-option"])
    assert status.value.code == 2
    assert "unrecognized arguments: --no-such-option" in capsys.readouterr().err


def test_other_commands_still_refuse_arguments_that_they_do_not_know(capsys):
    with pytest.raises(SystemExit):
        main(["doctor", "--no-such-option"])
    assert "unrecognized arguments: --no-such-option" in capsys.readouterr().err
