"""vLLM's own tests of its block pool, of what stands on it and of its tiers, with kvpool's in their place.

`KVPOOL_VLLM_SOURCE` is the unpacked source distribution of a release of vLLM.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = os.environ.get("KVPOOL_VLLM_SOURCE")
BLOCKS = ["test_prefix_caching.py", "test_single_type_kv_cache_manager.py", "prefix_cache", "test_kv_cache_metrics.py"]
TIERS = ["test_fs_tier.py", "test_tiering_offloading.py", "test_backpressure.py"]
INTERNALS = {  # tests of what only vLLM's own tiers have
    "test_store_accepts_block_published_by_another_writer",  # a file per block, named before it is written
    "test_failed_load_corrects_verdict_and_removes_corrupt_file[False]",
    "test_batched_partial_load_failure_keeps_loaded_blocks[False]",
    "test_batched_load_first_block_fails_marks_whole_batch[False]",
    "test_failed_load_after_abort_does_not_break_newer_probe",  # lookups that answer later
    "test_shutdown_discards_pending_tasks",  # its threads
    "test_store_load_roundtrip_without_o_direct",  # its reads and writes
    "test_mixed_job_results_emit_event_only_for_successful_job",
    "test_partially_failed_store_emits_no_event",
    "test_fs_tier_cross_tp_round_trip",  # ranks that share a folder
    "test_config_info_keys_match_the_filled_values",  # the example's metric
}
pytestmark = pytest.mark.timeout(3600)  # an engine starts in seconds, on a machine with nothing else to do
HERE = Path(__file__).parent


def outcomes(suites, *arguments):
    """{test: outcome} of suites. vLLM's test of a path that cannot be would make a folder under /dev: left out."""
    path = os.pathsep.join(filter(None, [SOURCE, str(HERE), os.environ.get("PYTHONPATH")]))
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider", "-q", "-rA",
         "-k", "not test_invalid_path_raises_at_construction", *arguments, *suites],
        cwd=SOURCE, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = re.findall(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS) (\S+)", ended.stdout, re.MULTILINE)
    assert found, ended.stdout[-3000:] + ended.stderr[-3000:]
    return {test: outcome for outcome, test in found}


@pytest.mark.skipif(not SOURCE, reason="KVPOOL_VLLM_SOURCE names no source distribution of vLLM")
def test_suites_of_vllm_end_as_on_its_own_blocks():
    suites = [f"tests/v1/core/{suite}" for suite in BLOCKS]
    stock, ours = outcomes(suites), outcomes(suites, "-p", "on_kvpool")
    assert ours == stock
    assert sum(outcome == "PASSED" for outcome in ours.values()) > 300, ours


@pytest.mark.skipif(not SOURCE, reason="KVPOOL_VLLM_SOURCE names no source distribution of vLLM")
def test_suites_of_tiers_end_as_on_vllms_own_but_those_of_internals():
    suites = [f"tests/v1/kv_offload/tiering/{suite}" for suite in TIERS]
    stock, ours = outcomes(suites), outcomes(suites, "-p", "tier_on_kvpool")
    assert {test.split("::")[-1] for test in stock if ours[test] != stock[test]} == INTERNALS
    assert sum(outcome == "PASSED" for outcome in ours.values()) > 150, ours
