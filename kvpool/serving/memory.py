"""Gives memory back to others, and takes it again: `kvpool.governor` decides, `Memory` looks and resizes."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import mlx.core as mx

from kvpool.adapters.mlx_lm.drafts import DraftModel
from kvpool.adapters.mlx_lm.engine import Engine
from kvpool.config import available_memory_nbytes, format_nbytes, memory_pressure
from kvpool.governor import KEEP, Governor, Holder, Machine
from kvpool.metrics import Metric, gauge
from kvpool.serving.texts import trim
from kvpool.store.outbox import Failures

if TYPE_CHECKING:
    from kvpool.serving.runner import Runner

SECONDS = 1.0  # between two looks
_log = logging.getLogger(__name__)


class Memory:
    """Resizes the pool of an engine, and says why in the log and the metrics.

    At most `max_running` samples run at a time. The pool of a `draft` model always has room for as many tokens. After a
    resize, when MLX's freed arrays were given back, `on_resize` is called with the engine.
    """

    def __init__(
        self,
        governor: Governor,
        max_running: int,
        draft: DraftModel | None = None,
        on_resize: Callable[[Engine], object] | None = None,
    ) -> None:
        self.governor = governor
        self._max_running, self._draft, self._on_resize = max_running, draft, on_resize
        self._seen, self._size, self._said, self._steps = Machine(0.0, 0), 0, KEEP, 0
        self._resizes: Counter[str] = Counter()

    async def watch(self, runner: Runner) -> None:
        """Look once a second, between two steps of the engine."""
        failures = Failures()
        while True:
            await asyncio.sleep(SECONDS)
            if runner.failure is None:
                try:
                    await runner.ask(self.look)
                except Exception as error:
                    failures.tell(_log, "memory: this look failed, the next one follows", error)

    def look(self, engine: Engine) -> None:
        """Look at the machine, and resize if it is time. Only the thread of the engine may call it."""
        self._seen = seen()
        before, steps = holder_of(engine, self._max_running, self._draft), engine.scheduler.stats().steps
        before, self._steps = before._replace(has_run=steps != self._steps), steps
        available = self._seen.available - promised_to_store(engine)
        decision = self.governor.decide(self._seen._replace(available=available), [before])
        if decision.size != before.size:
            resize(engine, decision.size, self._draft)
        if decision.frees_buffers:
            give_back()
        self._size = size = holder_of(engine, self._max_running, self._draft).size
        if size != before.size:
            self._resizes[decision.reason] += 1
            if self._on_resize is not None:
                self._on_resize(engine)
        if size != before.size or decision.reason not in (self._said, KEEP):
            told = {
                "reason": decision.reason,
                "before": format_nbytes(before.size),
                "after": format_nbytes(size),
                "available": format_nbytes(self._seen.available),
                "keep_free": format_nbytes(self.governor.reserve),
            }
            _log.info("memory", extra={"told": told})
            self._said = decision.reason

    def metrics(self) -> list[Metric]:
        """Return what it saw last, and how often it has resized. Any thread may ask."""
        values = {
            "held": (self._size, "Bytes of the pool, and of that of a draft model."),
            "limit": (self.governor.limit, "Bytes that these might take now."),
            "available": (self._seen.available, "Bytes of the machine that are available."),
            "buffers": (self._seen.buffers, "Bytes of freed arrays that MLX keeps."),
        }
        found = [gauge(f"kvpool_memory_{name}_bytes", text, value) for name, (value, text) in values.items()]
        found.append(gauge("kvpool_memory_pressure", "1 normal, 2 warning, 4 critical.", self._seen.pressure))
        samples = tuple(
            ({"reason": reason}, count) for reason, count in dict(self._resizes).items()
        )  # the engine's thread adds to it
        return [*found, Metric("kvpool_memory_resizes_total", "counter", "Resizes of the pool, by reason.", samples)]


def holder_of(engine: Engine, max_running: int, draft: DraftModel | None = None) -> Holder:
    """Return what the pool of an engine takes, with that of a draft model, which has room for as many tokens."""
    layout, pool, scheduler = engine.kv.layout, engine.kv.pool, engine.scheduler
    arenas = [(pool.stats(arena), nbytes) for arena, nbytes in enumerate(layout.block_nbytes)]
    own, unit = unit_nbytes(engine), unit_nbytes(engine, draft)
    lanes = max(0, max_running - len(scheduler.handles))
    tokens = sum(len(one.prompt) + one.max_tokens for one in scheduler.waiting(lanes))
    return Holder(
        "pool",
        sum(stats.num_blocks * nbytes for stats, nbytes in arenas) // own * unit,
        sum(stats.used * nbytes for stats, nbytes in arenas) * unit // own,
        sum(stats.evictable * nbytes for stats, nbytes in arenas) * unit // own,
        -(-tokens // pool.block_size) * unit,
        unit=unit,
    )


def resize(engine: Engine, nbytes: int, draft: DraftModel | None = None) -> None:
    """Give the pools so many bytes, or more if running requests hold more: the scheduler preempts those that grow."""
    layout, pool = engine.kv.layout, engine.kv.pool
    arenas = range(len(layout.block_nbytes))
    used = max(-(-pool.stats(arena).used // layout.columns(arena)) for arena in arenas)
    num_blocks = max(nbytes // unit_nbytes(engine, draft), 2 + used)
    if num_blocks == pool.num_blocks:
        return
    before = pool.num_blocks
    try:
        engine.resize(num_blocks)
        try:
            if draft is not None:
                draft.resize(num_blocks * pool.block_size)
        except BaseException:
            engine.resize(before)
            raise
    except (MemoryError, RuntimeError, ValueError) as error:  # too small, or no memory: all is as it was
        _log.info("memory: the pool stays as it is: %s", error)


def unit_nbytes(engine: Engine, draft: DraftModel | None = None) -> int:
    """Return the bytes of a block of tokens in all layers, those of a draft model included."""
    layout = engine.kv.layout
    own = sum(layout.columns(arena) * nbytes for arena, nbytes in enumerate(layout.block_nbytes))
    if draft is None:
        return own
    return own + -(-engine.kv.pool.block_size * unit_nbytes(draft.engine) // draft.engine.kv.pool.block_size)


def promised_to_store(engine: Engine) -> int:
    """Return the bytes of memory that the store of an engine may still take."""
    tiers = {} if engine.kv.stored is None else engine.kv.stored.store.stats()
    return tiers["memory"].limit_nbytes - tiers["memory"].nbytes if "memory" in tiers else 0


def seen() -> Machine:
    """Return what the machine and MLX say now."""
    most = mx.device_info()["max_recommended_working_set_size"] if mx.metal.is_available() else math.inf
    buffers, active = mx.get_cache_memory(), mx.get_active_memory()
    return Machine(time.monotonic(), available_memory_nbytes(), memory_pressure(), buffers, active, float(most))


def give_back() -> None:
    """Free the arrays that MLX keeps, and what glibc keeps of freed memory."""
    mx.clear_cache()
    trim(0)
