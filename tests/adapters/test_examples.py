"""The examples in Python run as they stand."""

import asyncio
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run(*command, cwd=EXAMPLES):
    """Run a program in Python; returns its exit status and what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_every_example_is_run_by_a_test():
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert [path.name for path in EXAMPLES.glob("*.*") if path.name not in tests and path.stem not in tests] == []


def test_block_manager_answers_as_the_model_alone():
    assert run("block_manager.py") == (0, "12 answers, each as the model alone gives it\n")


def test_one_step_for_a_batch_is_faster_than_verbs_for_each_sequence():
    """CPU time, least of three interleaved runs; the page says 7."""
    status, said = run("one_step.py", "--requests", "64", "--prompt", "256", "--tokens", "64", "--runs", "3")
    assert status == 0, said
    ratios = dict(re.findall(r"^(.*): \d+ ms, ([\d.]+) times as fast$", said, re.MULTILINE))
    assert len(ratios) == 3 and float(ratios["one Pool.step per batch"]) > 2.5, said


def test_example_of_the_migration_page_runs():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "migration.md").read_text(), re.DOTALL)
    exec(code, {})


def test_one_process_computes_a_prompt_and_another_generates():
    status, said = run("prefill_decode.py")
    assert status == 0, said
    assert re.match(r"96 of 100 tokens come from the store\n0 of 100 tokens .*\n\[(\d+, ){11}\d+\]$", said), said


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_async_engine_with_readers_and_cancellations_ends_with_an_empty_pool(seed):
    counted = asyncio.run(runpy.run_path(str(EXAMPLES / "async_engine.py"))["main"](requests=40, seed=seed))
    assert counted["failed"] == 0
    assert counted["finished"] + counted["cancelled"] == 40
    assert counted["cancelled"] <= 4 and counted["readings"] > 0 and counted["cached tokens"] > 0
    assert counted["blocks in use at the end"] == 0
