"""What is kept over a pause is found, and the others lose little: a generated trace, and real ones where they are."""

import os
from pathlib import Path

import pytest

from benchmarks.replay import read_trace, synthetic_trace
from benchmarks.replay.retention import retained


def check(trace, num_blocks, ttl):
    """The rule: of what was kept 95 % at least are found in time, and the others lose 3 % of their hits at most."""
    found = retained(trace, num_blocks, ttl)
    assert 0 < found.most_kept < 0.3 and found.due, found
    assert found.found_without < 0.95 * found.due <= found.found, found  # the pool is too small without directives
    assert found.others >= 0.97 * found.others_without, found


@pytest.mark.parametrize("seed", [1, 2])
def test_generated_conversations_find_what_they_kept_over_a_pause(seed):
    check(synthetic_trace(seed, 600), 3_000, 60)


@pytest.mark.long
@pytest.mark.skipif("KVPOOL_TRACES" not in os.environ, reason="KVPOOL_TRACES names the folder with the traces")
def test_agents_find_what_they_kept_over_a_pause():
    check(read_trace(Path(os.environ["KVPOOL_TRACES"]) / "agentic_a.npz"), 40_000, 300)
