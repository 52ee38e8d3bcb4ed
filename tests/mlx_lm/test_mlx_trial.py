"""The self-check of `install`: what a model does with its contexts decides whether it attends over the pool."""

import dataclasses
import logging

import mlx.core as mx
import numpy as np
import pytest
from mlx_families import FAMILIES
from mlx_lm.models import llama
from mlx_models import computing_on_cpu, random_prompts, solo_tokens, tiny_llama, tiny_sliding_llama

from kvpool.adapters.mlx_lm import attention, install
from kvpool.adapters.mlx_lm.passes import Rows
from kvpool_backends.numpy import NumpyBackend

cpu = pytest.fixture(computing_on_cpu, autouse=True)
stock_attention = llama.scaled_dot_product_attention
stock_mask = llama.create_attention_mask


@pytest.fixture
def model():
    return tiny_llama()


def test_backend_without_a_call_is_refused_by_name(model):
    class Partial:
        def __init__(self, spec, num_blocks):
            self._inside = NumpyBackend(spec, num_blocks)

        def __getattr__(self, name):
            if name in ("warmup", "settle"):
                raise AttributeError(name)
            return getattr(self._inside, name)

    with pytest.raises(TypeError, match=r"^\[install\] backend Partial has no settle, warmup: kvpool\.protocol"):
        install(model, 20, block_size=4, backend=Partial)


# ----------------------------------------------------------------------------- models that must gather


def keys_are_scaled(queries, keys, values, cache, scale, mask):
    return stock_attention(queries, keys * 2.0, values, cache=cache, scale=scale, mask=mask)


def keys_are_scaled_if_they_are_arrays(queries, keys, values, cache, scale, mask):
    keys = keys * 2.0 if isinstance(keys, mx.array) else keys
    return stock_attention(queries, keys, values, cache=cache, scale=scale, mask=mask)


def values_are_normed(queries, keys, values, cache, scale, mask):
    return stock_attention(queries, keys, mx.fast.rms_norm(values, None, 1e-5), cache=cache, scale=scale, mask=mask)


def mask_gets_a_bias(queries, keys, values, cache, scale, mask):
    mask = mx.zeros((1, 1)) if mask is None or isinstance(mask, str) else mask
    return stock_attention(queries, keys, values, cache=cache, scale=scale, mask=mask * 0.5)


