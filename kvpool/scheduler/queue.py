"""Queue of waiting requests, by tenant, priority and age."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from heapq import heapify, heappop, heappush, heapreplace

from kvpool.scheduler.request import RequestGroup, Sequence, Tenant


class WaitingQueue:
    """Sequences that wait: first those that lost their blocks, then by tenant those that never ran.

    The latter are new requests, and samples that found no lane. Only new requests count in `len`. `Scheduler` has the
    parameters. Choosing takes O(log tenants), adding and removing O(log requests) and a move of the references behind.
    """

    def __init__(self, weights: Mapping[Hashable, float], ageing: int, overtake: int) -> None:
        self.weights, self.overtake = weights, overtake
        self._ageing = ageing
        self._back: OrderedDict[Sequence, None] = OrderedDict()  # those that ran before
        self._new = self._arrivals = 0
        self._turns: list[tuple[float, int, Tenant]] = []  # heap by `used` and `since`, which may have grown
        self._latest: Tenant | None = None  # the last one whose line became shorter
        self._sweep_at = 64
        self.tenants: dict[Hashable, Tenant] = {}
        for name in weights:
            self.tenant(name)

    def __len__(self) -> int:
        return self._new

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._back
        for tenant in self.tenants.values():
            yield from tenant.line

    def tenant(self, name: Hashable) -> Tenant:
        """Return the tenant of this name, a new one if it is not there."""
        found = self.tenants.get(name)
        if found is None:
            if len(self.tenants) >= self._sweep_at:
                self._sweep()
            found = self.tenants[name] = Tenant(name, self.weights.get(name, 1.0))
        return found

    def _sweep(self) -> None:
        """Forget idle tenants that would be lifted if they came back."""
        least = self._least()
        self.tenants = {
            name: one for name, one in self.tenants.items() if one.requests or one.used > least or name in self.weights
        }
        self._sweep_at = max(64, 2 * len(self.tenants))

    def share(self, name: Hashable, places: int) -> int:
        """Return how many of the `places` for waiting requests a tenant may use."""
        weights = self.weights
        return max(1, int(places * weights[name] / sum(weights.values()))) if name in weights else places

    def enroll(self, group: RequestGroup) -> None:
        """Give a new request its tenant and its rank."""
        tenant = group.tenant = self.tenant(group.request.tenant)
        tenant.requests += 1
        group.rank = (tenant.admitted - self._ageing * group.request.priority, self._arrivals)
        self._arrivals += 1

    # -- who waits

    def push(self, sequence: Sequence, *, front: bool = False) -> None:
        """Put a sequence that never ran in the line of its tenant, or with `front` one that ran before all others."""
        if front:
            self._back[sequence] = None
            self._back.move_to_end(sequence, last=False)
            return
        tenant = sequence.group.tenant
        self._count(sequence, 1)
        if not tenant.line:
            tenant.base += max(0.0, self._least() - tenant.used)
            tenant.since = sequence.group.rank[1]
        insort(tenant.line, sequence, key=_rank)
        if not tenant.is_listed:
            tenant.is_listed = True
            heappush(self._turns, (tenant.used, tenant.since, tenant))

    def _count(self, sequence: Sequence, change: int) -> None:
        """Count a sequence of a line, if it stands for a new request."""
        if sequence.group.admitted is None:
            self._new += change
            sequence.group.tenant.new += change

    def _least(self) -> float:
        """Return what the tenants with lines have used at least. Nobody who comes has used less."""
        first = self._first() or self._latest
        return 0.0 if first is None else first.used

    def _first(self) -> Tenant | None:
        """Return the tenant that goes first, None if all lines are empty."""
        while self._turns:
            used, since, tenant = self._turns[0]
            now = (tenant.used, tenant.since, tenant)
            if not tenant.line:
                heappop(self._turns)
                tenant.is_listed = False
            elif now[:2] != (used, since):
                heapreplace(self._turns, now)
            else:
                return tenant
        return None

    def head(self) -> Sequence | None:
        """Return the next sequence, None if nobody waits."""
        if self._back:
            return next(iter(self._back))
        tenant = self._first()
        return None if tenant is None else tenant.line[0]

    def first(self, most: int) -> list[Sequence]:
        """Return `most` of the lines: the first of each tenant, in fair order, then the second ones."""
        turns: list[tuple[float, int, Tenant]] = []
        while len(turns) < most and self._first() is not None:
            turns.append(heappop(self._turns))
        for turn in turns:
            heappush(self._turns, turn)
        places = [(place, tenant) for place in range(most) for _, _, tenant in turns]
        return [tenant.line[place] for place, tenant in places if place < len(tenant.line)][:most]

    def is_back(self, sequence: Sequence) -> bool:
        """Return whether a sequence waits that ran before."""
        return sequence in self._back

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._back:
            del self._back[sequence]
            return
        tenant = self._latest = sequence.group.tenant
        self._count(sequence, -1)
        del tenant.line[bisect_left(tenant.line, _rank(sequence), key=_rank)]

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence if it is queued. Of a beam only the first sequence is."""
        if sequence in self._back or self._is_in_line(sequence):
            self.remove(sequence)

    def _is_in_line(self, sequence: Sequence) -> bool:
        line = sequence.group.tenant.line
        at = bisect_left(line, _rank(sequence), key=_rank)
        return line[at : at + 1] == [sequence]

    def put_back(self, sequence: Sequence, *, front: bool) -> None:
        """Let a sequence wait where it did before an admission that raised. `mend` comes next."""
        if front:
            return self.push(sequence, front=True)
        self._back.pop(sequence, None)
        if not self._is_in_line(sequence):
            insort(sequence.group.tenant.line, sequence, key=_rank)

    def mend(self) -> None:
        """Recompute all that follows from the lines, after an exception."""
        for tenant in self.tenants.values():
            tenant.is_listed = bool(tenant.line)
        self._new = sum(tenant.new for tenant in self.tenants.values())
        self._turns = [(tenant.used, tenant.since, tenant) for tenant in self.tenants.values() if tenant.line]
        heapify(self._turns)


def _rank(sequence: Sequence) -> tuple[int, int, int]:
    return *sequence.group.rank, sequence.index
