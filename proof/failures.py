"""Allocations that fail: those of the core's C code, under AddressSanitizer, and those of CPython.

`proof.failing` and `proof.nomemory` are what runs, in child processes; LeakSanitizer looks at the end of the first.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from proof.figure import Budget, Figure
from tests.verify import builds

NAME = "failures"
TARGET = "state unchanged, no leak, no abort at 100 % of >= 2,000 points"
COMMAND = "python -m proof failures"
POINTS = 2000  # of C, at least: an allocation fails alone, and with all behind it
SCRIPTS = 8  # whose allocations of Python fail
SHORT_POINTS = 120


def run_child(module: str, amount: int, budget: Budget, *more: str, leaks: bool = False) -> dict[str, Any]:
    """What a child process found."""
    argv = ["-W", "ignore", "-m", f"proof.{module}", str(amount), str(budget.seed), *more]
    variant = "asan" if leaks else "debug"
    done = builds.run(variant, argv, leaks=leaks)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"points": 0, "findings": [f"{module} ended with {done.returncode}: {lines[-1] if lines else ''}"]}
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measure(budget: Budget, *more: str) -> Figure:
    """The core, built with AddressSanitizer (C) and with assertions (Python's allocations)."""
    start = time.monotonic()
    full = budget.share >= 1
    here = importlib.util.find_spec("_testcapi") is not None
    with ThreadPoolExecutor(budget.jobs) as pool:
        first = pool.submit(run_child, "failing", POINTS if full else SHORT_POINTS, budget, *more, leaks=full)
        second = pool.submit(run_child, "nomemory", SCRIPTS if full else 1, budget, *more) if here else None
        memory, python = first.result(), second.result() if second else {"points": 0, "findings": []}
    notes = "" if here else f"{sys.version.split()[0]} has no _testcapi here"
    findings = list(memory["findings"])
    findings += python["findings"]
    wrong = len(findings)
    total = memory["points"] + python["points"]
    measured = f"{total - wrong:,} of {total:,} points ({memory['points']:,} of C, {python['points']:,} of Python)"
    holds = not findings and memory["points"] >= (POINTS if full else SHORT_POINTS)
    return Figure(
        NAME, TARGET, measured, holds, COMMAND, time.monotonic() - start, "\n".join([notes, *findings[:20]]).strip()
    )


def planted(budget: Budget) -> Figure:
    """A pool whose refused step leaves a sequence open."""
    return measure(budget, "planted")
