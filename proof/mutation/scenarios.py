"""Programs that reach what random ones do not: each is a function of the classes `Pool` and `Plan`.

They assert nothing themselves: what they call, and what comes back, is recorded from the core and compared with the
plain Python model, which runs them too (tests/test_proof_mutants.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SCENARIOS: list[Callable[[Any, Any], None]] = []


def scenario(program: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Put a program on the list."""
    SCENARIOS.append(program)
    return program
