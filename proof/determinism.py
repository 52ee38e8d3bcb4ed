"""Same seed, same digests: on every build and every Python that is found here.

Random programs run in each of them, and print one hash over all digests and fingerprints. Other interpreters get an
environment of their own below ``build/`` (numpy and Cython by pip), and compile the core there.
"""

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from proof.figure import Budget, Figure
from tests.verify.builds import ROOT, build, copied, environment, is_release

NAME = "determinism"
TARGET = "same seed, same digest trace on every build and Python: 100 %"
RUNS = 1000
BUILDS = ("debug", "asan")  # and release
OLDEST = (3, 11)
COMMAND = "python -m proof.determinism"


def trace(python: str | Path, folder: Path, variables: dict[str, str], seed: int, runs: int) -> str:
    """The hash that a process prints."""
    command = [str(python), "-m", "proof.fuzz.digests", str(seed), str(runs)]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else f"failed: {done.stderr.strip()[-300:]}"


def version(python: str) -> tuple[int, int] | None:
    """(major, minor) of an interpreter, None if it does not run."""
    code = "import sys; print(*sys.version_info[:2], sys.implementation.name)"
    try:
        found = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=30).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (int(found[0]), int(found[1])) if len(found) == 3 and found[2] == "cpython" else None


def other_pythons() -> dict[str, str]:
    """Version -> interpreter, of every other supported minor version that is found."""
    candidates = [shutil.which(f"python3.{minor}") for minor in range(OLDEST[1], 20)]
    homes = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates += [str(path) for path in sorted(homes.glob("3.*/bin/python"))]
    found = {}
    for python in filter(None, candidates):
        which = version(python)
        if which is not None and which >= OLDEST and which != sys.version_info[:2]:
            found.setdefault(f"{which[0]}.{which[1]}", python)
    return found


def environment_for(name: str, python: str) -> Path:
    """An interpreter with what a build needs, and a copy of this tree compiled for it in the folder of "release"."""
    home = ROOT / "build" / "pythons" / name
    inside = home / "bin" / "python"
    quiet = {"capture_output": True, "text": True, "check": True}
    if not (home / "ready").exists():
        subprocess.run([python, "-m", "venv", "--clear", str(home)], **quiet)
        subprocess.run([str(inside), "-m", "pip", "install", "-q", "numpy", "cython", "setuptools>=77"], **quiet)
        (home / "ready").touch()
    clean = {key: value for key, value in os.environ.items() if not key.startswith("KVPOOL_")}
    folder = copied("release")
    subprocess.run([str(inside), "setup.py", "-q", "build_ext", "--inplace"], cwd=folder, env=clean, **quiet)
    return inside


def measure(budget: Budget) -> Figure:
    """Traces of all builds and Pythons, release with two hash seeds; in short, these two of the build in place."""
    start, runs = time.monotonic(), budget.of(RUNS)
    tree, here = ROOT, {**os.environ, "PYTHONPATH": str(ROOT)}
    if budget.share >= 1 and not is_release():
        tree, here = build("release"), environment("release")
    which = {f"hash seed {n}": (sys.executable, tree, here | {"PYTHONHASHSEED": n}) for n in "12"}
    missing = []
    if budget.share >= 1:
        which |= {name: (sys.executable, build(name), environment(name)) for name in BUILDS}
        for name, python in other_pythons().items():
            try:
                inside = environment_for(name, python)
            except subprocess.CalledProcessError as error:
                missing.append(f"Python {name}: {error.stderr.strip().splitlines()[-1:]}")
                continue
            which[f"Python {name}"] = (str(inside), copied("release"), environment("release"))
    return judge(traced(which, budget, runs), runs, start, missing)


def traced(which: dict[str, tuple[str, Path, dict[str, str]]], budget: Budget, runs: int) -> dict[str, str]:
    """The hashes of processes by name, so many at a time as the budget has jobs; the slowest (asan) begins first."""
    order = sorted(which, key=lambda name: name != "asan")
    with ThreadPoolExecutor(budget.jobs) as pool:
        found = dict(zip(order, pool.map(lambda name: trace(*which[name], budget.seed, runs), order), strict=True))
    return {name: found[name] for name in which}


def judge(traces: dict[str, str], runs: int, start: float, missing: list[str]) -> Figure:
    """All equal, or not."""
    usual = max(set(traces.values()), key=list(traces.values()).count)
    other = [f"{name}: {found[:60]}" for name, found in traces.items() if found != usual]
    measured = f"{len(traces) - len(other)} of {len(traces)} traces of {runs:,} runs are equal ({', '.join(traces)})"
    holds = not other and len(usual) == 64
    return Figure(NAME, TARGET, measured, holds, COMMAND, time.monotonic() - start, "; ".join(other + missing))


def planted(budget: Budget) -> Figure:
    """One of the processes has another seed, as a pool would that draws its own."""
    start, runs = time.monotonic(), budget.of(RUNS)
    here = {**os.environ, "PYTHONPATH": str(ROOT)}
    traces = {str(n): trace(sys.executable, ROOT, here, budget.seed + (n == 2), runs) for n in range(3)}
    return judge(traces, runs, start, [])


if __name__ == "__main__":
    figure = measure(Budget(1.0))
    print(figure.measured, figure.notes, sep="\n")
    sys.exit(not figure.holds)
