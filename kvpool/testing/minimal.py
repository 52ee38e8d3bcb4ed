"""The shortest part of a program that still fails: delta debugging (Zeller and Hildebrandt, 2002)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Word = tuple[int, int, int, int]


def minimal(items: list[Any], fails: Callable[[list[Any]], bool]) -> list[Any]:
    """A part of `items` that still fails, and of which no single item can be left out (ddmin)."""
    parts = 2
    while len(items) >= 2:
        size = -(-len(items) // parts)
        for at in range(0, len(items), size):
            rest = items[:at] + items[at + size :]
            if fails(rest):
                items, parts = rest, max(parts - 1, 2)
                break
        else:
            if size == 1:
                return items
            parts = min(2 * parts, len(items))
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
