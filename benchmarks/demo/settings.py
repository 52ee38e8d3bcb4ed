"""Sizes of the parts of the whole demo."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvpool.cli.demo.report import Settings


@dataclass(frozen=True)
class AllSettings(Settings):
    """Those of ``kvpool demo``, and of the parts here. The defaults fit a minute on two slow cores."""

    out: Path = Path("kvpool-demo.png")
    # A shared prompt: requests that begin with it.
    shared_requests: int = 16
    # Occupancy: requests served, blocks for both servers, longest sequence the server accepts.
    requests: int = 160
    pool_blocks: int = 512
    max_len: int = 1024
    # Conversation: tokens, and how many of them may be held.
    talk_tokens: int = 200
    talk_budget: int = 64
