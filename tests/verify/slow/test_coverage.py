"""Which lines and branches of the core the fuzzer and the core's tests reach: `make coverage` prints it."""

import pytest

from tests.verify.slow import gcov

LINES_LEAST, BRANCHES_LEAST = 0.99, 0.97
FUZZ = "from tests.verify import run; run.search(1, calls={})"  # here: a child of the command would not count
TESTS = [
    *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not long and not slow"),
    *("-k", "not costs and not interrupted_soon"),  # nothing is fast in this build
    *("tests/core", "tests/prefix", "tests/capi"),
    *("tests/adapters/test_block_pool.py", "tests/adapters/test_blocks_by_name.py"),  # keys of foreign engines
]


@pytest.mark.slow
def test_fuzzer_and_tests_of_the_core_reach_nearly_all_of_it():
    found = gcov.coverage([["-c", FUZZ.format(10**6)], TESTS])
    print(f"{found.lines:.2%} of the lines, {found.branches:.2%} of the branches")
    print("never reached:", *found.missed, "one way only:", *found.one_way, sep="\n  ")
    assert not found.uncounted
    assert found.lines >= LINES_LEAST and found.branches >= BRANCHES_LEAST


@pytest.mark.slow
def test_programs_that_reach_little_and_files_that_nobody_counts_are_seen():
    found = gcov.coverage([["-c", "import kvpool; pool = kvpool.Pool(16, 4); pool.close(pool.open(7))"]])
    assert found.lines < 0.5 and found.branches < 0.5
    assert "kvpool/capi.pyx" in gcov.coverage([["-c", FUZZ.format(1)]], left_out="capi").uncounted


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
def test_checks_that_cython_adds_are_no_branches(text, counts):
    assert bool(gcov.ASKS.match(text)) == counts
