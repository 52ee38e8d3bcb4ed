"""Drafts of the next tokens of a request, for `Engine(speculate=...)`: from its own text, or from a small model.

A draft never changes an answer: the engine samples every token itself, and keeps the drafts that are equal.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from dataclasses import replace
from math import log
from typing import Any

import numpy as np

from kvpool import Request
from kvpool.adapters.mlx_lm.engine import Engine
from kvpool.errors import RequestRejected
from kvpool.scheduler import Decoding
from kvpool.scheduler.drafts import Propose
from kvpool.scheduler.request import integer

SHORTEST, LONGEST = 2, 6  # tokens of a phrase that `PromptLookup` looks for
FIRST_CHANCE = 0.85  # of a draft to be right, before anything is known: four drafts
MEMORY = 0.8  # weight of what was known of the chance before, at each token
PROBE = 16  # tokens after which a sequence whose drafts are mostly wrong gets a draft again


class Trust:
    """The number of drafts that are worth computing for a sequence, from how many were right lately.

    A sequence gets drafts as far as the last of them is more likely right than not, and at most `num_drafts`.
    """

    def __init__(self, num_drafts: int) -> None:
        self._most = num_drafts
        self._last: dict[tuple[Hashable, int], tuple[int, np.ndarray, float]] = {}  # tokens, drafts behind them, chance

    def ask(self, propose: Propose, rows: list[Decoding]) -> list[np.ndarray]:
        """Return the drafts that `propose` has for each sequence, and remember them."""
        drafts = [row.generated[:0] for row in rows]
        chances = list(map(self._chance, rows))
        asked = []
        for at, (row, chance) in enumerate(zip(rows, chances, strict=True)):
            most = int(log(0.5) / log(chance)) or int(len(row.generated) % PROBE == 0)
            if most:
                asked.append((at, replace(row, most=min(row.most, self._most, most))))
        given = propose([row for _, row in asked]) if asked else ()
        for (at, row), found in zip(asked, given, strict=True):
            drafts[at] = np.asarray(found, np.int32)[: row.most]
        found = zip(rows, drafts, chances, strict=True)
        self._last = {(row.request.id, row.index): (len(row.generated), own, chance) for row, own, chance in found}
        return drafts

    def _chance(self, row: Decoding) -> float:
        """Return how likely a draft of a sequence is right: above 0 and below 1."""
        begin, drafts, chance = self._last.get((row.request.id, row.index), (0, row.generated[:0], FIRST_CHANCE))
        came = row.generated[begin : begin + len(drafts)]
        right = int(np.append(came == drafts[: len(came)], False).argmin())
        chance = 1 - (1 - chance) * MEMORY**right
        return min(chance if right == len(came) else max(chance * MEMORY, 0.01), 0.99)


class PromptLookup:
    """Drafts what followed when the newest tokens occurred before, in the prompt or in the answer.

    It looks for the last two to six tokens, as many as occurred before, and takes their last place. Sequences whose
    drafts are mostly wrong get few (`Trust`).

    Parameters
    ----------
    num_drafts : int, default 8
        Drafts of a sequence in one step, at most.
    """

    def __init__(self, num_drafts: int = 8) -> None:
        self._trust = Trust(integer("PromptLookup", "num_drafts", num_drafts, 1))

    def __call__(self, rows: list[Decoding]) -> list[np.ndarray]:
        """Return the drafts of each sequence."""
        return self._trust.ask(lambda asked: [_continuation(row.known, row.most) for row in asked], rows)


def _continuation(tokens: np.ndarray, most: int) -> np.ndarray:
    """Return `most` tokens that followed the newest tokens before, or none. A text that repeats itself goes on so."""
    at = np.flatnonzero(tokens[:-1] == tokens[-1])
    for size in range(2, LONGEST + 1):
        longer = at[at >= size - 1]
        longer = longer[tokens[longer - size + 1] == tokens[-size]] if len(longer) else longer
        if not len(longer):
            break
        at = longer
    else:
        size += 1
    return np.resize(tokens[at[-1] + 1 :], most) if len(at) and size > SHORTEST else tokens[:0]


class DraftModel:
    """Drafts what a smaller model says, in an engine of its own.

    The engine's prefix cache has what was computed before, so drafts that turned out wrong need no correction.

    Parameters
    ----------
    model
        As loaded by ``mlx_lm.load``, with the tokens of the large one.
    num_blocks : int
        Blocks of four tokens. They should hold all sequences that run.
    num_drafts : int, default 4
        Drafts of a sequence in one step, at most.
    options
        See `Engine`.
    """

    def __init__(self, model: Any, num_blocks: int, *, num_drafts: int = 4, **options: Any) -> None:
        self._trust = Trust(integer("DraftModel", "num_drafts", num_drafts, 1))
        self.engine = Engine(model, num_blocks, **{"block_size": 4, **options})
        self._reading: dict[Hashable, tuple[Hashable, int]] = {}  # sequences in the engine, by their ids there

    def __call__(self, rows: list[Decoding]) -> list[np.ndarray]:
        """Return the drafts of each sequence."""
        return self._trust.ask(self._run, rows)

    def resize(self, num_tokens: int) -> None:
        """Have room for so many tokens, between two calls. What it reads begins anew, from its prefix cache.

        Raises
        ------
        ValueError, CapacityExceeded, MemoryError
            See `Engine.resize`. The size is unchanged.
        """
        for id in self._reading:
            self.engine.cancel(id)
        self._reading.clear()
        self.engine.resize(1 + num_tokens // self.engine.kv.pool.block_size)

    def _run(self, rows: list[Decoding]) -> list[np.ndarray]:
        """Return what the model says. Nothing for a sequence that is too long for it.

        It runs the model as often as a sequence has drafts. If that is not enough, because the model has to read a long
        text first, it goes on in the next calls, and the sequence has no drafts until then.
        """
        drafts, places = [row.generated[:0] for row in rows], {}
        try:
            for place, row in enumerate(rows):
                name = row.request.id, row.index
                request = Request(row.known, row.most, namespace=row.request.namespace)
                if name not in self._reading.values() and request.prompt.max() < self.engine.vocab_size:
                    with suppress(RequestRejected):
                        id = self.engine.submit(request)
                        places[id], self._reading[id] = place, name
            for _ in range(max(row.most for row in rows)):
                for completion in self.engine.step():
                    del self._reading[completion.id]
                    if completion.id in places:
                        drafts[places[completion.id]] = completion.tokens
        except BaseException:
            self._reading.clear()
            self.engine.reset()
            raise
        return drafts