def attention_is_computed_here(queries, keys, values, cache, scale, mask):
    keys, values = (mx.repeat(x, queries.shape[1] // x.shape[1], axis=1) for x in (keys, values))
    return mx.softmax(queries @ keys.swapaxes(-1, -2) * scale, axis=-1) @ values


def mask_is_forgotten_in_a_chunk(h, cache=None, **_):
    return None


def mask_is_an_array_of_its_own(h, cache=None, **_):
    return mx.tril(mx.ones((h.shape[1], h.shape[1] + cache.size()), mx.bool_), k=cache.size())


MASKS = mask_is_forgotten_in_a_chunk, mask_is_an_array_of_its_own
PLANTED = [
    (keys_are_scaled, "test_mlx_trial.keys_are_scaled, line [0-9]+: .*PagedContext. used as an array"),
    (keys_are_scaled_if_they_are_arrays, "its logits over the pool differ by [0-9.]+, the limit is 0.0001"),
    (values_are_normed, "test_mlx_trial.values_are_normed, line [0-9]+: rms_norm.* incompatible function arguments"),
    (mask_gets_a_bias, "test_mlx_trial.mask_gets_a_bias, line [0-9]+: .*PagedMask. used as an array"),
    (attention_is_computed_here, "asked for 'shape'"),
    (mask_is_forgotten_in_a_chunk, "the mask of 3 columns is None, not what make_mask returned"),
    (mask_is_an_array_of_its_own, "the mask of 3 columns is array, not what make_mask returned"),
]


@pytest.mark.parametrize(("fault", "why"), PLANTED, ids=[fault.__name__ for fault, _ in PLANTED])
def test_model_that_touches_its_context_or_mask_gathers_and_says_where(model, monkeypatch, caplog, fault, why):
    name = "create_attention_mask" if fault in MASKS else "scaled_dot_product_attention"
    prompt = random_prompts([20])[0]
    monkeypatch.setattr(llama, name, fault)
    expected = solo_tokens(model, prompt)
    with pytest.raises(RuntimeError, match=rf"\[install\] fused=True, but .*{why}"):
        install(model, 50, fused=True)
    with caplog.at_level(logging.WARNING), install(model, 50, block_size=4) as kv:
        assert not kv.passes.is_fused and kv.route.startswith("gather: ")
        assert kv.route in str(kv.summary()) and kv.summary().route == kv.route
        assert solo_tokens(model, prompt) == expected
    (record,) = caplog.records
    assert record.getMessage() == f"[install] this model gathers: {kv.route.removeprefix('gather: ')}"


def test_mask_that_is_wider_than_the_window_of_the_cache_gathers(monkeypatch):
    def wider(h, cache=None, window_size=None):
        return stock_mask(h, cache, window_size=window_size and window_size + 1)

    monkeypatch.setattr(llama, "create_attention_mask", wider)
    why = r"\.wider, line \d+: \[make_mask\] the window of the mask is 9, that of the cache 8"
    with pytest.raises(RuntimeError, match=why):
        install(tiny_sliding_llama(), 50, fused=True)


# -------------------------------------------------------------------------------- models that need not


def attention_is_wrapped(queries, keys, values, cache, scale, mask):
    return 0.5 * stock_attention(queries * 2.0, keys, values, cache=cache, scale=scale, mask=mask)


def context_is_cast(queries, keys, values, cache, scale, mask):
    queries, keys = queries.astype(mx.float32), keys.astype(mx.float32)
    return stock_attention(queries, keys, values, cache=cache, scale=scale, mask=mask).astype(values.dtype)


def attention_of_mlx_is_called(queries, keys, values, cache, scale, mask):
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


@pytest.mark.parametrize("change", [attention_is_wrapped, context_is_cast, attention_of_mlx_is_called])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def test_model_that_hands_its_context_on_attends_over_the_pool(model, monkeypatch, change, dtype):
    monkeypatch.setattr(llama, "scaled_dot_product_attention", change)
    model.set_dtype(dtype)
    prompt = random_prompts([20])[0]
    expected = solo_tokens(model, prompt)
    with install(model, 50, block_size=4) as kv:
        assert kv.route == "fused"
        tokens = solo_tokens(model, prompt)
        assert tokens == expected or dtype != mx.float32


def test_context_cast_to_a_narrower_dtype_is_refused(model):
    with install(model, 20, fused=True) as kv:
        x = mx.zeros((1, 2, 1, 8))
        (keys, _), *_ = [layer.update_and_fetch(x, x) for layer in kv.make_cache()]
        assert keys.astype(mx.float32) is keys and keys.dtype == mx.float32
        with pytest.raises(TypeError, match=r"\[PagedContext\] cast to mlx.core.float16"):
            keys.astype(mx.float16)


# ---------------------------------------------------------------------------- faults of the fused route


def forget(option):
    options_of = attention._options
    return lambda *given: dataclasses.replace(options_of(*given), **{option: None})


def too_sharp(attend):
    return lambda self, q, v, scale, *rest, **options: attend(self, q, v, scale * 1.1, *rest, **options)


@pytest.mark.parametrize(
    ("name", "owner", "attribute", "fault"),
    [
        ("gpt_oss", attention, "_options", forget("sinks")),
        ("gemma2", attention, "_options", forget("soft_cap")),
        ("llama", attention.PagedContext, "attend", too_sharp(attention.PagedContext.attend)),
        ("llama", Rows, "num_new", lambda self, columns: np.full(len(self.lens), columns, np.int64)),
    ],
    ids=["sinks", "soft_cap", "scale", "padding"],
)
def test_fault_of_the_fused_route_is_found_before_it_is_used(monkeypatch, name, owner, attribute, fault):
    model = FAMILIES[name]()
    assert install(model, 8, fused=True).route == "fused"
    monkeypatch.setattr(owner, attribute, fault)
    route = install(model, 8).route
    print(route)
    assert route.startswith("gather: ")


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_pool_is_compared_with_what_it_gathers(monkeypatch, bits):
    """Its logits differ from those of mlx-lm's caches, and rightly so."""
    model = tiny_llama(head_dim=32)
    options = {"kv_bits": bits, "quant_group_size": 32}
    assert install(model, 8, fused=True, **options).route == "fused"
    monkeypatch.setattr(attention.PagedContext, "attend", too_sharp(attention.PagedContext.attend))
    assert "its logits over the pool differ" in install(model, 8, **options).route


def test_trial_runs_four_short_passes(model, monkeypatch):
    shapes, call = [], llama.Model.__call__

    def counted(self, inputs, *args, **options):
        shapes.append(inputs.shape)
        return call(self, inputs, *args, **options)

    monkeypatch.setattr(llama.Model, "__call__", counted)
    install(model, 20, fused=False)
    assert shapes.pop() == (1, 1) and not shapes  # the shapes of keys and values, never computed
    install(model, 20, fused=True)
    assert shapes == [(1, 1), (2, 3), (2, 1), (1, 4), (1, 2)]
