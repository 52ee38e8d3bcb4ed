"""What a model is asked: held-out code with definitions planted in it, several documents of every seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.quality import corpus
from benchmarks.quality.corpus import Corpus, Marks, Tokens


@dataclass(frozen=True)
class Documents:
    """Documents of one length.

    Attributes
    ----------
    tokens : int32 ``[rows, length]``
    recalled : bool ``[rows, length]``
        Which of them only a memory of the definitions can tell. Each is more than half of the length away from them.
    seeds : int ``[rows]``
        Which seed drew the row.
    """

    tokens: Tokens
    recalled: Marks
    seeds: NDArray[np.int_]

    @property
    def length(self) -> int:
        """Tokens of each."""
        return self.tokens.shape[1]

    def take(self, rows: int) -> Documents:
        """Return the first rows of each seed, `rows` of them."""
        chosen = [row for seed in np.unique(self.seeds) for row in np.flatnonzero(self.seeds == seed)[:rows]]
        return Documents(self.tokens[chosen], self.recalled[chosen], self.seeds[chosen])


def planted(text: Corpus, length: int, seeds: int, samples: int) -> Documents:
    """Return documents for the model that is trained here, `samples` of each seed."""
    found = []
    for seed in range(seeds):
        rng = np.random.default_rng([7, seed, length])
        found += [corpus.planted(rng, text.held_out, length, after=length // 2) for _ in range(samples)]
    tokens, recalled = (np.stack(part) for part in zip(*found, strict=True))
    return Documents(tokens, recalled, np.repeat(np.arange(seeds), samples))


def written(text: Corpus, tokenizer: Any, length: int, seeds: int, samples: int, keys: int = 8) -> Documents:
    """Return documents for any model: ``# key K7 = 42`` is planted as a line of its own, and asked for at the end.

    Tokens of the numbers at the end are those to be recalled.
    """
    rows, marks = [], []
    for seed in range(seeds):
        rng = np.random.default_rng([8, seed, length])
        for _ in range(samples):
            tokens, recalled = _written(rng, text, tokenizer, length, keys)
            rows.append(tokens)
            marks.append(recalled)
    return Documents(np.stack(rows).astype(np.int32), np.stack(marks), np.repeat(np.arange(seeds), samples))


def _written(
    rng: np.random.Generator, text: Corpus, tokenizer: Any, length: int, keys: int
) -> tuple[list[int], list[bool]]:
    def encode(words: str) -> list[int]:
        return list(tokenizer.encode(words, add_special_tokens=False))

    names, values = rng.choice(100, keys, replace=False), rng.integers(10, 100, keys)
    head = encode("\n" + "".join(f"# key K{name} = {value}\n" for name, value in zip(names, values, strict=True)))
    tail: list[int] = []
    marks: list[bool] = []
    for key in rng.permutation(keys):
        question, number = encode(f"\n# key K{names[key]} ="), encode(f" {values[key]}")
        tail += question + number
        marks += [False] * len(question) + [True] * len(number)
    code = length - len(head) - len(tail)
    if code < length // 2:
        raise ValueError(f"[documents] {keys} keys take {length - code} tokens, too many of {length}")
    body: list[int] = []
    while len(body) < code:
        body += encode(corpus.excerpt(rng, text.held_out, min(8 * code, len(text.held_out))).tobytes().decode())
    lead = min(16, code // 8)
    tokens = body[:lead] + head + body[lead:code] + tail
    return tokens, [False] * (length - len(tail)) + marks
