"""Models with windows: speculative decoding, quantized storage of several arenas, admission, Gemma 2 gathered."""

import gc

import mlx.core as mx
import pytest
from mlx_families import gemma2_with_small_embeddings, model_of_file
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import KVCache, trim_prompt_cache
from mlx_models import (
    PROMPTS,
    VOCAB,
    assert_all_free,
    batch_tokens,
    computing_on_cpu,
    ended,
    on_cpu,
    random_prompts,
    solo_tokens,
    tiny_gemma3,
    tiny_gpt_oss,
    tiny_sliding_llama,
)

from kvpool.adapters.mlx_lm import Engine, install, passes

cpu = pytest.fixture(computing_on_cpu, autouse=True)
MAKERS = {"gemma3": tiny_gemma3, "gpt_oss": tiny_gpt_oss, "sliding llama": tiny_sliding_llama}
TOKENS = 24


# ---- speculative decoding


@pytest.fixture(scope="module", params=MAKERS)
def model(request):
    with on_cpu():
        return MAKERS[request.param]()


def noisy(model, seed=5):
    """A draft model of the same kind, some of whose guesses are right."""
    mx.random.seed(seed)
    draft = type(model)(model.args)
    draft.update(model.parameters())
    draft.lm_head = model.lm_head if hasattr(model, "lm_head") else None
    norm = draft.model.norm
    norm.weight = norm.weight + 0.3 * mx.random.normal(norm.weight.shape)
    return draft


def speculated(model, draft, prompt, num_draft):
    steps = speculative_generate_step(
        mx.array(prompt), model, draft, max_tokens=TOKENS, num_draft_tokens=num_draft, prefill_step_size=7
    )
    found = [(int(token), from_draft) for token, _, from_draft in steps]
    return [token for token, _ in found], sum(from_draft for _, from_draft in found)


@pytest.mark.parametrize(("fused", "num_draft"), [(True, 7), (False, 3)])
def test_speculative_decoding_gives_the_models_own_tokens_beyond_its_window(model, fused, num_draft):
    """mlx-lm's own caches take nothing back from a window that is full. So the oracle is one token at a time."""
    draft, prompts = noisy(model), random_prompts((3, 17, 30))
    expected = [solo_tokens(model, prompt, TOKENS) for prompt in prompts]
    accepted = 0
    with install(model, 200, block_size=4, fused=fused) as kv, install(draft, 200, block_size=4, fused=fused) as other:
        for prompt, tokens in zip(prompts, expected, strict=True):
            found, guessed = speculated(model, draft, prompt, num_draft)
            assert found == tokens
            accepted += guessed
        kv.pool.check()
    assert 0 < accepted < TOKENS * len(prompts), "no guess was right, or all were: nothing was tested"
    assert_all_free(kv)
    assert_all_free(other)


def test_more_tokens_than_the_lookahead_are_refused():
    model = tiny_gemma3()
    with install(model, 200, block_size=4) as kv:
        cache = kv.make_cache()
        model(mx.array([list(range(40))]), cache=cache)
        before = kv.pool.fingerprint()
        with pytest.raises(ValueError, match="truncate"):
            passes.TRIM.owner.trim_prompt_cache(cache, 30)
        assert kv.pool.fingerprint() == before
        assert passes.TRIM.owner.trim_prompt_cache(cache, 3) == 3 and cache[0].offset == 37
        assert trim_prompt_cache(cache, 1) == 0, "a prompt cache of mlx-lm takes back any number of tokens, or none"
    assert passes.TRIM.owner.trim_prompt_cache is trim_prompt_cache


# ---- quantized storage


class Rounded(KVCache):
    """A dense cache of every token, whose keys and values went through quantization."""

    def __init__(self, bits):
        super().__init__()
        self.format = {"group_size": 32, "bits": bits}

    def update_and_fetch(self, keys, values):
        rounded = (mx.dequantize(*mx.quantize(x, **self.format), **self.format) for x in (keys, values))
        return super().update_and_fetch(*rounded)


