"""The twin finds nothing in the core, finds a planted fault, and tells how to see it again."""

import pytest

import kvpool
from kvpool.testing import ModelPool
from tests.verify import run
from tests.verify.__main__ import main
from tests.verify.constructors import compare_constructors
from tests.verify.twin import WORDS_PER_RUN, Twin
from tests.verify.words import WORDS, shape_of


class LookaheadForgotten(ModelPool):
    """A planted bug: windows and chunks let tokens go that a truncation may bring back."""

    def _let_go(self, seq, layer, p):
        super()._let_go(seq, layer, p + self.lookahead)


def planted(**options):
    """The model; of pools without a prefix cache, one that has a fault."""
    return (ModelPool if options["prefix_cache"] else LookaheadForgotten)(**options)


class Planted(Twin):
    make_model = staticmethod(planted)


@pytest.mark.parametrize("calls", [4_000, pytest.param(60_000, marks=pytest.mark.long)])
def test_core_does_what_the_model_does(calls):
    report = run.hunt(20_261_127, calls=calls, words=WORDS_PER_RUN, make_pool=Twin)
    again = f"python -m tests.verify --model --seed {report.seed} --ops 1"
    assert report.finding is None, f"{report.finding}\nagain: {again}"
    missed = set(WORDS) - {word for word, times in report.words.items() if times}
    assert missed <= {"reset"} and report.met["refused"] and report.met["hits"], missed


def test_planted_fault_is_found_shrunk_and_printed_as_a_test():
    report = run.hunt(1, calls=20_000, words=WORDS_PER_RUN, make_pool=Planted)
    assert report.finding is not None and report.finding.startswith("model: "), report.finding
    shrunk = run.shrink(shape_of(report.seed), report.place, Planted)
    assert shrunk is not None and len(shrunk.words) <= 12, shrunk.words
    text = run.as_test(report.seed, (), shrunk, by_model=True)
    names = {}
    exec(text, names)
    names[f"test_verify_{report.seed}"]()  # the model does not have the fault
    assert run.play(shape_of(report.seed), shrunk.words, Planted)[0] == shrunk.finding


def test_command_compares_with_the_model_and_tells_how_to_make_a_finding_again(capsys, monkeypatch):
    assert main(["--model", "--ops", "300", "--seed", "3"]) == 0
    monkeypatch.setattr("tests.verify.__main__.Twin", Planted)
    assert main(["--model", "--ops", "20000", "--seed", "1"]) == 1
    said = capsys.readouterr().out
    assert "--ops 1 --model" in said and "words, Twin)" in said


def test_core_makes_the_pools_that_the_model_makes():
    met = compare_constructors(kvpool.Pool, 1, 1_000)
    assert set(met) == {"made", "ValueError", "TypeError"}, met
