"""States of recurrent layers ride in blocks of a pool: what a plan saves, a later one loads, bit by bit."""

import copy
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx_models import computing_on_cpu

import kvpool
from benchmarks import tiny_families
from benchmarks.tiny_families import OWN
from kvpool import Group
from kvpool.adapters.mlx_lm import install
from kvpool.adapters.mlx_lm.engine import FORMATS, RaggedForward
from kvpool.adapters.mlx_lm.shapes import Leaf, StateShape, inspect_model
from kvpool.adapters.mlx_lm.states import Checkpoints
from kvpool.group_storage import BlockRows

cpu = pytest.fixture(computing_on_cpu, autouse=True)
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

    def __init__(self, name, **how):
        model, _ = tiny_families.make(name)
        self.kv = install(model, 200, block_size=BLOCK, max_seqs=SLOTS // 2, prefix_cache=True, **how)
        self.pool, self.forward = self.kv.pool, RaggedForward(self.kv)
        self.plan = kvpool.Plan(self.pool, 4, 64, formats=FORMATS)
        self.group = self.kv.layout.state_group

    def run(self, handle, tokens, n, ends=None):
        """Run the next tokens, end the step by `ends`, and return the logits of the last one."""
        length = self.pool.num_tokens(handle) + n
        self.pool.step(self.plan, np.array([handle]), np.array([n]))
        new = np.array(tokens[length - n : length], np.int32)
        logits = np.array(self.forward(new, self.plan, np.array([n - 1])))
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
    arenas = len(driver.kv.layout.block_nbytes)
    assert [driver.pool.stats(arena).used for arena in range(arenas + 1)] == [0] * (arenas + 1)
    driver.pool.check()


def restorable():
    """Families with states, all of which have fixed shapes."""
    found = []
    for name in sorted(OWN):
        kinds = {leaf.kind for leaf in inspect_model(tiny_families.make(name)[0]).leaves}
        if "state" in kinds and "opaque" not in kinds:
            found.append(name)
    return found


@pytest.mark.parametrize("name", SHORT)
def test_state_overwritten_after_its_checkpoint_is_restored_bit_by_bit(name):
    check_restored(Driver(name), 11)


@pytest.mark.long
def test_states_of_every_family_are_restored_bit_by_bit():
    names = restorable()
    assert len(names) > 20 and set(SHORT) <= set(names)
    for name in names:
        check_restored(Driver(name), 12)


@pytest.mark.parametrize("how", [{"backend": "numpy"}, {"backend": "cpu"}, {"kernels": False}])
def test_states_in_blocks_of_any_storage_are_restored_bit_by_bit(how):
    check_restored(Driver("qwen3_5", **how), 14)


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "mamba"])
def test_caches_of_mlx_lm_with_a_found_prefix_have_its_state(name):
    """Also copies that were made before the first pass loaded the state, whichever of them runs first."""
    model, _ = tiny_families.make(name)
    tokens = np.random.default_rng(17).integers(0, 90, 40).tolist()

    def fed(caches, at):
        logits = []
        for n in (CUT, *CHUNKS) if at == 0 else CHUNKS:
            logits.append(np.array(model(mx.array([tokens[at : at + n]]), cache=caches))[0, -1])
            at += n
        return logits

    with install(model, 200, block_size=BLOCK, max_seqs=SLOTS, prefix_cache=True) as kv:
        caches, length = kv.fetch(tokens, cut=CUT)
        cold = fed(caches, length)[1:]
        kv.commit(caches, tokens)
        del caches
        caches, length = kv.fetch(tokens, cut=CUT)
        assert length == CUT
        copies = [copy.deepcopy(caches), caches, copy.deepcopy(caches)]
        for one in copies:
            assert all(np.array_equal(x, y) for x, y in zip(fed(one, length), cold, strict=True))
        del caches, copies, one
    assert kv.pool.stats().used == 0


def test_state_of_a_model_that_was_cast_is_refused():
    driver, tokens = Driver("mamba"), list(range(40))
    driver.kv.model.set_dtype(mx.bfloat16)
    handle = driver.pool.open(tokens, b"", cut=CUT)
    driver.run(handle, tokens, 4)
    with pytest.raises(TypeError, match=r"state of cache 0 has arrays .*bfloat16.* install again"):
        driver.run(handle, tokens, CUT - 4)
    driver.pool.rollback(driver.plan)
    assert driver.pool.num_tokens(handle) == 4


