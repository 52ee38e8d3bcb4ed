"""The command ``python -m benchmarks.replay``: what it prints and draws, what it refuses, and how it exits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from traces import output

from benchmarks.command import main
from benchmarks.replay import __main__ as command
from benchmarks.replay import replay, synthetic_trace

SYNTHETIC = ("--synthetic", "--concurrency", "8")
ROW = {"timestamp": 0, "input_length": 1100, "output_length": 20, "hash_ids": [0, 1, 2]}


@pytest.fixture
def trace_file(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(ROW)}\n{json.dumps(ROW)}\n")
    return str(path)


def test_json_has_every_counter_of_the_replay(capsys):
    facts = json.loads(output(capsys, *SYNTHETIC, "--num-blocks", "63", "--json"))
    assert facts["trace"]["requests"] == 67
    (run,) = facts["runs"]
    expected = replay(synthetic_trace(), num_blocks=63, concurrency=8)
    assert expected.counters.items() <= run.items()
    assert run["hit_rate"] == expected.hit_rate


def test_published_file_is_replayed(capsys, trace_file):
    facts = json.loads(output(capsys, trace_file, "--num-blocks", "20", "--json"))
    (run,) = facts["runs"]
    assert (run["block_size"], run["finished"], run["hit_tokens"]) == (512, 2, 1024)


def test_trace_alone_is_replayed_with_blocks_that_are_always_enough(capsys, trace_file):
    (run,) = json.loads(output(capsys, trace_file, "--json"))["runs"]
    assert (run["num_blocks"], run["finished"], run["preemptions"]) == (2 * 3, 2, 0)  # 1,120 tokens each
    assert "2 finished" in output(capsys, trace_file)


def test_sweep_compares_pools_and_names_the_one_that_is_enough(capsys):
    out = output(capsys, *SYNTHETIC, "--sweep", "63,498,100000")
    lines = out.splitlines()
    assert [line.split()[1] for line in lines[3:6]] == ["63", "498", "100,000"]
    assert lines[6].startswith("498 blocks (7,968 tokens) are enough")
    runs = json.loads(output(capsys, *SYNTHETIC, "--sweep", "63,498,100000", "--json"))["runs"]
    assert [run["num_blocks"] for run in runs] == [63, 498, 100_000]
    assert [run["evictions"] for run in runs] == [1320, 372, 0]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--num-blocks", "9"], "--synthetic"),
        (["TRACE", "--synthetic", "--num-blocks", "9"], "--synthetic"),
        (["--synthetic", "--num-blocks", "0"], "--num-blocks 0: out of range"),
        (["--synthetic", "--num-blocks", "many"], "--num-blocks many: not a whole number"),
        (["--synthetic", "--num-blocks", "9", "--block-size", "0"], "--block-size"),
        (["--synthetic", "--num-blocks", "9", "--concurrency", "0"], "--concurrency"),
        (["--synthetic", "--num-blocks", "9", "--sweep", "9,10"], "exclude"),
        (["--synthetic", "--sweep", "9,x"], "--sweep x"),
        (["--synthetic", "--num-blocks", "9", "--limit", "0"], "--limit"),
        (["--synthetic", "--num-blocks", "9", "--seed", "-1"], "--seed"),
        (["missing.jsonl", "--num-blocks", "9"], "missing.jsonl: No such file"),
        (["--synthetic", "--groups", "nobody", "--num-blocks", "9"], "--groups nobody"),
        (["--synthetic", "--groups", "qwen3_5"], "--num-blocks"),
        (["--synthetic", "--groups", "qwen3_5", "--num-blocks", "9", "--sweep", "9"], "--num-blocks"),
        (["--synthetic", "--groups", "qwen3_5", "--num-blocks", "many"], "--num-blocks many"),
        (["--synthetic", "--groups", "qwen3_5", "--num-blocks", "1KiB"], "out of range"),
        (["--synthetic", "--groups", "gemma4", "--num-blocks", "9"], "block_size"),
    ],
)
def test_bad_option_is_refused_in_one_line(capsys, argv, said):
    assert main(command, argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.startswith("python -m benchmarks.replay: ")
    assert err.count("\n") == 1


def test_malformed_trace_is_refused_with_its_line(capsys, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(ROW) + "\n{}\n")
    assert main(command, [str(path), "--num-blocks", "9"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"python -m benchmarks.replay: [read_trace] {path}:2: input_length is missing\n"


def test_progress_shows_on_a_terminal_and_leaves_stdout_alone():
    pytest.importorskip("rich")
    pty = pytest.importorskip("pty")
    try:
        reader, terminal = pty.openpty()
    except OSError as error:
        pytest.skip(f"no pseudo terminal on this machine: {error}")
    command = [sys.executable, "-m", "benchmarks.replay", *SYNTHETIC, "--num-blocks", "63"]
    shown = []
    for argv in (command, [*command, "--json"]):
        result = subprocess.run(argv, stdout=subprocess.PIPE, stderr=terminal, text=True, cwd=Path(__file__).parents[2])
        assert result.returncode == 0
        assert "67/67" not in result.stdout
        os.write(terminal, b"end")
        text = b""
        while not text.endswith(b"end"):
            text += os.read(reader, 2**16)
        shown.append(text.decode())
    os.close(reader)
    os.close(terminal)
    assert "67/67" in shown[0]
    assert shown[1] == "end"  # --json: nothing
