"""vLLM's tiering on a CPU, with kvpool's tier behind its own primary one: chunks that leave come back, also later."""

from types import SimpleNamespace

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

CHUNKS, NBYTES = 4, 1 << 16
REQUEST = ReqContext(req_id="one")
STEP = ScheduleEndContext(new_req_ids=[], preempted_req_ids=())


def spec(model="tiny", replica=0, **layout):
    """What vLLM tells a tier of the engine."""
    alone = {name: 1 for name in ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")}
    parallel = OffloadingParallelConfig(
        rank=0, data_parallel_index=replica, data_parallel_size=replica + 1, data_parallel_rank_local=None,
        is_parallelism_agnostic=False, **alone,
    )  # fmt: skip
    config = OffloadingConfig(
        groups=(), worker_kv_bytes_per_block=NBYTES, enable_kv_cache_events=True, extra_config={}, engine_id="e",
        model=OffloadingModelConfig(name=model, dtype="float32"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1), parallel=parallel, **layout,
    )  # fmt: skip
    return SimpleNamespace(config=config)


class Host:
    """vLLM's manager with a primary tier of four chunks and kvpool's behind it."""

    def __init__(self, path, weights="", **options):
        self.rows = np.zeros((CHUNKS, NBYTES), np.uint8)  # the memory of the primary tier
        region = SimpleNamespace(create_kv_memoryview=lambda *given, **options: memoryview(self.rows))
        primary = CPUPrimaryTierOffloadingManager(num_chunks=CHUNKS, mmap_region=region)
        settings = {"type": "KVPoolTier", "module_path": "kvpool.adapters.vllm.tier", "path": str(path)}
        view = primary.get_kv_memoryview()
        self.tier = SecondaryTierFactory.create_secondary_tier(
            settings | {"max_nbytes": 1 << 28, "weights": weights}, view, spec(**options)
        )
        self.manager = TieringOffloadingManager(primary_tier=primary, secondary_tiers=[self.tier])
        self.manager.on_new_request(REQUEST)

    def settle(self):
        self.tier.drain_jobs()
        self.tier.store.drain()
        self.manager.on_schedule_end(STEP)

    def put(self, keys):
        """Store chunks as a worker does: the bytes of each are those of its key."""
        plan = self.manager.prepare_store(keys, REQUEST)
        for key, chunk in zip(plan.keys_to_store, plan.store_spec.block_ids, strict=True):
            self.rows[chunk] = bytes_of(key)
        self.manager.complete_store(keys, REQUEST)
        self.settle()

    def take(self, key, request=REQUEST):
        """The bytes of a chunk once they are in the primary tier, None: a miss."""
        waits = (LookupResult.RETRY, LookupResult.HIT_PENDING)
        for _ in range(9):
            found = self.manager.lookup(key, request)
            if found not in waits:
                break
            self.settle()
        assert found not in waits, "a request waits without an end"
        if found is not LookupResult.HIT:
            return None
        (chunk,) = self.manager.prepare_load([key], request).block_ids
        held = self.rows[chunk].copy()
        self.manager.complete_load([key], request)
        return held

    def close(self):
        self.tier.shutdown()


def bytes_of(key):
    return np.random.default_rng(int.from_bytes(key, "big")).integers(0, 256, NBYTES, np.uint8)


KEYS = [make_offload_key(n.to_bytes(32, "big") if n < 8 else bytes([n]) * 32, 0) for n in range(1, 13)]


@pytest.fixture
def host(tmp_path):
    host = Host(tmp_path)
    for first in range(0, len(KEYS), CHUNKS):  # the primary tier has room for a third
        host.put(KEYS[first : first + CHUNKS])
    yield host
    host.close()


def test_chunks_that_left_the_primary_tier_come_back(host):
    for key in [*KEYS, *KEYS[::-1]]:
        assert np.array_equal(host.take(key), bytes_of(key))
    assert host.take(make_offload_key(bytes(32), 1)) is None


@pytest.mark.parametrize("replica", [0, 1])
def test_another_manager_finds_them_after_a_restart(host, tmp_path, replica):
    host.close()
    again = Host(tmp_path, replica=replica)
    again.tier.store.ready.wait(60)
    assert all(np.array_equal(again.take(key), bytes_of(key)) for key in KEYS)
    again.close()


def test_damaged_chunks_are_misses_and_the_others_come_back(host, tmp_path):
    host.close()
    for path in tmp_path.glob("rank0/*.kvpool*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 255
        path.write_bytes(data)
    again = Host(tmp_path)
    again.tier.store.ready.wait(60)
    found = [again.take(key) for key in KEYS]
    assert sum(one is None for one in found) == 1
    assert all(one is None or np.array_equal(one, bytes_of(key)) for one, key in zip(found, KEYS, strict=True))
    again.close()


def test_events_tell_what_the_tier_has(host):
    host.settle()
    told = [event for event in host.manager.take_events() if event.medium == host.tier.medium]
    assert {key for event in told for key in event.keys} == set(KEYS)


@pytest.mark.parametrize(
    "options", [{"model": "other"}, {"weights": "other"}, {"replicated_layout": True}, {"canonical_layout": True}]
)
def test_folder_of_other_chunks_is_refused_at_the_start(host, tmp_path, options):
    with pytest.raises(ValueError, match="layout"):
        Host(tmp_path, **options)


def test_folder_of_other_weights_of_the_same_model_is_refused_at_the_start(tmp_path):
    weights = tmp_path / "model.bin"
    weights.write_bytes(b"before")
    Host(tmp_path / "store", model=str(weights)).close()
    weights.write_bytes(b"behind")
    with pytest.raises(ValueError, match="layout"):
        Host(tmp_path / "store", model=str(weights))


def failing(names, rows):
    raise MemoryError


@pytest.mark.parametrize("load", [failing, lambda names, rows: np.zeros(len(rows), bool)])
def test_chunk_that_cannot_be_loaded_is_a_miss_for_its_request_and_found_by_later_ones(host, monkeypatch, load):
    monkeypatch.setattr(host.tier.store, "load", load)
    monkeypatch.setattr("kvpool.adapters.vllm.tier.log.error", lambda *told, exc_info: logged.append(exc_info))
    logged = []
    assert host.take(KEYS[0]) is None
    assert [type(error) for error in logged] == [MemoryError] * (load is failing)
    monkeypatch.undo()
    assert host.take(KEYS[0]) is None
    later = ReqContext(req_id="later")
    host.manager.on_request_finished(REQUEST)
    host.manager.on_new_request(later)
    assert np.array_equal(host.take(KEYS[0], later), bytes_of(KEYS[0]))
