"""The short forms of gates that have no file of their own, and the fault that each of them must convict."""

import pytest

from proof import SHORT, arithmetic, complexity, groups, misuse, soak

GATES = {"arithmetic": arithmetic, "complexity": complexity, "groups": groups, "misuse": misuse, "soak": soak}


@pytest.mark.parametrize("name", GATES)
def test_short_form_holds(name):
    figure = GATES[name].measure(SHORT)
    if name == "complexity" and "no valgrind" in figure.measured:
        pytest.skip("valgrind counts the instructions, and is not here")
    assert figure.holds, figure


@pytest.mark.parametrize("name", GATES)
def test_planted_fault_is_detected(name):
    figure = GATES[name].planted(SHORT)
    if name == "complexity" and "no valgrind" in figure.measured:
        pytest.skip("valgrind counts the instructions, and is not here")
    assert not figure.holds


def test_wrong_calls_are_counted_and_not_tests():
    """A file without a wrong call that is checked counts none, however many tests it has."""
    _, refused, failed, last = misuse.run_file("prefix_hostile", "")
    assert (refused, failed) == (0, 0) and "passed" in last
