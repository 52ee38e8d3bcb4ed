"""The hook into mlx-lm's attention: reversible in any order, checked against the source it stands in for, visible."""

import itertools
import logging
import threading

import mlx.core as mx
import pytest
from mlx_families import FAMILIES
from mlx_lm.models import base, gemma2, llama, mixtral
from mlx_lm.models.cache import make_prompt_cache
from mlx_models import on_cpu, random_prompts, randomized, solo_tokens, tiny_llama

from kvpool.adapters.mlx_lm import attention, host, install

MODULES = (llama, gemma2, mixtral)


@pytest.fixture(autouse=True)
def cpu():
    with on_cpu():
        yield


@pytest.fixture(autouse=True)
def hooks():
    """Whatever a test does, mlx-lm is as it was when it ends."""
    before = current()
    yield
    assert current() == before and not any(patch.count for patch in attention._patches.values())


def current():
    return [vars(module).get("scaled_dot_product_attention") for module in (base, *MODULES)] + [
        gemma2.Attention.__call__
    ]


@pytest.fixture(scope="module")
def model():
    return tiny_llama(num_hidden_layers=1)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_blocks_on_models_of_one_module_and_another_leave_in_any_order(model, order):
    original, call = llama.scaled_dot_product_attention, gemma2.Attention.__call__
    entered = [install(m, 8, fused=True) for m in (model, tiny_llama(num_hidden_layers=1), FAMILIES["gemma2"]())]
    for kv in entered:
        kv.__enter__()
    left = set(range(3))
    for i in order:
        assert all(entered[j].is_fused for j in left)
        entered[i].__exit__(None, None, None)
        left.discard(i)
        assert (llama.scaled_dot_product_attention is original) == (not left & {0, 1})
        assert (gemma2.Attention.__call__ is call) == (2 not in left)
    assert not any(kv.is_fused for kv in entered)


def test_a_thread_that_enters_while_another_one_looks_does_not_make_a_known_model_gather(model, monkeypatch):
    """Else what the second one finds in the module is the stand-in, which is not mlx-lm's function."""
    (site,) = install(model, 8, fused=True).passes.sites
    original, others = llama.scaled_dot_product_attention, []

    class Patches(dict):
        def get(self, key):
            patch = super().get(key)
            if not others:
                others.append(threading.Thread(target=site.enter))
                others[0].start()
                others[0].join(0.2)  # waits in vain where looking and entering exclude each other
            return patch

    monkeypatch.setattr(attention, "_patches", Patches())
    assert attention._original(llama, "scaled_dot_product_attention") is original
    others[0].join()
    assert site.is_active
    site.leave()


def test_an_exception_inside_the_block_takes_the_hook_back(model):
    with pytest.raises(ZeroDivisionError), install(model, 8, fused=True):
        raise ZeroDivisionError
    assert llama.scaled_dot_product_attention is base.scaled_dot_product_attention


def test_stock_caches_of_a_hooked_module_go_to_the_original():
    ours, theirs = tiny_llama(), tiny_llama()
    prompt = random_prompts([20])[0]
    expected = solo_tokens(theirs, prompt)
    with install(ours, 50, block_size=4, fused=True):
        assert solo_tokens(theirs, prompt) == expected == solo_tokens(ours, prompt)
        assert mx.array_equal(theirs(mx.array([prompt])), ours(mx.array([prompt])))  # no cache at all


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "llama, two masks"])
def test_caps_sinks_and_windows_of_stock_caches_reach_the_original(name):
    theirs, prompt = FAMILIES[name](), random_prompts([20])[0]
    expected = solo_tokens(theirs, prompt)
    with install(FAMILIES[name](), 50, fused=True):
        assert solo_tokens(theirs, prompt) == expected


def test_caches_of_a_fused_block_gather_when_it_is_over(model):
    prompt = random_prompts([20])[0]
    with install(model, 50, block_size=4, fused=True):
        cache = make_prompt_cache(model)
        model(mx.array([prompt[:9]]), cache=cache)
    keys, _ = cache[0].keys_and_values()
    assert keys.shape == (1, 2, 9, 8)
    assert solo_tokens(model, prompt[9:], prompt_cache=cache) == solo_tokens(model, prompt)


def test_attention_replaced_inside_the_block_is_kept(model):
    kv = install(model, 8, fused=True)
    with kv:
        ours = llama.scaled_dot_product_attention
        llama.scaled_dot_product_attention = theirs = lambda *args, **options: ours(*args, **options)
        with pytest.raises(RuntimeError, match=r"\[install\] mlx_lm\.models\.llama\.scaled_dot.* put back what was"):
            kv.__exit__(None, None, None)
        assert llama.scaled_dot_product_attention is theirs
        assert "make_cache" in vars(model)
        llama.scaled_dot_product_attention = ours
        assert kv.is_fused


