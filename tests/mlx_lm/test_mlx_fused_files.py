"""How each model file of mlx-lm attends: over the pool wherever it hands on what its cache returned."""

import re

import numpy as np
import pytest
from mlx_families import model_of_file
from mlx_models import batch_tokens, computing_on_cpu, solo_tokens

from benchmarks.tiny_families import OWN
from kvpool.adapters.mlx_lm import install

cpu = pytest.fixture(computing_on_cpu, autouse=True)
LATENT = "the backend does not attend to latents"  # MLX's own, on the CPU
GATHER = {  # why
    **dict.fromkeys(("afm7", "minimax_m3_vl"), "asked for 'shape'"),
    **dict.fromkeys(("bailing_hybrid", "bailing_moe_v3", "kimi_linear", "kimi_k3"), LATENT),
    **dict.fromkeys(("deepseek_v3", "kimi_k25", "kimi_vl", "glm4_moe_lite", "mistral4"), LATENT),
    **dict.fromkeys(("longcat_flash", "longcat_flash_ngram"), LATENT),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), LATENT),
    **dict.fromkeys(("deepseek_v41", "mamba", "mamba2", "rwkv7"), "no layer attends over blocks"),
    "llama4": "chunks",
    "plamo": "tile",
    "plamo3": "the window of the mask is 25, that of the cache 24",
}
SAMPLE = ("cohere2", "deepseek_v2", "gemma3n", "gpt2", "minimax", "olmo3", "phi", "stablelm")  # the others are long
LATENTS = sorted(name for name, why in GATHER.items() if why == LATENT)
PROMPTS, MAX_TOKENS = (3, 40, 17, 1), 8


@pytest.mark.long
@pytest.mark.parametrize("name", LATENTS)
def test_file_with_latents_decodes_over_them_where_the_backend_can(name):
    model = model_of_file(name)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(1, 96, n).tolist() for n in PROMPTS]
    stock = [solo_tokens(model, prompt, MAX_TOKENS) for prompt in prompts]
    with install(model, 100, block_size=4, backend="numpy") as kv:
        is_indexed = name in ("deepseek_v32", "glm_moe_dsa")
        assert kv.route.startswith("gather: mlx_lm.models.deepseek_v32.Indexer" if is_indexed else "fused")
        assert batch_tokens(model, prompts, MAX_TOKENS) == stock


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.long) for name in sorted(OWN)]
)
def test_file_attends_over_the_pool_or_gathers_if_it_computes_with_its_context(name):
    """Its tokens: see test_mlx_lm_families."""
    route = install(model_of_file(name), 100, block_size=4).route
    print(f"{name:24} {route}")
    assert route.startswith("gather: ") and re.search(GATHER[name], route) if name in GATHER else route == "fused"
