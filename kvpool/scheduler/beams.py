"""`Beam`: the hypotheses of a beam search. They share blocks by fork. All of them run, or none.

The search itself needs no pool: `rank` orders continuations, `decided` returns whether it is over.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy import float32, int32
from numpy.typing import NDArray

from kvpool.errors import OutOfSequences
from kvpool.scheduler.policy import count_admission, known_tokens, open_with_room
from kvpool.scheduler.request import DECODING, FINISHED, PREFILLING, WAITING, Output, RequestGroup, Sequence
from kvpool.scheduler.results import why_ended
from kvpool.scheduler.state import Attempt, Core


class Hypothesis(NamedTuple):
    """A finished hypothesis."""

    score: float
    tokens: NDArray[int32]
    logprobs: NDArray[float32]
    reason: str


class Candidate(NamedTuple):
    """A continuation of the live hypothesis `parent` with a token."""

    total: float
    parent: int
    token: int
    logprob: float


class Beam:
    """One beam search. A running one holds `width` lanes."""

    __slots__ = ("admitted", "common", "done", "group", "held", "live", "spare", "totals", "width")

    def __init__(self, group: RequestGroup) -> None:
        self.group = group
        self.width = group.request.beam_width
        self.live = [group.sequences[0]]  # unfinished, best first; the first stands for all in the waiting queue
        self.totals = [0.0]  # sum of the logprobs of each live hypothesis
        self.done: list[Hypothesis] = []  # the best `width` finished ones, best first
        self.spare: list[int] = []  # lanes that the beam holds and does not use
        # Handles that hold the blocks of hypotheses 1, 2, ... until the tokens that they have in common are computed.
        self.held: list[int] = []
        self.common = 0  # tokens (whole blocks) that hypotheses 1, 2, ... will share with the first
        self.admitted = 0

    # -- admission and preemption

    def wanted(self, core: Core, sequence: Sequence) -> int:
        """Return how many tokens a hypothesis may compute now. The last token of each waits for the others."""
        remaining = core.rows.remaining(sequence.lane)
        if len(self.live) == 1:
            return remaining
        if not self.held:
            return remaining - 1
        if sequence is not self.live[0]:
            return 0
        # A fork shares what the first has then, and no call takes tokens behind a window back.
        return self.common - int(core.rows.computed[sequence.lane])

    def spread(self, core: Core) -> None:
        """Fork the common tokens once they are computed, and decode once all hypotheses are ready."""
        rows = core.rows
        if self.held:
            first = self.live[0]
            if rows.computed[first.lane] < self.common or not self._fork_held(core):
                return
        if self.live[0].state == PREFILLING and all(rows.remaining(sequence.lane) == 1 for sequence in self.live):
            for sequence in self.live:
                core.move(sequence, DECODING)

    def _fork_held(self, core: Core) -> bool:
        """Replace the `held` handles by forks of the first hypothesis. Nothing is copied."""
        pool, rows = core.pool, core.rows
        first, others, forked = self.live[0], self.live[1:], list[int]()
        try:
            pool.close(self.held)
            forked += pool.fork(int(rows.handle[first.lane]), len(others)).tolist()
            for sequence, handle in zip(others, forked, strict=True):
                rows.handle[sequence.lane] = handle
                rows.computed[sequence.lane] = self.common
                rows.committed[sequence.lane] = min(self.common, int(rows.committed[first.lane]))
            self.held = []
        except BaseException as error:
            core.setbacks += 1
            core.close([*self.held, *forked])
            for sequence in others:
                rows.handle[sequence.lane] = -1
            self.preempt(core)
            if isinstance(error, OutOfSequences):  # another user of the pool was faster
                return False
            raise
        core.changed = True
        return True

    def admit(self, core: Core) -> bool:
        """Admit all hypotheses of the beam. Return False if there is no room for all."""
        rows, pool, needs, first = core.rows, core.pool, core.needs, self.live[0]
        if len(rows.free) < self.width:
            return False
        tokens = [known_tokens(sequence) for sequence in self.live]
        common = common_prefix(tokens) // needs.unit * needs.unit if len(tokens) > 1 else 0
        shared = [common if rank else 0 for rank in range(len(tokens))]
        blocks = needs.most(list(map(len, tokens)), shared, self.width > 1).sum(axis=0)
        # Nobody takes tokens back, so what the first finds must be common to all.
        looked_up = tokens[0][: common + 1] if len(tokens) > 1 else tokens[0]
        attempt = core.attempt = Attempt(core, first)
        handle = open_with_room(core, attempt, blocks.tolist(), looked_up, self.group.request)
        if handle is None:
            return False
        handles = [handle]
        try:
            for _ in tokens[1:]:
                handles.append(attempt.open(pool.open))
        except OutOfSequences:
            pool.close(handles)
            return False
        core.queue.remove(first)
        self.common = common
        self.admitted = core.admission_number(self.width)
        self.held = handles[1:]
        core.beams.append(self)
        computed = pool.num_tokens(handles[0])
        for rank, (sequence, handle, known) in enumerate(zip(self.live, handles, tokens, strict=True)):
            found = 0 if rank else computed
            count_admission(core, sequence, found, len(known) - (common if rank else 0))
            core.start(sequence, rows.take(), handle, found, self.admitted + rank)
            rows.common[sequence.lane] = shared[rank]
        self.spare = [rows.take() for _ in range(self.width - len(self.live))]
        self.spread(core)
        return True

    def preempt(self, core: Core) -> None:
        """Close all hypotheses and queue the first, which stands for all."""
        for sequence in self.live:
            if not self.held or sequence is self.live[0]:
                core.commit(sequence.lane)
        core.close(int(core.rows.handle[sequence.lane]) for sequence in self.live)
        for sequence in self.live:
            core.leave(sequence, WAITING)
        self.stop_running(core)

    def stop_running(self, core: Core) -> None:
        """Let the live hypotheses wait, without blocks."""
        for sequence in self.live:
            sequence.preemptions += 1
        core.preemptions += len(self.live)
        self.give_back(core)
        core.queue.push(self.live[0], front=True)

    def give_back(self, core: Core) -> None:
        """Free everything that the beam holds: it does not run any more."""
        for lane in self.spare:
            core.rows.give(lane)
        self.spare, self.held = [], []
        if self in core.beams:
            core.beams.remove(self)

    # -- a step of the search

    def move_on(self, core: Core, tokens: NDArray[int32], logprobs: NDArray[float32], now: float) -> list[Output]:
        """Take one more token: choose continuations, end hypotheses, fork and close handles."""
        rows, group = core.rows, self.group
        before = [rows.generated_of(sequence.lane) for sequence in self.live]
        scored = [rows.logprobs_of(sequence.lane) for sequence in self.live]
        chosen: list[tuple[Candidate, NDArray[int32], NDArray[float32]]] = []
        for candidate in rank(self.totals, tokens, logprobs):
            if len(chosen) == self.width:
                break
            longer = np.append(before[candidate.parent], np.int32(candidate.token))
            old = scored[candidate.parent]
            with_new = np.append(np.empty(0, np.float32) if old is None else old, np.float32(candidate.logprob))
            reason = why_ended(group, longer)
            if reason is None:
                chosen.append((candidate, longer, with_new))
            else:
                score = candidate.total / len(longer) ** group.request.length_penalty
                self.done.append(Hypothesis(score, longer, with_new, reason))
        self.done = sorted(self.done, key=lambda hypothesis: -hypothesis.score)[: self.width]
        core.sampled_tokens += len(self.live)
        if not chosen and not self.done:  # the live ones are all there is
            return self.cancel(core, now, "cancelled")
        if not chosen or decided(self, chosen[0][0].total, len(chosen[0][1])):
            return self.finish(core, now)
        reorder(core, self, chosen)
        return []

    # -- the end

    def cancel(self, core: Core, now: float, reason: str) -> list[Output]:
        """End the beam with the best of its finished and live hypotheses."""
        penalty = self.group.request.length_penalty
        self._release(core)
        found = list(self.done)
        for sequence, total in zip(self.live, self.totals, strict=True):
            length = len(sequence.tokens)
            scores = sequence.logprobs if sequence.logprobs is not None else np.empty(0, np.float32)
            found.append(Hypothesis(total / max(1, length) ** penalty, sequence.tokens, scores, reason))
        while len(found) < self.group.request.n:  # before the first step there is one, and it is empty
            found.append(found[-1])
        outputs = self._outputs(core, sorted(found, key=lambda h: -h.score), reason, now)
        core.cancelled += len(outputs)
        return outputs

    def finish(self, core: Core, now: float) -> list[Output]:
        """End the search with the best n finished hypotheses."""
        for sequence in self.live:
            core.commit(sequence.lane)
        self._release(core)
        outputs = self._outputs(core, self.done, None, now)
        core.count[FINISHED] += len(outputs)
        return outputs

    def _release(self, core: Core) -> None:
        """Let go of the live hypotheses, which are no outputs yet."""
        for sequence in self.live:
            core.release(sequence)
        core.cancelled -= len(self.live)
        self.give_back(core)
        core.close_group(self.group, self.group.unfinished)

    def _outputs(self, core: Core, found: list[Hypothesis], reason: str | None, now: float) -> list[Output]:
        """Return the outputs of the best n of `found`."""
        outputs = []
        for place, hypothesis in enumerate(found[: self.group.request.n]):
            sequence = Sequence(self.group, place)
            sequence.tokens, sequence.logprobs = hypothesis.tokens, hypothesis.logprobs
            sequence.preemptions = self.live[0].preemptions
            outputs.append(core.output(sequence, reason or hypothesis.reason, now, hypothesis.score))
        return outputs


def common_prefix(tokens: list[NDArray[int32]]) -> int:
    """Return the length of the common beginning. At least one token of each sequence is left over."""
    least = min(map(len, tokens)) - 1
    first = tokens[0][:least]
    for other in tokens[1:]:
        differ = np.flatnonzero(first != other[: len(first)])
        if differ.size:
            first = first[: differ[0]]
    return len(first)


def rank(totals: list[float], tokens: NDArray[int32], logprobs: NDArray[float32]) -> list[Candidate]:
    """Return all continuations, best first. Of equals the lower row comes first, then the lower candidate."""
    sums = np.asarray(totals, np.float64)[:, None] + logprobs.astype(np.float64)
    order = np.argsort(-sums, axis=None, kind="stable")
    width = tokens.shape[1]
    return [
        Candidate(float(sums.flat[at]), int(at) // width, int(tokens.flat[at]), float(logprobs.flat[at]))
        for at in order
        if sums.flat[at] > -np.inf
    ]


def decided(beam: Beam, best: float, length: int) -> bool:
    """Return whether no continuation of the best total can reach the `width` best finished hypotheses."""
    if len(beam.done) < beam.width:
        return False
    request = beam.group.request
    most = max(best / n**request.length_penalty for n in (length + 1, request.max_tokens))
    return beam.done[-1].score >= most


def reorder(core: Core, beam: Beam, chosen: list[tuple[Candidate, NDArray[int32], NDArray[float32]]]) -> None:
    """Make the chosen continuations live. The first child of a hypothesis keeps its blocks, others fork."""
    rows, pool, group = core.rows, core.pool, beam.group
    lanes = [sequence.lane for sequence in beam.live]
    handles = [int(rows.handle[lane]) for lane in lanes]
    committed = [int(rows.committed[lane]) for lane in lanes]
    computed = int(rows.computed[lanes[0]])
    parents = [candidate.parent for candidate, _, _ in chosen]
    preemptions = beam.live[0].preemptions
    pool.close([handle for at, handle in enumerate(handles) if at not in parents])
    for sequence in beam.live:
        core.count[sequence.state] -= 1
        rows.vacate(sequence.lane)
    core.changed = True
    free = sorted([lane for at, lane in enumerate(lanes) if at not in parents] + beam.spare)
    beam.live, beam.totals = [], [candidate.total for candidate, _, _ in chosen]
    core.count[WAITING] += len(chosen)
    for place, (_, tokens, logprobs) in enumerate(chosen):
        sequence = Sequence(group, place)
        sequence.tokens, sequence.logprobs = tokens, logprobs
        sequence.preemptions, sequence.high = preemptions, computed
        beam.live.append(sequence)
    group.sequences = beam.live
    own: list[int] = []
    try:
        for place, parent in enumerate(parents):
            own.append(int(pool.fork(handles[parent])[0]) if parent in parents[:place] else handles[parent])
    except OutOfSequences:  # another user of the pool was faster
        core.setbacks += 1
        pool.close(sorted({*own, *(handles[parent] for parent in parents)}))
        beam.spare = sorted(lanes + beam.spare)
        beam.stop_running(core)
        return
    shared = core.needs.shares(computed)
    for place, (sequence, parent) in enumerate(zip(beam.live, parents, strict=True)):
        lane = free.pop(0) if parent in parents[:place] else lanes[parent]
        core.start(sequence, lane, own[place], computed, beam.admitted + place)
        rows.committed[lane] = committed[parent]
        rows.shared[lane] = shared and parents.count(parent) > 1
        core.move(sequence, DECODING)
    beam.spare = free
