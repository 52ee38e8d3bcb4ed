"""The fuzzer's driver for pools with layer groups: the same programs of the same words, with other judges.

What is due is said by `_books_groups`, what blocks hold by `_content_groups`. See `proof.fuzz._fuzz.Driver`.
"""
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from kvpool._core cimport Pool
from proof.fuzz._books cimport (
    V_OK, V_SHORT, V_VALUE, Books, Line, Page, Pending, available, books_evict, books_next_handle, drop_ref, take,
    touch,
)
from proof.fuzz._books_groups cimport (
    MOST_GROUPS, MAX_PLANS, STATE_KIND, GroupBooks, Layers, Moves, group_books_free, group_books_init, groups_close,
    groups_done, groups_fork, groups_judge_open, groups_judge_step, groups_judge_truncate, groups_open,
    groups_pass_at_once, groups_reset, groups_rollback, groups_step, groups_truncate,
)
from proof.fuzz._calls_groups cimport compare_arrays, compare_groups, read_arrays
from proof.fuzz._content_groups cimport (
    Content, Shown, content_check, content_execute, content_free, content_init, content_poison,
)
from proof.fuzz._fuzz cimport Driver
from proof.fuzz._fuzz_base cimport (
    DECREF, MARK, S_COPIES, S_EVICTED, S_GONE, S_LATE_PLANS, S_LET_GO, S_PARTIAL, S_STATES, TOUCH, Base, Word,
)
from proof.fuzz._storage cimport line_stamp

from kvpool import errors
from proof.fuzz.shape import KINDS, OPERATIONS

REFUSALS = (errors.KVPoolError, ValueError)


