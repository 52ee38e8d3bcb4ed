"""All that knows MLX: checkpoints, and what a model says about tokens, one by one, on a cache of any policy."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from benchmarks.quality.answers import Answer
from benchmarks.quality.control import RandomCache
from benchmarks.quality.policies import DECAY, SINK, Policy

PREFILL = 32
"""Tokens of a document that are read at once, before the first decision."""
LONG, PIECE = 16384, 128
"""From how many tokens on a document is long, and what is then read at once where nothing is to be decided."""
TOP = 32
BLOCK_SIZE = 16


def save(folder: Path, config: dict[str, Any], weights: dict[str, NDArray[Any]]) -> None:
    """Write a checkpoint as mlx-lm reads it: ``config.json`` and ``model.safetensors``."""
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    mx.save_safetensors(str(folder / "model.safetensors"), {name: mx.array(w) for name, w in weights.items()})


def edges_of(policy: Policy, length: int) -> list[int]:
    """Return where each piece of a document begins that is read at once, and where the last one ends.

    A policy decides before every token. Where all are kept nothing is decided, and a long document, whose tokens would
    take an hour one by one, is read in larger pieces: the same attention, summed in another order.
    """
    last = length - 1
    if policy.kind == "unlimited" and length >= LONG:
        return [*range(0, last, PIECE), last]
    return [0, *range(min(PREFILL, last), length)]


class Model:
    """A model of mlx-lm, and questions to it.

    Parameters
    ----------
    name : str
        A folder, or an id that mlx-lm downloads. Weights in float32 are cast to float16, as K and V are stored.
    """

    def __init__(self, name: str, *, has_tokenizer: bool = True) -> None:
        from mlx_lm.utils import load_model

        from kvpool.adapters.mlx_lm.loading import load

        self.model: Any
        self.tokenizer: Any
        self.model, self.tokenizer = load(name) if has_tokenizer else (load_model(Path(name))[0], None)
        if any(layer.weight.dtype == mx.float32 for _, layer in self._norms()):
            self.model.set_dtype(mx.float16)
        mx.eval(self.model.parameters())

    def _norms(self) -> list[tuple[str, Any]]:
        return [(name, module) for name, module in self.model.named_modules() if name.endswith("norm")]

    @contextlib.contextmanager
    def caches(self, policy: Policy, rows: int, length: int) -> Iterator[tuple[list[Any], Callable[[], float]]]:
        """Yield empty caches of all layers for sequences of `length` tokens, and what tells the bytes of K and V.

        Raises
        ------
        ValueError
            The model's own caches are such that the policy's cannot stand in for them.
        """
        from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

        if policy.kind in ("h2o", "block") or policy.bits != "16/16":
            with self._paged(policy, rows, length) as paged:
                yield paged
            return
        found = make_prompt_cache(self.model)
        if policy.kind != "unlimited":
            for layer, cache in enumerate(found):
                if type(cache) is not KVCache:
                    name = type(cache).__name__
                    raise ValueError(f"[quality] layer {layer} uses {name}, {policy.name} stands in for KVCache only")
            is_stock = policy.kind == "rotating"
            found = [
                RotatingKVCache(policy.max_kv, keep=SINK) if is_stock else RandomCache(policy, layer)
                for layer in range(len(found))
            ]
        yield found, lambda: sum(cache.nbytes for cache in found)

    def check(self, policies: Iterable[Policy]) -> None:
        """Raise the ValueError that one of the policies would end in: nothing has to be measured to see it."""
        for policy in policies:
            with self.caches(policy, 1, 1):
                pass

    @contextlib.contextmanager
    def _paged(self, policy: Policy, rows: int, length: int) -> Iterator[tuple[list[Any], Callable[[], float]]]:
        """Yield kvpool's caches, merged to one batch."""
        from kvpool.adapters.mlx_lm import PagedKVCache, install
        from kvpool.eviction import H2O, BlockEviction

        eviction: Any = None
        if policy.kind == "block":
            eviction = BlockEviction(max_kv=policy.max_kv, sink=SINK, alpha=DECAY)
        elif policy.kind == "h2o":
            chosen: Any = {"heavy": policy.heavy, "kind": policy.scores, "slack": policy.slack}
            eviction = H2O(max_kv=policy.max_kv, sink=SINK, alpha=DECAY, **chosen)
        most = length if eviction is None else policy.max_kv + PREFILL
        stored: Any = {"k_bits": policy.k_bits, "v_bits": policy.v_bits, "quant_group_size": policy.group_size}
        blocks = rows * (-(-most // BLOCK_SIZE) + 2)
        with install(self.model, num_blocks=blocks, block_size=BLOCK_SIZE, eviction=eviction, **stored) as kv:
            layers = zip(*(kv.make_cache() for _ in range(rows)), strict=True)
            merged = [PagedKVCache.merge(layer) for layer in layers]
            batch, spec = merged[0].batch, kv.backend.spec
            each = policy.bytes_per_token(spec.num_kv_heads, (spec.head_dim, spec.value_head_dim), spec.num_layers)
            yield merged, lambda: int(batch.rows.lens.sum()) * each

    def answer(
        self, documents: NDArray[np.int32], policy: Policy, advance: Callable[[int], None] = lambda tokens: None
    ) -> Answer:
        """Read documents: `PREFILL` tokens at once, the others one by one (see `edges_of`)."""
        rows, length = documents.shape
        tokens = mx.array(documents)
        nats, right = np.zeros((rows, length - 1), np.float32), np.zeros((rows, length - 1), bool)
        start = time.perf_counter()
        with self.caches(policy, rows, length) as (caches, nbytes):
            for begin, end in itertools.pairwise(edges_of(policy, length)):
                logits = self.model(tokens[:, begin:end], cache=caches).astype(mx.float32)
                target = tokens[:, begin + 1 : end + 1]
                said = mx.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
                nat = mx.logsumexp(logits, axis=-1) - said
                hit = mx.argmax(logits, axis=-1) == target
                mx.eval(nat, hit)
                nats[:, begin:end], right[:, begin:end] = np.array(nat), np.array(hit)
                advance(rows * (end - begin))
            stored = nbytes()
        return Answer(nats, right, stored / rows, time.perf_counter() - start)

    def profile(self, documents: NDArray[np.int32]) -> list[dict[str, float]]:
        """Return for each layer the entropy of attention in nats, and the share of the `TOP` tokens that get most.

        Means over heads and over the queries of the second half of the documents.
        """
        found: list[dict[str, float]] = []

        def watch(queries: mx.array, keys: mx.array, scale: float) -> None:
            group = queries.shape[1] // keys.shape[1]
            spread = mx.repeat(keys, group, 1).astype(mx.float32)
            scores = (queries * scale).astype(mx.float32) @ spread.swapaxes(-1, -2)
            length = scores.shape[-1]
            late = mx.arange(length // 2, length)
            seen = mx.arange(length)[None] <= late[:, None]
            p = mx.softmax(mx.where(seen, scores[..., length // 2 :, :], -mx.inf), axis=-1)
            entropy = -(p * mx.log(mx.maximum(p, 1e-30))).sum(axis=-1)
            top = mx.topk(p, min(TOP, length), axis=-1).sum(axis=-1)
            found.append({"entropy": float(entropy.mean()), "top_share": float(top.mean())})

        with self._watched(watch):
            mx.eval(self.model(mx.array(documents)))
        return found

    @contextlib.contextmanager
    def _watched(self, watch: Callable[[mx.array, mx.array, float], None]) -> Iterator[None]:
        """Have every attention of the model tell its queries, keys and scale."""
        module: Any = sys.modules[type(self.model).__module__]
        original = module.scaled_dot_product_attention

        def attend(
            queries: mx.array, keys: mx.array, values: mx.array, cache: Any, scale: float, *args: Any, **options: Any
        ) -> mx.array:
            watch(queries, keys, scale)
            return original(queries, keys, values, cache, scale, *args, **options)

        module.scaled_dot_product_attention = attend
        try:
            yield
        finally:
            module.scaled_dot_product_attention = original

    def speed(self, policy: Policy, prompt: NDArray[np.int32], tokens: int, runs: int = 3) -> tuple[float, int]:
        """Return tokens per second of greedy decoding behind a prompt, the median of several runs, and the peak bytes.

        Of MLX's memory above that of the weights.
        """
        rates, peak = [], 0
        for _ in range(runs):
            mx.clear_cache()
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            with self.caches(policy, 1, len(prompt) + tokens) as (caches, _):
                rates.append(self._rate(caches, prompt, tokens))
            peak = max(peak, mx.get_peak_memory() - before)
        return float(np.median(rates)), peak

    def _rate(self, caches: list[Any], prompt: NDArray[np.int32], tokens: int) -> float:
        logits = self.model(mx.array(prompt[None, :PREFILL]), cache=caches)
        for place in range(PREFILL, len(prompt)):
            logits = self.model(mx.array(prompt[None, place : place + 1]), cache=caches)
            mx.eval(logits)
        token = mx.argmax(logits[:, -1:], axis=-1)
        start = time.perf_counter()
        for _ in range(tokens):
            token = mx.argmax(self.model(token, cache=caches)[:, -1:], axis=-1)
            mx.eval(token)
        return tokens / (time.perf_counter() - start)
