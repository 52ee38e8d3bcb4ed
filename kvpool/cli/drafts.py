"""Options of commands for speculative decoding."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from kvpool.cli.console import CommandError, whole

if TYPE_CHECKING:
    from kvpool.scheduler.drafts import Propose


def add_draft_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `num_drafts_of` and `load_draft_model`."""
    group = parser.add_argument_group("speculative decoding", "the answers are the same, in fewer passes of the model")
    group.add_argument(
        "--speculate",
        metavar="N",
        default="0",
        help="draft at most N tokens per step by prompt lookup (default: 0, none)",
    )
    group.add_argument(
        "--draft-model",
        metavar="PATH_OR_ID",
        help="a smaller model with the same vocabulary, which drafts instead; needs --speculate",
    )


def num_drafts_of(args: argparse.Namespace) -> int:
    """Return --speculate, checked as far as possible without a model."""
    num_drafts = whole("--speculate", args.speculate, 0)
    if args.draft_model is not None and not num_drafts:
        raise CommandError("--draft-model: needs --speculate")
    if num_drafts and args.eviction is not None:
        raise CommandError("--speculate and --eviction exclude each other")
    return num_drafts


def load_draft_model(args: argparse.Namespace, tokenizer: Any) -> Any:
    """Return the model of --draft-model, None without one."""
    if args.draft_model is None:
        return None
    from kvpool.adapters.mlx_lm import loading

    try:
        model, own = loading.load(args.draft_model)
    except loading.ModelNotLoaded as exc:
        raise CommandError(f"--draft-model {exc}") from None
    if own.get_vocab() != tokenizer.get_vocab():
        raise CommandError(f"--draft-model {args.draft_model}: its tokens are not those of --model {args.model}")
    return model


def proposer(num_drafts: int, draft_model: Any, num_tokens: int, max_running: int) -> Propose | None:
    """Return what drafts for an engine whose pool holds so many tokens."""
    from kvpool.adapters.mlx_lm.drafts import DraftModel, PromptLookup

    if draft_model is not None:
        return DraftModel(draft_model, 1 + num_tokens // 4, num_drafts=num_drafts, max_running=max_running)
    return PromptLookup(num_drafts) if num_drafts else None
