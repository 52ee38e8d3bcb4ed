"""Interleaved timing: contestants take turns with a yardstick, and a disturbed round counts for nobody.

On a machine that others share, two times that were measured one after the other say little about each other. Here
everything that is compared runs in turns, round by round, each round in another order; a round in which the
yardstick itself was slow is thrown away; and ratios are made of the least times, which no neighbour can improve.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

UNDISTURBED = 0.8
"""A round counts if its yardstick ran at this share of its best rate, or faster."""

ROUNDS_PER_REPETITION = 3
"""Rounds are given up after this many times the repetitions that are wanted."""

RUNS_MIN = 3
"""Runs that a slow contestant gets before it sits out."""


@dataclass(frozen=True)
class Contestant:
    """Something to be timed.

    Attributes
    ----------
    run : callable
        What is timed; its result is dropped.
    calls : int
        Times are given per call: one run does this many of them.
    seconds : float, optional
        Once its runs took this long in sum, and `RUNS_MIN` of them count, the contestant sits out.
    """

    name: str
    run: Callable[[], object]
    calls: int = 1
    seconds: float | None = None


@dataclass(frozen=True)
class Timing:
    """Seconds per call over the rounds that count."""

    best: float
    median: float
    runs: int


@dataclass(frozen=True)
class Race:
    """What `race` measured.

    Attributes
    ----------
    timings : dict of str to Timing
        By contestant; one that never ran in a round that counts is not there.
    repetitions, rejected : int
        Rounds that count, and rounds in which the yardstick was disturbed.
    wanted : int
        Repetitions that were asked for.
    """

    yardstick: Timing
    timings: dict[str, Timing]
    repetitions: int
    rejected: int
    wanted: int

    @property
    def is_complete(self) -> bool:
        """Whether enough rounds count."""
        return self.repetitions >= self.wanted


def race(
    yardstick: Contestant,
    contestants: Sequence[Contestant],
    repetitions: int = 15,
    clock: Callable[[], float] = time.perf_counter,
) -> Race:
    """Run everybody in turns until `repetitions` rounds count, or until it is clear that they will not.

    Everybody runs once beforehand, untimed, so that memory is mapped and scratch has grown.
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
    return Race(timings.pop(yardstick.name), timings, len(counted), len(rounds) - len(counted), repetitions)


def seconds_per_call(contestant: Contestant, clock: Callable[[], float]) -> float:
    """Run `contestant` once."""
    start = clock()
    contestant.run()
    return (clock() - start) / contestant.calls


def undisturbed(rounds: list[dict[str, float]], yardstick: str) -> list[dict[str, float]]:
    """Return the rounds that count, judged by the best of all of them."""
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
    return Timing(min(seconds), statistics.median(seconds), len(seconds)) if seconds else None
