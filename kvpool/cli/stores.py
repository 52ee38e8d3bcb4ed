"""Options of commands that keep prefixes in a store: a directory, or a server."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvpool.cli.console import CommandError
from kvpool.config import parse_nbytes

if TYPE_CHECKING:
    from kvpool.store import BlockStore, Layout

OPTIONS = (
    ("--store", "DIR|URL", "keep prefixes in this directory, or on a server: redis://HOST:PORT, unix://PATH"),
    ("--store-max", "SIZE", "what the directory holds, at most (default: 10GB)"),
    ("--store-writes", "SIZE/day", "what is written to the directory in a day, at most (default: no limit)"),
    ("--store-memory", "SIZE", "memory in front of the store, which answers first (default: none)"),
)
READY_SECONDS = 5.0  # how long the index of a directory may take before the first request


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `store_of`."""
    group = parser.add_argument_group("prefixes that outlive the process", "more: docs/store.md")
    for name, metavar, text in OPTIONS:
        group.add_argument(name, metavar=metavar, help=text)


def store_of(args: argparse.Namespace) -> Callable[[Layout], BlockStore] | None:
    """What makes the store of the arguments, None without `--store`. Sizes are checked now, the place when it is made.

    Raises
    ------
    CommandError
        Also of the returned callable.
    """
    most, memory = _size("--store-max", args.store_max), _size("--store-memory", args.store_memory)
    per_day = args.store_writes
    if per_day is not None and not per_day.lower().endswith("/day"):
        raise CommandError(f"--store-writes {per_day}: not a size per day, such as 20GB/day")
    writes = _size("--store-writes", per_day and per_day[:-4])
    if args.store is None:
        for name, given in (("max", most), ("writes", writes), ("memory", memory)):
            if given is not None:
                raise CommandError(f"--store-{name}: only with --store")
        return None
    is_server = "://" in args.store
    if is_server and (most is not None or writes is not None):
        raise CommandError(f"--store {args.store}: the server has its own limits, leave out --store-max and -writes")

    def make(layout: Layout) -> Any:
        from kvpool.store import DiskStore, MemoryStore, TieredStore

        try:
            if is_server:
                from kvpool.store.server import ServerStore

                found: BlockStore = ServerStore(args.store, layout)
            else:
                found = DiskStore(args.store, layout, most or 10 * 10**9, write_nbytes_per_day=writes)
                found.ready.wait(READY_SECONDS)
            return found if memory is None else TieredStore([MemoryStore(layout, memory), found])
        except (OSError, ValueError, ImportError) as exc:
            text = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc).rpartition("] ")[2]
            raise CommandError(f"--store {args.store}: {text}") from None

    return make


def _size(option: str, text: str | None) -> int | None:
    try:
        nbytes = None if text is None else parse_nbytes(text)
    except ValueError:
        raise CommandError(f"{option} {text}: not a size, such as 20GB") from None
    if nbytes == 0:
        raise CommandError(f"{option} {text}: must be more than 0")
    return nbytes
