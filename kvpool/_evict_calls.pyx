"""Calls that let tokens leave a sequence while it goes on: compaction, whole blocks, and blocks of its own before.

After an eviction a sequence has two lengths. `num_tokens` counts all it ever had and gives positions; `kv_len` counts
those that still have a slot and gives the lengths and slots of plans.
"""
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint32_t
from libc.string cimport memcpy

from kvpool._args cimport Ints, ints_at, ints_free, ints_get, to_int
from kvpool._blocks cimport Block, Blocks, whole_blocks
from kvpool._memory cimport xcalloc, xfree
from kvpool._plan cimport Plan
from kvpool._record cimport BATCH, put, put_ints, put_slots, put_wide, record_begin, record_end
from kvpool._sequence cimport Seqs, seq_compact, seq_evict, seq_rewritten, seq_table, slot_of
from kvpool._step cimport BAD_LENGTH, Limits, Verdict, step_check_unshare, step_undo_check
from kvpool._types cimport BAD_ROW, OK, OP_COMPACT, OP_EVICT_BLOCKS, OP_UNSHARE

from kvpool.errors import CapacityExceeded, PlanStateError

cdef int64_t INT32_MAX = (<int64_t>1 << 31) - 1


cdef class EvictPool(PrefixPool):
    """The calls that shorten what a sequence keeps; see `kvpool.Pool`."""

    # -- what `kvpool.Pool` does, where steps are

    cdef int note_pending(self, Plan plan) except -1:
        raise NotImplementedError

    cdef void carry_out(self, Plan plan, const int64_t* handles, bint advance, int64_t pad_rows, int64_t pad_tokens):
        raise NotImplementedError

    cdef Plan check_plan(self, object plan, str call):
        if type(plan) is not Plan:
            raise TypeError(f"[{call}] plan must be a kvpool.Plan, not {type(plan).__name__}")
        if (<Plan>plan).pool is not self:
            raise ValueError(f"[{call}] the plan belongs to another pool ({(<Plan>plan).pool!r})")
        return <Plan>plan

    # -- verbs

    cdef int judge_eviction(self, int32_t slot, int64_t leaving, str call, Py_ssize_t row) except -1:
        """Refuse what no eviction may touch; row -1: not in a batch."""
        cdef Seqs* s = &self.seqs
        cdef Blocks* b = &self.blocks
        name = "handle" if row < 0 else f"handles[{row}]"
        if b.newest_pending and s.seq[slot].last_step >= b.oldest_pending:
            raise PlanStateError(f"[{call}] {name} is a row of a pending plan "
                                 f"(step {s.seq[slot].last_step}); call done or rollback first")
        if leaving and s.life[slot].evicted + leaving + s.max_blocks * b.block_size > INT32_MAX:
            raise CapacityExceeded(f"[{call}] {name} would have lost {s.life[slot].evicted + leaving} tokens, with "
                                   f"the {s.max_blocks * b.block_size} it may hold positions end at {INT32_MAX}")
        return 0

    def unshare(self, plan, handles, lens, first=0):
        """Give sequences blocks of their own where `compact` is going to rewrite them: a step without tokens.

        Parameters
        ----------
        plan : Plan
            A plan of this pool that is not pending. Its copies have to be made; it is pending like after `step`.
        handles : ints
            Open sequences, int64, shape ``(S,)``, no duplicates.
        lens, first : as `compact` will get them

        Raises
        ------
        OutOfBlocks
            The blocks are not there. State unchanged.
        StaleHandle, ForeignHandle, PlanStateError, CapacityExceeded, ValueError, TypeError
            As `step` raises; a length that is not in ``0 .. kv_len``. State unchanged.

        Notes
        -----
        Replaces each block that `compact` with the same arguments would refuse to rewrite by a copy: blocks that
        others refer to, committed ones, ones that a pending copy reads. What the others read never changes. Rows
        are judged in order, so each but the last of the sequences that share a block gets a copy, and the last too
        while the copies are pending. O(blocks).
        """
        cdef Plan p
        cdef Ints rows, lengths
        cdef Limits limits
        cdef Verdict verdict
        cdef uint32_t* word = NULL
        cdef int64_t keep
        cdef int status
        self.enter("unshare")
        rows.held = lengths.held = False
        rows.owned = lengths.owned = NULL
        try:
            p = self.check_plan(plan, "unshare")
            p.refuse_pending("unshare")
            ints_get(&rows, handles, "unshare", "handles", False, False)
            ints_get(&lengths, lens, "unshare", "lens", True, True)
            keep = to_int(first, "unshare", "first", 0, INT64_MAX)
            if lengths.size >= 0 and lengths.size != rows.size:
                raise ValueError(f"[unshare] {lengths.size} lens for {rows.size} handles")
            p.refuse_rows(rows.size, "unshare")
            limits.max_tokens = 0
            limits.seq_tokens = min(p.seq_limit, self.seqs.max_blocks * self.blocks.block_size)
            limits.table_width = p.wire.table_width
            self.next_stamp()
            status = step_check_unshare(&p.step, &self.seqs, &self.blocks, &rows, &lengths, keep, &limits, &verdict)
            if status != OK:
                step_undo_check(&p.step, &self.blocks, 0)
                if status == BAD_ROW and verdict.reason == BAD_LENGTH:
                    raise ValueError(f"[unshare] lens[{verdict.row}] is {verdict.value}, it must be in 0 .. "
                                     f"{self.seqs.seq[slot_of(ints_at(&rows, verdict.row))].num_tokens}")
                p.refuse(status, &verdict, &rows, "unshare", -1)
            p.room_for_copies()
            self.note_pending(p)
            if self.record.data != NULL:
                word = record_begin(&self.record, OP_UNSHARE, 3 + 2 * BATCH + rows.size + 2 * lengths.size)
                if word != NULL:
                    word = put_wide(put(word, p.number_in(&self.record)), keep)
                    word = put_ints(put_slots(word, &rows), &lengths)
            self.carry_out(p, <const int64_t*>rows.data, False, 0, 0)
            self.copy_known(p)
            if self.record.data != NULL:
                record_end(&self.record, word, self.blocks.digest)
        finally:
            ints_free(&rows)
            ints_free(&lengths)
            self.busy = False

    cdef void copy_known(self, Plan p) noexcept:
        """A copy is not committed, but a `truncate` into it has to know which tokens are left in front."""
        cdef int64_t bs = self.blocks.block_size
        cdef int32_t k
        if not self.indexed:
            return
        for k in range(p.step.log_size):
            memcpy(self.index.tokens + p.step.log[k].new * bs, self.index.tokens + p.step.log[k].old * bs,
                   bs * sizeof(int32_t))

    def compact(self, handles, lens, first=0):
        """Keep `lens` tokens of each sequence, moved to the front of its table; the blocks behind them are released.

        Parameters
        ----------
        handles : int or ints
            Open sequences, int64, shape ``(n,)``, no duplicates.
        lens : int or ints
            Tokens that stay, int32 or int64, shape ``(n,)``; each ``0 <= len <= kv_len``. A sequence that keeps all
            is left alone.
        first : int, default 0
            Leading tokens that stay where they are, in all of these sequences: the whole blocks of them may be
            shared.

        Raises
        ------
        PlanStateError
            A sequence is a row of a pending plan. State unchanged.
        ValueError
            A length is out of range; a block that would be rewritten has another reference, is committed, or a
            pending copy reads it: call `unshare` first. State unchanged.
        CapacityExceeded
            The tokens that left and `max_blocks_per_seq` blocks pass position 2^31 - 1. State unchanged.

        Notes
        -----
        The pool moves numbers. The data is moved by the backend, `KVBackend.compact`, in the blocks of the table as
        it was, before the next step is executed. `num_tokens` stays, `kv_len` is the new length; blocks are
        released youngest first, through limbo while steps are pending. From here on the sequence commits no more
        blocks, and cannot be truncated below the `num_tokens` it has now. O(blocks).
        """
        cdef Seqs* s = &self.seqs
        cdef Ints batch, lengths
        cdef Py_ssize_t k
        cdef uint32_t* word
        cdef int64_t keep
        cdef int32_t slot, index
        self.enter("compact")
        batch.held = lengths.held = False
        batch.owned = lengths.owned = NULL
        try:
            ints_get(&batch, handles, "compact", "handles", True, False)
            ints_get(&lengths, lens, "compact", "lens", True, True)
            keep = to_int(first, "compact", "first", 0, INT64_MAX)
            self.check_batch(&batch, "compact")
            if lengths.size >= 0 and lengths.size != batch.size:
                raise ValueError(f"[compact] {lengths.size} lens for {batch.size} handles")
            for k in range(batch.size):
                slot = slot_of(ints_at(&batch, k))
                if not 0 <= ints_at(&lengths, k) <= s.seq[slot].num_tokens:
                    raise ValueError(f"[compact] lens[{k}] is {ints_at(&lengths, k)}, it must be in "
                                     f"0 .. {s.seq[slot].num_tokens}")
                self.judge_eviction(slot, s.seq[slot].num_tokens - ints_at(&lengths, k), "compact", k)
                index = seq_rewritten(s, &self.blocks, slot, keep, ints_at(&lengths, k), 0)
                if index >= 0:
                    self.explain_shared(seq_table(s, slot)[index], k)
            for k in range(batch.size):
                seq_compact(s, &self.blocks, slot_of(ints_at(&batch, k)), ints_at(&lengths, k))
            if self.record.data != NULL:
                word = record_begin(&self.record, OP_COMPACT, 2 + 2 * BATCH + batch.size + 2 * max(lengths.size, 0))
                if word != NULL:
                    word = put_ints(put_slots(put_wide(word, keep), &batch), &lengths)
                record_end(&self.record, word, self.blocks.digest)
        finally:
            ints_free(&batch)
            ints_free(&lengths)
            self.busy = False

    cdef int explain_shared(self, int32_t id, Py_ssize_t row) except -1:
        cdef const Block* block = &self.blocks.block[id]
        why = (f"has {block.refcount} references" if block.refcount > 1 else
               "is committed" if block.committed else "is read by a pending copy")
        raise ValueError(f"[compact] block {id} of handles[{row}] {why}, it must not be rewritten; "
                         f"call unshare first")

    def evict_blocks(self, handle, indices):
        """Whole blocks leave the table of a sequence; no data moves, and shared blocks stay as others read them.

        Parameters
        ----------
        handle : int
            An open sequence.
        indices : ints
            Places in its table, int32 or int64, shape ``(n,)``, ascending. Each must be full:
            ``0 <= index < kv_len // block_size``.

        Raises
        ------
        PlanStateError
            The sequence is a row of a pending plan. State unchanged.
        ValueError
            The indices do not ascend, or one is out of range. State unchanged.
        StaleHandle, ForeignHandle, CapacityExceeded
            As in `compact`. State unchanged.

        Notes
        -----
        What `compact` says of lengths, `truncate` and `commit` holds here too. O(blocks).
        """
        cdef Ints places
        cdef Py_ssize_t k
        cdef int32_t slot
        cdef int64_t full
        cdef int32_t* at = NULL
        cdef uint32_t* word
        self.enter("evict_blocks")
        places.held = False
        places.owned = NULL
        try:
            ints_get(&places, indices, "evict_blocks", "indices", False, True)
            slot = self.get_one(handle, "evict_blocks")
            full = whole_blocks(&self.blocks, self.seqs.seq[slot].num_tokens)
            for k in range(places.size):
                if not 0 <= ints_at(&places, k) < full:
                    raise ValueError(f"[evict_blocks] indices[{k}] is {ints_at(&places, k)}, the sequence has {full} "
                                     f"full blocks")
                if k and ints_at(&places, k) <= ints_at(&places, k - 1):
                    raise ValueError(f"[evict_blocks] indices[{k}] is {ints_at(&places, k)} after "
                                     f"{ints_at(&places, k - 1)}, they must ascend")
            self.judge_eviction(slot, places.size * self.blocks.block_size, "evict_blocks", -1)
            at = <int32_t*>xcalloc(places.size + 1, sizeof(int32_t))
            if at == NULL:
                raise MemoryError(f"[evict_blocks] no memory for {places.size} indices")
            for k in range(places.size):
                at[k] = <int32_t>ints_at(&places, k)
            seq_evict(&self.seqs, &self.blocks, slot, at, <int32_t>places.size)
            if self.record.data != NULL:
                word = record_begin(&self.record, OP_EVICT_BLOCKS, 1 + BATCH + 2 * places.size)
                if word != NULL:
                    word = put_ints(put(word, slot), &places)
                record_end(&self.record, word, self.blocks.digest)
        finally:
            xfree(at)
            ints_free(&places)
            self.busy = False

    def kv_len(self, handle):
        """Tokens of a sequence that still have a slot: `num_tokens` without those that were evicted. O(1)."""
        self.enter("kv_len")
        try:
            return self.seqs.seq[self.get_one(handle, "kv_len")].num_tokens
        finally:
            self.busy = False
