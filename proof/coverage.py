"""Lines and branches of the core's nogil functions that its tests reach, counted by gcov.

gcov counts C. Cython writes in front of each piece of C which line of the .pyx or .pxd file it is made of, and where
the code begins that only ends a function. What counts is a line of a nogil function that has C of its own, and each way
out of each condition in that C: one condition of the source may be several (``a and b`` is two, a `max` one more), and
all of them count. An inline function that several modules have compiled counts once, with the sum of their counts.
"""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from proof.builds import ROOT, build, run
from proof.figure import Budget, Figure
from proof.mutation.schemata import NOGIL

NAME = "coverage"
TARGET = "100 % of the lines, >= 95 % of the branches of the core's nogil functions"
COMMAND = "python -m proof coverage"
LEAST_BRANCHES = 0.95
#: Tests of the core; the state machine and the model play a part of it in each.
TESTS = (
    *("test_block_pool", "test_check", "test_cow", "test_dirty_rows", "test_eviction_core", "test_handles"),
    *("test_misuse", "test_out_of_blocks", "test_pending", "test_plan_binding", "test_plan_formats"),
    *("test_blocks_by_name", "test_pool_blocks"),
    *("test_pool_life", "test_prefix_commit", "test_prefix_duplicates", "test_prefix_events"),
    *("test_prefix_eviction", "test_prefix_flush", "test_prefix_lookup", "test_prefix_namespaces"),
    *("test_prefix_pins", "test_prefix_stats", "test_sequence", "test_stats"),
)
#: In front of a piece of C: where it comes from, or that it comes from nowhere.
MARK = re.compile(r'^ */\* (?:"kvpool/(\w+\.p[yx][xd])":(\d+)$|function exit code \*/)|^(?:static|\}|#define)')
Lines = dict[tuple[str, int], int]  # (file, line) -> times run
Branches = dict[tuple[str, int, int], int]  # (file, line, which) -> times taken


def nogil_lines() -> dict[str, dict[int, str]]:
    """File -> line -> nogil function, heads left out."""
    found: dict[str, dict[int, str]] = {}
    for path in sorted((ROOT / "kvpool").glob("_*.p[yx][xd]")):
        if path.stem == "_memory":  # where failures are made
            continue
        text = path.read_text()
        for head in NOGIL.finditer(text):
            number = text.count("\n", 0, head.end()) + 1
            for line in text[head.end() :].splitlines():
                if line and not line.startswith((" ", "\t")):
                    break
                found.setdefault(path.name, {})[number] = head[1]
                number += 1
    return found


WANTED = nogil_lines()


def programs(short: bool) -> list[list[str]]:
    """What runs in the build that counts: tests, and the programs that hunt mutants."""
    tests = [f"tests/{name}.py" for name in TESTS]
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    scenarios = ["-m", "proof.mutation.hunt", "--record-only", "--tapes"]
    return [[*scenarios, "0"]] if short else [[*scenarios, "10"], [*pytest, *tests]]


def counted(arguments: Iterable[list[str]]) -> tuple[Lines, Branches]:
    """Run programs in a build that starts from zero, and read what it counted."""
    folder = build("coverage")
    for path in folder.rglob("*.gcda"):
        path.unlink()
    for argv in arguments:
        done = run("coverage", argv)
        if done.returncode:
            raise RuntimeError(f"[coverage] {argv} failed:\n{done.stdout[-3000:]}{done.stderr[-2000:]}")
    lines: Lines = {}
    branches: Branches = {}
    with tempfile.TemporaryDirectory() as place:
        notes = [str(path) for path in folder.rglob("*.gcda")]
        subprocess.run(["gcov", "-b", "-c", "-j", *notes], cwd=place, check=True, capture_output=True)
        for path in Path(place).glob("*.gcov.json.gz"):
            add(json.loads(gzip.decompress(path.read_bytes())), folder, lines, branches)
    return lines, branches


def origins(source: str) -> dict[int, tuple[str, int]]:
    """Line of C -> (file, line) that Cython made it of."""
    found: dict[int, tuple[str, int]] = {}
    here: tuple[str, int] | None = None
    for number, line in enumerate(source.splitlines(), 1):
        if mark := MARK.match(line):
            here = (mark[1], int(mark[2])) if mark[1] else None
        if here:
            found[number] = here
    return found


def add(report: dict, folder: Path, lines: Lines, branches: Branches) -> None:
    """Sum up what gcov says about one module."""
    for file in report["files"]:
        if not file["file"].startswith("build/cython/kvpool/"):
            continue
        made_of, here = origins((folder / file["file"]).read_text()), Counter()
        for line in sorted(file["lines"], key=lambda line: line["line_number"]):
            place = made_of.get(line["line_number"])
            if place is None or place[1] not in WANTED.get(place[0], ()):
                continue
            lines[place] = lines.get(place, 0) + line["count"]
            for branch in line["branches"]:
                key = (*place, here[place])
                here[place] += 1
                branches[key] = branches.get(key, 0) + branch["count"]


def measured(short: bool, seconds: Callable[[], float], arguments: list[list[str]]) -> Figure:
    """The figure of what some programs reach."""
    lines, branches = counted(arguments)
    missed = [f"{file}:{line} ({WANTED[file][line]})" for (file, line), count in sorted(lines.items()) if not count]
    ways = [
        f"{file}:{line} ({WANTED[file][line]}), way {which}"
        for (file, line, which), count in sorted(branches.items())
        if not count
    ]
    by_line, by_branch = 1 - len(missed) / len(lines), 1 - len(ways) / len(branches)
    least = (0.8, 0.7) if short else (1.0, LEAST_BRANCHES)
    return Figure(
        name=NAME,
        target=TARGET,
        measured=f"{by_line:.2%} of {len(lines)} lines, {by_branch:.1%} of {len(branches)} branches",
        holds=by_line >= least[0] and by_branch >= least[1],
        command=COMMAND,
        seconds=seconds(),
        notes="; ".join([*missed, *ways]) and f"never reached: {'; '.join([*missed, *ways])}",
    )


def measure(budget: Budget) -> Figure:
    """The core's tests."""
    start = time.perf_counter()
    return measured(budget.share < 1, lambda: time.perf_counter() - start, programs(budget.share < 1))


def planted(budget: Budget) -> Figure:
    """Tests that open and close sequences, and no more."""
    start = time.perf_counter()
    code = "import kvpool; pool = kvpool.Pool(16, 4); pool.close(pool.open(7)); pool.shutdown()"
    return measured(budget.share < 1, lambda: time.perf_counter() - start, [["-c", code]])
