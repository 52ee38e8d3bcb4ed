"""`python -m benchmarks.serving`: its options, its JSON, its picture and its gates."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.command import main
from benchmarks.gate import Gate
from benchmarks.serving import command, gates
from benchmarks.serving.runs import Bench, make_bench
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


def test_the_seed_the_target_and_the_samples_reach_the_workload(capsys):
    base = served(capsys)
    assert served(capsys, "--seed", "2")["workload"]["tokens"] != base["workload"]["tokens"]
    assert served(capsys, "--samples", "3")["workload"]["tokens"] == 3 * base["workload"]["tokens"]
    assert served(capsys, "--samples", "3")["COW_clones_per_token"] > 0
    args = ["--model", "null", "--tokens-target", "500", "--json", "--against", "none"]
    assert main(command, args) == 0
    found = json.loads(capsys.readouterr().out)
    assert 500 <= found["workload"]["tokens"] < 700
    assert found["stock_tokens_per_sec"] is None


def test_a_trace_is_served(capsys, tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 100 * i, "input_length": 600, "output_length": 30, "hash_ids": [0, i]} for i in range(1, 6)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    args = ["--model", "null", "--trace", str(path), "--trace-scale", "4", "--json"]
    assert main(command, args) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["workload"]["prompt_tokens"] == 5 * 150
    assert found["hit_rate"] > 0


@pytest.mark.long
def test_the_table_and_the_picture(capsys, tmp_path):
    path = tmp_path / "run.png"
    assert main(command, [*NULL, "--plot", str(path)]) == 0
    out = capsys.readouterr().out
    for text in ("kvpool", "slots of the longest", "ramp", "steady", "tail", "spikes"):
        assert text in out
    assert path.read_bytes().startswith(b"\x89PNG")


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


@pytest.mark.parametrize("shared_prefix", [32, 0])
def test_stock_computes_a_shared_prefix_once_with_the_prompt_cache_of_its_server(shared_prefix):
    lm = pytest.importorskip("benchmarks.serving.lm", reason="it runs models of mlx-lm")
    model, vocab_size = lm.load("tiny")
    nbytes = lm.block_nbytes(model, 16)
    rng = np.random.default_rng(3)
    shared = rng.integers(0, vocab_size, 32)
    prompts = [np.append(shared, rng.integers(0, vocab_size, 8)).astype(np.int32) for _ in range(6)]
    tokens, computed = [], []
    for prefix in (shared_prefix, 0):
        server = lm.StockServer(model, 2, chunk=32, block_nbytes=nbytes, shared_prefix=prefix)
        for number, prompt in enumerate(prompts):
            server.add(number, prompt, 5)
        computed.append(0)
        while server.is_busy:
            server.tick()
            computed[-1] += server.describe().prefill_tokens
        tokens.append(server.tokens)
        server.close()
    assert tokens[0] == tokens[1]
    assert computed[1] >= 6 * 39 and (computed[0] <= computed[1] - 4 * 32) == (shared_prefix > 0)


# ------------------------------------------------------------------------------------------------- gates


def test_scheduler_and_pool_keep_up_with_a_million_tokens_a_second():
    gate = gates.null_gate(rounds=3, steps=60)
    assert gate.holds, gate


def test_a_slow_scheduler_misses_the_gate(monkeypatch):
    """A third of a millisecond more for each step is too much."""
    from time import process_time

    from kvpool import Scheduler

    schedule = Scheduler.schedule

    def slow(self):
        end = process_time() + 4e-4
        while process_time() < end:
            pass
        return schedule(self)

    monkeypatch.setattr(Scheduler, "schedule", slow)
    assert not gates.null_gate(rounds=2, steps=40).holds


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


def test_stock_has_the_budgets_of_the_engine():
    lm = pytest.importorskip("benchmarks.serving.lm", reason="it runs models of mlx-lm")
    bench = make_bench(Settings("tiny", requests=4, prompt="300", output="4", max_batch=4, chunk=64, shared_prefix=0))
    for name in ("kvpool", "stock"):
        assert bench.batch(name) == 4
        record = bench.run(name).record
        assert 48 <= record.column("prefill_tokens").max() <= 64 + 4  # with the places of rows that do not decode yet
    assert lm.PROMPTS == 8  # of the server of mlx-lm; here four prompts share 64 tokens


def test_gates_decide_the_exit_status(capsys, monkeypatch):
    for value, status in ((2.0, 0), (0.5, 1), (float("nan"), 1)):
        monkeypatch.setattr(gates, "null_gate", lambda value=value: Gate("a gate", value, 1.0))
        assert main(command, ["--model", "null", "--gates"]) == status
        out = capsys.readouterr().out
        assert out.startswith("ok" if status == 0 else "NO")
        assert main(command, ["--model", "null", "--gates", "--json"]) == status
        assert json.loads(capsys.readouterr().out)["held"] is (status == 0)
