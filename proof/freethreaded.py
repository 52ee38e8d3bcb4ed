"""Threads on pools and stores without a GIL, in the CPython that `make freethreaded` builds.

Four threads on one pool: each knows what its calls have to give, or takes everybody's sequences and plans. A pool
for each of them goes as it goes alone. All of it again under ThreadSanitizer. The planted fault is a lock that locks
nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence

from proof import coverage
from proof.figure import Budget, Figure
from proof.threads import refused
from tests.verify.builds import run, test_file
from tests.verify.builds.interpreter import missing as missing_interpreter

NAME = "without a GIL"
TARGET = "GIL off, tests pass, 0 findings in 1e7 calls of 4 threads, 0 reports of ThreadSanitizer, CPU <= 1.05x"
COMMAND = "python -m proof freethreaded"
CALLS = 10_000_000  # of the three cases of pools together
LEAST = 60_000  # a round of each
SANITIZED = 600_000
STORES = 4_000
POOLS = ("shared", "rude", "apart")
MOST_RATIO = 1.05
MOST_SECONDS = 900  # for one case
IMPORT = "import sys, kvpool, kvpool.capi, kvpool_backends.cpu; assert not sys._is_gil_enabled(); print(sys.version)"
TESTS = tuple(
    test_file(name)
    for name in (
        *coverage.TESTS,
        *("test_backend_cpu", "test_backend_numpy", "test_cpu_decode", "test_cpu_misuse", "test_cpu_move"),
        *("test_cpu_store", "test_fork_process", "test_guards", "test_hostile_use"),
    )
)
WARNING = "WARNING: ThreadSanitizer"
REPORTED = 66  # the exit status of a process with reports; those that name nothing of ours are the interpreter's
OURS = ("kvpool/", "kvpool_backends/", "kv_")


def missing() -> str | None:
    """Why this gate cannot run here, if it cannot."""
    return missing_interpreter() or refused()


def child(variant: str, case: str, calls: int, seed: int) -> tuple[dict, str]:
    """(facts, finding) of one case: the last line of what it said where it failed."""
    command = ["-m", "proof.freethreaded_run", case, str(calls), str(seed)]
    try:
        done = run(variant, command, timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:  # a chain of blocks that has become a ring
        return {"calls": 0, "reports": 0}, f"{case}: no end in {MOST_SECONDS} s"
    reports = [part for part in done.stderr.split(WARNING)[1:] if any(name in part for name in OURS)]
    if reports:
        return {"calls": 0, "reports": len(reports)}, f"{case}: {WARNING}{reports[0][:3000]}"
    if done.returncode not in (0, REPORTED) or not done.stdout:
        said = done.stderr.strip().rpartition("\n")[2] if done.returncode > 0 else f"signal {-done.returncode}"
        return {"calls": 0, "reports": 0}, f"{case}: {said}"
    return json.loads(done.stdout) | {"reports": 0}, ""


def figure(name: str, target: str, measured: str, holds: bool, begun: float, notes: Sequence[str] = ()) -> Figure:
    """A row of this gate."""
    told = "; ".join(note for note in notes if note)
    return Figure(f"{NAME}, {name}", target, measured, holds, COMMAND, time.perf_counter() - begun, told)


def imported() -> Figure:
    """The import leaves the GIL off without a warning, and the tests pass."""
    begun = time.perf_counter()
    loaded = run("free", ["-W", "error", "-c", IMPORT])
    tests = run("free", ["-m", "pytest", "-q", "-n", "2", *TESTS])
    said = tests.stdout.strip().rpartition("\n")[2].strip("= ")
    version = loaded.stdout.partition(" ")[0] or loaded.stderr.strip().rpartition("\n")[2]
    failed = "" if tests.returncode == 0 else tests.stdout[-3000:]
    return figure(
        *("tests", "kvpool imported: GIL off, no warning; the core's and the stores' tests pass"),
        *(f"CPython {version}: {said}", loaded.returncode == tests.returncode == 0, begun, [failed]),
    )


def operations(variant: str, name: str, target: str, calls: int, seed: int) -> Figure:
    """All cases, so many calls of pools in sum."""
    begun = time.perf_counter()
    found = [child(variant, case, calls // len(POOLS), seed) for case in POOLS]
    found.append(child(variant, "stores", max(400, STORES * calls // CALLS), seed))
    notes = [finding for _, finding in found if finding]
    made, reports = (sum(facts[key] for facts, _ in found) for key in ("calls", "reports"))
    measured = f"{made:.3g} calls, {len(notes)} findings" + (f", {reports} reports" if "tsan" in variant else "")
    return figure(name, target, measured, not notes, begun, notes)


def cost(calls: int, seed: int) -> Figure:
    """CPU seconds with two threads on two pools, beside those of one thread."""
    begun = time.perf_counter()
    facts, finding = child("free", "cost", calls, seed)
    ratio = facts.get("ratio", float("inf"))
    return figure(
        *("cost", f"CPU seconds of an operation, two threads on two pools: <= {MOST_RATIO} of one thread's"),
        *(f"{ratio:.3f}", ratio <= MOST_RATIO, begun, [finding, f"on {os.cpu_count()} cores, best of 15 turns"]),
    )


def measure(budget: Budget) -> list[Figure]:
    """Everything; nothing where there is no interpreter for it."""
    if why := missing():
        return [Figure(NAME, TARGET, "not measured", False, COMMAND, 0.0, why)]
    calls, sanitized, seed = max(LEAST, budget.of(CALLS)), max(LEAST, budget.of(SANITIZED)), budget.seed
    return [
        imported(),
        operations("free", "calls", "4 threads, one pool and one each, 1e7 calls: 0 findings", calls, seed),
        operations("free-tsan", "ThreadSanitizer", "the same, fewer: 0 reports", sanitized, seed),
        cost(calls // 50, seed),
    ]


def planted(budget: Budget) -> list[Figure]:
    """A lock that locks nothing: to be found by the books, and by ThreadSanitizer."""
    if why := missing():
        return [Figure(NAME, TARGET, "not measured", False, COMMAND, 0.0, why)]
    begun, rows = time.perf_counter(), []
    for variant in ("free-unlocked", "free-tsan-unlocked"):
        _, finding = child(variant, "shared", LEAST, budget.seed)
        rows.append(figure(variant, "0 findings", finding or "nothing found", not finding, begun))
    return rows
