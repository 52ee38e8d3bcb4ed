"""Shared by all commands: refusals, parsing of options, progress."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
import sys
from collections.abc import Callable, Iterator

INT_MAX = 2**31 - 1


class CommandError(Exception):
    """The command cannot do what was asked. The message is for the person who typed it."""


def whole(option: str, text: str, least: int = 1, most: int = INT_MAX) -> int:
    """Return `text` as an integer from `least` to `most`."""
    try:
        value = int(text)
    except ValueError:
        raise CommandError(f"{option} {text}: not a whole number") from None
    if not least <= value <= most:
        raise CommandError(f"{option} {text}: out of range, {least}..{most}")
    return value


def real(option: str, text: str, least: float, most: float = math.inf) -> float:
    """Return `text` as a finite number from `least` to `most`."""
    try:
        value = float(text)
    except ValueError:
        raise CommandError(f"{option} {text}: not a number") from None
    if not (math.isfinite(value) and least <= value <= most):
        limits = f"at least {least:g}" if most == math.inf else f"{least:g}..{most:g}"
        raise CommandError(f"{option} {text}: out of range, {limits}")
    return value


def nbytes(option: str, text: str) -> int:
    """Return a size such as 16GiB or 1024 in bytes."""
    from kvpool.config import parse_nbytes

    try:
        return parse_nbytes(f"{text}B" if text.isdecimal() else text)
    except ValueError as exc:
        raise CommandError(f"{option} {text}: {str(exc).rpartition('] ')[2]}") from None


@contextlib.contextmanager
def progress(total: int, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows on stderr what begins now. It is called `total` times.

    It is a bar on a terminal if rich is installed, else a line for each call.
    """
    if quiet:
        yield lambda what: None
        return
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        number = itertools.count(1)
        yield lambda what: print(f"[{next(number)}/{total}] {what}", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, completed=-1)
        yield lambda what: bar.update(task, advance=1, description=what)
