"""The examples in Python run as they stand, and what checks something finds a fault that is planted for it."""

import os
import re
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


#: Of the allocator: a text, and what stands there instead.
FAULT = "and self.counts[table[-1]] > 1", "and self.counts[table[-1]] > 2"  # a shared block is written


@pytest.mark.long
@pytest.mark.parametrize(("old", "new", "found"), [("", "", None), (*FAULT, "content")], ids=["sound", "fault"])
def test_machine_passes_the_allocator_and_finds_its_fault(tmp_path, old, new, found):
    text = (EXAMPLES / "allocator_machine.py").read_text()
    assert old in text
    (tmp_path / "allocator_machine.py").write_text(text.replace(old, new) if old else text)
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed", "1")
    status, said = run("-m", "pytest", *options, "allocator_machine.py", cwd=tmp_path)
    assert status == (found is not None), said
    assert found is None or f"TargetFinding: {found}" in said, said


def test_one_process_computes_a_prompt_and_another_generates():
    status, said = run("prefill_decode.py")
    assert status == 0, said
    assert re.match(r"96 of 100 tokens come from the store\n0 of 100 tokens .*\n\[(\d+, ){11}\d+\]$", said), said
