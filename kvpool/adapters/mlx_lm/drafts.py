"""Who guesses the next tokens of a request, for `Engine(speculate=...)`: its own text, or a smaller model.

A guess never changes an answer: the engine samples every token itself, and keeps the drafts that are equal.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

from kvpool import Request
from kvpool.adapters.mlx_lm.engine import Engine
from kvpool.errors import RequestRejected
from kvpool.scheduler import Decoding
from kvpool.scheduler.request import integer

SHORTEST, LONGEST = 2, 6  # tokens of a phrase that `PromptLookup` looks for


class PromptLookup:
    """Drafts what followed when the newest tokens occurred before, in the prompt or in the answer.

    It looks for the last two to six tokens, as many as occurred before, and takes their last place. It has no state.

    Parameters
    ----------
    num_drafts : int, default 8
        Drafts of a sequence in one step, at most.
    """

    def __init__(self, num_drafts: int = 8) -> None:
        self.num_drafts = integer("PromptLookup", "num_drafts", num_drafts, 1)

    def __call__(self, rows: list[Decoding]) -> list[np.ndarray]:
        """Return the drafts of each sequence."""
        return [_continuation(row.known, min(self.num_drafts, row.most)) for row in rows]


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
        self.num_drafts = integer("DraftModel", "num_drafts", num_drafts, 1)
        self.engine = Engine(model, num_blocks, **{"block_size": 4, **options})

    def __call__(self, rows: list[Decoding]) -> list[np.ndarray]:
        """Return the drafts of each sequence. There are none for one that is too long for the model."""
        drafts = [row.generated[:0] for row in rows]
        try:
            places = {}
            for place, row in enumerate(rows):
                request = Request(row.known, min(self.num_drafts, row.most))
                if request.prompt.max() < self.engine.vocab_size:
                    with suppress(RequestRejected):
                        places[self.engine.submit(request)] = place
            while self.engine.num_unfinished:
                for completion in self.engine.step():
                    drafts[places[completion.id]] = completion.tokens
        finally:
            self.engine.close()
        return drafts
