"""The hook into mlx-lm's attention: reversible in any order, and visible."""

import mlx.core as mx
import pytest
from mlx_families import FAMILIES
from mlx_lm.models import gemma2
from mlx_lm.models.cache import make_prompt_cache
from mlx_models import computing_on_cpu, random_prompts, solo_tokens, tiny_llama

from kvpool.adapters.mlx_lm import install
from kvpool.adapters.mlx_lm.hooks import _patches

cpu = pytest.fixture(computing_on_cpu, autouse=True)
STOCK = mx.fast.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def hooks():
    """Whatever a test does, mlx-lm is as it was when it ends."""
    before = current()
    yield
    assert current() == before and not any(patch.count for patch in _patches.values())


def current():
    return mx.fast.scaled_dot_product_attention, gemma2.Attention.__call__


@pytest.fixture(scope="module")
def model():
    return tiny_llama(num_hidden_layers=1)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "llama, two masks"])
def test_stock_caches_go_to_the_original(name):
    """With caps, sinks and windows too."""
    ours, theirs = (FAMILIES[name]() for _ in range(2))
    prompt = random_prompts([20])[0]
    expected = [solo_tokens(model, prompt) for model in (ours, theirs)]
    whole = [model(mx.array([prompt])) for model in (ours, theirs)]
    with install(ours, 50, block_size=4, fused=True):
        assert [solo_tokens(model, prompt) for model in (ours, theirs)] == expected
        again = [model(mx.array([prompt])) for model in (ours, theirs)]  # no cache at all
        assert all(map(mx.array_equal, again, whole))


def test_attention_replaced_inside_the_block_is_kept_gets_arrays_and_the_route_tells(model):
    prompt, calls = random_prompts([20])[0], []
    expected = solo_tokens(model, prompt)

    def theirs(q, k, v, **options):
        calls.append(k.shape)
        return STOCK(q, k, v, **options)

    with install(model, 50, block_size=4, fused=True) as kv:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mx.fast, "scaled_dot_product_attention", theirs)
            assert not kv.passes.is_fused
            assert kv.summary().route == "gather: somebody has set mlx.core.fast.scaled_dot_product_attention"
            assert solo_tokens(model, prompt) == expected and calls
            with pytest.raises(RuntimeError, match=r"\[install\] mlx\.core\.fast\.scaled_dot.* put back what was"):
                kv.__exit__(None, None, None)
            assert mx.fast.scaled_dot_product_attention is theirs and "make_cache" in vars(model)
        assert kv.passes.is_fused and kv.route == "fused"
        assert solo_tokens(model, prompt) == expected


def test_original_put_back_inside_the_block_is_hooked_again_by_the_next_block(model):
    prompt = random_prompts([20])[0]
    expected = solo_tokens(model, prompt)
    with install(model, 50, block_size=4, fused=True) as kv:
        mx.fast.scaled_dot_product_attention = STOCK
        assert not kv.passes.is_fused
        assert solo_tokens(model, prompt) == expected
        with install(model, 50, block_size=4, fused=True) as inner:
            assert inner.passes.is_fused and kv.passes.is_fused
            assert solo_tokens(model, prompt) == expected
        mx.fast.scaled_dot_product_attention = STOCK


def test_model_of_a_block_that_is_over_gathers_inside_the_block_of_another(model):
    prompt = random_prompts([20])[0]
    expected = solo_tokens(model, prompt)
    with install(model, 50, block_size=4, fused=True) as kv:
        cache = make_prompt_cache(model)
    with install(tiny_llama(num_hidden_layers=1), 50, fused=True):
        assert not kv.passes.is_fused
        assert solo_tokens(model, prompt, prompt_cache=cache) == expected


def test_gather_can_be_asked_for_and_kernels_are_needed_for_fused(model, caplog):
    assert install(model, 8, fused=False).route == "gather: fused=False"
    assert install(model, 8, kernels=False).route == "gather: the backend runs without kernels"
    with pytest.raises(RuntimeError, match="without kernels"):
        install(model, 8, kernels=False, fused=True)
    assert not caplog.records
