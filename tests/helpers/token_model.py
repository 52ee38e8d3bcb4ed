"""A language model that costs nothing and is exact about what a KV cache holds.

Its "keys and values" are two integers per slot: the position, and a digest of all tokens up to there (as in a
transformer, where the KV of a token depends on all tokens before it). The next token is a function of the digests read
back from *every* slot of the context. So a wrong block table, a copy that was forgotten, a block that somebody else
wrote, a prefix hit of another history or namespace give other tokens, or an `AssertionError` that names the row.

`TokenModel` is the function, with references that know no pool (`solo`, `beam`); `TokenMemory` is the same
function over the slots of a pool. Integers only: the same tokens on every machine, in any batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_EMPTY = -1  # position of a slot that nobody has written
_POISON = np.uint64(0xBAD0BAD0BAD0BAD0)


def mix(x: np.ndarray) -> np.ndarray:
    """uint64 in, uint64 out: a bijection without visible structure (the finalizer of SplitMix64)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def salt_of(namespace: bytes) -> int:
    """What a namespace does to the model: 64 bits, 0 for the default one. Another LoRA gives other KV."""
    return int.from_bytes(hashlib.sha256(namespace).digest()[:8], "little") if namespace else 0


@dataclass(frozen=True)
class Generated:
    """What a reference generated: tokens int32, their logprobs float32, why it ended, the score of a beam."""

    tokens: np.ndarray
    logprobs: np.ndarray
    finish_reason: str
    score: float | None = None


def why_finished(tokens: Sequence[int], max_tokens: int, eos: Sequence[int], stop: Sequence[Any]) -> str | None:
    """Why generation ends after these tokens: "eos", "stop", "length", in this order; None when it goes on."""
    if tokens[-1] in eos:
        return "eos"
    if any(len(tokens) >= len(end) and list(tokens[-len(end) :]) == list(end) for end in stop):
        return "stop"
    return "length" if len(tokens) >= max_tokens else None


