"""The open loop: requests are handed to a server when they arrive, and every tick of it is recorded."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.serving.record import Record
from benchmarks.serving.workload import Workload

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
        Sequences that were admitted, and requests that were not, while the step ran.
    blocks_in_use : int
        While it ran.
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

    def tick(self) -> None:
        """Do one step. This is what is timed."""
        ...

    def describe(self) -> Tick:
        """Tell what the last step did. Not timed."""
        ...


class Timed(NamedTuple):
    """One tick: when it ran, in seconds of the clock, its CPU time in seconds, and what it did."""

    start: float
    end: float
    cpu: float
    tick: Tick


class Clock(Protocol):
    """What tells `serve` the time."""

    def now(self) -> float:
        """Seconds since the run began."""
        ...

    def skip_to(self, when: float) -> None:
        """Let the time until `when` pass: the server is idle."""
        ...

    def time_tick(self, server: Server) -> Timed:
        """Let the server do a step."""
        ...


class SimulatedClock:
    """Time passes with ticks alone, by a formula: the same on every machine.

    Parameters
    ----------
    cost : callable
        Seconds that a tick takes. By default 1.
    """

    def __init__(self, cost: Callable[[Tick], float] = lambda tick: 1.0) -> None:
        self._cost, self._now = cost, 0.0

    def now(self) -> float:
        """Simulated seconds."""
        return self._now

    def skip_to(self, when: float) -> None:
        """Go on at `when`."""
        self._now = max(self._now, when)

    def time_tick(self, server: Server) -> Timed:
        """Let the server do a step, and the time pass that it costs."""
        server.tick()
        tick, start = server.describe(), self._now
        cost = self._cost(tick)
        self._now += cost
        return Timed(start, self._now, cost, tick)


class WallClock:
    """The machine's time, from the moment it is made.

    Idle time is skipped, not slept: nothing would happen in it. The clock stands while a server describes its step, so
    that a look at it costs nothing. CPU time is that of the process, all of its threads.
    """

    def __init__(self) -> None:
        self._start = self._paused = time.perf_counter()

    def now(self) -> float:
        """Seconds, skipped ones included."""
        return time.perf_counter() - self._start

    def pause(self) -> None:
        """Stand still until `resume`."""
        self._paused = time.perf_counter()

    def resume(self) -> None:
        """Go on."""
        self._start += time.perf_counter() - self._paused

    def skip_to(self, when: float) -> None:
        """Go on at `when`, at once."""
        self._start = min(self._start, time.perf_counter() - when)

    def time_tick(self, server: Server) -> Timed:
        """Let the server do a step."""
        cpu, start = time.process_time(), self.now()
        server.tick()
        end = self.now()
        cpu = time.process_time() - cpu
        tick = server.describe()
        self._start = time.perf_counter() - end
        return Timed(start, end, cpu, tick)


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
    for tokens in ticks(server, workload, clock, record):
        progress(tokens)
    return record


def ticks(server: Server, workload: Workload, clock: Clock, record: Record) -> Iterator[int]:
    """Drive `server`, fill `record`, and yield after every tick how many tokens it generated. Raises as `serve`."""
    arrivals, limits = workload.arrivals.tolist(), workload.max_tokens.tolist()
    number, count = 0, len(workload)
    while True:
        now = clock.now()
        while number < count and arrivals[number] <= now:
            server.add(number, workload.prompts[number], limits[number])
            number += 1
        if server.is_busy:
            timed = clock.time_tick(server)
            record.add(*timed)
            yield len(timed.tick.emitted)
        elif number < count:
            clock.skip_to(arrivals[number])
        else:
            break
    if record.num_tokens != workload.num_tokens:
        raise RuntimeError(f"[serve] {record.num_tokens} tokens were generated, {workload.num_tokens} were asked for")


def serve_side_by_side(
    pairs: Sequence[tuple[Server, Workload]],
    slice_seconds: float = 0.1,
    progress: Callable[[int], object] = lambda tokens: None,
) -> list[Record]:
    """Drive several servers with a workload each, in turns of `slice_seconds`, each by a clock of its own.

    The speed of a machine that others share changes from second to second; here it changes for everybody alike. A
    server with a method ``settle`` finishes what it has begun before its turn ends; that is its own time.
    """
    records = [Record(workload.arrivals, workload.samples) for _, workload in pairs]
    clocks = [WallClock() for _ in pairs]
    for clock in clocks:
        clock.pause()
    lanes = list(zip(pairs, records, clocks, strict=True))
    going = [(one[0], record, clock, ticks(*one, clock, record)) for one, record, clock in lanes]
    gc.collect()
    gc.freeze()  # a collection that walks through all modules would be somebody's spike
    try:
        while going:
            for lane in tuple(going):
                server, record, clock, run = lane
                clock.resume()
                until = clock.now() + slice_seconds
                for tokens in run:
                    progress(tokens)
                    if clock.now() >= until:
                        break
                else:
                    going.remove(lane)
                cpu = time.process_time()
                getattr(server, "settle", lambda: None)()
                record.settled += time.process_time() - cpu
                clock.pause()
    finally:
        gc.unfreeze()
    return records
