"""The short form of the gate `proof.coverage`, and how it reads C."""

import sys

import pytest

from proof import SHORT, coverage

linux = pytest.mark.skipif(sys.platform != "linux", reason="gcc and gcov")
FILE = "kvpool/core/blocks.pxi"
C = """
static int f(int a) {
  int r;
  /* "kvpool/core/blocks.pxi":7
 * cdef int f(int a) noexcept nogil:
 *     return a             # <<<<<<<<<<<<<<
*/
  r = a;
  goto L0;
  /* "kvpool/core/blocks.pxi":6
*/
  /* function exit code */
  L0:;
  return r;
}
"""


def test_c_is_traced_to_the_line_it_is_made_of():
    made_of = {
        number: place for place, first, piece in coverage.pieces(C) for number in range(first, first + len(piece))
    }
    assert {made_of.get(number) for number in (8, 9)} == {(FILE, 7)}
    assert not any(made_of.get(number) for number in (2, 3, 13, 14, 15))


def test_statements_of_all_functions_are_known():
    named = {file: {one.function for one in ones} for file, ones in coverage.wanted().items()}
    assert named[FILE] >= {"blocks_take", "blocks_fingerprint", "check_chain"}
    assert named["kvpool/core/pool.pxi"] >= {"step", "digest", "shutdown", "__repr__"}
    assert "kvpool/core/sequence.pxd" in named and "kvpool/core/memory.pxi" not in named


def report_of(tmp_path, number, text, taken):
    """What gcov says of one line of C, made of a line of the source."""
    source = f'  /* "{FILE}":{number}\n*/\n{text}\n  /* function exit code */\n  return;\n'
    (tmp_path / "build/cython/kvpool").mkdir(parents=True, exist_ok=True)
    (tmp_path / "build/cython/kvpool/_x.c").write_text(source)
    c = [
        {"line_number": 3, "count": 5, "branches": [{"count": 5}, {"count": taken}]},
        {"line_number": 5, "count": 9, "branches": []},
    ]
    return {"files": [{"file": "build/cython/kvpool/_x.c", "lines": c}]}


def statement(nogil, decides=True):
    """Some statement of the core."""
    return next(one for one in coverage.wanted()[FILE] if (one.nogil, one.decides) == (nogil, decides))


def test_branches_are_summed_over_the_modules_that_have_them(tmp_path):
    number = statement(nogil=True).line
    lines, branches = {}, {}
    for taken in (0, 3):
        coverage.add(report_of(tmp_path, number, "  if (a) b();", taken), tmp_path, lines, branches)
    assert lines == {(FILE, number): 10}
    assert sorted(branches.values()) == [3, 10]


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("  if (__pyx_t_1) {", True),
        ("  if (unlikely(__pyx_t_1)) {", True),
        ("  if (unlikely(!__pyx_t_1)) goto e;", False),
        ("  if (likely(!__pyx_t_1)) {", False),  # is what is iterated over a list?
        ("  if (unlikely(!__pyx_t_1)) {", False),  # has the iterator ended?
    ],
)
def test_checks_that_cython_adds_are_no_branches(tmp_path, text, counts):
    one = next((file, one) for file, ones in coverage.wanted().items() for one in ones if one.decides and not one.nogil)
    lines, branches = {}, {}
    report = report_of(tmp_path, one[1].line, text, 0)
    made = tmp_path / "build/cython/kvpool/_x.c"
    made.write_text(made.read_text().replace(FILE, one[0]))
    coverage.add(report, tmp_path, lines, branches)
    assert bool(branches) == counts and len(lines) == 1


@linux
def test_scenarios_reach_most_of_the_core():
    figure = coverage.measure(SHORT)
    assert figure.holds, figure


@linux
def test_short_programs_and_uncounted_modules_are_detected():
    figures = coverage.planted(SHORT)
    assert len(figures) == 2 and not any(figure.holds for figure in figures), figures
