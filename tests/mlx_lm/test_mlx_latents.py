"""Latent attention: decodes attend over the latents in the pool, chunks gather, models of mlx-lm stay as they are."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_families import model_of_file
from mlx_models import batch_tokens, computing_on_cpu, random_prompts, solo_tokens

from benchmarks.tiny_families import LATENT
from kvpool.adapters.mlx_lm import Engine, attention, install
from kvpool.adapters.mlx_lm.host import Converted
from kvpool.eviction import H2O
from kvpool.protocol import StepArrays

cpu = pytest.fixture(computing_on_cpu, autouse=True)
WIDE = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}  # as in DeepSeek-V3
PROMPTS, MAX_TOKENS, VOCAB = (3, 40, 17, 1), 8, 96


@pytest.fixture
def calls(monkeypatch):
    """Names of the calls by which layers read the pool, in order."""
    made = []
    for name in ("attend", "read"):
        real = getattr(Converted, name)
        monkeypatch.setattr(
            Converted, name, lambda *a, real=real, name=name, **k: (made.append(name), real(*a, **k))[1]
        )
    return made


INDEXED = ("deepseek_v32", "glm_moe_dsa")  # they compute with their keys
FAMILIES = [*INDEXED, "bailing_hybrid", "bailing_moe_v3", "deepseek_v3", "glm4_moe_lite", "kimi_k25", "kimi_k3"]
FAMILIES += ["kimi_linear", "kimi_vl", "longcat_flash", "longcat_flash_ngram", "mistral4"]


@pytest.mark.parametrize("name", FAMILIES)
def test_decodes_over_latents_generate_the_tokens_of_mlx_lm(name):
    model = model_of_file(name, **(WIDE if name == "deepseek_v3" else {}))
    prompts = random_prompts(PROMPTS, 5, VOCAB)
    stock = [solo_tokens(model, prompt, MAX_TOKENS) for prompt in prompts]
    with install(model, 100, block_size=8, backend="numpy") as kv:
        gathers = "gather: mlx_lm.models.deepseek_v32.Indexer"
        assert kv.layout.has_latents and kv.route.startswith(gathers if name in INDEXED else "fused")
        assert [solo_tokens(model, prompt, MAX_TOKENS) for prompt in prompts] == stock
        assert batch_tokens(model, prompts, MAX_TOKENS) == stock


def test_quantized_model_decodes_over_its_latents():
    model = model_of_file("deepseek_v3", **{"qk_nope_head_dim": 64, "kv_lora_rank": 64, "v_head_dim": 64})
    nn.quantize(
        model, 32, 8, class_predicate=lambda path, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0
    )
    prompts = random_prompts(PROMPTS, 5, VOCAB)
    stock = [solo_tokens(model, prompt, MAX_TOKENS) for prompt in prompts]
    with install(model, 100, block_size=8, backend="numpy", fused=True) as kv:
        assert kv.layout.has_latents
        assert batch_tokens(model, prompts, MAX_TOKENS) == stock


def test_engine_decodes_over_latents(calls):
    model, prompts = model_of_file("deepseek_v3"), random_prompts(PROMPTS, 5, VOCAB)
    stock = [solo_tokens(model, prompt, MAX_TOKENS) for prompt in prompts]
    engine = Engine(model, 100, block_size=8, backend="numpy", fused=True, prefill_chunk=9)
    calls.clear()
    assert [one.tokens.tolist() for one in engine.batch(prompts, max_tokens=MAX_TOKENS)] == stock
    assert calls.count("attend") >= (MAX_TOKENS - 1) * len(model.layers)
    assert calls.count("read") == len(model.layers) * sum(-(-n // 9) for n in PROMPTS if n > 1)


def test_policy_that_needs_scores_is_refused():
    with pytest.raises(ValueError, match=r"H2O needs scores, chunks of this model's latent attention"):
        install(model_of_file("deepseek_v3"), 40, block_size=8, backend="numpy", eviction=H2O(max_kv=16))


def test_wrong_mask_beside_latents_is_refused():
    with install(model_of_file("deepseek_v3"), 40, block_size=8, backend="numpy", fused=True) as kv:
        plan = StepArrays(np.array([[1]]), np.array([1]), np.array([0, 1]), np.array([8]))
        latents, keys = attention.paged_latents(attention.Forward(kv.backend, plan, (1, 1), is_fused=True), 0, None)
        queries = mx.zeros((1, 4, 1, LATENT["kv_lora_rank"]))
        for mask in (None, mx.zeros((1, 4, 1, 7))):
            with pytest.raises(TypeError, match=r"the mask is not the product of the rotary queries and 8 rotary keys"):
                latents.attend(queries, latents, 1.0, mask)
        with pytest.raises(TypeError, match=r"\[RotaryKeys\] asked for swapaxes\(0, 1\)"):
            keys.swapaxes(0, 1)
        with pytest.raises(TypeError, match=r"\[RotaryKeys\] used as an array"):
            keys * 2
