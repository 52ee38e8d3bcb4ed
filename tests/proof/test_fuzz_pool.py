"""`kvpool fuzz`: random programs on the installed core beside the plain Python model."""

import json

import pytest

import kvpool
from kvpool.cli import fuzz, main
from kvpool.testing.fuzz_pool import OPERATIONS, RAISED, Pair, Program, hunt_pool
from proof.fuzz._broken import broken

#: Planted bugs that a few seconds of these programs find. The compiled fuzzer finds all.
FOUND = (
    *("copy missing from the plan", "copy of too few tokens", "slot_mapping off by one", "fork without a reference"),
    *("block released twice", "fence removed", "rollback keeps a token", "truncate frees the oldest"),
    *("reservation lost", "watermark ignored", "evicted node stays in the index", "eviction order inverted"),
    *("hold never released", "copy missing from an unshare", "deferred closes in reverse order"),
    *("fork copies one partial token too few", "refused step leaves a trace", "removal of a node untold"),
)


def facts_of(capsys, *argv):
    """Run a command; return its exit status and its JSON."""
    status = main(["fuzz", *argv, "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("fault", FOUND)
def test_planted_bug_is_found(fault):
    report = hunt_pool(broken(fault), 1, calls=20_000)
    assert report.finding is not None


@pytest.mark.long
def test_sound_pool_has_no_finding_and_every_call_is_accepted_and_refused(monkeypatch):
    met, both = set(), Pair.both

    def spy(self, call, handles=False):
        result = both(self, call, handles)
        met.add((now[-1], result is RAISED))
        return result

    now = []
    for name in set(OPERATIONS):
        made = getattr(Program, name)
        monkeypatch.setattr(Program, name, lambda *args, name=name, made=made: (now.append(name), made(*args))[1])
    monkeypatch.setattr(Pair, "both", spy)
    assert hunt_pool(seed=1, calls=20_000).finding is None
    assert {name for name, refused in met if not refused} == set(OPERATIONS)
    assert len([name for name, refused in met if refused]) >= 14


def test_finding_is_printed_as_a_test_and_can_be_made_again(capsys, monkeypatch):
    monkeypatch.setattr(fuzz.kvpool, "Pool", broken("rollback loses a block"))
    status, facts = facts_of(capsys, "--ops", "1e5", "--seed", "4")
    assert status == 1 and "def test_fuzz_pool" in facts["script"] and facts["script_fails"]
    assert facts["script"].count(",  # ") < 12, "it was not shrunk"
    again = facts["again"].split("  #")[0].split()[2:]
    status, once_more = facts_of(capsys, *again)
    assert (status, once_more["finding"]) == (1, facts["finding"])


def test_script_of_a_finding_passes_on_a_sound_pool(tmp_path):
    report = hunt_pool(broken("truncate frees the oldest"), 1, calls=20_000)
    space = {}
    exec(report.script, space)
    space["test_fuzz_pool"]()


def test_same_seed_makes_the_same_calls(capsys):
    made = [facts_of(capsys, "--ops", "1000", "--seed", "9")[1] for _ in range(2)]
    assert made[0]["calls"] == made[1]["calls"] == 1000 and made[0]["finding"] is None


def test_sizes_are_passed_on(capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(fuzz.kvpool, "Pool", lambda **options: seen.append(options) or kvpool._core.Pool(**options))
    facts_of(capsys, "--ops", "400", "--seed", "4", "--blocks", "9", "--block-size", "3")
    assert seen and all((pool["num_blocks"], pool["block_size"]) == (9, 3) for pool in seen)


@pytest.mark.parametrize(
    "argv",
    [
        ("--seconds", "soon"),
        ("--seconds", "-1"),
        ("--ops", "many"),
        ("--ops", "inf"),
        ("--ops", "0"),
        ("--blocks", "3"),
        ("--block-size", "0"),
        ("--seed", "x"),
        ("--target", "nowhere"),
        ("--target", "kvpool:nothing"),
        ("--target", "no_such_module:f"),
    ],
)
def test_nonsense_is_refused(capsys, argv):
    assert main(["fuzz", *argv]) == 2
    assert "kvpool fuzz:" in capsys.readouterr().err
