"""A llama in NumPy, forwards and backwards: MLX multiplies float32 matrices on a CPU ten times slower than a BLAS.

Only training uses it. The weights are named and shaped as in mlx-lm's ``llama``, which runs them afterwards; a test
compares the gradients with those that MLX derives from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]  # of float32: NumPy's stubs lose it
Weights = dict[str, Array]
EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    vocab: int = 264
    dim: int = 96
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 256
    theta: float = 10000.0

    def config(self) -> dict[str, Any]:
        """Return the config.json of the checkpoint."""
        return {
            "model_type": "llama",
            "hidden_size": self.dim,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": EPS,
            "vocab_size": self.vocab,
            "max_position_embeddings": 65536,
            "rope_theta": self.theta,
            "tie_word_embeddings": True,
        }


def initial(shape: Shape, rng: np.random.Generator) -> Weights:
    """Return random weights, those of the residual branches' ends smaller the more layers there are."""
    s, weights = shape, Weights()

    def normal(rows: int, columns: int, scale: float) -> Array:
        return (rng.standard_normal((rows, columns)) * scale).astype(np.float32)

    weights["model.embed_tokens.weight"] = normal(s.vocab, s.dim, 0.02)
    weights["model.norm.weight"] = np.ones(s.dim, np.float32)
    q, kv, end = s.heads * s.head_dim, s.kv_heads * s.head_dim, (2 * s.layers) ** -0.5
    for layer in range(s.layers):
        at = f"model.layers.{layer}."
        for name, rows, columns, scale in (
            *(("self_attn.q_proj", q, s.dim, 1.0), ("self_attn.k_proj", kv, s.dim, 1.0)),
            *(("self_attn.v_proj", kv, s.dim, 1.0), ("self_attn.o_proj", s.dim, q, end)),
            *(("mlp.gate_proj", s.hidden, s.dim, 1.0), ("mlp.up_proj", s.hidden, s.dim, 1.0)),
            ("mlp.down_proj", s.dim, s.hidden, end),
        ):
            weights[f"{at}{name}.weight"] = normal(rows, columns, scale * columns**-0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}{name}.weight"] = np.ones(s.dim, np.float32)
    return weights


Backward = Callable[[Array], Array]
"""From the gradient of a result to that of the argument; gradients of weights are added on the way."""


