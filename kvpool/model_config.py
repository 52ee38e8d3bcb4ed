"""Reads the shape of a model's KV cache from its config.

`spec_from_config` reads a Hugging Face style ``config.json``. A config describes the layers of a model by its
``model_type`` and by fields that differ between types. So only types whose layers are known here are sized. Everything
else is refused with the reason: a wrong size would cost more than none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpool.spec import KVSpec, checked_int

__all__ = ["model_fields", "shortened", "sliding_window", "spec_from_config"]

_HEAD_DIM_DERIVED = frozenset(
    (
        *("apertus", "bailing_moe", "bitnet", "cohere", "cohere2", "deepseek", "dots1", "ernie4_5", "ernie4_5_moe"),
        *("glm", "gpt_neox", "granite", "granitemoe", "helium", "hunyuan_v1_dense", "internlm2", "internlm3"),
        *(
            "iquestcoder",
            "klear",
            "llama",
            "mimo",
            "minicpm",
            "minimax_m2",
            "mistral",
            "mixtral",
            "nanochat",
            "nemotron",
        ),
        *("olmo2", "olmo3", "olmoe", "phi", "phi3", "phimoe", "qwen", "qwen2", "qwen2_5_vl", "qwen2_5_vl_text"),
        *("qwen2_moe", "qwen2_vl", "qwen2_vl_text", "smollm3", "stablelm", "starcoder2", "telechat3", "xverse"),
    )
)
"""Types whose head_dim is hidden_size / num_attention_heads where a config leaves it out."""

_HEAD_DIM_GIVEN = frozenset(
    (
        *("afmoe", "exaone4", "exaone_moe", "gemma", "gemma2", "gemma3_text", "glm4", "glm4_moe", "gpt_oss", "laguna"),
        *("llama4_text", "mellum", "ministral3", "muse_glimmer", "plamo3", "qwen3", "qwen3_moe", "qwen3_vl_moe_text"),
        *("qwen3_vl_text", "seed_oss", "solar_open", "spark2_5"),
    )
)
"""Types with a head_dim of their own: it does not follow from hidden_size."""

_MULTI_HEAD = frozenset(
    (*("gpt_neox", "internlm2", "internlm3", "llama", "olmo2", "olmo3", "olmoe", "phi", "phi3", "qwen"),)
)
"""Types with as many KV heads as query heads where a config leaves num_key_value_heads out."""

_LATENT = frozenset(("deepseek_v3", "glm4_moe_lite", "joyai_llm_flash", "kimi_k2", "mistral4"))
"""Types of which mlx-lm, like other engines, keeps one latent and one rotary part per token and layer."""

_CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
    }
}
"""Fields that published configs leave to the defaults of the class that reads them."""

_INSTEAD = "describe what its layers keep with kvpool.KVSpec, and size it with kvpool.config.blocks_for"

_OTHER_CACHES = {
    "some layers keep a recurrent state": (
        *("attn_layer_indices", "attn_layer_offset", "attn_layer_period", "attn_type_list", "block_types"),
        *("full_attention_interval", "hybrid_override_pattern", "layer_group_size", "layers_block_type"),
        *("linear_attn_config", "linear_num_value_heads", "mamba_d_ssm", "mamba_d_state", "ssm_cfg", "state_size"),
    ),
    "some layers keep the state of a convolution": ("conv_L_cache", "full_attn_idxs"),
    "layers differ in their KV heads or head_dim": ("block_configs", "global_head_dim", "hybrid_layer_pattern"),
    "some layers read the keys and values of others": ("num_kv_shared_layers", "use_cla"),
    "layers keep keys of an indexer beside the latent": ("index_topk",),
    "layers run several times, with keys and values of their own each time": ("loop_num", "num_loops"),
}
"""Fields that show that layers differ, or keep something else than keys and values per token."""


def spec_from_config(
    config: Mapping[str, Any] | str | os.PathLike[str],
    *,
    block_size: int = 16,
    dtype: str | None = None,
    layout: str = "NHD",
    k_bits: int | None = None,
    v_bits: int | None = None,
    quant_group_size: int = 64,
) -> KVSpec:
    """The KV spec of a model from its Hugging Face style config.

    Parameters
    ----------
    config : mapping, path
        The content of a ``config.json``, the file, or the folder that holds it. Of a multimodal config,
        ``text_config`` counts.
    dtype : str, optional
        Overrides the model's ``dtype`` / ``torch_dtype``.
    k_bits, v_bits, quant_group_size
        As in `KVSpec`.

    Raises
    ------
    ValueError
        A field is missing or wrong, the model keeps something else than the same keys and values in every layer,
        or its ``model_type`` is not known here. The message names the field.
    """
    fields = model_fields(config)
    _refuse_other_caches(fields)
    model_type = _model_type(fields)
    num_layers = _field(fields, "num_hidden_layers")
    if model_type in _LATENT:
        heads, head_dim, v_head_dim = 1, _field(fields, "kv_lora_rank"), _field(fields, "qk_rope_head_dim")
    else:
        heads, head_dim, v_head_dim = _kv_heads(fields, model_type), _head_dim(fields, model_type), None
    dtype = dtype or fields.get("dtype") or fields.get("torch_dtype")
    if dtype is None:
        raise ValueError("[config] neither dtype nor torch_dtype is given; pass dtype, such as 'float16'")
    return KVSpec(
        num_layers=num_layers,
        num_kv_heads=heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        dtype=str(dtype).removeprefix("torch."),
        block_size=block_size,
        layout=layout,
        k_bits=k_bits,
        v_bits=v_bits,
        quant_group_size=quant_group_size,
    )


def model_fields(config: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """The fields of the text model: those of ``text_config`` if there is one, with missing ones filled in.

    A multimodal config may give the dtype of all its parts at the top level, and leave fields to the defaults of the
    class that reads it.
    """
    whole = config if isinstance(config, Mapping) else _read(Path(config))
    inner = whole.get("text_config")
    if not isinstance(inner, Mapping) or "num_hidden_layers" in whole:
        return dict(whole)
    fields = {name: whole[name] for name in ("dtype", "torch_dtype") if whole.get(name) is not None}
    if inner.get("dtype") or inner.get("torch_dtype"):
        fields = {}
    defaults = _CLASS_DEFAULTS.get(str(inner.get("model_type")), {})
    return fields | defaults | {name: value for name, value in inner.items() if value is not None}


def sliding_window(fields: Mapping[str, Any]) -> int | None:
    """Tokens that layers with a sliding window see, None if a model has no such layer.

    `fields` are those of `model_fields`.
    """
    window = fields.get("sliding_window") or fields.get("attention_chunk_size")
    layer_types = fields.get("layer_types")
    if not window or fields.get("use_sliding_window") is False:
        return None
    if isinstance(layer_types, list | tuple) and not {"sliding_attention", "chunked_attention"} & set(layer_types):
        return None
    window, most = checked_int("config", "sliding_window", window), fields.get("max_position_embeddings")
    return None if isinstance(most, int) and window >= most else window


def _model_type(fields: Mapping[str, Any]) -> str:
    """The model type; ValueError if its layers are not known."""
    name = fields.get("model_type")
    if name is None:
        raise ValueError("[config] model_type is missing; it says what the layers of a model keep")
    known = str(name).lower()
    if fields.get("kv_lora_rank") is not None and known not in _LATENT:
        raise ValueError(
            f"[config] latent attention (kv_lora_rank {shortened(fields['kv_lora_rank'])}) of model_type "
            f"{shortened(name)}: engines differ in whether they keep latents or keys and values per head; {_INSTEAD}"
        )
    if known not in _HEAD_DIM_DERIVED | _HEAD_DIM_GIVEN | _LATENT:
        raise ValueError(
            f"[config] model_type {shortened(name)} is not known to keep the same keys and values in every "
            f"layer; {_INSTEAD}"
        )
    return known


def _refuse_other_caches(fields: Mapping[str, Any]) -> None:
    """Sizes for a model that does not keep the same keys and values in every layer would be wrong."""
    layer_types = fields.get("layer_types") or []
    if not isinstance(layer_types, list | tuple) or not all(isinstance(name, str) for name in layer_types):
        raise ValueError(f"[config] layer_types must be a list of strings, got {shortened(layer_types)}")
    others = sorted(set(layer_types) - {"attention", "full_attention", "sliding_attention", "chunked_attention"})
    if others:
        raise ValueError(
            f"[config] layer_types names {shortened(others)}: not every layer keeps keys and values per token; "
            f"{_INSTEAD}"
        )
    for why, names in _OTHER_CACHES.items():
        for name in names:
            value = fields.get(name)
            is_plain = name == "attn_type_list" and isinstance(value, list) and value.count(1) == len(value)
            if value and not is_plain:
                raise ValueError(f"[config] {name} is {shortened(value)}: {why}; {_INSTEAD}")


def _kv_heads(fields: Mapping[str, Any], model_type: str) -> int:
    if fields.get("num_key_value_heads") is None and model_type in _MULTI_HEAD:
        return _field(fields, "num_attention_heads")
    return _field(fields, "num_key_value_heads")


def _head_dim(fields: Mapping[str, Any], model_type: str) -> int:
    if fields.get("head_dim") is not None or model_type in _HEAD_DIM_GIVEN:
        return _field(fields, "head_dim")
    hidden_size, num_heads = _field(fields, "hidden_size"), _field(fields, "num_attention_heads")
    if hidden_size % num_heads:
        raise ValueError(
            f"[config] there is no head_dim, and hidden_size {hidden_size} is not a multiple of "
            f"num_attention_heads {num_heads}"
        )
    return hidden_size // num_heads


def _read(path: Path) -> Mapping[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no UTF-8, no JSON, or a number of thousands of digits
        raise ValueError(f"[config] {path} is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"[config] {path} is nested too deeply for a model config") from error
    if not isinstance(config, Mapping):
        raise ValueError(f"[config] {path} holds {type(config).__name__}, not an object")
    return config


def shortened(value: Any) -> str:
    """`value` as in Python, cut to fit a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _field(fields: Mapping[str, Any], name: str) -> int:
    """Field `name`, a positive int."""
    if fields.get(name) is None:
        raise ValueError(f"[config] {name} is missing; the fields are {', '.join(sorted(fields)) or '(none)'}")
    return checked_int("config", name, fields[name])
