"""mlx-lm's models attend straight over the pool: every family, every dtype, batches and windows as in mlx-lm itself."""

import gc
import itertools

import mlx.core as mx
import numpy as np
import pytest
from mlx_families import FAMILIES
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_models import VOCAB, batch_tokens, computing_on_cpu, random_prompts, solo_tokens, tiny_llama

from kvpool import Pool
from kvpool.adapters.mlx_lm import install

cpu = pytest.fixture(computing_on_cpu, autouse=True)
PROMPTS = (3, 26, 1, 17, 9)  # on both sides of the window, of blocks and of prefill chunks
MAX_TOKENS = 12
HALVES = {name: make for name, make in FAMILIES.items() if name not in ("qwen3_moe", "mixtral", "gpt_oss")}
"""MLX multiplies the matrices of experts in float32 only on a CPU."""


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return FAMILIES[request.param]()


def logits_of(model, seed=0, dtype=mx.float32):
    """``[T, vocabulary]`` of random tokens, fed as a prompt in chunks, one by one, and as a speculative window."""
    print(f"token seed {seed}")
    chunks = (9, 7, 1, 1, 1, 1, 4, 1, 1)
    tokens = mx.array(np.random.default_rng(seed).integers(0, VOCAB, sum(chunks)))[None]
    cache, logits, start = make_prompt_cache(model), [], 0
    for size in chunks:
        logits.append(np.array(model(tokens[:, start : start + size], cache=cache).astype(dtype))[0])
        start += size
    return np.concatenate(logits)


def equals_stock(model, fused):
    prompts = random_prompts(PROMPTS)
    stock = [solo_tokens(model, prompt, MAX_TOKENS) for prompt in prompts]
    assert len({token for row in stock for token in row}) > 2 * MAX_TOKENS, "hardly anything could go wrong unseen"
    with install(model, 200, block_size=4, fused=fused) as kv:
        assert kv.passes.is_fused == fused and (kv.route == "fused") == fused
        if batch_tokens(model, prompts, MAX_TOKENS) != stock:
            return False
        assert [solo_tokens(model, prompt, MAX_TOKENS) for prompt in prompts] == stock
    gc.collect()
    summary = kv.summary()
    assert summary.blocks_used == summary.blocks_leaked == summary.mlx_pool_copies == kv.settle() == 0
    kv.pool.check()
    return True


def test_fused_tokens_equal_stock_in_a_batch_and_alone(model):
    assert equals_stock(model, fused=True)


@pytest.mark.parametrize("name", ["llama, two masks", "gemma3_text", "gpt_oss"])
def test_gathered_tokens_of_models_with_two_masks_equal_stock_in_a_batch_and_alone(name):
    assert equals_stock(FAMILIES[name](), fused=False)


def logprobs_of_first_tokens(model, prompts, batched=True, step=2048):
    """Log probabilities after each prompt, by mlx-lm's batch engine or one by one, prompts in chunks of `step`."""
    if not batched:
        steps = [generate_step(mx.array(prompt), model, max_tokens=1, prefill_step_size=step) for prompt in prompts]
        return np.stack([np.array(next(one)[1]) for one in steps])
    sizes = {"prefill_batch_size": 2, "completion_batch_size": 3, "prefill_step_size": step}
    generator, found = BatchGenerator(model, max_tokens=1, **sizes), {}
    uids = generator.insert(prompts)
    while responses := generator.next_generated():
        found |= {response.uid: np.array(response.logprobs) for response in responses}
    generator.close()
    return np.stack([found[uid] for uid in uids])


@pytest.mark.parametrize("step", [8, 2048])
def test_batch_has_the_bits_of_single_prompts_whose_chunks_end_at_the_same_places(step):
    model, prompts = tiny_llama(), random_prompts([24] * 4)
    with install(model, 200, fused=True):
        alone, batch = (logprobs_of_first_tokens(model, prompts, batched, step) for batched in (False, True))
    assert np.array_equal(alone, batch)


@pytest.mark.parametrize(("name", "dtype"), [*zip(HALVES, itertools.cycle([mx.float16, mx.bfloat16]))])
def test_fused_halves_are_as_near_to_float32_as_stock_is(name, dtype):
    """Two roundings may choose different tokens where two are nearly as likely, so what is compared is the logits."""
    model = HALVES[name]()
    model.set_dtype(dtype)
    stock = logits_of(model)
    with install(model, 50, block_size=4, fused=True):
        ours = logits_of(model)
    model.set_dtype(mx.float32)
    truth = logits_of(model)
    stock_error, our_error = (float(np.sqrt(np.mean((logits - truth) ** 2))) for logits in (stock, ours))
    print(f"error {our_error:.4f}, stock {stock_error:.4f}, logits {np.std(truth):.2f}")
    assert 0 < our_error <= 1.25 * stock_error


