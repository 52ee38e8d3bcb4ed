"""A Hypothesis state machine that drives any pool beside the model and beside a fake backend.

Two judges, independent of each other: `ModelPool` predicts every id, order, count and array, and
`proof.machine.content` knows what every token must read. Hypothesis draws for each example which
rules take part (its own swarm testing), and the machine draws the shape of the pool and the appetite of the
steps, so that some examples are always out of blocks and others never.

Examples
--------
>>> from kvpool.testing import ModelPlan, ModelPool
>>> from proof.machine.machine import run
>>> run(ModelPool, ModelPlan, examples=2, steps=10)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import seed as with_seed
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvpool.testing.model import ModelPlan, ModelPool
from proof.machine.content import Content
from proof.machine.misuse import MISUSE
from proof.machine.pair import ARRAYS, PLANS, RAISED, Pair, Side

BATCH = 25  # programs that Hypothesis draws from one seed
small = st.integers(0, 15)
picks = st.lists(small, min_size=1, max_size=6)
counts = st.lists(st.integers(0, 5), min_size=1, max_size=4)
#: Block-level calls, the ones that lead somewhere more often.
BLOCK_CALLS = (
    *("mark_cached", "mark_cached", "alloc", "decref", "touch", "free"),
    *("incref", "evict", "drain_evicted"),
)
#: Calls of `Pool.blocks`.
NAMED_CALLS = (
    *("take", "release", "release", "release oldest", "uncache", "uncache", "take_block", "free_order"),
    *("uncache in place", "uncache in place", "touch blank", "is_cached"),
)
#: Where the blocks of a call are mostly taken from, see `ModelPool.state`.
WHICH_BLOCKS = {
    "mark_cached": "refcounts",
    "incref": "refcounts",
    "decref": "raw",
    "free": "raw",
    "touch": "committed",
    "release": "raw",
    "release oldest": "raw",
    "uncache": "committed",
    "uncache in place": "committed",
    "take_block": "blank",
    "touch blank": "blank lru",
}
#: Ways to let tokens go; "settled": every pending step is done before.
HOW_TO_EVICT = ("unshare settled", "unshare", "compact settled", "compact", "blocks", "blocks settled")
which_plan = st.integers(0, len(PLANS) - 1)


def _some(names: list[int], chosen: list[int]) -> list[int]:
    """Names without duplicates, by index modulo their number."""
    return list(dict.fromkeys(names[i % len(names)] for i in chosen)) if names else []


class PoolMachine(RuleBasedStateMachine):
    """The rules; `make_machine` fills in which pool is tested, and against what."""

    make_pool: Callable[..., Any]
    make_plan: Callable[..., Any]
    oracle: tuple[Callable[..., Any], Callable[..., Any]]
    options: ClassVar[dict[str, Any]] = {}  # of the pools, besides what is drawn
    make_content: type[Content] = Content

    # ---- set-up -------------------------------------------------------------------------------------------

    @initialize(
        block_size=st.sampled_from([1, 2, 3, 4, 7, 16]),
        num_blocks=st.integers(4, 26),
        max_seqs=st.sampled_from([3, 6, 12]),
        max_blocks_per_seq=st.sampled_from([None, None, None, 6]),
        reserved_blocks=st.integers(0, 2),
        watermark=st.sampled_from([0, 0, 0, 1, 3]),
        in_order=st.sampled_from([False, False, False, True]),
        appetite=st.integers(1, 2),
        prompts=st.lists(small, min_size=1, max_size=4),
        samples=st.integers(0, 3),
    )
    def create(self, **drawn: Any) -> None:
        """Build both pools and their plans."""
        self.appetite = drawn.pop("appetite") * max(1, drawn["block_size"] // 4)
        prompts, samples = drawn.pop("prompts"), drawn.pop("samples")
        drawn.update(type(self).options)
        drawn["watermark"] = min(drawn["watermark"], drawn["num_blocks"] - drawn["reserved_blocks"])
        kind = type(self)
        self.pair = Pair(Side(kind.make_pool, kind.make_plan, drawn), Side(*kind.oracle, drawn))
        self.both = self.pair.both
        self.block_size = drawn["block_size"]
        self.num_blocks = drawn["num_blocks"]
        self.reserved_blocks = drawn["reserved_blocks"]
        self.in_order = drawn["in_order"]
        self.content = kind.make_content(self.num_blocks, self.block_size)
        self.tables: dict[int, list[int]] = {}  # of the pool under test, after the last call
        self.dead: list[int] = [0]  # the handle that `Side` opened and closed
        self.deferred: list[int] = []
        self.before: dict[int, dict[int, int]] = {}  # pending plan -> lengths of its rows before the step
        self.captured: dict[int, dict[str, np.ndarray]] = {}
        self.mirror: list[Any] = [None] * len(PLANS)  # block tables kept up to date by dirty_rows alone
        self.turn = 0
        self.quiet = False
        for _ in prompts:
            self._open(0)
        self._step(0, self.opened(), prompts[: len(self.opened())], partial=True)
        self._fork(self.opened()[0], samples)

    def teardown(self) -> None:
        """Give the pools' tags back."""
        if hasattr(self, "pair"):
            self.pair.test.shutdown()
            self.pair.oracle.shutdown()

    @invariant()
    def everything_agrees(self) -> None:
        """After every rule: both pools read the same, and every sequence reads what it wrote."""
        self.turn += 1
        if self.quiet:  # a deferred close waits for the next rule to drain it
            self.quiet = False
            return
        self._forget_deferred()
        self.tables = self.pair.compare_state()
        assert self.tables.keys() == self.content.stamps.keys()
        self.content.verify(self.tables)

    # ---- helpers ------------------------------------------------------------------------------------------

    def opened(self) -> list[int]:
        """Local handles of the open sequences."""
        return list(self.content.stamps)

    def any_open(self) -> bool:
        """Whether a sequence is open."""
        return bool(self.content.stamps)

    def _forget_deferred(self) -> None:
        """The next call closes what was deferred."""
        self._forget([name for name in self.deferred if name in self.content.stamps])
        self.deferred.clear()

    def _forget(self, names: list[int]) -> None:
        for name in names:
            self.dead.append(name)
            self.content.closed(name)

    def _rows(self, chosen: list[int]) -> list[int]:
        """Open sequences by index; opens one when there is none, so that no rule is idle."""
        self._forget_deferred()
        if not self.any_open():
            self._open(0)
        return _some(self.opened(), chosen)

    def _open(self, tokens: int) -> None:
        got = self.both(lambda side: side.pool.open(tokens), handles=True)
        if got is not RAISED:
            self.content.opened(got[0])
            self.tables[got[0]] = self.pair.test.pool.table(self.pair.test.handle(got[0])).tolist()
            self.content.took(self.tables[got[0]])

    def _as_array(self) -> bool:
        return self.turn % 2 == 0

    def _idle_plan(self, index: int) -> int:
        """A plan that is not pending, from this one on; if all are pending, the oldest is done first."""
        if len(self.before) == len(PLANS):
            self._done(next(iter(self.before)))
        plans = self.pair.oracle.plans
        idle = [i for i in range(len(plans)) if not plans[i].is_pending]
        return next((i for i in idle if i >= index), idle[0] if idle else index)

    # ---- sequences ----------------------------------------------------------------------------------------

    @rule(tokens=small)
    def open(self, tokens: int) -> None:
        """Open a sequence, sometimes with blocks reserved."""
        self._forget_deferred()
        self._open(max(0, tokens - 6) * self.appetite)

    @rule(pick=small, n=st.integers(1, 3), shorter=st.sampled_from([0, 0, 1, 2]), race=st.booleans())
    def fork(self, pick: int, n: int, shorter: int, race: bool) -> None:
        """Fork a sequence, pending or not; the children may give up tokens, and all may write at once."""
        parent = self._rows([pick])[0]
        children = self._fork(parent, n)
        if shorter and children:
            self._truncate(children, [max(0, len(self.content.stamps[name]) - shorter) for name in children])
        for name in [parent, *children] if race else []:
            self.everything_agrees()
            self._step(0, [name], 1)

    def _fork(self, parent: int, n: int) -> list[int]:
        children = self.both(lambda side: side.pool.fork(side.handle(parent), n), handles=True)
        if children is RAISED:
            return []
        self.content.forked(parent, children)
        return children

    @rule(chosen=picks, lens=counts, exact=st.booleans())
    def truncate(self, chosen: list[int], lens: list[int], exact: bool) -> None:
        """Shorten sequences: near their end, or anywhere."""
        rows = self._rows(chosen)
        now = [len(self.content.stamps[name]) for name in rows]
        cut = [lens[i % len(lens)] for i in range(len(rows))]
        new = [max(0, n - c) if exact else c % (n + 1) for n, c in zip(now, cut, strict=True)]
        self._truncate(rows, new)

    def _truncate(self, rows: list[int], new: list[int]) -> None:
        lens = [n + self.evicted(name) for name, n in zip(rows, new, strict=True)]
        form = np.array(lens, np.int32 if len(new) % 2 else np.int64) if self._as_array() else lens
        if self.both(lambda side: side.pool.truncate(side.batch(rows, self._as_array()), form)) is not RAISED:
            for name, length in zip(rows, new, strict=True):
                self.content.truncated(name, length)

    def evicted(self, name: int) -> int:
        """Tokens that left a sequence."""
        pool, handle = self.pair.test.pool, self.pair.test.handle(name)
        return pool.num_tokens(handle) - pool.kv_len(handle)

    @rule(chosen=picks, how=st.sampled_from(["close", "cache", "finished", "defer"]), bits=small)
    def close(self, chosen: list[int], how: str, bits: int) -> None:
        """Close sequences: now, with their full blocks cached, by mask, or in the next call."""
        rows = self._rows(chosen)
        if how == "cache":
            self._commit(rows)
        if how == "defer":
            self._defer([*rows[:1], *self.dead[-1:]][bits % 2])
        elif how == "finished":
            mask = np.array([bits >> i & 1 for i in range(len(rows))], bool if self._as_array() else np.uint8)
            self.both(lambda side: side.pool.close_finished(side.batch(rows, True), mask))
            self._forget([name for name, finished in zip(rows, mask, strict=True) if finished])
        else:
            alone = len(rows) == 1 and self._as_array()
            self.both(
                lambda side: side.pool.close(side.handle(rows[0]) if alone else side.batch(rows, self._as_array()))
            )
            self._forget(rows)

    def _commit(self, rows: list[int]) -> None:
        full = [self.tables[name][: len(self.content.stamps[name]) // self.block_size] for name in rows]
        self.both(lambda side: side.pool.blocks.drain_evicted())
        cached = self.pair.oracle.pool.state()["committed"]
        blocks = list(dict.fromkeys(block for table in full for block in table if block not in cached))
        self._mark(blocks)

    def _mark(self, blocks: list[int]) -> None:
        if self.both(lambda side: side.pool.blocks.mark_cached(self._ids(blocks))) is not RAISED:
            for block in blocks:
                self.content.freeze(block)

    def _defer(self, name: int) -> None:
        self.both(lambda side: side.pool.defer_close(side.handle(name)))
        self.deferred.append(name)
        self.quiet = True

    # ---- steps --------------------------------------------------------------------------------------------

    def _start(self, index: int, rows: list[int], call: Callable[[Side, Any], Any]) -> None:
        """Issue a step or a reservation, and tell the fake backend what its plan says."""
        index = self._idle_plan(index)
        plan = self.pair.test.plans[index]
        lengths = {name: len(self.content.stamps[name]) for name in rows}
        before = {name: set(self.tables[name]) for name in rows if name in self.tables}
        if self.both(lambda side: call(side, side.plans[index])) is RAISED:
            return
        self.pair.compare_plan(index)
        test = self.pair.test
        tables = [test.pool.table(test.handle(name)).tolist() for name in rows]
        if hasattr(plan, "block_tables"):  # what the backend sees counts
            tables = [row[: len(table)].tolist() for row, table in zip(plan.block_tables, tables, strict=False)]
        for name, table in zip(rows, tables, strict=True):
            self.content.took(block for block in table if block not in before.get(name, ()))
        slots = []
        for name, table in zip(rows, tables, strict=True):
            grown = range(lengths[name], test.pool.kv_len(test.handle(name)))
            slots.append([table[p // self.block_size] * self.block_size + p % self.block_size for p in grown])
        if hasattr(plan, "slot_mapping"):
            flat = [slot for row in slots for slot in row]
            assert plan.slot_mapping[: len(flat)].tolist() == flat, "slot_mapping differs from the tables"
        self.content.started(index, list(zip(rows, tables, strict=True)), slots, plan.copies.tolist())
        self._mirror(index)
        if self.in_order:
            self.content.finished(index)
            return
        self.before[index] = lengths
        self.captured[index] = {name: array.copy() for name, array in self._arrays(index).items()}

    def _arrays(self, index: int) -> dict[str, np.ndarray]:
        plan = self.pair.test.plans[index]
        names = ("block_tables", "seq_lens", "slot_mapping", "indices", "copies", "dirty_rows", "served")
        return {name: getattr(plan, name) for name in names if hasattr(plan, name)}

    def _mirror(self, index: int) -> None:
        """A backend that uploads only the dirty rows must hold the same tables."""
        plan = self.pair.test.plans[index]
        if not hasattr(plan, "block_tables"):
            return
        tables = plan.block_tables
        if self.mirror[index] is None:
            self.mirror[index] = np.full((plan.limits.max_rows, tables.shape[1]), -99, tables.dtype)
        self.mirror[index][plan.dirty_rows] = tables[plan.dirty_rows]
        assert (self.mirror[index][: len(tables)] == tables).all(), "a row changed that is not in dirty_rows"

    def _step(self, index: int, rows: list[int], new: Any, **options: Any) -> None:
        self._start(
            index,
            rows,
            lambda side, plan: side.pool.step(plan, side.batch(rows, self._as_array()), new, **options),
        )

    @rule(index=which_plan, size=st.integers(1, 8))
    def decode(self, index: int, size: int) -> None:
        """One token for the first sequences, in their rows."""
        self._step(index, self._rows(list(range(size))), 1)

    @rule(index=which_plan, sizes=st.lists(st.integers(1, 8), min_size=2, max_size=5), rebind=st.booleans())
    def generate(self, index: int, sizes: list[int], rebind: bool) -> None:
        """One plan step after step: batches that shrink and grow, with rows that stay where they are."""
        self._forget_deferred()
        for pending in list(self.before):
            self._done(pending)
        for size in sizes:
            self._step(index, self._rows(list(range(size))), 1)
            if self.before:
                self._done(index)
            if rebind:
                self._bind(index)
            self.everything_agrees()

    @rule(index=which_plan, chosen=picks, new=counts, partial=st.booleans())
    def step(self, index: int, chosen: list[int], new: list[int], partial: bool) -> None:
        """A batch of mixed lengths, all or as many as fit."""
        rows = self._rows(chosen)
        num_new = [new[i % len(new)] * self.appetite for i in range(len(rows))]
        form = np.array(num_new, np.int32) if self._as_array() else num_new
        self._step(index, rows, form, partial=partial)

    @rule(index=which_plan, chosen=picks, new=counts, more=small)
    def step_padded(self, index: int, chosen: list[int], new: list[int], more: int) -> None:
        """A batch in a static shape."""
        index = self._idle_plan(index)
        rows = self._rows(chosen)
        num_new = [new[i % len(new)] for i in range(len(rows))]
        limits = PLANS[index]
        pad_to = (
            min(limits["max_rows"], len(rows) + more % 4),
            min(limits["max_tokens"], sum(num_new) + more),
        )
        self._step(index, rows, np.array(num_new, np.int64), pad_to=pad_to, partial=more % 3 == 0)

    @rule(index=which_plan, chosen=picks, new=counts)
    def reserve(self, index: int, chosen: list[int], new: list[int]) -> None:
        """Blocks and copies ahead of the tokens."""
        rows = self._rows(chosen)
        num_new = [new[i % len(new)] * self.appetite for i in range(len(rows))]
        self._start(
            index,
            rows,
            lambda side, plan: side.pool.reserve(plan, side.batch(rows, self._as_array()), num_new),
        )

    @rule(index=which_plan, chosen=picks, lens=counts, first=small, how=st.sampled_from(HOW_TO_EVICT), salt=small)
    def evict_tokens(self, index: int, chosen: list[int], lens: list[int], first: int, how: str, salt: int) -> None:
        """Tokens leave sequences: compaction, with blocks made private before or not, or whole blocks."""
        rows = self._rows(chosen)
        if how.endswith("settled"):
            for pending in list(self.before):
                self._done(pending)
        if how.startswith("blocks"):
            self._evict_blocks(rows[0], salt)
            return
        now = [len(self.content.stamps[name]) for name in rows]
        keep = [max(0, n - lens[i % len(lens)] * self.appetite) for i, n in enumerate(now)]
        if how.startswith("unshare"):
            index = self._idle_plan(index)
            self._start(index, rows, lambda side, p: side.pool.unshare(p, side.batch(rows, True), keep, first))
            if how.endswith("settled") and index in self.before:
                self._done(index)
        self._compact(rows, keep, first, salt)

    def _compact(self, rows: list[int], keep: list[int], first: int, salt: int) -> None:
        """Compaction to so many tokens, which ones by chance; the fake backend moves them."""
        test = self.pair.test
        old = [test.pool.table(test.handle(name)).tolist() for name in rows]
        if self.both(lambda side: side.pool.compact(side.batch(rows, True), keep, first)) is RAISED:
            return
        for name, table, n in zip(rows, old, keep, strict=True):
            length = len(self.content.stamps[name])
            start = min(first, n)
            rest = random.Random(salt).sample(range(start, length), n - start)
            self.content.compacted(name, table, [*range(start), *sorted(rest)])

    def _evict_blocks(self, name: int, salt: int) -> None:
        full = len(self.content.stamps[name]) // self.block_size
        places = sorted(random.Random(salt).sample(range(full), salt % (full + 1)))
        if self.both(lambda side: side.pool.evict_blocks(side.handle(name), places)) is not RAISED:
            self.content.lost_blocks(name, places)

    def is_pending(self) -> bool:
        """Whether a step is pending and its `done` was not called."""
        return bool(self.before)

    def _check_captured(self, index: int) -> None:
        for name, array in self._arrays(index).items():
            assert (array == self.captured[index][name]).all(), f"plan {index}: {name} changed before done"

    @precondition(is_pending)
    @rule(pick=st.sampled_from([0, 0, 0, 1, 2]))
    def done(self, pick: int) -> None:
        """The backend finished a step: mostly the oldest."""
        self._forget_deferred()
        self._done(list(self.before)[pick % len(self.before)])

    def _done(self, index: int) -> None:
        self._check_captured(index)
        self.both(lambda side: side.pool.done(side.plans[index]))
        self.content.finished(index)
        del self.before[index], self.captured[index]

    @precondition(is_pending)
    @rule(pick=st.sampled_from([0, 0, 0, 1, 2]))
    def rollback(self, pick: int) -> None:
        """The backend failed: mostly in the newest step."""
        self._forget_deferred()
        index = list(self.before)[-1 - pick % len(self.before)]
        self._check_captured(index)
        if self.both(lambda side: side.pool.rollback(side.plans[index])) is not RAISED:
            lengths = {n: length for n, length in self.before[index].items() if n in self.content.stamps}
            self.content.rolled_back(index, lengths)
            del self.before[index], self.captured[index]

    # ---- blocks -------------------------------------------------------------------------------------------

    @rule(kind=st.sampled_from(BLOCK_CALLS), chosen=picks, n=st.integers(0, 4))
    def block_call(self, kind: str, chosen: list[int], n: int) -> None:
        """What engines with own tables and the prefix index do."""
        self._forget_deferred()
        blocks = self._blocks(chosen, WHICH_BLOCKS.get(kind, "refcounts"))
        if kind == "alloc":
            self._alloc(n)
        elif kind == "evict":
            self.both(lambda side: side.pool.blocks.evict(n))
        elif kind == "drain_evicted":
            self.both(lambda side: side.pool.blocks.drain_evicted())
        elif kind == "mark_cached":
            self._mark(blocks)
        else:
            ids = self._ids(blocks)
            self.both(lambda side: getattr(side.pool.blocks, kind)(ids))

    @rule(kind=st.sampled_from(NAMED_CALLS), chosen=picks, n=st.integers(0, 4))
    def named_call(self, kind: str, chosen: list[int], n: int) -> None:
        """What engines with own tables and own content keys do, by `Pool.blocks`."""
        self._forget_deferred()
        blocks = self._blocks(chosen, WHICH_BLOCKS.get(kind, "refcounts"))
        ids = self._ids(blocks)
        if kind == "take":
            got = self.both(lambda side: side.pool.blocks.take(n))
            self._took([] if got is RAISED else got[0])
        elif kind == "take_block":
            if self.both(lambda side: side.pool.blocks.take_block(blocks[0])) is not RAISED:
                self._took(blocks[:1])
        elif kind == "free_order":
            self.both(lambda side: side.pool.blocks.free_order(n or None))
        elif kind == "release oldest":
            self.both(lambda side: side.pool.blocks.release(ids, oldest=True))
        elif kind == "touch blank":
            state = self.pair.oracle.pool.state()
            empty = {*state["blank"], *state["lru"]} - {*state["committed"]}
            if self.both(lambda side: side.pool.blocks.touch(ids, blank=True)) is not RAISED:
                self._took([block for block in blocks if block in empty])
        else:
            name, *in_place = kind.split(" ")
            how = {"keep_place": True} if in_place else {}
            if self.both(lambda side: getattr(side.pool.blocks, name)(ids, **how)) is not RAISED and name == "uncache":
                for block in blocks:
                    self.content.frozen.pop(block, None)

    def _blocks(self, chosen: list[int], which: str) -> list[int]:
        """Blocks by what they are to the oracle (see `ModelPool.state`), or any when there are none."""
        state = self.pair.oracle.pool.state()
        ids = [block for part in which.split() for block in state[part]]
        ids = ids or list(range(self.reserved_blocks, self.num_blocks))
        return _some(sorted(ids), chosen)

    def _ids(self, blocks: list[int]) -> Any:
        if len(blocks) == 1 and self._as_array():
            return blocks[0]
        return np.array(blocks, np.int32) if self._as_array() else blocks

    def _alloc(self, n: int) -> None:
        got = self.both(lambda side: side.pool.blocks.alloc(n) if n else side.pool.blocks.alloc())
        if got is RAISED:
            return
        self._took(got.tolist() if n else [got])

    def _took(self, blocks: list[int]) -> None:
        self.content.took(blocks)
        for block in blocks:
            self.content.wrote_raw(block)

    # ---- the rest -----------------------------------------------------------------------------------------

    @rule(
        what=st.sampled_from(["can", "bind", "histogram", "reset"]),
        index=which_plan,
        chosen=picks,
        new=counts,
    )
    def other(self, what: str, index: int, chosen: list[int], new: list[int]) -> None:
        """The calls that need no rule of their own; reset is rare."""
        rows = self._rows(chosen)
        if what == "can":
            num_new = [new[i % len(new)] * self.appetite for i in range(len(rows))]
            self.both(lambda side: side.pool.can(side.batch(rows, self._as_array()), num_new))
        elif what == "bind":
            self._bind(self._idle_plan(index))
        elif what == "reset" and len(chosen) > 4:
            self._reset()
        else:
            self.pair.compare_histogram()

    def _bind(self, index: int) -> None:
        plan = self.pair.oracle.plans[index]
        names = (ARRAYS[index] * 2)[self.turn % len(ARRAYS[index]) :][:2]
        arrays = {name: np.full(plan._shapes[name], -55, plan._dtypes[name]) for name in names}
        if not plan.is_pending:
            self.both(lambda side: side.plans[index].bind(**{name: array.copy() for name, array in arrays.items()}))
            self.pair.forget_shown(index)

    def _reset(self) -> None:
        self.both(lambda side: side.pool.reset())
        self.dead.extend(self.content.stamps)
        self.content.reset()
        self.before.clear()
        self.captured.clear()

    @rule(kind=st.sampled_from(sorted(MISUSE)), pick=small)
    def misuse(self, kind: str, pick: int) -> None:
        """A call that is refused; whatever the oracle says, the pool says, and nothing changes."""
        self._forget_deferred()
        call = MISUSE[kind](self, pick)
        if call is not None:
            self.both(call)


def make_machine(
    make_pool: Callable[..., Any],
    make_plan: Callable[..., Any],
    *,
    oracle: tuple[Callable[..., Any], Callable[..., Any]] = (ModelPool, ModelPlan),
    prefix_cache: bool = False,
) -> type[PoolMachine]:
    """Return a state machine class for a kind of pool.

    Parameters
    ----------
    make_pool, make_plan : callable
        Like the constructors of `kvpool.Pool` and `kvpool.Plan`.
    oracle : pair of callables
        What predicts. A pool given as its own oracle is judged by its content alone.
    prefix_cache : bool
        Whether the pools are built with a prefix cache, and the programs use it.
    """
    from proof.machine.prefix import PrefixMachine  # which needs this module

    kind = PrefixMachine if prefix_cache else PoolMachine
    members = {
        "make_pool": staticmethod(make_pool),
        "make_plan": staticmethod(make_plan),
        "oracle": oracle,
    }
    return type(kind.__name__, (kind,), members)


def run(
    make_pool: Callable[..., Any],
    make_plan: Callable[..., Any],
    *,
    examples: int = 100,
    steps: int = 40,
    seed: int | None = None,
    oracle: tuple[Callable[..., Any], Callable[..., Any]] = (ModelPool, ModelPlan),
    shrink: bool = True,
    prefix_cache: bool = False,
) -> None:
    """Run the machine; raises AssertionError with a minimal program when a call disagrees.

    Parameters
    ----------
    make_pool, make_plan, oracle, prefix_cache
        See `make_machine`.
    examples, steps : int
        How many programs, and how many calls in each at most.
    seed : int, optional
        Makes the run repeatable.
    shrink : bool
        Whether a failing program is made minimal first, which can take a minute.
    """
    machine = make_machine(make_pool, make_plan, oracle=oracle, prefix_cache=prefix_cache)
    run_machine(machine, examples, steps, seed, shrink)


def findings(
    make_pool: Callable[..., Any], make_plan: Callable[..., Any], oracle: tuple, *, prefix_cache: bool = False
) -> Iterator[Exception]:
    """What programs find in a broken pool, at most one finding of each of 200 batches. It may break in its own ways."""
    for seed in range(1, 201):
        try:
            options = {"examples": BATCH, "steps": 50, "seed": seed, "shrink": False, "prefix_cache": prefix_cache}
            run(make_pool, make_plan, oracle=oracle, **options)
        except HypothesisException:
            raise
        except Exception as found:
            yield found


def run_machine(
    machine: type[RuleBasedStateMachine], examples: int, steps: int, seed: int | None, shrink: bool
) -> None:
    """Run a state machine; the numbers are those of `run`.

    Every `BATCH` programs have a seed of their own. Hypothesis begins a long run with many small programs: short runs
    find the planted faults in half of the time.
    """
    for begun in range(0, examples, BATCH):
        profile = settings(
            max_examples=min(BATCH, examples - begun),
            stateful_step_count=steps,
            deadline=None,
            database=None,
            print_blob=True,
            verbosity=Verbosity.normal,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, *([Phase.shrink] if shrink else [])],
        )
        seeded = machine if seed is None else with_seed(seed + begun // BATCH)(machine)
        run_state_machine_as_test(seeded, settings=profile)
