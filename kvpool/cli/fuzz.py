"""Random programs on the block allocator, every read checked: this one, a broken one, or somebody else's.

``kvpool fuzz`` drives the compiled core and prints what it met; a finding is shrunk and printed as a test, with the
command that makes it again. ``--canary`` plants bugs, each of which has to be found. ``--target module:factory``
drives an allocator (``factory(num_blocks=..., block_size=...)``, see `kvpool.testing.fuzz_target.Allocator`) or a
backend (``factory(spec, num_blocks)``).
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import json
import multiprocessing
import os
import queue
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import kvpool
from kvpool.cli.console import CommandError, whole

SECONDS = 10.0
CANARY_CALLS = 2_000_000  # for one planted bug; the rarest takes 100,000 on average, most a hundredth of that
LARGE_CALLS_PER_RUN = 20_000_000
LARGE_CHECK_EVERY = 2_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--seconds", help=f"how long to run (default {SECONDS:g}); with --canary: for each bug")
    parser.add_argument("--ops", help="calls to make instead, in all processes together")
    parser.add_argument("--seed", help="seed of the first run; with --ops 1 --jobs 1 that run alone (default: random)")
    parser.add_argument("--jobs", help="processes (default: one per CPU; --target and --canary have one)")
    parser.add_argument("--blocks", help="blocks of every pool (default: 4 to 64)")
    parser.add_argument("--block-size", help="tokens per block (default: 1 to 16)")
    parser.add_argument(
        "--large",
        action="store_true",
        help=f"pools of a million blocks, checked every {LARGE_CHECK_EVERY:,} calls",
    )
    parser.add_argument("--target", metavar="MODULE:FACTORY", help="somebody else's allocator or backend")
    parser.add_argument("--canary", action="store_true", help="plant bugs; each must be found")


def run(args: argparse.Namespace) -> int:
    """Fuzz; 0 without a finding (with --canary: with all of them), 1 otherwise."""
    if args.large and (args.canary or args.target or args.blocks or args.block_size):
        raise CommandError("--large has pools of its own, it does not go with --canary, --target and sizes")
    if args.canary and args.target:
        raise CommandError("--canary plants bugs into this allocator, it does not go with --target")
    if (args.canary or args.target) and args.jobs not in (None, "1"):
        raise CommandError(f"--jobs {args.jobs}: --target and --canary run in one process")
    seed = random.SystemRandom().getrandbits(31) if args.seed is None else _seed(args.seed)
    sizes = {
        "num_blocks": None if args.blocks is None else whole("--blocks", args.blocks, 4),
        "block_size": None if args.block_size is None else whole("--block-size", args.block_size),
    }
    facts: dict[str, Any] = {"kvpool": kvpool.__version__, "seed": seed, **sizes}
    limit = _limits(args)
    if args.target:
        facts |= _fuzz_target(args, seed, sizes, limit)
    elif args.canary:
        facts |= _fuzz_canaries(args, seed, sizes, limit)
    else:
        facts |= _fuzz_core(args, seed, {"large": True} if args.large else sizes, limit)
    print(json.dumps(facts, indent=2) if args.json else describe(facts))
    return 0 if facts["finding"] is None else 1


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise CommandError(f"--seed {text}: not a whole number from 0 on")
    return int(text)


def _limits(args: argparse.Namespace) -> dict[str, Any]:
    """How long: seconds, calls, or both."""
    try:
        seconds = None if args.seconds is None else float(args.seconds)
    except ValueError:
        raise CommandError(f"--seconds {args.seconds}: not a number") from None
    if seconds is not None and not 0 < seconds < 1e9:
        raise CommandError(f"--seconds {args.seconds}: out of range, above 0")
    calls = None
    if args.ops is not None:
        try:
            calls = int(float(args.ops))
        except ValueError:
            raise CommandError(f"--ops {args.ops}: not a number") from None
        if calls < 1:
            raise CommandError(f"--ops {args.ops}: out of range, at least 1")
    if seconds is None and calls is None:
        seconds, calls = (None, CANARY_CALLS) if args.canary else (SECONDS, None)
    return {"seconds": seconds, "calls": calls}


# ---- the core ----------------------------------------------------------------------------------------------


def hunt_job(seed: int, job: int, fault: str | None, sizes: dict[str, Any], limit: dict[str, Any], told: Any) -> Any:
    """One process's share. `told` gets (calls, runs) now and then."""
    from kvpool.testing.fuzz import hunt
    from kvpool.testing.fuzz_shape import big_shape, draw_shape

    make_pool: Any = kvpool.Pool
    if fault is not None:
        from kvpool.testing._broken import broken

        make_pool = broken(fault)
    if sizes.get("large"):
        calls = min(limit["calls"] or LARGE_CALLS_PER_RUN, LARGE_CALLS_PER_RUN)
        some: dict[str, Any] = {"calls_per_run": calls, "check_every": LARGE_CHECK_EVERY}
        report = hunt(seed, job=job, make_pool=make_pool, make_shape=big_shape, told=told, **limit, **some)
        return report, make_pool
    shape = functools.partial(draw_shape, **sizes)
    report = hunt(seed, job=job, make_pool=make_pool, make_shape=shape, told=told, **limit)
    return report, make_pool


