"""``kvpool serve`` and ``kvpool generate`` with a budget per sequence, and with quantized blocks."""

import json

import pytest
from mlx_models import batch_tokens, on_cpu, solo_tokens
from server_process import Server

from benchmarks import tiny_families
from kvpool.adapters.mlx_lm import host, install, tiny
from kvpool.cli import main, serve
from kvpool.eviction import H2O, SlidingWindow

PROMPT = "The block table maps positions to slots, and a policy says which of them stay."
H2O_48 = ["--eviction", "h2o", "--max-kv", "48", "--heavy", "20", "--sink", "2", "--slack", "4"]


@pytest.fixture(scope="module")
def server():
    options = ["--num-blocks", "60", "--kv-block-size", "8", "--max-tokens", "60", "--chunk", "7"]
    with Server(*H2O_48, *options) as one:
        yield one


def said(policy, one_at_a_time=False, n=60, **bits):
    """What mlx-lm's own engines say in this process."""
    with on_cpu():
        model, tokenizer = tiny.make()
        with install(model, 60, block_size=8, prefix_cache=True, eviction=policy, **bits):
            prompt = tokenizer.encode(PROMPT)
            tokens = solo_tokens(model, prompt, n) if one_at_a_time else batch_tokens(model, [prompt], n)[0]
        return tokenizer.decode(tokens[: tokens.index(256)] if 256 in tokens else tokens)


def test_server_keeps_its_budget(server):
    assert server.facts["eviction"] == "h2o"
    expected = said(H2O(max_kv=48, heavy=20, sink=2, slack=4))
    assert expected != said(None), "a budget that changes nothing shows nothing"
    status, answer = server.post("/v1/completions", {"prompt": PROMPT, "temperature": 0})
    assert status == 200 and answer["choices"][0]["text"] == expected
    found = server.idle_metrics()
    assert found["kvpool_evicted_tokens_total"] >= answer["usage"]["total_tokens"] - 1 - 48
    assert found["kvpool_blocks_used_peak"] <= 2 * 7 + 2, "what it holds, and copies"


def test_answer_longer_than_the_pool_is_served(server):
    """Of 59 blocks of 8 tokens; it would be refused without a budget."""
    body = {"prompt": PROMPT, "max_tokens": 500, "temperature": 0.0, "logit_bias": {"256": -100}}  # it never ends
    status, answer = server.post("/v1/completions", body)
    assert status == 200 and answer["usage"]["completion_tokens"] == 500 > 59 * 8


def test_quantized_server_says_what_quantized_blocks_say():
    bits = {"k_bits": 8, "v_bits": 4, "quant_group_size": 32}
    expected = said(SlidingWindow(max_kv=40), **bits)
    options = ["--k-bits", "8", "--v-bits", "4", "--kv-group-size", "32", "--eviction", "window", "--max-kv", "40"]
    options += ["--num-blocks", "60", "--kv-block-size", "8", "--chunk", "7"]
    with Server(*options) as server:
        assert server.facts["bits"] == bits
        status, answer = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 60, "temperature": 0})
    assert status == 200 and answer["choices"][0]["text"] == expected
    assert expected != said(SlidingWindow(max_kv=40))


