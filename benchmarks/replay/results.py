"""What a replay counted: `Result`, and in it what the pool held, over all steps: `Occupancy`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Occupancy:
    """What the pool held, over all steps, and what a static reservation would have held for the same sequences.

    Sums run over the ends of steps. Utilization is tokens of sequences / token positions held for them; sharing
    counts a block once and its tokens in every sequence, so with it a pool can pass 1.
    """

    block_size: int
    reserved_tokens: int  #: what a static reservation holds per sequence: the trace's longest one
    steps: int = 0
    used_block_steps: int = 0
    token_steps: int = 0
    sequence_steps: int = 0
    peak_utilization: float = 0.0
    peak_static_utilization: float = 0.0

    def add(self, steps: int, used: int, tokens: int, sequences: int) -> None:
        """Count `steps` steps after which `used` blocks, `sequences` sequences and `tokens` tokens are there.

        In the steps before the last one the sequences were shorter by one token each, by two, and so on.
        """
        self.steps += steps
        self.used_block_steps += steps * used
        self.token_steps += steps * tokens - sequences * (steps * (steps - 1) // 2)
        self.sequence_steps += steps * sequences
        if used:
            self.peak_utilization = max(self.peak_utilization, tokens / (used * self.block_size))
        if sequences:
            static = tokens / (sequences * self.reserved_tokens)
            self.peak_static_utilization = max(self.peak_static_utilization, static)

    @property
    def mean_utilization(self) -> float:
        """Tokens / positions held by the pool, both summed over the steps."""
        return _ratio(self.token_steps, self.used_block_steps * self.block_size)

    @property
    def mean_static_utilization(self) -> float:
        """The same for a static reservation."""
        return _ratio(self.token_steps, self.sequence_steps * self.reserved_tokens)


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
    occupancy : Occupancy
    costs : dict
        Per call of the pool: (number of calls, nanoseconds in all).
    block_operations : int
        Blocks taken, found in the cache, and released.
    peak_sequences : int
        Most sequences at a time.
    """

    num_blocks: int
    block_size: int
    concurrency: int
    counters: dict[str, Any]
    occupancy: Occupancy
    costs: dict[str, tuple[int, int]]
    block_operations: int
    peak_sequences: int

    @property
    def static_blocks(self) -> int:
        """Blocks that a static reservation needs to run as many sequences at a time."""
        return self.peak_sequences * -(-self.occupancy.reserved_tokens // self.block_size)

    @property
    def hit_rate(self) -> float:
        """Hit tokens / tokens looked up, repeated admissions included."""
        hit, *others = (self.counters.get(f"{name}_tokens", 0) for name in ("hit", "computed", "loaded"))
        return _ratio(hit, hit + sum(others))

    @property
    def ns_per_operation(self) -> float:
        """Time inside of the pool's calls per block operation, nanoseconds."""
        return _ratio(sum(ns for _, ns in self.costs.values()), self.block_operations)


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
