"""Whose turn it is, in plain Python: docs/scheduling.md's rules of admission by counting over all who wait.

It sees what a caller sees: requests that come and leave, rows of steps. It shares no code with the scheduler.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any


class Turns:
    """Judges admissions. For requests of one sequence each, on a pool of one table, without a tier."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.weights = {name: Fraction(weight) for name, weight in options.get("weights", {}).items()}
        self.ageing, self.overtake = options.get("ageing", 256), options.get("overtake", 16)
        self.lead = options["max_step_tokens"]
        self.used: dict[Any, Fraction] = {}  # tenants
        self.admitted: dict[Any, int] = {}  # tenants: requests
        self.latest: Any = None  # the tenant whose request was the last to leave the queue
        self.waiting: dict[Any, tuple[int, int]] = {}  # requests that never ran: rank
        self.tenant: dict[Any, Any] = {}  # of each request
        self.passed: dict[Any, int] = {}
        self.paid: dict[Any, int] = {}  # requests: leading tokens that were charged
        self.overtakings = 0

    def least(self) -> Fraction:
        """What the tenants with new requests have used at least."""
        used = [self.used[self.tenant[name]] for name in self.waiting]
        return min(used) if used else self.used.get(self.latest, Fraction())

    def arrive(self, request: Any) -> None:
        name, tenant = request.id, request.tenant
        self.tenant[name] = tenant
        if not any(self.tenant[other] == tenant for other in self.waiting):
            self.used[tenant] = max(self.used.get(tenant, Fraction()), self.least())
        age = self.admitted.setdefault(tenant, 0)
        self.waiting[name] = (age - self.ageing * request.priority, len(self.tenant))
        self.passed[name] = self.paid[name] = 0

    def leave(self, name: Any) -> None:
        """A request has ended."""
        if self.waiting.pop(name, None) is not None:
            self.latest = self.tenant[name]

    def admit(self, name: Any, known: int, hit: int) -> None:
        """A request is a row for the first time, or again after it lost its blocks. The cache had `hit` tokens."""
        tenant = self.tenant[name]
        if name in self.waiting:
            rank = self.waiting.pop(name)
            mine, others = self.used[tenant], {}
            for other, its_rank in self.waiting.items():
                whose = self.tenant[other]
                if its_rank < rank if whose == tenant else self.used[whose] < mine - Fraction(1, 10**6):
                    best = others.setdefault(whose, other)
                    if whose == tenant or its_rank < self.waiting[best]:
                        others[whose] = other
                    if whose == tenant:
                        self.passed[other] += 1
            for whose, other in others.items():
                self.passed[other] += whose != tenant
            for other in self.waiting:
                assert self.passed[other] <= self.overtake, f"{self.passed[other]} passed {other}, {name} the last"
            ahead = mine - min((self.used[whose] for whose in others), default=mine)
            assert ahead <= self.lead + 1, f"{name} passed {list(others.values())}, its tenant is {float(ahead)} ahead"
            self.overtakings += bool(others)
            self.admitted[tenant] += 1
            self.latest = tenant
        self.charge(name, known - max(hit, self.paid[name]))
        self.paid[name] = max(self.paid[name], known)

    def decode(self, name: Any) -> None:
        """A decoding row was computed."""
        self.charge(name, 1)
        self.paid[name] += 1

    def charge(self, name: Any, tokens: int) -> None:
        tenant = self.tenant[name]
        self.used[tenant] += max(0, tokens) / self.weights.get(tenant, Fraction(1))

    def share(self, tenant: Any, places: int) -> int:
        """How many of the places a tenant may take, of those that wait."""
        if tenant not in self.weights:
            return places
        return max(1, int(places * self.weights[tenant] / sum(self.weights.values())))

    def new_of(self, tenant: Any) -> int:
        """How many requests of a tenant wait that never ran."""
        return sum(self.tenant[name] == tenant for name in self.waiting)
