"""Blocks by id: what engines with block tables of their own call, and whoever holds blocks beside sequences.

A *raw* reference is one of a caller's. A block is *cached* if it is committed, by `mark_cached` where the pool has no
prefix cache; it is *noted* when its content was evicted and `drain_evicted` has not told yet.

    raw <= refcount; what gives back a reference takes a raw one
    noted  <=>  the id is in `dropped`  =>  not committed
    mark == stamp  <=>  the running call has named the block

Why it is so:

- `judge_blocks` judges a whole batch before a block changes, so a refusal undoes nothing. Most blocks are fit for the
  call by two comparisons; only of others it is asked why they may be. A strange id is refused before anything else: it
  is wrong in whatever state the pool is.
- No Python object is made under the lock, and none may be missing once blocks have moved. So a call that returns some
  reads under the lock what it will do, makes the objects behind it, and acts under the lock if that is still so;
  else it begins again.
- In a pool with a prefix cache the tree orders what leaves, in units of several blocks. So there calls say nothing of
  content, `alloc` takes blank blocks alone, and `incref` needs a raw reference: else one would keep a part of a unit.
- Of one `release` the first named is taken first, cached or not. Blank blocks are a stack, so they go back last named
  first; the LRU list is a queue.
"""

cdef extern from *:
    """
    #ifdef Py_GIL_DISABLED
    enum { KV_HAS_GIL = 0 };
    #else
    enum { KV_HAS_GIL = 1 };
    #endif
    """
    bint HAS_GIL "KV_HAS_GIL"


# ---- in C, under the lock ----------------------------------------------------------------------------------

cdef inline Blocks* blocks_of(State* pool, int32_t arena) noexcept nogil:
    return pool.groups.arena[arena]


cdef inline uint64_t begin_mix(const State* pool, int32_t arena, int64_t op) noexcept nogil:
    """The pool's digest after the name of a call; arena 0 is not named."""
    return mix(pool.blocks.digest, op | <int64_t>arena << 32)


cdef inline int32_t pool_next_block(State* pool, int32_t arena) noexcept nogil:
    """The block that will be taken next; -1: there is none."""
    cdef Blocks* b = blocks_of(pool, arena)
    if b.num_blank:
        return b.blank[b.num_blank - 1]
    return NO_BLOCK if has_tree(pool) else b.lru.head


cdef inline int pool_alloc(State* pool, int32_t arena, int32_t* ids, int64_t count, int64_t room,
                           Verdict* v) noexcept nogil:
    """`room`: of `ids`. Without a GIL the arena may have grown since they were made."""
    cdef Blocks* b = blocks_of(pool, arena)
    cdef int64_t available = b.num_blank
    if count > available and not has_tree(pool):
        available = blocks_available(b)
    available = min(available, room)
    if count > available:
        blocks_short(b, v, arena, -1, -1, count, count - available)
        v.evictable = available - b.num_blank
        return v.reason
    take(b, ids, <int32_t>count, True, True)
    pool.blocks.digest = mix_tokens(begin_mix(pool, arena, OP_ALLOC), ids, count)
    return OK


cdef void pool_evict(State* pool, int32_t arena, int64_t count) noexcept nogil:
    cdef Blocks* b = blocks_of(pool, arena)
    cdef int64_t k
    pool.blocks.digest = mix(begin_mix(pool, arena, OP_EVICT), count)
    if has_tree(pool):
        tree_make_room(pool.groups, arena, b.num_blank + count)
        return
    for k in range(count):
        pool.blocks.digest = mix(pool.blocks.digest, blocks_evict(b))


cdef int pool_drain_evicted(State* pool, int32_t arena, int32_t* ids, int32_t count, Verdict* v) noexcept nogil:
    """RETRY: there are not `count` of them."""
    cdef Blocks* b = blocks_of(pool, arena)
    cdef int32_t k
    if has_tree(pool):
        return refused(v, INDEXED, -1, 0, 0, 0, 0)
    if count != b.num_dropped:
        return RETRY
    pool.blocks.digest = mix(begin_mix(pool, arena, OP_DRAIN), b.num_dropped)
    for k in range(count):
        ids[k] = b.dropped[k]
        b.block[ids[k]].noted = 0
    b.num_dropped = 0
    return OK


