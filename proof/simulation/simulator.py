"""An asynchronous engine in simulation, over a real pool.

A host schedules requests, a device executes their plans later, and a seeded choice of events decides who moves next:
several steps in flight, results that arrive late, in another order or never, aborts and preemptions in every state,
forks, drafts that are cut off, tokens that leave, prefix hits, pins, flushes, resets. Pools hold a few requests only.
Every read is compared with what the reader wrote; a block that is handed out is poisoned. A world is made by its seed
alone, so a failure is replayed by it: ``python -m proof.simulation.simulator --seed 1 --steps 100000``.

Examples
--------
>>> from proof.simulation.simulator import simulate
>>> simulate(seed=1, steps=200).steps >= 200
True
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Any

from proof.simulation.books import Tally
from proof.simulation.host import Host, Kit

WORLD_STEPS = 500  # steps before a world is drained, and looked at for leaks

__all__ = ["Failure", "Kit", "Outcome", "main", "simulate", "simulate_in_processes"]


class Failure(AssertionError):
    """What went wrong in a simulated world, and how to see it again."""

    def __init__(self, seed: int, steps: int, error: BaseException, log: list[str]) -> None:
        super().__init__(seed, steps, error, log)
        self.seed, self.steps, self.error, self.log = seed, steps, error, log

    def __str__(self) -> str:
        again = f"python -m proof.simulation.simulator --seed {self.seed} --steps 1"
        tail = "\n".join(f"  {line}" for line in self.log)
        return f"seed {self.seed}, step {self.steps}: {type(self.error).__name__}: {self.error}\n{tail}\nagain: {again}"

    def __reduce__(self) -> Any:
        return Failure, (self.seed, self.steps, RuntimeError(f"{type(self.error).__name__}: {self.error}"), self.log)


@dataclass
class Outcome(Tally):
    """What was simulated."""

    worlds: int = 0
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Sum up."""
        for name in (each.name for each in fields(Tally)):
            setattr(self, name, getattr(self, name) + getattr(other, name))


def run_world(seed: int, kit: Kit, outcome: Outcome) -> None:
    """Run one world to its end and look for leaks; adds up what happened, raises `Failure`."""
    host = Host(seed, kit)
    try:
        host.run(WORLD_STEPS)
        host.drain()
    except Exception as exc:
        raise Failure(seed, host.tally.steps, exc, list(host.log)) from exc
    finally:
        outcome.worlds += 1
        outcome.add(host.tally)
        host.leave()


def simulate(
    seed: int = 1,
    steps: int = 100_000,
    kit: Kit | None = None,
    progress: Callable[[Outcome], None] | None = None,
) -> Outcome:
    """Run worlds of the seeds `seed`, `seed + 1`, ... until so many engine steps were made.

    Parameters
    ----------
    seed, steps : int
        First world; engine steps to reach. A world is never cut short, so a few more are made.
    kit : Kit, optional
        What is simulated: classes of pool, plan and device. Default: kvpool's own.
    progress : callable, optional
        Called with the outcome so far after every world.

    Returns
    -------
    Outcome
        Counters; `failures` is empty, for the first failure is raised.

    Raises
    ------
    Failure
        A stale read, a leak, a broken invariant or an exception nobody asked for: with the seed of its world.
    """
    kit, outcome = kit or Kit(), Outcome()
    while outcome.steps < steps:
        run_world(seed + outcome.worlds, kit, outcome)
        if progress is not None:
            progress(outcome)
    return outcome


def _share(arguments: tuple[int, int]) -> Outcome:
    seed, steps = arguments
    try:
        return simulate(seed, steps)
    except Failure as failure:
        return Outcome(failures=[failure])


def simulate_in_processes(seed: int, steps: int, jobs: int) -> Outcome:
    """Share the steps among processes; failures are collected, one per process at most."""
    shares = [(seed + job * 1_000_000, -(-steps // jobs)) for job in range(jobs)]
    total = Outcome()
    with ProcessPoolExecutor(jobs) as workers:
        for outcome in workers.map(_share, shares):
            total.add(outcome)
            total.worlds += outcome.worlds
            total.failures += outcome.failures
    return total


def main(argv: list[str] | None = None) -> int:
    """Simulate, and say what happened; 1 when something went wrong."""
    parser = argparse.ArgumentParser(prog="python -m proof.simulation.simulator", description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="of the first world (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100_000, help="engine steps (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.jobs > 1:
        outcome = simulate_in_processes(args.seed, args.steps, args.jobs)
    else:
        outcome = _share_here(args.seed, args.steps)
    for failure in outcome.failures:
        print(failure)
    print(outcome.describe())
    return 1 if outcome.failures else 0


def _share_here(seed: int, steps: int) -> Outcome:
    def show(outcome: Outcome) -> None:
        if sys.stderr.isatty():
            print(f"\r{outcome.steps:,} of {steps:,} steps, {outcome.worlds:,} worlds", end="", file=sys.stderr)

    try:
        return simulate(seed, steps, progress=show)
    except Failure as failure:
        return Outcome(failures=[failure])
    finally:
        if sys.stderr.isatty():
            print(file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
