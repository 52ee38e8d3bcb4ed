"""Instructions that each row of the benchmarks takes: ``python -m benchmarks.instructions [OTHER_CHECKOUT]``.

valgrind counts them, so they depend on neither clocks nor neighbours. With another checkout, compiled in place, its
rows are counted by its own benchmarks, and the table has the ratios; exit status 1 if one is above MOST.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

from benchmarks.callgrind import counted, marks

HERE = Path(__file__).resolve().parent
#: Runs pytest with this file as a plugin, in a checkout whose benchmarks may not have it.
LAUNCH = f"""
import importlib.util, sys, pytest
spec = importlib.util.spec_from_file_location("instructions", {__file__!r})
plugin = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plugin)
sys.exit(pytest.main(sys.argv[1:], plugins=[plugin]))
"""
MOST = 1.03  # what a change may cost a row
ROUNDS = 5


def pytest_configure() -> None:
    """As a plugin of pytest: count what pytest-benchmark would time."""
    from pytest_benchmark.fixture import BenchmarkFixture

    count, state = marks(), {"started": False}

    def pedantic(benchmark, run, setup=None, **_):
        for number in range(ROUNDS + 1):  # the first is not counted: it warms caches of the interpreter
            if setup:
                setup()
            if number == 0:
                run()
                continue
            if not state["started"]:
                count.count_prepare()
                state["started"] = True
            count.count_toggle()
            run()
            count.count_toggle()
            count.count_dump(f"{benchmark.extra_info['items']} {benchmark.extra_info['row']}".encode())

    BenchmarkFixture.pedantic = pedantic


def count_rows(checkout: Path) -> dict[str, float]:
    """Return instructions per item of each row: the median of the rounds."""
    files = [str(path) for path in sorted((checkout / "benchmarks").glob("bench_*.py"))]
    found = counted(
        *("-c", LAUNCH, "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--timeout=0", "-W", "ignore"),
        *("-k", "not floor and not python"),
        *files,
        cwd=checkout,
        PYTHONPATH=str(checkout),  # before what an editable installation names
        PYTHONHASHSEED="0",
        OPENBLAS_NUM_THREADS="1",
    )
    rows = {}
    for mark, counts in found.items():
        items, _, row = mark.partition(" ")
        rows[row] = median(counts) / float(items)
    return rows


def main(arguments: list[str]) -> int:
    """Print the table; return the exit status."""
    ours = count_rows(HERE.parent)
    others = count_rows(Path(arguments[0]).resolve()) if arguments else {}
    worst = 0.0
    print(f"{'instructions per item':70}{'here':>14}{'there':>14}{'ratio':>8}")
    for row, here in ours.items():
        there = others.get(row)
        ratio = here / there if there else 0.0
        worst = max(worst, ratio)
        print(f"{row:70}{here:14,.1f}" + (f"{there:14,.1f}{ratio:8.3f}" if there else ""))
    if arguments:
        print(f"largest ratio: {worst:.3f}, at most {MOST}")
    return int(worst > MOST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
