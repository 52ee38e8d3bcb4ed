"""How many small faults of the core are found: mutants, drawn by a seed and by their keys.

::

    python -m tests.verify.mutants --seed 7 --jobs 2       # 300 of them, half an hour
    python -m tests.verify.mutants --of wire_emit          # of those of one function

The tests of the core that `make test` runs run once on the sound core. One that fails there is left out, and it is
noted which mutants each reaches. A mutant is then given to the tests that reach it, the fastest first, in a forked
child, and to the fuzzer (`tests.verify`) if they find nothing. It is found where a test fails, where the fuzzer has a
finding, where the child dies, and where it takes far longer than the sound core. The sound core goes the same way, and
nothing may be found there.

``equivalents.txt`` has the keys of mutants that no program can tell from the core. They are not drawn.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import MAKE_TEST, plants
from tests.verify.builds import run
from tests.verify.mutants.schemata import mutate
from tests.verify.mutants.source import ROOT, core_sources
from tests.verify.run import search

VARIANT, DRAWN, CALLS = "mutated", 300, 3_000_000
LEAST = 0.80  # share to be found: of those of seed 7 it is 89 %, and a hundred others may have some percent less
HERE = Path(__file__).parent
#: The list of mutants, in the copy of the tree that has them: there this program judges.
MUTANTS = HERE / "mutants.json"
#: Tests of the core, below ``tests/``.
TESTS = (
    *("core", "prefix", "capi", "regressions", "eviction", "adapters", "scheduler"),
    *("verify/test_recorded_runs.py", "verify/test_twin.py"),
)
BY_CLOCK = ("test_capi_speed", "test_scheduler_speed")
SOUND, FUZZER = "sound", "the fuzzer"
MEMORY = 32 << 30  # bytes of address space that a child may have
MOST = 40  # CPU seconds of tests that a mutant is given, as long as they take on the sound core
SLACK = 10  # so many seconds more than on the sound core may a test take, and so many times as long
STUCK = 1800  # seconds after which a child waits for what never comes


def equivalents() -> set[str]:
    """Keys; a line that begins with ``=`` says why, for those below it."""
    lines = (HERE / "equivalents.txt").read_text().splitlines()
    return {line for line in lines if line and line[0] not in "=#"}


# ---- in the build of the mutants: a child for each -----------------------------------------------------------------


def in_child(body: Callable[[Path], bool]) -> tuple[bool, str]:
    """Whether a forked child finds something that does `body`, in a folder of its own; and the file ``said`` there."""
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as name:
        folder, said = Path(name), Path(name, "said")
        if not (child := os.fork()):
            is_found = True
            try:
                os.setsid()
                os.environ["PYTEST_DEBUG_TEMPROOT"] = name
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
                for stream in (1, 2):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
                is_found = body(folder)
            except BaseException:
                said.write_text(traceback.format_exc())
            finally:
                os._exit(is_found)
        deadline = time.monotonic() + STUCK
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
            time.sleep(0.003)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # and what it started
        status = os.waitstatus_to_exitcode(ended[1] if ended[0] else os.waitpid(child, 0)[1])
        text = said.read_text() if said.exists() else ""
    if status < 0:
        why = {signal.SIGPROF: "takes far too long", signal.SIGKILL: "is stuck"}
        text += f": {why.get(-status, f'dies of {signal.Signals(-status).name}')}"
    return status != 0, text


def mutated() -> list[Any]:
    return [importlib.import_module(f"kvpool.{path.stem}") for path in core_sources() if path.suffix == ".pyx"]


def fails(session: pytest.Session, item: pytest.Item) -> bool:
    """Run one test; whether pytest counts a failure."""
    before = session.testsfailed
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
    return session.testsfailed > before


def cpu_seconds() -> float:
    """CPU time of this process and of its children: what else runs on the machine does not count."""
    return sum(os.times()[:4])


def observed(session: pytest.Session, numbers: Sequence[int], calls: int, folder: Path) -> bool:
    """On the sound core: of each test that passes its seconds, and which of the mutants it reached."""
    found, left_out = {}, 0
    for item in session.items:
        for module in mutated():
            module.forget_reached()
        start = cpu_seconds()
        if fails(session, item):
            left_out += 1
            continue
        seconds = cpu_seconds() - start
        reached = [module.mutants_reached() for module in mutated()]
        found[item.nodeid] = (seconds, [n for n in numbers if any(of_module[n] for of_module in reached)])
    start = cpu_seconds()
    search(1, calls=calls)
    (folder / "said").write_text(json.dumps({"tests": found, "left_out": left_out, "fuzz": cpu_seconds() - start}))
    return False


def judged(session: pytest.Session, seconds: dict[str, float], args: argparse.Namespace, folder: Path) -> bool:
    """Tests, the fastest first, and the fuzzer, until one of them finds something; `folder` has its name."""
    chosen, most = [item for item in session.items if item.nodeid in seconds], MOST
    for item in sorted(chosen, key=lambda item: seconds[item.nodeid]):
        most -= seconds[item.nodeid]
        if most < 0:
            break
        (folder / "said").write_text(item.nodeid)
        signal.setitimer(signal.ITIMER_PROF, SLACK + SLACK * seconds[item.nodeid])
        if fails(session, item):
            return True
    (folder / "said").write_text(FUZZER)
    signal.setitimer(signal.ITIMER_PROF, SLACK + SLACK * seconds[FUZZER])
    finding = search(1, calls=args.calls).finding
    (folder / "said").write_text(f"{FUZZER}: {finding}" if finding else "")
    return finding is not None


def with_tests(args: argparse.Namespace, body: Callable[[pytest.Session], None]) -> None:
    """Call `body` with the tests of the core that `make test` runs, but for those that plant a fault of their own."""
    from hypothesis import settings

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(session: pytest.Session) -> bool:
        session.config.pluginmanager.unregister(name="terminalreporter")
        session.items = [item for item in session.items if not plants(item)]
        body(session)
        return True

    settings.register_profile("mutants", database=None)  # what one child finds is not told to the next
    settings.load_profile("mutants")
    plain = [f"-p no:{name}" for name in ("cacheprovider", "xdist", "faulthandler")]
    left_out = [f"--ignore-glob=*/{name}.py" for name in BY_CLOCK]
    chosen = args.tests or [f"tests/{name}" for name in TESTS]
    pytest.main(["-q", "-m", MAKE_TEST, "-o", "timeout=0", *plain, *left_out, *chosen],
                plugins=[SimpleNamespace(pytest_runtestloop=pytest_runtestloop)])  # fmt: skip


def drawn(args: argparse.Namespace) -> list[dict]:
    """The mutants that the seed draws by their keys: a change elsewhere does not change the draw."""
    known = equivalents()
    real = [mutant for mutant in json.loads(MUTANTS.read_text()) if mutant["key"] not in known]
    chosen = [mutant for mutant in real if not args.of or mutant["key"].startswith(f"{args.of}: ")]
    return sorted(chosen, key=lambda mutant: sha256(f"{args.seed} {mutant['key']}".encode()).digest())[: args.mutants]


def try_all(args: argparse.Namespace, session: pytest.Session, into: Path) -> None:
    """A child for each mutant, and one for the sound core, `jobs` at a time; a line about each is added to `into`."""
    mutants = drawn(args)
    numbers = [mutant["number"] for mutant in mutants]
    failed, said = in_child(lambda folder: observed(session, numbers, args.calls, folder))
    if failed:
        raise RuntimeError(f"[mutants] the run on the sound core failed: {said}")
    sound = json.loads(said)
    print(f"{len(sound['tests'])} tests, {sum(took for took, _ in sound['tests'].values()):.0f} s on the sound core "
          f"({sound['left_out']} left out that fail there); the fuzzer {sound['fuzz']:.0f} s", flush=True)  # fmt: skip
    tasks = [{"number": 0, "name": SOUND}]
    tasks += [{"number": m["number"], "name": f"{m['file']}:{m['line']} {m['key']}"} for m in mutants]

    def end_of(task: dict) -> None:
        tests = {name: took for name, (took, reached) in sound["tests"].items()
                 if not task["number"] or task["number"] in reached}  # fmt: skip

        def body(folder: Path) -> bool:
            for module in mutated():
                module.set_mutant(task["number"])
            return judged(session, tests | {FUZZER: sound["fuzz"]}, args, folder)

        found, by = in_child(body)
        with open(into, "a") as results:
            results.write(json.dumps(task | {"found": found, "by": by, "tests": len(tests)}) + "\n")

    for k in range(args.jobs):
        if not os.fork():
            for task in tasks[k :: args.jobs]:
                end_of(task)
            os._exit(0)
    for _ in range(args.jobs):
        os.wait()


def report(ends: Sequence[dict]) -> bool:
    """Print who survives, and the table; whether it holds."""
    mutants = [end for end in ends if end["name"] != SOUND]
    wrong = [end["by"] for end in ends if end["name"] == SOUND and end["found"]]
    survivors = [f"survives {end['tests']} tests and the fuzzer: {end['name']}" for end in mutants if not end["found"]]
    print(*survivors, *(f"NOT SOUND: the core without a mutant fails {by}" for by in wrong), sep="\n")
    found = Counter(end["by"].startswith(FUZZER) for end in mutants if end["found"])
    print("\n| found by | mutants | of |\n|---|---|---|")
    print(f"| the tests of the core that `make test` runs | {found[False]} | {len(mutants)} |")
    print(f"| {FUZZER} of those that are left | {found[True]} | {len(mutants) - found[False]} |")
    print(f"| both | {found.total()} | {len(mutants)} |")
    return not wrong and len(ends) > len(mutants) > 0 and found.total() >= LEAST * len(mutants)


def number(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 if fewer than 80 % are found, or something is found in the sound core."""
    parser = argparse.ArgumentParser(prog="python -m tests.verify.mutants", description=str(__doc__).split("\n")[0])
    parser.add_argument("--mutants", type=number, default=DRAWN, help=f"how many are drawn (default {DRAWN})")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the draw (default: a random one)")
    parser.add_argument("--of", metavar="FUNCTION", default="", help="of the mutants of this function alone")
    parser.add_argument("--jobs", type=number, default=1, help="children at a time (default 1)")
    parser.add_argument("--calls", type=number, default=CALLS, help=f"of the fuzzer for each (default {CALLS:,})")
    parser.add_argument("tests", nargs="*", help="files of tests in place of all that are about the core")
    args = parser.parse_args(argv)
    if not MUTANTS.exists():
        if args.of and not any(mutant.key.startswith(f"{args.of}: ") for mutant in mutate(core_sources())[1]):
            parser.error(f"--of {args.of}: the core has no function of this name with mutants")
        if missing := [name for name in args.tests if not (ROOT / name.partition("::")[0]).exists()]:
            parser.error(f"there is no {missing[0]}")
        print(f"==> seed {args.seed}", flush=True)
        command = ["-m", "tests.verify.mutants", *(sys.argv[1:] if argv is None else argv), f"--seed={args.seed}"]
        return run(VARIANT, command, stdout=None).returncode
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder, "results")
        into.touch()
        with_tests(args, lambda session: try_all(args, session, into))
        return 0 if report([json.loads(line) for line in into.read_text().splitlines()]) else 1


if __name__ == "__main__":
    sys.exit(main())
