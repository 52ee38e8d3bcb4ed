"""``python -m proof.convicted``: a fault that tests meet is convicted, and what nobody looks at is not."""

import sys

import pytest

from proof import convicted

linux = pytest.mark.skipif(sys.platform != "linux", reason="a build beside this one, and forked children")
FEW = ["--mutants", "12", "--pools", "2", "--seed", "1", "tests/core/test_cow.py"]


def line(end, name="a mutant", kind="mutant"):
    return {"kind": kind, "name": name, "end": end, "by": "", "tests": 1}


@linux
@pytest.mark.long
def test_faults_are_convicted_and_the_sound_core_is_not(capsys):
    convicted.main(FEW)
    printed = capsys.readouterr().out
    assert "| faulty pools, installed | 2 | 2 |" in printed and "NOT SOUND" not in printed


@linux
@pytest.mark.long
def test_without_tests_nothing_is_convicted_and_nothing_holds(capsys):
    assert convicted.main([*FEW, "--blind"]) == 1
    printed = capsys.readouterr().out
    assert "| mutants of the core | 0 | 12 |" in printed and "| faulty pools, installed | 0 | 2 |" in printed


def test_share_below_the_target_does_not_hold():
    sound = [line("survives", convicted.SOUND)]
    assert convicted.report([*sound, *[line("convicted")] * 9, line("survives")], {})
    assert not convicted.report([*sound, *[line("convicted")] * 8, line("survives")], {})
    assert not convicted.report(sound, {})


@pytest.mark.parametrize("end", ["convicted", "hangs", "dies of SIGSEGV", "fails to run"])
def test_sound_core_that_is_convicted_does_not_hold(end):
    assert not convicted.report([line("convicted"), line(end, convicted.SOUND)], {})


def test_fault_that_only_all_tests_plant_is_not_counted():
    planted = {("a", "test_planted_fault", ()): False, ("a", "test_planted_bug", ()): True}
    assert list(convicted.table([], planted)) == [("faults that tests plant", 1, 2)]
