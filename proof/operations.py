"""Random operations: on small pools under the sanitizers, each one checked; on large ones as fast as they go.

They run ``python -m proof.fuzz``; an operation is one call of a pool (a step of eight rows is one operation). It has no
prefix caches of pools with groups. In short, this tree's own build takes the place of the copies.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass

from proof.builds import RELEASE, ROOT, is_release, run
from proof.figure import Budget, Figure
from proof.fuzz._broken import broken
from proof.fuzz.hunt import hunt

NAME = "random operations"
TARGET = "0 findings in 1e8 operations under ASan+UBSan, and in 1e9 in release"
#: What has to be found before a run without a finding means something.
PLANTED = ("fence removed", "write into a shared block", "evicted node stays in the index")


@dataclass(frozen=True, slots=True)
class Part:
    """One row."""

    name: str
    target: str
    variant: str
    operations: int
    options: tuple[str, ...] = ()
    notes: str = ""
    program: tuple[str, ...] = ("proof.fuzz",)


PARTS = (
    Part(
        "random operations, sanitized",
        "ASan+UBSan, pools of 4 to 64 blocks, all checked after every one: >= 1e8, 0 findings",
        *("asan", 100_000_000),
        notes="the judge's own books are compiled without them; what it reads of the pool is read with them",
    ),
    Part(
        "random operations, release",
        "pools of 1M blocks, all checked at checkpoints: >= 1e9, 0 findings",
        *("release", 1_000_000_000),
        ("--large",),
        "batches of one or two rows on 4,096 or 32,768 sequences",
    ),
    *(
        Part(
            f"random operations on layer groups, {name}",
            f"{build}, pools with 1 to 8 groups, all checked after every one: >= {operations:.0e}, 0 findings",
            *(variant, operations),
            ("--groups",),
        )
        for name, build, variant, operations in (
            ("sanitized", "ASan+UBSan", "asan", 100_000_000),
            ("release", "release", "release", 1_000_000_000),
        )
    ),
)


def is_this_build(variant: str | None) -> bool:
    """Whether the build in place will do."""
    return variant is None or (variant == "release" and is_release())


def start_of(variant: str | None) -> str:
    """How the command begins that runs Python in a build as `fuzz` does."""
    if not is_this_build(variant):
        return f"python -m proof.builds {variant}"
    return " ".join([*(f"{name}={value}" for name, value in RELEASE.runtime.items()), "python"])


def fuzz(variant: str | None, options: list[str], program: tuple[str, ...] = ("proof.fuzz",)) -> dict:
    """The facts of one command in one build, or in this one; a sanitizer's report is a finding."""
    command = ["-m", *program, *options, "--json"]
    if is_this_build(variant):
        env = {**os.environ, **RELEASE.runtime}
        done = subprocess.run([sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True)
    else:
        done = run(variant, command)
    if done.returncode not in (0, 1) or not done.stdout.startswith("{"):
        return {"calls": 0, "seconds": 0.0, "finding": f"exit {done.returncode}: {done.stderr.strip()[-2000:]}"}
    return json.loads(done.stdout)


def measure(budget: Budget) -> list[Figure]:
    """The parts, one after the other."""
    return [measure_part(part, budget) for part in PARTS]


def measure_part(part: Part, budget: Budget) -> Figure:
    """One row; the seconds are those of the command, without what was compiled for it."""
    start, least = time.monotonic(), budget.of(part.operations)
    variant = part.variant if budget.share >= 1 else None
    options = [*part.options, "--ops", str(least), "--seed", str(budget.seed)]
    if part.program == ("proof.fuzz",):
        options += ["--jobs", str(budget.jobs)]
    facts = fuzz(variant, options, part.program)
    seconds, calls = facts["seconds"], facts["calls"]
    return Figure(
        *(part.name, part.target),
        measured=f"{calls:.4g} in {seconds:.0f} s, {int(facts['finding'] is not None)} findings",
        holds=calls >= least and facts["finding"] is None,
        command=f"{start_of(variant)} -m {' '.join([*part.program, *options])}",
        seconds=time.monotonic() - start,
        notes=facts["finding"] or part.notes,
    )


def planted(budget: Budget) -> Figure:
    """The same driver on pools with planted bugs: holds only if one of them is not found."""
    start = time.monotonic()
    missed = [name for name in PLANTED if hunt(budget.seed, calls=200_000, make_pool=broken(name)).finding is None]
    measured = f"{len(PLANTED)} planted bugs, {len(missed)} missed"
    return Figure(
        NAME, "none missed", measured, bool(missed), "python -m proof.fuzz --canary", time.monotonic() - start
    )
