"""The open loop: requests are handed to a server when they arrive, and every tick of it is recorded."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvpool.serving.record import Record
from kvpool.serving.workload import Workload

_NONE = np.zeros(0, np.int64)


@dataclass(slots=True)
class Tick:
    """What a server did in one step.

    Attributes
    ----------
    emitted : int ``[M]``
        Sequences that got a token, see `Record`.
    decodes, prefill_tokens : int
        Rows of one token, and tokens of prompts that were computed.
    running, waiting : int
        Sequences admitted, requests that are not, both after the step.
    blocks_in_use : int
        After the step.
    context_tokens, blocks_touched : int
        Read by attention in each layer, summed over the rows.
    """

    emitted: NDArray[np.integer] = field(default_factory=lambda: _NONE)
    decodes: int = 0
    prefill_tokens: int = 0
    running: int = 0
    waiting: int = 0
    blocks_in_use: int = 0
    context_tokens: int = 0
    blocks_touched: int = 0


class Server(Protocol):
    """What `serve` drives."""

    def add(self, number: int, prompt: NDArray[np.int32], max_tokens: int) -> None:
        """Take request `number` (0, 1, ...)."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether a tick would do something."""
        ...

    def tick(self) -> Tick:
        """Do one step."""
        ...


class Clock(Protocol):
    """What tells `serve` the time."""

    def now(self) -> float:
        """Seconds since the run began."""
        ...

    def cpu(self) -> float:
        """Seconds of CPU time."""
        ...

    def skip_to(self, when: float) -> None:
        """Let the time until `when` pass: the server is idle."""
        ...

    def passed(self, tick: Tick) -> None:
        """A tick is through."""
        ...


class SimulatedClock:
    """Time passes with ticks alone, by a formula: the same on every machine.

    Parameters
    ----------
    cost : callable
        Seconds that a tick takes. The default is 1 s per tick with anything in it.
    """

    def __init__(self, cost: Callable[[Tick], float] = lambda tick: 1.0) -> None:
        self._cost, self._now = cost, 0.0

    def now(self) -> float:
        """Simulated seconds."""
        return self._now

    def cpu(self) -> float:
        """The same."""
        return self._now

    def skip_to(self, when: float) -> None:
        """Go on at `when`."""
        self._now = max(self._now, when)

    def passed(self, tick: Tick) -> None:
        """Add the cost of a tick."""
        self._now += self._cost(tick)


class WallClock:
    """The machine's time, from the moment it is made. Idle time is skipped, not slept: nothing would happen in it."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        """Seconds, skipped ones included."""
        return time.perf_counter() - self._start

    def cpu(self) -> float:
        """CPU time of this process, all threads of it."""
        return time.process_time()

    def skip_to(self, when: float) -> None:
        """Go on at `when`, at once."""
        self._start = min(self._start, time.perf_counter() - when)

    def passed(self, tick: Tick) -> None:
        """Nothing: time has passed by itself."""


def serve(
    server: Server,
    workload: Workload,
    clock: Clock,
    progress: Callable[[int], object] = lambda tokens: None,
) -> Record:
    """Drive `server` until all requests are through.

    Parameters
    ----------
    progress : callable
        Told after every tick how many tokens it generated.

    Raises
    ------
    RuntimeError
        The server is idle, but not all tokens were generated.
    """
    record = Record(workload.arrivals, workload.samples)
    arrivals, limits = workload.arrivals.tolist(), workload.max_tokens.tolist()
    number, count = 0, len(workload)
    while True:
        now = clock.now()
        while number < count and arrivals[number] <= now:
            server.add(number, workload.prompts[number], limits[number])
            number += 1
        if not server.is_busy:
            if number == count:
                break
            clock.skip_to(arrivals[number])
            continue
        start, cpu = clock.now(), clock.cpu()
        tick = server.tick()
        clock.passed(tick)
        cpu = clock.cpu() - cpu
        record.add(start, clock.now(), cpu, tick)
        progress(len(tick.emitted))
    if record.num_tokens != workload.num_tokens:
        raise RuntimeError(f"[serve] {record.num_tokens} tokens were generated, {workload.num_tokens} were asked for")
    return record
