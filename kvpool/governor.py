"""How much memory the KV caches of a process may take, decided from numbers.

`Governor.decide` looks at the machine and at what holds the caches (pools, `PromptCache`s, several models), and says
how many bytes each of them should have, and why. It starts no thread, reads no clock and knows no framework: the caller
looks once a second or so, resizes, and frees MLX's buffers when it is told to.

1. The limit is what the caches could take in all, if `reserve` bytes of the machine stay free for others, from `floor`
   to `ceiling`. Freed arrays that MLX keeps can be freed first, so they count as free. What a cache may still fill is
   promised to it: nobody else gets it.
2. Above the limit it shrinks at once, deeper than it must by a margin: a quarter of the reserve, at most an eighth of
   what lies between floor and ceiling. Blank blocks go first, then cached ones, then those of running requests. Under
   pressure it shrinks by an eighth at a time; if the pressure is critical, to the floor.
3. It grows when requests wait, at most once in `pause` seconds, into what was free in all of that time, and leaves
   twice the margin more than it must. So what others take and free again within a minute moves nothing.
4. If nothing has run for `idle_release` seconds, it shrinks to the floor. The first request afterwards need not wait
   for the pause.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

NORMAL, WARNING, CRITICAL = 1, 2, 4
"""Memory pressure, as macOS counts it."""

EASED = 10.0
"""Seconds between two steps under the pressure WARNING."""

KEEP = "nothing to do"
HELD_DOWN = "requests wait, but there is no memory to grow into"
BUFFERS = "freed arrays are given back"
OTHERS = "others need memory"
PRESSURE = "the system reports memory pressure"
DEVICE = "the memory of the device is short"
CEILING = "the caches are above their ceiling"
WAITING = "requests wait"
IDLE = "nothing has run for a while"


class Machine(NamedTuple):
    """What one look at the machine found; sizes are bytes."""

    seconds: float  #: a clock that never goes back
    available: int  #: memory that could be taken without others losing theirs
    pressure: int = NORMAL  #: NORMAL, WARNING or CRITICAL
    buffers: int = 0  #: freed arrays that MLX keeps: ``mx.get_cache_memory()``
    active: int = 0  #: arrays in use, weights included: ``mx.get_active_memory()``
    most_active: float = inf  #: what arrays and buffers may take on the device


class Holder(NamedTuple):
    """A pool or a `PromptCache`; sizes are bytes.

    With `fills` it takes memory only as it fills, as a `PromptCache` does: it has taken live + cached. It needs more
    when these and `waiting` exceed its size. Leave `waiting` 0 if it was not used since the last look.
    """

    name: str
    size: int  #: what it takes now; with `fills`, what it may take
    live: int = 0  #: what of it running requests hold
    cached: int = 0  #: what of it a prefix may be found in, and nobody holds
    waiting: int = 0  #: what requests need that wait, as far as they could run at the same time
    least: int = 0  #: what it needs in any case: for the longest request, for example
    unit: int = 1  #: sizes are multiples of it: the bytes of a block
    fills: bool = False
    has_run: bool = False  #: something ran since the last look, so that it is not idle

    @property
    def promised(self) -> int:
        """Bytes of its size that it has not taken yet."""
        return self.size - self.live - self.cached if self.fills else 0


class Decision(NamedTuple):
    """What to do: `size` is for all caches together, `sizes` for each of the holders, in their order.

    With `frees_buffers` the caller frees the arrays that MLX keeps, after it has resized.
    """

    size: int
    reason: str
    sizes: tuple[int, ...]
    frees_buffers: bool = False


class Governor:
    """Decides how many bytes the caches of a process take.

    Parameters
    ----------
    floor, ceiling : int
        Bytes that all caches have together, at least and at most.
    reserve : int
        Bytes of the machine that stay available for others.
    idle_release : float
        Seconds without a request after which the caches shrink to their floor.
    pause : float
        Seconds between a resize and the next growth.
    yields : bool
        Whether the caches shrink when others need memory. Without, only the ceiling and `idle_release` count.

    Raises
    ------
    ValueError
        The floor is above the ceiling, or a number is below 0.

    Attributes
    ----------
    limit : int
        What the caches could have taken at the last look.
    margin : int
        How much deeper than it must it shrinks.
    """

    def __init__(
        self,
        floor: int,
        ceiling: int,
        reserve: int = 0,
        *,
        idle_release: float = inf,
        pause: float = 60.0,
        yields: bool = True,
    ) -> None:
        for name, number in (("floor", floor), ("reserve", reserve), ("idle_release", idle_release), ("pause", pause)):
            if not number >= 0:
                raise ValueError(f"[Governor] {name} is {number}, it must be at least 0")
        if floor > ceiling:
            raise ValueError(f"[Governor] floor is {floor} bytes, above the ceiling of {ceiling}: lower it")
        self.floor, self.ceiling, self.reserve = floor, ceiling, reserve
        self.idle_release, self.pause, self.yields = idle_release, pause, yields
        self.margin = min(reserve // 4, (ceiling - floor) // 8)
        self.limit = ceiling
        self._seen: deque[tuple[float, float]] = deque()  # (when, what could be taken), of the last pause
        self._busy_since: float | None = None  # when anything ran last
        self._resized, self._may_grow = -inf, -inf  # when; from when on

    def decide(self, machine: Machine, holders: Sequence[Holder]) -> Decision:
        """Return what the caches should have now. The caller tries to make it so. O(holders + looks in a pause)."""
        size, now = sum(one.size for one in holders), machine.seconds
        room, short = self._room(machine)
        free, room = room, room - sum(one.promised for one in holders)
        self._seen.append((now, size + room))
        while self._seen[0][0] < now - self.pause:
            self._seen.popleft()
        if self._busy_since is None or any(one.live or one.waiting or one.has_run for one in holders):
            self._busy_since = now
        least = max(self.floor, sum(one.least for one in holders))
        self.limit = int(min(self.ceiling, max(least, size + room)))
        lacking = sum(max(0, one.live + one.waiting + one.cached * one.fills - one.size) for one in holders)
        grown = int(min(self.limit, max(least, min(could for _, could in self._seen) - 2 * self.margin)))
        is_held_down = grown < size + min(lacking, size // 8)

        wanted, reason, pause = size, KEEP, self.pause
        if size > self.limit:
            reason = CEILING if size + room > self.ceiling else short
            deeper = 0 if reason == CEILING else self.margin
            wanted = max(least, int(min(self.limit, size + room - deeper)))
        elif self.yields and size > least and machine.pressure >= CRITICAL:
            reason, wanted = PRESSURE, least
        elif self.yields and size > least and machine.pressure > NORMAL and now >= self._resized + EASED:
            reason, wanted = PRESSURE, max(least, size - size // 8)
        elif now - self._busy_since >= self.idle_release and size > least:
            reason, wanted, pause = IDLE, least, 0.0
        elif lacking and now >= self._may_grow and machine.pressure == NORMAL:
            reason = WAITING
            wanted = size if is_held_down else min(grown, size + max(lacking, size // 8))
        before = tuple(one.size for one in holders)
        sizes = before if reason == KEEP else _shared(wanted, holders)
        if sizes != before:
            self._resized, self._may_grow = now, now + pause
            return Decision(sum(sizes), reason, sizes, True)
        if free < machine.buffers:
            return Decision(size, BUFFERS, sizes, True)
        return Decision(size, HELD_DOWN if lacking and is_held_down else KEEP, sizes)

    def _room(self, machine: Machine) -> tuple[float, str]:
        """Return the bytes that the caches could take more, below 0 if they have to shrink, and what limits them."""
        if not self.yields:
            return inf, CEILING
        beside = machine.available + machine.buffers - self.reserve
        return min((float(beside), OTHERS), (machine.most_active - machine.active, DEVICE))


def _shared(size: int, holders: Sequence[Holder]) -> tuple[int, ...]:
    """Return the size of each holder, `size` bytes together: those served last have least when it is short."""
    given = [0] * len(holders)
    for goal in (
        [one.least for one in holders],
        [max(one.least, one.live) for one in holders],
        [max(one.least, one.live + one.waiting) for one in holders],
        [max(one.least, one.live + one.waiting + one.cached) for one in holders],
        [max(one.least, one.live + one.waiting + one.cached, min(one.size, size)) for one in holders],
    ):
        lack = [max(0, more - had) for more, had in zip(goal, given, strict=True)]
        left, all_lack = size - sum(given), sum(lack)
        if left >= all_lack:
            given = [had + more for had, more in zip(given, lack, strict=True)]
        elif left > 0:
            given = [had + more * left // all_lack for had, more in zip(given, lack, strict=True)]
    takers = [one.waiting for one in holders] if any(one.waiting for one in holders) else [one.size for one in holders]
    rest = max(0, size - sum(given))
    given = [had + rest * part // max(1, sum(takers)) for had, part in zip(given, takers, strict=True)]
    return tuple(
        max(-(-one.least // one.unit), had // one.unit) * one.unit for had, one in zip(given, holders, strict=True)
    )
