"""What the layers of a model keep, in groups, and how many bytes that is. (Blocks that fit a machine: `kvpool.config`.)

A group is all layers that keep the same: keys and values of every token (``full``), of the last tokens (``window``), of
the tokens since a multiple (``chunk``), or a state of one size whatever the length (``state``). `layer_groups` reads
them from the ``config.json`` (Hugging Face style) of a model. Where mlx-lm is installed it asks the model itself
(`adapters.mlx_lm.shapes`). Else, or if mlx-lm cannot build it from this config, it reads the types of `_TYPES`,
which keep keys and values of every token or of a window, or latents. Everything else is refused with the reason: a size
that is silently wrong costs more than none. `spec_from_config` is what a pool with one table needs. `arranged` says how
groups share arenas of blocks.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from kvpool.spec import DTYPES, KVSpec, checked_int

Config = Mapping[str, Any] | str | os.PathLike[str]

_log = logging.getLogger(__name__)
_MODELS = "kvpool.adapters.mlx_lm.shapes"  # by name, as backends are: it is a layer above, and needs mlx-lm
_INSTEAD = "describe what its layers keep with kvpool.KVSpec, and size it with kvpool.config.blocks_for"
_ITEMSIZES = DTYPES | {"int64": 8, "int32": 4, "uint32": 4, "int8": 1, "uint8": 1}


@dataclass(frozen=True, slots=True)
class StateArray:
    """One array of a state, of one sequence."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return prod(self.shape) * _ITEMSIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one model that keep the same."""

    kind: str  #: what they keep of a sequence: "full", "window", "chunk" or "state"
    layers: tuple[int, ...]  #: those that own the bytes, among those that keep anything; with two such caches twice
    dtype: str  #: of keys and values; the arrays of a state have their own
    size: int | None = None  #: tokens of a window or a chunk
    kept: int = 0  #: first tokens that a window keeps for ever; `size` counts them. No model of mlx-lm has any
    num_kv_heads: int = 0
    head_dim: int = 0  #: elements of a key, per head
    v_head_dim: int = 0  #: elements of a value
    arrays: tuple[StateArray, ...] = ()  #: what a layer of kind "state" keeps
    latent: bool = False  #: the keys are latents and the values their rotary parts, of one head

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token in all layers of the group; 0 for states."""
        elements = self.num_kv_heads * (self.head_dim + self.v_head_dim)
        return len(self.layers) * elements * _ITEMSIZES[self.dtype]

    @property
    def state_nbytes(self) -> int:
        """Bytes of a sequence that do not depend on its length: one checkpoint of the state takes as many."""
        return len(self.layers) * sum(array.nbytes for array in self.arrays)

    def num_held_in_blocks(self, num_tokens: int, block_size: int) -> int:
        """Slots of the blocks that hold those tokens, wherever in a block the first of them lies."""
        if self.size is None or num_tokens <= self.size:
            return -(-num_tokens // block_size) * block_size
        is_aligned = self.kind == "chunk" and self.size % block_size == 0
        most = self.size // block_size if is_aligned else (self.size + block_size - 2) // block_size + 1
        return min(most, -(-num_tokens // block_size)) * block_size


# ---- arenas ------------------------------------------------------------------------------------------------

IDLE = 0.05  # of the bytes of a block of tokens may belong to no layer
_ALIGNMENT = 16  # bytes: where the rows of an arena and the parts of a row begin

Parts = tuple[KVSpec, ...]


class Held(NamedTuple):
    """Where a group of layers has its blocks."""

    arena: int
    width: int  # layer arrays of a block
    columns: int  # blocks for each block of tokens


class ArenaSize(NamedTuple):
    """What the blocks of an arena take."""

    specs: tuple[KVSpec, ...]  # what a block holds, by group
    columns: int  # blocks for each block of tokens, in all groups of the arena
    block_nbytes: int


def arena_sizes(needs: Sequence[tuple[KVSpec, int]], held: Sequence[Held]) -> tuple[ArenaSize, ...]:
    """Return the arenas of groups that are held as `arranged` says."""
    sizes = []
    for number in range(len({each.arena for each in held})):
        own = [(spec, each) for (spec, _), each in zip(needs, held, strict=True) if each.arena == number]
        specs = tuple(replace(spec, num_layers=each.width) for spec, each in own)
        nbytes = block_nbytes_of({(spec,) for spec in specs})
        sizes.append(ArenaSize(specs, sum(each.columns for _, each in own), nbytes))
    return tuple(sizes)


def arranged(needs: Sequence[tuple[KVSpec, int]], is_shared: bool) -> list[Held]:
    """Return how groups of layers are held; `needs` has for each the spec of one layer, and how many layers it has.

    With `is_shared` several shapes share an arena where their bytes agree (their layout must then be "block"). Else
    each shape has an arena of its own.
    """
    shapes = list(dict.fromkeys(spec for spec, _ in needs))
    widths = None
    if is_shared and len(shapes) > 1 and all(map(_fits_a_block, shapes)):
        widths = arrays_of_one_size([(count, spec.block_nbytes) for spec, count in needs])
    if widths:
        return [Held(0, width, -(-count // width)) for width, (_, count) in zip(widths, needs, strict=True)]
    held = []
    for spec, count in needs:
        width = arrays_of_an_arena([other for its, other in needs if its == spec])
        held.append(Held(shapes.index(spec), width, -(-count // width)))
    return held


def _fits_a_block(spec: KVSpec) -> bool:
    try:
        replace(spec, layout="block")
    except ValueError:  # its planes cannot be aligned
        return False
    return True


def arrays_of_one_size(needs: Sequence[tuple[int, int]]) -> list[int] | None:
    """Return how many layer arrays a block has for each group, whose blocks have equal bytes.

    `needs` has for each group its layers, and the bytes of a block of one of them. The bytes of a block are the most
    for which at most 5 % of them idle in every group. None: there is no such number.
    """
    for nbytes in sorted({arrays * one for count, one in needs for arrays in range(1, count + 1)}, reverse=True):
        widths = [min(count, nbytes // one) for count, one in needs]
        if all(
            width and -(-count // width) * nbytes * (1 - IDLE) <= count * one
            for width, (count, one) in zip(widths, needs, strict=True)
        ):
            return widths
    return None


def arrays_of_an_arena(counts: Sequence[int]) -> int:
    """Return how many layer arrays an arena has whose groups have `counts` layers.

    The most for which at most 5 % of the arrays of every group belong to no layer: more arrays mean fewer blocks to
    count.
    """
    widths = arrays_of_one_size([(count, 1) for count in counts])
    assert widths is not None  # blocks of one array have none to idle
    return max(widths)


def block_nbytes_of(shapes: Collection[Parts]) -> int:
    """Return the bytes of a block of an arena, given what a column of each of its groups holds."""
    if len(shapes) == 1 and all(len(parts) == 1 for parts in shapes):
        return next(iter(shapes))[0].block_nbytes
    return max(sum(map(aligned_nbytes, parts)) for parts in shapes)


def aligned_nbytes(spec: KVSpec) -> int:
    """Return the bytes that a part takes of a row."""
    return -(-spec.block_nbytes // _ALIGNMENT) * _ALIGNMENT


# ---- configs -----------------------------------------------------------------------------------------------


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
        A field is missing or wrong, or the ``model_type`` is not known. The message names the field.

    Notes
    -----
    With mlx-lm, the sizes are those of its caches, with weights of the model's dtype. Nothing is loaded or computed.
    """
    whole = _whole(config)
    fields = _text_fields(whole)
    dtype = _dtype(fields, dtype)
    try:
        groups_of_model = import_module(_MODELS).groups_of_model
    except ImportError:
        return _read_groups(fields, dtype)
    try:
        found: tuple[LayerGroup, ...] = groups_of_model(whole if whole.get("model_type") else fields, dtype)
        return found
    except ValueError as error:
        if fields["model_type"] in _RULES:
            _log.info("the sizes are those of the config alone: %s", error)
            return _read_groups(fields, dtype)
        raise


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
    """The fields of the text model: those of ``text_config``, if there is one, above those of the whole."""
    return _text_fields(_whole(config))


