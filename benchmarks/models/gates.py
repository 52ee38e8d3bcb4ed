"""What has to hold: bytes of all files, sequences of Gemma 4 31B in one budget, times of six files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from benchmarks.gate import Gate
from benchmarks.models import capacity, subjects, times
from benchmarks.models.held import held
from benchmarks.models.report import BATCH, CONTEXTS

BYTES_MAX = 1.05
CAPACITY_MIN = 7.0
TIME_MAX = 1.20


def measure(names: Sequence[str], rows: Sequence[int], repetitions: int, say: Callable[[str], None]) -> Iterator[Gate]:
    """Measure every gate; those of time for the files among `names` that have a medium model."""
    say("bytes")
    yield bytes_gate(names)
    yield capacity_gate()
    for name in names if repetitions else ():
        if name in subjects.MEDIUM_OWN:
            say(f"times, {name}")
            yield from time_gates(name, rows, repetitions)


def bytes_gate(names: Sequence[str]) -> Gate:
    """Judge the most bytes of all files, contexts and batches, relative to those of mlx-lm's caches."""
    ratio, note = max(
        (held(model, num_rows, num_tokens).ratio, f"{name}, {num_rows} x {context}")
        for name in names
        if name not in subjects.NOT_RUN
        for model in (subjects.tiny(name),)
        for context, num_tokens in CONTEXTS.items()
        for num_rows in (1, BATCH)
    )
    return Gate("bytes / mlx-lm, the most", ratio, BYTES_MAX, at_most=True, note=note)


def capacity_gate() -> Gate:
    """Judge how many more sequences layer groups hold."""
    found = capacity.gemma4_31b(CONTEXTS["32k"])
    note = f"{found.groups} beside {found.everything} that keep every token, Gemma 4 31B"
    return Gate("32k sequences in one budget", found.ratio, CAPACITY_MIN, note=note, unit="x")


def time_gates(name: str, rows: Sequence[int], repetitions: int) -> Iterator[Gate]:
    """Judge a decode step and a chunk of a tiny and a medium model."""
    for size, make in (("tiny", subjects.tiny), ("medium", subjects.medium)):
        model = make(name)
        for num_rows in rows:
            with times.installed(model, num_rows, repetitions) as kv:
                found = times.measure(kv, num_rows, repetitions)
            for what, one in zip(("decode", "chunk"), found, strict=True):
                note = f"{one.pool * 1e3:.2f} ms beside {one.stock * 1e3:.2f} ms"
                yield Gate(f"{what}, {name} {size} x {num_rows}", one.ratio, TIME_MAX, at_most=True, note=note)
