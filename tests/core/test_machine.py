"""A Hypothesis state machine: random calls on `kvpool.Pool` and on the plain Python model, compared after each call.

It is the pattern for a machine of your own allocator: put your pool in place of `Pool`, and keep the rules that it has.
Hypothesis draws the calls, leaves some rules out of each program, and shrinks a program that fails to a few lines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as with_seed
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvpool import Group, Plan, Pool
from kvpool.testing import ModelPlan, ModelPool

BLOCKS, SEQS, PLANS, ROWS = 24, 5, 3, 8
GROUPS: dict[str, list[Group] | None] = {
    "one table": None,
    "full": [Group.full()],
    "full and window": [Group.full(), Group.window(5)],
}
numbers = st.integers(0, 63)
texts = st.lists(st.integers(0, 1), max_size=12)  # two tokens, so that prompts share prefixes
batches = st.lists(st.tuples(numbers, st.integers(0, 5)), min_size=1, max_size=4)


class Side:
    """A pool with its plans, the handles of its sequences and its blocks without a sequence."""

    def __init__(self, make_pool: Callable[..., Any], make_plan: Callable[..., Any], options: dict[str, Any]) -> None:
        self.pool = make_pool(BLOCKS, max_seqs=SEQS, prefix_cache=True, seed=1, **options)
        self.plans = [make_plan(self.pool, ROWS, 32) for _ in range(PLANS)]
        self.rows: list[int] = []
        self.blocks: list[int] = []

    def call(self, act: Callable[[Side], Any]) -> tuple[Any, type[Exception] | None]:
        """What a call returns, or the class of what it raises."""
        before = self.seen()
        try:
            return act(self), None
        except Exception as error:  # of any class: the other side must raise the same
            assert self.seen() == before, f"the call raised and changed the pool: {error}"
            return None, type(error)

    def seen(self) -> list[Any]:
        """All that can be read of the pool, as plain values."""
        pool = self.pool
        layers = range(len(pool.options.groups or ())) or [None]
        tables = [pool.table(row, *([g] if g is not None else [])).tolist() for row in self.rows for g in layers]
        lengths = [(pool.num_tokens(row), pool.capacity(row), pool.prefix.committed(row)) for row in self.rows]
        counts = [pool.blocks.refcount(block) for block in range(1, BLOCKS)]
        pending = [plan.is_pending for plan in self.plans]
        return [tables, lengths, counts, pending, tuple(pool.stats()), tuple(pool.prefix.stats())]


def arrays(plan: Any) -> list[Any]:
    """What a kernel reads of a plan."""
    found = [plan.num_tokens, plan.served.tolist()]
    for part in plan.groups or [plan]:
        tokens = slice(0, plan.num_tokens)
        found += [part.block_tables.tolist(), part.slot_mapping[..., tokens].tolist(), part.copies.tolist()]
    return found


class Machine(RuleBasedStateMachine):
    """The rules. `make` is how the pool under test is made; the other side is the model."""

    make: tuple[Callable[..., Any], Callable[..., Any]] = (Pool, Plan)
    groups: list[Group] | None = None

    @initialize(block_size=st.sampled_from([1, 2, 4]), in_order=st.booleans())
    def create(self, block_size: int, in_order: bool) -> None:
        """Make both pools."""
        options = {"block_size": block_size, "in_order": in_order, "groups": self.groups}
        self.sides = [Side(*make, options) for make in (self.make, (ModelPool, ModelPlan))]
        self.texts: list[list[int]] = []  # the tokens of each sequence: of what it holds, and more

    def teardown(self) -> None:
        """Give the pools back."""
        for side in getattr(self, "sides", []):
            side.pool.shutdown()

    @invariant()
    def sides_are_equal(self) -> None:
        """Both show the same, and the pool finds no fault in itself."""
        if hasattr(self, "sides"):
            one, other = (side.seen() for side in self.sides)
            assert one == other, f"the pool shows {one}, the model {other}"
            self.sides[0].pool.check()

    def both(self, act: Callable[[Side], Any]) -> Any:
        """Make a call on both sides: they return or raise the same. Returns what each gave; None: they raised."""
        (one, raised), (other, due) = (side.call(act) for side in self.sides)
        assert raised == due, f"the pool raised {raised}, the model {due}"
        return None if raised else (one, other)

    def some(self, number: int) -> int | None:
        """The place of a sequence."""
        return number % len(self.texts) if self.texts else None

    def forget(self, place: int) -> None:
        del self.texts[place]
        for side in self.sides:
            del side.rows[place]

    def add(self, handles: tuple[Any, Any] | None, text: list[int]) -> None:
        if handles is not None:
            self.texts.append(text)
            for side, handle in zip(self.sides, handles, strict=True):
                side.rows.append(int(handle))

    # ---- sequences --------------------------------------------------------------------------------------------

    @rule(text=texts)
    def open(self, text: list[int]) -> None:
        """A sequence for a prompt, which begins with what is cached of it."""
        self.add(self.both(lambda side: side.pool.open(text)), text + [0] * 90)

    @rule(which=numbers)
    def fork(self, which: int) -> None:
        """A sequence that shares all blocks of another one."""
        place = self.some(which)
        if place is not None:
            self.add(self.both(lambda side: side.pool.fork(side.rows[place])[0]), list(self.texts[place]))

    @rule(which=numbers, left=st.integers(0, 20))
    def truncate(self, which: int, left: int) -> None:
        """A sequence lets go of its last tokens."""
        place = self.some(which)
        if place is not None:
            self.both(lambda side: side.pool.truncate(side.rows[place], left))

    @rule(which=numbers)
    def close(self, which: int) -> None:
        """A sequence ends."""
        place = self.some(which)
        if place is not None and self.both(lambda side: [side.pool.close(side.rows[place])]):
            self.forget(place)

    @rule(which=numbers, n=st.integers(0, 8))
    def commit(self, which: int, n: int) -> None:
        """A sequence says which tokens its next ones are: its blocks may be found then."""
        place = self.some(which)
        if place is not None:
            first = self.sides[1].pool.prefix.committed(self.sides[1].rows[place])
            tokens = self.texts[place][first : first + n]
            self.both(lambda side: [side.pool.prefix.commit(side.rows[place], tokens)])

    # ---- steps ------------------------------------------------------------------------------------------------

    @rule(which=numbers, batch=batches)
    def step(self, which: int, batch: list[tuple[int, int]]) -> None:
        """Rows get room for their next tokens; both plans show a kernel the same."""
        counts = {self.some(number): n for number, n in batch if self.texts}
        index, n = which % PLANS, np.array(list(counts.values()), np.int32)

        def act(side: Side) -> list[Any]:
            side.pool.step(side.plans[index], [side.rows[place] for place in counts], n)
            return arrays(side.plans[index])

        found = self.both(act)
        assert found is None or found[0] == found[1], f"the pool's plan is {found[0]}, the model's {found[1]}"

    @rule(which=numbers)
    def done(self, which: int) -> None:
        """The device has executed a plan."""
        self.both(lambda side: side.pool.done(side.plans[which % PLANS]))

    @rule(which=numbers)
    def rollback(self, which: int) -> None:
        """A plan is given up, as is what it did."""
        self.both(lambda side: side.pool.rollback(side.plans[which % PLANS]))

    # ---- blocks without a sequence ----------------------------------------------------------------------------

    @rule(n=st.integers(1, 4))
    def alloc(self, n: int) -> None:
        """Blocks for whoever asks, each with a reference."""
        found = self.both(lambda side: side.pool.blocks.alloc(n).tolist())
        assert found is None or found[0] == found[1], f"the pool gave {found[0]}, the model {found[1]}"
        for side, blocks in zip(self.sides, found or ([], []), strict=True):
            side.blocks += blocks

    @rule(which=numbers)
    def free(self, which: int) -> None:
        """One of them comes back; or one that nobody took, which is refused."""
        blocks = self.sides[1].blocks
        block = blocks[which % len(blocks)] if blocks else which % (BLOCKS + 1)
        if self.both(lambda side: [side.pool.blocks.free([block])]) and blocks:
            for side in self.sides:
                side.blocks.remove(block)


SETTINGS = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
SEED = 1


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_pool_beside_the_plain_model_shows_the_same(groups):
    run_state_machine_as_test(with_seed(SEED)(type("Machine", (Machine,), {"groups": groups})), settings=SETTINGS)


class RollbackIsDone(Pool):
    """A pool with a bug: what was given up stays."""

    def rollback(self, plan: Plan) -> None:
        self.done(plan)


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_pool_with_a_planted_bug_is_found(groups):
    kind = type("Machine", (Machine,), {"groups": groups, "make": (RollbackIsDone, Plan)})
    unshrunk = settings(SETTINGS, max_examples=1_000, phases=[Phase.generate])
    with pytest.raises(AssertionError, match=r"the (pool|model) "):
        run_state_machine_as_test(with_seed(SEED)(kind), settings=unshrunk)
