"""Blocks that are held back: what a row says of a block whose copy has not run is found by nobody.

A memory of one number per slot stands for the KV. Each test is run on kvpool, on the plain model, and on a model with
a bug planted, where it must fail.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from catalogue import Unchecked, planted
from prefixes import ask

from kvpool.errors import PlanStateError, StaleHandle
from kvpool.testing import ModelPool
from tests.verify._hooks import set_next_uid

PROMPT = list(range(100, 112))  # three blocks


class Backend:
    """One number per slot; a plan's copies, then its writes, when it is executed."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.kv = np.full(pool.num_blocks * pool.block_size, np.nan)

    def execute(self, plan: Any, tokens: list[int] | None = None) -> None:
        """Do the work of a plan and say so."""
        for src, dst, n in plan.copies * [self.pool.block_size, self.pool.block_size, 1]:
            self.kv[dst : dst + n] = self.kv[src : src + n]
        self.kv[plan.slot_mapping[: plan.num_tokens]] = tokens or []
        self.pool.done(plan)

    def read(self, handle: int) -> list[float]:
        """What the tokens of a sequence are."""
        slots = self.pool.table(handle)[:, None] * self.pool.block_size + np.arange(self.pool.block_size)
        return self.kv[slots.ravel()[: self.pool.kv_len(handle)]].tolist()

    def ask(self, prompt: list[int] = PROMPT) -> int:
        """Open a sequence for the prompt: what is found must be there. Returns how many tokens were."""
        return ask(self.pool, self.read, prompt)


def family(Pool: Any, Plan: Any, length: int = len(PROMPT), **options: Any) -> tuple[Any, Any, Backend, int, int]:
    """A pool, a plan, a backend, and two sequences that share all blocks of the prompt, none of them committed."""
    pool = Pool(32, 4, max_seqs=8, prefix_cache=True, seed=1, **options)
    plan, backend = Plan(pool, 4, 64), Backend(pool)
    first = pool.open()
    pool.step(plan, [first], length)
    backend.execute(plan, PROMPT[:length])
    return pool, plan, backend, first, int(pool.fork(first)[0])


class CopyIsPublished(Unchecked):
    """A block is found as soon as its tokens are told."""

    def _publish(self, seq: Any) -> None:
        pending, self._pending = self._pending, []
        super()._publish(seq)
        self._pending = pending


class WaitingIsForgotten(Unchecked):
    """A step passes, and what waited for it goes on waiting."""

    def _publish_waiting(self) -> None:
        """Publish nothing."""


class WaitsForNobody(Unchecked):
    """Blocks behind one that is held back are published."""

    def _publish(self, seq: Any) -> None:
        super()._publish(seq)
        at, seq.published = seq.published, seq.published + 1
        if at < len(seq.tokens) // self.block_size:
            super()._publish(seq)


class RollbackPublishes(Unchecked):
    """A rollback counts as the end of the step, like `done`."""

    def rollback(self, plan: Any) -> None:
        """Publish first."""
        pending, self._pending = self._pending, []
        self._publish_waiting()
        self._pending = pending
        super().rollback(plan)


class WaitsForEveryStep(Unchecked):
    """Whatever a row of a pending plan says is held back."""

    def _publish(self, seq: Any) -> None:
        if not any(row.handle == seq.handle for step in self._pending for row in step.rows):
            super()._publish(seq)


class HeldIsCached(Unchecked):
    """A block that nobody may find is kept as if somebody might."""

    def _leave(self, block: int) -> None:
        if block in self._held_back:
            self._lru.append(block)
        else:
            super()._leave(block)


class YoungestFirst(Unchecked):
    """Rows that wait for one step are published from the last to the first."""

    def _publish_waiting(self) -> None:
        for _, seq in sorted(self._sequences.items(), reverse=True):
            self._publish(seq)


