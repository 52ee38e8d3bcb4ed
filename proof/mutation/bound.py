"""Programs about arrays of the caller's that change, arguments that call back, and plans that nobody refers to."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

import kvpool
from kvpool.testing import ModelPlan
from proof.mutation.refused import Wrong
from proof.mutation.scenarios import ARRAYS, FORMATS, look, tried


class Told(np.ndarray):
    """An array that calls when it is asked for its shape or for its base, once each."""

    on_shape: Callable[[], None] | None = None
    on_base: Callable[[], None] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        call, self.on_shape = self.on_shape, None
        if call is not None:
            call()
        return np.shape(self.view(np.ndarray))

    @property
    def base(self) -> Any:
        call, self.on_base = self.on_base, None
        if call is not None:
            call()
        return np.ndarray.base.__get__(self)


class Called:
    """A handle that calls when it is read, once."""

    def __init__(self, handle: int, call: Callable[[], None]) -> None:
        self.handle, self.call = handle, call

    def __index__(self) -> int:
        call, self.call = self.call, lambda: None
        call()
        return self.handle


class Owner:
    """Arrays that are bound as they are, not as copies, and that change afterwards."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}

    def give(self, plan: Any, names: list[str], dtype: str = "int32", fill: int = 77, within: int = 0) -> None:
        """Bind new arrays; `within`: parts of larger ones, from this place on."""
        shapes = {"block_tables": (4, 6), "kv_slots": (4, 24), "seq_lens": (4,), "slot_ids": (4,), "cu_q_lens": (5,)}
        shapes |= {"slot_mapping": (16,), "positions": (16,), "indptr": (5,), "indices": (24,), "last_page_len": (4,)}
        made = {}
        for name in names:
            size = int(np.prod(shapes[name]))
            whole = np.full(size + 2 * within, fill, dtype)
            made[name] = whole[within : within + size].reshape(shapes[name]) if within else whole.reshape(shapes[name])
            made[name] = made[name] if within or len(shapes[name]) > 1 else whole
        plan.bind(**made)
        self.arrays |= made

    def resize(self, name: str, size: int) -> None:
        """Make an array another size, whoever has it."""
        self.arrays[name].resize(size, refcheck=False)

    def written(self, name: str) -> list:
        """What stands in an array, and around it."""
        array = self.arrays[name]
        return (array if array.base is None else array.base).ravel().tolist()

    def deep(self, plan: Any, dimensions: int) -> None:
        """Bind what is a part of an array of many dimensions."""
        plan.bind(seq_lens=np.zeros((4, *[1] * (dimensions - 1)), np.int32).reshape(4))

    def bound_within(self, plan: Any, name: str, other: str, size: int) -> None:
        """Bind an array that binds another one when it is asked for its shape."""
        array = np.full(size, 55, np.int32).view(Told)
        array.on_shape = lambda: self.give(plan, [other], fill=66)
        plan.bind(**{name: array})
        self.arrays[name] = np.asarray(array)

    def stepped_within(self, pool: Any, plan: Any, name: str, size: int, handle: int) -> None:
        """Bind an array that makes a step with the plan when it is asked for its shape."""
        array = np.full(size, 55, np.int32).view(Told)
        array.on_shape = lambda: pool.step(plan, [handle], 1)
        plan.bind(**{name: array})

    def resized_within(self, plan: Any, name: str, size: int) -> None:
        """Bind an array that has another size when it is asked for its base."""
        array = Told((size,), np.int32)
        array[:] = 55
        array.on_base = lambda: np.ndarray.resize(array, size + 3, refcheck=False)
        plan.bind(**{name: array})

    def called_within(self, pool: Any, call: str, plan: Any, handle: int, other: int) -> None:
        """Make a call with a plan whose step begins when the handle is read."""
        handles = [Called(handle, lambda: pool.step(plan, [other], 1))]
        getattr(pool, call)(plan, handles, 1)

    def overwrite(self, plan: Any, name: str) -> None:
        """Write into what a plan shows."""
        getattr(plan, name)[...] = 0


class Lives:
    """A plan that this object alone refers to, and the pool while it needs it."""

    def make(self, pool: Any, rows: int = 3, tokens: int = 30) -> None:
        """A plan of the pool, in the place of the one before."""
        kind = kvpool.Plan if isinstance(pool, kvpool.Pool) else ModelPlan
        self.plan = kind(pool, rows, tokens)
        self.seen = weakref.ref(self.plan)

    def call(self, pool: Any, name: str, *arguments: Any) -> Any:
        """A call of the pool with the plan."""
        return getattr(pool, name)(self.plan, *arguments)

    def lives_on(self) -> bool:
        """Whether the plan is there when nobody here refers to it."""
        del self.plan
        gc.collect()
        return self.seen() is not None


