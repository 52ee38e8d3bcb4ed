"""`PromptCache` beside mlx-lm's `LRUPromptCache`: ``python -m benchmarks.prompt_cache``.

Conversations of a made-up agentic trace share a system prompt and take turns. Both caches get the same calls; caches
have one small layer, so bytes are counted and no model runs. Exit code 1 if a gate does not hold.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, LRUPromptCache

from kvpool.adapters.prompt_cache import PromptCache

CONVERSATIONS, TURNS, SYSTEM, SEED = 200, 3, 1024, 1
TOKEN_NBYTES = 128


def trace() -> list[list[int]]:
    """Return the prompts, in the order in which they come; each prompt of a conversation begins with the one before."""
    rng = random.Random(SEED)
    system = [rng.randrange(32_000) for _ in range(SYSTEM)]
    prompts = [list(system) for _ in range(CONVERSATIONS)]
    found = []
    for _ in range(TURNS):
        for number in rng.sample(range(CONVERSATIONS), CONVERSATIONS):
            prompts[number] = prompts[number] + [rng.randrange(32_000) for _ in range(rng.randint(64, 384))]
            found.append(prompts[number])
    return found


def play(prompts: Any, requests: list[list[int]]) -> tuple[int, int]:
    """Return hit tokens, and the most bytes that were held."""
    hits, most = 0, 0
    for tokens in requests:
        caches, rest = prompts.fetch_nearest_cache("model", tokens)
        hits += len(tokens) - len(rest)
        (cache,) = caches or [KVCache()]
        new = mx.zeros((1, 1, len(rest), TOKEN_NBYTES // 8), mx.float32)
        cache.update_and_fetch(new, new)
        mx.eval(cache.keys, cache.values)
        prompts.insert_cache("model", tokens, [cache])
        most = max(most, prompts.nbytes)
    return hits, most


def main() -> int:
    """Print the table."""
    requests = trace()
    stock, stock_most = play(LRUPromptCache(max_size=1 << 30), requests)
    ours, ours_most = play(PromptCache(), requests)
    print(f"{len(requests)} requests, {sum(map(len, requests)):,} prompt tokens, seed {SEED}")
    print(f"{'budget':>14} {'LRUPromptCache':>22} {'PromptCache':>22}")
    print(f"{'none: hits':>14} {stock:>22,} {ours:>22,}")
    print(f"{'none: bytes':>14} {stock_most:>22,} {ours_most:>22,}")
    good = ours_most <= 0.4 * stock_most
    for share in (16, 8, 4):
        budget = stock_most // share
        theirs, _ = play(LRUPromptCache(max_size=1 << 30, max_bytes=budget), requests)
        hits, most = play(PromptCache(budget), requests)
        print(f"{f'{budget:,}':>14} {theirs:>22,} {hits:>22,}  {hits / max(theirs, 1):.2f} x")
        good = good and most <= budget
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
