"""Calls on sequences: open, fork, truncate, close, and handles that cannot be confused."""
from libc.stdint cimport INT64_MAX, INT64_MIN, int32_t, int64_t, uint32_t
from libc.string cimport memcpy, memset

from kvpool._args cimport Ints, array_data, ints_at, ints_free, ints_get, new_int32, new_int64, to_int
from kvpool._block_calls cimport BlockPool
from kvpool._blocks cimport Blocks, blocks_available, blocks_take_many, whole_blocks
from kvpool._memory cimport xcalloc, xfree
from kvpool._record cimport (
    BATCH,
    CLOSE_FINISHED,
    DEFERRED,
    START,
    Record,
    put,
    put_bytes,
    put_ints,
    put_slots,
    put_wide,
    put_words,
    record_begin,
    record_end,
    record_one,
    record_slots,
)
from kvpool._sequence cimport (
    FREE_SLOT,
    MAX_SEQS,
    MAX_TAG,
    SLOT_BITS,
    TAG_SHIFT,
    Seq,
    SeqLife,
    Seqs,
    seq_close,
    seq_find,
    seq_fork,
    seq_new,
    seq_refresh,
    seq_table,
    seq_truncate,
    slot_of,
    untagged,
)
from kvpool._types cimport OP_CLOSE, OP_FORK, OP_TRUNCATE

import gc

from kvpool.errors import CapacityExceeded, ForeignHandle, OutOfBlocks, OutOfSequences, PlanStateError, StaleHandle

_live_tags = set()              # tags of live pools in this process
_last_tag = 0


def _free_tag():
    """The next tag nobody has, round robin: the handles of a dead pool stay foreign for as long as possible."""
    for k in range(MAX_TAG):
        tag = (_last_tag + k) % MAX_TAG + 1
        if tag not in _live_tags:
            return tag
    return 0


cdef int64_t take_tag() except -1:
    global _last_tag
    tag = _free_tag()
    if not tag:
        gc.collect()            # pools that only a cycle keeps, with their pending plans
        tag = _free_tag()
    if not tag:
        raise ValueError(f"[Pool] {MAX_TAG} pools are alive in this process, the limit")
    _live_tags.add(tag)
    _last_tag = tag
    return tag


cdef bytes get_mask(object mask, Py_ssize_t n):
    """A copy of a bool or uint8 mask of n entries."""
    if isinstance(mask, (list, tuple)) and all(isinstance(m, bool) for m in mask):
        mask = bytes(mask)
    try:
        view = memoryview(mask)
    except TypeError:
        raise TypeError(f"[close_finished] mask must be a bool or uint8 array, not {type(mask).__name__}") from None
    if view.format not in ("?", "B"):
        raise TypeError(f"[close_finished] mask must have dtype bool or uint8 (format {view.format!r})")
    if view.ndim != 1 or view.shape[0] != n or not view.c_contiguous:
        raise ValueError(f"[close_finished] mask has shape {view.shape}, it must be contiguous with {n} entries")
    return view.tobytes()