def arrays_that_change(Pool: Any, Plan: Any, Owner: Any) -> None:
    """Bound arrays are resized, bound within each other, and bound again; parts of others are written to alone."""
    owner = Owner()
    for dtype in ("int32", "int64"):
        pool = Pool(60, 4, max_seqs=8, max_blocks_per_seq=6)
        plan = Plan(pool, 4, 16, formats=FORMATS, dtype=dtype)
        rows = [pool.open() for _ in range(4)]
        for names in (["seq_lens"], ["slot_ids", "cu_q_lens", "seq_lens"], ["positions", "slot_mapping", "indptr"]):
            for name in names:
                owner.give(plan, names, dtype)
                tried(pool.step, plan, rows, 1)
                ended_and_read(pool, plan, owner, names)
                owner.resize(name, 50)
                for call in (pool.step, pool.reserve, pool.unshare):
                    try:
                        call(plan, rows, 0)
                    except BufferError:
                        continue
                    pool.rollback(plan)
                _ = plan.is_pending
                owner.give(plan, [name], dtype)
                tried(pool.step, plan, rows, 0)
                ended_and_read(pool, plan, owner, names)
                pool.truncate(rows, 0)
        for within in (1, 3):
            owner.give(plan, ["seq_lens", "cu_q_lens", "positions", "slot_mapping"], dtype, 44, within)
            pool.step(plan, rows, [1, 2, 0, 3])
            ended_and_read(pool, plan, owner, ["seq_lens", "cu_q_lens", "positions", "slot_mapping"])
        for names in (["kv_slots"], ["block_tables", "last_page_len"], ["kv_slots", "block_tables"]):
            owner.give(plan, names, dtype, 33)
            for turn in range(3):
                pool.step(plan, rows[: 2 + turn], 1, pad_to=(4, 8))
                ended_and_read(pool, plan, owner, names)
            pool.truncate(rows, 1)
        pool.shutdown()


def ended_and_read(pool: Any, plan: Any, owner: Any, names: list[str]) -> None:
    """End a step, and read what it wrote."""
    look(pool, plan)
    if plan.is_pending:
        pool.done(plan)
    for name in names:
        owner.written(name)


def arguments_that_call(Pool: Any, Plan: Any, Owner: Any) -> None:
    """Arrays that bind others while they are bound, or begin a step; handles that do."""
    owner = Owner()
    pool = Pool(60, 4, max_seqs=8, max_blocks_per_seq=6)
    plan = Plan(pool, 4, 16, formats=FORMATS)
    rows = [pool.open() for _ in range(4)]
    pool.step(plan, rows, 3)
    pool.done(plan)
    for name, size, other in (("seq_lens", 4, "slot_mapping"), ("positions", 16, "seq_lens"), ("indptr", 5, "indptr")):
        owner.bound_within(plan, name, other, size)
        pool.step(plan, rows, [1, 0, 2, 1])
        ended_and_read(pool, plan, owner, [name, other])
        tried(owner.resize, other, 40)
        try:
            pool.step(plan, rows, 0)
        except BufferError:
            owner.give(plan, [other])
        if plan.is_pending:
            pool.rollback(plan)
    for call in ("step", "reserve", "unshare"):
        tried(owner.called_within, pool, call, plan, rows[0], rows[1])
        look(pool, plan)
        tried(pool.table, rows[1])
        tried(pool.num_tokens, rows[0])
        if plan.is_pending:
            pool.rollback(plan)
    pool.shutdown()


def bindings_that_are_refused_late(Pool: Any, Plan: Any, Owner: Any, Wrong: Any) -> None:
    """What is right when it is looked at and wrong when it is bound; arrays of many dimensions; those to read only."""
    owner, wrong = Owner(), Wrong()
    pool = Pool(60, 4, max_seqs=8, max_blocks_per_seq=6)
    plan = Plan(pool, 4, 16, formats=FORMATS)
    rows = [pool.open() for _ in range(4)]
    for name, size in (("seq_lens", 4), ("cu_q_lens", 5)):
        tried(owner.stepped_within, pool, plan, name, size, rows[0])
        look(pool, plan)
        if plan.is_pending:
            pool.rollback(plan)
        tried(owner.resized_within, plan, name, size)
        pool.step(plan, rows, 1)
        look(pool, plan)
        pool.done(plan)
    for dimensions in (1, 2, 7, 8, 9, 10):
        tried(owner.deep, plan, dimensions)
        pool.step(plan, rows, 1)
        look(pool, plan)
        pool.done(plan)
    for name in (*ARRAYS, "handles"):
        tried(owner.overwrite, plan, name)
    words_while_pending(pool, plan, rows, wrong)
    for kv, width, formats in ((2**31, 4, "kv_slots_ragged"), (2**31 + 1, 1, "kv_slots_ragged")):
        tried(Plan, pool, 1, 4, formats=(formats,), kv_width=kv, table_width=width)
    pool.shutdown()


