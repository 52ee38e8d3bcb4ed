"""The parts of the demo, their results, and how these are shown: a table for people, JSON for machines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import kvpool

ASCII = str.maketrans({"█": "#", "░": ".", "─": "-", "│": "|", "└": "+"})
"""For terminals whose encoding has no such characters."""


@dataclass(frozen=True)
class Settings:
    """Sizes of every part. The defaults fit 30 seconds on two slow cores; the tests take smaller ones."""

    model: str | None = None  # path or id of an mlx-lm checkpoint; None: a small Llama with random weights
    block_size: int = 16
    # The engine: one prompt per length, each continued greedily by `new_tokens`.
    prompt_lengths: tuple[int, ...] = (7, 212, 40, 95, 18, 131, 64, 33)
    new_tokens: int = 48
    # Forks: one prompt, continued `samples` times.
    samples: int = 32
    sample_prompt: int = 150
    sample_tokens: int = 24
    # Step cost: sequences per batch, tokens in each, interleaved rounds.
    batch_sizes: tuple[int, ...] = (64, 256)
    context: int = 4096
    rounds: int = 9
    seed: int = 0


class Claim(NamedTuple):
    """Whether one sentence held, and the numbers behind the verdict, for a person."""

    held: bool
    measured: str


class Outcome(NamedTuple):
    """The result of a part: a `Claim` per name it promised, numbers for machines, and notes for people."""

    claims: dict[str, Claim]
    numbers: dict[str, Any]
    notes: tuple[str, ...] = ()


class Part(NamedTuple):
    """One part of the demo.

    Attributes
    ----------
    name, title : str
        Its key in the JSON object, its heading in the table.
    promises : dict of str to str
        Claim name to the sentence that is to hold. They are known before the part runs, so that a part
        that cannot run still reports each of them, as not held.
    run : callable
        Takes the `Settings` and a function that shows one line of progress; may raise `NotRun`.
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
        self.add(part, Outcome({name: Claim(False, "not decided") for name in part.promises}, {}))

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
            **{"kvpool": kvpool.__version__, "held": self.held, "claims": self.claims},
            "numbers": {part.name: outcome.numbers for part, outcome in self.outcomes},
            **{"not_run": self.not_run, "seconds": round(self.seconds, 2)},
        }


class Printer:
    """Prints a report part by part, as parts begin and end, to a `rich.console.Console`."""

    def __init__(self, console: Any, parts: list[Part]) -> None:
        self.console, self.width = console, max(len(text) for part in parts for text in part.promises.values())
        self.ascii_only = console.options.ascii_only

    def begin(self, number: int, part: Part) -> None:
        """Print the heading of a part."""
        from rich.text import Text

        self.console.print(Text(f"({chr(ord('a') + number)}) {part.title}", "bold"))

    def end(self, report: Report) -> None:
        """Print the claims and the notes of the part that was added last."""
        self.console.print(_claims_table(report, self.width, self.ascii_only))
        for note in report.outcomes[-1][1].notes:
            text = note.translate(ASCII) if self.ascii_only else note
            self.console.print()
            self.console.print(text, markup=False, highlight=False, no_wrap=True, overflow="ignore", crop=False)
            self.console.print()

    def close(self, report: Report) -> None:
        """Print how many claims held."""
        from rich.text import Text

        verdicts, seconds = report.claims.values(), f"{report.seconds:.1f} s"
        closing = f"{sum(verdicts)} of {len(verdicts)} claims held, {seconds}, kvpool {kvpool.__version__}"
        if report.not_run:
            closing += "\nA claim that was not decided is not held."
        self.console.print()
        self.console.print(Text(closing, "bold green" if report.held else "bold red"))


def _claims_table(report: Report, width: int, ascii_only: bool) -> Any:
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    part, outcome = report.outcomes[-1]
    reason = report.not_run.get(part.name)
    held, broken = ("ok", "NO") if ascii_only else ("✓", "✗")
    table = Table.grid(padding=(0, 1))
    table.add_column(width=3, justify="right")
    table.add_column(width=width)
    table.add_column()
    for name, claim in outcome.claims.items():
        mark = Text(held, "green") if claim.held else Text("-" if reason else broken, "bold red")
        table.add_row(mark, part.promises[name], Text(claim.measured, "dim"))
    return Group(Padding(Text(reason, "yellow"), (0, 0, 0, 4)), table) if reason else table
