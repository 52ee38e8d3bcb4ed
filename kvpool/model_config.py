"""Reads the shape of a model's KV cache from its config.

`layer_groups` reads a Hugging Face style ``config.json``: what the layers of a model keep, in groups
(kvpool.sizing). A config names its layers by ``model_type`` and by fields that each type spells in its own way, so only
types whose layers are known (kvpool.sizing_families) are sized. Everything else is refused with the reason: a size that
is silently wrong costs more than none. `spec_from_config` is what a pool needs today, if it can hold the model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpool.sizing import LayerGroup, StateArray
from kvpool.sizing_families import FAMILIES, Family, Fields, Kept, shortened
from kvpool.spec import DTYPES, KVSpec

__all__ = ["layer_groups", "model_fields", "refusal_of", "shortened", "spec_from_config", "spec_of_groups"]

Config = Mapping[str, Any] | str | os.PathLike[str]

_INSTEAD = "describe what its layers keep with kvpool.KVSpec, and size it with kvpool.config.blocks_for"


def layer_groups(config: Config, *, dtype: str | None = None) -> tuple[LayerGroup, ...]:
    """What the layers of a model keep, in groups of layers that keep the same.

    Parameters
    ----------
    config : mapping, path
        The content of a ``config.json``, the file, the folder that holds it, or the name of a repository
        (``owner/name``) in the local cache of the Hugging Face Hub.
    dtype : str, optional
        Overrides the model's ``dtype`` / ``torch_dtype``.

    Returns
    -------
    tuple of LayerGroup
        In the order of their first layers.

    Raises
    ------
    ValueError, TypeError
        A field is missing or wrong, or the ``model_type`` is not known here. The message names the field.

    Notes
    -----
    The sizes are those of mlx-lm 0.32.2's caches, from the fields that its model files read and with their defaults.
    Arrays of a state that follow the weights' dtype are taken to have the model's.
    """
    whole = _whole(config)
    family, given = _family(whole)
    fields = Fields(given, family.defaults, family.spelled)
    dtype = _dtype(given, dtype)
    layers = family.read(fields)
    found: dict[Kept, tuple[list[int], list[int]]] = {}
    for number, kept in enumerate(layers):
        source = layers[kept] if isinstance(kept, int) else kept
        assert not isinstance(source, int)
        for cache in source:
            found.setdefault(cache, ([], []))[isinstance(kept, int)].append(number)
    if not found:
        raise ValueError("[config] no layer keeps anything")
    return tuple(_group(cache, own, readers, dtype) for cache, (own, readers) in found.items())


def _group(cache: Kept, layers: list[int], read_by: list[int], dtype: str) -> LayerGroup:
    return LayerGroup(
        kind=cache.kind,
        layers=tuple(layers),
        dtype=dtype,
        size=cache.size,
        num_kv_heads=cache.num_kv_heads,
        head_dim=cache.head_dim,
        v_head_dim=cache.v_head_dim,
        read_by=tuple(read_by),
        arrays=tuple(StateArray(shape, own or dtype) for shape, own in cache.arrays),
        latent=cache.latent,
    )


def spec_from_config(
    config: Config,
    *,
    block_size: int = 16,
    dtype: str | None = None,
    k_bits: int | None = None,
    v_bits: int | None = None,
    quant_group_size: int = 64,
    layout: str | None = None,
) -> KVSpec:
    """The KV spec of a model from its Hugging Face style config: every token in every layer.

    Parameters
    ----------
    config, dtype
        As in `layer_groups`.
    k_bits, v_bits, quant_group_size, layout
        As in `KVSpec`.

    Raises
    ------
    ValueError
        As in `layer_groups`, or the model keeps something else than the same keys and values in every layer.
    """
    storage = {"layout": layout, "k_bits": k_bits, "v_bits": v_bits, "quant_group_size": quant_group_size}
    return spec_of_groups(layer_groups(config, dtype=dtype), block_size=block_size, **storage)


def spec_of_groups(groups: tuple[LayerGroup, ...], **storage: Any) -> KVSpec:
    """As `spec_from_config`, for groups that are known; `storage` is for `KVSpec`."""
    why = refusal_of(groups)
    if why:
        raise ValueError(f"[config] {why}: one KVSpec holds the same keys and values in every layer; {_INSTEAD}")
    first, count = groups[0], sum(len(group.layers) for group in groups)
    v_head_dim = None if first.v_head_dim == first.head_dim else first.v_head_dim
    dims = first.num_kv_heads, first.head_dim
    return KVSpec(count, *dims, first.dtype, v_head_dim=v_head_dim, latent=first.latent, **storage)


def refusal_of(groups: tuple[LayerGroup, ...]) -> str:
    """Why one `KVSpec`, and so one table, cannot hold these groups; empty if it can."""
    for kind, what in (("state", "keep a recurrent state or that of a convolution"), ("chunk", "attend in chunks")):
        count = len({layer for group in groups if group.kind == kind for layer in group.layers})
        if count:
            return f"{count} layer{'s' * (count > 1)} {what}"
    layers = [layer for group in groups for layer in group.layers]
    if len(layers) > len(set(layers)):
        return "layers keep more than one cache each"
    if len({(group.num_kv_heads, group.head_dim, group.v_head_dim) for group in groups}) > 1:
        return "layers differ in their KV heads or head_dim"
    return ""


def model_fields(config: Config) -> dict[str, Any]:
    """The fields of the text model, of ``text_config`` where its type keeps them there, above mlx-lm's defaults."""
    family, given = _family(_whole(config))
    return {**family.defaults, **given}


