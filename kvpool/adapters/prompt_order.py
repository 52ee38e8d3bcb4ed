"""Which sequence of a `PromptCache` leaves first: one that is not kept, then by type and use as in mlx-lm."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from kvpool.adapters.dense_caches import CacheLayout

TYPES = ("assistant", "user", "system")
"""Types of sequences, as in mlx-lm: what leaves first where `max_size` or `trim_to` counts them."""

Tokens = list[int] | np.ndarray


@dataclass(eq=False)
class CachedSequence:
    """An inserted sequence: an open row of the pool, and the caches that are valid at its end only.

    `parent` is its last full block (or the root), `tail` the tokens behind it. Until `until` it is kept with
    `priority`.
    """

    layout: CacheLayout
    root: bytes
    kind: str = TYPES[0]
    extra: Any = None
    priority: int = 0
    until: float = 0.0
    handle: int = -1
    parent: int | bytes = b""
    length: int = 0
    tail: list[int] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    kept_nbytes: int = 0
    nbytes: int = 0
    can_cut: bool = True  # a shorter prefix can be made of it

    def priority_at(self, now: float) -> int:
        """Return how late it leaves: 0 unless it is kept."""
        return self.priority if now < self.until else 0

    def keep(self, priority: int, until: float, now: float) -> None:
        """Keep it until then, and as long and with the priority that it is kept now."""
        self.priority = max(priority, self.priority_at(now))
        self.until = max(until, self.until)

    def is_prefix_of(self, known: Tokens) -> bool:
        """Whether a prompt that has its whole blocks begins with it."""
        return self.tail == list(known[self.length - len(self.tail) : self.length])


def first(sequences: Iterable[CachedSequence], now: float) -> CachedSequence | None:
    """Return the first one that is not kept, or else the first one of the lowest priority."""
    best: CachedSequence | None = None
    for one in sequences:
        if not one.priority_at(now):
            return one
        if best is None or one.priority < best.priority:
            best = one
    return best


def oldest(
    order: dict[str, OrderedDict[CachedSequence, None]], now: float, but: CachedSequence | None = None
) -> CachedSequence:
    """Return the sequence that leaves first, of those of the lowest priority: its type is not rarer than the next one.

    `order` has those of each type, in the order of use, `but` is passed over. At the time `inf` nothing is kept.
    """
    orders = list(order.values())
    firsts = [first((one for one in each if one is not but), now) for each in orders]
    lowest = min(one.priority_at(now) for one in firsts if one)
    found = [one if one and one.priority_at(now) == lowest else None for one in firsts]
    for one, (own, following) in zip(found, pairwise(orders), strict=False):
        if one and len(own) >= len(following):
            return one
    return next(one for one in reversed(found) if one)
