"""Commands for a checkout, such as ``python -m benchmarks.serving``: they read arguments as those of `kvpool` do."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from types import ModuleType

from kvpool.cli import declare, run


def main(module: ModuleType, argv: Sequence[str] | None = None) -> int:
    """Run the command that `module` is, and return the exit status."""
    summary = str(module.__doc__).splitlines()[0]
    parser = argparse.ArgumentParser(prog=f"python -m {module.__package__}", description=summary)
    declare(parser, module)
    return run(parser, argv)
