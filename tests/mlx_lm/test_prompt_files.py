"""Prompt caches of mlx-lm in files: what a store takes from them, and gives back."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_models import tiny_sliding_llama

from kvpool.adapters.mlx_lm.prompt_files import export_prompt_cache, import_prompt_cache
from kvpool.protocol import StepArrays
from kvpool.spec import KVSpec
from kvpool.store import BlockLayout, Layout, MemoryStore
from kvpool_backends.numpy import NumpyBackend

BLOCK, TOKENS = 4, list(range(5, 27))  # five full blocks, and two tokens


def spec_of(dtype="float32"):
    return KVSpec(3, 2, 8, dtype, BLOCK)


def store_of(spec):
    return MemoryStore(Layout((BlockLayout(BLOCK, spec.block_nbytes, "full"),), b"w"), 1 << 20)


def written(path, model, dtype="float32", tokens=TOKENS):
    """A file of mlx-lm, and its caches."""
    cache = make_prompt_cache(model)
    model(mx.array([tokens]), cache=cache)
    for layer in cache:
        if dtype != "float32":
            layer.keys, layer.values = (array.astype(getattr(mx, dtype)) for array in (layer.keys, layer.values))
    save_prompt_cache(str(path), cache, {"model": "tiny"})
    return cache


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_file_comes_back_bit_for_bit_as_far_as_blocks_are_full(tmp_path, model, dtype):
    cache, spec = written(tmp_path / "in.safetensors", model, dtype), spec_of(dtype)
    store = store_of(spec)
    assert import_prompt_cache(tmp_path / "in.safetensors", TOKENS, spec, store, b"tenant") == 20
    assert export_prompt_cache(tmp_path / "no.safetensors", TOKENS, spec, store) == 0
    assert not (tmp_path / "no.safetensors").exists()
    longer = [*TOKENS[:20], 300, 301, 302, 303, 304]
    assert export_prompt_cache(tmp_path / "out.safetensors", longer, spec, store, b"tenant", {"of": "a test"}) == 20
    back, metadata = load_prompt_cache(str(tmp_path / "out.safetensors"), return_metadata=True)
    assert metadata == {"of": "a test"} and len(back) == 3
    for own, other in zip(cache, back, strict=True):
        assert other.offset == 20
        for before, after in ((own.keys, other.keys), (own.values, other.values)):
            assert after.dtype == getattr(mx, dtype) and mx.array_equal(before[:, :, :20], after)


def test_rows_are_what_a_backend_exports(tmp_path, model):
    cache, spec = written(tmp_path / "in.safetensors", model), spec_of()
    store, backend = store_of(spec), NumpyBackend(spec, 8)
    import_prompt_cache(tmp_path / "in.safetensors", TOKENS, spec, store)
    table = np.array([[3, 1, 6, 2, 5, 4]], np.int32)
    slots = (table[0, :, None] * BLOCK + np.arange(BLOCK)).ravel()[:22].astype(np.int32)
    step = backend.prepare(StepArrays(table, np.array([22], np.int32), np.array([0, 22], np.int32), slots))
    for layer, own in enumerate(cache):
        keys, values = (np.array(array)[0, :, :22].transpose(1, 0, 2) for array in (own.keys, own.values))
        backend.write(step, layer, keys, values)
    rows = np.empty((5, spec.block_nbytes), np.uint8)
    assert store.load(store.layout.blocks(TOKENS)[0], rows).all()
    assert np.array_equal(rows, backend.export_blocks(table[0, :5]))


def test_file_that_does_not_fit_is_refused_and_nothing_is_stored(tmp_path, model):
    written(tmp_path / "in.safetensors", model)
    written(tmp_path / "sliding.safetensors", tiny_sliding_llama())
    mx.save_safetensors(str(tmp_path / "weights.safetensors"), {"w": mx.zeros(3)})
    spec = spec_of()
    store = store_of(spec)
    for name, tokens, words in (
        ("in", TOKENS[:-1], "the tokens and the spec say"),
        ("sliding", TOKENS, "RotatingKVCache"),
        ("weights", TOKENS, "of no model"),
    ):
        with pytest.raises(ValueError, match=words):
            import_prompt_cache(tmp_path / f"{name}.safetensors", tokens, spec, store)
    with pytest.raises(ValueError, match="float16"):
        half = spec_of("float16")
        import_prompt_cache(tmp_path / "in.safetensors", TOKENS, half, store_of(half))
    with pytest.raises(ValueError, match="one group of 4 tokens and"):
        import_prompt_cache(tmp_path / "in.safetensors", TOKENS, spec_of("float16"), store)
    assert store.stats()["memory"].stored == 0
