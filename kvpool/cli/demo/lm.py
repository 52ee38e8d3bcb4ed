"""The mlx-lm side of the demo: a model, prompts, and runs of the stock engine with whatever cache it finds.

Of the demo only this imports mlx and mlx-lm; the parts that need it import it when they run.
"""

from __future__ import annotations

import copy
import functools
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from kvpool.adapters.mlx_lm import PagedKV, Summary, install
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
