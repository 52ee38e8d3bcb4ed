"""The gate of the simulator, in its short form."""

import pytest

from proof import SHORT, Budget, simulator


@pytest.mark.long
def test_gate_holds_for_kvpool():
    figure = simulator.measure(Budget(SHORT.share, jobs=2))
    assert figure.holds and "0 failures" in figure.measured


def test_gate_does_not_hold_for_a_pool_without_a_fence():
    figure = simulator.planted(SHORT)
    assert not figure.holds and "stale read" in figure.notes
