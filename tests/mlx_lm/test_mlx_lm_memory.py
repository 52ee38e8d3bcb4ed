"""`blocks_in`: how many blocks a memory holds beside the states of the sequences that run."""

import gc

import mlx.core as mx
import pytest
from mlx_models import computing_on_cpu

from benchmarks import tiny_families
from kvpool.adapters.mlx_lm import host, install
from kvpool.adapters.mlx_lm.loading import blocks_in
from kvpool.config import describe_plan

cpu = pytest.fixture(computing_on_cpu, autouse=True)
MEMORY, ROWS = 2**20, 5


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
    model, _ = tiny_families.make(name)
    num_blocks = blocks_in(MEMORY, model, 16, ROWS)
    pool, state = bytes_of(model, num_blocks)
    one_more, _ = bytes_of(model, num_blocks + 1)
    assert pool + 2 * ROWS * state <= MEMORY < one_more + 2 * ROWS * state
    assert (state > 0) == (name in ("qwen3_5", "falcon_h1", "mamba"))


def test_memory_that_the_states_fill_is_refused_with_their_bytes():
    model, _ = tiny_families.make("qwen3_5")
    why = r"^\[memory\] the states of 500 sequences take .* MiB .*: run fewer at a time$"
    with pytest.raises(ValueError, match=why):
        blocks_in(MEMORY, model, 16, 500)


def test_memory_that_holds_no_block_beside_the_reserved_one_is_refused():
    model, _ = tiny_families.make("gemma4_text")
    least, _ = bytes_of(model, 2)
    assert blocks_in(least + 1023, model, 16, ROWS) == 2
    for nbytes, said in ((least - 1, ""), (1, "; there are 1 B")):
        with pytest.raises(ValueError, match=rf"^\[memory\] no usable block: blocks need .* KiB at least.*{said}$"):
            blocks_in(nbytes, model, 16, ROWS)


def test_checkpoints_that_no_memory_holds_are_refused_with_their_bytes(monkeypatch):
    """Of a model with states only: a block holds one."""

    def full(num_blocks, nbytes):
        raise MemoryError

    monkeypatch.setattr(host, "BlockRows", full)
    model, _ = tiny_families.make("mamba")
    with pytest.raises(MemoryError, match=r"no memory for 50 checkpoints of states, 16128 bytes each: give fewer blo"):
        install(model, 50, prefix_cache=True)
    install(model, 50)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "gemma4_text", "qwen3_5", "baichuan_m1", "llama"])
def test_plan_says_the_pool_that_install_makes(name):
    rows, memory = 32, 2**22
    facts, text = describe_plan(tiny_families.config_of(name), memory, dtype="float32")
    model, _ = tiny_families.make(name)
    assert facts["num_blocks"] == blocks_in(memory, model, 16, rows)
    kv = install(model, facts["num_blocks"], max_seqs=rows)
    pool = kv.pool
    made = [(pool.stats(arena).num_blocks, nbytes) for arena, nbytes in enumerate(kv.layout.block_nbytes)]
    assert made == [(arena["num_blocks"], arena["block_nbytes"]) for arena in facts["arenas"]]
    assert facts["longest"] == pool.options.max_blocks_per_seq * pool.block_size
    assert facts["pool_nbytes"] == sum(blocks * nbytes for blocks, nbytes in made) <= memory
    if kv.layout.groups:
        assert f"--num-blocks {facts['num_blocks']}" in text and len(made) == text.count("  arena ")
        assert all(f"{blocks} blocks = " in text for blocks, _ in made)
