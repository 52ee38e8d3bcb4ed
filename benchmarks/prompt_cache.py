"""`PromptCache` beside mlx-lm's `LRUPromptCache`: ``python -m benchmarks.prompt_cache``.

Conversations of a made-up agentic trace share a system prompt and take turns, few or many. All caches get the same
calls; caches have one small layer, so bytes are counted and no model runs. mlx-lm's server keeps 10 sequences unless it
is told otherwise; so `LRUPromptCache` plays with that limit, and with none. Then `fetch` of a long prompt beside one
copy of its bytes by MLX, and `insert` of one more turn behind a long and a short prompt, and a miss of states
in a store.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache, LRUPromptCache

from benchmarks.baselines import seconds
from benchmarks.command import main
from benchmarks.gate import Gate, table
from kvpool.adapters.prompt_cache import PromptCache
from kvpool.adapters.prompt_store import store_layout
from kvpool.store import MemoryStore

CONVERSATIONS, SEED = 200, 1
FEW, MANY = (3, 512), (12, 256)  # turns, and tokens of the system prompt
SERVER = 10  # sequences that mlx-lm's server keeps by default
TOKEN_NBYTES = 1024  # a small model's
LAYERS, HEADS, DIM = 4, 2, 64  # of the caches whose calls are timed: 4 KiB a token
SHORT, LONG, TURN, ROUNDS = 1024, 32_768, 256, 15


def trace(turns: int, system_tokens: int) -> list[list[int]]:
    """Return the prompts, in the order in which they come; each prompt of a conversation begins with the one before."""
    rng = random.Random(SEED)
    system = [rng.randrange(32_000) for _ in range(system_tokens)]
    prompts = [list(system) for _ in range(CONVERSATIONS)]
    found = []
    for _ in range(turns):
        for number in rng.sample(range(CONVERSATIONS), CONVERSATIONS):
            prompts[number] = prompts[number] + [rng.randrange(32_000) for _ in range(rng.randint(32, 192))]
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


def conversation(rng: np.random.Generator, length: int) -> tuple[np.ndarray, list[KVCache]]:
    """Return tokens and the caches of a model that has computed them."""
    caches = [KVCache() for _ in range(LAYERS)]
    for cache in caches:
        cache.update_and_fetch(*(mx.random.normal((1, HEADS, length, DIM)) for _ in range(2)))
    mx.eval([array for cache in caches for array in (cache.keys, cache.values)])
    return rng.integers(0, 32_000, length), caches


def fetching(rng: np.random.Generator) -> Gate:
    """Time of `fetch` beside that of MLX's copy of the same bytes."""
    prompts = PromptCache()
    tokens, caches = conversation(rng, LONG)
    prompts.insert(tokens, caches)
    plain = mx.zeros((LONG, LAYERS * 2 * HEADS * DIM))
    mx.eval(plain)

    def copied() -> None:
        mx.eval(mx.concatenate([plain[:1], plain[1:]]))

    prompt = np.append(tokens, 1)
    ratios = []
    for _ in range(ROUNDS):
        once = seconds(copied)
        ratios.append(seconds(lambda: prompts.fetch(prompt)) / once)
    return Gate(f"fetch of {LONG:,} tokens / one copy", median(ratios), 1.2, at_most=True)


def inserting(rng: np.random.Generator, as_list: bool) -> Gate:
    """Time of one more turn behind a long prompt beside that behind a short one, of tokens in an array or a list."""
    spent: dict[int, list[float]] = {SHORT: [], LONG: []}
    prompts = PromptCache()
    begun = {length: conversation(rng, length + TURN) for length in spent}
    for length, (tokens, caches) in begun.items():
        prompts.insert(tokens[:length], caches)
    for _ in range(ROUNDS):
        for length, (tokens, caches) in begun.items():
            tokens[length:] = rng.integers(0, 32_000, TURN)
            given = tokens.tolist() if as_list else tokens
            spent[length].append(seconds(lambda given=given, caches=caches: prompts.insert(given, caches)))
    value = median(spent[LONG]) / median(spent[SHORT])
    note = f"{median(spent[LONG]) * 1e3:.2f} ms, {median(spent[SHORT]) * 1e3:.2f} ms"
    name = f"insert of {TURN} tokens behind {LONG:,} / behind {SHORT:,}, {'a list' if as_list else 'an array'}"
    return Gate(name, value, None if as_list else 1.1, at_most=True, note=note, goal=1.1 if as_list else None)


def beside(turns: int, system_tokens: int, shares: tuple[int, ...]) -> list[Gate]:
    """Print hit tokens of conversations of so many turns, within shares of what stock takes without a budget."""
    requests = trace(turns, system_tokens)
    stock, most = play(LRUPromptCache(max_size=1 << 30), requests)
    default, _ = play(LRUPromptCache(max_size=SERVER), requests)
    lines: list[tuple[object, ...]] = []
    above, best = 0, 0.0
    for share in shares:
        budget = most // share
        hits, nbytes = play(PromptCache(budget), requests)
        if share > 1:
            default, _ = play(LRUPromptCache(SERVER, budget), requests)
            stock, _ = play(LRUPromptCache(1 << 30, budget), requests)
        lines.append((turns, f"{budget:,}", f"{default:,}", f"{stock:,}", f"{hits:,}", f"{nbytes:,}"))
        above, best = above + max(0, nbytes - budget), max(best, hits / stock)
        if share == 1:
            first = (hits / default, nbytes / most)
    head = ("turns", "budget, bytes", f"hits, {SERVER} sequences", "`LRUPromptCache`", "`PromptCache`", "bytes of it")
    print(table(head, *lines), end="\n\n", file=sys.stderr)
    return [
        Gate(f"{turns} turns: hits / LRUPromptCache of {SERVER} sequences", first[0], 3 if turns == MANY[0] else None),
        Gate(f"{turns} turns: hits / LRUPromptCache at its best", best, None, goal=3),
        Gate(f"{turns} turns: bytes / LRUPromptCache", first[1], 0.4 if turns == FEW[0] else None, at_most=True),
        Gate(f"{turns} turns: bytes above the budget", above, 0, at_most=True),
    ]


def missing(rng: np.random.Generator) -> Gate:
    """Time of a miss of each position of a prompt in a store of states alone."""
    state = ArraysCache(1)
    state[0] = mx.zeros((1, 4))
    prompts = PromptCache(store=MemoryStore(store_layout([state], "none"), 1 << 20))
    tokens = rng.integers(0, 32_000, LONG)
    value = median(seconds(lambda: prompts.fetch(tokens)) for _ in range(ROUNDS)) / LONG * 1e6
    return Gate(f"miss of {LONG:,} positions, each", value, None, at_most=True, unit="us")


def gates(args: argparse.Namespace) -> Iterator[Gate]:
    """Print the tables on stderr, and yield what has to hold."""
    rng = np.random.default_rng(SEED)
    yield from (*beside(*FEW, (1, 4)), *beside(*MANY, (1, 2)))
    yield from (fetching(rng), missing(rng))
    yield from (inserting(rng, False), inserting(rng, True))


if __name__ == "__main__":
    sys.exit(main())
