"""``python -m proof``: every gate's figure, and whether each gate convicts what it is there to convict."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from types import ModuleType

from kvpool.cli.console import progress
from proof.figure import FULL, SHORT, Budget, Figure

#: The gates in the order of the table, each a module of this package.
GATES = (
    *("operations", "determinism", "failures", "exhaustion", "misuse", "soak", "arithmetic", "complexity"),
    *("mutants", "coverage", "threads", "groups", "freethreaded", "hostile", "kills", "stores"),
)
LONG = {  # left out unless asked for
    "operations": "an hour of random calls; `make proof-long` runs it",
    "mutants": "two hours of small changes to the core; `make proof-long` runs it",
    "kills": "an hour of servers that start; `make proof-long` runs it",
}
COLUMNS = ("figure", "target", "measured", "holds", "planted fault", "command")


def figures_of(made: Figure | Sequence[Figure]) -> list[Figure]:
    """A gate may have several rows."""
    return [made] if isinstance(made, Figure) else list(made)


def run_gate(name: str, gate: ModuleType, budget: Budget, planted: bool) -> list[tuple[Figure, bool | None]]:
    """The gate's rows, each with whether the gate caught its planted fault: no row of it may hold then.

    A gate that breaks is a row that does not hold: half an hour of other figures is not lost with it.
    """
    begun = time.perf_counter()
    try:
        rows = figures_of(gate.measure(budget))
        caught = not any(figure.holds for figure in figures_of(gate.planted(SHORT))) if planted else None
    except Exception:
        seconds, said = time.perf_counter() - begun, traceback.format_exc()
        broken = Figure(gate.NAME, gate.TARGET, "the gate failed", False, f"python -m proof {name}", seconds, said)
        return [(broken, None)]
    return [(figure, caught) for figure in rows]


def reasons() -> dict[str, str]:
    """Gates that need what this machine lacks, and why: they run only by name."""
    found = {name: getattr(importlib.import_module(f"proof.{name}"), "missing", lambda: None)() for name in GATES}
    return {name: why for name, why in found.items() if why}


def show(rows: list[tuple[Figure, bool | None]]) -> None:
    """The table, and below it what the gates have to say."""
    caught = {True: "caught", False: "MISSED", None: "not run"}
    cells = [(f.name, f.target, f.measured, "yes" if f.holds else "NO", caught[found], f.command) for f, found in rows]
    if importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.table import Table

        table = Table(*COLUMNS)
        for row in cells:
            table.add_row(*row)
        Console(width=None if sys.stdout.isatty() else 200).print(table)
    else:
        for row in cells:
            print(" | ".join(row))
    for figure, _ in rows:
        if figure.notes:
            print(f"{figure.name}: {figure.notes}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run gates and print the table; 1 if a figure does not hold, or a planted fault was missed."""
    parser = argparse.ArgumentParser(prog="python -m proof", description=__doc__)
    parser.add_argument("gates", nargs="*", metavar="NAME", help=f"gates to run: {', '.join(GATES)}")
    parser.add_argument("--long", action="store_true", help=f"with no NAME: run {', '.join(LONG)} too")
    parser.add_argument("--short", action="store_true", help="a thousandth of the work; says nothing about the figures")
    parser.add_argument("--seed", type=int, default=FULL.seed)
    parser.add_argument("--jobs", type=int, default=min(FULL.jobs, os.cpu_count() or 1), help="processes")
    parser.add_argument("--no-planted", action="store_true", help="leave the planted faults out")
    parser.add_argument("--json", action="store_true", help="print JSON, no table")
    options = parser.parse_args(argv)
    names, left_out = options.gates, {}
    if not names:
        left_out = reasons() | ({} if options.long else LONG)
        names = [name for name in GATES if name not in left_out]
    if unknown := sorted(set(names) - set(GATES)):
        parser.error(f"no gate has the name {', '.join(unknown)}; there are {', '.join(GATES)}")
    budget = replace(SHORT if options.short else FULL, seed=options.seed, jobs=options.jobs)
    start, rows = time.perf_counter(), []
    with progress(len(names), quiet=False) as begin:
        for name in names:
            begin(name)
            begun = time.perf_counter()
            gate = importlib.import_module(f"proof.{name}")
            rows += (made := run_gate(name, gate, budget, not options.no_planted))
            for figure, _ in made:
                print(f"  {'' if figure.holds else 'DOES NOT HOLD: '}{figure.measured}", file=sys.stderr, flush=True)
            print(f"  {time.perf_counter() - begun:.0f} s, builds and planted fault too", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - start
    if options.json:
        shown = [asdict(figure) | {"planted_caught": caught} for figure, caught in rows]
        print(json.dumps({"figures": shown, "not_run": left_out, "seconds": seconds}, indent=1))
    else:
        show(rows)
        for name, why in left_out.items():
            print(f"not run: {name}: {why}")
        print(f"{seconds:.0f} s in all")
    return 0 if all(figure.holds and caught is not False for figure, caught in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
