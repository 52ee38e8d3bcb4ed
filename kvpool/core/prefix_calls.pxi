"""The prefix cache of a pool: open with tokens, match, commit, pin, flush, events, statistics."""

# ---- in C, under the lock ----------------------------------------------------------------------------------

cdef Name* enter_name(State* pool, Name* known, uint64_t hash, const char* space, int64_t size,
                      Verdict* v) noexcept nogil:
    """A sequence more in a namespace, which is known from now on. Last of what can fail in a call."""
    cdef Index* ix = &pool.index
    cdef Name* name = known
    if known == NULL:
        name = name_new(&ix.names, hash, space, size)
        if name == NULL or names_add(&ix.names, name) != OK:
            name_let_go(name)
            refused(v, NO_MEMORY, -1, ix.names.size + <int64_t>1, 0, 0, 0)
            return NULL
    name.users += 1
    return name


cdef int64_t pool_next_handle(State* pool) noexcept nogil:
    """The handle that the next sequence gets; -1: there is no room for one."""
    return seq_next_handle(&pool.seqs) if pool.seqs.num_free_slots else -1


cdef void row_joins(State* pool, int32_t slot, const Ints* tokens, Name* name, uint32_t root_hash, const Hit* hit,
                    int64_t cut, bint take, bint load, bint again) noexcept nogil:
    """A new row is in a namespace: what the prefix cache knows of it."""
    cdef Groups* gs = pool.groups
    cdef RowPlaces* row = &gs.tree.row[slot]
    cdef Lookups* counted = &pool.index.lookups[again]
    cdef SeqPrefix* prefix = &gs.seqs.prefix[slot]
    prefix.committed = prefix.done = prefix.forked_at = row.hit = gs.seqs.seq[slot].num_tokens
    prefix.published = hit.nodes
    prefix.name = name
    prefix.root_hash = root_hash
    row.cut = row.junction = row.keep.priority = 0
    memset(row.taken, 0xFF, sizeof(row.taken))          # NO_CHECKPOINT
    if load:
        row.cut = tokens.size
        if gs.tree.bundle_size:
            bundle_take(gs, checkpoint_new(gs, tokens.size), slot, SAVED_ELSEWHERE)
    elif take and tokens.data != NULL:
        row.cut = max(tokens.size - TAIL_TOKENS, <int64_t>0) if cut < 0 else cut
        row.junction = min(hit.known * gs.block_size, row.cut)
        counted.prompts += 1
        counted.tokens += tokens.size
        counted.hit_tokens += row.hit


