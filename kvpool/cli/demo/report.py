"""What a demo part hands back, and how it is shown: a table for people, one JSON object for machines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import kvpool
from kvpool.cli.console import NotRun
from kvpool.errors import install_command

ASCII = str.maketrans({"█": "#", "░": ".", "─": "-", "│": "|", "└": "+"})
"""For terminals whose encoding has no such characters."""


def load_lm(say: Callable[[str], None]) -> ModuleType:
    """Import `kvpool.cli.demo.lm`, which needs mlx and mlx-lm.

    Raises
    ------
    NotRun
        If one of them is missing or does not import.
    """
    say("importing mlx-lm")
    try:
        from kvpool.cli.demo import lm
    except ImportError as exc:
        raise NotRun(f"needs mlx and mlx-lm ({exc}): {install_command('mlx')}") from None
    return lm


@dataclass(frozen=True)
class Claim:
    """One sentence that the demo measured.

    Attributes
    ----------
    held : bool
        Whether the measurement agrees with the sentence.
    measured : str
        The numbers behind the verdict, for a person.
    """

    held: bool
    measured: str


@dataclass(frozen=True)
class Outcome:
    """What a part found: a `Claim` per name it promised, numbers for machines, and notes for people."""

    claims: dict[str, Claim]
    numbers: dict[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Part:
    """One part of the demo.

    Attributes
    ----------
    name : str
        Its key in the JSON object.
    title : str
        Its heading in the table.
    promises : dict of str to str
        Claim name to the sentence that is to hold. They are known before the part runs, so that a part
        that cannot run still reports each of them, as not held.
    run : callable
        Takes the `Settings` and a function that shows one line of progress; returns an `Outcome`.
        May raise `NotRun`.
    """

    name: str
    title: str
    promises: dict[str, str]
    run: Callable[..., Outcome]


@dataclass
class Report:
    """All parts of one run."""

    seconds: float = 0.0
    outcomes: list[tuple[Part, Outcome]] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)

    def add(self, part: Part, outcome: Outcome) -> None:
        """Record what `part` found; a part must decide every claim it promised."""
        if set(outcome.claims) != set(part.promises):
            decided, promised = sorted(outcome.claims), sorted(part.promises)
            raise ValueError(f"[demo] {part.name} decided {decided}, promised {promised}")
        self.outcomes.append((part, outcome))

    def add_not_run(self, part: Part, reason: str) -> None:
        """Record that `part` did not run. A claim that was not checked is not held."""
        self.not_run[part.name] = reason
        claims = {name: Claim(False, "not decided") for name in part.promises}
        self.outcomes.append((part, Outcome(claims, {})))

    @property
    def claims(self) -> dict[str, bool]:
        """Every claim of every part, by name."""
        return {name: bool(c.held) for _, outcome in self.outcomes for name, c in outcome.claims.items()}

    @property
    def held(self) -> bool:
        """Whether every claim held."""
        return all(self.claims.values())

    def as_json(self) -> dict[str, Any]:
        """Return the object that ``kvpool demo --json`` prints."""
        return {
            "kvpool": kvpool.__version__,
            "held": self.held,
            "claims": self.claims,
            "numbers": {part.name: outcome.numbers for part, outcome in self.outcomes},
            "not_run": self.not_run,
            "seconds": round(self.seconds, 2),
        }


def print_report(report: Report, console: Any) -> None:
    """Print notes, the table of claims and a closing line to a `rich.console.Console`."""
    from rich.text import Text

    ascii_only = console.options.ascii_only
    for _, outcome in report.outcomes:
        for note in outcome.notes:
            text = note.translate(ASCII) if ascii_only else note
            console.print(text, markup=False, highlight=False, no_wrap=True, overflow="ignore", crop=False)
            console.print()
    for number, (part, _) in enumerate(report.outcomes):
        console.print(Text(f"({chr(ord('a') + number)}) {part.title}", "bold"))
        console.print(_claims_table(report, number, ascii_only))
    verdicts = report.claims.values()
    closing = f"{sum(verdicts)} of {len(verdicts)} claims held, {report.seconds:.1f} s, kvpool {kvpool.__version__}"
    if report.not_run:
        closing += "\nA claim that was not decided is not held."
    console.print()
    console.print(Text(closing, "bold green" if report.held else "bold red"))


def _claims_table(report: Report, number: int, ascii_only: bool) -> Any:
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    part, outcome = report.outcomes[number]
    reason = report.not_run.get(part.name)
    held, broken = ("ok", "NO") if ascii_only else ("✓", "✗")
    table = Table.grid(padding=(0, 1))
    table.add_column(width=3, justify="right")
    table.add_column(width=max(len(text) for part, _ in report.outcomes for text in part.promises.values()))
    table.add_column()
    for name, claim in outcome.claims.items():
        mark = Text(held, "green") if claim.held else Text("-" if reason else broken, "bold red")
        table.add_row(mark, part.promises[name], Text(claim.measured, "dim"))
    return Group(Padding(Text(reason, "yellow"), (0, 0, 0, 4)), table) if reason else table
