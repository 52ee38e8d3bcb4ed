"""What the parts of the whole demo do with models of mlx-lm: see `kvpool.cli.demo.lm`, which has the rest."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from benchmarks import tiny_families
from benchmarks.demo.settings import AllSettings
from kvpool.adapters.mlx_lm import Engine, PagedKV, tiny
from kvpool.cli.demo.lm import Run, generate, install_pool


def generate_shared(kv: PagedKV, system: list[int], prompts: list[list[int]], max_tokens: int) -> tuple[Run, int]:
    """Compute `system` and commit it, then serve `prompts`, which begin with it, from the prefix cache.

    Returns
    -------
    run : Run
    held : int
        Blocks in use when all requests have found their prefix and none has computed a token.
    """
    cache = make_prompt_cache(kv.model)
    kv.model(mx.array([system]), cache=cache)
    kv.commit(cache, system)
    del cache
    caches, rest = [], []
    for prompt in prompts:
        found, num_cached = kv.fetch(prompt)
        caches.append(found)
        rest.append(prompt[num_cached:])
    held = kv.summary().blocks_used
    return generate(kv.model, rest, max_tokens, caches=caches, together=len(prompts)), held


def compare_layers(arch: str, settings: AllSettings) -> dict[str, Any]:
    """Continue prompts with a tiny model, by stock and on a pool, each alone and in a batch.

    Returns
    -------
    dict
        ``tokens`` of stock alone, of kvpool alone and in a batch; ``nbytes`` of both batches: keys, values and states;
        ``blocks_left``, ``layers`` in words, and the route of attention.
    """
    rng = np.random.default_rng(settings.seed)
    model, _ = tiny_families.make(arch)
    prompts = [rng.integers(0, tiny.CONFIG["vocab_size"], n).tolist() for n in settings.prompt_lengths]
    longest = max(settings.prompt_lengths) + settings.sample_tokens
    stock = [generate(model, [prompt], settings.sample_tokens).tokens[0] for prompt in prompts]
    theirs = generate(model, prompts, settings.sample_tokens)
    num_blocks = 1 + (len(prompts) + 1) * (longest // settings.block_size + 2)
    with install_pool(model, num_blocks, settings.block_size) as kv:
        alone = [generate(model, [prompt], settings.sample_tokens).tokens[0] for prompt in prompts]
        ours = generate(model, prompts, settings.sample_tokens)
        gc.collect()
        summary = kv.summary()
        described = kv.layout.model.describe()
    return {
        "tokens": {"stock": stock, "alone": alone, "batch": ours.tokens},
        "nbytes": {"stock": theirs.cache_nbytes, "kvpool": ours.cache_nbytes},
        "kv_nbytes_peak": summary.kv_nbytes_peak,
        "blocks_left": summary.blocks_used,
        "layers": described,
        "attention": summary.route,
    }


def second_turn(arch: str, settings: AllSettings) -> dict[str, Any]:
    """Hold two turns of a conversation with a tiny model: a prompt, then the same with another end and more tokens.

    Returns
    -------
    dict
        ``tokens`` of the second answer by stock and by kvpool; ``prompt``, ``shared`` and ``computed``: tokens of the
        second prompt, those that it shares with the first one, and those that were computed for it.
    """
    rng = np.random.default_rng(settings.seed)
    model, _ = tiny_families.make(arch)
    first = rng.integers(0, tiny.CONFIG["vocab_size"], max(settings.prompt_lengths) + 64).tolist()
    shared = len(first) - 5
    second = [*first[:shared], *rng.integers(0, tiny.CONFIG["vocab_size"], 40).tolist()]
    stock = generate(model, [second], settings.sample_tokens).tokens[0]
    with Engine(model, 4 * len(second) // settings.block_size, block_size=settings.block_size) as engine:
        engine.generate(first, max_tokens=settings.sample_tokens, cut=shared)
        answer = engine.generate(second, max_tokens=settings.sample_tokens)
    computed = len(second) - answer.samples[0].output.num_cached
    ours = answer.tokens.tolist()
    return {"tokens": {"stock": stock, "kvpool": ours}, "prompt": len(second), "shared": shared, "computed": computed}


@dataclass(frozen=True)
class Talk:
    """One sequence, token by token: what was fed, what came out of it, and what it took."""

    tokens: list[int]
    choices: list[int]  # the likeliest next token after each
    logits: list[bytes]  # after each
    most_held: int  # tokens in the cache at any time
    nbytes: int  # of the cache, the most at any time

    def share_like(self, other: Talk) -> float:
        """Share of the choices that are those of another talk."""
        return sum(a == b for a, b in zip(self.choices, other.choices, strict=True)) / len(self.choices)


def talk(model: Any, tokens: list[int], length: int, cache: list[Any] | None) -> Talk:
    """Feed `tokens` one by one, and the likeliest ones after them, up to `length`."""
    cache = make_prompt_cache(model) if cache is None else cache
    fed, most, nbytes = list(tokens[:length]), 0, 0
    choices: list[int] = []
    logits: list[bytes] = []
    for at in range(length):
        if at == len(fed):
            fed.append(choices[-1])
        out = model(mx.array([[fed[at]]]), cache=cache)[0, -1].astype(mx.float32)
        logits.append(np.array(out).tobytes())
        choices.append(int(mx.argmax(out)))
        most = max(most, cache[0].size())
        nbytes = max(nbytes, sum(layer.nbytes for layer in cache))
    return Talk(fed, choices, logits, most, nbytes)


def rotating_cache(model: Any, max_size: int) -> list[Any]:
    """mlx-lm's caches of the newest tokens, and the first four."""
    return [RotatingKVCache(max_size=max_size, keep=4) for _ in model.layers]


def positions_held(caches: list[Any]) -> np.ndarray:
    """Logical positions that a paged cache holds, ``[L, Hk, n]``."""
    batch = caches[0].batch
    batch.eviction.settle()
    return np.array(batch.eviction.memory.positions(0, int(batch.rows.held[0]), caches[0].offset))
