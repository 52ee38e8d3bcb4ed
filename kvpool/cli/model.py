"""What the commands that take a model share: its name, and the architecture of the tiny one."""

from __future__ import annotations

import argparse
from types import ModuleType

from kvpool.cli.console import CommandError
from kvpool.errors import install_command

TINY = "tiny"


def add_model_arguments(parser: argparse.ArgumentParser, metavar: str, help: str) -> None:
    """Declare --model and --arch; `help` says what --model takes besides ``tiny``."""
    parser.add_argument(
        "--model",
        required=True,
        metavar=metavar,
        help=f"{help}, or {TINY}: a small random model that needs no download",
    )
    parser.add_argument(
        "--arch",
        metavar="NAME",
        help=f"architecture of the {TINY} model, a model file of mlx-lm such as qwen3_5 (default: a llama)",
    )


def tiny_model(args: argparse.Namespace) -> ModuleType | None:
    """The module of the tiny model if the user asked for it, else None. Its architecture is one that it has."""
    if args.model != TINY:
        if args.arch is not None:
            raise CommandError(f"--arch {args.arch}: only --model {TINY} has a choice")
        return None
    try:
        from kvpool.adapters.mlx_lm import tiny
    except ImportError as exc:
        raise CommandError(f"--model {TINY} needs mlx-lm ({exc}): {install_command('mlx')}") from None
    try:
        tiny.config(args.arch)
    except ValueError as exc:
        raise CommandError(f"--arch: {str(exc).removeprefix('[tiny] arch is ')}") from None
    return tiny
