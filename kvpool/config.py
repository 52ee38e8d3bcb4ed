"""Shapes and sizes: what the KV of one token is, where it lies in memory, and how many blocks fit a machine.

`KVSpec` describes the storage, `blocks_for` divides memory by it and tells how, `spec_from_config` reads a
Hugging Face style model config, and `describe_plan` puts the three together for people (the ``kvpool plan``
command).

All sizes are Python integers (no overflow) and carry their unit in the name: ``_nbytes``, ``num_tokens``,
``num_blocks``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}  # name: bytes per element
LAYOUTS = ("NHD", "HND", "interleaved", "stacked")

_MAX_INT64 = 2**63 - 1
_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PlaneLayout:
    """Where one plane (the keys, or the values) lies in its base array; offset and strides in elements.

    Element (layer, block, slot, head, d) of the plane is element ``offset + layer * layer_stride + block *
    block_stride + slot * slot_stride + head * head_stride + d`` of the base array (64-bit arithmetic). With
    `per_layer`, each layer has a base array of its own and ``layer_stride`` is 0.
    """

    array: str  # name of the base array; planes with the same name share it
    shape: tuple[int, ...]  # of the base array, C-contiguous
    per_layer: bool
    offset: int
    layer_stride: int
    block_stride: int
    slot_stride: int
    head_stride: int


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What a backend stores for one layer group of a model.

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim : int
        As in the model; `head_dim` is that of the keys.
    dtype : {"float32", "float16", "bfloat16"}
        Of the stored elements.
    block_size : int
        Tokens per block, any value >= 1.
    v_head_dim : int, optional
        Head dimension of the values, `head_dim` by default.
    layout : {"NHD", "HND", "interleaved", "stacked"}
        Order of the axes in memory, see Notes.

    Raises
    ------
    TypeError, ValueError
        ``[KVSpec] ...`` for a wrong type, a value < 1, an unknown name, or a block of 2^63 bytes and more.

    Notes
    -----
    Two planes per layer, k and v. The layouts differ in strides only (`plane_layout`); with S = block_size, H
    = num_kv_heads:

    - ``NHD``: per layer and plane ``[num_blocks, S, H, D]``. The default: a token is one contiguous store, a
      block one contiguous copy.
    - ``HND``: per layer and plane ``[num_blocks, H, S, D]``, head-major.
    - ``interleaved``: per layer ``[num_blocks, S, 2 * H, D]``, heads in the order k0, v0, k1, v1, ...
      (Levanter, ragged paged attention on TPU).
    - ``stacked``: per plane, all layers in one array ``[num_layers, H, num_blocks, S, D]`` (the MLX
      paged-attention plan).
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float16"
    block_size: int = 16
    v_head_dim: int | None = None
    layout: str = "NHD"

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "v_head_dim"):
            value = getattr(self, name)
            if value is None and name == "v_head_dim":
                continue
            object.__setattr__(self, name, checked_int("KVSpec", name, value))
        _one_of("KVSpec", "dtype", self.dtype, tuple(DTYPES))
        _one_of("KVSpec", "layout", self.layout, LAYOUTS)
        if self.layout == "interleaved" and self.value_head_dim != self.head_dim:
            raise ValueError(
                f"[KVSpec] layout 'interleaved' holds keys and values in one array and needs equal head dims "
                f"(head_dim {self.head_dim}, v_head_dim {self.value_head_dim})"
            )
        if self.block_nbytes > _MAX_INT64:
            raise ValueError(f"[KVSpec] one block has {self.block_nbytes} bytes, the limit is 2^63 - 1")

    @property
    def value_head_dim(self) -> int:
        """Head dimension of the values, never None."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def planes(self) -> tuple[tuple[str, int], ...]:
        """(name, head dimension) of the planes of a layer, in the order of `export_blocks`."""
        return (("k", self.head_dim), ("v", self.value_head_dim))

    @property
    def itemsize_nbytes(self) -> int:
        """Bytes of one stored element."""
        return DTYPES[self.dtype]

    @property
    def token_nbytes(self) -> int:
        """Bytes that one token takes in all layers, keys and values."""
        per_head = (self.head_dim + self.value_head_dim) * self.itemsize_nbytes
        return self.num_layers * self.num_kv_heads * per_head

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block in all layers, keys and values."""
        return self.block_size * self.token_nbytes

    def pool_nbytes(self, num_blocks: int) -> int:
        """Bytes of the whole storage."""
        return num_blocks * self.block_nbytes

    @property
    def array_block_nbytes(self) -> int:
        """Bytes of one block in the largest base array: devices limit the size of a single array."""
        arrays: dict[str, int] = {}
        for plane, dim in self.planes:
            layout = self.plane_layout(plane, 1)
            layers = 1 if layout.per_layer else self.num_layers
            nbytes = layers * self.block_size * self.num_kv_heads * dim * self.itemsize_nbytes
            arrays[layout.array] = arrays.get(layout.array, 0) + nbytes
        return max(arrays.values())

    def plane_layout(self, plane: str, num_blocks: int) -> PlaneLayout:
        """Base array and strides of plane ``"k"`` or ``"v"`` in a pool of `num_blocks` blocks."""
        _one_of("plane_layout", "plane", plane, ("k", "v"))
        layers, heads, slots = self.num_layers, self.num_kv_heads, self.block_size
        dim = dict(self.planes)[plane]
        if self.layout == "NHD":
            shape: tuple[int, ...] = (num_blocks, slots, heads, dim)
            strides = (0, slots * heads * dim, heads * dim, dim)
        elif self.layout == "HND":
            shape = (num_blocks, heads, slots, dim)
            strides = (0, heads * slots * dim, dim, slots * dim)
        elif self.layout == "interleaved":
            shape = (num_blocks, slots, 2 * heads, dim)
            strides = (0, slots * 2 * heads * dim, 2 * heads * dim, 2 * dim)
            return PlaneLayout("kv", shape, True, 0 if plane == "k" else dim, *strides)
        else:
            shape = (layers, heads, num_blocks, slots, dim)
            strides = (heads * num_blocks * slots * dim, slots * dim, dim, num_blocks * slots * dim)
        return PlaneLayout(plane, shape, self.layout != "stacked", 0, *strides)


# ---------------------------------------------------------------------- memory to blocks


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How many blocks fit, and why. ``print(size.how)`` explains it line by line."""

    spec: KVSpec
    num_blocks: int  # reserved ones included
    reserved_blocks: int
    budget_nbytes: int  # what the blocks may take
    source: str  # where the budget comes from
    limited_by: str  # what set num_blocks: the budget, the largest array, or the index width
    breakdown: tuple[tuple[str, int], ...]  # (what, bytes), the terms that sum up to the budget

    @property
    def pool_nbytes(self) -> int:
        """Bytes of the storage."""
        return self.spec.pool_nbytes(self.num_blocks)

    @property
    def num_tokens(self) -> int:
        """Tokens that fit, reserved blocks left out."""
        return max(0, self.num_blocks - self.reserved_blocks) * self.spec.block_size

    @property
    def how(self) -> str:
        """The calculation as text."""
        spec = self.spec
        terms = (*self.breakdown, ("= budget for blocks", self.budget_nbytes))
        lines = [
            f"KV pool sized from {self.source}:",
            *(f"  {what:<46} {'-' if n < 0 else ' '}{format_nbytes(abs(n)):>11}" for what, n in terms),
            f"  one block of {spec.block_size} tokens: {format_nbytes(spec.block_nbytes)}",
            f"  {self.num_blocks} blocks = {format_nbytes(self.pool_nbytes)} (limited by {self.limited_by})",
            f"  {self.reserved_blocks} reserved, room for {self.num_tokens} tokens",
        ]
        return "\n".join(lines)


