"""Show on this machine all that kvpool claims: the parts of ``kvpool demo``, and more of them, with a picture.

The other parts: a server's occupancy, a shared prompt, a long conversation, models whose layers differ, and
a server that is killed and started again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import picture
from benchmarks.command import main
from benchmarks.demo import models, occupancy, restart
from benchmarks.demo.settings import AllSettings
from kvpool.cli import demo
from kvpool.cli.demo.report import Part

OPTIONS = {"out": (str(AllSettings.out), "where the picture goes")}
add_arguments = demo.add_arguments


def run(args: argparse.Namespace) -> int:
    """Run all parts and print what they found; 0 if every claim held, else 1."""
    settings = AllSettings(model=args.model, out=Path(args.out), block_size=args.kv_block_size)
    demo.check(settings)
    picture.check("--out", settings.out)
    return demo.show(settings, all_parts(), args.json)


def all_parts() -> list[Part]:
    """Return the parts in the order they run, which is the order of the table."""
    more = [models.SHARED_PROMPT, models.CONVERSATION, models.LAYERS]
    return [*demo.all_parts(), occupancy.PART, *more, restart.PART]


if __name__ == "__main__":
    sys.exit(main())
