"""`PromptCache` beside mlx-lm's `LRUPromptCache`: ``python -m benchmarks.prompt_cache``.

Conversations of a made-up agentic trace share a system prompt and take turns, few or many. All caches get the same
calls; caches have one small layer, so bytes are counted and no model runs. mlx-lm's server keeps 10 sequences unless it
is told otherwise; so `LRUPromptCache` plays with that limit, and with none. Then `fetch` of a long prompt beside one
copy of its bytes by MLX, and `insert` of one more turn behind a long and a short prompt, and a miss of states
in a store.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache, LRUPromptCache

from benchmarks.baselines import alternate, seconds
from benchmarks.command import main
from benchmarks.gate import Gate, table
from benchmarks.replay.readers import read_trace
from kvpool.adapters.prompt_cache import BLOCK, PromptCache
from kvpool.adapters.prompt_store import store_layout
from kvpool.store import MemoryStore

CONVERSATIONS, SEED = 200, 1
FEW, MANY = (3, 512), (12, 256)  # turns, and tokens of the system prompt
SERVER = 10  # sequences that mlx-lm's server keeps by default
TOKEN_NBYTES = 1024  # a small model's
LAYERS, HEADS, DIM = 4, 2, 64  # of the caches whose calls are timed: 4 KiB a token
SHORT, LONG, TURN, ROUNDS = 1024, 32_768, 256, 15
LOOKUPS = ((2_000, 50, 20), (32_000, 40, 4))  # tokens, the goal beside mlx-vlm, lookups of a round
TRACED, TRACED_NBYTES = 400, 4096  # requests of a trace, and bytes of a token; SmolLM-135M has 23,040
OPTIONS = {"traces": ("", "a folder of traces (.npz)")}


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


def play(prompts: Any, requests: Any, has_state: bool = False, token_nbytes: int = TOKEN_NBYTES) -> tuple[int, int]:
    """Return hit tokens, and the most bytes that were held. A model that `has_state` has a state beside its rows."""
    hits, most = 0, 0
    for tokens in requests:
        caches, rest = prompts.fetch_nearest_cache("model", tokens)
        hits += len(tokens) - len(rest)
        cache, *others = caches or [KVCache(), *[ArraysCache(1)] * has_state]
        new = mx.zeros((1, 1, len(rest), token_nbytes // 8), mx.float32)
        cache.update_and_fetch(new, new)
        for state in others:
            state[0] = mx.zeros((1, 4 * token_nbytes))
        mx.eval(cache.keys, cache.values)
        prompts.insert_cache("model", tokens, [cache, *others])
        most = max(most, prompts.nbytes)
    return hits, most


def conversation(rng: np.random.Generator, length: int, dim: int = DIM) -> tuple[Any, list[Any]]:
    """Return tokens and the caches of a model that has computed them."""
    caches = [KVCache() for _ in range(LAYERS)]
    for cache in caches:
        cache.update_and_fetch(*(mx.random.normal((1, HEADS, length, dim)) for _ in range(2)))
    mx.eval([array for cache in caches for array in (cache.keys, cache.values)])
    return rng.integers(0, 32_000, length), caches


def fetching(rng: np.random.Generator) -> Gate:
    """CPU time of `fetch` beside that of MLX's copy of the same bytes, in all threads."""
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
        once = seconds(copied, time.process_time)
        ratios.append(seconds(partial(prompts.fetch, prompt), time.process_time) / once)
    return Gate(f"fetch of {LONG:,} tokens / one copy", median(ratios), 1.2, at_most=True)


def inserting(rng: np.random.Generator, as_list: bool) -> Gate:
    """CPU time of one more turn behind a long prompt beside that behind a short one, in an array or a list."""
    spent: dict[int, list[float]] = {SHORT: [], LONG: []}
    prompts = PromptCache()
    begun = {length: conversation(rng, length + TURN) for length in spent}
    for length, (tokens, caches) in begun.items():
        prompts.insert(tokens[:length], caches)
    for _ in range(ROUNDS):
        for length, (tokens, caches) in begun.items():
            tokens[length:] = rng.integers(0, 32_000, TURN)
            given = tokens.tolist() if as_list else tokens
            spent[length].append(seconds(partial(prompts.insert, given, caches), time.thread_time))
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


