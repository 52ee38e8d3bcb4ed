"""A tiny config for every model file of mlx-lm that a CPU can run. Numbers differ wherever two could be confused."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from kvpool.adapters.mlx_lm import tiny

WINDOW = 24
SLIDING, FULL = "sliding_attention", "full_attention"

COMMON: dict[str, Any] = {  # names that many files know; a file ignores those that it does not know
    **{"hidden_size": 48, "num_hidden_layers": 4, "intermediate_size": 80, "vocab_size": 96},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024},
    **{"rms_norm_eps": 1e-5, "layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "norm_eps": 1e-5},
    **{"rope_theta": 1e4, "partial_rotary_factor": 0.5, "rotary_dim": 8, "tie_word_embeddings": False},
    **{"attention_bias": False, "mlp_bias": False, "use_bias": False, "use_qkv_bias": False, "use_qk_norm": True},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"n_shared_experts": 1, "num_shared_experts": 1, "moe_intermediate_size": 32, "norm_topk_prob": True},
    **{"shared_expert_intermediate_size": 32, "shared_intermediate_size": 32, "routed_scaling_factor": 1.0},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1, "decoder_sparse_step": 1},
    **{"mlp_only_layers": [], "dtype": "bfloat16"},
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
ROPE_BY_LAYER = {"rope_parameters": {FULL: ROPE, SLIDING: ROPE}}
ROPE_LLAMA4 = {"rope_parameters": ROPE | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}}
ROPE_ALPHA = {"rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}}
ROPE_LONG = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1.0] * 6}
GRANITE = {"logits_scaling": 1.0, "attention_multiplier": 0.25, "embedding_multiplier": 1.0, "residual_multiplier": 1.0}
WINDOWED = {"sliding_window": WINDOW, "layer_types": [SLIDING, FULL, SLIDING, SLIDING]}
PATTERN = {"sliding_window": WINDOW, "sliding_window_pattern": 3}
LATENT = {
    **{"kv_lora_rank": 40, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 20},
    "num_key_value_heads": 4,
}
INDEXED = LATENT | {"index_head_dim": 24, "index_n_heads": 4, "index_topk": 32}
DELTA = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16},
    **{"linear_value_head_dim": 8, "linear_conv_kernel_dim": 3, "full_attention_interval": 3},
}
KDA = {
    **{"kda_layers": [1, 2, 4], "full_attn_layers": [3], "num_heads": 3, "head_dim": 16},
    "short_conv_kernel_size": 4,
}
MAMBA2 = {
    **{"mamba_n_heads": 6, "mamba_d_head": 8, "mamba_d_state": 12, "mamba_d_conv": 3, "mamba_n_groups": 2},
    **{"mamba_proj_bias": False, "mamba_conv_bias": True},
}
SHORT_CONV = {"conv_bias": False, "conv_L_cache": 3, "layer_types": ["conv", FULL, "conv", "conv"]}
LFM2 = SHORT_CONV | {
    **{"block_dim": 48, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False},
}
GROUPED = {"layer_group_size": 3, "group_norm_size": 2, "num_key_value_heads": 4}
LONGCAT = LATENT | {
    **{"ffn_hidden_size": 80, "moe_topk": 2, "expert_ffn_hidden_size": 32, "zero_expert_num": 2, "num_layers": 2},
    **{"mla_scale_q_lora": True, "mla_scale_kv_lora": True},
}
GEMMA3 = PATTERN | {"query_pre_attn_scalar": 16}
GEMMA4 = {
    **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96, "global_head_dim": 32},
    **{"num_hidden_layers": 6, "num_kv_shared_layers": 2, "layer_types": [SLIDING, SLIDING, FULL] * 2},
    **{"sliding_window": WINDOW, "tie_word_embeddings": True},
}
GEMMA3N = {
    **{"num_hidden_layers": 6, "num_kv_shared_layers": 2, "layer_types": [SLIDING, SLIDING, FULL] * 2},
    **{"sliding_window": WINDOW, "rope_local_base_freq": 1e4, "final_logit_softcapping": 30.0},
    **{"activation_sparsity_pattern": [0.5] * 2 + [0.0] * 4, "hidden_size_per_layer_input": 8},
    **{"vocab_size_per_layer_input": 96, "altup_num_inputs": 2, "altup_coef_clip": 120.0},
    **{"altup_correct_scale": True, "altup_active_idx": 0, "laurel_rank": 8},
}
GPT2 = {"n_embd": 48, "n_head": 4, "n_layer": 4, "n_positions": 1024, "n_ctx": 1024, "num_key_value_heads": None}

PLAIN = (  # files that need nothing besides
    *("Klear", "bailing_moe", "deepseek", "ernie4_5", "gemma", "glm", "glm4", "helium", "internlm3", "mimo"),
    *("minimax", "mixtral", "olmo2", "olmoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3"),
    *("solar_open", "stablelm", "talkie", "telechat3"),
)
OWN: dict[str, dict[str, Any]] = dict[str, dict[str, Any]].fromkeys(
    PLAIN, {}
) | {  # what a file's config has besides, or instead
    "afm7": {"hidden_dim": 48, "num_layers": 4, "num_kv_reuse_layers": 1, "num_heads": 4, "num_kv_heads": 2},
    "afmoe": WINDOWED | {"num_dense_layers": 1},
    "apertus": {"post_norm": False, "qk_norm": True},
    "baichuan_m1": {
        **{"sliding_window": WINDOW, "sliding_window_layers": [0, 3], "conv_window": 2},
        **{"num_swa_attention_heads": 2, "num_swa_key_value_heads": 1},
    },
    "bailing_hybrid": LATENT | GROUPED,
    "bailing_moe_linear": GROUPED | {"num_key_value_heads": 2},
    "bailing_moe_v3": LATENT
    | {"moe_shared_expert_intermediate_size": 32, "layer_group_size": 3, "short_conv_kernel_size": 3},
    "cohere": {"logit_scale": 1.0},
    "cohere2": PATTERN | {"logit_scale": 1.0, "head_dim": 12},
    "dbrx": {
        **{"d_model": 48, "n_layers": 4, "n_heads": 4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    },
    "deepseek_v2": LATENT
    | {
        "topk_method": "greedy",
        "rope_scaling": {
            **{"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512, "mscale_all_dim": 1.0},
        },
    },
    "deepseek_v3": LATENT,
    "deepseek_v32": INDEXED,
    "deepseek_v41": {
        **{"num_key_value_heads": 1, "head_dim": 64, "hidden_size": 64, "q_lora_rank": 32, "o_groups": 2},
        **{"qk_rope_head_dim": 16, "o_lora_rank": 16, "sliding_window": WINDOW, "compress_ratios": [0, 4, 4, 4]},
        **{"kv_source_layer_ids": [1, 2, 3], "index_source_layer_ids": [1, 2, 3], "index_topk": 8},
        **{"index_n_heads": 2, "index_head_dim": 32, "hc_mult": 2, "hc_sinkhorn_iters": 4},
    },
    "dots1": {"scoring_func": "noaux_tc"},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_layer_start_index": 1, "moe_k": 2, "moe_num_shared_experts": 1},
    "exaone": {"num_layers": 4, "head_dim": 12},
    "exaone4": {"rope_scaling": {"rope_type": "default"}, "sliding_window": WINDOW, "sliding_window_pattern": "LLG"},
    "exaone_moe": WINDOWED | {"is_moe_layer": [False, True, True, True]},
    "falcon_h1": MAMBA2
    | {
        **{"mamba_d_ssm": 48, "mamba_expand": 2, "mamba_chunk_size": 32},
        **{"embedding_multiplier": 1.0, "lm_head_multiplier": 1.0},
    },
    "gear": {
        "layer_types": ["conv_mixer", SLIDING, "conv_mixer", FULL],
        **{"sliding_window": WINDOW, "conv_L_cache": 4},
    },
    "gemma2": {"query_pre_attn_scalar": 16.0},
    "gemma3": {"text_config": {"model_type": "gemma3_text"} | GEMMA3},
    "gemma3_text": GEMMA3,
    "gemma3n": {"text_config": {"model_type": "gemma3n_text"} | GEMMA3N},
    "gemma4": {"text_config": {"model_type": "gemma4_text", "num_key_value_heads": 1} | GEMMA4},
    "gemma4_text": GEMMA4 | {"num_global_key_value_heads": 1, "attention_k_eq_v": True},
    "glm4_moe": {"rope_scaling": None},
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": INDEXED | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "rope_parameters": ROPE},
    "gpt2": GPT2,
    "gpt_bigcode": GPT2 | {"n_inner": 80},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5, "num_key_value_heads": None},
    "gpt_oss": WINDOWED,
    "gptj": GPT2 | {"rotary_dim": 8},
    "granite": GRANITE,
    "granitemoe": GRANITE,
    "granitemoehybrid": MAMBA2 | GRANITE | {"layer_types": ["mamba", "attention", "mamba", "mamba"]},
    "hunyuan": ROPE_ALPHA
    | {"moe_topk": 2, "num_shared_expert": 1, "use_mixed_mlp_moe": True, "use_cla": True, "cla_share_factor": 2},
    "hunyuan_v1_dense": ROPE_ALPHA,
    "internlm2": {"bias": False},
    "iquestloopcoder": {"loop_num": 2, "loop_window_size": WINDOW},
    "jamba": {
        **{"attn_layer_offset": 1, "attn_layer_period": 3, "expert_layer_offset": 1, "expert_layer_period": 2},
        **{"mamba_d_conv": 3, "mamba_d_state": 12, "mamba_expand": 2},
    },
    "kimi_k25": {"text_config": {"model_type": "kimi_k2"} | LATENT},
    "kimi_k3": {
        "text_config": LATENT
        | {
            **{"linear_attn_config": KDA, "num_experts_per_token": 2, "attn_res_block_size": 2},
            "mla_use_output_gate": True,
        }
    },
    "kimi_linear": LATENT
    | {
        **{"q_lora_rank": None, "linear_attn_config": KDA, "model_max_length": 1024, "num_experts_per_token": 2},
    },
    "kimi_vl": {"text_config": {"model_type": "deepseek_v3"} | LATENT},
    "laguna": WINDOWED | ROPE_BY_LAYER | {"num_attention_heads_per_layer": [8, 4, 8, 8]},
    "lfm2": LFM2,
    "lfm2-vl": {"text_config": {"model_type": "lfm2"} | LFM2},
    "lfm2_moe": SHORT_CONV | {"use_expert_bias": True, "num_dense_layers": 1},
    "lille-130m": {"block_size": 1024, "n_embd": 96, "n_head": 4, "n_kv_heads": 2, "n_layer": 4},
    "llama": WINDOWED,
    "llama4": {
        "text_config": {
            **{"model_type": "llama4_text", "attention_chunk_size": 20, "interleave_moe_layer_step": 2},
            **{"intermediate_size_mlp": 80, "num_experts_per_tok": 1, "rope_scaling": None},
        }
    },
    "llama4_text": {"intermediate_size_mlp": 80, "no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": LONGCAT | {"attention_method": "MLA", "zero_expert_type": "identity"},
    "longcat_flash_ngram": LONGCAT | {"ngram_vocab_size_ratio": 2, "emb_neighbor_num": 3, "emb_split_num": 2},
    "mamba": {
        **{"intermediate_size": 72, "state_size": 12, "conv_kernel": 3, "use_conv_bias": True, "time_step_rank": 4},
    },
    "mamba2": {
        **{"num_heads": 6, "head_dim": 8, "intermediate_size": 48, "state_size": 12, "conv_kernel": 3, "n_groups": 2},
        **{"use_conv_bias": True, "time_step_limit": (0.001, 100.0), "time_step_rank": 4},
    },
    "mellum": WINDOWED | ROPE_BY_LAYER,
    "mimo_v2_flash": {
        **{"hybrid_layer_pattern": [0, 1, 1, 0], "moe_layer_freq": [0, 1, 1, 1], "sliding_window_size": WINDOW},
        **{"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "topk_method": "noaux_tc"},
        **{"scoring_func": "sigmoid", "layernorm_epsilon": 1e-5, "swa_rope_theta": 1e4, "v_head_dim": 8},
        **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 20, "swa_v_head_dim": 12},
    },
    "minicpm": {"dim_model_base": 48, "scale_depth": 2.0, "scale_emb": 1.0},
    "minicpm3": LATENT
    | {
        **{"dim_model_base": 48, "scale_depth": 2.0, "scale_emb": 1.0},
        "rope_scaling": ROPE_LONG | {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4},
    },
    "minimax_m3_vl": {
        "text_config": {
            **{"dense_intermediate_size": 80, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
            "layer_types": [FULL, "sparse", "sparse", "sparse"],
            "sparse_attention_config": {
                **{"sparse_num_index_heads": 2, "sparse_index_dim": 24, "sparse_block_size": 16},
                **{"sparse_topk_blocks": 2, "sparse_local_block": 1},
            },
        }
    },
    "ministral3": WINDOWED | ROPE_LLAMA4,
    "mistral3": {"text_config": {"model_type": "ministral3"} | WINDOWED | ROPE_LLAMA4},
    "mistral4": LATENT | ROPE_LLAMA4,
    "muse_glimmer": {"sliding_window": WINDOW, "output_multiplier": 1.0},
    "nanbeige": {"num_loops": 2},
    "nanochat": {"num_key_value_heads": 4},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
        ]
    },
    "nemotron_h": {
        "hybrid_override_pattern": ["M", "*", "-", "M", "E", "*"],
        **{"mamba_num_heads": 6, "mamba_head_dim": 8, "mamba_proj_bias": False, "ssm_state_size": 12},
        **{"conv_kernel": 3, "n_groups": 2, "use_conv_bias": True, "moe_shared_expert_intermediate_size": 32},
    },
    "olmo3": WINDOWED,
    "olmo_hybrid": DELTA | {"linear_num_key_heads": 4, "linear_allow_neg_eigval": True},
    "openelm": {
        **{"num_transformer_layers": 4, "model_dim": 48, "ffn_dim_divisor": 16, "num_query_heads": [4, 4, 8, 8]},
        **{"num_kv_heads": [2, 2, 4, 4], "ffn_multipliers": [1.0, 1.25, 1.5, 1.5]},
    },
    "phi": {"num_key_value_heads": None},
    "phi3": {"partial_rotary_factor": 1.0},
    "phimoe": {"rope_scaling": ROPE_LONG | {"short_mscale": 1.0, "long_mscale": 1.0}},
    "phixtral": {"num_vocab": 96, "model_dim": 48, "num_heads": 4, "num_layers": 4, "rotary_dim": 8},
    "pixtral": {"text_config": {"model_type": "mistral"}},
    "plamo": {"n_shared_head": 2},
    "plamo2": {
        **{"hidden_size_per_head": 8, "mamba_d_state": 12, "mamba_d_conv": 3, "mamba_num_heads": 6},
        **{"mamba_step": 2, "mamba_chunk_size": 32, "attention_window_size": WINDOW},
    },
    "plamo3": PATTERN,
    "prism_hadamard_qwen35": {
        "text_config": DELTA | {"model_type": "qwen3_5", "num_experts": 0, "intermediate_size": 128},
        **{"tensor_namespace": "mlx-vlm-qwen3_5", "quantization": {"bits": 2, "group_size": 128, "mode": "affine"}},
        "modules": [
            {"path": f"model.layers.{layer}.mlp.down_proj", "embedding": False, "dtype": "float16", "block": 0}
            for layer in range(4)
        ],
    },
    "qwen": {"kv_channels": 12, "num_key_value_heads": None},
    "qwen2_vl": {"text_config": {"model_type": "qwen2"}},
    "qwen3_5": {"text_config": DELTA | {"model_type": "qwen3_5", "num_experts": 0}},
    "qwen3_5_moe": {"text_config": DELTA | {"model_type": "qwen3_5_moe"}},
    "qwen3_next": DELTA,
    "qwen3_vl": {"text_config": {"model_type": "qwen3"}},
    "qwen3_vl_moe": {"text_config": {"model_type": "qwen3_moe"}},
    "recurrent_gemma": {
        **{"conv1d_width": 3, "logits_soft_cap": 30.0, "attention_window_size": WINDOW, "num_hidden_layers": 5},
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "rwkv7": {
        **{"a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8, "decay_low_rank_dim": 8},
    },
    "spark2_5": ROPE_BY_LAYER | {"sliding_window": WINDOW},
    "starcoder2": {"norm_epsilon": 1e-5},
    "step3p5": WINDOWED
    | {
        **{"num_attention_groups": 2, "partial_rotary_factors": [1.0, 0.5, 1.0, 0.5]},
        "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 4},
        **{"moe_num_experts": 4, "moe_top_k": 2, "share_expert_dim": 32, "moe_layers_enum": "1,2,3"},
    },
    "youtu_llm": LATENT,
}

NOT_RUN = {  # the other model files of mlx-lm 0.32.2, and why no CPU runs them
    "bitnet": "kernels of a GPU only",
    "muse_spark": "kernels of a GPU only",
    "olmo": "raises for a prompt of more than one token",
    "phi3small": "ends the process in MLX on a CPU",
}


def config_of(name: str, vocab_size: int = 96) -> dict[str, Any]:
    """The config of the file `name`, of the caller's own. A text model that is wrapped has the fields.

    Raises
    ------
    ValueError
        There is no such file here.
    """
    if name not in OWN:
        raise ValueError(f"[config_of] name is {name!r}, known are {', '.join(OWN)}")
    own = copy.deepcopy(OWN[name])
    is_wrapped = "text_config" in own
    text = copy.deepcopy(COMMON) | (own["text_config"] if is_wrapped else own)
    if "vocab_size_per_layer_input" in text:
        text["vocab_size_per_layer_input"] = vocab_size
    text["vocab_size"] = vocab_size
    return {"model_type": name} | (own | {"vocab_size": vocab_size, "text_config": text} if is_wrapped else text)


def build(name: str, config: dict[str, Any]) -> Any:
    """The model of mlx-lm's file, as the file initialises it."""
    sys.modules.setdefault("hf_olmo", ModuleType("hf_olmo"))  # olmo asks for it, and does not use it
    module = importlib.import_module(f"mlx_lm.models.{name}")
    return module.Model(module.ModelArgs.from_dict(config))


