"""`Record`: every tick and every token of one run, as arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from benchmarks.serving.harness import Tick

COLUMNS = (
    *("start", "end", "cpu"),
    *("decodes", "prefill_tokens", "running", "waiting", "blocks_in_use", "context_tokens", "blocks_touched"),
)


@dataclass
class Record:
    """What `serve` saw: T ticks, each with the sequences that got a token in it.

    Attributes
    ----------
    arrivals : float64 ``[R]``
        Seconds, by request.
    samples : int
        Sequences per request: sequence ``i * samples + j`` is answer j of request i.
    rows : list of tuple
        `COLUMNS` of each tick: seconds by the clock, seconds of CPU time, then what its `Tick` has.
    emitted : list of int array
        Sequences that got a token, per tick.
    settled : float
        CPU seconds of steps that were begun ahead, after the last tick of a turn.
    """

    arrivals: NDArray[np.float64]
    samples: int = 1
    rows: list[tuple[float, ...]] = field(default_factory=list, repr=False)
    emitted: list[NDArray[np.integer]] = field(default_factory=list, repr=False)
    settled: float = 0.0

    def add(self, start: float, end: float, cpu: float, tick: Tick) -> None:
        """Append one tick."""
        self.rows.append(
            (
                *(start, end, cpu, tick.decodes, tick.prefill_tokens, tick.running, tick.waiting),
                *(tick.blocks_in_use, tick.context_tokens, tick.blocks_touched),
            )
        )
        self.emitted.append(tick.emitted)

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def _table(self) -> NDArray[np.float64]:
        return np.array(self.rows, np.float64).reshape(len(self.rows), len(COLUMNS)).T

    def column(self, name: str) -> NDArray[np.float64]:
        """One of `COLUMNS`, float64 ``[T]``. Call it when all ticks are there."""
        column: NDArray[np.float64] = self._table[COLUMNS.index(name)]
        return column

    @property
    def seconds(self) -> NDArray[np.float64]:
        """Duration of each tick, float64 ``[T]``."""
        return self.column("end") - self.column("start")

    @cached_property
    def tokens_per_tick(self) -> NDArray[np.int64]:
        """Tokens that each tick generated, int64 ``[T]``."""
        return np.array([len(numbers) for numbers in self.emitted], np.int64)

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return int(self.tokens_per_tick.sum())

    @property
    def wall(self) -> float:
        """Seconds from the first arrival to the last token, idle ones included; 0 without a tick."""
        return float(self.column("end")[-1] - min(self.arrivals[0], self.column("start")[0])) if self.rows else 0.0

    @cached_property
    def token_times(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Sequence and time of every token, ordered by sequence, then by time."""
        if not self.rows:
            return np.zeros(0, np.int64), np.zeros(0)
        sequences = np.concatenate(self.emitted).astype(np.int64)
        times = np.repeat(self.column("end"), self.tokens_per_tick)
        order = np.argsort(sequences, kind="stable")  # ticks are in order of time already
        return sequences[order], times[order]
