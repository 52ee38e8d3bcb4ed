"""The layers of a simulated model: which group of the pool holds them, what their queries read, and where it lies.

A pool without groups has one full group. Nothing here asks a pool which rule it follows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvpool import Group

MOST_GROUPS, MOST_COLUMNS = 8, 4


@dataclass(frozen=True, slots=True)
class Layers:
    """One group: `size` tokens in a block, blocks of arena number `arena`; ids below `low` hold nothing."""

    number: int
    kind: str
    reach: int
    keep: int
    size: int
    columns: int
    arena: int
    low: int
    alone: bool  # the pool was made without groups

    def first_read(self, position: Any) -> Any:
        """Queries at these positions and later ones read no token below, but for those that are kept."""
        if self.kind == "window":
            return np.maximum(position - self.reach + 1, 0)
        return position // self.reach * self.reach if self.kind == "chunk" else position * 0

    def mark(self, stamps: np.ndarray) -> np.ndarray:
        """What its columns hold of tokens with these stamps, ``[tokens, columns]``."""
        return (stamps[:, None] * MOST_GROUPS + self.number) * MOST_COLUMNS + np.arange(self.columns)

    def arrays(self, plan: Any) -> Any:
        """What a plan says of the group."""
        return plan if self.alone else plan.groups[self.number]

    def table(self, pool: Any, handle: int) -> np.ndarray:
        """The blocks of a sequence, ``[entries, columns]``."""
        return (pool.table(handle) if self.alone else pool.table(handle, self.number)).reshape(-1, self.columns)

    def blocks(self, pool: Any) -> Any:
        """The calls on its blocks."""
        return pool.blocks if self.alone else pool.blocks.arena(self.arena)


def layers_of(groups: tuple[Group, ...], block_size: int, reserved: int) -> list[Layers]:
    """All layers of a pool; arenas of states come after those of blocks."""
    if not groups:
        return [Layers(0, "full", 0, 0, block_size, 1, 0, reserved, True)]
    made: list[Layers] = []
    arenas = 1 + max((group.arena for group in groups if group.kind != "state"), default=0)
    for number, group in enumerate(groups):
        if group.kind == "state":
            made.append(Layers(number, "state", 0, 0, 1, 1, arenas, 0, False))
            arenas += 1
        else:
            size = group.block_size or block_size
            place = (size, group.columns, group.arena, reserved, False)
            made.append(Layers(number, group.kind, group.size, group.keep, *place))
    return made


def needs(groups: tuple[Group, ...], block_size: int, length: int, arena: int) -> int:
    """Blocks of an arena that a row of this length has if it lets go of none."""
    here = [layers for layers in layers_of(groups, block_size, 0) if layers.arena == arena]
    return sum(layers.columns * -(-length // layers.size) for layers in here)


def draw_groups(
    rng: random.Random, block_size: int, longest: int, reserved: int, slots: int, lookahead: int
) -> tuple[Group, ...]:
    """One to five groups in one or two arenas, each with room for one to three of the longest rows."""
    kinds = [rng.choice(["full", "window", "chunk"])]
    kinds += rng.choices(["full", "window", "window", "chunk", "state"], k=rng.choice([0, 1, 1, 2, 2, 3, 4]))
    groups: list[Group] = []
    for place, kind in enumerate(kinds):
        if kind == "state":
            groups.append(Group.state(slots + rng.randint(0, slots)))
            continue
        reach = lookahead + rng.randint(1, rng.choice([3, 8, 16]))
        keep = rng.choice([0, rng.randrange(reach)]) if kind == "window" else 0
        size, columns = block_size * rng.choice([1, 1, 2, 4]), rng.choice([1, 1, 2, 3])
        arena = int(place > 0 and rng.random() < 0.4)
        groups.append(Group(kind, 0 if kind == "full" else reach, keep, size, columns, arena))
    second = next((place for place, group in enumerate(groups) if group.arena == 1), None)
    if second is not None:
        need = needs(tuple(groups), block_size, longest, 1)
        groups[second] = replace(groups[second], num_blocks=reserved + need + rng.randint(1, need))
    return tuple(groups)
