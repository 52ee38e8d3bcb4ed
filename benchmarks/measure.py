"""Interleaved timing: contestants alternate with a yardstick, and disturbed rounds do not count.

On a shared machine, two times measured one after the other cannot be compared. Here all contestants alternate, round
by round, each round in another order. A round in which the yardstick was slow is dropped. Ratios are made of the least
times, because neighbours can only make times longer.
"""

from __future__ import annotations

import platform
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvpool.config import read_text

UNDISTURBED = 0.8
"""A round counts if its yardstick ran at this share of its best rate, or faster."""

ROUNDS_PER_REPETITION = 3
"""Measuring ends after this many times the wanted repetitions."""

RUNS_MIN = 3
"""Runs that a slow contestant gets before it pauses."""


@dataclass(frozen=True)
class Contestant:
    """Something to be timed."""

    name: str
    run: Callable[[], object]
    calls: int = 1  # that one run does: times are given per call
    seconds: float | None = None  # when its runs took so long, and `RUNS_MIN` of them count, the contestant pauses


class Timing(NamedTuple):
    """Seconds per call over the rounds that count."""

    best: float
    median: float


class Race(NamedTuple):
    """The result of `race`; `repetitions` rounds count, and `is_complete` says whether these are enough.

    A contestant that never ran in a round that counts is missing in `timings`.
    """

    yardstick: Timing
    timings: dict[str, Timing]
    repetitions: int
    is_complete: bool


def race(
    yardstick: Contestant,
    contestants: Sequence[Contestant],
    repetitions: int = 15,
    clock: Callable[[], float] = time.perf_counter,
) -> Race:
    """Alternate all contestants until `repetitions` rounds count, or until it is clear that they will not.

    Before that, each runs once without timing, so that memory is mapped and scratch has grown.
    """
    everybody = [yardstick, *contestants]
    for contestant in everybody:
        contestant.run()
    rounds: list[dict[str, float]] = []
    while True:
        counted = undisturbed(rounds, yardstick.name)
        if len(counted) >= repetitions or len(rounds) >= repetitions * ROUNDS_PER_REPETITION:
            break
        turn = len(rounds) % len(everybody)
        order = everybody[turn:] + everybody[:turn]
        racing = [c for c in order if c is yardstick or not is_finished(c, rounds, counted)]
        rounds.append({contestant.name: seconds_per_call(contestant, clock) for contestant in racing})
    timings = {c.name: timing for c in everybody if (timing := summary(c.name, counted)) is not None}
    return Race(timings.pop(yardstick.name), timings, len(counted), len(counted) >= repetitions)


def seconds_per_call(contestant: Contestant, clock: Callable[[], float]) -> float:
    """Run `contestant` once."""
    start = clock()
    contestant.run()
    return (clock() - start) / contestant.calls


def undisturbed(rounds: list[dict[str, float]], yardstick: str) -> list[dict[str, float]]:
    """Return the rounds that count, by comparison with the best round."""
    if not rounds:
        return []
    best = min(times[yardstick] for times in rounds)
    return [times for times in rounds if best >= UNDISTURBED * times[yardstick]]


def is_finished(contestant: Contestant, rounds: list[dict[str, float]], counted: list[dict[str, float]]) -> bool:
    """Whether a contestant has used up its time."""
    if contestant.seconds is None:
        return False
    spent = sum(times.get(contestant.name, 0.0) for times in rounds) * contestant.calls
    return spent >= contestant.seconds and sum(contestant.name in times for times in counted) >= RUNS_MIN


def summary(name: str, counted: list[dict[str, float]]) -> Timing | None:
    """Return the least and the median of the times of one contestant, None if there are none."""
    seconds = [times[name] for times in counted if name in times]
    return Timing(min(seconds), statistics.median(seconds)) if seconds else None


def cpu_model() -> str:
    """Return the name of the CPU; its architecture if the system does not tell."""
    found = re.search(r"^model name\s*:\s*(.+)$", read_text("/proc/cpuinfo"), re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def tokens(n: int) -> str:
    """Return a number of tokens as people write it: 4096 as ``4k``."""
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)
