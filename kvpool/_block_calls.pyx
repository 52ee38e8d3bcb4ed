"""Block-level calls: alloc, incref, decref, free and the seam for an index of committed blocks."""
from libc.stdint cimport INT64_MAX, INT64_MIN, int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memset

from kvpool._args cimport Ints, array_data, ints_at, ints_free, ints_get, new_int32, new_int64, to_int
from kvpool._blocks cimport (
    RESERVED,
    Block,
    Blocks,
    blocks_available,
    blocks_evict,
    blocks_ref,
    blocks_reset,
    blocks_revive,
    blocks_take_many,
    blocks_unref,
)
from kvpool._fork cimport process_number, watch_forks
from kvpool._memory cimport xcalloc, xfree, xmalloc
from kvpool._record cimport BATCH, Record, put_words, record_begin, record_blocks, record_end, record_one
from kvpool._types cimport (
    MAX_REFCOUNT,
    OP_ALLOC,
    OP_COMMIT,
    OP_DECREF,
    OP_DRAIN,
    OP_EVICT,
    OP_FREE,
    OP_INCREF,
    OP_REVIVE,
    mix,
)

from kvpool.errors import ConcurrentUse, DoubleFree, OutOfBlocks, PoolClosed

watch_forks()


cdef class BlockPool:
    """Block-level calls, for engines that keep their own block tables. See `kvpool.Pool`."""

    def __cinit__(self, num_blocks, block_size, *, max_seqs=1024, max_blocks_per_seq=None, reserved_blocks=1,
                  watermark=0, in_order=False, seed=None, prefix_cache=False, events=0, record=0, _hash_bits=64):
        cdef Blocks* b = &self.blocks
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

    cdef void release_memory(self):
        cdef Blocks* b = &self.blocks
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

    cdef int enter(self, str call) except -1:
        """Every public call starts here and ends with ``self.busy = False``."""
        if self.busy == process_number:         # of another process: a thread that this fork has not got
            raise ConcurrentUse(f"[{call}] the pool is inside another call; one caller at a time")
        if self.blocks.block == NULL:
            raise PoolClosed(f"[{call}] the pool was shut down")
        self.busy = process_number
        return 0

    cdef int refuse_indexed(self, str call) except -1:
        if self.indexed:
            raise ValueError(f"[{call}] the prefix cache looks after committed blocks in this pool")
        return 0

    cdef int get_ids(self, Ints* ids, object value, str call) except -1:
        """Block ids of a call: in range, not reserved, no duplicates."""
        cdef Blocks* b = &self.blocks
        cdef Py_ssize_t k
        cdef int64_t i
        ints_get(ids, value, call, "ids", True, True, IndexError)
        if ids.size < 0:
            ids.size = 1
        b.stamp += 1
        if b.stamp == 0:
            memset(b.mark, 0, b.num_blocks * sizeof(uint32_t))
            b.stamp = 1
        for k in range(ids.size):
            i = ints_at(ids, k)
            if i < 0 or i >= b.num_blocks:
                raise IndexError(f"[{call}] ids[{k}] is no block ({i}), ids are 0 .. {b.num_blocks - 1}")
            if i < b.reserved:
                raise ValueError(f"[{call}] ids[{k}] is a reserved block ({i}), reserved are 0 .. {b.reserved - 1}")
            if b.mark[i] == b.stamp:
                raise ValueError(f"[{call}] ids[{k}] is a duplicate ({i})")
            b.mark[i] = b.stamp
        return 0

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
        cdef Blocks* b = &self.blocks
        cdef Ints target
        cdef int64_t count = 1
        cdef int32_t one
        cdef int32_t* ids = &one
        self.enter("alloc")
        target.held = False
        target.owned = NULL
        try:
            if n is not None:
                count = to_int(n, "alloc", "n", 0, INT64_MAX)
            if out is not None:
                ints_get(&target, out, "alloc", "out", False, True)
                if not target.held or target.width != 4:
                    raise TypeError("[alloc] out must be an int32 array")
                if target.view.readonly:
                    raise ValueError("[alloc] out is read-only")
                if target.size < count:
                    raise ValueError(f"[alloc] out is too small ({target.size}), it must hold {count} ids")
                ids = <int32_t*>target.data
            if count > blocks_available(b):
                raise OutOfBlocks(
                    f"[alloc] {count} blocks asked for, {b.num_blank} free and {b.lru.size} evictable, "
                    f"{b.limbo.size} in limbo",
                    needed=count, short_by=count - blocks_available(b), free=b.num_blank,
                    evictable=b.lru.size, limbo=b.limbo.size)
            if n is not None and out is None:
                out = new_int32(count)
                ids = <int32_t*>array_data(out)
            if ids == &one:
                out = b.blank[b.num_blank - 1] if b.num_blank else b.lru.head   # made before anything moves
            self.alloc_raw(ids, <int32_t>count)
            return out
        finally:
            ints_free(&target)
            self.busy = False

    cdef void alloc_raw(self, int32_t* ids, int32_t count):
        cdef Blocks* b = &self.blocks
        cdef int32_t k
        cdef uint32_t* at
        cdef uint64_t h = mix(mix(b.digest, OP_ALLOC), count)
        blocks_take_many(b, ids, count)
        for k in range(count):
            b.block[ids[k]].raw = 1
            h = mix(h, ids[k])
        b.digest = h
        if self.record.data != NULL:
            at = record_begin(&self.record, OP_ALLOC, count + BATCH)
            record_end(&self.record, put_words(at, ids, count) if at != NULL else NULL, h)

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
        cdef Blocks* b = &self.blocks
        cdef Ints batch
        cdef Py_ssize_t k
        cdef Block* block
        self.enter("incref")
        batch.held = False
        batch.owned = NULL
        try:
            self.get_ids(&batch, ids, "incref")
            for k in range(batch.size):
                block = &b.block[ints_at(&batch, k)]
                if block.refcount == 0:
                    raise DoubleFree(f"[incref] block {ints_at(&batch, k)} has no reference to add to")
                if block.refcount >= MAX_REFCOUNT:
                    raise OverflowError(f"[incref] block {ints_at(&batch, k)} has {block.refcount} references, "
                                        f"the limit")
            b.digest = mix(mix(b.digest, OP_INCREF), batch.size)
            for k in range(batch.size):
                blocks_ref(b, <int32_t>ints_at(&batch, k), 1)
                b.block[ints_at(&batch, k)].raw += 1
                b.digest = mix(b.digest, ints_at(&batch, k))
            record_blocks(&self.record, OP_INCREF, &batch, b.digest)
        finally:
            ints_free(&batch)
            self.busy = False

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
        cdef Blocks* b = &self.blocks
        cdef Ints batch
        cdef Py_ssize_t k
        cdef int32_t i
        cdef uint64_t h
        self.enter(call)
        batch.held = False
        batch.owned = NULL
        try:
            self.get_ids(&batch, ids, call)
            for k in range(batch.size):
                i = <int32_t>ints_at(&batch, k)
                if b.block[i].raw == 0:
                    raise DoubleFree(f"[{call}] block {i} has no raw reference to drop "
                                     f"(refcount {b.block[i].refcount})")
                if last and b.block[i].refcount > 1:
                    raise ValueError(f"[{call}] block {i} has {b.block[i].refcount} references, "
                                     f"only a block with one can be freed")
            h = mix(mix(b.digest, OP_FREE if last else OP_DECREF), batch.size)
            for k in range(batch.size):
                i = <int32_t>ints_at(&batch, k)
                b.block[i].raw -= 1
                blocks_unref(b, i)
                h = mix(h, i)
            b.digest = h
            record_blocks(&self.record, OP_FREE if last else OP_DECREF, &batch, h)
        finally:
            ints_free(&batch)
            self.busy = False
        return 0

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
        cdef Blocks* b = &self.blocks
        cdef Ints batch
        cdef Py_ssize_t k
        cdef int32_t i
        self.enter("mark_committed")
        batch.held = False
        batch.owned = NULL
        try:
            self.refuse_indexed("mark_committed")
            self.get_ids(&batch, ids, "mark_committed")
            for k in range(batch.size):
                i = <int32_t>ints_at(&batch, k)
                if b.block[i].refcount == 0:
                    raise DoubleFree(f"[mark_committed] block {i} has no reference")
                if b.block[i].noted:
                    raise ValueError(f"[mark_committed] block {i} is in the dropped list, call take_dropped first")
            b.digest = mix(mix(b.digest, OP_COMMIT), batch.size)
            for k in range(batch.size):
                b.block[ints_at(&batch, k)].committed = 1
                b.digest = mix(b.digest, ints_at(&batch, k))
            record_blocks(&self.record, OP_COMMIT, &batch, b.digest)
        finally:
            ints_free(&batch)
            self.busy = False

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
        cdef Blocks* b = &self.blocks
        cdef Ints batch
        cdef Py_ssize_t k
        cdef int32_t i
        self.enter("revive")
        batch.held = False
        batch.owned = NULL
        try:
            self.refuse_indexed("revive")
            self.get_ids(&batch, ids, "revive")
            for k in range(batch.size):
                i = <int32_t>ints_at(&batch, k)
                if not b.block[i].committed:
                    raise ValueError(f"[revive] block {i} is not committed")
                if b.block[i].refcount >= MAX_REFCOUNT:
                    raise OverflowError(f"[revive] block {i} has {b.block[i].refcount} references, the limit")
            b.digest = mix(mix(b.digest, OP_REVIVE), batch.size)
            for k in range(batch.size):
                blocks_revive(b, <int32_t>ints_at(&batch, k))
                b.digest = mix(b.digest, ints_at(&batch, k))
            record_blocks(&self.record, OP_REVIVE, &batch, b.digest)
        finally:
            ints_free(&batch)
            self.busy = False

    def evict(self, n):
        """Clear the `n` oldest evictable blocks, or all if there are fewer. Returns how many. O(n)."""
        cdef Blocks* b = &self.blocks
        cdef int64_t count
        cdef int32_t k, i
        cdef object evicted
        self.enter("evict")
        try:
            count = min(to_int(n, "evict", "n", 0, INT64_MAX), b.lru.size)
            evicted = count
            b.digest = mix(mix(b.digest, OP_EVICT), count)
            for k in range(count):
                i = blocks_evict(b)
                b.digest = mix(b.digest, i)
            record_one(&self.record, OP_EVICT, count, b.digest)
            return evicted
        finally:
            self.busy = False

    def take_dropped(self):
        """Ids of committed blocks whose content was given up since the last call, oldest first; int32 ``(n,)``.

        An index of committed blocks must forget these before it commits them again.
        """
        cdef Blocks* b = &self.blocks
        cdef int32_t k
        cdef int32_t* data
        self.enter("take_dropped")
        try:
            self.refuse_indexed("take_dropped")
            ids = new_int32(b.num_dropped)
            data = <int32_t*>array_data(ids)
            b.digest = mix(mix(b.digest, OP_DRAIN), b.num_dropped)
            for k in range(b.num_dropped):
                data[k] = b.dropped[k]
                b.block[data[k]].noted = 0
            b.num_dropped = 0
            record_one(&self.record, OP_DRAIN, ids.size, b.digest)
            return ids
        finally:
            self.busy = False

    def _recorded(self):
        """(bytes of the record, calls in it, calls that it lost); see `kvpool.replay.calls`."""
        cdef Record* r = &self.record
        cdef const char* older
        cdef const char* newer
        self.enter("_recorded")
        try:
            if r.data == NULL:
                return b"", 0, 0
            newer = <const char*>(r.data + r.active * r.half)
            older = <const char*>(r.data + (r.active ^ 1) * r.half)
            return older[:4 * r.size[r.active ^ 1]] + newer[:4 * r.size[r.active]], r.calls[0] + r.calls[1], r.lost
        finally:
            self.busy = False

    def _set_digest(self, digest):
        """For replays that begin at a reset."""
        self.blocks.digest = digest

    def refcount(self, block):
        """References on one block: table entries of sequences plus raw ones. O(1)."""
        cdef int64_t i
        self.enter("refcount")
        try:
            i = to_int(block, "refcount", "block", INT64_MIN, INT64_MAX, IndexError)
            if i < 0 or i >= self.blocks.num_blocks:
                raise IndexError(f"[refcount] no such block ({i}), ids are 0 .. {self.blocks.num_blocks - 1}")
            if i < self.blocks.reserved:
                raise ValueError(f"[refcount] block {i} is reserved, reserved are 0 .. {self.blocks.reserved - 1}")
            return self.blocks.block[i].refcount
        finally:
            self.busy = False

    def refcount_histogram(self):
        """How many unreserved blocks have 0, 1, 2, ... references; int64 ``(max refcount + 1,)``. O(num_blocks)."""
        cdef Blocks* b = &self.blocks
        cdef int32_t i, most = 0
        cdef int64_t* data
        self.enter("refcount_histogram")
        try:
            for i in range(b.reserved, b.num_blocks):
                most = max(most, b.block[i].refcount)
            counts = new_int64(<Py_ssize_t>most + 1)
            data = <int64_t*>array_data(counts)
            memset(data, 0, (<Py_ssize_t>most + 1) * sizeof(int64_t))
            for i in range(b.reserved, b.num_blocks):
                data[b.block[i].refcount] += 1
            return counts
        finally:
            self.busy = False
