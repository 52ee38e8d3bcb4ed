"""Layer groups: layers of one kind and one shape; a pool has one at least. docs/core.md is the contract."""

from dataclasses import dataclass, replace
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


def read_groups(groups: object, block_size: int, lookahead: int, most: int) -> tuple[Group, ...]:
    """The layer groups that a pool is asked for, at most so many; None: one full group."""
    if groups is None:
        return (Group.full(),)
    if not isinstance(groups, (list, tuple)):
        raise TypeError(f"[Pool] groups must be a list or a tuple of kvpool.Group, not {type(groups).__name__}")
    groups = tuple(groups)
    for group in groups:
        if type(group) is not Group:
            raise TypeError(f"[Pool] groups must be kvpool.Group, not {type(group).__name__}")
    if not 1 <= len(groups) <= most:
        raise ValueError(f"[Pool] {len(groups)} groups, 1 .. {most} are allowed")
    blocks = [group for group in groups if group.kind != "state"]
    for group in blocks:
        if group.block_size not in (None, block_size, 2 * block_size, 4 * block_size):
            raise ValueError(f"[Pool] block_size of a group is {group.block_size}, it must be {block_size} times 1, 2 "
                             f"or 4")
        if group.kind != "full" and lookahead >= group.size:
            raise ValueError(f"[Pool] lookahead is {lookahead}, it must be below every window and chunk ({group.size})")
    arenas = {group.arena for group in blocks}
    if arenas != set(range(len(arenas))):
        raise ValueError(f"[Pool] arenas are {', '.join(map(str, sorted(arenas)))}, they must be 0, 1, .. without a "
                         f"gap")
    told: dict[int, int | None] = {0: None}
    for group in blocks:
        if group.arena not in told and group.num_blocks is None:
            raise ValueError(f"[Pool] the first group in arena {group.arena} must say num_blocks")
        if group.num_blocks not in (None, told.setdefault(group.arena, group.num_blocks)):
            due = f"another says {told[group.arena]}" if group.arena else "the pool's own argument says how many"
            raise ValueError(f"[Pool] a group says that arena {group.arena} has {group.num_blocks} blocks, {due}")
    return groups


def arena_sizes(groups: tuple[Group, ...], num_blocks: int) -> dict[int, int]:
    """Arena -> blocks, or state slots."""
    sizes = {0: num_blocks}
    for group, arena in zip(groups, arenas_of(groups), strict=True):
        sizes.setdefault(arena, group.size if group.kind == "state" else group.num_blocks or 0)
    return sizes


def resized(groups: tuple[Group, ...], sizes: dict[int, int]) -> tuple[Group, ...]:
    """The same groups in arenas of other sizes."""
    return tuple(
        replace(group, size=sizes[arena])
        if group.kind == "state"
        else group if group.num_blocks is None else replace(group, num_blocks=sizes[arena])
        for group, arena in zip(groups, arenas_of(groups), strict=True)
    )
