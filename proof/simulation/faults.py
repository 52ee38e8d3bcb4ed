"""Faults for `proof.simulation.simulator` to find: real pools, plans and devices, each with one part broken.

A simulator that never convicts is no judge. Most kits of `FAULTS` wrap kvpool's own core thinly, so that the fault
runs at full speed; faults deep in the logic are planted in the plain Python model. `SEEDS` says how many worlds it may
take until one is found; most show in the first.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from kvpool import Plan, Pool
from kvpool._core import BlockAPI, PrefixCache
from kvpool.errors import OutOfBlocks, StaleHandle
from kvpool.testing.model import ModelPlan, ModelPool
from proof.fuzz._broken_groups import GROUP_FAULTS, broken_groups
from proof.simulation.device import Device, Move, Work
from proof.simulation.layers import Layers
from proof.simulation.simulator import Failure, Kit, simulate

SEEDS = 100  # worlds in which every fault must show


class NoFence(Pool):
    """Every step counts as done when it is issued: nothing waits for the device."""

    def step(self, plan: Any, *rest: Any, **options: Any) -> None:
        """Declare it done at once."""
        super().step(plan, *rest, **options)
        super().done(plan)

    def reserve(self, plan: Any, *rest: Any) -> None:
        """Declare it done at once."""
        super().reserve(plan, *rest)
        super().done(plan)

    def done(self, plan: Any) -> None:
        """It is done already."""

    def rollback(self, plan: Any) -> None:
        """It is done already."""


class _Issued(Pool):
    """A pool that knows its pending plans, and takes a second `done` for granted."""

    def _mine(self) -> list[Any]:
        return self.__dict__.setdefault("issued", [])

    def step(self, plan: Any, *rest: Any, **options: Any) -> None:
        """Remember the plan."""
        super().step(plan, *rest, **options)
        self._mine().append(plan)

    def reserve(self, plan: Any, *rest: Any) -> None:
        """Remember the plan."""
        super().reserve(plan, *rest)
        self._mine().append(plan)

    def done(self, plan: Any) -> None:
        """Forget the plan."""
        if plan in self._mine():
            self._mine().remove(plan)
            super().done(plan)

    def rollback(self, plan: Any) -> None:
        """Forget the plan."""
        if plan in self._mine():
            super().rollback(plan)
            self._mine().remove(plan)

    def reset(self) -> None:
        """Forget all plans."""
        super().reset()
        self._mine().clear()

    def _all_done(self) -> None:
        for plan in list(self._mine()):
            self._mine().remove(plan)
            super().done(plan)


class CloseWithoutFence(_Issued):
    """Blocks of a closed sequence do not wait for the steps in flight."""

    def close(self, handles: Any) -> None:
        """Free at once."""
        self._all_done()
        super().close(handles)


class AnyDoneFreesAll(_Issued):
    """Whatever step a completion names, all blocks in limbo are freed."""

    def done(self, plan: Any) -> None:
        """Every step is done."""
        self._all_done()


class EvictionWithoutFence(_Issued):
    """Blocks that eviction releases do not wait for the steps in flight."""

    def compact(self, handles: Any, lens: Any, first: int = 0) -> None:
        """Free at once."""
        self._all_done()
        super().compact(handles, lens, first)

    def evict_blocks(self, handle: int, indices: Any) -> None:
        """Free at once."""
        self._all_done()
        super().evict_blocks(handle, indices)


class CommitBeforeDone(_Issued):
    """Blocks may be committed, and found, before they are written."""

    def open(self, *arguments: Any) -> int:
        """Commit what was only scheduled: here, by not waiting for it."""
        self._all_done()
        return super().open(*arguments)


class RollbackIgnored(Pool):
    """A step that failed is taken for done."""

    def rollback(self, plan: Any) -> None:
        """Keep the tokens."""
        self.done(plan)


class TruncateIgnored(Pool):
    """Drafts that were not accepted stay."""

    def truncate(self, handles: Any, lens: Any) -> None:
        """Keep the tokens."""


class TruncateOneTooMany(Pool):
    """The cut is made one token late."""

    def truncate(self, handles: Any, lens: Any) -> None:
        """Keep one token too many, where there is one."""
        super().truncate(handles, min(lens + 1, self.num_tokens(handles)))


class CloseForgotten(Pool):
    """A sequence whose close is deferred stays for ever."""

    def defer_close(self, handle: Any) -> None:
        """Forget it."""


class AbortLeaksBlock(Pool):
    """Closing drops the table, but not every reference."""

    def close(self, handles: Any) -> None:
        """Keep a reference of the first block."""
        if isinstance(handles, int):
            self.blocks.incref(self.table(handles)[:1])
        super().close(handles)


class SecondCloseIsSilent(Pool):
    """Closing the dead is no error."""

    def close(self, handles: Any) -> None:
        """Look away."""
        with suppress(StaleHandle):
            super().close(handles)


class NamespaceIgnored(Pool):
    """What one tenant cached is found by the other."""

    def open(self, tokens: Any = 0, namespace: bytes = b"") -> int:
        """One namespace for all."""
        return super().open(tokens)


class HashedBits(PrefixCache):
    """See `TokensNotCompared`."""

    def commit(self, handles: Any, tokens: Any, counts: Any = None) -> None:
        """Commit the hash."""
        super().commit(handles, [t & 1 for t in tokens], counts)


class TokensNotCompared(Pool):
    """Equal hashes are taken for equal tokens: here, of a hash that sees one bit of each."""

    @property
    def prefix(self) -> HashedBits:
        """What is told of the hash."""
        return HashedBits(self)

    def open(self, tokens: Any = 0, namespace: bytes = b"") -> int:
        """Look up the hash."""
        return super().open(tokens if isinstance(tokens, int) else [t & 1 for t in tokens], namespace)


class HollowPins(PrefixCache):
    """See `PinHoldsNothing`."""

    def pin(self, tokens: Any, namespace: bytes = b"") -> int:
        """Give the blocks up again; the caller still reads them."""
        pool, handle = self.pool, super().pin(tokens, namespace)
        found = pool.__dict__.setdefault("found", {})
        found[handle] = pool.table(handle), pool.num_tokens(handle)
        super().unpin(handle)
        pool.__dict__["hollow"] = empty = pool.open(0)
        found[empty] = found.pop(handle)
        return empty


class PinHoldsNothing(Pool):
    """A hit is a hint: what was found may be evicted before it is used."""

    @property
    def prefix(self) -> HollowPins:
        """Whose pins hold nothing."""
        return HollowPins(self)

    def table(self, handle: int) -> np.ndarray:
        """What was found then."""
        found = self.__dict__.get("found", {})
        return found[handle][0] if handle in found else super().table(handle)

    def num_tokens(self, handle: int) -> int:
        """What was found then."""
        found = self.__dict__.get("found", {})
        return found[handle][1] if handle in found else super().num_tokens(handle)


class NothingHeld(BlockAPI):
    """See `TransferHoldsNothing`."""

    def arena(self, number: int) -> NothingHeld:
        """Neither elsewhere."""
        return self

    def incref(self, ids: Any) -> None:
        """Hold nothing."""

    def decref(self, ids: Any) -> None:
        """Give nothing back."""


class TransferHoldsNothing(Pool):
    """Who copies blocks elsewhere believes that the request will wait."""

    @property
    def blocks(self) -> NothingHeld:
        """That hold nothing."""
        return NothingHeld(self)


class ForkSharesAllButTail(Pool):
    """The children of a fork hold the full blocks of their parent, and an empty tail."""

    def fork(self, handle: int, n: int = 1) -> np.ndarray:
        """Cut the tail off, and grow it again without content."""
        children = super().fork(handle, n)
        length, size = self.num_tokens(handle), self.block_size
        for child in children.tolist() if length % size else ():
            plan = Plan(self, 1, size)
            super().truncate(child, length - length % size)
            try:
                super().step(plan, [child], length % size)
            except OutOfBlocks:
                return children
            super().done(plan)
        return children


_shared: dict[int, np.ndarray] = {}


def one_buffer(pool: Any, **options: Any) -> Plan:
    """All plans write into one array, which the device may still have to read."""
    plan, length = Plan(pool, **options), options["max_tokens"]
    plan.bind(slot_mapping=_shared.setdefault(length, np.zeros(length, np.int32)))
    return plan


class CopiesSkipped(Device):
    """A backend without copy on write."""

    def _copies(self, work: Work, layers: Layers) -> list[list[int]]:
        return []


class CopyOneShort(Device):
    """The last token of a tail is not copied."""

    def _copies(self, work: Work, layers: Layers) -> list[list[int]]:
        return [[src, dst, tokens - 1] for src, dst, tokens in super()._copies(work, layers)]


class DirtyRowsForgotten(Device):
    """The last table row that changed is not uploaded."""

    def _dirty(self, arrays: Any) -> np.ndarray:
        return arrays.dirty_rows[:-1]


class UpdatesForgotten(Device):
    """Of the updates of a plan the last one is lost."""

    def _updates(self, plan: Any) -> list[list[int]]:
        return super()._updates(plan)[:-1]


class ZombieRows(Device):
    """Work that was cancelled is executed all the same, a little later."""

    def cancel(self, work: Work) -> None:
        """Leave it in the queue, its completion unheard of."""
        if work in self.queue:
            super().cancel(work)
            for layers in self.layers:
                if layers.kind != "state":
                    slots = layers.arrays(work.plan).slot_mapping.reshape(layers.columns, -1).T.copy()
                    self.zombies = [*getattr(self, "zombies", []), (layers, slots[: work.stamps.size], work.stamps)]

    def submit(self, work: Work) -> None:
        """Bury the dead after the living were told where to write."""
        super().submit(work)
        for layers, slots, stamps in getattr(self, "zombies", []):
            self.arenas[layers.arena][:, slots // layers.size, slots % layers.size] = layers.mark(stamps)


class StatesLost(Device):
    """A step leaves every slot as it was."""

    def _step_states(self, work: Work, layers: Layers, depth: int) -> None:
        before = self.arenas[layers.arena].copy()
        super()._step_states(work, layers, depth)
        self.arenas[layers.arena][:] = before


class MovesOvertake(Device):
    """Tokens move at once, before the steps that were issued earlier."""

    def submit_move(self, move: Move) -> None:
        """Do not wait."""
        self._move(move)


class NewestFirst(Device):
    """Steps are not executed in the order in which they were issued."""

    def submit(self, work: Work) -> None:
        """Overtake what has not begun."""
        super().submit(work)
        if len(self.queue) > 1 and not self.queue[-2].next_operation:
            self.queue[-1], self.queue[-2] = self.queue[-2], self.queue[-1]


class OtherLayersForgotten(Device):
    """Copies are made in the first layer only."""

    def _copy(self, work: Work, layers: Layers, depth: int) -> None:
        if depth == 0:
            super()._copy(work, layers, depth)


class NoHold(ModelPool):
    """The source of a pending copy is given up with its last reference."""

    def _release(self, block: int) -> None:
        if not self._refcount(block):
            self._holds, holds = [], self._holds
            super()._release(block)
            self._holds = holds


class FloorIgnored(ModelPool):
    """A block is written in place below what a pending copy still has to read."""

    def _floor(self, block: int) -> int:
        return 0


class SharedWrittenInPlace(ModelPool):
    """A shared tail is not copied before it is written."""

    def _row_needs(self, *arguments: Any) -> Any:
        return [], super()._row_needs(*arguments)[1]


class LimboSkipped(ModelPool):
    """A freed block is blank at once."""

    def _release(self, block: int) -> None:
        if not self._refcount(block) and block not in self._holds:
            self._leave(block)


class CommittedWrittenInPlace(ModelPool):
    """A cached block is written by the sequence that goes on in it."""

    def _row_needs(self, *arguments: Any) -> Any:
        self._committed, committed = set(), self._committed
        needs = super()._row_needs(*arguments)
        self._committed = committed
        return needs


class SharedCompacted(ModelPool):
    """Compaction rewrites blocks that others read."""

    def _is_own(self, *arguments: Any) -> bool:
        """Every block is."""
        return True


class PendingCompacted(ModelPool):
    """Tokens may leave rows of a step in flight."""

    def _judge_eviction(self, *arguments: Any) -> None:
        """All may."""


class LeftoversCommitted(ModelPool):
    """What is left of a sequence may be committed, as if it were the beginning of a prompt."""

    def _refuse_commit(self, seq: Any, row: list[int], told: dict[int, tuple[int, ...]]) -> None:
        """Not where tokens left."""
        if not seq.evicted:
            super()._refuse_commit(seq, row, told)


class CopyIsPublished(ModelPool):
    """What a row says is in a block is found before the copy that brings it has run."""

    def _publish(self, seq: Any) -> None:
        pending, self._pending = self._pending, []
        super()._publish(seq)
        self._pending = pending


class HitsStayOnTheList(ModelPool):
    """A hit gains a reference but stays evictable."""

    def _touch(self, block: int) -> None:
        """Leave it where it is."""


def model(pool: Any, **shape: Any) -> Kit:
    """A fault in the logic: planted in the plain Python model, which is slow. Pools with layer groups have no fault."""

    def make(*sizes: Any, **options: Any) -> Any:
        return (pool if options.get("groups") is None else ModelPool)(*sizes, **options)

    return Kit(Pool=make, Plan=ModelPlan, shape=shape)


FORKS = {"weights": {"fork": 4.0}}
CACHE: dict[str, Any] = {"prefix_cache": True, "in_order": False}
LATE: dict[str, Any] = {"in_order": False, "depth": 4}
#: Tails that are shared, cut and undone, and little else.
CUT_AND_UNDONE: dict[str, Any] = {
    **{"block_size": 8, "max_rows": 2, "num_layers": 1, "max_running": 6},
    **{"prefix_cache": False, "drafting": 0.0, "reserving": 0.0},
    "weights": {"fork": 6.0, "trim": 6.0, "give_up": 6.0},
}
#: Few prompts, forked and told while their blocks are copied.
COPIES_TOLD: dict[str, Any] = (
    LATE
    | CACHE
    | {
        **{"num_prompts": 2, "drafting": 0.0, "max_running": 8},
        "weights": {"compact": 4.0, "commit": 0.5, "fork": 6.0, "give_up": 2.0},
    }
)
#: And nothing is evicted: blocks that are still to be moved are poisoned later.
ALL_ARRIVES = {"losing": 0.0, "weights": {"give_up": 0.0, "compact": 0.0, "evict_blocks": 0.0}}
#: Whoever is not asked for it makes no wrong calls: a fault has to show by what it does.
MISUSE = {"weights": {"misuse": 5.0}}
LEAVING = {"weights": {"fork": 2.0, "compact": 3.0, "evict_blocks": 1.0}}


def quiet(kit: Kit) -> Kit:
    """The kit, without wrong calls and layer groups unless it asks for them."""
    weights = {"misuse": 0.0} | kit.shape.get("weights", {})
    return replace(kit, shape={"grouped": False} | kit.shape | {"weights": weights})


_KITS: dict[str, Kit] = {
    "no fence": Kit(Pool=NoFence, shape=LATE | ALL_ARRIVES),
    "close without fence": Kit(Pool=CloseWithoutFence, shape=LATE | ALL_ARRIVES),
    "any done frees all": Kit(Pool=AnyDoneFreesAll, shape=LATE | ALL_ARRIVES),
    "eviction without fence": Kit(Pool=EvictionWithoutFence, shape=LATE | LEAVING),
    "found before it is written": Kit(Pool=CommitBeforeDone, shape=LATE | CACHE | ALL_ARRIVES),
    "rollback ignored": Kit(Pool=RollbackIgnored, shape=LATE),
    "truncate ignored": Kit(Pool=TruncateIgnored, shape={"drafting": 0.5}),
    "truncate one late": Kit(Pool=TruncateOneTooMany, shape={"drafting": 0.5}),
    "deferred close forgotten": Kit(Pool=CloseForgotten),
    "abort leaks a block": Kit(Pool=AbortLeaksBlock),
    "second close is silent": Kit(Pool=SecondCloseIsSilent, shape=MISUSE),
    "namespace ignored": Kit(Pool=NamespaceIgnored, shape=CACHE),
    "tokens not compared": Kit(Pool=TokensNotCompared, shape=CACHE),
    "pin holds nothing": Kit(Pool=PinHoldsNothing, shape=CACHE | {"weights": {"pin": 6.0}}),
    "transfer holds nothing": Kit(Pool=TransferHoldsNothing, shape={"weights": {"send": 3.0}}),
    "fork without the tail": Kit(Pool=ForkSharesAllButTail, shape=FORKS | {"in_order": False}),
    "copies skipped": Kit(Device=CopiesSkipped, shape=FORKS),
    "copies one short": Kit(Device=CopyOneShort, shape=FORKS),
    "dirty rows forgotten": Kit(Device=DirtyRowsForgotten, shape={"by_tables": True, "in_order": False}),
    "one buffer for all plans": Kit(Plan=one_buffer, shape=LATE),
    "zombie rows": Kit(Device=ZombieRows, shape=LATE),
    "moves overtake": Kit(Device=MovesOvertake, shape={"in_order": True, "depth": 4} | LEAVING),
    "newest first": Kit(Device=NewestFirst, shape=LATE),
    "copies in one layer only": Kit(Device=OtherLayersForgotten, shape=FORKS | {"num_layers": 2}),
    "source of a copy not held": model(NoHold, **LATE | FORKS),
    "floor ignored": model(FloorIgnored, **LATE | CUT_AND_UNDONE),
    "shared tail written in place": model(SharedWrittenInPlace, **FORKS),
    "limbo skipped": model(LimboSkipped, **LATE),
    "cached block written in place": model(CommittedWrittenInPlace, **CACHE | {"weights": {"trim": 2.0}}),
    "shared blocks compacted": model(SharedCompacted, **LEAVING),
    "pending rows compacted": model(PendingCompacted, **LATE, weights=LEAVING["weights"] | MISUSE["weights"]),
    "leftovers are committed": model(LeftoversCommitted, **CACHE, weights=LEAVING["weights"] | MISUSE["weights"]),
    "found before it is copied": model(CopyIsPublished, **COPIES_TOLD),
    "hits stay on the list": model(HitsStayOnTheList, **CACHE),
}

GROUPED: dict[str, Any] = {"grouped": True}
UNSEEN = ("cached block of a later arena written",)  # nobody marks blocks as cached here
_KITS |= {
    f"groups: {name}": Kit(Pool=broken_groups(name), shape=GROUPED | LATE)
    for name in GROUP_FAULTS
    if name not in UNSEEN
}
_KITS |= {
    "groups: no fence": Kit(Pool=NoFence, shape=GROUPED | LATE | ALL_ARRIVES),
    "groups: transfer holds nothing": Kit(Pool=TransferHoldsNothing, shape=GROUPED | {"weights": {"send": 3.0}}),
    "groups: copies skipped": Kit(Device=CopiesSkipped, shape=GROUPED | FORKS),
    "groups: copies one short": Kit(Device=CopyOneShort, shape=GROUPED | FORKS),
    "groups: dirty rows forgotten": Kit(
        Device=DirtyRowsForgotten, shape=GROUPED | {"by_tables": True, "in_order": False}
    ),
    "groups: updates forgotten": Kit(Device=UpdatesForgotten, shape=GROUPED | LATE),
    "groups: newest first": Kit(Device=NewestFirst, shape=GROUPED | LATE),
    "groups: states are not written": Kit(Device=StatesLost, shape=GROUPED),
    "groups: rollback ignored": Kit(Pool=RollbackIgnored, shape=GROUPED | LATE),
}

FAULTS = {name: quiet(kit) for name, kit in _KITS.items()}


def convict(name: str, seed: int = 1, seeds: int = SEEDS) -> Failure | None:
    """Run the fault in one world after the other; returns how it showed, None if it did not."""
    for each in range(seed, seed + seeds):
        try:
            simulate(each, 1, FAULTS[name])
        except Failure as failure:
            return failure
    return None
