"""What is to be served, and by whom: the command line's options, read and checked."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from kvpool.cli.console import CommandError, whole

RIVALS = ("stock",)
TICK_COST = (20.0, 0.5, 0.3)
"""Milliseconds that a step of the null model takes, for each row, and for each token of a prompt."""

POLICIES = ("last", "longest", "grower", "priority")


@dataclass(frozen=True)
class Settings:
    """What is to be served, and by whom.

    Attributes
    ----------
    model : str
        "null", "tiny", "medium", or what mlx-lm loads.
    requests, tokens_target : int or None
        At most one of them; with a trace, its first requests.
    rate : float
        Arrivals per second, infinite: all at once.
    prompt, output : str
        Lengths, see `benchmarks.serving.workload.Lengths`; `shared_prefix` tokens come before every prompt.
    num_blocks : int or None
        Usable blocks. None: those that `max_batch` sequences of the longest length would reserve, or a quarter of
        them with the null model.
    max_batch : int
        Sequences at a time. Slots of the null model: as many as fit the pool.
    chunk : int
        Tokens of prompts that a step computes at most, all prompts together, whoever serves.
    """

    model: str = "tiny"
    requests: int | None = None
    tokens_target: int | None = None
    rate: float = math.inf
    prompt: str = "lognormal:48:0.7:256"
    output: str = "lognormal:32:0.7:128"
    shared_prefix: int = 0
    samples: int = 1
    seed: int = 1
    trace: Path | None = None
    trace_scale: int = 1
    num_blocks: int | None = None
    block_size: int = 16
    max_batch: int = 16
    chunk: int = 128
    preempt: str = "last"
    against: tuple[str, ...] = RIVALS
    repetitions: int = 3

    @property
    def is_null(self) -> bool:
        """Whether nothing is computed, and time is simulated."""
        return self.model == "null"


NUMBERS: dict[str, tuple[str, str | None, str]] = {
    "requests": ("N", None, "how many (default: 64, or those of the trace)"),
    "tokens-target": ("N", None, "as many requests as it takes to generate so many tokens"),
    "shared-prefix": ("TOKENS", "0", "that every prompt begins with"),
    "samples": ("N", "1", "answers per prompt, by fork"),
    "trace-scale": ("N", "1", "divide the lengths of a trace"),
    "num-blocks": ("N", None, "of the pool (default: room for --max-batch of the longest; null: a quarter)"),
    "block-size": ("TOKENS", "16", "tokens per block"),
    "max-batch": ("N", "16", "most sequences at a time"),
    "chunk": ("TOKENS", "128", "of prompts in one step, all together"),
    "repetitions": ("N", "3", "runs of everybody, in turns; the median counts"),
    "seed": ("S", "1", "of arrivals, lengths and tokens"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options. Values are read by `settings`, which says in one line what is wrong with one."""
    parser.add_argument(
        "--model",
        metavar="NAME",
        default="tiny",
        help="null: nothing is computed, time is simulated; tiny, medium, big: random Llamas; or a checkpoint: "
        "a folder, or an id that mlx-lm downloads (default: %(default)s)",
    )
    texts = {
        "rate": ("R", "inf", "Poisson arrivals per second; inf: all at once"),
        "prompt": ("LENGTHS", Settings.prompt, "N, uniform:FIRST:LAST or lognormal:MEDIAN:SIGMA[:MAX]"),
        "output": ("LENGTHS", Settings.output, "of the answers"),
        "preempt": ("POLICY", "last", "who gives way when blocks run out: " + ", ".join(POLICIES)),
        "against": ("NAME", "stock", "mlx-lm's BatchGenerator, with null: slots; or none"),
    }
    for name, (metavar, default, text) in (NUMBERS | texts).items():
        told = text if default is None else f"{text} (default: %(default)s)"
        parser.add_argument(f"--{name}", metavar=metavar, default=default, help=told)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="serve a trace, in the formats of benchmarks.replay")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the run of kvpool over time")
    parser.add_argument(
        "--gates", action="store_true", help="measure what has to hold instead; exit status 1 if something does not"
    )


def settings(args: argparse.Namespace) -> Settings:
    """Return what the arguments ask for."""
    numbers = {name: number(args, name) for name in NUMBERS}
    if numbers["requests"] is not None and numbers["tokens-target"] is not None:
        raise CommandError("--requests and --tokens-target exclude each other")
    if args.trace is not None and numbers["tokens-target"] is not None:
        raise CommandError("--trace and --tokens-target exclude each other")
    for name in ("prompt", "output"):
        lengths(name, getattr(args, name))
    return Settings(
        model=args.model,
        rate=rate(args.rate),
        prompt=args.prompt,
        output=args.output,
        trace=args.trace,
        preempt=known("--preempt", args.preempt, POLICIES),
        against=() if args.against == "none" else (known("--against", args.against, RIVALS),),
        **{name.replace("-", "_"): value for name, value in numbers.items()},  # type: ignore[arg-type]
    )


def number(args: argparse.Namespace, name: str) -> int | None:
    """Return a whole number, None if it was not given and has no default."""
    text = getattr(args, name.replace("-", "_"))
    least = 0 if name in ("seed", "shared-prefix") else 1
    return None if text is None else whole(f"--{name}", text, least)


def rate(text: str) -> float:
    """Return a number above 0, which may be infinite."""
    try:
        value = float(text)
    except ValueError:
        raise CommandError(f"--rate {text}: not a number") from None
    if not value > 0:
        raise CommandError(f"--rate {text}: has to be more than 0")
    return value


def known(option: str, text: str, names: tuple[str, ...]) -> str:
    """Return a name that has to be known."""
    if text not in names:
        raise CommandError(f"{option} {text}: there are {', '.join(names)}")
    return text


def lengths(option: str, text: str) -> None:
    """Refuse what is not a distribution of lengths."""
    from benchmarks.serving.workload import Lengths

    try:
        Lengths.parse(text)
    except ValueError as exc:
        raise CommandError(f"--{option} {exc}") from None
