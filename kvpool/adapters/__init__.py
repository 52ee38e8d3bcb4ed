"""Glue between kvpool and serving frameworks, one module per framework. The core and backends import none."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def importing(package: str, found: str, tested: str) -> Iterator[None]:
    """A context for imports that other releases may lack. If one is missing, the ImportError names both releases."""
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"[kvpool.adapters] {package} {found} is installed, the adapter was tested with {tested}: {error}"
        ) from error


def warn_if_untested(call: str, package: str, found: str, oldest: str, below: str) -> None:
    """Warn of a release that is older than `oldest`, or `below` or newer: no test has run with it."""
    if not _numbers(oldest) <= _numbers(found) < _numbers(below):
        _log.warning("[%s] %s %s is installed, tested with >= %s, < %s", call, package, found, oldest, below)


def _numbers(release: str) -> list[int]:
    """Leading numbers of a release: ``"0.10.2.dev1"`` is ``[0, 10, 2]``. Without numbers it is older than all."""
    match = re.match(r"\d+(\.\d+)*", release)
    return [int(number) for number in match[0].split(".")] if match else []
