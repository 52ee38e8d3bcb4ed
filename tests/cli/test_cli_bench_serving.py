"""`python -m benchmarks.serving`: its options, its JSON, its picture and its gates."""

from __future__ import annotations

import json

from benchmarks.command import main
from benchmarks.gate import Gate
from benchmarks.serving import command, gates

NULL = ["--model", "null", "--requests", "30", "--shared-prefix", "40"]
NAMED = {
    *("stock_tokens_per_sec", "continuous_tokens_per_sec", "continuous_steady_tokens_per_sec"),
    *("wall_seconds", "phases", "prefill_chunk_ms", "paged_kv_bytes_read"),
    *("blocks_touched", "blocks_in_use", "COW_clones_per_token", "hit_rate", "preemptions"),
    *(f"{name}_ms_p{p}" for name in ("ttft", "tpot", "itl", "decode_tick") for p in (50, 95, 99)),
}


def served(capsys, *options):
    assert main(command, [*NULL, *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_every_number_by_name_and_simulated_time_is_the_same_every_time(capsys):
    one, two = served(capsys, "--rate", "20"), served(capsys, "--rate", "20")
    assert one.keys() >= NAMED
    for found in (one, two):
        del found["seconds"]
    assert one == two
    assert one["continuous_tokens_per_sec"] > one["stock_tokens_per_sec"] > 0
    assert one["simulated"] is True
    assert one["hit_rate"] > 0.2
    assert one["blocks_leaked"] == 0
    for run in one["runs"].values():
        assert sum(run["phases"][name]["tokens"] for name in ("ramp", "steady", "tail")) == one["workload"]["tokens"]


def test_a_model_is_served_beside_stock_with_the_same_tokens(capsys):
    args = ["--requests", "6", "--prompt", "uniform:5:20", "--output", "uniform:3:9", "--shared-prefix", "32"]
    assert main(command, ["--model", "tiny", *args, "--repetitions", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["same_tokens"] == 1.0
    assert found["runs"].keys() == {"kvpool", "stock"}
    assert {run["tokens"] for run in found["runs"].values()} == {found["workload"]["tokens"]}
    assert found["paged_kv_bytes_read"] > 0


# ------------------------------------------------------------------------------------------------- gates


def test_gates_decide_the_exit_status(capsys, monkeypatch):
    for value, status in ((2.0, 0), (0.5, 1), (float("nan"), 1)):
        monkeypatch.setattr(gates, "null_gate", lambda value=value: Gate("a gate", value, 1.0))
        assert main(command, ["--model", "null", "--gates"]) == status
        out = capsys.readouterr().out
        assert out.startswith("ok" if status == 0 else "NO")
        assert main(command, ["--model", "null", "--gates", "--json"]) == status
        assert json.loads(capsys.readouterr().out)["held"] is (status == 0)
