"""Cases in which every two values of two factors meet."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np


def pairwise(factors: dict[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Choices in which every two values of two factors meet (greedy, deterministic)."""
    names = list(factors)
    missing = {((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]}
    order = {pair: i for i, pair in enumerate(sorted(missing, key=repr))}
    rng = np.random.default_rng(seed)
    rows = []
    while missing:
        best: tuple[int, dict[str, Any]] = (0, {})
        target = min(missing, key=order.__getitem__)
        for _ in range(30):
            row = {name: factors[name][rng.integers(len(factors[name]))] for name in names} | dict(target)
            covered = sum(pair in missing for pair in itertools.combinations(row.items(), 2))
            best = max(best, (covered, row), key=lambda entry: entry[0])
        rows.append(best[1])
        missing -= set(itertools.combinations(best[1].items(), 2))
    return rows
