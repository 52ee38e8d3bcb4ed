"""Sequences over blocks: open, fork, truncate, close, and handles that cannot be confused.

A fork is metadata: it copies the block table and adds a reference per block. What a write to a shared block
means is decided in `_step`, when the write is planned.
"""
from libc.stdint cimport INT64_MAX, INT64_MIN, int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from kvpool._args cimport Ints, array_data, ints_at, ints_free, ints_get, new_array, to_int
from kvpool._block_calls cimport BlockPool
from kvpool._blocks cimport (
    Blocks,
    blocks_available,
    blocks_ref_many,
    blocks_take_many,
    blocks_unref_many,
    whole_blocks,
)
from kvpool._types cimport mix

from kvpool.errors import CapacityExceeded, ForeignHandle, OutOfBlocks, OutOfSequences, PlanStateError, StaleHandle

cdef enum:                   # continues the words of kvpool._block_calls
    OP_OPEN = 16
    OP_FORK
    OP_TRUNCATE
    OP_CLOSE

cdef uint64_t GENERATIONS = 1ULL << 32

_live_tags = set()              # tags of live pools in this process


cdef int64_t take_tag() except -1:
    cdef int64_t tag
    for tag in range(1, MAX_TAG + 1):
        if tag not in _live_tags:
            _live_tags.add(tag)
            return tag
    raise ValueError(f"[Pool] {MAX_TAG} pools are alive in this process, the limit")


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


# ---- one sequence ------------------------------------------------------------------------------------------

cdef void seq_refresh(const Seqs* s, const Blocks* b, int32_t slot) noexcept nogil:
    """Recompute where the next token of a sequence goes."""
    cdef Seq* q = &s.seq[slot]
    cdef int64_t index = whole_blocks(b, q.num_tokens)
    if index < q.num_blocks:
        q.tail = seq_table(s, slot)[index]
        q.stop_slot = (q.tail + <int64_t>1) * b.block_size
        q.next_slot = q.stop_slot - (index + 1) * b.block_size + q.num_tokens
    else:
        q.next_slot = q.stop_slot = 0


cdef int32_t seq_new(Seqs* s) noexcept nogil:
    """Open the oldest free slot. The caller has checked that there is one."""
    cdef int32_t slot = s.free_slot[s.first_free]
    cdef Seq* q = &s.seq[slot]
    s.first_free = s.first_free + 1 if s.first_free + 1 < s.max_seqs else 0
    s.num_free_slots -= 1
    s.num_open += 1
    s.life[slot].life = OPEN
    s.life[slot].fork_step = 0
    q.handle = (s.tag << TAG_SHIFT) | (<int64_t>s.life[slot].generation << SLOT_BITS) | slot
    q.num_tokens = q.next_slot = q.stop_slot = 0
    q.num_blocks = 0
    q.epoch = 0
    q.last_step = 0
    seq_new_version(s, q)
    return slot


cdef void seq_retire_handle(Seqs* s, int32_t slot) noexcept nogil:
    """Make the slot's handle stale and the slot free, or retired after its last generation."""
    cdef SeqLife* life = &s.life[slot]
    cdef int32_t end
    s.num_open -= 1
    s.seq[slot].handle = -1
    if <uint64_t>life.generation + 1 == GENERATIONS:
        life.life = RETIRED
        return
    life.generation += 1
    life.life = FREE_SLOT
    end = s.first_free + s.num_free_slots
    s.free_slot[end if end < s.max_seqs else end - s.max_seqs] = slot
    s.num_free_slots += 1


cdef void seq_close(Seqs* s, Blocks* b, int32_t slot) noexcept nogil:
    """Release every block, youngest first. O(blocks)."""
    cdef Seq* q = &s.seq[slot]
    blocks_unref_many(b, seq_table(s, slot), q.num_blocks)
    s.sum_tokens -= q.num_tokens
    s.sum_blocks -= q.num_blocks
    b.digest = mix(mix(b.digest, OP_CLOSE), untagged(s.seq[slot].handle))
    seq_retire_handle(s, slot)


cdef void seq_truncate(Seqs* s, Blocks* b, int32_t slot, int64_t length) noexcept nogil:
    cdef Seq* q = &s.seq[slot]
    cdef int32_t keep = <int32_t>whole_blocks(b, length + b.block_size - 1)
    if keep < q.num_blocks:
        blocks_unref_many(b, seq_table(s, slot) + keep, q.num_blocks - keep)
        s.sum_blocks -= q.num_blocks - keep
        q.num_blocks = keep
        q.epoch += 1
        seq_new_version(s, q)
    s.sum_tokens -= q.num_tokens - length
    q.num_tokens = length
    seq_refresh(s, b, slot)
    b.digest = mix(mix(mix(b.digest, OP_TRUNCATE), untagged(s.seq[slot].handle)), length)


