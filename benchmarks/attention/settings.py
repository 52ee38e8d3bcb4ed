"""What is to be measured: the command line's options, read and checked."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from kvpool.cli.bench.options import DTYPES, LIST, MEMORY, NUMBER, declare, memory_nbytes, numbers, some
from kvpool.cli.console import CommandError, whole

PARTS = ("decode", "prefill", "write", "copy", "scores")
LAYOUTS = ("NHD", "HND")
KV_BITS = ("8", "4", "8/8", "4/4", "8/4", "4/8", "fp8")
OPTIONS = (
    ("part", LIST, ",".join(PARTS), "what to measure"),
    ("dtype", LIST, ",".join(DTYPES), "element types of the cache"),
    ("block-size", LIST, "8,16,32", "tokens per block"),
    ("batch", LIST, "1,8,16,32,64", "sequences per call"),
    ("context", LIST, "1k,4k,16k", "tokens of each sequence"),
    ("against", "NAME", "torch", "dense attention to compare with, where it is installed; or none"),
    ("threads", LIST, "auto", "numbers of threads; auto: 1 and all of them"),
    ("heads", "HQ/HK", "32/8", "query heads / KV heads"),
    ("head-dim", "D", "128", "elements per head"),
    ("layout", "NAME", "auto", "NHD or HND; auto: that of the instruction set"),
    ("repetitions", NUMBER, "15", "rounds that have to count"),
    ("max-memory", "SIZE", "auto", MEMORY),
    ("kv-bits", LIST, "none", "decode from quantized K and V too, beside bfloat16: 8, 4, 8/4 (keys / values), fp8"),
    ("seed", "S", "1", "of tables and contents"),
)


@dataclass(frozen=True)
class Settings:
    """What is to be measured. Contexts are in tokens, `memory_nbytes` in bytes.

    `threads` are numbers of threads; `against` is "torch" or "none".
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
    against: str = "torch"
    kv_bits: tuple[str, ...] = ()
    repetitions: int = 15
    memory_nbytes: int = 2**33
    seed: int = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options. Values are read by `settings`, which says in one line what is wrong with one."""
    declare(parser, OPTIONS)
    parser.add_argument("--gates", action="store_true", help="exit status 1 if a gate is missed or not decided")


def settings(args: argparse.Namespace, num_threads: int, layout: str) -> Settings:
    """Return what the arguments ask for; threads and layout are those that the kernels use by themselves."""
    num_q_heads, num_kv_heads = heads(args.heads)
    return Settings(
        parts=some("--part", args.part, PARTS),
        dtypes=some("--dtype", args.dtype, DTYPES),
        block_sizes=numbers("--block-size", args.block_size),
        batches=numbers("--batch", args.batch),
        contexts=numbers("--context", args.context),
        threads=tuple(sorted({1, num_threads})) if args.threads == "auto" else numbers("--threads", args.threads),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=whole("--head-dim", args.head_dim),
        layout=some("--layout", layout if args.layout == "auto" else args.layout, LAYOUTS)[0],
        against=some("--against", args.against, ("torch", "none"))[0],
        kv_bits=() if args.kv_bits == "none" else some("--kv-bits", args.kv_bits, KV_BITS),
        repetitions=whole("--repetitions", args.repetitions),
        memory_nbytes=memory_nbytes(args.max_memory),
        seed=whole("--seed", args.seed, least=0),
    )


def heads(text: str) -> tuple[int, int]:
    """Return ``"32/8"`` as (32, 8)."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found:
        raise CommandError(f"--heads {text}: write query heads / KV heads, such as 32/8")
    num_q_heads, num_kv_heads = (whole("--heads", count) for count in found.groups())
    if num_q_heads % num_kv_heads:
        raise CommandError(f"--heads {text}: {num_q_heads} is not a multiple of {num_kv_heads}")
    return num_q_heads, num_kv_heads
