"""`Group` and `Sequence`: what the scheduler remembers of a request and of each of its sequences. No behaviour."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from kvpool.scheduler.request import Request

WAITING, PREFILLING, DECODING, SPILLED, FINISHED = range(5)
NO_TOKENS = np.empty(0, np.int32)
NO_TOKENS.flags.writeable = False


class Group:
    """A request and its sequences."""

    __slots__ = (
        *("request", "id", "sequences", "unfinished", "forked", "beam"),
        *("num_cached", "arrived", "admitted", "first_token"),
    )

    def __init__(self, request: Request, name: Hashable, arrived: float) -> None:
        self.request = request
        self.id = name
        self.sequences = [Sequence(self, 0)]
        self.unfinished = 1  # sequences
        self.forked = request.n == 1 or request.beam_width > 0  # or: there are no samples to fork
        self.beam: Any = None
        self.num_cached = 0
        self.arrived = arrived
        self.admitted: float | None = None
        self.first_token: float | None = None


class Sequence:
    """One stream of tokens. While it has a slot its numbers stand in the rows, `tokens` and `logprobs` are for later.

    Attributes
    ----------
    high : int
        Most tokens ever computed: what is below and computed again is recomputation.
    computed : int
        Tokens whose KV the tier has, while spilled.
    """

    __slots__ = ("computed", "group", "high", "index", "kept", "logprobs", "preemptions", "slot", "state", "tokens")

    def __init__(self, group: Group, index: int) -> None:
        self.group = group
        self.index = index
        self.state = WAITING
        self.slot = -1
        self.tokens = NO_TOKENS
        self.logprobs: np.ndarray | None = None
        self.high = 0
        self.computed = 0
        self.kept: Any = None
        self.preemptions = 0
