"""What eviction and quantization cost in quality: perplexity and recall for every policy, budget and width.

On a small llama that is trained here, once, on the sources of Python's library, with definitions planted in them that
have to be recalled; or on any checkpoint of mlx-lm.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING

from benchmarks.gate import held
from benchmarks.quality.settings import add_arguments, settings
from kvpool.cli.console import CommandError, check_plot, progress

if TYPE_CHECKING:
    from benchmarks.quality.tables import Table

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Ask all questions, print the tables; with ``--gates`` return 1 if something does not hold."""
    from benchmarks.quality import gates, report, subjects

    wanted = settings(args)
    check_plot(args.plot)
    from kvpool.adapters.mlx_lm.loading import ModelNotLoaded

    start = time.perf_counter()
    try:
        told = subjects.make(wanted, quiet=args.json)
        told.check()
        bench, model = told.bench, told.name
        with progress(bench.total, args.json) as bench.say:
            tables = dict(bench.rows())
    except (ModelNotLoaded, ValueError, MemoryError) as exc:
        raise CommandError(str(exc) or "not enough memory") from None
    decided = gates.judge(tables, wanted.context) if {"max_kv", "bits"} <= tables.keys() else []
    if args.plot is not None:
        draw(args, tables["max_kv"], f"{model}, {wanted.context} tokens")
    if args.json:
        seconds = time.perf_counter() - start
        print(json.dumps(report.as_json(wanted, model, tables, decided, seconds), indent=2))
    else:
        report.show(model, tables, decided)
        if args.plot is not None:
            print(f"Drawn in {args.plot}")
    return 1 if args.gates and not held(decided) else 0


def draw(args: argparse.Namespace, table: Table, title: str) -> None:
    """Write the picture."""
    from benchmarks.quality import plot

    try:
        plot.draw(args.plot, table, title)
    except OSError as exc:
        raise CommandError(f"--plot {args.plot}: {exc.strerror or exc}") from None
