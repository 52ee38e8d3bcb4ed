"""Every kind of cache in one pool: tokens are those of stock mlx-lm alone, states survive failures.

Models attend over the pool wherever they hand on what their caches returned.
"""

import copy
import logging
import re
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from mlx_families import model_of_file as family
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import ArraysCache, LRUPromptCache, make_prompt_cache
from mlx_models import assert_all_free, computing_on_cpu, random_prompts, solo_tokens

from benchmarks import tiny_families
from kvpool import OutOfBlocks, Pool
from kvpool.adapters.mlx_lm import Engine, install
from kvpool.adapters.mlx_lm.shapes import leaves_of
from kvpool.eviction import SlidingWindow

cpu = pytest.fixture(computing_on_cpu, autouse=True)
prompts_of = partial(random_prompts, seed=3, vocab=96)
NEW = 8
alone = partial(solo_tokens, max_tokens=NEW, prefill_step_size=2048)
BY_CHUNK = {"plamo3"}  # files whose tokens depend on the chunks of a prompt in mlx-lm, too
LATENT = "the backend does not attend to latents"  # MLX's own, on the CPU
GATHER = {  # why
    **dict.fromkeys(("afm7", "minimax_m3_vl"), "asked for 'shape'"),
    **dict.fromkeys(("bailing_hybrid", "bailing_moe_v3", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"), LATENT),
    **dict.fromkeys(("glm_moe_dsa", "kimi_k25", "kimi_k3", "kimi_linear", "kimi_vl", "mistral4"), LATENT),
    **dict.fromkeys(("longcat_flash", "longcat_flash_ngram"), LATENT),
    **dict.fromkeys(("deepseek_v41", "mamba", "mamba2", "rwkv7"), "no layer attends over blocks"),
    "llama4": "chunks",
    "plamo": "tile",
    "plamo3": "the window of the mask is 25, that of the cache 24",
}
STATEFUL = ("qwen3_5", "mamba", "baichuan_m1", "deepseek_v41")


def together(model, prompts, arrivals=None, caches=None, **options):
    """Tokens of a BatchGenerator; `arrivals`: pairs of a step and the prompts that come then."""
    generator = BatchGenerator(model, max_tokens=NEW, stop_tokens=[], **options)
    waiting = list(arrivals or [(0, range(len(prompts)))])
    owner, tokens, step = {}, [[] for _ in prompts], 0
    while any(len(row) < NEW for row in tokens):
        while waiting and waiting[0][0] <= step:
            rows = list(waiting.pop(0)[1])
            given = None if caches is None else [caches[i] for i in rows]
            owner |= dict(zip(generator.insert([prompts[i] for i in rows], caches=given), rows, strict=True))
        for response in generator.next()[1]:
            tokens[owner[response.uid]].append(response.token)
        step += 1
        assert step < 500
    generator.close()
    return tokens


def install_on_cpu(model, num_blocks=200, **options):
    return install(model, num_blocks, block_size=8, **options)


# ------------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("name", sorted(tiny_families.OWN))
def test_tokens_of_every_family_equal_stock_alone(name):
    model = family(name)
    prompts = prompts_of((1, 23, 90))
    own = [alone(model, prompt) for prompt in prompts]
    in_chunks = [alone(model, prompt, prefill_step_size=16) for prompt in prompts] if name in BY_CHUNK else own
    with install_on_cpu(model) as kv:
        route = kv.route
        assert re.match("gather: .*" + GATHER[name], route) if name in GATHER else route == "fused", route
        assert [alone(model, prompt) for prompt in prompts] == own
        assert together(model, prompts, [(0, [0, 2]), (5, [1])]) == own
        assert together(model, prompts, prefill_step_size=16) == in_chunks
    assert_all_free(kv)


@pytest.mark.parametrize("name", ["llama4", "longcat_flash_ngram", "minimax_m3_vl", "qwen3_5", "gemma4_text"])
def test_tokens_where_writes_are_lazy_equal_stock_alone_and_copy_no_array(name):
    model = family(name)
    prompts = prompts_of((5, 37, 23))
    own = [alone(model, prompt) for prompt in prompts]
    with install_on_cpu(model, kernels=False) as kv:
        assert together(model, prompts, prefill_step_size=16) == own
        assert kv.settle() == kv.summary().mlx_pool_copies == 0
    assert_all_free(kv)


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_5", "mamba", "llama4", "deepseek_v41"])
def test_prompts_from_a_cache_of_mlx_lm_give_the_tokens_of_stock(name):
    """LRUPromptCache keeps a cache and hands out deep copies: forks that share blocks and states."""
    model = family(name)
    head, *tails = prompts_of((43, 3, 9))  # it ends inside a block
    own = [alone(model, head + tail) for tail in tails]
    with install_on_cpu(model) as kv:
        prompts = LRUPromptCache()
        cache = make_prompt_cache(model)
        model(mx.array(head)[None], cache=cache)
        prompts.insert_cache("m", list(head), cache)
        assert prompts.nbytes > 0
        found = [prompts.fetch_nearest_cache("m", head + tail) for tail in tails]
        assert [rest for _, rest in found] == tails
        assert together(model, tails, caches=[cache for cache, _ in found]) == own
        assert alone(model, tails[1], prompt_cache=prompts.fetch_nearest_cache("m", head + tails[1])[0]) == own[1]
        del prompts, cache, found
    assert_all_free(kv)


# -------------------------------------------------------------------------------------------------- bytes


def test_summary_counts_all_arenas_and_states():
    """Without the blocks that windows have let go."""
    model = family("gemma4_text")
    with install_on_cpu(model, kernels=False) as kv:
        cache = kv.make_cache()
        for _ in range(3):
            model(mx.ones((1, 40), mx.int32), cache=cache)
        arenas = [kv.pool.stats(arena).used for arena in range(len(kv.layout.block_nbytes))]
        sizes = kv.layout.block_nbytes
        assert len(arenas) == 2 and min(arenas) > 0
        assert kv.summary().kv_nbytes == sum(np.multiply(arenas, sizes)) == sum(layer.nbytes for layer in cache)
    model = family("mamba")
    with install_on_cpu(model) as kv:
        cache = kv.make_cache()
        model(mx.ones((1, 20), mx.int32), cache=cache)
        assert kv.summary().state_nbytes == sum(layer.nbytes for layer in cache) > 0 == kv.summary().kv_nbytes


# ----------------------------------------------------------------------------------------------- failures


def fail_once(monkeypatch, layer, call):
    """Let a layer raise in its n-th call."""
    cls, calls_left = type(layer), [call]
    original = cls.__call__

    def __call__(self, *args, **kwargs):
        if self is layer:
            calls_left[0] -= 1
            if not calls_left[0]:
                raise RuntimeError("planted")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(cls, "__call__", __call__)


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("fails_in", [1, 2])
def test_a_pass_that_fails_in_its_last_layer_is_taken_back_in_all_layers(name, fails_in, monkeypatch):
    """The second call of a layer in one pass is that of another part."""
    model = family(name)
    first, second = prompts_of((9, 30))
    with install_on_cpu(model) as kv:
        caches = [kv.make_cache() for _ in range(2)]
        for cache, prompt in zip(caches, (first, second), strict=True):
            model(mx.array([prompt]), cache=cache)
        merged = [one.merge([one, other]) for one, other in zip(*caches, strict=True)]
        clean, next_tokens = copy.deepcopy(merged), mx.array([[1, 2, 3], [4, 5, 6]])
        for batch in (merged, clean):
            for cache in batch:
                cache.prepare(lengths=[1, 3], right_padding=[2, 0])
        expected = np.array(model(next_tokens, cache=clean))
        fail_once(monkeypatch, model.layers[-1], fails_in)
        with pytest.raises(RuntimeError, match="planted"):
            model(next_tokens, cache=merged)
        with pytest.raises(RuntimeError, match=r"kv\.recover"):
            model(next_tokens, cache=merged)
        failed = next(leaves_of(merged)).batch
        assert kv.recover() and not kv.recover()
        assert [kv.pool.num_tokens(handle) for handle in failed.handles] == [9, 30]
        failed.is_stopped = False  # an engine's batch stays stopped; here its content is compared
        assert np.array_equal(np.array(model(next_tokens, cache=merged)), expected)
        del merged, clean, caches, failed, batch, cache
    assert_all_free(kv)


@pytest.mark.parametrize("name", ["qwen3_5", "gemma4_text"])
def test_a_pass_without_blocks_changes_nothing(name):
    model = family(name)
    (prompt,) = prompts_of((24,))
    own = alone(model, prompt)
    with install_on_cpu(model, 9) as kv:
        cache, other = kv.make_cache(), kv.make_cache()
        model(mx.array([prompt[:-1]]), cache=cache)
        model(mx.ones((1, 32), mx.int32), cache=other)
        held = kv.summary()
        with pytest.raises(OutOfBlocks):
            model(mx.ones((1, 16), mx.int32), cache=cache)
        assert kv.summary().blocks_used == held.blocks_used
        del other
        assert alone(model, prompt[-1:], prompt_cache=cache) == own


# ----------------------------------------------------------------------------------------------- bad input


def test_caches_that_are_not_those_of_the_model_are_refused():
    model, other = family("qwen3_5"), family("qwen3_5")
    token = mx.array([[1]])
    with install_on_cpu(model) as kv, install_on_cpu(other) as kv2:
        cache, strange = kv.make_cache(), kv2.make_cache()
        with pytest.raises(ValueError, match="belong to another model or another pool"):
            model(token, cache=strange)
        with pytest.raises(ValueError, match="cache 0 is a ArraysCache"):
            model(token, cache=[ArraysCache(2), *cache[1:]])
        with pytest.raises(ValueError, match="cache 1 is a PagedKVCache of somebody else"):
            model(token, cache=[cache[0], *kv.make_cache()[1:]])
        with pytest.raises(ValueError, match=r"layers \[1, 0"):
            model(token, cache=[cache[1], cache[0], *cache[2:]])
        with pytest.raises(RuntimeError, match="only in a call of the model itself"):
            model.language_model.model(token, cache=cache)
        assert kv.summary().sequences == kv2.summary().sequences == 0
        model(token, cache=cache)
        assert kv.summary().sequences == 1
    with pytest.raises(RuntimeError, match="only inside the install block"):
        model(token, cache=cache)


def test_what_layer_groups_cannot_do_is_said_at_install(caplog):
    model = family("qwen3_5")
    with pytest.raises(ValueError, match=r"pool has the layer groups full\(\) x 1 in arena 0, this model needs full"):
        install(model, pool=Pool(50, 8))
    with pytest.raises(ValueError, match="this model has no layer that keeps every token"):
        Engine(family("mamba"), 50, eviction=SlidingWindow(max_kv=64))
    with caplog.at_level(logging.WARNING):
        assert install_on_cpu(model, prefix_cache=True).prefix_cache and not caplog.text
        kv = install_on_cpu(family("deepseek_v41"), prefix_cache=True)
        assert not kv.prefix_cache and kv.route.endswith("; opaque: LayerCache")
        said = "LayerCache is held whole for each sequence, outside the blocks; no prefix of this model is found"
        assert [said in line for line in caplog.messages] == [True]
    with install_on_cpu(model) as first, install(model, pool=first.pool) as second:
        assert second.pool is first.pool and second.layout.groups == first.layout.groups
    with pytest.raises(ValueError, match=r"pool has the layer groups full"):
        install(family("gemma4_text"), pool=first.pool)