def test_attention_replaced_inside_the_block_gets_arrays_and_the_route_tells(model):
    prompt, calls = random_prompts([20])[0], []
    expected = solo_tokens(model, prompt)

    def theirs(queries, keys, values, cache, scale, mask, sinks=None):
        calls.append(keys.shape)
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)

    with install(model, 50, block_size=4, fused=True) as kv:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llama, "scaled_dot_product_attention", theirs)
            assert not kv.is_fused
            assert kv.summary().route == "gather: somebody has set mlx_lm.models.llama.scaled_dot_product_attention"
            assert solo_tokens(model, prompt) == expected and calls
        assert kv.is_fused and kv.route == "fused"
        assert solo_tokens(model, prompt) == expected


def test_a_module_that_was_reloaded_inside_the_block_is_left_as_it_is(model):
    """A reload executes ``from mlx_lm.models.base import scaled_dot_product_attention`` again."""
    prompt = random_prompts([20])[0]
    expected = solo_tokens(model, prompt)
    with install(model, 50, block_size=4, fused=True) as kv:
        llama.scaled_dot_product_attention = base.scaled_dot_product_attention
        assert not kv.is_fused
        assert solo_tokens(model, prompt) == expected
        with install(model, 50, block_size=4, fused=True) as inner:
            assert inner.is_fused and kv.is_fused
            assert solo_tokens(model, prompt) == expected
        llama.scaled_dot_product_attention = base.scaled_dot_product_attention


# ------------------------------------------------------------------------------------------ what is refused


def changed(name):
    """A way to make the llama module something that was not tested."""

    def call(self, x, mask=None, cache=None):
        return original(self, x, mask, cache)

    def stranger(*args, **options):
        return base.scaled_dot_product_attention(*args, **options)

    original = llama.Attention.__call__
    return {
        "call": (llama.Attention, "__call__", call),
        "function": (llama, "scaled_dot_product_attention", stranger),
        "base": (base, "scaled_dot_product_attention", stranger),
        "digest": (attention, "KNOWN", attention.KNOWN | {"mlx_lm.models.llama.Attention": "0" * 16}),
    }[name]


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("call", "llama.Attention.__call__ has changed"),
        ("function", "llama.scaled_dot_product_attention is not that of"),
        ("base", "base.scaled_dot_product_attention has changed"),
        ("digest", "llama.Attention.__call__ has changed"),
    ],
)
def test_an_attention_that_was_not_tested_gathers_and_says_why(model, monkeypatch, caplog, what, why):
    prompt = random_prompts([20])[0]
    expected = solo_tokens(model, prompt)
    with monkeypatch.context() as patch:
        patch.setattr(*changed(what))
        with pytest.raises(RuntimeError, match=r"\[install\] fused=True, but"):
            install(model, 8, fused=True)
        with caplog.at_level(logging.WARNING), install(model, 50) as kv:
            assert not kv.is_fused and why in kv.route and kv.route.startswith("gather: ")
            assert kv.route in str(kv.summary()) and kv.summary().route == kv.route
            assert solo_tokens(model, prompt) == expected
        assert [record.getMessage() for record in caplog.records] == [
            f"[install] this model gathers: {kv.route.removeprefix('gather: ')}"
        ]


def test_a_model_that_is_not_known_gathers(caplog):
    from mlx_lm.models import olmo2

    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 4}
    model = randomized(
        olmo2.Model(olmo2.ModelArgs("olmo2", **sizes, num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=320))
    )
    prompt = random_prompts([20])[0]
    expected = solo_tokens(model, prompt)
    with install(model, 50, block_size=4) as kv:
        assert kv.route == "gather: mlx_lm.models.olmo2.Attention.__call__ is not among those that can be hooked"
        assert solo_tokens(model, prompt) == expected
    assert "this model gathers" in caplog.text


def test_gather_can_be_asked_for_and_kernels_are_needed_for_fused(model, caplog):
    assert install(model, 8, fused=False).route == "gather: fused=False"
    assert install(model, 8, kernels=False).route == "gather: the backend runs without kernels"
    with pytest.raises(RuntimeError, match="without kernels"):
        install(model, 8, kernels=False, fused=True)
    assert not caplog.records


def test_one_layer_that_is_not_known_is_enough_to_gather():
    known = attention.Caller("mlx_lm.models.llama", llama.Attention.__call__.__code__)
    unknown = attention.Caller(__name__, current.__code__)
    (site,) = attention.find_sites([known, known])
    assert (site.owner, site.name) == (llama, "scaled_dot_product_attention")
    with pytest.raises(LookupError, match="current is not among those that can be hooked"):
        attention.find_sites([known, unknown])


def test_a_release_that_was_not_tested_gathers_even_where_the_texts_are_the_same(model, monkeypatch):
    monkeypatch.setattr(host, "SUPPORTED_VERSIONS", ("0.0.1",))
    kv = install(model, 8, strict=False)
    assert kv.route.startswith("gather: mlx-lm ") and kv.route.endswith("is not one of 0.0.1") and not kv.passes.sites
