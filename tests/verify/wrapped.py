"""A pool between `tests.verify._verify.Run` and the core, which sees each call of a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kvpool

CALLS = (
    *("open", "loaded", "fork", "truncate", "close", "defer_close", "can", "step", "reserve", "done"),
    *("rollback", "unshare", "compact", "evict_blocks", "reset", "resize"),
)


class Part:
    """A part of a pool: "prefix", or the number of an arena, whose blocks it has."""

    def __init__(self, pool: Wrapped, name: str | int, mine: Any) -> None:
        self.pool, self.name, self.mine = pool, name, mine

    def arena(self, number: int) -> Part:
        """The blocks of another arena."""
        return Part(self.pool, number, self.mine.arena(number))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Such a method."""
        call = getattr(self.mine, name)
        return lambda *given, **options: self.pool.made(name, call, given, options, self.name)


class Wrapped(kvpool.Pool):
    """A pool whose calls are made by `made`."""

    def made(self, name: str, call: Callable[..., Any], given: Any, options: dict[str, Any], part: Any = None) -> Any:
        """Make a call of this name, of the pool or of a part."""
        raise NotImplementedError

    @property
    def prefix(self) -> Any:
        """The prefix cache, if there is one."""
        found = super().prefix
        return found and Part(self, "prefix", found)

    @property
    def blocks(self) -> Any:
        """The blocks of arena 0."""
        return Part(self, 0, super().blocks)


def wrapped(name: str) -> Callable[..., Any]:
    """A method of `Pool` that is made by `made`."""
    return lambda self, *given, **options: self.made(name, getattr(super(Wrapped, self), name), given, options)


for one in CALLS:
    setattr(Wrapped, one, wrapped(one))
