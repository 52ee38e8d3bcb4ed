"""Runs of the fuzzer as tapes: its judge keeps books of its own, and convicts whatever is not in them.

The judge compares what calls give back, and the tables, references, plans and stored tokens after each of them. It
leaves the pool's counters alone here, and makes no call that compares digests.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import kvpool
from proof.fuzz._fuzz import Driver
from proof.fuzz.shape import OPERATIONS, Shape, draw_shape
from proof.mutation.tape import Difference, first_tag

RUNS, CALLS = 32, 1500


@dataclass(slots=True)
class FuzzRun:
    """A random program that is made anew each time it is played."""

    name: str
    shape: Shape
    make_pool: Callable[..., Any] = kvpool.Pool
    judged: bool = True

    def play(self, *, learn: bool = False, blind: bool = False) -> Iterator[Difference]:
        """Make the calls; there is nothing to `learn`, and `blind` compares nothing."""
        first_tag()
        driver = Driver(self.shape, self.make_pool)
        try:
            driver.run(CALLS)
        except Exception as finding:
            if not blind:
                yield Difference(True, None, finding)
        driver.shutdown()


def without(shape: Shape, operation: str) -> Shape:
    """The shape of a run that makes steps in place of an operation."""
    unwanted, step = OPERATIONS.index(operation), OPERATIONS.index("step")
    dice: list[int] = list(shape.dice)
    dice[step] += dice[unwanted]
    dice[unwanted] = 0
    return replace(shape, dice=tuple(dice))


def fuzz_runs(seed: int) -> Iterator[FuzzRun]:
    """Runs on small pools of all kinds; no two of one seed are the same."""
    rng = random.Random(f"fuzzed {seed}")
    for number in range(RUNS):
        shape = replace(draw_shape(rng.getrandbits(48)), counters=False)
        yield FuzzRun(f"fuzz run {number}, seed {seed}", without(shape, "ranks"))
