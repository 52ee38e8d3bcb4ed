"""What a model said, and what is made of it: perplexity, recall, and how sure both are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.quality.documents import Documents


@dataclass(frozen=True)
class Answer:
    """What a model says to documents ``[rows, length]``: for each token but the first.

    Attributes
    ----------
    nats : float32 ``[rows, length - 1]``
        Minus the logarithm of the probability of the token.
    right : bool ``[rows, length - 1]``
        Whether it was the most probable one.
    nbytes : float
        Of K and V of each row at the end.
    seconds : float
        That it took for all.
    """

    nats: NDArray[Any]
    right: NDArray[np.bool_]
    nbytes: float
    seconds: float = math.nan


@dataclass(frozen=True)
class Quality:
    """One row of a table. The arrays have an element for each seed.

    Attributes
    ----------
    nats, code_nats : float ``[seeds]``
        Per token, of all tokens and of those that need not be recalled.
    recall : float ``[seeds]``
        Share of the definitions that are recalled.
    """

    nats: NDArray[np.float64]
    code_nats: NDArray[np.float64]
    recall: NDArray[np.float64]
    nbytes: float
    seconds: float

    @classmethod
    def of(cls, documents: Documents, answer: Answer) -> Quality:
        """Return what the answers to documents are worth."""
        recalled, seeds = documents.recalled[:, 1:], np.unique(documents.seeds)
        of_seed = [documents.seeds == seed for seed in seeds]
        return cls(
            np.array([answer.nats[rows].mean() for rows in of_seed], np.float64),
            np.array([answer.nats[rows][~recalled[rows]].mean() for rows in of_seed], np.float64),
            np.array([answer.right[rows][recalled[rows]].mean() for rows in of_seed], np.float64),
            answer.nbytes,
            answer.seconds,
        )

    @property
    def perplexity(self) -> float:
        """Of all tokens."""
        return float(np.exp(self.nats.mean()))

    @property
    def code_perplexity(self) -> float:
        """Of those that need not be recalled."""
        return float(np.exp(self.code_nats.mean()))

    def as_json(self) -> dict[str, Any]:
        """Return numbers by name."""
        return {
            "perplexity": self.perplexity,
            "code_perplexity": self.code_perplexity,
            "recall": float(self.recall.mean()),
            "nats_of_seeds": self.nats.tolist(),
            "code_nats_of_seeds": self.code_nats.tolist(),
            "recall_of_seeds": self.recall.tolist(),
            "kv_bytes": self.nbytes,
            "seconds": self.seconds,
        }


def more(one: NDArray[np.float64], other: NDArray[np.float64]) -> tuple[float, float]:
    """Return by how much `one` is more than `other`, and the standard error of that over the seeds, which are pairs."""
    difference = one - other
    count = len(difference)
    error = float(difference.std(ddof=1)) / math.sqrt(count) if count > 1 else math.inf
    return float(difference.mean()), error
