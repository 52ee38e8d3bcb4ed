"""The example for vLLM says so where vLLM is not; `KVPOOL_VLLM_PYTHON`, an interpreter that has it, runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "vllm_blocks.py"


def run(python, *arguments, path=""):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, str(ROOT)]))}
    return subprocess.run(
        [python, str(EXAMPLE), *arguments], env=environment, capture_output=True, text=True, check=False
    )


def test_example_without_vllm_says_that_nothing_was_run(tmp_path):
    (tmp_path / "vllm.py").write_text("raise ImportError('not for this test')\n")
    ended = run(sys.executable, path=str(tmp_path))
    assert ended.returncode == 1 and ended.stdout == ""
    assert "[vllm_blocks] vLLM is not here (" in ended.stderr and "nothing was run" in ended.stderr


def test_example_on_vllms_manager_finds_every_table_the_same():
    python = os.environ.get("KVPOOL_VLLM_PYTHON")
    if not python:
        pytest.skip("KVPOOL_VLLM_PYTHON names no interpreter that has vLLM")
    ended = run(python, "--requests", "80", "--blocks", "1500", path=os.environ.get("PYTHONPATH", ""))
    assert ended.returncode == 0, ended.stderr
    found = r"^80 requests, [1-9]\d* tokens found in the cache, every block table the same$"
    assert re.search(found, ended.stdout, re.MULTILINE)
