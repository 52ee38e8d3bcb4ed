"""Programs of calls that find the lock of a pool taken, by another thread or by their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvpool.errors import ConcurrentUse
from proof.mutation.limits import poked
from proof.mutation.scenarios import FORMATS, look, place, tried

WAIT = 0.005  # seconds that another thread keeps a lock


class Other:
    """Another thread that holds the lock of a pool while this one calls."""

    def call(self, pool: Any, thing: Any, name: str, *arguments: Any) -> Any:
        """The call waits until the lock is free, and nothing changes until then."""
        return self._made(pool, lambda: made(thing, name, arguments))

    def call_with_fewer(self, pool: Any, thing: Any, name: str, *arguments: Any) -> Any:
        """While the call waits a blank block goes, which comes back when it is over."""
        try:
            return self._made(pool, lambda: made(thing, name, arguments), -1)
        finally:
            fewer(pool, 1)

    def call_with_one(self, pool: Any, thing: Any, name: str, *arguments: Any) -> Any:
        """All blocks are taken. While the call waits the one that was taken last is blank, until it is over."""
        try:
            return self._made(pool, lambda: made(thing, name, arguments), 1)
        finally:
            fewer(pool, -1)

    def call_inside(self, pool: Any, thing: Any, name: str, *arguments: Any) -> None:
        """The thread that holds the lock calls."""
        from proof.fuzz import _poke

        _poke.hold(pool)
        try:
            made(thing, name, arguments)
        finally:
            _poke.let_go(pool)

    def _made(self, pool: Any, call: Callable[[], Any], change: int = 0) -> Any:
        from proof.fuzz import _poke

        held, found = threading.Event(), []

        def hold() -> None:
            _poke.hold(pool)
            before = _poke.state(pool)
            held.set()
            time.sleep(WAIT)
            found.append(before == _poke.state(pool))
            if change:
                fewer(pool, change)
            _poke.let_go(pool)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        try:
            return call()
        finally:
            thread.join()
            if found != [True]:
                raise RuntimeError("the pool changed while another thread had its lock")


def made(thing: Any, name: str, arguments: tuple) -> Any:
    """What a call gives, or what an attribute is."""
    found = getattr(thing, name)
    return found(*arguments) if callable(found) else found


def fewer(pool: Any, by: int) -> None:
    """A blank block more or less."""
    poked(pool, "blocks.num_blank", by)
    poked(pool, "blocks.num_used", -by)


class OtherOfModel:
    """The same calls, one after the other."""

    def call(self, pool: Any, thing: Any, name: str, *arguments: Any) -> Any:
        """A call."""
        return made(thing, name, arguments)

    def call_with_fewer(self, pool: Any, thing: Any, name: str, *arguments: Any) -> Any:
        """A call while the block that would be taken next is away."""
        block = pool._blank.pop()
        try:
            return made(thing, name, arguments)
        finally:
            pool._blank.append(block)

    def call_with_one(self, pool: Any, thing: Any, name: str, *arguments: Any) -> Any:
        """A call while the block that is taken last is there."""
        pool._blank.append(pool.num_blocks - 1)
        try:
            return made(thing, name, arguments)
        finally:
            pool._blank.pop()

    def call_inside(self, pool: Any, thing: Any, name: str, *arguments: Any) -> None:
        """Every call that takes the lock is refused."""
        raise ConcurrentUse(name)


def calls_that_wait(Pool: Any, Plan: Any, Other: Any) -> None:
    """Calls while another thread holds the lock, and from the thread that holds it."""
    other = Other()
    for cached in (False, True):
        pool = Pool(20, 2, max_seqs=6, prefix_cache=cached, **({"events": 40} if cached else {}))
        plan = Plan(pool, 4, 20, formats=FORMATS)
        rows = [pool.open() for _ in range(3)]
        text = np.arange(3, dtype=np.int32)
        calls: list[tuple] = [("step", plan, rows, 3), ("rollback", plan), ("step", plan, rows, 3), ("done", plan)]
        calls += [("table", rows[0]), ("num_tokens", rows[0]), ("fork", rows[0], 1), ("truncate", rows[2], 2)]
        calls += [("reserve", plan, rows[:1], 1), ("rollback", plan), ("can", rows, 1), ("close", rows[2])]
        calls += [("open", 3), ("blocks.refcount", 2), ("blocks.evict", 1), ("is_open", rows[0]), ("capacity", rows[0])]
        if cached:
            calls += [("prefix.commit", rows[0], text), ("prefix.match", text), ("prefix.events",), ("open", text)]
            calls += [("prefix.pin", text[:2]), ("prefix.flush", b""), ("prefix.flush",), ("prefix.events",)]
            calls += [("prefix.committed", rows[0])]
        else:
            calls += [("blocks.alloc",), ("blocks.alloc", 3), ("blocks.incref", [2]), ("blocks.decref", [2])]
            calls += [("blocks.mark_cached", [2]), ("blocks.drain_evicted",), ("blocks.touch", [2])]
            calls += [("blocks.free", [2])]
        for name, *arguments in calls:
            target, call = place(pool, name)
            tried(other.call_inside, pool, target, call, *arguments)
            tried(other.call, pool, target, call, *arguments)
        if not cached:
            blocks = pool.blocks
            pool.blocks.evict(1)
            tried(other.call, pool, blocks, "drain_evicted")
            calls = [("take", 2), ("touch", [2]), ("release", [2]), ("mark_cached", [2]), ("uncache", [2])]
            calls += [("refcounts", [2]), ("free_order",), ("num_blank",), ("usage",), ("num_free",)]
            calls += [("take_block", 19)]
            for name, *arguments in calls:
                tried(other.call_inside, pool, blocks, name, *arguments)
                tried(other.call, pool, blocks, name, *arguments)
            free = len(blocks.free_order())
            for name, *arguments in (
                ("take", free), ("free_order",), ("free_order", free), ("num_blank",), ("num_free",), ("usage",),
            ):  # fmt: skip
                tried(other.call_with_fewer, pool, blocks, name, *arguments)
            tried(other.call_with_fewer, pool, blocks, "alloc", free)
            tried(other.call_with_fewer, pool, pool, "open", 2 * free)
        look(pool, plan)
        pool.reset()
        if not cached:
            pool.blocks.alloc(19)
            for name in ("free_order", "num_blank", "num_free", "usage"):
                tried(other.call_with_one, pool, blocks, name)
        other.call(pool, pool, "shutdown")
        tried(other.call, pool, pool, "stats")
        for name in ("drain_evicted", "alloc", "refcount"):
            tried(other.call, pool, pool.blocks, name, *[2] * (name == "refcount"))
        if cached:
            tried(other.call, pool, pool.prefix, "events")
