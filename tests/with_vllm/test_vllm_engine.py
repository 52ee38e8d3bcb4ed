"""vLLM's engine, whole, with its own block pool and with kvpool's: everything that can be seen is the same."""

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest
from engine import CASES
from vllm.v1.core import kv_cache_coordinator
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector

from kvpool.adapters.vllm import register
from kvpool.adapters.vllm.blocks import KVPoolBlocks

pytestmark = pytest.mark.timeout(3600)  # an engine starts in seconds, on a machine with nothing else to do
HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def installed(folder):
    """What an installation of kvpool tells vLLM: the entry points of pyproject.toml."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    about = folder / "kvpool-0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: kvpool\nVersion: 0\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (about / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines]))
    return os.pathsep.join([str(folder), str(ROOT)])  # before what an older build left beside the sources


def run(*arguments, **environment):
    """{case: what the engine did} of a process."""
    with tempfile.TemporaryDirectory() as folder:
        told = {**os.environ, "PYTHONPATH": installed(Path(folder)), **environment}
        program = [sys.executable, str(HERE / "engine.py"), *arguments]
        ended = subprocess.run(program, env=told, capture_output=True, text=True, check=False)
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


@pytest.mark.parametrize("caching", [False, True])
def test_metrics_tell_the_evictions_that_stock_tells(caching):
    told = []
    for kind in (BlockPool, KVPoolBlocks):
        metrics = KVCacheMetricsCollector(sample_rate=1.0)
        pool = kind(4, enable_caching=caching, hash_block_size=1, metrics_collector=metrics)
        for _ in range(3):
            pool.free_blocks(pool.get_new_blocks(3))
        told.append(len(metrics.drain_events()))
    assert told[0] == told[1] and bool(told[0]) == caching


def test_release_whose_pool_does_something_else_is_refused_and_keeps_its_own(monkeypatch):
    free = BlockPool.free_blocks
    monkeypatch.setenv("VLLM_PLUGINS", "other,kvpool")
    for name, other in (("free_blocks", lambda pool, blocks: free(pool, [*blocks][::-1])), ("unpin_blocks", None)):
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="this plugin does not know"):
            patch.setattr(BlockPool, name, other)
            register()
    assert kv_cache_coordinator.BlockPool is BlockPool
    monkeypatch.setattr(kv_cache_coordinator, "BlockPool", BlockPool)  # given back behind the test
    register()
    assert kv_cache_coordinator.BlockPool is KVPoolBlocks


def test_free_blocks_are_counted_where_references_are_set():
    pool = KVPoolBlocks(4, enable_caching=True, hash_block_size=1)
    (block,) = pool.get_new_blocks(1)
    block.ref_cnt = 0
    assert pool.get_num_free_blocks() == pool.core.num_free == 3
