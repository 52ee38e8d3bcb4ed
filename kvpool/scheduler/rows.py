"""`Rows`: the numbers of running sequences, one array per number, indexed by slot. A decode touches nothing else."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np
from numpy import float32, int32
from numpy.typing import NDArray

from kvpool.scheduler.sequence import PREFILLING, WAITING, Sequence


class Rows:
    """Arrays over the slots.

    Attributes
    ----------
    handle : int64
        In the pool, -1 in a free slot and in one that was cancelled while a step is out.
    state : int8
        PREFILLING, DECODING, or WAITING in a free slot.
    admitted : int64
        Number of the admission: the order of rows.
    prompt, generated, computed, committed : int32
        Tokens of the prompt; tokens generated; known tokens in the pool; tokens given to `PrefixCache.commit`.
    gone : int32
        Of the computed ones, those that were evicted.
    high : int32
        Most tokens that were computed before the admission.
    limit : int32
        Tokens to generate at most.
    last : int32
        Last known token: the input of the next decode.
    shared : bool
        The tail may be shared with a fork: the next token may need a block for its copy.
    watch : int32 ``[slots, E]``
        Tokens that may end the sequence, padded with -1: eos, and the last ones of stop sequences.
    width : int32
        Of the beam, 0: none.
    index : int32
        Of the sequence in its request.
    tokens : int32 ``[slots, W]``
        Generated tokens; W doubles when a sequence needs it.
    logprobs : float32 ``[slots, W]`` or None
        None until somebody gives some.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.handle = np.full(size, -1, np.int64)
        self.state = np.zeros(size, np.int8)
        self.admitted = np.zeros(size, np.int64)
        self.prompt = np.zeros(size, np.int32)
        self.generated = np.zeros(size, np.int32)
        self.computed = np.zeros(size, np.int32)
        self.committed = np.zeros(size, np.int32)
        self.gone = np.zeros(size, np.int32)
        self.high = np.zeros(size, np.int32)
        self.limit = np.zeros(size, np.int32)
        self.last = np.zeros(size, np.int32)
        self.shared = np.zeros(size, np.bool_)
        self.watch = np.full((size, 1), -1, np.int32)
        self.width = np.zeros(size, np.int32)
        self.index = np.zeros(size, np.int32)
        self.tokens = np.zeros((size, 64), np.int32)
        self.logprobs: NDArray[float32] | None = None
        self.ones = np.ones(size, np.int64)  # what a row of a step looks like when all are decodes
        self.order = np.arange(size, dtype=np.int32)
        self.ones.flags.writeable = self.order.flags.writeable = False
        self.sequences: list[Sequence | None] = [None] * size
        self.free = list(range(size))
        heapify(self.free)

    def take(self) -> int:
        """Reserve the lowest free slot."""
        return heappop(self.free)

    def put(self, slot: int, sequence: Sequence, handle: int, computed: int, admitted: int) -> None:
        """Let a sequence run in a slot that was taken."""
        request = sequence.group.request
        self.handle[slot] = handle
        self.state[slot] = PREFILLING
        self.admitted[slot] = admitted
        self.prompt[slot] = request.prompt.size
        self.computed[slot] = self.committed[slot] = computed
        self.gone[slot] = 0
        self.high[slot] = sequence.high
        self.limit[slot] = request.max_tokens
        self.shared[slot] = False
        self._put_watch(slot, {*request.eos, *(stop[-1] for stop in request.stop)})
        self.width[slot] = request.beam_width
        self.index[slot] = sequence.index
        self.set_tokens(slot, sequence, sequence.tokens, sequence.logprobs)
        self.sequences[slot] = sequence
        sequence.slot = slot
        sequence.tokens, sequence.logprobs = sequence.tokens[:0], None

    def _put_watch(self, slot: int, tokens: set[int]) -> None:
        if len(tokens) > self.watch.shape[1]:
            wider = np.full((self.size, len(tokens)), -1, np.int32)
            wider[:, : self.watch.shape[1]] = self.watch
            self.watch = wider
        self.watch[slot] = -1
        self.watch[slot, : len(tokens)] = sorted(tokens)

    def set_tokens(
        self, slot: int, sequence: Sequence, tokens: NDArray[int32], logprobs: NDArray[float32] | None
    ) -> None:
        """Replace what a slot has generated."""
        self.make_room(len(tokens) + 1)
        self.tokens[slot, : len(tokens)] = tokens
        self.generated[slot] = len(tokens)
        self.last[slot] = tokens[-1] if len(tokens) else sequence.group.request.prompt[-1]
        if self.logprobs is not None or logprobs is not None:
            kept = self.need_logprobs()
            kept[slot] = np.nan
            if logprobs is not None:
                kept[slot, : len(logprobs)] = logprobs

    def make_room(self, width: int) -> None:
        """Make the token buffers hold `width` tokens a slot."""
        old = self.tokens.shape[1]
        if width <= old:
            return
        new = max(width, 2 * old)
        tokens = np.zeros((self.size, new), np.int32)
        tokens[:, :old] = self.tokens
        self.tokens = tokens
        if self.logprobs is not None:
            logprobs = np.full((self.size, new), np.nan, np.float32)
            logprobs[:, :old] = self.logprobs
            self.logprobs = logprobs

    def need_logprobs(self) -> NDArray[float32]:
        """Return the buffer of logprobs, made now if it was not there."""
        if self.logprobs is None:
            self.logprobs = np.full(self.tokens.shape, np.nan, np.float32)
        return self.logprobs

    def generated_of(self, slot: int) -> NDArray[int32]:
        """Return a copy of what a slot has generated."""
        return self.tokens[slot, : self.generated[slot]].copy()

    def logprobs_of(self, slot: int) -> NDArray[float32] | None:
        """Return a copy of its logprobs, None if there never were any."""
        if self.logprobs is None:
            return None
        mine = self.logprobs[slot, : self.generated[slot]]
        return None if np.isnan(mine).all() else mine.copy()

    def known(self, slot: int, begin: int, end: int) -> NDArray[int32]:
        """Return the tokens at positions begin .. end - 1 of prompt and generated ones."""
        prompt = self.sequence(slot).group.request.prompt
        n = len(prompt)
        if end <= n:
            return prompt[begin:end]
        if begin >= n:
            return self.tokens[slot, begin - n : end - n]
        return np.concatenate([prompt[begin:], self.tokens[slot, : end - n]])

    def leave(self, slot: int) -> None:
        """Take the sequence off a slot, which is free at once."""
        self.vacate(slot)
        self.give(slot)

    def give(self, slot: int) -> None:
        """Give back a slot in which nothing runs."""
        heappush(self.free, slot)

    def vacate(self, slot: int) -> None:
        """Take the sequence off a slot, which stays taken."""
        sequence = self.sequences[slot]
        if sequence is not None:
            sequence.slot = -1
        self.sequences[slot] = None
        self.handle[slot] = -1
        self.state[slot] = WAITING

    def running(self, state: int = -1) -> NDArray[np.intp]:
        """Return the slots in a state (any running one by default), in order of admission."""
        (chosen,) = (self.state == state if state >= 0 else self.state != WAITING).nonzero()
        return chosen[self.admitted[chosen].argsort()]

    def sequence(self, slot: int) -> Sequence:
        """Return what runs in a slot that is not free."""
        sequence = self.sequences[slot]
        assert sequence is not None
        return sequence

    def kv_lens(self, slots: NDArray[np.intp]) -> NDArray[int32]:
        """Tokens of these slots that the pool holds: those computed, without those evicted."""
        lens: NDArray[int32] = self.computed[slots] - self.gone[slots]
        return lens

    def remaining(self, slot: int) -> int:
        """Known tokens that are not computed."""
        return int(self.prompt[slot] + self.generated[slot] - self.computed[slot])
