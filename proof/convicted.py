"""How much of what can be wrong `make test` alone convicts: ``python -m proof.convicted``.

Three shares. Of mutants of the core, drawn by a seed and by their keys, so that a change elsewhere leaves the draw
(`proof.mutation`; equivalents are no mutants here). Of the pools of `proof.fuzz._broken`, each in turn the installed
one. Of the faults that tests plant themselves: those whose tests `make test` runs. The first two are given to the
folders of tests that are about the core.

These tests run once on the sound core: one that fails there is left out, and it is noted which mutants each reaches.
A mutant is then given to the tests that reach it, the fastest first, in a forked child. It is convicted where a test
fails by pytest's count, where the child dies, and where it takes far longer than it should. The sound core and the
sound pool go the same way, and must convict nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from proof.mutation.equivalents import EQUIVALENTS
from proof.mutation.source import core_sources
from tests.conftest import plants
from tests.verify.builds import ROOT, run

VARIANT, DRAWN, LEAST = "mutants-plain", 300, 0.90
FOLDERS = ("core", "prefix", "capi", "regressions", "eviction", "adapters", "scheduler", "proof")
#: Files that compile copies of the tree, judge by the clock, or take minutes.
LEFT_OUT = (
    *("test_builds", "test_capi_speed", "test_scheduler_speed"),
    *("test_fuzz_machine", "test_fuzz_prefix", "test_fuzz_target"),
)
SOUND = "sound"
MEMORY = 32 << 30  # bytes of address space that a child may have
MOST = 30  # CPU seconds of tests that a fault is given, as long as they take on the sound core
SLACK = 10  # so many seconds more than on the sound core may a test take, and so many times as long
PASSED, FAILED, ENDED = 0, 1, ("survives", "convicted", "fails to run")  # exit codes of a child, and what they say


# ---- in the build of the mutants: a child for each fault ---------------------------------------------------------


def in_child(body: Callable[[Path], int], limit: float) -> tuple[str, str]:
    """How a forked child ends that does `body`, in a folder of its own, and what stands in ``said`` there."""
    folder = Path(tempfile.mkdtemp(prefix="convicted-"))
    child = os.fork()
    if not child:
        status = 2
        try:
            os.setsid()
            os.environ["PYTEST_DEBUG_TEMPROOT"] = str(folder)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            status = body(folder)
        except BaseException:
            (folder / "said").write_text(traceback.format_exc())
        finally:
            os._exit(status)
    deadline = time.monotonic() + limit
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.003)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # and what it started
    status = os.waitstatus_to_exitcode(ended[1] if ended[0] else os.waitpid(child, 0)[1])
    said = (folder / "said").read_text() if (folder / "said").exists() else ""
    shutil.rmtree(folder, ignore_errors=True)
    if not ended[0] or status == -signal.SIGPROF:
        return "hangs", said
    return ENDED[status] if status >= 0 else f"dies of {signal.Signals(-status).name}", said


def fails(session: pytest.Session, item: pytest.Item) -> bool:
    """Run one test; whether pytest counts a failure."""
    before = session.testsfailed
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
    return session.testsfailed > before


def mutated() -> list[Any]:
    """The modules that have mutants."""
    return [importlib.import_module(f"kvpool.{path.stem}") for path in core_sources() if path.suffix == ".pyx"]


def cpu_seconds() -> float:
    """CPU time of this process and of its children: what else runs on the machine does not count."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def observed(session: pytest.Session, numbers: Sequence[int], folder: Path) -> int:
    """Run all tests on the sound core; of each that passes its seconds, and which of the mutants it reached."""
    found = {}
    items = [item for item in session.items if not plants(item)]
    for item in items:
        for module in mutated():
            module.forget_reached()
        start = cpu_seconds()
        if not fails(session, item):
            seconds = cpu_seconds() - start
            reached = [module.mutants_reached() for module in mutated()]
            found[item.nodeid] = (seconds, [n for n in numbers if any(of_module[n] for of_module in reached)])
    (folder / "said").write_text(json.dumps({"passed": found, "failed": len(items) - len(found)}))
    return PASSED


def judged(session: pytest.Session, seconds: dict[str, float], most: float, folder: Path) -> int:
    """The exit code of pytest after these tests, the fastest first, until one fails; they may take `most` seconds."""
    chosen = [item for item in session.items if item.nodeid in seconds]
    for item in sorted(chosen, key=lambda item: seconds[item.nodeid]):
        most -= seconds[item.nodeid]
        if most < 0:
            break
        (folder / "said").write_text(item.nodeid)
        signal.setitimer(signal.ITIMER_PROF, SLACK + SLACK * seconds[item.nodeid])
        if fails(session, item):
            return FAILED
    (folder / "said").unlink(missing_ok=True)
    return PASSED


