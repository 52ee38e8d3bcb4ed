"""Fuzzing somebody else's backend: random engines, each answer beside dense attention, then the conformance kit.

Whatever the backend raises is a finding. Turns of an engine draw independently of each other, so a run that fails
shrinks to the fewest turns that still do.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields

from kvpool.config import KVSpec
from kvpool.testing import conformance
from kvpool.testing.engine import RandomEngine
from kvpool.testing.filled import Factory, NotApplicable, specs
from kvpool.testing.minimal import minimal

TURNS = 20  # of one engine


@dataclass(slots=True)
class BackendReport:
    """What a hunt on a foreign backend did, and found; `calls` are turns of engines, those of shrinking left out.

    `script_fails`: the test in `script` failed when it was tried; else the backend fails only sometimes.
    """

    runs: int = 0
    calls: int = 0
    seconds: float = 0.0
    finding: str | None = None
    seed: int | None = None
    script: str = ""
    script_fails: bool = False
    cases: dict[str, str] = field(default_factory=dict)


def _told(error: Exception) -> str:
    if isinstance(error, AssertionError):
        return str(error) or "an assert without a message failed"
    return f"exception: {type(error).__name__}: {error}"


def _script(source: str, imports: str, what: str, call: str) -> str:
    """A test that makes the call on the backend."""
    lines, _, _ = source.rpartition("\n")
    comment = "\n".join(f"    # {line}" for line in what.splitlines())
    return f"{lines}\n{imports}\n\n\ndef test_fuzz_backend():\n{comment}\n    {call}\n"


class _Run:
    """The engine of a seed: any of its turns can be left out."""

    def __init__(self, factory: Factory, offered: list[KVSpec], seed: int, num_blocks: int | None) -> None:
        self.factory, self.seed, self.num_blocks = factory, seed, num_blocks
        self.spec = random.Random(seed).choice(offered)

    def play(self, turns: list[int]) -> tuple[int, Exception | None]:
        """Play some turns; returns how many were begun, and what was raised."""
        engine = None
        try:
            engine = RandomEngine(self.factory, self.spec, self.seed, num_blocks=self.num_blocks)
            engine.play(turns)
        except Exception as error:  # a backend may fail with anything
            return engine.num_turns if engine else 0, error
        return engine.num_turns, None

    def convict(self, report: BackendReport, first: Exception, source: str) -> None:
        """Fill in the finding: the fewest turns that raise the same kind of exception."""

        def fails(tried: list[int]) -> bool:
            return type(self.play(tried)[1]) is type(first)

        turns = minimal(list(range(TURNS)), fails)
        error = self.play(turns)[1]
        report.script_fails = type(error) is type(first)
        if error is None or not report.script_fails:
            turns, error = list(range(TURNS)), first
        report.finding = _told(error)
        expression = source.rpartition("\n")[2]
        sizes = f", num_blocks={self.num_blocks}" if self.num_blocks else ""
        imports = "from kvpool.config import KVSpec\nfrom kvpool.testing.engine import RandomEngine"
        given = ((part.name, getattr(self.spec, part.name), part.default) for part in fields(self.spec))
        spec = ", ".join(f"{name}={value!r}" for name, value, usual in given if value != usual)
        call = f"RandomEngine({expression}, KVSpec({spec}), {self.seed}{sizes}).play({turns})"
        report.script = _script(source, imports, report.finding, call)


def _conform(report: BackendReport, factory: Factory, source: str) -> None:
    """The conformance kit, case by case."""
    told, failed = [], []
    for case in conformance.CASES:
        try:
            report.cases |= conformance.check_backend(factory, [case])
        except AssertionError as error:
            report.cases[case.__name__] = "failed"
            told.append(str(error).partition("\n")[2])
            failed.append(case)
    if not failed:
        return
    head = f"{len(failed)} of {len(conformance.CASES)} cases of the conformance kit failed"
    report.finding = "\n".join([head, *told])
    expression, case = source.rpartition("\n")[2], failed[0]
    imports = f"from {case.__module__} import {case.__name__}"
    report.script = _script(source, imports, told[0], f"{case.__name__}({expression})")
    try:
        case(factory)
    except Exception:  # whatever it is: the case fails once more, so the script will
        report.script_fails = True


def hunt_backend(
    factory: Factory,
    seed: int = 1,
    *,
    source: str = "factory",
    calls: int | None = None,
    seconds: float | None = None,
    num_blocks: int | None = None,
    block_size: int | None = None,
    told: Callable[[BackendReport], None] | None = None,
) -> BackendReport:
    """Random engines on backends of ``factory(spec, num_blocks)`` until one fails, then the conformance kit.

    Returns a report whose `finding` is None, or says what is wrong, with the shortest test found in `script`. The first
    run is that of `seed`, so the report's `seed` and ``calls=1`` repeat the run that failed.

    Raises
    ------
    ValueError
        There is no spec to try: the backend has no blocks of `block_size` tokens.
    """
    report, rng, began = BackendReport(seed=seed), random.Random(seed), time.monotonic()
    try:
        offered = list(specs(factory, block_sizes=(block_size or 8,)))
    except NotApplicable:
        offered = []
    except Exception as refused:
        report.finding = _told(refused)
        return report
    if block_size:
        offered = [spec for spec in offered if spec.block_size == block_size]
    if not offered:
        raise ValueError(f"the backend accepts no spec of block_size {block_size or 8}")
    while True:
        run = _Run(factory, offered, rng.getrandbits(31) if report.runs else seed, num_blocks)
        turns, error = run.play(list(range(TURNS)))
        report.runs, report.calls = report.runs + 1, report.calls + turns
        report.seconds = time.monotonic() - began
        if told:
            told(report)
        if error is not None:
            report.seed = run.seed
            run.convict(report, error, source)
            return report
        if (calls and report.calls >= calls) or (seconds and report.seconds >= seconds):
            break
    _conform(report, factory, source)
    report.seconds = time.monotonic() - began
    return report
