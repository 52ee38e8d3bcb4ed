"""vLLM's engine with kvpool's store behind it: what was computed once is found after a kill, and nothing stalls."""

import os
import signal
import subprocess
import sys
import threading
import time

import engine
import numpy as np
import pytest
from test_vllm_engine import HERE, run

from kvpool.adapters.vllm.connector import KVPoolConnector
from kvpool.store import MemoryStore

pytestmark = pytest.mark.timeout(3600)  # an engine starts in seconds, on a machine with nothing else to do
CASE = "chunked"
SMALL = {"num_gpu_blocks_override": 200, "max_num_batched_tokens": 512}


def tokens(runs):
    return [(name, answer[0]) for name, answer in runs[CASE]["answers"]]


def cached(runs):
    return sum(answer[1] for _, answer in runs[CASE]["answers"])


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
    assert again[CASE]["store"]["hits"] > 0 and cached(again) > cached(stock)


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


class Slow(MemoryStore):
    """A store that answers when it is let; one that is dead raises."""

    def __init__(self, layout, dead=False):
        super().__init__(layout, 1 << 28)
        self.let, self.dead = threading.Event(), dead

    def lookup(self, blocks):
        if self.dead:
            raise OSError("the disk is gone")
        return np.ones(len(blocks), bool)  # even of what it does not have

    def load(self, blocks, rows):
        assert self.let.wait(600)
        return super().load(blocks, rows)


@pytest.fixture
def slow(tmp_path):
    one = engine.engine("full", tmp_path / "model", tmp_path / "store", **SMALL)
    store = Slow(engine.scheduler_of(one).connector.layout)
    workers = [found for found in made if isinstance(found, KVPoolConnector)]
    assert len(workers) == 2
    for connector in workers:
        connector.store = store
    yield one, store
    made.clear()


made = []


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    """The connectors that an engine makes."""
    init = KVPoolConnector.__init__

    def note(self, *arguments, **options):
        init(self, *arguments, **options)
        made.append(self)

    monkeypatch.setattr(KVPoolConnector, "__init__", note)


LONG, SHORT = [4 + (7 * k + 1) % 300 for k in range(100)], [5, 6, 7]  # three whole blocks, and none


def add(one, name, prompt):
    params = engine.SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    one.add_request(name, {"prompt_token_ids": prompt}, params)


def ended(one, name):
    """Step until a request has ended; its tokens, and the names of all that said something."""
    named = set()
    while True:
        for output in one.step():
            named.add(output.request_id)
            if output.request_id == name and output.finished:
                return list(output.outputs[0].token_ids), named


def test_load_that_does_not_return_holds_no_other_request_and_a_dead_store_none(slow):
    one, store = slow
    add(one, "long", LONG)
    add(one, "short", SHORT)
    _, named = ended(one, "short")
    assert named == {"short"}, "blocks of the other are being loaded"
    store.let.set()  # the store finds out that it has nothing
    tokens, _ = ended(one, "long")
    assert len(tokens) == 8
    store.dead = True
    one.reset_prefix_cache()
    add(one, "again", LONG)
    assert ended(one, "again")[0] == tokens


def test_store_of_another_model_is_refused_at_the_start(tmp_path):
    run("--store", str(tmp_path / "store"), CASE)
    with pytest.raises(AssertionError, match="layout"):
        run("--store", str(tmp_path / "store"), "window")


def test_options_that_are_unknown_are_refused_at_the_start(tmp_path):
    from kvpool.adapters.vllm.connector import open_store

    with pytest.raises(ValueError, match=r"\[KVPoolConnector\] kv_connector_extra_config has \['dir'\], it needs path"):
        open_store(None, {"dir": "x"})
