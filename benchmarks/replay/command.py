"""Replay a serving trace through a pool: hit rate, evictions, preemptions, memory. Or the calls of a `RecordedPool`."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import picture
from kvpool.cli.console import CommandError, nbytes, whole
from kvpool.errors import install_command

if TYPE_CHECKING:
    from benchmarks.replay import Result, Trace
    from benchmarks.replay.shapes import HybridShape

BLOCK_SIZE = 16


def shape_of(model: str, block_size: int, concurrency: int) -> HybridShape:
    """Return what a model keeps."""
    from benchmarks.replay.shapes import MODELS, hybrid_shape

    try:
        return hybrid_shape(model, block_size, concurrency)
    except OSError as exc:
        known = ", ".join(MODELS)
        raise CommandError(f"--groups {model}: {exc.strerror or exc}; names that need no file are {known}") from None
    except (TypeError, ValueError) as exc:
        raise CommandError(f"--groups {model}: {exc}") from None


def pool_sizes(args: argparse.Namespace, shape: HybridShape | None) -> list[int | None]:
    """Return the pools to replay, in blocks; None: as many as are always enough."""
    if args.sweep is not None and args.num_blocks is not None:
        raise CommandError("--sweep and --num-blocks exclude each other")
    if args.sweep is not None:
        return [blocks_of("--sweep", text, shape) for text in args.sweep.split(",")]
    if args.num_blocks is not None:
        return [blocks_of("--num-blocks", args.num_blocks, shape)]
    if shape is not None:
        raise CommandError("--groups needs --num-blocks N, or --sweep N1,N2,...; N is blocks, or a size such as 64GiB")
    return [None]


def blocks_of(option: str, text: str, shape: HybridShape | None) -> int:
    """Return a number of blocks; of a model with layer groups it may be a size in bytes."""
    if shape is None or text.strip("0123456789 -+") == "":
        return whole(option, text)
    return whole(option, str(nbytes(option, text) // shape.block_nbytes))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments. Numbers are read by `run`, which says in one line what is wrong with one."""
    parser.add_argument(
        "trace",
        nargs="?",
        metavar="TRACE",
        help="a trace in Mooncake's JSONL format (hash ids per 512 tokens), or the compact .npz",
    )
    parser.add_argument(
        "--synthetic", action="store_true", help="replay a generated trace of conversations instead of a file"
    )
    numbers: tuple[tuple[str, str, str | None, str], ...] = (
        ("--num-blocks", "N", None, "usable blocks (default: enough for any C requests at a time)"),
        ("--block-size", "TOKENS", None, "tokens per block (default: the trace's, 16 without hash ids)"),
        ("--concurrency", "C", "16", "most requests that run at a time (default: %(default)s)"),
        ("--limit", "ROWS", None, "replay only the first ROWS requests"),
        ("--trace-block-size", "TOKENS", None, "tokens per hash id, when it is not Mooncake's 512"),
        ("--seed", "S", "1", "of --synthetic (default: %(default)s)"),
        ("--sessions", "S", "24", "conversations of --synthetic (default: %(default)s)"),
        ("--store-blocks", "N", None, "blocks of a store behind the pool, the least recently used leave"),
    )
    for name, metavar, default, text in numbers:
        parser.add_argument(name, metavar=metavar, default=default, help=text)
    parser.add_argument("--sweep", metavar="N1,N2,...", help="compare pools of these sizes")
    parser.add_argument("--ops", type=Path, metavar="FILE", help="instead of a trace: calls of RecordedPool, checked")
    parser.add_argument(
        "--minimise", action="store_true", help="with --ops: the fewest calls that still fail, when they do"
    )
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw blocks in use and hit rate over time")
    parser.add_argument(
        "--groups",
        metavar="MODEL",
        help="what the layers of a model keep: qwen3_5, gemma4, gpt_oss, or a config.json; --num-blocks and"
        " --sweep then take blocks, or sizes such as 64GiB; --block-size is 16 by default",
    )


def run(args: argparse.Namespace) -> int:
    """Replay, and print what happened."""
    if args.ops is not None:
        return run_calls(args)
    if args.minimise:
        raise CommandError("--minimise needs --ops FILE")
    from benchmarks.replay import replay, report
    from kvpool.errors import CapacityExceeded

    block_size, concurrency = number(args, "block_size"), whole("--concurrency", args.concurrency)
    shape = None if args.groups is None else shape_of(args.groups, block_size or BLOCK_SIZE, concurrency)
    sizes = pool_sizes(args, shape)
    if args.plot is not None:
        check_plot(args)
    trace = load_trace(args)
    options: dict[str, Any] = {"block_size": block_size, "concurrency": concurrency, "shape": shape}
    results = []
    try:
        with progress_bar(len(trace) * len(sizes), quiet=args.json) as show:
            for index, num_blocks in enumerate(sizes):
                progress = partial(show, index * len(trace))
                store = store_of(args, block_size or trace.block_size or BLOCK_SIZE)
                results.append(replay(trace, num_blocks=num_blocks, **options, store=store, progress=progress))
    except (ValueError, CapacityExceeded, MemoryError) as exc:
        raise CommandError(str(exc) or "not enough memory for this pool") from None
    if args.plot is not None:
        draw(args, trace, results[0])
    if args.json:
        model = {} if shape is None else {"model": report.shape_facts(shape)}
        runs = [report.result_facts(result, shape) for result in results]
        print(json.dumps({"trace": report.trace_facts(trace), **model, "runs": runs}, indent=2))
        return 0
    print(report.describe_trace(trace))
    if shape is not None:
        print(report.describe_shape(args.groups, shape))
    print(report.describe(results[0], shape) if args.sweep is None else report.describe_sweep(results, shape))
    if args.plot is not None:
        print(f"Drawn in {args.plot}")
    return 0


