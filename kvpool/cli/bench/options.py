"""Options that a measurement takes: lists, numbers such as ``4k``, sizes of memory."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable

from kvpool.cli.console import INT_MAX, CommandError, nbytes, whole

DTYPES = ("float32", "bfloat16", "float16")
LIST, NUMBER = "A,B,...", "N"
MEMORY = "leave out what needs more, such as 8GiB; auto: half of what is available"
Option = tuple[str, str, str, str]  # name, LIST or NUMBER, default, what it is


def declare(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    """Declare options that take a list or a number."""
    for name, shown, default, text in options:
        parser.add_argument(f"--{name}", metavar=shown, default=default, help=f"{text} (default: %(default)s)")


def some(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names in `text`, each of which has to be known."""
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise CommandError(f"{option} {name}: there are {', '.join(known)}")
    return names


def numbers(option: str, text: str, most: int = INT_MAX) -> tuple[int, ...]:
    """Return the numbers in ``"1k,4096"`` in ascending order."""
    return tuple(sorted({number(option, part, most) for part in text.split(",")}))


def number(option: str, text: str, most: int = INT_MAX) -> int:
    """Return ``"4k"`` as 4096."""
    found = re.fullmatch(r"(\d{1,9})k", text.lower())
    return whole(option, str(int(found[1]) * 1024) if found else text, most=most)


def memory_nbytes(text: str) -> int:
    """Return the size in bytes."""
    from kvpool.config import available_memory_nbytes

    return available_memory_nbytes() // 2 if text == "auto" else nbytes("--max-memory", text)


def tokens(n: int) -> str:
    """Return a number of tokens as people write it: 4096 as ``4k``."""
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)
