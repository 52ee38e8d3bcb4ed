"""The kernels as CUDA: the same texts behind ``cuda.h``, run on a CPU by what runs Metal's. No GPU has a say in it.

`make cross` compiles them with NVIDIA's compilers; ``python -m benchmarks.cuda_check`` runs them on a GPU.
"""

import mlx.core as mx
import numpy as np
import pytest
from metal_cases import FEATURES, Batch, PackedBatch, packed
from metal_engine import CudaStandIn

import kvpool_backends.mlx
from kvpool.config import KVSpec
from kvpool.errors import BackendUnavailable
from kvpool_backends.mlx import MLXBackend, cuda, metal_kernels
from kvpool_backends.mlx.metal_kernels import MetalKernels

ENGINE = CudaStandIn()
LATENT = {"head_dim": 32, "v_head_dim": 16, "latent": True, "kv_heads": 1, "group": 8}


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (Batch, {"features": FEATURES}),
        (Batch, {"dtype": "float16", "head_dim": 80, "layout": "HND", "part_tokens": 32}),
        (Batch, {"group": 9, "features": FEATURES}),
        (Batch, {"dtype": "float16", "group": 9, "kv_heads": 1, "part_tokens": 32}),
        (Batch, {"dtype": "bfloat16", "group": 9, "kv_heads": 1, "features": FEATURES}),
        (Batch, {"dtype": "float16", "q_dtype": "float32", "group": 9, "kv_heads": 1}),
        (Batch, {"dtype": "bfloat16", "seq_lens": (40, 9), "q_lens": (5, 9)}),
        (Batch, {"dtype": "float16", **LATENT}),
        (PackedBatch, {"dtype": "float16", "v_bits": 4, "size": 32}),
        (PackedBatch, {"dtype": "bfloat16", "k_bits": 4, "size": 32, "group": 9, "kv_heads": 1}),
    ],
    ids=str,
)
def test_attention_by_the_texts_for_cuda_equals_float64(kind, shape):
    batch = kind(**{"seq_lens": (50, 17)} | shape)
    for schedule in (0, 3):
        batch.check(batch.run(ENGINE.factory(schedule)))


def test_an_infinite_value_stays_with_the_queries_that_see_it_by_the_texts_for_cuda():
    batch = Batch(dtype="float16", seq_lens=(60,), q_lens=(4,), group=4, kv_heads=1)
    batch.content[0][1][59] = np.inf
    out = batch.run(ENGINE.factory(0))
    assert np.isfinite(out[:3]).all() and (out[3] == np.inf).all()


@pytest.mark.parametrize("length", [9, 37])  # a prime: no group of threads fits
def test_contexts_are_gathered_and_tokens_packed_by_the_texts_for_cuda(length):
    batch = Batch(dtype="float16", seq_lens=(length, 5))
    kernels = MetalKernels(batch.spec, batch.num_blocks, ENGINE.factory(0))
    tables, lens = mx.array(batch.tables), mx.array(batch.seq_lens, mx.int32)
    out = np.array(kernels.gather(0, "v", batch.pools[1], tables, lens, length).astype(mx.float32))
    for row, (_, v) in enumerate(batch.content):
        np.testing.assert_array_equal(out[row, :, : len(v)], v.swapaxes(0, 1))
        assert not out[row, :, len(v) :].any()
    spec = KVSpec(1, 3, 64, "float16", 8, k_bits=4, quant_group_size=32)
    x = np.random.default_rng(0).standard_normal((length, 3, 64))
    made = MetalKernels(spec, 4, ENGINE.factory(0)).packed("k", mx.array(x.astype(np.float16)))
    for found, expected in zip(made, packed(x, "float16", 4, 32), strict=True):
        assert mx.array_equal(found, expected)


def test_names_know_the_dialect_and_the_types_of_inputs(monkeypatch):
    """MLX finds a compiled kernel by its name, in a folder that later processes read too."""
    names = []

    def cuda_kernel(*, name, **_):
        names.append(name)
        return lambda *, output_shapes, output_dtypes, **_: list(map(mx.zeros, output_shapes, output_dtypes))

    def pack(dtype):
        kernels = MetalKernels(
            KVSpec(1, 1, 64, k_bits=8), 4, lambda **told: cuda.metal_kernel(factory=cuda_kernel, **told)
        )
        kernels.packed("k", mx.zeros((1, 1, 64), dtype))

    pack(mx.float16)
    pack(mx.float32)
    real = metal_kernels._file_text
    monkeypatch.setattr(metal_kernels, "_file_text", lambda name: real(name) + ";" * (name == "cuda.h"))
    metal_kernels.source_text.cache_clear()
    pack(mx.float16)
    metal_kernels.source_text.cache_clear()
    assert len(set(names)) == 3


def test_the_cuda_route_is_taken_where_mlx_computes_with_cuda_and_left_where_it_fails(monkeypatch, caplog):
    monkeypatch.setattr(kvpool_backends.mlx, "has_cuda", lambda: True)
    monkeypatch.setattr(cuda, "metal_kernel", ENGINE.factory(0))
    spec = KVSpec(1, 2, 64, "float32", 8)
    kvpool_backends.mlx.what_is_wrong.cache_clear()
    backend = MLXBackend(spec, 4)
    assert (backend.route, backend.capabilities.lazy) == ("cuda", True) and not caplog.text

    def refused(**_):
        raise RuntimeError("Failed to compile kernel: paged_attention")

    monkeypatch.setattr(cuda, "metal_kernel", refused)
    kvpool_backends.mlx.what_is_wrong.cache_clear()
    for _ in range(2):
        assert MLXBackend(spec, 4).route == "plain"
    assert caplog.text.count("the plain route is taken: RuntimeError: Failed to compile kernel: paged_attention") == 1
    with pytest.raises(BackendUnavailable, match=r"do not work on this GPU .*paged_attention"):
        MLXBackend(spec, 4, kernels=True)
    kvpool_backends.mlx.what_is_wrong.cache_clear()
