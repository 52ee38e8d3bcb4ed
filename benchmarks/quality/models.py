"""All that knows MLX: checkpoints, and what a model says about tokens, one by one, on a cache of any policy."""

from __future__ import annotations

import contextlib
import itertools
import json
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
BLOCK_SIZE = 16


def save(folder: Path, config: dict[str, Any], weights: dict[str, NDArray[Any]]) -> None:
    """Write a checkpoint as mlx-lm reads it: ``config.json`` and ``model.safetensors``."""
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    mx.save_safetensors(str(folder / "model.safetensors"), {name: mx.array(w) for name, w in weights.items()})


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
            yield merged, lambda: int(batch.rows.held.sum()) * each

    def answer(self, documents: NDArray[np.int32], policy: Policy) -> Answer:
        """Read documents: `PREFILL` tokens at once, the others one by one: a policy decides before every token."""
        rows, length = documents.shape
        tokens = mx.array(documents)
        nats, right = np.zeros((rows, length - 1), np.float32), np.zeros((rows, length - 1), bool)
        start = time.perf_counter()
        with self.caches(policy, rows, length) as (caches, nbytes):
            for begin, end in itertools.pairwise([0, *range(min(PREFILL, length - 1), length)]):
                logits = self.model(tokens[:, begin:end], cache=caches).astype(mx.float32)
                target = tokens[:, begin + 1 : end + 1]
                said = mx.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
                nat = mx.logsumexp(logits, axis=-1) - said
                hit = mx.argmax(logits, axis=-1) == target
                mx.eval(nat, hit)
                nats[:, begin:end], right[:, begin:end] = np.array(nat), np.array(hit)
            stored = nbytes()
        return Answer(nats, right, stored / rows, time.perf_counter() - start)