cdef class SequencePool(BlockPool):
    """Sequences on top of blocks. See `kvpool.Pool`."""

    def __cinit__(self, num_blocks, block_size, *, max_seqs=1024, max_blocks_per_seq=None, reserved_blocks=1,
                  watermark=0, in_order=False, seed=None, prefix_cache=False, events=0, record=0, _hash_bits=64):
        cdef Seqs* s = &self.seqs
        cdef int32_t usable = self.blocks.num_blocks - self.blocks.reserved
        cdef int32_t slot
        s.max_seqs = <int32_t>to_int(max_seqs, "Pool", "max_seqs", 1, MAX_SEQS)
        if max_blocks_per_seq is None:
            s.max_blocks = min(usable, max(1, (1 << 27) // s.max_seqs))
        else:
            s.max_blocks = <int32_t>to_int(max_blocks_per_seq, "Pool", "max_blocks_per_seq", 1, (<int64_t>1 << 31) - 1)
        s.watermark = to_int(watermark, "Pool", "watermark", 0, usable)
        self.deferred = []
        s.memory = xcalloc(s.max_seqs + 1, sizeof(Seq))
        s.life = <SeqLife*>xcalloc(s.max_seqs, sizeof(SeqLife))
        s.table = <int32_t*>xcalloc(s.max_seqs, s.max_blocks * sizeof(int32_t))
        s.free_slot = <int32_t*>xcalloc(s.max_seqs, sizeof(int32_t))
        if s.memory == NULL or s.life == NULL or s.table == NULL or s.free_slot == NULL:
            SequencePool.release_memory(self)
            raise MemoryError(f"[Pool] no memory for {s.max_seqs} sequences of {s.max_blocks} blocks")
        s.seq = <Seq*>((<size_t>s.memory + sizeof(Seq) - 1) // sizeof(Seq) * sizeof(Seq))
        for slot in range(s.max_seqs):
            s.free_slot[slot] = slot
            s.seq[slot].handle = -1
        s.num_free_slots = s.max_seqs
        s.tag = take_tag()

    def __dealloc__(self):
        SequencePool.release_memory(self)

    cdef void release_memory(self):
        cdef Seqs* s = &self.seqs
        if s.tag and _live_tags is not None:    # a free-threaded interpreter forgets modules before objects
            _live_tags.discard(s.tag)
        xfree(s.memory)
        xfree(s.life)
        xfree(s.prefix)
        xfree(s.partial)
        xfree(s.table)
        xfree(s.free_slot)
        memset(s, 0, sizeof(Seqs))
        BlockPool.release_memory(self)

    cdef int enter(self, str call) except -1:
        BlockPool.enter(self, call)
        if self.deferred:
            self.drain()
        return 0

    cdef void drain(self):
        """Close what finalizers left behind; a handle that is dead already is skipped."""
        cdef Py_ssize_t k = 0
        cdef int32_t slot
        while k < len(self.deferred):           # a finalizer can run meanwhile and add one
            slot = seq_find(&self.seqs, self.deferred[k])
            if slot >= 0:
                seq_close(&self.seqs, &self.blocks, slot)
                record_one(&self.record, DEFERRED, slot, self.blocks.digest)
            k += 1
        self.deferred.clear()                   # takes no memory, so it cannot fail

    # -- handles

    cdef int32_t find(self, int64_t handle, str call, Py_ssize_t row) except -1:
        """Slot of a handle, or the exception that says why it has none (row -1: not in a batch)."""
        cdef int32_t slot = seq_find(&self.seqs, handle)
        if slot >= 0:
            return slot
        name = "handle" if row < 0 else f"handles[{row}]"
        if handle < 0:
            raise ValueError(f"[{call}] {name} is negative ({handle})")
        if handle >> TAG_SHIFT != self.seqs.tag:
            raise ForeignHandle(f"[{call}] {name} is not of this pool ({handle})")
        slot = slot_of(handle)
        if slot >= self.seqs.max_seqs:
            raise StaleHandle(f"[{call}] {name} names slot {slot} ({handle}), the pool has {self.seqs.max_seqs}")
        raise StaleHandle(f"[{call}] {name} is stale ({handle}: generation {<uint32_t>(handle >> SLOT_BITS)}, "
                          f"current {self.seqs.life[slot].generation})")

    cdef int32_t get_one(self, object handle, str call) except -1:
        return self.find(to_int(handle, call, "handle", INT64_MIN, INT64_MAX), call, -1)

    cdef int check_batch(self, Ints* batch, str call) except -1:
        """Handles of a call: live, no duplicates. A scalar becomes a batch of one.

        Python code can run while arguments are read (an __index__), and change the arrays of others: so all
        arguments are read first, and from here on to the end of the call everything is C.
        """
        cdef Seqs* s = &self.seqs
        cdef Py_ssize_t k
        cdef int32_t slot
        if batch.size < 0:
            batch.size = 1
            self.find(batch.scalar, call, -1)
            return 0
        self.next_stamp()
        for k in range(batch.size):
            slot = self.find(ints_at(batch, k), call, k)
            if s.seq[slot].mark == s.stamp:
                raise ValueError(f"[{call}] handles[{k}] is a duplicate ({ints_at(batch, k)})")
            s.seq[slot].mark = s.stamp
        return 0

    cdef void uncommit(self, int32_t slot, int64_t length):
        """A sequence is about to be shortened; for the layer that knows about tokens."""

    cdef void next_stamp(self) noexcept:
        cdef Seqs* s = &self.seqs
        cdef int32_t slot
        s.stamp += 1
        if s.stamp == 0:
            for slot in range(s.max_seqs):
                s.seq[slot].mark = 0
            s.stamp = 1

    cdef void record_start(self) noexcept:
        """The pool was reset: a replay may begin here, with what a reset leaves as it is."""
        cdef Seqs* s = &self.seqs
        cdef Record* r = &self.record
        cdef uint32_t* at
        cdef int32_t slot, used = 0
        if r.data == NULL:
            return
        r.epoch += 1
        for slot in range(s.max_seqs):
            used += s.life[slot].generation != 0
        at = record_begin(r, START, 3 + BATCH + 2 * <int64_t>used + self.blocks.num_dropped)
        if at != NULL:
            at = put_wide(at, <int64_t>self.blocks.digest)
            at = put(put_words(at, self.blocks.dropped, self.blocks.num_dropped), used)
            for slot in range(s.max_seqs):
                if s.life[slot].generation:
                    at = put(put(at, slot), s.life[slot].generation)
        record_end(r, at, self.blocks.digest)

    # -- verbs

    def fork(self, handle, n=1):
        """`n` new sequences that share every filled block of an open one. No KV data moves until one of them writes.

        Parameters
        ----------
        handle : int
            The parent; it may be a row of a pending plan.
        n : int, default 1
            Number of children, >= 0.

        Returns
        -------
        ndarray, int64, shape ``(n,)``
            Handles of the children. Blocks reserved beyond the parent's length stay with the parent.

        Raises
        ------
        OutOfSequences
            Fewer than `n` slots are free. State unchanged.
        StaleHandle, ForeignHandle
            `handle` is not open in this pool. State unchanged.

        Notes
        -----
        O(blocks of the parent * n).
        """
        cdef int32_t parent
        cdef int64_t count
        cdef int64_t* made
        self.enter("fork")
        try:
            parent = self.get_one(handle, "fork")
            count = to_int(n, "fork", "n", 0, INT64_MAX)
            self.check_slots(count)
            children = new_int64(count)
            made = <int64_t*>array_data(children)   # asks for memory: nothing may fail once the fork is made
            self.make_children(parent, count, made)
            return children
        finally:
            self.busy = False

    cdef int check_slots(self, int64_t count) except -1:
        if count > self.seqs.num_free_slots:
            raise OutOfSequences(f"[fork] {count} children asked for, {self.seqs.num_open} sequences are open, "
                                 f"the limit is {self.seqs.max_seqs}")
        return 0

    cdef void make_children(self, int32_t parent, int64_t count, int64_t* children) noexcept:
        cdef uint32_t* at
        cdef int64_t k
        seq_fork(&self.seqs, &self.blocks, parent, <int32_t>count, children)
        if self.record.data != NULL:
            at = record_begin(&self.record, OP_FORK, 2 + count)
            if at != NULL:
                at = put(put(at, parent), count)
                for k in range(count):
                    at[k] = slot_of(children[k])
                at += count
            record_end(&self.record, at, self.blocks.digest)

    def truncate(self, handles, lens):
        """Shorten sequences; blocks beyond the new length are released, youngest first, reserved ones too.

        Parameters
        ----------
        handles : int or ints
            Open sequences, int64, shape ``(n,)``, no duplicates.
        lens : int or ints
            New lengths in tokens as `num_tokens` counts them, int32 or int64, shape ``(n,)``; each
            ``0 <= len <= num_tokens``.

        Raises
        ------
        PlanStateError
            A sequence is a row of a pending plan. State unchanged.
        ValueError
            A length is negative or above the current one, or below the length at which tokens were evicted last;
            the shapes differ. State unchanged.
        """
        cdef Ints batch, lengths
        self.enter("truncate")
        batch.held = lengths.held = False
        batch.owned = lengths.owned = NULL
        try:
            ints_get(&batch, handles, "truncate", "handles", True, False)
            ints_get(&lengths, lens, "truncate", "lens", True, True)
            self.truncate_rows(&batch, &lengths)
        finally:
            ints_free(&batch)
            ints_free(&lengths)
            self.busy = False

    cdef int truncate_rows(self, Ints* batch, const Ints* lengths) except -1:
        cdef Seqs* s = &self.seqs
        cdef Blocks* b = &self.blocks
        cdef Py_ssize_t k
        cdef int64_t length
        cdef int32_t slot
        cdef Seq* q
        cdef SeqLife* life
        cdef uint32_t* word
        self.check_batch(batch, "truncate")
        if lengths.size >= 0 and lengths.size != batch.size:
            raise ValueError(f"[truncate] {lengths.size} lens for {batch.size} handles")
        for k in range(batch.size):
            slot = seq_find(s, ints_at(batch, k))
            q = &s.seq[slot]
            life = &s.life[slot]
            length = ints_at(lengths, k)
            if length < life.point or length > q.num_tokens + life.evicted:
                raise ValueError(f"[truncate] lens[{k}] is {length}, it must be in "
                                 f"{life.point} .. {q.num_tokens + life.evicted}")
            if b.newest_pending and q.last_step >= b.oldest_pending:
                raise PlanStateError(f"[truncate] handles[{k}] is a row of a pending plan "
                                     f"(step {q.last_step}); call done or rollback first")
        for k in range(batch.size):
            slot = seq_find(s, ints_at(batch, k))
            length = ints_at(lengths, k) - s.life[slot].evicted
            self.uncommit(slot, length)
            seq_truncate(s, b, slot, length)
        if self.record.data != NULL:
            word = record_begin(&self.record, OP_TRUNCATE, 2 * BATCH + batch.size + 2 * lengths.size)
            if word != NULL:
                word = put_ints(put_slots(word, batch), lengths)
            record_end(&self.record, word, b.digest)
        return 0

    def close(self, handles):
        """End sequences, in the order given; their blocks are released youngest first. Legal while a plan is pending.

        Raises
        ------
        StaleHandle, ForeignHandle
            A handle is not open in this pool. State unchanged.
        ValueError
            Duplicate handles. State unchanged.
        """
        cdef Ints batch
        self.enter("close")
        batch.held = False
        batch.owned = NULL
        try:
            ints_get(&batch, handles, "close", "handles", True, False)
            self.close_rows(&batch)
        finally:
            ints_free(&batch)
            self.busy = False

    cdef int close_rows(self, Ints* batch) except -1:
        cdef Py_ssize_t k
        self.check_batch(batch, "close")
        for k in range(batch.size):
            seq_close(&self.seqs, &self.blocks, seq_find(&self.seqs, ints_at(batch, k)))
        record_slots(&self.record, OP_CLOSE, batch, self.blocks.digest)
        return 0

    def close_finished(self, handles, mask):
        """Close the sequences whose mask byte is not zero; returns how many.

        Parameters
        ----------
        handles : ints
            int64, shape ``(n,)``, no duplicates.
        mask : buffer
            bool or uint8, shape ``(n,)``; read before anything is closed.

        Raises
        ------
        StaleHandle, ForeignHandle, ValueError, TypeError
            A handle is not open, duplicates, shapes that differ, another dtype. State unchanged.
        """
        cdef Ints batch
        cdef Py_ssize_t k
        cdef bytes done
        cdef object closed
        cdef uint32_t* word
        self.enter("close_finished")
        batch.held = False
        batch.owned = NULL
        try:
            ints_get(&batch, handles, "close_finished", "handles", False, False)
            done = get_mask(mask, batch.size)
            self.check_batch(&batch, "close_finished")
            closed = batch.size - done.count(b"\0")     # made before anything moves
            for k in range(batch.size):
                if done[k]:
                    seq_close(&self.seqs, &self.blocks, seq_find(&self.seqs, ints_at(&batch, k)))
            if self.record.data != NULL:
                word = record_begin(&self.record, CLOSE_FINISHED, BATCH + 2 + batch.size + batch.size // 4)
                if word != NULL:
                    word = put_bytes(put_slots(word, &batch), <char*>done, batch.size)
                record_end(&self.record, word, self.blocks.digest)
            return closed
        finally:
            ints_free(&batch)
            self.busy = False

    def defer_close(self, handle):
        """Ask for a sequence to be closed by the next public call. Never mutates: for finalizers.

        A handle that is dead by then is skipped, so it is safe to call for a sequence that was closed.
        """
        if self.blocks.block != NULL:
            self.deferred.append(to_int(handle, "defer_close", "handle", INT64_MIN, INT64_MAX))

    # -- reading

    def table(self, handle):
        """Block ids of a sequence in order, reserved ones included; int32 ``(blocks,)``, a copy."""
        cdef int32_t slot
        self.enter("table")
        try:
            slot = self.get_one(handle, "table")
            ids = new_int32(self.seqs.seq[slot].num_blocks)
            memcpy(array_data(ids), seq_table(&self.seqs, slot), self.seqs.seq[slot].num_blocks * sizeof(int32_t))
            return ids
        finally:
            self.busy = False

    def num_tokens(self, handle):
        """Length of a sequence in tokens, evicted ones included: the position of the next one. O(1)."""
        cdef int32_t slot
        self.enter("num_tokens")
        try:
            slot = self.get_one(handle, "num_tokens")
            return self.seqs.seq[slot].num_tokens + self.seqs.life[slot].evicted
        finally:
            self.busy = False

    def capacity(self, handle):
        """Tokens that the blocks of a sequence can hold. O(1)."""
        self.enter("capacity")
        try:
            return self.seqs.seq[self.get_one(handle, "capacity")].num_blocks * self.blocks.block_size
        finally:
            self.busy = False

    def is_open(self, handle):
        """Whether a handle names an open sequence of this pool. O(1)."""
        self.enter("is_open")
        try:
            return seq_find(&self.seqs, to_int(handle, "is_open", "handle", 0, INT64_MAX)) >= 0
        finally:
            self.busy = False

    def _set_generation(self, slot, generation):
        """For tests: the generation that the next sequence in a free slot gets."""
        cdef int64_t i = to_int(slot, "_set_generation", "slot", 0, self.seqs.max_seqs - 1)
        cdef int64_t value = to_int(generation, "_set_generation", "generation", 0, (<int64_t>1 << 32) - 1)
        if self.seqs.life[i].life != FREE_SLOT:
            raise ValueError(f"[_set_generation] slot {i} is not free")
        self.seqs.life[i].generation = <uint32_t>value
