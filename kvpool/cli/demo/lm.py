"""The mlx-lm side of the demo: a model, prompts, and runs of the stock engine with whatever cache it finds.

The only module of the command line that imports mlx and mlx-lm; the parts that need it import it when they run.
"""

from __future__ import annotations

import copy
import functools
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import llama
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from kvpool.adapters.mlx_lm import Engine, PagedKV, Summary, install, tiny
from kvpool.adapters.mlx_lm.loading import ModelNotLoaded, load
from kvpool.cli.console import CommandError, NotRun
from kvpool.cli.demo.report import Settings

VOCABULARY = 512
TEXTS = (
    "The block table maps",
    "A paged KV cache stores keys and values in blocks that need not be contiguous in memory, because",
    "Once upon a time, in a data centre far away, a scheduler had run out of memory. It looked at the waiting"
    " requests, then at the running ones, and it decided that",
    "1, 1, 2, 3, 5, 8,",
    "Write one sentence about copy-on-write:",
    "def fork(parent):\n    # share every block, copy none\n",
)
"""Prompts for a checkpoint that has a tokenizer."""


@dataclass(frozen=True)
class Workload:
    """A model and token prompts of mixed length; `label` says which model it is."""

    model: Any
    label: str
    prompts: list[list[int]]
    long_prompt: list[int]


@dataclass(frozen=True)
class Run:
    """The result of one run of the engine."""

    tokens: list[list[int]]  # generated, per prompt
    cache_nbytes: int  # largest sum of ``nbytes`` over the engine's caches, looked at after every step
    mlx_peak_nbytes: int  # of MLX's allocated memory during the run: weights, activations and pool included
    seconds: float  # wall time

    @property
    def num_tokens(self) -> int:
        """Generated tokens of all prompts."""
        return sum(map(len, self.tokens))

    @property
    def num_distinct(self) -> int:
        """Different ones among them."""
        return len({token for row in self.tokens for token in row})

    @property
    def numbers(self) -> dict[str, Any]:
        """Bytes and times of the run, for the JSON object."""
        nbytes = {"kv_nbytes_peak": self.cache_nbytes, "mlx_peak_nbytes": self.mlx_peak_nbytes}
        return nbytes | {"seconds": round(self.seconds, 3)}


@functools.lru_cache(maxsize=1)
def make_workload(settings: Settings) -> Workload:
    """Load `settings.model`, or build the small random Llama."""
    if settings.model is not None:
        return load_checkpoint(settings.model, settings.sample_prompt)
    mx.random.seed(settings.seed)
    rng = np.random.default_rng(settings.seed)
    prompts = [rng.integers(0, VOCABULARY, n).tolist() for n in settings.prompt_lengths]
    long_prompt = rng.integers(0, VOCABULARY, settings.sample_prompt).tolist()
    return Workload(random_llama(), "Llama with 4 layers and random weights, nothing downloaded", prompts, long_prompt)


def random_llama(**sizes: int) -> Any:
    """Return a Llama whose greedy output is varied; `sizes` are those of mlx-lm's ``ModelArgs``.

    With default weights the logits are so flat that a few tokens repeat; unit-variance weights give nearly as
    many distinct tokens as steps, so that a wrong cache cannot go unnoticed.
    """
    defaults: dict[str, Any] = {
        **{"model_type": "llama", "hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 256},
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "rms_norm_eps": 1e-5},
        **{"vocab_size": VOCABULARY, "tie_word_embeddings": False},
    }
    model = llama.Model(llama.ModelArgs(**(defaults | sizes)))
    model.update(tree_map(lambda p: mx.random.normal(p.shape) if p.ndim == 2 else p, model.parameters()))
    mx.eval(model.parameters())
    return model


def load_checkpoint(name: str, prompt_len: int) -> Workload:
    """Load a checkpoint through mlx-lm, and encode `TEXTS` with its tokenizer; the long prompt is cut."""
    try:
        model, tokenizer = load(name)
    except ModelNotLoaded as exc:
        raise CommandError(f"--model {exc}") from exc
    prompts = [tokenizer.encode(text) for text in TEXTS]
    repeated = tokenizer.encode("\n".join(TEXTS) * 8)
    return Workload(model, f"checkpoint {name}", prompts, repeated[:prompt_len])


def generate(
    model: Any,
    prompts: list[list[int]],
    max_tokens: int,
    *,
    caches: list[list[Any]] | None = None,
    sampler: Callable[[mx.array], mx.array] | None = None,
    together: int = 8,
) -> Run:
    """Continue `prompts` with mlx-lm's `BatchGenerator`, at most `together` prompts in one prefill."""
    mx.synchronize()
    mx.reset_peak_memory()
    cache_nbytes = 0
    start = time.perf_counter()
    engine = BatchGenerator(
        model,
        max_tokens=max_tokens,
        sampler=sampler,
        prefill_batch_size=together,
        completion_batch_size=max(32, together),
        prefill_step_size=64,
    )
    try:
        tokens: dict[int, list[int]] = {uid: [] for uid in engine.insert(prompts, caches=caches)}
        busy = True
        while busy:
            prompt_responses, responses = engine.next()
            for response in responses:
                tokens[response.uid].append(response.token)
            cache_nbytes = max(cache_nbytes, engine.prompt_cache_nbytes)
            busy = bool(prompt_responses or responses)
    finally:
        engine.close()
    return Run(list(tokens.values()), cache_nbytes, mx.get_peak_memory(), time.perf_counter() - start)


