"""The short form of the gate `proof.failures`: allocations of the core, and of Python inside of its calls, fail.

Allocations of C fail in the build of the mutants' short form, where none of them is on: it can fail on demand, and is
made for tests/proof/test_proof_mutants.py anyway. Python's fail in the build in place.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool import _core
from proof import SHORT
from proof.failures import SHORT_POINTS
from tests.verify import builds

ROOT = Path(__file__).resolve().parents[2]


def sweep(*more):
    """Allocations of Python fail inside of every call of one script, in the build at hand."""
    command = [sys.executable, "-W", "ignore", "-m", "proof.nomemory", "1", "3", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return json.loads(done.stdout)


linux = pytest.mark.skipif(sys.platform != "linux", reason="a build beside this one")
needs_testcapi = pytest.mark.skipif(
    importlib.util.find_spec("_testcapi") is None, reason="this Python has no _testcapi"
)


def c_sweep(*more):
    """Allocations of C fail, one after the other, in scripts of calls."""
    argv = ["-W", "ignore", "-m", "proof.failing", str(SHORT_POINTS), str(SHORT.seed), *more]
    done = builds.run("mutants-quick", argv)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


@linux
def test_call_whose_allocation_fails_changes_nothing():
    result = c_sweep()
    assert result["points"] >= SHORT_POINTS and not result["findings"], result
    assert {"Pool", "Plan", "open", "step", "can", "unshare", "reset"} <= set(result["by_call"])


@linux
def test_call_that_leaves_a_sequence_behind_is_detected():
    assert any("step" in finding for finding in c_sweep("planted")["findings"])


@needs_testcapi
def test_call_without_memory_for_its_objects_changes_nothing():
    result = sweep()
    assert result["points"] > 150 and not result["findings"], result


@needs_testcapi
def test_call_that_leaves_something_behind_is_detected():
    assert sweep("planted")["findings"]


def test_release_build_refuses_to_fail_on_demand():
    if _core.can_fail():
        _core.fail_at(0)
        return
    with pytest.raises(RuntimeError, match=r"\[fail_at\]"):
        _core.fail_at(1)
