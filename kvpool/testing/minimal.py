"""The shortest part of a program that still fails: delta debugging (Zeller and Hildebrandt, 2002)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

Word = tuple[int, int, int, int]
SHORT = 48  # items, of which all pairs are tried


class FuzzFinding(AssertionError):
    """What is tested and what is right disagree; `call` is the number of the call in its run."""

    call = -1


def minimal(items: list[Any], fails: Callable[[list[Any]], bool]) -> list[Any]:
    """A part of `items` that still fails, and of which no item can be left out, nor two of a short one.

    Like ddmin, but for one thing: after a piece was left out, the pieces behind it are tried, not again those before
    it, which had to stay a moment ago. A pass takes as many tries as there are pieces, however many of them go.
    """
    size = max(1, len(items) // 2)
    while size:
        at, before = 0, len(items)
        while at < len(items):
            rest = items[:at] + items[at + size :]
            if fails(rest):
                items = rest
            else:
                at += size
        if size > 1 or len(items) == before:
            size = min(size // 2, len(items))
    pairs = itertools.combinations(range(len(items)), 2) if len(items) <= SHORT else ()
    for first, second in pairs:  # what opens and what closes
        rest = items[:first] + items[first + 1 : second] + items[second + 1 :]
        if fails(rest):
            return minimal(rest, fails)
    return items


def smaller_numbers(words: list[Word], fails: Callable[[list[Word]], bool]) -> list[Word]:
    """The same calls with smaller arguments, as far as they still fail."""
    for at in range(len(words)):
        for place in (1, 2, 3):
            for value in (0, 1, 2, 3, 5, 15, 1 << 28, 1 << 29, 3 << 29):
                if value >= words[at][place]:
                    continue
                op, a, b, c = (value if k == place else old for k, old in enumerate(words[at]))
                tried = [*words[:at], (op, a, b, c), *words[at + 1 :]]
                if fails(tried):
                    words = tried
                    break
    return words
