"""What a simulated world is made of: its sizes, the weights of its events, its prompts, and stamps of content."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from kvpool import Group
from proof.simulation.layers import draw_groups, needs

#: Events and how often they happen, before a world redraws the weights.
EVENTS = {
    "execute": 80.0,
    "schedule": 16.0,
    "deliver": 14.0,
    "admit": 6.0,
    "submit": 4.0,
    "finish": 3.0,
    "commit": 4.0,
    "fork": 1.2,
    "abort": 0.08,
    "preempt": 0.06,
    "trim": 0.2,
    "compact": 0.8,
    "evict_blocks": 0.2,
    "give_up": 0.3,
    "pin": 0.3,
    "unpin": 0.3,
    "send": 0.3,
    "sent": 0.3,
    "flush": 0.05,
    "misuse": 0.5,
}
ALWAYS = ("execute", "schedule", "deliver", "admit", "submit", "finish", "give_up", "unpin", "sent", "abort")
NAMESPACES = (b"", b"other")


@dataclass(slots=True)
class Shape:
    """Sizes and habits of one world, drawn from its seed."""

    num_blocks: int
    block_size: int
    width: int  # blocks of the longest sequence
    reserved_blocks: int
    watermark: int
    max_seqs: int
    max_running: int
    max_rows: int
    max_tokens: int
    depth: int  # most steps in flight
    num_layers: int
    prefix_cache: bool
    in_order: bool
    by_tables: bool
    chunk: int  # most prompt tokens of a request in a step
    vocabulary: int
    num_prompts: int
    drafting: float  # these are probabilities
    reserving: float
    losing: float
    reordering: float
    resetting: float
    weights: dict[str, float]
    grouped: bool  # whether the pool has layer groups: then its sizes are drawn anew
    by_updates: bool = False  # read through tables that ``table_updates`` keep
    groups: tuple[Group, ...] = ()
    lookahead: int = 0

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return self.width * self.block_size

    def pool_options(self) -> dict[str, Any]:
        """Arguments of the pool besides its two sizes."""
        names = ("reserved_blocks", "watermark", "max_seqs", "prefix_cache", "in_order")
        options = {name: getattr(self, name) for name in names} | {"max_blocks_per_seq": self.width}
        return options | ({"groups": self.groups, "lookahead": self.lookahead} if self.groups else {})

    @property
    def most_drafts(self) -> int:
        """Tokens that are drafted at most: all of them may be cut off again."""
        return min(4, self.lookahead) if self.groups else 4

    @classmethod
    def draw(cls, rng: random.Random, changes: dict[str, Any]) -> Shape:
        """Draw a world; pools hold one to four of the longest requests."""
        width, reserved = rng.randint(2, 8), rng.randint(0, 2)
        watermark, max_running = rng.choice([0, 0, 1, 2]), rng.randint(1, 10)
        num_blocks = reserved + width + watermark + rng.randint(1, 3 * width)
        weights = {
            name: weight * rng.choice([0.3, 1.0, 1.0, 3.0] if name in ALWAYS else [0.0, 0.3, 1.0, 3.0])
            for name, weight in EVENTS.items()
        }
        shape = cls(
            num_blocks=num_blocks,
            block_size=rng.choice([1, 2, 3, 4, 8]),
            width=width,
            reserved_blocks=reserved,
            watermark=watermark,
            max_seqs=max_running + 2,
            max_running=max_running,
            max_rows=rng.randint(1, 8),
            max_tokens=rng.randint(5, 32),
            depth=rng.randint(1, 4),
            num_layers=rng.choice([1, 1, 2]),
            prefix_cache=rng.random() < 0.6,
            in_order=rng.random() < 0.08,
            by_tables=rng.random() < 0.4,
            chunk=rng.randint(2, 16),
            vocabulary=rng.choice([2, 1000, 2**31]),
            num_prompts=rng.randint(4, 16),
            drafting=rng.choice([0.0, 0.1, 0.5]),
            reserving=rng.choice([0.0, 0.05]),
            losing=rng.choice([0.0, 0.02, 0.1]),
            reordering=rng.choice([0.0, 0.5, 1.0]),
            resetting=rng.choice([0.0, 0.02]),
            weights=weights,
            grouped=changes["grouped"] if "grouped" in changes else rng.random() < 0.5,
        )
        for name, value in changes.items():
            if name == "weights":
                shape.weights.update(value)
            else:
                setattr(shape, name, value)
        shape.by_tables = shape.by_tables and not shape.in_order  # their plans may be in use again when they run
        if shape.grouped:
            shape.divide(rng)
        return shape

    def divide(self, rng: random.Random) -> None:
        """Give the pool layer groups: no prefix cache, and no token leaves but behind a window."""
        self.block_size, self.width = rng.choice([1, 1, 2, 3, 4]), rng.randint(4, 16)
        self.lookahead = rng.choice([0, 0, 1, 2, 4])
        slots = self.max_running + rng.randint(1, self.max_running * self.depth)
        self.groups = draw_groups(rng, self.block_size, self.max_length, self.reserved_blocks, slots, self.lookahead)
        need = needs(self.groups, self.block_size, self.max_length, 0)
        self.num_blocks = self.reserved_blocks + self.watermark + need + rng.randint(1, need)
        self.by_updates = rng.random() < 0.3
        self.by_tables = self.by_tables and not self.by_updates
        self.prefix_cache = False
        self.drafting *= self.lookahead > 0 and all(group.kind != "state" for group in self.groups)
        self.weights |= {"compact": 0.0, "evict_blocks": 0.0, "flush": 0.0, "pin": 0.0, "unpin": 0.0}


class Stamps:
    """A number for every token in every context: equal numbers, equal contents."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int], int] = {}
        self._roots = {namespace: -2 - i for i, namespace in enumerate(NAMESPACES)}

    def extend(self, stamps: list[int], tokens: list[int], namespace: bytes, salt: int = 0) -> None:
        """Append the stamps of `tokens`, which follow on what `stamps` stand for; `salt`: on what is left of it."""
        known = self._known
        last = stamps[-1] if stamps else self._roots[namespace]
        for token in tokens:
            last = known.setdefault((last, token, salt), len(known))
            stamps.append(last)


def prompts(rng: random.Random, shape: Shape, stamps: Stamps) -> list[tuple[bytes, list[int], list[int]]]:
    """Return prompts (namespace, tokens, stamps) many of which begin alike."""
    bases = [[rng.randrange(3) for _ in range(shape.max_length)] for _ in range(2)]
    made = []
    for _ in range(shape.num_prompts):
        length = rng.randint(1, max(1, shape.max_length - 2))
        base, shared = rng.choice(bases), rng.randint(0, length)
        tokens = base[:shared] + [rng.randrange(3) for _ in range(length - shared)]
        content: list[int] = []
        namespace = rng.choice(NAMESPACES)
        stamps.extend(content, tokens, namespace)
        made.append((namespace, tokens, content))
    return made
