"""Programs of namespaces by the thousand, and of events that are told while something else happens."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np

from proof.mutation.limits import poked
from proof.mutation.scenarios import look
from proof.mutation.tape import drop


def namespaces_by_the_hundred(Pool: Any, Plan: Any, Starving: Any) -> None:
    """Tables of names that grow, names that go, events that tell of them when they are gone."""
    starving = Starving()
    for count, events in ((15, 500), (17, 30), (33, 64), (70, 100), (70, 1000)):
        pool = Pool(3 * count, 1, max_seqs=8, prefix_cache=True, events=events)
        plan = Plan(pool, 1, 8, formats=("block_tables",))
        names = [b"%d" % k * (1 + k % 3) for k in range(count)]
        text = np.arange(3, dtype=np.int32)
        for k, name in enumerate(names):
            row = pool.open(text, name)
            pool.step(plan, [row], 3 - pool.num_tokens(row))
            pool.done(plan)
            pool.prefix.commit(row, text[pool.prefix.committed(row) :])
            pool.close(row)
            if k % 20 == 19 and events != 100:
                pool.prefix.events()
        for name in (*names, b"", b"no such"):
            pool.prefix.match(text, name)
        pool.blocks.evict(count // 2)
        for name in names[::5]:
            pool.prefix.flush(name)
            pool.prefix.flush(name)
            pool.prefix.match(text, name)
        pool.prefix.events()
        for name in names:
            pool.prefix.match(text, name)
        for name in names[::3]:
            row = pool.open(text, name)
            pool.close(row)
        pool.prefix.stats()
        look(pool)
        pool.prefix.flush()
        pool.prefix.match(text, names[0])
        if events > 64:
            pool.prefix.events()
        pool.prefix.flush(b"last")
        pool.shutdown()
        drop(plan)
        drop(pool)
        starving.left()


def namespaces_that_nobody_needs(Pool: Any, Plan: Any, Starving: Any) -> None:
    """More than a thousand names without a sequence or a block are forgotten, time and again; the others stay."""
    text, none = np.arange(3, dtype=np.int32), np.arange(0, dtype=np.int32)
    for seqs, live in ((6, 2), (700, 600)):
        pool = Pool(40, 1, max_seqs=seqs, max_blocks_per_seq=4, prefix_cache=True)
        plan = Plan(pool, 1, 8, formats=("block_tables",))
        for name in (b"a", b"b", b"c"):
            row = pool.open(text, name)
            pool.step(plan, [row], 3)
            pool.done(plan)
            pool.prefix.commit(row, text)
            pool.close(row)
        starving = Starving()
        kept = [pool.open(none, b"kept %d" % k) for k in range(live)]
        for k in range(3000):
            pool.close(pool.open(none, b"%d" % k))
            if k % 256 == 0 or k + live in (1020, 1021, 1022):
                starving.names(pool, 3)
            if k == 1200:
                pool.close(kept[2:])
        for name in (b"a", b"b", b"c", b"kept 1"):
            pool.prefix.match(text, name)
        pool.step(plan, kept[:1], 2)
        pool.done(plan)
        pool.prefix.commit(kept[0], text[:2])
        pool.prefix.match(text, b"kept 0")
        look(pool)
        pool.shutdown()


class Draining:
    """Does something in the midst of a call that drains events: when it makes garbage, which is collected."""

    def _meanwhile(self, pool: Any, act: Callable[[], Any]) -> tuple[list, Any]:
        found: list[Any] = []

        def collected(phase: str, info: dict) -> None:
            if not found:
                found.append(None)
                found[0] = act()

        before = gc.get_threshold()
        gc.collect()  # objects that were kept for the next ones are gone too: each new one counts
        gc.callbacks.append(collected)
        gc.set_threshold(8)
        try:
            events = pool.prefix.events()
        finally:
            gc.set_threshold(*before)
            gc.callbacks.remove(collected)
        return events, found[0]

    def nested(self, pool: Any) -> tuple[list, list]:
        """Another call finds no event, and none is lost."""
        return self._meanwhile(pool, pool.prefix.events)

    def forked(self, pool: Any) -> tuple[list, list]:
        """The process is forked: what the child's calls give."""

        def child() -> list:
            poked(pool, "index.ring.process", 1)  # as it is in a child
            told = [pool.prefix.events(), pool.prefix.events()]
            poked(pool, "index.ring.process", 1)  # as it was, for the parent
            return told

        return self._meanwhile(pool, child)

    def failing(self, pool: Any) -> str:
        """Python's own memory runs out before all events are told."""
        import _testcapi

        gc.collect()
        _testcapi.set_nomemory(12, 13)
        try:
            pool.prefix.events()
        except MemoryError:
            return "MemoryError"
        finally:
            _testcapi.remove_mem_hooks()
        return ""


class DrainingModel:
    """What is found."""

    def nested(self, pool: Any) -> tuple[list, list]:
        """Another call finds no event, and none is lost."""
        return pool.prefix.events(), []

    def forked(self, pool: Any) -> tuple[list, list]:
        """The child knows how many are not for it."""
        events = pool.prefix.events()
        return events, [[("lost", told_of(events))], []]

    def failing(self, pool: Any) -> str:
        """All are lost."""
        pool._lost_events = told_of(pool.prefix.events())
        return "MemoryError"


def told_of(events: list) -> int:
    """How many events these are, and tell of."""
    return sum(event[1] if event[0] == "lost" else 1 for event in events)


def events_in_the_midst(Pool: Any, Plan: Any, Draining: Any) -> None:
    """Calls, forks and failures while events are drained."""
    draining = Draining()
    for events in (25, 200):
        pool = Pool(90, 1, max_seqs=4, prefix_cache=True, events=events)
        plan = Plan(pool, 1, 40, formats=("block_tables",))
        for turn in range(10):
            text = np.arange(40, dtype=np.int32) + turn
            row = pool.open(text)
            pool.step(plan, [row], 40)
            pool.done(plan)
            pool.prefix.commit(row, text)
            pool.close(row)
            pool.blocks.evict(turn)
            call = (pool.prefix.events, draining.nested, draining.forked, draining.failing)[turn % 4]
            call(*[pool] * (turn % 4 > 0))
            pool.prefix.flush(b"no such")
            pool.prefix.events()
        pool.shutdown()