def _whole(config: Config) -> Mapping[str, Any]:
    whole = config if isinstance(config, Mapping) else _read(Path(config))
    inner = whole.get("text_config") or {}
    if not isinstance(inner, Mapping):
        raise ValueError(f"[config] text_config must be an object, got {shortened(inner)}")
    name = whole.get("model_type") or inner.get("model_type")
    if not isinstance(name, str):
        raise ValueError(f"[config] model_type is missing or no string ({shortened(name)}): it says what layers keep")
    return whole


def _text_fields(whole: Mapping[str, Any]) -> dict[str, Any]:
    inner = whole.get("text_config") or {}
    fields = {**whole, **inner, "model_type": whole.get("model_type") or inner["model_type"]}
    if inner.get("dtype") or inner.get("torch_dtype"):
        fields |= {name: inner.get(name) for name in ("dtype", "torch_dtype")}
    return fields


def _dtype(fields: Mapping[str, Any], dtype: str | None) -> str:
    found = dtype or fields.get("dtype") or fields.get("torch_dtype")
    if found is None:
        raise ValueError("[config] neither dtype nor torch_dtype is in the config, give one, such as dtype='bfloat16'")
    name = str(found).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"[config] dtype is {shortened(name)}, known are {', '.join(DTYPES)}")
    return name


# ---- configs without the model -----------------------------------------------------------------------------

