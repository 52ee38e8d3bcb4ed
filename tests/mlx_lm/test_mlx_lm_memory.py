"""`blocks_in`: how many blocks a memory holds beside the states of the sequences that run."""

import gc

import mlx.core as mx
import pytest
from mlx_models import on_cpu

from kvpool.adapters.mlx_lm import host, install, tiny
from kvpool.adapters.mlx_lm.loading import blocks_in

MEMORY, ROWS = 2**20, 5


@pytest.fixture(autouse=True)
def cpu():
    with on_cpu():
        yield


def bytes_of(model, num_blocks):
    """Bytes of a pool, and of the states of one row that has run."""
    with install(model, num_blocks, prefix_cache=True) as kv:
        caches = kv.make_cache()
        mx.eval(model(mx.ones((1, 7), mx.int32), cache=caches))
        gc.collect()
        found = kv.summary()
        del caches
    return found.pool_nbytes, found.state_nbytes


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "mamba", "gemma4_text", "llama"])
def test_memory_holds_the_blocks_and_the_states_of_all_rows_before_and_after_a_pass(name):
    model, _ = tiny.make(name)
    num_blocks = blocks_in(MEMORY, model, 16, ROWS)
    pool, state = bytes_of(model, num_blocks)
    one_more, _ = bytes_of(model, num_blocks + 1)
    assert pool + 2 * ROWS * state <= MEMORY < one_more + 2 * ROWS * state
    assert (state > 0) == (name in ("qwen3_5", "falcon_h1", "mamba"))


def test_memory_that_the_states_fill_is_refused_with_their_bytes():
    model, _ = tiny.make("qwen3_5")
    why = r"^\[memory\] the states of 500 sequences take .* MiB .*: run fewer at a time$"
    with pytest.raises(ValueError, match=why):
        blocks_in(MEMORY, model, 16, 500)


def test_checkpoints_that_no_memory_holds_are_refused_with_their_bytes(monkeypatch):
    """Of a model with states only: a block holds one."""

    def full(num_blocks, nbytes):
        raise MemoryError

    monkeypatch.setattr(host, "BlockRows", full)
    model, _ = tiny.make("mamba")
    with pytest.raises(MemoryError, match=r"no memory for 50 checkpoints of states, 16128 bytes each: give fewer blo"):
        install(model, 50, prefix_cache=True)
    install(model, 50)
