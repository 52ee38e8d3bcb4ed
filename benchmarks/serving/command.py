"""Serving under an open loop: kvpool's engine beside mlx-lm's own.

Requests arrive by Poisson or by a trace, whether the server keeps up or not. Everybody serves the same workload in one
process, in turns of a tenth of a second, so that a machine that others share is as fast for all; of several runs that
with the median rate counts.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from benchmarks.gate import as_text, held
from benchmarks.serving.settings import add_arguments, settings
from kvpool.cli.console import CommandError, check_plot

if TYPE_CHECKING:
    from benchmarks.serving.runs import Bench, Run

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Serve, and print what was found; with ``--gates`` 1 if something does not hold."""
    from benchmarks.serving import gates, report, runs
    from kvpool.errors import KVPoolError

    wanted = settings(args)
    check_plot(args.plot)
    start = time.perf_counter()
    try:
        if args.gates:
            with progress(quiet=args.json) as (say, _):
                decided = gates.measure(wanted, say)
            print(json.dumps(gates.as_json(decided, wanted), indent=2) if args.json else as_text(decided))
            return 0 if held(decided) else 1
        bench = runs.make_bench(wanted)
        runs.check_fits(bench)
        found = measure(bench, quiet=args.json)
    except (KVPoolError, ValueError, MemoryError) as exc:
        raise CommandError(str(exc) or "not enough memory") from None
    if args.plot is not None:
        draw(args, bench, runs.median(found["kvpool"]))
    result = report.as_json(bench, found, time.perf_counter() - start)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        report.show(bench, result)
        if args.plot is not None:
            print(f"Drawn in {args.plot}")
    return 0


def measure(bench: Bench, *, quiet: bool) -> dict[str, list[Run]]:
    """Return the runs of everybody."""
    from benchmarks.serving import runs

    s = bench.settings
    names = ("kvpool", *s.against)
    repetitions = 1 if s.is_null else s.repetitions  # simulated time is the same every time
    with progress(repetitions * len(names) * bench.workload.num_tokens, quiet=quiet) as (bench.say, bench.advance):
        if not s.is_null:
            bench.say("warming up")
            runs.warm_up(bench, names)
        return runs.run_all(bench, names, repetitions)


def draw(args: argparse.Namespace, bench: Bench, drawn: Run) -> None:
    """Write the picture."""
    from benchmarks.serving import plot

    try:
        plot.draw(args.plot, bench, drawn)
    except OSError as exc:
        raise CommandError(f"--plot {args.plot}: {exc.strerror or exc}") from None


@contextlib.contextmanager
def progress(
    total: int | None = None, *, quiet: bool = False
) -> Iterator[tuple[Callable[[str], None], Callable[[int], None]]]:
    """Yield two functions: one is told what begins now, the other how many tokens were generated.

    A bar on a terminal if rich is there, else a line for each beginning.
    """
    if quiet:
        yield lambda what: None, lambda tokens: None
        return
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda what: print(what, file=sys.stderr, flush=True), lambda tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda what: bar.update(task, description=what), lambda tokens: bar.update(task, advance=tokens)
