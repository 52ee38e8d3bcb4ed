"""Logprobs of a prompt: the engine says what is given, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvpool.adapters.mlx_lm.grammar import Grammar, Grammars


class Given(Grammar):
    """A grammar whose only answer are these tokens. It follows its samples, too. All grammars have as many bits."""

    def __init__(self, tokens: Sequence[int], grammars: Grammars) -> None:
        super().__init__(None, frozenset())
        self._tokens, self._size = tokens, len(grammars.regex("a").follow().allowed(np.empty(0, np.int32)))

    def follow(self) -> Any:
        """Return what follows one sample."""
        return self

    def allowed(self, generated: np.ndarray) -> np.ndarray:
        """Return which tokens may come next, one bit each, the lowest first. Behind the last one, all may."""
        if len(generated) >= len(self._tokens):
            return np.full(self._size, 255, np.uint8)
        token, bits = int(self._tokens[len(generated)]), np.zeros(self._size, np.uint8)
        bits[token // 8] = 1 << token % 8
        return bits
