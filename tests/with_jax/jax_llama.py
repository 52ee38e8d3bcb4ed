"""A toy Llama in JAX over `kvpool.adapters.jax`, and the same model without any cache as its reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvpool.adapters.jax import attend, copy_pages, update

VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM, THETA = 97, 64, 2, 8, 2, 16, 10_000.0
SCALE = HEAD_DIM**-0.5


def make_params(seed):
    """Random weights, large enough that greedy output wanders over many tokens."""
    print(f"weights from seed {seed}")
    rng = np.random.default_rng(seed)
    layer_shapes = {
        "q": (WIDTH, HEADS * HEAD_DIM),
        "k": (WIDTH, KV_HEADS * HEAD_DIM),
        "v": (WIDTH, KV_HEADS * HEAD_DIM),
        "o": (HEADS * HEAD_DIM, WIDTH),
        "up": (WIDTH, 2 * WIDTH),
        "down": (2 * WIDTH, WIDTH),
    }
    layers = [
        {name: rng.standard_normal(shape).astype(np.float32) * 0.3 for name, shape in layer_shapes.items()}
        for _ in range(LAYERS)
    ]
    return {"embed": rng.standard_normal((VOCAB, WIDTH)).astype(np.float32), "layers": layers}


def empty_kv(num_pages, page_size):
    """One KV array per layer, full of NaN: whatever is read before it is written shows."""
    return [jnp.full((num_pages, page_size, 2 * KV_HEADS, HEAD_DIM), jnp.nan) for _ in range(LAYERS)]


def norm(x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def rope(x, positions):
    """Rotate ``[T, heads, head_dim]`` by its positions ``[T]``."""
    half = HEAD_DIM // 2
    angle = positions[:, None, None] * THETA ** (-jnp.arange(half) / half)
    low, high, cos, sin = x[..., :half], x[..., half:], jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def project(layer, x, positions):
    hidden = norm(x)
    q = rope((hidden @ layer["q"]).reshape(len(x), HEADS, HEAD_DIM), positions)
    k = rope((hidden @ layer["k"]).reshape(len(x), KV_HEADS, HEAD_DIM), positions)
    return q, k, (hidden @ layer["v"]).reshape(len(x), KV_HEADS, HEAD_DIM)


def finish(layer, x, attended):
    x = x + attended.reshape(len(x), -1) @ layer["o"]
    return x + jax.nn.silu(norm(x) @ layer["up"]) @ layer["down"]


def forward(params, kv, tokens, info):
    """Logits ``[T, vocab]`` of one step and the next KV arrays."""
    x = params["embed"][tokens]
    written = []
    for layer, pages in zip(params["layers"], kv, strict=True):
        q, k, v = project(layer, x, info.positions)
        pages = update(copy_pages(pages, info), info, k, v)
        written.append(pages)
        x = finish(layer, x, attend(q, pages, info, SCALE))
    return norm(x) @ params["embed"].T, written


step = functools.partial(jax.jit, donate_argnums=1)(forward)


@jax.jit
def dense_logits(params, tokens, length):
    """Logits of the last token of ``tokens [n]``, padded after `length`, with plain causal attention and no cache."""
    positions = jnp.arange(len(tokens))
    x = params["embed"][tokens]
    seen = (positions[None, :] <= positions[:, None]) & (positions[None, :] < length)
    for layer in params["layers"]:
        q, k, v = project(layer, x, positions)
        k, v = (jnp.repeat(t, HEADS // KV_HEADS, axis=1) for t in (k, v))
        score = jnp.where(seen, jnp.einsum("qhd,khd->hqk", q, k) * SCALE, -jnp.inf)
        x = finish(layer, x, jnp.einsum("hqk,khd->qhd", jax.nn.softmax(score, -1), v))
    return (norm(x) @ params["embed"].T)[length - 1]


def padded(tokens, size):
    array = np.zeros(size, np.int32)
    array[: len(tokens)] = tokens
    return array


def solo(params, prompt, max_tokens, choose=lambda logits, n: int(jnp.argmax(logits))):
    """Tokens that follow a prompt; ``choose(logits, n)`` picks the n-th."""
    known = list(prompt)
    for n in range(max_tokens):
        known.append(choose(dense_logits(params, padded(known, 128), len(known)), n))
    return known[len(prompt) :]
