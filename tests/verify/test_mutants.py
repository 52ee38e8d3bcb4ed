"""Mutants of the core: what is changed, that the draw names what there is, and that the judge finds and does not."""

import re
import sys

import pytest

from tests.verify.mutants.__main__ import SOUND, equivalents, main, report
from tests.verify.mutants.schemata import mutate
from tests.verify.mutants.source import core_sources, functions


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
    main(["--mutants", "8", "--seed", "1", "--calls", "100000", "--of", "groups_fork", "tests/core/test_pending.py"])
    printed = capfd.readouterr().out
    by_tests, by_fuzzer, both = map(int, re.findall(r"\| (\d+) \| \d+ \|$", printed, re.MULTILINE))
    assert "NOT SOUND" not in printed and 0 < min(by_tests, by_fuzzer) < both < 8, printed
