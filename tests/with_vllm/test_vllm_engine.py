"""vLLM's engine, whole, with its own block pool and with kvpool's: everything that can be seen is the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine import CASES

HERE = Path(__file__).parent


def run(*arguments, **environment):
    """{case: what the engine did} of a process."""
    ended = subprocess.run(
        [sys.executable, str(HERE / "engine.py"), *arguments], env={**os.environ, **environment}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    found = [line.removeprefix("RESULT ") for line in ended.stdout.splitlines() if line.startswith("RESULT ")]
    assert ended.returncode == 0 and found, ended.stdout[-3000:] + ended.stderr[-3000:]
    return dict(map(json.loads, found))


@pytest.fixture(scope="module")
def engines():
    return run(*CASES, KVPOOL_VLLM="0"), run(*CASES, KVPOOL_VLLM="1")


@pytest.mark.parametrize("case", CASES)
def test_engine_on_kvpool_answers_as_on_its_own_blocks(engines, case):
    stock, ours = (runs[case] for runs in engines)
    assert (stock.pop("pool"), ours.pop("pool")) == ("BlockPool", "KVPoolBlocks")
    assert ours == stock
    cached = sum(answer[1] for _, answer in stock["answers"])
    assert bool(cached) == (case != "uncached"), "the requests share their beginnings"
    assert stock["preempted"] or case not in {"tight", "uncached"}, "the pool is too small for all of them"
