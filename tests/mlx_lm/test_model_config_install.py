"""Every model type that `kvpool plan` sizes, against what `install` finds in a tiny model of mlx-lm's file for it."""

import importlib
from dataclasses import replace

import pytest

from kvpool import model_config
from kvpool.model_config import spec_from_config

pytest.importorskip("mlx_lm")

from mlx_lm.utils import MODEL_REMAPPING

from kvpool.adapters.mlx_lm.shapes import inspect_model

TYPES = model_config._HEAD_DIM_DERIVED | model_config._HEAD_DIM_GIVEN | model_config._LATENT
ELSEWHERE = {  # types that stand in text_config only, or that compute by kernels of a GPU
    *("bitnet", "llama4_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_vl", "qwen2_vl_text"),
    *("qwen3_vl_moe_text", "qwen3_vl_text"),
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
BY_LAYER = {"full_attention": ROPE, "sliding_attention": ROPE}
SCALED_ROPE = ROPE | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}
GRANITE = {"logits_scaling": 1.0, "attention_multiplier": 0.25, "embedding_multiplier": 1.0, "residual_multiplier": 1.0}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 16, "qk_nope_head_dim": 8, "v_head_dim": 24}

COMMON = {
    **{"hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96, "vocab_size": 128},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "rope_theta": 1e4},
    **{"rms_norm_eps": 1e-5, "layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "norm_eps": 1e-5},
    **{"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "use_bias": False},
    **{"use_qkv_bias": False, "use_qk_norm": True, "partial_rotary_factor": 0.5, "sliding_window": 24},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"n_shared_experts": 1, "num_shared_experts": 1, "moe_intermediate_size": 32, "norm_topk_prob": True},
    **{"shared_expert_intermediate_size": 32, "shared_intermediate_size": 32, "routed_scaling_factor": 1.0},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1, "decoder_sparse_step": 1},
    **{"mlp_only_layers": [], "num_dense_layers": 1, "rotary_dim": 8},
}
OWN = {
    "apertus": {"post_norm": False, "qk_norm": True},
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0, "sliding_window_pattern": 2},
    "dots1": {"scoring_func": "noaux_tc"},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_layer_start_index": 1, "moe_k": 2, "moe_num_shared_experts": 1},
    "exaone4": {"rope_scaling": {"rope_type": "default"}, "sliding_window_pattern": "LLG"},
    "exaone_moe": {"is_moe_layer": [False, True, True]},
    "gemma3_text": {"sliding_window_pattern": 2},
    "glm4_moe": {"rope_scaling": None},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5, "num_key_value_heads": None},
    "granite": GRANITE,
    "granitemoe": GRANITE,
    "hunyuan_v1_dense": {"rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}},
    "internlm2": {"bias": False},
    "laguna": {"rope_parameters": BY_LAYER},
    "mellum": {"rope_parameters": BY_LAYER},
    "minicpm": {"dim_model_base": 64, "scale_depth": 2.0, "scale_emb": 1.0},
    "ministral3": {"rope_parameters": SCALED_ROPE},
    "mistral4": {"rope_parameters": SCALED_ROPE},
    "muse_glimmer": {"output_multiplier": 1.0},
    "nemotron": {"hidden_act": "relu2"},
    "phi": {"num_key_value_heads": None},
    "phi3": {"partial_rotary_factor": 1.0},
    "phimoe": {
        "rope_scaling": {
            **{"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8},
            **{"short_mscale": 1.0, "long_mscale": 1.0},
        }
    },
    "qwen": {"kv_channels": 16, "num_key_value_heads": None},
    "spark2_5": {"rope_parameters": BY_LAYER},
    "starcoder2": {"norm_epsilon": 1e-5},
}
WINDOWED = {"afmoe", "exaone_moe", "gpt_oss", "laguna", "mellum", "ministral3", "olmo3"}


def config_of(model_type):
    """Fields as its configs have them; head_dim only where it is the type's own."""
    fields = COMMON | {"model_type": model_type} | OWN.get(model_type, {})
    if model_type in model_config._HEAD_DIM_GIVEN:
        fields["head_dim"] = 24  # not hidden_size / num_attention_heads
    if model_type in model_config._LATENT:
        fields |= LATENT | {"num_key_value_heads": 4}
    if model_type in WINDOWED:
        fields["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    return fields


@pytest.mark.parametrize("model_type", sorted(TYPES - ELSEWHERE))
def test_plan_of_every_type_counts_what_install_finds(model_type):
    config = config_of(model_type)
    name = "Klear" if model_type == "klear" else MODEL_REMAPPING.get(model_type, model_type)
    module = importlib.import_module(f"mlx_lm.models.{name}")
    needed = {"head_dim": 16} | config if name in ("cohere2", "dots1", "ernie4_5", "glm", "helium") else config
    found, *_ = inspect_model(module.Model(module.ModelArgs.from_dict(needed)), 16)
    planned = spec_from_config(config, dtype="float32")
    assert replace(planned, v_head_dim=planned.value_head_dim) == replace(found, v_head_dim=found.value_head_dim)


def test_types_that_are_not_compared_are_types_that_are_sized():
    assert ELSEWHERE < TYPES and OWN.keys() < TYPES and WINDOWED < TYPES
