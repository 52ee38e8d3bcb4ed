"""`Group`: layers of one kind and one shape, whose KV a pool holds in tables of their own."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Self

MAX_ARENAS = 8


def _int(name: str, value: Any, low: int, high: int = 2**31 - 1) -> int:
    if isinstance(value, bool):
        raise TypeError(f"[Group] {name} is a bool ({value}), an int is needed")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"[Group] {name} is a {type(value).__name__} ({value!r}), an int is needed") from None
    if not low <= number <= high:
        raise ValueError(f"[Group] {name} is {number}, it must be in {low} .. {high}")
    return number


@dataclass(frozen=True, kw_only=True)
class _Fields:
    kind: str
    window: int  #: positions that a query reads, its own included
    keep: int  #: first positions that every query reads too
    chunk: int  #: a query reads from the last multiple of it on
    slots: int  #: state slots
    block_size: int | None  #: tokens of a block; None: the pool's
    columns: int  #: block ids per block of tokens
    arena: int  #: the set of blocks that the group takes from
    num_blocks: int | None  #: blocks of that arena, which the first group in it says

    def __post_init__(self) -> None:
        sizes = {"window": self.window, "chunk": self.chunk, "state": self.slots}
        if self.kind not in ("full", *sizes):
            raise ValueError(f"[Group] kind is {self.kind!r}, one of full, window, chunk, state is needed")
        if self.kind in sizes:
            _int("slots" if self.kind == "state" else self.kind, sizes[self.kind], 1)
        _int("keep", self.keep, 0, max(self.window - 1, 0))
        _int("columns", self.columns, 1)
        _int("arena", self.arena, 0, MAX_ARENAS - 1)
        if self.block_size is not None:
            _int("block_size", self.block_size, 1)
        if self.num_blocks is not None:
            if self.arena == 0:
                raise ValueError(f"[Group] num_blocks is {self.num_blocks}, but arena 0 has the pool's")
            _int("num_blocks", self.num_blocks, 1)

class Group(_Fields):
    """Layers of one kind and one shape; made by `full`, `window`, `chunk` or `state`.

    Examples
    --------
    >>> Group.window(1024, keep=4).keep
    4
    """

    def __init__(
        self, kind: str, *, window: Any = 0, keep: Any = 0, chunk: Any = 0, slots: Any = 0, block_size: Any = None,
        columns: Any = 1, arena: Any = 0, num_blocks: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(
            kind=kind, window=window, keep=keep, chunk=chunk, slots=slots, block_size=block_size, columns=columns,
            arena=arena, num_blocks=num_blocks,
        )  # fmt: skip

    @classmethod
    def full(cls, **options: Any) -> Self:
        """Every query reads all positions up to its own."""
        return cls("full", **options)

    @classmethod
    def window(cls, window: int, *, keep: int = 0, **options: Any) -> Self:  # type: ignore[no-redef]
        """A query reads the last `window` positions up to its own, and the first `keep`."""
        return cls("window", window=window, keep=keep, **options)

    @classmethod
    def chunk(cls, chunk: int, **options: Any) -> Self:  # type: ignore[no-redef]
        """A query reads from the last multiple of `chunk` on."""
        return cls("chunk", chunk=chunk, **options)

    @classmethod
    def state(cls, slots: int) -> Self:
        """A query reads one state, whatever the length."""
        return cls("state", slots=slots)
