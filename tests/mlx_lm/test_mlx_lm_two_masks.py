"""Models that build two masks per forward pass (sliding and full layers) are token-equal to stock."""

import gc

import pytest
from mlx_models import (
    PROMPTS,
    WINDOW,
    batch_tokens,
    random_prompts,
    solo_tokens,
    tiny_gemma3,
    tiny_gpt_oss,
    tiny_llama,
    tiny_sliding_llama,
)

from kvpool import Pool
from kvpool.adapters.mlx_lm import PagedKVCache, install, masks
from kvpool.adapters.mlx_lm import cache as cache_module
from kvpool.adapters.mlx_lm.passes import LayerCache

TWO_MASKS = [tiny_sliding_llama, tiny_gemma3, tiny_gpt_oss]


@pytest.fixture(params=[False, None])
def fused(request):
    return request.param


@pytest.fixture(scope="module", params=TWO_MASKS, ids=lambda make: make.__name__)
def model(request):
    return request.param()


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(PROMPTS)


def test_batch_generator_with_two_masks_equals_stock(model, prompts, fused):
    expected = batch_tokens(model, prompts)
    assert all(len(set(row)) > len(row) // 2 for row in expected)
    with install(model, 200, block_size=4, fused=fused) as kv:
        assert batch_tokens(model, prompts) == expected
    gc.collect()
    assert kv.summary().blocks_used == kv.summary().blocks_leaked == 0
    kv.pool.check()


@pytest.mark.long
def test_generate_step_with_two_masks_equals_stock(model, prompts, fused):
    expected = [solo_tokens(model, prompt, 24) for prompt in prompts]
    with install(model, 100, block_size=4, fused=fused) as kv:
        assert [solo_tokens(model, prompt, 24) for prompt in prompts] == expected
    assert set(kv.passes.windows) == {None, WINDOW}


# ----------------------------------------------------- canaries: planted faults that these tests must notice


def tokens_or_error(model, prompt, **how):
    with install(model, **(how or {"num_blocks": 100, "block_size": 4}), fused=False):
        try:
            return solo_tokens(model, prompt, 24)
        except (RuntimeError, ValueError) as error:
            return error


def test_canary_stepping_in_make_mask_passes_one_mask_and_fails_two(monkeypatch, prompts):
    """The tempting shortcut: a mask is asked for once per pass, so it may step. Here it comes twice."""
    pure_mask = PagedKVCache.make_mask

    def mask_that_steps(self, N, **options):
        mask = pure_mask(self, N, **options)
        batch = self._batch
        if batch.passes._running is not None:  # so that the guard against half a pass does not find it first
            batch.passes.finish()
        stepped[:] = [step(batch, len(batch.handles), N)]
        batch.rows = stepped[0][1]
        return mask

    one, two, prompt = tiny_llama(), tiny_sliding_llama(), prompts[2]
    expected_one, expected_two = solo_tokens(one, prompt, 24), solo_tokens(two, prompt, 24)
    step, stepped = cache_module.Batch.forward, []
    monkeypatch.setattr(PagedKVCache, "make_mask", mask_that_steps)
    monkeypatch.setattr(cache_module.Batch, "forward", lambda *_: stepped[0])
    assert tokens_or_error(one, prompt, pool=Pool(100, 4)) == expected_one
    assert tokens_or_error(two, prompt, pool=Pool(100, 4)) != expected_two


def test_canary_an_offset_that_moves_for_all_layers_at_once_is_detected(monkeypatch, prompts):
    model = tiny_sliding_llama()
    expected = solo_tokens(model, prompts[2], 24)
    monkeypatch.setattr(PagedKVCache, "offset", property(lambda self: int(self._batch.rows.lens[0])))
    assert tokens_or_error(model, prompts[2], pool=Pool(100, 4)) != expected
    assert tokens_or_error(model, prompts[2]) == expected
    late = property(
        lambda self: self.part.offsets[1 if self.part._forwards else 0], lambda *_: None
    )
    monkeypatch.setattr(LayerCache, "offset", late, raising=False)
    assert tokens_or_error(model, prompts[2]) != expected


def test_canary_a_forgotten_window_is_detected(monkeypatch, prompts):
    model = tiny_sliding_llama()
    expected = solo_tokens(model, prompts[2], 24)
    mask = masks._mask
    monkeypatch.setattr(masks, "_mask", lambda *sizes: mask(*sizes[:-1], None))
    assert tokens_or_error(model, prompts[2], pool=Pool(100, 4)) != expected
    assert tokens_or_error(model, prompts[2]) != expected  # what is left of the oldest block
