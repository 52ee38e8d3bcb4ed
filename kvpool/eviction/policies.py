"""Policies: a few numbers that say how many tokens a sequence may keep, and which ones stay.

Sources: H2O is "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models" (Zhang et al.,
2023), sinks are from "Efficient Streaming Language Models with Attention Sinks" (Xiao et al., 2023), whole blocks from
"PagedEviction: Structured Block-wise KV Cache Pruning for Efficient Large Language Model Inference" (2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from kvpool.protocol import SCORES, Capabilities
from kvpool.spec import checked_int


class Budget(NamedTuple):
    """The answer of `advise`."""

    max_kv: int  #: tokens that a sequence keeps at most
    heavy: int  #: of these, by their scores


def advise(context: int) -> Budget:
    """A budget for contexts of so many tokens: a quarter of them, and of that one half by scores.

    Raises
    ------
    TypeError, ValueError
        `context` is not an int, or below 16.
    """
    context = checked_int("advise", "context", context, 16)
    return Budget(context // 4, context // 8)


@dataclass(frozen=True, kw_only=True)
class SlidingWindow:
    """The first `sink` tokens and the newest ones: StreamingLLM.

    No evictor runs: `kvpool.adapters.mlx_lm` puts full layers into ``Group.window(max_kv - sink, keep=sink)``, whose
    blocks the pool lets go. What a token reads depends on its position alone.

    Parameters
    ----------
    max_kv : int
        Tokens that a token reads, itself included.
    sink : int, default 4
        How many of them are the first ones of the sequence: fewer than the newest.

    Raises
    ------
    TypeError, ValueError
        A number is not an int or too small; `max_kv` has no room for the sinks.

    Examples
    --------
    >>> SlidingWindow(max_kv=64).window
    60
    """

    max_kv: int
    sink: int = 4

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_kv", checked_int("SlidingWindow", "max_kv", self.max_kv, 8))
        object.__setattr__(self, "sink", checked_int("SlidingWindow", "sink", self.sink, 0))
        if self.window <= self.sink:
            raise ValueError(
                f"[SlidingWindow] max_kv is {self.max_kv}, too small for sink {self.sink}: the least is twice that and "
                "one more"
            )

    @property
    def window(self) -> int:
        """Newest tokens that a token reads, itself included."""
        return self.max_kv - self.sink


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The base of the policies that choose by scores.

    Parameters
    ----------
    max_kv : int
        Tokens that a sequence holds at most while it generates. A prompt that comes in chunks passes it by one chunk.
    sink : int, default 4
        Leading tokens that always stay.
    slack : int, optional
        How far below `max_kv` an eviction goes, so that the next one is that many tokens away. By default 16, and an
        eighth of a `max_kv` below 128.
    kind : {"mass", "raw"}, default "mass"
        Scores: the mean over the query heads of a KV head of what comes out of the softmax, as in the paper, or of what
        goes into it, taken absolute. Raw scores cost less to export, and choose no better than a window where
        ``docs/numbers.md`` has looked.
    alpha : float, default 0.95
        Of the moving average of scores, ``average = alpha * average + (1 - alpha) * score``; a token begins with its
        first score.
    queries : int, default 32
        Newest queries of a chunk of a prompt that are looked at, each like a step of its own.
    """

    max_kv: int
    sink: int = 4
    slack: int | None = None
    kind: str = "mass"
    alpha: float = 0.95
    queries: int = 32

    whole_blocks: ClassVar[bool] = False  #: whether blocks leave as they are, and no token moves

    def __post_init__(self) -> None:
        call = type(self).__name__
        object.__setattr__(self, "max_kv", checked_int(call, "max_kv", self.max_kv, 1))
        object.__setattr__(self, "sink", checked_int(call, "sink", self.sink, 0))
        slack = max(1, min(16, self.max_kv // 8)) if self.slack is None else checked_int(call, "slack", self.slack, 1)
        object.__setattr__(self, "slack", slack)
        if self.kind not in SCORES:
            raise ValueError(f"[{call}] kind is {self.kind!r}, it must be one of {', '.join(SCORES)}")
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float | np.floating):
            kind = type(self.alpha).__name__
            raise TypeError(f"[{call}] alpha must be a float, not {kind} ({self.alpha!r})")
        if not 0 < self.alpha < 1:
            raise ValueError(f"[{call}] alpha is {self.alpha}, it must be in (0, 1)")
        object.__setattr__(self, "queries", checked_int(call, "queries", self.queries, 1))

    @property
    def recent(self) -> int:
        """Newest tokens that always stay."""
        raise NotImplementedError

    def candidates(self, lens: Any, block_size: int) -> tuple[int, Any]:
        """First table index that may leave, and the end of them: full blocks without a protected token."""
        return -(-self.sink // block_size), (lens - self.recent) // block_size

    def lens_after(self, lens: np.ndarray, block_size: int) -> np.ndarray:
        """Tokens that sequences of `lens` tokens have after eviction; one that has less than `max_kv` keeps all."""
        assert self.slack is not None
        return np.where(lens >= self.max_kv, self.max_kv - self.slack, lens)

    @property
    def most(self) -> int:
        """Tokens that a sequence holds at most when a forward pass begins; those of the pass come on top."""
        return self.max_kv - 1

    def check_block_size(self, block_size: int) -> None:
        """Raise ValueError where `max_kv` cannot be kept in blocks of so many tokens."""

    def _require_room(self) -> None:
        assert self.slack is not None
        call = type(self).__name__
        if self.sink + self.recent + self.slack > self.max_kv:
            raise ValueError(
                f"[{call}] max_kv is {self.max_kv}, smaller than sink {self.sink} + recent {self.recent} + slack "
                f"{self.slack}"
            )


@dataclass(frozen=True, kw_only=True)
class H2O(Policy):
    """Sinks, heavy hitters and the newest tokens, chosen anew for each layer and KV head.

    Parameters
    ----------
    max_kv, sink, slack, kind, alpha, queries
        As in `Policy`.
    heavy : int, optional
        Tokens that stay for their scores; half of `max_kv` by default. The rest of `max_kv`, without the sinks, is for
        the newest ones. An eviction leaves `slack` fewer heavy hitters, for the tokens to come.

    Raises
    ------
    TypeError, ValueError
        A number of the wrong type or out of range; a budget smaller than what has to stay.

    Examples
    --------
    >>> policy = H2O(max_kv=128)
    >>> policy.sink, policy.heavy, policy.recent
    (4, 64, 60)
    """

    heavy: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        heavy = self.max_kv // 2 if self.heavy is None else checked_int("H2O", "heavy", self.heavy, 1)
        object.__setattr__(self, "heavy", heavy)
        if self.recent < 1:
            raise ValueError(
                f"[H2O] max_kv is {self.max_kv}, too small for sink {self.sink} + heavy {heavy} and a recent token"
            )
        self._require_room()

    @property
    def recent(self) -> int:
        assert self.heavy is not None
        return self.max_kv - self.sink - self.heavy


@dataclass(frozen=True, kw_only=True)
class BlockEviction(Policy):
    """Whole blocks leave, those with the lowest mean score first; no token moves, and shared blocks stay shared.

    Parameters
    ----------
    max_kv, sink, kind, alpha, queries
        As in `Policy`; the scores of all layers and heads count together. The block of a protected token stays as a
        whole, so `max_kv` has a least value for each size of blocks, see `check_block_size`.
    recent_tokens : int, optional
        Newest tokens that always stay; a quarter of `max_kv` by default.

    Raises
    ------
    TypeError, ValueError
        As in `H2O`.

    Notes
    -----
    A sequence with `max_kv` tokens loses as many blocks as bring it below; `slack` is not used.
    """

    recent_tokens: int | None = None

    whole_blocks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.slack is None:
            object.__setattr__(self, "slack", 1)
        super().__post_init__()
        recent = self.max_kv // 4 if self.recent_tokens is None else self.recent_tokens
        object.__setattr__(self, "recent_tokens", checked_int("BlockEviction", "recent_tokens", recent, 1))
        self._require_room()

    @property
    def recent(self) -> int:
        assert self.recent_tokens is not None
        return self.recent_tokens

    def lens_after(self, lens: np.ndarray, block_size: int) -> np.ndarray:
        """As in `Policy`; what leaves are whole blocks, as many as there are to choose from at most."""
        first, end = self.candidates(lens, block_size)
        blocks = np.clip((lens - self.max_kv) // block_size + 1, 0, np.maximum(end - first, 0))
        return np.asarray(lens - blocks * block_size)

    def check_block_size(self, block_size: int) -> None:
        """As in `Policy`: blocks of protected tokens stay, and the newest of these may begin at the end of a block."""
        least = -(-self.sink // block_size) * block_size + self.recent + block_size
        if self.max_kv < least:
            raise ValueError(
                f"[BlockEviction] max_kv is {self.max_kv}, in blocks of {block_size} the least is {least}: those of "
                f"sink {self.sink}, recent {self.recent} and one more block"
            )


def check_backend(policy: Policy, can: Capabilities, block_size: int) -> None:
    """Raise ValueError where a backend cannot serve a policy: export its scores, move tokens, have such blocks."""
    call = type(policy).__name__
    if policy.kind not in can.scores:
        only = f"only {list(can.scores)}" if can.scores else "none at all"
        raise ValueError(f"[{call}] backend {can.name!r} exports no scores {policy.kind!r}, {only}")
    if not policy.whole_blocks and not can.compacts:
        raise ValueError(f"[{call}] backend {can.name!r} cannot move tokens; BlockEviction moves none")
    policy.check_block_size(block_size)
