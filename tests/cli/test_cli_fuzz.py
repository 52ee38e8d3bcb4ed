"""`kvpool fuzz`: random programs on the installed core, beside its plain model."""

import json

import pytest

import kvpool
from kvpool.cli import main
from kvpool.testing import ModelPool
from kvpool.testing.fuzz_pool import PoolAllocator
from kvpool.testing.fuzz_target import fuzz_target


class LosesCopies(PoolAllocator):
    """A planted bug: copies are not told."""

    def append(self, seq, tokens):
        return super().append(seq, tokens)[:0]


def facts_of(capsys, *argv):
    """Run a command; return its exit status and its JSON."""
    status = main(["fuzz", *argv, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_installed_core_has_no_finding_and_every_part_of_it_is_used():
    made = []

    class Kept(PoolAllocator):
        def __init__(self, **sizes):
            super().__init__(**sizes)
            made.append(self)

    report = fuzz_target(Kept, 1, calls=20_000)
    assert report.finding is None, report.script
    pools = [one.pool for one in made]
    assert sum(pool.prefix.stats().hit_tokens for pool in pools) > 1_000
    assert all(sum(getattr(pool.stats(), name) for pool in pools) > 100 for name in ("cow_copies", "evictions"))


def test_finding_is_printed_as_a_test_and_can_be_made_again(capsys, monkeypatch):
    monkeypatch.setattr("kvpool.testing.fuzz_pool.PoolAllocator", LosesCopies)
    status, facts = facts_of(capsys, "--ops", "1e5", "--seed", "4")
    assert status == 1 and facts["kind"] == "content" and facts["script_fails"]
    assert facts["script"].count("checked.") < 8, "it was not shrunk"
    again = facts["again"].split("  #")[0].split()[2:]
    status, once_more = facts_of(capsys, *again)
    assert (status, once_more["finding"]) == (1, facts["finding"]) and "--target" not in again
    monkeypatch.undo()
    space = {}
    exec(facts["script"], space)
    space["test_fuzz_target"]()


class FindsLess(ModelPool):
    """A planted bug of the model: half of a hit is not found."""

    def open(self, tokens=0, *given, **options):
        return super().open(tokens if isinstance(tokens, int) else [*tokens[: len(tokens) // 2], 99], *given, **options)


def test_pool_and_model_that_disagree_are_a_finding(monkeypatch):
    monkeypatch.setattr("kvpool.testing.fuzz_pool.ModelPool", FindsLess)
    report = fuzz_target(PoolAllocator, 1, calls=20_000)
    assert report.kind == "model" and "the plain model" in report.finding and report.script_fails


def test_same_seed_makes_the_same_calls(capsys):
    made = [facts_of(capsys, "--ops", "1000", "--seed", "9")[1] for _ in range(2)]
    assert made[0]["calls"] == made[1]["calls"] >= 1000 and made[0]["finding"] is None


def test_sizes_are_passed_on(capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(
        kvpool, "Pool", lambda *sizes, **options: seen.append(sizes) or kvpool._core.Pool(*sizes, **options)
    )
    facts_of(capsys, "--ops", "400", "--seed", "4", "--blocks", "9", "--block-size", "3")
    assert seen and set(seen) == {(9, 3)}


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
