"""`benchmarks.metal`: its code runs here with Metal on a CPU; what it says there about time means nothing."""

import json
import subprocess
import sys

import mlx.core as mx
import pytest

from benchmarks import beside_dense, metal
from kvpool.cli.console import CommandError
from kvpool_backends.mlx import metal_kernels
from kvpool_backends.mlx.metal import MetalBackend


@pytest.fixture
def fake(monkeypatch, engine):
    monkeypatch.setattr(mx.fast, "metal_kernel", engine.factory(0))
    monkeypatch.setattr(beside_dense, "RUNS", 3)
    monkeypatch.setattr(metal, "LAYERS_MAX", 2)
    monkeypatch.setattr(metal, "LAYERS_MIN", 2)


def test_every_case_has_two_times(fake):
    found = list(metal.cases(("float16",), (2, 4), (1, 2), (40,), 32, 4))
    assert [(case.group, case.batch, case.context) for case in found] == [(g, b, 40) for g in (2, 4) for b in (1, 2)]
    for case in found:
        assert case.num_kv_heads == 4 // case.group and min(metal.seconds(case)) > 0


def test_the_sweep_returns_the_settings_that_took_least(monkeypatch, tmp_path):
    """Times are made up, and so is what is best; its file is one that the kernels read."""
    wanted = {"SIMDGROUPS": 4, "ROW_DIMS_MAX": 1024, "PART_TOKENS": 128, "PARTS_MAX": 32}
    before = {name: getattr(metal_kernels, name) for name in wanted}

    def seconds(case):
        away = sum(getattr(metal_kernels, name) != value for name, value in wanted.items())
        return 1e-5 * (1 + away), 1.0

    monkeypatch.setattr(metal, "seconds", seconds)
    assert metal.sweep([CASE]) == wanted
    assert {name: getattr(metal_kernels, name) for name in wanted} == before
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(wanted))
    monkeypatch.setenv("KVPOOL_METAL_SETTINGS", str(file))
    assert {name: metal_kernels.tuned(name, 7) for name in wanted} == wanted
    code = "from kvpool_backends.mlx import metal, metal_kernels as of; "
    code += f"print([getattr(of, name) for name in {list(wanted)}], metal.MetalAttention.part_tokens)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == f"{list(wanted.values())} {wanted['PART_TOKENS']}\n", run.stderr


@pytest.mark.parametrize("text", ["", "[]", '{"SIMDGROUPS": 3}', '{"SIMDGROUPS": "8"}'])
def test_settings_that_make_no_sense_are_named_and_not_used(monkeypatch, caplog, tmp_path, text):
    file = tmp_path / "settings.json"
    file.write_text(text)
    monkeypatch.setenv("KVPOOL_METAL_SETTINGS", str(file))
    assert metal_kernels.tuned("SIMDGROUPS", 4) == 4
    assert str(file) in caplog.text
    monkeypatch.setenv("KVPOOL_METAL_SETTINGS", str(tmp_path / "none"))
    assert metal_kernels.tuned("PART_TOKENS", 128) == 128 and "cannot be read" in caplog.text


CASE = metal.Case("float16", 4, 2, 700, 4, 32, 1)


def test_every_choice_of_the_sweep_gives_right_results(fake, monkeypatch):
    for name, choices in metal_kernels.CHOICES.items():
        for choice in choices:
            with monkeypatch.context() as patch:
                patch.setattr(metal_kernels, name, choice)
                metal.seconds(CASE)  # refuses wrong results


def test_a_wrong_result_has_no_time(fake, monkeypatch):
    monkeypatch.setattr(MetalBackend, "attend", lambda self, step, layer, q, **_: q)
    with pytest.raises(CommandError, match="a result is wrong"):
        metal.seconds(CASE)