def _whole(config: Config) -> Mapping[str, Any]:
    return config if isinstance(config, Mapping) else _read(Path(config))


def _family(whole: Mapping[str, Any]) -> tuple[Family, dict[str, Any]]:
    """How a config is read, and the fields that are read; a dtype may stand beside ``text_config``."""
    inner = whole.get("text_config")
    if whole.get("model_type") is None and isinstance(inner, Mapping):
        family, text = _known(inner), "inner"
    else:
        family = _known(whole)
        text = family.text
    if text != "inner" and not (text == "either" and isinstance(inner, Mapping)):
        return family, dict(whole)
    if not isinstance(inner, Mapping):
        raise ValueError(f"[config] text_config must be an object, got {shortened(inner)}")
    fields = {name: whole[name] for name in ("dtype", "torch_dtype") if whole.get(name) is not None}
    if inner.get("dtype") or inner.get("torch_dtype"):
        fields = {}
    return family, dict(inner) | fields


def _known(fields: Mapping[str, Any]) -> Family:
    """The family of the ``model_type``."""
    name = fields.get("model_type")
    if name is None:
        raise ValueError("[config] model_type is missing; it says what the layers of a model keep")
    key = str(name).lower()
    if key == "bailing_hybrid" and fields.get("architectures") == ["BailingMoeV3ForCausalLM"]:
        key = "bailing_moe_v3"
    family = FAMILIES.get(key) or FAMILIES.get(key.removesuffix("_text"))
    if family is None:
        raise ValueError(f"[config] model_type {shortened(name)} is not known; {_INSTEAD}")
    return family


def _dtype(fields: Mapping[str, Any], dtype: str | None) -> str:
    found = dtype or fields.get("dtype") or fields.get("torch_dtype")
    if found is None:
        raise ValueError("[config] neither dtype nor torch_dtype is in the config, give one, such as dtype='bfloat16'")
    name = str(found).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"[config] dtype is {shortened(name)}, known are {', '.join(DTYPES)}")
    return name


def _read(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        path = _in_hub_cache(path) or path
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


def _in_hub_cache(name: Path) -> Path | None:
    """The folder of ``owner/name`` in the local cache of the Hugging Face Hub; nothing is downloaded."""
    if len(name.parts) != 2 or name.is_absolute() or name.parts[0].startswith((".", "~")):
        return None
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    folder = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{'--'.join(name.parts)}"
    try:
        revision = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return folder / "snapshots" / revision