@pytest.mark.parametrize(
    ("bits", "given"), [(["--kv-bits", "4"], {"k_bits": 4, "v_bits": 4}), (["--k-bits", "8"], {"k_bits": 8})]
)
def test_tiny_model_takes_quantized_storage(capsys, bits, given):
    options = ["--model", "tiny", *bits, "--kv-group-size", "32", "--json"]
    with on_cpu():
        assert main(["generate", "--prompt", PROMPT, "--max-tokens", "40", *options]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["answers"]
    assert main(["plan", "--memory", "1GiB", *options]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert {name: planned[name] for name in ("k_bits", "v_bits") if planned[name]} == given
    assert answer["samples"][0]["text"] == said(None, n=40, **given, quant_group_size=32)


def test_generate_keeps_a_budget(capsys):
    options = ["--prompt", PROMPT, "--max-tokens", "60", "--chunk", "7", "--kv-block-size", "8"]
    with on_cpu():
        assert main(["generate", "--model", "tiny", *options, *H2O_48, "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["answers"]
    with on_cpu():
        assert main(["generate", "--model", "tiny", *options, "--json"]) == 0
    (free,) = json.loads(capsys.readouterr().out)["answers"]
    assert answer["samples"][0]["text"] != free["samples"][0]["text"] == said(None)


NONSENSE = [
    (["--eviction", "lru", "--max-kv", "64"], "--eviction lru: not one of h2o, window, blocks"),
    (["--eviction", "h2o"], "--eviction h2o: needs --max-kv"),
    (["--max-kv", "64"], "--max-kv 64: only with --eviction"),
    (["--eviction", "h2o", "--max-kv", "0"], "--max-kv 0: out of range, 1.."),
    (
        ["--eviction", "h2o", "--max-kv", "16", "--heavy", "10", "--sink", "8"],
        "--eviction h2o: --max-kv is 16, too small for --sink 8 + --heavy 10 and a --recent token",
    ),
    (
        ["--eviction", "window", "--max-kv", "8", "--sink", "8"],
        "--eviction window: --max-kv is 8, too small for --sink 8",
    ),
    (["--eviction", "window", "--max-kv", "64", "--slack", "8"], "--slack 8: not with --eviction window, only"),
    (
        ["--eviction", "blocks", "--max-kv", "16", "--recent", "16"],
        "--eviction blocks: --max-kv is 16, smaller than --sink 4 + --recent 16",
    ),
    (
        ["--eviction", "blocks", "--max-kv", "64", "--kv-block-size", "32"],
        "--eviction blocks: --max-kv is 64, in blocks of 32 the least is 80: those of --sink 4, --recent 16 and",
    ),
    (
        ["--eviction", "window", "--max-kv", "64", "--heavy", "8"],
        "--heavy 8: not with --eviction window, only with h2o",
    ),
    (["--eviction", "h2o", "--max-kv", "64", "--alpha", "1"], "--eviction h2o: --alpha is 1.0, it must be in (0, 1)"),
    (["--eviction", "h2o", "--max-kv", "64", "--scores", "max"], "kind is 'max', it must be one of raw, mass"),
    (["--kv-bits", "5"], "--kv-bits 5: not 8 or 4"),
    (["--kv-bits", "8", "--v-bits", "4"], "--kv-bits is for both: not with --k-bits or --v-bits"),
    (["--kv-group-size", "64"], "--kv-group-size: only with --kv-bits"),
    (["--kv-bits", "8", "--kv-group-size", "48"], "--kv-group-size 48: not 32, 64 or 128"),
    (["--max-running", "262145"], "--max-running 262145: out of range, 1..262144"),
    (["--chunk", "1073741824"], "--chunk 1073741824: out of range, 1..1073741823"),
]


def refusal(capsys, monkeypatch, command, options):
    """What a command says that must be refused."""
    monkeypatch.setattr(serve, "leave", lambda status: None)
    mine = ["--port", "0"] if command == "serve" else ["--prompt", "x"]
    with on_cpu():
        assert main([command, "--model", "tiny", *mine, *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.replace("kvpool serve: loading tiny ...\n", "")


@pytest.mark.parametrize("command", ["serve", "generate"])
@pytest.mark.parametrize(("options", "message"), NONSENSE)
def test_nonsense_is_refused_in_one_line(capsys, monkeypatch, command, options, message):
    said = refusal(capsys, monkeypatch, command, options)
    assert message in said and said.count("\n") == 1, said


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_policy_on_a_route_without_scores_is_refused(capsys, monkeypatch, command):
    monkeypatch.setattr(host, "reason_to_gather", lambda kv: "nobody knows this model")
    said = refusal(capsys, monkeypatch, command, ["--eviction", "h2o", "--max-kv", "64"])
    assert "--eviction h2o needs scores, and this model's route is gather: nobody knows this model" in said


def test_beam_with_a_budget_is_refused(capsys, monkeypatch):
    said = refusal(capsys, monkeypatch, "generate", ["--beam", "2", *H2O_48])
    assert "--eviction h2o and --beam exclude each other: a beam keeps every token" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--v-bits", "8"], "v_head_dim is 16, not a multiple of --kv-group-size 64"),
        (["--speculate", "4"], "--speculate: the pool has a state group"),
    ],
)
def test_what_a_model_cannot_have_is_refused_by_its_flag(capsys, tmp_path, options, said):
    tiny_families.save(tmp_path, "qwen3_5")
    with on_cpu():
        assert main(["generate", "--model", str(tmp_path), "--prompt", "x", *options]) == 2
    assert said in capsys.readouterr().err
