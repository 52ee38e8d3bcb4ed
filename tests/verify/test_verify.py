"""The fuzzer finds nothing in the core, repeats itself, finds a planted fault, and refuses what is wrong."""

import os
import signal
from functools import partial

import pytest

import kvpool
from tests.verify import __main__ as command
from tests.verify import run
from tests.verify._verify import Run
from tests.verify.canaries import CANARIES, planted
from tests.verify.words import WORDS, shape_of

CALLS = 400_000


class SlotsLost(kvpool.Pool):
    """Plans that copy name no slot to write to."""

    def step(self, plan, *args, **options):
        super().step(plan, *args, **options)
        for part in plan.groups if self.options.groups else [plan]:
            if getattr(part, "state_src", None) is None and len(part.copies):
                part.slot_mapping[:] = 1 << 30


def test_core_random_programs_have_no_finding():
    report = run.search(20_261_127, calls=CALLS)
    again = f"python -m tests.verify --seed {report.seed} --ops 1"
    assert report.finding is None, f"{report.finding}\nagain: {again}"
    assert set(WORDS) == {word for word, times in report.words.items() if times}, "a word was never said"
    assert all(report.met.values()), report.met


@pytest.mark.parametrize("seed", range(3, 9))
def test_run_by_methods_does_what_it_does_below_them(seed):
    digests = []
    for trace in (None, []):
        one = Run(shape_of(seed), trace=trace)
        one.run(1_000)
        digests.append((one.digest(), one.facts()))
        one.shutdown()
    assert digests[0] == digests[1]


def test_planted_fault_is_found_shrunk_and_repeated():
    report = run.search(1, calls=20_000, make_pool=SlotsLost)
    assert report.finding is not None and report.finding.startswith("content"), report.finding
    again = run.search(report.seed, calls=1, make_pool=SlotsLost)
    assert (again.finding, again.place) == (report.finding, report.place)
    shrunk = run.shrink(shape_of(report.seed), report.place, SlotsLost)
    assert shrunk is not None and shrunk.finding.startswith("content")
    assert len(shrunk.words) <= 10, shrunk.words
    assert run.play(shape_of(report.seed), shrunk.words, SlotsLost)[0] == shrunk.finding
    names: dict[str, object] = {}
    exec(run.as_test(report.seed, (), shrunk), names)
    names[f"test_verify_{report.seed}"]()  # the core does not have the fault


@pytest.mark.parametrize(
    ("fault", "why"), [(signal.pause, "does not end"), (partial(os._exit, 3), "ended the process (3)")]
)
def test_run_that_crashes_or_never_ends_is_named(fault, why, monkeypatch, capfd):
    monkeypatch.setattr(command, "LONGEST_RUN", 0.5)
    monkeypatch.setattr(run, "shape_of", lambda *_: fault())
    assert command.main(["--ops", "1", "--seed", "7"]) == 1
    assert f"the run of seed 7 {why}\nagain: python -m tests.verify --seed 7 --ops 1\n" in capfd.readouterr().out


def test_canaries_are_in_the_text_of_the_core():
    text = "".join(planted().values())
    assert all(f"(kv_planted == {number})" in text for number in range(1, len(CANARIES) + 1))


def test_words_left_out_are_not_said():
    report = run.search(3, calls=20_000, without=command.left_out(["rollback", "fork"]))
    assert report.words["rollback"] == report.words["fork"] == 0 and report.finding is None


@pytest.mark.parametrize(
    "options",
    [
        ["--without", "dance"],
        ["--without", "step"],
        ["--seed", "-1"],
        ["--seed", "1.5"],
        ["--ops", "none"],
        ["--seconds", "0"],
        ["--canaries", "no such fault"],
    ],
)
def test_option_wrong_is_refused_with_its_name(options, capsys):
    status, said = command.main(options), capsys.readouterr().err
    assert status == 2 and options[0] in said and options[1] in said, said