class Loop:
    """What is done with the tests that were collected, in place of running them."""

    def __init__(self, body: Callable[[pytest.Session], Any]) -> None:
        self.body = body
        self.made: Any = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Do it."""
        session.config.pluginmanager.unregister(name="terminalreporter")
        self.made = self.body(session)
        return True


def with_tests(args: argparse.Namespace, body: Callable[[pytest.Session], Any]) -> Any:
    """What `body` makes of the tests of the core that `make test` runs."""
    from hypothesis import settings

    settings.register_profile("convicted", database=None)  # what one child finds is not told to the next
    settings.load_profile("convicted")
    plain = [f"-p no:{name}" for name in ("cacheprovider", "xdist", "faulthandler")]
    chosen = args.tests or [f"tests/{name}" for name in FOLDERS]
    left_out = [f"--ignore-glob=*/{name}.py" for name in LEFT_OUT]
    loop = Loop(body)
    pytest.main(["-q", "-m", "not long and not slow", "-o", "timeout=0", *plain, *left_out, *chosen], plugins=[loop])
    return loop.made


def install(fault: str) -> None:
    """Have a pool with a planted bug wherever kvpool's own is known by name, before a test is imported."""
    import kvpool.eviction
    import kvpool.scheduler
    from proof.fuzz import _broken

    sound, every = kvpool.Pool, sorted({method for methods, *_ in _broken.FAULTS.values() for method in methods})
    _broken.FAULTS[SOUND] = (every, None, None, None)
    pool = _broken.broken(fault)
    del _broken.FAULTS[SOUND]
    for module in set(sys.modules.values()) - {kvpool._core}:  # compiled modules ask it for the C type
        for name, value in list(vars(module).items()):
            if value is sound:
                setattr(module, name, pool)


def share_out(tasks: Sequence[tuple[dict, Callable[[Path], int], float]], args: argparse.Namespace) -> None:
    """Each task in a child, `jobs` of them at a time; a line about each is added to the results."""
    workers = []
    for k in range(args.jobs):
        if not (worker := os.fork()):
            for named, body, limit in tasks[k :: args.jobs]:
                start = time.perf_counter()
                end, said = in_child(body, limit)
                line = named | {"end": end, "by": said, "seconds": round(time.perf_counter() - start, 1)}
                with open(args.into, "a") as results:
                    results.write(json.dumps(line) + "\n")
            os._exit(0)
        workers.append(worker)
    for worker in workers:
        os.waitpid(worker, 0)


def sound_run(body: Callable[[Path], int], args: argparse.Namespace, kind: str) -> dict[str, tuple[float, list[int]]]:
    """The tests that pass on the sound core: name -> (seconds, mutants reached)."""
    end, said = in_child(body, 1800)
    if end != ENDED[PASSED]:
        raise RuntimeError(f"[convicted] the run on the sound core {end}: {said}")
    found = json.loads(said)
    with open(args.into, "a") as results:
        passed = found["passed"]
        facts = {"passed": len(passed), "failed": found["failed"], "took": sum(took for took, _ in passed.values())}
        results.write(json.dumps({"kind": kind} | facts) + "\n")
    return {} if args.blind else found["passed"]


def try_mutants(args: argparse.Namespace, session: pytest.Session) -> None:
    """A child for each mutant, and one for the sound core, which is number 0."""
    every = json.loads((ROOT / "proof/mutants.json").read_text())
    real = [mutant for mutant in every if mutant["key"] not in EQUIVALENTS]
    drawn = sorted(real, key=lambda mutant: sha256(f"{args.seed} {mutant['key']}".encode()).digest())[: args.mutants]
    numbers = [mutant["number"] for mutant in drawn]
    passed = sound_run(lambda folder: observed(session, numbers, folder), args, "mutant")

    def task(mutant: dict) -> tuple[dict, Callable[[Path], int], float]:
        number = mutant["number"]
        seconds = {name: took for name, (took, reached) in passed.items() if not number or number in reached}

        def body(folder: Path) -> int:
            for module in mutated():
                module.set_mutant(number)
            return judged(session, seconds, args.most, folder)

        where = f"{mutant['file']}:{mutant['line']} {mutant['key']}" if number else SOUND
        named = {"kind": "mutant", "name": where, "aside": mutant.get("aside", ""), "tests": len(seconds)}
        return named, body, 60 + 4 * args.most

    share_out([task(mutant) for mutant in [*drawn, {"number": 0}]], args)


def try_pools(args: argparse.Namespace) -> None:
    """A child for each pool with a planted bug, and one for the pool with none; each imports the tests anew."""

    def body_of(fault: str, look: Callable[[pytest.Session, Path], int]) -> Callable[[Path], int]:
        def body(folder: Path) -> int:
            install(fault)
            return with_tests(args, lambda session: look(session, folder))

        return body

    from proof.fuzz._broken import FAULTS

    passed = sound_run(body_of(SOUND, lambda session, folder: observed(session, [], folder)), args, "pool")
    seconds = {name: took for name, (took, _) in passed.items()}

    def task(fault: str) -> tuple[dict, Callable[[Path], int], float]:
        body = body_of(fault, lambda session, folder: judged(session, seconds, args.most, folder))
        return {"kind": "pool", "name": fault, "tests": len(seconds)}, body, 120 + 4 * args.most

    share_out([task(fault) for fault in [*list(FAULTS)[: args.pools], SOUND]], args)


