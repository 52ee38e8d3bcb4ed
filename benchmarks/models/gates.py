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


def measure(names: Sequence[str], rows: Sequence[int], repetitions: int, say: Callable[[str], None]) -> list[Gate]:
    """Measure every gate; those of time for the files among `names` that have a medium model."""
    say("bytes")
    gates = [bytes_gate(names), capacity_gate()]
    for name in names if repetitions else ():
        if name in subjects.MEDIUM_OWN:
            gates += time_gates(name, rows, repetitions, say)
    return gates


def bytes_gate(names: Sequence[str]) -> Gate:
    """Judge the file with the most bytes, relative to those of mlx-lm's caches."""
    worst, note = 0.0, ""
    for name in names:
        if name in subjects.NOT_RUN:
            continue
        model = subjects.tiny(name)
        for context, num_tokens in CONTEXTS.items():
            for num_rows in (1, BATCH):
                ratio = held(model, num_rows, num_tokens).ratio
                if ratio > worst:
                    worst, note = ratio, f"{name}, {num_rows} x {context}"
    return Gate("bytes / mlx-lm, the most", worst, BYTES_MAX, at_most=True, note=note)


def capacity_gate() -> Gate:
    """Judge how many more sequences layer groups hold."""
    found = capacity.gemma4_31b(CONTEXTS["32k"])
    note = f"{found.groups} beside {found.everything} that keep every token, Gemma 4 31B"
    return Gate("32k sequences in one budget", found.ratio, CAPACITY_MIN, note=note, unit="x")


def time_gates(name: str, rows: Sequence[int], repetitions: int, say: Callable[[str], None]) -> Iterator[Gate]:
    """Judge a decode step and a chunk of a tiny and a medium model."""
    for size, make in (("tiny", subjects.tiny), ("medium", subjects.medium)):
        model = make(name)
        for num_rows in rows:
            say(f"{name} {size}, {num_rows} rows")
            with times.installed(model, num_rows, repetitions) as kv:
                for what, measured in (("decode", times.decode), ("chunk", times.chunk)):
                    found = measured(kv, num_rows, repetitions)
                    note = f"{found.pool * 1e3:.2f} ms beside {found.stock * 1e3:.2f} ms"
                    title = f"{what}, {name} {size} x {num_rows}"
                    yield Gate(title, found.ratio, TIME_MAX, at_most=True, note=note)