cdef int64_t count_references(const Blocks* b, int64_t* counts, int64_t size) noexcept nogil:
    """Entries that the histogram has; it is filled if `size` is that."""
    cdef int32_t i, most = 0
    for i in range(b.reserved, b.num_blocks):
        most = max(most, b.block[i].refcount)
    if size == <int64_t>most + 1:
        memset(counts, 0, size * sizeof(int64_t))
        for i in range(b.reserved, b.num_blocks):
            counts[b.block[i].refcount] += 1
    return <int64_t>most + 1


cdef int judge_range(const Blocks* b, const Ints* given, Py_ssize_t start, Verdict* v) noexcept nogil:
    cdef Py_ssize_t k
    for k in range(start, given.size):
        if not 0 <= ints_at(given, k) < b.num_blocks:
            return refused(v, NO_SUCH_BLOCK, k, ints_at(given, k), 0, b.num_blocks - 1, 0)
    return OK


cdef inline int judge_block(const Block* block, int op, bint option) noexcept nogil:
    if op == OP_TOUCH:
        if block.refcount == 0 and not block.committed and not (option and is_empty(block)):
            return NOT_KEPT
        return REFERENCE_LIMIT if block.refcount >= MAX_REFCOUNT else OK
    if op == OP_MARK_CACHED:
        if block.refcount == 0:
            return UNREFERENCED
        return HAS_CONTENT if block.committed else NOT_DRAINED if block.noted else OK
    if op == OP_INCREF:
        if option and block.raw == 0:
            return NOT_ALLOCATED
        return UNREFERENCED if block.refcount == 0 else REFERENCE_LIMIT if block.refcount >= MAX_REFCOUNT else OK
    if op == OP_DECREF or op == OP_FREE or op == OP_RELEASE:
        return NO_RAW_REFERENCE if block.raw == 0 else STILL_SHARED if op == OP_FREE and block.refcount > 1 else OK
    return OK


cdef inline int judge_blocks(Blocks* b, const Ints* given, int op, bint option, int32_t* ids, int32_t* size,
                             Verdict* v) noexcept nogil:
    """Ids of a call as int32; `ids` may be the memory of `given`. Calls of engines with keys of their own may name
    reserved blocks, which are left out.

    An id that no block has is refused before what is wrong with a block, wherever they stand.
    """
    cdef const Block* block = b.block
    cdef uint32_t* mark = b.mark
    cdef uint32_t stamp
    cdef int32_t named = 0, num_blocks = b.num_blocks, reserved = b.reserved
    cdef const int64_t* wide = <const int64_t*>given.data
    cdef const int32_t* narrow = <const int32_t*>given.data
    cdef bint is_narrow = given.width == 4, is_raw = op in (OP_INCREF, OP_DECREF, OP_FREE)
    cdef Py_ssize_t k, n = given.size
    cdef int64_t i
    cdef int reason, status
    # Most blocks are fit for the call: they have so many raw references, and from 1 to so many in all.
    cdef int32_t least_raw = op in (OP_DECREF, OP_FREE, OP_RELEASE) or (op == OP_INCREF and option)
    cdef uint32_t most = (1 if op == OP_FREE else 0 if op in (OP_MARK_CACHED, OP_UNCACHE)
                          else MAX_REFCOUNT - 1 if op in (OP_INCREF, OP_TOUCH) else INT32_MAX)
    blocks_new_stamp(b)
    stamp = b.stamp
    for k in range(n):
        i = narrow[k] if is_narrow else wide[k]
        if <uint64_t>i >= <uint64_t>num_blocks:
            return judge_range(b, given, k, v)
        if i >= reserved and mark[i] != stamp and (
                (block[i].raw >= least_raw and <uint32_t>(block[i].refcount - 1) < most)
                or judge_block(&block[i], op, option) == OK):
            mark[i] = stamp
            ids[named] = <int32_t>i
            named += 1
            continue
        if i < reserved and not is_raw:
            continue
        reason = RESERVED_BLOCK if i < reserved else judge_block(&block[i], op, option)
        if mark[i] == stamp:
            reason = NAMED_TWICE if op == OP_RELEASE else DUPLICATE_BLOCK
        status = judge_range(b, given, k + 1, v)
        return status if status != OK else refused(v, reason, k, i, 0, reserved - 1, block[i].refcount)
    size[0] = named
    return OK


