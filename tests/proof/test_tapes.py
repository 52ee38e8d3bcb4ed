"""Scenarios on tape: the core gives what the plain Python model gives, and what it gave when the snapshot was made.

The snapshot, tests/data/tapes.json, has a number for each program, of all that came back and of the digest and the
fingerprint after each call: ranks compare these, and logs keep the texts of refusals. Whoever changes one of them on
purpose makes the snapshot anew: ``python -m tests.proof.test_tapes``.
"""

import json
import re
import sys
import zlib
from pathlib import Path

import pytest

import kvpool
from kvpool.testing import ModelPlan
from proof.machine.misuse import Shortens
from proof.mutation import bound
from proof.mutation.blocks import blocks_by_name, blocks_of_an_engine
from proof.mutation.embedded import (
    PoolByC,
    ReaderByC,
    StatusByC,
    arrays_that_c_reads,
    statuses_of_every_call,
)
from proof.mutation.grouped import (
    ArenaPlan,
    ArenaPool,
    Shown,
    ShownOfModel,
    life_with_groups,
    refused_with_groups,
    shared_tails,
)
from proof.mutation.pending import CORE_ONLY, SCENARIOS
from proof.mutation.refused import Wrong, arguments_of_every_call
from proof.mutation.tape import LOCAL, Raised, Tape, as_judged, first_tag, judge
from proof.plain import plain_pool

SNAPSHOT = Path(__file__).parents[1] / "data" / "tapes.json"
#: Programs that take more than a pool and plans, or other pools, and what.
MORE = {
    **bound.JUDGED,
    **bound.UNJUDGED,
    arguments_of_every_call: {"Wrong": Wrong},
    arrays_that_c_reads: {"Pool": PoolByC, "Reader": ReaderByC},
    statuses_of_every_call: {"Pool": PoolByC, "Status": StatusByC},
    blocks_by_name: {},
    life_with_groups: {"Shown": Shown},
    shared_tails: {"Shown": Shown},
    refused_with_groups: {},
}
PROGRAMS = {program.__name__: (program, {}) for program in SCENARIOS}
PROGRAMS |= {program.__name__: (program, kinds) for program, kinds in MORE.items()}


def core_tape(program, more=None, **options):
    kinds = {"Pool": kvpool.Pool, "Plan": kvpool.Plan} | (more or {})
    made = kinds["Pool"]
    return tape_of(program, **kinds | {"Pool": lambda *a, **k: made(*a, **{"seed": 1} | options | k)})


def told(outcome):
    """An outcome without tags of pools, which other pools may have, and without texts that are not the core's own."""
    if isinstance(outcome, Raised):
        text = re.sub(r"\d{16,}\.0|\d\.\d+e\+\d+", "a float", outcome.text)  # it has lost bits of a handle
        text = re.sub(r"\d{16,}", lambda found: str(int(found[0]) & LOCAL), text)
        return outcome.kind, text if text.startswith("[") else "", told(outcome.more)
    is_list = isinstance(outcome, tuple) and not (len(outcome) == 3 and isinstance(outcome[2], bytes))
    return [told(part) for part in outcome] if is_list else as_judged(outcome)


def number_of(name, **options):
    """What a program gives, as a number: another one as soon as anything differs."""
    tape, number = core_tape(*PROGRAMS[name], **options), 0
    for _ in tape.play(learn=True):
        pytest.fail("not the same twice")
    for op in tape.ops:
        if op.name != "nbytes":
            number = zlib.crc32(repr((op.name, told(op.outcome), op.after)).encode(), number)
    return number


def tape_of(program, **kinds):
    tape = Tape(program.__name__, kinds)
    first_tag()
    program(*map(tape.make, kinds))
    return tape


@pytest.mark.long
@pytest.mark.parametrize("program", [s for s in SCENARIOS if s.__name__ not in CORE_ONLY], ids=lambda s: s.__name__)
def test_scenario_gives_what_the_model_gives(program):
    judge(core_tape(program), tape_of(program, Pool=plain_pool, Plan=ModelPlan))


@pytest.mark.long
@pytest.mark.parametrize("program", [life_with_groups, shared_tails], ids=lambda s: s.__name__)
def test_program_with_groups_gives_what_the_model_gives(program):
    judge(core_tape(program, {"Shown": Shown}), tape_of(program, Pool=plain_pool, Plan=ModelPlan, Shown=ShownOfModel))


def test_model_refuses_the_pools_and_plans_with_groups_that_the_core_refuses():
    tape = core_tape(refused_with_groups)
    judge(tape, tape_of(refused_with_groups, Pool=plain_pool, Plan=ModelPlan))
    assert sum(isinstance(op.outcome, Raised) for op in tape.ops) > 100


@pytest.mark.parametrize("program", [blocks_by_name, blocks_of_an_engine], ids=lambda s: s.__name__)
def test_blocks_of_an_arena_are_what_those_of_a_pool_of_its_size_are(program):
    tape = tape_of(program, Pool=ArenaPool, Plan=ArenaPlan)
    judge(tape, tape_of(program, Pool=plain_pool, Plan=ModelPlan))
    assert any(op.name == "mark_cached" and op.outcome is None for op in tape.ops)


@pytest.mark.skipif(sys.platform != "linux", reason="the snapshot is of Linux")
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_gives_what_it_gave(name):
    assert number_of(name) == json.loads(SNAPSHOT.read_text())[name]


@pytest.mark.skipif(sys.platform != "linux", reason="the snapshot is of Linux")
@pytest.mark.parametrize("name", ["numbers_of_every_size", "arguments_of_every_call"])
def test_number_is_the_same_beside_other_pools_and_another_one_with_another_option(name):
    due = json.loads(SNAPSHOT.read_text())[name]
    for living in (1, 2, 4):
        first_tag()
        others = [kvpool.Pool(4, 4) for _ in range(living)]
        assert number_of(name) == due
        del others
    assert number_of(name, reserved_blocks=2) != due


def test_tape_is_played_as_it_was_recorded():
    def program(pool_type, plan_type):
        pool = pool_type(8, 2)
        plan = plan_type(pool, 2, 8)
        pool.step(plan, [pool.open(), pool.open()], 3)
        _ = plan.block_tables
        pool.shutdown()

    tape = tape_of(program, Pool=lambda *a: kvpool.Pool(*a, seed=1), Plan=kvpool.Plan)
    assert not [*tape.play(learn=True), *tape.play()]
    tape.judged = True
    tape.kinds["Pool"] = lambda *a: kvpool.Pool(*a, seed=2)
    assert not [found for found in tape.play() if found.convicts], "the seed is nothing that a result depends on"
    tape.kinds["Pool"] = lambda *a: kvpool.Pool(*a, seed=1, reserved_blocks=2)
    found = [*tape.play()]
    assert found[0].op.name == "open" and not found[0].convicts, "a digest is no result"
    assert any(difference.convicts and difference.op.name == "block_tables" for difference in found)


def test_tape_leaves_out_a_list_that_changes_while_it_is_read():
    """The list is another one afterwards, so the call could not be made again."""

    def program(pool_type, plan_type):
        pool = pool_type(8, 2)
        batch = [None, pool.open()]
        batch[0] = Shortens(batch, batch[1])
        with pytest.raises(ValueError, match="changed its length"):
            pool.can(batch)
        pool.shutdown()

    tape = tape_of(program, Pool=lambda *a: kvpool.Pool(*a, seed=1), Plan=kvpool.Plan)
    assert "can" not in [op.name for op in tape.ops]
    assert not [*tape.play(learn=True), *tape.play()]


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps({name: number_of(name) for name in PROGRAMS}, indent=1) + "\n")
