"""Serving over HTTP: `kvpool serve` beside mlx-lm's server, as processes, under an open loop.

The same streamed chats arrive by Poisson, whether a server keeps up or not, and share system prompts. Each server is a
fresh process in each run, and all take turns. The clients are a process of their own, whose CPU time is told apart.
Times are told by the clock and by the CPU time of the server's process, because others may use the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import fields, replace
from pathlib import Path

from benchmarks.gate import Gate, as_text, held
from benchmarks.http import report
from benchmarks.http.judge import Result
from benchmarks.http.report import OURS
from benchmarks.http.servers import SERVERS, measure
from benchmarks.http.workload import Shape
from benchmarks.serving.workload import Lengths
from kvpool.cli.console import CommandError, real, whole

__all__ = ["add_arguments", "run"]

MODELS = ("tiny", "medium")
PARTS = ("compare", "overhead", "harm")
NUMBERS = {
    "requests": "how many",
    "systems": "different system prompts",
    "system-tokens": "tokens of each of them",
    "seed": "of arrivals, lengths and texts",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    defaults = {field.name: field.default for field in fields(Shape)}
    parser.add_argument("--model", choices=MODELS, default="tiny", help="a Llama with random weights")
    for name, text in NUMBERS.items():
        value = defaults[name.replace("-", "_")]
        parser.add_argument(f"--{name}", metavar="N", default=str(value), help=f"{text} (default: %(default)s)")
    parser.add_argument("--rate", default=str(defaults["rate"]), help="Poisson arrivals per second (%(default)s)")
    parser.add_argument("--user", default=defaults["user"], help="lengths of the questions (default: %(default)s)")
    parser.add_argument("--output", default=defaults["output"], help="lengths of the answers (default: %(default)s)")
    known = "; ".join(SERVERS)
    parser.add_argument("--servers", metavar="A;B", help=f"which of {known} (default: all; for harm the first)")
    parser.add_argument("--repetitions", metavar="N", default="1", help="runs of each; the median counts")
    parser.add_argument("--part", choices=PARTS, default="compare", help="what to measure (default: %(default)s)")
    parser.add_argument("--gates", action="store_true", help="judge what has to hold; 1 if something does not")


def run(args: argparse.Namespace) -> int:
    """Run all servers in turns and print tables, and with ``--gates`` what has to hold: 1 if something does not."""
    names = args.servers.split(";") if args.servers else [*SERVERS] if args.part == "compare" else [OURS]
    shape = shape_of(args)
    for name in names:
        if name not in SERVERS:
            raise CommandError(f"--servers {name}: there are {'; '.join(SERVERS)}")
    repetitions = whole("--repetitions", args.repetitions)
    try:
        from benchmarks.serving import lm
    except ImportError as exc:
        raise CommandError(f"needs mlx and mlx-lm: pip install 'kvpool[mlx]' ({exc})") from None
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="kvpool-http-") as folder:
        model = Path(folder) / "model"
        lm.save(args.model, model)
        if args.part == "compare":
            runs = measured(names, str(model), shape, repetitions, quiet=args.json)
            decided = report.gates(runs) if args.gates else []
            found = report.as_json(runs) | {"workload": shape.as_json()}
        else:
            runs, found = {}, {}
            decided = judged(args.part, names, str(model), repetitions)
    if args.json:
        found |= {"model": args.model, "gates": [gate.as_json() for gate in decided]}
        print(json.dumps(found, indent=2))
        return 0 if held(decided) else 1
    if runs:
        report.show(runs)
    print(as_text(decided) if decided else f"{shape}")
    print(f"({args.model}, {time.perf_counter() - start:.0f} s)")
    return 0 if held(decided) else 1


def judged(part: str, names: list[str], model: str, repetitions: int) -> list[Gate]:
    """Return the gates of a part that compares nothing."""
    from benchmarks.http import harm, overhead

    if part == "overhead":
        return [overhead.gate(model, repetitions)]
    return [gate for name in names for gate in harm.gates(name, SERVERS[name], model, repetitions)]


def shape_of(args: argparse.Namespace) -> Shape:
    """Return the workload that the arguments ask for."""
    for name in ("user", "output"):
        try:
            Lengths.parse(getattr(args, name))
        except ValueError as exc:
            raise CommandError(f"--{name} {exc}") from None
    counts = {name.replace("-", "_"): whole(f"--{name}", getattr(args, name.replace("-", "_"))) for name in NUMBERS}
    return Shape(rate=real("--rate", args.rate, 0.001), user=args.user, output=args.output, **counts)


def measured(names: list[str], model: str, shape: Shape, repetitions: int, *, quiet: bool) -> dict[str, list[Result]]:
    """Return the runs of each server. All take turns, each time in another order."""
    warm_up = replace(shape, requests=4, systems=1, system_tokens=64, output="4", seed=shape.seed + 1).chats()
    chats, runs = shape.chats(), {name: list[Result]() for name in names}
    for repetition in range(repetitions):
        turn = repetition % len(names)
        for name in [*names[turn:], *names[:turn]]:
            if not quiet:
                print(f"{name}: run {repetition + 1} of {repetitions}", file=sys.stderr, flush=True)
            runs[name].append(measure(SERVERS[name], model, chats, warm_up))
    return runs
