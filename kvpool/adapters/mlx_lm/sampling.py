"""Samples tokens from logits. Each row has its own `Sampling`.

The token of a row depends only on its logits, its `Sampling` and its position. It does not depend on other rows or on
earlier samples. So a seeded request gives the same tokens however it is batched or preempted, if the model gives the
same logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import mlx.core as mx
import numpy as np

from kvpool.adapters.mlx_lm.grammar import Grammar
from kvpool.errors import KVPoolError

SEED_MAX = 2**63 - 1


class LogitsNotFinite(KVPoolError, ArithmeticError):
    """The model gave NaN or infinity where a token was to be sampled, or no token that may come was possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters of a request.

    As in mlx-lm, `top_p`, `min_p` and `top_k` filter by the model's own probabilities. The remaining tokens are sampled
    at the temperature.

    Attributes
    ----------
    temperature : float
        0 takes the likeliest token, the first one of equals.
    top_p : float
        Keep the likeliest tokens that together have this probability; 0 < top_p <= 1.
    top_k : int
        Number of likeliest tokens to keep. 0 keeps all.
    min_p : float
        Keep tokens at least this probable, in units of the likeliest one's probability; 0 <= min_p <= 1.
    xtc_probability, xtc_threshold : float
        At a token, with the first as the chance: of the kept tokens that are more probable than the second (0 .. 0.5),
        only the least probable stays.
    xtc_special_tokens : ints
        Tokens that xtc never removes.
    frequency_penalty, presence_penalty : float
        Subtracted from the logit of a token that was generated before: the first per occurrence, the second once;
        -100 .. 100.
    repetition_penalty : float
        For tokens of the prompt and the answer. It divides positive logits and multiplies negative ones; 0.01 .. 100.
    min_tokens : int
        No token of the request's ``eos`` comes before so many others.
    grammar : Grammar, optional
        What form the answer must have, see `Engine.grammars`.
    logit_bias : mapping of int to float
        Added to the logits of these tokens; -1000 .. 1000. Kept as sorted pairs.
    top_logprobs : int
        How many of the likeliest tokens `TokenEvent.top` has; 0 .. 1024.
    seed : int, optional
        0 .. 2^63 - 1. Sample i of a request equals a separate request with seed + i. By default the engine draws a
        seed.

    Raises
    ------
    TypeError, ValueError
        A value is not a number, or out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special_tokens: Any = ()
    min_tokens: int = 0
    grammar: Grammar | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Any = ()
    top_logprobs: int = 0
    seed: int | None = None
    alters: bool = field(init=False, repr=False, compare=False, default=False)  #: whether `changes` has any
    looks_back: bool = field(init=False, repr=False, compare=False, default=False)  #: whether earlier tokens matter

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, lambda x: 0 <= x <= 1e30, "0 .. 1e30")
        _number("top_p", self.top_p, lambda x: 0 < x <= 1, "above 0 and at most 1")
        _number("min_p", self.min_p, lambda x: 0 <= x <= 1, "0 .. 1")
        _number("xtc_probability", self.xtc_probability, lambda x: 0 <= x <= 1, "0 .. 1")
        _number("xtc_threshold", self.xtc_threshold, lambda x: 0 <= x <= 0.5, "0 .. 0.5")
        object.__setattr__(self, "xtc_special_tokens", tuple(self.xtc_special_tokens))
        for token in self.xtc_special_tokens:
            _whole("a token of xtc_special_tokens", token, 2**31 - 1)
        _whole("top_k", self.top_k, 2**31 - 1)
        _whole("min_tokens", self.min_tokens, 2**31 - 1)
        if not isinstance(self.grammar, Grammar | None):
            raise TypeError(f"[Sampling] grammar must be one of Engine.grammars, got {self.grammar!r}")
        if self.grammar is not None and self.min_tokens:
            raise ValueError("[Sampling] min_tokens and grammar exclude each other: the grammar says where the end is")
        _number("frequency_penalty", self.frequency_penalty, lambda x: -100 <= x <= 100, "-100 .. 100")
        _number("presence_penalty", self.presence_penalty, lambda x: -100 <= x <= 100, "-100 .. 100")
        _number("repetition_penalty", self.repetition_penalty, lambda x: 0.01 <= x <= 100, "0.01 .. 100")
        _whole("top_logprobs", self.top_logprobs, 1024)
        object.__setattr__(self, "top_logprobs", int(self.top_logprobs))  # a small int of numpy counts no vocabulary
        try:
            pairs = dict(self.logit_bias)
        except (TypeError, ValueError):
            raise TypeError(f"[Sampling] logit_bias must be a mapping of tokens, got {self.logit_bias!r}") from None
        for token, bias in pairs.items():
            _whole("a token of logit_bias", token, 2**31 - 1)
            _number(f"logit_bias[{token}]", bias, lambda x: -1000 <= x <= 1000, "-1000 .. 1000")
        object.__setattr__(self, "logit_bias", tuple(sorted(pairs.items())))
        penalties = self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1
        object.__setattr__(self, "alters", bool(pairs or penalties or self.min_tokens))
        object.__setattr__(self, "looks_back", bool(penalties or self.min_tokens or self.grammar))
        if self.seed is not None:
            _whole("seed", self.seed, SEED_MAX)

    @property
    def is_greedy(self) -> bool:
        """Whether sampling takes the likeliest token."""
        return self.temperature == 0

    @property
    def is_filtered(self) -> bool:
        """Whether a filter is set."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or self.xtc_probability > 0

    def changes(
        self, prompt: np.ndarray, generated: np.ndarray, eos: Sequence[int] = ()
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the tokens whose logits change, what divides or multiplies each logit, and what is added then."""
        repeated = np.concatenate([prompt, generated]) if self.repetition_penalty != 1 else generated[:0]
        bias = np.array([token for token, _ in self.logit_bias], np.int32)
        penalized = generated if self.frequency_penalty or self.presence_penalty else generated[:0]
        early = np.array(eos if len(generated) < self.min_tokens else (), np.int32)
        tokens = np.unique(np.concatenate([bias, penalized, repeated, early]))
        counts = np.bincount(np.searchsorted(tokens, penalized), minlength=len(tokens))
        added = -self.frequency_penalty * counts - self.presence_penalty * (counts > 0)
        added[np.searchsorted(tokens, bias)] += [value for _, value in self.logit_bias]
        added[np.searchsorted(tokens, early)] = -np.inf
        return tokens, np.where(np.isin(tokens, repeated), self.repetition_penalty, 1.0), added


