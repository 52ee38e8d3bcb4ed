"""Runs of random programs until one finds something, and the shortest program that still does."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import kvpool
from kvpool.testing.fuzz_target import Word, minimal, runs_of, smaller_numbers
from tests.verify._verify import Run
from tests.verify.words import WORDS, Shape, shape_of

WORDS_PER_RUN = 3_000


@dataclass
class Report:
    """What a search has seen. `finding` is None, or says what is wrong in the run of `seed`."""

    seed: int | None = None
    runs: int = 0
    calls: int = 0
    seconds: float = 0.0
    finding: str | None = None
    place: int = -1  # of the word at which it was found; the number of words: at the end
    words: Counter[str] = field(default_factory=Counter)
    met: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Shrunk:
    """The shortest program found that fails in the same way, and the calls it makes."""

    finding: str
    words: list[Word]
    calls: list[str]


def kind_of(finding: str) -> str:
    """What is wrong, without its numbers."""
    return re.sub(r"-?\d+", "#", finding)[:60]


def finding_of(run: Callable[[], None]) -> str | None:
    """What is wrong, if something is."""
    try:
        run()
    except Exception as error:  # a pool that is wrong may fail with anything
        return str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
    return None


def whole(pool: Any, shape: Shape, words: int, trace: list[Any] | None = None) -> str | None:
    """Make a run on a pool that has the options of its shape, and leave it open. Returns what is wrong."""
    return finding_of(lambda: Run(shape, lambda **options: pool, trace).run(words))


def search(
    seed: int,
    *,
    without: Iterable[str] = (),
    words: int = WORDS_PER_RUN,
    make_pool: Callable[..., Any] = kvpool.Pool,
    running: Any = None,
    **until: Any,
) -> Report:
    """Run after run until one finds something, or so many calls or seconds are through: see `runs_of`.

    The first run is that of `seed`, so the report's `seed` and ``calls=1`` repeat the run that failed. A run is made
    whole, of so many `words`. `without` names words that no program has. ``running.value`` is the seed of
    the run that is made, 0 afterwards.
    """
    report, left_out = Report(), tuple(without)
    running = SimpleNamespace() if running is None else running
    for running.value in runs_of(report, seed, **until):
        run = Run(shape_of(running.value, left_out), make_pool)
        report.finding = finding_of(lambda run=run: run.run(words))  # type: ignore[misc]
        report.place = run.place
        said, met = run.facts()
        report.words.update(said)
        report.met.update(met)
        report.calls += met["calls"]
        run.shutdown()
    running.value = 0
    return report


def play(shape: Shape, words: list[Word], make_pool: Callable[..., Any] = kvpool.Pool) -> tuple[str | None, list[str]]:
    """Play a program, and check after every word. Returns what is wrong, and the calls that were made."""
    trace: list[str] = []
    run = Run(shape, make_pool, trace)
    finding = finding_of(lambda: run.replay(words))
    run.shutdown()
    return finding, trace


def shrink(shape: Shape, place: int, make_pool: Callable[..., Any] = kvpool.Pool) -> Shrunk | None:
    """Cut the program of a run that failed; None: it does not fail by the methods of Python."""
    run = Run(shape, make_pool)
    words = run.words(min(place + 1, WORDS_PER_RUN))
    run.shutdown()
    first, _ = play(shape, words, make_pool)
    if first is None:
        return None

    def fails(tried: list[Word]) -> bool:
        finding, _ = play(shape, tried, make_pool)
        return finding is not None and kind_of(finding) == kind_of(first)

    words = smaller_numbers(minimal(words, fails), fails)
    finding, calls = play(shape, words, make_pool)
    return Shrunk(finding or first, words, calls)


def as_test(seed: int, without: tuple[str, ...], shrunk: Shrunk, by_model: bool = False) -> str:
    """A test that plays a program. `by_model`: beside the model."""
    calls = "".join(f"    # {line}\n" for line in shrunk.calls)
    words = "".join(f"        {word},  # {WORDS[word[0]]}\n" for word in shrunk.words)
    left_out = f", {without!r}" if without else ""
    return (
        "from tests.verify.run import play\n"
        + ("from tests.verify.twin import Twin\n" if by_model else "")
        + "from tests.verify.words import shape_of\n\n\n"
        f"def test_verify_{seed}():\n    # {shrunk.finding}\n{calls}    words = [\n{words}    ]\n"
        f"    assert play(shape_of({seed}{left_out}), words{', Twin' if by_model else ''})[0] is None\n"
    )
