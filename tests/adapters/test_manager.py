"""`KVBlockManager`: the verbs of the MLX paged-attention plan, against dense attention."""

import numpy as np
import pytest

from kvpool.adapters.block_manager import BlockTableView, KVBlockManager, TailView
from kvpool.config import KVSpec, blocks_for
from kvpool.errors import ForeignHandle, StaleHandle
from kvpool.testing.dense import dense_attention
from kvpool_backends.numpy import NumpyBackend

SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", block_size=4)
NUM_HEADS = 4
SEED = 11


def keys(tokens, layer, dim=8):
    """K (or, with another layer, V) as a model would compute them: a function of the token alone."""
    return np.stack([np.random.default_rng([layer, token]).standard_normal((2, dim)) for token in tokens]).astype("f4")


class Engine:
    """A manager with the history of every sequence."""

    def __init__(self, **options):
        self.manager = KVBlockManager(SPEC, **({"num_blocks": 32} | options))
        self.history = {}

    def new(self, tokens):
        seq_id = self.manager.new_sequence(len(tokens)).seq_id
        self.history[seq_id] = []
        self.append({seq_id: tokens})
        return seq_id

    def fork(self, parent):
        child = self.manager.fork(parent).seq_id
        self.history[child] = list(self.history[parent])
        return child

    def append(self, new):
        self.manager.step(list(new), [len(tokens) for tokens in new.values()])
        for seq_id, tokens in new.items():
            for layer in range(2):
                k, v = keys(tokens, layer), keys(tokens, layer + 100)
                self.manager.write_prefill(seq_id, layer, k, v, len(self.history[seq_id]))
            self.history[seq_id] += tokens

    def check(self, seq_ids, n=1):
        """Attention of the n newest tokens of each sequence, in both layers."""
        tables, lens = self.manager.batch_tables(seq_ids)
        assert tables.shape == (len(seq_ids), -(-max(lens) // 4)) and lens.shape == (len(seq_ids),)
        q = np.random.default_rng(SEED).standard_normal((len(seq_ids), NUM_HEADS, n, 8)).astype("f4")
        for layer in range(2):
            out = self.manager.paged_attention(q, tables, lens, layer)
            assert out.shape == (len(seq_ids), NUM_HEADS, n, 8)
            for row, seq_id in enumerate(seq_ids):
                k, v = keys(self.history[seq_id], layer), keys(self.history[seq_id], layer + 100)
                expected = dense_attention(q[row].swapaxes(0, 1), k, v)[0].swapaxes(0, 1)
                np.testing.assert_allclose(out[row], expected, atol=1e-5, err_msg=f"row {row}, seed {SEED}")


def snapshot(manager):
    """Everything that a refused call must leave alone."""
    return manager.pool.fingerprint(), manager.backend.export_blocks(np.arange(manager.backend.num_blocks)).tobytes()


# ---------------------------------------------------------------------- sequences


def test_free_is_a_method_and_gives_blocks_back():
    """A free list of the same name must not hide it. An id is a handle of the pool, and good once."""
    manager = KVBlockManager(SPEC, 8)
    for _ in range(20):
        seq_id = manager.new_sequence(7 * 4).seq_id  # all blocks, each time
        assert manager.table(seq_id)[0].tolist() == manager.pool.table(seq_id).tolist()
        with pytest.raises(ForeignHandle):
            KVBlockManager(SPEC, 8).table(seq_id)
        manager.free(seq_id)
        for call in (manager.free, manager.table, manager.fork, manager.ensure_tail_capacity):
            with pytest.raises(StaleHandle):
                call(seq_id)
    assert manager.pool.blocks.num_blank == 7


# ---------------------------------------------------------------------- sizes


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
def test_sequences_of_a_manager_that_is_resized_read_what_was_written(backend):
    """Attention over tokens that were written before, between and after resizes, and over those that a fork shares."""
    engine, rng, moved = Engine(num_blocks=40, backend=backend), np.random.default_rng(SEED), 0
    ids = [engine.new([token] * 7) for token in range(8)]
    for _ in range(5):
        for seq_id in [ids.pop(int(rng.integers(len(ids)))) for _ in range(3)]:
            engine.manager.free(seq_id)
        least = 1 + engine.manager.pool.stats().used
        for size in (least, least + 30):
            tables = [engine.manager.table(seq_id)[0] for seq_id in ids]
            engine.manager.resize(size)
            assert engine.manager.pool.num_blocks == engine.manager.backend.num_blocks == size
            for seq_id, old in zip(ids, tables, strict=True):
                new = engine.manager.table(seq_id)[0]
                assert new.max() < size
                moved += int((old != new).sum())
            engine.check(ids, 2)
        ids += [engine.fork(ids[0]), engine.new([size, 1, 2]), engine.new([3] * 5)]
        engine.append({seq_id: [int(rng.integers(100))] for seq_id in ids})
        engine.check(ids, 2)
    assert moved > 5
    engine.manager.pool.check()


# ---------------------------------------------------------------------- tokens


def test_ensure_tail_capacity_takes_blocks_and_copies_without_growing():
    engine = Engine()
    parent = engine.new([1, 2, 3, 4, 5, 6])
    child = engine.fork(parent)
    assert engine.manager.table(child)[0].tolist() == engine.manager.table(parent)[0].tolist()
    tail = engine.manager.ensure_tail_capacity(child, 4)
    block_ids, ctx_len = engine.manager.table(child)
    assert isinstance(tail, TailView) and (tail.seq_id, tail.start_pos, ctx_len) == (child, 6, 6)
    assert tail.slots.tolist() == [
        block_ids[1] * 4 + 2,
        block_ids[1] * 4 + 3,
        block_ids[2] * 4,
        block_ids[2] * 4 + 1,
    ]
    assert block_ids[1] != engine.manager.table(parent)[0][1]
    engine.check([child, parent])  # the valid tokens were copied


def test_write_prefill_of_unplanned_positions_is_refused():
    manager = KVBlockManager(SPEC, 8)
    seq_id = manager.new_sequence(8).seq_id  # reserved, but not planned
    manager.step([seq_id], 3)
    before = snapshot(manager)
    for start_pos, n in ((0, 4), (3, 1), (2**62, 1)):
        chunk = keys(range(n), 0)
        with pytest.raises(ValueError, match=r"^\[write_prefill\] .* 3 are planned"):
            manager.write_prefill(seq_id, 0, chunk, chunk, start_pos)
    for start_pos, error in ((-1, ValueError), (1.0, TypeError), (True, TypeError), (None, TypeError)):
        with pytest.raises(error, match=r"^\[write_prefill\] start_pos"):
            manager.write_prefill(seq_id, 0, keys([1], 0), keys([1], 0), start_pos)
    assert snapshot(manager) == before


def test_write_prefill_into_a_shared_block_is_refused():
    """A late write into the prefix would change the child's past."""
    engine = Engine()
    parent = engine.new([1, 2, 3, 4, 5])
    child = engine.fork(parent)
    before = snapshot(engine.manager)
    with pytest.raises(ValueError, match="is shared"):
        engine.manager.write_prefill(parent, 0, keys([9], 0), keys([9], 0), 4)
    assert snapshot(engine.manager) == before
    engine.check([parent, child])


# ---------------------------------------------------------------------- chunked prefill


def forward(chunk, start_pos):
    return [keys(chunk, layer) for layer in range(2)], [keys(chunk, layer + 100) for layer in range(2)]


@pytest.mark.parametrize("max_chunk_tokens", [1, 3, 4, 7, 100])
def test_prefill_in_chunks_equals_dense_attention(max_chunk_tokens):
    """Between two chunks another sequence decodes."""
    engine = Engine()
    other = engine.new([1, 2])
    prompt = list(range(50, 67))
    view, written = engine.manager.new_sequence(len(prompt)), []
    assert isinstance(view, BlockTableView) and view.ctx_len == 0
    assert view.block_ids.shape == (5,) and view.block_ids.dtype == np.int32
    seq_id = view.seq_id
    for done in engine.manager.prefill_into_kv(seq_id, prompt, forward, max_chunk_tokens):
        written.append(done)
        engine.history[seq_id] = prompt[:done]
        engine.append({other: [done]})
        engine.check([other, seq_id])
    assert written == [*range(max_chunk_tokens, 17, max_chunk_tokens), 17]


@pytest.mark.parametrize("failing_chunk", [0, 1, 2])
def test_prefill_that_fails_can_go_on_behind_its_last_chunk(failing_chunk):
    engine = Engine(num_blocks=5, max_blocks_per_seq=8)  # a chunk takes blocks for itself: all of it has no room
    prompt = list(range(20))
    seq_id = engine.manager.new_sequence().seq_id

    def fails(chunk, start_pos):
        if start_pos == 3 * failing_chunk:
            raise RuntimeError("model failed")
        return forward(chunk, start_pos)

    with pytest.raises(RuntimeError, match="model failed"):
        list(engine.manager.prefill_into_kv(seq_id, prompt, fails, 3))
    written = 3 * failing_chunk
    assert engine.manager.table(seq_id)[1] == written
    engine.manager.resize(8)
    other = engine.new([1, 2, 3])
    list(engine.manager.prefill_into_kv(seq_id, prompt[written:], forward, 3))
    engine.history[seq_id] = prompt
    engine.check([other, seq_id])


def test_prefill_with_a_wrong_number_of_layers_writes_no_token():
    engine = Engine()
    seq_id = engine.manager.new_sequence().seq_id
    for layers in ((2, 1), (1, 1), (3, 3)):
        with pytest.raises(ValueError, match=r"^\[prefill_into_kv\] forward gave"):
            list(
                engine.manager.prefill_into_kv(
                    seq_id, [1, 2], lambda c, p, n=layers: tuple([keys(c, 0)] * count for count in n)
                )
            )
    assert engine.manager.table(seq_id)[1] == 0
    with pytest.raises(ValueError, match="max_chunk_tokens is 0"):
        next(engine.manager.prefill_into_kv(seq_id, [1], forward, 0))


# ---------------------------------------------------------------------- attention


def test_attention_with_contiguous_head_mapping_is_the_default():
    engine = Engine(backend="numpy")
    ids = [engine.new([1, 2, 3, 4, 5])]
    tables, lens = engine.manager.batch_tables(ids)
    q = np.random.default_rng(SEED).standard_normal((1, NUM_HEADS, 1, 8)).astype("f4")
    out = engine.manager.paged_attention(q, tables, lens, 1)
    mapped = engine.manager.paged_attention(q, tables, lens, 1, kv_head_mapping=np.array([0, 0, 1, 1]))
    assert np.array_equal(out, mapped)
    assert np.array_equal(out, engine.manager.paged_attention(q, tables, lens, 1, causal=False))
    again, attn = engine.manager.paged_attention(q, tables, lens, 1, return_attn=True)
    assert np.array_equal(out, again) and attn.shape == (1, NUM_HEADS, 1, 5)
    assert np.allclose(attn.sum(axis=-1), 1)
    assert not np.allclose(out, engine.manager.paged_attention(q, tables, lens, 1, scale=2.0))
    assert engine.manager.batch_tables([])[0].shape == (0, 0)
    for size, num_new in ((0, 1), (1, 0)):
        nothing = engine.manager.paged_attention(q[:size, :, :num_new], tables[:size], lens[:size], 1)
        assert nothing.shape == (size, NUM_HEADS, num_new, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_head_mapping": [0, 1, 0, 1]}, "contiguous groups"),
        ({"kv_head_mapping": [0, 0, 1]}, "contiguous groups"),
        ({"rope_freqs": np.ones(4)}, "positions are the model's"),
        ({"attn_mask": np.zeros((1, 1))}, "only the causal mask"),
        ({"causal": False, "shape": (1, NUM_HEADS, 2, 8)}, "only the causal mask"),
        *(({"shape": shape}, "q must have shape") for shape in ((2, 4, 1, 8), (4, 1, 8), (1, 4, 8))),
    ],
)
def test_attention_refuses_what_belongs_to_the_model_and_another_batch(options, message):
    engine = Engine()
    tables, lens = engine.manager.batch_tables([engine.new([1, 2, 3])])
    q, options = np.zeros(options.get("shape", (1, NUM_HEADS, 1, 8)), "f4"), options.copy()
    options.pop("shape", None)
    with pytest.raises(ValueError, match=rf"^\[paged_attention\] .*{message}"):
        engine.manager.paged_attention(q, tables, lens, 0, **options)


def test_k_and_v_are_read_only_copies_in_the_axes_of_the_plan():
    engine = Engine(num_blocks=4)
    seq_id = engine.new([1, 2, 3, 4, 5])
    manager = engine.manager
    assert manager.k.shape == manager.v.shape == (2, 2, 4, 4, 8)  # layers, kv_heads, blocks, block_size, head_dim
    block = manager.table(seq_id)[0][1]
    assert np.array_equal(manager.k[1, :, block, 0], keys([5], 1)[0])
    assert np.array_equal(manager.v[0, :, block, 0], keys([5], 100)[0])
    manager.k[:] = np.nan
    engine.check([seq_id])
    with pytest.raises(AttributeError):
        manager.k = np.zeros(1)


# ---------------------------------------------------------------------- construction


def test_memory_sizes_the_pool_and_says_how(capsys):
    class Device(NumpyBackend):
        @staticmethod
        def device_info():
            return {
                "device_name": "Apple M9",
                "max_recommended_working_set_size": 2 * 2**30,
                "max_buffer_length": 2**20,
            }

    manager = KVBlockManager(SPEC, memory="auto", backend=Device)
    assert manager.pool.num_blocks == 2**20 // SPEC.array_block_nbytes
    printed = capsys.readouterr().out
    assert "Apple M9" in printed and "max_buffer_length" in printed
    said = []
    manager = KVBlockManager(SPEC, memory="1MiB", log=said.append)
    size = blocks_for("1MiB", SPEC)
    assert manager.pool.num_blocks == manager.backend.num_blocks == size.num_blocks
    KVBlockManager(SPEC, memory="1MiB", log=None)
    assert said == [size.how] and capsys.readouterr().out == ""


def test_manager_without_exactly_one_size_or_with_layers_that_differ_is_refused():
    for sizes in ({}, {"num_blocks": 4, "memory": "1MiB"}):
        with pytest.raises(ValueError, match=r"^\[KVBlockManager\] give either num_blocks or memory"):
            KVBlockManager(SPEC, **sizes)
    with pytest.raises(TypeError, match="a manager has one table; for layer groups make a Pool"):
        KVBlockManager([SPEC, SPEC], 32)


def test_manager_takes_a_backend_by_name(monkeypatch):
    monkeypatch.setenv("KVPOOL_BACKEND", "numpy")
    assert isinstance(KVBlockManager(SPEC, 4).backend, NumpyBackend)
    manager = KVBlockManager(SPEC, 4, backend="numpy")
    assert isinstance(manager.backend, NumpyBackend) and manager.storage.backends == (manager.backend,)
