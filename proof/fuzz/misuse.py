"""Calls that have to be refused in any state: the fuzzer makes them, and sees that nothing changed.

Each function gets `Facts` about a pool and returns the exception that is documented for a call and the call itself;
``(None, None)`` where the state has nothing to misuse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpool import errors

Attempt = tuple[Any, Any]
NOTHING: Attempt = (None, None)


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known about the pool, and two random numbers."""

    pool: Any
    live: list[int]  # some open handles
    stale: list[int]  # some dead ones
    queue: list[Any]  # pending plans, oldest first
    idle: list[Any]  # plans that are not pending
    b: int
    c: int
    refcount: Callable[[int], int]  # of a block, as it has to be
    table: Callable[[int], list[int]]  # of an open handle
    loading: list[int]  # open handles of sequences that are loaded

    @property
    def foreign(self) -> int:
        """A handle of another pool."""
        return ((self.live or self.stale or [1 << 52])[0] ^ (1 << 52)) | (1 << 53)

    @property
    def block(self) -> int:
        """Any block that may be handed out."""
        first = self.pool.options.reserved_blocks
        return int(first + self.b % (self.pool.num_blocks - first))


def _on_handle(facts: Facts, handle: int) -> Callable[[], Any]:
    """Some call that takes a handle."""
    pool = facts.pool
    calls: list[Callable[[], Any]] = [
        lambda: pool.close(handle),
        lambda: pool.close([*facts.live, handle]),
        lambda: pool.fork(handle),
        lambda: pool.truncate(handle, 0),
        lambda: pool.table(handle),
        lambda: pool.can([handle]),
    ]
    if facts.idle:
        calls.append(lambda: pool.step(facts.idle[0], [*facts.live, handle][-facts.idle[0].limits.max_rows :], 0))
    return calls[facts.c % len(calls)]


def stale(facts: Facts) -> Attempt:
    """A handle that was closed."""
    if not facts.stale:
        return NOTHING
    return errors.StaleHandle, _on_handle(facts, facts.stale[facts.b % len(facts.stale)])


def foreign(facts: Facts) -> Attempt:
    """A handle of another pool."""
    return errors.ForeignHandle, _on_handle(facts, facts.foreign)


def negative(facts: Facts) -> Attempt:
    """A number that is no handle."""
    return ValueError, _on_handle(facts, -1 - facts.b)


def duplicate(facts: Facts) -> Attempt:
    """A handle twice in one batch."""
    if not facts.live:
        return NOTHING
    pool, twice = facts.pool, [facts.live[0], facts.live[0]]
    calls: list[Callable[[], Any]] = [
        lambda: pool.close(twice),
        lambda: pool.close_finished(twice, [True, True]),
        lambda: pool.truncate(twice, [0, 0]),
        lambda: pool.can(twice, 0),
    ]
    return ValueError, calls[facts.c % len(calls)]


def block_out_of_range(facts: Facts) -> Attempt:
    """A block that is none."""
    pool, block = facts.pool, (-1 if facts.b & 1 else facts.pool.num_blocks + facts.b % 5)
    call = ("incref", "decref", "free")[facts.c % 3]
    return IndexError, lambda: getattr(pool.blocks, call)([block])


def block_reserved(facts: Facts) -> Attempt:
    """A block that is never handed out."""
    if not facts.pool.options.reserved_blocks:
        return NOTHING
    call = ("incref", "decref", "free")[facts.c % 3]
    return ValueError, lambda: getattr(facts.pool.blocks, call)(0)


def block_twice(facts: Facts) -> Attempt:
    """A block twice in one call."""
    call = ("incref", "decref", "free")[facts.c % 3]
    return (ValueError, errors.DoubleFree), lambda: getattr(facts.pool.blocks, call)([facts.block, facts.block])


def block_of_a_sequence(facts: Facts) -> Attempt:
    """A reference that is not the caller's to drop."""
    pool, call = facts.pool, ("decref", "free")[facts.c % 2]
    tables = [block for handle in facts.live for block in facts.table(handle)]
    own = [block for block in tables if facts.refcount(block) == 1]  # the reference is the sequence's
    return (errors.DoubleFree, lambda: getattr(pool.blocks, call)(own[0])) if own else NOTHING


def block_unreferenced(facts: Facts) -> Attempt:
    """A block that nobody refers to."""
    pool, block = facts.pool, facts.block
    if facts.refcount(block):
        return NOTHING
    call = ("incref", "decref", "free")[facts.c % 3]
    return errors.DoubleFree, lambda: getattr(pool.blocks, call)(block)


def negative_count(facts: Facts) -> Attempt:
    """Fewer than no tokens."""
    pool = facts.pool
    calls: list[Callable[[], Any]] = [
        lambda: pool.open(-1),
        lambda: pool.blocks.alloc(-1),
        lambda: pool.blocks.evict(-1),
    ]
    if facts.live:
        calls.append(lambda: pool.fork(facts.live[0], -1))
        calls.append(lambda: pool.truncate(facts.live[0], -1))
        calls.append(lambda: pool.can(facts.live[:1], -1))
    if facts.live and facts.idle:
        calls.append(lambda: pool.step(facts.idle[0], facts.live[:1], -1))
    return ValueError, calls[facts.c % len(calls)]


def wrong_type(facts: Facts) -> Attempt:
    """What is no whole number."""
    pool, wrong = facts.pool, (1.5, "1", True, None, b"1")[facts.b % 5]
    calls: list[Callable[[], Any]] = [
        lambda: pool.fork(wrong),
        lambda: pool.close(wrong),
        lambda: pool.table(wrong),
        lambda: pool.blocks.incref(wrong),
    ]
    return TypeError, calls[facts.c % len(calls)]


