"""Show on this machine what kvpool claims: the same tokens, fewer bytes, a step's cost.

Every part measures and then decides its claims. A part that cannot run (mlx is not installed) leaves its
claims undecided, and an undecided claim is not held.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvpool.cli.console import CommandError, NotRun
from kvpool.cli.demo.report import Part, Printer, Report, Settings
from kvpool.cli.wired import add_wired_argument, wired
from kvpool.errors import install_command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--model",
        metavar="PATH_OR_ID",
        help="run the parts with a model on this checkpoint: a folder, or a Hugging Face id that mlx-lm downloads "
        "(default: a small Llama with random weights, nothing is downloaded)",
    )
    parser.add_argument(
        "--kv-block-size",
        type=int,
        metavar="TOKENS",
        default=Settings.block_size,
        help="tokens per block, in all parts (default: %(default)s)",
    )
    add_wired_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Run the demo and print what it found; 0 if every claim held, else 1."""
    settings = Settings(model=args.model, block_size=args.kv_block_size)
    check(settings)
    with wired(args.wired):
        return show(settings, all_parts(), args.json)


def show(settings: Settings, parts: list[Part], as_json: bool) -> int:
    """Run `parts` and print what they found; 0 if every claim held, else 1."""
    if as_json:
        report = run_parts(settings, parts, lambda line: None)
        print(json.dumps(report.as_json(), indent=2))
    else:
        try:
            from rich.console import Console
        except ImportError:
            raise CommandError(f"the summary needs rich: {install_command('demo')} (or use --json)") from None
        printer = Printer(Console(), parts)
        with progress_line(printer.console) as say:
            report = run_parts(settings, parts, say, printer)
        printer.close(report)
    return 0 if report.held else 1


def all_parts() -> list[Part]:
    """Return the parts in the order they run, which is the order of the table."""
    from kvpool.cli.demo import models, pools

    return [models.ENGINE, models.FORKS, pools.STEP_COST, pools.OUT_OF_BLOCKS]


def run_parts(
    settings: Settings, parts: list[Part], say: Callable[[str], None], printer: Printer | None = None
) -> Report:
    """Run `parts` one after another. One that raises does not stop the others; its claims are not held."""
    report, start = Report(), time.perf_counter()
    for number, part in enumerate(parts):
        if printer:
            printer.begin(number, part)
        try:
            report.add(part, part.run(settings, say))
        except NotRun as exc:
            report.add_not_run(part, str(exc))
        except CommandError:  # a bad argument is the user's to correct, not a claim that failed
            raise
        except Exception as exc:  # a demo that dies halfway tells less than one that says what failed
            traceback.print_exc(file=sys.stderr)
            report.add_not_run(part, f"stopped by {type(exc).__name__}: {exc}")
        if printer:
            printer.end(report)
    report.seconds = time.perf_counter() - start
    return report


def check(settings: Settings) -> None:
    """Refuse, before any work, a block that no sequence fills, and a wrong folder."""
    model, longest = settings.model, 256
    if not 1 <= settings.block_size <= longest:
        raise CommandError(f"--kv-block-size {settings.block_size}: out of range, 1..{longest}")
    if model is not None and not Path(model).exists() and model.count("/") != 1:
        raise CommandError(f"--model {model}: there is no such folder, and a Hugging Face id reads owner/name")
    if model is not None and Path(model).is_dir() and not (Path(model) / "config.json").is_file():
        raise CommandError(f"--model {model}: a folder without config.json")


@contextlib.contextmanager
def progress_line(printed: Any) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows one line of progress: below what a console prints, or on stderr, or nowhere.

    `printed` is that console. Only a terminal shows progress.
    """
    from rich.console import Console

    console = printed if printed.is_terminal else Console(stderr=True)
    if not console.is_terminal:
        yield lambda line: None
        return
    with console.status("starting", spinner="line" if console.options.ascii_only else "dots") as status:
        yield status.update
