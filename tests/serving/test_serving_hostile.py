"""Hostile requests from a seeded grammar: the server lives, statuses are right, all blocks come back.

``KVPOOL_HOSTILE=10000 python -m pytest tests/serving/test_serving_hostile.py`` sends so many.
"""

import os

import pytest

from proof.hostile import GROWTH, STALL, attack, is_sound

COUNT = int(os.environ.get("KVPOOL_HOSTILE", 400))
SEED = int(os.environ.get("KVPOOL_FUZZ_SEED", 7))


def test_hostile_requests_harm_nobody():
    print(f"seed {SEED}, {COUNT} requests")
    found = attack(COUNT, SEED)
    print(found)
    assert not found["wrong"], "\n".join(found["wrong"])
    assert max(found["stalls"]) <= STALL and found["grown"] <= GROWTH
    assert min(found["statuses"][status] for status in (200, 400, 404)) > COUNT // 50


@pytest.mark.parametrize("fault", ["any field", "a slow check", "a kept body", "a kept request"])  # one per judge
def test_server_with_a_fault_is_convicted(fault):
    assert not is_sound(attack(300, SEED, fault))
