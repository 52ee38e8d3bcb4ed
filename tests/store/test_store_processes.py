"""Processes that write one directory and are killed: a sample of ``python -m proof stores``, and its planted faults."""

import pytest

from proof import stores
from proof.figure import Budget


@pytest.mark.long
@pytest.mark.parametrize("seed", [1])
def test_killed_writers_leave_no_wrong_hit_and_lose_nothing(seed):
    killed, wrong = stores.kill(10, seed)
    assert killed >= 10 and wrong == [], f"seed {seed}"


def test_gate_of_killed_writers_convicts_its_planted_faults():
    rows = stores.planted(Budget(0.001, 1, 3))
    assert len(rows) == 2 and not any(row.holds for row in rows), rows