def _job(results: Any, progress: Any, job: int, options: dict[str, Any]) -> None:
    """Body of a process."""

    def told(report: Any) -> None:
        progress[2 * job], progress[2 * job + 1] = report.calls, report.seed or 0

    report, _ = hunt_job(job=job, told=told, **options)
    results.put((job, report))


def run_jobs(jobs: int, quiet: bool, options: dict[str, Any]) -> list[Any]:
    """Reports of all processes; the first finding ends them all."""
    if jobs == 1:
        told = None if quiet else Progress(options["limit"])
        return [hunt_job(job=0, told=told, **options)[0]]
    context = multiprocessing.get_context("spawn")
    results, progress = context.Queue(), context.RawArray("q", 2 * jobs)
    share = {**options, "limit": dict(options["limit"])}
    if share["limit"]["calls"] is not None:
        share["limit"]["calls"] = -(-share["limit"]["calls"] // jobs)
    processes = [context.Process(target=_job, args=(results, progress, job, share)) for job in range(jobs)]
    shown = None if quiet else Progress(options["limit"])
    for process in processes:
        process.start()
    reports: dict[int, Any] = {}
    try:
        while len(reports) < jobs:
            try:
                job, report = results.get(timeout=0.2)
                reports[job] = report
                if report.finding is not None:
                    break
            except queue.Empty:
                for job, process in enumerate(processes):
                    if job not in reports and process.exitcode not in (None, 0):
                        raise CommandError(
                            f"process {job} died ({process.exitcode}) after the run of seed {progress[2 * job + 1]}"
                        ) from None
            if shown is not None:
                shown.show(sum(progress[2 * job] for job in range(jobs)))
    finally:
        for process in processes:
            if process.exitcode is None and process.is_alive():
                process.terminate()
            process.join()
    return list(reports.values())


class Progress:
    """A line on stderr that says how far it is, where somebody watches."""

    def __init__(self, limit: dict[str, Any]) -> None:
        self.limit = limit
        self.began = self.last = time.monotonic()

    def __call__(self, report: Any) -> None:
        self.show(report.calls)

    def show(self, calls: int) -> None:
        """Twice a second at most."""
        now = time.monotonic()
        if not sys.stderr.isatty() or now - self.last < 0.5:
            return
        self.last = now
        end = f"{self.limit['seconds']:g} s" if self.limit["seconds"] else f"{self.limit['calls']:,} calls"
        spent = now - self.began
        print(f"\r{spent:6.0f} s of {end}: {calls:,} calls, {calls / spent:,.0f}/s ", end="", file=sys.stderr)


def _fuzz_core(args: argparse.Namespace, seed: int, sizes: dict[str, Any], limit: dict[str, Any]) -> dict[str, Any]:
    from kvpool.testing.fuzz_shape import OPERATIONS, STATES

    jobs = (os.cpu_count() or 1) if args.jobs is None else whole("--jobs", args.jobs)
    began = time.monotonic()
    options = {"seed": seed, "fault": None, "sizes": sizes, "limit": limit}
    reports = run_jobs(jobs, args.json, options)
    seconds = time.monotonic() - began
    calls = sum(report.calls for report in reports)
    facts: dict[str, Any] = {
        "jobs": jobs,
        "runs": sum(report.runs for report in reports),
        "calls": calls,
        "seconds": seconds,
        "calls_per_second": calls / seconds,
        "operations": {name: sum(report.by_operation[name] for report in reports) for name in OPERATIONS},
        "states": {name: sum(report.states[name] for report in reports) for name in STATES},
    }
    failed = next((report for report in reports if report.finding is not None), None)
    return facts | _conviction(failed, kvpool.Pool, "import kvpool\nkvpool.Pool", sizes)


def _conviction(report: Any, make_pool: Callable[..., Any], source: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """What a finding adds to the facts: the shortest script, and how to make it again."""
    if report is None:
        return {"finding": None, "script": "", "again": ""}
    from kvpool.testing.fuzz_shrink import shrink

    if not report.shape.full:  # too many calls to shrink
        again = f"kvpool fuzz --large --seed {report.seed} --ops {LARGE_CALLS_PER_RUN} --jobs 1"
        return {"finding": report.finding, "script": "", "again": again}
    failure = shrink(report.shape, report.words, make_pool, source)
    return {
        "finding": failure.what,
        "script": failure.script,
        "script_fails": failure.reproduces,
        "again": f"kvpool fuzz --seed {report.seed} --ops 1 --jobs 1{_given(sizes)}",
    }


def _given(sizes: dict[str, Any]) -> str:
    """The end of a command that makes a run again: the sizes asked for, and the version whose programs these are."""
    options = "".join(f" --{name.replace('num_', '').replace('_', '-')} {n}" for name, n in sizes.items() if n)
    return f"{options}  # kvpool {kvpool.__version__}"


# ---- planted bugs ------------------------------------------------------------------------------------------


def _fuzz_canaries(args: argparse.Namespace, seed: int, sizes: dict[str, Any], limit: dict[str, Any]) -> dict[str, Any]:
    """Every planted bug: how many calls it takes to find it."""
    from kvpool.testing._broken import FAULTS

    found = {}
    for name in FAULTS:
        began = time.monotonic()
        report, _ = hunt_job(seed, 0, name, sizes, limit, None)
        took = time.monotonic() - began
        found[name] = {"found": report.finding, "calls": report.calls, "seconds": took}
        if not args.json:
            print(f"{name:34} {report.calls:>9,} calls  {took:6.2f} s  {report.finding or 'NOT FOUND'}", flush=True)
    missed = [name for name, fact in found.items() if fact["found"] is None]
    again = f"kvpool fuzz --canary --seed {seed}"
    finding = f"planted bugs were not found: {', '.join(missed)}" if missed else None
    return {"canaries": found, "again": again, "finding": finding}


# ---- somebody else's ---------------------------------------------------------------------------------------


def load_target(text: str) -> Callable[..., Any]:
    """The factory that ``module:factory`` names; modules of the working directory count."""
    module, colon, name = text.partition(":")
    if not colon:
        raise CommandError(f"--target {text}: it has to be MODULE:FACTORY")
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise CommandError(f"--target {text}: {error}") from None
    finally:
        sys.path.remove(os.getcwd())
    return found  # type: ignore[return-value]


def _takes(factory: Callable[..., Any], *values: Any, **named: Any) -> bool | None:
    """Whether the factory takes these arguments, by its signature; None: that does not say it."""
    try:
        signature = inspect.signature(factory)
    except ValueError:  # compiled
        return None
    try:
        taken = signature.bind(*values, **named).arguments
    except TypeError:
        return False
    anything = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return None if any(signature.parameters[name].kind in anything for name in taken) else True


def _makes_allocators(target: str, factory: Callable[..., Any], sizes: dict[str, Any]) -> bool:
    """Whether the factory makes allocators, not backends: its signature says it, else what it makes.

    What the fuzzer needs and does not find is no finding but a wrong target: CommandError.
    """
    from kvpool.testing.filled import capabilities_of
    from kvpool.testing.fuzz_target import missing

    small = {"num_blocks": sizes["num_blocks"] or 8, "block_size": sizes["block_size"] or 2}
    as_allocator, as_backend = _takes(factory, **small), _takes(factory, None, 8)
    if as_allocator is False and as_backend is False:
        raise CommandError(f"--target {target}: it takes neither (num_blocks=, block_size=) nor (spec, num_blocks)")
    reasons = []
    if as_allocator is not False:
        try:
            lacks = missing(factory(**small))
        except Exception as error:
            if as_allocator or as_backend is False:
                return True  # that is a finding
            reasons.append(f"(num_blocks=, block_size=) raised {type(error).__name__}: {error}")
        else:
            if not lacks:
                return True
            reasons.append(f"what it makes is no allocator, it has no {', '.join(lacks)}")
    if as_backend and not as_allocator:
        return False
    if as_backend is None and not as_allocator:
        try:
            capabilities_of(factory)
            return False
        except Exception as error:
            reasons.append(f"(spec, num_blocks) made no backend: {type(error).__name__}: {error}")
    raise CommandError(f"--target {target}: {'; '.join(reasons)}")


def _fuzz_target(args: argparse.Namespace, seed: int, sizes: dict[str, Any], limit: dict[str, Any]) -> dict[str, Any]:
    factory = load_target(args.target)
    if not callable(factory):
        raise CommandError(f"--target {args.target}: {factory!r} cannot be called")
    module, _, name = args.target.partition(":")
    options: dict[str, Any] = {
        "source": f"from {module} import {name.partition('.')[0]}\n{name}",
        "told": None if args.json else Progress(limit),
        **sizes,
        **limit,
    }
    report: Any
    if _makes_allocators(args.target, factory, sizes):
        from kvpool.testing.fuzz_target import hunt_target

        report = hunt_target(factory, seed, **options)
        more = {"kind": report.kind}
    else:
        from kvpool.testing.fuzz_backend import hunt_backend

        try:
            report = hunt_backend(factory, seed, **options)
        except ValueError as error:
            raise CommandError(f"--target {args.target}: {error}") from None
        more = {"cases": report.cases}
    again = f"kvpool fuzz --target {args.target} --seed {report.seed} --ops 1{_given(sizes)}"
    return {
        "target": args.target,
        **more,
        "runs": report.runs,
        "calls": report.calls,
        "seconds": report.seconds,
        "finding": report.finding,
        "script": report.script,
        "script_fails": report.script_fails,
        "again": "" if report.finding is None else again,
    }


# ---- words -------------------------------------------------------------------------------------------------


def describe(facts: dict[str, Any]) -> str:
    """The table for a person."""
    if "canaries" in facts:
        n = len(facts["canaries"])
        if facts["finding"] is not None:
            return f"{facts['finding']}\nagain: {facts['again']}"
        return f"all {n} planted bugs were found (seed {facts['seed']})"
    lines = [f"{facts['calls']:,} calls in {facts['seconds']:.1f} s, seed {facts['seed']}"]
    if "operations" in facts:
        lines[0] += f", {facts['runs']:,} runs, {facts['jobs']} processes, {facts['calls_per_second']:,.0f} calls/s"
        for title, counts in (("calls", facts["operations"]), ("met", facts["states"])):
            cells = [f"{name:<22}{n:>13,}" for name, n in counts.items()]
            lines += [f"{title}:"] + ["  ".join(cells[at : at + 3]) for at in range(0, len(cells), 3)]
    if facts["finding"] is None:
        return "\n".join([*lines, "no finding"])
    again = [f"again: {facts['again']}"] if facts["again"] else []
    if facts["script"] and not facts.get("script_fails", True):
        if "target" in facts:
            again.append("the target fails only sometimes: the script below may pass")
        else:
            again.append("the script below is the shortest found, but passes on a pool of its own: trust the command")
    return "\n".join([*lines, f"FINDING: {facts['finding']}", *again, "", facts["script"]]).rstrip()
