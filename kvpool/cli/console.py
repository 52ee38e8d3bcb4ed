"""Shared by all commands: refusals, parsing of options, and facts about this machine."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
import platform
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

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


def cpu_model() -> str:
    """Return the name of the CPU; its architecture if the system does not tell."""
    found = re.search(r"^model name\s*:\s*(.+)$", read_text("/proc/cpuinfo"), re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def cache_nbytes() -> int | None:
    """Return the size of the largest cache of the first CPU, None where the system does not tell."""
    sizes = [read_text(path) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    found = [re.fullmatch(r"(\d+)([KMG])", size.strip()) for size in sizes]
    return max((int(size[1]) * units[size[2]] for size in found if size), default=None)


def huge_pages() -> str | None:
    """Return when the system backs memory with huge pages: always, madvise (on request) or never."""
    found = re.search(r"\[(\w+)\]", read_text("/sys/kernel/mm/transparent_hugepage/enabled"))
    return found[1] if found else None


def read_text(path: str | Path) -> str:
    """Return the content of a file of the system, empty where there is none."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