def blocks_for(
    memory: int | str,
    spec: KVSpec,
    *,
    fraction: float | None = None,
    overhead_nbytes: int | None = None,
    device_info: Mapping[str, Any] | None = None,
    active_nbytes: int | None = None,
    reserved_blocks: int = 1,
) -> PoolSize:
    """Number of blocks that fit into `memory`.

    Parameters
    ----------
    memory : int, str
        Bytes for the storage; a size such as ``"16GiB"`` or ``"512MB"`` (KB, MB, GB, TB are powers of 1000,
        KiB, MiB, GiB, TiB of 1024); or ``"auto"``, which looks at the machine.
    spec : KVSpec
        What one block holds.
    fraction : float, optional
        With "auto", the share of the machine that this process may use: by default 0.8 of a Metal device's
        recommended working set, 0.5 of the available RAM.
    overhead_nbytes : int, optional
        With "auto", what activations and temporaries need beside the pool. Measure it with a prefill if you
        can; by default 10 % of the machine, on Metal at least 1 GiB.
    device_info : mapping, optional
        ``mlx.core.device_info()`` of a Metal device; it may carry ``active_nbytes`` too. Without
        ``max_recommended_working_set_size`` in it (MLX on a CPU) RAM counts.
    active_nbytes : int, optional
        With "auto", memory that weights and caches take of the device: the larger of MLX's active memory and
        the footprint of the process. Of RAM, count only what is yet to be loaded: the rest is not available.
    reserved_blocks : int
        Blocks that hold no sequence, as in `Pool`; they are part of `num_blocks`.

    Returns
    -------
    PoolSize

    Raises
    ------
    ValueError
        The budget holds no usable block (the message is the whole calculation), or `memory` is not a size.

    Notes
    -----
    A pool is also limited by ``max_buffer_length`` (no single array may be larger) and by int32 slots
    (``num_blocks * block_size <= 2^31 - 1``).
    """
    if not isinstance(spec, KVSpec):
        raise TypeError(f"[blocks_for] spec must be a KVSpec, got {type(spec).__name__}")
    reserved_blocks = checked_int("blocks_for", "reserved_blocks", reserved_blocks, least=0)
    terms: list[tuple[str, int]]
    if memory == "auto":
        source, terms = _machine_budget(fraction, overhead_nbytes, device_info or {}, active_nbytes)
    else:
        source, terms = "the given memory", [("memory for the KV pool", parse_nbytes(memory))]
    budget = sum(nbytes for _, nbytes in terms)

    num_blocks, limited_by = _most_blocks(budget, spec, device_info or {})
    size = PoolSize(spec, num_blocks, reserved_blocks, budget, source, limited_by, tuple(terms))
    if num_blocks <= reserved_blocks:
        raise ValueError(f"[blocks_for] no usable block: {num_blocks} fit, {reserved_blocks} are reserved\n{size.how}")
    return size


