"""A batch that does not find its blocks changes nothing: at every need of 1 to 64 blocks and every number free below.

One *case* is a kind of call: many blocks for one row, a block for each of many rows, copies of shared tails, prompts
whose hits lie among the evictable blocks, a watermark, a mixture of blank and cached blocks, `partial`. One *point* is
a case with a need and a number of blocks that are there. What the error must say is worked out here from these two.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import kvpool
from kvpool import OutOfBlocks
from proof.figure import Budget, Figure

NAME = "exhaustion"
TARGET = "all-or-nothing at 100 % of >= 2,000 points"
LARGEST = 64
COMMAND = "python -m proof exhaustion"
Call = Callable[[], Any]


class Scene:
    """A pool in which `free` blocks are left, and the call that needs `need` of them."""

    def __init__(self, pool_type: type, need: int, **options: Any) -> None:
        self.need, self.row = need, 0  # row: what the error names when so many blocks are there, None: the first short
        self.pool = pool_type(1 + 4 * need + 8, 2, max_seqs=2 * need + 8, seed=1, **options)
        self.plan = kvpool.Plan(self.pool, need + 1, 2 * need + 2, table_width=need + 2)
        self.call: Call = lambda: None
        self.rows_short = False  # the first row that is short is row `free`
        self.held: list[int] = []
        self.margin = 0  # blocks that must be there beside the need

    def grow(self, handle: int, count: int) -> None:
        """Write tokens and wait for them."""
        plan = kvpool.Plan(self.pool, 1, count, formats=())
        self.pool.step(plan, [handle], count)
        self.pool.done(plan)

    def squeeze(self, mixed: bool = False) -> None:
        """Take every block; they come back one by one, every other one cached when `mixed`."""
        self.held = self.pool.blocks.alloc(self.pool.stats().blank).tolist()
        if mixed:
            self.pool.blocks.mark_cached(self.held[::2])

    def shown(self) -> tuple:
        """All that a refused call must leave alone."""
        plan = self.plan
        return (
            self.pool.fingerprint(), self.pool.digest(), self.pool.stats(), plan.is_pending, len(plan.handles),
            plan.num_tokens, plan.copies.tolist(), plan.block_tables.tolist(), plan.handles.tolist(),
        )  # fmt: skip


def one_row(scene: Scene, verb: str = "step") -> None:
    handle = scene.pool.open()
    scene.call = lambda: getattr(scene.pool, verb)(scene.plan, [handle], 2 * scene.need)


def many_rows(scene: Scene, verb: str = "step") -> None:
    handles = [scene.pool.open() for _ in range(scene.need)]
    scene.rows_short = True
    scene.call = lambda: getattr(scene.pool, verb)(scene.plan, handles, 1)


def copies(scene: Scene) -> None:
    """need + 1 sequences share a tail; the last one writes in place."""
    parent = scene.pool.open()
    scene.grow(parent, 1)
    rows = [parent, *scene.pool.fork(parent, scene.need).tolist()]
    scene.rows_short = True
    scene.call = lambda: scene.pool.step(scene.plan, rows, 1)


def own_blocks(scene: Scene) -> None:
    """A sequence that shares all its blocks gets copies of them."""
    parent = scene.pool.open()
    scene.grow(parent, 2 * scene.need)
    child = scene.pool.fork(parent, 1)
    scene.call = lambda: scene.pool.unshare(scene.plan, child, 2 * scene.need - 1)


def own_rows(scene: Scene) -> None:
    """need children of a sequence, a copy each."""
    parent = scene.pool.open()
    scene.grow(parent, 2)
    children = scene.pool.fork(parent, scene.need)
    scene.rows_short = True
    scene.call = lambda: scene.pool.unshare(scene.plan, children, 1)


def prompt(scene: Scene) -> None:
    """The first blocks of the prompt are cached, evictable, and no room for the rest of it."""
    hits = min(3, scene.need)
    tokens = np.arange(2 * (hits + scene.need), dtype=np.int32)
    first = scene.pool.open(tokens[: 2 * hits])
    scene.grow(first, 2 * hits)
    scene.pool.prefix.commit(first, tokens[: 2 * hits])
    scene.pool.close(first)
    scene.call = lambda: scene.pool.open(tokens)


def watermark(scene: Scene) -> None:
    scene.margin = 5
    scene.call = lambda: scene.pool.open(2 * scene.need)


def raw(scene: Scene) -> None:
    scene.call = lambda: scene.pool.blocks.alloc(scene.need)


CASES: dict[str, tuple[Callable[[Scene], None], dict[str, Any], bool]] = {  # what to do, the pool's options, mixed
    "step, one row": (one_row, {}, False),
    "step, one row, half of the blocks cached": (one_row, {}, True),
    "step, a block per row": (many_rows, {}, False),
    "step, a block per row, half of the blocks cached": (many_rows, {}, True),
    "step, copies of a shared tail": (copies, {}, False),
    "reserve, one row": (lambda scene: one_row(scene, "reserve"), {}, False),
    "reserve, a block per row": (lambda scene: many_rows(scene, "reserve"), {}, True),
    "unshare, one row": (own_blocks, {}, True),
    "unshare, a block per row": (own_rows, {}, False),
    "open, watermark": (watermark, {"watermark": 5}, False),
    "alloc": (raw, {}, True),
}


def refusal(scene: Scene, free: int) -> str | None:
    """What is wrong with a call that is `need - free` blocks short."""
    pool, short = scene.pool, scene.need + scene.margin - free
    before = scene.shown()
    try:
        scene.call()
    except OutOfBlocks as error:
        stats = pool.stats()
        said = (error.needed, error.short_by, error.blank, error.blank + error.evictable, error.limbo)
        if scene.shown() != before:
            return "the refused call changed the state"
        if said != (scene.need, short, stats.blank, free, 0):
            return f"needed, short_by, free, free + evictable, limbo are {said}"
        row = max(free - scene.margin, 0) if scene.rows_short else 0
        if error.row not in (row, -1) or (scene.rows_short and error.row != row):
            return f"row {error.row} is called the first that is short, it is {row}"
        return None
    return "the call was not refused"


def acceptance(scene: Scene) -> str | None:
    """What is wrong with a call whose blocks are all there."""
    try:
        scene.call()
    except OutOfBlocks as error:
        return f"refused: {error}"
    scene.pool.check()
    return None


def partial(scene: Scene, free: int) -> str | None:
    """With `partial` exactly the first `free` rows are served, and a rollback gives back what they took."""
    before = scene.pool.stats()
    handles = [scene.pool.open() for _ in range(scene.need)]
    scene.pool.step(scene.plan, handles, 1, partial=True)
    served = scene.plan.served.tolist()
    scene.pool.rollback(scene.plan)
    scene.pool.close(handles)
    after = scene.pool.stats()
    if served != [1] * free + [0] * (scene.need - free):
        return f"served {sum(served)} rows {served}"
    return None if after[:7] == before[:7] else f"{before} became {after}"


def sequences(pool_type: type, need: int) -> Iterator[str | None]:
    """`fork` with fewer slots than children."""
    pool = pool_type(4 + need, 2, max_seqs=need + 1, seed=1)
    parent = pool.open()
    others = [pool.open() for _ in range(need)]
    for handle in others:
        before = pool.fingerprint(), pool.digest()
        try:
            pool.fork(parent, need)
            yield "the fork was not refused"
        except kvpool.OutOfSequences:
            yield None if (pool.fingerprint(), pool.digest()) == before else "the refused fork changed the state"
        pool.close(handle)
    pool.fork(parent, need)


def points(pool_type: type, needs: range) -> Iterator[tuple[str, str | None]]:
    """Every point, and what is wrong there."""
    for need in needs:
        for name, (arrange, options, mixed) in CASES.items():
            scene = Scene(pool_type, need, **options)
            arrange(scene)
            scene.squeeze(mixed)
            for free in range(need + scene.margin):
                yield f"{name}, need {need}, free {free}", refusal(scene, free)
                scene.pool.blocks.free(scene.held[free])
            yield f"{name}, need {need}, all there", acceptance(scene)
        yield from prompt_points(pool_type, need)
        scene = Scene(pool_type, need)
        scene.squeeze()
        for free in range(need):
            yield f"partial, need {need}, free {free}", partial(scene, free)
            scene.pool.blocks.free(scene.held[free])
        scene.pool.check()
        for free, wrong in enumerate(sequences(pool_type, need)):
            yield f"fork, need {need}, free slots {free}", wrong


def prompt_points(pool_type: type, need: int) -> Iterator[tuple[str, str | None]]:
    """Points of a prompt with hits: the blank blocks are taken by others, one after the other less."""
    for free in range(need):
        scene = Scene(pool_type, need, prefix_cache=True)
        prompt(scene)
        stats = scene.pool.stats()
        scene.pool.blocks.alloc(stats.blank - free)
        yield f"open, hits among the evictable blocks, need {need}, free {free}", refusal(scene, free)
        scene.pool.check()


def measure_on(pool_type: type, budget: Budget) -> Figure:
    """The figure of one implementation of a pool."""
    start, total, wrong = time.monotonic(), 0, []
    step = 1 if budget.share >= 1 else 16  # needs 1, 17, 33, 49
    for name, finding in points(pool_type, range(1, LARGEST + 1, step)):
        total += 1
        if finding:
            wrong.append(f"{name}: {finding}")
    measured = f"{total - len(wrong):,} of {total:,} points, {len(CASES) + 4} kinds of calls"
    enough = total >= (2000 if budget.share >= 1 else 200)
    return Figure(
        NAME, TARGET, measured, not wrong and enough, COMMAND, time.monotonic() - start, "\n".join(wrong[:20])
    )


def measure(budget: Budget) -> Figure:
    """The core."""
    return measure_on(kvpool.Pool, budget)


class Greedy(kvpool.Pool):
    """A pool that takes what is there before it finds out that it is not enough."""

    def step(self, plan: Any, handles: Any, num_new: Any = 1, **options: Any) -> None:
        """Like the core's, but not all or nothing."""
        try:
            super().step(plan, handles, num_new, **options)
        except OutOfBlocks:
            if self.blocks.num_blank:
                self.blocks.alloc(1)
            raise


def planted(budget: Budget) -> Figure:
    """A pool that is not all-or-nothing."""
    return measure_on(Greedy, budget)