cdef int pool_open(State* pool, const Ints* tokens, const char* space, int64_t size, int64_t cut, bint take,
                   bint reserve, bint load, bint again, bint asked, const Directive* keep, Verdict* v) noexcept nogil:
    """Match, judge, then commit. `take`: the last token is computed. `reserve`: blocks for the rest of the prompt.

    `load`: somebody fills these, `pool_loaded` ends that. `again`: the prompt counts apart. `tokens.data` NULL: a
    count. `cut`: see docs/prefix.md, -1: not told. `asked`: whether it could be opened is all that is wanted, nothing
    is committed. `keep`: NULL or with priority 0: none, its ttl is then that of a pin. Else the sequence gets the
    handle that `pool_next_handle` told.
    """
    cdef Groups* gs = pool.groups
    cdef Seqs* s = &pool.seqs
    cdef Tree* t = gs.tree
    cdef Name* name = NULL
    cdef uint64_t hash = names_hash(&pool.index.names, space, size) if t != NULL else 0
    cdef Hit hit = no_hit(<uint32_t>hash & pool.index.keep)
    cdef int64_t[MAX_ARENAS] need
    cdef int32_t slot
    cdef bint is_kept = t != NULL and keep != NULL and keep.priority
    cdef bint is_timed = t != NULL and keep != NULL and keep.priority == 0 and keep.ttl > 0
    if t == NULL and load and (gs.lets_go or gs.has_states):
        return refused(v, CANNOT_LOAD, -1, 0, 0, 0, 0)
    if tokens.size > gs.seq_tokens:
        return refused(v, PROMPT_TOO_LONG, -1, tokens.size, 0, gs.seq_tokens, 0)
    if t != NULL:
        name = names_find(&pool.index.names, hash, space, size)
        if load and judge_load(gs, tokens.size, v) != OK:
            return v.reason
    if name != NULL and tokens.data != NULL and not (load and t.needs_checkpoints):     # its window begins elsewhere
        hit = tree_match(gs, name.slot, <uint32_t>hash & pool.index.keep, <const int32_t*>tokens.data,
                         max(tokens.size - take, <int64_t>0) // gs.block_size)
    if judge_open(gs, tokens, &hit, reserve, load, need, v) != OK:
        return v.reason
    if s.num_free_slots == 0:
        return refused(v, OUT_OF_SEQUENCES, -1, 1, 0, s.max_seqs, s.num_open)
    if asked:
        return OK
    if (is_kept and keeping_init(t) != OK) or (is_timed and pins_init(t, s.max_seqs) != OK):
        return refused(v, NO_MEMORY, -1, t.room, 0, 0, 0)
    if t != NULL:
        name = enter_name(pool, name, hash, space, size, v)
        if name == NULL:
            return v.reason
    slot = open_row(gs, tokens, &hit, need, reserve, take, load)
    if t != NULL:
        row_joins(pool, slot, tokens, name, <uint32_t>hash & pool.index.keep, &hit, cut, take, load, again)
    mix_open(gs, slot, &hit, need, load)
    if is_kept:
        t.row[slot].keep = keep[0]
        row_keep(gs, slot, keep)
    if is_timed:
        ends_insert(t.pins, t.now, slot, t.now + keep.ttl, NO_NODE)
        gs.arena[0].digest = mix(mix(gs.arena[0].digest, OP_PIN_TTL), keep.ttl)
    return OK


cdef void mix_open(Groups* gs, int32_t slot, const Hit* hit, const int64_t* need, bint load) noexcept nogil:
    """The digest of a new row; its bytes come from elsewhere from now on if it is loaded."""
    cdef uint64_t digest = mix(gs.arena[0].digest, OP_OPEN)
    cdef int64_t taken = 0
    cdef int32_t k
    for k in range(gs.num_arenas):
        taken += need[k]
    if gs.tree != NULL:
        digest = mix(mix(mix(digest, gs.seqs.seq[slot].num_blocks), hit.digest), hit.nodes)
    else:
        digest = mix(digest, taken)
    gs.arena[0].digest = mix(digest, untagged(gs.seqs, gs.seqs.seq[slot].handle))
    if load:
        seq_begin_load(gs.seqs, slot)
        gs.arena[0].digest = mix(gs.arena[0].digest, OP_LOADED)


cdef int64_t pool_match(State* pool, const Ints* prompt, const char* space, int64_t space_size) noexcept nogil:
    cdef uint64_t hash = names_hash(&pool.index.names, space, space_size)
    cdef Name* name = names_find(&pool.index.names, hash, space, space_size)
    cdef int64_t bs = pool.groups.block_size
    cdef int64_t most = min(max(prompt.size - 1, <Py_ssize_t>0) // bs, <int64_t>pool.seqs.max_blocks)
    if name == NULL:
        return 0
    return tree_match(pool.groups, name.slot, <uint32_t>hash & pool.index.keep, <const int32_t*>prompt.data,
                      most).nodes * bs


cdef int pool_commit(State* pool, Ints* rows, Ints* counts, const Ints* tokens, bint even,
                     const Directive* keep, Verdict* v) noexcept nogil:
    """All rows or none; `even`: equally many tokens for each, whatever `counts` is. `keep`: see `pool_open`."""
    cdef const int32_t* data = <const int32_t*>tokens.data
    cdef Py_ssize_t k
    cdef const Directive* own
    cdef int64_t at = 0, count, told
    cdef int32_t slot
    cdef int status = OK
    if not has_tree(pool):
        return refused(v, NOT_INDEXED, -1, 0, 0, 0, 0)
    status = seqs_judge(&pool.seqs, rows, NULL, False, v)
    if status != OK:
        return status
    if even and tokens.size % max(rows.size, <Py_ssize_t>1):
        return refused(v, UNEVEN_TOKENS, -1, tokens.size, 0, 0, rows.size)
    if even:
        counts.scalar = tokens.size // max(rows.size, <Py_ssize_t>1)
    if counts.size >= 0 and counts.size != rows.size:
        return refused(v, BAD_SHAPE, -1, counts.size, 0, 0, rows.size)
    for k in range(pool.groups.num_arenas):
        blocks_new_stamp(pool.groups.arena[k])
    for k in range(rows.size):
        count = ints_at(counts, k)
        if count > tokens.size - at:
            return refused(v, TOO_FEW_TOKENS, k, tokens.size, 0, 0, 0)
        status = judge_commit(pool, rows, counts, data, k, at, v)
        if status != OK:
            return status
        at += count
    if at != tokens.size:
        return refused(v, TOO_MANY_LEFT, -1, tokens.size, 0, 0, at)
    if keep != NULL and keep.priority and keeping_init(pool.groups.tree) != OK:
        return refused(v, NO_MEMORY, -1, pool.groups.tree.room, 0, 0, 0)
    at = 0
    for k in range(rows.size):
        count = ints_at(counts, k)
        slot = slot_of(ints_at(rows, k))
        told = pool.seqs.prefix[slot].committed
        tree_commit_row(pool.groups, slot, data + at, count)
        at += count
        own = &pool.groups.tree.row[slot].keep
        if keep != NULL and keep.priority:
            row_keep(pool.groups, slot, keep)
        elif own.priority and told < own.tokens:
            row_keep(pool.groups, slot, own)
    return OK


cdef int judge_commit(State* pool, const Ints* rows, const Ints* counts, const int32_t* tokens, Py_ssize_t row,
                      int64_t at, Verdict* v) noexcept nogil:
    """Row `row`, whose tokens are those from `at` on. An entry that another sequence committed, or that an earlier
    row of this very call is going to, must say the same."""
    cdef int32_t slot = slot_of(ints_at(rows, row))
    cdef int64_t count = ints_at(counts, row), known = pool.seqs.prefix[slot].committed
    cdef int64_t limit = seq_done(&pool.seqs, &pool.blocks, slot)
    if count < 0:
        return refused(v, NEGATIVE_COUNT, row, count, 0, 0, 0)
    if count and pool.seqs.life[slot].point:
        return refused(v, EVICTED_ROW, row, count, 0, 0, 0)
    if count > limit - known:
        return refused(v, NOT_DONE_YET, row, count, known, limit, pool.seqs.seq[slot].num_tokens)
    return judge_tokens(pool.groups, rows, counts, tokens, <int32_t>row, at, v)


cdef int pool_flush(State* pool, const char* space, int64_t size, int32_t* count, Verdict* v) noexcept nogil:
    """Forget a namespace, `size` -1: all. RETRY: `count` was not, and now is, what will become blank."""
    cdef Index* ix = &pool.index
    cdef uint64_t hash = names_hash(&ix.names, space, size) if size >= 0 else 0
    cdef Name* name = names_find(&ix.names, hash, space, size) if size >= 0 else NULL
    cdef bint is_known = size < 0 or name != NULL
    cdef int32_t blank = tree_evictable(pool.groups, name) if is_known else 0
    if count[0] != blank:
        count[0] = blank
        return RETRY
    if not is_known and ix.ring.limit:      # that is an event all the same
        name = name_new(&ix.names, hash, space, size)
        if name == NULL:
            return refused(v, NO_MEMORY, -1, 1, 0, 0, 0)
    elif name != NULL:
        name.references += 1                # it is forgotten when its last user is gone
    if is_known:
        tree_flush(pool.groups, name)
    if name != NULL:
        ring_add(&ix.ring, CLEARED, NULL, NULL, name, NULL, 0, -1)
        name_let_go(name)
    pool.blocks.digest = mix(mix(pool.blocks.digest, OP_FLUSH), <uint64_t>blank)
    pool.blocks.digest = mix_bytes(pool.blocks.digest, <const unsigned char*>space, size)
    return OK


cdef int pool_tick(State* pool, int64_t now, Verdict* v) noexcept nogil:
    if not has_tree(pool):
        return refused(v, NOT_INDEXED, -1, 0, 0, 0, 0)
    if now < pool.groups.tree.now:
        return refused(v, CLOCK_BACK, -1, now, pool.groups.tree.now, 0, 0)
    tree_tick(pool.groups, now)
    pool.blocks.digest = mix(mix(pool.blocks.digest, OP_TICK), now)
    return OK


cdef int pool_limit_kept(State* pool, const char* space, int64_t size, int64_t blocks, Verdict* v) noexcept nogil:
    """How many nodes a namespace may keep, NO_LIMIT: as many as there are. A namespace with a limit is known."""
    cdef uint64_t hash
    cdef Name* name
    if not has_tree(pool):
        return refused(v, NOT_INDEXED, -1, 0, 0, 0, 0)
    hash = names_hash(&pool.index.names, space, size)
    name = names_find(&pool.index.names, hash, space, size)
    if name != NULL or blocks != NO_LIMIT:
        name = enter_name(pool, name, hash, space, size, v)
        if name == NULL:
            return v.reason
        if name.most_kept != NO_LIMIT:
            name_leave(&pool.index.names, name)
        name.most_kept = blocks
        if blocks == NO_LIMIT:
            name_leave(&pool.index.names, name)
    pool.blocks.digest = mix(mix(pool.blocks.digest, OP_LIMIT_KEPT), <uint64_t>blocks)
    pool.blocks.digest = mix_bytes(pool.blocks.digest, <const unsigned char*>space, size)
    return OK


cdef int pool_bundle(State* pool, int64_t handle, int64_t group, const int32_t** ids, int64_t* n, int32_t* columns,
                     Verdict* v) noexcept nogil:
    """Where the blocks with a state of the checkpoint of a row are, and how many; they have no columns."""
    cdef Tree* t = pool.groups.tree
    cdef int32_t m = NO_CHECKPOINT, first
    cdef int32_t slot = seq_judge_any(&pool.seqs, handle, -1, v)
    if slot < 0:
        return v.reason
    if t == NULL or not 0 <= group < pool.groups.num_groups or pool.groups.group[group].kind != STATE_LAYERS:
        return refused(v, NO_STATE_GROUP, -1, group, 0, 0, 0)
    first = pool.groups.group[t.state_group].table[slot]
    if pool.seqs.life[slot].life == LOADING:
        m = t.row[slot].taken[0]
    elif first != NO_BLOCK:
        m = t.load[first]
    n[0] = t.span[group] if m != NO_CHECKPOINT else 0
    ids[0] = checkpoint_bundle(t, max(m, 0)) + t.offset[group]
    return OK


# ---- for Python --------------------------------------------------------------------------------------------

cdef int read_prompt(Ints* prompt, object tokens, object namespace, bint reserve, bint take, str call) except -1:
    """What is to be opened. `take`: a count, `prompt.data` NULL, is accepted too: there is nothing to match."""
    if type(namespace) is not bytes:
        raise TypeError(f"[{call}] namespace must be bytes, not {type(namespace).__name__}")
    if take and (not hasattr(tokens, "__len__") or getattr(tokens, "ndim", 1) == 0):
        prompt.size = to_int(tokens, call, "tokens", 0, INT64_MAX)
        if not reserve:
            raise ValueError(f"[{call}] reserve is False for a count of {prompt.size} tokens, only a prompt can be "
                             "opened without blocks")
        return 0
    ints_get(prompt, tokens, call, "tokens", False, True)
    return ints_tokens(prompt, call)


cdef int judge_flags(object reserve, object load, str call) except -1:
    cdef bint reserves = to_bool(reserve, call, "reserve")
    if to_bool(load, call, "load") and not reserves:
        raise ValueError(f"[{call}] load is True and reserve is False: there are no blocks to be loaded")
    return 0


cdef int read_keep(Directive* d, object keep, str call) except -1:
    d.priority, d.ttl, d.tokens = 0, 0, INT64_MAX
    if keep is None:
        return 0
    if not isinstance(keep, Keep):
        raise TypeError(f"[{call}] keep must be a Keep, not {type(keep).__name__} ({keep!r})")
    d.priority, d.ttl = keep.priority, keep.ttl
    if keep.tokens is not None:
        d.tokens = keep.tokens
    return 0


cdef bint can_open(State* pool, object tokens, object namespace, bint reserve, bint load) except -1:
    """Whether `open_tokens` would find its blocks and a row, of a prompt that is not too long."""
    cdef Ints prompt
    cdef Verdict v
    cdef int status
    ints_init(&prompt, &pool.spare)
    try:
        read_prompt(&prompt, tokens, namespace, reserve, True, "can")
        pool_enter(pool, "can")
        status = pool_open(pool, &prompt, PyBytes_AS_STRING(namespace), PyBytes_GET_SIZE(namespace), -1, True, reserve,
                           load, False, True, NULL, &v)
        pool_leave(pool)
    finally:
        ints_free(&prompt)
    if status not in (OK, OUT_OF_BLOCKS, OUT_OF_SEQUENCES, NO_CHECKPOINTS, PROMPT_TOO_LONG):
        refuse("can", &v)
    return status == OK


cdef object open_tokens(State* pool, object tokens, object namespace, object cut, bint reserve, str call, bint take,
                        bint load, bint again, object keep, object ttl=None):
    """A new sequence over what is cached of a prompt, or with blocks for a count; see `pool_open`."""
    cdef Ints prompt
    cdef object handle
    cdef int64_t next_handle = -2, place = -1       # no handle, and none that `pool_next_handle` tells
    cdef Directive told
    cdef Verdict v
    cdef int status = RETRY
    cdef bint is_indexed = False
    read_keep(&told, keep, call)
    if keep is not None or cut is not None:
        pool_enter(pool, call)          # it may have been shut down
        is_indexed = has_tree(pool)
        pool_leave(pool)
    if ttl is not None:
        told.ttl = to_int(ttl, call, "ttl", 1, INT64_MAX >> 1)
    if keep is not None and not is_indexed:
        raise ValueError(f"[{call}] keep is {keep}, but the pool has no prefix cache: leave it out")
    ints_init(&prompt, &pool.spare)
    try:
        read_prompt(&prompt, tokens, namespace, reserve, take, call)
        if cut is not None:
            place = to_int(cut, call, "cut", 0, prompt.size)
            if not is_indexed:
                raise ValueError(f"[{call}] cut is {place}, but the pool has no prefix cache: leave it out")
            if load:
                raise ValueError(f"[{call}] cut is {place}, but load is True: leave it out")
            if prompt.data == NULL:
                raise ValueError(f"[{call}] cut is {place}, but tokens are a number, not a prompt")
        while status == RETRY:
            handle = next_handle            # made before anything moves
            pool_enter(pool, call)
            if next_handle == pool_next_handle(pool):
                status = pool_open(pool, &prompt, PyBytes_AS_STRING(namespace), PyBytes_GET_SIZE(namespace), place,
                                   take, reserve, load, again, False, &told, &v)
            else:
                next_handle = pool_next_handle(pool)
            pool_end(pool, status, &v, call)
    finally:
        ints_free(&prompt)
    return handle


@cython.no_gc_clear      # `state` lies in the pool, which has to live as long
cdef class PrefixCache:
    """What a pool knows of contents: prefixes that sequences computed, for prompts that begin alike.

    Parameters
    ----------
    pool : Pool
        A pool with a prefix cache; ``pool.prefix`` is ``PrefixCache(pool)``.

    Raises
    ------
    ValueError
        The pool has no prefix cache.

    Notes
    -----
    `Pool.open` finds cached prefixes. See ``docs/prefix.md`` for the exact rules.

    Examples
    --------
    >>> from kvpool import Plan, Pool
    >>> pool = Pool(num_blocks=8, block_size=4, prefix_cache=True)
    >>> plan = Plan(pool, max_rows=1, max_tokens=8)
    >>> h = pool.open([7, 8, 9, 10, 11])
    >>> pool.step(plan, [h], 5)
    >>> pool.done(plan)
    >>> pool.prefix.commit(h, [7, 8, 9, 10, 11])
    >>> pool.prefix.match([7, 8, 9, 10, 50])
    4
    """

    def __cinit__(self, Pool pool not None):
        if not pool.options.prefix_cache:
            raise ValueError("[PrefixCache] the pool has no prefix cache (prefix_cache=False)")
        self.pool = pool
        self.state = &pool.state

    def __repr__(self):
        return f"<prefix cache of {self.pool!r}>"

    def __reduce__(self):
        raise TypeError("[prefix] the prefix cache of a pool cannot be pickled or copied")

    def match(self, tokens, namespace=b""):
        """Tokens of a prompt that `open` would find cached. No side effect. O(n)."""
        cdef Ints prompt
        cdef int64_t found
        ints_init(&prompt, &self.state.spare)
        try:
            read_prompt(&prompt, tokens, namespace, True, False, "match")
            pool_enter(self.state, "match")
            found = pool_match(self.state, &prompt, PyBytes_AS_STRING(namespace), PyBytes_GET_SIZE(namespace))
            pool_leave(self.state)
            return found
        finally:
            ints_free(&prompt)

    def commit(self, handles, tokens, counts=None, *, keep=None):
        """Make tokens known: the blocks they fill become immutable, and hits for later prompts.

        Parameters
        ----------
        handles : int or ints
            Sequences, int64, shape ``(S,)``, no duplicates.
        tokens : ints
            Tokens of all rows, one after the other, int32 or int64, shape ``(sum of counts,)``: of each row the
            positions after those committed before.
        counts : int or ints, optional
            Tokens per row; default: equally many for each.
        keep : Keep, optional
            How long what the rows have committed stays cached, and with which priority; default: what `open` was told.

        Raises
        ------
        ValueError
            A position is not done yet (its step is pending), tokens contradict a shared block, shapes differ.
            State unchanged.
        StaleHandle, ForeignHandle
            A handle is not open in this pool. State unchanged.

        Notes
        -----
        O(tokens). A duplicate of a known block stays where it is: running tables never change.
        """
        cdef Ints rows, new, all_tokens
        cdef Directive told
        cdef Verdict v
        read_keep(&told, keep, "commit")
        ints_init(&rows, &self.state.spare)
        ints_init(&new, &self.state.spare)
        ints_init(&all_tokens, &self.state.spare)
        try:
            ints_batch(&rows, handles, "commit", "handles", False)
            if counts is not None:
                ints_get(&new, counts, "commit", "counts", True, True)
            ints_get(&all_tokens, tokens, "commit", "tokens", False, True)
            ints_tokens(&all_tokens, "commit")
            pool_enter(self.state, "commit")
            pool_end(self.state, pool_commit(self.state, &rows, &new, &all_tokens, counts is None, &told, &v), &v,
                     "commit")
        finally:
            ints_free(&rows)
            ints_free(&new)
            ints_free(&all_tokens)

    def committed(self, handle):
        """Tokens of a sequence that `commit` was told, or `open` found: the position from which `commit` goes on.

        0 after tokens were evicted. O(1).
        """
        cdef int64_t wanted = get_handle(handle, "committed"), found = 0
        cdef int32_t slot
        cdef Verdict v
        pool_enter(self.state, "committed")
        slot = seq_judge_any(&self.state.seqs, wanted, -1, &v)
        if slot >= 0:
            found = self.state.seqs.prefix[slot].committed
        pool_end(self.state, OK if slot >= 0 else v.reason, &v, "committed")
        return found

    def bundle(self, handle, group):
        """Blocks of arena 0 with the state of a group at which a sequence begins, int32 ``(blocks,)``.

        Those that a loader fills, or those of the hit of `open` or `pin` that no step has loaded yet. Empty: none.

        Raises
        ------
        ValueError
            `group` is not a state group of this pool.
        """
        cdef int64_t wanted = get_handle(handle, "bundle")
        cdef int64_t number = to_int(group, "bundle", "group", INT64_MIN, INT64_MAX)
        cdef int32_t columns = 1
        return copy_ids(self.state, wanted, number, "bundle", pool_bundle, &columns)

    def wanted(self, handles):
        """Where the next step of each sequence should end at the latest, so that a checkpoint is taken there.

        Parameters
        ----------
        handles : int or ints
            Sequences, int64, shape ``(S,)``.

        Returns
        -------
        ndarray
            int64, shape ``(S,)``: a length above that of the sequence, -1: no checkpoint is wanted.
        """
        cdef Ints rows
        cdef Verdict v
        cdef Py_ssize_t k
        cdef int status
        cdef int64_t* found
        ints_init(&rows, &self.state.spare)
        try:
            ints_batch(&rows, handles, "wanted", "handles", False)
            result = empty(rows.size, INT64)
            found = <int64_t*>array_data(result)
            pool_enter(self.state, "wanted")
            status = seqs_judge(&self.state.seqs, &rows, NULL, False, &v)
            for k in range(rows.size if status == OK else 0):
                found[k] = next_checkpoint(self.state.groups.tree, slot_of(ints_at(&rows, k)),
                                           self.state.seqs.seq[slot_of(ints_at(&rows, k))].num_tokens)
            pool_end(self.state, status, &v, "wanted")
        finally:
            ints_free(&rows)
        return result

    def pin(self, tokens, namespace=b"", *, ttl=None):
        """Hold the cached blocks of a prefix, from its root, against eviction; `unpin` lets go.

        Parameters
        ----------
        tokens : ints
            int32 or int64, shape ``(n,)``.
        namespace : bytes
        ttl : int, optional
            1 .. 2^62 - 1, in the unit of the clock of `tick`: the first `tick` that is so much later than the last one
            before the call closes the pin, if nobody has; default: none does.

        Returns
        -------
        int
            The handle of a sequence over all full blocks that are cached; its `num_tokens` says how much that is.

        Raises
        ------
        OutOfBlocks, OutOfSequences, CapacityExceeded
            A group of states has no slot, no row is free, or the tokens are too many. State unchanged.
        TypeError, ValueError
            An argument has another type, or is out of range. State unchanged.

        Notes
        -----
        What `tick` closed is closed: `unpin` of its handle raises `StaleHandle`, `Pool.is_open` says False. A fork of a
        pin has no ttl.

        Examples
        --------
        >>> from kvpool import Pool
        >>> pool = Pool(num_blocks=8, block_size=4, prefix_cache=True)
        >>> pin = pool.prefix.pin([7, 8, 9, 10], ttl=60)
        >>> pool.prefix.tick(59)
        >>> pool.is_open(pin)
        True
        >>> pool.prefix.tick(60)
        >>> pool.is_open(pin)
        False
        """
        return open_tokens(self.state, tokens, namespace, None, False, "pin", False, False, False, None, ttl)

    def unpin(self, handle):
        """Let go of a pinned prefix: `Pool.close`."""
        self.pool.close(handle)

    def tick(self, now):
        """Tell the time, which ends what `Keep` said and closes pins: the pool has no clock of its own.

        Parameters
        ----------
        now : int
            0 .. 2^62 - 1, in the unit of every ttl, not less than before. It is 0 at first.

        Raises
        ------
        TypeError, ValueError
            `now` is not an integer, out of range, or less than before. State unchanged.

        Notes
        -----
        Legal while a plan is pending. Amortised O(1) for each directive and pin. Every rank that is to evict alike must
        be told the same, at the same place.
        """
        cdef int64_t wanted = to_int(now, "tick", "now", 0, INT64_MAX >> 1)
        cdef Verdict v
        pool_enter(self.state, "tick")
        pool_end(self.state, pool_tick(self.state, wanted, &v), &v, "tick")

    def limit_kept(self, namespace, blocks):
        """Limit how much a namespace may keep: a directive that asks for more keeps the first of its tokens.

        Parameters
        ----------
        namespace : bytes
        blocks : int, optional
            Base blocks of tokens, 0 .. 2^30; None: no limit. What is kept already stays so until it ends.

        Raises
        ------
        TypeError, ValueError
            An argument has another type, or is out of range. State unchanged.
        """
        cdef int64_t most = NO_LIMIT
        cdef Verdict v
        if type(namespace) is not bytes:
            raise TypeError(f"[limit_kept] namespace must be bytes, not {type(namespace).__name__}")
        if blocks is not None:
            most = to_int(blocks, "limit_kept", "blocks", 0, 1 << 30)
        pool_enter(self.state, "limit_kept")
        pool_end(self.state, pool_limit_kept(self.state, PyBytes_AS_STRING(namespace), PyBytes_GET_SIZE(namespace),
                                             most, &v), &v, "limit_kept")

    def flush(self, namespace=None):
        """Forget the cached blocks of a namespace, or of all.

        Evictable ones become blank; blocks in use stay with their sequences and become blank when released.

        Returns
        -------
        int
            Blocks that became blank. O(num_blocks + max_seqs).
        """
        cdef const char* space = NULL
        cdef int64_t size = -1
        cdef int32_t count = -1
        cdef object blank
        cdef Verdict v
        cdef int status = RETRY
        if namespace is not None:
            if type(namespace) is not bytes:
                raise TypeError(f"[flush] namespace must be bytes or None, not {type(namespace).__name__}")
            space, size = PyBytes_AS_STRING(namespace), PyBytes_GET_SIZE(namespace)
        while status == RETRY:
            blank = max(count, 0)               # made before anything moves
            pool_enter(self.state, "flush")
            status = pool_flush(self.state, space, size, &count, &v)
            pool_end(self.state, status, &v, "flush")
        return blank

    @property
    def nbytes(self):
        """Bytes that the index has taken, once."""
        cdef int64_t found = 0
        pool_enter_any(self.state, "nbytes")
        if self.state.groups != NULL:               # else the pool was shut down
            found = tree_nbytes(self.state.groups)
        pool_leave(self.state)
        return found

    def stats(self):
        """Counters of the prefix cache, O(1); see `kvpool.stats.PrefixStats`."""
        cdef Index ix
        cdef Tree t
        cdef Lookups first, later
        cdef int32_t kept
        pool_enter(self.state, "stats")
        ix = self.state.index
        first, later = ix.lookups[0], ix.lookups[1]
        t = self.state.groups.tree[0]
        kept = t.keeping.num_kept if t.keeping != NULL else 0
        pool_leave(self.state)
        return PrefixStats(
            first.prompts, first.tokens, first.hit_tokens, first.hit_tokens / <double>first.tokens if first.tokens
            else 0.0, t.num_nodes, ix.inserted, ix.duplicates, ix.evicted, ix.names.size,
            t.num_checkpoints, t.taken, t.published, t.used, t.skipped, t.evicted,
            later.prompts, later.tokens, later.hit_tokens, kept)

    def events(self):
        """Events since the last call, oldest first: tuples as docs/prefix.md lists them.

        The lock of the pool is held while they are taken, not while they become Python objects. If there is no memory
        for these, they count as lost.
        """
        cdef Ring taken
        cdef int64_t k, count, told = 0
        cdef tuple groups = self.pool.options.groups
        found = []
        pool_enter(self.state, "events")
        taken = ring_take(&self.state.index.ring)
        pool_leave(self.state)
        count = taken.size + taken.lost
        try:
            if taken.lost:
                found.append(("lost", taken.lost))
            for k in range(taken.size):
                found.append(ring_event(&taken, k, groups))
            told = count
        finally:
            pool_enter_any(self.state, "events")   # the pool may have been shut down meanwhile
            self.state.index.ring.lost += count - told
            ring_free(&taken)
            pool_leave(self.state)
        return found
