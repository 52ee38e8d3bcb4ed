"""Memory that runs out at every allocation of every call, of the core and of Python: the call is refused, no more."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from failing_calls import Careless, script, script_with_groups, sweep_core

import kvpool
from kvpool import _core

ROOT = Path(__file__).resolve().parents[2]
SEEDS = range(6)
#: Calls that take memory, in every script.
TAKE_MEMORY = {"Pool", "Plan", "step", "can", "reset", "resize"}

can_fail = pytest.mark.skipif(not _core.can_fail(), reason="make asan: a build whose memory fails on demand")
needs_testcapi = pytest.mark.skipif(
    importlib.util.find_spec("_testcapi") is None, reason="this Python has no _testcapi"
)


@can_fail
@pytest.mark.parametrize(
    ("made", "least"), [(script, TAKE_MEMORY | {"unshare"}), (script_with_groups, TAKE_MEMORY | {"open"})]
)
@pytest.mark.parametrize("seed", SEEDS)
def test_call_whose_allocation_fails_changes_nothing(seed, made, least):
    failed = sweep_core(made(seed))
    assert set(failed) >= least and failed.total() > 100, failed


@can_fail
def test_core_call_that_leaves_a_sequence_behind_is_detected(monkeypatch):
    monkeypatch.setattr(kvpool, "Pool", Careless)
    with pytest.raises(AssertionError, match="step: the failure of allocation"):
        sweep_core(script(1))


def swept(*arguments):
    """What a process apart has found: a failure of Python's memory would meet pytest too."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.failing_calls", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return json.loads(done.stdout)


@needs_testcapi
@pytest.mark.parametrize("seed", "123456")
def test_call_without_memory_for_its_objects_changes_nothing(seed):
    found = swept(seed)
    assert found["points"] > 150 and not found["findings"], found


@needs_testcapi
def test_call_without_memory_that_leaves_a_sequence_behind_is_detected():
    assert swept("3", "planted")["findings"]


@pytest.mark.skipif(_core.can_fail(), reason="this build can")
def test_release_build_refuses_to_fail_on_demand():
    with pytest.raises(RuntimeError, match=r"\[fail_at\]"):
        _core.fail_at(1)
