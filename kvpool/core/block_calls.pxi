"""Block-level calls: alloc, incref, decref, free and the seam for an index of committed blocks.

Every call reads its arguments, takes the pool's lock, judges and moves in C, lets go of the lock, and only then
raises or makes its result: no Python object is made under the lock.
"""

cdef extern from *:
    """
    /* The arguments of a constructor may run Python code, which finds every object that the garbage collector tracks.
       What is half made is no such object. */
    static inline void kv_making(PyObject *object) {
        if (PyObject_IS_GC(object)) PyObject_GC_UnTrack(object);
    }
    static inline void kv_made(PyObject *object) {
        if (PyObject_IS_GC(object) && !PyObject_GC_IsTracked(object)) PyObject_GC_Track(object);
    }
    """
    void making "kv_making"(object made)
    void made "kv_made"(object made)


cdef int judge_ids(Blocks* b, Ints* ids, Verdict* v) noexcept nogil:
    """Block ids of a call: in range, not reserved, no duplicates. A scalar becomes a batch of one."""
    cdef Py_ssize_t k
    cdef int64_t i
    if ids.size < 0:
        ids.size = 1
    blocks_new_stamp(b)
    for k in range(ids.size):
        i = ints_at(ids, k)
        if i < 0 or i >= b.num_blocks:
            return refused(v, NO_SUCH_BLOCK, k, i, 0, b.num_blocks - 1, 0)
        if i < b.reserved:
            return refused(v, RESERVED_BLOCK, k, i, 0, b.reserved - 1, 0)
        if b.mark[i] == b.stamp:
            return refused(v, DUPLICATE_BLOCK, k, i, 0, 0, 0)
        b.mark[i] = b.stamp
    return OK