class TokenModel:
    """The function from tokens to a distribution over a small vocabulary.

    Parameters
    ----------
    vocabulary : int
        Tokens are ``0 .. vocabulary - 1`` (prompts may hold larger ones).
    seed : int
        Another seed is another model.
    quantum : float
        Logprobs are multiples of it, a power of two: sums in float32 are exact while they stay below
        ``2**24 * quantum``, so that scores compare equal however they were added up. A coarse one makes ties.
    """

    def __init__(self, vocabulary: int = 64, seed: int = 0, quantum: float = 2.0**-16) -> None:
        self.vocabulary = vocabulary
        self.quantum = quantum
        self._seed = mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64))
        self._words = mix(np.arange(vocabulary, dtype=np.uint64) ^ self._seed)

    def digests(self, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """uint64 ``[n]``: what each token adds to the digest of its history."""
        return mix(mix(tokens.astype(np.uint64) ^ self._seed) ^ positions.astype(np.uint64))

    def start(self, salt: int | np.ndarray = 0) -> np.ndarray:
        """uint64 ``[1]``, or one per salt: the digest of no tokens."""
        return mix(np.atleast_1d(np.asarray(salt, np.uint64)) ^ self._seed)

    def states(self, tokens: Any, salt: int = 0) -> np.ndarray:
        """uint64 ``[n]``: the state after each token of a whole sequence. `logprobs` makes distributions of them."""
        tokens = np.asarray(tokens, np.int64)
        digests = self.digests(tokens, np.arange(tokens.size))
        return np.cumsum(mix(self.start(salt) + np.cumsum(digests, dtype=np.uint64)), dtype=np.uint64)

    def logprobs(self, states: np.ndarray) -> np.ndarray:
        """float32 ``[M, vocabulary]``, multiples of the quantum, for uint64 ``[M]``."""
        bits = mix(mix(states)[:, None] ^ self._words[None, :])
        logits = (bits >> np.uint64(40)).astype(np.float64) * (8.0 / 2**24)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return (np.rint(logits / self.quantum) * self.quantum).astype(np.float32)

    def greedy(self, states: np.ndarray) -> np.ndarray:
        """int32 ``[M]``: the likeliest token, the lowest of equals."""
        return self.logprobs(states).argmax(axis=1).astype(np.int32)

    def sample(self, states: np.ndarray, seeds: Any, index: Any, position: Any) -> np.ndarray:
        """int32 ``[M]``: a draw that depends on the seed, which sample of its request and which token of it this is.

        Gumbel-max over integers made of those three: the same token however the row is batched.
        """
        key = np.zeros(len(states), np.uint64)
        for part in (seeds, index, position):
            key = mix(key ^ np.broadcast_to(np.asarray(part), key.shape).astype(np.uint64))
        uniform = (mix(key[:, None] ^ self._words[None, :]) >> np.uint64(11)).astype(np.float64)
        gumbel = -np.log(-np.log((uniform + 0.5) / 2**53))
        return (self.logprobs(states) + gumbel).argmax(axis=1).astype(np.int32)

    def top(self, states: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k likeliest continuations per row, best first, lowest token of equals: int32, float32 ``[M, k]``."""
        logprobs = self.logprobs(states)
        order = np.argsort(-logprobs, axis=1, kind="stable")[:, :k]
        return order.astype(np.int32), np.take_along_axis(logprobs, order, axis=1)

    def solo(
        self,
        prompt: Any,
        max_tokens: int,
        *,
        eos: Sequence[int] = (),
        stop: Sequence[Any] = (),
        salt: int = 0,
        seed: int | None = None,
        index: int = 0,
    ) -> Generated:
        """The reference: one sequence alone, no pool. Greedy, or sample `index` of `seed`."""
        tokens: list[int] = []
        logprobs: list[float] = []
        reason = None
        while reason is None:
            state = self.states([*prompt, *tokens], salt)[-1:]
            if seed is None:
                token = int(self.greedy(state)[0])
            else:
                token = int(self.sample(state, [seed], [index], [len(tokens)])[0])
            tokens.append(token)
            logprobs.append(float(self.logprobs(state)[0, token]))
            reason = why_finished(tokens, max_tokens, eos, stop)
        return Generated(np.array(tokens, np.int32), np.array(logprobs, np.float32), reason)

    def beam(
        self,
        prompt: Any,
        max_tokens: int,
        width: int,
        n: int = 1,
        *,
        eos: Sequence[int] = (),
        stop: Sequence[Any] = (),
        length_penalty: float = 1.0,
        salt: int = 0,
    ) -> list[Generated]:
        """The n best hypotheses of a beam search, best first; no pool, every state computed from all tokens.

        In each round every live hypothesis proposes its ``2 * width`` likeliest tokens; from the best proposal down,
        those that end are finished hypotheses, the others live on, until `width` live. The search is over when no live
        hypothesis can score better than the worst of the `width` best finished ones, however long it grows.
        """
        prompt = np.asarray(prompt, np.int64)
        live: list[tuple[float, list[int], list[float]]] = [(0.0, [], [])]
        done: list[Generated] = []

        def end(total: float, tokens: list[int], logprobs: list[float], reason: str) -> None:
            score = total / len(tokens) ** length_penalty
            done.append(Generated(np.array(tokens, np.int32), np.array(logprobs, np.float32), reason, score))

        while live:
            proposals = []
            for row, (total, tokens, logprobs) in enumerate(live):
                state = self.states(np.concatenate([prompt, np.array(tokens, np.int64)]), salt)[-1:]
                candidates, values = self.top(state, 2 * width)
                for rank, (token, value) in enumerate(zip(candidates[0].tolist(), values[0].tolist(), strict=True)):
                    proposals.append((-(total + value), row, rank, [*tokens, token], [*logprobs, value]))
            live = []
            for negative, _, _, tokens, logprobs in sorted(proposals, key=lambda p: p[:3]):
                reason = why_finished(tokens, max_tokens, eos, stop)
                if reason is None:
                    live.append((-negative, tokens, logprobs))
                else:
                    end(-negative, tokens, logprobs, reason)
                if len(live) == width:
                    break
            done = sorted(done, key=lambda g: -(g.score or 0.0))[:width]
            if len(done) == width and live:
                length = len(live[0][1])
                best = max(live[0][0] / n**length_penalty for n in range(length + 1, max_tokens + 1))
                if best <= (done[-1].score or 0.0):
                    break
        return done[:n]


class TokenMemory:
    """A `TokenModel` over the slots of a pool, driven by plans alone.

    The plan needs the formats block_tables, seq_lens, slot_mapping and cu_q_lens; positions are compared when they are
    there. O(context of the batch) per forward, vectorised.

    Parameters
    ----------
    model : TokenModel
    num_blocks, block_size : int
        Of the pool.
    """

    def __init__(self, model: TokenModel, num_blocks: int, block_size: int) -> None:
        self.model = model
        self.block_size = block_size
        self.position = np.full(num_blocks * block_size, _EMPTY, np.int64)
        self.history = np.full(num_blocks * block_size, _POISON, np.uint64)
        self.value = np.full(num_blocks * block_size, _POISON, np.uint64)

    def poison(self, blocks: Any) -> None:
        """Forget these blocks: reading them is an error from now on. For blocks that nobody holds."""
        blocks = np.asarray(blocks, np.int64)
        for plane, value in ((self.position, _EMPTY), (self.history, _POISON), (self.value, _POISON)):
            plane.reshape(-1, self.block_size)[blocks] = value

    def save(self, blocks: Any) -> tuple[np.ndarray, ...]:
        """A copy of what these blocks hold, for `load`: what a tier keeps."""
        blocks = np.asarray(blocks, np.int64)
        return tuple(p.reshape(-1, self.block_size)[blocks] for p in (self.position, self.history, self.value))

    def load(self, kept: tuple[np.ndarray, ...], blocks: Any) -> None:
        """Put what was saved into other blocks."""
        blocks = np.asarray(blocks, np.int64)
        for plane, part in zip((self.position, self.history, self.value), kept, strict=True):
            plane.reshape(-1, self.block_size)[blocks] = part[: blocks.size]

    def spoil(self, plan: Any) -> None:
        """What a forward leaves that breaks off: copies done, half of the writes, wrong."""
        self._copy(np.asarray(plan.copies, np.int64))
        slots = np.asarray(plan.slot_mapping[: plan.num_tokens], np.int64)[::2]
        for plane in (self.history, self.value):
            plane[slots] = _POISON
        self.position[slots] = _EMPTY

    def forward(self, tokens: Any, plan: Any, salts: Any = 0) -> np.ndarray:
        """Copies, then writes, then reads, as a backend does with a plan.

        Parameters
        ----------
        tokens : int ``[T]``
            Inputs in row order.
        plan
            Its first `num_rows` rows and `num_tokens` tokens count, padding is ignored.
        salts : int or uint64 ``[S]``
            Per row, `salt_of` its namespace; used by rows that begin at position 0.

        Returns
        -------
        states : uint64 ``[T]``
            After each new token; `TokenModel.logprobs` and its friends take them.

        Raises
        ------
        AssertionError
            The arrays contradict each other, or a slot of a context does not hold what was written for its position.
        """
        num_rows, num_tokens = len(plan.handles), int(plan.num_tokens)
        seq_lens = np.asarray(plan.seq_lens[:num_rows], np.int64)
        cu_q_lens = np.asarray(plan.cu_q_lens[: num_rows + 1], np.int64)
        slots = np.asarray(plan.slot_mapping[:num_tokens], np.int64)
        tokens = np.asarray(tokens, np.int64)
        assert tokens.shape == slots.shape, f"{tokens.size} tokens for {slots.size} slots"
        assert cu_q_lens[-1] == num_tokens, f"cu_q_lens ends at {cu_q_lens[-1]}, the plan has {num_tokens} tokens"
        q_lens = np.diff(cu_q_lens)
        assert (q_lens <= seq_lens).all(), "a row has more new tokens than tokens"
        return self._forward(tokens, plan, slots, seq_lens, q_lens, np.asarray(salts, np.uint64))

    def _forward(
        self,
        tokens: np.ndarray,
        plan: Any,
        slots: np.ndarray,
        seq_lens: np.ndarray,
        q_lens: np.ndarray,
        salts: np.ndarray,
    ) -> np.ndarray:
        row, offset = _ragged(q_lens)
        positions = (seq_lens - q_lens)[row] + offset
        if hasattr(plan, "positions"):  # a format that not everybody asks for
            assert np.array_equal(plan.positions[: positions.size], positions), "positions contradict seq_lens"
        self._copy(np.asarray(plan.copies, np.int64))
        self._write(tokens, slots, positions, row, offset, self._before(plan, seq_lens - q_lens, salts))
        # Every slot of every row that has a new token, through the block table.
        context = np.where(q_lens > 0, seq_lens, 0)
        ctx_row, ctx_position = _ragged(context)
        read = self._slots(plan, ctx_row, ctx_position)
        wrong = np.flatnonzero(self.position[read] != ctx_position)
        if wrong.size:
            first = wrong[0]
            raise AssertionError(
                f"row {ctx_row[first]} reads slot {read[first]} for position {ctx_position[first]}, "
                f"it holds position {self.position[read[first]]} ({wrong.size} such slots)"
            )
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(self.value[read], dtype=np.uint64)])
        begin = (np.cumsum(context) - context)[row]
        return sums[begin + positions + 1] - sums[begin]

    def _slots(self, plan: Any, row: np.ndarray, position: np.ndarray) -> np.ndarray:
        """int64 slots of (row, position), by the block tables."""
        blocks = np.asarray(plan.block_tables)[row, position // self.block_size].astype(np.int64)
        slots = blocks * self.block_size + position % self.block_size
        outside = (blocks < 0) | (slots >= self.position.size)
        if outside.any():
            raise AssertionError(f"row {row[outside][0]} has no block for position {position[outside][0]}")
        return slots

    def _copy(self, copies: np.ndarray) -> None:
        """All sources are read before a destination is written."""
        if not copies.size:
            return
        pair, offset = _ragged(copies[:, 2])
        source = copies[pair, 0] * self.block_size + offset
        target = copies[pair, 1] * self.block_size + offset
        for plane in (self.position, self.history, self.value):
            plane[target] = plane[source]

    def _before(self, plan: Any, begins: np.ndarray, salts: np.ndarray) -> np.ndarray:
        """uint64 ``[S]``: the digest of what each row has behind it, read from its last slot."""
        before = np.broadcast_to(self.model.start(salts).reshape(-1), begins.shape).copy()
        rows = np.flatnonzero(begins > 0)
        if rows.size:
            before[rows] = self.history[self._slots(plan, rows, begins[rows] - 1)]
        return before

    def _write(
        self,
        tokens: np.ndarray,
        slots: np.ndarray,
        positions: np.ndarray,
        row: np.ndarray,
        offset: np.ndarray,
        before: np.ndarray,
    ) -> None:
        if not slots.size:
            return
        assert slots.min() >= 0 and slots.max() < self.position.size, "slot_mapping names a slot outside the pool"
        assert np.unique(slots).size == slots.size, "two tokens are written to one slot"
        digests = self.model.digests(tokens, positions)
        sums = np.cumsum(digests, dtype=np.uint64)
        first = np.flatnonzero(offset == 0)  # of each row that writes
        behind = (sums - digests)[first]  # what the rows before added
        nth = np.cumsum(offset == 0) - 1
        history = before[row] + sums - behind[nth]
        self.position[slots] = positions
        self.history[slots] = history
        self.value[slots] = mix(history)


def _ragged(lens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For rows of these lengths, one after the other: the row of every element, and its place in the row."""
    row = np.repeat(np.arange(lens.size), lens)
    return row, np.arange(row.size) - np.repeat(np.cumsum(lens) - lens, lens)