def altered(logits: mx.array, changes: Mapping[int, tuple[np.ndarray, np.ndarray, np.ndarray]]) -> mx.array:
    """Return logits with the changes of some rows (`Sampling.changes`). Each row depends on its own logits only."""
    rows = mx.array(np.concatenate([np.full(len(tokens), row, np.int32) for row, (tokens, _, _) in changes.items()]))
    tokens, factor, added = (mx.array(np.concatenate(one)) for one in zip(*changes.values(), strict=True))
    before = logits[rows, tokens.astype(mx.int32)]
    factor = factor.astype(mx.float32)
    scaled = mx.where(before > 0, before / factor, before * factor) + added.astype(mx.float32)
    result = logits + 0  # the caller keeps its logits
    result[rows, tokens.astype(mx.int32)] = scaled
    return result


def masked(logits: mx.array, allowed: Mapping[int, np.ndarray]) -> mx.array:
    """Return logits in which some rows keep only the tokens that are allowed there (`Follower.allowed`)."""
    bits = np.full((len(logits), len(next(iter(allowed.values())))), 0xFF, np.uint8)
    bits[list(allowed)] = list(allowed.values())
    is_allowed = np.unpackbits(bits, axis=1, count=logits.shape[-1], bitorder="little").view(bool)
    return mx.where(mx.array(is_allowed), logits, -mx.inf)


def sample(
    logits: mx.array,
    samplings: Sequence[Sampling],
    indices: np.ndarray,
    positions: np.ndarray,
    changes: Mapping[int, tuple[np.ndarray, np.ndarray, np.ndarray]] | None = None,
    allowed: Mapping[int, np.ndarray] | None = None,
) -> tuple[mx.array, mx.array]:
    """One token per row.

    Parameters
    ----------
    logits : float32 ``[M, V]``
    samplings : M of them, each with a seed unless greedy.
    indices, positions : int ``[M]``
        Which sample of its request the row is, and how many tokens it has.
    changes, allowed : mapping, optional
        Of rows to their `Sampling.changes`, and to the bits of the tokens that may come there.

    Returns
    -------
    tokens : int32 ``[M]``
    logprobs : float32 ``[M]``
        Of these tokens, by the model's own probabilities. Both are nodes of MLX's graph. It is not finite where the
        logits of the row have NaN or plus infinity, and where the token cannot come: the token means nothing then.
    """
    if not len(samplings):
        return mx.zeros(0, mx.int32), mx.zeros(0, mx.float32)
    chosen_from = altered(logits, changes) if changes else logits
    chosen_from = masked(chosen_from, allowed) if allowed else chosen_from
    tokens = mx.argmax(chosen_from, axis=-1).astype(mx.int32)
    total = mx.logsumexp(logits, axis=-1)
    is_warm = any(map(attrgetter("temperature"), samplings))
    if not is_warm and chosen_from is logits:
        return tokens, logits.max(axis=-1) - total
    for is_filtered in (False, True) if is_warm else ():  # a row's arithmetic must not depend on the rows beside it
        rows = np.array(
            [i for i, one in enumerate(samplings) if not one.is_greedy and one.is_filtered == is_filtered], np.int64
        )
        if len(rows):
            picks = mx.array(rows.astype(np.int32))
            heard = chosen_from[picks]
            some = [samplings[row] for row in rows]
            seeds = [one.seed or 0 for one in some]
            chances = uniforms(seeds, indices[rows], np.stack([positions[rows], ~positions[rows]]))
            choose = _filtered if is_filtered else _plain
            heard = heard - mx.logsumexp(heard, axis=-1, keepdims=True)
            tokens[picks] = choose(heard, some, mx.array(chances)[..., None])
    logprobs = mx.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0] - total
    if chosen_from is not logits:  # nothing that is left may be possible, the token is none of it then
        is_possible = mx.isfinite(mx.take_along_axis(chosen_from, tokens[:, None], axis=-1)[:, 0])
        logprobs = mx.where(is_possible, logprobs, mx.nan)
    return tokens, logprobs