def make(name: str) -> tuple[Any, TokenizerWrapper]:
    """The model with weights of its own, and the tokenizer of `tiny`, as ``mlx_lm.load`` gives them.

    ``mx.random`` is seeded: some model files draw weights that stay.
    """
    mx.random.seed(7)
    model = build(name, config_of(name, tiny.CONFIG["vocab_size"]))
    randomize(model)
    model.eval()
    mx.eval(model.parameters())
    return model, tiny.tokenizer()


def save(folder: Path, name: str) -> None:
    """Write both into a folder, for whatever takes a path to a model."""
    tiny.write(folder, config_of(name, tiny.CONFIG["vocab_size"]), *make(name))


def randomize(model: Any) -> None:
    """Random float32 weights under which greedy output wanders and states remember, the same ones every time."""
    key = mx.random.key(7)
    weights = []
    parameters: Any = sorted(tree_flatten(model.parameters()))
    for name, weight in parameters:
        if mx.issubdtype(weight.dtype, mx.floating):
            key, own = mx.random.split(key)
            weight = _value(name, weight.astype(mx.float32), mx.random.normal(weight.shape, key=own))
        weights.append((name, weight))
    model.update(tree_unflatten(weights))


def _value(name: str, weight: mx.array, noise: mx.array) -> mx.array:
    if name.endswith(("A_log", "w_lora.lora.2.bias")):
        return weight + 0.1 * noise - 4.0  # slow decay: a state remembers some tens of tokens
    if "conv" in name and weight.ndim > 1:
        return 0.5 * noise
    if weight.ndim < 2 or min(weight.shape) == 1:
        return weight + 0.1 * noise  # norms, biases, sinks, gates
    if any(part in name for part in ("embed", "wte", "wpe")):
        return 0.2 * noise  # small, because tied ones repeat the last token
    return noise * (2.0 / weight.shape[-1] ** 0.5)
