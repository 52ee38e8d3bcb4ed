"""Pools that may be wrong, made by the core and by the plain model: both make one, or both raise the same."""

from __future__ import annotations

import random
from typing import Any

from kvpool.groups import Group
from kvpool.testing import ModelPool
from tests.verify.words import KINDS

#: What may be wrong with an option of a pool, or right.
WRONG: tuple[dict[str, Any], ...] = (
    *({"lookahead": n} for n in (-1, 0, 1, 2, 5, True, None, 1.0)),
    *({"groups": groups} for groups in ([], 3, "full", [1], [None], (), [Group.state(2)], [Group.full()] * 9)),
    *({"prefix_cache": flag} for flag in (True, False, 1)),
    *({"reserved_blocks": n} for n in (0, 1, 5, 20)),
    *({"watermark": n} for n in (0, 3, 99)),
    *({"events": n} for n in (0, 4)),
    *({"num_blocks": n} for n in (0, 1, 2, 6)),
    *({"block_size": n} for n in (0, 1, 2, 3)),
)


def make_group(rng: random.Random) -> Group:
    """A group with options that may be wrong."""
    kind = rng.choice(KINDS)
    number: Any = rng.choice([1, 2, 3, 5, 8, 1, 2, 3, 5, 8, 0, -1, True, 1.5, None])
    if kind == "state":
        return Group.state(number)
    options: dict[str, Any] = {}
    for name, values in (
        ("block_size", [None, 2, 2, 4, 8, 1, 3, 6, 16, 0, -2, "2"]),
        ("columns", [1, 1, 2, 5, 0, -1, None]),
        ("arena", [0, 0, 0, 1, 1, 2, 7, 8, -1, None]),
        ("num_blocks", [None, None, 6, 6, 9, 1, 0, -1, 2.0]),
    ):
        if rng.random() < 0.35:
            options[name] = rng.choice(values)
    if kind == "full":
        return Group.full(**options)
    if kind == "chunk":
        return Group.chunk(number, **options)
    if rng.random() < 0.5:
        options["keep"] = rng.choice([0, 1, 2, 4, 5, 8, -1, None])
    return Group.window(number, **options)


def compare_constructors(make_pool: Any, seed: int, count: int) -> dict[str, int]:
    """Make pools that may be wrong on both sides; both make one, or both raise the same. Returns how many of each."""
    rng = random.Random(f"constructors {seed}")
    met: dict[str, int] = {}
    for _ in range(count):
        groups: Any = []
        for _ in range(rng.choice([1, 1, 2, 2, 3])):
            try:
                groups.append(make_group(rng))
            except (TypeError, ValueError):
                continue
        options = {"num_blocks": 16, "block_size": 2, "groups": groups, "max_seqs": 4}
        if rng.random() < 0.4:  # one thing that is wrong, for which both sides have the same word
            options |= {"groups": [Group.full(), Group.window(4), Group.state(3)], **rng.choice(WRONG)}
        results: list[Any] = []
        for make in (make_pool, ModelPool):
            try:
                pool = make(**options)
                named = max(group.arena for group in options["groups"])
                num_arenas = 1 + named + sum(group.kind == "state" for group in options["groups"])
                arenas = [tuple(pool.stats(arena)) for arena in range(num_arenas)]
                results.append((arenas, pool.options.groups, pool.options.lookahead))
                pool.shutdown()
            except Exception as error:  # the other side must raise it as well
                results.append(type(error))
        assert results[0] == results[1], f"Pool(**{options}): {results[0]}, due {results[1]}"
        name = results[1].__name__ if isinstance(results[1], type) else "made"
        met[name] = met.get(name, 0) + 1
    return met