cdef void seq_fork(Seqs* s, Blocks* b, int32_t parent, int32_t child) noexcept nogil:
    """Give a new sequence the parent's filled blocks; the references were added by the caller."""
    cdef Seq* p = &s.seq[parent]
    cdef Seq* q = &s.seq[child]
    cdef int64_t inherited = max(p.last_step, s.life[parent].fork_step)
    q.num_tokens = p.num_tokens
    q.num_blocks = <int32_t>whole_blocks(b, p.num_tokens + b.block_size - 1)
    memcpy(seq_table(s, child), seq_table(s, parent), q.num_blocks * sizeof(int32_t))
    if b.newest_pending and inherited >= b.oldest_pending:
        s.life[child].fork_step = inherited
    s.sum_tokens += q.num_tokens
    s.sum_blocks += q.num_blocks
    seq_refresh(s, b, child)


cdef void seqs_reset(Seqs* s) noexcept nogil:
    """Make every handle stale; slots are free in ascending order, as in a new pool."""
    cdef int32_t slot
    for slot in range(s.max_seqs):
        if s.life[slot].life == OPEN:
            seq_retire_handle(s, slot)
    s.first_free = s.num_free_slots = s.num_open = 0
    s.sum_tokens = s.sum_blocks = 0
    for slot in range(s.max_seqs):
        if s.life[slot].life == FREE_SLOT:
            s.free_slot[s.num_free_slots] = slot
            s.num_free_slots += 1


# ---- audit -------------------------------------------------------------------------------------------------

cdef uint64_t seqs_fingerprint(const Seqs* s, const Blocks* b, uint64_t h, int64_t next_step) noexcept nogil:
    """Hash of everything about sequences that a later call can see."""
    cdef int32_t slot, k
    cdef const Seq* q
    h = mix(mix(mix(h, s.max_seqs), s.max_blocks), s.watermark)
    for k in range(s.num_free_slots):
        slot = (s.first_free + k) % s.max_seqs
        h = mix(h, s.free_slot[slot])
    for slot in range(s.max_seqs):
        q = &s.seq[slot]
        h = mix(h, (<uint64_t>s.life[slot].generation << 2) | s.life[slot].life)
        if s.life[slot].life != OPEN:
            continue
        h = mix(mix(mix(h, q.num_tokens), q.num_blocks), q.epoch)
        if b.newest_pending and q.last_step >= b.oldest_pending:
            h = mix(h, next_step - q.last_step)
        if b.newest_pending and s.life[slot].fork_step >= b.oldest_pending:
            h = mix(h, ~(next_step - s.life[slot].fork_step))
        for k in range(q.num_blocks):
            h = mix(h, seq_table(s, slot)[k])
    return h


