"""The short form of the gate `proof.failures`: allocations of the core, and of Python inside of its calls, fail.

The builds that can fail on demand are made when they are not there (half a minute, once).
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool import _memory

ROOT = Path(__file__).resolve().parent.parent


def sweep(*more):
    """Allocations of Python fail inside of every call of one script, in the build at hand."""
    command = [sys.executable, "-W", "ignore", "-m", "proof.nomemory", "1", "3", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return json.loads(done.stdout)


needs_testcapi = pytest.mark.skipif(
    importlib.util.find_spec("_testcapi") is None, reason="this Python has no _testcapi"
)


@needs_testcapi
def test_call_without_memory_for_its_objects_changes_nothing():
    result = sweep()
    assert result["points"] > 150 and not result["findings"], result


@needs_testcapi
def test_call_that_leaves_something_behind_is_convicted():
    assert sweep("planted")["findings"]


def test_release_build_refuses_to_fail_on_demand():
    if _memory.can_fail():
        _memory.fail_at(0)
        return
    with pytest.raises(RuntimeError, match=r"\[fail_at\]"):
        _memory.fail_at(1)