def evicting(rng: np.random.Generator) -> Gate:
    """CPU time of a block that leaves."""
    spent = []
    for _ in range(ROUNDS):
        prompts = PromptCache()
        prompts.insert(*conversation(rng, LONG, 4))
        spent.append(seconds(partial(prompts.trim_to, n_sequences=0), time.thread_time))
    return Gate("a block that leaves", min(spent) / LONG * BLOCK * 1e6, 20, at_most=True, unit="us")


def waiting(rng: np.random.Generator) -> Gate:
    """The most CPU time that an insertion of 100,000 tokens takes during one short `fetch`, in the best of rounds."""
    tokens, caches = conversation(rng, 100_000)
    prompt, own = conversation(rng, SHORT)
    most = []
    for _ in range(5):
        prompts, is_put, may_end, spent = PromptCache(), threading.Event(), threading.Event(), [0.0]
        prompts.insert(prompt, own)

        def put(prompts: PromptCache = prompts, is_put: Any = is_put, may_end: Any = may_end) -> None:
            prompts.insert(tokens, caches)
            is_put.set()
            may_end.wait()  # its clock ends with it

        other = threading.Thread(target=put)
        other.start()
        clock = time.pthread_getcpuclockid(other.ident or 0)
        while not is_put.is_set():
            begun = time.clock_gettime(clock)
            prompts.fetch(prompt)
            spent.append(time.clock_gettime(clock) - begun)
        may_end.set()
        other.join()
        most.append(max(spent))
    return Gate("fetch beside an insert of 100,000, CPU", min(most) * 1e3, None, at_most=True, unit="ms", goal=20)


