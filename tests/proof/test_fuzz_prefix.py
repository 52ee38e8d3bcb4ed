"""The prefix cache beside its model and beside a backend that knows what a hit must hold, for many random programs.

``KVPOOL_FUZZ_EXAMPLES`` and ``KVPOOL_FUZZ_SEED`` as in test_fuzz_machine. The pools in the second half are broken on
purpose: the model or the content has to notice each of them.
"""

from __future__ import annotations

import os
from itertools import islice
from typing import Any

import pytest
from fuzz_seed import fresh_seed

from kvpool import Plan, Pool
from kvpool.testing import ModelPlan, ModelPool
from kvpool.testing.model_blocks import Sequence
from proof.machine.machine import findings, run

EXAMPLES = int(os.environ.get("KVPOOL_FUZZ_EXAMPLES", "1000")) // 8


def test_prefix_core_random_programs_agree_with_the_model_and_the_content() -> None:
    run(Pool, Plan, examples=EXAMPLES, steps=50, seed=fresh_seed(), prefix_cache=True)


def test_prefix_model_random_programs_keep_the_content() -> None:
    run(ModelPool, ModelPlan, examples=EXAMPLES // 5, steps=50, seed=fresh_seed(), prefix_cache=True)


class Unchecked(ModelPool):
    """A pool that does not notice by itself what is wrong with it."""

    def check(self) -> None:
        """See nothing."""


class PendingCommitted(Unchecked):
    """Tokens can be committed before they are computed."""

    def _done_length(self, seq: Sequence) -> int:
        return seq.num_tokens


class ForkCommitsPending(Unchecked):
    """A fork of a pending row is believed to be computed."""

    def _done_length(self, seq: Sequence) -> int:
        seq.forked_in = None
        return super()._done_length(seq)


class ParentIsNotCompared(Unchecked):
    """A block is found by its own tokens, whatever is before it."""

    def _hits(self, tokens: list[int], namespace: bytes, most: int) -> list[int]:
        hits: list[int] = []
        for i in range(most):
            block = self._block_of(tokens, i)
            found = [node.block for (_, content), node in self._nodes.items() if content == block]
            hits += [b for b in found if b not in hits][:1]
            if len(hits) <= i:
                break
        return hits


class NamespaceIgnored(Unchecked):
    """Every tenant has the same root."""

    def _root(self, namespace: bytes) -> int:
        return super()._root(b"")

    def _hits(self, tokens: list[int], namespace: bytes, most: int) -> list[int]:
        return super()._hits(tokens, b"", most)


class EvictedIsFound(Unchecked):
    """A block that was taken for other use keeps its node."""

    def _evict_oldest(self) -> int:
        nodes = dict(self._nodes)
        block = super()._evict_oldest()
        self._nodes = nodes
        return block


class FlushedIsFound(Unchecked):
    """A flush forgets only what nobody uses."""

    def _forget(self, node: Any) -> None:
        if not self._refcount(node.block):
            super()._forget(node)


class LastTokenIsFound(Unchecked):
    """A prompt that is cached as a whole leaves nothing to compute."""

    def _prompt_hits(self, tokens: list[int], namespace: bytes) -> list[int]:
        return self._hits(tokens, namespace, len(tokens) // self.block_size)


class HitStaysEvictable(Unchecked):
    """A hit is found, but not pinned."""

    def _touch(self, block: int) -> None:
        self._cached_at.pop(block, None)


class HitsAreNotSubtracted(Unchecked):
    """Evictable hits count as blocks that can be taken."""

    def _out_of_blocks(self, *args: Any, lost: int = 0, **options: Any) -> None:
        super()._out_of_blocks(*args, **options)

    def _prompt_hits(self, tokens: list[int], namespace: bytes) -> list[int]:
        return super()._prompt_hits(tokens, namespace)[: len(self._blank)]


class DuplicateIsCached(Unchecked):
    """A duplicate goes to the LRU when it is released, as if it could be found."""

    def _leave(self, block: int) -> None:
        if block in self._stands_for and self._block_node(block) is None:
            self._blank.insert(0, block)
            self._blank_committed(block)
        else:
            super()._leave(block)


class CanonicalNotHeld(Unchecked):
    """A duplicate does not keep the parent of its child alive."""

    def _hold_canonicals(self, seq: Sequence, at: int) -> None:
        held = dict(self._held_canonicals)
        super()._hold_canonicals(seq, at)
        self._held_canonicals = held


class CanonicalLeaks(Unchecked):
    """A duplicate that is gone still holds its canonical block."""

    def _release(self, block: int) -> None:
        held, self._held_canonicals = self._held_canonicals, {-i: b for i, b in self._held_canonicals.items()}
        super()._release(block)
        self._held_canonicals = held


class CopyIsPublished(Unchecked):
    """What a row says is in a block can be found before the copy that brings it has run."""

    def _publish(self, seq: Sequence) -> None:
        pending, self._pending = self._pending, []
        super()._publish(seq)
        self._pending = pending


class WaitingIsForgotten(Unchecked):
    """Blocks that were held back are not published when their step has passed."""

    def _publish_waiting(self) -> None:
        """Publish nothing."""


class WaitingIsPassed(Unchecked):
    """A block behind one that is held back does not wait for it."""

    def _publish(self, seq: Sequence) -> None:
        super()._publish(seq)
        published, seq.published = seq.published, seq.published + 1
        super()._publish(seq)
        seq.published = max(published, min(seq.published, len(seq.tokens) // self.block_size))


class HeldIsKeptByRollback(Unchecked):
    """A copy that never ran stays committed, and its row goes on as if it had."""

    def rollback(self, plan: Any) -> None:
        """Restore everything but what was committed."""
        held, tokens = set(self._held_back), dict(self._block_tokens)
        super().rollback(plan)
        for block in held - self._held_back:
            self._committed.add(block)
            self._block_tokens[block] = tokens[block]


class RowsOfABatchAreJudgedAlone(Unchecked):
    """Two rows of one commit may tell different tokens of a block that they share."""

    def _refuse_commit(self, seq: Sequence, row: list[int], told: dict[int, tuple[int, ...]]) -> None:
        super()._refuse_commit(seq, row, dict(self._block_tokens))


class StatsCountRefused(Unchecked):
    """A request that does not fit is counted as a query."""

    def _out_of_blocks(self, call: str, *args: Any, **options: Any) -> None:
        self._use["queries"] += call == "open"
        super()._out_of_blocks(call, *args, **options)


@pytest.mark.parametrize("pool", Unchecked.__subclasses__())
def test_machine_broken_prefix_cache_is_detected_by_the_model(pool: type) -> None:
    assert any(findings(pool, ModelPlan, (ModelPool, ModelPlan), prefix_cache=True))


@pytest.mark.parametrize(
    "pool", [ParentIsNotCompared, NamespaceIgnored, EvictedIsFound, HitStaysEvictable, CopyIsPublished]
)
def test_machine_wrong_hit_is_detected_by_its_content_alone(pool: type) -> None:
    found = islice(findings(pool, ModelPlan, (pool, ModelPlan), prefix_cache=True), 8)
    assert any("content:" in str(finding) for finding in found)  # the others broke in their own ways first
