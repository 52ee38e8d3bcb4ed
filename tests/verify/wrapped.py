"""A pool between `tests.verify._verify.Run` and the core, which sees each call of a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kvpool

CALLS = (
    *("open", "loaded", "fork", "truncate", "close", "close_finished", "defer_close", "can", "step", "reserve", "done"),
    *("rollback", "unshare", "compact", "evict_blocks", "reset"),
)


class Part:
    """The prefix cache of a pool, or the blocks of an arena."""

    def __init__(self, pool: Wrapped, mine: Any) -> None:
        self.pool, self.mine = pool, mine

    def arena(self, number: int) -> Part:
        """The blocks of another arena."""
        return Part(self.pool, self.mine.arena(number))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Such a method."""
        return lambda *given, **options: self.pool.made(name, lambda: getattr(self.mine, name)(*given, **options))


class Wrapped(kvpool.Pool):
    """A pool that makes its calls by `made`."""

    def made(self, name: str, call: Callable[[], Any]) -> Any:
        """Make a call of this name."""
        raise NotImplementedError

    @property
    def prefix(self) -> Any:
        """The prefix cache, if there is one."""
        found = super().prefix
        return found and Part(self, found)

    @property
    def blocks(self) -> Any:
        """The blocks of arena 0."""
        return Part(self, super().blocks)


def wrapped(name: str) -> Callable[..., Any]:
    """A method of `Pool` that is made by `made`."""

    def call(self: Wrapped, *given: Any, **options: Any) -> Any:
        method = getattr(super(Wrapped, self), name)
        return self.made(name, lambda: method(*given, **options))

    return call


for one in CALLS:
    setattr(Wrapped, one, wrapped(one))
