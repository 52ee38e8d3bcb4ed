"""``python -m benchmarks.attention --kv-bits``: a row per format beside bfloat16, and that wrong results are seen."""

import json
from dataclasses import replace

import pytest
from test_bench_attention import SMALL, NumpyKernels

from benchmarks.attention import command, quantized, settings
from benchmarks.attention.bench import Bench
from benchmarks.attention.cache import WrongResult
from benchmarks.command import main
from kvpool.cli.console import CommandError

SETTINGS = replace(SMALL, parts=(), threads=(1,), head_dim=64, kv_bits=("8", "4", "8/4", "fp8"))


def test_every_size_has_a_row_per_format_with_the_bytes_that_it_stores():
    rows = [row for row in quantized.rows(Bench(NumpyKernels(), SETTINGS)) if row.part == "quantized"]
    assert len(rows) == 4 * len(SETTINGS.batches) * len(SETTINGS.contexts)
    first = rows[:4]
    assert [row.dtype for row in first] == ["8 bits", "4 bits", "8/4 bits", "fp8"]
    per_element = [1.0625, 0.5625, 0.8125, 1.0]
    elements = 2 * first[0].batch * first[0].context * SETTINGS.num_kv_heads * 64
    assert [row.nbytes / elements for row in first] == per_element
    assert all(row.yardstick == "decode" and row.error is not None for row in rows)


def test_writes_have_a_row_per_format_beside_memcpy():
    rows = [row for row in quantized.rows(Bench(NumpyKernels(), SETTINGS)) if row.part == "write"]
    assert [row.dtype for row in rows] == ["8 bits", "4 bits", "8/4 bits", "fp8"]
    assert all(row.yardstick == "memcpy" and row.nbytes == 2 * 512 * SETTINGS.num_kv_heads * 64 * 2 for row in rows)


def test_wrong_results_have_no_time(monkeypatch):
    right = quantized.Call.attend
    monkeypatch.setattr(quantized.Call, "attend", lambda call: right(call) + 0.01)
    with pytest.raises(WrongResult, match="off by 1"):
        list(quantized.rows(Bench(NumpyKernels(), SETTINGS)))


def test_the_command_prints_rows_as_json(capsys):
    asked = "--part decode --dtype bfloat16 --batch 1 --context 64 --threads 1 --against none --repetitions 1 --json"
    assert main(command, [*asked.split(), "--kv-bits", "8/4,fp8"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["dtype"] for row in rows if row["part"] == "quantized"] == ["8/4 bits", "fp8"]


def test_unknown_bits_and_heads_without_groups_are_refused():
    with pytest.raises(CommandError, match=r"--kv-bits 3: there are 8, 4"):
        settings.checked_kv_bits("8,3")
    with pytest.raises(CommandError, match=r"--kv-bits: \[KVSpec\] head_dim is 40, not a multiple"):
        list(quantized.rows(Bench(NumpyKernels(), replace(SETTINGS, head_dim=40))))
