"""What is to be measured: the command line's options, read and checked."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from kvpool.cli.bench.options import DTYPES, memory_nbytes, numbers, some
from kvpool.cli.console import CommandError, whole

PARTS = ("decode", "prefill", "write", "copy", "scores")
LAYOUTS = ("NHD", "HND")
RIVALS = ("numpy", "torch")
# Options that take a list: what they choose by themselves, and what they are.
LISTS = {
    "part": (",".join(PARTS), "what to measure"),
    "dtype": (",".join(DTYPES), "element types of the cache"),
    "block-size": ("8,16,32", "tokens per block"),
    "batch": ("1,8,16,32,64", "sequences per call"),
    "context": ("1k,4k,16k", "tokens of each sequence"),
    "against": (",".join(RIVALS), "dense attention to compare with, where it is installed; or none"),
}
QUICK = {"block-size": "16", "batch": "1,4", "context": "4k,16k"}


@dataclass(frozen=True)
class Settings:
    """What is to be measured. Contexts are in tokens, `memory_nbytes` in bytes.

    `threads` are numbers of threads; `rivals` are those frameworks that dense attention may be measured with,
    installed or not.
    """

    parts: tuple[str, ...] = PARTS
    dtypes: tuple[str, ...] = DTYPES
    block_sizes: tuple[int, ...] = (8, 16, 32)
    batches: tuple[int, ...] = (1, 8, 16, 32, 64)
    contexts: tuple[int, ...] = (1024, 4096, 16384)
    threads: tuple[int, ...] = (1, 2)
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    layout: str = "NHD"
    rivals: tuple[str, ...] = RIVALS
    kv_bits: tuple[str, ...] = ()
    repetitions: int = 15
    memory_nbytes: int = 2**33
    seed: int = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options. Lists are read by `settings`, which says in one line what is wrong with one."""
    for name, (default, text) in LISTS.items():
        parser.add_argument(f"--{name}", metavar="A,B,...", help=f"{text} (default: {default})")
    parser.add_argument("--threads", metavar="A,B,...", help="numbers of threads (default: 1 and all of them)")
    parser.add_argument(
        "--heads", metavar="HQ/HK", default="32/8", help="query heads / KV heads (default: %(default)s)"
    )
    parser.add_argument("--head-dim", metavar="D", default="128", help="elements per head (default: %(default)s)")
    parser.add_argument("--layout", metavar="NAME", help="NHD or HND (default: that of the instruction set)")
    parser.add_argument(
        "--repetitions", metavar="N", default="15", help="rounds that have to count (default: %(default)s)"
    )
    parser.add_argument(
        "--max-memory",
        metavar="SIZE",
        default="auto",
        help="leave out what needs more, such as 8GiB (default: half of what is available)",
    )
    parser.add_argument(
        "--kv-bits",
        metavar="A,B,...",
        help="decode from quantized K and V too, beside bfloat16: 8, 4, 8/4 (keys / values), fp8",
    )
    parser.add_argument("--seed", metavar="S", default="1", help="of tables and contents (default: %(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help="a minute or two: blocks of 16, batches 1 and 4, contexts 4k and 16k"
    )
    parser.add_argument("--gates", action="store_true", help="exit status 1 if a gate is missed or not decided")


def settings(args: argparse.Namespace, num_threads: int, layout: str) -> Settings:
    """Return what the arguments ask for; threads and layout are those that the kernels use by themselves."""
    num_q_heads, num_kv_heads = heads(args.heads)
    against = chosen(args, "against")
    return Settings(
        parts=some("--part", chosen(args, "part"), PARTS),
        dtypes=some("--dtype", chosen(args, "dtype"), DTYPES),
        block_sizes=numbers("--block-size", chosen(args, "block-size")),
        batches=numbers("--batch", chosen(args, "batch")),
        contexts=numbers("--context", chosen(args, "context")),
        threads=numbers("--threads", args.threads) if args.threads else tuple(sorted({1, num_threads})),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=whole("--head-dim", args.head_dim),
        layout=some("--layout", args.layout or layout, LAYOUTS)[0],
        rivals=() if against == "none" else some("--against", against, RIVALS),
        kv_bits=checked_kv_bits(args.kv_bits) if args.kv_bits else (),
        repetitions=whole("--repetitions", args.repetitions),
        memory_nbytes=memory_nbytes(args.max_memory),
        seed=whole("--seed", args.seed, least=0),
    )


def chosen(args: argparse.Namespace, name: str) -> str:
    """Return what an option that takes a list says, or what stands for it."""
    given: str | None = getattr(args, name.replace("-", "_"))
    default = LISTS[name][0]
    return given if given is not None else QUICK.get(name, default) if args.quick else default


def heads(text: str) -> tuple[int, int]:
    """Return ``"32/8"`` as (32, 8)."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found:
        raise CommandError(f"--heads {text}: write query heads / KV heads, such as 32/8")
    num_q_heads, num_kv_heads = (whole("--heads", count) for count in found.groups())
    if num_q_heads % num_kv_heads:
        raise CommandError(f"--heads {text}: {num_q_heads} is not a multiple of {num_kv_heads}")
    return num_q_heads, num_kv_heads


def checked_kv_bits(text: str) -> tuple[str, ...]:
    """Return the formats in ``"8,4,8/4,fp8"``."""
    names = tuple(dict.fromkeys(text.split(",")))
    known = ("8", "4", "8/8", "4/4", "8/4", "4/8", "fp8")
    for name in names:
        if name not in known:
            raise CommandError(f"--kv-bits {name}: there are {', '.join(known)}")
    return names