class RolledBackIsPublished(Unchecked):
    """A row goes on as if what it was told of a block were true of the block that was restored."""

    def rollback(self, plan: Any) -> None:
        """Publish what was restored."""
        super().rollback(plan)
        for seq in self._sequences.values():
            for i in range(len(seq.tokens) // self.block_size):
                self._commit_block(seq.table[i], self._block_of(seq.tokens, i))
            self._publish(seq)


class CommittedForgetsTruncate(ModelPool):
    """The committed length only grows."""

    def _prefix_committed(self, handle: int) -> int:
        """Return the largest so far."""
        lengths = self.__dict__.setdefault("lengths", {})
        lengths[handle] = max(lengths.get(handle, 0), super()._prefix_committed(handle))
        return lengths[handle]


@planted(CopyIsPublished, RollbackPublishes)
def test_copy_that_was_rolled_back_is_never_found(Pool, Plan):
    """The backend raised before it copied: nobody may read the block that the copy was for."""
    pool, plan, backend, first, _ = family(Pool, Plan)
    pool.unshare(plan, [first], 10)
    pool.prefix.commit(first, PROMPT)
    assert pool.prefix.committed(first) == 12
    pool.rollback(plan)
    assert backend.ask() == 0 and pool.prefix.stats().nodes == 0
    assert backend.read(first) == PROMPT and pool.prefix.committed(first) == 12


@planted(CopyIsPublished)
def test_copy_of_a_plan_that_never_ends_is_never_a_hit(Pool, Plan):
    """The backend raised, and the engine closes what it had, without a rollback or with a late one."""
    for end in ("close", "close all", "reset"):
        pool, plan, backend, first, second = family(Pool, Plan)
        pool.unshare(plan, [first], 10)
        pool.prefix.commit(first, PROMPT)
        assert backend.ask() == 0
        if end == "reset":
            pool.reset()
        else:
            pool.close([first] if end == "close" else [first, second])
        assert backend.ask() == 0
        if end != "reset":
            pool.rollback(plan)
        assert backend.ask() == 0 and pool.stats().limbo == pool.stats().evictable == 0


@planted(CopyIsPublished)
def test_copy_that_was_rolled_back_is_not_found_through_a_child(Pool, Plan):
    """A child made while the copy was pending has it in its table, and may tell its tokens too."""
    pool, plan, backend, first, _ = family(Pool, Plan)
    pool.unshare(plan, [first], 10)
    child = int(pool.fork(first)[0])
    pool.prefix.commit(child, PROMPT)
    assert pool.prefix.committed(child) == 12 and pool.prefix.committed(first) == 0
    assert backend.ask() == 0
    with pytest.raises(PlanStateError):
        pool.rollback(plan)
    pool.close(child)
    assert backend.ask() == 0
    pool.rollback(plan)
    assert backend.ask() == 0
    pool.prefix.commit(first, PROMPT)  # what was restored was written long ago
    assert backend.ask() == 12


@planted(WaitingIsForgotten, CopyIsPublished)
def test_copy_is_found_when_its_plan_is_done(Pool, Plan):
    """Held back, published once, and indexed like any block."""
    pool, plan, backend, first, second = family(Pool, Plan)
    pool.unshare(plan, [first], 10)
    pool.prefix.commit(first, PROMPT)
    assert backend.ask() == 0
    backend.execute(plan)
    assert backend.ask() == 12 and (pool.prefix.stats().nodes, pool.prefix.stats().duplicates) == (3, 0)
    assert pool.table(pool.prefix.pin(PROMPT)).tolist() == pool.table(first).tolist() == [4, 5, 6]
    pool.prefix.commit(second, PROMPT)
    assert pool.prefix.stats().duplicates == 3


@planted(WaitingIsForgotten)
def test_done_that_is_noted_publishes_when_it_passes(Pool, Plan):
    """The copies of a step wait for the older steps too."""
    pool, plan, _, first, second = family(Pool, Plan)
    older = Plan(pool, 1, 4)
    pool.step(older, [second], 1)
    pool.unshare(plan, [first], 10)
    pool.prefix.commit(first, PROMPT)
    pool.done(plan)
    assert pool.prefix.match([*PROMPT, 1]) == 0
    pool.done(older)
    assert pool.prefix.match([*PROMPT, 1]) == 12


@planted(WaitsForNobody, WaitingIsForgotten)
def test_blocks_behind_a_held_one_wait_with_it(Pool, Plan):
    """Only the first block is copied; the others are written, and found with the first."""
    pool, plan, backend, first, second = family(Pool, Plan)
    pool.unshare(plan, [first], 4)
    assert plan.copies.tolist() == [[1, 4, 4]]
    pool.prefix.commit(first, PROMPT)
    assert pool.prefix.stats().nodes == 0
    backend.execute(plan)
    assert backend.ask() == 12
    pool.prefix.commit(second, PROMPT)  # its own first block is a duplicate, the other two are shared
    assert (pool.prefix.stats().nodes, pool.prefix.stats().duplicates) == (3, 1)


@planted(RolledBackIsPublished)
def test_blocks_behind_a_copy_that_was_rolled_back_wait_until_they_are_committed_anew(Pool, Plan):
    """Not even what was written long ago is published behind it, nor what comes later."""
    pool, plan, backend, first, second = family(Pool, Plan)
    pool.unshare(plan, [first], 8, 4)  # the second block
    pool.prefix.commit(first, PROMPT)
    assert plan.copies.tolist() == [[2, 4, 4]] and backend.ask() == 4
    pool.rollback(plan)
    assert pool.prefix.committed(first) == 12 and backend.ask() == 4
    pool.close(second)
    pool.step(plan, [first], 4)
    backend.execute(plan, [1, 2, 3, 4])
    pool.prefix.commit(first, [1, 2, 3, 4])
    assert backend.ask([*PROMPT, 1, 2, 3, 4]) == 4
    pool.truncate(first, 4)
    pool.step(plan, [first], 8)
    backend.execute(plan, PROMPT[4:])
    pool.prefix.commit(first, PROMPT[4:])
    assert backend.ask() == 12
    assert backend.read(first) == PROMPT


@planted(WaitsForEveryStep)
def test_step_in_flight_that_copies_the_tail_holds_nothing_back(Pool, Plan):
    """Step n + 1 writes behind what step n left: the full blocks before it are found at once."""
    for call in ("step", "reserve"):
        pool, plan, backend, first, _ = family(Pool, Plan, 10)
        getattr(pool, call)(plan, [first], 1)
        assert plan.copies.tolist() == [[3, 4, 2]]
        pool.prefix.commit(first, PROMPT[:10])
        assert backend.ask() == 8
        pool.rollback(plan)
        assert backend.ask() == 8 and pool.prefix.committed(first) == 10
        pool.step(plan, [first], 2)
        backend.execute(plan, PROMPT[10:])
        pool.prefix.commit(first, PROMPT[10:])
        assert backend.ask() == 12


@planted(HeldIsCached)
def test_held_block_that_is_released_becomes_blank(Pool, Plan):
    """Nobody can find it, so it is not kept."""
    pool, plan, backend, first, second = family(Pool, Plan)
    pool.unshare(plan, [first], 10)
    pool.prefix.commit(first, PROMPT)
    pool.close([first, second])
    backend.execute(plan)
    assert (pool.stats().evictable, pool.blocks.num_blank) == (0, 31) and backend.ask() == 0


@planted(YoungestFirst)
def test_rows_that_wait_for_one_step_are_published_by_their_slots(Pool, Plan):
    """Of two copies of one content, that of the lower slot is the one that is found."""
    pool, plan, backend, first, second = family(Pool, Plan)
    keeper = int(pool.fork(first)[0])
    pool.unshare(plan, [second, first], 10)  # 4, 5, 6 are of the second
    pool.prefix.commit([second, first], PROMPT * 2)
    backend.execute(plan)
    assert pool.table(pool.prefix.pin(PROMPT)).tolist() == pool.table(first).tolist() == [7, 8, 9]
    assert pool.prefix.stats().duplicates == 3
    pool.close(keeper)


@planted(CopyIsPublished)
def test_flush_while_blocks_are_held_back_keeps_them_unfound(Pool, Plan):
    """What a flushed sequence says is never indexed, held back or not."""
    pool, plan, backend, first, _ = family(Pool, Plan)
    pool.unshare(plan, [first], 10)
    pool.prefix.commit(first, PROMPT)
    assert pool.prefix.stats().nodes == 0
    pool.prefix.flush()
    backend.execute(plan)
    assert backend.ask() == 0
    pool.close(first)
    assert pool.stats().evictable == 0


@planted(WaitsForEveryStep)
def test_pool_that_runs_in_order_publishes_at_once(Pool, Plan):
    """Its plans are done when the call returns."""
    pool = Pool(32, 4, prefix_cache=True, in_order=True, seed=1)
    plan, handle = Plan(pool, 2, 16), pool.open()
    pool.step(plan, [handle], 12)
    child = int(pool.fork(handle)[0])
    pool.unshare(plan, [child], 10)
    pool.prefix.commit(child, PROMPT)
    assert pool.prefix.match([*PROMPT, 1]) == 12
    other = Pool(32, 4, prefix_cache=True, seed=1)  # and one that does not, for what is planted
    plan, handle = Plan(other, 2, 16), other.open()
    other.step(plan, [handle], 12)
    other.done(plan)
    other.step(plan, [handle], 1)
    other.prefix.commit(handle, PROMPT)
    assert other.prefix.match([*PROMPT, 1]) == 12


@planted(CommittedForgetsTruncate)
def test_committed_tells_where_the_next_commit_goes_on(Pool, Plan):
    """Of a new sequence, one that found something, and after whatever changes it."""
    pool, _, _, first, second = family(Pool, Plan)
    assert pool.prefix.committed(first) == 0
    pool.prefix.commit(first, PROMPT[:6])
    assert pool.prefix.committed(first) == 6 and pool.prefix.committed(second) == 0
    assert pool.prefix.committed(int(pool.fork(first)[0])) == 6
    assert pool.prefix.committed(pool.open(PROMPT)) == 4
    pool.truncate(first, 5)
    assert pool.prefix.committed(first) == 5
    pool.prefix.commit(first, [])
    assert pool.prefix.committed(first) == 5
    pool.evict_blocks(first, [0])
    assert pool.prefix.committed(first) == 0
    pool.close(first)
    with pytest.raises(StaleHandle, match=r"\[committed\]"):
        pool.prefix.committed(first)


# ---- what is told ------------------------------------------------------------------------------------------


class RowsOfABatchAreJudgedAlone(Unchecked):
    """A row is judged by what was committed before the call."""

    def _refuse_commit(self, seq: Any, row: list[int], told: Any) -> None:
        super()._refuse_commit(seq, row, dict(self._block_tokens))


@planted(RowsOfABatchAreJudgedAlone)
def test_tokens_that_contradict_inside_one_commit_are_refused(Pool, Plan):
    """As they are one after the other; those that agree are accepted."""
    pool, _, backend, first, second = family(Pool, Plan)
    before = pool.fingerprint(), pool.digest()
    for rows in ([first, second], [second, first]):
        with pytest.raises(ValueError, match=r"\[commit\]"):
            pool.prefix.commit(rows, [*PROMPT[:4], *PROMPT[4:8], *PROMPT[:4], 9, 9, 9, 9])
    assert (pool.fingerprint(), pool.digest()) == before
    pool.prefix.commit([first, second], [*PROMPT[:8], *PROMPT[:8]])
    pool.prefix.commit([first, second], [*PROMPT[8:], *PROMPT[8:11]], [4, 3])
    with pytest.raises(ValueError, match=r"\[commit\]"):
        pool.prefix.commit(second, [9])
    assert backend.ask() == 12 and pool.prefix.stats().nodes == 3


class NumbersRunOut(Unchecked):
    """Before the numbers of nodes pass 32 bits, everything is flushed."""

    def _prefix_commit(self, *arguments: Any) -> None:
        """Flush in good time."""
        if self._next_uid > 2**32 - 2 * self.num_blocks:
            self._prefix_flush()
            self._next_uid = 1
        super()._prefix_commit(*arguments)


@planted(NumbersRunOut)
def test_node_numbers_pass_32_bits_and_nothing_is_forgotten(Pool, Plan):
    """A long-lived sequence stays found and goes on to be indexed, and so does everything after it."""
    for start in (2**31, 2**32, 2**48):
        pool, plan, backend, first, _ = family(Pool, Plan, events=64)
        pool.prefix.commit(first, PROMPT[:8])
        if hasattr(pool, "_next_uid"):
            pool._next_uid = start - 1
        else:
            set_next_uid(pool, start - 1)
        assert backend.ask() == 8
        pool.prefix.commit(first, PROMPT[8:])
        assert backend.ask() == 12
        pool.step(plan, [first], 8)
        backend.execute(plan, [*range(8)])
        pool.prefix.commit(first, [*range(8)])
        assert backend.ask([*PROMPT, *range(8)]) == 20 and pool.prefix.stats().nodes == 5
        assert [event[0] for event in pool.prefix.events()] == ["stored"] * 5
        other = pool.open([7] * 5, b"other")
        pool.step(plan, [other], 4)
        pool.done(plan)
        pool.prefix.commit(other, [7] * 4)
        assert pool.prefix.match([7] * 5, b"other") == 4 and pool.prefix.match([7] * 5) == 0
        pool.check()


class DigestWithoutTokens(ModelPool):
    """The digest sees that there was a commit or a flush, not of what."""

    def _chain(self, *words: Any) -> None:
        super()._chain(words[0] if words[0] in ("commit", "flush") else words)


@planted(DigestWithoutTokens)
def test_digest_sees_the_tokens_of_a_commit(Pool, Plan):
    """Ranks that sampled different tokens differ from that call on, and equal ones never do."""
    digests = []
    for tokens in (PROMPT, PROMPT, [*PROMPT[:11], 5], [PROMPT[1], PROMPT[0], *PROMPT[2:]], PROMPT[:11]):
        pool, _, _, first, _ = family(Pool, Plan)
        before = pool.digest()
        pool.prefix.commit(first, tokens)
        assert pool.digest() != before
        digests.append(pool.digest())
    assert digests[0] == digests[1] and len(set(digests)) == 4
    pools = [family(Pool, Plan) for _ in range(2)]
    for pool, _, _, first, _ in pools:
        for token in PROMPT:
            pool.prefix.commit(first, [token])
    assert pools[0][0].digest() == pools[1][0].digest()


@planted(DigestWithoutTokens)
def test_digest_sees_the_namespace_of_a_flush(Pool, Plan):
    """Of two that hold the same, the one or the other, or all."""
    digests = []
    for flushed in (b"a", b"b", None):
        pool = Pool(16, 4, max_seqs=8, prefix_cache=True, seed=1)
        plan = Plan(pool, 1, 8)
        for namespace in (b"a", b"b"):
            handle = pool.open(PROMPT, namespace)
            pool.step(plan, [handle], 8)
            pool.done(plan)
            pool.prefix.commit(handle, PROMPT[:8])
            pool.close(handle)
        pool.prefix.flush(flushed)
        digests.append(pool.digest())
    assert len(set(digests)) == 3
