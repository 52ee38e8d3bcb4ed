"""Every call that the fuzzer makes into a pool, and everything that it reads of one.

What is read is what calls return to anybody (tables, lengths, reference counts, statistics, the arrays of a plan),
taken from the pool's memory where a call for each would be slow. It is held against the books; no expectation comes
from here. `direct_*` are calls without the reading of their arguments, for runs in which speed is all that counts.
"""
from libc.stdint cimport int32_t, int64_t

from kvpool._core cimport (
    BLOCK_TABLES, CU_Q_LENS, INDICES, INDPTR, KV_INDPTR, KV_SLOTS, KV_SLOTS_RAGGED, LAST_PAGE_LEN, OK, POSITIONS,
    SEQ_LENS, SLOT_IDS, SLOT_MAPPING, Blocks, Field, Index, Ints, Plan, Pool, Seq, Seqs, Verdict,
    pool_commit, pool_enter, pool_fork, pool_leave, pool_step, refuse, seq_table,
)
from proof.fuzz._books cimport LOADS_IN_VAIN, LOADS_NOT, Line, ceil_blocks, line_table, num_open, open_slot
from proof.fuzz._storage cimport found




def blank_blocks(Pool pool):
    """Ids of the blocks that are free: whoever still reads one of them reads what anybody may overwrite."""
    return [pool.state.blocks.blank[k] for k in range(pool.state.blocks.num_blank)]


cdef inline int64_t get(const Field* f, int64_t i) noexcept nogil:
    """Entry of an array that a plan has filled."""
    return (<int32_t*>f.data)[i] if f.width == 4 else (<int64_t*>f.data)[i]


cdef inline int differs(Finding* f, const char* what, int64_t a, int64_t b, int64_t is_, int64_t due) noexcept nogil:
    """0 if it is what is due. `what` names up to two numbers, then the two that differ."""
    return 0 if is_ == due else found(f, what, a, b, is_, due)


cdef int compare_sequences(const Seqs* q, const Books* b, Finding* f) noexcept nogil:
    cdef int32_t i, k, slot
    cdef int64_t handle
    cdef const Line* line
    cdef const Seq* seq
    cdef const int32_t* table
    cdef const int32_t* due
    for i in range(num_open(b)):
        slot = open_slot(b, i)
        line = &b.line[slot]
        seq = &q.seq[slot]
        handle = seq.handle if line.loads == LOADS_NOT else ~seq.handle
        if line.loads == LOADS_IN_VAIN:
            if seq.handle != -1:
                return found(f, b"pool.is_open(%lld) is %lld%lld, not %lld", line.handle, 1, 0, 0)
        elif handle - q.base != line.handle or handle < 0:
            return found(f, b"pool.is_open(%lld) is %lld%lld, not %lld", line.handle, 0, 0, 1)
        if differs(f, b"pool.num_tokens(%lld)%lld is %lld, not %lld", line.handle, -1,
                   seq.kv_len + q.life[slot].evicted, line.length + line.evicted):
            return -1
        if differs(f, b"pool.kv_len(%lld)%lld is %lld, not %lld", line.handle, -1, seq.kv_len, line.length):
            return -1
        if differs(f, b"pool.capacity(%lld)%lld is %lld, not %lld", line.handle, -1,
                   seq.num_blocks * b.block_size, line.blocks * b.block_size):
            return -1
        table = seq_table(q, slot)
        due = line_table(b, slot)
        for k in range(line.blocks):
            if table[k] != due[k]:
                return found(f, b"pool.table(%lld)[%lld] is %lld, not %lld", line.handle, k, table[k], due[k])
        if q.prefix != NULL and b.indexed and differs(
                f, b"pool.prefix.committed(%lld)%lld is %lld, not %lld", line.handle, -1, q.prefix[slot].committed,
                line.committed):
            return -1
    return 0


