"""Pools with layer groups: random operations without a finding, and every planted bug found by the same driver."""

import time
from functools import partial
from typing import Any

import kvpool
from proof.figure import Budget, Figure
from proof.fuzz._broken_groups import GROUP_FAULTS, broken_groups
from proof.fuzz.hunt import hunt
from proof.fuzz.shape import draw_group_shape
from proof.operations import Part, measure_part

NAME = "layer groups"
TARGET = ">= 1e7 checked operations, 0 findings; every planted bug found in <= 300,000"
COMMAND = "python -m proof groups"
OPERATIONS = 10_000_000
CANARY_CALLS = 300_000


def canaries(seed: int) -> dict[str, int | None]:
    """For every planted bug the operations until it was found; None: it was not."""
    found: dict[str, int | None] = {}
    for name in GROUP_FAULTS:
        report = find(seed, make_pool=broken_groups(name))
        found[name] = None if report.finding is None else report.calls
    return found


#: One bug, or none, in one process.
find: Any = partial(hunt, calls=CANARY_CALLS, make_shape=draw_group_shape)


def measure(budget: Budget) -> Figure:
    """Operations in the build in place, then the planted bugs."""
    start = time.monotonic()
    run = measure_part(Part(NAME, TARGET, "release", OPERATIONS, ("--groups",)), budget)
    found = canaries(budget.seed)
    missed = [name for name, calls in found.items() if calls is None]
    most = max((calls, name) for name, calls in found.items() if calls is not None)
    return Figure(
        *(NAME, TARGET),
        measured=f"{run.measured}; {len(found)} planted bugs, {len(missed)} missed, the most calls: {most[0]:,}",
        holds=run.holds and not missed,
        command=COMMAND,
        seconds=time.monotonic() - start,
        notes=run.notes or (f"missed: {', '.join(missed)}" if missed else f"the most calls took: {most[1]}"),
    )


def planted(budget: Budget) -> Figure:
    """A pool with windows that are one token short, and the judge that has to say so."""
    start = time.monotonic()
    fault = broken_groups("window off by one")
    sound, wrong = (find(budget.seed, make_pool=pool).finding for pool in (kvpool.Pool, fault))
    measured = f"a sound pool: {sound or 'no finding'}; a planted bug: {wrong or 'no finding'}"
    return Figure(NAME, TARGET, measured, sound is not None or wrong is None, COMMAND, time.monotonic() - start)
