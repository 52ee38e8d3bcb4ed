"""Serving: kvpool's engine beside mlx-lm's own, and scheduler and pool alone.

Both serve the same requests in one process, in turns of a tenth of a second, so that a machine that others share is as
fast for both; of several runs the median counts.
"""

from __future__ import annotations

import argparse
import json

from benchmarks.gate import as_text, held
from benchmarks.serving import gates
from kvpool.cli.console import CommandError, progress, whole

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--model",
        metavar="NAME",
        default="tiny",
        help="null: scheduler and pool alone; tiny, medium, big: random Llamas; or a checkpoint: a folder, or an id "
        "that mlx-lm downloads (default: %(default)s)",
    )
    parser.add_argument("--repetitions", metavar="N", default="3", help="runs of both (default: %(default)s)")
    parser.add_argument("--gates", action="store_true", help="exit status 1 if something does not hold")


def run(args: argparse.Namespace) -> int:
    """Serve, and print what was found beside what has to hold; with ``--gates`` 1 if something does not."""
    repetitions = whole("--repetitions", args.repetitions)
    decided = [gates.null_gate()]
    if args.model != "null":
        try:
            from benchmarks.serving import lm
        except ImportError as exc:
            need = "needs mlx and mlx-lm: pip install 'kvpool[mlx]'"
            raise CommandError(f"--model {args.model} {need} ({exc})") from None
        with progress(len(gates.ROWS) + 1, args.json) as say:
            decided += gates.measure(lm.Bench(args.model), repetitions, say)
    print(json.dumps([gate.as_json() for gate in decided], indent=2) if args.json else as_text(decided))
    return 1 if args.gates and not held(decided) else 0