cdef int call_blocks(State* pool, int32_t arena, Ints* given, int op, bint option, Verdict* v) noexcept nogil:
    """Judge a call with a batch of blocks, then make it."""
    cdef Blocks* b = blocks_of(pool, arena)
    cdef int32_t[SMALL] few
    cdef int32_t* ids = &few[0] if given.owned == NULL else <int32_t*>given.owned
    cdef int32_t n = 0
    cdef int status
    if has_tree(pool) and op not in (OP_INCREF, OP_DECREF, OP_FREE):
        return refused(v, INDEXED, -1, 0, 0, 0, 0)
    status = judge_blocks(b, given, op, has_tree(pool) if op == OP_INCREF else option, ids, &n, v)
    if status != OK:
        return status
    if op == OP_INCREF or op == OP_TOUCH:
        if option:
            blocks_take_empty(b, ids, n)
        blocks_revive_many(b, ids, n)
    elif op == OP_RELEASE:
        blocks_release(b, ids, n)
    elif op == OP_MARK_CACHED:
        blocks_commit(b, ids, n)
    elif op == OP_UNCACHE:
        blocks_uncommit(b, ids, n, option)
    else:
        blocks_unref_raw(b, ids, n)
    pool.blocks.digest = mix_tokens(begin_mix(pool, arena, op | (OPTION if option else 0)), ids, n)
    return OK


# ---- for Python --------------------------------------------------------------------------------------------

cdef int32_t count_of(State* pool, int32_t arena, int64_t i, str call, int32_t* reserved) except -1:
    cdef const Blocks* b
    cdef int32_t count = 0, num_blocks
    pool_enter(pool, call)
    b = blocks_of(pool, arena)
    num_blocks, reserved[0] = b.num_blocks, b.reserved
    if 0 <= i < num_blocks:
        count = b.block[i].refcount
    pool_leave(pool)
    if not 0 <= i < num_blocks:
        raise IndexError(f"[{call}] no such block ({i}), ids are 0 .. {num_blocks - 1}")
    return count


