"""``python -m benchmarks.drafts``: what speculative decoding costs and saves, by how often a draft is right.

The drafts are known answers, of which a given share is wrong: all of them, or as many as `Trust` asks for. The last
rows are kvpool's own proposers. The model's next token depends on the newest one alone, so its text runs in
circles, and the draft model, which is the same with one layer, is always right. Seconds are CPU time of all threads.
All runs must give the same tokens.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.command import main
from benchmarks.gate import table
from benchmarks.serving_lm import load
from kvpool.adapters.mlx_lm import DraftModel, Engine, PromptLookup
from kvpool.adapters.mlx_lm.drafts import Trust
from kvpool.scheduler import Decoding

BLOCKS = 2000
PROMPT = 64
SHARES = (1.0, 0.9, 0.7, 0.5, 0.0)
OPTIONS = {
    **{"model": ("tiny", "tiny or medium"), "drafts": (4, "tokens guessed in one step, at most")},
    **{"max-tokens": (128, "tokens of each answer"), "rounds": (3, "runs of each row; the fastest counts")},
}


class Known:
    """Drafts known answers, each token right with a given chance."""

    def __init__(self, answers: Sequence[np.ndarray], right: float, num_drafts: int) -> None:
        self.answers, self.right, self.num_drafts = answers, right, num_drafts
        self.rng = np.random.default_rng(1)

    def __call__(self, rows: list[Decoding]) -> list[np.ndarray]:
        """Return the drafts of each sequence, whose number is the request's priority."""
        found = []
        for row in rows:
            begin = len(row.generated)
            tokens = self.answers[row.request.priority][begin : begin + min(self.num_drafts, row.most)].copy()
            tokens[self.rng.random(len(tokens)) >= self.right] = 0
            found.append(tokens)
        return found


def circling(model: Any) -> Any:
    """Let the next token depend on the newest one alone."""
    for layer in model.layers:
        layer.self_attn.o_proj.weight *= 0
        layer.mlp.down_proj.weight *= 0
    mx.eval(model.parameters())
    return model


def first_layer(model: Any) -> Any:
    """Return the model with one layer, on the same weights."""
    small = copy.copy(model)
    body = copy.copy(model.model)
    dict.__setitem__(body, "layers", model.model.layers[:1])
    dict.__setitem__(small, "model", body)
    return small


def measured(model: Any, speculate: Any, prompts: list[list[int]], max_tokens: int) -> tuple[float, Any, list[Any]]:
    """Return the CPU seconds of decoding these prompts together, the scheduler's counts, and the answers."""
    engine = Engine(model, BLOCKS, speculate=speculate)
    ids = [engine.submit(prompt, max_tokens=max_tokens, priority=at) for at, prompt in enumerate(prompts)]
    done: dict[Any, Any] = {}
    while engine.scheduler.stats().decode_tokens == 0:  # drafts may end a short answer in its first step
        done |= {completion.id: completion.tokens for completion in engine.step()}
    begin = time.process_time()
    while engine.num_unfinished:
        done |= {completion.id: completion.tokens for completion in engine.step()}
    return time.process_time() - begin, engine.scheduler.stats(), [done[id] for id in ids]


def trusted(answers: Sequence[np.ndarray], right: float, num_drafts: int) -> Any:
    """Return a proposer of known answers, as many as are worth it."""
    return partial(Trust(num_drafts).ask, Known(answers, right, num_drafts))


def rows_of(model: Any, num_drafts: int, answers: list[Any]) -> dict[str, Callable[[], Any]]:
    """Return what makes the proposer of each row of the table."""
    rows: dict[str, Callable[[], Any]] = {"none": lambda: None}
    for share in SHARES:
        rows[f"{share:4.0%} right"] = partial(Known, answers, share, num_drafts)
        rows[f"{share:4.0%}, trust"] = partial(trusted, answers, share, num_drafts)
    rows["prompt lookup"] = partial(PromptLookup, num_drafts)
    rows["draft model"] = lambda: DraftModel(first_layer(model), BLOCKS, num_drafts=num_drafts)
    return rows


def measure(model: Any, streams: int, args: argparse.Namespace) -> None:
    """Print the table of so many streams."""
    prompts = np.random.default_rng(7).integers(int(model.args.vocab_size), size=(streams, PROMPT)).tolist()
    _, _, answers = measured(model, None, prompts, args.max_tokens)
    rows = rows_of(model, args.drafts, answers)
    seconds: dict[str, float] = {}
    counts: dict[str, Any] = {}
    for _ in range(args.rounds):
        for name, make in rows.items():
            spent, counts[name], tokens = measured(model, make(), prompts, args.max_tokens)
            assert all(map(np.array_equal, tokens, answers)), f"{name}: other tokens"
            seconds[name] = min(spent, seconds.get(name, spent))
    lines: list[tuple[object, ...]] = [("drafts", "accepted of drafted", "tokens per row and step", "CPU s", "speed")]
    for name, found in counts.items():
        each = found.sampled_tokens / max(1, found.sampled_tokens - found.accepted_tokens)
        share, speed = f"{found.accepted_tokens} of {found.drafted_tokens}", seconds["none"] / seconds[name]
        lines.append((name, share, f"{each:.2f}", f"{seconds[name]:.2f}", f"{speed:.2f}x"))
    print(f"\n{args.model}, {streams} streams, {args.drafts} drafts at most\n\n{table(*lines)}")


def run(args: argparse.Namespace) -> int:
    """Print one table for each number of streams."""
    model = circling(load(args.model)[0])
    for streams in (1, 8):
        measure(model, streams, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
