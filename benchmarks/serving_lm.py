"""The mlx-lm side of ``python -m benchmarks.serving``: models, stock's batch engine as a server, stopwatches.

The only module of it that imports mlx and mlx-lm.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import llama
from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.utils import save_config, save_model
from numpy.typing import NDArray

from benchmarks.serving import Tick, Workload
from kvpool import Request
from kvpool.adapters.mlx_lm import loading, tiny
from kvpool.adapters.mlx_lm.engine import Engine
from kvpool.adapters.mlx_lm.layout import layout_of
from kvpool.adapters.mlx_lm.shapes import inspect_model
from kvpool.cli.console import CommandError
from kvpool.scheduler import Output, Step

LLAMA = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "vocab_size": 1024,
    "tie_word_embeddings": False,
}
SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        **{"hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 128},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    },
    "medium": {
        **{"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 512},
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
    },
    "big": {
        **{"hidden_size": 1024, "num_hidden_layers": 8, "intermediate_size": 2816},
        **{"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64},
    },
}
"""Llamas with random weights. A step of the medium one with 16 to 32 rows takes 20 to 50 ms on two cores with
MLX for Linux, whose matrix products take as long for each row as for one row alone."""


def load(name: str) -> tuple[Any, int]:
    """Return a model and its number of tokens: one of `SIZES`, or a checkpoint that mlx-lm loads.

    Raises
    ------
    CommandError
        mlx-lm cannot load it.
    """
    if name not in SIZES:
        try:
            model, _ = loading.load(name)
        except loading.ModelNotLoaded as exc:
            raise CommandError(f"--model {exc}") from exc
        return model, int(model.args.vocab_size)
    model = llama.Model(llama.ModelArgs.from_dict(LLAMA | SIZES[name]))
    tiny.randomize(model)
    model.eval()
    mx.eval(model.parameters())
    return model, int(LLAMA["vocab_size"])  # type: ignore[call-overload]


def save(name: str, folder: Path) -> None:
    """Write one of `SIZES` with a tokenizer of bytes. All that it says are visible ASCII characters, without an end.

    Detokenizers of mlx-lm drop a space that an answer begins with; so there is none.
    """
    config = tiny.CONFIG | SIZES[name]
    model, tokenizer = llama.Model(llama.ModelArgs.from_dict(config)), tiny.byte_tokenizer()
    tiny.randomize(model)
    visible = ["!" <= tokenizer.decode([token]) <= "~" for token in range(len(tokenizer) - 1)]
    model.lm_head.weight *= mx.array([*visible, False])[:, None]
    folder.mkdir(parents=True)
    save_model(folder, model)
    save_config(config, folder / "config.json")
    tokenizer.save_pretrained(folder)


BLOCK_SIZE = 16
PROMPT_CACHES, PROMPTS = 10, 8
"""Sequences that mlx-lm's server remembers, and prompts that it computes at a time, by default."""


def block_nbytes(model: Any, block_size: int) -> int:
    """Return the bytes of a block of a model's cache, all layers together."""
    return layout_of(inspect_model(model), block_size, keeps_all=True).block_nbytes[0]


