"""How many blocks fit a machine. (How many bytes the layer groups of a model take: `kvpool.sizing`.)

`blocks_for` divides memory by a `KVSpec` (kvpool.spec) and shows the calculation. `describe_plan` says what the layers
of a model keep by its config (kvpool.sizing), and how much of it fits, as text and as data (``kvpool plan``).
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from operator import index
from pathlib import Path
from typing import Any

from kvpool.sizing import (
    ArenaSize,
    Held,
    LayerGroup,
    arena_sizes,
    arranged,
    layer_groups,
    model_fields,
    refusal_of,
    shortened,
    spec_from_config,
    spec_of_groups,
)
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
    "layer_groups",
    "memory_pressure",
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
        lines = [
            *_budget_lines(self.source, self.breakdown),
            f"  one block of {spec.block_size} tokens: {format_nbytes(spec.block_nbytes)}",
            f"  {self.num_blocks} blocks = {format_nbytes(self.pool_nbytes)} (limited by {self.limited_by})",
            f"  {self.reserved_blocks} reserved, room for {self.num_tokens} tokens",
        ]
        return "\n".join(lines)


def _budget_lines(source: str, terms: Sequence[tuple[str, int]]) -> list[str]:
    """The terms that sum up to the budget of a pool, and the budget, as text."""
    shown = (*terms, ("= budget for blocks", sum(nbytes for _, nbytes in terms)))
    lines = [f"  {what:<46} {'-' if n < 0 else ' '}{format_nbytes(abs(n)):>11}" for what, n in shown]
    return [f"KV pool sized from {source}:", *lines]


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
    source, terms = _budget(memory, fraction, overhead_nbytes, device_info, active_nbytes)
    budget = sum(nbytes for _, nbytes in terms)

    num_blocks, limited_by = _most_blocks(budget, spec, device_info or {})
    size = PoolSize(spec, num_blocks, reserved_blocks, budget, source, limited_by, tuple(terms))
    if num_blocks <= reserved_blocks:
        raise ValueError(f"[blocks_for] no usable block: {num_blocks} fit, {reserved_blocks} are reserved\n{size.how}")
    return size


def blocks_of_arenas(
    budget_nbytes: int, arenas: Sequence[ArenaSize], device_info: Mapping[str, Any] | None = None
) -> int:
    """Return the `num_blocks` of `install` whose arenas fit the budget: blocks of tokens in all layers, and 1.

    Below 2, the budget does not hold a block of tokens beside the block that each arena reserves. `device_info` is as
    for `blocks_for`.
    """
    reserved = sum(arena.block_nbytes for arena in arenas)
    nbytes = sum(arena.columns * arena.block_nbytes for arena in arenas)
    most = [1 + (budget_nbytes - reserved) // nbytes]
    for arena in arenas:
        found = [_most_blocks(budget_nbytes, spec, device_info or {})[0] for spec in arena.specs]
        most += [1 + (blocks - 1) // arena.columns for blocks in found]
    return min(most)


def memory_for(memory: int | str, **machine: Any) -> int:
    """Return the bytes that `memory` gives to a pool; what it may be, and `machine`: see `blocks_for`."""
    return sum(nbytes for _, nbytes in _budget(memory, **machine)[1])


def _budget(
    memory: int | str,
    fraction: float | None = None,
    overhead_nbytes: int | None = None,
    device_info: Mapping[str, Any] | None = None,
    active_nbytes: int | None = None,
) -> tuple[str, Sequence[tuple[str, int]]]:
    """Where the memory for a pool comes from, and the terms that sum up to it."""
    if memory == "auto":
        return _machine_budget(fraction, overhead_nbytes, device_info or {}, active_nbytes)
    return "the given memory", [("memory for the KV pool", parse_nbytes(memory))]


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


def memory_nbytes() -> int:
    """RAM of the machine, or what this process may have of it, see `_cgroups`."""
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *(limit for limit, _ in _cgroups())])


def available_memory_nbytes() -> int:
    """RAM for this process: on Linux the available RAM within the limits of `_cgroups`.

    Elsewhere what the package psutil says, without it all RAM.
    """
    available = memory_nbytes()
    found = re.search(r"^MemAvailable:\s+(\d+) kB", read_text("/proc/meminfo"), re.MULTILINE)
    if found:
        available = int(found.group(1)) * 1024
    elif find_spec("psutil") is not None:
        available = int(import_module("psutil").virtual_memory().available)
    return min([available, *(max(0, limit - used) for limit, used in _cgroups())])


def _cgroups() -> Iterator[tuple[int, int]]:
    """Yield limit and use of RAM of the cgroup of this process and of those above it, where Linux has a limit."""
    own = re.search(r"^0::(.+)$", read_text("/proc/self/cgroup"), re.MULTILINE)
    group = Path(f"/sys/fs/cgroup{own.group(1) if own else ''}")
    for place in (group, *group.parents):
        limit, used = (read_text(f"{place}/memory.{name}") for name in ("max", "current"))
        if limit.strip().isdigit() and used.strip().isdigit():
            pages = re.search(r"^inactive_file (\d+)", read_text(f"{place}/memory.stat"), re.MULTILINE)
            freed = int(pages.group(1)) if pages else 0  # cached files, such as the weights', which leave first
            yield int(limit), max(0, int(used) - freed)


def memory_pressure() -> int:
    """Return the pressure on the memory of the system as macOS counts it: 1 normal, 2 warning, 4 critical. Else 1."""
    level, size = ctypes.c_int(1), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    if sys.platform == "darwin":
        name = b"kern.memorystatus_vm_pressure_level"
        ctypes.CDLL(None).sysctlbyname(name, ctypes.byref(level), ctypes.byref(size), None, ctypes.c_size_t(0))
    return level.value


def read_text(path: str) -> str:
    """Return the content of a file of the system, empty where there is none."""
    try:
        return Path(path).read_text()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):  # it says nothing about the file
            raise
        return ""  # another system, or no permission: the caller has a less exact source


_UNITS = {"B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS |= {f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}


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

_TYPICAL_LENGTHS = (512, 2048, 8192, 32768, 131072)
LONGEST = ("max_position_embeddings", "model_max_length", "n_positions", "max_seq_len", "seq_length")
"""Fields of a config that say how many tokens the model supports."""
MAX_TOKENS = 2**17  # of a sequence, in models that hold a bounded number of blocks for any length
_ROWS = 32  # sequences that run at a time: kvpool serve's --max-running
_KEPT = {"full": "every token", "window": "last {}", "chunk": "chunk of {}", "state": "state"}


@dataclass(frozen=True, slots=True)
class _Plan:
    """The size of a pool for a model in so much memory."""

    groups: tuple[LayerGroup, ...]
    storage: dict[str, Any]  # of `KVSpec`
    max_len: int
    source: str  # of the memory
    terms: Sequence[tuple[str, int]]
    size: PoolSize | None  # of a pool that keeps every token; None: `refusal` says why there is none
    refusal: str
    held: tuple[tuple[LayerGroup, Held], ...]  # where the groups of keys and values have their blocks
    arenas: tuple[ArenaSize, ...]
    num_blocks: int  # as `install` takes it; below 2: the model keeps states only, or the memory is too small

    @property
    def budget_nbytes(self) -> int:
        return max(0, sum(nbytes for _, nbytes in self.terms))

    @property
    def lengths(self) -> list[int]:
        return [n for n in _TYPICAL_LENGTHS if n < self.max_len] + [self.max_len]

    @property
    def is_quantized(self) -> bool:
        return (self.storage["k_bits"], self.storage["v_bits"]) != (None, None)

    @property
    def is_one_table(self) -> bool:
        """Whether the pool of this model has one table: no layer could do with less."""
        return self.size is not None and all(group.kind == "full" for group in self.groups)

    def token_nbytes(self, group: LayerGroup) -> int:
        """Bytes of a token in a group, quantized if asked for; keys without values stay as they are."""
        if not self.is_quantized or 0 in (group.head_dim, group.v_head_dim):
            return group.token_nbytes
        return len(group.layers) * _layer_spec(group, self.storage).token_nbytes

    def arena_blocks(self) -> list[int]:
        """Blocks of each arena, the reserved one included; none if there is no pool."""
        return [1 + (self.num_blocks - 1) * arena.columns for arena in self.arenas] if self.num_blocks > 1 else []

    def longest(self) -> int:
        """Tokens of a sequence, at most, in the pool that `install` makes."""
        tokens = (self.num_blocks - 1) * self.storage["block_size"]
        return tokens if any(group.kind == "full" for group in self.groups) else max(tokens, MAX_TOKENS)

    def group_nbytes(self, group: LayerGroup, num_tokens: int) -> int:
        """Bytes of a sequence in a group, in whole blocks."""
        held = group.num_held_in_blocks(num_tokens, self.storage["block_size"])
        return held * self.token_nbytes(group) + group.state_nbytes

    def sequence_nbytes(self, num_tokens: int) -> dict[str, int | None]:
        """Bytes of one sequence: in one table of a pool, in layer groups."""
        blocks = -(-num_tokens // self.storage["block_size"])
        return {
            "kvpool": None if self.size is None else blocks * self.size.spec.block_nbytes,
            "layer_groups": sum(self.group_nbytes(group, num_tokens) for group in self.groups),
        }

    def num_sequences(self, num_tokens: int) -> dict[str, int | None]:
        """How many such sequences fit, in the same two."""
        needed, counts = self.sequence_nbytes(num_tokens), dict[str, int | None]()
        for where, nbytes in needed.items():
            counts[where] = None if nbytes is None else self.budget_nbytes // nbytes
        if self.size is not None:
            usable = self.size.num_blocks - self.size.reserved_blocks
            counts["kvpool"] = usable // -(-num_tokens // self.storage["block_size"])
        return counts


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
    """Return what the layers of a model keep and how much of it fits, as data (a dict) and as text.

    Parameters
    ----------
    config, block_size, dtype, k_bits, v_bits, quant_group_size
        As in `spec_from_config`.
    memory : int, str
        As in `blocks_for`, which also takes the keywords in `machine`.
    max_len : int, optional
        Tokens of the longest sequence that is counted; the model's limit by default, else 131,072.

    Notes
    -----
    Two ways to keep a sequence stand side by side: a pool with one table, which keeps every token of every layer; and
    what the layer groups alone need, in blocks. The pool is the one that `install`, ``kvpool generate`` and ``kvpool
    serve`` make: with layer groups if the layers differ. Shapes share an arena where their bytes agree. Twice the
    states of 32 sequences are subtracted, because a step holds those before and after it.
    """
    fields = model_fields(config)
    if max_len is None:
        max_len = next((fields[name] for name in LONGEST if fields.get(name)), MAX_TOKENS)
    storage = {"k_bits": k_bits, "v_bits": v_bits, "quant_group_size": quant_group_size}
    storage["block_size"] = checked_int("plan", "block_size", block_size)
    groups = layer_groups(config, dtype=dtype)
    refusal = refusal_of(groups)
    size = None if refusal else blocks_for(memory, spec_of_groups(groups, **storage), **machine)
    if size is None:
        machine.pop("reserved_blocks", None)
        source, terms = _budget(memory, **machine)
    else:
        source, terms = size.source, size.breakdown
    kept = [group for group in groups if group.kind != "state"]
    needs = [(_layer_spec(group, storage), len(group.layers)) for group in kept]
    held = arranged(needs, is_shared=True)
    arenas = arena_sizes(needs, held)
    num_blocks = 0
    if kept:
        budget = sum(nbytes for _, nbytes in (*terms, *_states_of(groups)))
        num_blocks = blocks_of_arenas(budget, arenas, machine.get("device_info"))
    max_len, places = checked_int("plan", "max_len", max_len), tuple(zip(kept, held, strict=True))
    plan = _Plan(groups, storage, max_len, source, terms, size, refusal, places, arenas, num_blocks)
    return _facts(plan), "\n".join(_lines(plan, str(fields.get("model_type"))))


def _states_of(groups: Sequence[LayerGroup]) -> list[tuple[str, int]]:
    nbytes = 2 * _ROWS * sum(group.state_nbytes for group in groups)
    return [(f"states of {_ROWS} sequences, before and after a step", -nbytes)] if nbytes else []


def _layer_spec(group: LayerGroup, storage: Mapping[str, Any]) -> KVSpec:
    if 0 in (group.head_dim, group.v_head_dim):  # keys without values are not quantized
        storage = {"block_size": storage["block_size"]}
    dims = group.num_kv_heads, max(group.head_dim, 1)
    return KVSpec(1, *dims, group.dtype, v_head_dim=max(group.v_head_dim, 1), latent=group.latent, **storage)


def _lines(plan: _Plan, model_type: str) -> list[str]:
    words = KVSpec(1, 1, 128, plan.groups[0].dtype, **plan.storage).storage
    longest = plan.max_len
    lines = [
        f"model      {model_type}, {words}",
        f"  {'keeps':<24} {'layers':>6} {'heads x dim':>14} {'bytes per token':>16} {f'{longest} tokens':>16}",
        *(_group_line(plan, group) for group in plan.groups),
    ]
    if checkpoint := sum(group.state_nbytes for group in plan.groups):
        lines.append(f"  a checkpoint of the state takes {format_nbytes(checkpoint)}, at any length")
    needed = {where: "-" if n is None else format_nbytes(n) for where, n in plan.sequence_nbytes(longest).items()}
    one_table = f"not possible, {plan.refusal}" if plan.refusal else "every token of every layer"
    lines += [
        f"One sequence of {longest} tokens takes",
        f"  {needed['kvpool']:>11}  in one table: {one_table}",
        f"  {needed['layer_groups']:>11}  in layer groups: what the layers need",
        *_pool_lines(plan),
    ]
    lines.append("Sequences that fit:")
    lines.append(f"  {'tokens each':>12} {'one table':>10} {'layer groups':>14}")
    for length in plan.lengths:
        shown = ["-" if count is None else str(count) for count in plan.num_sequences(length).values()]
        lines.append(f"  {length:>12} {shown[0]:>10} {shown[1]:>14}")
    return lines


def _pool_lines(plan: _Plan) -> list[str]:
    if plan.is_one_table:
        assert plan.size is not None
        return [plan.size.how]
    states = _states_of(plan.groups)
    lines = _budget_lines(plan.source, [*plan.terms, *states])
    if not plan.arenas:
        return [*lines, "  the model keeps states only: a block of its pool holds a checkpoint of one sequence"]
    block_size = plan.storage["block_size"]
    nbytes = format_nbytes(sum(arena.columns * arena.block_nbytes for arena in plan.arenas))
    lines.append(f"  one block of {block_size} tokens in all layers: {nbytes}")
    if plan.num_blocks < 2:
        return [*lines, "  no pool: the budget does not hold it beside a reserved block"]
    for number, (arena, blocks) in enumerate(zip(plan.arenas, plan.arena_blocks(), strict=True)):
        each, total = format_nbytes(arena.block_nbytes), format_nbytes(blocks * arena.block_nbytes)
        lines.append(f"  arena {number}: {arena.columns} x {each} for it; {blocks} blocks = {total}, 1 reserved")
    room = (plan.num_blocks - 1) * block_size
    lines.append(f"  room for {room} tokens, more where layers let go; one sequence has at most {plan.longest()}")
    running = f" --max-running {_ROWS}" if states else ""
    return [*lines, f"  for kvpool generate and serve: --num-blocks {plan.num_blocks}{running}"]


def _group_line(plan: _Plan, group: LayerGroup) -> str:
    heads = f"{group.num_kv_heads} x {group.head_dim}"
    if group.v_head_dim != group.head_dim:
        heads += f" + {group.v_head_dim}"
    per_token = str(plan.token_nbytes(group))
    if group.kind == "state":
        heads = per_token = "-"
    nbytes = format_nbytes(plan.group_nbytes(group, plan.max_len))
    return (
        f"  {_KEPT[group.kind].format(group.size):<24} {len(group.layers):>6} {heads:>14} {per_token:>16} {nbytes:>16}"
    )


def _group_facts(plan: _Plan, group: LayerGroup) -> dict[str, Any]:
    return asdict(group) | {
        "layers": list(group.layers),
        "arrays": [{"shape": list(array.shape), "dtype": array.dtype} for array in group.arrays],
        "token_nbytes": plan.token_nbytes(group),
        "state_nbytes": group.state_nbytes,
        "sequence_nbytes": plan.group_nbytes(group, plan.max_len),
    }


def _facts(plan: _Plan) -> dict[str, Any]:
    """A plan as JSON can hold it; what a pool has is null where none can hold the model."""
    spec = None if plan.size is None else plan.size.spec
    facts: dict[str, Any] = {
        "groups": [_group_facts(plan, group) for group in plan.groups],
        "refusal": plan.refusal or None,
        "max_len": plan.max_len,
        "sequence_nbytes": plan.sequence_nbytes(plan.max_len),
        "num_sequences": {str(length): plan.num_sequences(length) for length in plan.lengths},
        **{name: plan.storage[name] for name in ("block_size", "k_bits", "v_bits")},
        "quant_group_size": plan.storage["quant_group_size"] if plan.is_quantized else None,
        "source": plan.source,
        "breakdown": [{"what": what, "nbytes": nbytes} for what, nbytes in plan.terms],
        "budget_nbytes": plan.budget_nbytes,
    }
    for name in ("num_layers", "num_kv_heads", "head_dim", "dtype", "token_nbytes"):
        facts[name] = None if spec is None else getattr(spec, name)
    facts["v_head_dim"] = None if spec is None else spec.value_head_dim
    return facts | _pool_facts(plan)


def _pool_facts(plan: _Plan) -> dict[str, Any]:
    """The pool that `install` makes. A block is one of tokens in all layers; the arenas have several for it, or one."""
    names = ("num_blocks", "reserved_blocks", "num_tokens", "pool_nbytes", "limited_by", "block_nbytes")
    facts: dict[str, Any] = dict.fromkeys((*names, "longest"))
    if plan.is_one_table:
        assert plan.size is not None
        facts |= {name: getattr(plan.size, name) for name in names[:-1]} | {"longest": plan.size.num_tokens}
    elif plan.num_blocks >= 2:
        nbytes = sum(n * arena.block_nbytes for n, arena in zip(plan.arena_blocks(), plan.arenas, strict=True))
        tokens = (plan.num_blocks - 1) * plan.storage["block_size"]
        facts |= {"num_blocks": plan.num_blocks, "reserved_blocks": 1, "num_tokens": tokens, "pool_nbytes": nbytes}
        facts["longest"] = plan.longest()
    nbytes = sum(arena.columns * arena.block_nbytes for arena in plan.arenas)
    arenas = [
        {"num_blocks": blocks, "columns": arena.columns, "block_nbytes": arena.block_nbytes}
        for blocks, arena in zip(plan.arena_blocks(), plan.arenas, strict=False)
    ]
    return facts | {"block_nbytes": nbytes or None, "arenas": arenas}
