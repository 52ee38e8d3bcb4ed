"""Random programs on pools with groups: core and model agree, and every planted fault is convicted."""

import json

import pytest
from checkpoint_faults import ShortWindow
from group_faults import OF_CONTENT, OF_ORDER

import kvpool
from kvpool.testing import ModelPlan
from kvpool.testing.fuzz_target import TargetFinding
from proof.fuzz._broken_groups import broken_groups
from proof.plain import plain_pool
from proof.plain.__main__ import main
from proof.plain.programs import GroupRun, compare_constructors, hunt_groups, options_of

MODEL = (plain_pool, ModelPlan)
RUNS = 150
#: Where to begin, to be quick, and with faults that few programs show: all seeds are tried.
FIRST = {
    **{"FloorForgotten": 124, "SharedCompacted": 78, "LookaheadForgotten": 28, "ResetKeepsNotes": 20},
    **{"RoomOfStatesNotRounded": 29},
    **{"CachedWrittenInPlace": 8, "ChunkOffByOne": 7, "WrongArena": 4, "ColumnLeftBehind": 4},
}


def convicted(make, oracle):
    """The first seed of which a program fails, and what is wrong."""
    first = FIRST.get(make[0].__name__, 0)
    for number in range(RUNS):
        seed = (first + number) % RUNS + 1
        run = GroupRun(options_of(seed), seed, make, oracle)
        try:
            run.play(run.words())
        except TargetFinding as finding:
            return seed, finding
    return None, None


@pytest.mark.long
def test_core_agrees_with_the_model_and_reads_the_right_content():
    report = hunt_groups((kvpool.Pool, kvpool.Plan), 1, calls=3_000)
    assert report.finding is None, report.script


def test_constructors_agree():
    met = compare_constructors(kvpool.Pool, 1, 1_000)
    assert set(met) == {"made", "ValueError", "TypeError"}, met


@pytest.mark.parametrize("fault", [*OF_CONTENT, *OF_ORDER], ids=lambda fault: fault.__name__)
def test_planted_fault_differs_from_the_model(fault):
    seed, finding = convicted((fault, ModelPlan), MODEL)
    print(f"{fault.__name__}: seed {seed}, {finding}")
    assert finding is not None


@pytest.mark.parametrize("fault", OF_CONTENT, ids=lambda fault: fault.__name__)
def test_planted_fault_is_seen_in_the_content_alone(fault):
    seed, finding = convicted((fault, ModelPlan), (fault, ModelPlan))
    print(f"{fault.__name__}: seed {seed}, {finding}")
    assert finding is not None


def test_finding_is_printed_as_a_test():
    report = hunt_groups((ShortWindow, ModelPlan), 3, calls=20_000)
    assert report.finding is not None
    assert "def test_fuzz_groups" in report.script and "Group(kind='window'" in report.script


@pytest.mark.long
def test_command_fuzzes_and_makes_a_finding_again(capsys, monkeypatch):
    def facts_of(*argv):
        return main([*argv, "--json"]), json.loads(capsys.readouterr().out)

    status, facts = facts_of("--ops", "600", "--seed", "2")
    assert (status, facts["finding"]) == (0, None) and facts["calls"] >= 600
    monkeypatch.setattr(kvpool, "Pool", broken_groups("lookahead forgotten"))
    status, facts = facts_of("--ops", "60000", "--seed", "2")
    assert status == 1 and "def test_fuzz_groups" in facts["script"]
    again = facts["again"].removeprefix("python -m proof.plain ").split("#")[0].split()
    status, once_more = facts_of(*again)
    assert (status, once_more["finding"]) == (1, facts["finding"])


def test_command_refuses_nonsense(capsys):
    assert main(["--ops", "many"]) == 2
    assert "proof.plain: --ops many" in capsys.readouterr().err
