"""What a replay counted: `Result`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Result:
    """What a replay counted.

    Attributes
    ----------
    num_blocks, block_size : int
        The pool; usable blocks.
    concurrency : int
        The most requests at a time.
    counters : dict
        The policy's counters by name, in the order of its definition.
    """

    num_blocks: int
    block_size: int
    concurrency: int
    counters: dict[str, Any]

    @property
    def hit_rate(self) -> float:
        """Hit tokens / tokens looked up, repeated admissions included."""
        hit, *others = (self.counters.get(f"{name}_tokens", 0) for name in ("hit", "computed", "loaded"))
        return hit / (hit + sum(others)) if hit else 0.0
