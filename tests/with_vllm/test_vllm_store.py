"""vLLM's engine with kvpool's store behind it: what was computed once is found after a kill, and nothing stalls."""

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import engine
import numpy as np
import pytest
import torch
from test_vllm_engine import HERE, run
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvpool.adapters.vllm.connector import Followed, KVPoolConnector, layout_of, open_store
from kvpool.adapters.vllm.weights import fingerprint
from kvpool.store import BlockLayout, Layout, MemoryStore

pytestmark = pytest.mark.timeout(3600)  # an engine starts in seconds, on a machine with nothing else to do
CASE = "chunked"
SMALL = {"num_gpu_blocks_override": 200, "max_num_batched_tokens": 512}


def tokens(runs):
    return [(name, answer[0]) for name, answer in runs[CASE]["answers"]]


@pytest.fixture(scope="module")
def stock():
    return run(CASE, KVPOOL_VLLM="0")


def test_engine_that_was_killed_finds_its_prompts_on_disk(stock, tmp_path):
    store = tmp_path / "store"
    one = subprocess.Popen([sys.executable, str(HERE / "engine.py"), "--store", str(store), CASE, CASE, CASE])
    while one.poll() is None and not sum(path.stat().st_size > 1 << 20 for path in store.glob("*.kvpool*")):
        time.sleep(0.05)
    os.kill(one.pid, signal.SIGKILL)
    one.wait()
    again = run("--store", str(store), CASE, KVPOOL_VLLM="1")
    assert tokens(again) == tokens(stock)
    cached = [sum(answer[1] for _, answer in runs[CASE]["answers"]) for runs in (stock, again)]
    assert again[CASE]["store"]["hits"] > 0 and cached[1] > cached[0]


def test_damaged_files_are_misses_with_the_same_tokens(stock, tmp_path):
    run("--store", str(tmp_path), CASE)
    for path in tmp_path.glob("*.kvpool*"):
        data = bytearray(path.read_bytes())
        for place in range(4096, len(data), 9_000):
            data[place] ^= 255
        path.write_bytes(data)
    again = run("--store", str(tmp_path), CASE)
    assert tokens(again) == tokens(stock)
    assert again[CASE]["store"]["damaged"] > 0


class Told(MemoryStore):
    """A store that promises everything, and answers when it is let; one that is dead raises."""

    def __init__(self, layout):
        super().__init__(layout, 1 << 28)
        self.let, self.dead = threading.Event(), False

    def lookup(self, blocks):
        if self.dead:
            raise OSError("the disk is gone")
        return np.ones(len(blocks), bool)

    def load(self, blocks, rows):
        assert self.let.wait(600)
        return np.zeros(len(blocks), bool)


@pytest.fixture
def watched(monkeypatch):
    """The connectors that an engine makes."""
    made, init = [], KVPoolConnector.__init__

    def note(self, *arguments, **options):
        init(self, *arguments, **options)
        made.append(self)

    monkeypatch.setattr(KVPoolConnector, "__init__", note)
    return made


@pytest.fixture
def told(watched, tmp_path):
    """An engine whose connectors have a store of the test."""
    one = engine.engine("full", tmp_path / "model", tmp_path / "store", **SMALL)
    store = Told(engine.scheduler_of(one).connector.layout)
    for connector in watched:
        connector.store = store
    return one, store


LONG, SHORT = [4 + (7 * k + 1) % 300 for k in range(300)], [5, 6, 7]  # nine whole blocks, and none


def add(one, name, prompt, new=8):
    params = engine.SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    one.add_request(name, {"prompt_token_ids": prompt}, params)


def ended(one, *names):
    """Step until requests have ended; their tokens, and the names of all that said something."""
    found, named = {}, set()
    while len(found) < len(names):
        for output in one.step():
            named.add(output.request_id)
            if output.request_id in names and output.finished:
                found[output.request_id] = list(output.outputs[0].token_ids)
    return [found[name] for name in names], named


def test_load_that_does_not_return_holds_no_other_request_and_a_dead_store_none(told):
    one, store = told
    add(one, "long", LONG)
    add(one, "short", SHORT)
    _, named = ended(one, "short")
    assert named == {"short"}, "blocks of the other are being loaded"
    store.let.set()  # the store finds out that it has nothing
    (tokens,), _ = ended(one, "long")
    assert len(tokens) == 8
    store.dead = True
    one.reset_prefix_cache()
    add(one, "again", LONG)
    assert ended(one, "again")[0] == [tokens]


def test_window_is_refused_at_the_start_as_its_lost_blocks_cannot_be_computed(tmp_path):
    with pytest.raises(Exception, match="the cache has SlidingWindowSpec, the connector serves one group of full"):
        engine.engine("window", tmp_path / "model", tmp_path / "store", **SMALL)


def test_changed_weights_find_nothing_that_was_saved_before(tmp_path):
    one = engine.engine("full", tmp_path / "model", tmp_path / "store", **SMALL)
    add(one, "before", LONG)
    ended(one, "before")
    connector = engine.scheduler_of(one).connector
    connector.store.drain()
    assert one.reset_prefix_cache(reset_running_requests=False, reset_connector=True)
    add(one, "after", LONG)
    ended(one, "after")
    assert connector.store.stats()["disk"].hits == 0