class StockServer:
    """mlx-lm's own `BatchGenerator` on its own caches, which are counted in blocks of `block_nbytes`.

    `batch` sequences run at a time, prompts among them; a step computes `chunk` tokens of all prompts together. If
    every prompt begins with `shared_prefix` tokens, requests look mlx-lm's prompt cache up when it is their turn, and
    leave there the shared prefix and what they computed, as mlx-lm's server does.
    """

    def __init__(self, model: Any, batch: int, *, chunk: int, block_nbytes: int, shared_prefix: int = 0) -> None:
        prompts = min(batch, PROMPTS)
        self.generator = BatchGenerator(
            model,
            completion_batch_size=batch,
            prefill_batch_size=prompts,
            prefill_step_size=max(1, chunk // prompts),
        )
        self.batch, self.block_nbytes, self.shared_prefix = batch, block_nbytes, shared_prefix
        self.prompt_cache = LRUPromptCache(PROMPT_CACHES) if shared_prefix else None
        self.tokens: dict[int, list[int]] = {}
        self._waiting: deque[tuple[int, list[int], int]] = deque()  # number, prompt, most tokens
        self._numbers: dict[int, int] = {}  # by uid, as long as the request is not through
        self._prefilled: dict[int, int] = {}  # tokens of the prompts that were begun and are not through
        self._answers: Any = ([], [])

    def add(self, number: int, prompt: NDArray[np.int32], max_tokens: int) -> None:
        self.tokens[number] = []
        self._waiting.append((number, prompt.tolist(), max_tokens))

    @property
    def is_busy(self) -> bool:
        return bool(self._numbers or self._waiting)

    def tick(self) -> None:
        """One step of the engine; what it computes for the step after goes on."""
        while self._waiting and (self.prompt_cache is None or len(self._numbers) < self.batch):
            number, prompt, max_tokens = self._waiting.popleft()
            self._numbers[self._insert(prompt, max_tokens)] = number
        self._answers = self.generator.next()
        if self.prompt_cache is not None:
            self._remember(*self._answers)

    def _insert(self, prompt: list[int], max_tokens: int) -> int:
        """Hand a request to the engine, with the KV that the prompt cache has of it; return its uid."""
        cache: Any = None
        rest = prompt
        if self.prompt_cache is not None:
            cache, rest = self.prompt_cache.fetch_nearest_cache("", prompt)
        if not rest:  # the last token has to be computed, for what comes next
            cache, rest = None, prompt
        done = len(prompt) - len(rest)
        parts = [prompt[done : self.shared_prefix], prompt[max(done, self.shared_prefix) :]]
        (uid,) = self.generator.insert_segments([parts], [max_tokens], caches=[cache], all_tokens=[prompt[:done]])
        return int(uid)

    def _remember(self, prompts: list[Any], responses: list[Any]) -> None:
        """Leave the shared prefix, and each sequence that ends, in the prompt cache."""
        assert self.prompt_cache is not None
        begun = [r.uid for r in prompts if r.end_of_segment and not r.end_of_prompt]
        for cache, tokens in self.generator.extract_cache(begun).values():
            self.prompt_cache.insert_cache("", tokens[:], cache, cache_type="system")
        for response in responses:
            if response.finish_reason is not None:
                self.prompt_cache.insert_cache("", response.all_tokens[:], response.prompt_cache)

    def describe(self) -> Tick:
        """The last step. Its caches are counted as they are now."""
        prompts, responses = self._answers
        tick = Tick(tokens=len(responses), decodes=len(responses))
        for response in prompts:
            done = response.progress[0]
            tick.prefill_tokens += done - self._prefilled.get(response.uid, 0)
            self._prefilled[response.uid] = done
        for response in responses:
            self.tokens[self._numbers[response.uid]].append(response.token)
        for response in responses:
            if response.finish_reason is not None:
                del self._numbers[response.uid], self._prefilled[response.uid]
        tick.blocks_in_use = -(-self.cache_nbytes() // self.block_nbytes)
        return tick

    def settle(self) -> None:
        mx.synchronize(self.generator.stream)

    def cache_nbytes(self) -> int:
        """Bytes of its caches: of prompts that are computed, of answers, and of the prompt cache."""
        batches = self.generator._prompt_batch, self.generator._generation_batch
        kept = 0 if self.prompt_cache is None else self.prompt_cache.nbytes
        return kept + sum(cache.nbytes for batch in batches for cache in batch.prompt_cache)

    def close(self) -> None:
        """Let the engine go; the answers stay."""
        mx.synchronize()
        self.generator.close()
        del self.generator, self.prompt_cache


class EngineServer:
    """`kvpool.adapters.mlx_lm.engine.Engine` on a pool of its own, of `num_blocks` usable blocks."""

    def __init__(self, model: Any, num_blocks: int, block_size: int, max_running: int, **options: Any) -> None:
        self.engine = Engine(model, num_blocks + 1, block_size=block_size, max_running=max_running, **options)
        self.tokens: dict[int, list[int]] = {}
        self._update = self.engine.scheduler.update
        self.engine.scheduler.update = self._observed  # type: ignore[method-assign, assignment]
        self._tick = Tick()
        self._emitted = 0
        self._ended: list[Any] = []

    def _observed(self, step: Step, *results: Any) -> list[Output]:
        self._tick.decodes = step.num_decodes
        self._tick.prefill_tokens = len(step.tokens) - step.num_decodes
        self._tick.blocks_in_use = self.engine.kv.pool.stats().used
        return self._update(step, *results)

    def add(self, number: int, prompt: NDArray[np.int32], max_tokens: int) -> None:
        # The listener counts for the engine: it is part of the time of a step.
        self.engine.submit(Request(prompt, max_tokens, id=number), on_token=self._count)

    def _count(self, event: Any) -> None:
        self._emitted += 1

    @property
    def is_busy(self) -> bool:
        return self.engine.num_unfinished > 0

    def tick(self) -> None:
        self._tick, self._emitted = Tick(), 0
        self._ended = self.engine.step()

    def settle(self) -> None:
        mx.synchronize()

    def describe(self) -> Tick:
        for completion in self._ended:
            self.tokens[completion.id] = completion.samples[0].tokens.tolist()
        self._ended = []
        self._tick.tokens = self._emitted
        return self._tick

    def close(self) -> None:
        """Give everything back; the answers stay."""
        self.engine.close()
        del self.engine, self._update


class Bench:
    """A model, and the engines that serve it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model, self.vocab_size = load(name)

    def server(self, name: str, workload: Workload, batch: int, chunk: int) -> Any:
        """Return a fresh engine: "kvpool" or "stock"."""
        if name == "stock":
            nbytes = block_nbytes(self.model, BLOCK_SIZE)
            shared = workload.shared_prefix
            return StockServer(self.model, batch, chunk=chunk, block_nbytes=nbytes, shared_prefix=shared)
        num_blocks = batch * -(-workload.longest // BLOCK_SIZE)
        options = {"max_step_tokens": batch + chunk, "prefill_chunk": chunk}
        return EngineServer(self.model, num_blocks, BLOCK_SIZE, batch, **options)
