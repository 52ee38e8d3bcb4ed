"""`StaticBatches`: batching as it was before: a batch is put together, and runs until its slowest member is through."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from benchmarks.serving.harness import Server, Tick


class StaticBatches:
    """Static batching on any server that batches continuously.

    A batch begins when it is full, or when nobody else will come. Prompts are padded to its longest one, and each
    member goes on for as many tokens as the longest answer has; tokens beyond a member's own are thrown away.

    Parameters
    ----------
    server : Server
        Has to admit a whole batch at once.
    batch : int
        Requests of a batch.
    requests : int
        How many will come.
    pad : bool
        Whether to pad prompts here; a server that pads by itself does not need it.
    """

    def __init__(self, server: Server, batch: int, requests: int, *, pad: bool = True) -> None:
        self.server, self.batch, self.pad = server, batch, pad
        self._left = requests  # not yet in a batch
        self._waiting: deque[tuple[int, NDArray[np.int32], int]] = deque()
        self._tokens_left = np.zeros(requests, np.int64)

    def add(self, number: int, prompt: NDArray[np.int32], max_tokens: int) -> None:
        """Take a request."""
        self._waiting.append((number, prompt, max_tokens))
        self._tokens_left[number] = max_tokens

    @property
    def is_busy(self) -> bool:
        """Whether a batch runs, or one is complete."""
        return self.server.is_busy or self._is_complete

    @property
    def _is_complete(self) -> bool:
        return bool(self._waiting) and len(self._waiting) >= min(self.batch, self._left)

    def tick(self) -> None:
        """A step of the batch that runs, or of the next one."""
        if not self.server.is_busy:
            self._begin()
        self.server.tick()

    def describe(self) -> Tick:
        """The last step, without the tokens that nobody asked for."""
        tick = self.server.describe()
        wanted = self._tokens_left[tick.emitted] > 0
        self._tokens_left[tick.emitted] -= 1
        tick.emitted = tick.emitted[wanted]
        tick.waiting += len(self._waiting)
        return tick

    def _begin(self) -> None:
        members = [self._waiting.popleft() for _ in range(min(self.batch, self._left))]
        self._left -= len(members)
        width = max(len(prompt) for _, prompt, _ in members)
        longest = max(new for *_, new in members)
        for number, prompt, _ in members:
            padding = width - len(prompt) if self.pad else 0
            self.server.add(number, np.pad(prompt, (padding, 0)) if padding else prompt, longest)
