"""What has to hold: a measured value, and what it has to reach; and tables. The same for all commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Gate:
    """One promise: `value` has to be at least (or at most) `limit`."""

    name: str
    value: float | None  # None: nobody measured it, so it does not hold; neither does NaN
    limit: float | None  # None: the value is reported, not judged
    at_most: bool = False
    note: str = ""  # what stands behind the value
    unit: str = ""  # of value, limit and goal
    goal: float | None = None  # what it is meant to reach

    @property
    def holds(self) -> bool:
        """Whether the value is within the limit."""
        if self.limit is None or self.value is None:
            return self.limit is None
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def as_json(self) -> dict[str, Any]:
        """Everything, and the verdict."""
        return asdict(self) | {"holds": self.holds}


def held(gates: Sequence[Gate]) -> bool:
    """Whether all of them do."""
    return all(gate.holds for gate in gates)


def as_text(gates: Sequence[Gate]) -> str:
    """Return a line for each, and how many hold."""
    width = max((len(gate.name) for gate in gates), default=0)
    lines = []
    for gate in gates:
        verdict = "--" if gate.limit is None else "ok" if gate.holds else "NO"
        value = "not decided" if gate.value is None else f"{short(gate.value)} {gate.unit}".rstrip()
        sign = "<=" if gate.at_most else ">="
        limit = "reported" if gate.limit is None else f"{sign} {short(gate.limit)}"
        goal = "" if gate.goal is None else f" (goal {short(gate.goal)})"
        lines.append(f"{verdict} {gate.name:{width}} {value:>14} {limit + goal:<14}  {gate.note}".rstrip())
    judged = [gate for gate in gates if gate.limit is not None]
    return "\n".join([*lines, f"{sum(gate.holds for gate in judged)} of {len(judged)} gates hold"])


def short(value: float) -> str:
    """Return a number with three digits or more."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(*lines: Sequence[object]) -> str:
    """Return a Markdown table with aligned columns; the first line is its head."""
    rows = [[str(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    )
