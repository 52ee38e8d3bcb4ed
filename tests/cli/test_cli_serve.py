"""``kvpool serve`` as a process: answers, statistics, its end, and nonsense on its command line."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import mlx_lm
import pytest
from mlx_models import on_cpu, solo_tokens
from server_process import Server

from benchmarks import tiny_families
from kvpool.adapters.mlx_lm import tiny
from kvpool.cli import main, serve

PROMPT = "The block table maps"
GREEDY = {"prompt": PROMPT, "temperature": 0}


@pytest.fixture(scope="module")
def server():
    with Server("--num-blocks", "40", "--kv-block-size", "8", "--max-tokens", "30") as one:
        yield one


@pytest.fixture(scope="module")
def expected():
    with on_cpu():
        model, tokenizer = tiny.make()
        return tokenizer.decode(solo_tokens(model, tokenizer.encode(PROMPT), 30))


@pytest.mark.parametrize("arch", ["qwen3_5", "falcon_h1"])
def test_server_of_a_model_with_states_answers_as_the_stock_model(arch, tmp_path):
    tiny_families.save(tmp_path, arch)  # some models change their weights when they are loaded
    with on_cpu():
        model, tokenizer = mlx_lm.load(str(tmp_path))[:2]
        expected = tokenizer.decode(solo_tokens(model, tokenizer.encode(PROMPT), 12))
    with Server("--num-blocks", "40", "--kv-block-size", "8", model=str(tmp_path)) as one:
        for _ in range(2):
            status, answer = one.post("/v1/completions", GREEDY | {"max_tokens": 12})
            assert (status, answer["choices"][0]["text"]) == (200, expected)


def test_blocks_do_not_limit_the_answer_of_a_model_with_states_alone(tmp_path):
    tiny_families.save(tmp_path, "mamba")
    with Server("--num-blocks", "40", "--kv-block-size", "8", model=str(tmp_path)) as one:
        body = {"prompt": "a" * 400, "max_tokens": 5, "ignore_eos": True}
        status, answer = one.post("/v1/completions", body)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 5)


def test_sigterm_lets_requests_end_and_takes_no_more():
    body = {"messages": [{"role": "user", "content": "go on"}], "max_tokens": 200, "logit_bias": {"256": -100}}
    with Server("--num-blocks", "400") as one, ThreadPoolExecutor() as threads:
        answer = threads.submit(one.raw, "/v1/chat/completions", body | {"stream": True})
        while not any(value for name, value in one.metrics().items() if name.startswith("kvpool_requests{")):
            time.sleep(0.01)
        one.process.send_signal(signal.SIGTERM)
        while one.get("/ready")[0] != 503:
            time.sleep(0.01)
        assert one.post("/v1/completions", GREEDY)[0] == 503
        status, errors = one.stop()  # its second signal comes at once, and counts as the first
        assert answer.result()[1].endswith("data: [DONE]\n\n")
    assert status == 0 and "stopped, 0 blocks in use" in errors, errors
    logged = re.findall(r"^[-\d]+ [:\d]+ (\w+ /\S+) id=req_\w+ (status=\d+) .*total=[.\d]+", errors, re.MULTILINE)
    logged = [" ".join(one) for one in logged]
    due = ["GET /ready status=503", "POST /v1/chat/completions status=200", "POST /v1/completions status=503"]
    assert sorted(set(logged)) == due, errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/no/such/folder"], "--model /no/such/folder: no such folder"),
        (["--port", "x"], "--port x: not a whole number"),
        (["--port", "65536"], "--port 65536: out of range, 0..65535"),
        (["--num-blocks", "2"], "--num-blocks 2: out of range"),
        (["--num-blocks", "20", "--memory", "1MiB"], "--memory and --num-blocks exclude each other"),
        (["--host", "0.0.0.0"], "--api-key, --api-keys or the variable KVPOOL_API_KEY"),
        (["--api-key", ""], "--api-key: a key must be ASCII, and not empty"),
        (["--memory", "lots"], "--memory lots: 'lots' is not a size"),
        (["--events-replay", "tcp://127.0.0.1:9"], "--events-replay: needs --events"),
        (["--allowed-origins", "https://a.example, b.example"], "--allowed-origins b.example: must be"),
        (["--allowed-origins", "https://a.example/"], "--allowed-origins https://a.example/: must be"),
        (["--allowed-origins", "null, file://, app://obsidian.md, http://[::1]:80, x"], "--allowed-origins x: must be"),
        (["--events", "tcp:/x"], "--events: tcp:/x cannot be bound: Invalid argument"),
        (["--memory", "2GiB:1GiB"], "--memory 2GiB:1GiB: 2GiB is above 1GiB"),
        (["--memory", "1GiB:"], "is not a size"),
        (["--memory", ":1GiB"], "is not a size"),
        (["--memory", "few:1GiB"], "--memory few: 'few' is not a size"),
        (["--memory=-1:5"], "is not a size"),
        (["--memory", "1GiB:2GiB", "--num-blocks", "9"], "--memory and --num-blocks exclude each other"),
        (["--idle-release", "60"], "--idle-release 60: needs --memory"),
        (["--memory", "auto", "--idle-release", "0"], "--idle-release 0: out of range"),
        (["--memory", "auto", "--idle-release", "soon"], "--idle-release soon: not a number"),
        (["--memory", "1GiB", "--keep-free", "1GiB"], "--keep-free 1GiB: needs --memory auto or MIN:MAX"),
        (["--memory", "auto", "--keep-free", "1000TiB"], "--keep-free 1000TiB: the machine has"),
        (["--memory", "auto", "--keep-free", "lots"], "--keep-free lots: 'lots' is not a size"),
        (["--store-max", "10GB"], "--store-max: only with --store"),
        (["--store", "x", "--store-max", "0"], "--store-max 0: must be more than 0"),
        (["--store", "redis://:SECRET@host:notaport", "--store-max", "1GB"], "the server has its own limit"),
    ],
)
def test_nonsense_is_refused_in_one_line(capsys, arguments, message):
    assert main(["serve", "--model", "tiny", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err and captured.err.count("\n") == 1, captured.err
    assert "SECRET" not in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "1"], "no usable block: blocks need 48.00 KiB at least; there are 1 B"),
        (["--kv-bits", "8"], "--kv-group-size 64"),
        (["--kv-bits", "8", "--log", "json"], '"level": "error", "message": "kvpool serve: '),
        (["--model", "BROKEN"], "No safetensors found"),
        (["--store", "/proc/nowhere/at/all"], "--store /proc/nowhere/at/all: "),
        (["--store", "redis://:SECRET@host:notaport"], "--store ...: "),
        (["--store", "redis://:SECRET@host:notaport", "--json"], "--store ...: "),
    ],
)
def test_a_model_that_cannot_be_made_is_reported_before_the_port_opens(
    capsys, monkeypatch, tmp_path, arguments, message
):
    left = []
    monkeypatch.setattr(serve, "leave", left.append)
    (tmp_path / "config.json").write_text("{}")
    arguments = [str(tmp_path) if one == "BROKEN" else one for one in arguments]
    with on_cpu():
        assert main(["serve", "--model", "tiny", *arguments, "--port", "0"]) == 2
    assert left == [2], "the process must end before the interpreter shuts down: threads of MLX run"
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err and "SECRET" not in captured.err
    assert captured.err.count("\n") == 2 and "loading" in captured.err, captured.err


def test_port_in_use_is_reported_before_the_model_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--model", "tiny", "--port", str(port)]) == 2
    captured = capsys.readouterr()
    assert f"--port {port}: Address already in use" in captured.err and "loading" not in captured.err


HELD = """
import sys
from kvpool.adapters.mlx_lm import loading
from kvpool.cli import main
load = loading.load
loading.load = lambda *args: sys.stdin.readline() and load(*args)
sys.exit(main(sys.argv[1:]))
"""


def test_of_two_servers_that_load_for_one_port_one_is_refused_in_one_line():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [sys.executable, "-c", HELD, "serve", "--model", "tiny", "--num-blocks", "40", "--port", port, "--json"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    env = os.environ | {"PYTHONPATH": os.getcwd(), "MLX_DEFAULT_DEVICE": "cpu"}
    both = [subprocess.Popen(command, env=env, text=True, **pipes) for _ in range(2)]
    for one in both:
        assert "loading tiny" in one.stderr.readline()
    for one in both:
        one.stdin.write("go\n")
        one.stdin.flush()
    while all(one.poll() is None for one in both):
        time.sleep(0.05)
    loser, winner = sorted(both, key=lambda one: one.poll() is None)
    assert loser.communicate()[1] == f"kvpool serve: --host 127.0.0.1 --port {port}: Address already in use\n"
    assert loser.returncode == 2
    assert json.loads(winner.stdout.readline())["url"].endswith(port)
    winner.send_signal(signal.SIGTERM)
    assert "stopped, 0 blocks in use" in winner.communicate()[1] and winner.returncode == 0


def test_printed_address_of_ipv6_is_served():
    with Server("--num-blocks", "40", "--host", "0:0:0:0:0:0:0:1", "--api-key", "k") as one:
        port = one.facts["url"].rpartition(":")[2]
        assert one.facts["url"] == f"http://[0:0:0:0:0:0:0:1]:{port}"
        assert one.get("/health")[0] == 200


def test_request_that_ends_by_a_stop_string_has_times(server):
    before = server.idle_metrics()
    body = GREEDY | {"logit_bias": {"70": 100}}
    (letter,) = set(server.post("/v1/completions", body | {"max_tokens": 4})[1]["choices"][0]["text"])
    assert server.post("/v1/completions", body | {"stop": letter * 2})[1]["choices"][0]["finish_reason"] == "stop"
    after = server.idle_metrics()
    for name in ("request", "queue", "time_to_first_token"):
        assert after[f"kvpool_{name}_seconds_count"] == before[f"kvpool_{name}_seconds_count"] + 2


@pytest.mark.parametrize("drafts", [["--speculate", "4"], ["--speculate", "3", "--draft-model", "tiny"]])
def test_server_that_speculates_answers_as_the_stock_model(expected, drafts):
    with Server("--num-blocks", "40", "--kv-block-size", "8", "--max-tokens", "30", *drafts) as one:
        for prompt in (GREEDY, GREEDY | {"n": 2}):
            status, answer = one.post("/v1/completions", prompt)
            assert status == 200 and {choice["text"] for choice in answer["choices"]} == {expected}
        accepted, drafted = (one.metrics()[f"kvpool_{name}_tokens_total"] for name in ("accepted", "drafted"))
    assert accepted <= drafted and (accepted > 20) == ("--draft-model" in drafts)


def test_defaults_of_sampling_are_the_makers_of_the_model_unless_the_command_line_has_others(tmp_path):
    tiny.write(tmp_path, tiny.CONFIG, *tiny.make())
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.0, "top_p": 0.5, "do_sample": true}')
    for options, is_greedy in (((), True), (("--temp", "1"), False)):
        with Server("--num-blocks", "100", *options, model=str(tmp_path)) as server:
            body = {name: value for name, value in GREEDY.items() if name != "temperature"}
            texts = {server.post("/v1/completions", body)[1]["choices"][0]["text"] for _ in range(3)}
            assert (len(texts) == 1) == is_greedy
