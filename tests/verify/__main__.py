"""Random programs on the compiled core: the content of every slot is judged.

::

    python -m tests.verify --seconds 60
    python -m tests.verify --ops 1e8 --seed 7 --without rollback
    python -m tests.verify --model              # beside the plain model: ids, order, counts, refusals, too
    python -m tests.verify --canaries           # planted faults, each of which has to be found

A finding is shrunk and printed as a test, with the command that repeats it. So is the command of a run that ends the
process or does not end itself.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
from collections.abc import Callable
from ctypes import c_uint64
from typing import Any

import kvpool
from kvpool.cli.console import CommandError, whole
from kvpool.cli.fuzz import SECONDS, Progress, limits
from tests.verify import run
from tests.verify.twin import WORDS_PER_RUN as WORDS_BESIDE_MODEL
from tests.verify.twin import Twin
from tests.verify.words import ALWAYS, WORDS, shape_of

LONGEST_RUN = 60.0  # seconds; a run of the core takes milliseconds, beside the model or sanitized a few seconds


def arguments() -> argparse.ArgumentParser:
    """The options."""
    summary, _, rest = str(__doc__).partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m tests.verify",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", help=f"how long to run (default {SECONDS:g})")
    parser.add_argument("--ops", help="calls to make instead")
    parser.add_argument("--seed", help="of the first run; with --ops 1 that run alone (default: random)")
    parser.add_argument("--without", action="append", default=[], metavar="WORD", help="leave a word out of all runs")
    parser.add_argument("--model", action="store_true", help="make each call on the plain model, too, and compare all")
    parser.add_argument("--canaries", nargs="*", metavar="NAME", help="find planted faults, all or those named")
    return parser


def left_out(words: list[str]) -> tuple[str, ...]:
    """The words that were named, which may be left out."""
    for word in words:
        if word not in WORDS:
            raise CommandError(f"--without {word}: there is no such word, they are {', '.join(WORDS)}")
        if word in ALWAYS:
            raise CommandError(f"--without {word}: a program without it goes nowhere")
    return tuple(words)


def again(args: argparse.Namespace, seed: int) -> str:
    """The command that makes the run of this seed alone."""
    options = "".join(f" --without {word}" for word in args.without) + " --model" * args.model
    return f"again: python -m tests.verify --seed {seed} --ops 1{options}"


def watched(args: argparse.Namespace, work: Callable[[c_uint64], int]) -> int:
    """Do the work in a child, which notes the seed of each run: a run can crash, or hold the interpreter for ever."""
    fork, last, hangs = multiprocessing.get_context("fork"), 0, False
    running = fork.RawValue(c_uint64)  # 0: none
    child = fork.Process(target=lambda: sys.exit(work(running)))
    child.start()
    while child.exitcode is None:
        child.join(LONGEST_RUN)
        hangs = child.exitcode is None and running.value == last != 0
        if hangs:
            child.kill()
            child.join()
        last = running.value
    if last == 0:
        return child.exitcode
    why = "does not end" if hangs else f"ended the process ({child.exitcode})"
    print(f"FINDING: the run of seed {last} {why}\n{again(args, last)}", flush=True)
    return 1


def fuzz(args: argparse.Namespace) -> int:
    """Search; 0 without a finding."""
    without = left_out(args.without)
    seed = random.SystemRandom().getrandbits(31) if args.seed is None else whole("--seed", args.seed, 0, 2**63)
    make_pool, length = (Twin, WORDS_BESIDE_MODEL) if args.model else (kvpool.Pool, run.WORDS_PER_RUN)
    options = {"without": without, "words": length, "make_pool": make_pool, **limits(args)}
    print(f"seed {seed}", flush=True)
    return watched(args, lambda running: search(args, seed, running, options))


def search(args: argparse.Namespace, seed: int, running: c_uint64, options: dict[str, Any]) -> int:
    """Make the runs, and print what was found."""
    report = run.search(seed, **options, running=running, told=Progress(options))
    rate = report.calls / report.seconds
    print(f"{report.calls:,} calls in {report.runs:,} runs, {report.seconds:.1f} s, {rate:,.0f}/s")
    print("  words: " + ", ".join(f"{name} {n:,}" for name, n in report.words.items()))
    print("  met: " + ", ".join(f"{name} {n:,}" for name, n in report.met.items()))
    if report.finding is None or report.seed is None:
        print("no finding")
        return 0
    print(f"FINDING at word {report.place}: {report.finding}\n{again(args, report.seed)}", flush=True)
    shrunk = run.shrink(shape_of(report.seed, options["without"]), report.place, options["make_pool"])
    if shrunk is None:
        print("The run fails, but not by the methods of Python with a check after every word.")
        return 1
    print(run.as_test(report.seed, options["without"], shrunk, args.model))
    return 1


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    args = arguments().parse_args(argv)
    try:
        if args.canaries is not None:
            from tests.verify.canaries import show

            return show(args.canaries, args.model)
        return fuzz(args)
    except CommandError as error:
        print(f"python -m tests.verify: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
