"""The short form of the gate `proof.mutants`, and its parts: what is changed, and what the fuzzer finds."""

import os
import sys

import pytest

from proof import SHORT, mutants
from proof.fuzz._broken import broken
from proof.mutation.equivalents import EQUIVALENTS
from proof.mutation.fuzzed import fuzz_runs
from proof.mutation.schemata import Schemata, mutate
from proof.mutation.source import core_sources, covered

linux = pytest.mark.skipif(sys.platform != "linux", reason="a build beside this one, and forked children")
hunts = pytest.mark.skipif(
    not os.environ.get("KVPOOL_LONG"), reason="hunts take 20 minutes: make test-long has them"
)
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
    for name in ("index_publish", "seqs_judge", "seq_fork", "unref", "step_check", "pending_settle", "check_group_row"):
        assert "" in asides[name], name
    assert asides["blocks_fingerprint"] == {"fingerprint"} and asides["chain"] == {"fingerprint"}
    assert asides["find_fault"] == asides["check_group"] == {"check"} and asides["mix_tokens"] == {"digest"}


def test_run_of_the_fuzzer_detects_a_planted_bug_and_passes_a_sound_pool():
    runs = list(fuzz_runs(1))
    assert not any(difference for run in runs for difference in run.play())
    for run in runs:
        run.make_pool = broken("write into a shared block")
    found, run = next((found, run) for run in runs for found in run.play())
    assert found.convicts
    assert not [*run.play(blind=True)]


@linux
@hunts
def test_most_mutants_are_detected():
    figure = mutants.measure(SHORT)
    assert figure.holds, figure


@linux
@hunts
def test_killers_that_do_not_look_are_found_out():
    figures = mutants.planted(SHORT)
    assert len(figures) == 3 and not any(figure.holds for figure in figures), figures
