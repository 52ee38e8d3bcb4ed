"""Fuzzing somebody else's backend: random engines, each answer beside dense attention, then the conformance kit.

Whatever the backend raises is a finding. Turns of an engine draw independently of each other, so a run that fails
shrinks to the fewest turns that still do.
"""

from __future__ import annotations

import random
import time
from dataclasses import fields
from typing import Any

from kvpool.config import KVSpec
from kvpool.testing import conformance
from kvpool.testing.engine import RandomEngine
from kvpool.testing.filled import Factory, NotApplicable, specs
from kvpool.testing.fuzz_target import TargetFinding, TargetReport, Word, as_test, fuzz

TURNS = 20  # of one engine; each is a word of a program


class BackendFinding(TargetFinding):
    """Whatever a backend raised; `kind` is the type."""

    def __init__(self, error: Exception) -> None:
        super().__init__("exception", f"{type(error).__name__}: {error}")
        self.kind = type(error).__name__
        if isinstance(error, AssertionError):
            self.args = (str(error) or "an assert without a message failed",)


class BackendRun:
    """The engine of a seed: any of its turns can be left out. For `kvpool.testing.fuzz_target.fuzz`."""

    def __init__(self, factory: Factory, spec: KVSpec, seed: int, num_blocks: int | None, source: str) -> None:
        self.factory, self.spec, self.seed, self.num_blocks, self.source = factory, spec, seed, num_blocks, source

    def words(self) -> list[Word]:
        """All turns."""
        return [(turn, 0, 0, 0) for turn in range(TURNS)]

    def play(self, words: list[Word]) -> int:
        """Play some turns; returns how many."""
        try:
            engine = RandomEngine(self.factory, self.spec, self.seed, num_blocks=self.num_blocks)
            engine.play(turn for turn, *_ in words)
        except Exception as error:  # a backend may fail with anything
            raise BackendFinding(error) from error
        return len(words)

    def script(self, words: list[Word], what: str) -> str:
        """A test that plays these turns."""
        expression = self.source.rpartition("\n")[2]
        sizes = f", num_blocks={self.num_blocks}" if self.num_blocks else ""
        imports = "from kvpool.config import KVSpec\nfrom kvpool.testing.engine import RandomEngine"
        given = ((part.name, getattr(self.spec, part.name), part.default) for part in fields(self.spec))
        spec = ", ".join(f"{name}={value!r}" for name, value, usual in given if value != usual)
        turns = [turn for turn, *_ in words]
        call = f"RandomEngine({expression}, KVSpec({spec}), {self.seed}{sizes}).play({turns})"
        return as_test("backend", self.source, imports, what, [call])


def _conform(report: TargetReport, factory: Factory, source: str) -> None:
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
    report.script = as_test("backend", source, imports, told[0], [f"{case.__name__}({expression})"])
    try:
        case(factory)
    except Exception:  # whatever it is: the case fails once more, so the script will
        report.script_fails = True


def fuzz_backend(
    factory: Factory,
    seed: int = 1,
    *,
    source: str = "factory",
    num_blocks: int | None = None,
    block_size: int | None = None,
    **until: Any,
) -> TargetReport:
    """Random engines on backends of ``factory(spec, num_blocks)`` until one fails, then the conformance kit.

    Returns a report whose `finding` is None, or says what is wrong, with the shortest test found in `script`; its
    `calls` are turns of engines. The first run is that of `seed`, so the report's `seed` and ``calls=1`` repeat the run
    that failed. `until` says when to stop, and who is told: see `kvpool.testing.fuzz_target.fuzz`.

    Raises
    ------
    ValueError
        There is no spec to try: the backend has no blocks of `block_size` tokens.
    """
    began = time.monotonic()
    try:
        offered = list(specs(factory, block_sizes=(block_size or 8,)))
    except NotApplicable:
        offered = []
    except Exception as refused:
        return TargetReport(seed=seed, finding=str(BackendFinding(refused)))
    if block_size:
        offered = [spec for spec in offered if spec.block_size == block_size]
    if not offered:
        raise ValueError(f"the backend accepts no spec of block_size {block_size or 8}")

    def make_run(run_seed: int) -> BackendRun:
        return BackendRun(factory, random.Random(run_seed).choice(offered), run_seed, num_blocks, source)

    report = fuzz(make_run, seed, **until)
    if report.finding is None:
        report.seed = seed
        _conform(report, factory, source)
    report.seconds = time.monotonic() - began
    return report