def test_engine_made_after_another_has_a_store_that_is_open(watched, tmp_path):
    for number in range(2):
        one = engine.engine("full", tmp_path / "model", tmp_path / "store", **SMALL)
        (scheduler, worker) = watched[-2:]
        names = worker.layout.blocks(range(64 * number, 64 * number + 64))[0]
        worker.store.store(names, np.ones((2, worker.layout.groups[0].nbytes), np.uint8))
        worker.store.drain()
        assert len(watched) == 2 * number + 2 and scheduler.store.lookup(names).all()
        one.engine_core.shutdown()


def test_store_of_another_model_is_refused_at_the_start(tmp_path):
    run("--store", str(tmp_path / "store"), CASE)
    with pytest.raises(AssertionError, match="layout"):
        run("--store", str(tmp_path / "store"), "hybrid")


def test_another_config_or_quantization_of_the_same_weights_is_another_model(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 1000)

    def told(quantization=None, **config):
        hf = SimpleNamespace(to_dict=lambda: {"_name_or_path": str(quantization), **config})
        return fingerprint(SimpleNamespace(model=str(tmp_path), hf_config=hf, revision=None, quantization=quantization))

    assert told(rope_theta=1.0) == told(rope_theta=1.0)
    assert len({told(rope_theta=1.0), told(rope_theta=2.0), told("fp8", rope_theta=1.0)}) == 3
    before = told()
    (tmp_path / "model.safetensors").write_bytes(bytes(range(255, -1, -1)) * 1000)
    assert told() != before


def test_another_file_of_weights_at_the_same_place_is_another_model(tmp_path):
    path, hf = tmp_path / "model.gguf", SimpleNamespace(to_dict=dict)
    model, found = SimpleNamespace(model=str(path), hf_config=hf, revision=None, quantization="gguf"), set()
    for value in (1, 2):
        path.write_bytes(bytes([value]) * 1000)
        found.add(fingerprint(model))
    for value in "ab":  # a folder without weights that are known, as of a model on S3: its name decides
        (tmp_path / value).mkdir()
        model.model = str(tmp_path / value)
        found.add(fingerprint(model))
    assert len(found) == 4


def described():
    """The configuration of an engine and of its cache, as far as the connector reads them."""
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["one"])])
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=1), device_config=SimpleNamespace(device_type="cpu"),
        attention_config=SimpleNamespace(backend=None),
    )  # fmt: skip
    return config, cache


def test_store_that_two_engines_share_is_open_until_both_have_ended(tmp_path):
    config, cache = described()
    options = {"path": str(tmp_path / "store"), "max_nbytes": 1 << 28, "weights": "none"}
    config.kv_transfer_config = SimpleNamespace(kv_role="kv_both", kv_connector_extra_config=options)
    first, second = (KVPoolConnector(config, KVConnectorRole.SCHEDULER, cache) for _ in range(2))
    names, row = second.layout.blocks(range(32))[0], np.ones((1, second.layout.groups[0].nbytes), np.uint8)
    for one, kept in ((first, 1), (first, 1), (second, 0)):
        one.shutdown()
        assert second.store.store(names, row) == kept


def test_machine_whose_kernels_pack_blocks_in_another_way_has_another_layout(monkeypatch):
    config, cache = described()
    found = set()
    for is_amx in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda is_amx=is_amx: is_amx)
        found.add(layout_of(config, cache, "weights").digest)
    config.attention_config.backend = "FLEX_ATTENTION"
    assert len(found | {layout_of(config, cache, "weights").digest}) == 3


@pytest.mark.parametrize("hits", [0, 1, 2, 3, 5])
def test_names_of_blocks_behind_hits_are_those_of_all_tokens_before_them(hits):
    layout = Layout((BlockLayout(4, 64, "x"),), "none")
    request = SimpleNamespace(cache_salt=None, all_token_ids=list(range(10)), num_tokens=10)
    followed, named = Followed(request, layout, ""), {}
    followed.table = list(range(8))
    for full, known in ((1, 6), (6, 27), (8, 32)):
        request.all_token_ids = list(range(known))
        for ids, blocks in followed.fill(full):
            named |= zip(ids, map(bytes, blocks.keys), strict=True)
        followed.saved = max(followed.saved, hits)  # the request was preempted, and another one computed its blocks
    every = dict(enumerate(map(bytes, layout.blocks(range(32))[0].keys)))
    assert named.items() <= every.items() and {0, 5, 6, 7} <= set(named)


@pytest.mark.parametrize("what", ["lora_request", "mm_features", "prompt_embeds"])
def test_requests_whose_tokens_do_not_say_what_they_hold_are_left_out(what):
    request = SimpleNamespace(request_id="1", lora_request=None, mm_features=[], prompt_embeds=None)
    setattr(request, what, ["x"])
    connector = object.__new__(KVPoolConnector)
    connector.followed = {}
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False) and not connector.followed


def test_role_that_only_saves_is_refused_at_the_start(tmp_path):
    with pytest.raises(Exception, match="kv_role is kv_producer"):
        engine.engine("full", tmp_path / "model", tmp_path / "store", role="kv_producer", **SMALL)


def test_options_that_are_unknown_are_refused_at_the_start(tmp_path):
    with pytest.raises(ValueError, match=r"\[KVPoolConnector\] kv_connector_extra_config has \['dir'\], it needs path"):
        open_store(None, {"dir": "x"})
