"""A trace from a formula, for machines without trace files: the same numbers everywhere.

Conversations over three shared system prompts. Each turn's prompt repeats the conversation and adds to it; one
turn in eight branches off at an earlier point. The turns of all conversations are interleaved at random. The
generator is SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014), integers
only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvpool.replay.trace import Trace

MASK = 2**64 - 1


class SplitMix64:
    """Random integers from a 64-bit counter."""

    def __init__(self, seed: int) -> None:
        self.state = seed & MASK

    def draw(self) -> int:
        """Return 64 random bits."""
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        bits = self.state
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & MASK
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & MASK
        return bits ^ bits >> 31

    def below(self, limit: int) -> int:
        """Return an integer in ``[0, limit)``."""
        return self.draw() % limit

    def between(self, first: int, last: int) -> int:
        """Return an integer in ``[first, last]``."""
        return first + self.below(last - first + 1)

    def small(self, first: int, last: int) -> int:
        """Return an integer in ``[first, last]``, more often a small one: the least of three."""
        return min(self.between(first, last) for _ in range(3))


@dataclass
class _Conversation:
    number: int
    ids: list[int]
    turns_left: int


def synthetic_trace(seed: int = 1, sessions: int = 24, block_size: int = 16) -> Trace:
    """Return the trace of `sessions` conversations, each of 1 to 12 turns.

    Prompts keep their last, partly filled block without an id, as agent traces do.
    """
    random, num_ids = SplitMix64(seed), 0

    def new_ids(count: int) -> list[int]:
        nonlocal num_ids
        num_ids += count
        return list(range(num_ids - count, num_ids))

    system_prompts = [new_ids(random.between(4, 24)) for _ in range(3)]
    live = [_Conversation(number, system_prompts[random.below(3)], random.small(1, 12)) for number in range(sessions)]
    clock, rows = 0, []
    while live:
        talk = live[random.below(len(live))]
        history = talk.ids
        if len(history) > 1 and random.below(8) == 0:
            history = history[: random.between(1, len(history))]
        talk.ids = history + new_ids(random.small(1, 40))
        clock += random.between(0, 400)
        prompt = len(talk.ids) * block_size + random.below(block_size)
        rows.append((clock, talk.number, prompt, random.small(1, 160), talk.ids))
        talk.turns_left -= 1
        if talk.turns_left == 0:
            live.remove(talk)
    timestamps, numbers, prompts, outputs, ids = zip(*rows, strict=True)
    return Trace(
        name=f"synthetic (seed {seed}, {sessions} sessions)",
        block_size=block_size,
        prompts=np.array(prompts, np.int64),
        outputs=np.array(outputs, np.int64),
        ids=np.concatenate([np.array(row, np.int64) for row in ids]),
        id_offsets=np.cumsum([0, *map(len, ids)], dtype=np.int64),
        timestamps=np.array(timestamps, np.int64),
        sessions=np.array(numbers, np.int64),
    )
