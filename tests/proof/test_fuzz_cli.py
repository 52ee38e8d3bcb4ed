"""`python -m proof.fuzz`: what it prints, how it exits, and that a finding can be made again."""

import json

import pytest

from proof.fuzz import __main__ as fuzz
from proof.fuzz import _broken
from proof.fuzz.__main__ import main
from proof.fuzz._broken import broken
from proof.fuzz.hunt import hunt
from proof.fuzz.shape import OPERATIONS, STATES


def facts_of(capsys, *argv):
    """Run a command; return its exit status and its JSON."""
    status = main([*argv, "--json"])
    out, err = capsys.readouterr()
    assert err == ""
    return status, json.loads(out)


def test_json_has_every_operation_and_state(capsys):
    status, facts = facts_of(capsys, "--ops", "6000", "--seed", "4", "--jobs", "1")
    assert status == 0 and facts["finding"] is None
    assert facts["calls"] >= 6000 and facts["seed"] == 4
    assert set(facts["operations"]) == set(OPERATIONS) and set(facts["states"]) == set(STATES)
    assert sum(facts["operations"].values()) == facts["calls"]


def test_same_seed_makes_the_same_calls(capsys):
    argv = ("--ops", "3000", "--seed", "9", "--jobs", "1")
    assert facts_of(capsys, *argv)[1]["operations"] == facts_of(capsys, *argv)[1]["operations"]


def test_processes_share_the_calls(capsys):
    _, facts = facts_of(capsys, "--ops", "20000", "--seed", "4", "--jobs", "2")
    assert facts["calls"] >= 20000 and facts["runs"] >= 6


def test_text_is_a_table(capsys):
    assert main(["--ops", "3000", "--seed", "4", "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    for words in ("calls/s", "rollback", "prefix_hits", "no finding"):
        assert words in out


def test_sizes_are_passed_on(capsys, monkeypatch):
    seen = []
    monkeypatch.setattr("proof.fuzz.hunt.Driver", spy(seen))
    facts_of(capsys, "--ops", "3000", "--seed", "4", "--jobs", "1", "--blocks", "9", "--block-size", "3")
    assert seen and all((pool["num_blocks"], pool["block_size"]) == (9, 3) for pool in seen)


def spy(seen):
    from proof.fuzz._fuzz import Driver

    def make(shape, *rest):
        seen.append(shape.pool)
        return Driver(shape, *rest)

    return make


def test_finding_is_printed_as_a_test_and_can_be_made_again(capsys, monkeypatch):
    faulty = broken("rollback loses a block")
    monkeypatch.setattr(fuzz.kvpool, "Pool", faulty)
    status, facts = facts_of(capsys, "--ops", "1e6", "--seed", "4", "--jobs", "1")
    assert status == 1 and "def test_fuzz_" in facts["script"] and facts["script_fails"]
    again = int(facts["again"].split("--seed ")[1].split()[0])
    assert hunt(again, calls=1, make_pool=faulty).finding is not None
    assert hunt(again, calls=1, make_pool=faulty).runs == 1


def test_canaries_are_listed_and_found(capsys, monkeypatch):
    few = dict(list(fuzz.FAULTS.items())[:3])
    monkeypatch.setattr(fuzz, "FAULTS", few)
    status, facts = facts_of(capsys, "--canary", "--seed", "1")
    assert status == 0 and set(facts["canaries"]) == set(few)
    assert all(canary["found"] for canary in facts["canaries"].values())


def test_a_canary_that_is_not_found_fails_the_command(capsys, monkeypatch):
    harmless = {"nothing at all": (("step",), None, None, None)}
    monkeypatch.setattr(fuzz, "FAULTS", harmless)
    monkeypatch.setattr(_broken, "FAULTS", harmless)
    for limit in (("--seconds", "0.2"), ("--ops", "2000")):
        status, facts = facts_of(capsys, "--canary", "--seed", "1", *limit)
        assert status == 1 and "nothing at all" in facts["finding"] and facts["again"].endswith("--canary --seed 1")


@pytest.mark.parametrize(
    "argv",
    [
        ("--seconds", "soon"),
        ("--seconds", "-1"),
        ("--ops", "many"),
        ("--ops", "0"),
        ("--blocks", "3"),
        ("--block-size", "0"),
        ("--jobs", "0"),
        ("--seed", "x"),
        ("--large", "--blocks", "8"),
        ("--canary", "--jobs", "2"),
        ("--groups", "--large"),
        ("--groups", "--blocks", "8"),
    ],
)
def test_nonsense_is_refused(capsys, argv):
    assert main([*argv]) == 2
    assert "proof.fuzz:" in capsys.readouterr().err
