"""Errors for a framework release that was not tested. They name the release, not the module that has moved."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator


@contextlib.contextmanager
def importing(package: str, found: str, tested: str) -> Iterator[None]:
    """A context for imports that other releases may lack. If one is missing, the ImportError names both releases."""
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"[kvpool.adapters] {package} {found} is installed, the adapter was tested with {tested}: {error}"
        ) from error


def require(call: str, package: str, found: str, oldest: str, below: str, *, strict: bool = True) -> None:
    """Raise RuntimeError if the release `found` is older than `oldest`, or `below` or newer (and `strict`)."""
    if strict and not _numbers(oldest) <= _numbers(found) < _numbers(below):
        raise RuntimeError(
            f"[{call}] {package} {found} is installed, tested with >= {oldest}, < {below}; see strict=False"
        )


def _numbers(release: str) -> list[int]:
    """Leading numbers of a release: ``"0.10.2.dev1"`` is ``[0, 10, 2]``. Without numbers it is older than all."""
    match = re.match(r"\d+(\.\d+)*", release)
    return [int(number) for number in match[0].split(".")] if match else []
