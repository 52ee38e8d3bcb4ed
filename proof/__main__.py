"""``python -m proof``: every gate's figure, and whether each gate convicts what it is there to convict."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from types import ModuleType

from kvpool.cli.console import progress
from proof.figure import FULL, SHORT, Figure

#: The gates in the order of the table, each a module of this package.
GATES = (
    *("operations", "determinism", "failures", "exhaustion", "misuse", "soak", "arithmetic", "complexity"),
    *("mutants", "coverage", "threads", "simulator"),
)
COLUMNS = ("figure", "target", "measured", "holds", "planted fault", "command")


def figures_of(made: Figure | Sequence[Figure]) -> list[Figure]:
    """A gate may have several rows."""
    return [made] if isinstance(made, Figure) else list(made)


def run_gate(gate: ModuleType, budget, planted: bool) -> tuple[list[Figure], bool | None]:
    """The gate's rows, and whether it caught its planted fault: every row of it must not hold."""
    rows = figures_of(gate.measure(budget))
    if not planted:
        return rows, None
    return rows, not any(figure.holds for figure in figures_of(gate.planted(SHORT)))


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
    parser.add_argument("gates", nargs="*", metavar="NAME", help=f"gates to run, all by default: {', '.join(GATES)}")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="the same, one by one")
    parser.add_argument("--short", action="store_true", help="a thousandth of the work; says nothing about the figures")
    parser.add_argument("--seed", type=int, default=FULL.seed)
    parser.add_argument("--jobs", type=int, default=min(FULL.jobs, os.cpu_count() or 1), help="processes")
    parser.add_argument("--no-planted", action="store_true", help="leave the planted faults out")
    parser.add_argument("--json", action="store_true", help="print JSON, no table")
    options = parser.parse_args(argv)
    names = [*options.gates, *options.only] or list(GATES)
    if unknown := sorted(set(names) - set(GATES)):
        parser.error(f"no gate has the name {', '.join(unknown)}; there are {', '.join(GATES)}")
    budget = replace(SHORT if options.short else FULL, seed=options.seed, jobs=options.jobs)
    start, rows = time.perf_counter(), []
    with progress(len(names), quiet=False) as begin:
        for name in names:
            begin(name)
            figures, caught = run_gate(importlib.import_module(f"proof.{name}"), budget, not options.no_planted)
            rows += [(figure, caught) for figure in figures]
    if options.json:
        shown = [asdict(figure) | {"planted_caught": caught} for figure, caught in rows]
        print(json.dumps({"figures": shown, "seconds": time.perf_counter() - start}, indent=1))
    else:
        show(rows)
        print(f"{time.perf_counter() - start:.0f} s in all")
    return 0 if all(figure.holds and caught is not False for figure, caught in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
