"""The ``kvpool`` command.

Each command is a module with ``add_arguments(parser)`` and ``run(args) -> int``. The exit status is 0 if it is done
(and every claim held), 1 if a claim did not hold, 2 if it could not do what was asked. A module with ``COMMANDS`` is a
group of commands.

Reading the arguments needs only numpy and the standard library. A command imports what it uses when it runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

import kvpool
from kvpool.cli import bench, demo, doctor, fuzz, generate, plan, serve, store
from kvpool.cli.console import CommandError

COMMANDS = {
    "demo": demo,
    "generate": generate,
    "serve": serve,
    "plan": plan,
    "store": store,
    "doctor": doctor,
    "bench": bench,
    "fuzz": fuzz,
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(prog="kvpool", description="A block allocator for the KV cache of LLM inference.")
    parser.add_argument("--version", action="version", version=f"kvpool {kvpool.__version__}")
    add_commands(parser, COMMANDS)
    return parser


def add_commands(parser: argparse.ArgumentParser, modules: Mapping[str, ModuleType]) -> None:
    """Declare the commands, and those of groups below them."""
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, module in modules.items():
        summary = str(module.__doc__).splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary)
        if hasattr(module, "COMMANDS"):
            add_commands(command, module.COMMANDS)
        else:
            module.add_arguments(command)
            command.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
            command.set_defaults(run=module.run, parser=command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    return run(build_parser(), argv)


def run(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> int:
    """Read the arguments, run the command that they name, and return the exit status."""
    args, rest = parser.parse_known_args(argv)
    if rest:
        args.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except CommandError as exc:
        print(f"{args.parser.prog}: {exc}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output (head, less) has gone: no message, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(f"{args.parser.prog}: interrupted", file=sys.stderr)
        return 130
