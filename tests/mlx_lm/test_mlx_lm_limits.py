"""What paged caches do not do is said in a sentence, before any harm is done."""

import gc

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_families import FAMILIES
from mlx_lm.models import llama
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache, save_prompt_cache
from mlx_models import batch_tokens, on_cpu, random_prompts, solo_tokens, tiny_llama

from kvpool.adapters.mlx_lm import PagedKVCache, install

LAZY = {
    **{"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 1024, "vocab_size": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
}


@pytest.mark.parametrize("is_empty", [True, False])
def test_saving_a_cache_raises_and_writes_no_file(model, tmp_path, is_empty):
    kv = install(model, 20, block_size=4)
    cache, others = kv.make_cache(), kv.make_cache()
    model(mx.array([[1, 2, 3]]), cache=others)
    if not is_empty:
        model(mx.array([[1, 2, 3]]), cache=cache)
    mx.eval([layer.state for layer in cache])  # what engines do with it still works
    with pytest.raises(ValueError, match="a paged cache cannot be saved"):
        save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
    assert not list(tmp_path.iterdir())


# -------------------------------------------------------------------------------------------------- max_kv_size


def test_max_kv_size_is_refused_where_stock_would_honour_it():
    model = FAMILIES["qwen2"]()  # has no `make_cache`: mlx-lm makes its caches itself
    (prompt,) = random_prompts([20])
    assert type(make_prompt_cache(model, 8)[0]) is RotatingKVCache
    expected = solo_tokens(model, prompt)
    assert solo_tokens(model, prompt, max_kv_size=8) != expected
    with install(model, 50, block_size=4), install(model, 50, block_size=4) as kv:
        for call in (
            lambda: make_prompt_cache(model, 8),
            lambda: solo_tokens(model, prompt, max_kv_size=8),
            lambda: batch_tokens(model, [prompt], max_kv_size=8),
        ):
            with pytest.raises(ValueError, match=r"\[make_cache\] max_kv_size is 8"):
                call()
        assert solo_tokens(model, prompt) == expected == batch_tokens(model, [prompt])[0]
        assert type(model.make_cache()[0]) is PagedKVCache
    assert kv.summary().blocks_used == 0
    assert type(make_prompt_cache(model, 8)[0]) is RotatingKVCache


def test_max_kv_size_is_ignored_where_stock_ignores_it(model):
    (prompt,) = random_prompts([20])
    expected = solo_tokens(model, prompt, max_kv_size=8)
    with install(model, 50, block_size=4):
        assert solo_tokens(model, prompt, max_kv_size=8) == expected == solo_tokens(model, prompt)


# -------------------------------------------------------------------------------------- strangers in the batch


def test_stock_and_paged_caches_in_one_batch_are_distinguished(model):
    stock = make_prompt_cache(model)
    paged = install(model, 20, block_size=4).make_cache()
    for cache in (stock, paged):
        mx.eval(model(mx.array([[1, 2]]), cache=cache))
    merged = PagedKVCache.merge(paged[:1])
    with pytest.raises(TypeError, match=r"\[merge\] KVCache cannot be in one batch with paged"):
        PagedKVCache.merge([paged[1], stock[1]])
    with pytest.raises(TypeError, match=r"\[extend\] BatchKVCache cannot be in one batch with paged"):
        paged[2].extend(stock[2].merge([stock[2]]))
    # the other way round stock's own code runs, and what it looks for tells
    for call in (lambda: stock[0].merge([stock[0], paged[0]]), lambda: stock[0].merge([stock[0]]).extend(merged)):
        with pytest.raises(AttributeError, match="stock and paged caches cannot be in one batch"):
            call()


# --------------------------------------------------------------------------------------------------- dtypes


def test_a_model_that_was_cast_after_install_is_refused():
    model = tiny_llama()
    kv = install(model, 20, block_size=4)
    cache = kv.make_cache()
    mx.eval(model(mx.array([[1, 2]]), cache=cache))
    model.set_dtype(mx.bfloat16)
    before = kv.pool.fingerprint()
    with pytest.raises(TypeError, match=r"\[update_and_fetch\] keys are mlx.core.bfloat16.* holds mlx.core.float32"):
        model(mx.array([[3]]), cache=cache)
    assert kv.pool.fingerprint() == before and not kv.recover()
    again = install(model, 20, block_size=4)
    assert again.backend.dtype == mx.bfloat16
    mx.eval(model(mx.array([[1, 2]]), cache=again.make_cache()))


# --------------------------------------------------------------------------------------- models built lazily


@pytest.fixture
def lazy():
    """A model whose weights are not loaded, and how many bytes they have."""
    with on_cpu():
        model = llama.Model(llama.ModelArgs(**LAZY))
        gc.collect()  # models of tests before this one would leave in the middle of it
        yield model, sum(x.nbytes for _, x in tree_flatten(model.parameters()))


@pytest.mark.parametrize("kernels", [True, False])
def test_forward_pass_of_a_lazy_model_loads_its_weights_where_kernels_run_at_once(lazy, kernels):
    """What the docstring of the adapter says: with kernels of the CPU the call itself computes, else nothing does."""
    model, weights = lazy
    with install(model, 8, kernels=kernels, fused=False) as kv:
        cache = kv.make_cache()
        before = mx.get_active_memory()
        logits = model(mx.array([[1, 2, 3]]), cache=cache)
        loaded = mx.get_active_memory() - before
        assert kv.backend.capabilities.lazy != kernels
        assert loaded > weights // 2 if kernels else loaded < weights // 8, (loaded, weights)
        mx.eval(logits)
        assert mx.get_active_memory() - before > weights * 3 // 4


@pytest.mark.parametrize("fused", [True, False])
def test_install_of_a_lazy_model_loads_its_weights_where_it_tries_to_fuse(lazy, fused):
    model, weights = lazy
    before = mx.get_active_memory()
    kv = install(model, 8, fused=fused)
    loaded = mx.get_active_memory() - before - kv.backend.spec.pool_nbytes(8)
    assert loaded > weights // 2 if fused else loaded < weights // 8, (loaded, weights)
