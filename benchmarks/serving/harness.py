"""Servers that work in turns, and what each of their steps took."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.serving.workload import Workload

SLICE_SECONDS = 0.1
PLATEAU = 0.9  # of the steps that decode beside prompts, so many have at most the rows of the steady state


@dataclass(slots=True)
class Tick:
    """What a server did in one step.

    Attributes
    ----------
    tokens : int
        Generated.
    decodes, prefill_tokens : int
        Rows of one token, and tokens of prompts that were computed.
    blocks_in_use : int
        While it ran.
    """

    tokens: int = 0
    decodes: int = 0
    prefill_tokens: int = 0
    blocks_in_use: int = 0


class Server(Protocol):
    """What `Run` drives."""

    tokens: dict[int, list[int]]
    """The answers, by the number of their request; they stay when the server is closed."""

    def add(self, number: int, prompt: NDArray[np.int32], max_tokens: int) -> None:
        """Take request `number` (0, 1, ...)."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether a tick would do something."""
        ...

    def tick(self) -> None:
        """Do one step. This is what is timed."""
        ...

    def describe(self) -> Tick:
        """Tell what the last step did. Not timed."""
        ...

    def settle(self) -> None:
        """Finish what was begun ahead: it is this server's own time."""
        ...


@dataclass
class Run:
    """A server with requests, and what it did with them.

    Attributes
    ----------
    seconds, cpu_seconds : float
        Its turns by the clock, and the CPU time of the process in them.
    wall : float
        `seconds` when the last token came.
    ticks : list of Tick
    costs : list of float
        CPU seconds of each tick.
    """

    server: Server
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    wall: float = 0.0
    ticks: list[Tick] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)

    def timed(self, work: Callable[[], object]) -> float:
        """Let the server do something, and return its CPU seconds."""
        cpu, start = time.process_time(), time.perf_counter()
        work()
        self.seconds += time.perf_counter() - start
        cpu = time.process_time() - cpu
        self.cpu_seconds += cpu
        return cpu

    def begin(self, workload: Workload) -> None:
        """Hand over all requests."""
        for number, (prompt, most) in enumerate(zip(workload.prompts, workload.max_tokens.tolist(), strict=True)):
            self.server.add(number, prompt, most)

    def turn(self) -> bool:
        """Let the server work for `SLICE_SECONDS`, and return whether there is more to do."""
        until = self.seconds + SLICE_SECONDS
        while self.server.is_busy and self.seconds < until:
            self.costs.append(self.timed(self.server.tick))
            self.wall = self.seconds
            self.ticks.append(self.server.describe())
        self.timed(self.server.settle)
        return self.server.is_busy

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return sum(tick.tokens for tick in self.ticks)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.wall

    @property
    def cpu_rate(self) -> float:
        """Tokens per second of CPU time."""
        return self.num_tokens / self.cpu_seconds

    @property
    def peak(self) -> int:
        """Most blocks in use."""
        return max(tick.blocks_in_use for tick in self.ticks)

    @property
    def steady_ratio(self) -> float:
        """p99 over p50 of the CPU time of steady steps, NaN without any.

        Steps are steady from the first one that decodes as many rows as the plateau has, to the last one that computes
        a prompt.
        """
        decodes = np.array([tick.decodes for tick in self.ticks])
        prompts = np.flatnonzero([tick.prefill_tokens for tick in self.ticks])
        end = int(prompts[-1]) + 1 if len(prompts) else 0
        rows = decodes[:end][decodes[:end] > 0]
        if not len(rows):
            return float("nan")
        first = int(np.argmax(decodes[:end] >= np.quantile(rows, PLATEAU, method="lower")))
        p50, p99 = np.percentile(np.array(self.costs)[first:end][decodes[first:end] > 0], (50, 99))
        return float(p99 / p50)


def serve_side_by_side(servers: Sequence[Server], workload: Workload) -> list[Run]:
    """Let servers do the same work, in turns.

    The speed of a machine that others share changes from second to second; here it changes for everybody alike.

    Raises
    ------
    RuntimeError
        A server is idle, but not all tokens were generated.
    """
    runs = [Run(server) for server in servers]
    gc.collect()
    gc.freeze()  # a collection that walks through all modules would be in somebody's step
    try:
        for run in runs:
            run.timed(lambda run=run: run.begin(workload))  # type: ignore[misc]
        going = runs
        while going:
            going = [run for run in going if run.turn()]
    finally:
        gc.unfreeze()
    for run in runs:
        if run.num_tokens != workload.num_tokens:
            asked = workload.num_tokens
            raise RuntimeError(f"[serve] {run.num_tokens} tokens were generated, {asked} were asked for")
    return runs