cdef class BlockPool:
    """Block-level calls, for engines that keep their own block tables. See `kvpool.Pool`."""

    def __cinit__(self, *args, **options):
        making(self)
        lock_init(&self.mutex)
        # This __cinit__ runs first and refuses wrong calls for all of them: errors of Cython would say __cinit__().
        num_blocks, block_size, _, _, reserved_blocks, *_, record, _ = _signatures.Pool(*args, **options)
        cdef Blocks* b = &self.all_blocks
        cdef int64_t size, n = to_int(num_blocks, "Pool", "num_blocks", 1, (<int64_t>1 << 31) - 1)
        b.block_size = to_int(block_size, "Pool", "block_size", 1, min((<int64_t>1 << 31) - 1, (<int64_t>1 << 62) // n))
        b.shift = (<object>b.block_size).bit_length() - 1 if b.block_size & (b.block_size - 1) == 0 else -1
        b.reserved = <int32_t>to_int(reserved_blocks, "Pool", "reserved_blocks", 0, n - 1)
        b.num_blocks = <int32_t>n
        b.next = <int32_t*>xcalloc(n, sizeof(int32_t))
        b.prev = <int32_t*>xcalloc(n, sizeof(int32_t))
        b.fence = <int64_t*>xcalloc(n, sizeof(int64_t))
        b.floor = <int32_t*>xcalloc(n, sizeof(int32_t))
        b.blank = <int32_t*>xcalloc(n, sizeof(int32_t))
        b.dropped = <int32_t*>xcalloc(n, sizeof(int32_t))
        b.mark = <uint32_t*>xcalloc(n, sizeof(uint32_t))
        b.block = <Block*>xcalloc(n, sizeof(Block))
        if (b.block == NULL or b.next == NULL or b.prev == NULL or b.fence == NULL or b.floor == NULL
                or b.blank == NULL or b.dropped == NULL or b.mark == NULL):
            BlockPool.release_memory(self)
            raise MemoryError(f"[Pool] no memory for {n} blocks, each needs 48 bytes")
        for n in range(b.reserved):
            b.block[n].place = RESERVED
        blocks_reset(b)
        size = to_int(record, "Pool", "record", 0, <int64_t>1 << 33)    # what fits has fewer than 2^30 words
        if 0 < size < 8:
            raise ValueError(f"[Pool] record is too small ({size} bytes), it must be 0 or in 8 .. {<int64_t>1 << 33}")
        self.record.half = size // 8
        if size:
            self.record.data = <uint32_t*>xmalloc(8 * self.record.half)
            if self.record.data == NULL:
                BlockPool.release_memory(self)
                raise MemoryError(f"[Pool] no memory for a record of {record} bytes")

    def __dealloc__(self):
        BlockPool.release_memory(self)
        spare_free(&self.spare)
        lock_free(&self.mutex)

    cdef void release_memory(self) noexcept nogil:
        cdef Blocks* b = &self.all_blocks
        xfree(b.block)
        xfree(b.next)
        xfree(b.prev)
        xfree(b.fence)
        xfree(b.floor)
        xfree(b.blank)
        xfree(b.dropped)
        xfree(b.mark)
        xfree(b.canonical)
        memset(b, 0, sizeof(Blocks))
        xfree(self.record.data)
        memset(&self.record, 0, sizeof(Record))

    def __reduce__(self):
        raise TypeError("[Pool] a pool cannot be pickled or copied")

    cdef int lock(self, str call) except -1:
        """Take the pool: no Python code may run from here to `unlock`. What earlier calls left to do is done first."""
        self.lock_open_or_not(call)
        if self.all_blocks.block == NULL:
            self.unlock()
            raise PoolClosed(f"[{call}] the pool was shut down")
        self.catch_up()
        return 0

    cdef int lock_open_or_not(self, str call) except -1:
        """The lock alone, also of a pool that was shut down."""
        if not lock_try(&self.mutex) and not lock_wait(&self.mutex):
            raise ConcurrentUse(f"[{call}] this thread is inside another call on the pool")
        return 0

    cdef void unlock(self) noexcept nogil:
        lock_release(&self.mutex)

    cdef void catch_up(self) noexcept nogil:
        """For the layers above."""

    def alloc(self, n=None, *, out=None):
        """Take blank blocks, or evict cached ones; each comes with one raw reference.

        Parameters
        ----------
        n : int, optional
            How many blocks. Without it one block is taken and its id returned as an int.
        out : ndarray, int32, shape ``(>= n,)``, optional
            Where the ids go; saves the allocation of an array.

        Returns
        -------
        int, or ndarray int32 of shape ``(n,)``, or `out`

        Raises
        ------
        OutOfBlocks
            Fewer than `n` blocks are free or evictable. State unchanged.

        Notes
        -----
        O(n), no Python object per block.
        """
        cdef int64_t count = 1
        cdef object found           # an int: Cython would keep a C integer, and make the object at the end
        cdef int32_t one, next_one
        cdef int32_t* data
        cdef Verdict v
        cdef int status = RETRY
        if n is not None:
            count = to_int(n, "alloc", "n", 0, INT64_MAX)
        if out is not None:
            return self.alloc_into(out, count)
        if n is not None:
            # More blocks than there are will be refused: no array for them.
            ids = new_int32(count if count <= self.all_blocks.num_blocks else 0)
            data = <int32_t*>array_data(ids)
            self.lock("alloc")
            status = self.alloc_raw(data, count, &v)
            self.unlock()
            if status != OK:
                refuse("alloc", &v)
            return ids
        while status == RETRY:
            self.lock("alloc")
            next_one = self.next_block()
            self.unlock()
            found = next_one            # made before anything moves
            self.lock("alloc")
            status = RETRY if self.next_block() != next_one else self.alloc_raw(&one, 1, &v)
            self.unlock()
        if status != OK:
            refuse("alloc", &v)
        return found

    cdef int32_t next_block(self) noexcept nogil:
        """The block that will be taken next; -1: there is none."""
        cdef Blocks* b = &self.all_blocks
        return b.blank[b.num_blank - 1] if b.num_blank else b.lru.head

    cdef object alloc_into(self, object out, int64_t count):
        """The ids go to the caller's array, once they are taken: nothing can fail then."""
        cdef Py_buffer view
        cdef Ints made
        cdef Verdict v
        cdef int32_t* ids
        cdef int status
        if not PyObject_CheckBuffer(out):
            raise TypeError(f"[alloc] out must be an int32 array, not {type(out).__name__}")
        PyObject_GetBuffer(out, &view, PyBUF_STRIDES | PyBUF_FORMAT)
        ints_init(&made, &self.spare)
        try:
            buffer_judge(&view, "alloc", "out", True)
            if view.itemsize != 4:
                raise TypeError("[alloc] out must be an int32 array")
            if view.readonly:
                raise ValueError("[alloc] out is read-only")
            if view.shape[0] < count:
                raise ValueError(f"[alloc] out is too small ({view.shape[0]}), it must hold {count} ids")
            ids = <int32_t*>ints_room(&made, count, 4, "alloc", "ids")
            self.lock("alloc")
            status = self.alloc_raw(ids, count, &v)
            self.unlock()
            if status != OK:
                refuse("alloc", &v)
            memcpy(view.buf, ids, count * sizeof(int32_t))
        finally:
            ints_free(&made)
            PyBuffer_Release(&view)
        return out

    cdef int alloc_raw(self, int32_t* ids, int64_t count, Verdict* v) noexcept nogil:
        cdef Blocks* b = &self.all_blocks
        cdef int64_t k, available = blocks_available(b)
        cdef uint32_t* at
        cdef uint64_t h
        if count > available:
            return blocks_short(b, v, -1, -1, count, count - available)
        h = mix(mix(b.digest, OP_ALLOC), count)
        blocks_take_many(b, ids, <int32_t>count)
        for k in range(count):
            b.block[ids[k]].raw = 1
            h = mix(h, ids[k])
        b.digest = h
        if self.record.data != NULL:
            at = record_begin(&self.record, OP_ALLOC, count + BATCH)
            record_end(&self.record, put_words(at, ids, count) if at != NULL else NULL, h)
        return OK

    def incref(self, ids):
        """Add one raw reference to each block.

        Parameters
        ----------
        ids : int or ints
            Block ids, shape ``(n,)``; blocks somebody refers to, no duplicates.

        Raises
        ------
        DoubleFree
            A block has no reference: it is free, evictable or in limbo. State unchanged.
        IndexError, ValueError, OverflowError
            No such block; reserved or duplicate; the count is at its limit of 2^30. State unchanged.
        """
        cdef Ints batch
        cdef Verdict v
        cdef int status
        ints_init(&batch, &self.spare)
        try:
            ints_get(&batch, ids, "incref", "ids", True, True, IndexError)
            self.lock("incref")
            status = self.incref_ids(&batch, &v)
            self.unlock()
        finally:
            ints_free(&batch)
        if status != OK:
            refuse("incref", &v)

    cdef int incref_ids(self, Ints* ids, Verdict* v) noexcept nogil:
        cdef Blocks* b = &self.all_blocks
        cdef Py_ssize_t k
        cdef int64_t i
        cdef int status = judge_ids(b, ids, v)
        if status != OK:
            return status
        for k in range(ids.size):
            i = ints_at(ids, k)
            if b.block[i].refcount == 0:
                return refused(v, UNREFERENCED, k, i, 0, 0, 0)
            if b.block[i].refcount >= MAX_REFCOUNT:
                return refused(v, REFERENCE_LIMIT, k, i, 0, 0, b.block[i].refcount)
        b.digest = mix(mix(b.digest, OP_INCREF), ids.size)
        for k in range(ids.size):
            i = ints_at(ids, k)
            blocks_ref(b, <int32_t>i, 1)
            b.block[i].raw += 1
            b.digest = mix(b.digest, i)
        record_blocks(&self.record, OP_INCREF, ids, b.digest)
        return OK

    def decref(self, ids):
        """Drop one raw reference of each block, in the order given; the last reference releases the block.

        Raises
        ------
        DoubleFree
            A block has no raw reference (a sequence's reference is never taken away). State unchanged.
        IndexError, ValueError
            No such block; reserved or duplicate. State unchanged.
        """
        self.drop(ids, "decref", False)

    def free(self, ids):
        """Give back blocks of which the caller holds the only reference.

        Raises
        ------
        DoubleFree
            A block has no raw reference. State unchanged.
        ValueError
            Somebody else refers to a block too (use `decref`); reserved or duplicate ids. State unchanged.
        IndexError
            No such block. State unchanged.
        """
        self.drop(ids, "free", True)

    cdef int drop(self, object ids, str call, bint last) except -1:
        cdef Ints batch
        cdef Verdict v
        cdef int status
        ints_init(&batch, &self.spare)
        try:
            ints_get(&batch, ids, call, "ids", True, True, IndexError)
            self.lock(call)
            status = self.drop_ids(&batch, last, &v)
            self.unlock()
        finally:
            ints_free(&batch)
        if status != OK:
            refuse(call, &v)
        return 0

    cdef int drop_ids(self, Ints* ids, bint last, Verdict* v) noexcept nogil:
        cdef Blocks* b = &self.all_blocks
        cdef Py_ssize_t k
        cdef int32_t i
        cdef uint64_t h
        cdef int status = judge_ids(b, ids, v)
        if status != OK:
            return status
        for k in range(ids.size):
            i = <int32_t>ints_at(ids, k)
            if b.block[i].raw == 0:
                return refused(v, NO_RAW_REFERENCE, k, i, 0, 0, b.block[i].refcount)
            if last and b.block[i].refcount > 1:
                return refused(v, STILL_SHARED, k, i, 0, 0, b.block[i].refcount)
        h = mix(mix(b.digest, OP_FREE if last else OP_DECREF), ids.size)
        for k in range(ids.size):
            i = <int32_t>ints_at(ids, k)
            b.block[i].raw -= 1
            blocks_unref(b, i)
            h = mix(h, i)
        b.digest = h
        record_blocks(&self.record, OP_FREE if last else OP_DECREF, ids, h)
        return OK

    def mark_committed(self, ids):
        """Declare the content of blocks final: they are never written again, and stay cached when released.

        Raises
        ------
        DoubleFree
            A block has no reference. State unchanged.
        ValueError
            A block's former content was dropped and `take_dropped` has not told so yet; reserved or duplicate
            ids. State unchanged.
        IndexError
            No such block. State unchanged.
        """
        cdef Ints batch
        cdef Verdict v
        cdef int status
        ints_init(&batch, &self.spare)
        try:
            ints_get(&batch, ids, "mark_committed", "ids", True, True, IndexError)
            self.lock("mark_committed")
            status = self.mark_committed_ids(&batch, &v)
            self.unlock()
        finally:
            ints_free(&batch)
        if status != OK:
            refuse("mark_committed", &v)

    cdef int mark_committed_ids(self, Ints* ids, Verdict* v) noexcept nogil:
        cdef Blocks* b = &self.all_blocks
        cdef Py_ssize_t k
        cdef int64_t i
        cdef int status
        if self.indexed:
            return refused(v, INDEXED, -1, 0, 0, 0, 0)
        status = judge_ids(b, ids, v)
        if status != OK:
            return status
        for k in range(ids.size):
            i = ints_at(ids, k)
            if b.block[i].refcount == 0:
                return refused(v, UNREFERENCED, k, i, 0, 0, 0)
            if b.block[i].noted:
                return refused(v, NOT_DRAINED, k, i, 0, 0, 0)
        b.digest = mix(mix(b.digest, OP_COMMIT), ids.size)
        for k in range(ids.size):
            b.block[ints_at(ids, k)].committed = CANONICAL
            b.digest = mix(b.digest, ints_at(ids, k))
        record_blocks(&self.record, OP_COMMIT, ids, b.digest)
        return OK

    def revive(self, ids):
        """A cache hit: add one raw reference to committed blocks, wherever they are.

        A block in use gains a reference; one on the LRU list or in limbo is unlinked, O(1), its content intact.

        Raises
        ------
        ValueError
            A block is not committed; reserved or duplicate ids. State unchanged.
        IndexError
            No such block. State unchanged.
        OverflowError
            The count is at its limit of 2^30. State unchanged.
        """
        cdef Ints batch
        cdef Verdict v
        cdef int status
        ints_init(&batch, &self.spare)
        try:
            ints_get(&batch, ids, "revive", "ids", True, True, IndexError)
            self.lock("revive")
            status = self.revive_ids(&batch, &v)
            self.unlock()
        finally:
            ints_free(&batch)
        if status != OK:
            refuse("revive", &v)

    cdef int revive_ids(self, Ints* ids, Verdict* v) noexcept nogil:
        cdef Blocks* b = &self.all_blocks
        cdef Py_ssize_t k
        cdef int64_t i
        cdef int status
        if self.indexed:
            return refused(v, INDEXED, -1, 0, 0, 0, 0)
        status = judge_ids(b, ids, v)
        if status != OK:
            return status
        for k in range(ids.size):
            i = ints_at(ids, k)
            if not b.block[i].committed:
                return refused(v, NOT_COMMITTED, k, i, 0, 0, 0)
            if b.block[i].refcount >= MAX_REFCOUNT:
                return refused(v, REFERENCE_LIMIT, k, i, 0, 0, b.block[i].refcount)
        b.digest = mix(mix(b.digest, OP_REVIVE), ids.size)
        for k in range(ids.size):
            blocks_revive(b, <int32_t>ints_at(ids, k))
            b.digest = mix(b.digest, ints_at(ids, k))
        record_blocks(&self.record, OP_REVIVE, ids, b.digest)
        return OK

    def evict(self, n):
        """Clear the `n` oldest evictable blocks, or all if there are fewer. Returns how many. O(n)."""
        cdef int64_t asked = to_int(n, "evict", "n", 0, INT64_MAX), count = -1
        cdef object evicted
        cdef int status = RETRY
        while status == RETRY:
            evicted = count                 # made before anything moves
            self.lock("evict")
            if count == min(asked, <int64_t>self.all_blocks.lru.size):
                self.evict_oldest(count)
                status = OK
            count = min(asked, <int64_t>self.all_blocks.lru.size)
            self.unlock()
        return evicted

    cdef void evict_oldest(self, int64_t count) noexcept nogil:
        cdef Blocks* b = &self.all_blocks
        cdef int64_t k
        b.digest = mix(mix(b.digest, OP_EVICT), count)
        for k in range(count):
            b.digest = mix(b.digest, blocks_evict(b))
        record_one(&self.record, OP_EVICT, count, b.digest)

    def take_dropped(self):
        """Ids of committed blocks whose content was given up since the last call, oldest first; int32 ``(n,)``.

        An index of committed blocks must forget these before it commits them again.
        """
        cdef int32_t count = 0
        cdef int32_t* data
        cdef Verdict v
        cdef int status = RETRY
        while status == RETRY:
            ids = new_int32(count)
            data = <int32_t*>array_data(ids)
            self.lock("take_dropped")
            status = self.drain_dropped(data, count, &v)
            count = self.all_blocks.num_dropped
            self.unlock()
        if status != OK:
            refuse("take_dropped", &v)
        return ids

    cdef int drain_dropped(self, int32_t* ids, int32_t count, Verdict* v) noexcept nogil:
        """RETRY: there are not `count` of them."""
        cdef Blocks* b = &self.all_blocks
        cdef int32_t k
        if self.indexed:
            return refused(v, INDEXED, -1, 0, 0, 0, 0)
        if count != b.num_dropped:
            return RETRY
        b.digest = mix(mix(b.digest, OP_DRAIN), b.num_dropped)
        for k in range(count):
            ids[k] = b.dropped[k]
            b.block[ids[k]].noted = 0
        b.num_dropped = 0
        record_one(&self.record, OP_DRAIN, count, b.digest)
        return OK

    def _recorded(self):
        """(bytes of the record, calls in it, calls that it lost); see `kvpool.replay.calls`."""
        cdef Record* r = &self.record
        cdef int64_t size = 0, found = -1, older, calls = 0, lost = 0
        cdef char* data
        while found != size:
            size = max(found, 0)
            made = PyBytes_FromStringAndSize(NULL, size)
            data = PyBytes_AS_STRING(made)
            self.lock("_recorded")
            found = 4 * (r.size[0] + r.size[1])
            if found == size and r.data != NULL:
                older = 4 * r.size[r.active ^ 1]
                memcpy(data, r.data + (r.active ^ 1) * r.half, older)
                memcpy(data + older, r.data + r.active * r.half, size - older)
                calls, lost = r.calls[0] + r.calls[1], r.lost
            self.unlock()
        return made, calls, lost

    def _set_digest(self, digest):
        """For replays that begin at a reset."""
        self.all_blocks.digest = digest

    def refcount(self, block):
        """References on one block: table entries of sequences plus raw ones. O(1)."""
        cdef int64_t i = to_int(block, "refcount", "block", INT64_MIN, INT64_MAX, IndexError)
        cdef int32_t count = 0
        self.lock("refcount")
        if 0 <= i < self.all_blocks.num_blocks:
            count = self.all_blocks.block[i].refcount
        self.unlock()
        if i < 0 or i >= self.all_blocks.num_blocks:
            raise IndexError(f"[refcount] no such block ({i}), ids are 0 .. {self.all_blocks.num_blocks - 1}")
        if i < self.all_blocks.reserved:
            raise ValueError(f"[refcount] block {i} is reserved, reserved are 0 .. {self.all_blocks.reserved - 1}")
        return count

    def refcount_histogram(self):
        """How many unreserved blocks have 0, 1, 2, ... references; int64 ``(max refcount + 1,)``. O(num_blocks)."""
        cdef int64_t size = 0, found = -1
        cdef int64_t* data
        while found != size:
            size = max(found, 0)
            counts = new_int64(size)
            data = <int64_t*>array_data(counts)
            self.lock("refcount_histogram")
            found = self.count_references(data, size)
            self.unlock()
        return counts

    cdef int64_t count_references(self, int64_t* counts, int64_t size) noexcept nogil:
        """Entries that the histogram has; it is filled if `size` is that."""
        cdef Blocks* b = &self.all_blocks
        cdef int32_t i, most = 0
        for i in range(b.reserved, b.num_blocks):
            most = max(most, b.block[i].refcount)
        if size == <int64_t>most + 1:
            memset(counts, 0, size * sizeof(int64_t))
            for i in range(b.reserved, b.num_blocks):
                counts[b.block[i].refcount] += 1
        return <int64_t>most + 1
