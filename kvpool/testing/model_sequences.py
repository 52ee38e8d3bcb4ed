"""The sequence half of `kvpool.testing.model`: handles, opening, forking, shortening and closing."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpool.errors import (
    CapacityExceeded,
    ForeignHandle,
    OutOfSequences,
    PlanStateError,
    StaleHandle,
)
from kvpool.testing import model_args as args
from kvpool.testing.model_blocks import (
    GENERATION_BITS,
    MAX_GENERATION,
    SLOT_BITS,
    BlockModel,
    Sequence,
    ceil_div,
    public_call,
)


class SequenceModel(BlockModel):
    """`BlockModel` with sequences; `ModelPool` adds steps."""

    def _find(self, handle: int) -> Sequence | None:
        seq = self._sequences.get(handle & (2**SLOT_BITS - 1))
        return seq if seq is not None and seq.handle == handle else None

    def _sequence(self, call: str, handle: int) -> Sequence:
        if handle < 0:
            raise ValueError(f"[{call}] handle is negative ({handle})")
        seq = self._find(handle)
        if seq is None and handle >> (SLOT_BITS + GENERATION_BITS) != self._tag:
            raise ForeignHandle(f"[{call}] handle of another pool ({handle})")
        if seq is None:
            raise StaleHandle(f"[{call}] handle of a closed sequence ({handle})")
        return seq

    def _batch(self, call: str, handles: Any, alone: bool = False) -> list[Sequence]:
        return [self._sequence(call, handle) for handle in args.handles(call, handles, alone=alone)]

    def _one(self, call: str, handle: Any) -> Sequence:
        return self._sequence(call, args.integer(call, "handle", handle, 0, args.MAX_INT64))

    def _create(self, num_tokens: int, table: list[int]) -> Sequence:
        slot = self._free_slots.popleft()
        generation = self._generations.setdefault(slot, 0)
        handle = self._tag << (SLOT_BITS + GENERATION_BITS) | generation << SLOT_BITS | slot
        seq = self._sequences[slot] = Sequence(handle, num_tokens, table)
        return seq

    def _refuse_slots(self, call: str, n: int) -> None:
        if n > len(self._free_slots):
            raise OutOfSequences(
                f"[{call}] {n} sequence slots are needed, {len(self._free_slots)} are free, "
                f"max_seqs is {self.options.max_seqs}"
            )

    @public_call
    def open(self, num_tokens: int = 0) -> int:
        """Open an empty sequence with blocks for `num_tokens` tokens; returns its handle."""
        return self._open_blank(num_tokens).handle

    def _open_blank(self, num_tokens: int) -> Sequence:
        need = ceil_div(args.count("open", "num_tokens", num_tokens), self.block_size)
        if need > self.options.max_blocks_per_seq:
            raise CapacityExceeded(f"[open] {need} blocks, max_blocks_per_seq is {self.options.max_blocks_per_seq}")
        if need and need + self.options.watermark > self._available():
            self._out_of_blocks("open", need, self.options.watermark)
        self._refuse_slots("open", 1)
        seq = self._create(0, [self._take() for _ in range(need)])
        self._chain("open", num_tokens, self._local(seq.handle), *seq.table)
        return seq

    def _fork_in(self, parent: Sequence) -> tuple[int, int] | None:
        raise NotImplementedError

    @public_call
    def fork(self, handle: int, n: int = 1) -> np.ndarray:
        """Open `n` children that share the parent's written blocks; returns their handles, int64 ``[n]``."""
        parent = self._one("fork", handle)
        n = args.count("fork", "n", n)
        self._refuse_slots("fork", n)
        shared = ceil_div(parent.num_tokens, self.block_size)
        children = []
        for _ in range(n):
            child = self._create(parent.num_tokens, parent.table[:shared])
            child.ancestors = [*parent.ancestors, (parent.handle, self._next_step - 1)]
            child.root, child.tokens, child.published = parent.root, list(parent.tokens), parent.published
            child.evicted, child.point = parent.evicted, parent.point
            child.forked_in = self._fork_in(parent)
            children.append(child.handle)
        self._chain("fork", self._local(parent.handle), *map(self._local, children))
        return np.array(children, np.int64)

    def _pop_blocks(self, seq: Sequence, length: int) -> None:
        """Drop table entries from the end until `length` are left."""
        while len(seq.table) > length:
            self._release(seq.table.pop())

    @public_call
    def truncate(self, handles: Any, lens: Any) -> None:
        """Shorten sequences to `lens` tokens; the blocks past them are released, youngest first."""
        batch = self._batch("truncate", handles, alone=True)
        lengths = args.per_row("truncate", "lens", lens, len(batch))
        for seq, length in zip(batch, lengths, strict=True):
            if not seq.point <= length <= seq.num_tokens + seq.evicted:
                raise ValueError(f"[truncate] len is {length}, {seq.point} .. {seq.num_tokens + seq.evicted} is legal")
            if any(row.handle == seq.handle for step in self._pending for row in step.rows):
                raise PlanStateError(f"[truncate] handle is a row of a pending plan ({seq.handle})")
        for seq, length in zip(batch, lengths, strict=True):
            left = length - seq.evicted
            keep = ceil_div(left, self.block_size)
            seq.epoch += keep < len(seq.table)
            self._pop_blocks(seq, keep)
            seq.num_tokens = left
            self._forget_tokens(seq, left)
            seq.published = min(seq.published, left // self.block_size)
        self._chain("truncate", *(self._local(seq.handle) for seq in batch), *lengths)

    def _forget_tokens(self, seq: Sequence, left: int) -> None:
        """What was told of a sequence, but for its first tokens."""
        del seq.tokens[left:]

    def _close(self, seq: Sequence) -> None:
        slot = seq.handle & (2**SLOT_BITS - 1)
        self._pop_blocks(seq, 0)
        del self._sequences[slot]
        self._generations[slot] += 1
        if self._generations[slot] <= MAX_GENERATION:
            self._free_slots.append(slot)
        self._chain("close", self._local(seq.handle))

    @public_call
    def close(self, handles: Any) -> None:
        """Close sequences in the order given; each one's blocks are released youngest first."""
        for seq in self._batch("close", handles, alone=True):
            self._close(seq)

    @public_call
    def close_finished(self, handles: Any, mask: Any) -> int:
        """Close the rows whose mask byte is not zero; returns how many."""
        batch = self._batch("close_finished", handles)
        finished = args.mask("close_finished", mask, len(batch))
        for seq, is_finished in zip(batch, finished, strict=True):
            if is_finished:
                self._close(seq)
        return sum(map(bool, finished))

    def defer_close(self, handle: int) -> None:
        """Close this sequence at the beginning of the next call; a dead handle is skipped then."""
        self._deferred.append(args.integer("defer_close", "handle", handle, 0, args.MAX_INT64))

    def _drain(self) -> None:
        while self._deferred:
            seq = self._find(self._deferred.pop(0))
            if seq is not None:
                self._close(seq)

    @public_call
    def reset(self) -> None:
        """Forget every sequence, reference, pending plan and committed bit; generations go on."""
        self._reset()

    def _reset(self) -> None:
        for slot in self._sequences:
            self._generations[slot] += 1
        for step in self._pending:
            step.plan._pending = False
        self._dropped.extend(sorted(self._committed))
        self._empty()
        self._chain("reset")

    @public_call
    def table(self, handle: int) -> np.ndarray:
        """Return the blocks of a sequence, int32 ``[blocks]``, a copy."""
        return np.array(self._one("table", handle).table, np.int32)

    @public_call
    def num_tokens(self, handle: int) -> int:
        """Return the length of a sequence in tokens, evicted ones included."""
        seq = self._one("num_tokens", handle)
        return seq.num_tokens + seq.evicted

    @public_call
    def capacity(self, handle: int) -> int:
        """Return the tokens that the blocks of a sequence can hold."""
        return len(self._one("capacity", handle).table) * self.block_size

    @public_call
    def is_open(self, handle: int) -> bool:
        """Return whether the handle names an open sequence of this pool."""
        return self._find(args.integer("is_open", "handle", handle, 0, args.MAX_INT64)) is not None
