"""Options that several commands share: the model, its cache, drafts, a store of prefixes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvpool.cli.console import CommandError, nbytes, real, whole

if TYPE_CHECKING:
    from kvpool.eviction import Policy, SlidingWindow
    from kvpool.scheduler.drafts import Propose
    from kvpool.store import BlockStore, Layout


TINY = "tiny"
MOST_RUNNING = 2**18  # a pool has 2^20 sequences, and an engine takes two and some more for each that runs
MOST_CHUNK = 2**30 - 1  # a step has two


def add_model_arguments(parser: argparse.ArgumentParser, metavar: str, help: str) -> None:
    """Declare --model; `help` says what --model takes besides ``tiny``."""
    help = f"{help}, or {TINY}: a small random model that needs no download"
    parser.add_argument("--model", required=True, metavar=metavar, help=help)


POLICIES = {"h2o": "H2O", "window": "SlidingWindow", "blocks": "BlockEviction"}
#: option, metavar, field of the policy, its least value, policies with this field, help
FIELDS: tuple[tuple[str, str, str, int | None, tuple[str, ...], str], ...] = (
    ("--max-kv", "TOKENS", "max_kv", 1, tuple(POLICIES), "the budget: tokens that a sequence keeps at most"),
    ("--sink", "TOKENS", "sink", 0, tuple(POLICIES), "leading tokens that always stay (default: 4)"),
    ("--slack", "TOKENS", "slack", 1, ("h2o",), "tokens evicted at a time (default: max-kv / 8, at most 16)"),
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
    text = "cache size: 2GiB, bytes or auto (serve: also MIN:MAX); not with --num-blocks"
    parser.add_argument("--memory", metavar="SIZE", help=text)
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
        what = by_flags(exc).partition("\n")[0]  # without the calculation
        raise CommandError(f"--memory {args.memory}: {what or 'not enough memory'}") from None


def policy_of(args: argparse.Namespace, block_size: int) -> Policy | SlidingWindow | None:
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
        policy: Policy | SlidingWindow = getattr(eviction, POLICIES[name])(**values)
        if isinstance(policy, eviction.Policy):
            policy.check_block_size(block_size)
    except ValueError as exc:
        raise CommandError(f"--eviction {name}: {by_flags(exc)}") from None
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


def engine_options(args: argparse.Namespace, least_blocks: int) -> dict[str, Any]:
    """Return the options of `Engine` that commands share, checked as far as possible without a model."""
    block_size = whole("--kv-block-size", args.kv_block_size)
    running = whole("--max-running", args.max_running, most=MOST_RUNNING)
    chunk = whole("--chunk", args.chunk, most=MOST_CHUNK)
    return {
        "num_blocks": None if args.num_blocks is None else whole("--num-blocks", args.num_blocks, least_blocks),
        "block_size": block_size,
        "max_running": running,
        "prefill_chunk": chunk,
        "max_step_tokens": max(2 * chunk, running),
        "eviction": policy_of(args, block_size),
        **bits_of(args),
    }


def by_flags(error: Exception) -> str:
    """The text of an error of the library, with flags where it names arguments. Empty if it says nothing."""
    flags = {field: name for name, field, _ in BITS} | {field: name for name, _, field, *_ in FIELDS if field != "kind"}
    flags |= {name: f"--eviction {flag}" for flag, name in POLICIES.items()}
    flags |= {"dtype=": "--dtype=", "recent": "--recent", "speculate": "--speculate", "num_blocks": "--num-blocks"}
    return re.sub(r"\w+=?", lambda word: flags.get(word[0], word[0]), re.sub(r"^\[\w+\] ", "", str(error)))


def add_draft_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `num_drafts_of` and `load_draft_model`."""
    group = parser.add_argument_group("speculative decoding", "the answers are the same, in fewer passes of the model")
    text = "draft at most N tokens per step by prompt lookup (default: 0, none)"
    group.add_argument("--speculate", metavar="N", default="0", help=text)
    text = "a smaller model with the same vocabulary, which drafts instead; needs --speculate"
    group.add_argument("--draft-model", metavar="PATH_OR_ID", help=text)


