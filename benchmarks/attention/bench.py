"""What every part of a measurement shares: the kernels, the settings, who is told about progress."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.attention.cache import PagedCall
from benchmarks.attention.settings import Settings
from kvpool.cli.bench.measure import Contestant, Race, race
from kvpool.config import KVSpec, format_nbytes


@dataclass
class Bench:
    """One run of the command.

    Attributes
    ----------
    kernels : module
        `kvpool_backends.cpu._kernels`, or what looks like it.
    torch : str or None
        Its version, if dense attention is measured with it.
    say : callable
        Told what begins now.
    left_out : list of (what, why)
        What was asked for and is not measured.
    load : float
        Processes that wanted a CPU in the minute before.
    """

    kernels: Any
    settings: Settings
    torch: str | None = None
    say: Callable[[str], None] = lambda text: None
    left_out: list[tuple[str, str]] = field(default_factory=list)
    load: float = field(default_factory=lambda: os.getloadavg()[0])

    @property
    def isa(self) -> str:
        """Instruction set of the kernels."""
        return str(self.kernels.default_isa())

    def rng(self, *case: int) -> np.random.Generator:
        """Return the random numbers of one case: they do not depend on which others are measured."""
        return np.random.default_rng([self.settings.seed, *case])

    def spec(self, dtype: str, block_size: int = 16) -> KVSpec:
        """Return one layer of the cache."""
        s = self.settings
        return KVSpec(1, s.num_kv_heads, s.head_dim, dtype=dtype, block_size=block_size, layout=s.layout)

    def call(
        self,
        spec: KVSpec,
        planes: tuple[np.ndarray, ...],
        *,
        batch: int,
        context: int,
        num_threads: int,
        rng: np.random.Generator,
        num_queries: int = 1,
    ) -> PagedCall:
        """Return a call of attention prepared on `planes`."""
        return PagedCall(
            self.kernels,
            spec,
            planes,
            batch=batch,
            context=context,
            num_queries=num_queries,
            num_q_heads=self.settings.num_q_heads,
            num_threads=num_threads,
            rng=rng,
        )

    def reading(self, arrays: Sequence[np.ndarray], num_threads: int) -> Contestant:
        """Return the yardstick: a read of every byte of `arrays`."""
        return Contestant("read", lambda: self.kernels.read_sum(arrays, num_threads=num_threads))

    def race(self, yardstick: Contestant, contestants: Sequence[Contestant]) -> Race:
        """Time all of them."""
        return race(yardstick, contestants, self.settings.repetitions)

    def fits(self, what: str, nbytes: int) -> bool:
        """Whether so many bytes may be allocated; notes what is left out."""
        if nbytes <= self.settings.memory_nbytes:
            return True
        self.left_out.append((what, f"more than {format_nbytes(self.settings.memory_nbytes)} (--max-memory)"))
        return False
