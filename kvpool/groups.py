"""Layer groups: layers of one kind and one shape; a pool has one at least. docs/core.md is the contract."""

from dataclasses import dataclass
from itertools import count
from operator import index
from typing import Self

MAX_COLUMNS = 1024
UNUSED = {
    "full": ("size", "keep", "blocks"),
    "window": ("blocks",),
    "chunk": ("keep", "blocks"),
    "state": ("keep", "block_size", "columns", "arena", "num_blocks"),
}
"""Arguments that a kind of layers does not have."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers of one kind and one shape, which share a table; made by `full`, `window`, `chunk` and `state`.

    Parameters
    ----------
    kind : str
        ``"full"``, ``"window"``, ``"chunk"`` or ``"state"``.
    size : int
        Tokens of the window or of the chunk; state slots; 0 for full attention.
    keep : int
        Leading tokens that a window keeps.
    block_size : int, optional
        Tokens of a block; default the pool's. The pool's times 1, 2 or 4.
    columns : int
        Block ids per block of tokens, at most 1,024.
    arena : int
        Where the blocks come from.
    num_blocks : int, optional
        Blocks of that arena, for arenas after the first; the first group in one says it.
    blocks : int
        Of a state group: blocks of arena 0 that its part of a checkpoint takes. 0: the pool takes no checkpoint.

    Raises
    ------
    TypeError, ValueError
        An argument is not an integer, or out of range.
    """

    kind: str
    size: int = 0
    keep: int = 0
    block_size: int | None = None
    columns: int = 1
    arena: int = 0
    num_blocks: int | None = None
    blocks: int = 0

    def __post_init__(self) -> None:
        if self.kind not in UNUSED:
            raise ValueError(f"[Group] kind is {self.kind!r}, it must be full, window, chunk or state")
        most = {"columns": MAX_COLUMNS}
        lows = {"size": int(self.kind != "full"), "keep": 0, "block_size": 1, "columns": 1, "arena": 0, "num_blocks": 1}
        lows["blocks"] = 0
        for name, low in lows.items():
            value = getattr(self, name)
            if value is None and name in ("block_size", "num_blocks"):
                continue
            if isinstance(value, bool):
                raise TypeError(f"[Group] {name} must be an int, not a bool ({value})")
            try:
                number = index(value)
            except TypeError:
                raise TypeError(f"[Group] {name} must be an int, not {type(value).__name__}") from None
            high = most.get(name, 2**31 - 1)
            if not low <= number <= high:
                raise ValueError(f"[Group] {name} is out of range ({number}), it must be in {low} .. {high}")
            object.__setattr__(self, name, number)
        for name in UNUSED[self.kind]:
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise ValueError(f"[Group] {name} is {getattr(self, name)}, a group of kind {self.kind} has no {name}")
        if self.keep and self.keep >= self.size:
            raise ValueError(f"[Group] keep is {self.keep}, it must be below the window of {self.size} tokens")

    @classmethod
    def full(
        cls, *, block_size: int | None = None, columns: int = 1, arena: int = 0, num_blocks: int | None = None
    ) -> Self:
        """Layers that read every token."""
        return cls("full", 0, 0, block_size, columns, arena, num_blocks)

    @classmethod
    def window(
        cls,
        window: int,
        *,
        keep: int = 0,
        block_size: int | None = None,
        columns: int = 1,
        arena: int = 0,
        num_blocks: int | None = None,
    ) -> Self:
        """Layers that read the last `window` tokens, and the first `keep` ones."""
        return cls("window", window, keep, block_size, columns, arena, num_blocks)

    @classmethod
    def chunk(
        cls,
        chunk: int,
        *,
        block_size: int | None = None,
        columns: int = 1,
        arena: int = 0,
        num_blocks: int | None = None,
    ) -> Self:
        """Layers that read from the last multiple of `chunk` on."""
        return cls("chunk", chunk, 0, block_size, columns, arena, num_blocks)

    @classmethod
    def state(cls, slots: int, *, blocks: int = 0) -> Self:
        """Layers with one state per sequence.

        `slots`: working states of all rows. `blocks`: blocks of arena 0 that a checkpoint takes, 0: no checkpoint.
        """
        return cls("state", slots, blocks=blocks)


def arenas_of(groups: tuple[Group, ...]) -> list[int]:
    """The arena of each group of a pool: each state group has one of its own, after those of blocks."""
    states = count(1 + max(group.arena for group in groups))
    return [next(states) if group.kind == "state" else group.arena for group in groups]
