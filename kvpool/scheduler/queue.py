"""`WaitingQueue`: who waits, highest priority first, first come first served within one. Knows nothing else."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heappop, heappush

from kvpool.scheduler.sequence import Sequence


class WaitingQueue:
    """Sequences by priority. Every call is O(log priorities) or better."""

    def __init__(self) -> None:
        self._lanes: dict[int, OrderedDict[Sequence, None]] = {}
        self._priorities: list[int] = []  # heap of negated ones; an empty lane leaves when it is on top
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        for priority in sorted(self._lanes, reverse=True):
            yield from self._lanes[priority]

    def push(self, sequence: Sequence, *, front: bool = False) -> None:
        """Put a sequence behind those of its priority, or before them."""
        priority = sequence.group.request.priority
        lane = self._lanes.get(priority)
        if lane is None:
            lane = self._lanes[priority] = OrderedDict()
            heappush(self._priorities, -priority)
        lane[sequence] = None
        if front:
            lane.move_to_end(sequence, last=False)
        self._size += 1

    def head(self) -> Sequence | None:
        """Who is next, None when nobody waits."""
        while self._priorities:
            lane = self._lanes[-self._priorities[0]]
            if lane:
                return next(iter(lane))
            del self._lanes[-heappop(self._priorities)]
        return None

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands."""
        del self._lanes[sequence.group.request.priority][sequence]
        self._size -= 1

    def discard(self, sequence: Sequence) -> None:
        """Take a sequence out if it is there: of a beam only the first is."""
        if sequence in self._lanes.get(sequence.group.request.priority, ()):
            self.remove(sequence)
