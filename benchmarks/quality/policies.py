"""What is compared: how many tokens a sequence may keep, who decides which, and in how many bits they are stored."""

from __future__ import annotations

from dataclasses import dataclass, replace

KINDS = ("unlimited", "rotating", "h2o", "block", "random")
SINK = 4
DECAY = 0.95
"""Of the average of a token's scores, a step."""
BITS = ((None, None), (8, 8), (8, 4), (4, 8), (4, 4))
"""Of K and V; None is 16."""


@dataclass(frozen=True)
class Policy:
    """One way to keep a KV cache small.

    Attributes
    ----------
    kind : str
        One of `KINDS`: everything is kept; sinks and the newest (mlx-lm's RotatingKVCache); sinks, heavy hitters and
        the newest; whole blocks leave; or the control, which keeps sinks, the newest, and others at random.
    max_kv : int
        Tokens kept at most, 0 without a limit.
    heavy : int
        Of them, heavy hitters.
    scores : str
        What makes a token a heavy hitter: "mass", its share of attention, or "raw", the absolute value of its score
        before the softmax.
    slack : int
        Tokens that leave at a time, and so how far below `max_kv` they leave a sequence.
    k_bits, v_bits : int or None
        4 or 8, None for 16.
    """

    kind: str = "unlimited"
    max_kv: int = 0
    heavy: int = 0
    scores: str = "mass"
    slack: int = 1
    k_bits: int | None = None
    v_bits: int | None = None
    group_size: int = 32

    @property
    def bits(self) -> str:
        """Return the bits of K and V as ``"8/4"``."""
        return f"{self.k_bits or 16}/{self.v_bits or 16}"

    @property
    def name(self) -> str:
        """Return what tables call it, without its budget."""
        if self.kind != "h2o":
            return {"rotating": "rotating (keep 4)", "block": "block eviction"}.get(self.kind, self.kind)
        share = {2: "heavy", 4: "balanced"}.get(self.max_kv // max(1, self.heavy), f"h={self.heavy}")
        return f"H2O {share}" + ("" if self.scores == "mass" else f", {self.scores} scores")

    def bytes_per_token(self, heads: int, head_dims: tuple[int, int], layers: int) -> float:
        """Return what K and V of a token take, scales and biases of quantized ones (2 bytes each) included."""
        total = 0.0
        for bits, dim in zip((self.k_bits, self.v_bits), head_dims, strict=True):
            total += 2 * dim if bits is None else dim * bits / 8 + 4 * dim / self.group_size
        return layers * heads * total

    def stored(self, k_bits: int | None, v_bits: int | None) -> Policy:
        """Return the same policy with other bits."""
        return replace(self, k_bits=k_bits, v_bits=v_bits)


UNLIMITED = Policy()


def slack_of(max_kv: int) -> int:
    """Return what `kvpool.eviction` evicts at a time by itself."""
    return max(1, min(16, max_kv // 8))


def rotating(max_kv: int) -> Policy:
    """Return the stock baseline."""
    return Policy("rotating", max_kv)


def h2o(max_kv: int, share: int = 2, scores: str = "mass") -> Policy:
    """Return H2O with a heavy budget of `max_kv` over `share`."""
    return Policy("h2o", max_kv, max_kv // share, scores, slack_of(max_kv))


def compared(max_kv: int) -> tuple[Policy, ...]:
    """Return all policies at one budget, the unlimited first."""
    return (
        *(UNLIMITED, rotating(max_kv), h2o(max_kv, 4), h2o(max_kv), h2o(max_kv, scores="raw")),
        *(Policy("block", max_kv), Policy("random", max_kv, max_kv // 2, slack=slack_of(max_kv))),
    )
