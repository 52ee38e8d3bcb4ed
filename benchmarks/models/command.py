"""Every model file of mlx-lm: how a pool serves it, and its bytes and times beside mlx-lm's own caches.

The models are tiny and random. Windows have the size of the model file's default, else 1,024 tokens.
"""

from __future__ import annotations

import argparse
import json
import sys

from benchmarks.gate import as_text, held
from kvpool.cli.console import CommandError, whole

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--files", metavar="NAME,...", help="these model files only")
    parser.add_argument(
        "--repetitions", default="15", metavar="N", help="timed runs of each; 0 measures no time (default: %(default)s)"
    )
    parser.add_argument(
        "--gates", action="store_true", help="bytes of all files, the capacity of Gemma 4 31B, and times of six files"
    )
    parser.add_argument("--batch", default="1,4,16", metavar="N,...", help="with --gates: rows (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Print the table, or with ``--gates`` what has to hold: 1 if something does not."""
    import mlx.core as mx

    from benchmarks.models import gates, report, subjects

    mx.set_default_device(mx.cpu)
    names = subjects.FILES if args.files is None else tuple(args.files.split(","))
    for name in names:
        if name not in subjects.FILES:
            raise CommandError(f"--files {name}: no model file of mlx-lm 0.32.2")
    repetitions = whole("--repetitions", args.repetitions, 0)

    def say(what: str) -> None:
        if not args.json:
            print(what, file=sys.stderr, flush=True)

    if args.gates:
        rows = [whole("--batch", text) for text in args.batch.split(",")]
        decided = list(gates.measure(names, rows, repetitions, say))
        print(json.dumps([gate.as_json() for gate in decided], indent=2) if args.json else as_text(decided))
        return 0 if held(decided) else 1
    lines = list(report.measure(names, repetitions, say))
    print(json.dumps([line.as_json() for line in lines], indent=2) if args.json else report.as_text(lines))
    return 0
