"""The blocks of a pool by name, for an engine that keeps its own block tables and its own content keys.

`Pool.blocks` gives a `PoolBlocks`. A pool with a prefix cache has none: there the cache says what blocks hold.
"""

# ---- in C, under the lock ----------------------------------------------------------------------------------

cdef int judge_range(const Blocks* b, const Ints* given, Py_ssize_t start, Verdict* v) noexcept nogil:
    """Whether there are such blocks, from row `start` on."""
    cdef Py_ssize_t k
    for k in range(start, given.size):
        if not 0 <= ints_at(given, k) < b.num_blocks:
            return refused(v, NO_SUCH_BLOCK, k, ints_at(given, k), 0, b.num_blocks - 1, 0)
    return OK


cdef inline int judge_block(const Block* block, int op) noexcept nogil:
    """Why a call refuses a block, or OK."""
    if op == OP_TOUCH:
        if block.refcount == 0 and not block.committed:
            return NOT_KEPT
        return REFERENCE_LIMIT if block.refcount >= MAX_REFCOUNT else OK
    if op == OP_RELEASE:
        return OK if block.raw else NO_RAW_REFERENCE
    if op == OP_COMMIT_BLOCKS:
        if block.refcount == 0:
            return UNREFERENCED
        return HAS_CONTENT if block.committed else NOT_DRAINED if block.noted else OK
    return OK


cdef inline int judge_blocks(Blocks* b, const Ints* given, int op, int32_t* ids, int32_t* size,
                             Verdict* v) noexcept nogil:
    """Ids of a call as int32, without those of reserved blocks; `ids` may be the memory of `given`.

    An id that no block has is refused before what is wrong with a block, wherever they stand.
    """
    cdef const Block* block = b.block
    cdef uint32_t* mark = b.mark
    cdef uint32_t stamp
    cdef int32_t named = 0, num_blocks = b.num_blocks, reserved = b.reserved
    cdef const int64_t* wide = <const int64_t*>given.data
    cdef const int32_t* narrow = <const int32_t*>given.data
    cdef bint is_narrow = given.width == 4
    cdef Py_ssize_t k, n = given.size
    cdef int64_t i
    cdef int reason, status
    blocks_new_stamp(b)
    stamp = b.stamp
    for k in range(n):
        i = narrow[k] if is_narrow else wide[k]
        if <uint64_t>i >= <uint64_t>num_blocks:
            return judge_range(b, given, k, v)
        if i < reserved:
            continue
        reason = judge_block(&block[i], op)
        if mark[i] == stamp:
            reason = NAMED_TWICE if op == OP_RELEASE else DUPLICATE_BLOCK
        if reason != OK:
            status = judge_range(b, given, k + 1, v)
            return status if status != OK else refused(v, reason, k, i, 0, 0, block[i].refcount)
        mark[i] = stamp
        ids[named] = <int32_t>i
        named += 1
    size[0] = named
    return OK


cdef void note(Blocks* b, Record* record, int op, const int32_t* ids, int32_t n) noexcept nogil:
    """A call was made: into the digest and the record."""
    cdef uint32_t* at
    b.digest = mix_tokens(mix(b.digest, op), ids, n)
    if record.data != NULL:
        at = record_begin(record, op, n + BATCH)
        record_end(record, put_words(at, ids, n) if at != NULL else NULL, b.digest)


cdef int carry_out(Blocks* b, Record* record, Ints* given, int op, bint oldest, Verdict* v) noexcept nogil:
    """Judge a call that names blocks, then make it. A scalar becomes a batch of one."""
    cdef int32_t[SMALL] few
    cdef int32_t* ids = few
    cdef int32_t n = 0
    cdef int status
    if given.size < 0:
        given.data = &given.scalar
        given.size = 1
    if given.owned != NULL:
        ids = <int32_t*>given.owned
    if oldest and b.newest_pending:
        status = judge_range(b, given, 0, v)
        return status if status != OK else refused(v, STEP_PENDING, -1, b.newest_pending, 0, 0, 0)
    if op == OP_TOUCH:          # each with a loop of its own, in which nothing asks for the op
        status = judge_blocks(b, given, OP_TOUCH, ids, &n, v)
        if status == OK:
            blocks_revive_many(b, ids, n)
    elif op == OP_RELEASE:
        status = judge_blocks(b, given, OP_RELEASE, ids, &n, v)
        if status == OK:
            blocks_release(b, ids, n, oldest)
    elif op == OP_COMMIT_BLOCKS:
        status = judge_blocks(b, given, OP_COMMIT_BLOCKS, ids, &n, v)
        if status == OK:
            blocks_commit(b, ids, n)
    else:
        status = judge_blocks(b, given, OP_UNCOMMIT, ids, &n, v)
        if status == OK:
            blocks_uncommit(b, ids, n)
    if status != OK:
        return status
    note(b, record, op | (OLDEST << 8 if oldest else 0), ids, n)
    return OK


# ---- for Python --------------------------------------------------------------------------------------------

