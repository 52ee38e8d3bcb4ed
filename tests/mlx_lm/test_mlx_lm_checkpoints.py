"""States of recurrent layers ride in blocks of a pool: what a plan saves, a later one loads, bit by bit."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_models import on_cpu

import kvpool
from kvpool.adapters.mlx_lm import install, tiny
from kvpool.adapters.mlx_lm.engine import FORMATS
from kvpool.adapters.mlx_lm.ragged import RaggedForward
from kvpool.adapters.mlx_lm.shapes import inspect_model
from kvpool.adapters.mlx_lm.tiny_families import OWN

BLOCK, CUT, SLOTS = 4, 24, 16
CHUNKS = (7, 8, 1)  # after the cut
SHORT = {  # family: what its checkpoints are
    **{"qwen3_5": "gated deltas", "nemotron_h": "Mamba 2 and layers without a cache", "falcon_h1": "in a CacheList"},
    **{"lfm2": "convolutions", "mamba": "no keys and values beside them", "kimi_linear": "latent attention beside"},
    **{"baichuan_m1": "smaller than a block, beside two shapes"},
}


def bits_of(held):
    """The bytes of what slots hold."""
    return {leaf: [np.array(x.reshape(-1).view(mx.uint8)) for x in arrays] for leaf, arrays in held.items()}


def assert_equal_bits(found, due):
    assert found.keys() == due.keys()
    assert all(np.array_equal(x, y) for leaf in due for x, y in zip(found[leaf], due[leaf], strict=True))


class Driver:
    """Runs one sequence after the other."""

    def __init__(self, name, dtype=None, **how):
        model, _ = tiny.make(name)
        if dtype is not None:
            model.set_dtype(dtype)
        self.kv = install(model, 200, block_size=BLOCK, max_seqs=SLOTS // 2, prefix_cache=True, **how)
        self.pool, self.forward = self.kv.pool, RaggedForward(self.kv)
        self.plan = kvpool.Plan(self.pool, 4, 64, formats=FORMATS)
        self.group = self.kv.layout.state_group

    def run(self, handle, tokens, n, ends=None):
        """Run the next tokens, end the step by `ends`, and return the logits of the last one."""
        length = self.pool.num_tokens(handle) + n
        self.pool.step(self.plan, np.array([handle]), np.array([n]))
        new = np.array(tokens[length - n : length], np.int32)
        logits = np.array(self.forward(new, self.plan, np.array([length]), np.array([n - 1])))
        (ends or self.pool.done)(self.plan)
        return logits

    def states(self, handle):
        """The bytes of a sequence's states."""
        return bits_of(self.forward.states.read(self.pool.table(handle, self.group).tolist()))

    def prefilled(self, tokens):
        """A sequence up to the cut, with a checkpoint there."""
        handle = self.pool.open(tokens, b"", cut=CUT)
        while self.pool.num_tokens(handle) < CUT:
            (wanted,) = self.pool.prefix.wanted([handle])
            self.run(handle, tokens, int(wanted) - self.pool.num_tokens(handle))
        assert len(self.plan.groups[self.group].state_saves) == 1
        self.pool.prefix.commit(handle, tokens[:CUT])
        return handle

    def forget(self):
        """Let other sequences write every state slot, and close them."""
        self.forward.keep_states([])
        others = [self.pool.open() for _ in range(SLOTS // 2 - self.pool.stats().sequences)]
        for n in (3, 1):
            for handle in others:
                self.run(handle, [5] * 4, n)
        self.pool.close(others)
        self.forward.keep_states([])


def check_restored(driver, seed):
    """A hit has the state of the sequence that it was found in, and its logits, bit by bit; also after a rollback."""
    print(f"prompt seed {seed}")
    tokens = np.random.default_rng(seed).integers(0, 90, 40).tolist()
    handle = driver.prefilled(tokens)
    due = driver.states(handle)
    cold = [driver.run(handle, tokens, n) for n in CHUNKS]
    driver.pool.close(handle)
    driver.forget()
    handle = driver.pool.open(tokens)
    assert driver.pool.num_tokens(handle) == CUT
    driver.run(handle, tokens, 3, ends=driver.pool.rollback)
    assert_equal_bits(driver.states(handle), due)
    driver.forget()
    warm = [driver.run(handle, tokens, n) for n in CHUNKS]
    assert all(np.array_equal(x, y) for x, y in zip(warm, cold, strict=True))
    driver.pool.close(handle)
    driver.forward.keep_states([])
    assert len(driver.forward.states) == 0
    arenas = len(driver.kv.layout.specs) or 1
    assert [driver.pool.stats(arena).used for arena in range(arenas + 1)] == [0] * (arenas + 1)
    driver.pool.check()


def restorable():
    """Families with states, all of which have fixed shapes."""
    found = []
    for name in sorted(OWN):
        kinds = {leaf.kind for leaf in inspect_model(tiny.make(name)[0]).leaves}
        if "state" in kinds and "opaque" not in kinds:
            found.append(name)
    return found


@pytest.mark.parametrize("name", SHORT)
def test_state_overwritten_after_its_checkpoint_is_restored_bit_by_bit(name):
    with on_cpu():
        check_restored(Driver(name), 11)