def misaligned(facts: Facts) -> Attempt:
    """Memory that begins at an odd address."""
    pool, handle = facts.pool, (facts.live or [0])[0]
    memory = bytearray(24)
    at = 1 - (np.frombuffer(memory, np.uint8).ctypes.data & 1)
    view = memoryview(memory)[at : at + 16].cast("q")
    view[0] = view[1] = handle if facts.c % 4 < 2 else facts.block
    calls: list[Callable[[], Any]] = [
        lambda: pool.close(view[:1]),
        lambda: pool.can(view[:1]),
        lambda: pool.blocks.incref(view[:1]),
        lambda: pool.blocks.decref(view),
    ]
    return ValueError, calls[facts.c % len(calls)]


class _Shortens:
    """A number that takes items from the list that it is read from."""

    def __init__(self, batch: list[Any], number: int) -> None:
        self.batch, self.number = batch, number

    def __index__(self) -> int:
        del self.batch[1:]
        return self.number


def list_that_changes(facts: Facts) -> Attempt:
    """A list that is shorter when it has been read than when the call began."""
    pool, batch = facts.pool, [0, 0, 0]
    batch[0] = _Shortens(batch, (facts.live or [0])[0])  # type: ignore[call-overload]
    calls: list[Callable[[], Any]] = [
        lambda: pool.close(batch),
        lambda: pool.can(batch),
        lambda: pool.blocks.incref(batch),
        lambda: pool.truncate(batch, 0),
    ]
    return ValueError, calls[facts.c % len(calls)]


def bound_array_moved(facts: Facts) -> Attempt:
    """A step into an array that was resized since it was bound."""
    if not facts.idle or not facts.live:
        return NOTHING
    pool, lens = facts.pool, np.zeros(2, np.int32)
    plan = type(facts.idle[0])(pool, 2, formats=("seq_lens",), out={"seq_lens": lens})
    lens.resize(3 + facts.b % 4096, refcheck=False)
    call = ("step", "reserve", "unshare")[facts.c % 3]
    return BufferError, lambda: getattr(pool, call)(plan, facts.live[:1], 0)


def plan_pending(facts: Facts) -> Attempt:
    """A step on a plan that is pending."""
    if not facts.queue:
        return NOTHING
    plan = facts.queue[facts.b % len(facts.queue)]
    call = ("step", "reserve")[facts.c % 2]
    return errors.PlanStateError, lambda: getattr(facts.pool, call)(plan, facts.live[: plan.limits.max_rows], 0)


def plan_idle(facts: Facts) -> Attempt:
    """The end of a step that is not pending."""
    if not facts.idle:
        return NOTHING
    call = ("done", "rollback")[facts.c % 2]
    return errors.PlanStateError, lambda: getattr(facts.pool, call)(facts.idle[0])


def rollback_of_an_older(facts: Facts) -> Attempt:
    """A step is taken back before those behind it."""
    if len(facts.queue) < 2:
        return NOTHING
    return errors.PlanStateError, lambda: facts.pool.rollback(facts.queue[0])


def too_many_rows(facts: Facts) -> Attempt:
    """A batch that the plan cannot hold."""
    if not facts.idle or len(facts.live) <= facts.idle[0].limits.max_rows:
        return NOTHING
    return errors.CapacityExceeded, lambda: facts.pool.step(facts.idle[0], facts.live, 0)


def bad_padding(facts: Facts) -> Attempt:
    """Arrays padded to more than they hold."""
    if not facts.idle:
        return NOTHING
    plan = facts.idle[0]
    return ValueError, lambda: facts.pool.step(plan, [], 0, pad_to=(plan.limits.max_rows + 1, 0))


def loaded_by_somebody(facts: Facts) -> Attempt:
    """A call on a sequence whose blocks somebody else still writes."""
    if not facts.loading:
        return NOTHING
    pool, handle = facts.pool, facts.loading[facts.b % len(facts.loading)]
    calls: list[Callable[[], Any]] = [
        lambda: pool.fork(handle),
        lambda: pool.truncate(handle, 0),
        lambda: pool.compact(handle, 0),
        lambda: pool.evict_blocks(handle, []),
        lambda: pool.can([handle], 0),
    ]
    if pool.prefix is not None:
        calls.append(lambda: pool.prefix.commit(handle, []))
    if facts.idle:
        plan = facts.idle[0]
        calls += [
            lambda: pool.step(plan, [*facts.live, handle][-plan.limits.max_rows :], 0),
            lambda: pool.reserve(plan, [handle], 1),
            lambda: pool.unshare(plan, [handle], [0]),
        ]
    return errors.PlanStateError, calls[facts.c % len(calls)]


def loaded_by_nobody(facts: Facts) -> Attempt:
    """The end of a load that never began."""
    return (errors.PlanStateError, lambda: facts.pool.loaded(facts.live[0], 0)) if facts.live else NOTHING


MISUSES = (
    *(stale, foreign, negative, duplicate, block_out_of_range, block_reserved, block_twice, block_of_a_sequence),
    *(block_unreferenced, negative_count, wrong_type, plan_pending, plan_idle, rollback_of_an_older, too_many_rows),
    *(bad_padding, misaligned, list_that_changes, bound_array_moved),
    *(loaded_by_somebody, loaded_by_nobody),
)