# --------------------------------------------------------------------------------- what stands for arrays


@pytest.fixture
def paged():
    """(model, cache, keys, values, mask) of a pass over two columns."""
    model = FAMILIES["llama"]()
    with install(model, 20, block_size=4, fused=True) as kv:
        cache = kv.make_cache()
        mask = cache[0].make_mask(2)
        x = mx.random.normal((1, 2, 2, 8))
        pairs = [layer.update_and_fetch(x, x) for layer in cache]
        yield model, cache, *pairs[0], mask


def test_array_placeholder_used_as_array_raises(paged):
    _, _, keys, values, mask = paged
    for misuse in (
        lambda: keys @ mx.zeros((2, 2)),
        lambda: values * 2.0,
        lambda: keys[0],
        lambda: np.asarray(keys),
        lambda: keys.shape_of_an_array,
        lambda: keys.swapaxes(1, 2),
        lambda: mask.dtype,
        lambda: mask + mx.zeros((2, 2)),
    ):
        with pytest.raises((TypeError, AttributeError), match=r"\[Paged(Context|Mask)\] .*fused=False"):
            misuse()


def test_keys_are_good_for_their_own_pass_values_queries_and_mask_only(paged):
    _, cache, keys, values, mask = paged
    q = mx.random.normal((1, 4, 2, 8))
    assert keys.attend(q, values, 1.0, mask).shape == (1, 4, 2, 8)
    assert mx.array_equal(keys.attend(q, values, 1.0, "causal"), keys.attend(q, values, 1.0, mask))
    for error, text, arguments in (
        (TypeError, "values are", (q, q, 1.0, mask)),
        (ValueError, "queries are for 1 rows of 1 columns", (q[:, :, :1], values, 1.0, mask)),
        (TypeError, "the mask of 2 columns is None", (q, values, 1.0, None)),
        (TypeError, "the mask of 2 columns is array", (q, values, 1.0, mx.ones((2, 2), mx.bool_))),
    ):
        with pytest.raises(error, match=rf"\[attention\] {text}"):
            keys.attend(*arguments)
    for layer in cache:
        layer.trim(1)
    with pytest.raises(RuntimeError, match=r"\[attention\] these keys are those of an earlier forward pass"):
        keys.attend(q, values, 1.0, mask)


def test_keys_that_outlive_their_cache_are_refused():
    """Its blocks go back to the pool, and may hold somebody else's tokens."""
    with install(FAMILIES["llama"](), 20, block_size=4, fused=True) as kv:
        cache, x = kv.make_cache(), mx.random.normal((1, 2, 2, 8))
        mask = cache[0].make_mask(2)
        (keys, values), *_ = [layer.update_and_fetch(x, x) for layer in cache]
        del cache
        gc.collect()
        with pytest.raises(RuntimeError, match=r"\[attention\] these keys are those of an earlier forward pass"):
            keys.attend(mx.random.normal((1, 4, 2, 8)), values, 1.0, mask)


def test_the_window_of_the_mask_and_that_of_the_layer_both_hold():
    """With a window of 1 a token sees itself alone, whatever the queries are."""
    sliding = ["sliding_attention", "full_attention"]
    model = tiny_llama(num_hidden_layers=2, layer_types=sliding, sliding_window=1)
    with install(model, pool=Pool(20, 4), fused=True) as kv:
        cache = kv.make_cache()
        masks = [cache[0].make_mask(3), cache[1].make_mask(3, window_size=1)]
        q, k, v = (mx.random.normal((1, heads, 3, 8)) for heads in (4, 2, 2))
        itself = np.repeat(np.array(v), 2, axis=1)
        pairs = [layer.update_and_fetch(k, v) for layer in cache]
        for (keys, values), mask in zip(pairs, masks, strict=True):
            assert np.array_equal(keys.attend(q, values, 1.0, mask), itself)
        assert np.array_equal(pairs[0][0].attend(q, pairs[0][1], 1.0, "causal"), itself)
        assert not np.array_equal(pairs[1][0].attend(q, pairs[1][1], 1.0, "causal"), itself)
    with install(FAMILIES["llama, two masks"](), 20, fused=True) as kv:
        for cache, windows in zip(kv.make_cache(), ([8, 5], [None, 5]), strict=False):
            assert [cache.make_mask(3).window, cache.make_mask(3, window_size=5).window] == windows
