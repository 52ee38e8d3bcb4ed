"""vLLM's own tests of its block pool and of what stands on it, with kvpool's blocks in its place.

`KVPOOL_VLLM_SOURCE` is the unpacked source distribution of a release of vLLM.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = os.environ.get("KVPOOL_VLLM_SOURCE")
SUITES = ["test_prefix_caching.py", "test_single_type_kv_cache_manager.py", "prefix_cache", "test_kv_cache_metrics.py"]
pytestmark = pytest.mark.timeout(3600)  # an engine starts in seconds, on a machine with nothing else to do
HERE = Path(__file__).parent


def outcomes(*arguments):
    """{test: outcome} of the suites."""
    path = os.pathsep.join(filter(None, [SOURCE, str(HERE), os.environ.get("PYTHONPATH")]))
    suites = [f"tests/v1/core/{suite}" for suite in SUITES]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider", "-q", "-rA", *arguments, *suites],
        cwd=SOURCE, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = re.findall(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS) (\S+)", ended.stdout, re.MULTILINE)
    assert found, ended.stdout[-3000:] + ended.stderr[-3000:]
    return {test: outcome for outcome, test in found}


@pytest.mark.skipif(not SOURCE, reason="KVPOOL_VLLM_SOURCE names no source distribution of vLLM")
def test_suites_of_vllm_end_as_on_its_own_blocks():
    stock, ours = outcomes(), outcomes("-p", "on_kvpool")
    assert ours == stock
    assert sum(outcome == "PASSED" for outcome in ours.values()) > 300, ours
