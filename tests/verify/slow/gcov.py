"""Lines and branches of the core's functions that programs reach, counted by gcov.

gcov counts C. Cython writes in front of each piece of C which line of which source it is made of. This is what counts:

- A *line* is a statement of a function or a method, whether it has Python objects or not; it is reached when the first
  C of one of its pieces ran. Heads are none (their C reads arguments), nor is what runs at import.
- A *branch* is one way out of a condition that stands in the source. In a nogil function all C is made of the source,
  so each of its ways counts. In the others Cython adds checks of its own after each call (was there memory, was there
  an exception, is this a list). It computes what the source asks into a variable first and then asks nothing else, as
  in ``if (__pyx_t_1) {``, and counts with ``for (__pyx_t_1 = ...``; its own checks ask for something else, end in a
  jump, or guess ``(likely(!__pyx_t_1))`` that it walks a list. So only such C counts, and only where the statement is
  or has an ``if``, a ``while``, an ``and``, an ``or``, or a ``for``.

The same C may be there several times: an inline function in several modules, the end of a ``try`` once for each way
there. It counts once, with the sum of the counts.
"""

from __future__ import annotations

import bisect
import gzip
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.verify.builds import ROOT, build, run
from tests.verify.mutants.source import core_sources, functions, uncommented

#: In front of a piece of C: where it comes from, or that it comes from nowhere.
MARK = re.compile(r'^ */\* (?:"([\w/]+\.p(?:yx|xd|xi))":(\d+)$|function exit code \*/)|^(?:static|\}|#define)')
#: C that asks what the source asks.
ASKS = re.compile(
    r"^\s*(?:\} else )?(?:if \((?:unlikely\(|\(*!?)\(*__pyx_t_\d+\)+ (?:\{|break;)$|for \(__pyx_t_\d+ = .*\{$)"
)
DECIDES = re.compile(r"\b(?:if|elif|while|and|or|for)\b")
Place = tuple[str, int]  # file, line
Lines = Counter[Place]  # -> times run
Branches = Counter[tuple[str, int, str, int]]  # (file, line, C, which) -> times taken


@dataclass(frozen=True, slots=True)
class Statement:
    """One that is counted."""

    function: str
    line: int
    last: int
    nogil: bool
    decides: bool  # a condition stands in it


@cache
def wanted() -> dict[str, list[Statement]]:
    """File -> the statements of its functions, in order; a file is named as Cython names it."""
    found: dict[str, list[Statement]] = {}
    for path in core_sources():
        text = path.read_text()
        for function in functions(path.name, text):
            for line in function.body:
                decides = DECIDES.search(uncommented(text[line.first : line.last])) is not None
                last = line.number + text.count("\n", line.first, line.last)
                one = Statement(function.name, line.number, last, function.nogil, decides)
                found.setdefault(str(path.relative_to(ROOT)), []).append(one)
    return found


def statement_at(place: Place) -> Statement | None:
    """The statement that begins on this line or goes on there."""
    statements = wanted().get(place[0], [])
    at = bisect.bisect_right(statements, place[1], key=lambda one: one.line) - 1
    return statements[at] if at >= 0 and place[1] <= statements[at].last else None


def counted(arguments: Iterable[list[str]], left_out: str = "") -> tuple[Lines, Branches]:
    """Run programs in a build that starts from zero, and read what it counted; `left_out`: a module nobody asks."""
    folder = build("coverage")
    for path in folder.rglob("*.gcda"):
        path.unlink()
    for argv in arguments:
        done = run("coverage", argv)
        if done.returncode:
            raise RuntimeError(f"[gcov] {argv} failed:\n{done.stdout[-3000:]}{done.stderr[-2000:]}")
    lines, branches = Lines(), Branches()
    with tempfile.TemporaryDirectory() as place:
        notes = [str(path) for path in folder.rglob("*.gcno") if path.stem != left_out]
        subprocess.run(["gcov", "-b", "-c", "-j", *notes], cwd=place, check=True, capture_output=True)
        for path in Path(place).glob("*.gcov.json.gz"):
            add(json.loads(gzip.decompress(path.read_bytes())), folder, lines, branches)
    return lines, branches


def pieces(source: str) -> Iterator[tuple[Place, int, list[str]]]:
    """(made of, number of the first line, lines) of each piece of C that is made of a source."""
    here: Place | None = None
    piece: list[str] = []
    first = 0
    for number, line in enumerate([*source.splitlines(), "}"], 1):
        if mark := MARK.match(line):
            if here and piece:
                yield here, first, piece
            here = (mark[1], int(mark[2])) if mark[1] else None
            piece, first = [], number + 1
        else:
            piece.append(line)


def add(report: dict, folder: Path, lines: Lines, branches: Branches) -> None:
    """Sum up what gcov says about one module."""
    for file in report["files"]:
        if not file["file"].startswith("build/cython/"):
            continue
        at: dict[int, list[dict]] = {}
        for line in file["lines"]:
            at.setdefault(line["line_number"], []).append(line)
        source = (folder / file["file"]).read_text()
        for place, first, piece in pieces(source):
            statement = statement_at(place)
            if statement is None:
                continue
            ran = [found for number in range(first, first + len(piece)) for found in at.get(number, ())]
            if not ran:
                continue
            key = (place[0], statement.line)
            lines[key] += ran[0]["count"]
            asked = [number for number, text in enumerate(piece, first) if statement.nogil or ASKS.match(text)]
            ways = [way["count"] for number in asked for found in at.get(number, ()) for way in found["branches"]]
            alike = re.sub(r"__pyx_\w+", "_", "".join(piece))
            for which, count in enumerate(ways if statement.nogil or statement.decides else ()):
                branches[(*key, alike, which)] += count


@dataclass(frozen=True, slots=True)
class Coverage:
    """Shares of lines and branches that were reached, and what was not: ``file:line (function)``."""

    lines: float
    branches: float
    uncounted: list[str]  # files of which nothing was counted
    missed: list[str]
    one_way: list[str]


def coverage(arguments: Iterable[list[str]], left_out: str = "") -> Coverage:
    """What some programs reach."""
    lines, branches = counted(arguments, left_out)
    named = {(file, one.line): one.function for file, ones in wanted().items() for one in ones}
    ways: Counter[Place] = Counter((file, line) for (file, line, *_), count in branches.items() if not count)

    def told(place: Place) -> str:
        return f"{place[0]}:{place[1]} ({named[place]})"

    missed = [place for place, count in sorted(lines.items()) if not count]
    return Coverage(
        lines=1 - len(missed) / len(lines),
        branches=1 - ways.total() / len(branches),
        uncounted=sorted(file for file in wanted() if not any(place[0] == file for place in lines)),
        missed=[told(place) for place in missed],
        one_way=[f"{told(place)}, {count} ways" for place, count in sorted(ways.items()) if lines[place]],
    )
