"""`SlotServer`: the server that kvpool is compared with where no model runs: a number of slots, and no pool.

Every sequence owns a slot as long as the longest sequence may get, from its first step to its last.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from benchmarks.serving.harness import Tick


class SlotServer:
    """Continuous batching over slots of one size, without memory or a model.

    Parameters
    ----------
    slots : int
        Sequences at a time.
    slot_blocks : int
        What a slot holds, in blocks; counted as in use while the slot is taken.
    prefill_chunk : int
        Tokens of prompts that a tick computes at most, oldest first.
    """

    def __init__(self, slots: int, *, slot_blocks: int = 1, prefill_chunk: int = 512) -> None:
        self.slots, self.slot_blocks, self.prefill_chunk = slots, slot_blocks, prefill_chunk
        self._waiting: deque[tuple[int, int, int]] = deque()
        self._running: list[list[int]] = []  # [number, prompt tokens left, context, tokens left]
        self._tick = Tick()

    def add(self, number: int, prompt: NDArray[np.int32], max_tokens: int) -> None:
        """Take a request."""
        self._waiting.append((number, len(prompt), max_tokens))

    @property
    def is_busy(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self._waiting or self._running)

    def tick(self) -> None:
        """Decode everybody, fill slots, compute a chunk of prompts; the end of a prompt gives its first token."""
        while self._waiting and len(self._running) < self.slots:
            number, prompt, new = self._waiting.popleft()
            self._running.append([number, prompt, 0, new])
        tick, emitted, budget = Tick(), [], self.prefill_chunk
        for sequence in self._running:
            if sequence[1] == 0:
                tick.decodes += 1
                sequence[2] += 1
            else:
                chunk = min(sequence[1], budget)
                budget -= chunk
                tick.prefill_tokens += chunk
                sequence[1] -= chunk
                sequence[2] += chunk
                if chunk == 0:
                    continue
            tick.context_tokens += sequence[2]
            if sequence[1] == 0:
                emitted.append(sequence[0])
                sequence[3] -= 1
        tick.running, tick.waiting = len(self._running), len(self._waiting)
        tick.blocks_in_use = tick.blocks_touched = len(self._running) * self.slot_blocks
        tick.emitted = np.array(emitted, np.int64)
        self._running = [sequence for sequence in self._running if sequence[3]]
        self._tick = tick

    def describe(self) -> Tick:
        """The last step."""
        return self._tick
