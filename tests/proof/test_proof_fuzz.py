"""The gates that fuzz, in short: their figures hold, and not with what they have to find."""

from collections import Counter

import pytest

from proof import determinism, operations
from proof.figure import Budget
from proof.fuzz.digests import digest_trace
from proof.fuzz.shape import OPERATIONS

SHORTEST = Budget(0.0002)  # 2e4 checked operations, 2e5 on large pools, no run of 2,000 for determinism


@pytest.mark.long
@pytest.mark.parametrize("part", operations.PARTS, ids=lambda part: part.name)
def test_operations_hold_in_short(part):
    figure = operations.measure_part(part, SHORTEST)
    assert figure.holds, figure.notes


def test_operations_gate_detects_its_planted_fault():
    assert not operations.planted(SHORTEST).holds


def test_traces_are_equal_in_short():
    figure = determinism.measure(Budget(0.005))
    assert figure.holds, figure.notes


def test_traces_are_of_programs_with_every_operation():
    """As many runs as the short form has; tokens leave sequences in them too."""
    counted = Counter()
    digest_trace(1, 10, counted)
    assert not [name for name in OPERATIONS if not counted[name]], counted


def test_trace_of_another_seed_is_detected():
    assert not determinism.planted(Budget(0.001)).holds


def test_sanitizer_crash_is_a_finding(monkeypatch):
    monkeypatch.setattr(operations, "ROOT", "/")
    assert "exit" in operations.fuzz(None, ["--no-such-option"])["finding"]
