"""``kvpool replay --groups``: a trace through a pool with layer groups, or through the policy H1."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvpool.cli.console import CommandError, check_plot, nbytes, whole

if TYPE_CHECKING:
    from kvpool.replay import Trace
    from kvpool.replay.hybrid_shapes import HybridShape

Player = Callable[[int, Callable[[int], None]], dict[str, Any]]
"""Plays a trace in so many blocks, reports how many requests have ended, and returns the counts."""

BLOCK_SIZE = 16
FLAGS = ("checkpoints", "place", "first_distance")
"""Options with a value that only H1 has."""


def add_group_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that need --groups."""
    parser.add_argument(
        "--groups",
        metavar="MODEL",
        help="what the layers of a model keep: qwen3_5, gemma4, gpt_oss, or a config.json. The policy is then P3, a"
        " prefix cache with layer groups, or H1, a fixed split between KV and checkpoints; --num-blocks and --sweep"
        " take blocks, or sizes such as 64GiB (P3); --block-size is 16 by default",
    )
    parser.add_argument("--checkpoints", metavar="N", help="H1: room for states, or for blocks of windows")
    parser.add_argument(
        "--place",
        metavar="RULES",
        help="H1: where checkpoints are taken, any of E: at the end of a prompt; J: where a prompt leaves the path of"
        " an earlier one; D: at doubling distances (default: EJ)",
    )
    parser.add_argument(
        "--first-distance", metavar="TOKENS", help="H1: the first distance of D (default: from the bytes of the model)"
    )
    parser.add_argument("--two-class", action="store_true", help="H1: states that a later one replaces leave first")


def refuse_group_arguments(args: argparse.Namespace) -> None:
    """Refuse options that mean something only with --groups, or only with another policy."""
    is_split = args.groups is not None and args.policy == "H1"
    given = [name for name in FLAGS if getattr(args, name) is not None] + ["two_class"] * args.two_class
    if given and not is_split:
        raise CommandError(f"--{given[0].replace('_', '-')} needs --groups MODEL and --policy H1")


def run_groups(args: argparse.Namespace, trace_of: Callable[[], Trace], progress_bar: Callable[..., Any]) -> int:
    """Replay, and print what happened."""
    from kvpool.errors import CapacityExceeded
    from kvpool.replay import hybrid_report, report

    if args.policy not in (None, "P3", "H1"):
        raise CommandError(f"--policy {args.policy}: with --groups there are P3 and H1")
    if args.samples != "1":
        raise CommandError(f"--samples {args.samples}: only P2 has samples")
    check_plot(args.plot)
    if args.plot is not None and (args.sweep is None or args.policy == "H1"):
        raise CommandError("--plot with --groups draws a sweep of pools: it needs --sweep, and excludes --policy H1")
    concurrency = whole("--concurrency", args.concurrency)
    size = BLOCK_SIZE if args.block_size is None else whole("--block-size", args.block_size)
    shape = shape_of(args.groups, size, concurrency)
    budgets = [budget(args, text, shape) for text in budget_texts(args)]
    trace = trace_of()
    runs = []
    try:
        play = player(args, trace, shape, concurrency)
        with progress_bar(len(trace) * len(budgets), quiet=args.json) as show:
            for index, num_blocks in enumerate(budgets):
                runs.append(play(num_blocks, partial(show, index * len(trace))))
    except (ValueError, CapacityExceeded, MemoryError) as exc:
        raise CommandError(str(exc) or "not enough memory for this pool") from None
    if args.plot is not None:
        draw(args, trace, shape, runs)
    if args.json:
        facts = {"trace": report.trace_facts(trace), "model": hybrid_report.shape_facts(shape), "runs": runs}
        print(json.dumps(facts, indent=2))
        return 0
    print(report.describe_trace(trace))
    print(hybrid_report.describe_shape(args.groups, shape))
    if args.sweep is not None:
        print(hybrid_report.describe_hybrid_sweep(runs))
    else:
        print((hybrid_report.describe_split if args.policy == "H1" else hybrid_report.describe_hybrid)(runs[0]))
    if args.plot is not None:
        print(f"Drawn in {args.plot}")
    return 0


def shape_of(model: str, block_size: int, concurrency: int) -> HybridShape:
    """Return what a model keeps."""
    from kvpool.replay.hybrid_shapes import MODELS, hybrid_shape

    try:
        return hybrid_shape(model, block_size, concurrency)
    except OSError as exc:
        known = ", ".join(MODELS)
        raise CommandError(f"--groups {model}: {exc.strerror or exc}; names that need no file are {known}") from None
    except (TypeError, ValueError) as exc:
        raise CommandError(f"--groups {model}: {exc}") from None


def budget_texts(args: argparse.Namespace) -> list[str]:
    """Return the budgets as they were given."""
    if (args.sweep is None) == (args.num_blocks is None):
        raise CommandError("--groups needs --num-blocks N, or --sweep N1,N2,...; N is blocks, or a size such as 64GiB")
    texts: list[str] = [args.num_blocks] if args.sweep is None else args.sweep.split(",")
    return texts


def budget(args: argparse.Namespace, text: str, shape: HybridShape) -> int:
    """Return a budget in blocks."""
    option = "--num-blocks" if args.sweep is None else "--sweep"
    if args.policy == "H1" or text.strip("0123456789 -+") == "":
        return whole(option, text)
    return whole(option, str(nbytes(option, text) // shape.block_nbytes))


def player(args: argparse.Namespace, trace: Trace, shape: HybridShape, concurrency: int) -> Player:
    """Return the function that plays the trace once under the policy of the arguments."""
    from kvpool.replay.fixed_split import FixedSplit, Split
    from kvpool.replay.hybrid import replay_hybrid
    from kvpool.replay.hybrid_report import hybrid_facts

    if args.policy != "H1":
        pool = partial(replay_hybrid, trace, shape=shape, concurrency=concurrency)
        return lambda num_blocks, progress: hybrid_facts(pool(num_blocks=num_blocks, progress=progress), shape)
    if args.checkpoints is None:
        raise CommandError("--policy H1 needs --checkpoints N, the room beside the blocks of KV")
    place = "EJ" if args.place is None else args.place
    if not place or set(place) - set("EJD"):
        raise CommandError(f"--place {place}: it must be letters of E, J and D")
    distance = shape.first_distance if args.first_distance is None else whole("--first-distance", args.first_distance)
    split = Split(
        kv_blocks=0,
        room=whole("--checkpoints", args.checkpoints, 0),
        block_size=shape.block_size,
        concurrency=concurrency,
        window_blocks=shape.window_blocks(),
        place=place,
        first_distance=distance,
        is_two_class=args.two_class,
    )
    facts = {
        "policy": "H1",
        "block_size": split.block_size,
        "room": split.room,
        "room_holds": "blocks of windows" if split.window_blocks else "states",
        "concurrency": concurrency,
    }
    return lambda num_blocks, progress: {
        **facts,
        "num_blocks": num_blocks,
        **FixedSplit(trace, replace(split, kv_blocks=num_blocks)).run(progress),
    }


def draw(args: argparse.Namespace, trace: Trace, shape: HybridShape, runs: list[dict[str, Any]]) -> None:
    """Write the picture."""
    from kvpool.replay import plot

    try:
        plot.draw_hybrid_sweep(args.plot, f"{trace.name}, {args.groups}", runs)
    except OSError as exc:
        raise CommandError(f"--plot {args.plot}: {exc.strerror or exc}") from None
