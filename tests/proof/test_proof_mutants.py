"""The short form of the gate `proof.mutants`, and its parts: what is changed, what is recorded, what is compared."""

import sys

import pytest

import kvpool
from kvpool.testing import ModelPlan, ModelPool
from proof import SHORT, mutants
from proof.fuzz._broken import broken
from proof.machine.misuse import Shortens
from proof.mutation.equivalents import EQUIVALENTS
from proof.mutation.fuzzed import fuzz_runs
from proof.mutation.pending import CORE_ONLY, SCENARIOS
from proof.mutation.schemata import Schemata, mutate
from proof.mutation.source import core_sources, covered
from proof.mutation.tape import Tape, as_judged, first_tag

linux = pytest.mark.skipif(sys.platform != "linux", reason="a build beside this one, and forked children")
SOURCE = '''"""Words."""
from libc.stdint cimport int32_t

cdef struct B:
    int32_t size
    int32_t used
    int32_t open
    int32_t* next


cdef int32_t f(B* b, int32_t n) noexcept nogil:
    """Twice."""
    cdef int32_t k, most = n if n < b.size else <int32_t>g(b, n)   # a comment with n > 1
    for k in range(most - 1, -1, -1):
        b.next[k] += 2
    if b.size == 1ULL and not b.open:
        h(b, n, most)
        b.used = most
        return 0
    b.size = n
    b.used = b.size
    return max(most, n)


cdef class Pool:
    cdef B b

    def python_method(self, x):
        if x is None:
            raise ValueError(f"[python_method] x is {x}")
        return f(&self.b, x)


cdef void h(B* b, int32_t one, int32_t other) noexcept nogil:
    pass


cdef bint g(B* b, int32_t n) noexcept nogil:
    return n > 1
'''


def of(source):
    """Return (rewritten source, mutants)."""
    schemata = Schemata({"_x.pyx": source})
    return schemata.file("_x.pyx", source), schemata.mutants


def changes(kind):
    return [(mutant.was, mutant.now) for mutant in of(SOURCE)[1] if mutant.kind == kind]


@pytest.mark.parametrize(
    ("kind", "was", "now"),
    [
        ("comparison", "n < b.size", "n <= b.size"),
        ("comparison", "b.size == 1ULL", "b.size != 1ULL"),
        ("comparison", "x is None", "x is not None"),
        ("arithmetic", "most - 1", "most + 1"),
        ("arithmetic", "b.next[k] += 2", "b.next[k] -= 2"),
        ("arithmetic", "not b.open", "b.open"),
        ("constant", "2", "2 + 1"),
        ("constant", "1ULL", "1ULL - 1"),
        ("call", "h(b, n, most)", "nothing"),
        ("call", "max(most, n)", "min(most, n)"),
        ("branch", "b.size == 1ULL and not b.open", "b.size == 1ULL or not b.open"),
        ("branch", "n < b.size", "True"),
        ("swap", "h(b, n, most)", "h(b, most, n)"),
        ("field", "b.size", "b.used"),
        ("field", "b.used = most", "b.open = most"),
        ("dropped", "b.used = most", "nothing"),
        ("order", "b.size = n", "after b.used = b.size"),
        ("refusal", 'raise ValueError(f"[python_method] x is {x}")', "nothing"),
    ],
)
def test_kind_of_change_is_made(kind, was, now):
    assert (was, now) in changes(kind)


def test_statements_that_do_not_depend_on_each_other_keep_their_order():
    assert ("h(b, n, most)", "after b.used = most") not in changes("order")
    assert not any("b.next[k]" in was for was, _ in changes("order"))


def test_functions_with_python_objects_are_changed_too():
    text, made = of(SOURCE)
    assert {mutant.function for mutant in made} == {"f", "g", "python_method"}
    assert [mutant.number for mutant in made] == list(range(1, len(made) + 1))
    assert all(f"kv_is({mutant.number})" in text for mutant in made)


def test_covered_source_line_keeps_its_length():
    for line in SOURCE.splitlines():
        assert len(covered(line)) == len(line)


@pytest.fixture(scope="module")
def core_mutants():
    """Made once: it takes seconds."""
    return mutate(core_sources())[1]


def test_every_source_of_the_core_has_mutants(core_mutants):
    files = {mutant.file for mutant in core_mutants}
    assert {"pool.pxi", "prefix_calls.pxi", "capi.pyx", "args.pxi", "sequence.pxd"} <= files
    assert not mutants.without_mutants(files)
    assert mutants.without_mutants(files - {"pool.pxi"}) == ["pool.pxi"]
    kinds = {"comparison", "arithmetic", "constant", "branch", "call", "swap", "field", "dropped", "order", "refusal"}
    assert {mutant.kind for mutant in core_mutants} == kinds


def test_equivalents_name_mutants_that_are_made_and_say_why(core_mutants):
    made = [mutant.key for mutant in core_mutants]
    assert len(set(made)) == len(made)
    assert not EQUIVALENTS.keys() - set(made)
    assert all(len(why) > 20 for why in EQUIVALENTS.values())


def test_mutants_of_state_changes_are_not_set_aside(core_mutants):
    why = {(mutant.function, mutant.source): mutant.aside for mutant in core_mutants}
    asides = {function: {aside for (name, _), aside in why.items() if name == function} for function, _ in why}
    for name in ("index_publish", "seqs_judge", "seq_fork", "unref", "step_check", "pending_settle"):
        assert "" in asides[name], name
    assert asides["blocks_fingerprint"] == {"fingerprint"} and asides["chain"] == {"fingerprint"}
    assert asides["find_fault"] == {"check"} and asides["mix_tokens"] == {"digest"}


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
            assert as_judged(got.outcome) == as_judged(due.outcome), (got.name, got.args)


def test_tape_is_played_as_it_was_recorded():
    def program(pool_type, plan_type):
        pool = pool_type(8, 2)
        plan = plan_type(pool, 2, 8)
        pool.step(plan, [pool.open(), pool.open()], 3)
        _ = plan.block_tables
        pool.shutdown()

    tape = tape_of(program, lambda *a: kvpool.Pool(*a, seed=1), kvpool.Plan)
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

    tape = tape_of(program, lambda *a: kvpool.Pool(*a, seed=1), kvpool.Plan)
    assert "can" not in [op.name for op in tape.ops]
    assert not [*tape.play(learn=True), *tape.play()]


def test_run_of_the_fuzzer_detects_a_planted_bug_and_passes_a_sound_pool():
    runs = list(fuzz_runs(1))
    assert not any(difference for run in runs for difference in run.play())
    for run in runs:
        run.make_pool = broken("write into a shared block")
    found, run = next((found, run) for run in runs for found in run.play())
    assert found.convicts
    assert not [*run.play(blind=True)]


@linux
def test_most_mutants_are_detected():
    figure = mutants.measure(SHORT)
    assert figure.holds, figure


@linux
def test_killers_that_do_not_look_are_found_out():
    figures = mutants.planted(SHORT)
    assert len(figures) == 3 and not any(figure.holds for figure in figures), figures
