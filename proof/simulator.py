"""An asynchronous engine in simulation: every read is what the reader wrote, and nothing is left at idle."""

import time

from proof.figure import Budget, Figure
from proof.simulation.faults import FAULTS, SEEDS, convict
from proof.simulation.simulator import Failure, simulate, simulate_in_processes

NAME = "simulator"
TARGET = ">= 1e6 engine steps, 0 stale reads, 0 leaks"
STEPS = 1_000_000


def measure(budget: Budget) -> Figure:
    """Simulate kvpool's own pool."""
    start, steps = time.monotonic(), budget.of(STEPS)
    outcome = simulate_in_processes(budget.seed, steps, budget.jobs)
    measured = (
        f"{outcome.steps:,} steps in {outcome.worlds:,} worlds, {outcome.reads:,} reads compared, "
        f"{len(outcome.failures)} failures"
    )
    return Figure(
        *(NAME, TARGET, measured, outcome.steps >= steps and not outcome.failures),
        command=f"python -m proof.simulation.simulator --seed {budget.seed} --steps {steps} --jobs {budget.jobs}",
        seconds=time.monotonic() - start,
        notes="\n".join(map(str, outcome.failures)) or outcome.describe(),
    )


def planted(budget: Budget) -> Figure:
    """Simulate a pool without a fence, then every other fault; holds only if one of them is not noticed."""
    start = time.monotonic()
    missed = []
    try:
        simulate(budget.seed, 1, FAULTS["no fence"])
        missed.append("no fence")
    except Failure as failure:
        found = str(failure)
    names = FAULTS if budget.share >= 1 else list(FAULTS)[:3]
    missed += [name for name in names if convict(name, budget.seed) is None]
    return Figure(
        *(NAME, TARGET, f"{len(names)} planted faults, {len(missed)} missed in {SEEDS} worlds each", bool(missed)),
        command="python -m pytest tests/proof/test_simulator_faults.py",
        seconds=time.monotonic() - start,
        notes=", ".join(missed) or found,
    )
