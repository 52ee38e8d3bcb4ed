"""mlx-lm on quantized pools: one sequence beside mlx-lm's own quantized cache, batches beside one sequence."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import QuantizedKVCache
from mlx_models import batch_tokens, on_cpu, solo_tokens, tiny_llama

from kvpool.adapters.mlx_lm import install, make_cache
from kvpool.eviction import H2O

PROMPTS = [[5, 9, 200, 31, 7] * 5, [11, 12, 13], list(range(40, 80))]
TOKENS = 12


@pytest.fixture(scope="module")
def model():
    with on_cpu():
        yield tiny_llama(head_dim=64)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("fused", [True, False])
def test_logits_of_one_sequence_are_those_of_mlx_lms_quantized_cache(model, bits, fused):
    stock = [QuantizedKVCache(64, bits) for _ in range(3)]
    with install(model, num_blocks=16, kv_bits=bits, fused=fused) as kv:
        paged = kv.make_cache()
        for tokens in (PROMPTS[0], [17], [18], [19, 20, 21]):
            expected, got = (model(mx.array([tokens]), cache=cache) for cache in (stock, paged))
            # A number on the edge between two steps may fall to either side, and layers behind it see that.
            assert mx.abs(expected - got).max() < 0.02 * mx.abs(expected).max()
            assert mx.array_equal(expected.argmax(-1), got.argmax(-1))


@pytest.mark.parametrize(
    "bits",
    [
        {"kv_bits": 8},
        {"k_bits": 8, "v_bits": 4},
        {"v_bits": 4, "quant_group_size": 32},
        {"kv_bits": 8, "kernels": False},  # MLX's own operations
    ],
)
def test_batches_generate_what_sequences_generate_alone(model, bits):
    with install(model, num_blocks=40, **bits) as kv:
        alone = [solo_tokens(model, prompt, TOKENS, prompt_cache=kv.make_cache()) for prompt in PROMPTS]
        assert batch_tokens(model, PROMPTS, TOKENS) == alone
    assert kv.summary().blocks_leaked == 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kv_bits": 3}, ValueError, "k_bits is 3"),
        ({"kv_bits": 8, "v_bits": 4}, TypeError, "kv_bits is for both"),
        ({"kv_bits": 8, "quant_group_size": 128}, ValueError, "head_dim is 64, not a multiple of quant_group_size 128"),
    ],
)
def test_bits_that_cannot_be_are_refused_and_leave_the_model_alone(model, options, error, message):
    before = dict(vars(model))
    with pytest.raises(error, match=message):
        install(model, num_blocks=8, **options)
    assert vars(model) == before and np.isfinite(mx.array(0).item())


def test_caches_are_asked_for_with_the_bits_of_the_pool(model):
    with install(model, num_blocks=40, k_bits=8, v_bits=4, quant_group_size=32) as kv:
        due = solo_tokens(model, PROMPTS[0], TOKENS, prompt_cache=kv.make_cache())
        for given in ((None, {"quant_group_size": 32}), (H2O(max_kv=100), {})):
            asked = make_cache(model, given[0], k_bits=8, v_bits=4, **given[1])
            assert solo_tokens(model, PROMPTS[0], TOKENS, prompt_cache=asked) == due
        with pytest.raises(ValueError, match=r"\[make_cache\] k_bits 8, v_bits 8, .* have k_bits 8, v_bits 4"):
            make_cache(model, kv_bits=8)
        with pytest.raises(ValueError, match="quant_group_size 64 are asked for"):
            make_cache(model, k_bits=8, v_bits=4, quant_group_size=64)
        with pytest.raises(ValueError, match="k_bits is 3"):
            make_cache(model, kv_bits=3)
        with pytest.raises(TypeError, match=r"\[make_cache\] kv_bits is for both"):
            make_cache(model, kv_bits=8, k_bits=8)
        with pytest.raises(TypeError, match="unexpected keyword argument 'bits'"):
            make_cache(model, bits=8)
    with install(model, num_blocks=40), pytest.raises(ValueError, match="the blocks have k_bits None, v_bits None"):
        make_cache(model, kv_bits=8)


def test_bits_of_the_engine_that_the_blocks_have_change_nothing(model):
    with install(model, num_blocks=40, kv_bits=8) as kv:
        due = solo_tokens(model, PROMPTS[0], TOKENS, prompt_cache=kv.make_cache())
        options = {"max_tokens": TOKENS, "quantized_kv_start": 0}
        given = [int(t) for t, _ in generate_step(mx.array(PROMPTS[0]), model, kv_bits=8, **options)]
        assert given == due
        for other in ({"kv_bits": 4}, {"kv_bits": 8, "kv_group_size": 32}):
            with pytest.raises(ValueError, match=r"\[to_quantized\] .* the blocks hold float32, keys 8 bits"):
                list(generate_step(mx.array(PROMPTS[0]), model, **other, **options))
    with install(model, num_blocks=40, k_bits=8, v_bits=4), pytest.raises(ValueError, match="kv_bits=8 with groups"):
        list(generate_step(mx.array(PROMPTS[0]), model, kv_bits=8, **options))
