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
from types import SimpleNamespace
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
    """The function from tokens to a distribution over a small vocabulary; another seed is another model.

    Logprobs are multiples of `quantum`, a power of two: sums in float32 are exact while they stay below
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


def of_group(plan: Any, group: int) -> Any:
    """What a plan says of the first column of a group, as the plan of a pool of one group does."""
    if len(getattr(plan, "groups", ())) < 2:
        return plan
    part, common = plan.groups[group], ("cu_q_lens", "positions", "handles", "num_tokens")
    return SimpleNamespace(
        seq_lens=part.kv_lens,
        block_tables=part.block_tables[:, :, 0],
        slot_mapping=part.slot_mapping[0],
        copies=part.copies,
        **{name: getattr(plan, name) for name in common},
    )


class TokenMemory:
    """A `TokenModel` over the slots of a pool, driven by plans alone: by one group, where a pool has several.

    The plan needs the formats block_tables, seq_lens, slot_mapping and cu_q_lens.
    """

    def __init__(self, model: TokenModel, num_blocks: int, block_size: int, group: int = 0) -> None:
        self.model, self.group = model, group
        self.block_size = block_size
        self.position = np.full(num_blocks * block_size, _EMPTY, np.int64)
        self.history = np.full(num_blocks * block_size, _POISON, np.uint64)
        self.value = np.full(num_blocks * block_size, _POISON, np.uint64)
        self.planes = (self.position, self.history, self.value)

    def poison(self, blocks: Any) -> None:
        """Forget these blocks: reading them is an error from now on. For blocks that nobody holds."""
        for plane, value in zip(self.planes, (_EMPTY, _POISON, _POISON), strict=True):
            plane.reshape(-1, self.block_size)[np.asarray(blocks, np.int64)] = value

    def save(self, blocks: Any) -> tuple[np.ndarray, ...]:
        """A copy of what these blocks hold, for `load`: what a tier keeps."""
        return tuple(plane.reshape(-1, self.block_size)[np.asarray(blocks, np.int64)] for plane in self.planes)

    def load(self, kept: tuple[np.ndarray, ...], blocks: Any) -> None:
        """Put what was saved into other blocks."""
        for plane, part in zip(self.planes, kept, strict=True):
            plane.reshape(-1, self.block_size)[np.asarray(blocks, np.int64)] = part[: len(blocks)]

    def spoil(self, plan: Any) -> None:
        """What a forward leaves that breaks off: copies done, half of the writes, wrong."""
        plan = of_group(plan, self.group)
        self._copy(plan.copies)
        for plane, value in zip(self.planes, (_EMPTY, _POISON, _POISON), strict=True):
            plane[np.asarray(plan.slot_mapping[: plan.num_tokens], np.int64)[::2]] = value

    def forward(self, tokens: Any, plan: Any, salts: Any = 0) -> np.ndarray:
        """Copies, then writes, then reads, as a backend does with a plan: states uint64 ``[T]`` after each new token.

        `tokens` are inputs in row order, `salts` the `salt_of` each row's namespace. AssertionError: the arrays
        contradict each other, or a slot of a context does not hold what was written for its position.
        """
        plan, tokens = of_group(plan, self.group), np.asarray(tokens, np.int64)
        slots = np.asarray(plan.slot_mapping[: plan.num_tokens], np.int64)
        ends = plan.cu_q_lens[: len(plan.handles) + 1].tolist()
        assert len(tokens) == len(slots) == ends[-1], f"{tokens.size} tokens, {slots.size} slots, they end at {ends}"
        assert ((slots >= 0) & (slots < self.position.size)).all(), "slot_mapping names a slot outside the pool"
        assert np.unique(slots).size == slots.size, "two tokens are written to one slot"
        self._copy(plan.copies)
        contexts = [self._slots(plan, row) for row in range(len(plan.handles))]
        starts = np.broadcast_to(self.model.start(salts), len(contexts))
        positions, histories, states = [slots[:0]], [self.history[:0]], [self.value[:0]]
        for row, (context, begin, end) in enumerate(zip(contexts, ends, ends[1:], strict=False)):
            first = len(context) - (end - begin)
            assert first >= 0, "a row has more new tokens than tokens"
            known = hasattr(plan, "positions")  # a format that not everybody asks for
            positions.append(plan.positions[begin:end] if known else np.arange(first, len(context)))
            digests = self.model.digests(tokens[begin:end], positions[-1])
            before = self.history[context[first - 1]] if first else starts[row]
            histories.append(before + np.cumsum(digests, dtype=np.uint64))
        self.position[slots], self.history[slots] = np.concatenate(positions), np.concatenate(histories)
        self.value[slots] = mix(self.history[slots])
        for row, (context, begin, end) in enumerate(zip(contexts, ends, ends[1:], strict=False)):
            self.read(row, context)
            states.append(np.cumsum(self.value[context], dtype=np.uint64)[len(context) - (end - begin) :])
        return np.concatenate(states)

    def read(self, row: int, context: np.ndarray) -> None:
        """A row reads the slots of its context: they hold its positions."""
        held = self.position[context]
        wrong = np.flatnonzero(held != np.arange(len(context)))
        if wrong.size:
            first = wrong[0]
            raise AssertionError(
                f"row {row} reads slot {context[first]} for position {first}, it holds position {held[first]} "
                f"({wrong.size} such slots)"
            )

    def _slots(self, plan: Any, row: int) -> np.ndarray:
        """int64 slots of a row's context, by the block tables."""
        position = np.arange(plan.seq_lens[row])
        blocks = np.asarray(plan.block_tables[row])[position // self.block_size].astype(np.int64)
        slots = blocks * self.block_size + position % self.block_size
        outside = (blocks < 0) | (slots >= self.position.size)
        assert not outside.any(), f"row {row} has no block for position {position[outside][0]}"
        return slots

    def _copy(self, copies: Any) -> None:
        """All sources are read before a destination is written."""
        pairs = [(a * self.block_size, b * self.block_size, n) for a, b, n in np.asarray(copies).tolist()]
        for plane in self.planes:
            kept = [plane[a : a + n].copy() for a, _, n in pairs]
            for (_, b, n), part in zip(pairs, kept, strict=True):
                plane[b : b + n] = part
