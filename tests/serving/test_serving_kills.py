"""``kvpool serve`` ended under load by signals: `python -m proof kills` does it 1,000 times, here it is ten."""

import os

import pytest

from proof.kills import PLANTED, kill

SEED = int(os.environ.get("KVPOOL_FUZZ_SEED", 7))


def test_server_that_was_killed_leaves_nothing_and_serves_again():
    print(f"seed {SEED}")
    assert kill(5, SEED) == {"rounds": 10, "wrong": []}


@pytest.mark.parametrize("fault", PLANTED)
def test_server_that_leaves_something_is_convicted(fault):
    assert kill(1, SEED, fault)["wrong"]
