"""Replay a serving trace through a pool: hit rate, evictions, preemptions, memory."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.command import main
from benchmarks.replay import Trace, TraceError, read_trace, replay, report, synthetic_trace
from benchmarks.replay.shapes import MODELS, HybridShape, hybrid_shape
from kvpool.cli.console import CommandError, nbytes, whole
from kvpool.errors import CapacityExceeded

BLOCK_SIZE = 16
OPTIONS = {
    "synthetic": (False, "replay a generated trace of conversations instead of a file"),
    "num-blocks": ("", "usable blocks (default: enough for any --concurrency requests at a time)"),
    "block-size": ("", "tokens per block (default: the trace's, 16 without hash ids)"),
    "concurrency": ("16", "most requests that run at a time"),
    "limit": ("", "replay only so many requests, the first ones"),
    "trace-block-size": ("", "tokens per hash id, when it is not Mooncake's 512"),
    "seed": ("1", "of --synthetic"),
    "sessions": ("24", "conversations of --synthetic"),
    "store-blocks": ("", "blocks of a store behind the pool, the least recently used leave"),
    "sweep": ("", "N1,N2,...: compare pools of these sizes"),
    "groups": (
        "",
        "what the layers of a model keep: qwen3_5, gemma4, gpt_oss, or a config.json; --num-blocks and"
        " --sweep then take blocks, or sizes such as 64GiB; --block-size is 16 by default",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the trace."""
    text = "a trace in Mooncake's JSONL format (hash ids per 512 tokens), or the compact .npz"
    parser.add_argument("trace", nargs="?", metavar="TRACE", help=text)


def run(args: argparse.Namespace) -> int:
    """Replay, and print what happened."""
    block_size, concurrency = number(args, "block_size"), whole("--concurrency", args.concurrency)
    shape = shape_of(args.groups, block_size or BLOCK_SIZE, concurrency) if args.groups else None
    sizes = pool_sizes(args, shape)
    trace = load_trace(args)
    options: dict[str, Any] = {"block_size": block_size, "concurrency": concurrency, "shape": shape}
    results = []
    try:
        with progress_bar(args.json) as bar:
            task = bar.add_task("", total=len(trace) * len(sizes))
            for index, num_blocks in enumerate(sizes):
                store, before = store_of(args, block_size or trace.block_size or BLOCK_SIZE), index * len(trace)

                def show(done: int, before: int = before) -> None:
                    bar.update(task, completed=before + done)

                results.append(replay(trace, num_blocks=num_blocks, **options, store=store, progress=show))
    except (ValueError, CapacityExceeded, MemoryError) as exc:
        raise CommandError(str(exc) or "not enough memory for this pool") from None
    if args.json:
        model = {} if shape is None else {"model": report.shape_facts(shape)}
        runs = [report.result_facts(result, shape) for result in results]
        print(json.dumps({"trace": report.trace_facts(trace), **model, "runs": runs}, indent=2))
        return 0
    print(report.describe_trace(trace))
    if shape is not None:
        print(report.describe_shape(args.groups, shape))
    print(report.describe_sweep(results, shape) if args.sweep else report.describe(results[0], shape))
    return 0


def number(args: argparse.Namespace, name: str, least: int = 1) -> int | None:
    """Return the value of a numeric option, None if it was not given."""
    text = getattr(args, name)
    return whole("--" + name.replace("_", "-"), text, least) if text else None


def shape_of(model: str, block_size: int, concurrency: int) -> HybridShape:
    """Return what a model keeps."""
    try:
        return hybrid_shape(model, block_size, concurrency)
    except OSError as exc:
        known = ", ".join(MODELS)
        raise CommandError(f"--groups {model}: {exc.strerror or exc}; names that need no file are {known}") from None
    except (TypeError, ValueError) as exc:
        raise CommandError(f"--groups {model}: {exc}") from None


def pool_sizes(args: argparse.Namespace, shape: HybridShape | None) -> list[int | None]:
    """Return the pools to replay, in blocks; None: as many as are always enough."""
    if args.sweep and args.num_blocks:
        raise CommandError("--sweep and --num-blocks exclude each other")
    if not args.sweep and not args.num_blocks and shape is not None:
        raise CommandError("--groups needs --num-blocks N, or --sweep N1,N2,...; N is blocks, or a size such as 64GiB")
    option = "--sweep" if args.sweep else "--num-blocks"
    asked = (args.sweep or args.num_blocks).split(",")
    return [blocks_of(option, text, shape) for text in asked] if asked != [""] else [None]


def blocks_of(option: str, text: str, shape: HybridShape | None) -> int:
    """Return a number of blocks; of a model with layer groups it may be a size in bytes."""
    if shape is None or text.strip("0123456789 -+") == "":
        return whole(option, text)
    return whole(option, str(nbytes(option, text) // shape.block_nbytes))


def store_of(args: argparse.Namespace, block_size: int) -> Any:
    """Return the store behind the pool, None without `--store-blocks`."""
    num_blocks = number(args, "store_blocks")
    if num_blocks is None:
        return None
    from kvpool.store import BlockLayout, Layout, MemoryStore

    return MemoryStore(Layout((BlockLayout(block_size, 1, "replay"),), b""), num_blocks)


def load_trace(args: argparse.Namespace) -> Trace:
    """Return the trace that the arguments name."""
    if (args.trace is None) != args.synthetic:
        raise CommandError("name either a TRACE file or --synthetic")
    tokens_per_id, limit = number(args, "trace_block_size"), number(args, "limit")
    seed, sessions = whole("--seed", args.seed, 0), whole("--sessions", args.sessions)
    try:
        if args.synthetic:
            trace = synthetic_trace(seed, sessions, tokens_per_id or 16)
        else:
            trace = read_trace(args.trace, block_size=tokens_per_id)
    except OSError as exc:
        raise CommandError(f"{args.trace}: {exc.strerror or exc}") from None
    except TraceError as exc:
        raise CommandError(str(exc)) from None
    return trace if limit is None else trace.head(limit)


def progress_bar(quiet: bool) -> Progress:
    """Return what shows how many requests are finished, on a terminal."""
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    is_off = quiet or not sys.stderr.isatty()
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=is_off)


if __name__ == "__main__":
    sys.exit(main())
