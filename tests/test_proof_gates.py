"""The short forms of gates that have no file of their own, and the fault that each of them must convict."""

import pytest

from proof import SHORT, arithmetic, complexity, misuse, soak

GATES = {"arithmetic": arithmetic, "complexity": complexity, "misuse": misuse, "soak": soak}


@pytest.mark.parametrize("name", GATES)
def test_short_form_holds(name):
    figure = GATES[name].measure(SHORT)
    if name == "complexity" and "no valgrind" in figure.measured:
        pytest.skip("valgrind counts the instructions, and is not here")
    assert figure.holds, figure


@pytest.mark.parametrize("name", ["arithmetic", "soak"])
def test_planted_fault_is_convicted(name):
    """Those of the others take longer: ``python -m proof`` plants them."""
    assert not GATES[name].planted(SHORT).holds
