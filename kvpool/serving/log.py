"""The log of a server on stderr: requests, failures, and every ten seconds what was computed."""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging.handlers import QueueHandler, QueueListener
from typing import Any

from kvpool.adapters.mlx_lm.engine import Engine
from kvpool.groups import arenas_of

FORMS = ("text", "json", "off")
MOST_LINES = 1024  # that wait for stderr; more are dropped
LAST_SECONDS = 1.0  # for the last lines
SECONDS = 10.0  # between two lines of `report`
_log = logging.getLogger(__name__)


class _Lines(logging.Formatter):
    """Makes a line of a record, as text or JSON. Its fields are those of `told` that are not null or empty."""

    def __init__(self, is_json: bool) -> None:
        super().__init__("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S")
        self._is_json = is_json

    def format(self, record: logging.LogRecord) -> str:
        told = {name: value for name, value in getattr(record, "told", {}).items() if value not in (None, [])}
        if not self._is_json:
            return " ".join([super().format(record), *(f"{name}={_word(value)}" for name, value in told.items())])
        head = {"time": self.formatTime(record, self.datefmt), "level": record.levelname.lower()}
        return json.dumps(head | {"message": record.getMessage()} | told)


def _word(value: Any) -> str:
    text = ",".join(value) if isinstance(value, list) else str(value)
    return text if re.fullmatch(r"[\w.,:/+-]+", text, re.ASCII) else json.dumps(text)


@contextmanager
def to_stderr(form: str) -> Iterator[None]:
    """Write the log of the package and of uvicorn to stderr, from a thread: a server works on if nobody reads it.

    `form` is of `FORMS`. With "off", only failures are written, as text.
    """
    lines: queue.Queue[logging.LogRecord] = queue.Queue(MOST_LINES)
    writer, loggers = logging.StreamHandler(), [logging.getLogger(name) for name in ("kvpool", "uvicorn")]
    writer.setFormatter(_Lines(form == "json"))
    handler, listener = QueueHandler(lines), QueueListener(lines, writer)
    before = [(one.level, one.propagate) for one in loggers], logging.raiseExceptions
    logging.raiseExceptions = False  # of a full queue, and of a reader who is gone
    listener.start()
    for one in loggers:
        one.addHandler(handler)
        one.setLevel(logging.WARNING if form == "off" or one.name == "uvicorn" else logging.INFO)
        one.propagate = False
    try:
        yield
    finally:
        end = time.monotonic() + LAST_SECONDS
        while lines.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.01)
        if not lines.unfinished_tasks:
            listener.stop()
        for one, (level, propagate) in zip(loggers, before[0], strict=True):
            one.removeHandler(handler)
            one.level, one.propagate = level, propagate
        logging.raiseExceptions = before[1]


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
            names = "sampled_tokens", "prefill_tokens", "hit_tokens"
            made, read, hit = (getattr(stats, name) - getattr(before, name) for name in names)
            pool = engine.kv.pool
            arenas = [pool.stats(arena) for arena in set(arenas_of(pool.options.groups))]
            used = sum(arena.used for arena in arenas) / sum(arena.num_blocks for arena in arenas)
            _log.info(
                f"{stats.prefilling + stats.decoding} running, {stats.waiting} waiting; "
                f"{made / seconds:.1f} tokens a second, {read / seconds:.1f} of prompts"
                f"{f', {100 * hit / (hit + read):.0f} % of prompts cached' if hit else ''}; "
                f"{100 * used:.0f} % of blocks in use"
            )
        before = stats
