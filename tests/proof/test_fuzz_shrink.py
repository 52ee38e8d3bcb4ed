"""Findings shrink to a few calls, and the script that is printed fails on the broken pool and passes on a sound one."""

import pytest

import kvpool
from kvpool.testing.fuzz_target import minimal
from proof.fuzz import shrink
from proof.fuzz._broken import broken
from proof.fuzz._fuzz import Driver
from proof.fuzz.hunt import hunt
from proof.fuzz.shape import draw_shape

#: planted bug -> most calls of its shortest program
SHORTEST = {
    "copy missing from the plan": 6,
    "fence removed": 8,
    "write into a shared block": 10,
    "rollback loses a block": 4,
    "reservation lost": 3,
    "watermark ignored": 4,
    "truncate frees the oldest": 4,
    "evicted node stays in the index": 24,
    "generation not counted": 10,
}


def source(fault):
    return f"from proof.fuzz._broken import broken\nbroken({fault!r})"


def run(script):
    space = {}
    exec(script, space)
    next(value for name, value in space.items() if name.startswith("test_"))()


@pytest.fixture(scope="module", params=SHORTEST)
def failure(request):
    report = hunt(seed=3, calls=2_000_000, make_pool=broken(request.param))
    return request.param, shrink.shrink(report.shape, report.words, broken(request.param), source(request.param))


def test_failure_is_short(failure):
    fault, shortest = failure
    assert len(shortest.words) <= SHORTEST[fault], shortest.script


def test_no_call_can_be_left_out(failure):
    fault, shortest = failure
    for at in range(len(shortest.words)):
        rest = shortest.words[:at] + shortest.words[at + 1 :]
        assert shrink.failure_of(shortest.shape, rest, broken(fault)) is None


def test_script_fails_on_the_broken_pool_alone(failure):
    fault, shortest = failure
    assert shortest.reproduces
    with pytest.raises(BaseException):  # noqa: B017 (pytest's "did not raise" is no Exception)
        run(shortest.script)
    run(
        shortest.script.replace(f"broken({fault!r})", "kvpool.Pool").replace(
            "import broken", "import broken\nimport kvpool"
        )
    )


def test_scripts_of_sound_runs_pass():
    for seed in range(25):
        shape = draw_shape(seed)
        driver = Driver(shape)
        words = driver.words(0, 80)
        driver.shutdown()
        run(shrink.make_script(shape, words, kvpool.Pool))


def test_minimal_keeps_only_the_needed_items():
    assert minimal(list(range(200)), lambda items: {3, 77, 150} <= set(items)) == [3, 77, 150]


def test_minimal_of_one_item_that_does_not_matter_is_nothing():
    assert minimal([3], lambda items: True) == minimal([], lambda items: True) == []
