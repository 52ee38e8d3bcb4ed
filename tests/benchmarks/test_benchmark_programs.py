"""The benchmarks with tables of their own run, on sizes of nothing, and `python -m benchmarks` asks for their gates."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as whole
from benchmarks import block_pool, eviction, vllm_source
from benchmarks.command import main

ROOT = Path(__file__).resolve().parents[2]


# ----------------------------------------------------------------------------------------------- all of them


def statuses(monkeypatch, arguments, **status_of):
    """The programs that ``python -m benchmarks`` runs, and its exit status, where they end with these."""
    asked = []

    def run(command, **options):
        asked.append(command[1:])
        return subprocess.CompletedProcess(command, status_of.get(command[2].rpartition(".")[2], 0))

    monkeypatch.setattr(whole, "run_benchmarks", lambda arguments: [])
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    with pytest.raises(SystemExit) as end:
        whole.main()
    return asked, end.value.code


def test_gates_of_a_program_decide_the_exit_status_of_all(monkeypatch, capsys):
    programs = [["-m", "benchmarks.eviction", "--gates"]]
    assert statuses(monkeypatch, ["--gates"]) == (programs, 0)
    assert statuses(monkeypatch, ["--gates"], eviction=1) == (programs, 1)
    assert "A TARGET IS MISSED" in capsys.readouterr().out
    assert statuses(monkeypatch, [], eviction=1) == (programs, 0)


def test_every_row_of_the_table_runs():
    records = whole.run_benchmarks([])
    rows = {record["row"] for record in records if "row" in record}
    assert whole.LIMITS.keys() <= rows and len(records) > 50


# ----------------------------------------------------------------------------------------------- pool_memory


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counted by glibc's malloc")
def test_memory_of_a_pool_is_what_the_docs_say():
    from benchmarks.pool_memory import BLOCK_SIZE, rates

    row = (ROOT / "docs" / "limits.md").read_text().split("- Memory of a pool: ")[1].split("\n\n")[0]
    block, sequence, entry, cached_block, cached_sequence, *per_token, event = map(int, re.findall(r"\b\d+\b", row))
    plain, cached, told = rates(), rates(prefix_cache=True), rates(prefix_cache=True, events=1)
    expected = {"block, at best": block, "block, at worst": block, "sequence": sequence, "entry of its table": entry}
    assert plain == pytest.approx(expected, rel=0.05)  # rows of tables begin at cache lines
    block, sequence = block + cached_block + per_token[0] * BLOCK_SIZE, sequence + cached_sequence
    expected |= {"block, at best": block, "block, at worst": block, "sequence": sequence + per_token[1] * BLOCK_SIZE}
    assert cached == pytest.approx(expected, rel=0.05)
    assert [told[name] - cached[name] for name in list(told)[:2]] == pytest.approx([event] * 2, rel=0.01)


# -------------------------------------------------------------------------------------------------- eviction


def test_eviction_prints_a_share_for_every_policy_and_its_gate_is_the_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(eviction, "PASSES", 1)
    asked = ["--model", "tiny", "--rows", "2", "--tokens", "64", "--steps", "8", "--json"]
    monkeypatch.setattr(eviction, "SHARE_MAX", 1)
    assert main(eviction, [*asked, "--gates"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(eviction.policies(64))
    works = ("H2O", "H2O, raw", "blocks")  # a window is a layer group of the pool, and nothing of it runs
    assert all((0 < row["value"] < 1) == (row["name"] in works) for row in rows)
    monkeypatch.setattr(eviction, "SHARE_MAX", -1)
    assert main(eviction, [*asked, "--gates"]) == 1
    assert main(eviction, asked) == 0, "not asked for"


# ------------------------------------------------------------------------------------------------ block pool


def test_block_pool_without_vllm_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setenv(vllm_source.VARIABLE, "/nowhere")
    assert main(block_pool, []) == 2
    assert "benchmarks.block_pool: vLLM is not here: KVPOOL_VLLM has to name" in capsys.readouterr().err


@pytest.mark.parametrize(("limit", "missed"), [(0, False), (1e9, True)])
def test_block_pool_has_a_row_per_call_and_its_gate_is_the_exit_status(monkeypatch, capsys, limit, missed):
    if vllm_source.load() is None:
        pytest.skip(vllm_source.ABSENT)
    monkeypatch.setattr(block_pool, "TIMES_MIN", {1: limit, 100: limit})
    assert main(block_pool, ["--rounds", "4", "--gates"]) == missed
    rows = capsys.readouterr().out.splitlines()[:-1]
    calls = ("get", "free", "lookup", "cache", "touch", "evict")
    assert len(rows) == 22 and all(sum(row[3:].startswith(call) for row in rows) >= 2 for call in calls)
    assert all(row.startswith("NO" if missed else "ok") for row in rows)
