"""Options of commands for eviction and quantization of the cache."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from kvpool.cli.console import CommandError, nbytes, real, whole

if TYPE_CHECKING:
    from kvpool.eviction import Policy

POLICIES = {"h2o": "H2O", "window": "SlidingWindow", "blocks": "BlockEviction"}
#: option, metavar, field of the policy, its least value, policies with this field, help
FIELDS: tuple[tuple[str, str, str, int | None, tuple[str, ...], str], ...] = (
    ("--max-kv", "TOKENS", "max_kv", 1, tuple(POLICIES), "the budget: tokens that a sequence keeps at most"),
    ("--sink", "TOKENS", "sink", 0, tuple(POLICIES), "leading tokens that always stay (default: 4)"),
    ("--slack", "TOKENS", "slack", 1, ("h2o", "window"), "tokens evicted at a time (default: max-kv / 8, at most 16)"),
    ("--heavy", "TOKENS", "heavy", 1, ("h2o",), "tokens that stay for their scores (default: max-kv / 2)"),
    ("--recent", "TOKENS", "recent_tokens", 1, ("blocks",), "newest tokens that stay (default: max-kv / 4)"),
    ("--scores", "KIND", "kind", None, ("h2o", "blocks"), "mass or raw (default: mass)"),
    ("--alpha", "A", "alpha", None, ("h2o", "blocks"), "weight of the old average of scores (default: 0.95)"),
    ("--queries", "N", "queries", 1, ("h2o", "blocks"), "newest queries of a chunk that are observed (default: 32)"),
)
BITS = (
    ("--kv-bits", "kv_bits", "8 or 4: bits of stored keys and values, from the first token on"),
    ("--k-bits", "k_bits", "the same for keys alone"),
    ("--v-bits", "v_bits", "the same for values alone"),
    ("--kv-group-size", "quant_group_size", "elements that share a scale: 32, 64 or 128 (default: 64)"),
)


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `memory_of`, `policy_of` and `bits_of`."""
    parser.add_argument("--memory", metavar="SIZE", help="cache size: 2GiB, bytes or auto; not with --num-blocks")
    group = parser.add_argument_group("a fixed budget per sequence", "more: python -m pydoc kvpool.eviction")
    group.add_argument("--eviction", metavar="POLICY", help="which tokens are evicted: h2o, window or blocks")
    for name, metavar, field, _, policies, text in FIELDS:
        of = "" if len(policies) == len(POLICIES) else f"{' and '.join(policies)}: "
        group.add_argument(name, metavar=metavar, dest=f"eviction_{field}", help=of + text)
    add_bits_arguments(parser)


def add_bits_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bits_of`."""
    group = parser.add_argument_group("quantized storage", "stored as mx.quantize does it")
    for name, field, text in BITS:
        group.add_argument(name, metavar="N", dest=field, help=text)


def memory_of(args: argparse.Namespace) -> int | str | None:
    """Return --memory in bytes, or "auto"; None if it was not given."""
    if args.memory is not None and args.num_blocks is not None:
        raise CommandError("--memory and --num-blocks exclude each other")
    return args.memory if args.memory in (None, "auto") else nbytes("--memory", args.memory)


def blocks_in_memory(args: argparse.Namespace, model: Any, block_size: int, num_rows: int, draft: Any) -> int:
    """Return the blocks that fit into --memory, by default into the available memory, beside those of a draft model."""
    from kvpool.adapters.mlx_lm import loading

    memory = memory_of(args)
    try:
        return loading.blocks_in(memory or "auto", model, block_size, num_rows, beside=draft, **bits_of(args))
    except (ValueError, MemoryError) as exc:
        if memory is None:
            raise
        what = str(exc).rpartition("] ")[2].partition("\n")[0]  # without the calculation
        raise CommandError(f"--memory {args.memory}: {what or 'not enough memory'}") from None


def policy_of(args: argparse.Namespace, block_size: int) -> Policy | None:
    """The policy of the arguments, None without `--eviction`. Raises CommandError if they make no policy."""
    name = args.eviction
    given = {field: getattr(args, f"eviction_{field}") for _, _, field, _, _, _ in FIELDS}
    if name is not None and name not in POLICIES:
        raise CommandError(f"--eviction {name}: not one of {', '.join(POLICIES)}")
    values: dict[str, Any] = {}
    for option, _, field, least, policies, _ in FIELDS:
        text = given[field]
        if text is None:
            continue
        if name is None:
            raise CommandError(f"{option} {text}: only with --eviction")
        if name not in policies:
            raise CommandError(f"{option} {text}: not with --eviction {name}, only with {' and '.join(policies)}")
        if field == "alpha":
            values[field] = real(option, text, 0, 1)
        else:
            values[field] = text if least is None else whole(option, text, least)
    if name is None:
        return None
    if "max_kv" not in values:
        raise CommandError(f"--eviction {name}: needs --max-kv")
    from kvpool import eviction

    try:
        policy: Policy = getattr(eviction, POLICIES[name])(**values)
        policy.check_block_size(block_size)
    except ValueError as exc:
        raise CommandError(f"--eviction {name}: {str(exc).rpartition('] ')[2]}") from None
    return policy


def bits_of(args: argparse.Namespace) -> dict[str, Any]:
    """`kv_bits` and so on, as `install` and `Engine` take them. Only those that were given."""
    given = {field: (name, getattr(args, field)) for name, field, _ in BITS}
    bits: dict[str, Any] = {field: whole(name, text) for field, (name, text) in given.items() if text is not None}
    if "kv_bits" in bits and bits.keys() & {"k_bits", "v_bits"}:
        raise CommandError("--kv-bits is for both: not with --k-bits or --v-bits")
    for name, field, _ in BITS[:3]:
        if bits.get(field, 8) not in (4, 8):
            raise CommandError(f"{name} {bits[field]}: not 8 or 4")
    if "quant_group_size" in bits:
        if len(bits) == 1:
            raise CommandError("--kv-group-size: only with --kv-bits, --k-bits or --v-bits")
        if bits["quant_group_size"] not in (32, 64, 128):
            raise CommandError(f"--kv-group-size {bits['quant_group_size']}: not 32, 64 or 128")
    return bits
