"""The benchmarks with tables of their own run, on sizes of nothing, and `python -m benchmarks` asks for their gates."""

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as whole
from benchmarks import block_pool, eviction, quantized, vllm_source
from kvpool_backends.cpu import CPUBackend, default_isa, isas

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"HEADS": 1, "GROUP": 1, "DIM": 64, "ROWS": 2}
NO_LIMITS = {"DECODE_MAX": 1e9, "OF_FLOAT32_MIN": 0, "WRITE_MAX": 1e9, "ERROR_MAX": 1}
ASKED = ["--threads", "1", "--layouts", "NHD", "--context", "64", "--repetitions", "1"]


@pytest.fixture
def small(monkeypatch):
    """Sizes of nothing, and limits that nothing misses."""
    for name, value in (SMALL | NO_LIMITS).items():
        monkeypatch.setattr(quantized, name, value)


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


@pytest.mark.parametrize("missed", ["quantized", "eviction"])
def test_gates_of_a_program_decide_the_exit_status_of_all(monkeypatch, capsys, missed):
    programs = [["-m", f"benchmarks.{name}", "--gates"] for name in ("quantized", "eviction")]
    assert statuses(monkeypatch, ["--gates"]) == (programs, 0)
    assert statuses(monkeypatch, ["--gates"], **{missed: 1}) == (programs, 1)
    assert "A TARGET IS MISSED" in capsys.readouterr().out
    assert statuses(monkeypatch, [], **{missed: 1}) == (programs, 0)


def test_arguments_for_pytest_leave_the_programs_out(monkeypatch):
    assert statuses(monkeypatch, ["--gates", "-k", "fork"], quantized=1) == ([], 0)


# ----------------------------------------------------------------------------------------------- pool_memory


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counted by glibc's malloc")
def test_memory_of_a_pool_is_what_the_docs_say():
    from benchmarks.pool_memory import BLOCK_SIZE, rates

    row = (ROOT / "docs" / "limits.md").read_text().split("- No growth: ")[1].split("\n\n")[0]
    block, sequence, entry, least, most, more, token, event = map(int, re.findall(r"\b\d+\b", row))
    plain, cached, told = rates(), rates(prefix_cache=True), rates(prefix_cache=True, events=1)
    tokens = token * BLOCK_SIZE
    expected = {"block, at best": block, "block, at worst": block, "sequence": sequence, "entry of its table": entry}
    assert plain == pytest.approx(expected, rel=0.01)
    expected |= {"block, at best": block + least + tokens, "block, at worst": block + most + tokens}
    expected["sequence"] = sequence + more + tokens
    assert cached == pytest.approx(expected, rel=0.01)
    assert [told[name] - cached[name] for name in list(told)[:2]] == pytest.approx([event] * 2, rel=0.01)


# ------------------------------------------------------------------------------------------------- quantized


def test_quantized_prints_a_row_per_format_of_every_table(small, capsys):
    assert quantized.main([*ASKED, "--json", "--gates"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    tables = {}
    for row in rows:
        tables.setdefault(row["what"].split(" ")[0], []).append(row["format"])
    writes = [f"{dtype} to {name}" for name in ("bfloat16", "int8", "int4") for dtype in ("float32", "bfloat16")]
    assert tables == {"decode": list(quantized.FORMATS), "write": ["memcpy", *writes] * 2, "error": ["int8", "int4"]}
    assert all(row["ms"] > 0 for row in rows if "ms" in row)
    assert all(0 < row["largest"] < 1e-3 for row in rows if "largest" in row)


@pytest.mark.parametrize(
    ("limit", "value", "missed"),
    [("DECODE_MAX", 0, 2), ("OF_FLOAT32_MIN", 1e9, 2), ("WRITE_MAX", 0, 2), ("ERROR_MAX", 0, 2)],
)
def test_quantized_gate_that_is_missed_is_the_exit_status(small, monkeypatch, capsys, limit, value, missed):
    monkeypatch.setattr(quantized, limit, value)
    assert quantized.main([*ASKED, "--gates"]) == 1
    assert capsys.readouterr().out.count("MISSED") == missed
    assert quantized.main(ASKED) == 0, "not asked for"


def test_quantized_measures_the_instruction_set_that_is_asked_for(small, monkeypatch, capsys):
    made, init = [], CPUBackend.__init__

    def watched(backend, *args, **options):
        init(backend, *args, **options)
        made.append(backend.store.isa)

    monkeypatch.setattr(CPUBackend, "__init__", watched)
    for isa in isas():
        made.clear()
        assert quantized.main([*ASKED, "--isa", isa]) == 0
        assert set(made) == {isa} and f"kernels for {isa}" in capsys.readouterr().out
    made.clear()
    quantized.main(ASKED)
    assert set(made) == {default_isa()}
    with pytest.raises(SystemExit, match="2"):
        quantized.main([*ASKED, "--isa", "vax"])


# -------------------------------------------------------------------------------------------------- eviction


def test_eviction_prints_a_share_for_every_policy_and_its_gate_is_the_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(eviction, "PASSES", 1)
    asked = ["--model", "tiny", "--rows", "2", "--tokens", "64", "--steps", "8", "--json"]
    monkeypatch.setattr(eviction, "SHARE_MAX", 1)
    assert eviction.main([*asked, "--gates"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["policy"] for row in rows] == list(eviction.policies(64))
    assert all(row["ms"] > 0 for row in rows)
    assert all((0 < row["share"] < 1) == (row["policy"] != "everything kept") for row in rows)
    monkeypatch.setattr(eviction, "SHARE_MAX", -1)
    assert eviction.main([*asked, "--gates"]) == 1
    assert eviction.main(asked) == 0, "not asked for"


# -------------------------------------------------------------------------------------------- sliding windows


def test_pool_keeps_the_bytes_that_a_window_would_save(capsys):
    windows = pytest.importorskip("benchmarks.windows")
    windows.main(["--tokens", "700"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    times = {line[0]: float(line[-2]) for line in lines}
    assert times["llama"] <= 1.0 < times["gemma3_text"] < times["gpt_oss"], times


# ------------------------------------------------------------------------------------------------ block pool


def test_block_pool_without_vllm_says_how_to_get_it(monkeypatch):
    monkeypatch.setenv(vllm_source.VARIABLE, "/nowhere")
    monkeypatch.setattr(sys, "argv", ["block_pool"])
    with pytest.raises(SystemExit, match=r"^\[benchmarks.block_pool\] vLLM is not here: KVPOOL_VLLM has to name"):
        block_pool.main()


@pytest.mark.parametrize(("limit", "missed"), [(0, False), (1e9, True)])
def test_block_pool_has_a_row_per_call_and_its_gate_is_the_exit_status(monkeypatch, capsys, limit, missed):
    if vllm_source.load() is None:
        pytest.skip(vllm_source.ABSENT)
    monkeypatch.setattr(block_pool, "TIMES_MIN", {1: limit, 100: limit})
    monkeypatch.setattr(sys, "argv", ["block_pool", "--rounds", "4", "--gates"])
    with pytest.raises(SystemExit) if missed else contextlib.nullcontext():
        block_pool.main()
    rows = capsys.readouterr().out.splitlines()[2:]
    calls = ("get", "free", "lookup", "cache", "touch", "evict")
    assert len(rows) == 22 and all(sum(row.startswith(call) for row in rows) >= 2 for call in calls)
    assert all(row.endswith("missed") for row in rows) == missed