cdef int compare_counters(const Blocks* o, const Seqs* q, int64_t pending, const Books* b, Finding* f) noexcept nogil:
    """What `stats` says."""
    if (differs(f, b"pool.stats().blank%lld%lld is %lld, not %lld", -1, -1, o.num_blank, b.num_blank)
            or differs(f, b"pool.stats().evictable%lld%lld is %lld, not %lld", -1, -1, o.lru.size, b.lru.size)
            or differs(f, b"pool.stats().limbo%lld%lld is %lld, not %lld", -1, -1, o.limbo.size, b.limbo.size)
            or differs(f, b"pool.stats().used%lld%lld is %lld, not %lld", -1, -1, o.num_used, b.used)
            or differs(f, b"pool.stats().shared%lld%lld is %lld, not %lld", -1, -1, o.num_shared, b.shared)
            or differs(f, b"pool.stats().sequences%lld%lld is %lld, not %lld", -1, -1, q.num_open, num_open(b))
            or differs(f, b"pool.stats().pending%lld%lld is %lld, not %lld", -1, -1, pending, b.num_queue)
            or differs(f, b"pool.stats().cow_copies%lld%lld is %lld, not %lld", -1, -1, o.cow_copies, b.cow_copies)
            or differs(f, b"pool.stats().cow_tokens%lld%lld is %lld, not %lld", -1, -1, o.cow_tokens, b.cow_tokens)
            or differs(f, b"pool.stats().allocs%lld%lld is %lld, not %lld", -1, -1, o.allocs, b.allocs)
            or differs(f, b"pool.stats().evictions%lld%lld is %lld, not %lld", -1, -1, o.evictions, b.evictions)
            or differs(f, b"pool.stats().peak_used%lld%lld is %lld, not %lld", -1, -1, o.peak_used, b.peak_used)
            or differs(f, b"pool.stats().tokens%lld%lld is %lld, not %lld", -1, -1, q.sum_tokens, b.tokens)
            or differs(f, b"pool.stats().capacity%lld%lld is %lld, not %lld", -1, -1, q.sum_blocks * b.block_size,
                       b.blocks * b.block_size)
            or differs(f, b"pool.stats().evicted_tokens%lld%lld is %lld, not %lld", -1, -1, q.evicted_tokens,
                       b.evicted_tokens)):
        return -1
    return 0


cdef int compare_index(const Index* ix, const Blocks* o, const Books* b, Finding* f) noexcept nogil:
    """What `prefix.stats` says. Nodes that the last call evicted leave the index in the next one."""
    cdef int64_t leaving = 0
    cdef int32_t k
    for k in range(o.num_dropped):
        leaving += ix.uid[o.dropped[k]] != 0
    if (differs(f, b"pool.prefix.stats().queries%lld%lld is %lld, not %lld", -1, -1, ix.queries, b.queries)
            or differs(f, b"pool.prefix.stats().query_tokens%lld%lld is %lld, not %lld", -1, -1, ix.query_tokens,
                       b.query_tokens)
            or differs(f, b"pool.prefix.stats().hit_tokens%lld%lld is %lld, not %lld", -1, -1, ix.hit_tokens,
                       b.hit_tokens)
            or differs(f, b"pool.prefix.stats().nodes%lld%lld is %lld, not %lld", -1, -1,
                       ix.num_nodes - leaving, b.nodes)
            or differs(f, b"pool.prefix.stats().inserted%lld%lld is %lld, not %lld", -1, -1, ix.inserted, b.inserted)
            or differs(f, b"pool.prefix.stats().duplicates%lld%lld is %lld, not %lld", -1, -1, ix.duplicates,
                       b.duplicates)
            or differs(f, b"pool.prefix.stats().evicted%lld%lld is %lld, not %lld", -1, -1,
                       ix.evicted + leaving, b.evicted_nodes)):
        return -1
    return 0


