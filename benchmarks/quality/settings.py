"""What is to be measured, and on which model: the command line's options, read and checked."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from kvpool.cli.console import CommandError, whole

TABLES = ("policies", "heavy", "max_kv", "length", "bits")


def default_cache() -> Path:
    """Return where the user's programs keep what can be made again."""
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "kvpool"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "kvpool"


@dataclass(frozen=True)
class Settings:
    """What is to be measured.

    Attributes
    ----------
    model : str or None
        What mlx-lm loads. None: the model that is trained here.
    context : int
        Tokens of a document. Budgets are shares of it.
    seeds, samples : int
        Documents: `samples` of each seed.
    tables : tuple of str
        Some of `TABLES`.
    """

    model: str | None = None
    context: int = 512
    seeds: int = 3
    samples: int = 8
    tables: tuple[str, ...] = TABLES
    cache: Path = Path()

    @property
    def max_kv(self) -> int:
        """The budget that is advised for the context."""
        return self.context // 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options. Values are read by `settings`, which says in one line what is wrong with one."""
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="a checkpoint: a folder, or an id that mlx-lm downloads (default: a small llama, trained on the sources "
        "of Python's library in minutes and kept in --cache-dir)",
    )
    for name, metavar, default, text in (
        ("context", "TOKENS", 512, "of a document; budgets are shares of it"),
        ("seeds", "N", 3, "of documents; standard errors are over them"),
        ("samples", "N", 8, "documents of each seed"),
    ):
        parser.add_argument(f"--{name}", metavar=metavar, default=str(default), help=f"{text} (default: {default})")
    parser.add_argument("--tables", metavar="A,B", help="some of " + ", ".join(TABLES) + " (default: all)")
    parser.add_argument("--cache-dir", type=Path, metavar="FOLDER", help=f"default: {default_cache()}")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw quality against memory, a curve for each policy")
    parser.add_argument("--gates", action="store_true", help="exit status 1 if something does not hold that has to")


def settings(args: argparse.Namespace) -> Settings:
    """Return what the arguments ask for."""
    tables = TABLES if args.tables is None else tuple(dict.fromkeys(args.tables.split(",")))
    for name in tables:
        if name not in TABLES:
            raise CommandError(f"--tables {name}: there are {', '.join(TABLES)}")
    if args.gates:
        needed = ("max_kv", "bits")
        tables = tuple(name for name in TABLES if name in (*tables, *needed))
    if args.plot is not None and "max_kv" not in tables:
        raise CommandError("--plot draws the table max_kv, which --tables leaves out")
    context = whole("--context", args.context, 256)
    if context % 64:
        raise CommandError(f"--context {context}: not a multiple of 64")
    seeds = whole("--seeds", args.seeds)
    if args.gates and seeds < 3:
        raise CommandError(f"--seeds {seeds}: the gates need 3 or more")
    cache = args.cache_dir or default_cache()
    if cache.exists() and not cache.is_dir():
        raise CommandError(f"--cache-dir {cache}: not a folder")
    samples = whole("--samples", args.samples)
    return Settings(args.model, context, seeds, samples, tables, cache)
