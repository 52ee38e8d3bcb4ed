"""The one form of all commands: a module, its options, what it measures. They read arguments as those of `kvpool` do.

A module has `OPTIONS`, by name the default and what it is, or `add_arguments`. It has ``run(args)``, which returns the
exit status, or ``gates(args)``, which yields what has to hold: `main` prints that, and with ``--gates`` the exit status
is 1 if something does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from benchmarks.gate import Gate, as_text, held
from kvpool import cli


def main(module: ModuleType | None = None, argv: Sequence[str] | None = None) -> int:
    """Run the command that `module` is, by default the program's, and return the exit status."""
    here: Any = module or sys.modules["__main__"]
    name = here.__spec__.name.removesuffix(".__main__")
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=str(here.__doc__).splitlines()[0])
    declare(parser, getattr(here, "OPTIONS", {}))
    if hasattr(here, "add_arguments"):
        here.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    if hasattr(here, "gates"):
        parser.add_argument("--gates", action="store_true", help="exit status 1 if something does not hold")
    parser.set_defaults(run=getattr(here, "run", None) or partial(judge, here), parser=parser)
    return cli.run(parser, argv)


def declare(parser: argparse.ArgumentParser, options: Mapping[str, tuple[Any, str]]) -> None:
    """Declare options, each with the type of its default; a bool is False, and has no value."""
    for name, (default, text) in options.items():
        if isinstance(default, bool):
            parser.add_argument(f"--{name}", action="store_true", help=text)
        else:
            text += "" if default == "" else " (default: %(default)s)"
            parser.add_argument(f"--{name}", type=type(default), default=default, help=text)


def judge(module: Any, args: argparse.Namespace) -> int:
    """Print the gates of a module."""
    return judged(list(module.gates(args)), args)


def judged(gates: Sequence[Gate], args: argparse.Namespace, more: Iterable[str] = ()) -> int:
    """Print gates, below `more` lines; return the exit status that they give."""
    if args.json:
        print(json.dumps([gate.as_json() for gate in gates], indent=2))
    else:
        print(*more, as_text(gates), sep="\n")
    return int(args.gates and not held(gates))
