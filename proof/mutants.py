"""Mutation score of the core: whether its tests would see a wrong comparison, operator, constant, branch or call.

`proof.mutation` makes the mutants, in one build, and kills them. A mutant that nobody can tell from the core stands on
a list of equivalents, with the reason; the raw score counts it as missed all the same.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

from proof.builds import ROOT, run
from proof.figure import Budget, Figure
from proof.mutation.equivalents import EQUIVALENTS

NAME = "mutants"
TARGET = ">= 500 mutants of the core; >= 95 % killed, equivalents apart; >= 90 % raw"
COMMAND = "python -m proof mutants"
CORE = ROOT / "kvpool"
LEAST, LEAST_RAW, LEAST_MUTANTS = 0.95, 0.90, 500
TAPES = 8
SHORT_SHARE, BLIND_SHARE = 0.015, 0.0015  # of the mutants; a blind killer plays all tapes with almost every one


def hunted(budget: Budget, share: float, *more: str) -> list[dict]:
    """What became of the mutants: all of them, or `share` of them, on the quick tapes, when the budget is short."""
    short = budget.share < 1
    options = {"share": share, "tapes": 0} if short else {"share": 1.0, "tapes": TAPES}
    options |= {"jobs": budget.jobs, "seed": budget.seed}
    arguments = [f"--{name}={value}" for name, value in options.items()] + ["--quick"] * short
    done = run("mutants-quick" if short else "mutants", ["-m", "proof.mutation.hunt", *arguments, *more])
    if done.returncode:
        raise RuntimeError(f"[mutants] the hunt failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return list(ends(done.stdout))


def ends(printed: str) -> Iterator[dict]:
    """The lines of a hunt that are about one mutant."""
    for line in printed.splitlines():
        found = json.loads(line)
        if "how" in found:
            yield found


def judged(found: list[dict], budget: Budget, seconds: float) -> Figure:
    """The figure; of a short run the scores alone are judged, and more mildly: its tapes see less than all."""
    alive = [end["mutant"] for end in found if end["how"] == "survived"]
    missed = [mutant for mutant in alive if mutant["key"] not in EQUIVALENTS]
    equal, total = len(alive) - len(missed), len(found)
    raw, score = 1 - len(alive) / total, 1 - len(missed) / max(1, total - equal)
    wrong = [
        end["mutant"]
        for end in found
        if end["how"] not in ("survived", "too slow") and end["mutant"]["key"] in EQUIVALENTS
    ]
    slack = 0.0 if budget.share >= 1 else 0.25
    enough = total >= LEAST_MUTANTS or budget.share < 1
    lines = [f"{m['file']}:{m['line']} {m['key']}" for m in missed]
    lines += [f"on the list of equivalents, and seen all the same: {m['key']}" for m in wrong]
    return Figure(
        name=NAME,
        target=TARGET,
        measured=f"{total} mutants: {score:.1%} killed, {equal} equivalents apart; {raw:.1%} raw",
        holds=enough and not wrong and score >= LEAST - slack and raw >= LEAST_RAW - slack,
        command=COMMAND,
        seconds=seconds,
        notes="survivors:\n  " + "\n  ".join(lines) if lines else "",
    )


def measure(budget: Budget) -> Figure:
    """Hunt every mutant."""
    start = time.perf_counter()
    found = hunted(budget, SHORT_SHARE)
    return judged(found, budget, time.perf_counter() - start)


def planted(budget: Budget) -> Figure:
    """Killers that compare nothing: only what crashes or hangs dies, and the score must show it."""
    start = time.perf_counter()
    found = hunted(budget, BLIND_SHARE, "--blind")
    return judged(found, budget, time.perf_counter() - start)