class Pass:
    """One pass over a batch of tokens ``[batch, length]``: `loss` computes it, `gradients` goes back."""

    def __init__(self, shape: Shape, weights: Weights, tokens: NDArray[np.int32]) -> None:
        self.shape, self.weights, self.tokens = shape, weights, tokens
        self.batch, self.length = tokens.shape
        self.gradient: Weights = {}
        self._back: list[Backward] = []
        half = shape.head_dim // 2
        angles = np.arange(self.length)[:, None] * shape.theta ** (-np.arange(half) / half)
        self._cos, self._sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self._future = np.triu(np.full((self.length, self.length), -np.inf, np.float32), 1)

    def logits(self) -> Array:
        """Return ``[batch, length, vocab]``."""
        x = self.weights["model.embed_tokens.weight"][self.tokens.ravel()]
        for layer in range(self.shape.layers):
            at = f"model.layers.{layer}."
            for block, norm in ((self._attention, "input_layernorm"), (self._mlp, "post_attention_layernorm")):
                h, norm_back = self._norm(x, f"{at}{norm}.weight")
                change, block_back = block(h, at)
                x = x + change
                self._back.append(lambda d, n=norm_back, b=block_back: d + n(b(d)))  # type: ignore[misc]
        h, norm_back = self._norm(x, "model.norm.weight")
        logits, head_back = self._linear(h, "model.embed_tokens.weight")
        self._back += [norm_back, head_back]
        return logits.reshape(self.batch, self.length, -1)

    def loss(self, targets: NDArray[np.int32], weight: Array) -> tuple[float, Array]:
        """Return the weighted mean of the cross entropy, and the cross entropy of every target."""
        logits = self.logits().reshape(targets.size, -1)
        logits -= logits.max(axis=-1, keepdims=True)
        likelihood = np.exp(logits)
        total = likelihood.sum(axis=-1, keepdims=True)
        rows = np.arange(targets.size)
        entropy = np.log(total[:, 0]) - logits[rows, targets.ravel()]
        likelihood /= total
        likelihood[rows, targets.ravel()] -= 1
        share = (weight / weight.sum()).reshape(-1, 1)
        self._at_logits = likelihood * share
        return float(entropy @ share[:, 0]), entropy.reshape(targets.shape)

    def gradients(self) -> Weights:
        """Return the gradient of the loss for every weight."""
        d = self._at_logits
        while self._back:
            d = self._back.pop()(d)
        embedding = self.gradient["model.embed_tokens.weight"]
        np.add.at(embedding, self.tokens.ravel(), d)
        return self.gradient

    def _add(self, name: str, gradient: Array) -> None:
        known = self.gradient.get(name)
        self.gradient[name] = gradient if known is None else known + gradient

    def _linear(self, x: Array, name: str) -> tuple[Array, Backward]:
        weight = self.weights[name]

        def back(d: Array) -> Array:
            self._add(name, d.T @ x)
            return d @ weight

        return x @ weight.T, back

    def _norm(self, x: Array, name: str) -> tuple[Array, Backward]:
        weight = self.weights[name]
        scale = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(EPS))
        unit = x * scale

        def back(d: Array) -> Array:
            self._add(name, (d * unit).sum(axis=0))
            d = d * weight
            return scale * (d - unit * (d * unit).mean(axis=-1, keepdims=True))

        return unit * weight, back

    def _mlp(self, x: Array, at: str) -> tuple[Array, Backward]:
        gate, gate_back = self._linear(x, f"{at}mlp.gate_proj.weight")
        up, up_back = self._linear(x, f"{at}mlp.up_proj.weight")
        sigmoid = 1 / (1 + np.exp(-gate))
        silu = gate * sigmoid
        down, down_back = self._linear(silu * up, f"{at}mlp.down_proj.weight")

        def back(d: Array) -> Array:
            d = down_back(d)
            return up_back(d * silu) + gate_back(d * up * (sigmoid + silu * (1 - sigmoid)))

        return down, back

    def _rope(self, x: Array, sign: int = 1) -> Array:
        """Turn the first against the second half of each head ``[batch, kv_heads, group, length, head_dim]``."""
        half = x.shape[-1] // 2
        a, b, sin = x[..., :half], x[..., half:], sign * self._sin
        return np.concatenate([a * self._cos - b * sin, a * sin + b * self._cos], axis=-1)

    def _attention(self, x: Array, at: str) -> tuple[Array, Backward]:
        s, batch, length = self.shape, self.batch, self.length
        group = s.heads // s.kv_heads
        split = (batch, length, s.kv_heads, -1, s.head_dim)
        whole = (batch, s.kv_heads, -1, s.head_dim)

        def heads(flat: Array) -> Array:  # [batch, kv_heads, group or 1, length, head_dim]
            return flat.reshape(split).transpose(0, 2, 3, 1, 4)

        def flat(headed: Array) -> Array:
            return headed.transpose(0, 3, 1, 2, 4).reshape(batch * length, -1)

        (q, q_back), (k, k_back), (v, v_back) = (self._linear(x, f"{at}self_attn.{n}_proj.weight") for n in "qkv")
        scale = np.float32(s.head_dim**-0.5)
        q = (self._rope(heads(q)) * scale).reshape(whole)
        k, v = self._rope(heads(k)).reshape(whole), np.ascontiguousarray(heads(v)).reshape(whole)
        p = (q @ k.swapaxes(-1, -2)).reshape(batch, s.kv_heads, group, length, length)
        p += self._future
        p -= p.max(axis=-1, keepdims=True)
        np.exp(p, out=p)
        p /= p.sum(axis=-1, keepdims=True)
        p = p.reshape(batch, s.kv_heads, group * length, length)
        out = p @ v
        shape = (batch, s.kv_heads, group, length, s.head_dim)
        mixed, o_back = self._linear(flat(out.reshape(shape)), f"{at}self_attn.o_proj.weight")

        def back(d: Array) -> Array:
            d_out = np.ascontiguousarray(heads(o_back(d))).reshape(whole)
            d_v = p.swapaxes(-1, -2) @ d_out
            d_s = d_out @ v.swapaxes(-1, -2)
            d_s -= (d_out * out).sum(axis=-1, keepdims=True)
            d_s *= p
            d_q = self._rope((d_s @ k).reshape(shape) * scale, -1)
            d_k = self._rope((d_s.swapaxes(-1, -2) @ q).reshape(batch, s.kv_heads, 1, length, s.head_dim), -1)
            d_v = d_v.reshape(batch, s.kv_heads, 1, length, s.head_dim)
            return q_back(flat(d_q)) + k_back(flat(d_k)) + v_back(flat(d_v))

        return mixed, back