@pytest.mark.parametrize(
    ("arch", "fields", "arenas"),  # heads as wide as a group of the quantization
    [
        ("gemma4_text", {"head_dim": 32, "global_head_dim": 64, "vocab_size_per_layer_input": VOCAB}, 2),
        ("olmo3", {"head_dim": 32, "hidden_size": 128}, 1),
    ],
)
@pytest.mark.parametrize(("fused", "bits"), [(None, 4), (False, 4), (None, 8)])
def test_quantized_arenas_equal_a_dense_cache_of_the_same_numbers(arch, fields, arenas, bits, fused):
    model = model_of_file(arch, VOCAB, **fields)
    prompt = random_prompts((50,))[0]  # longer than the windows
    with install(model, 64, block_size=4, kv_bits=bits, quant_group_size=32, fused=fused) as kv:
        assert len(kv.backends) == arenas and {group.kind for group in kv.pool.options.groups} == {"window", "full"}
        dense, paged = [Rounded(bits) for _ in range(kv.num_layers)], kv.make_cache()
        for tokens in (prompt, [17], [18], [19, 20, 21], prompt[:9], [3]):
            expected, found = (model(mx.array([tokens]), cache=cache) for cache in (dense, paged))
            # A number on the edge between two steps may fall to either side, and layers behind it see that.
            assert mx.abs(expected - found).max() < 0.02 * mx.abs(expected).max()
            assert mx.array_equal(expected.argmax(-1), found.argmax(-1))
        del paged
        prompts = random_prompts((3, 30, 12))
        assert batch_tokens(model, prompts) == [solo_tokens(model, one) for one in prompts]
        gc.collect()
        assert kv.summary().blocks_used == kv.summary().blocks_leaked == 0


# ---- admission


def test_admission_has_room_for_the_chunk():
    model, prompts = tiny_gemma3(), random_prompts([60] * 2)

    def served(num_blocks):
        """Two prompts, each in one pass, if they are admitted."""
        with install(model, num_blocks, block_size=4) as kv:
            if not kv.can_admit(60, 2, [(0, 62)]):
                return False
            batch_tokens(model, prompts, 2, prefill_step_size=64)
        return True

    assert [served(num_blocks) for num_blocks in (20, 35)] == [False, True]


def test_requests_cost_what_their_windows_hold_and_not_all_their_tokens():
    """100 tokens in blocks of 4: 26 of the full layers, with one for the copy of a tail.

    The windows of 8 hold 6, with 7 tokens of lookahead and chunks of 4, and one for a copy, in 3 columns.
    """
    with install(tiny_gemma3(), 1 + 100, block_size=4) as kv:
        assert [group.columns for group in kv.pool.options.groups] == [3, 1]
        for chunk, most in ((4, (400 - 4) // (26 + 3 * 7)), (64, (400 - 4) // (26 + 3 * 22))):
            fits = [kv.can_admit(0, 0, [(0, 100)] * n, chunk=chunk) for n in range(20)]
            assert fits == [n <= most for n in range(20)]
        with pytest.raises(ValueError, match="chunk is 0, the least is 1"):
            kv.can_admit(1, 1, chunk=0)


# ---- Gemma 2


def test_gathered_gemma2_answers_in_batches_what_it_answers_alone():
    """mlx-lm's own caches raise there: its code takes no mask per row."""
    model, prompts = gemma2_with_small_embeddings(), random_prompts(PROMPTS)
    expected = [solo_tokens(model, prompt) for prompt in prompts]
    with pytest.raises(ValueError, match="broadcast"):
        batch_tokens(model, prompts)
    with install(model, 400, block_size=4, fused=False) as kv:
        assert batch_tokens(model, prompts) == expected
    assert_all_free(kv)
    with Engine(model, 400, block_size=4, fused=False) as engine:
        names = [engine.submit(prompt, max_tokens=16) for prompt in prompts]
        done = ended(engine)
    assert [done[name].tokens.tolist() for name in names] == expected