def best(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The `k` likeliest tokens of each row, likeliest first: int32 and float32 ``[M, k]``. For beams.

    What a vocabulary of fewer than `k` tokens lacks is of probability 0.
    """
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    order = mx.argsort(-logprobs, axis=-1)[:, :k]
    values = mx.take_along_axis(logprobs, order, axis=-1)
    lacking = [(0, 0), (0, max(0, k - logits.shape[-1]))]
    return mx.pad(order.astype(mx.int32), lacking), mx.pad(values, lacking, constant_values=mx.array(-mx.inf))


def uniforms(seeds: Sequence[int], indices: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """A number in [0, 1) for each (seed + index, position), float32, always the same one.

    Two rounds of the finalizer of SplitMix64 (Steele, Lea and Flood, 2014), the second one on the position.
    """
    key = _mix(np.array(seeds, np.uint64) + indices.astype(np.uint64))
    bits = _mix(key ^ _mix(positions.astype(np.uint64)))
    return ((bits >> np.uint64(40)).astype(np.float64) / 2.0**24).astype(np.float32)  # 24 bits: exact, below 1


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _plain(logprobs: mx.array, samplings: Sequence[Sampling], chances: mx.array) -> mx.array:
    """Rows without filters: no sorting."""
    weights = _heated(logprobs - logprobs.max(axis=-1, keepdims=True), samplings)
    return _pick(weights, chances[0]).astype(mx.int32)


def _filtered(logprobs: mx.array, samplings: Sequence[Sampling], chances: mx.array) -> mx.array:
    order = mx.argsort(-logprobs, axis=-1)
    ranked = mx.take_along_axis(logprobs, order, axis=-1)
    probs = mx.exp(ranked)
    before = mx.cumsum(probs, axis=-1) - probs
    top_p = _column(samplings, "top_p")
    keep = (before < top_p) | (top_p >= 1)
    keep = keep & (probs >= _column(samplings, "min_p") * probs[:, :1])
    ranks, top_k = mx.arange(ranked.shape[-1]), _column(samplings, "top_k")
    keep = keep & ((ranks < top_k) | (top_k == 0)) | (ranks == 0)
    if any([one.xtc_probability for one in samplings]):
        keep = keep & ~_excluded(keep & (probs > _column(samplings, "xtc_threshold")), order, samplings, chances[1])
    weights = mx.where(keep, _heated(ranked - ranked[:, :1], samplings), 0.0)
    return mx.take_along_axis(order, _pick(weights, chances[0])[:, None], axis=-1)[:, 0].astype(mx.int32)


def _excluded(tops: mx.array, order: mx.array, samplings: Sequence[Sampling], chances: mx.array) -> mx.array:
    """Which ranks xtc removes: of `tops`, all but the last, where the chance says so."""
    spared = np.full((len(samplings), max(len(one.xtc_special_tokens) for one in samplings) + 1), -1)
    for row, one in zip(spared, samplings, strict=True):
        row[: len(one.xtc_special_tokens)] = one.xtc_special_tokens
    is_spared = (order[:, :, None] == mx.array(spared)[:, None]).any(axis=-1)
    last = tops.sum(axis=-1, keepdims=True) - 1
    return (mx.arange(order.shape[-1]) < last) & (chances < _column(samplings, "xtc_probability")) & ~is_spared


def _pick(weights: mx.array, chances: mx.array) -> mx.array:
    """The first index whose cumulative weight passes the chance; always one of weight above 0."""
    total = mx.cumsum(weights, axis=-1)
    passed = total > chances * total[:, -1:]
    last = weights.shape[-1] - 1 - mx.argmax((weights > 0)[:, ::-1], axis=-1)
    return mx.minimum(mx.argmax(passed, axis=-1), last)


def _heated(below: mx.array, samplings: Sequence[Sampling]) -> mx.array:
    """Weights at the rows' temperatures of log-probabilities, given as what they are below the largest."""
    return mx.exp(below / mx.maximum(_column(samplings, "temperature"), 1e-30))


def _column(samplings: Sequence[Sampling], name: str) -> mx.array:
    return mx.array(np.array([getattr(one, name) for one in samplings], np.float32))[:, None]


def _number(name: str, value: Any, is_legal: Callable[[float], bool], limits: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating | np.integer):
        raise TypeError(f"[Sampling] {name} must be a number, got {value!r}")
    if not is_legal(value if isinstance(value, int) else float(value)):  # no float can be 10**400
        raise ValueError(f"[Sampling] {name} is {value}, it must be {limits}")


def _whole(name: str, value: Any, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"[Sampling] {name} must be an int, got {value!r}")
    if not 0 <= value <= most:
        raise ValueError(f"[Sampling] {name} is {value}, it must be 0 .. {most}")
