"""Planted faults, each of which the fuzzer has to find.

A canary is a change to the text of the core. All are compiled into one copy of the tree (`tests.verify.builds`), where
`kvpool._core._plant(number)` switches one on: number 0 is the core as it is. `?` in a text stands for "this one is on".
They are bugs of other allocators, and bugs that this one has had.

::

    python -m tests.verify --canaries            # fault, calls, seconds, and what was found
"""

from __future__ import annotations

import re
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import kvpool
from kvpool.cli.console import CommandError
from tests.verify import builds, run
from tests.verify.twin import WORDS_PER_RUN as WORDS_BESIDE_MODEL
from tests.verify.twin import Twin

CALLS_MAX = 1_000_000
#: It changes an order in which things leave, and no content: the plain model finds it.
OF_THE_MODEL = (
    "checkpoint outlives its keys", "kept unit leaves at its turn", "directive ends with the node at which it ended"
)  # fmt: skip
SECONDS_MAX = 20  # of the processor; a core with a fault may never end
SEED = 844
HEAD = """
cdef int kv_planted = 0


def _plant(int number):
    global kv_planted
    kv_planted = number


"""
Edit = tuple[str, str, str]  #: file of the core, text that stands there once, text in its place


@dataclass(frozen=True)
class Canary:
    """A fault, by what goes wrong."""

    name: str
    edits: tuple[Edit, ...]


def read_canaries(text: str) -> tuple[Canary, ...]:
    """The canaries of a text: ``== name``, ``@@ file``, lines that stand there (-) and those in their place (+)."""
    found: list[Canary] = []
    for block in re.split(r"^== ", text, flags=re.MULTILINE)[1:]:
        name, _, rest = block.partition("\n")
        edits: list[Edit] = []
        for part in re.split(r"^@@ ", rest, flags=re.MULTILINE)[1:]:
            file, *lines = part.rstrip("\n").split("\n")
            sides = ["\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+"]
            edits.append((file, sides[0], sides[1]))
        found.append(Canary(name, tuple(edits)))
    return tuple(found)


CANARIES = read_canaries((builds.ROOT / "tests" / "verify" / "canaries.txt").read_text())


def planted() -> dict[Path, str]:
    """Path of a file of the core -> its text with all canaries in it."""
    texts = {path.stem: path.read_text() for path in (builds.ROOT / "kvpool" / "core").glob("*.pxi")}
    for number, canary in enumerate(CANARIES, 1):
        for file, before, after in canary.edits:
            times = texts[file].count(before)
            if times != 1:
                raise CommandError(f"canary {canary.name!r}: {file}.pxi has {before!r} {times} times, not once")
            texts[file] = texts[file].replace(before, after.replace("?", f"(kv_planted == {number})"))
    core, first = Path("kvpool/_core.pyx"), 'include "core/memory.pxi"'
    made = {core: (builds.ROOT / core).read_text().replace(first, HEAD + first)}
    return made | {Path("kvpool", "core", f"{file}.pxi"): text for file, text in texts.items()}


@dataclass(frozen=True)
class Result:
    """How the search for a canary went: `finding` is empty if nothing was found."""

    name: str
    calls: int
    seconds: float
    finding: str


def find(name: str, by_model: bool = False) -> Result:
    """Search for one canary of the copy in a process of its own."""
    number = [canary.name for canary in CANARIES].index(name) + 1
    command = [sys.executable, "-m", "tests.verify.canaries", str(number), *["model"] * by_model]
    where = {"cwd": builds.folder_of("canaries"), "env": builds.environment("canaries")}
    done = subprocess.run(command, **where, capture_output=True, text=True)
    if done.returncode > 0:
        raise RuntimeError(f"[canaries] {name}: {done.stderr}")
    made, used, finding = done.stdout.splitlines()[-1].split("\t")
    if done.returncode:
        how = "does not end" if done.returncode == -signal.SIGXCPU else f"died of signal {-done.returncode}"
        finding = f"the process {how} in the run that follows"
    return Result(name, int(made), float(used), finding)


def show(names: list[str], by_model: bool) -> int:
    """Print the table of canaries; 0 if each was found. By the model: those of the model, unless others are named."""
    known = [canary.name for canary in CANARIES]
    for name in names:
        if name not in known:
            raise CommandError(f"--canaries {name!r}: there is none of this name, they are {', '.join(known)}")
    builds.build("canaries")
    print("| fault | calls | seconds | found |\n|---|---|---|---|")
    missed = 0
    names = names or [name for name in known if (name in OF_THE_MODEL) == by_model]
    with ThreadPoolExecutor(2) as two:
        for result in two.map(partial(find, by_model=by_model), names):
            missed += not result.finding
            found = result.finding or "NOTHING"
            print(f"| {result.name} | {result.calls:,} | {result.seconds:.1f} | {found} |", flush=True)
    return 1 if missed else 0


def main() -> None:
    """In the copy: plant one, search, and say how it went."""
    from kvpool import _core

    number, *by_model = sys.argv[1:]
    _core._plant(int(number))
    seconds = SECONDS_MAX * (4 if by_model else 1)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    began = time.process_time()

    def told(report: run.Report) -> None:
        used = time.process_time() - began
        print(report.calls, f"{used:.2f}", report.finding or "", sep="\t", flush=True)

    told(run.Report())
    make_pool, length = (Twin, WORDS_BESIDE_MODEL) if by_model else (kvpool.Pool, run.WORDS_PER_RUN)
    run.search(SEED, calls=CALLS_MAX, words=length, make_pool=make_pool, told=told)


if __name__ == "__main__":
    main()
