"""What eviction and quantization cost in quality: H2O and other policies beside windows, at equal budgets.

A small llama is trained on the sources of Python's library, whose bytes are its tokens, and reads others of them. In
the first quarter of a document eight keys are defined, and in its second half each definition has to be repeated:
*recall* is the share that the model repeats. Training takes minutes, and its result is kept in ``--cache-dir``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import math
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx import optimizers
from mlx_lm.models import llama
from mlx_lm.models.cache import ConcatenateKVCache, KVCache, RotatingKVCache
from mlx_lm.utils import load_model

from benchmarks.command import main
from kvpool.adapters.mlx_lm import PagedKVCache, install
from kvpool.eviction import H2O, BlockEviction

OPTIONS = {
    **{
        "context": (512, "tokens of a document"),
        "seeds": (3, "of documents"),
        "samples": (8, "documents of each seed"),
    },
    "cache-dir": (str(Path.home() / ".cache" / "kvpool"), "of the model"),
}
BYTES, KEYS, VALUES = 128, 8, 16
"""The vocabulary: bytes of the code, a use of each key, a definition of each key with each value."""

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": BYTES + KEYS + KEYS * VALUES,
    "max_position_embeddings": 65536,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
STAGES = ((250, 32, 96, 2), (300, 8, 512, 1), (50, 4, 1024, 1))
"""Steps on so many documents of so many tokens, with so many uses of each key. Recall is learned in short ones."""
RATE, WARM_UP, DECAY, BETAS, CLIP = 4e-3, 40, 0.05, (0.9, 0.98), 1.0
RECALL_WEIGHT = 2.0
"""Of a definition that is repeated, in the loss."""

BLOCK_SIZE, SINK, GROUP_SIZE = 16, 4, 32


# ---------------------------------------------------------------------------------------------- documents


def sources(folder: Path, least: int = 3000) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of all Python sources below a folder: those to train on, and those held out.

    Tests and installed packages are left out. A tenth of the files, chosen by name, is held out.
    """
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        text = path.read_bytes().translate(None, bytes(range(BYTES, 256)))
        left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib"} & set(name.parts)
        if not left_out and len(text) >= least:
            parts[hashlib.sha256(name.as_posix().encode()).digest()[0] < 26].append(text)
    train, held_out = (np.frombuffer(b"\n".join(part), np.uint8) for part in parts)
    return train, held_out


