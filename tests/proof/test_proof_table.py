"""``python -m proof``: the table, what makes it fail, and that no gate is forgotten."""

import importlib
import json
from pathlib import Path

import pytest

import proof.__main__ as table
from proof import SHORT, Figure


class Gate:
    """Stands for a module."""

    NAME, TARGET = "one", ">= 3"

    def __init__(self, holds=True, caught=True, rows=1):
        self.holds, self.caught, self.rows = holds, caught, rows

    def figure(self, holds):
        return Figure("one", ">= 3", "4", holds, "python -m proof one", 0.1, "a note")

    def measure(self, budget):
        return [self.figure(self.holds)] * self.rows if self.rows > 1 else self.figure(self.holds)

    def planted(self, budget):
        assert budget == SHORT
        return self.figure(not self.caught)


class Breaking(Gate):
    """A gate that raises."""

    def measure(self, budget):
        raise RuntimeError("no such compiler")


@pytest.fixture
def gates(monkeypatch):
    """``gates(one=Gate(), ...)`` are all there are."""

    def put(**made):
        monkeypatch.setattr(table, "GATES", tuple(made))
        monkeypatch.setattr(table.importlib, "import_module", lambda name: made[name.removeprefix("proof.")])

    return put


def test_every_gate_of_the_list_is_a_gate():
    for name in table.GATES:
        gate = importlib.import_module(f"proof.{name}")
        assert gate.NAME and gate.TARGET and callable(gate.measure) and callable(gate.planted)


def test_every_gate_is_on_the_list():
    modules = [path for path in Path(table.__file__).parent.glob("*.py") if "\ndef planted(" in path.read_text()]
    assert {path.stem for path in modules} == set(table.GATES)


def test_figures_that_hold_pass(gates, capsys):
    gates(one=Gate(), two=Gate(rows=2))
    assert table.main([]) == 0
    printed = capsys.readouterr().out
    assert printed.count("caught") == 3 and "python -m proof one" in printed and "a note" in printed


@pytest.mark.parametrize("bad", [Gate(holds=False), Gate(caught=False)])
def test_figure_that_fails_or_fault_that_is_missed_fails(gates, bad, capsys):
    gates(one=Gate(), two=bad)
    assert table.main(["--json"]) == 1
    shown = json.loads(capsys.readouterr().out)["figures"]
    assert [figure["holds"] and figure["planted_caught"] for figure in shown[:2]] == [True, False]
    assert table.main(["one"]) == 0


def test_long_gates_run_by_name_or_with_long(gates, monkeypatch, capsys):
    gates(one=Gate(), two=Gate(holds=False))
    monkeypatch.setattr(table, "LONG", {"two": "an hour"})
    assert table.main([]) == 0
    assert "not run: two: an hour" in capsys.readouterr().out
    assert table.main(["two"]) == table.main(["--long"]) == 1


def test_gate_that_breaks_is_a_row_and_the_others_stand(gates, capsys):
    gates(one=Breaking(), two=Gate())
    assert table.main([]) == 1
    printed = capsys.readouterr()
    assert "the gate failed" in printed.out and "no such compiler" in printed.out and "caught" in printed.out
    assert "DOES NOT HOLD: the gate failed" in printed.err and "  4\n" in printed.err


def test_unknown_gate_is_refused(gates, capsys):
    gates(one=Gate())
    with pytest.raises(SystemExit) as ended:
        table.main(["three"])
    assert ended.value.code == 2 and "there are one" in capsys.readouterr().err
