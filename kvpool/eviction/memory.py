"""`Memory`: what a policy knows of the sequences of a batch, and its choice."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvpool.eviction.policies import Policy

__all__ = ["Memory", "block_sums"]


class Memory:
    """Scores and positions of the tokens of B sequences, per layer and KV head; rows are sequences.

    Parameters
    ----------
    policy : Policy
    num_layers, num_kv_heads, block_size : int
        Of the cache.
    num_rows : int, default 0
        Sequences; new ones have no tokens.

    Attributes
    ----------
    scores : float32 ``[L, B, Hk, C']``
        Moving average per token, by its place in the table; C' is room.
    known : int64 ``[B]``
        Places whose score is known.

    Notes
    -----
    `nbytes` is what it takes: one float32 per layer, KV head and token, and one int32 for those that went through an
    eviction.
    """

    def __init__(self, policy: Policy, num_layers: int, num_kv_heads: int, block_size: int, num_rows: int = 0) -> None:
        self.policy = policy
        self.block_size = block_size
        self.scores = np.zeros((num_layers, num_rows, num_kv_heads, 0), np.float32)
        self.known = np.zeros(num_rows, np.int64)
        self._positions: list[np.ndarray | None] = [None] * num_rows  # [L, Hk, n] as of the last eviction

    @property
    def nbytes(self) -> int:
        """Bytes that scores and positions take."""
        return self.scores.nbytes + sum(0 if p is None else p.nbytes for p in self._positions)

    # ------------------------------------------------------------------------------------------- rows

    def append(self, other: Memory, rows: Sequence[int]) -> None:
        """Add copies of rows of another memory of an equal policy."""
        rows = list(rows)
        if not rows:
            return
        self.reserve(other.scores.shape[3])
        layers, _, heads, room = self.scores.shape
        more = np.zeros((layers, len(rows), heads, room), np.float32)
        more[..., : other.scores.shape[3]] = other.scores[:, rows]
        self.scores = np.concatenate([self.scores, more], axis=1)
        self.known = np.concatenate([self.known, other.known[rows]])
        self._positions += [other._positions[row] for row in rows]

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Only these rows stay, in this order."""
        rows = list(rows)
        self.scores = self.scores[:, rows]
        self.known = self.known[rows]
        self._positions = [self._positions[row] for row in rows]

    def start(self, row: int) -> None:
        """A new sequence without tokens is in this row; there are more rows if it takes more."""
        now = len(self._positions)
        if row >= now:
            more = max(row + 1, 2 * now) - now
            layers, _, heads, room = self.scores.shape
            self.scores = np.concatenate([self.scores, np.zeros((layers, more, heads, room), np.float32)], axis=1)
            self.known = np.concatenate([self.known, np.zeros(more, np.int64)])
            self._positions += [None] * more  # last: it says how many rows there are
        self.known[row] = 0
        self._positions[row] = None

    def saved(self, row: int) -> Memory:
        """A memory of one row, a copy of this one: for `put`."""
        _, _, heads, _ = self.scores.shape
        one = Memory(self.policy, len(self.scores), heads, self.block_size)
        one.append(self, [row])
        return one

    def put(self, row: int, saved: Memory) -> None:
        """Put the scores that `saved` has copied into this row, which was started."""
        length = int(saved.known[0])
        self.reserve(length)
        self.scores[:, row, :, :length] = saved.scores[:, 0, :, :length]
        self.known[row] = length
        self._positions[row] = saved._positions[0]

    def truncate(self, lens: np.ndarray) -> None:
        """Rows lost what lies behind `lens` places."""
        self.known = np.minimum(self.known, lens)

    def reserve(self, room: int) -> None:
        """Make room for so many tokens in each row."""
        now = self.scores.shape[3]
        if room > now:
            grown = np.zeros((*self.scores.shape[:3], max(room, now + now // 2)), np.float32)
            grown[..., :now] = self.scores
            self.scores = grown

    # ------------------------------------------------------------------------------------------- scores

    def observe(self, scores: np.ndarray, lens: np.ndarray, rows: np.ndarray | None = None) -> None:
        """Take what one step has seen.

        Parameters
        ----------
        scores : float32 ``[L, S, Hk, C]``
            As `KVBackend.attend` exports them, for each layer.
        lens : ``[S]``
            Tokens of each row after the step.
        rows : int ``[S]``, optional
            Which rows these are, by default 0, 1, 2, ...; -1: none, it had no query or has ended. A row that is there
            several times is seen so often, in this order.

        Notes
        -----
        O(L * S * Hk * C), a few passes over the array; `scores` is overwritten.
        """
        alpha = np.float32(self.policy.alpha)
        length = scores.shape[3]
        self.reserve(length)
        np.abs(scores, out=scores)
        mine, lens = self.scores[..., :length], np.asarray(lens, np.int64)
        places = np.arange(len(lens)) if rows is None else np.asarray(rows)
        known = self.known
        if len(places) == len(known) and (places == np.arange(len(places))).all() and (known == known[:1]).all():
            self._blend(mine, scores, alpha, int(known[0]) if len(known) else 0)
            self.known = lens.copy()
            return
        for at, row in enumerate(places.tolist()):
            if row >= 0:
                self._blend(mine[:, row], scores[:, at], alpha, int(known[row]))
                known[row] = lens[at]

    def _blend(self, mine: np.ndarray, new: np.ndarray, alpha: np.float32, known: int) -> None:
        """A token that is known moves by 1 - alpha, a new one begins where it is."""
        old = mine[..., :known]
        old *= alpha
        fresh = new[..., :known]
        fresh *= 1 - alpha
        old += fresh
        mine[..., known:] = new[..., known:]

    # ------------------------------------------------------------------------------------------- the choice

    def select(self, row: int, kv_len: int, target: int) -> np.ndarray:
        """Which places of a row stay: int64 ``[L, Hk, target]``, ascending; O(places), nothing is sorted.

        For a policy of whole blocks: table indices that leave, int64 ``[n]``, ascending.
        """
        policy = self.policy
        if policy.whole_blocks:
            return self._blocks(row, kv_len, target)
        num_layers, _, heads, _ = self.scores.shape
        recent = min(policy.recent, target - policy.sink)
        keep = np.zeros((num_layers, heads, kv_len), bool)
        keep[..., : policy.sink] = True
        keep[..., kv_len - recent :] = True
        middle = slice(policy.sink, kv_len - recent)
        chosen = target - policy.sink - recent
        if chosen:
            candidates = self._row_scores(row, kv_len)[..., middle]
            best = np.argpartition(candidates, candidates.shape[-1] - chosen, axis=-1)[..., -chosen:]
            np.put_along_axis(keep[..., middle], best, True, -1)
        return np.flatnonzero(keep).reshape(num_layers, heads, target) % kv_len

    def _row_scores(self, row: int, kv_len: int) -> np.ndarray:
        """Scores of a row, 0 where none is known (nothing has looked there since)."""
        known = min(int(self.known[row]), kv_len)
        found = np.zeros((self.scores.shape[0], self.scores.shape[2], kv_len), np.float32)
        found[..., :known] = self.scores[:, row, :, :known]
        return found

    def _blocks(self, row: int, kv_len: int, target: int) -> np.ndarray:
        first, end = self.policy.candidates(kv_len, self.block_size)
        count = (kv_len - target) // self.block_size
        scores = self._row_scores(row, kv_len).sum(axis=(0, 1), dtype=np.float64)
        blocks = scores[first * self.block_size : end * self.block_size].reshape(-1, self.block_size).sum(axis=1)
        return first + np.sort(np.argpartition(blocks, count - 1)[:count])

    def evicted(self, row: int, kv_len: int, chosen: np.ndarray, num_tokens: int) -> None:
        """The row was compacted to `chosen`, or lost these blocks; `num_tokens` is its logical length."""
        if self.policy.whole_blocks:
            stays = np.ones(kv_len, bool)
            stays.reshape(-1)[(chosen[:, None] * self.block_size + np.arange(self.block_size)).ravel()] = False
            places = np.flatnonzero(stays)
            chosen = np.broadcast_to(places, (self.scores.shape[0], self.scores.shape[2], len(places)))
        positions = self.positions(row, kv_len, num_tokens)
        scores, length = self._row_scores(row, kv_len), chosen.shape[2]
        self.reserve(length)
        self.scores[:, row, :, :length] = np.take_along_axis(scores, chosen, -1)
        self.known[row] = length
        self._positions[row] = np.take_along_axis(positions, chosen, -1)

    def positions(self, row: int, kv_len: int, num_tokens: int) -> np.ndarray:
        """Logical position of what is at each place: int32 ``[L, Hk, kv_len]``, for a row of `num_tokens` tokens."""
        old = self._positions[row]
        shape = (self.scores.shape[0], self.scores.shape[2], kv_len)
        found = np.empty(shape, np.int32)
        found[...] = np.arange(num_tokens - kv_len, num_tokens)
        if old is not None:
            n = min(kv_len, old.shape[2])
            found[..., :n] = old[..., :n]
        return found


def block_sums(scores: np.ndarray, lens: np.ndarray, block_size: int) -> np.ndarray:
    """Scores ``[..., B, Hk, C]`` summed by block, ``[..., B, Hk, ceil(C / block_size)]``; behind `lens` is nothing."""
    length = scores.shape[-1]
    inside = np.arange(length) < np.asarray(lens)[:, None, None]
    padded = np.zeros((*scores.shape[:-1], -(-length // block_size) * block_size), scores.dtype)
    padded[..., :length] = np.where(inside, scores, 0)
    return padded.reshape(*scores.shape[:-1], -1, block_size).sum(axis=-1)
