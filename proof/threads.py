"""Threads on pools under ThreadSanitizer: without the GIL on one pool each, and on one pool together.

Pools share nothing: what threads do to one pool each, without the GIL, is what they would do alone. Public calls of
many threads on one pool wait for each other. The control, threads on one pool with nothing between them, must be
reported, or the sanitizer would see nothing at all. `proof.freethreaded` has more of it, without a GIL.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

from proof.figure import Budget, Figure
from tests.verify.builds import VARIANTS, build, environment, run

NAME = "threads"
TARGET = "0 reports of ThreadSanitizer in our code; the control without a lock is reported"
COMMAND = "python -m proof threads"
OPERATIONS = 5_000_000
LEAST = 40_000  # fewer are over before the second thread has begun
CLEAN = ("pools_apart", "pool_with_a_lock", "pool_of_all")
CONTROL = "pool_without_a_lock"
WARNING = "WARNING: ThreadSanitizer"


def refused() -> str | None:
    """Why ThreadSanitizer cannot run here, if it cannot."""
    prefix = VARIANTS["tsan"].prefix
    if shutil.which(prefix[0]) is None or subprocess.run([*prefix, "true"], capture_output=True).returncode:
        return f"{' '.join(prefix)} is refused here: ThreadSanitizer needs it, nothing was measured"
    return None


def prepare() -> None:
    """Compile the core and the driver."""
    folder = build("tsan")
    flags = {"CFLAGS": "-fsanitize=thread -O1 -g", "LDFLAGS": "-fsanitize=thread"}
    command = [sys.executable, "-m", "Cython.Build.Cythonize", "-q", "-3", "-i", "proof/threads_driver.pyx"]
    clean = environment("tsan") | flags
    clean.pop("LD_PRELOAD")
    done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"[threads] the driver does not compile:\n{done.stdout}{done.stderr}")


def case(name: str, operations: int) -> tuple[int, str]:
    """(reports that name our code, what the case says); a case that fails is a report too."""
    done = run("tsan", ["-m", "proof.threads_run", name, str(operations)])
    reports = [part for part in done.stderr.split(WARNING)[1:] if "kvpool/" in part or "threads_driver" in part]
    failed = done.returncode != 0 and not reports
    said = done.stdout.strip() or done.stderr.strip().rpartition("\n")[2]
    return len(reports) + failed, said


def measured(budget: Budget, cases: tuple[str, ...]) -> Figure:
    """The figure of some cases, which have to be clean, and of the control."""
    start = time.perf_counter()
    if why := refused():
        return Figure(NAME, TARGET, "not measured", False, COMMAND, 0.0, why)
    prepare()
    operations = max(budget.of(OPERATIONS), LEAST)
    found = {name: case(name, operations) for name in cases}
    control, _ = case(CONTROL, LEAST)
    reports = sum(count for count, _ in found.values())
    return Figure(
        name=NAME,
        target=TARGET,
        measured=f"{reports} reports in {', '.join(said for _, said in found.values())}; control: {control} reports",
        holds=reports == 0 and control > 0,
        command=COMMAND,
        seconds=time.perf_counter() - start,
        notes=f"on {os.cpu_count()} cores",
    )


def measure(budget: Budget) -> Figure:
    """Everything that has to be clean."""
    return measured(budget, CLEAN)


def planted(budget: Budget) -> Figure:
    """Threads on one pool without a lock, passed off as clean."""
    return measured(budget, (CONTROL,))
