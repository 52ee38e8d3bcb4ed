"""Phases of a run: a ramp until the batch is full, a steady state, a tail when nobody comes any more; and spikes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.serving.record import Record

SPIKE_FACTOR = 5.0
PLATEAU = 0.9  # of the ticks before the tail that have rows, so many have at most that many


@dataclass(frozen=True)
class Phase:
    """A stretch of ticks: `first` to `last`, the last one excluded.

    Attributes
    ----------
    seconds : float
        From its first tick to the next phase's first one, idle time included.
    tokens : int
        Generated in it.
    """

    first: int
    last: int
    seconds: float
    tokens: int

    @property
    def ticks(self) -> int:
        """Number of ticks."""
        return self.last - self.first

    @property
    def tokens_per_sec(self) -> float | None:
        """Tokens / seconds, None if no time passed."""
        return self.tokens / self.seconds if self.seconds > 0 else None

    def as_json(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            **{"ticks": self.ticks, "seconds": self.seconds, "tokens": self.tokens},
            "tokens_per_sec": self.tokens_per_sec,
        }


@dataclass(frozen=True)
class Phases:
    """Ramp, steady and tail partition the ticks; spikes are ticks of any of them.

    Attributes
    ----------
    level : int
        Rows that a tick has to decode for the ramp to be over.
    spikes : int array
        Ticks longer than `spike_threshold` seconds.
    spike_seconds : float
        Their durations together.
    """

    ramp: Phase
    steady: Phase
    tail: Phase
    level: int
    spikes: NDArray[np.int64]
    spike_seconds: float
    spike_threshold: float

    def as_json(self) -> dict[str, Any]:
        """Return them for JSON."""
        return {
            **{name: getattr(self, name).as_json() for name in ("ramp", "steady", "tail")},
            "spikes": {
                "count": len(self.spikes),
                "seconds": self.spike_seconds,
                "threshold_seconds": self.spike_threshold,
            },
        }


def find_phases(
    record: Record,
    target: int | None = None,
    *,
    by: str = "wall",
) -> Phases:
    """Find the phases of a run.

    The ramp ends with the first tick that decodes `target` rows, or as many as the plateau has, if that is less. The
    tail begins after the last tick that computes a prompt: the last admission. A spike is a tick that takes more
    than `SPIKE_FACTOR` times the median of the steady state (of all ticks if there is none).

    Parameters
    ----------
    by : {"wall", "cpu"}
        The time that makes a tick a spike. On a machine that others share, a tick that waited for a CPU is no
        spike by CPU time.
    """
    if not len(record):
        nothing = Phase(0, 0, 0.0, 0)
        return Phases(nothing, nothing, nothing, 0, np.zeros(0, np.int64), 0.0, 0.0)
    decodes, prefill = record.column("decodes"), record.column("prefill_tokens")
    count = len(record)
    tail = int(np.flatnonzero(prefill)[-1]) + 1 if prefill.any() else 0
    before = decodes[:tail][decodes[:tail] > 0]
    level = int(np.quantile(before, PLATEAU, method="lower")) if len(before) else 0
    if target is not None:
        level = min(level, target)
    reached = np.flatnonzero(decodes[:tail] >= max(level, 1))
    steady = int(reached[0]) if len(reached) else tail
    seconds = record.column("cpu") if by == "cpu" else record.seconds
    typical = seconds[steady:tail] if tail > steady else seconds
    threshold = SPIKE_FACTOR * float(np.median(typical))
    spikes = np.flatnonzero(seconds > threshold)
    return Phases(
        _phase(record, 0, steady),
        _phase(record, steady, tail),
        _phase(record, tail, count),
        level,
        spikes,
        float(seconds[spikes].sum()),
        threshold,
    )


def _phase(record: Record, first: int, last: int) -> Phase:
    start, end, count = record.column("start"), record.column("end"), len(record)
    tokens = int(record.tokens_per_tick[first:last].sum())
    if first == last:
        return Phase(first, last, 0.0, tokens)
    until = start[last] if last < count else end[-1]
    return Phase(first, last, float(until - start[first]), tokens)
