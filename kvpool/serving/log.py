"""The log of a server on stderr: requests, failures, and every ten seconds what was computed."""

from __future__ import annotations

import asyncio
import logging
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging.handlers import QueueHandler, QueueListener

from kvpool.adapters.mlx_lm.engine import Engine
from kvpool.groups import arenas_of
from kvpool.scheduler.request import SchedulerStats

LEVELS = {"info": logging.INFO, "warning": logging.WARNING}
MOST_LINES = 1024  # that wait for stderr; more are dropped
LAST_SECONDS = 1.0  # for the last lines
SECONDS = 10.0  # between two lines of `report`
_log = logging.getLogger(__name__)


@contextmanager
def to_stderr(level: str) -> Iterator[None]:
    """Write the log of the package to stderr, from a thread: a server works on if nobody reads it."""
    lines: queue.Queue[logging.LogRecord] = queue.Queue(MOST_LINES)
    writer = logging.StreamHandler()
    writer.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    handler, package = QueueHandler(lines), logging.getLogger("kvpool")
    before = package.level, package.propagate, logging.raiseExceptions
    logging.raiseExceptions = False  # of a full queue, and of a reader who is gone
    listener = QueueListener(lines, writer)
    listener.start()
    package.addHandler(handler)
    package.setLevel(LEVELS[level])
    package.propagate = False
    try:
        yield
    finally:
        package.removeHandler(handler)
        end = time.monotonic() + LAST_SECONDS
        while lines.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.01)
        if not lines.unfinished_tasks:
            listener.stop()
        package.level, package.propagate, logging.raiseExceptions = before


async def report(engine: Engine, now: Callable[[], float] = time.monotonic) -> None:
    """Log every ten seconds what the engine computed, unless it was idle."""
    began, before = now(), engine.scheduler.stats()
    while True:
        await asyncio.sleep(SECONDS)
        seconds, stats = now() - began, engine.scheduler.stats()
        began += seconds
        if stats.steps < before.steps:  # the engine failed, and has another scheduler
            before = stats
        if stats.steps > before.steps:
            _log.info("%s", _line(engine, before, stats, seconds))
        before = stats


def _line(engine: Engine, before: SchedulerStats, stats: SchedulerStats, seconds: float) -> str:
    """Return what was computed between two statistics."""
    made, read, hit = (
        getattr(stats, name) - getattr(before, name) for name in ("sampled_tokens", "prefill_tokens", "hit_tokens")
    )
    pool = engine.kv.pool
    arenas = [pool.stats(arena) for arena in set(arenas_of(pool.options.groups))]
    used = sum(arena.used for arena in arenas) / sum(arena.num_blocks for arena in arenas)
    found = f", {100 * hit / (hit + read):.0f} % of prompts cached" if hit else ""
    return (
        f"{stats.prefilling + stats.decoding} running, {stats.waiting} waiting; {made / seconds:.1f} tokens a second, "
        f"{read / seconds:.1f} of prompts{found}; {100 * used:.0f} % of blocks in use"
    )