_SLIDING = "sliding_attention"
_ATTENTION = ("full_attention", _SLIDING, "attention", "chunked_attention")

_TYPES = {  # how the heads are read: the types
    "head_dim": "gemma gemma2 gemma3 gemma3_text glm4 glm4_moe gpt_oss qwen3 qwen3_moe seed_oss",
    "hidden_size": "apertus cohere dbrx deepseek granite granitemoe internlm2 internlm3 mixtral phi3 qwen2 qwen2_moe "
    "stablelm starcoder2",
    "either": "bitnet dots1 ernie4_5 ernie4_5_moe glm hunyuan_v1_dense llama minimax_m2 ministral3 mistral nemotron "
    "olmo2 olmo3 olmoe smollm3",
    "latent": "deepseek_v3 glm4_moe_lite joyai_llm_flash kimi_k2",
}
_RULES = {name: rule for rule, names in _TYPES.items() for name in names.split()}
_PERIODS = {"gemma3": 6, "gemma3_text": 6, "gpt_oss": 2, "llama": 1, "ministral3": 1, "mistral": 1, "olmo3": 4}
"""Types with windows in the layers that layer_types names; without it, in all but every so many."""

_MAX_LAYERS = 1 << 16  # each is listed

_DBRX = {"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}


def _read_groups(fields: Mapping[str, Any], dtype: str) -> tuple[LayerGroup, ...]:
    name = fields["model_type"]
    if name not in _RULES:
        raise ValueError(f"[config] model_type {shortened(name)} is not known without mlx-lm; {_INSTEAD}")
    if name == "dbrx":
        inner = fields.get("attn_config")
        if not isinstance(inner, Mapping):
            raise ValueError(f"[config] attn_config must be an object, got {shortened(inner)}")
        heads = _size(inner, "kv_n_heads")
        fields = {common: fields.get(own) for common, own in _DBRX.items()} | {"num_key_value_heads": heads}
    is_latent = _RULES[name] == "latent"
    if is_latent:
        shape = 1, _size(fields, "kv_lora_rank"), _size(fields, "qk_rope_head_dim")
    else:
        head_dim = _head_dim(fields, _RULES[name])
        shape = _size(fields, "num_key_value_heads", "num_attention_heads"), head_dim, head_dim
    is_sliding, groups = _sliding(name, fields), []
    for sliding in dict.fromkeys(is_sliding):
        layers = tuple(layer for layer, its in enumerate(is_sliding) if its == sliding)
        kind, size = ("window", _size(fields, "sliding_window")) if sliding else ("full", None)
        groups.append(LayerGroup(kind, layers, dtype, size, 0, *shape, latent=is_latent))
    return tuple(groups)


def _sliding(name: str, fields: Mapping[str, Any]) -> list[bool]:
    count, types = _size(fields, "num_hidden_layers"), fields.get("layer_types")
    if count > _MAX_LAYERS:
        raise ValueError(f"[config] num_hidden_layers is {count}, the limit is {_MAX_LAYERS}")
    if types:
        unknown = [kind for kind in types if kind not in _ATTENTION] if isinstance(types, list) else [types]
        if unknown:
            raise ValueError(f"[config] layer_types has {shortened(unknown[0])}, known are {', '.join(_ATTENTION)}")
        if len(types) < count:
            raise ValueError(f"[config] layer_types has {len(types)} items, the model {count} layers")
    if name not in _PERIODS:
        return [False] * count
    if types:
        return [kind == _SLIDING for kind in types[:count]]
    period = _size({"sliding_window_pattern": _PERIODS[name], **fields}, "sliding_window_pattern")
    return [(layer + 1) % period > 0 for layer in range(count)]


def _head_dim(fields: Mapping[str, Any], rule: str) -> int:
    if rule == "head_dim" or (rule == "either" and fields.get("head_dim") is not None):
        return _size(fields, "head_dim")
    whole, heads = _size(fields, "hidden_size"), _size(fields, "num_attention_heads")
    if whole % heads:
        raise ValueError(f"[config] hidden_size {whole} is no multiple of num_attention_heads {heads}")
    return whole // heads


def _size(fields: Mapping[str, Any], *names: str) -> int:
    """Return the first of the fields that is given, at least 1."""
    for name in names:
        if fields.get(name) is not None:
            return checked_int("config", name, fields[name])
    shown = ", ".join(sorted(map(str, fields))) or "(none)"
    raise ValueError(f"[config] {names[0]} is missing; the fields are {shown}")


def shortened(value: Any) -> str:
    """`value` as in Python, cut to fit a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# ---- files -------------------------------------------------------------------------------------------------


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
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    cache = os.path.expandvars(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or f"{home}/hub"))
    folder = Path(cache) / f"models--{'--'.join(name.parts)}"
    try:
        revision = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return folder / "snapshots" / revision
