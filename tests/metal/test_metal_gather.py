"""`gather_blocks`: contexts out of the pool, in the order that MLX's attention takes."""

import mlx.core as mx
import numpy as np
import pytest
from metal_cases import Batch

from kvpool_backends.mlx.metal_kernels import MetalKernels


@pytest.mark.parametrize("layout", ["NHD", "HND", "interleaved", "stacked"])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size"), [("float32", 80, 8), ("float16", 128, 16), ("bfloat16", 256, 32)]
)
def test_gather_equals_what_was_stored(engine, layout, dtype, head_dim, block_size):
    batch = Batch(
        dtype=dtype, head_dim=head_dim, block_size=block_size, layout=layout, seq_lens=(45, 1, 32), kv_heads=3
    )
    longest = 45
    tables, seq_lens = mx.array(batch.tables), mx.array(batch.seq_lens, mx.int32)
    for schedule in engine.schedules:
        kernels = MetalKernels(batch.spec, batch.num_blocks, engine.factory(schedule))
        for at, (plane, dim) in enumerate(batch.spec.planes):
            out = kernels.gather(batch.layer, plane, batch.pools[at], tables, seq_lens, longest)
            out = np.array(out.astype(mx.float32))
            assert out.shape == (3, 3, longest, dim)
            for row, length in enumerate(batch.seq_lens):
                np.testing.assert_array_equal(out[row, :, :length], batch.content[row][at].swapaxes(0, 1))
                assert (out[row, :, length:] == 0).all()


def test_gathered_contexts_and_mlx_attention_equal_float64(engine):
    batch = Batch(seq_lens=(90,), q_lens=(40,), head_dim=128)
    kernels = MetalKernels(batch.spec, batch.num_blocks, engine.factory(0))
    tables, seq_lens = mx.array(batch.tables), mx.array(batch.seq_lens, mx.int32)
    k, v = (kernels.gather(0, plane, batch.pools[at], tables, seq_lens, 90) for at, plane in enumerate("kv"))
    q = mx.array(batch.q).swapaxes(0, 1)[None]
    out = mx.fast.scaled_dot_product_attention(q, k, v, scale=128**-0.5, mask="causal")
    np.testing.assert_allclose(np.array(out[0].swapaxes(0, 1)), batch.expected, atol=2e-5)


def test_gather_moves_each_byte_once(counting_engine):
    batch = Batch(dtype="float16", head_dim=128, seq_lens=(64, 40), kv_heads=2)
    runs = []
    kernels = MetalKernels(batch.spec, batch.num_blocks, counting_engine.factory(0, runs=runs))
    kernels.gather(0, "k", batch.pools[0], mx.array(batch.tables), mx.array(batch.seq_lens, mx.int32), 64)
    read, written = runs[0].reads["pool"], runs[0].writes["out"]
    assert read.bytes == (64 + 40) * 2 * 128 * 2
    assert written.bytes == 2 * 64 * 2 * 128 * 2
    assert read.full_transactions == read.transactions
    assert written.full_transactions == written.transactions
