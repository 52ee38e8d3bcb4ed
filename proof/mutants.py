"""Two mutation scores of the core: what any recording of it would see, and what a judge would convict.

`proof.mutation` makes the mutants of all functions of the core, in one build, and hunts them. A mutant is *seen* when
anything differs from a recording of the core itself, its digest and its fingerprint too. It is *convicted* when a
result is not the one of the plain Python model. This judge never reads the pool's own digest, fingerprint, index or
counters, so it is not asked about mutants of these (`proof.mutation.aside`). A mutant that no program can tell from
the core stands on a list of equivalents, with the reason, and counts in neither score.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator

from proof.figure import Budget, Figure
from proof.mutation.equivalents import EQUIVALENTS
from proof.mutation.source import core_sources, functions
from tests.verify.builds import run

NAME = "mutants"
TARGET = ">= 97 % of the core's mutants seen, >= 90 % convicted by a judge that asks the pool nothing"
COMMAND = "python -m proof mutants"
LEAST_SEEN, LEAST_CONVICTED, LEAST_MUTANTS = 0.97, 0.90, 2000
TAPES = 4
#: Of the mutants: all of them take more than a day of processor time. Another seed gives other ones.
FULL_SHARE, SHORT_SHARE, BLIND_SHARE = 0.12, 0.005, 0.0015


def hunted(budget: Budget, share: float, *more: str) -> list[dict]:
    """What became of `share` of the mutants; on the quick tapes when the budget is short."""
    short = budget.share < 1
    options = {"share": share, "tapes": 0 if short else TAPES, "jobs": budget.jobs, "seed": budget.seed}
    arguments = [f"--{name}={value}" for name, value in options.items()] + ["--quick", "--cached=6"] * short
    done = run("mutants-quick" if short else "mutants", ["-m", "proof.mutation.hunt", *arguments, *more])
    if done.returncode:
        raise RuntimeError(f"[mutants] the hunt failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return list(ends(done.stdout))


def ends(printed: str) -> Iterator[dict]:
    """The lines of a hunt that are about one mutant."""
    for line in printed.splitlines():
        found = json.loads(line)
        if "seen" in found:
            yield found


def without_mutants(files: set[str]) -> list[str]:
    """Sources of the core that have functions, and no mutant."""
    made = {path.name: path.read_text() for path in core_sources()}
    return [name for name, text in made.items() if name not in files and functions(name, text)]


def judged(found: list[dict], budget: Budget, seconds: float, files: set[str]) -> Figure:
    """The figure; of a short run the scores are judged more mildly: its tapes see less than all."""
    real = [end for end in found if end["mutant"]["key"] not in EQUIVALENTS]
    asked = [end for end in real if not end["mutant"]["aside"]]
    seen = sum(bool(end["seen"]) for end in real) / max(1, len(real))
    convicted = sum(bool(end["convicted"]) for end in asked) / max(1, len(asked))
    known = [end for end in found if end["mutant"]["key"] in EQUIVALENTS]
    wrong = [end["mutant"] for end in known if end["seen"] not in ("", "too slow")]
    silent = without_mutants(files)
    slack = 0.0 if budget.share >= 1 else 0.25
    lines = [f"no mutants of {name}" for name in silent]
    lines += [describe("not seen", end["mutant"]) for end in real if not end["seen"]]
    lines += [describe("not convicted", end["mutant"]) for end in asked if end["seen"] and not end["convicted"]]
    lines += [describe("on the list of equivalents, and seen all the same", mutant) for mutant in wrong]
    aside = Counter(end["mutant"]["aside"] for end in real if end["mutant"]["aside"])
    lines.append("left to recordings: " + ", ".join(f"{n} of {why}" for why, n in aside.most_common()))
    enough = len(found) >= LEAST_MUTANTS or budget.share < 1
    return Figure(
        name=NAME,
        target=TARGET,
        measured=f"{len(found)} mutants, {len(found) - len(real)} equivalents apart: {seen:.1%} seen; "
        f"{convicted:.1%} of the {len(asked)} that the judge is asked about convicted",
        holds=bool(
            enough and not wrong and not silent and seen >= LEAST_SEEN - slack and convicted >= LEAST_CONVICTED - slack
        ),
        command=COMMAND,
        seconds=seconds,
        notes="\n  ".join(["mutants:", *lines]),
    )


def describe(what: str, mutant: dict) -> str:
    """A line about one mutant."""
    return f"{what}: {mutant['file']}:{mutant['line']} {mutant['key']}"


def measure(budget: Budget) -> Figure:
    """Hunt a share of the mutants."""
    start = time.perf_counter()
    found = hunted(budget, SHORT_SHARE if budget.share < 1 else FULL_SHARE)
    return judged(found, budget, time.perf_counter() - start, mutated_files())


def mutated_files(left_out: str = "") -> set[str]:
    """The files that have mutants; `left_out`: a source that nobody changes."""
    from proof.mutation.schemata import mutate

    return {mutant.file for mutant in mutate(path for path in core_sources() if path.name != left_out)[1]}


def planted(budget: Budget) -> list[Figure]:
    """Killers that compare nothing, a judge that does not, and a source that is left out: no figure may hold."""
    start = time.perf_counter()
    blind = hunted(budget, BLIND_SHARE, "--blind")
    unjudged = hunted(budget, SHORT_SHARE, "--unjudged")
    perfect = [end | {"seen": "differs", "convicted": "differs"} for end in unjudged]
    left_out = max((path.name for path in core_sources()), key=len)
    return [
        judged(blind, budget, time.perf_counter() - start, mutated_files()),
        judged(unjudged, budget, time.perf_counter() - start, mutated_files()),
        judged(perfect, budget, time.perf_counter() - start, mutated_files(left_out)),
    ]
