"""What has to hold: bytes of all files, sequences of Gemma 4 31B in one budget, times of six files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.gate import Gate
from benchmarks.models import capacity, subjects, times
from benchmarks.models.held import held
from benchmarks.models.kept import Kept
from benchmarks.models.report import BATCH, CONTEXTS

CAPACITY = "32k sequences in one budget"
BYTES_MAX = 1.05
CAPACITY_MIN = 7.0
TIME_MAX = 1.20


def measure(names: Sequence[str], rows: Sequence[int], repetitions: int, kept: Kept) -> list[Gate]:
    """Measure every gate; those of time for the files among `names` that have a medium model."""
    gates = [bytes_gate(names, kept), *kept.gates((CAPACITY,), lambda: (capacity_gate(),))]
    for name in names if repetitions else ():
        if name in subjects.MEDIUM_OWN:
            gates += time_gates(name, rows, repetitions, kept)
    return gates


def bytes_gate(names: Sequence[str], kept: Kept) -> Gate:
    """Judge the file with the most bytes, relative to those of mlx-lm's caches."""
    run = [name for name in names if name not in subjects.NOT_RUN]
    found = [kept.gates((f"bytes, {name}",), partial(_bytes_of, name))[0] for name in run]
    worst = max(found, key=lambda gate: gate.value or 0.0)
    return replace(worst, name="bytes / mlx-lm, the most", note=f"{worst.name.partition(', ')[2]}, {worst.note}")


def _bytes_of(name: str) -> tuple[Gate]:
    """Judge one file: the most of all contexts and batches."""
    model = subjects.tiny(name)
    ratio, note = max(
        (held(model, num_rows, num_tokens).ratio, f"{num_rows} x {context}")
        for context, num_tokens in CONTEXTS.items()
        for num_rows in (1, BATCH)
    )
    return (Gate(f"bytes, {name}", ratio, BYTES_MAX, at_most=True, note=note),)


def capacity_gate() -> Gate:
    """Judge how many more sequences layer groups hold."""
    found = capacity.gemma4_31b(CONTEXTS["32k"])
    note = f"{found.groups} beside {found.everything} that keep every token, Gemma 4 31B"
    return Gate(CAPACITY, found.ratio, CAPACITY_MIN, note=note, unit="x")


def time_gates(name: str, rows: Sequence[int], repetitions: int, kept: Kept) -> Iterator[Gate]:
    """Judge a decode step and a chunk of a tiny and a medium model."""
    for size, make in (("tiny", subjects.tiny), ("medium", subjects.medium)):
        model = functools.cache(partial(make, name))  # not made where everything is known
        for num_rows in rows:
            titles = tuple(f"{what}, {name} {size} x {num_rows}" for what in ("decode", "chunk"))
            yield from kept.gates(titles, partial(_times_of, titles, model, num_rows, repetitions))


def _times_of(
    titles: tuple[str, ...], model: Callable[[], Any], num_rows: int, repetitions: int
) -> tuple[Gate, ...]:
    with times.installed(model(), num_rows, repetitions) as kv:
        found = times.measure(kv, num_rows, repetitions)
    notes = [f"{one.pool * 1e3:.2f} ms beside {one.stock * 1e3:.2f} ms" for one in found]
    return tuple(
        Gate(title, one.ratio, TIME_MAX, at_most=True, note=note)
        for title, one, note in zip(titles, found, notes, strict=True)
    )