def run_calls(args: argparse.Namespace) -> int:
    """Repeat recorded calls on a new pool. Returns 0 if all results are as recorded, else 1."""
    from benchmarks.replay.recorded import RecordError, load, minimise, rerun

    if args.trace is not None or args.synthetic:
        raise CommandError("--ops FILE replaces the trace: give only one of them")
    few = None
    try:
        record = load(args.ops)
        with progress_bar(len(record.calls), quiet=args.json) as show:
            failure = rerun(record, progress=lambda done: show(0, done))
        if failure is not None and args.minimise:
            few = minimise(record, failure)
    except OSError as exc:
        raise CommandError(f"{args.ops}: {exc.strerror or exc}") from None
    except (RecordError, MemoryError) as exc:
        raise CommandError(str(exc) or "not enough memory for this pool") from None
    total = len(record.calls)
    if args.json:
        facts = {"pool": record.header["pool"], "calls": total, "kvpool": record.header["kvpool"]}
        facts["failure"] = None if failure is None else vars(failure)
        facts["fewest"] = None if few is None else [str(call) for call in few]
        print(json.dumps(facts, indent=2))
        return int(failure is not None)
    print(f"{total} calls on a pool of {record.header['pool']['num_blocks']} blocks")
    print("every digest as recorded, check() finds nothing" if failure is None else f"FAILED at {failure}")
    if few is not None:
        print(f"{len(few)} calls are enough to fail like that:")
        print("\n".join(f"  {call}" for call in few))
    return int(failure is not None)


def number(args: argparse.Namespace, name: str, least: int = 1) -> int | None:
    """Return the value of a numeric option, None if it was not given."""
    text = getattr(args, name)
    return None if text is None else whole("--" + name.replace("_", "-"), text, least)


def store_of(args: argparse.Namespace, block_size: int) -> Any:
    """Return the store behind the pool, None without `--store-blocks`."""
    num_blocks = number(args, "store_blocks")
    if num_blocks is None:
        return None
    from kvpool.store import BlockLayout, Layout, MemoryStore

    return MemoryStore(Layout((BlockLayout(block_size, 1, "replay"),), b""), num_blocks)


def load_trace(args: argparse.Namespace) -> Trace:
    """Return the trace that the arguments name."""
    from benchmarks.replay import TraceError, read_trace, synthetic_trace

    if (args.trace is None) != args.synthetic:
        raise CommandError("name either a TRACE file or --synthetic")
    tokens_per_id, limit = number(args, "trace_block_size"), number(args, "limit")
    seed, sessions = number(args, "seed", 0), number(args, "sessions")
    try:
        if args.synthetic:
            assert seed is not None and sessions is not None  # they have defaults
            trace = synthetic_trace(seed, sessions, tokens_per_id or 16)
        else:
            trace = read_trace(args.trace, block_size=tokens_per_id)
    except OSError as exc:
        raise CommandError(f"{args.trace}: {exc.strerror or exc}") from None
    except TraceError as exc:
        raise CommandError(str(exc)) from None
    return trace if limit is None else trace.head(limit)


def check_plot(args: argparse.Namespace) -> None:
    """Refuse, before any work, a picture that cannot be drawn."""
    if args.groups is not None:
        raise CommandError("--plot draws a replay without --groups")
    picture.check("--plot", args.plot)
    if args.plot.suffix.lower() != ".png":
        raise CommandError(f"--plot {args.plot}: the picture is a PNG, so its name has to end in .png")
    if args.sweep is not None:
        raise CommandError("--plot draws one replay: leave --sweep out")
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError(f"--plot needs matplotlib: {install_command('demo')}")


def draw(args: argparse.Namespace, trace: Trace, result: Result) -> None:
    """Write the picture."""
    from benchmarks.replay import plot

    try:
        plot.draw(args.plot, trace.name, result)
    except OSError as exc:
        raise CommandError(f"--plot {args.plot}: {exc.strerror or exc}") from None


@contextlib.contextmanager
def progress_bar(total: int, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows how many requests are finished: ``show(in earlier replays, in this one)``.

    It does nothing without rich or a terminal.
    """
    if quiet or not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda before, done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda before, done: progress.update(task, completed=before + done)
