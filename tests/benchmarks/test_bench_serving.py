"""`python -m benchmarks.serving`: scheduler and pool alone, and both engines on few requests."""

import json

import pytest

from benchmarks import serving
from benchmarks.command import main
from benchmarks.gate import Gate


@pytest.fixture
def null(monkeypatch):
    gate = serving.null_gate(1, 2)
    assert gate.value > 0
    monkeypatch.setattr(serving, "null_gate", lambda: gate)


def test_serving_compares_every_row_and_both_engines_say_the_same(monkeypatch, capsys, null):
    pytest.importorskip("mlx_lm")
    few = {name: row | {"requests": 3, "prompt": "20", "output": "5"} for name, row in serving.ROWS.items()}
    monkeypatch.setattr(serving, "ROWS", few)
    assert main(serving, ["--repetitions", "1", "--json"]) == 0
    found = {gate["name"]: gate["value"] for gate in json.loads(capsys.readouterr().out)}
    assert len(found) == 1 + 3 * len(few) + 2
    assert all(value == 1.0 for name, value in found.items() if "same tokens" in name)
    assert all(value > 0 for name, value in found.items() if "over stock's" in name)


def test_serving_without_a_model_ends_as_its_gate_says(monkeypatch, capsys):
    for value, status in ((2.0, 0), (0.5, 1), (float("nan"), 1)):
        monkeypatch.setattr(serving, "null_gate", lambda value=value: Gate("a gate", value, 1.0))
        assert main(serving, ["--model", "null", "--gates"]) == status
        assert capsys.readouterr().out.startswith("NO" if status else "ok")
