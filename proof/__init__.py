"""Figures that stand for trust, each measured by a gate that also convicts a planted fault: ``python -m proof``.

One module per gate. Each has `NAME`, `TARGET` and two functions: ``measure(budget)`` makes the `Figure`, and
``planted(budget)`` makes it of a core, a backend or a program with a fault that the gate is there to find, so its
figure must not hold. `budget` says how long a gate may take; the tests run every gate with `SHORT`.
"""

from proof.figure import FULL, SHORT, Budget, Figure

__all__ = ["FULL", "SHORT", "Budget", "Figure"]
