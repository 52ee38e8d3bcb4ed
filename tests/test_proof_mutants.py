"""The short form of the gate `proof.mutants`, and its parts: what is changed, what is recorded, what is compared."""

import sys

import pytest

import kvpool
from kvpool.testing import ModelPlan, ModelPool
from proof import SHORT, mutants
from proof.mutation.equivalents import EQUIVALENTS
from proof.mutation.evictions import CORE_ONLY, SCENARIOS
from proof.mutation.schemata import Schemata, covered, mutate
from proof.mutation.tape import Differs, Tape, first_tag, play, tags_off

linux = pytest.mark.skipif(sys.platform != "linux", reason="a build beside this one, and forked children")
#: The core is made of other functions and files since; the tools that read its sources have yet to follow.
core_moved_on = pytest.mark.xfail(reason="the tool does not read all sources of the core yet", strict=False)
SOURCE = '''"""Words."""
from libc.stdint cimport int32_t

cdef int32_t f(const B* b, int32_t n) noexcept nogil:
    """Twice."""
    cdef int32_t k, most = n if n < b.size else <int32_t>g(b)   # a comment with n > 1
    for k in range(most - 1, -1, -1):
        b.next[k] += 2
    if b.size == 1ULL and not b.open:
        h(&b.list, most)
        return 0
    return max(most, NO_BLOCK)


cdef int python_function(x):
    return 1 + 1
'''


def of(source):
    """Return (rewritten source, mutants)."""
    schemata = Schemata()
    return schemata.file("_x.pyx", source), schemata.mutants


def changes(kind):
    return [(mutant.was, mutant.now) for mutant in of(SOURCE)[1] if mutant.kind == kind]


def test_every_kind_of_change_is_made():
    assert changes("comparison") == [
        ("n < b.size", "n <= b.size"),
        ("n < b.size", "n >= b.size"),
        ("b.size == 1ULL", "b.size != 1ULL"),
    ]
    assert ("most - 1", "most + 1") in changes("arithmetic")
    assert ("b.next[k] += 2", "b.next[k] -= 2") in changes("arithmetic")
    assert {("2", "2 + 1"), ("1ULL", "1ULL - 1"), ("NO_BLOCK", "NO_BLOCK + 1")} <= set(changes("constant"))
    assert {("h(&b.list, most)", "nothing"), ("g(b)", "0"), ("max(most, NO_BLOCK)", "min(most, NO_BLOCK)")} == set(
        changes("call")
    )
    assert ("not b.open", "b.open") in changes("arithmetic")
    assert ("b.size == 1ULL and not b.open", "b.size == 1ULL or not b.open") in changes("branch")
    assert ("n < b.size", "True") in changes("branch")


def test_only_nogil_functions_are_changed():
    text, made = of(SOURCE)
    assert {mutant.function for mutant in made} == {"f"}
    assert "return 1 + 1" in text
    assert [mutant.number for mutant in made] == list(range(1, len(made) + 1))
    assert all(text.count(f"kv_mutant == {m.number})") + text.count(f"kv_mutant == {m.number} ") or (
        f"kv_mutant != {m.number}" in text or f"kv_mutant == {m.number}:" in text
    ) for m in made)  # fmt: skip


def test_covered_text_keeps_its_length():
    for line in SOURCE.splitlines():
        assert len(covered(line)) == len(line)


@core_moved_on
def test_core_has_its_mutants():
    _, made = mutate(mutants.CORE)
    assert len(made) >= mutants.LEAST_MUTANTS
    assert {"comparison", "arithmetic", "constant", "branch", "call"} == {mutant.kind for mutant in made}
    assert len({mutant.file for mutant in made}) == 11


@core_moved_on
def test_equivalents_name_mutants_that_are_made_and_say_why():
    made = [mutant.key for mutant in mutate(mutants.CORE)[1]]
    assert len(set(made)) == len(made)
    assert not EQUIVALENTS.keys() - set(made)
    assert all(len(why) > 20 for why in EQUIVALENTS.values())


def tape_of(program, pool_type, plan_type):
    tape = Tape(program.__name__, {"Pool": pool_type, "Plan": plan_type})
    first_tag()
    program(tape.make("Pool"), tape.make("Plan"))
    return tape


@pytest.mark.parametrize("program", [s for s in SCENARIOS if s.__name__ not in CORE_ONLY], ids=lambda s: s.__name__)
def test_scenario_gives_what_the_model_gives(program):
    core = tape_of(program, lambda *a, **k: kvpool.Pool(*a, **{"seed": 1} | k), kvpool.Plan)
    model = tape_of(program, ModelPool, ModelPlan)
    assert len(core.ops) == len(model.ops)
    for got, due in zip(core.ops, model.ops, strict=True):
        if got.name not in ("digest", "fingerprint", "check"):
            assert tags_off(got.outcome) == tags_off(due.outcome), (got.name, got.args)


def test_tape_is_played_as_it_was_recorded():
    def program(pool_type, plan_type):
        pool = pool_type(8, 2, seed=1)
        plan = plan_type(pool, 2, 8)
        pool.step(plan, [pool.open(), pool.open()], 3)
        _ = plan.block_tables
        pool.shutdown()

    tape = tape_of(program, kvpool.Pool, kvpool.Plan)
    play(tape, learn=True)
    play(tape)
    tape.kinds["Pool"] = lambda *a, **k: kvpool.Pool(*a, **k, reserved_blocks=2)
    with pytest.raises(Differs, match="open"):
        play(tape)


@core_moved_on
@linux
def test_most_mutants_are_seen():
    figure = mutants.measure(SHORT)
    assert figure.holds, figure


@core_moved_on
@linux
def test_killers_that_compare_nothing_are_convicted():
    figure = mutants.planted(SHORT)
    assert not figure.holds, figure