cdef class Calls:
    """The pool of a run, and its plans."""

    def __cinit__(self, shape, make_pool=Pool, trace=None):
        self.pool = make_pool(**shape.pool)
        self.counters = shape.counters
        self.do_open, self.do_fork, self.do_truncate = self.pool.open, self.pool.fork, self.pool.truncate
        self.do_close = self.pool.close
        self.do_commit = self.pool.prefix.commit if self.pool.prefix is not None else None
        self.do_done, self.do_rollback = self.pool.done, self.pool.rollback

    def shutdown(self):
        """Give the pool's memory and tag back."""
        self.pool.shutdown()

    def digest(self):
        """The pool's digest."""
        return self.pool.digest()

    def fingerprint(self):
        """The pool's fingerprint."""
        return self.pool.fingerprint()

    # -- calls without the reading of arguments

    cdef int direct_step(self, int32_t k, const int64_t* handles, const int64_t* counts, int32_t n, bint advance,
                         bint partial) except -1:
        cdef Ints rows, new
        cdef Verdict v
        cdef Plan plan = self.plans[k]
        cdef int status
        rows.data = handles
        new.data = counts
        rows.size = new.size = n
        rows.width = new.width = 8
        self.pool.keep_plan(plan)
        pool_enter(&self.pool.state, "step")
        status = pool_step(&self.pool.state, plan, &rows, &new, advance, partial, 0, -1, &v)
        pool_leave(&self.pool.state)
        if status != OK:
            self.pool.let_go_of_plan(plan)
            plan.refuse(&v, "step", -1)
        return 0

    cdef int direct_fork(self, int64_t handle, int64_t n, int64_t* children) except -1:
        cdef Verdict v
        cdef int status
        pool_enter(&self.pool.state, "fork")
        status = pool_fork(&self.pool.state, handle, n, children, &v)
        pool_leave(&self.pool.state)
        if status != OK:
            refuse("fork", &v)
        return 0

    cdef int direct_commit(self, int64_t handle, const int32_t* tokens, int64_t n) except -1:
        cdef Ints rows, counts, all_tokens
        cdef Verdict v
        cdef int status
        rows.data, rows.size, rows.width = &handle, 1, 8
        counts.data, counts.size = NULL, -1
        all_tokens.data, all_tokens.size, all_tokens.width = tokens, n, 4
        pool_enter(&self.pool.state, "commit")
        status = pool_commit(&self.pool.state, &rows, &counts, &all_tokens, True, &v)
        pool_leave(&self.pool.state)
        if status != OK:
            refuse("commit", &v)
        return 0

    cdef int direct_drain(self) except -1:
        """The least call that closes what was deferred."""
        pool_enter(&self.pool.state, "num_free")
        pool_leave(&self.pool.state)
        return 0

    # -- what is read

    cdef int compare_pool(self, const Books* b, Finding* f) noexcept:
        """Everything that calls tell about sequences, blocks and their counts. 0, or -1 with a finding."""
        cdef int32_t i
        if compare_sequences(&self.pool.state.seqs, b, f):
            return -1
        for i in range(b.reserved, b.num_blocks):
            if self.pool.state.blocks.block[i].refcount != b.page[i].refs:
                return found(f, b"pool.blocks.refcount(%lld)%lld is %lld, not %lld", i, -1,
                             self.pool.state.blocks.block[i].refcount, b.page[i].refs)
        if not self.counters:
            return 0
        if compare_counters(&self.pool.state.blocks, &self.pool.state.seqs, self.pool.state.pending.size, b, f):
            return -1
        if b.indexed:
            if compare_index(&self.pool.state.index, &self.pool.state.blocks, b, f):
                return -1
            if self.pool.state.blocks.num_dropped == 0:     # else the next call forgets nodes, and what they keep known
                return differs(f, b"pool.prefix.stats().namespaces%lld%lld is %lld, not %lld", -1, -1,
                               self.pool.state.index.names.size, b.num_roots)
        return 0

    # -- plans

    cdef int compare_plan(self, int32_t k, const Books* b, const Pending* p, Finding* f) noexcept:
        """Copies, and the slots of new tokens."""
        cdef Plan plan = self.plans[k]
        cdef const Field* slots = &plan.wire.field[SLOT_MAPPING]
        cdef const int32_t* copy = plan.step.copies
        cdef int32_t i, due = 0
        cdef int64_t t
        for i in range(p.num_entries):
            due += p.entry[i].tokens > 0
        if (differs(f, b"plan.copies.shape[0]%lld%lld is %lld, not %lld", -1, -1, plan.copies_made, due)
                or differs(f, b"plan.num_tokens%lld%lld is %lld, not %lld", -1, -1, plan.tokens, p.tokens)):
            return -1
        due = 0
        for i in range(p.num_entries):
            if p.entry[i].tokens == 0:
                continue
            if (differs(f, b"plan.copies[%lld, 0]%lld is %lld, not %lld", due, -1, copy[0], p.entry[i].old)
                    or differs(f, b"plan.copies[%lld, 1]%lld is %lld, not %lld", due, -1, copy[1], p.entry[i].new)
                    or differs(f, b"plan.copies[%lld, 2]%lld is %lld, not %lld", due, -1, copy[2],
                               p.entry[i].tokens)):
                return -1
            due += 1
            copy += 3
        for t in range(p.tokens):
            if get(slots, t) != p.slot[t]:
                return found(f, b"plan.slot_mapping[%lld]%lld is %lld, not %lld", t, -1, get(slots, t), p.slot[t])
        return 0

    cdef int update_mirror(self, int32_t k, const Books* b, Pending* p) noexcept:
        """A consumer copies the rows that the plan calls dirty, and no other."""
        cdef Plan plan = self.plans[k]
        cdef int32_t i, row, at
        for i in range(plan.wire.num_dirty):
            row = plan.wire.dirty[i]
            for at in range(b.width):
                p.mirror[row * b.width + at] = <int32_t>get(&plan.wire.field[BLOCK_TABLES],
                                                            <int64_t>row * b.width + at)
        return 0

    def dirty_rows(self, k):
        """Of the last step of plan k."""
        return (<Plan>self.plans[k]).dirty_rows.tolist()

    cdef int compare_formats(self, int32_t k, const Books* b, const Pending* p, Finding* f) noexcept:
        """Everything else in a plan: rows as a consumer of dirty_rows has them, lengths, positions, tables."""
        cdef Plan plan = self.plans[k]
        cdef const Field* field = plan.wire.field
        cdef int32_t i, at, due
        cdef const Line* line
        cdef const int32_t* table
        cdef int64_t t = 0, position, pages = 0, total = 0, full, bs = b.block_size, slot
        for i in range(p.rows):
            line = &b.line[p.handle[i] & 0xFFFFF]
            table = line_table(b, <int32_t>(p.handle[i] & 0xFFFFF))
            if differs(f, b"plan.served[%lld]%lld is %lld, not %lld", i, -1, plan.wire.served[i], p.served[i]):
                return -1
            for at in range(b.width):
                due = table[at] if at < line.blocks else <int32_t>field[BLOCK_TABLES].pad
                if p.mirror[i * b.width + at] != due:
                    return found(f, b"block_tables[%lld, %lld] by dirty_rows is %lld, not %lld", i, at,
                                 p.mirror[i * b.width + at], due)
            if differs(f, b"plan.seq_lens[%lld]%lld is %lld, not %lld", i, -1, get(&field[SEQ_LENS], i), p.length[i]):
                return -1
            if differs(f, b"plan.cu_q_lens[%lld]%lld is %lld, not %lld", i, -1, get(&field[CU_Q_LENS], i), t):
                return -1
            for position in range(p.before[i], p.length[i]):
                if differs(f, b"plan.positions[%lld]%lld is %lld, not %lld", t, -1, get(&field[POSITIONS], t),
                           position + line.evicted):
                    return -1
                t += 1
            full = ceil_blocks(b, p.length[i])
            if field[SLOT_IDS].width and differs(f, b"plan.slot_ids[%lld]%lld is %lld, not %lld", i, -1,
                                                 get(&field[SLOT_IDS], i), p.handle[i] & 0xFFFFF):
                return -1
            if field[INDPTR].width:
                if (differs(f, b"plan.indptr[%lld]%lld is %lld, not %lld", i, -1, get(&field[INDPTR], i), pages)
                        or differs(f, b"plan.indptr[%lld]%lld is %lld, not %lld", i + 1, -1, get(&field[INDPTR], i + 1),
                                   pages + full)
                        or differs(f, b"plan.last_page_len[%lld]%lld is %lld, not %lld", i, -1,
                                   get(&field[LAST_PAGE_LEN], i), p.length[i] - (full - 1) * bs if full else 0)):
                    return -1
                for at in range(full):
                    if differs(f, b"plan.indices[%lld]%lld is %lld, not %lld", pages + at, -1,
                               get(&field[INDICES], pages + at), table[at]):
                        return -1
            if field[KV_SLOTS].width or field[KV_SLOTS_RAGGED].width:
                for position in range(p.length[i]):
                    slot = table[position // bs] * bs + position % bs
                    if field[KV_SLOTS].width and differs(
                            f, b"plan.kv_slots[%lld, %lld] is %lld, not %lld", i, position,
                            get(&field[KV_SLOTS], i * plan.wire.kv_width + position), slot):
                        return -1
                    if field[KV_SLOTS_RAGGED].width and differs(
                            f, b"plan.kv_slots_ragged[%lld]%lld is %lld, not %lld", total + position, -1,
                            get(&field[KV_SLOTS_RAGGED], total + position), slot):
                        return -1
            if field[KV_INDPTR].width and differs(f, b"plan.kv_indptr[%lld]%lld is %lld, not %lld", i, -1,
                                                  get(&field[KV_INDPTR], i), total):
                return -1
            pages += full
            total += p.length[i]
        return differs(f, b"plan.cu_q_lens[%lld]%lld is %lld, not %lld", p.rows, -1, get(&field[CU_Q_LENS], p.rows), t)
