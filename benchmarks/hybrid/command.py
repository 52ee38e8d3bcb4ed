"""Prefix hits of hybrid models on serving traces: the pool beside other policies at equal bytes.

The pool itself plays the traces. The others are simulations, written from their sources, at their best settings. U is
the bytes of the full attention of all different tokens of a trace. The folder of traces is named by --traces or by
KVPOOL_TRACES.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from benchmarks.gate import as_text, held
from benchmarks.hybrid import gates, plot, report
from benchmarks.hybrid.measure import DIVISORS, SETTINGS, measure
from kvpool.cli.console import CommandError, check_plot

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    models = tuple(dict.fromkeys(setting.model for setting in SETTINGS))
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="where agentic_a.npz and the others are")
    parser.add_argument("--models", default=",".join(models), metavar="NAME,...", help="default: %(default)s")
    parser.add_argument("--gates", action="store_true", help="judge what has to hold; 1 if something does not")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the policies over bytes")


def run(args: argparse.Namespace) -> int:
    """Print the tables, and with ``--gates`` what has to hold: 1 if something does not."""
    check_plot(args.plot)
    folder = args.traces or os.environ.get("KVPOOL_TRACES")
    if folder is None:
        raise CommandError("--traces FOLDER, or KVPOOL_TRACES, has to name the folder of traces")
    known = {setting.model for setting in SETTINGS}
    models = tuple(args.models.split(","))
    for name in models:
        if name not in known:
            raise CommandError(f"--models {name}: there are {', '.join(sorted(known))}")
    if args.plot is not None and plot.MODEL not in models:
        raise CommandError(f"--plot draws {plot.MODEL}, which --models leaves out")

    def say(what: str) -> None:
        if not args.json:
            print(what, file=sys.stderr, flush=True)

    try:
        measured = list(measure(Path(folder), models, DIVISORS, say))
    except OSError as exc:
        raise CommandError(f"{exc.filename}: {exc.strerror or exc}") from None
    if args.plot is not None:
        plot.draw(args.plot, measured)
    decided = gates.gates_of(measured) if args.gates else []
    if args.json:
        results = {"results": [report.as_json(one) for one in measured], "gates": [gate.as_json() for gate in decided]}
        print(json.dumps(results, indent=2))
    else:
        print(report.as_text(measured))
        if args.gates:
            print(as_text(decided))
    return 0 if held(decided) else 1