def _most_blocks(budget: int, spec: KVSpec, device_info: Mapping[str, Any]) -> tuple[int, str]:
    """Blocks within all limits, and the name of the limit that decides."""
    limits = [
        (max(0, budget) // spec.block_nbytes, "the budget"),
        (_MAX_INT32 // spec.block_size, "int32 slots"),
    ]
    largest_array = device_info.get("max_buffer_length")
    if largest_array:
        what = f"max_buffer_length {format_nbytes(largest_array)}"
        limits.append((largest_array // spec.array_block_nbytes, what))
    return min(limits, key=lambda limit: limit[0])


def _machine_budget(
    fraction: float | None,
    overhead_nbytes: int | None,
    device_info: Mapping[str, Any],
    active_nbytes: int | None,
) -> tuple[str, list[tuple[str, int]]]:
    working_set = device_info.get("max_recommended_working_set_size")
    if working_set:
        machine, what, share = int(working_set), "recommended working set", 0.8
        source = f"the Metal device {device_info.get('device_name', '')}".rstrip()
        overhead_default = max(2**30, machine // 10)
    else:
        machine, what, share = available_memory_nbytes(), "available RAM", 0.5
        source = "the machine's RAM"
        overhead_default = machine // 10
    if fraction is not None:
        share = fraction
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise ValueError(f"[blocks_for] fraction must be in (0, 1], got {share!r}")
    overhead = overhead_default if overhead_nbytes is None else overhead_nbytes
    overhead = checked_int("blocks_for", "overhead_nbytes", overhead, least=0)
    terms = [(f"{share:g} of {format_nbytes(machine)} {what}", int(share * machine))]
    active = device_info.get("active_nbytes", 0) if active_nbytes is None else active_nbytes
    active = checked_int("blocks_for", "active_nbytes", active, least=0)
    if active:
        terms.append(("already in use (weights and caches)", -active))
    terms.append(("overhead (activations, temporaries)", -overhead))
    return source, terms


def available_memory_nbytes() -> int:
    """RAM for this process: on Linux what is available and within its cgroup's limit, on macOS all of it."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _read_text("/proc/meminfo"), re.MULTILINE)
    if found:
        available = int(found.group(1)) * 1024
    limit, used = _read_text("/sys/fs/cgroup/memory.max"), _read_text("/sys/fs/cgroup/memory.current")
    if limit.strip().isdigit() and used.strip().isdigit():
        available = min(available, max(0, int(limit) - int(used)))
    return available


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:  # another system, or no permission: the caller has a coarser source
        return ""


_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_nbytes(memory: int | str) -> int:
    """Bytes of ``17179869184``, ``"16GiB"``, ``"1.5 GB"`` or ``"512MB"``; at most 2^63 - 1."""
    if isinstance(memory, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Z]+)\s*", memory.upper())
        if not found or found.group(2) not in _UNITS:
            raise ValueError(
                f"[memory] {memory!r} is not a size; write bytes as an int, or '16GiB', '512MB', or 'auto'"
            )
        nbytes: float = float(found.group(1)) * _UNITS[found.group(2)]
    elif isinstance(memory, bool) or not hasattr(memory, "__index__"):
        raise TypeError(f"[memory] must be an int (bytes) or a str, got {type(memory).__name__}")
    else:
        nbytes = index(memory)
    if nbytes > _MAX_INT64:
        raise ValueError(f"[memory] {_shortened(memory)} is too much, the limit is 2^63 - 1 bytes")
    return int(nbytes)


def format_nbytes(nbytes: int) -> str:
    """``1536`` as ``"1.50 KiB"``."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"


# ---------------------------------------------------------------------- model configs


def spec_from_config(
    config: Mapping[str, Any] | str | os.PathLike[str],
    *,
    block_size: int = 16,
    dtype: str | None = None,
    layout: str = "NHD",
) -> KVSpec:
    """The KV spec of a model from its Hugging Face style config.

    Parameters
    ----------
    config : mapping, path
        The content of a ``config.json``, the file, or the folder that holds it. Of a multimodal config,
        ``text_config`` counts.
    dtype : str, optional
        Overrides the model's ``dtype`` / ``torch_dtype``.

    Raises
    ------
    ValueError
        A field is missing or wrong, or the model keeps something else than keys and values per token in every
        layer.
    """
    fields = _text_config(config)
    _refuse_other_caches(fields)
    # Multi-head models leave num_key_value_heads out, most models leave head_dim out.
    num_kv_heads = _field(fields, "num_key_value_heads", default="num_attention_heads")
    if fields.get("head_dim") is not None:
        head_dim = _field(fields, "head_dim")
    else:
        hidden_size, num_heads = _field(fields, "hidden_size"), _field(fields, "num_attention_heads")
        head_dim = hidden_size // num_heads
        if hidden_size % num_heads:
            raise ValueError(
                f"[config] there is no head_dim, and hidden_size {hidden_size} is no multiple of "
                f"num_attention_heads {num_heads}"
            )
    dtype = dtype or fields.get("dtype") or fields.get("torch_dtype")
    if dtype is None:
        raise ValueError("[config] neither dtype nor torch_dtype is given; pass dtype, such as 'float16'")
    return KVSpec(
        num_layers=_field(fields, "num_hidden_layers"),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=fields.get("v_head_dim"),
        dtype=str(dtype).removeprefix("torch."),
        block_size=block_size,
        layout=layout,
    )


def _refuse_other_caches(fields: Mapping[str, Any]) -> None:
    """Sizes for a model that does not keep keys and values per head in every layer would be wrong."""
    rank = fields.get("kv_lora_rank")
    if rank is not None:
        raise ValueError(f"[config] latent attention (kv_lora_rank {rank}) keeps no keys and values per head")
    per_token = {"full_attention", "sliding_attention", "chunked_attention"}
    layer_types = fields.get("layer_types") or []
    if not isinstance(layer_types, list | tuple) or not all(isinstance(name, str) for name in layer_types):
        raise ValueError(f"[config] layer_types must be a list of strings, got {_shortened(layer_types)}")
    others = sorted(set(layer_types) - per_token)
    if others:
        raise ValueError(
            f"[config] layers of type {others} keep no keys and values per token; "
            "describe the attention layers with KVSpec"
        )


def _text_config(config: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    if not isinstance(config, Mapping):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:  # no UTF-8, no JSON, or a number of thousands of digits
            raise ValueError(f"[config] {path} is not JSON: {error}") from error
        except RecursionError as error:
            raise ValueError(f"[config] {path} is nested too deeply for a model config") from error
        if not isinstance(config, Mapping):
            raise ValueError(f"[config] {path} holds {type(config).__name__}, not an object")
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) and "num_hidden_layers" not in config else config


def _shortened(value: Any) -> str:
    """`value` as in Python, cut to fit a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _field(fields: Mapping[str, Any], name: str, default: str | None = None) -> int:
    """Field `name`, or field `default` where `name` is absent or null; a positive int."""
    if fields.get(name) is None and default is not None:
        return _field(fields, default)
    if fields.get(name) is None:
        raise ValueError(f"[config] {name} is missing; the fields are {', '.join(sorted(fields)) or '(none)'}")
    return checked_int("config", name, fields[name])


# ---------------------------------------------------------------------- what `kvpool plan` says

_TYPICAL_LENGTHS = (512, 2048, 8192, 32768, 131072)


def describe_plan(
    config: Mapping[str, Any] | str | os.PathLike[str],
    memory: int | str,
    block_size: int = 16,
    dtype: str | None = None,
    max_len: int | None = None,
    **machine: Any,
) -> tuple[dict[str, Any], str]:
    """What a model's KV cache costs and how much of it fits, for machines (a dict) and for people (a text).

    Parameters
    ----------
    config, block_size, dtype
        As in `spec_from_config`.
    memory : int, str
        As in `blocks_for`, which also takes the keywords in `machine`.
    max_len : int, optional
        Tokens that a static cache would reserve per sequence; the model's ``max_position_embeddings`` by
        default, else 4096.
    """
    spec = spec_from_config(config, block_size=block_size, dtype=dtype)
    size = blocks_for(memory, spec, **machine)
    if max_len is None:
        max_len = _text_config(config).get("max_position_embeddings") or 4096
    max_len = checked_int("plan", "max_len", max_len)
    usable = size.num_blocks - size.reserved_blocks
    static = size.pool_nbytes // (max_len * spec.token_nbytes)
    lengths = [n for n in _TYPICAL_LENGTHS if n < max_len] + [max_len]
    fits = {n: usable // -(-n // spec.block_size) for n in lengths}

    facts: dict[str, Any] = {
        "num_layers": spec.num_layers,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "v_head_dim": spec.value_head_dim,
        "dtype": spec.dtype,
        "block_size": spec.block_size,
        "token_nbytes": spec.token_nbytes,
        "block_nbytes": spec.block_nbytes,
        "num_blocks": size.num_blocks,
        "reserved_blocks": size.reserved_blocks,
        "num_tokens": size.num_tokens,
        "pool_nbytes": size.pool_nbytes,
        "budget_nbytes": size.budget_nbytes,
        "source": size.source,
        "breakdown": [{"what": what, "nbytes": nbytes} for what, nbytes in size.breakdown],
        "limited_by": size.limited_by,
        "max_len": max_len,
        "num_static_sequences": static,
        "num_paged_sequences": {str(n): count for n, count in fits.items()},
    }
    lines = [
        f"model      {spec.num_layers} layers, {spec.num_kv_heads} KV heads, "
        f"head_dim {spec.head_dim} / {spec.value_head_dim}, {spec.dtype}",
        f"KV bytes   {spec.token_nbytes} per token, {spec.block_nbytes} per block of {block_size} tokens",
        size.how,
        f"Sequences that fit (static: each one reserves {max_len} tokens):",
        f"  {'tokens each':>12} {'paged':>10} {'static':>10}",
        *(f"  {n:>12} {count:>10} {static:>10}" for n, count in fits.items()),
    ]
    return facts, "\n".join(lines)


# ---------------------------------------------------------------------- checks


def checked_int(call: str, name: str, value: Any, least: int = 1) -> int:
    """`value` as an int, if it is one (a bool is none) and in the range ``least .. 2^63 - 1``."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"[{call}] {name} must be an int, got {type(value).__name__} ({value!r})")
    number = index(value)
    if not least <= number <= _MAX_INT64:
        raise ValueError(f"[{call}] {name} is {number}, the range is {least} .. 2^63 - 1")
    return number


def _one_of(call: str, name: str, value: Any, known: tuple[str, ...]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"[{call}] {name} must be a str, got {type(value).__name__} ({value!r})")
    if value not in known:
        raise ValueError(f"[{call}] {name} is {value!r}, known are {', '.join(known)}")