class OfVlm:
    """mlx-vlm's manager of blocks, with the calls that `play` makes, and with lookups and insertions alone."""

    def __init__(self, num_blocks: int, nbytes: int = 1 << 34) -> None:
        apc = importlib.import_module("mlx_vlm.apc")
        limits = {"memory_max_gb": nbytes / (1 << 30), "memory_reserve_gb": 0}
        self.manager, self.nbytes = apc.APCManager(num_blocks, BLOCK, overrides=limits), 0

    def find(self, tokens: Any) -> int:
        """Return the length of the longest known prefix."""
        blocks, length = self.manager.lookup_prefix(tokens)
        self.manager.release(blocks)
        return int(length)

    def put(self, tokens: Any, caches: list[KVCache], known: int = 0) -> None:
        """Insert what is behind the tokens that are known."""
        keys, values = ([getattr(one, name)[..., : len(tokens), :] for one in caches] for name in ("keys", "values"))
        self.manager.release(self.manager.store_kv_blocks(tokens, keys, values, skip_first_n_tokens=known))

    def fetch_nearest_cache(self, model: str, tokens: list[int]) -> tuple[list[KVCache], list[int]]:
        """Return a cache of zeros as long as the hit, and the rest of the tokens."""
        found, cache = self.find(tokens[:-1]), KVCache()
        old = mx.zeros((1, 1, found, TRACED_NBYTES // 8), mx.float32)
        cache.update_and_fetch(old, old)
        return [cache], tokens[found:]

    def insert_cache(self, model: str, tokens: list[int], caches: list[KVCache]) -> None:
        """Insert all tokens."""
        self.put(tokens, caches)


def beside_vlm(rng: np.random.Generator, length: int, goal: int, count: int) -> Iterator[Gate]:
    """CPU time of lookups and insertions of the same tokens by mlx-vlm's manager, with tiny keys and values."""
    tokens, caches = conversation(rng, length + TURN, 4)
    stock, prompts = OfVlm(length // BLOCK + ROUNDS * TURN), PromptCache()
    stock.put(tokens[:length].tolist(), caches)
    prompts.insert(tokens[:length], caches)
    for kind, prompt in (("a list", tokens[: length + 1].tolist()), ("an array", tokens[: length + 1])):
        calls: list[Any] = [partial(stock.find, prompt), partial(prompts._find, prompt, b"")]
        theirs, ours = alternate([(partial(repeat, call, count), count, call) for call in calls], 2 * ROUNDS)
        note = f"{theirs / 1e3:.0f} us, {ours / 1e3:.1f} us"
        yield Gate(f"lookup of {length:,}, {kind}: mlx-vlm / ours", theirs / ours, None, goal=goal, note=note)
    spent: list[list[float]] = [[], []]
    for _ in range(ROUNDS):
        tokens[length:] = rng.integers(0, 32_000, TURN)
        given = tokens.tolist()
        calls = [partial(stock.put, given, caches, length), partial(prompts.insert, given, caches)]
        for times, call in zip(spent, calls, strict=True):
            times.append(seconds(call, time.thread_time))
    theirs, ours = map(min, spent)
    note = f"{theirs * 1e3:.1f} ms, {ours * 1e3:.2f} ms"
    yield Gate(f"insert of {TURN} behind {length:,}: mlx-vlm / ours", theirs / ours, None, goal=10, note=note)
    held = len(stock.manager.hash_table) * 2 * LAYERS / sum(row is not None for row in prompts._index.rows)
    yield Gate(f"MLX arrays of {length:,} and {ROUNDS} tails: mlx-vlm / ours", held, None, goal=2 * LAYERS)


def repeat(call: Any, count: int) -> None:
    """Make so many calls."""
    for _ in range(count):
        call()


def traced(folder: Path) -> Iterator[Gate]:
    """Hit tokens in real traces at equal bytes: a block of a trace is one of ours, and a quarter of them fits.

    `PromptCache` counts its index, 57 bytes a token: one prompt less may fit. The others do not count theirs, such as
    224 bytes a token for the trie of `LRUPromptCache`.
    """
    for path in sorted(folder.glob("*.npz")):
        source = read_trace(path)
        if source.block_size < 1:
            continue
        requests = [
            (source.ids_of(row)[:, None] * BLOCK + np.arange(BLOCK)).ravel().tolist()
            for row in range(min(TRACED, len(source)))
            if len(source.ids_of(row))
        ]
        nbytes = len({token for tokens in requests for token in tokens}) * TRACED_NBYTES // 4
        for has_state in (False, True):
            others: dict[str, Any] = {"LRUPromptCache": LRUPromptCache(1 << 30, nbytes)}
            if not has_state and importlib.util.find_spec("mlx_vlm"):
                others["mlx-vlm's manager"] = OfVlm(nbytes // TRACED_NBYTES // BLOCK, nbytes)
            mine, _ = play(PromptCache(nbytes), requests, has_state, TRACED_NBYTES)
            for name, other in others.items():
                hits, _ = play(other, requests, has_state, TRACED_NBYTES)
                kind = "hybrid" if has_state else "dense"
                note = f"{mine:,}, {hits:,} of {sum(map(len, requests)):,}"
                yield Gate(f"{path.stem}, {kind}: hits / {name}", mine / max(1, hits), None, goal=1, note=note)


def gates(args: argparse.Namespace) -> Iterator[Gate]:
    """Print the tables on stderr, and yield what has to hold."""
    rng = np.random.default_rng(SEED)
    if args.traces:
        yield from traced(Path(args.traces))
        return
    yield from (*beside(*FEW, (1, 4)), *beside(*MANY, (1, 2)))
    yield from (fetching(rng), missing(rng), evicting(rng), waiting(rng))
    yield from (inserting(rng, False), inserting(rng, True))
    if importlib.util.find_spec("mlx_vlm"):
        for case in LOOKUPS:
            yield from beside_vlm(rng, *case)


if __name__ == "__main__":
    sys.exit(main())
