"""Programs for which memory does not last: what is refused for want of it is made again, and nothing is lost."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np

import kvpool
from kvpool.groups import Group
from kvpool.testing import ModelPlan
from proof.mutation.grouped import FORMATS as GROUP_FORMATS
from proof.mutation.scenarios import FORMATS, look, tried
from proof.mutation.tape import drop
from proof.plain import plain_pool

CORE: dict[str, Any] = {"pool": kvpool.Pool, "plan": kvpool.Plan}
MODEL: dict[str, Any] = {"pool": plain_pool, "plan": ModelPlan}


class Starving:
    """Makes calls while memory runs out: each allocation fails once. A call that fails has taken nothing."""

    def __init__(self) -> None:
        from kvpool import _core

        self._core = _core
        gc.collect()
        self._first = self._living()

    def _living(self) -> int:
        return self._core.allocations()[1]

    def _until_it_succeeds(self, call: Callable[[], Any]) -> Any:
        for k in range(1, 400):
            before = self._living()
            self._core.fail_at(k)
            try:
                return call()
            except MemoryError as error:
                if type(error) is not MemoryError:  # want of blocks is one too
                    raise
            finally:
                self._core.fail_at(0)
            if self._living() != before:
                raise RuntimeError("memory is lost")
        raise RuntimeError("it never succeeds")

    def make(self, kind: str, *arguments: Any, **options: Any) -> None:
        """A pool or a plan, which goes at once."""
        more = {"seed": 1} if kind == "pool" else {}
        before = self._living()
        made = self._until_it_succeeds(lambda: CORE[kind](*arguments, **more | options))
        del made
        if self._living() != before:
            raise RuntimeError("memory is lost")

    def call(self, thing: Any, name: str, *arguments: Any, **options: Any) -> Any:
        """A call, which is refused as in peace or gives what it gives then."""
        return self._until_it_succeeds(lambda: getattr(thing, name)(*arguments, **options))

    def lose(self, pool: Any, row: int, tokens: Any) -> None:
        """A commit of one block, of which no event can tell."""
        self._core.fail_at(1)
        try:
            pool.prefix.commit(row, tokens)
        finally:
            self._core.fail_at(0)

    def names(self, pool: Any, before: int = 0) -> int:
        """Namespaces that came since this object was made: a block of memory each, as is the last one forgotten."""
        return self._living() - self._first - 1

    def left(self) -> int:
        """Memory that was taken since this object was made, and not given back."""
        gc.collect()
        return self._living() - self._first


class StarvingModel:
    """The same in peace."""

    def make(self, kind: str, *arguments: Any, **options: Any) -> None:
        """A pool or a plan, which goes at once."""
        made = MODEL[kind](*arguments, **options)
        if kind == "pool":
            made.shutdown()

    def call(self, thing: Any, name: str, *arguments: Any, **options: Any) -> Any:
        """A call."""
        return getattr(thing, name)(*arguments, **options)

    def lose(self, pool: Any, row: int, tokens: Any) -> None:
        """A commit of one block, of which no event can tell."""
        pool.prefix.commit(row, tokens)
        pool._events.pop()
        pool._lost_events += 1

    def names(self, pool: Any, before: int = 0) -> int:
        """Namespaces that are known, without those `before`."""
        return len(pool._roots) - before

    def left(self) -> int:
        """Nothing."""
        return 0


def calls_without_memory(Pool: Any, Plan: Any, Starving: Any) -> None:
    """Pools, plans and calls for which the memory does not last at first: nothing is lost, nothing has changed."""
    starving = Starving()
    tried(starving.make, "pool", 8, 2)
    pool = Pool(20, 1, max_seqs=3, prefix_cache=True, events=9)
    plan, row = Plan(pool, 1, 9, formats=("block_tables",)), pool.open()
    pool.step(plan, [row], 9)
    pool.done(plan)
    for k in range(3):
        starving.lose(pool, row, np.array([3 * k], np.int32))
        pool.prefix.commit(row, np.array([3 * k + 1, 3 * k + 2], np.int32))
        starving.call(pool.prefix, "flush", b"nobody")
        pool.prefix.events()
    pool.shutdown()
    drop(plan)
    drop(pool)
    for cached in (False, True):
        options = {"max_seqs": 30, "prefix_cache": cached} | ({"events": 300} if cached else {})
        starving.make("pool", 180, 2, **options)
        options.pop("events", None)  # an event may be lost
        pool = Pool(180, 2, **options)
        starving.make("plan", pool, 25, 200, formats=FORMATS)
        plan = Plan(pool, 25, 200, formats=FORMATS)
        row = starving.call(pool, "open")
        starving.call(pool, "step", plan, [row], 41)
        look(pool, plan)
        starving.call(pool, "done", plan)
        text = np.arange(41, dtype=np.int32)
        if cached:
            pool.prefix.commit(row, text[:1])
            starving.call(pool.prefix, "commit", row, text[1:])
            for k in range(40):
                name = b"%d" % k
                one = starving.call(pool, "open", text[: k % 5 + 1].tolist(), name)
                starving.call(pool.prefix, "flush", b"no %d" % k)
                tried(pool.close, one)
                if k % 7 == 6:
                    starving.call(pool.prefix, "flush", name)
                    starving.call(pool.prefix, "match", text.tolist(), name)
            pool.prefix.stats()
        else:
            ids = starving.call(pool.blocks, "alloc", 20)
            out = np.zeros(20, np.int32)
            starving.call(pool.blocks, "alloc", 20, out=out)
            blocks = pool.blocks
            ids = ids.tolist()
            for name in ("incref", "mark_cached", "decref", "decref", "touch", "free"):
                tried(starving.call, blocks, name, ids)
                tried(starving.call, blocks, name, ids[:17])
                blocks.free_order()
            taken, _ = starving.call(blocks, "take", 18)
            for name in ("touch", "mark_cached", "release", "refcounts", "uncache"):
                starving.call(blocks, name, taken)
            blocks.free_order()
            drop(blocks)
        children = starving.call(pool, "fork", row, 20).tolist()
        starving.call(pool, "step", plan, [row, *children], 1)
        look(pool, plan)
        starving.call(pool, "done", plan)
        starving.call(pool, "truncate", children, [k for k in range(20)])
        starving.call(pool, "close", children)
        starving.call(pool, "evict_blocks", row, [1, 3])
        look(pool)
        pool.shutdown()
        drop(plan)
        drop(pool)
        starving.left()


def groups_without_memory(Pool: Any, Plan: Any, Starving: Any) -> None:
    """The same for pools with layer groups: a row moves its states and copies its blocks."""
    starving = Starving()
    for cached in (False, True):
        states = [Group.state(slots, blocks=int(cached)) for slots in (70, 60)]
        groups = [Group.full(columns=2), Group.window(4, arena=1, num_blocks=160), *states]
        options: dict[str, Any] = {"groups": groups, "max_seqs": 30, "prefix_cache": cached}
        starving.make("pool", 320, 2, **options | ({"events": 300} if cached else {}))
        pool = Pool(320, 2, **options)
        starving.make("plan", pool, 25, 200, formats=GROUP_FORMATS)
        plan, text = Plan(pool, 25, 200, formats=GROUP_FORMATS), [1, 2, 3, 4, 5, 6]
        row = starving.call(pool, "open", *([text, b"", 4] if cached else []))
        for new in (4, 1):
            starving.call(pool, "step", plan, [row], new)
            starving.call(pool, "done", plan)
            if cached:
                starving.call(pool.prefix, "commit", row, text[pool.prefix.committed(row) : pool.num_tokens(row)])
        rows = [row, *starving.call(pool, "fork", row, 20).tolist()]
        late = Plan(pool, 25, 200)  # whose lists are still short when every row only moves its states
        for filled, new in ((plan, 3), (plan, 1), (late, 1), (plan, [1, 2] * 10 + [0])):
            starving.call(pool, "step", filled, rows, new)
            _ = len(filled.served)
            starving.call(pool, "done", filled)
        starving.call(pool, "reserve", plan, rows, 3)
        starving.call(pool, "rollback", plan)
        if cached:
            rows.append(starving.call(pool, "open", text))
            starving.call(pool, "step", plan, rows[-1:], 2)
            starving.call(pool, "done", plan)
            starving.call(pool.prefix, "flush", b"nobody")
        starving.call(pool, "close", rows)
        pool.check()
        pool.shutdown()
        drop(plan)
        drop(late)
        drop(pool)
        starving.left()
