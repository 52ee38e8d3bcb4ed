"""How each model file of mlx-lm attends: over the pool wherever it hands on what its cache returned."""

import re

import pytest
from mlx_families import model_of_file
from mlx_models import computing_on_cpu

from benchmarks.tiny_families import OWN
from kvpool.adapters.mlx_lm import install

cpu = pytest.fixture(computing_on_cpu, autouse=True)
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
SAMPLE = ("cohere2", "deepseek_v2", "deepseek_v3", "gemma3n", "gpt2", "minimax", "olmo3", "phi", "stablelm")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.long) for name in sorted(OWN)]
)
def test_file_attends_over_the_pool_or_gathers_if_it_computes_with_its_context(name):
    """Its tokens: see test_mlx_lm_families."""
    route = install(model_of_file(name), 100, block_size=4).route
    print(f"{name:24} {route}")
    assert route.startswith("gather: ") and re.search(GATHER[name], route) if name in GATHER else route == "fused"
