"""Mutants of the core: what is changed, that the draw names what there is, and that the judge finds and does not."""

import re
import sys

import pytest

from tests.verify.mutants.__main__ import SOUND, equivalents, main, report
from tests.verify.mutants.schemata import Schemata, mutate
from tests.verify.mutants.source import core_sources, covered, functions

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


def is_made(change):
    return any(mutant.key.endswith(f" | {change}") for mutant in of(SOURCE)[1])


@pytest.mark.parametrize(
    "change",
    [
        "n < b.size -> n <= b.size",
        "b.size == 1ULL -> b.size != 1ULL",
        "x is None -> x is not None",
        "most - 1 -> most + 1",
        "b.next[k] += 2 -> b.next[k] -= 2",
        "not b.open -> b.open",
        "2 -> 2 + 1",
        "1ULL -> 1ULL - 1",
        "h(b, n, most) -> nothing",
        "max(most, n) -> min(most, n)",
        "b.size == 1ULL and not b.open -> b.size == 1ULL or not b.open",
        "n < b.size -> True",
        "h(b, n, most) -> h(b, most, n)",
        "b.size -> b.used",
        "b.used = most -> b.open = most",
        "b.used = most -> nothing",
        'raise ValueError(f"[python_method] x is {x}") -> nothing',
    ],
)
def test_kind_of_change_is_made(change):
    assert is_made(change)


def test_functions_with_python_objects_are_changed_too():
    text, made = of(SOURCE)
    assert {mutant.key.partition(":")[0] for mutant in made} == {"f", "g", "python_method"}
    assert [mutant.number for mutant in made] == list(range(1, len(made) + 1))
    assert all(f"kv_is({mutant.number})" in text for mutant in made)


def test_covered_source_line_keeps_its_length():
    for line in SOURCE.splitlines():
        assert len(covered(line)) == len(line)


def test_every_source_of_the_core_has_mutants_and_equivalents_are_among_them():
    made = mutate(core_sources())[1]
    files = {path.name for path in core_sources() if functions(path.name, path.read_text())}
    assert {mutant.file for mutant in made} == files
    keys = {mutant.key for mutant in made}
    assert len(keys) == len(made) and equivalents() and not equivalents() - keys


def ends(found, survive, *sound):
    """Ends of mutants, and of the core without one."""
    every = [("a mutant", "a test")] * found + [("a mutant", "")] * survive + [(SOUND, by) for by in sound]
    return [{"name": name, "found": bool(by), "by": by, "tests": 1} for name, by in every]


@pytest.mark.parametrize(
    ("found", "survive", "sound", "holds"),
    [(8, 2, [""], True), (7, 3, [""], False), (9, 1, ["a test"], False), (9, 1, [], False), (0, 0, [""], False)],
)
def test_report_holds_where_most_are_found_and_nothing_in_the_sound_core(found, survive, sound, holds):
    assert report(ends(found, survive, *sound)) == holds


@pytest.mark.parametrize(
    "options",
    [["--seed", "x"], ["--mutants", "0"], ["--jobs", "-1"], ["--of", "no_function"], ["tests/no_file.py"]],
)
def test_option_wrong_is_refused_with_its_name(options, capsys):
    with pytest.raises(SystemExit):
        main(options)
    said = capsys.readouterr().err
    assert all(word in said for word in options), said


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a build beside this one, and forked children")
def test_mutants_are_found_by_tests_that_reach_them_or_by_the_fuzzer(capfd):
    main(["--mutants", "8", "--seed", "1", "--calls", "100000", "--of", "seq_fork", "tests/core/test_cow.py"])
    printed = capfd.readouterr().out
    by_tests, by_fuzzer, both = map(int, re.findall(r"\| (\d+) \| \d+ \|$", printed, re.MULTILINE))
    assert "NOT SOUND" not in printed and 0 < min(by_tests, by_fuzzer) < both < 8, printed
