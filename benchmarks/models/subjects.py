"""The models that are measured: one of each model file of mlx-lm, small, with windows of a size that is used."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any, NamedTuple

import mlx.core as mx

from benchmarks.tiny_families import NOT_RUN, OWN, build, config_of, randomize


class Beside(NamedTuple):
    """What one quantity is on mlx-lm's own caches, and on the pool."""

    stock: float
    pool: float

    @property
    def ratio(self) -> float:
        """That on the pool, divided by that on mlx-lm's caches."""
        return self.pool / self.stock


FILES = tuple(sorted([*OWN, *NOT_RUN], key=str.lower))
"""All model files of mlx-lm 0.32.2."""

WINDOWS = ("sliding_window", "sliding_window_size", "attention_window_size", "loop_window_size", "attention_chunk_size")
"""Fields of a config with the tokens of a window or a chunk."""

USUAL = {"attention_chunk_size": 8192}
USUAL_WINDOW = 1024  # where neither a model file nor `USUAL` says one

MEDIUM = {  # numbers that replace those of a tiny config: 20 to 40 MB of weights in float32
    **{"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 8},
    **{"num_key_value_heads": 4, "head_dim": 64, "moe_intermediate_size": 256},
}
MEDIUM_OWN: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        **{"linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 64},
        "linear_value_head_dim": 64,
    },
    "nemotron_h": {
        **{"hybrid_override_pattern": list("M-M*-M"), "intermediate_size": 2048},
        **{"mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 64},
    },
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"] * 2, "block_dim": 256, "block_multiple_of": 256},
    "falcon_h1": {"mamba_d_ssm": 512, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64},
    "gemma3_text": {"query_pre_attn_scalar": 64, "sliding_window_pattern": 6},
    "gpt_oss": {"intermediate_size": 256, "layer_types": ["sliding_attention", "full_attention"] * 3},
}


def tiny(name: str, windows: bool = True) -> Any:
    """Return a tiny model of a file with random weights. `windows`: as large as they are used."""
    config = config_of(name)
    return _made(name, with_used_windows(name, config) if windows else config)


def medium(name: str) -> Any:
    """Return a model of some 30 MB, for the files of `MEDIUM_OWN`."""
    config = config_of(name, 4096)
    fields = config.get("text_config", config)
    fields.update(MEDIUM | MEDIUM_OWN[name])
    return _made(name, with_used_windows(name, config))


def _made(name: str, config: dict[str, Any]) -> Any:
    mx.random.seed(7)  # some model files draw weights that stay
    model = build(name, config)
    randomize(model)
    model.eval()
    mx.eval(model.parameters())
    return model


def with_used_windows(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return a config whose windows have the size that is the default of the model file, or a usual one."""
    changed: dict[str, Any] = {}
    for field, value in config.items():
        if isinstance(value, dict):
            changed[field] = with_used_windows(value.get("model_type", name), value)
        elif field in WINDOWS and isinstance(value, int):
            changed[field] = _default(name, field) or USUAL.get(field, USUAL_WINDOW)
        else:
            changed[field] = value
    return changed


def _default(name: str, field: str) -> int | None:
    """Return the default of a field in the arguments of a model file, None without one."""
    try:
        module = importlib.import_module(f"mlx_lm.models.{name}")
    except ImportError:
        return None
    own = [found for found in vars(module).values() if getattr(found, "__module__", None) == module.__name__]
    for arguments in filter(dataclasses.is_dataclass, own):
        for known in dataclasses.fields(arguments):
            if known.name == field and isinstance(known.default, int):
                return known.default
    return None