def num_drafts_of(args: argparse.Namespace) -> int:
    """Return --speculate, checked as far as possible without a model."""
    num_drafts = whole("--speculate", args.speculate, 0)
    if args.draft_model is not None and not num_drafts:
        raise CommandError("--draft-model: needs --speculate")
    if num_drafts and args.eviction not in (None, "window"):
        raise CommandError(f"--speculate and --eviction {args.eviction} exclude each other")
    return num_drafts


def load_draft_model(args: argparse.Namespace, tokenizer: Any) -> Any:
    """Return the model of --draft-model, None without one."""
    if args.draft_model is None:
        return None
    from kvpool.adapters.mlx_lm import loading

    try:
        model, own = loading.load(args.draft_model)
    except loading.ModelNotLoaded as exc:
        raise CommandError(f"--draft-model {exc}") from None
    if own.get_vocab() != tokenizer.get_vocab():
        raise CommandError(f"--draft-model {args.draft_model}: its tokens are not those of --model {args.model}")
    return model


def proposer(num_drafts: int, draft_model: Any, num_tokens: int, max_running: int) -> Propose | None:
    """Return what drafts for an engine whose pool holds so many tokens."""
    from kvpool.adapters.mlx_lm.drafts import DraftModel, PromptLookup

    if draft_model is not None:
        return DraftModel(draft_model, 1 + num_tokens // 4, num_drafts=num_drafts, max_running=max_running)
    return PromptLookup(num_drafts) if num_drafts else None


OPTIONS = (
    ("--store", "DIR|URL", "keep prefixes in this directory, or on a server: redis://HOST:PORT, unix://PATH"),
    ("--store-max", "SIZE", "size of the directory, at most (default: 10GB)"),
    ("--store-memory", "SIZE", "memory in front of the store, which answers first (default: none)"),
)
READY_SECONDS = 5.0  # how long the index of a directory may take before the first request


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `store_of`."""
    group = parser.add_argument_group("prefixes that outlive the process", "more: docs/store.md")
    for name, metavar, text in OPTIONS:
        group.add_argument(name, metavar=metavar, help=text)


def store_of(args: argparse.Namespace) -> Callable[[Layout], BlockStore] | None:
    """The factory of `--store`, or None. Sizes are checked now, the place when the store is made.

    Raises
    ------
    CommandError
        Also of the returned callable.
    """
    most, memory = _size("--store-max", args.store_max), _size("--store-memory", args.store_memory)
    if args.store is None:
        for name, given in (("max", most), ("memory", memory)):
            if given is not None:
                raise CommandError(f"--store-{name}: only with --store")
        return None
    is_server = "://" in args.store
    if is_server and most is not None:
        raise CommandError(f"--store {place_of(args)}: the server has its own limit, drop --store-max")

    def make(layout: Layout) -> Any:
        from kvpool.store import DiskStore, MemoryStore, TieredStore

        try:
            if is_server:
                from kvpool.store.server import ServerStore

                found: BlockStore = ServerStore(args.store, layout)
            else:
                found = DiskStore(args.store, layout, most or 10 * 10**9)
                found.ready.wait(READY_SECONDS)
            return found if memory is None else TieredStore([MemoryStore(layout, memory), found])
        except (OSError, ValueError, ImportError) as exc:
            text = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc).rpartition("] ")[2]
            raise CommandError(f"--store {place_of(args)}: {text}") from None

    return make


def place_of(args: argparse.Namespace) -> str | None:
    """Return --store without a password."""
    from kvpool.store.server import without_password

    return without_password(args.store) if "://" in (args.store or "") else args.store


def _size(option: str, text: str | None) -> int | None:
    size = None if text is None else nbytes(option, text)
    if size == 0:
        raise CommandError(f"{option} {text}: must be more than 0")
    return size
