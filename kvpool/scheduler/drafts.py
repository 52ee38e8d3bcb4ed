"""Drafted tokens: decodes that compute several tokens in one step, of which `update` keeps those that were right.

`ask` collects them before a step, `settle` takes back what was wrong after it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy import int32, int64
from numpy.typing import NDArray

from kvpool._core import Pool
from kvpool.scheduler.request import Request, token_array
from kvpool.scheduler.results import Given, why_ended
from kvpool.scheduler.state import Core, DecodeBatch, Step


@dataclass(frozen=True, eq=False, slots=True)
class Decoding:
    """A sequence that decodes, as a proposer sees it."""

    request: Request
    index: int  #: number of the sequence in its request
    generated: NDArray[int32]  #: its tokens so far, at least one; the array holds during the call
    most: int  #: how many drafts it may have; more are ignored

    @property
    def known(self) -> NDArray[int32]:
        """A copy of the prompt and the generated tokens."""
        return np.concatenate([self.request.prompt, self.generated])


Propose = Callable[[list[Decoding]], Sequence[Any]]
"""Returns the drafts of each sequence: tokens that may come next, or none."""


def check_proposer(call: str, propose: Any, pool: Pool, eviction: Any) -> None:
    """Raise unless `propose` is None, or is callable and sequences can take tokens back."""
    if propose is None:
        return
    if not callable(propose):
        raise TypeError(f"[{call}] speculate must be callable, not {type(propose).__name__}")
    kinds = {group.kind for group in pool.options.groups}
    if "state" in kinds:
        raise ValueError(f"[{call}] speculate: the pool has a state group, and a state takes no token back")
    if kinds != {"full"} and not pool.options.lookahead:
        raise ValueError(f"[{call}] speculate: windows and chunks take tokens back only with lookahead (0)")
    if eviction is not None:
        raise ValueError(f"[{call}] speculate and eviction exclude each other")


def ask(core: Core, propose: Propose, batch: DecodeBatch, chunks: list[tuple[int, int]]) -> NDArray[int64] | None:
    """Return the new tokens of each decode, drafts included. None: there are no drafts.

    They are stored behind the generated tokens of their lanes. They use what all others leave of the token budget and
    of the blocks: a decode without room for its drafts has none.
    """
    rows, lanes = core.rows, batch.lanes
    budget = core.max_step_tokens - len(lanes) - sum(new for _, new in chunks)
    longest = min(budget, core.chunk - 1, core.pool.options.lookahead if core.needs.lets_go else budget)
    most = np.minimum(batch.limit - rows.generated[lanes] - 1, longest)
    most[(rows.generated[lanes] == 0) | (batch.width > 0)] = 0
    asked = np.flatnonzero(most > 0).tolist() if core.mixed or len(lanes) == 1 else []
    if not asked:
        return None
    found = []
    for row in asked:
        lane, sequence = lanes[row], rows.sequence(lanes[row])
        generated = rows.tokens[lane, : rows.generated[lane]]
        found.append(Decoding(sequence.group.request, sequence.index, generated, int(most[row])))
    new = np.ones(len(lanes), np.int64)
    for row, decoding, given in zip(asked, found, propose(found), strict=True):
        drafts = token_array("schedule", "drafts", given)[: min(decoding.most, budget)]
        budget -= len(drafts)
        new[row] += len(drafts)
        lane, end = lanes[row], len(decoding.generated)
        rows.make_room(end + len(drafts) + 1)
        rows.tokens[lane, end : end + len(drafts)] = drafts
    for row in reversed(asked):
        if (new == 1).all():
            return None
        if core.has_room(batch, new):
            return new
        new[row] = 1
    return None


def settle(core: Core, step: Step, given: Given) -> tuple[Step, Given]:
    """Count drafts that the sampled tokens confirm, and take all others back. Set `Step.taken`.

    Return what is left to take: the last new token of each decode, as if it had no drafts.
    """
    rows, n = core.rows, step.num_decodes
    taken = np.ones(len(step.sample_at), np.bool_)
    last = taken.copy()
    ends = step.num_new.cumsum()
    first = np.searchsorted(step.sample_at, ends - step.num_new)
    cut: list[tuple[int, int]] = []
    for row in np.flatnonzero(step.num_new[:n] > 1).tolist():
        lane, drafted, at = int(step.lanes[row]), int(step.num_new[row]) - 1, int(first[row])
        last[at : at + drafted + 1] = taken[at : at + drafted + 1] = False
        if rows.handle[lane] != step.handles[row]:  # it was cancelled
            continue
        begin = int(rows.generated[lane])
        right = _confirmed(core, lane, given.tokens[at : at + drafted])
        taken[at : at + right + 1] = last[at + right] = True
        if given.logprobs is not None:
            rows.need_logprobs()[lane, begin : begin + right] = given.logprobs[at : at + right]
        rows.generated[lane] += right
        rows.computed[lane] += right
        core.decode_tokens += right
        core.sampled_tokens += right
        core.drafted_tokens += drafted
        rows.sequence(lane).group.tenant.served += right
        core.accepted_tokens += right
        if right < drafted:
            cut.append((int(rows.handle[lane]), int(rows.computed[lane]) + 1))
    if cut:
        handles, lens = np.array(cut, np.int64).T.copy()
        core.pool.truncate(handles, lens)
    step.taken = taken
    rest = copy.copy(step)
    rest.num_new = step.num_new.copy()
    rest.num_new[:n] = 1
    rest.sample_lane, rest.beam_width = step.sample_lane[last], step.beam_width[last]
    rest.sample_position = step.sample_position[last]
    logprobs = None if given.logprobs is None else given.logprobs[last]
    return rest, given._replace(tokens=given.tokens[last], logprobs=logprobs)


def _confirmed(core: Core, lane: int, sampled: NDArray[int32]) -> int:
    """Return how many drafts of a lane are the tokens that were sampled, and do not end the sequence."""
    rows = core.rows
    begin = int(rows.generated[lane])
    known = rows.tokens[lane]
    right = int(np.append(known[begin : begin + len(sampled)] == sampled, False).argmin())
    ends = np.isin(known[begin : begin + right], rows.watch[lane])
    for at in np.flatnonzero(ends).tolist():
        if why_ended(rows.sequence(lane).group, known[: begin + at + 1]) is not None:
            return at
    return right