cdef str seqs_check(const Seqs* s, const Blocks* b):
    """The first invariant that does not hold, in words, or None. O(sum of table lengths + num_blocks)."""
    cdef int32_t slot, k, num_open = 0, retired = 0
    cdef int64_t tokens = 0, blocks = 0
    cdef const Seq* q
    cdef dict references = {}
    for slot in range(s.max_seqs):
        q = &s.seq[slot]
        num_open += s.life[slot].life == OPEN
        retired += s.life[slot].life == RETIRED
        if (s.life[slot].life == OPEN) != (q.handle >= 0):
            return f"slot {slot} has life {s.life[slot].life} and handle {q.handle}"
        if s.life[slot].life != OPEN:
            continue
        if q.num_tokens < 0 or q.num_tokens > q.num_blocks * b.block_size or q.num_blocks > s.max_blocks:
            return f"sequence in slot {slot} has {q.num_tokens} tokens in {q.num_blocks} blocks"
        if q.next_slot < q.stop_slot and q.next_slot != (seq_table(s, slot)[q.num_tokens // b.block_size] * b.block_size
                                      + q.num_tokens % b.block_size):
            return f"sequence in slot {slot} would write its next token to slot {q.next_slot}"
        tokens += q.num_tokens
        blocks += q.num_blocks
        for k in range(q.num_blocks):
            block = seq_table(s, slot)[k]
            if block < b.reserved or block >= b.num_blocks:
                return f"sequence in slot {slot} has block {block} in its table"
            references[block] = references.get(block, 0) + 1
    for k in range(b.reserved, b.num_blocks):
        if b.block[k].refcount != references.get(k, 0) + b.block[k].raw:
            return (f"block {k} has refcount {b.block[k].refcount}, tables name it {references.get(k, 0)} times "
                    f"and raw references are {b.block[k].raw}")
    if tokens != s.sum_tokens or blocks != s.sum_blocks:
        return f"counted {tokens} tokens in {blocks} blocks, the counters say {s.sum_tokens} and {s.sum_blocks}"
    free_slots = {s.free_slot[(s.first_free + k) % s.max_seqs] for k in range(s.num_free_slots)}
    if len(free_slots) != s.num_free_slots or num_open != s.num_open:
        return f"{num_open} sequences are open, the counter says {s.num_open}"
    if any(s.life[slot].life != FREE_SLOT for slot in free_slots):
        return "a slot that is not free is on the list of free slots"
    if num_open + retired + s.num_free_slots != s.max_seqs:
        return f"{num_open} open, {retired} retired and {s.num_free_slots} free slots of {s.max_seqs}"
    return None


# ---- the Python face ---------------------------------------------------------------------------------------

cdef class SequencePool(BlockPool):
    """Sequences on top of blocks. See `kvpool.Pool`."""

    def __cinit__(self, num_blocks, block_size, *, max_seqs=1024, max_blocks_per_seq=None, reserved_blocks=1,
                  watermark=0, in_order=False, seed=None):
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
        s.memory = calloc(s.max_seqs + 1, sizeof(Seq))
        s.life = <SeqLife*>calloc(s.max_seqs, sizeof(SeqLife))
        s.table = <int32_t*>calloc(s.max_seqs, s.max_blocks * sizeof(int32_t))
        s.free_slot = <int32_t*>calloc(s.max_seqs, sizeof(int32_t))
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
        if s.tag:
            _live_tags.discard(s.tag)
        free(s.memory)
        free(s.life)
        free(s.table)
        free(s.free_slot)
        memset(s, 0, sizeof(Seqs))
        BlockPool.release_memory(self)

    cdef int enter(self, str call) except -1:
        BlockPool.enter(self, call)
        if self.deferred:
            self.drain()
        return 0

    cdef void drain(self):
        """Close what finalizers left behind; a handle that is dead already is skipped."""
        cdef int32_t slot
        while self.deferred:
            slot = seq_find(&self.seqs, self.deferred.pop(0))
            if slot >= 0:
                seq_close(&self.seqs, &self.blocks, slot)

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

    cdef int get_batch(self, Ints* batch, object handles, str call, bint scalar) except -1:
        """Handles of a call: live, no duplicates. A scalar becomes a batch of one."""
        cdef Seqs* s = &self.seqs
        cdef Py_ssize_t k
        cdef int32_t slot
        ints_get(batch, handles, call, "handles", scalar, False)
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

    cdef void next_stamp(self) noexcept:
        cdef Seqs* s = &self.seqs
        cdef int32_t slot
        s.stamp += 1
        if s.stamp == 0:
            for slot in range(s.max_seqs):
                s.seq[slot].mark = 0
            s.stamp = 1

    # -- verbs

    def open(self, num_tokens=0):
        """A new sequence of length 0, with blocks reserved for its first tokens.

        Parameters
        ----------
        num_tokens : int, default 0
            Tokens to reserve blocks for.

        Returns
        -------
        int
            The handle.

        Raises
        ------
        OutOfBlocks
            The blocks would leave fewer than `watermark` free or evictable. State unchanged.
        OutOfSequences
            `max_seqs` sequences are open. State unchanged.
        CapacityExceeded
            More tokens than a sequence may have. State unchanged.
        """
        cdef Seqs* s = &self.seqs
        cdef Blocks* b = &self.blocks
        cdef int64_t tokens, need
        cdef int32_t slot
        self.enter("open")
        try:
            tokens = to_int(num_tokens, "open", "num_tokens", 0, INT64_MAX)
            if tokens > s.max_blocks * b.block_size:
                raise CapacityExceeded(f"[open] {tokens} tokens, a sequence has at most {s.max_blocks * b.block_size}")
            need = whole_blocks(b, tokens + b.block_size - 1)
            if need and need + s.watermark > blocks_available(b):
                raise OutOfBlocks(
                    f"[open] {need} blocks for {tokens} tokens, {b.num_blank} free and {b.lru.size} evictable, "
                    f"watermark {s.watermark}", needed=need, short_by=need + s.watermark - blocks_available(b),
                    free=b.num_blank, evictable=b.lru.size, limbo=b.limbo.size)
            if s.num_free_slots == 0:
                raise OutOfSequences(f"[open] {s.num_open} sequences are open, the limit is {s.max_seqs}")
            slot = seq_new(s)
            blocks_take_many(b, seq_table(s, slot), <int32_t>need)
            s.seq[slot].num_blocks = <int32_t>need
            s.sum_blocks += need
            seq_refresh(s, b, slot)
            b.digest = mix(mix(mix(b.digest, OP_OPEN), need), untagged(s.seq[slot].handle))
            return s.seq[slot].handle
        finally:
            self.busy = False

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
        cdef Seqs* s = &self.seqs
        cdef Blocks* b = &self.blocks
        cdef int32_t parent, child, shared
        cdef int64_t count, k
        cdef int64_t* data
        cdef uint64_t h
        self.enter("fork")
        try:
            parent = self.get_one(handle, "fork")
            count = to_int(n, "fork", "n", 0, INT64_MAX)
            if count > s.num_free_slots:
                raise OutOfSequences(f"[fork] {count} children asked for, {s.num_open} sequences are open, "
                                     f"the limit is {s.max_seqs}")
            children = new_array(count, "int64")
            data = <int64_t*>array_data(children)
            shared = <int32_t>whole_blocks(b, s.seq[parent].num_tokens + b.block_size - 1)
            h = mix(mix(mix(b.digest, OP_FORK), untagged(s.seq[parent].handle)), count)
            if count:
                blocks_ref_many(b, seq_table(s, parent), shared, <int32_t>count)
            for k in range(count):
                child = seq_new(s)
                seq_fork(s, b, parent, child)
                data[k] = s.seq[child].handle
                h = mix(h, untagged(data[k]))
            b.digest = h
            return children
        finally:
            self.busy = False

    def truncate(self, handles, lens):
        """Shorten sequences; blocks beyond the new length are released, youngest first, reserved ones too.

        Parameters
        ----------
        handles : int or ints
            Open sequences, int64, shape ``(n,)``, no duplicates.
        lens : int or ints
            New lengths in tokens, int32 or int64, shape ``(n,)``; each ``0 <= len <= num_tokens``.

        Raises
        ------
        PlanStateError
            A sequence is a row of a pending plan. State unchanged.
        ValueError
            A length is negative or above the current one, or the shapes differ. State unchanged.
        """
        cdef Seqs* s = &self.seqs
        cdef Blocks* b = &self.blocks
        cdef Ints batch, lengths
        cdef Py_ssize_t k
        cdef int64_t length
        cdef Seq* q
        self.enter("truncate")
        batch.held = lengths.held = False
        batch.owned = lengths.owned = NULL
        try:
            self.get_batch(&batch, handles, "truncate", True)
            ints_get(&lengths, lens, "truncate", "lens", True, True)
            if lengths.size >= 0 and lengths.size != batch.size:
                raise ValueError(f"[truncate] {lengths.size} lens for {batch.size} handles")
            for k in range(batch.size):
                q = &s.seq[seq_find(s, ints_at(&batch, k))]
                length = ints_at(&lengths, k)
                if length < 0 or length > q.num_tokens:
                    raise ValueError(f"[truncate] lens[{k}] is {length}, it must be in 0 .. {q.num_tokens}")
                if b.newest_pending and q.last_step >= b.oldest_pending:
                    raise PlanStateError(f"[truncate] handles[{k}] is a row of a pending plan "
                                         f"(step {q.last_step}); call done or rollback first")
            for k in range(batch.size):
                seq_truncate(s, b, seq_find(s, ints_at(&batch, k)), ints_at(&lengths, k))
        finally:
            ints_free(&batch)
            ints_free(&lengths)
            self.busy = False

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
        cdef Py_ssize_t k
        self.enter("close")
        batch.held = False
        batch.owned = NULL
        try:
            self.get_batch(&batch, handles, "close", True)
            for k in range(batch.size):
                seq_close(&self.seqs, &self.blocks, seq_find(&self.seqs, ints_at(&batch, k)))
        finally:
            ints_free(&batch)
            self.busy = False

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
        cdef int closed = 0
        self.enter("close_finished")
        batch.held = False
        batch.owned = NULL
        try:
            self.get_batch(&batch, handles, "close_finished", False)
            done = get_mask(mask, batch.size)
            for k in range(batch.size):
                if done[k]:
                    seq_close(&self.seqs, &self.blocks, seq_find(&self.seqs, ints_at(&batch, k)))
                    closed += 1
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
            ids = new_array(self.seqs.seq[slot].num_blocks, "int32")
            memcpy(array_data(ids), seq_table(&self.seqs, slot), self.seqs.seq[slot].num_blocks * sizeof(int32_t))
            return ids
        finally:
            self.busy = False

    def num_tokens(self, handle):
        """Length of a sequence in tokens. O(1)."""
        self.enter("num_tokens")
        try:
            return self.seqs.seq[self.get_one(handle, "num_tokens")].num_tokens
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