# ---- the table ---------------------------------------------------------------------------------------------------


class Census:
    """Tests that plant a fault: name -> whether only `make test-all` runs it.

    Seeds and instruction sets of one fault count once.
    """

    def __init__(self) -> None:
        self.found: dict[tuple, bool] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Look at all tests."""
        for item in session.items:
            if plants(item):
                params = item.callspec.params if hasattr(item, "callspec") else {}
                told = tuple((name, repr(value)) for name, value in params.items() if name not in ("seed", "isa"))
                key = (str(item.path.relative_to(ROOT)), item.originalname, told)
                is_long = item.get_closest_marker("long") is not None
                self.found[key] = is_long and self.found.get(key, True)


def census() -> dict[tuple, bool]:
    """Faults that tests plant -> whether they are left to `make test-all`."""
    counted = Census()
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(ROOT)], plugins=[counted])
    return counted.found


def table(lines: Sequence[dict], planted: dict[tuple, bool]) -> Iterator[tuple[str, int, int]]:
    """The rows: (what is wrong, how many convicted, of how many)."""
    for kind, what in (("mutant", "mutants of the core"), ("pool", "faulty pools, installed")):
        ends = [line["end"] for line in lines if line["kind"] == kind and "end" in line and line["name"] != SOUND]
        if ends:
            yield what, len(ends) - ends.count(ENDED[PASSED]), len(ends)
    if planted:
        yield "faults that tests plant", len(planted) - sum(planted.values()), len(planted)


def report(lines: Sequence[dict], planted: dict[tuple, bool]) -> bool:
    """Print the table and who survives; whether all of it holds."""
    ends = [line for line in lines if "end" in line]
    for line in lines:
        if "passed" in line:
            print(f"{line['kind']}: {line['passed']} tests in {line['took']:.0f} s on the sound core, "
                  f"{line['failed']} left out that fail there")  # fmt: skip
    for line in ends:
        if line["end"] == ENDED[PASSED] and line["name"] != SOUND:
            print(f"survives {line['tests']} tests: {line['name']} {line.get('aside', '')}".rstrip())
    for (file, name, _), count in Counter((*key[:2], "") for key, long in planted.items() if long).items():
        print(f"left to make test-all: {count} of {file}::{name}")
    wrong = [line for line in ends if line["name"] == SOUND and line["end"] != ENDED[PASSED]]
    wrong += [line for line in ends if line["end"] == ENDED[2]]
    for line in wrong:
        print(f"NOT SOUND: {line['kind']} {line['name']} {line['end']} {line['by']}")
    print("ends: " + ", ".join(f"{n} {end}" for end, n in Counter(line["end"] for line in ends).most_common()))
    rows = list(table(lines, planted))
    print("\n| wrong | convicted by `make test` | of | share |\n|---|---|---|---|")
    for what, convicted, of in rows:
        print(f"| {what} | {convicted} | {of} | {convicted / of:.1%} |")
    return bool(rows) and not wrong and all(convicted >= LEAST * of for _, convicted, of in rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 if a share is below 90 %, or something sound is convicted."""
    parser = argparse.ArgumentParser(prog="python -m proof.convicted", description=__doc__.split("\n")[0])
    parser.add_argument("--mutants", type=int, default=DRAWN, help=f"how many are drawn (default {DRAWN})")
    parser.add_argument("--pools", type=int, help="how many of the faulty pools (default all)")
    parser.add_argument("--seed", type=int, help="of the draw (default: a random one)")
    parser.add_argument("--jobs", type=int, default=1, help="children at a time (default 1)")
    parser.add_argument("--most", type=float, default=MOST, help=f"seconds of tests for each (default {MOST})")
    parser.add_argument("--blind", action="store_true", help="run no test: nothing may be convicted")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("tests", nargs="*", help="files of tests in place of all that are about the core")
    args = parser.parse_args(argv)
    args.seed = random.randrange(10**6) if args.seed is None else args.seed
    if args.into is None:
        return measured(args, list(sys.argv[1:] if argv is None else argv))
    if args.pools != 0:
        try_pools(args)
    if args.mutants:
        with_tests(args, lambda session: try_mutants(args, session))
    return 0


def measured(args: argparse.Namespace, argv: list[str]) -> int:
    """Run this program in the build of the mutants; print what comes of it."""
    print(f"==> seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder, "results")
        more = [f"--seed={args.seed}", f"--into={into}", *argv]
        done = run(VARIANT, ["-m", "proof.convicted", *more])
        if done.returncode:
            raise RuntimeError(f"[convicted] the run failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        lines = [json.loads(line) for line in into.read_text().splitlines()]
    return 0 if report(lines, {} if args.tests else census()) else 1


if __name__ == "__main__":
    sys.exit(main())
