"""Every public call with every kind of wrong argument, in child processes under AddressSanitizer.

A case is a call inside of a test's ``with refused(...)``, which names the documented exception and finds fingerprint,
digest and plans as they were; tests that do not do all of that run too, and count nothing. Such are the arrays that
another thread writes while each call reads them, and calls that are legal where one would not expect it: from a
finalizer, a signal's handler, an ``__index__`` (earlier calls, all of them), and an import by a second interpreter,
which is refused as a whole. Those of the CPU kernels (``tests/cpu/test_cpu_misuse.py``) have no pool whose fingerprint
could change, and their copy takes several times as long to compile as the core's: ``make asan`` runs them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from proof.figure import Budget, Figure
from tests.verify import builds

NAME = "misuse"
TARGET = "documented exception, fingerprint unchanged: 100 % of >= 150 cases"
COMMAND = "python -m proof misuse"
FILES = ("misuse", "handles", "guards", "hostile_use", "plan_binding", "prefix_hostile", "threads")
QUICK = ("hostile_use", "handles")
ENDINGS = re.compile(r"(\d+) (failed|errors?)\b")
REFUSED = re.compile(r"(?m)^(\d+) wrong calls refused as documented$")


def run_file(name: str, variant: str, core: str = "") -> tuple[str, int, int, str]:
    """One file of tests in a process of its own: (name, wrong calls refused as documented, failures, last line)."""
    argv = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", builds.test_file(f"test_{name}")]
    env = {"KVPOOL_COUNT_REFUSED": "1"} | ({"KVPOOL_CORE": core} if core else {})
    env["ASAN_OPTIONS"] = "detect_leaks=0:allocator_may_return_null=1"  # pools too large for this machine are cases
    if variant:
        done = builds.run(variant, argv, env=env)
    else:  # the build in place
        done = subprocess.run(
            [sys.executable, *argv], cwd=builds.ROOT, env=os.environ | env, capture_output=True, text=True
        )
    last = (done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]])[-1]
    counts = {kind.rstrip("s"): int(number) for number, kind in ENDINGS.findall(last)}
    failed = counts.get("failed", 0) + counts.get("error", 0)
    if done.returncode and not failed:
        failed = 1  # it crashed, or collected nothing
    refused = REFUSED.search(done.stdout)
    return name, int(refused[1]) if refused else 0, failed, last


def figure_of(files: Sequence[str], variant: str, budget: Budget, least: int, core: str = "") -> Figure:
    """The figure over some files of tests."""
    start = time.monotonic()
    if variant:
        builds.build(variant)
    with ThreadPoolExecutor(budget.jobs) as pool:
        results = list(pool.map(lambda name: run_file(name, variant, core), files))
    cases, failed = (sum(result[column] for result in results) for column in (1, 2))
    where = variant or "the build in place"
    measured = f"{cases:,} wrong calls refused as documented, {failed:,} tests failed, under {where}"
    notes = "\n".join(f"test_{name}.py: {last}" for name, _, wrong, last in results if wrong)
    return Figure(NAME, TARGET, measured, not failed and cases >= least, COMMAND, time.monotonic() - start, notes)


def measure(budget: Budget) -> Figure:
    """The core."""
    if budget.share >= 1:
        return figure_of(FILES, "asan", budget, 150)
    return figure_of(QUICK, "", budget, 15)


def planted(budget: Budget) -> Figure:
    """The plain Python model, which is no fortress."""
    return figure_of(("guards",), "", budget, 15, core="model")