def test_pool_with_checkpoints_of_another_size_is_refused():
    model, _ = tiny_families.make("qwen3_5")
    groups = [Group.full(), Group.state(8, blocks=3)]
    with pytest.raises(ValueError, match=r"checkpoint of the pool has 3 blocks, .* this model need 9: .*blocks=9"):
        install(model, pool=kvpool.Pool(64, BLOCK, prefix_cache=True, groups=groups), prefix_cache=True)


# ------------------------------------------------------------------------------------------------- any bytes

DTYPES = (mx.float32, mx.float16, mx.bfloat16, mx.int32, mx.uint8, mx.int64, mx.uint16)
NUM_BLOCKS, GROUP = 40, 1


def drawn_layout(rng, block_nbytes):
    """What `Checkpoints` reads of a layout: one to three states with any arrays, at least one of them."""
    leaves = [
        tuple(
            None if rng.random() < 0.2 else StateShape(tuple(rng.integers(1, 6, rng.integers(0, 4)).tolist()), dtype)
            for dtype in rng.choice(np.array(DTYPES, object), rng.integers(1, 4))
        )
        for _ in range(rng.integers(1, 4))
    ]
    leaves.append((StateShape((3,), mx.float32),))
    found = {2 * i: Leaf("state", "ArraysCache", len(arrays), arrays=arrays) for i, arrays in enumerate(leaves)}
    nbytes = sum(leaf.nbytes for leaf in found.values())
    model = SimpleNamespace(state_nbytes=nbytes)
    return SimpleNamespace(
        leaves=found, held=tuple(found), model=model, block_nbytes=(block_nbytes,), state_group=GROUP,
        checkpoint_blocks=-(-nbytes // block_nbytes),
    )  # fmt: skip


def drawn_states(rng, layout, num_rows):
    """Random bits, those of numbers that are none among them; and the same as bytes, row by row."""
    held, rows = {}, [b""] * num_rows
    for leaf in layout.held:
        held[leaf] = []
        for array in layout.leaves[leaf].arrays:
            data = None if array is None else rng.integers(0, 256, (num_rows, array.nbytes), np.uint8)
            held[leaf].append(None if data is None else mx.array(data).view(array.dtype).reshape(-1, *array.shape))
            rows = [row if data is None else row + data[i].tobytes() for i, row in enumerate(rows)]
    return held, rows


def test_any_bits_of_any_arrays_come_back_from_any_blocks():
    """Every storage exports and imports the bits of blocks: see `kvpool.testing.conformance`."""
    rng = np.random.default_rng(19)
    print("seed 19")
    for _ in range(40):
        nbytes = int(rng.integers(40, 200))
        layout, blocks = drawn_layout(rng, nbytes), BlockRows(NUM_BLOCKS, nbytes)
        checkpoints, num_rows = Checkpoints(layout, blocks), int(rng.integers(1, 4))
        ids = rng.permutation(NUM_BLOCKS)[: num_rows * layout.checkpoint_blocks].astype(np.int32)
        bundles = np.column_stack([np.arange(num_rows) + 5, ids.reshape(num_rows, -1)]).astype(np.int32)
        held, rows = drawn_states(rng, layout, num_rows)
        others = np.setdiff1d(np.arange(NUM_BLOCKS), ids)
        kept = rng.integers(0, 256, (len(others), nbytes), np.uint8)
        blocks.import_blocks(others, kept)
        plan = SimpleNamespace(groups=[None, SimpleNamespace(state_saves=bundles, state_loads=bundles[::-1])])
        checkpoints.save(plan, lambda slots, held=held: held if slots[0] == 5 else None)
        slots, found = checkpoints.loaded(plan)
        assert slots == bundles[::-1, 0].tolist()
        assert bytes_of(found, num_rows) == rows[::-1]
        assert np.array_equal(blocks.export_blocks(others), kept)


def bytes_of(held, num_rows):
    """The bytes of each row of what is held."""
    parts = [np.array(x.reshape(num_rows, -1).view(mx.uint8)) for xs in held.values() for x in xs if x is not None]
    return [b"".join(part[row].tobytes() for part in parts) for row in range(num_rows)]
