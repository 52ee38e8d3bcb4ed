"""`PagedServer`: `kvpool.Scheduler` over a pool, with any model behind it, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.serving.harness import Tick
from kvpool import Request, Scheduler
from kvpool.scheduler import Step


class NullModel:
    """A model that costs nothing: every token is 0. What is left is the scheduler and the pool."""

    def __init__(self) -> None:
        self._tokens = np.zeros(64, np.int32)

    def __call__(self, step: Step) -> NDArray[np.int32]:
        """Return a token for each sample of a step."""
        count = len(step.sample_at)
        if count > len(self._tokens):
            self._tokens = np.zeros(2 * count, np.int32)
        return self._tokens[:count]


class Observer:
    """Says what a step of a scheduler does: which sequences of which requests, how much it reads.

    Requests have their number for an id. `see` is called between `Scheduler.schedule` and `Scheduler.update`.
    """

    def __init__(self, scheduler: Scheduler, pool: Any, max_running: int, samples: int = 1) -> None:
        self.scheduler, self.pool, self.samples = scheduler, pool, samples
        self._handles = np.full(max_running, -1, np.int64)  # by lane; a handle is never given twice
        self._numbers = np.zeros(max_running, np.int64)  # first sequence of the request in a lane

    def see(self, step: Step) -> Tick:
        """Return the tick that `step` will have been."""
        lens = np.asarray(step.plan.seq_lens)[: len(step.handles)]
        stats, pool = self.scheduler.stats(), self.pool.stats()
        return Tick(
            emitted=self._sequences(step),
            decodes=step.num_decodes,
            prefill_tokens=len(step.tokens) - step.num_decodes,
            running=stats.prefilling + stats.decoding,
            waiting=stats.waiting + stats.spilled,
            blocks_in_use=pool.used,
            context_tokens=int(lens.sum()),
            blocks_touched=int((-(-lens // self.pool.block_size)).sum()),
        )

    def _sequences(self, step: Step) -> NDArray[np.int64]:
        lanes, decodes = step.sample_lane, step.num_decodes
        handles = step.handles[:decodes]
        if len(lanes) > decodes:
            rows = np.searchsorted(np.cumsum(step.num_new), step.sample_at[decodes:], side="right")
            handles = np.concatenate([handles, step.handles[rows]])
        changed = np.flatnonzero(self._handles[lanes] != handles)
        if len(changed):
            requests: list[Any] = step.requests
            self._numbers[lanes[changed]] = [self.samples * requests[i].id for i in changed.tolist()]
            self._handles[lanes[changed]] = handles[changed]
        return self._numbers[lanes] + step.sample_index


class PagedServer:
    """Continuous batching over blocks.

    Parameters
    ----------
    scheduler : Scheduler
    pool : Pool
        The scheduler's.
    model : callable
        Takes a `Step`, returns the tokens that are sampled, int32 ``[M]``.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pool: Any,
        model: Callable[[Step], NDArray[np.int32]],
        *,
        max_running: int,
        samples: int = 1,
    ) -> None:
        self.scheduler, self.pool, self.model, self.samples = scheduler, pool, model, samples
        self.observer = Observer(scheduler, pool, max_running, samples)
        self._left = 0  # requests that are not through
        self._tick = Tick()

    def add(self, number: int, prompt: NDArray[np.int32], max_tokens: int) -> None:
        """Take a request."""
        self.scheduler.add(Request(prompt, max_tokens, id=number, n=self.samples))
        self._left += self.samples

    @property
    def is_busy(self) -> bool:
        """Whether a request is not through."""
        return self._left > 0

    def tick(self) -> None:
        """Schedule, compute, and give the tokens of the step before to the scheduler."""
        step = self.scheduler.schedule()
        assert step is not None
        self._tick = self.observer.see(step)
        self._left -= len(self.scheduler.update(step, self.model(step)))

    def describe(self) -> Tick:
        """The last step."""
        return self._tick