@cython.no_gc_clear      # `state` lies in the pool, which has to live as long
cdef class BlockAPI:
    """Blocks by id, for engines that keep block tables of their own, and for blocks held beside sequences.

    Any pool has `alloc`, `incref`, `decref` and `free`: references of the caller's, which the pool counts apart from
    those of sequences. It has `evict`, too, and all that only reads.

    The other calls are for an engine with content keys of its own. They name blocks by id, none of them twice; ids of
    reserved blocks are passed over, as tables name one where they have nothing. In a pool with a prefix cache they
    raise ValueError: there the cache says what blocks hold.

    A block is *in use* while it has a reference, else *free*. A free block is *blank*, or *cached*: its content is
    final, and `touch` brings it back. Blank blocks are always taken before cached ones, these in the order in which
    they were released. Of the blocks of one `release` or `uncache` the first named is taken first, among blank ones
    and among cached ones. ``uncache(ids, keep_place=True)`` leaves free blocks where they stand in that order,
    although they hold nothing any more.

    Parameters
    ----------
    pool : Pool
        ``pool.blocks`` is ``BlockAPI(pool)``.
    arena : int, default 0
        Whose blocks; ``pool.blocks.arena(k)`` is ``BlockAPI(pool, k)``.

    Notes
    -----
    Ids are an int, a list or tuple of ints, or an int32 / int64 array. O(ids named). A call that raises has changed
    nothing. While a step of the pool is pending, what is released waits in limbo, as every block of the pool; it is
    neither blank nor taken until the step is done.

    Examples
    --------
    >>> from kvpool import Pool
    >>> blocks = Pool(num_blocks=6, block_size=16).blocks
    >>> table, _ = blocks.take(3)
    >>> blocks.mark_cached(table[:2])  # full, and computed
    >>> blocks.release(table[::-1])  # the tail is evicted first
    >>> table, blocks.free_order().tolist()
    ([1, 2, 3], [3, 4, 5, 2, 1])
    >>> blocks.take(4)  # one of them was cached
    ([3, 4, 5, 2], 1)
    """

    cdef readonly Pool pool
    cdef State* state
    cdef int32_t number         # of the arena

    def __cinit__(self, Pool pool not None, arena=0):
        cdef int64_t number = to_int(arena, "blocks", "arena", 0, MAX_ARENAS)
        self.pool = pool
        self.state = &pool.state
        self.number = <int32_t>number
        if number:
            pool_enter(self.state, "blocks")
            pool_leave(self.state)
        if number and number >= self.state.num_arenas:
            raise ValueError(f"[blocks] there is no arena {number}, the pool has {self.state.num_arenas}")

    def __repr__(self):
        return f"<blocks of {f'arena {self.number} of ' if self.number else ''}{self.pool!r}>"

    def __reduce__(self):
        raise TypeError("[blocks] the blocks of a pool cannot be pickled or copied")

    def arena(self, arena):
        """The same calls on another arena; ``pool.blocks`` has those of arena 0.

        Raises
        ------
        ValueError
            The pool has no such arena.
        """
        return BlockAPI(self.pool, arena)

    cdef inline Blocks* at(self) noexcept nogil:
        return blocks_of(self.state, self.number)

    cdef inline int64_t room(self) noexcept nogil:
        """No call gives more blocks."""
        return self.state.sizes[self.number]

    cdef int run(self, object ids, str call, int op, str name="", object option=False) except -1:
        """Make a call with a batch of blocks, which may have an option."""
        cdef Ints given
        cdef Verdict v
        cdef bint wanted = option is not False and to_bool(option, call, name)
        ints_init(&given, &self.state.spare)
        try:
            ints_batch(&given, ids, call, "ids", True, IndexError)
            pool_enter(self.state, call)
            return pool_end(self.state, call_blocks(self.state, self.number, &given, op, wanted, &v), &v, call)
        finally:
            ints_free(&given)

    # -- references

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
            Fewer than `n` blocks are blank or evictable; with a prefix cache, blank. State unchanged.

        Notes
        -----
        O(n), no Python object per block.
        """
        cdef int64_t count = 1, room
        cdef object found           # an int: Cython would keep a C integer, and make the object at the end
        cdef int32_t one, next_one = NO_BLOCK
        cdef Verdict v
        cdef int status = RETRY
        if n is not None:
            count = to_int(n, "alloc", "n", 0, INT64_MAX)
        if out is not None:
            return self.alloc_into(out, count)
        if n is not None:
            # More blocks than there are will be refused: no array for them.
            room = self.room()
            ids = empty(count if count <= room else 0, INT32)
            self.alloc_now(<int32_t*>array_data(ids), count, room)
            return ids
        while status == RETRY:
            found = next_one            # made before anything moves
            pool_enter(self.state, "alloc")
            if pool_next_block(self.state, self.number) == next_one:
                status = pool_alloc(self.state, self.number, &one, 1, 1, &v)
            next_one = pool_next_block(self.state, self.number)
            pool_end(self.state, status, &v, "alloc")
        return found

    cdef int alloc_now(self, int32_t* ids, int64_t count, int64_t room) except -1:
        cdef Verdict v
        pool_enter(self.state, "alloc")
        return pool_end(self.state, pool_alloc(self.state, self.number, ids, count, room, &v), &v, "alloc")

    cdef object alloc_into(self, object out, int64_t count):
        cdef Py_buffer view
        cdef const Array* array = plain_array(out)
        if array != NULL and array.descr == <PyObject*>INT32 and array.flags & (WRITEABLE | WARN) == WRITEABLE:
            self.alloc_to(<int32_t*>array.data, array.dimensions[0], count)
            return out
        if not PyObject_CheckBuffer(out):
            raise TypeError(f"[alloc] out must be an int32 array, not {type(out).__name__}")
        PyObject_GetBuffer(out, &view, PyBUF_STRIDES | PyBUF_FORMAT)
        try:
            buffer_judge(&view, "alloc", "out", True)
            if view.itemsize != 4:
                raise TypeError("[alloc] out must be an int32 array")
            if view.readonly:
                raise ValueError("[alloc] out is read-only")
            self.alloc_to(<int32_t*>view.buf, view.shape[0], count)
        finally:
            PyBuffer_Release(&view)
        return out

    cdef int alloc_to(self, int32_t* out, Py_ssize_t room, int64_t count) except -1:
        """Write the ids once they are taken: nothing can fail then."""
        cdef Ints made
        if room < count:
            raise ValueError(f"[alloc] out is too small ({room}), it must hold {count} ids")
        ints_init(&made, &self.state.spare)
        try:
            ints_room(&made, count, 4, "alloc", "ids")
            self.alloc_now(<int32_t*>made.data, count, count)
            memcpy(out, made.data, count * sizeof(int32_t))
        finally:
            ints_free(&made)
        return 0

    def incref(self, ids):
        """Add one raw reference to each block.

        Parameters
        ----------
        ids : int or ints
            Block ids, shape ``(n,)``; blocks somebody refers to, no duplicates. With a prefix cache only blocks of
            `alloc`, as a reference to one block would keep a part of what leaves whole.

        Raises
        ------
        DoubleFree
            A block has no reference: it is free, evictable or in limbo. State unchanged.
        IndexError, ValueError, OverflowError
            No such block; reserved or duplicate; the count is at its limit of 2^30. State unchanged.
        """
        self.run(ids, "incref", OP_INCREF)

    def decref(self, ids):
        """Drop one raw reference of each block, in the order given; the last reference releases the block.

        Raises
        ------
        DoubleFree
            A block has no raw reference (a sequence's reference is never taken away). State unchanged.
        IndexError, ValueError
            No such block; reserved or duplicate. State unchanged.
        """
        self.run(ids, "decref", OP_DECREF)

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
        self.run(ids, "free", OP_FREE)

    def evict(self, n):
        """Clear the `n` oldest evictable blocks, or all if there are fewer. Returns how many. O(n).

        In a pool with a prefix cache entries and checkpoints leave whole: a few more blocks may be cleared.
        """
        cdef int64_t asked = to_int(n, "evict", "n", 0, INT64_MAX), count = -1
        cdef object evicted
        cdef int status = RETRY
        while status == RETRY:
            evicted = count                 # made before anything moves
            pool_enter(self.state, "evict")
            if count == min(asked, <int64_t>self.at().num_evictable):
                pool_evict(self.state, self.number, count)
                status = OK
            count = min(asked, <int64_t>self.at().num_evictable)
            pool_leave(self.state)
        return evicted

    # -- content keys of an engine's own

    def take(self, n):
        """Take blocks, blank ones first; each comes with one reference.

        Parameters
        ----------
        n : int

        Returns
        -------
        ids : list of int
            The first `n` of `free_order`.
        evicted : int
            How many of them were cached: what these held is gone. They are the last ones, among which may be blocks
            that `uncache` emptied in their place.

        Raises
        ------
        OutOfBlocks
            Fewer than `n` blocks are free. State unchanged.
        """
        cdef Blocks* b
        cdef Ints room
        cdef Verdict v
        cdef int64_t available, count = to_int(n, "take", "n", 0, INT64_MAX), most = self.room()
        cdef int32_t* ids
        cdef int status = RETRY
        cdef uint64_t seen
        cdef int32_t evicted = 0, k
        ints_init(&room, &self.state.spare)
        try:
            ids = <int32_t*>ints_room(&room, min(count, most), 4, "take", "ids")
            while status == RETRY:
                pool_enter(self.state, "take")
                b = self.at()
                available = min(blocks_available(b), most)      # without a GIL the arena may have grown
                if has_tree(self.state):
                    status = refused(&v, INDEXED, -1, 0, 0, 0, 0)
                elif count > available:
                    status = blocks_short(b, &v, self.number, -1, -1, count, count - available)
                else:
                    blocks_free_order(b, ids, <int32_t>count)
                    evicted = 0
                    for k in range(b.num_blank, <int32_t>count):
                        evicted += b.block[ids[k]].committed
                seen = self.state.blocks.digest
                pool_end(self.state, status, &v, "take")
                result = (as_list(ids, <int32_t>count), evicted)        # made before anything moves
                pool_enter(self.state, "take")
                if self.state.blocks.digest == seen:
                    status = OK
                    take(b, ids, <int32_t>count, True, False)
                    self.state.blocks.digest = mix_tokens(begin_mix(self.state, self.number, OP_TAKE), ids,
                                                          <int32_t>count)
                pool_leave(self.state)
            return result
        finally:
            ints_free(&room)

    def touch(self, ids, *, blank=False):
        """One reference more on each block, in use or cached: a hit. Free ones are in use from now on.

        Parameters
        ----------
        ids : int or ints
        blank : bool, default False
            Take free blocks without content, too, from where they stand: O(blank blocks that are taken before them).

        Raises
        ------
        ValueError, IndexError
            A block is free and without content, and `blank` is False; or it waits in limbo without content, or stands
            twice; there is no such block. State unchanged.
        OverflowError
            A block has 2^30 references. State unchanged.
        """
        self.run(ids, "touch", OP_TOUCH, "blank", blank)

    def release(self, ids):
        """Give back one reference of each block; of those that end, the first named is taken first.

        Raises
        ------
        DoubleFree, IndexError
            A block has no raw reference, or stands twice; there is no such block. State unchanged.
        """
        self.run(ids, "release", OP_RELEASE)

    def mark_cached(self, ids):
        """The content of these blocks is final: once released they are taken last, and `touch` brings them back.

        Raises
        ------
        DoubleFree
            A block has no reference. State unchanged.
        ValueError
            A block is marked already, stands twice, or lost its former content, which `drain_evicted` has not told
            yet. State unchanged.
        IndexError
            There is no such block. State unchanged.
        """
        self.run(ids, "mark_cached", OP_MARK_CACHED)

    def uncache(self, ids, *, keep_place=False):
        """The content of these blocks is gone: free ones are blank at once, the others when they are released.

        Blocks that are not marked stay as they are.

        Parameters
        ----------
        ids : int or ints
        keep_place : bool, default False
            Free blocks keep their place in `free_order`, where `take` finds them in their turn, and `touch` with
            ``blank=True``.

        Raises
        ------
        ValueError, IndexError
            A block stands twice; there is no such block. State unchanged.
        """
        self.run(ids, "uncache", OP_UNCACHE, "keep_place", keep_place)

    def drain_evicted(self):
        """Ids of cached blocks whose content was evicted since the last call, oldest first; int32 ``(n,)``.

        Those of `take` and `uncache` are not among them. An engine's index must forget these before it marks them
        again.
        """
        cdef int32_t count = 0
        cdef int32_t* data
        cdef Verdict v
        cdef int status = RETRY
        while status == RETRY:
            ids = empty(count, INT32)
            data = <int32_t*>array_data(ids)
            pool_enter(self.state, "drain_evicted")
            status = pool_drain_evicted(self.state, self.number, data, count, &v)
            count = self.at().num_dropped
            pool_end(self.state, status, &v, "drain_evicted")
        return ids

    # -- reading

    def refcount(self, block):
        """References on one block: table entries of sequences plus raw ones. O(1). `references` reads it faster."""
        cdef int64_t i = to_int(block, "refcount", "block", INT64_MIN, INT64_MAX, IndexError)
        cdef int32_t reserved = 0
        cdef int32_t count = count_of(self.state, self.number, i, "refcount", &reserved)
        if i < reserved:
            raise ValueError(f"[refcount] block {i} is reserved, reserved are 0 .. {reserved - 1}")
        return count

    @property
    def references(self):
        """References on each block, by its id, 0 for reserved ones: ``references[block]``. It shows the present."""
        return References(self)

    def is_cached(self, ids):
        """Whether `mark_cached` named each block, and its content was not evicted since; bool ``(ids,)``.

        Raises
        ------
        IndexError
            There is no such block.
        """
        cdef Ints given
        cdef Verdict v
        cdef int32_t* found
        cdef Py_ssize_t k
        cdef int status
        ints_init(&given, &self.state.spare)
        try:
            ints_batch(&given, ids, "is_cached", "ids", True, IndexError)
            result = empty(given.size, INT32)
            found = <int32_t*>array_data(result)
            pool_enter(self.state, "is_cached")
            status = judge_range(self.at(), &given, 0, &v)
            if has_tree(self.state):
                status = refused(&v, INDEXED, -1, 0, 0, 0, 0)
            for k in range(given.size if status == OK else 0):
                found[k] = self.at().block[ints_at(&given, k)].committed
            pool_end(self.state, status, &v, "is_cached")
        finally:
            ints_free(&given)
        return result.astype(bool)

    def refcount_histogram(self):
        """How many unreserved blocks have 0, 1, 2, ... references; int64 ``(max refcount + 1,)``. O(num_blocks)."""
        cdef int64_t size = 0, found = -1
        cdef int64_t* data
        while found != size:
            size = max(found, 0)
            counts = empty(size, INT64)
            data = <int64_t*>array_data(counts)
            pool_enter(self.state, "refcount_histogram")
            found = count_references(self.at(), data, size)
            pool_leave(self.state)
        return counts

    def free_order(self, n=None):
        """Ids of the next `n` blocks that `take` gives, of all free ones without `n`; int32. Nothing changes.

        Blank blocks come first, then cached ones, the least recently released before the others. Of a pool with a
        prefix cache only blank ones are told, as `alloc` takes no others. O(ids returned).
        """
        cdef Blocks* b
        cdef int64_t asked = INT64_MAX if n is None else to_int(n, "free_order", "n", 0, INT64_MAX)
        cdef int64_t room = -1, size = 0
        cdef int32_t* ids
        while room != size:
            room = size
            result = empty(room, INT32)
            ids = <int32_t*>array_data(result)
            pool_enter(self.state, "free_order")
            b = self.at()
            size = min(asked, <int64_t>b.num_blank + b.lru.size)    # a prefix cache has its own in no list
            if size == room:
                blocks_free_order(b, ids, <int32_t>size)
            pool_leave(self.state)
        return result

    @property
    def num_free(self):
        """Blocks that `take` can give: without a reference, blank or cached."""
        cdef int32_t found
        pool_enter(self.state, "num_free")
        found = blocks_available(self.at())
        pool_leave(self.state)
        return found

    @property
    def num_blank(self):
        """Blank blocks: so many are taken before one is evicted."""
        cdef int32_t found
        pool_enter(self.state, "num_blank")
        found = self.at().num_blank
        pool_leave(self.state)
        return found

    @property
    def usage(self):
        """Share of the blocks that somebody holds, 0.0 to 1.0; reserved ones do not count."""
        cdef int32_t used, all_
        pool_enter(self.state, "usage")
        used, all_ = self.at().num_used, self.at().num_blocks - self.at().reserved
        pool_leave(self.state)
        return <double>used / all_


@cython.no_gc_clear      # `state` lies in the pool, which has to live as long
cdef class References:
    """``references[block]``: the references of a block, read as fast as an attribute; reserved blocks have 0.

    Parameters
    ----------
    blocks : BlockAPI
        ``blocks.references`` is ``References(blocks)``.

    Notes
    -----
    With a GIL no other thread is inside a call of the pool while this one reads, so it takes no lock.

    Examples
    --------
    >>> from kvpool import Pool
    >>> blocks = Pool(num_blocks=6, block_size=16).blocks
    >>> table, _ = blocks.take(2)
    >>> blocks.touch(table[:1])
    >>> references = blocks.references
    >>> references[table[0]], references[table[1]]
    (2, 1)
    """

    cdef readonly BlockAPI blocks
    cdef State* state
    cdef int32_t number

    def __cinit__(self, BlockAPI blocks not None):
        self.blocks = blocks
        self.state = blocks.state
        self.number = blocks.number

    def __reduce__(self):
        raise TypeError("[references] the blocks of a pool cannot be pickled or copied")

    def __getitem__(self, block):
        cdef State* pool = self.state
        cdef const Blocks* b
        cdef int64_t i = 0
        cdef int32_t reserved
        if HAS_GIL and not pool.num_deferred and pool.blocks.block != NULL and short_int(block, &i):
            b = blocks_of(pool, self.number)
            if 0 <= i < b.num_blocks:
                return b.block[i].refcount
        i = to_int(block, "references", "block", INT64_MIN, INT64_MAX, IndexError)
        return count_of(pool, self.number, i, "references", &reserved)
