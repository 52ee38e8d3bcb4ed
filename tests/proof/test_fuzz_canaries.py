"""Every planted bug is found by the fuzzer, each within seconds."""

import pytest

from proof.fuzz._broken import FAULTS, broken
from proof.fuzz.hunt import hunt

CALLS_MAX = 300_000  # most need a thousandth


def test_there_are_enough_planted_bugs():
    assert len(FAULTS) >= 35


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("seed", [1, 2])
def test_planted_bug_is_found(fault, seed):
    report = hunt(seed=seed, calls=CALLS_MAX, make_pool=broken(fault))
    assert report.finding is not None, f"{report.calls} calls found nothing"


def test_sound_pool_has_no_finding():
    report = hunt(seed=1, calls=100_000)
    assert report.finding is None and report.calls >= 100_000
