"""The asyncio example runs as it stands: every request ends, and nothing is left in the pool."""

import asyncio
import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "async_engine.py"


def load_example():
    spec = importlib.util.spec_from_file_location("async_engine", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for the names of their annotations
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_async_engine_with_readers_and_cancellations_ends_with_an_empty_pool(seed):
    counted = asyncio.run(load_example().main(requests=40, seed=seed))
    assert counted["failed"] == 0
    assert counted["finished"] + counted["cancelled"] == 40
    assert counted["cancelled"] <= 4 and counted["readings"] > 0 and counted["cached tokens"] > 0
    assert counted["blocks in use at the end"] == 0
