"""What a replay counted: `Result`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Result:
    """What a replay counted."""

    num_blocks: int  # of the pool, usable ones
    block_size: int
    concurrency: int  # the most requests at a time
    counters: dict[str, Any]  # of the policy, by name

    @property
    def hit_rate(self) -> float:
        """Hit tokens / tokens looked up, repeated admissions included."""
        hit, *others = (self.counters.get(f"{name}_tokens", 0) for name in ("hit", "computed", "loaded"))
        return hit / (hit + sum(others)) if hit else 0.0
