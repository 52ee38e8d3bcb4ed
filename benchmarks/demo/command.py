"""Show on this machine all that kvpool claims: the parts of ``kvpool demo``, and more of them, with a picture.

The other parts: a server's occupancy, a shared prompt, attention, a long conversation, models whose layers differ, and
a server that is killed and started again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import picture
from benchmarks.demo import models, occupancy, restart
from benchmarks.demo.settings import AllSettings
from kvpool.cli import demo
from kvpool.cli.demo.report import Part


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    demo.add_arguments(parser)
    parser.add_argument(
        "--out", type=Path, metavar="PNG", default=AllSettings.out, help="where the picture goes (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Run all parts and print what they found; 0 if every claim held, else 1."""
    settings = AllSettings(model=args.model, out=args.out, block_size=args.kv_block_size)
    demo.check(settings)
    picture.check("--out", args.out)
    return demo.show(settings, all_parts(), args.json)


def all_parts() -> list[Part]:
    """Return the parts in the order they run, which is the order of the table."""
    more = [models.SHARED_PROMPT, models.ATTENTION, models.CONVERSATION, models.LAYERS]
    return [*demo.all_parts(), occupancy.PART, *more, restart.PART]