def planted(
    rng: np.random.Generator, text: np.ndarray, length: int, uses: int = 1, after: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return a document of `length` tokens, and which of them are definitions to be repeated.

    Every key is defined in the first quarter of the code, and used at random places at least `after` bytes behind it.
    """
    code = length - KEYS * (1 + 2 * uses)
    quarter = code // 4
    definitions = BYTES + KEYS + VALUES * np.arange(KEYS) + rng.integers(0, VALUES, KEYS)
    order = rng.permutation(KEYS)
    asked = rng.permutation(np.repeat(np.arange(KEYS), uses))
    places = np.concatenate([rng.integers(0, quarter, KEYS), rng.integers(quarter + after, code + 1, len(asked))])
    places.sort()
    inserted = np.concatenate([definitions[order], np.stack([BYTES + asked, definitions[asked]], axis=1).ravel()])
    at = np.concatenate([places[:KEYS], np.repeat(places[KEYS:], 2)])
    start = int(rng.integers(0, len(text) - code + 1))
    document = np.insert(text[start : start + code].astype(np.int32), at, inserted)
    marks = np.insert(np.zeros(code, bool), at, [False] * KEYS + [False, True] * len(asked))
    return document.astype(np.int32), marks


def drawn(rng: np.random.Generator, text: np.ndarray, count: int, *options: int) -> tuple[np.ndarray, np.ndarray]:
    """Return so many planted documents, one below the other, and their marks."""
    documents, marks = zip(*(planted(rng, text, *options) for _ in range(count)), strict=True)
    return np.stack(documents), np.stack(marks)


# ----------------------------------------------------------------------------------------------- training


def initial(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return random weights, named as in mlx-lm's llama; those at the ends of the residual branches are smaller."""
    dim, hidden, layers = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["num_hidden_layers"]
    q, kv = (CONFIG[name] * CONFIG["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    end = (2 * layers) ** -0.5
    weights = {"model.embed_tokens": rng.standard_normal((CONFIG["vocab_size"], dim)) * 0.02}
    for layer in range(layers):
        for name, rows, columns, scale in (
            *(("self_attn.q_proj", q, dim, 1), ("self_attn.k_proj", kv, dim, 1), ("self_attn.v_proj", kv, dim, 1)),
            *(("self_attn.o_proj", dim, q, end), ("mlp.gate_proj", hidden, dim, 1), ("mlp.up_proj", hidden, dim, 1)),
            ("mlp.down_proj", dim, hidden, end),
        ):
            weight = rng.standard_normal((rows, columns)) * (scale * columns**-0.5)
            weights[f"model.layers.{layer}.{name}"] = weight
    norms = [f"layers.{layer}.{at}_layernorm" for layer in range(layers) for at in ("input", "post_attention")]
    weights |= {f"model.{name}": np.ones(dim) for name in (*norms, "norm")}
    return {f"{name}.weight": weight.astype(np.float32) for name, weight in weights.items()}


def train(text: np.ndarray, say: Callable[[str], None]) -> Any:
    """Train by AdamW (Loshchilov and Hutter 2019), whose rate falls along a cosine to a twentieth."""
    rng, steps = np.random.default_rng(1), sum(stage[0] for stage in STAGES)
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    model.load_weights([(name, mx.array(weight)) for name, weight in initial(rng).items()])

    def rate(done: mx.array) -> mx.array:
        step = done + 1
        return RATE * mx.minimum(1.0, step / WARM_UP) * (0.05 + 0.475 * (1 + mx.cos(math.pi * step / steps)))

    def loss(tokens: mx.array, weight: mx.array) -> mx.array:
        return (nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]) * weight).sum() / weight.sum()

    adam: Any = {"learning_rate": rate, "betas": BETAS, "bias_correction": True}
    both = [optimizers.AdamW(weight_decay=DECAY, **adam), optimizers.Adam(**adam)]
    optimizer = optimizers.MultiOptimizer(both, [lambda name, weight: weight.ndim > 1])
    gradients = nn.value_and_grad(model, loss)
    for step, options in enumerate((options for count, *options in STAGES for _ in range(count)), 1):
        documents, marks = drawn(rng, text, *options)
        weight = np.where(marks[:, 1:], np.float32(RECALL_WEIGHT), np.float32(1))
        _, found = gradients(mx.array(documents), mx.array(weight))
        optimizer.update(model, optimizers.clip_grad_norm(found, CLIP)[0])
        mx.eval(model.state, optimizer.state)
        if step % 25 == 0:
            say(f"trained {step} steps of {steps}")
    return model


def trained(cache: Path, text: np.ndarray, say: Callable[[str], None]) -> Any:
    """Return the model in mlx-lm, trained now if the folder lacks it: another recipe or text is another folder."""
    recipe = json.dumps([CONFIG, STAGES, RATE, WARM_UP, DECAY, BETAS, CLIP, RECALL_WEIGHT]).encode()
    folder = cache / f"quality-{hashlib.sha256(recipe + text.tobytes()).hexdigest()[:12]}"
    if not (folder / "config.json").is_file():
        made = train(text, say)
        folder.mkdir(parents=True, exist_ok=True)
        made.save_weights(str(folder / "model.safetensors"))
        (folder / "config.json").write_text(json.dumps(CONFIG))
    model = load_model(folder)[0]
    model.set_dtype(mx.float16)
    return model


# ----------------------------------------------------------------------------------------------- policies


class Policy(NamedTuple):
    """A row of the table: who decides what a sequence keeps, its tokens at most, and the bits of K and V."""

    name: str
    max_kv: int = 0
    k_bits: int | None = None
    v_bits: int | None = None


def policies(context: int) -> Iterator[Policy]:
    """Return the rows of the table: budgets are a half, a quarter and an eighth of the context."""
    for bits in ((None, None), (8, 8), (8, 4), (4, 4)):
        yield Policy("unlimited", 0, *bits)
    half, quarter, eighth = context // 2, context // 4, context // 8
    for name in ("rotating", "H2O", "block eviction", "random"):
        yield Policy(name, half)
    yield from (Policy("rotating", quarter), Policy("H2O", quarter), Policy("H2O", quarter, 8, 8))
    yield from (Policy("H2O, raw scores", quarter), Policy("block eviction", quarter))
    yield from (Policy("rotating", eighth), Policy("H2O", eighth))


class RandomCache(ConcatenateKVCache):
    """The control: H2O's budgets, but the tokens of its heavy half are drawn. Positions go on counting."""

    def __init__(self, max_kv: int, layer: int) -> None:
        super().__init__()
        self.keys: Any = None
        self.values: Any = None
        self.max_kv, self._rng = max_kv, np.random.default_rng([1, layer])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Evict where there is no room, store K and V ``[rows, kv_heads, new, head_dim]``, return what is kept."""
        offset = self.offset + keys.shape[2]
        if self.keys is not None and self.keys.shape[2] >= self.max_kv:
            rows, heads, kept, _ = self.keys.shape
            end = kept - (self.max_kv - SINK - self.max_kv // 2)
            order = self._rng.random((rows, heads, end - SINK)).argsort(axis=-1)
            places = np.broadcast_to(np.arange(kept), (rows, heads, kept))
            chosen = SINK + np.sort(order[..., : self.max_kv // 2 - min(16, self.max_kv // 8)], axis=-1)
            where = mx.array(np.concatenate([places[..., :SINK], chosen, places[..., end:]], axis=-1))[..., None]
            self.keys, self.values = (mx.take_along_axis(x, where, axis=2) for x in (self.keys, self.values))
        found = super().update_and_fetch(keys, values)
        self.offset = offset
        return found


# -------------------------------------------------------------------------------------------------- table


@contextlib.contextmanager
def make_caches(model: Any, policy: Policy, rows: int, length: int) -> Iterator[tuple[list[Any], Callable[[], float]]]:
    """Yield the caches of all layers, and what tells their bytes."""
    name, max_kv, *bits = policy
    stock: dict[str, Callable[[int], Any]] = {
        "unlimited": lambda layer: KVCache(),
        "rotating": lambda layer: RotatingKVCache(max_kv, keep=SINK),
        "random": lambda layer: RandomCache(max_kv, layer),
    }
    if name in stock and bits == [None, None]:
        caches = [stock[name](layer) for layer in range(CONFIG["num_hidden_layers"])]
        yield caches, lambda: sum(cache.nbytes for cache in caches)
        return
    eviction: Any = None
    if name == "block eviction":
        eviction = BlockEviction(max_kv=max_kv, sink=SINK)
    elif name != "unlimited":
        eviction = H2O(max_kv=max_kv, sink=SINK, kind="raw" if name == "H2O, raw scores" else "mass")
    options: dict[str, Any] = dict(zip(("k_bits", "v_bits"), bits, strict=True)) | {"quant_group_size": GROUP_SIZE}
    blocks = rows * (-(-((max_kv or length) + length // 16) // BLOCK_SIZE) + 2)
    element = sum(2.0 if width is None else width / 8 + 4 / GROUP_SIZE for width in bits)  # with scale and bias
    token = element * CONFIG["head_dim"] * CONFIG["num_key_value_heads"] * CONFIG["num_hidden_layers"]
    with install(model, num_blocks=blocks, block_size=BLOCK_SIZE, eviction=eviction, **options) as kv:
        merged = [PagedKVCache.merge(layer) for layer in zip(*(kv.make_cache() for _ in range(rows)), strict=True)]
        yield merged, lambda: int(merged[0].batch.rows.held.sum()) * token


def read(model: Any, documents: np.ndarray, policy: Policy) -> tuple[np.ndarray, np.ndarray, float]:
    """Return minus the logarithm of each token's probability, whether it was the most probable, and bytes of a row.

    A sixteenth of a document is read at once and the rest token by token, so a policy decides before each.
    """
    rows, length = documents.shape
    tokens = mx.array(documents)
    nats, right = np.zeros((rows, length - 1), np.float32), np.zeros((rows, length - 1), bool)
    with make_caches(model, policy, rows, length) as (caches, nbytes):
        for begin, end in itertools.pairwise([0, *range(length // 16, length)]):
            logits = model(tokens[:, begin:end], cache=caches).astype(mx.float32)
            target = tokens[:, begin + 1 : end + 1]
            nat = mx.logsumexp(logits, axis=-1) - mx.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
            hit = mx.argmax(logits, axis=-1) == target
            mx.eval(nat, hit)
            nats[:, begin:end], right[:, begin:end] = np.array(nat), np.array(hit)
        return nats, right, nbytes() / rows


def run(args: argparse.Namespace) -> int:
    """Train the model unless it is kept, and print the table."""
    text, held_out = sources(Path(sysconfig.get_path("stdlib")))
    model = trained(Path(args.cache_dir), text, lambda line: print(line, file=sys.stderr, flush=True))
    length = args.context
    rngs = [np.random.default_rng([7, seed, length]) for seed in range(args.seeds)]
    parts = [drawn(rng, held_out, args.samples, length, 1, length // 2) for rng in rngs]
    documents, marks = (np.concatenate(part) for part in zip(*parts, strict=True))
    marks, base = marks[:, 1:], None
    print("| policy | max_kv | K/V bits | perplexity | of code | recall | KV KiB |\n|---|---|---|---|---|---|---|")
    for policy in policies(length):
        nats, right, nbytes = read(model, documents, policy)
        found = [math.exp(nats.mean()), math.exp(nats[~marks].mean())]
        if base is None:
            base, shown = found, [f"{value:.3f}" for value in found]
        else:
            shown = [f"{value:.3f} ({value / least - 1:+.1%})" for value, least in zip(found, base, strict=True)]
        bits = f"{policy.k_bits or 16}/{policy.v_bits or 16}"
        cells = (policy.name, policy.max_kv or "-", bits, *shown, f"{right[marks].mean():.1%}", f"{nbytes / 1024:.1f}")
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