cdef list as_list(const int32_t* ids, int32_t n):
    cdef int32_t k
    cdef list result = PyList_New(n)
    for k in range(n):
        item = PyLong_FromLong(ids[k])
        Py_INCREF(item)             # the list takes this reference
        PyList_SET_ITEM(result, k, item)
    return result


cdef class PoolBlocks:
    """Blocks by name: take, touch, release, commit and uncommit them, and see who would be taken next.

    For an engine with block tables and content keys of its own. A call names blocks by id: an int, a list or tuple
    of ints, or an int32 / int64 array, none of them twice. Ids of reserved blocks are passed over: tables name one
    where they have nothing. A call that raises has changed nothing.

    A block is *in use* while it has a reference, else *free*. A free block is *blank*, or *committed*: its content is
    final, and `touch` brings it back. Blank blocks are always taken before committed ones, these in the order in
    which they were released. Of the blocks of one `release` or `uncommit` the first named is taken first, among blank
    ones and among committed ones.

    Parameters
    ----------
    pool : Pool
        A pool without a prefix cache; ``pool.blocks`` is ``PoolBlocks(pool)``.

    Raises
    ------
    AttributeError
        The pool has a prefix cache, which looks after its blocks.

    Notes
    -----
    O(ids named). Threads wait for each other as in every call of a pool. While a step of the pool is pending, what is
    released waits in limbo, as every block of the pool; it is neither blank nor taken until the step is done.

    Examples
    --------
    >>> from kvpool import Pool
    >>> blocks = Pool(num_blocks=6, block_size=16).blocks
    >>> table, _ = blocks.take(3)
    >>> blocks.commit(table[:2])  # full, and computed
    >>> blocks.release(table[::-1])  # the tail is evicted first
    >>> table, blocks.free_order().tolist()
    ([1, 2, 3], [3, 4, 5, 2, 1])
    >>> blocks.take(4)  # one of them was committed
    ([3, 4, 5, 2], 1)
    """

    def __cinit__(self, BlockPool pool not None):
        if pool.indexed:
            raise AttributeError("[blocks] the prefix cache looks after the blocks of this pool; a pool has `blocks` "
                                 "when it is made without one")
        self.pool = pool

    def __repr__(self):
        return f"<blocks of {self.pool!r}>"

    def __reduce__(self):
        raise TypeError("[blocks] the blocks of a pool cannot be pickled or copied")

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
            So many of them, the last ones, were committed: what they held is gone.

        Raises
        ------
        OutOfBlocks
            Fewer than `n` blocks are free. State unchanged.
        """
        cdef Blocks* b = &self.pool.all_blocks
        cdef Ints room
        cdef Verdict v
        cdef int64_t available, count = to_int(n, "take", "n", 0, INT64_MAX)
        cdef int32_t* ids
        cdef int status = RETRY
        cdef uint64_t seen
        cdef int32_t evicted
        ints_init(&room, &self.pool.spare)
        try:
            ids = <int32_t*>ints_room(&room, min(count, <int64_t>b.num_blocks), 4, "take", "ids")
            while status == RETRY:
                self.pool.lock("take")
                available = blocks_available(b)
                if count > available:
                    status = blocks_short(b, &v, -1, -1, count, count - available)
                else:
                    blocks_free_order(b, ids, <int32_t>count)
                evicted = max(<int32_t>count - b.num_blank, 0)
                seen = b.digest
                self.pool.unlock()
                if status != RETRY:
                    refuse("take", &v)
                result = (as_list(ids, <int32_t>count), evicted)        # made before anything moves
                self.pool.lock("take")
                if b.digest == seen:
                    status = OK
                    blocks_take_raw(b, ids, <int32_t>count)
                    note(b, &self.pool.record, OP_TAKE, ids, <int32_t>count)
                self.pool.unlock()
            return result
        finally:
            ints_free(&room)

    def take_block(self, block):
        """Take one blank block by its id, with one reference. O(blank blocks that would be taken before it).

        Raises
        ------
        ValueError
            It is not blank: `touch` takes a committed one. State unchanged.
        IndexError
            No such block. State unchanged.
        """
        cdef Blocks* b = &self.pool.all_blocks
        cdef Verdict v
        cdef int64_t i = to_int(block, "take_block", "block", INT64_MIN, INT64_MAX, IndexError)
        cdef int32_t id
        cdef int status = OK
        self.pool.lock("take_block")
        if i < 0 or i >= b.num_blocks:
            status = refused(&v, NO_SUCH_BLOCK, 0, i, 0, b.num_blocks - 1, 0)
        elif b.block[i].place != BLANK:
            status = refused(&v, NOT_BLANK, 0, i, 0, 0, 0)
        else:
            id = <int32_t>i
            blocks_take_blank(b, id)
            note(b, &self.pool.record, OP_TAKE_BLOCK, &id, 1)
        self.pool.unlock()
        if status != OK:
            refuse("take_block", &v)

    cdef int run(self, object ids, str call, int op, bint oldest) except -1:
        cdef Ints given
        cdef Verdict v
        cdef int status
        ints_init(&given, &self.pool.spare)
        try:
            ints_get(&given, ids, call, "ids", True, True, IndexError)
            self.pool.lock(call)
            status = carry_out(&self.pool.all_blocks, &self.pool.record, &given, op, oldest, &v)
            self.pool.unlock()
        finally:
            ints_free(&given)
        if status != OK:
            refuse(call, &v)
        return 0

    def touch(self, ids):
        """One reference more on each block, in use or committed: a hit. Free ones are in use from now on.

        Raises
        ------
        ValueError, IndexError
            A block is blank, or stands twice; there is no such block. State unchanged.
        OverflowError
            A block has 2^30 references. State unchanged.
        """
        self.run(ids, "touch", OP_TOUCH, False)

    def release(self, ids, *, oldest=False):
        """Give back one reference of each block; of those that end, the first named is taken first.

        Parameters
        ----------
        ids : int or ints
        oldest : bool, default False
            Committed blocks go to the old end of the LRU list: they are evicted before all others.

        Raises
        ------
        DoubleFree, IndexError
            A block has no raw reference, or stands twice; there is no such block. State unchanged.
        PlanStateError
            `oldest` while a step is pending: what is released now waits for it. State unchanged.
        """
        if not isinstance(oldest, bool):
            raise TypeError(f"[release] oldest must be a bool, not {type(oldest).__name__} ({oldest!r})")
        self.run(ids, "release", OP_RELEASE, oldest)

    def commit(self, ids):
        """The content of these blocks is final: once released they are taken last, and `touch` brings them back.

        Raises
        ------
        DoubleFree
            A block has no reference. State unchanged.
        ValueError
            A block is committed already, stands twice, or is in the dropped list of `Pool.take_dropped`. State
            unchanged.
        IndexError
            There is no such block. State unchanged.
        """
        self.run(ids, "commit", OP_COMMIT_BLOCKS, False)

    def uncommit(self, ids):
        """The content of these blocks is gone: free ones are blank at once, the others when they are released.

        Blocks that are not committed stay as they are.

        Raises
        ------
        ValueError, IndexError
            A block stands twice; there is no such block. State unchanged.
        """
        self.run(ids, "uncommit", OP_UNCOMMIT, False)

    def refcounts(self, ids):
        """References of each block, in the order named, also if named twice; int32 ``(ids,)``. Reserved ones have 0.

        Raises
        ------
        IndexError
            There is no such block.
        """
        cdef Ints given
        cdef Verdict v
        cdef int32_t* counts
        cdef Py_ssize_t k
        cdef int64_t i
        cdef int status = OK
        ints_init(&given, &self.pool.spare)
        try:
            ints_get(&given, ids, "refcounts", "ids", True, True, IndexError)
            result = new_int32(given.size if given.size >= 0 else 1)
            counts = <int32_t*>array_data(result)
            self.pool.lock("refcounts")
            for k in range(given.size if given.size >= 0 else 1):
                i = ints_at(&given, k)
                if i < 0 or i >= self.pool.all_blocks.num_blocks:
                    status = refused(&v, NO_SUCH_BLOCK, k, i, 0, self.pool.all_blocks.num_blocks - 1, 0)
                    break
                counts[k] = self.pool.all_blocks.block[i].refcount
            self.pool.unlock()
        finally:
            ints_free(&given)
        if status != OK:
            refuse("refcounts", &v)
        return result

    def free_order(self, n=None):
        """Ids of the next `n` blocks that `take` gives, of all free ones without `n`; int32. Nothing changes.

        Blank blocks come first, then committed ones, the least recently released before the others. O(ids returned).
        """
        cdef Blocks* b = &self.pool.all_blocks
        cdef int64_t asked = INT64_MAX if n is None else to_int(n, "free_order", "n", 0, INT64_MAX)
        cdef int64_t room = -1, size = 0
        cdef int32_t* ids
        while room != size:
            room = size
            result = new_int32(room)
            ids = <int32_t*>array_data(result)
            self.pool.lock("free_order")
            size = min(asked, <int64_t>blocks_available(b))
            if size == room:
                blocks_free_order(b, ids, <int32_t>size)
            self.pool.unlock()
        return result

    @property
    def num_free(self):
        """Blocks that `take` can give: without a reference, blank or committed."""
        cdef int32_t found
        self.pool.lock("num_free")
        found = blocks_available(&self.pool.all_blocks)
        self.pool.unlock()
        return found

    @property
    def num_blank(self):
        """Blank blocks: so many are taken before one is evicted."""
        cdef int32_t found
        self.pool.lock("num_blank")
        found = self.pool.all_blocks.num_blank
        self.pool.unlock()
        return found

    @property
    def usage(self):
        """Share of the blocks that somebody holds, 0.0 to 1.0; reserved ones do not count."""
        cdef int32_t used, all_
        self.pool.lock("usage")
        used, all_ = self.pool.all_blocks.num_used, self.pool.all_blocks.num_blocks - self.pool.all_blocks.reserved
        self.pool.unlock()
        return <double>used / all_
