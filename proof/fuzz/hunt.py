"""Fuzzing a pool: run after run until the time, the calls or the patience is over.

One process; `proof.fuzz.jobs` starts several. A finding is replayed from its seed, and the version of kvpool.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import kvpool
from kvpool.testing.fuzz_target import FuzzFinding
from proof.fuzz._fuzz import Driver
from proof.fuzz._fuzz_groups import GroupDriver
from proof.fuzz.shape import Shape, draw_shape

CALLS_PER_RUN = 3000


@dataclass(slots=True)
class Report:
    """What a hunt did, and found."""

    runs: int = 0
    calls: int = 0
    by_operation: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0  # of CPU time
    finding: str | None = None
    seed: int | None = None  # of the run that found it
    shape: Shape | None = None
    words: list[tuple[int, int, int, int]] = field(default_factory=list)  # of that run, up to the call that failed

    def add(self, driver: Driver) -> None:
        """Count a run."""
        calls, states = driver.results()
        self.runs += 1
        self.calls += driver.calls_made()
        self.by_operation.update(calls)
        self.states.update(states)


def seeds(seed: int, job: int = 0) -> Iterator[int]:
    """Seeds of the runs of one process: the first is `seed` itself for job 0, so that one run can be repeated."""
    if job == 0:
        yield seed
    rng = random.Random(f"{seed} {job}")
    while True:
        yield rng.getrandbits(48)


def make_driver(shape: Shape, make_pool: Callable[..., Any]) -> Driver:
    """The driver of a run."""
    return (GroupDriver if "groups" in shape.pool else Driver)(shape, make_pool)


def one_run(shape: Shape, make_pool: Callable[..., Any], report: Report, calls: int, check_every: int) -> None:
    """One run; its finding goes into the report."""
    driver = make_driver(shape, make_pool)
    try:
        driver.run(calls, check_every)
        driver.audit()
    except (FuzzFinding, kvpool.errors.CorruptState) as finding:
        report.finding = str(finding)
        report.shape = shape
        report.words = driver.words(0, driver.calls_made() + driver.idle) if shape.full else []
    finally:
        report.add(driver)
        driver.shutdown()


def hunt(
    seed: int,
    *,
    job: int = 0,
    calls: int | None = None,
    seconds: float | None = None,
    make_pool: Callable[..., Any] = kvpool.Pool,
    make_shape: Callable[[int], Shape] = draw_shape,
    calls_per_run: int = CALLS_PER_RUN,
    check_every: int = 1,
    told: Callable[[Report], None] | None = None,
) -> Report:
    """Run until a finding, or until so many calls were made, or so many seconds have passed.

    Parameters
    ----------
    seed, job : int
        The same two give the same runs.
    calls : int, optional
        Calls to make, at least; whole runs are made.
    seconds : float, optional
        Wall time after which no run begins.
    make_pool : callable
        `kvpool.Pool`, or a subclass.
    make_shape : callable
        From a seed to the `Shape` of its run.
    check_every : int
        For shapes that are not `full`: calls between full checks.
    told : callable, optional
        Called with the report after every run.
    """
    report = Report()
    cpu, end = time.process_time(), None if seconds is None else time.monotonic() + seconds
    for run_seed in seeds(seed, job):
        report.seed = run_seed
        one_run(make_shape(run_seed), make_pool, report, calls_per_run, check_every)
        report.seconds = time.process_time() - cpu
        if told:
            told(report)
        if report.finding is not None:
            break
        if (calls is not None and report.calls >= calls) or (end is not None and time.monotonic() >= end):
            report.seed = None
            break
    return report
