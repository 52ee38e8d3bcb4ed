"""`Tenant`, `RequestGroup`, `Sequence`: who sends requests, a request, and a sequence of it, with what each keeps."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from kvpool.scheduler.request import Request

WAITING, PREFILLING, DECODING, SPILLED, FINISHED = range(5)
NO_TOKENS = np.empty(0, np.int32)
NO_TOKENS.flags.writeable = False


class Tenant:
    """Who sends requests, and what was served to it.

    Attributes
    ----------
    served : int
        Tokens computed for it. Those that a sequence has count when it is admitted, others when they are computed.
        Hits of the prefix cache do not count. What a preempted sequence computes again does not, either.
    base : float
        What `used` has skipped while nothing waited.
    admitted : int
        Requests that were admitted: the time by which the others grow older.
    requests : int
        Requests that have not ended.
    new : int
        Requests that were never admitted.
    line : list of Sequence
        Sequences that never ran, by rank: new requests, and samples that found no lane.
    since : int
        Number of the request with which the line began.
    is_listed : bool
        Whether the queue has a turn for it.
    waited : float
        How long the request waited that was admitted last.
    """

    __slots__ = (
        *("admitted", "base", "is_listed", "line", "name", "new", "requests", "served", "since", "waited", "weight"),
    )

    def __init__(self, name: Hashable, weight: float) -> None:
        self.name, self.weight = name, weight
        self.served = self.admitted = self.requests = self.new = self.since = 0
        self.base = self.waited = 0.0
        self.line: list[Sequence] = []
        self.is_listed = False

    @property
    def used(self) -> float:
        """The virtual counter. Of the tenants with lines, the one that has used least goes first."""
        return self.base + self.served / self.weight


class RequestGroup:
    """A request and its sequences.

    Attributes
    ----------
    tenant : Tenant
    rank : (int, int)
        Its place in the line of its tenant, and the number of its arrival.
    passed : int
        Later requests that were admitted before it, because it found no room.
    """

    __slots__ = (
        *("request", "id", "sequences", "unfinished", "forked", "beam"),
        *("num_cached", "arrived", "admitted", "first_token", "tenant", "rank", "passed"),
    )

    tenant: Tenant
    rank: tuple[int, int]

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
        self.passed = 0


class Sequence:
    """One stream of tokens. While it has a lane, `LaneRows` has its numbers, and `tokens` and `logprobs` are empty.

    Attributes
    ----------
    high : int
        Most tokens ever computed. Computing tokens below it again counts as recomputation.
    computed : int
        Tokens whose KV the tier has, while spilled.
    paid : int
        Leading tokens that its tenant has been charged for.
    """

    __slots__ = (
        *("computed", "group", "high", "index", "kept", "lane", "logprobs", "paid", "preemptions", "state"),
        "tokens",
    )

    def __init__(self, group: RequestGroup, index: int) -> None:
        self.group = group
        self.index = index
        self.state = WAITING
        self.lane = -1
        self.tokens = NO_TOKENS
        self.logprobs: np.ndarray | None = None
        self.high = 0
        self.computed = self.paid = 0
        self.kept: Any = None
        self.preemptions = 0
