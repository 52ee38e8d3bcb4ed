"""An asyncio server whose engine steps in a worker thread, on one pool that both sides call.

A worker thread runs the steps. Between two of them the event loop opens and closes sequences; meanwhile other
coroutines read the pool's statistics. No lock is needed around the pool: a call waits until another thread's call is
over, and both are short. The "model" is one line of arithmetic, so that the example runs anywhere:
``python examples/async_engine.py``.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import numpy as np

from kvpool import OutOfBlocks, Plan, Pool

BLOCK_SIZE, MAX_ROWS = 16, 8


@dataclass
class Request:
    """A prompt, how many tokens to make, and those that were made."""

    prompt: list[int]
    max_tokens: int
    handle: int = -1
    made: list[int] = field(default_factory=list)
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: bool = False


class Engine:
    """Decodes all running requests together, a step at a time, in a worker thread."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = Pool(num_blocks, BLOCK_SIZE, max_seqs=256, prefix_cache=True, watermark=MAX_ROWS)
        self.plan = Plan(self.pool, MAX_ROWS, max_tokens=4096)
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    def step(self) -> None:
        """One step of the batch: what `asyncio.to_thread` runs."""
        batch, counts = [], []
        for request in self.running:
            known = [*request.prompt, *request.made]
            batch.append(request.handle)
            counts.append(len(known) - self.pool.num_tokens(request.handle))
        self.pool.step(self.plan, batch, counts)
        # A backend would run here: `self.plan` says which slots to write and which blocks to read.
        self.pool.done(self.plan)
        for request in self.running:
            known = [*request.prompt, *request.made]
            begin = self.pool.prefix.committed(request.handle)
            self.pool.prefix.commit(request.handle, np.array(known[begin:], np.int32))
            request.made.append((known[-1] * 31 + len(known)) % 1000)

    def admit(self) -> None:
        """Open what fits; the rest waits."""
        while self.waiting and len(self.running) < MAX_ROWS:
            request = self.waiting[0]
            try:
                request.handle = self.pool.open(request.prompt)
            except OutOfBlocks:
                return
            self.running.append(self.waiting.pop(0))

    def retire(self) -> None:
        """Close what is finished or was cancelled."""
        for request in [r for r in self.running if r.cancelled or len(r.made) >= r.max_tokens]:
            self.pool.close(request.handle)
            self.running.remove(request)
            request.finished.set()

    async def serve(self) -> None:
        """Step until the task is cancelled."""
        while True:
            self.admit()
            if self.running:
                await asyncio.to_thread(self.step)
                self.retire()
            else:
                await asyncio.sleep(0.001)

    async def generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The tokens of one request."""
        request = Request(prompt, max_tokens)
        self.waiting.append(request)
        try:
            await request.finished.wait()
        except asyncio.CancelledError:
            request.cancelled = True
            if request in self.waiting:
                self.waiting.remove(request)
            raise
        return request.made


async def watch(pool: Pool, seen: list[int]) -> None:
    """A metrics exporter: it reads the pool while the worker thread steps."""
    while True:
        seen.append(pool.stats().used)
        await asyncio.sleep(0.0005)


async def main(requests: int = 40, seed: int = 1) -> dict[str, int]:
    """Serve random requests, cancel a few, and return what was counted."""
    draw = random.Random(seed)
    engine, seen = Engine(num_blocks=200), []
    server = asyncio.create_task(engine.serve())
    watcher = asyncio.create_task(watch(engine.pool, seen))
    shared = [draw.randrange(1000) for _ in range(64)]
    tasks = [
        asyncio.create_task(engine.generate([*shared[: draw.randrange(16, 64)], k], draw.randrange(4, 40)))
        for k in range(requests)
    ]
    for task in tasks[::10]:
        await asyncio.sleep(0.002)
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    while engine.running:  # a cancelled request leaves with the step it is in
        await asyncio.sleep(0.001)
    for task in (server, watcher):
        task.cancel()
    engine.pool.check()
    return {
        "finished": sum(isinstance(result, list) for result in results),
        "cancelled": sum(isinstance(result, asyncio.CancelledError) for result in results),
        "failed": sum(
            isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError) for result in results
        ),
        "readings": len(seen),
        "cached tokens": engine.pool.prefix.stats().hit_tokens,
        "blocks in use at the end": engine.pool.stats().used,
    }


if __name__ == "__main__":
    for name, value in asyncio.run(main()).items():
        print(f"{name}: {value}")
