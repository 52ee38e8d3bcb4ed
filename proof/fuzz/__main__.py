"""Random programs on the compiled core, as fast as it goes: every call judged by books of their own.

::

    python -m proof.fuzz --seconds 60             # make fuzz
    python -m proof.fuzz --large --ops 1e9        # pools of a million blocks
    python -m proof.fuzz --groups --seconds 60    # pools with layer groups
    python -m proof.fuzz --canary                 # plants bugs, each of which has to be found

A finding is shrunk and printed as a test, with the command that makes it again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import kvpool
from kvpool.cli.console import CommandError, whole
from kvpool.cli.fuzz import SECONDS, given, limits, seed_of
from proof.fuzz._broken import FAULTS
from proof.fuzz._broken_groups import GROUP_FAULTS
from proof.fuzz.jobs import LARGE_CALLS_PER_RUN, LARGE_CHECK_EVERY, hunt_job, run_jobs
from proof.fuzz.shape import GROUP_STATES, GROUP_WEIGHTS, OPERATIONS, STATES
from proof.fuzz.shrink import shrink

CANARY_CALLS = 2_000_000  # for one planted bug; the rarest takes 100,000 on average, most a hundredth of that


def arguments() -> argparse.ArgumentParser:
    """The options."""
    summary, _, rest = str(__doc__).partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m proof.fuzz",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", help=f"how long to run (default {SECONDS:g}); with --canary: for each bug")
    parser.add_argument("--ops", help="calls to make instead, in all processes together")
    parser.add_argument("--seed", help="seed of the first run; with --ops 1 --jobs 1 that run alone (default: random)")
    parser.add_argument("--jobs", help="processes (default: one per CPU; --canary has one)")
    parser.add_argument("--blocks", help="blocks of every pool (default: 4 to 64)")
    parser.add_argument("--block-size", help="tokens per block (default: 1 to 16)")
    parser.add_argument(
        "--large",
        action="store_true",
        help=f"pools of a million blocks, checked every {LARGE_CHECK_EVERY:,} calls",
    )
    parser.add_argument("--groups", action="store_true", help="pools with layer groups")
    parser.add_argument("--canary", action="store_true", help="plant bugs; each must be found")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    return parser


def run(args: argparse.Namespace) -> int:
    """Fuzz; 0 without a finding (with --canary: with all of them), 1 otherwise."""
    if args.large and (args.canary or args.groups or args.blocks or args.block_size):
        raise CommandError("--large has pools of its own, it does not go with --canary, --groups and sizes")
    if args.groups and (args.blocks or args.block_size):
        raise CommandError("--groups has pools of its own, it does not go with sizes")
    if args.canary and args.jobs not in (None, "1"):
        raise CommandError(f"--jobs {args.jobs}: --canary runs in one process")
    seed = random.SystemRandom().getrandbits(31) if args.seed is None else seed_of(args.seed)
    sizes: dict[str, Any] = {
        "num_blocks": None if args.blocks is None else whole("--blocks", args.blocks, 4),
        "block_size": None if args.block_size is None else whole("--block-size", args.block_size),
    }
    facts: dict[str, Any] = {"kvpool": kvpool.__version__, "seed": seed, **sizes}
    usual = {"seconds": None, "calls": CANARY_CALLS} if args.canary else {"seconds": SECONDS, "calls": None}
    limit = limits(args, usual)
    if args.large or args.groups:
        sizes = {"large": True} if args.large else {"groups": True}
    facts |= (_fuzz_canaries if args.canary else _fuzz_core)(args, seed, sizes, limit)
    print(json.dumps(facts, indent=2) if args.json else describe(facts))
    return 0 if facts["finding"] is None else 1


# ---- the core ----------------------------------------------------------------------------------------------


def _fuzz_core(args: argparse.Namespace, seed: int, sizes: dict[str, Any], limit: dict[str, Any]) -> dict[str, Any]:
    jobs = (os.cpu_count() or 1) if args.jobs is None else whole("--jobs", args.jobs)
    began = time.monotonic()
    options = {"seed": seed, "fault": None, "sizes": sizes, "limit": limit}
    reports = run_jobs(jobs, args.json, options)
    seconds = time.monotonic() - began
    calls = sum(report.calls for report in reports)
    operations, states = (GROUP_WEIGHTS, GROUP_STATES) if "groups" in sizes else (OPERATIONS, STATES)
    facts: dict[str, Any] = {
        "jobs": jobs,
        "runs": sum(report.runs for report in reports),
        "calls": calls,
        "seconds": seconds,
        "calls_per_second": calls / seconds,
        "operations": {name: sum(report.by_operation[name] for report in reports) for name in operations},
        "states": {name: sum(report.states[name] for report in reports) for name in states},
    }
    failed = next((report for report in reports if report.finding is not None), None)
    return facts | _conviction(failed, kvpool.Pool, "import kvpool\nkvpool.Pool", sizes)


def _conviction(report: Any, make_pool: Callable[..., Any], source: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """What a finding adds to the facts: the shortest script, and how to make it again."""
    if report is None:
        return {"finding": None, "script": "", "again": ""}
    if not report.shape.full:  # too many calls to shrink
        again = f"python -m proof.fuzz --large --seed {report.seed} --ops {LARGE_CALLS_PER_RUN} --jobs 1"
        return {"finding": report.finding, "script": "", "again": again}
    groups, sizes = (" --groups", {}) if "groups" in sizes else ("", sizes)
    failure = shrink(report.shape, report.words, make_pool, source)
    return {
        "finding": failure.what,
        "script": failure.script,
        "script_fails": failure.reproduces,
        "again": f"python -m proof.fuzz{groups} --seed {report.seed} --ops 1 --jobs 1{given(sizes)}",
    }


# ---- planted bugs ------------------------------------------------------------------------------------------


def _fuzz_canaries(args: argparse.Namespace, seed: int, sizes: dict[str, Any], limit: dict[str, Any]) -> dict[str, Any]:
    """Every planted bug: how many calls it takes to find it."""
    found = {}
    for name in GROUP_FAULTS if "groups" in sizes else FAULTS:
        began = time.monotonic()
        report, _ = hunt_job(seed, 0, name, sizes, limit, None)
        took = time.monotonic() - began
        found[name] = {"found": report.finding, "calls": report.calls, "seconds": took}
        if not args.json:
            print(f"{name:46} {report.calls:>9,} calls  {took:6.2f} s  {report.finding or 'NOT FOUND'}", flush=True)
    missed = [name for name, fact in found.items() if fact["found"] is None]
    again = f"python -m proof.fuzz --canary{' --groups' if 'groups' in sizes else ''} --seed {seed}"
    finding = f"planted bugs were not found: {', '.join(missed)}" if missed else None
    return {"canaries": found, "again": again, "finding": finding}


# ---- words -------------------------------------------------------------------------------------------------


def describe(facts: dict[str, Any]) -> str:
    """The table for a person."""
    if "canaries" in facts:
        n = len(facts["canaries"])
        if facts["finding"] is not None:
            return f"{facts['finding']}\nagain: {facts['again']}"
        return f"all {n} planted bugs were found (seed {facts['seed']})"
    lines = [
        f"{facts['calls']:,} calls in {facts['seconds']:.1f} s, seed {facts['seed']}, {facts['runs']:,} runs, "
        f"{facts['jobs']} processes, {facts['calls_per_second']:,.0f} calls/s"
    ]
    for title, counts in (("calls", facts["operations"]), ("met", facts["states"])):
        cells = [f"{name:<22}{n:>13,}" for name, n in counts.items()]
        lines += [f"{title}:"] + ["  ".join(cells[at : at + 3]) for at in range(0, len(cells), 3)]
    if facts["finding"] is None:
        return "\n".join([*lines, "no finding"])
    again = [f"again: {facts['again']}"]
    if facts["script"] and not facts["script_fails"]:
        again.append("the script below is the shortest found, but passes on a pool of its own: trust the command")
    return "\n".join([*lines, f"FINDING: {facts['finding']}", *again, "", facts["script"]]).rstrip()


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    try:
        return run(arguments().parse_args(argv))
    except CommandError as error:
        print(f"python -m proof.fuzz: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
