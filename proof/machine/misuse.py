"""Calls that should be refused, for `proof.machine.machine`.

Each entry takes the machine and a small number, and returns a call for either side, or None when the state
offers no such misuse. A call may turn out to be legal; the oracle decides, and the pool must agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from proof.machine.machine import PoolMachine
    from proof.machine.pair import Side

Call = Callable[["Side"], Any]
WRONG_TYPES: tuple[Any, ...] = (True, 1.0, "1", None, np.float64(2), np.bool_(False), b"1", 1j)
SEQUENCE_CALLS: tuple[Callable[[Side, Any], Any], ...] = (
    lambda side, h: side.pool.fork(h),
    lambda side, h: side.pool.truncate(h, 0),
    lambda side, h: side.pool.close(h),
    lambda side, h: side.pool.close([h]),
    lambda side, h: side.pool.close_finished([h], np.ones(1, bool)),
    lambda side, h: side.pool.table(h),
    lambda side, h: side.pool.num_tokens(h),
    lambda side, h: side.pool.capacity(h),
    lambda side, h: side.pool.can([h], 1),
    lambda side, h: side.pool.is_open(h),
)
STEP_CALLS: tuple[Callable[[Side, Any, Any], Any], ...] = (
    lambda side, plan, handles: side.pool.step(plan, handles, 0),
    lambda side, plan, handles: side.pool.reserve(plan, handles, 0),
)
BLOCK_CALLS: tuple[Callable[[Side, Any], Any], ...] = (
    lambda side, ids: side.pool.blocks.incref(ids),
    lambda side, ids: side.pool.blocks.decref(ids),
    lambda side, ids: side.pool.blocks.free(ids),
    lambda side, ids: side.pool.blocks.mark_cached(ids),
    lambda side, ids: side.pool.blocks.touch(ids),
    lambda side, ids: side.pool.blocks.refcount(ids),
)


def _idle(machine: PoolMachine, pick: int) -> int | None:
    idle = [i for i, plan in enumerate(machine.pair.oracle.plans) if not plan.is_pending]
    return idle[pick % len(idle)] if idle else None


def _handle(machine: PoolMachine, pick: int, name: int, flip: int = 0) -> Call:
    """A bad handle in any call that takes one; `flip` changes bits of the tag."""
    index = _idle(machine, pick)
    which = pick % (len(SEQUENCE_CALLS) + len(STEP_CALLS))
    if index is None or which < len(SEQUENCE_CALLS):
        which %= len(SEQUENCE_CALLS)
        return lambda side: SEQUENCE_CALLS[which](side, side.handle(name) ^ flip << 52)
    step = STEP_CALLS[which - len(SEQUENCE_CALLS)]
    rows = machine.opened()[:2]
    return lambda side: step(side, side.plans[index], [*side.batch(rows, False), side.handle(name) ^ flip << 52])


def stale_handle(machine: PoolMachine, pick: int) -> Call:
    """A closed sequence."""
    return _handle(machine, pick, machine.dead[-1 - pick % len(machine.dead)])


def future_handle(machine: PoolMachine, pick: int) -> Call:
    """A generation or a slot that was never handed out."""
    return _handle(machine, pick, 5 << 40 | pick if pick % 2 else (1 << 20) - 1)


def foreign_handle(machine: PoolMachine, pick: int) -> Call:
    """A live sequence under the tag of another pool."""
    return _handle(machine, pick, machine.opened()[0] if machine.any_open() else 0, flip=1 + pick)


def handle_of_wrong_type(machine: PoolMachine, pick: int) -> Call:
    """Anything but an int."""
    wrong = WRONG_TYPES[pick % len(WRONG_TYPES)]
    which = (pick * 7 + machine.turn) % len(SEQUENCE_CALLS)
    return lambda side: SEQUENCE_CALLS[which](side, wrong)


def handle_out_of_range(machine: PoolMachine, pick: int) -> Call:
    """Negative, or 2^63 and more."""
    wrong = (-1, 2**63, 2**64 + 5, -(2**63) - 1)[pick % 4]
    which = machine.turn % len(SEQUENCE_CALLS)
    return lambda side: SEQUENCE_CALLS[which](side, wrong)


def duplicate_handles(machine: PoolMachine, pick: int) -> Call | None:
    """One sequence twice in a batch."""
    if not machine.any_open():
        return None
    rows = [*machine.opened()[:3], machine.opened()[0]]
    index = _idle(machine, pick)
    if pick % 4 == 0:
        return lambda side: side.pool.close(side.batch(rows, True))
    if pick % 4 == 1:
        return lambda side: side.pool.truncate(side.batch(rows, False), 0)
    if pick % 4 == 2 or index is None:
        return lambda side: side.pool.can(side.batch(rows, True), 0)
    return lambda side: STEP_CALLS[pick % 2](side, side.plans[index], side.batch(rows[-2:] + rows[:1], True))


def handles_of_wrong_form(machine: PoolMachine, pick: int) -> Call:
    """Arrays of other dtypes, shapes or strides."""
    name = machine.opened()[0] if machine.any_open() else 0
    forms: tuple[Callable[[int], Any], ...] = (
        lambda h: np.array([h], np.uint64),
        lambda h: np.array([h], np.float64),
        lambda h: np.array([[h]], np.int64),
        lambda h: np.array([h, 0, h + 1, 0], np.int64)[::2],
        lambda h: np.array([h], ">i8"),
        lambda h: np.array([], np.int32),
        lambda h: "12",
    )
    form = forms[pick % len(forms)]
    return lambda side: side.pool.close(form(side.handle(name)))


class Shortens:
    """A number that takes items from the list that it is read from."""

    def __init__(self, batch: list[Any], number: int) -> None:
        self.batch, self.number = batch, number

    def __index__(self) -> int:
        del self.batch[1:]
        return self.number


def list_that_changes(machine: PoolMachine, pick: int) -> Call:
    """A list that is shorter when it has been read than when the call began."""
    name = machine.opened()[0] if machine.any_open() else 0
    calls: tuple[Callable[[Side, Any], Any], ...] = (
        lambda side, batch: side.pool.close(batch),
        lambda side, batch: side.pool.can(batch),
        lambda side, batch: side.pool.truncate(batch, 0),
        lambda side, batch: side.pool.blocks.incref(batch),
    )

    def make(side: Side) -> Any:
        batch: list[Any] = [0, 0, 0]
        batch[0] = Shortens(batch, side.handle(name))
        return calls[pick % len(calls)](side, batch)

    return make


def pending_plan(machine: PoolMachine, pick: int) -> Call | None:
    """A plan whose step is not through, noted or not."""
    pending = [i for i, plan in enumerate(machine.pair.oracle.plans) if plan.is_pending]
    if not pending:
        return None
    index, rows = pending[pick % len(pending)], machine.opened()[:2]
    if pick % 3 == 2:
        return lambda side: side.plans[index].bind()
    return lambda side: STEP_CALLS[pick % 3](side, side.plans[index], side.batch(rows, True))


def idle_plan(machine: PoolMachine, pick: int) -> Call | None:
    """`done` or `rollback` where neither is due: idle, or noted already."""
    index = [i for i in range(len(machine.pair.oracle.plans)) if i not in machine.before]
    if not index:
        return None
    i = index[pick % len(index)]
    if pick % 2:
        return lambda side: side.pool.done(side.plans[i])
    return lambda side: side.pool.rollback(side.plans[i])


def plan_of_another_pool(machine: PoolMachine, pick: int) -> Call:
    """A plan built for another pool."""
    calls: tuple[Call, ...] = (
        lambda side: side.pool.step(side.foreign_plan(), []),
        lambda side: side.pool.reserve(side.foreign_plan(), [], 1),
        lambda side: side.pool.done(side.foreign_plan()),
        lambda side: side.pool.rollback(side.foreign_plan()),
    )
    return calls[pick % 4]


def not_a_plan(machine: PoolMachine, pick: int) -> Call:
    """Something else where a plan belongs."""
    wrong: Any = (None, 3, "plan", [])[pick % 4]
    calls: tuple[Call, ...] = (
        lambda side: side.pool.step(wrong, []),
        lambda side: side.pool.reserve(wrong, [], 1),
        lambda side: side.pool.done(wrong),
        lambda side: side.pool.rollback(wrong),
    )
    return calls[machine.turn % 4]


def batch_too_large(machine: PoolMachine, pick: int) -> Call | None:
    """More rows, tokens, blocks or context than the arrays hold."""
    index = _idle(machine, pick)
    if index is None or not machine.any_open():
        return None
    rows, max_rows = machine.opened(), machine.pair.oracle.plans[index].limits.max_rows
    new = 0 if len(rows) > max_rows and pick % 2 else (97, 1000, 2**31, 2**40)[pick % 4]
    partial = bool(pick & 8)
    return lambda side: side.pool.step(side.plans[index], side.batch(rows, True), new, partial=partial)


def bad_num_new(machine: PoolMachine, pick: int) -> Call | None:
    """Counts that are negative, of the wrong type, or not one per row."""
    index = _idle(machine, pick)
    if index is None or not machine.any_open():
        return None
    rows = machine.opened()[:2]
    wrong: tuple[Any, ...] = (
        -1,
        [-1] * len(rows),
        [0] * (len(rows) + 1),
        [],
        True,
        1.0,
        "1",
        None,
        np.array([1.0] * len(rows)),
        np.array([1] * len(rows), np.int16),
        [1.5] * len(rows),
        np.array([[0] * len(rows)]),
    )
    new = wrong[pick % len(wrong)]
    if pick % 3 == 0:
        return lambda side: side.pool.can(side.batch(rows, True), new)
    if pick % 3 == 1:
        return lambda side: side.pool.reserve(side.plans[index], side.batch(rows, True), new)
    return lambda side: side.pool.step(side.plans[index], side.batch(rows, True), new)


def bad_pad_to(machine: PoolMachine, pick: int) -> Call | None:
    """A shape smaller than the batch or larger than the plan."""
    index = _idle(machine, pick)
    if index is None:
        return None
    rows = machine.opened()[:2]
    shapes: tuple[Any, ...] = ((len(rows) - 1, 8), (99, 8), (2, 999), (2, -1), (2,), (1.5, 2), (2, 3, 4), 7)
    pad_to = shapes[pick % len(shapes)]
    return lambda side: side.pool.step(side.plans[index], side.batch(rows, True), 0, pad_to=pad_to)


def too_few_tokens(machine: PoolMachine, pick: int) -> Call | None:
    """A shape with room for fewer tokens than the batch has."""
    index, rows = _idle(machine, 0), machine.opened()[:2]
    if index not in (0, 1) or not rows or not machine.pair.oracle.pool.can(machine.pair.oracle.batch(rows, True), 1):
        return None
    return lambda side: side.pool.step(side.plans[index], side.batch(rows, True), 1, pad_to=(len(rows), len(rows) - 1))


def bad_lens(machine: PoolMachine, pick: int) -> Call | None:
    """Longer than the sequence, negative, not one per row, of the wrong type."""
    if not machine.any_open():
        return None
    rows = machine.opened()[:2]
    longer = [machine.evicted(name) + len(machine.content.stamps[name]) + 1 for name in rows]
    wrong: tuple[Any, ...] = (
        longer,
        -1,
        [0] * 3,
        2**40,
        1.0,
        True,
        None,
        np.zeros(len(rows)),
        np.array(longer),
    )
    lens = wrong[pick % len(wrong)]
    return lambda side: side.pool.truncate(side.batch(rows, True), lens)


def bad_mask(machine: PoolMachine, pick: int) -> Call:
    """Masks of the wrong length or dtype."""
    rows = machine.opened()[:2]
    wrong: tuple[Any, ...] = (
        np.ones(len(rows) + 1, bool),
        np.ones(len(rows), np.int32),
        np.ones((1, len(rows)), bool),
        None,
        np.ones(2 * len(rows) + 2, np.uint8)[::2],
    )
    mask = wrong[pick % len(wrong)]
    return lambda side: side.pool.close_finished(side.batch(rows, True), mask)


def bad_count(machine: PoolMachine, pick: int) -> Call:
    """Counts of blocks, tokens and children."""
    wrong = (-1, True, 1.0, "1", np.float32(1), -(2**70), {1})[machine.turn % 7]
    row = machine.opened()[:1]
    calls: tuple[Call, ...] = (
        lambda side: side.pool.blocks.alloc(wrong),
        lambda side: side.pool.open(wrong),
        lambda side: side.pool.blocks.evict(wrong),
        lambda side: side.pool.fork(side.handle(row[0]), wrong),
    )
    return calls[pick % (4 if row else 3)]


def too_many(machine: PoolMachine, pick: int) -> Call:
    """More blocks or sequences than there are."""
    oracle = machine.pair.oracle.pool
    stats = oracle.stats()  # drains, as the calls below will
    available, tokens = stats.free, oracle.block_size
    row = machine.opened()[:1] or machine.dead[:1]
    calls: tuple[Call, ...] = (
        lambda side: side.pool.blocks.alloc(available + 1 + pick),
        lambda side: side.pool.fork(side.handle(row[0]), oracle.max_seqs + 1),
        lambda side: side.pool.open((available + 1) * tokens),
        lambda side: side.pool.open((oracle.max_blocks_per_seq + 1) * tokens),
    )
    return calls[pick % 4]


def bad_block_ids(machine: PoolMachine, pick: int) -> Call:
    """Ids that are out of range, reserved, twice, or no ints."""
    first, end = machine.reserved_blocks, machine.num_blocks
    wrong: tuple[Any, ...] = (
        end,
        -1,
        2**40,
        first - 1,
        [first, first],
        [first, end],
        True,
        1.0,
        "1",
        None,
        [None],
        np.array([first], np.float32),
        np.array([[first]], np.int32),
        np.array([first, first], np.int32),
        np.array([first, -1], np.int32),
    )
    ids = wrong[pick % len(wrong)]
    call = BLOCK_CALLS[machine.turn % len(BLOCK_CALLS)]
    if call is BLOCK_CALLS[-1] and isinstance(ids, list | np.ndarray):
        call = BLOCK_CALLS[0]
    return lambda side: call(side, ids)


def block_in_the_wrong_state(machine: PoolMachine, pick: int) -> Call | None:
    """Blocks without a reference, or with references that are not the caller's."""
    block = machine.reserved_blocks + pick * 5 % (machine.num_blocks - machine.reserved_blocks)
    which = machine.turn % 3
    state = machine.pair.oracle.pool.state()
    raw, count = state["raw"].get(block, 0), state["refcounts"].get(block, 0)
    is_legal = (count > 0, raw > 0, raw == count == 1)[which]
    return None if is_legal else lambda side: BLOCK_CALLS[which](side, block)


