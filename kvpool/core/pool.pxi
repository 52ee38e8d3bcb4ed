"""`Pool`: blocks, sequences and steps over layer groups, behind one call per step."""

# The arguments of a constructor may run Python code, which finds every object that the garbage collector tracks. What
# is half made is no such object.
cdef extern from "Python.h":
    void making "PyObject_GC_UnTrack"(object made)
    void made "PyObject_GC_Track"(object made)


cdef bint has_entries(tuple groups):
    return any([group.kind != "state" for group in groups])


cdef int init_blocks(State* pool, object num_blocks, object block_size, object reserved_blocks) except -1:
    cdef int64_t n = to_int(num_blocks, "Pool", "num_blocks", 1, INT32_MAX)
    cdef int64_t size = to_int(block_size, "Pool", "block_size", 1, min(<int64_t>INT32_MAX, (<int64_t>1 << 62) // n))
    cdef int64_t reserved = to_int(reserved_blocks, "Pool", "reserved_blocks", 0, n - 1)
    if blocks_init(&pool.blocks, <int32_t>n, <int32_t>reserved, size) != OK:
        raise MemoryError(f"[Pool] no memory for {n} blocks, each needs 48 bytes")
    return 0


cdef int init_seqs(State* pool, object max_seqs, object max_blocks_per_seq, object watermark, tuple groups) except -1:
    cdef Seqs* s = &pool.seqs
    cdef int32_t usable = pool.blocks.num_blocks - pool.blocks.reserved
    cdef int32_t slot
    s.max_seqs = <int32_t>to_int(max_seqs, "Pool", "max_seqs", 1, MAX_SEQS)
    if max_blocks_per_seq is not None:
        s.max_blocks = <int32_t>to_int(max_blocks_per_seq, "Pool", "max_blocks_per_seq", 1, INT32_MAX)
    elif has_entries(groups):
        s.max_blocks = min(usable, max(1, (1 << 27) // s.max_seqs))
    else:
        s.max_blocks = <int32_t>(INT32_MAX // pool.blocks.block_size)
    s.watermark = to_int(watermark, "Pool", "watermark", 0, usable)
    s.memory = xcalloc(s.max_seqs + 1, sizeof(Seq))
    s.life = <SeqLife*>xcalloc(s.max_seqs, sizeof(SeqLife))
    s.free_slot = <int32_t*>xcalloc(s.max_seqs, sizeof(int32_t))
    if s.memory == NULL or s.life == NULL or s.free_slot == NULL:
        raise MemoryError(f"[Pool] no memory for {s.max_seqs} sequences of {s.max_blocks} blocks")
    s.seq = <Seq*>((<size_t>s.memory + sizeof(Seq) - 1) // sizeof(Seq) * sizeof(Seq))
    for slot in range(s.max_seqs):
        s.free_slot[slot] = slot
        s.seq[slot].handle = ~slot
    s.num_free_slots = s.max_seqs
    s.tag = take_tag(&s.first_generation)
    s.base = (s.tag << TAG_SHIFT) | (s.first_generation << SLOT_BITS)
    return 0


cdef tuple init_index(State* pool, object seed, object prefix_cache, object events, object hash_bits):
    """Returns the seed and the number of events that are kept."""
    cdef Seqs* s = &pool.seqs
    cdef int64_t bits = to_int(hash_bits, "Pool", "_hash_bits", 0, 32)
    cdef int64_t room = to_int(events, "Pool", "events", 0, 1 << 30)
    cdef int64_t number = (int.from_bytes(os.urandom(8), "little") >> 1 if seed is None
                           else to_int(seed, "Pool", "seed", 0, INT64_MAX))
    if not to_bool(prefix_cache, "Pool", "prefix_cache"):
        if room:
            raise ValueError(f"[Pool] events ({room}) need prefix_cache=True")
        return number, room
    s.prefix = <SeqPrefix*>xcalloc(s.max_seqs, sizeof(SeqPrefix))
    s.partial = <int32_t*>xcalloc(s.max_seqs, pool.blocks.block_size * sizeof(int32_t))
    if (s.prefix == NULL or s.partial == NULL
            or index_init(&pool.index, pool.blocks.block_size, mix(0x5851F42D4C957F2DULL, <uint64_t>number),
                          <uint64_t>-1 >> (64 - bits) if bits else 0, room) != OK):
        raise MemoryError(f"[Pool] no memory for what the prefix cache has of {s.max_seqs} sequences")
    s.names = &pool.index.names
    return number, room


cdef int init_arenas(State* pool, tuple groups) except -1:
    """All but the blocks of the first. State slots stand behind the arenas of blocks, and none is reserved."""
    cdef dict sizes = arena_sizes(groups, pool.blocks.num_blocks)
    cdef Groups* gs = pool.groups
    cdef int32_t k, reserved, last = max([group.arena for group in groups])
    for k in range(<int32_t>len(sizes)):
        gs.arena[k] = &gs.more[k - 1] if k else &pool.blocks
        gs.num_arenas = pool.num_arenas = k + 1
        pool.sizes[k] = sizes[k]
        reserved = pool.blocks.reserved if k <= last else 0
        if pool.sizes[k] <= reserved:
            raise ValueError(f"[Pool] arena {k} has {pool.sizes[k]} blocks, of which {reserved} are reserved")
        if k and blocks_init(gs.arena[k], pool.sizes[k], reserved, gs.block_size) != OK:
            raise MemoryError(f"[Pool] no memory for {pool.sizes[k]} blocks, each needs 48 bytes")
    return 0


cdef int init_group(State* pool, int32_t k, object group, int32_t arena, int64_t lookahead) except -1:
    cdef Groups* gs = pool.groups
    cdef LayerGroup* g = &gs.group[k]
    g.kind = KINDS.index(group.kind)
    g.arena = arena
    g.blocks = gs.arena[arena]
    g.columns = group.columns
    g.block_size = group.block_size or gs.block_size
    g.shift = (<object>g.block_size).bit_length() - 1 if g.block_size & (g.block_size - 1) == 0 else -1
    if g.kind == STATE_LAYERS:
        g.shift = 62
    g.scale = (<object>(g.block_size // gs.block_size)).bit_length() - 1
    g.reach = group.size
    g.lookahead = lookahead
    g.period = g.block_size if g.kind == WINDOW_LAYERS else g.reach if g.kind == CHUNK_LAYERS else 1
    if g.period & (g.period - 1):
        g.period = 1
    g.phase = lookahead + (g.reach - 1 if g.kind == WINDOW_LAYERS else 0)
    g.kept = <int32_t>((<int64_t>group.keep + g.block_size - 1) // g.block_size)
    g.hole = 0 if pool.blocks.reserved else NO_BLOCK
    gs.has_states |= g.kind == STATE_LAYERS
    gs.lets_go |= g.kind == WINDOW_LAYERS or g.kind == CHUNK_LAYERS
    # A row that lost a part of a block holds as many tokens in one block more.
    width = 1 if g.kind == STATE_LAYERS else (entries_for(g, gs.most_blocks) + 1) * group.columns
    if width > INT32_MAX:
        raise ValueError(f"[Pool] a sequence may have {width} block ids in group {k}, the limit is {INT32_MAX}")
    # Rows start an odd number of cache lines apart: the tails of rows of one length lie in different sets.
    g.width = width if g.kind == STATE_LAYERS else (width + 15) // 16 * 16 | 16
    if group_init(g, gs.seqs, k == 0) != OK:
        raise MemoryError(f"[Pool] no memory for tables of group {k}: {gs.seqs.max_seqs} rows of {width} ids")
    return 0


cdef int init_groups(State* pool, tuple groups, int64_t lookahead) except -1:
    cdef Groups* gs = <Groups*>xcalloc(1, sizeof(Groups))
    cdef int32_t k
    if gs == NULL:
        raise MemoryError("[Pool] no memory for layer groups")
    pool.groups = gs
    gs.seqs = &pool.seqs
    gs.pends = pool.steps_pend
    gs.block_size = pool.blocks.block_size
    gs.seq_tokens = pool.seqs.max_blocks * gs.block_size
    gs.has_entries = has_entries(groups)
    gs.unit = min([(group.block_size or gs.block_size) // gs.block_size for group in groups if group.kind != "state"],
                  default=1)
    gs.longest = INT32_MAX // gs.unit * gs.unit * gs.block_size
    gs.most_blocks = blocks_for(gs, gs.seq_tokens)
    init_arenas(pool, groups)
    if gs.most_blocks > INT32_MAX:
        raise ValueError(f"[Pool] a sequence may have {gs.seq_tokens} tokens, {gs.most_blocks} blocks of the smallest "
                         f"block_size, the limit is {INT32_MAX}")
    gs.num_groups = <int32_t>len(groups)
    for k, arena in enumerate(arenas_of(groups)):
        init_group(pool, k, groups[k], arena, lookahead)
    return 0


cdef int init_tree(State* pool, tuple groups) except -1:
    cdef Groups* gs = pool.groups
    cdef int32_t[MAX_GROUPS] bundle
    cdef int64_t size = 0, room = pool.blocks.num_blocks - pool.blocks.reserved
    cdef int32_t k
    for k in range(gs.num_groups):
        bundle[k] = groups[k].blocks
        size += bundle[k]
    if size > room:
        raise ValueError(f"[Pool] a checkpoint has {size} blocks, arena 0 has {room}: "
                         "give more num_blocks, or blocks=0 to the state groups for no checkpoints")
    gs.tree = <Tree*>xcalloc(1, sizeof(Tree))
    if gs.tree == NULL or tree_init(gs.tree, gs, &pool.index, pool.sizes, bundle) != OK:
        raise MemoryError("[Pool] no memory for the prefix cache")
    return 0


cdef int read_seq(State* pool, object handle, str call, Seq* q) except -1:
    cdef int64_t wanted = get_handle(handle, call)
    cdef int32_t slot
    cdef Verdict v
    pool_enter(pool, call)
    slot = seq_judge_any(&pool.seqs, wanted, -1, &v)
    if slot >= 0:
        q[0] = pool.seqs.seq[slot]
    return pool_end(pool, OK if slot >= 0 else v.reason, &v, call)


cdef int call_rows(State* pool, int op, str call, object handles, str what, object each, object first,
                   object group) except -1:
    """`close`, `truncate`, `compact`, which has a `first` and a `group`, and else `can`, which gets the status."""
    cdef Ints rows, numbers
    cdef Verdict v
    cdef int64_t kept, number
    cdef int status
    ints_init(&rows, &pool.spare)
    ints_init(&numbers, &pool.spare)
    try:
        ints_batch(&rows, handles, call, "handles", False)
        if op != OP_CLOSE:
            ints_get(&numbers, each, call, what, True, True)
        if op == OP_COMPACT:
            kept = to_int(first, call, "first", 0, INT64_MAX)
            number = to_int(group, call, "group", INT64_MIN, INT64_MAX)
        pool_enter(pool, call)
        if op == OP_CLOSE:
            status = pool_close(pool, &rows, &v)
        elif op == OP_TRUNCATE:
            status = pool_truncate(pool, &rows, &numbers, &v)
        elif op == OP_COMPACT:
            status = pool_compact(pool, number, &rows, &numbers, kept, &v)
        else:
            status = pool_can(pool, &rows, &numbers, &v)
        pool_leave(pool)
    finally:
        ints_free(&rows)
        ints_free(&numbers)
    if status == OK or (op == OP_STEP and status in (OUT_OF_BLOCKS, TABLE_TOO_WIDE, SEQ_TOO_LONG)):
        return status
    return refuse(call, &v)


cdef enum:
    FEW_PLANS = 16              # that pass at once without memory for their list

cdef class Pool:
    """Blocks, sequences and steps, by layer groups. Integers only: the pool never sees a tensor.

    Parameters
    ----------
    num_blocks : int
        Blocks of arena 0, reserved ones included; 1 .. 2^31 - 1. A group in another arena says how many that has.
    block_size : int
        Tokens per block, >= 1. A group may have blocks of 2 or 4 times as many.
    max_seqs : int, default 1024
        Sequences that may be open at a time, at most 2^20.
    max_blocks_per_seq : int, optional
        A sequence may hold so many times `block_size` tokens in each layer group: what a window let go of counts,
        evicted tokens do not. Default: all blocks there are, as far as the tables stay below 2^27 entries; in a pool
        with state groups only, as many as have 2^31 - 1 tokens.
    reserved_blocks : int, default 1
        Ids ``0 .. reserved_blocks - 1`` are never handed out: tables may be padded with them, padded writes may
        land there.
    watermark : int, default 0
        Blocks of arena 0 that `open` leaves for the growth of running sequences.
    in_order : bool, default False
        Every step counts as done when it returns: for backends that execute in order and need no rollback.
    seed : int, optional
        Seed of content hashes, random by default. Nothing else in a pool is random.
    prefix_cache : bool, default False
        Index committed blocks by content, so that `open` finds the prefixes that other sequences computed.
    events : int, default 0
        Keep up to this many events of the prefix cache for `PrefixCache.events`; 0: none.
    lookahead : int, default 0
        Tokens that `truncate` can always take back: windows and chunks let go so many tokens later. Less than every
        window and chunk; where there are none, it changes nothing.
    groups : sequence of kvpool.Group, optional
        Layer groups, 1 .. 8: the layers of one kind and one shape, which share a table. Default: one full group, whose
        layers read every token.

    Attributes
    ----------
    options : kvpool.stats.PoolOptions
        What the pool was made with, as it was understood.

    Raises
    ------
    ValueError, TypeError, MemoryError
        A parameter is out of range or of the wrong type; 2,047 pools are alive; no memory.

    Notes
    -----
    All memory is taken here, about 48 bytes a block and 180 a sequence plus its tables. A pool is thread-safe: a call
    waits until the pool's lock is free, without the GIL. Pools are independent of each other. See ``docs/core.md`` for
    the exact rules.

    Examples
    --------
    >>> from kvpool import Plan, Pool
    >>> pool = Pool(num_blocks=8, block_size=4)
    >>> plan = Plan(pool, max_rows=2, max_tokens=8, table_width=2)
    >>> h = pool.open()
    >>> pool.step(plan, [h], 6)
    >>> plan.block_tables.tolist(), plan.slot_mapping.tolist()
    ([[1, 2]], [4, 5, 6, 7, 8, 9])
    >>> pool.done(plan)
    """

    __signature__ = signature(_arguments.Pool)

    def __cinit__(self, *args, **options):
        making(self)
        lock_init(&self.state.mutex)
        self.plans = []
        try:
            self.init(_arguments.Pool(*args, **options))       # errors of Cython would say __cinit__()
        except BaseException:       # a subclass's __del__ gets what there is, and finds a pool that was shut down
            self.shutdown()
            raise
        made(self)

    @cython.callspec("KV_COLD")
    cdef int init(self, tuple given) except -1:
        (num_blocks, block_size, max_seqs, max_blocks_per_seq, reserved_blocks, watermark, in_order, seed, prefix_cache,
         events, lookahead, groups, hash_bits) = given
        lookahead = to_int(lookahead, "Pool", "lookahead", 0, INT32_MAX)
        init_blocks(&self.state, num_blocks, block_size, reserved_blocks)
        groups = read_groups(groups, self.state.blocks.block_size, lookahead, MAX_GROUPS)
        init_seqs(&self.state, max_seqs, max_blocks_per_seq, watermark, groups)
        seed, events = init_index(&self.state, seed, prefix_cache, events, hash_bits)
        self.state.next_step = 1
        self.state.steps_pend = not to_bool(in_order, "Pool", "in_order")
        init_groups(&self.state, groups, lookahead)
        if prefix_cache:
            init_tree(&self.state, groups)
        self.options = PoolOptions(
            self.state.blocks.num_blocks, self.state.blocks.block_size, self.state.seqs.max_seqs,
            self.state.seqs.max_blocks, self.state.blocks.reserved, self.state.seqs.watermark, in_order, seed,
            prefix_cache, events, lookahead, groups)
        return 0

    def __dealloc__(self):
        if self.state.seqs.tag:
            tag_give_back(self.state.seqs.tag, seqs_fresh_generation(&self.state.seqs))
        pool_free(&self.state)
        step_free(&self.state.scratch)
        spare_free(&self.state.spare)
        lock_free(&self.state.mutex)

    def __reduce__(self):
        raise TypeError("[Pool] a pool cannot be pickled or copied")

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.shutdown()

    def __repr__(self):
        cdef int32_t used, sequences
        try:
            pool_enter(&self.state, "repr")
        except PoolClosed:
            return "<kvpool.Pool, shut down>"
        used, sequences = self.state.blocks.num_used, self.state.seqs.num_open
        pool_leave(&self.state)
        return (f"<kvpool.Pool of {self.options.num_blocks} blocks of {self.options.block_size} tokens, "
                f"{used} used by {sequences} sequences>")

    @property
    def num_blocks(self):
        """Blocks of the pool, reserved ones included."""
        return self.options.num_blocks

    @property
    def block_size(self):
        """Tokens per block."""
        return self.options.block_size

    @property
    def prefix(self):
        """The prefix cache, a `PrefixCache`; None in a pool that has none."""
        return PrefixCache(self) if self.options.prefix_cache else None

    @property
    def blocks(self):
        """The blocks of arena 0 by id, a `BlockAPI`: for engines with block tables of their own."""
        return BlockAPI(self)

    # -- sequences

    def open(self, tokens=0, namespace=b"", cut=None, *, reserve=True, load=False, again=False, keep=None):
        """A new sequence: with the cached prefix of a prompt, or empty with blocks for a number of tokens.

        Parameters
        ----------
        tokens : int or ints
            A count: blocks are taken for so many tokens, nothing is matched. Or the prompt, int32, int64 or a list,
            shape ``(n,)``, each 0 .. 2^31 - 1: its longest cached prefix is found, and blocks for the rest taken.
        namespace : bytes, default b""
            Prefixes are shared within a namespace only; see `kvpool.namespace`.
        cut : int, optional
            Where the part of the prompt begins that the next turn may rewrite, 0 .. n; default ``max(0, n - 16)``.
            Where some layer group is not full, a checkpoint is taken there, see `PrefixCache.wanted`.
        reserve : bool, default True
            False: no blocks are taken for the part of a prompt that is not cached.
        load : bool, default False
            True: the bytes of these blocks come from elsewhere, outside the order of steps. Until `loaded` says so,
            the sequence can be read and closed, and nothing else.
        again : bool, default False
            True: the request was admitted before, and its sequence was preempted, say. What the prompt finds now, the
            request may have computed itself, so it counts apart in the statistics. Nothing else differs.
        keep : Keep, optional
            How long what is found, and what the sequence commits, stays cached, and with which priority.

        Returns
        -------
        int
            The handle. Its `num_tokens` is the number of cached tokens: 0 for a count; for a prompt a multiple of the
            largest block size of the groups, below n, so that at least the last token is computed.

        Raises
        ------
        OutOfBlocks
            An arena has too few blocks or state slots; arena 0 would keep fewer than `watermark` free or evictable
            ones. State unchanged.
        CapacityExceeded
            More tokens than `max_blocks_per_seq` blocks have. State unchanged.
        OutOfSequences
            `max_seqs` sequences are open. State unchanged.
        TypeError
            `reserve`, `load` or `again` is no bool, `keep` no `Keep`. State unchanged.
        ValueError
            A `keep` without a prefix cache. A `cut` without a prompt or a prefix cache, with `load`, or behind the
            prompt; `reserve=False` with a count or with `load`; a `load` that no hit could be made of, where some group
            is not full. State unchanged.

        Notes
        -----
        Match, references and blocks are one transaction: what was found cannot be evicted in between. O(n).
        """
        judge_flags(reserve, load, "open")
        return open_tokens(&self.state, tokens, namespace, cut, reserve, "open", True, load,
                           to_bool(again, "open", "again"), keep)

    def loaded(self, handle, n):
        """End what ``open(..., load=True)`` began: the bytes of the first `n` tokens are in the blocks.

        Parameters
        ----------
        handle : int
        n : int
            The new length, from that after `open` to `capacity`; where some layer group is not full, that of the
            prompt. 0: the load failed, the length stays. After a flush the sequence is empty, whatever `n` is: the
            bytes may be of other weights.

        Returns
        -------
        bool
            False: the sequence was closed meanwhile. Its blocks, which were kept for the loader, are released now.

        Raises
        ------
        PlanStateError
            The sequence is not being loaded. State unchanged.
        StaleHandle, ForeignHandle
            `handle` is not open in this pool. State unchanged.
        ValueError
            `n` is out of range. State unchanged.

        Notes
        -----
        O(1), and the blocks of a sequence that was closed or flushed. From then on the sequence is one like any other.
        `commit` makes its tokens known, from ``pool.prefix.committed(handle)`` on.
        """
        cdef int64_t wanted = get_handle(handle, "loaded")
        cdef int64_t length = to_int(n, "loaded", "n", 0, INT64_MAX)
        cdef bint is_open = False
        cdef Verdict v
        pool_enter(&self.state, "loaded")
        pool_end(&self.state, pool_loaded(&self.state, wanted, length, &is_open, &v), &v, "loaded")
        return is_open

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
        cdef int64_t parent = get_handle(handle, "fork")
        cdef int64_t count = to_int(n, "fork", "n", 0, INT64_MAX)
        cdef int64_t* made
        cdef Verdict v
        children = empty(count if count <= self.state.seqs.max_seqs else 0, INT64)       # more will be refused
        made = <int64_t*>array_data(children)   # asks for memory: nothing may fail once the fork is made
        pool_enter(&self.state, "fork")
        pool_end(&self.state, pool_fork(&self.state, parent, count, made, &v), &v, "fork")
        return children

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
            A length is negative or above the current one, or below the length at which tokens were evicted last; a
            layer group has let go of what a query there reads, or has the state of another length; the shapes differ.
            State unchanged.
        """
        call_rows(&self.state, OP_TRUNCATE, "truncate", handles, "lens", lens, None, None)

    def close(self, handles):
        """End sequences, in the order given; their blocks are released youngest first. Legal while a plan is pending.

        Raises
        ------
        StaleHandle, ForeignHandle, ValueError
            A handle is not open in this pool; duplicates. State unchanged.
        """
        call_rows(&self.state, OP_CLOSE, "close", handles, None, None, None, None)

    def defer_close(self, handle):
        """Ask for a sequence to be closed by the next public call. Never mutates: for finalizers.

        A handle that is dead by then is skipped, so it is safe to call for a sequence that was closed, and for a
        pool that was shut down.
        """
        cdef int64_t closing = to_int(handle, "defer_close", "handle", INT64_MIN, INT64_MAX)
        cdef int status = OK
        cdef Verdict v
        pool_enter_any(&self.state, "defer_close")
        if self.state.blocks.block != NULL:
            status = pool_defer(&self.state, closing, &v)
        pool_end(&self.state, status, &v, "defer_close")

    def table(self, handle, group=None):
        """Block ids of a sequence in order, reserved ones included; a copy.

        Parameters
        ----------
        handle : int
        group : int, optional
            A layer group; not needed in a pool that has one.

        Returns
        -------
        ndarray, int32
            Shape ``(entries, columns)``. Without `group`, and if the group has one column, ``(entries,)``. Of a state
            group ``(1,)``, or ``(0,)`` before the first token.

        Raises
        ------
        StaleHandle, ForeignHandle
            `handle` is not open in this pool.
        ValueError
            There is no such group, or no `group` was given and the pool has several.
        """
        cdef int64_t wanted = get_handle(handle, "table")
        cdef int64_t number = ONLY_GROUP if group is None else to_int(group, "table", "group", INT64_MIN + 1, INT64_MAX)
        cdef int32_t columns = 0
        copy = copy_ids(&self.state, wanted, number, "table", pool_table, &columns)
        return copy.reshape(-1, columns) if columns > (group is None) else copy

    def num_tokens(self, handle):
        """Length of a sequence in tokens, evicted ones included: the position of the next one. O(1)."""
        cdef Seq q
        read_seq(&self.state, handle, "num_tokens", &q)
        return q.num_tokens

    def kv_len(self, handle, group=0):
        """Tokens of a sequence that a layer group has: `num_tokens` without those that were evicted from it. O(1).

        What a window or a chunk let go of counts, and so do the tokens that a state stands for.
        """
        cdef int64_t wanted = get_handle(handle, "kv_len"), length = 0
        cdef int64_t number = to_int(group, "kv_len", "group", INT64_MIN, INT64_MAX)
        cdef Verdict v
        pool_enter(&self.state, "kv_len")
        pool_end(&self.state, pool_kv_len(&self.state, wanted, number, &length, &v), &v, "kv_len")
        return length

    def capacity(self, handle):
        """Positions that the tables of a sequence have room for, the same in each layer group. O(1).

        Evicted tokens are among them, as in `num_tokens`.
        """
        cdef Seq q
        read_seq(&self.state, handle, "capacity", &q)
        return q.num_blocks * <object>self.options.block_size

    def is_open(self, handle):
        """Whether a handle names an open sequence of this pool. O(1)."""
        cdef int64_t wanted = to_int(handle, "is_open", "handle", 0, INT64_MAX)
        cdef bint found
        cdef Verdict v
        pool_enter(&self.state, "is_open")
        found = seq_judge_any(&self.state.seqs, wanted, -1, &v) >= 0
        pool_leave(&self.state)
        return found

    # -- steps

    def step(self, plan, handles, num_new=1, *, partial=False, pad_to=None):
        """Grow every sequence of a batch and fill the plan: the one call per step.

        Parameters
        ----------
        plan : Plan
            A plan of this pool that is not pending.
        handles : ints
            The batch, int64, shape ``(S,)``, no duplicates. Keep a sequence in its row to stay O(S).
        num_new : int or ints, default 1
            New tokens, for all rows or per row (int32 or int64, shape ``(S,)``), each >= 0. 0 is a row that only reads.
        partial : bool, default False
            Serve rows in order and skip those whose blocks are not there, instead of raising.
        pad_to : (int, int), optional
            Static shape ``(rows, tokens)`` that the arrays show, padded.

        Raises
        ------
        OutOfBlocks
            The blocks are not there (without `partial`). State unchanged.
        StaleHandle, ForeignHandle
            A handle is not open in this pool. State unchanged.
        CapacityExceeded
            The batch does not fit the plan, a sequence its tables, or it would hold more tokens than
            `max_blocks_per_seq` blocks have. State unchanged.
        PlanStateError
            The plan is pending. State unchanged.
        ValueError, TypeError
            Duplicate handles, negative counts, shapes that differ, a foreign plan. State unchanged.

        Notes
        -----
        O(S) for a decode step with unchanged rows, plus O(blocks) for rows that changed. No Python object per
        token, row or block. The plan is pending until `done` or `rollback`.
        """
        self.run(plan, handles, num_new, "step", True, partial, pad_to)

    def reserve(self, plan, handles, num_new):
        """Take the blocks for `num_new` more tokens per row, without the tokens: lengths do not move.

        Copies that shared blocks need are in the plan, which is pending like after `step`. Until a sequence is
        forked, steps inside its reservation cannot run out of blocks, but of state slots. Raises like `step`.
        """
        self.run(plan, handles, num_new, "reserve", False, False, None)

    cdef int run(self, object plan_, object handles, object num_new, str call, bint advance, object partial,
                 object pad_to) except -1:
        cdef Plan plan = self.check_plan(plan_, call)
        cdef Ints rows, new
        cdef int64_t pad_rows = 0, pad_tokens = -1
        ints_init(&rows, &self.state.spare)
        ints_init(&new, &self.state.spare)
        plan.refuse_pending(call)
        cdef bint some = partial is not False and to_bool(partial, call, "partial")
        try:
            ints_batch(&rows, handles, call, "handles", False)
            ints_get(&new, num_new, call, "num_new", True, True)
            if new.size >= 0 and new.size != rows.size:
                raise ValueError(f"[{call}] {new.size} num_new for {rows.size} handles")
            plan.refuse_rows(rows.size, call)
            if pad_to is not None:
                plan.get_pad(pad_to, call, rows.size, &pad_rows, &pad_tokens)
            self.run_plan(plan, &rows, &new, call, advance, some, pad_rows, pad_tokens)
        finally:
            ints_free(&rows)
            ints_free(&new)
        return 0

    cdef int run_plan(self, Plan plan, const Ints* rows, const Ints* new, str call, bint advance, bint partial,
                      int64_t pad_rows, int64_t pad_tokens) except -1:
        """A step of arguments that fit each other and the plan; `pad_tokens` -1: no padding asked for."""
        cdef Verdict v
        cdef int status = RETRY
        self.keep_plan(plan)
        try:
            pool_enter(&self.state, call)
            status = pool_step(&self.state, plan, rows, new, advance, partial, pad_rows, pad_tokens, &v)
            pool_leave(&self.state)
        finally:
            if status != OK:
                self.let_go_of_plan(plan)
        if status != OK:
            plan.refuse(&v, call, pad_tokens)
        return 0

    cdef Plan check_plan(self, object plan, str call):
        if type(plan) is not Plan:
            raise TypeError(f"[{call}] plan must be a kvpool.Plan, not {type(plan).__name__}")
        if (<Plan>plan).pool is not self:
            raise ValueError(f"[{call}] the plan belongs to another pool ({(<Plan>plan).pool!r})")
        return <Plan>plan

    cdef int keep_plan(self, Plan plan) except -1:
        """Last thing that can fail before the lock is taken: a plan lives as long as its step is pending."""
        if self.state.steps_pend:
            self.plans.append(plan)
        return 0

    cdef int let_go_of_plan(self, Plan plan) except -1:
        if self.state.steps_pend:
            try:
                self.plans.remove(plan)
            except ValueError:              # the pool was shut down meanwhile
                pass
        return 0

    def can(self, handles=None, num_new=1, *, tokens=None, namespace=b"", reserve=True, load=False):
        """Whether a `step`, or with `tokens` an `open`, would find what it needs. No state and no counter changes.

        Parameters
        ----------
        handles, num_new
            As `step` takes them: would it find its blocks and its table room? O(S).
        tokens, namespace, reserve, load
            As `open` takes them: would it find its blocks, beside its hit and the watermark, and room for a sequence?
            O(tokens).

        Returns
        -------
        bool
            False where the call would raise `OutOfBlocks`, `OutOfSequences`, or `CapacityExceeded` for a sequence that
            is too long.

        Raises
        ------
        StaleHandle, ForeignHandle, PlanStateError, TypeError, ValueError
            What `step` or `open` raises for bad arguments; handles and tokens in one call, or neither.

        Examples
        --------
        >>> from kvpool import Pool
        >>> pool = Pool(num_blocks=8, block_size=4)
        >>> pool.can(tokens=28), pool.can(tokens=[5] * 29)
        (True, False)
        """
        if tokens is not None:
            if handles is not None or type(num_new) is not int or num_new != 1:
                raise TypeError("[can] tokens ask for `open`, handles and num_new for `step`: give one of them")
            judge_flags(reserve, load, "can")
            return can_open(&self.state, tokens, namespace, reserve, load)
        if handles is None:
            raise TypeError("[can] handles and tokens are None: give one of them")
        if type(namespace) is not bytes or namespace or reserve is not True or load is not False:
            raise TypeError("[can] namespace, reserve and load belong to tokens, which are None")
        return call_rows(&self.state, OP_STEP, "can", handles, "num_new", num_new, None, None) == OK

    def done(self, plan):
        """Declare a pending plan executed. Plans finish in step order; an early `done` is noted until its turn.

        Raises
        ------
        PlanStateError
            The plan is not pending, or its `done` was noted already. State unchanged.
        """
        self.end_done(self.check_plan(plan, "done"))

    cdef int end_done(self, Plan plan) except -1:
        cdef void* few[FEW_PLANS]
        cdef void** passed = few
        cdef Verdict v
        cdef int32_t k, room, count = 0
        cdef int status = OK
        pool_enter(&self.state, "done")
        room = self.state.pending.size
        if room > FEW_PLANS:
            passed = <void**>xcalloc(room, sizeof(void*))
        if passed != NULL:
            status = pool_done(&self.state, plan, passed, &count, &v)
        pool_leave(&self.state)
        if passed == NULL:
            raise MemoryError(f"[done] no memory for {room} plans")
        for k in range(count):
            self.let_go_of_plan(<Plan>passed[k])
            Py_DECREF(<Plan>passed[k])
        if passed != few:
            xfree(passed)
        return refuse("done", &v) if status != OK else 0

    def rollback(self, plan):
        """Take the newest pending step back: lengths, tables and references of its rows are as before it.

        The blocks it took go through limbo while an older step is pending, else they are blank at once. Evicted cache
        entries stay evicted; rows closed since are skipped. The caller has stopped the backend, or lets an older step
        be pending until it has. Every row of the plan is dirty in its next step.

        Raises
        ------
        PlanStateError
            The plan is not pending, not the newest, declared done, or a sequence that was forked from one of its
            rows since is open. State unchanged.
        """
        self.end_rollback(self.check_plan(plan, "rollback"))

    cdef int end_rollback(self, Plan plan) except -1:
        cdef Verdict v
        pool_enter(&self.state, "rollback")
        pool_end(&self.state, pool_rollback(&self.state, plan, &v), &v, "rollback")
        return self.let_go_of_plan(plan)

    # -- tokens leave a sequence that goes on

    def unshare(self, plan, handles, lens, first=0, group=0):
        """Give sequences blocks of their own where `compact` is going to rewrite them: a step without tokens.

        Parameters
        ----------
        plan : Plan
            A plan of this pool that is not pending. Its copies have to be made; it is pending like after `step`.
        handles : ints
            Open sequences, int64, shape ``(S,)``, no duplicates.
        lens, first, group : as `compact` will get them

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
        cdef Plan p = self.check_plan(plan, "unshare")
        cdef Ints rows, lengths
        cdef Verdict v
        cdef int64_t keep, number
        cdef int status = RETRY
        ints_init(&rows, &self.state.spare)
        ints_init(&lengths, &self.state.spare)
        p.refuse_pending("unshare")
        try:
            ints_batch(&rows, handles, "unshare", "handles", False)
            ints_get(&lengths, lens, "unshare", "lens", True, True)
            keep = to_int(first, "unshare", "first", 0, INT64_MAX)
            number = to_int(group, "unshare", "group", INT64_MIN, INT64_MAX)
            if lengths.size >= 0 and lengths.size != rows.size:
                raise ValueError(f"[unshare] {lengths.size} lens for {rows.size} handles")
            p.refuse_rows(rows.size, "unshare")
            self.keep_plan(p)
            try:
                v.value = 0
                while status == RETRY:
                    if v.value:
                        (<PlanGroup>p.group_plans[number]).room_for_copies(&self.state, v.value)
                    pool_enter(&self.state, "unshare")
                    status = pool_unshare(&self.state, p, number, &rows, &lengths, keep, &v)
                    pool_leave(&self.state)
            finally:
                if status != OK:
                    self.let_go_of_plan(p)
        finally:
            ints_free(&rows)
            ints_free(&lengths)
        if status != OK:
            p.refuse(&v, "unshare", -1)

    def compact(self, handles, lens, first=0, group=0):
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
        group : int, default 0
            The layer group that the tokens leave, a full one; the others keep theirs.

        Raises
        ------
        PlanStateError
            A sequence is a row of a pending plan. State unchanged.
        ValueError
            A length is out of range; a group is out of range or not full; a block that would be rewritten has another
            reference, is committed, or a pending copy reads it: call `unshare` first. State unchanged.

        Notes
        -----
        The pool moves numbers. The data is moved by the backend, `KVBackend.compact`, in the blocks of the table as
        it was, before the next step is executed. `num_tokens` and `capacity` stay, the `kv_len` of the group is the
        new length; blocks are released youngest first, through limbo while steps are pending. From here on the
        sequence commits no more blocks, in no group, and cannot be truncated below the `num_tokens` it has now.
        O(blocks).
        """
        call_rows(&self.state, OP_COMPACT, "compact", handles, "lens", lens, first, group)

    def evict_blocks(self, handle, indices, group=0):
        """Whole blocks leave the table of a sequence; no data moves, and shared blocks stay as others read them.

        Parameters
        ----------
        handle : int
            An open sequence.
        indices : ints
            Places in its table, int32 or int64, shape ``(n,)``, ascending. Each must be full:
            ``0 <= index < kv_len // block_size``, both of the group.
        group : int, default 0
            The layer group that the blocks leave, a full one. With columns an entry of its table leaves as a whole.

        Raises
        ------
        PlanStateError
            The sequence is a row of a pending plan. State unchanged.
        ValueError
            The indices do not ascend, or one is out of range; a group is out of range or not full. State unchanged.
        StaleHandle, ForeignHandle
            `handle` is not open in this pool. State unchanged.

        Notes
        -----
        What `compact` says of lengths, `truncate` and `commit` holds here too. O(blocks).
        """
        cdef int64_t wanted = get_handle(handle, "evict_blocks")
        cdef int64_t number = to_int(group, "evict_blocks", "group", INT64_MIN, INT64_MAX)
        cdef Ints places
        cdef Verdict v
        ints_init(&places, &self.state.spare)
        try:
            ints_batch(&places, indices, "evict_blocks", "indices", True)
            pool_enter(&self.state, "evict_blocks")
            pool_end(&self.state, pool_evict_blocks(&self.state, wanted, number, &places, &v), &v, "evict_blocks")
        finally:
            ints_free(&places)

    # -- the whole pool

    def resize(self, num_blocks, arena=0):
        """Another number of blocks, or of state slots. What is cached may leave, what lives moves.

        Parameters
        ----------
        num_blocks : int or dict
            Blocks of the arena from now on, reserved ones included. A dict has them for several arenas, all or none.
        arena : int, default 0
            Which one. State groups have those behind the arenas of blocks, in their order.

        Returns
        -------
        moves : ndarray, int32, shape ``(K, 2)``
            (source, destination): block `destination` is what block `source` was, so the backend copies it before the
            next step, and before it lets go of the memory behind the new end. A dict of these for a dict.

        Raises
        ------
        PlanStateError
            A step is pending, or a sequence is being loaded. State unchanged.
        OutOfBlocks
            More blocks are in use than would be there. State unchanged.
        ValueError
            Reserved blocks, the watermark or a checkpoint would not fit; a block that would move has references of
            `blocks`; no such arena. State unchanged.
        CapacityExceeded
            Slots would pass what int32 holds, while plans may have such. State unchanged.
        TypeError, MemoryError
            State unchanged.

        Notes
        -----
        A larger arena gets blank blocks, taken after those that it has. A smaller one evicts what leaves first, until
        the rest fits; then what lies behind the new end moves into the blank blocks that would be taken next. Tables,
        the prefix cache, pins and checkpoints follow, and each row that changed is dirty in its next step.
        `max_blocks_per_seq` stays. O(blocks + table entries); the blocks that leave the arena are not cleared.

        Examples
        --------
        >>> from kvpool import Pool
        >>> pool = Pool(num_blocks=8, block_size=4)
        >>> first, second = pool.open(12), pool.open(8)
        >>> pool.close(first)
        >>> pool.resize(4).tolist(), pool.table(second).tolist()
        ([[4, 1], [5, 2]], [1, 2])
        """
        found = self.resize_arenas(num_blocks, arena, NULL, INT64_MAX)
        return found if isinstance(num_blocks, dict) else found.popitem()[1]

    @cython.callspec("KV_COLD")
    cdef dict resize_arenas(self, object num_blocks, object arena, int32_t* to, int64_t room_there):
        """Resize some arenas, all or none; returns the moves of each. Whatever can fail is made before.

        `to`: where those of the one arena go instead, with room for so many; what is returned has their number alone.
        """
        cdef dict wanted = read_sizes(num_blocks, arena, self.state.num_arenas)
        cdef int32_t[MAX_ARENAS] sizes, room, counts
        cdef int32_t* moves[MAX_ARENAS]
        cdef Verdict v
        cdef int32_t k
        cdef int status = RETRY
        cdef dict target, found
        memset(room, 0, sizeof(room))
        while status == RETRY:
            options = self.options
            target = arena_sizes(options.groups, options.num_blocks) | wanted
            changed = options._replace(num_blocks=target[0], groups=resized(options.groups, target))
            found = {k: empty((room[k], 2), INT32) for k in wanted}
            for k in range(len(target)):
                if room[k] > room_there:
                    raise ValueError(f"[resize] there is room for {room_there} moves, there may be {room[k]}")
                sizes[k] = target[k]
                moves[k] = NULL if k not in found else <int32_t*>array_data(found[k]) if to == NULL else to
            pool_enter(&self.state, "resize")
            if self.options is options:         # else another thread was faster
                status = pool_resize(&self.state, sizes, moves, room, counts, &v)
            if status == OK:
                options, self.options = self.options, changed
            for k in range(self.state.num_arenas):
                room[k] = blocks_behind(self.state.groups.arena[k], sizes[k])
            pool_end(&self.state, status, &v, "resize")
        for number in found:
            found[number] = shortened(found[number], counts[number])
        return found

    def reset(self):
        """Close everything: sequences, raw references, pending plans, cached blocks. No KV data is touched.

        Every handle is stale afterwards; plans stay usable. The backend must be idle. O(num_blocks + max_seqs).
        """
        cdef void** plans
        cdef int32_t k, room
        pool_enter(&self.state, "reset")
        room = self.state.pending.size
        plans = <void**>xcalloc(room + 1, sizeof(void*))
        if plans != NULL:
            pool_reset(&self.state, plans)
        pool_leave(&self.state)
        if plans == NULL:
            raise MemoryError(f"[reset] no memory for {room} plans")
        for k in range(room):
            self.let_go_of_plan(<Plan>plans[k])
            Py_DECREF(<Plan>plans[k])
        xfree(plans)

    def shutdown(self):
        """Give back all memory; every later call raises `PoolClosed`. Idempotent."""
        cdef Step* p
        cdef int64_t tag, fresh = 0
        pool_enter_any(&self.state, "shutdown")
        tag = self.state.seqs.tag
        if tag:                     # else it was shut down before, or never made
            fresh = seqs_fresh_generation(&self.state.seqs)
        p = self.state.pending.oldest
        while p != NULL:
            set_flag(&p.pending, False)
            p = p.newer
        memset(&self.state.pending, 0, sizeof(self.state.pending))
        pool_free(&self.state)
        pool_leave(&self.state)
        if tag:
            tag_give_back(tag, fresh)   # takes the lock that a fork takes before those of pools
        self.plans.clear()

    def stats(self, arena=0):
        """Counters, O(1); see `kvpool.stats.PoolStats`. Blocks are those of one arena, the rest is the pool's."""
        cdef int64_t number = to_int(arena, "stats", "arena", INT64_MIN, INT64_MAX)
        cdef Blocks b
        cdef Seqs s
        cdef int32_t pending, arenas
        cdef int64_t capacity
        pool_enter(&self.state, "stats")
        arenas = self.state.groups.num_arenas
        b = self.state.blocks
        if 0 < number < arenas:
            b = self.state.groups.arena[number][0]
        s = self.state.seqs
        pending = self.state.pending.size
        pool_leave(&self.state)
        if not 0 <= number < arenas:
            raise ValueError(f"[stats] arena is out of range ({number}), it must be in 0 .. {arenas - 1}")
        capacity = s.sum_blocks * self.options.block_size
        return PoolStats(
            b.num_blocks, b.reserved, b.num_blank, b.num_evictable, b.limbo.size, b.num_used, b.num_shared, s.num_open,
            pending, b.cow_copies, b.cow_tokens, b.allocs, b.evictions, b.peak_used, s.sum_tokens, capacity,
            1.0 - s.sum_tokens / <double>capacity if capacity else 0.0, s.evicted_tokens)

    def digest(self):
        """64 bits chained over every call that changed something, and its results. O(1).

        Equal calls on equally built pools give equal digests, in any process and build: ranks that keep
        replicated tables compare 8 bytes instead of tables.
        """
        cdef uint64_t found
        pool_enter(&self.state, "digest")
        found = self.state.blocks.digest
        pool_leave(&self.state)
        return found

    def fingerprint(self):
        """64 bits recomputed from all that influences a later call, orders of lists included. O(state)."""
        cdef uint64_t h
        cdef const Step* p
        pool_enter(&self.state, "fingerprint")
        h = blocks_fingerprint(&self.state.blocks, 0, self.state.next_step)
        h = seqs_fingerprint(&self.state.seqs, &self.state.blocks, h, self.state.next_step)
        h = mix(mix(h, self.state.steps_pend), self.state.pending.size)
        p = self.state.pending.oldest
        while p != NULL:
            h = step_fingerprint(p, &self.state.seqs, h, self.state.next_step)
            p = p.newer
        h = groups_fingerprint(self.state.groups, &self.state.pending, h, self.state.next_step)
        pool_leave(&self.state)
        return h

    def check(self):
        """Recompute every invariant and every counter. O(state), for tests and for debugging.

        Raises
        ------
        CorruptState
            Something does not hold; the message says what.
        """
        cdef char[FINDING] finding
        cdef bint wrong
        cdef int32_t room
        cdef int32_t* seen
        pool_enter(&self.state, "check")
        room = audit_room(&self.state)
        seen = <int32_t*>xmalloc((2 * <size_t>room + 1) * sizeof(int32_t))
        wrong = seen != NULL and groups_check(self.state.groups, &self.state.pending, seen, room, finding)
        pool_leave(&self.state)
        if seen == NULL:
            raise MemoryError(f"[check] no memory for {room} blocks or nodes")
        xfree(seen)
        if wrong:
            raise CorruptState(f"[check] {finding.decode()}")
