"""A Hypothesis state machine for pools with layer groups, beside the plain model and a memory of what blocks hold.

Its calls and its judges are those of `proof.plain.programs.Program`. Hypothesis draws the groups and what each
call names, chooses for each example which calls take part, and shrinks all of it.

Examples
--------
>>> from kvpool.testing import ModelPlan
>>> from proof.machine.groups import run
>>> from proof.plain import plain_pool
>>> run(plain_pool, ModelPlan, examples=2, steps=10)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvpool.groups import Group
from kvpool.testing import ModelPlan
from proof.machine.machine import run_machine
from proof.machine.pair import Side
from proof.plain import plain_pool
from proof.plain.programs import CACHED, OPERATIONS, PLANS, Program

MOST_GROUPS, REACH = 5, 12
numbers = st.integers(0, 2**16 - 1)


@st.composite
def pool_options(draw: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of a pool with one to five groups, the first of which has blocks in arena 0."""
    size, reserved = draw(st.sampled_from([2, 1, 3, 4])), draw(st.integers(0, 2))
    lookahead = draw(st.sampled_from([0, 0, 1, 3]))
    groups: list[Group] = []
    cached = draw(st.booleans())
    for place in range(draw(st.integers(1, MOST_GROUPS))):
        kind = draw(st.sampled_from(["full", "window", "chunk", "state"][: 3 if place == 0 else 4]))
        if kind == "state":
            groups.append(Group.state(draw(st.integers(2, 8)), blocks=draw(st.integers(0, 3)) if cached else 0))
            continue
        reach = 0 if kind == "full" else lookahead + draw(st.integers(1, REACH))
        keep = draw(st.integers(0, reach - 1)) if kind == "window" else 0
        arena = int(place > 0 and not (cached and kind == "full") and draw(st.booleans()))
        first = arena == 1 and all(group.arena == 0 for group in groups)
        blocks = reserved + draw(st.integers(6, 40)) if first else None
        shape = size * draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3))
        groups.append(Group(kind, reach, keep, *shape, arena, blocks))
    return {
        "num_blocks": reserved + draw(st.integers(8, 64)),
        "block_size": size,
        "max_seqs": draw(st.sampled_from([3, 5, 8])),
        "max_blocks_per_seq": draw(st.sampled_from([None, 6, 30])),
        "reserved_blocks": reserved,
        "watermark": draw(st.sampled_from([0, 2])),
        "in_order": draw(st.booleans()),
        "lookahead": lookahead,
        "groups": groups,
        "prefix_cache": cached,
        "events": draw(st.sampled_from([0, 10_000])) if cached else 0,
        "two_classes": cached and draw(st.booleans()),
    }


class GroupMachine(RuleBasedStateMachine):
    """The pools, the program and its end; `make_machine` adds a rule per call, and says which pool is tested."""

    make: ClassVar[tuple[Callable[..., Any], Callable[..., Any]]]

    @initialize(options=pool_options())
    def create(self, options: dict[str, Any]) -> None:
        """Make both pools and their plans."""
        assume(getattr(type(self).make[0], "may_cache", True) or not options["prefix_cache"])
        self.sides = [Side(*make, options, PLANS) for make in (type(self).make, (plain_pool, ModelPlan))]
        self.program = Program(self.sides[0], self.sides[1], options)
        self.agrees = True

    def teardown(self) -> None:
        """Finish what is pending, if nothing has failed, close everything, and give the tags of the pools back."""
        if hasattr(self, "program"):
            try:
                if self.agrees:
                    self.program.finish()
            finally:
                for side in self.sides:
                    side.shutdown()


def _rule_of(name: str) -> Any:
    @rule(a=numbers, b=numbers, c=numbers)
    def call(self: GroupMachine, a: int, b: int, c: int) -> None:
        if name not in self.program.operations:
            return
        self.agrees = False
        self.program.call(name, a, b, c)
        self.agrees = True

    return call


def make_machine(make_pool: Callable[..., Any], make_plan: Callable[..., Any]) -> type[GroupMachine]:
    """Return a state machine class for a kind of pool; see `proof.machine.machine.make_machine`."""
    rules = {name: _rule_of(name) for name in sorted({*CACHED, *OPERATIONS})}
    return type("GroupMachine", (GroupMachine,), {"make": (make_pool, make_plan), **rules})


def run(
    make_pool: Callable[..., Any],
    make_plan: Callable[..., Any],
    *,
    examples: int = 100,
    steps: int = 40,
    seed: int | None = None,
    shrink: bool = True,
) -> None:
    """Run the machine; parameters are those of `proof.machine.machine.run`."""
    run_machine(make_machine(make_pool, make_plan), examples, steps, seed, shrink)
