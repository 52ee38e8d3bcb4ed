"""Policies of eviction on dense arrays in NumPy, for llamas: an evicted token is masked, nothing is moved or packed.

Slow and plain. It is what `python -m benchmarks.quality` and caches with eviction are compared with.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.quality.answers import Answer
from benchmarks.quality.network import EPS, Array, Shape, Weights
from benchmarks.quality.policies import DECAY, SINK, Policy

BLOCK_SIZE = 16


class Simulated:
    """A llama on simulated caches.

    Parameters
    ----------
    """

    def __init__(self, shape: Shape, weights: Weights, seed: int = 1) -> None:
        self.shape, self.weights, self.seed = shape, weights, seed

    def answer(self, documents: NDArray[np.int32], policy: Policy) -> Answer:
        """Read documents token by token."""
        start, (rows, length) = time.perf_counter(), documents.shape
        nats, right = np.zeros((rows, length - 1), np.float32), np.zeros((rows, length - 1), bool)
        states = [_Layer(self, policy, rows, length, layer) for layer in range(self.shape.layers)]
        at = np.arange(rows)
        for step in range(length - 1):
            self._evict(policy, step, states)
            logits = self._step(documents[:, step], step, states)
            logits -= logits.max(axis=-1, keepdims=True)
            target = documents[:, step + 1]
            nats[:, step] = np.log(np.exp(logits).sum(axis=-1)) - logits[at, target]
            right[:, step] = logits.argmax(axis=-1) == target
        s = self.shape
        each = policy.bytes_per_token(s.kv_heads, (s.head_dim, s.head_dim), s.layers)
        return Answer(nats, right, each * int(states[0].alive[0, 0].sum()), time.perf_counter() - start)

    def _evict(self, policy: Policy, now: int, states: list[_Layer]) -> None:
        """Before a token is stored: if there is no room for it, leave `max_kv` less `slack` tokens."""
        if policy.kind == "unlimited" or states[0].alive[0, 0].sum() < policy.max_kv:
            return
        if policy.kind != "block":
            for state in states:
                state.evict(now)
            return
        for row in range(len(states[0].alive)):  # one table for all layers and heads: their scores count together
            alive = states[0].alive[row, 0, :now]
            places = np.flatnonzero(alive)
            ours = places[: (len(places) - policy.max_kv // 4) // BLOCK_SIZE * BLOCK_SIZE].reshape(-1, BLOCK_SIZE)[1:]
            if not len(ours):
                continue
            worth = [sum(float(state.scores[row, :, block].sum()) for state in states) for block in ours]
            for state in states:
                state.alive[row][:, ours[int(np.argmin(worth))]] = False

    def _step(self, tokens: NDArray[np.int32], position: int, states: list[_Layer]) -> Array:
        w = self.weights
        x = w["model.embed_tokens.weight"][tokens]
        for layer, state in enumerate(states):
            at = f"model.layers.{layer}."
            h = _norm(x, w[f"{at}input_layernorm.weight"])
            x = x + state.attend(h, position) @ w[f"{at}self_attn.o_proj.weight"].T
            h = _norm(x, w[f"{at}post_attention_layernorm.weight"])
            gate = h @ w[f"{at}mlp.gate_proj.weight"].T
            up = h @ w[f"{at}mlp.up_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{at}mlp.down_proj.weight"].T
        head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
        return _norm(x, w["model.norm.weight"]) @ head.T


class _Layer:
    """K, V, scores and who is alive, ``[rows, kv_heads, length]`` each."""

    def __init__(self, model: Simulated, policy: Policy, rows: int, length: int, layer: int) -> None:
        s = model.shape
        self.model, self.policy, self.layer = model, policy, layer
        self.k = np.zeros((rows, s.kv_heads, length, s.head_dim), np.float32)
        self.v = np.zeros_like(self.k)
        self.alive = np.zeros((rows, s.kv_heads, length), bool)
        self.scores = np.zeros((rows, s.kv_heads, length), np.float32)
        self.rng = np.random.default_rng([model.seed, layer])

    def attend(self, h: Array, position: int) -> Array:
        """Store K and V of one token of each row, evict, attend: ``[rows, heads * head_dim]``."""
        s, w, rows, now = self.model.shape, self.model.weights, len(h), position + 1
        at = f"model.layers.{self.layer}.self_attn."
        q, k, v = ((h @ w[f"{at}{n}_proj.weight"].T).reshape(rows, -1, s.head_dim) for n in "qkv")
        half = s.head_dim // 2
        angle = position * s.theta ** (-np.arange(half) / half)
        q, k = (_turn(x, angle) for x in (q, k))
        self.k[:, :, position] = _packed(k, self.policy.k_bits, self.policy.group_size)
        self.v[:, :, position] = _packed(v, self.policy.v_bits, self.policy.group_size)
        self.alive[:, :, position] = True
        grouped = q.reshape(rows, s.kv_heads, -1, s.head_dim)
        alive = self.alive[:, :, :now]
        raw = grouped @ self.k[:, :, :now].swapaxes(-1, -2) * np.float32(s.head_dim**-0.5)
        hidden = np.where(alive[:, :, None], raw, -np.inf)
        mass = np.exp(hidden - hidden.max(axis=-1, keepdims=True))
        mass /= mass.sum(axis=-1, keepdims=True)
        if self.policy.kind in ("h2o", "block"):
            seen = np.abs(raw.mean(axis=2)) if self.policy.scores == "raw" else mass.mean(axis=2)
            self.scores[:, :, :position] += (1 - DECAY) * (seen - self.scores[:, :, :now])[..., :position]
            self.scores[:, :, position] = seen[..., position]
        return (mass @ self.v[:, :, :now]).reshape(rows, -1)

    def evict(self, now: int) -> None:
        """Leave `max_kv` less `slack` of the tokens at places below `now`."""
        policy = self.policy
        newest = policy.max_kv - SINK - policy.heavy - (policy.slack if policy.kind == "rotating" else 0)
        middle = slice(SINK, now - newest)
        alive = self.alive[:, :, middle]
        if policy.kind == "rotating":
            alive[...] = False
            return
        count = policy.heavy - policy.slack
        worth = self.scores[:, :, middle] if policy.kind == "h2o" else self.rng.random(alive.shape)
        best = np.argpartition(-np.where(alive, worth, -1), count - 1, axis=-1)[..., :count]
        chosen = np.zeros_like(alive)
        np.put_along_axis(chosen, best, True, axis=-1)
        alive &= chosen


def _norm(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPS) * weight


def _turn(x: Array, angle: Any) -> Array:
    a, b = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def _packed(x: Array, bits: int | None, group: int) -> Array:
    """Return what comes back from affine storage in so many bits: `mx.quantize` in words of NumPy."""
    if bits is None:
        return x
    groups = x.reshape(*x.shape[:-1], -1, group)
    least, most = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    is_below = np.abs(least) > np.abs(most)  # the edge that comes back exactly, as does 0
    edge = np.where(is_below, least, most)
    step = np.maximum((most - least) / np.float32(2**bits - 1), np.float32(1e-7)) * np.where(is_below, 1, -1)
    steps = np.rint(edge / step)
    step = np.where(steps == 0, step, edge / np.where(steps == 0, 1, steps)).astype(np.float32)
    bias = np.where(steps == 0, 0, edge).astype(np.float32)
    places = np.clip(np.rint((groups - bias) / step), 0, 2**bits - 1)
    return (places * step + bias).reshape(x.shape).astype(np.float32)