def bad_bind(machine: PoolMachine, pick: int) -> Call | None:
    """Arrays that do not fit a plan."""
    index = 2  # page_batch_info
    plan = machine.pair.oracle.plans[index]
    if plan.is_pending:
        return None
    shape = (plan.limits.max_rows, plan.limits.table_width)
    read_only = np.zeros(shape, np.int32)
    read_only.flags.writeable = False
    wrong: tuple[dict[str, Any], ...] = (
        {"block_tables": np.zeros(shape, np.int64)},
        {"block_tables": np.zeros((shape[0] + 1, shape[1]), np.int32)},
        {"block_tables": np.zeros((shape[0], 2 * shape[1]), np.int32)[:, ::2]},
        {"block_tables": read_only},
        {"block_tables": [[0]]},
        {"kv_slots": np.zeros(shape, np.int32)},
        {"seq_lens": (both := np.zeros(shape[0] + 1, np.int32))[:-1], "cu_q_lens": both},
        {"block_tables": np.zeros(shape, ">i4")},
    )
    arrays = wrong[pick % len(wrong)]
    return lambda side: side.plans[index].bind(**arrays)


MISUSE: dict[str, Callable[[PoolMachine, int], Call | None]] = {
    function.__name__: function
    for function in (
        stale_handle,
        future_handle,
        foreign_handle,
        handle_of_wrong_type,
        handle_out_of_range,
        duplicate_handles,
        handles_of_wrong_form,
        list_that_changes,
        pending_plan,
        idle_plan,
        plan_of_another_pool,
        not_a_plan,
        batch_too_large,
        bad_num_new,
        bad_pad_to,
        too_few_tokens,
        bad_lens,
        bad_mask,
        bad_count,
        too_many,
        bad_block_ids,
        block_in_the_wrong_state,
        bad_bind,
    )
}
