"""`python -m benchmarks.serving`: its options, its JSON, its picture and its gates."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from benchmarks.command import main
from benchmarks.gate import Gate
from benchmarks.serving import command, gates
from benchmarks.serving.runs import Bench
from benchmarks.serving.settings import Settings

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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rate", "0"], "--rate 0: has to be more than 0"),
        (["--rate", "nan"], "--rate nan: has to be more than 0"),
        (["--requests", "3", "--tokens-target", "3"], "exclude each other"),
        (["--prompt", "some"], "--prompt some: lengths are"),
        (["--preempt", "x"], "--preempt x: there are last"),
        (["--against", "x"], "--against x: there are stock"),
        (["--num-blocks", "1"], "--num-blocks 1: the longest request has"),
        (["--trace", "/nowhere"], "--trace /nowhere: No such file"),
        (["--plot", "/nowhere/x.png"], "--plot /nowhere/x.png: not a file"),
    ],
)
def test_bad_values_are_named_in_one_line(capsys, options, said):
    assert main(command, ["--model", "null", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert len(err.splitlines()) == 1


def test_a_model_is_served_beside_stock_with_the_same_tokens(capsys):
    args = ["--requests", "6", "--prompt", "uniform:5:20", "--output", "uniform:3:9", "--shared-prefix", "32"]
    assert main(command, ["--model", "tiny", *args, "--repetitions", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["same_tokens"] == 1.0
    assert found["runs"].keys() == {"kvpool", "stock"}
    assert {run["tokens"] for run in found["runs"].values()} == {found["workload"]["tokens"]}
    assert found["paged_kv_bytes_read"] > 0


# ------------------------------------------------------------------------------------------------- gates


def fake_run(rate=2.0, cpu_rate=2.0, tokens="same", blocks=1, ratio=1.0, spikes=()):
    summary = {"blocks_in_use_peak": blocks, "steady_tick_cpu_p99_over_p50": ratio}
    phases = SimpleNamespace(spikes=spikes)
    return SimpleNamespace(rate=rate, cpu_rate=cpu_rate, tokens={0: tokens}, summary=summary, cpu_phases=phases)


@pytest.mark.parametrize(
    ("fault", "missed"),
    [
        ({}, []),
        ({"rate": 1.5}, ["tokens/s over"]),
        ({"cpu_rate": 1.5}, ["tokens/s of CPU time"]),
        ({"tokens": "other"}, ["the same tokens"]),
        ({"blocks": 5}, ["bytes at the peak"]),
        ({"ratio": 4.0}, ["steady steps"]),
        ({"spikes": (3,)}, ["spikes"]),
        ({"rate": float("nan")}, ["tokens/s over"]),
    ],
)
def test_each_gate_beside_stock_is_missed_by_its_own_fault(monkeypatch, fault, missed):
    def run_all(bench, names, repetitions):
        runs = {"kvpool": fake_run(**fault), "stock": fake_run(rate=1.0, cpu_rate=1.0, blocks=10)}
        return {name: [runs[name]] * repetitions for name in names}

    monkeypatch.setattr(gates, "run_all", run_all)
    found = gates.compared("a row", Bench(Settings("tiny", shared_prefix=16, repetitions=3, num_blocks=8), None))
    wrong = [gate.name for gate in found if not gate.holds]
    assert len(wrong) == len(missed) and all(one in name for one, name in zip(missed, wrong, strict=True)), wrong


def test_gates_decide_the_exit_status(capsys, monkeypatch):
    for value, status in ((2.0, 0), (0.5, 1), (float("nan"), 1)):
        monkeypatch.setattr(gates, "null_gate", lambda value=value: Gate("a gate", value, 1.0))
        assert main(command, ["--model", "null", "--gates"]) == status
        out = capsys.readouterr().out
        assert out.startswith("ok" if status == 0 else "NO")
        assert main(command, ["--model", "null", "--gates", "--json"]) == status
        assert json.loads(capsys.readouterr().out)["held"] is (status == 0)