def sample(model: Any, prompt: list[int], samples: int, max_tokens: int, seed: int) -> tuple[Run, float]:
    """Prefill `prompt` once, deep-copy its cache `samples` times, and continue every copy at temperature 1.

    This is what a host of mlx-lm does today for n samples. The draws depend on the seed and the logits only.

    Returns
    -------
    run : Run
    seconds : float
        Time of the copies alone.
    """
    cache = make_prompt_cache(model)
    model(mx.array([prompt[:-1]]), cache=cache)
    mx.eval([c.state for c in cache])
    start = time.perf_counter()
    copies = [copy.deepcopy(cache) for _ in range(samples)]
    seconds = time.perf_counter() - start
    mx.random.seed(seed)
    last = [prompt[-1:] for _ in range(samples)]
    run = generate(model, last, max_tokens, caches=copies, sampler=mx.random.categorical, together=samples)
    return run, seconds


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


def decode(
    model: Any, num_rows: int, context: int, steps: int, block_size: int, *, fused: bool
) -> tuple[list[list[int]], float]:
    """Decode `steps` tokens greedily in `num_rows` rows whose caches hold `context` random keys and values.

    A prefill of that length would take longer than all the rest, and a decode step does not see the difference.
    On MLX's CPU device, where the kernels are. One more step comes before those that are measured.

    Returns
    -------
    tokens : list of list of int
        Per row.
    ms : float
        Median CPU time of a step.

    Raises
    ------
    NotRun
        There are no kernels for `fused`.
    """
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        num_blocks = num_rows * -(-(context + steps + 1) // block_size) + 1
        with install_pool(model, num_blocks, block_size, fused=fused) as kv:
            cache, spec = kv.make_cache(), kv.backend.spec
            mx.random.seed(num_rows)
            for layer in cache:
                layer.update_and_fetch(
                    *(mx.random.normal((num_rows, spec.num_kv_heads, context, dim)) for _, dim in spec.planes)
                )
            tokens, ms, last = [], [], mx.arange(num_rows)[:, None]
            for _ in range(steps + 1):
                start = time.process_time()
                last = mx.argmax(model(last, cache=cache), axis=-1)
                mx.eval(last)
                ms.append((time.process_time() - start) * 1e3)
                tokens.append(last[:, 0].tolist())
    finally:
        mx.set_default_device(device)
    return [list(row) for row in zip(*tokens[1:], strict=True)], median(ms[1:])


def compare_layers(arch: str, settings: Settings) -> dict[str, Any]:
    """Continue prompts with a tiny model, by stock and on a pool, each alone and in a batch.

    Returns
    -------
    dict
        ``tokens`` of stock alone, of kvpool alone and in a batch; ``nbytes`` of both batches: keys, values and states;
        ``blocks_left``, ``layers`` in words, and the route of attention.
    """
    rng = np.random.default_rng(settings.seed)
    model, _ = tiny.make(arch)
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


def second_turn(arch: str, settings: Settings) -> dict[str, Any]:
    """Hold two turns of a conversation with a tiny model: a prompt, then the same with another end and more tokens.

    Returns
    -------
    dict
        ``tokens`` of the second answer by stock and by kvpool; ``prompt``, ``shared`` and ``computed``: tokens of the
        second prompt, those that it shares with the first one, and those that were computed for it.
    """
    rng = np.random.default_rng(settings.seed)
    model, _ = tiny.make(arch)
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


def install_pool(
    model: Any, num_blocks: int, block_size: int, *, prefix_cache: bool = False, fused: bool | None = None
) -> PagedKV:
    """Put `model` on a pool of its own, for the length of a ``with`` block.

    A model in 16 bits gathers unless `fused` says something: its tokens are compared with those of mlx-lm's own
    attention, and where two tokens are nearly as likely, two ways to round may choose different ones.

    Raises
    ------
    NotRun
        The adapter does not take this model, or this release of mlx-lm.
    """
    install_by = functools.partial(install, model, num_blocks, block_size=block_size, prefix_cache=prefix_cache)
    try:
        kv = install_by(fused=fused)
        return kv if fused is not None or kv.backend.dtype == mx.float32 else install_by(fused=False)
    except (RuntimeError, ValueError) as exc:
        raise NotRun(str(exc)) from exc


def account(kv: PagedKV) -> Summary:
    """Return the account of a pool after the engine is gone: blocks still used then were leaked."""
    gc.collect()  # caches in reference cycles are garbage, not leaks
    return kv.summary()
