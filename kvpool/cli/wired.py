"""Memory that macOS may not page out while a command runs a model.

The pages of a cache are touched rarely, so they and parts of the weights are the first that macOS takes away, and each
token then waits for them. A limit belongs to the process, so only commands set one: the library never does.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

from kvpool.cli.console import nbytes

ROOM = 2**30  # beside weights and cache, for what a step computes
SMALL_NBYTES, SMALL_SHARE = 16 * 2**30, 0.65  # a Mac with so much memory keeps the rest for others


def add_wired_argument(parser: argparse.ArgumentParser) -> None:
    """Declare --wired."""
    text = "memory that macOS may not page out: off, a size, or auto, the weights and the cache (default: %(default)s)"
    parser.add_argument("--wired", metavar="auto|off|BYTES", default="auto", help=text)


def most_wired_nbytes() -> int:
    """Return the most that is wired here; 0 without MLX or Metal."""
    try:
        import mlx.core as mx
    except ImportError:
        return 0
    if not mx.metal.is_available():
        return 0
    device = mx.device_info()
    most, total = int(device["max_recommended_working_set_size"]), int(device["memory_size"])
    return min(most, int(SMALL_SHARE * total)) if total <= SMALL_NBYTES else most


def limit_of(given: str) -> int | None:
    """Return the limit of --wired before a model is loaded, None for off."""
    if given == "off":
        return None
    wanted = None if given == "auto" else nbytes("--wired", given)
    return most_wired_nbytes() if wanted is None else min(wanted, most_wired_nbytes())


@contextlib.contextmanager
def wired(given: str) -> Iterator[None]:
    """Keep the limit of --wired, and the former one afterwards."""
    limit = limit_of(given)
    if not limit:
        yield
        return
    import mlx.core as mx

    before = mx.set_wired_limit(limit)
    try:
        yield
    finally:
        mx.synchronize()
        mx.set_wired_limit(before)


def fit_wired(given: str) -> int:
    """Set the limit of ``--wired auto`` to weights and cache, as MLX has them now. Returns the limit, 0 for none."""
    limit = limit_of(given) or 0
    if limit and given == "auto":
        import mlx.core as mx

        limit = min(limit, mx.get_active_memory() + ROOM)
        mx.set_wired_limit(limit)
    return limit
