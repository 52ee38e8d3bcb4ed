"""What a gate is given, and what it gives back."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Budget:
    """How much a gate may do: a share of the amount its target asks for, on so many processes, from a seed."""

    share: float  # 1.0: all that the target asks for
    jobs: int = 2  # processes
    seed: int = 1

    def of(self, amount: int) -> int:
        """`amount` scaled down to the share, at least 1."""
        return max(1, int(amount * self.share))


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table."""

    name: str
    target: str  # in words, as the table shows it
    measured: str  # what came out, with its numbers
    holds: bool
    command: str  # what makes this row again, alone
    seconds: float
    notes: str = ""  # findings, survivors, why something could not run here


FULL = Budget(1.0)
SHORT = Budget(0.001)
