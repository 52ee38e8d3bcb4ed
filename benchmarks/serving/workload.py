"""Requests with random prompts and random lengths."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests, all there at the beginning.

    Attributes
    ----------
    prompts : list of int32 ``[tokens]``
        At least one token each.
    max_tokens : int64 ``[R]``
        Tokens of each answer, at least 1: requests end by length, so that every server does the same work.
    shared_prefix : int
        Tokens that every prompt begins with.
    """

    prompts: list[NDArray[np.int32]] = field(repr=False)
    max_tokens: NDArray[np.int64]
    shared_prefix: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that are to be generated."""
        return int(self.max_tokens.sum())

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and its answer: what a static reservation holds for each sequence."""
        return max(len(prompt) + int(new) for prompt, new in zip(self.prompts, self.max_tokens, strict=True))


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens.

    ``fixed`` is always `first`; ``lognormal`` has the median `first` and the standard deviation `sigma` of its
    logarithm, and is cut at `last`.
    """

    kind: str
    first: int
    last: int
    sigma: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Read ``"64"`` or ``"lognormal:64:0.8:512"``.

        Raises
        ------
        ValueError
            It is neither of them.
        """
        kind, _, rest = text.partition(":")
        try:
            if not rest:
                found = cls("fixed", int(kind), int(kind))
            else:
                median, sigma, last = rest.split(":")
                found = cls(kind, int(median), int(last), float(sigma))
            if found.kind not in ("fixed", "lognormal"):
                raise ValueError(kind)
        except ValueError:
            raise ValueError(f"{text}: lengths are N or lognormal:MEDIAN:SIGMA:MAX") from None
        if not (1 <= found.first <= found.last < 2**31 and 0 <= found.sigma <= 10):
            raise ValueError(f"{text}: lengths go from 1 up to 2^31 - 1, sigma from 0 to 10")
        return found

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """Return `count` lengths, int64 ``[count]``."""
        if self.kind == "fixed":
            return np.full(count, self.first, np.int64)
        drawn = np.exp(rng.normal(math.log(self.first), self.sigma, count))
        return np.clip(np.rint(drawn), 1, self.last).astype(np.int64)


def make_workload(
    vocab_size: int, *, prompt: str, output: str, requests: int, shared_prefix: int = 0, seed: int = 1
) -> Workload:
    """Return random requests, with tokens below `vocab_size`; the lengths of prompts come on top of what they share."""
    _, for_prompts, for_outputs, for_tokens = np.random.default_rng(seed).spawn(4)
    outputs = Lengths.parse(output).draw(for_outputs, requests)
    shared = for_tokens.integers(0, vocab_size, shared_prefix, np.int32)
    prompts = [
        np.concatenate([shared, for_tokens.integers(0, vocab_size, int(own), np.int32)])
        for own in Lengths.parse(prompt).draw(for_prompts, requests)
    ]
    return Workload(prompts, outputs, shared_prefix)
