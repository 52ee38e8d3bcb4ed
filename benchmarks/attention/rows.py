"""One measured row: what ran, how long it took, and how long the yardstick took for the same work."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvpool.cli.bench.measure import Race
from kvpool.cli.bench.options import tokens

CACHED_NBYTES = 2**27
"""Rows that move fewer bytes (134 MB) may live in a cache: they are shown and carry no gate."""


@dataclass(frozen=True)
class Row:
    """A line of the report; times in seconds.

    Attributes
    ----------
    part : {"decode", "prefill", "write", "copy", "raw", "mass", "quantized"}
        The last three are decode: with scores, and from what --kv-bits stores.
    batch, context, block_size : int
        Rows of the batch, tokens of each row's context, tokens per block.
    nbytes : int
        What the yardstick moves: K and V of all contexts, or the stored bytes.
    yardstick : {"read", "sgemm", "memcpy", "decode"}
        What the time is compared with, at the same work and the same number of threads.
    best, median, yardstick_best, yardstick_median : float
    repetitions, rejected : int
        Rounds that count, and rounds whose yardstick was disturbed.
    is_complete : bool
        Whether as many rounds count as were asked for.
    torch : float, optional
        Decode only: least time of torch's attention over dense, contiguous K and V.
    error : float, optional
        Largest difference from float64 attention, as a share of the largest result of a head.
    scores_nbytes : int, optional
        Scores only: memory of theirs, scratch included.
    """

    part: str
    dtype: str
    threads: int
    layout: str
    block_size: int
    batch: int
    context: int
    nbytes: int
    yardstick: str
    best: float
    median: float
    yardstick_best: float
    yardstick_median: float
    repetitions: int
    rejected: int
    is_complete: bool
    torch: float | None = None
    error: float | None = None
    scores_nbytes: int | None = None

    @property
    def ratio(self) -> float:
        """Least time, in least times of the yardstick."""
        return self.best / self.yardstick_best

    @property
    def median_ratio(self) -> float:
        """The same of the medians."""
        return self.median / self.yardstick_median

    @property
    def rate(self) -> float:
        """GB/s."""
        return self.nbytes / self.best / 1e9

    @property
    def yardstick_rate(self) -> float:
        """GB/s of the yardstick."""
        return self.nbytes / self.yardstick_best / 1e9

    @property
    def is_cached(self) -> bool:
        """Whether the bytes are so few that a cache may hold them."""
        return self.nbytes < CACHED_NBYTES

    @property
    def name(self) -> str:
        """What tells this row from others of its part, for people."""
        size = f"{self.batch} x {tokens(self.context)}"
        if self.part in ("write", "copy"):
            size = f"{self.context} tokens"
        return f"{self.dtype} {size}, {threads_name(self.threads)}"

    def as_json(self) -> dict[str, Any]:
        """Everything about the row, seconds as they were measured."""
        figures = {"ratio": self.ratio, "median_ratio": self.median_ratio, "is_cached": self.is_cached}
        if self.yardstick != "sgemm":
            figures |= {"gb_per_s": self.rate, "yardstick_gb_per_s": self.yardstick_rate}
        return asdict(self) | figures


def timed(race: Race, name: str, work: float = 1.0) -> dict[str, Any]:
    """Return the fields of a `Row` that come from a race, for contestant `name`.

    `work` is the contestant's work in units of the yardstick's.
    """
    timing = race.timings[name]
    return {
        "best": timing.best,
        "median": timing.median,
        "yardstick_best": race.yardstick.best * work,
        "yardstick_median": race.yardstick.median * work,
        "repetitions": race.repetitions,
        "rejected": race.rejected,
        "is_complete": race.is_complete,
    }


def threads_name(number: int) -> str:
    """``"2 threads"``."""
    return f"{number} thread{'s' if number > 1 else ''}"