def words_while_pending(pool: Any, plan: Any, rows: list[int], wrong: Any) -> None:
    """What plans say of themselves, pending and not."""
    pool.step(plan, rows, 0)
    wrong.call(plan, "__repr__")
    pool.done(plan)
    wrong.call(plan, "__repr__")


def copies_that_outgrow_a_plan(Pool: Any, Plan: Any) -> None:
    """A plan that shows few copies gets room for more, and shows few again."""
    pool = Pool(90, 2, max_seqs=8)
    plan = Plan(pool, 2, 20)
    parent = pool.open()
    pool.step(plan, [parent], 15)
    pool.done(plan)
    rows = pool.fork(parent, 4).tolist()
    for first, many in ((0, 1), (1, 2), (2, 3)):
        pool.step(plan, rows[first : first + 1], 1)
        _ = plan.copies, plan.served, len(plan.copies), plan.copies[:, 2].sum()
        pool.rollback(plan)
        tried(pool.unshare, plan, rows[:many], 1)
        if plan.is_pending:
            pool.rollback(plan) if first == 1 else pool.done(plan)
        (young,) = pool.fork(rows[first], 1).tolist()
        pool.step(plan, [young], 1)
        _ = plan.copies, plan.served, len(plan.copies), plan.copies[:, 2].sum()
        pool.done(plan)
        pool.close(young)
    pool.shutdown()


def plans_that_nobody_refers_to(Pool: Any, Plan: Any, Lives: Any) -> None:
    """A pool keeps a plan while its step is pending, no longer, however that ends; a refused step keeps none."""
    for in_order in (False, True):
        pool = Pool(40, 4, max_seqs=8, max_blocks_per_seq=6, in_order=in_order)
        rows = [pool.open() for _ in range(3)]
        for calls in (
            [], ["step"], ["step", "done"], ["step", "rollback"], ["reserve", "done"], ["unshare"],
            ["unshare", "rollback"],
            ["step", "reset"], ["refused"], ["not unshared"], ["refused", "step", "done"], ["step", "done", "step"],
        ):  # fmt: skip
            lives = Lives()
            lives.make(pool)
            for name in calls:
                if name == "reset":
                    pool.reset()
                    rows = [pool.open() for _ in range(3)]
                elif name == "refused":
                    tried(lives.call, pool, "step", rows, 100)
                elif name == "not unshared":
                    tried(lives.call, pool, "unshare", rows, 100)
                else:
                    tried(lives.call, pool, name, *([rows, 0] if name in ("step", "reserve", "unshare") else []))
            lives.lives_on()
            pool.reset()
            rows = [pool.open() for _ in range(3)]
        waiting = [Lives() for _ in range(20)]
        for lives in waiting:
            lives.make(pool)
            lives.call(pool, "step", rows, 0)
        if not in_order:
            for lives in waiting[1:]:
                lives.call(pool, "done")
            for lives in waiting[1:3]:
                lives.lives_on()
            waiting[0].call(pool, "done")
        for lives in [*waiting[3:], waiting[0]]:
            lives.lives_on()
        pool.shutdown()


def plans_of_pools_that_ended(Pool: Any, Plan: Any, Lives: Any) -> None:
    """A pool that was shut down keeps no plan."""
    for in_order in (False, True):
        pool = Pool(40, 4, max_seqs=8, in_order=in_order)
        last = Lives()
        last.make(pool)
        last.call(pool, "step", [pool.open()], 0)
        pool.shutdown()
        last.lives_on()


#: Programs and what they need beside pools and plans: those that the model runs too, and the others.
JUDGED: dict[Callable[..., None], dict[str, Any]] = {
    arrays_that_change: {"Owner": Owner},
    arguments_that_call: {"Owner": Owner},
    copies_that_outgrow_a_plan: {},
    plans_that_nobody_refers_to: {"Lives": Lives},
}
UNJUDGED: dict[Callable[..., None], dict[str, Any]] = {
    bindings_that_are_refused_late: {"Owner": Owner, "Wrong": Wrong},
    plans_of_pools_that_ended: {"Lives": Lives},
}