cdef class GroupDriver(Driver):
    """One run on a pool with groups; parameters and calls are those of `proof.fuzz._fuzz.Driver`."""

    cdef GroupBooks gb
    cdef Content content
    cdef Shown[MAX_PLANS][MOST_GROUPS] arrays
    cdef list parts             # plan.groups of each plan

    def __dealloc__(self):
        group_books_free(&self.gb)
        content_free(&self.content)

    def __cinit__(self, shape, make_pool=Pool, trace=None):
        cdef Layers* g
        cdef int32_t k
        asked = self.shape.pool
        groups = asked["groups"]
        blocks = {group.arena: group.num_blocks for group in groups if group.num_blocks is not None}
        self.gb.num_arenas = 1 + len(blocks)
        self.gb.num_groups = len(groups)
        self.gb.lookahead = asked["lookahead"]
        for k, n in blocks.items():
            self.gb.more[k - 1].num_blocks, self.gb.more[k - 1].reserved = n, self.b.reserved
        for k, group in enumerate(groups):
            g = &self.gb.layers[k]
            g.kind, g.reach, g.keep = KINDS.index(group.kind), group.size, group.keep
            g.columns, g.arena, g.size = group.columns, group.arena, group.block_size or self.b.block_size
            if group.kind == "state":
                g.columns, g.arena, g.size = 1, self.gb.num_arenas, 1
                self.gb.more[g.arena - 1].num_blocks = group.size
                self.gb.num_arenas += 1
        self.parts = [plan.groups for plan in self.plans]
        if group_books_init(&self.gb, &self.b) or content_init(&self.content, &self.gb):
            raise MemoryError("[GroupDriver] no memory for what is known about the pool")

    def read_more(self, tokens):
        """Queries read so many tokens more than the contract says: as if pool and books were both wrong."""
        self.content.more = tokens

    # -- what is checked

    cdef int check(self) except -1:
        cdef int32_t a
        PyErr_CheckSignals()
        self.finding.what = NULL
        if compare_groups(self.pool, &self.gb, &self.finding):
            self.report(&self.finding)
        if self.b.num_queue == 0 and content_check(&self.content, &self.gb, &self.s):
            self.report(&self.content.finding)
        self.states[S_LET_GO] = self.gb.let_go
        self.states[S_EVICTED] = 0
        for a in range(self.gb.num_arenas):
            self.states[S_EVICTED] += self.gb.arena[a].evictions
        return 0

    cdef void clean(self) noexcept:
        content_poison(&self.content, &self.gb)

    cdef int refused(self, object error) except -1:
        """What an OutOfBlocks says is due as well."""
        Base.refused(self, error)
        if isinstance(error, errors.OutOfBlocks):
            said = error.arena, error.row, error.needed
            due = self.gb.lack.arena, self.gb.lack.row, self.gb.lack.needed
            if said != due:
                self.fail(f"OutOfBlocks names arena, row and blocks {said}, not {due}")
        return 0

    # -- sequences

    cdef int op_open(self, const Word* w, bint prompt, bint pin) except -1:
        cdef int64_t n = w.a % (self.b.capacity + 2 if w.a >> 28 == 0 else 2 * self.b.block_size + 1)
        if w.b & 3:
            n = 0
        self.expect(groups_judge_open(&self.gb, n))
        try:
            handle = self.do_open(n)
        except REFUSALS as error:
            return self.refused(error)
        self.accepted("open")
        self.greet(handle, books_next_handle(&self.b, 0))
        groups_open(&self.gb, n)
        return 0

    cdef void fork_books(self, int32_t parent, int32_t n, int32_t* children) noexcept:
        groups_fork(&self.gb, parent, n, children)

    cdef void close_books(self, int32_t slot) noexcept:
        groups_close(&self.gb, slot)

    cdef int op_truncate(self, const Word* w) except -1:
        """To any length, to little less than there is, or to one that is not there."""
        cdef int32_t slot = self.b.live[self.pick(w.b)]
        cdef Line* line = &self.b.line[slot]
        cdef int64_t length = w.a % (line.length + 2)
        if w.c & 3:
            length = max(line.length - w.a % (self.gb.lookahead + 3), <int64_t>0)
        self.expect(groups_judge_truncate(&self.gb, slot, length))
        try:
            self.do_truncate(line.handle + self.tag, length)
        except REFUSALS as error:
            self.states[S_GONE] += self.due is ValueError and length < line.length
            return self.refused(error)
        self.accepted("truncate")
        groups_truncate(&self.gb, slot, length)
        return 0

    cdef void reset_books(self) noexcept:
        groups_reset(&self.gb)

    # -- blocks by id, of some arena

    cdef int op_alloc(self, const Word* w) except -1:
        cdef int32_t a = <int32_t>(w.c % <uint32_t>self.gb.num_arenas)
        cdef Books* b = self.gb.arena[a]
        cdef int64_t n = w.a % 4, k
        self.gb.lack.arena, self.gb.lack.row, self.gb.lack.needed = a, -1, n
        self.expect(V_SHORT if n > available(b) else V_OK)
        if self.trace is not None:
            self.say(f"pool.blocks.arena({a}).alloc({n})")
        try:
            found = self.pool.blocks.arena(a).alloc(n).tolist()
        except REFUSALS as error:
            return self.refused(error)
        self.accepted("alloc")
        due = [take(b) for k in range(n)]
        if found != due:
            self.fail(f"alloc gave blocks {found} of arena {a}, not {due}")
        for block in due:
            b.page[<int32_t>block].raw = 1
        self.clean()
        return 0

    cdef int op_evict(self, const Word* w) except -1:
        cdef int32_t a = <int32_t>(w.c % <uint32_t>self.gb.num_arenas)
        due = books_evict(self.gb.arena[a], w.a % 4)
        if self.trace is not None:
            self.say(f"assert pool.blocks.arena({a}).evict({w.a % 4}) == {due}")
        found = self.pool.blocks.arena(a).evict(w.a % 4)
        if found != due:
            self.fail(f"evict({w.a % 4}) cleared {found} blocks of arena {a}, not {due}")
        self.clean()
        return 0

    cdef int op_reference(self, const Word* w, uint32_t op) except -1:
        """References of the caller: incref, decref or free, mark_cached, touch; and drain_evicted."""
        cdef int32_t a = <int32_t>(w.c % <uint32_t>self.gb.num_arenas), k, i = -1
        cdef Books* b = self.gb.arena[a]
        cdef Page* page
        if op > TOUCH:
            return self.drain_evicted_of(a)
        for k in range(b.num_blocks - b.reserved):
            i = b.reserved + <int32_t>((w.a + <uint32_t>k) % <uint32_t>(b.num_blocks - b.reserved))
            page = &b.page[i]
            if page.raw if op == DECREF else page.final if op == TOUCH else page.refs:
                break
        else:
            return self.nothing()
        last = op == DECREF and w.b & 1
        call = "free" if last else OPERATIONS[op]
        self.expect(V_VALUE if (last and page.refs > 1) or (op == MARK and (page.noted or page.final)) else V_OK)
        if self.trace is not None:
            self.say(f"pool.blocks.arena({a}).{call}({i})")
        try:
            getattr(self.pool.blocks.arena(a), call)(i)
        except REFUSALS as error:
            return self.refused(error)
        self.accepted(call)
        page.raw += 0 if op == MARK else -1 if op == DECREF else 1
        if op == DECREF:
            drop_ref(b, i)
        elif op == MARK:
            page.final = 1
        else:
            touch(b, i)
        return 0

    cdef int drain_evicted_of(self, int32_t a) except -1:
        cdef Books* b = self.gb.arena[a]
        cdef int32_t k
        due = [b.dropped[k] for k in range(b.num_dropped)]
        if self.trace is not None:
            self.say(f"assert pool.blocks.arena({a}).drain_evicted().tolist() == {due}")
        found = self.pool.blocks.arena(a).drain_evicted().tolist()
        if found != due:
            self.fail(f"drain_evicted gave {found} of arena {a}, not {due}")
        for k in range(b.num_dropped):
            b.page[b.dropped[k]].noted = 0
        b.num_dropped = 0
        return 0

    # -- steps

    cdef int judge_step(self, int32_t k, int32_t n, int64_t max_tokens, bint advance, bint partial) noexcept:
        return groups_judge_step(&self.gb, k, n, self.rows, self.count, max_tokens, advance, partial)

    cdef int stepped(self, int32_t k, int32_t n, bint advance, bint padded) except -1:
        """The step was taken: what it should have done, and what it did."""
        cdef Pending* p = &self.b.plan[k]
        cdef const Moves* m
        cdef int32_t i, g
        groups_step(&self.gb, k, n, self.rows, self.count, advance)
        self.clean()
        for i in range(n):
            self.states[S_PARTIAL] += not p.served[i]
            self.extend(self.rows[i], p.length[i], self.salt)
            memcpy(p.expect + i * self.b.capacity, line_stamp(&self.s, &self.b, self.rows[i]),
                   p.length[i] * sizeof(uint64_t))
        for g in range(self.gb.num_groups):
            m = &self.gb.layers[g].moves[k]
            for i in range(m.num):
                self.states[S_STATES if self.gb.layers[g].kind == STATE_KIND else S_COPIES] += m.entry[i].tokens > 0
        self.finding.what = NULL
        read_arrays(self.parts[k], &self.gb, k, self.arrays[k])
        if compare_arrays(&self.gb, k, self.arrays[k], self.b.max_rows if padded else n, &self.finding):
            self.report(&self.finding)
        if not self.b.steps_pend:
            self.run_plan(p)
            groups_pass_at_once(&self.gb, k)
        return 0

    cdef int run_plan(self, Pending* p) except -1:
        """The backend runs a plan."""
        cdef int32_t k = <int32_t>(p - self.b.plan)
        p.executed = True
        self.states[S_LATE_PLANS] += self.b.num_queue > 1
        if content_execute(&self.content, &self.gb, k, self.arrays[k]):
            self.report(&self.content.finding)
        return 0

    cdef void pass_plan(self, int32_t k) noexcept:
        groups_done(&self.gb, k)

    cdef int undo_plan(self, int32_t k) except -1:
        groups_rollback(&self.gb, k)
        self.clean()
        return 0
