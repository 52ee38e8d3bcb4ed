"""Pools of 8 and 4 bits behind `MetalBackend`: the conformance kit, long chunks, warmup, choice of route, mlx-lm."""

from dataclasses import replace

import numpy as np
import pytest
from metal_engine import recording
from mlx_models import batch_tokens, on_cpu, random_prompts, tiny_llama
from test_mlx_native import built, looking_in  # noqa: F401  (a fixture)

import kvpool_backends.mlx
from kvpool.adapters.mlx_lm import install
from kvpool.config import KVSpec
from kvpool.protocol import AttentionOptions, BatchShape
from kvpool.testing import conformance_storage
from kvpool.testing.conformance_attention import check as check_scores
from kvpool.testing.filled import fill
from kvpool_backends.mlx import MLXBackend

SPEC = KVSpec(2, 2, 64, "float32", 8, k_bits=8, v_bits=4, quant_group_size=32)
CASES = [case for case in conformance_storage.QUANTIZED_CASES if case.__name__ != "other_bits_and_groups_are_refused"]


@pytest.fixture
def metal(engine):
    return lambda spec, num_blocks: MLXBackend(spec, num_blocks, native=False, metal_kernel=engine.factory(1))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_metal_backend_conforms(case, metal, monkeypatch):
    # Each kernel takes half a second to compile: two specs of all.
    real, few = conformance_storage._quantized_specs, (("float32", (8, 4)), ("float16", (4, 4)))
    monkeypatch.setattr(
        conformance_storage, "_quantized_specs", lambda *a, **k: (x for x in real(*a, **k) if (x.dtype, x.bits) in few)
    )
    case(metal)


@pytest.mark.parametrize("kind", [None, "raw", "mass"])
def test_long_chunks_are_gathered_as_floats_and_equal_float64(metal, kind):
    filled = fill(metal, SPEC, [50, 9])
    if kind is None:
        filled.check((40, 1), 4, "long chunks", options=AttentionOptions(sinks=np.zeros(4)), tolerance=2e-5)
    else:
        check_scores(filled, (40, 1), 4, kind, None)


def test_reads_give_what_gather_gives(metal):
    filled = fill(metal, SPEC, [20, 9])
    arrays = filled.backend.prepare(filled.plan((1, 1)))
    read = filled.backend.read(arrays, 1)
    for row, n in enumerate((20, 9)):
        for x, whole in zip(read, filled.backend.gather(1, filled.tables[row, : -(-n // 8)], n), strict=True):
            assert x.shape == (2, 2, 20, 64) and not x[row, :, n:].any()
            np.testing.assert_allclose(np.array(x[row, :, :n].swapaxes(0, 1)), np.array(whole), rtol=0, atol=1e-6)


def test_after_warmup_no_kernel_is_new(engine):
    kernels = set()

    factory = recording(engine.factory(0), kernels)
    filled = fill(lambda spec, n: MLXBackend(spec, n, native=False, metal_kernel=factory), SPEC, [3, 60, 40])
    kernels.clear()
    filled.backend.warmup([BatchShape(4, 64, 8, 8)])
    warm = frozenset(kernels)
    assert {name.rsplit("_", 1)[0] for name, *_ in warm} == {
        "kvpool_paged_attention_packed_kv",
        "kvpool_paged_matrix_packed_kv",
        "kvpool_gather_packed",
        "kvpool_packed_tokens",
    }
    for q_lens in ((1, 1, 1), (3, 1, 20), (3, 50, 33)):
        filled.check(q_lens, 8, f"{q_lens}", tolerance=2e-5)
    assert kernels == warm


@pytest.mark.parametrize("layout", ["NHD", "HND", "interleaved", "stacked"])
def test_the_extension_writes_planes_of_every_layout_where_they_are_read(engine, built, layout):  # noqa: F811
    bits = {"k_bits": 8, "v_bits": 8 if layout == "interleaved" else None}
    spec = replace(SPEC, layout=layout, **bits)
    with looking_in(built):
        filled = fill(lambda *a: MLXBackend(*a, native=True, metal_kernel=engine.factory(1)), spec, [3, 50, 40])
        assert type(filled.backend).__name__ == "NativeMetalBackend"
        for q_lens in ((1, 1, 1), (3, 40, 9)):
            filled.check(q_lens, 4, f"{q_lens}", tolerance=2e-5)
        assert filled.backend.settle() == filled.backend.memory().pool_copies == 0


def test_a_quantized_pool_takes_the_extension_where_there_is_one(engine, built):  # noqa: F811
    factory = engine.factory(0)
    with looking_in(built), on_cpu():
        assert type(MLXBackend(SPEC, 4, metal_kernel=factory)).__name__ == "NativeMetalBackend"
        assert type(MLXBackend(SPEC, 4, metal_kernel=factory, native=False)).__name__ == "MetalBackend"
        assert type(MLXBackend(SPEC, 4)).__name__ == "NativeBackend"
        assert MLXBackend(SPEC, 4, kernels=False).route == "plain"
        with pytest.raises(ValueError, match=r"layout 'HND' is not among .* by the metal route"):
            MLXBackend(KVSpec(1, 2, 64, layout="HND", k_bits=8), 4, native=False, metal_kernel=factory)


def test_mlx_lm_generates_what_it_does_with_the_kernels_of_the_cpu(metal, monkeypatch):
    with on_cpu():
        model, prompts = tiny_llama(head_dim=64), random_prompts((3, 40, 9))
        with install(model, 40, block_size=8, k_bits=8, v_bits=4) as kv:
            assert kv.backend.route == "kernels"
            expected = batch_tokens(model, prompts, 5)
        monkeypatch.setattr(kvpool_backends.mlx, "MLXBackend", lambda spec, n, **_: metal(spec, n))
        with install(model, 40, block_size=8, k_bits=8, v_bits=4, fused=True) as kv:
            assert kv.backend.route == "metal" and kv.backend.spec.bits == (8, 4)
            assert batch_tokens(model, prompts, 5) == expected
        assert kv.settle() == kv.summary().mlx_pool_copies == 0
