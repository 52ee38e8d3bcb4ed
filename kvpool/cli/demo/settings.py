"""The sizes of a demo run. The defaults fit 50 seconds on two slow cores; the tests take smaller ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """Sizes of every part, in tokens, sequences and blocks as named.

    Attributes
    ----------
    model : str or None
        Path or id of an mlx-lm checkpoint; None builds a small Llama with random weights.
    out : Path
        Where the picture goes.
    block_size : int
        Tokens per block, in all parts.
    prompt_lengths, new_tokens
        The engine part: one prompt per length, each continued greedily by `new_tokens`.
    samples, sample_prompt, sample_tokens
        The fork part: one prompt of `sample_prompt` tokens, continued `samples` times by `sample_tokens`.
    shared_requests
        The shared-prompt part: requests that begin with the same `sample_prompt` tokens and go on for
        `sample_tokens`.
    batch_sizes, context, rounds
        The step-cost part: sequences per batch, tokens in each sequence, interleaved rounds.
    attention_rows, attention_context, attention_steps
        The attention part: sequences, tokens in each, decode steps by each route.
    requests, pool_blocks, max_len
        The occupancy part: requests served, blocks for both servers, longest sequence the server accepts.
    talk_tokens, talk_budget
        The conversation part: tokens, and how many of them may be held.
    seed : int
        Of every random number in the demo.
    """

    model: str | None = None
    out: Path = Path("kvpool-demo.png")
    block_size: int = 16
    prompt_lengths: tuple[int, ...] = (7, 212, 40, 95, 18, 131, 64, 33)
    new_tokens: int = 48
    samples: int = 32
    sample_prompt: int = 150
    sample_tokens: int = 24
    shared_requests: int = 16
    batch_sizes: tuple[int, ...] = (64, 256)
    context: int = 4096
    rounds: int = 9
    attention_rows: int = 16
    attention_context: int = 1024
    attention_steps: int = 5
    requests: int = 160
    pool_blocks: int = 512
    max_len: int = 1024
    talk_tokens: int = 200
    talk_budget: int = 64
    seed: int = 0
