"""Sizes: how many blocks fit a machine.

`blocks_for` divides memory by a `KVSpec` (kvpool.spec) and shows the calculation. `describe_plan` does this for the
config of a model (kvpool.model_config), as text and as data (the ``kvpool plan`` command).

All sizes are Python integers (no overflow) and carry their unit in the name: ``_nbytes``, ``num_tokens``,
``num_blocks``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

from kvpool.model_config import model_fields, shortened, sliding_window, spec_from_config
from kvpool.spec import DTYPES, LAYOUTS, KVSpec, PlaneLayout, checked_int

__all__ = [
    "DTYPES",
    "LAYOUTS",
    "KVSpec",
    "PlaneLayout",
    "PoolSize",
    "available_memory_nbytes",
    "blocks_for",
    "checked_int",
    "describe_plan",
    "format_nbytes",
    "parse_nbytes",
    "spec_from_config",
]

_MAX_INT64 = 2**63 - 1
_MAX_INT32 = 2**31 - 1


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
        With "auto", the bytes that activations and temporaries need in addition to the pool. Measure it with a
        prefill if you can. By default it is 10 % of the machine, on Metal at least 1 GiB.
    device_info : mapping, optional
        ``mlx.core.device_info()`` of a Metal device; it may carry ``active_nbytes`` too. Without
        ``max_recommended_working_set_size`` in it (MLX on a CPU) RAM counts.
    active_nbytes : int, optional
        With "auto", memory that weights and caches use on the device: the larger of MLX's active memory and the
        footprint of the process. For RAM, count only what is yet to be loaded: the rest is not available anyway.
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
    """RAM for this process: on Linux the available RAM within the limit of its cgroup, on macOS all RAM."""
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
    except OSError:  # another system, or no permission: the caller has a less exact source
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
        raise ValueError(f"[memory] {shortened(memory)} is too much, the limit is 2^63 - 1 bytes")
    return int(nbytes)


def format_nbytes(nbytes: int) -> str:
    """``1536`` as ``"1.50 KiB"``."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"


# ---------------------------------------------------------------------- what `kvpool plan` says

_KEPT = "window     layers with a sliding window of {} tokens keep every token here, as the others do"
_TYPICAL_LENGTHS = (512, 2048, 8192, 32768, 131072)


def describe_plan(
    config: Mapping[str, Any] | str | os.PathLike[str],
    memory: int | str,
    block_size: int = 16,
    dtype: str | None = None,
    max_len: int | None = None,
    *,
    k_bits: int | None = None,
    v_bits: int | None = None,
    quant_group_size: int = 64,
    **machine: Any,
) -> tuple[dict[str, Any], str]:
    """The size of a model's KV cache and how much of it fits, as data (a dict) and as text.

    Parameters
    ----------
    config, block_size, dtype, k_bits, v_bits, quant_group_size
        As in `spec_from_config`.
    memory : int, str
        As in `blocks_for`, which also takes the keywords in `machine`.
    max_len : int, optional
        Tokens that a static cache would reserve per sequence; the model's ``max_position_embeddings`` by
        default, else 4096.
    """
    fields = model_fields(config)
    spec = spec_from_config(
        fields, block_size=block_size, dtype=dtype, k_bits=k_bits, v_bits=v_bits, quant_group_size=quant_group_size
    )
    window = sliding_window(fields)
    size = blocks_for(memory, spec, **machine)
    if max_len is None:
        max_len = fields.get("max_position_embeddings") or 4096
    max_len = checked_int("plan", "max_len", max_len)
    usable = size.num_blocks - size.reserved_blocks
    static = size.pool_nbytes // (max_len * spec.token_nbytes)
    lengths = [n for n in _TYPICAL_LENGTHS if n < max_len] + [max_len]
    fits = {n: usable // -(-n // spec.block_size) for n in lengths}

    facts = _facts(spec, size) | {
        "sliding_window": window,
        "max_len": max_len,
        "num_static_sequences": static,
        "num_paged_sequences": {str(n): count for n, count in fits.items()},
    }
    lines = [
        f"model      {spec.num_layers} layers, {spec.num_kv_heads} KV heads, "
        f"head_dim {spec.head_dim} / {spec.value_head_dim}, {spec.storage}",
        f"KV bytes   {spec.token_nbytes} per token, {spec.block_nbytes} per block of {block_size} tokens",
        *([] if window is None else [_KEPT.format(window)]),
        size.how,
        f"Sequences that fit (paged: into the blocks that are not reserved; static: each reserves {max_len} tokens):",
        f"  {'tokens each':>12} {'paged':>10} {'static':>10}",
        *(f"  {n:>12} {count:>10} {static:>10}" for n, count in fits.items()),
    ]
    return facts, "\n".join(lines)


def _facts(spec: KVSpec, size: PoolSize) -> dict[str, Any]:
    """A spec and a size as JSON can hold them."""
    return {
        "num_layers": spec.num_layers,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "v_head_dim": spec.value_head_dim,
        "dtype": spec.dtype,
        "k_bits": spec.k_bits,
        "v_bits": spec.v_bits,
        "quant_group_size": spec.quant_group_size if spec.is_quantized else None,
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
    }
