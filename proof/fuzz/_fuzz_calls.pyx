"""The fuzzer's driver: every call that no other part of it makes."""
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from proof.fuzz._books cimport (
    LOADS,
    NOBODY,
    V_FULL,
    V_OK,
    V_SHORT,
    V_VALUE,
    Line,
    Page,
    available,
    books_close,
    books_defer,
    books_drain,
    books_evict,
    books_find,
    books_fork,
    books_judge_loaded,
    books_judge_truncate,
    books_loaded,
    books_next_handle,
    books_truncate,
    drop_ref,
    line_table,
    num_open,
    take,
    touch,
    waits_for_step,
)
from proof.fuzz._books_prefix cimport books_reset
from proof.fuzz._fuzz_base cimport CLOSE_BATCH, DECREF, MARK, TOUCH, S_EVICTED, S_IN_VAIN, S_LOADED, Word, hash64
from proof.fuzz._storage cimport line_stamp, line_token, storage_load

from kvpool import errors
from proof.fuzz.misuse import MISUSES, Facts
from proof.fuzz.shape import OPERATIONS

REFUSALS = (errors.KVPoolError, ValueError)


cdef class Others(Prefixes):
    """The rest of the calls; see `proof.fuzz._fuzz.Driver`."""

    cdef int op_fork(self, const Word* w) except -1:
        cdef int32_t parent = self.b.live[self.pick(w.b)], n = w.a % 4, i
        cdef Line* p = &self.b.line[parent]
        cdef int32_t[4] children
        cdef int64_t[4] made
        self.expect(V_FULL if n > self.b.max_seqs - num_open(&self.b) else V_OK)
        if self.due is not None and not self.full:
            return self.nothing()
        if self.trace is not None:
            names = [f"h{len(self.names) + i}" for i in range(n)]
            self.say(f"[{', '.join(names)}] = pool.fork({self.names[p.handle]}, {n}).tolist()")
        try:
            if self.full:
                handles = self.do_fork(p.handle + self.tag, n)
                for i in range(n):
                    made[i] = handles[i]
            else:
                self.direct_fork(p.handle + self.tag, n, made)
        except REFUSALS as error:
            return self.refused(error)
        self.accepted("fork")
        for i in range(n):
            self.greet(made[i], books_next_handle(&self.b, i))
        self.fork_books(parent, n, children)
        for i in range(n):
            memcpy(line_stamp(&self.s, &self.b, children[i]), line_stamp(&self.s, &self.b, parent),
                   p.known * sizeof(uint64_t))
            memcpy(line_token(&self.s, &self.b, children[i]), line_token(&self.s, &self.b, parent),
                   p.known * sizeof(int32_t))
        return 0

    cdef void fork_books(self, int32_t parent, int32_t n, int32_t* children) noexcept:
        books_fork(&self.b, parent, n, children)

    cdef void close_books(self, int32_t slot) noexcept:
        books_close(&self.b, slot)

    cdef void reset_books(self) noexcept:
        books_reset(&self.b)

    cdef int64_t telling_length(self, int32_t* slot, uint32_t word) noexcept:
        """A length that ends in a copy whose tokens were told before, or below what a pending copy reads; -1: none."""
        cdef int64_t bs = self.b.block_size, index
        cdef int32_t k, first = self.b.line[slot[0]].at
        cdef const Line* line
        cdef const Page* page
        for k in range(self.b.num_live):
            line = &self.b.line[self.b.live[(first + k) % self.b.num_live]]
            for index in range(0 if waits_for_step(&self.b, line) else (line.length + bs - 1) // bs):
                page = &self.b.page[line_table(&self.b, self.b.live[line.at])[index]]
                if page.refs == 1 and page.floor:
                    slot[0] = self.b.live[line.at]
                    return min(index * bs + word % <uint32_t>page.floor, line.length)
                if index < line.committed // bs and not page.final and bs > 1:
                    slot[0] = self.b.live[line.at]
                    return index * bs + 1 + word % <uint32_t>(bs - 1)
        return -1

    cdef int op_truncate(self, const Word* w) except -1:
        cdef int32_t slot = self.b.live[self.pick(w.b)]
        cdef Line* line = &self.b.line[slot]
        cdef int64_t n = w.a % <uint64_t>(line.length + 2), telling
        if not self.full:
            n = line.length - min(n % 4, line.length)
        elif w.c >> 31:
            telling = self.telling_length(&slot, w.a)
            line = &self.b.line[slot]
            n = n if telling < 0 else telling
        self.expect(books_judge_truncate(&self.b, slot, n))
        if self.due is not None and not self.full:
            return self.nothing()
        if self.trace is not None:
            self.say(f"pool.truncate({self.names[line.handle]}, {n + line.evicted})")
        try:
            self.do_truncate(line.handle + self.tag, n + line.evicted)
        except REFUSALS as error:
            return self.refused(error)
        self.accepted("truncate")
        books_truncate(&self.b, slot, n)
        return 0

    cdef int op_close(self, const Word* w, uint32_t op) except -1:
        """One sequence, or neighbours by `close` or `close_finished`."""
        cdef int32_t n = 1, first = self.pick(w.b), i
        if op == CLOSE_BATCH:
            n = min(1 + w.a % 3, self.b.num_live, self.shape.max_rows)
        for i in range(n):
            self.rows[i] = self.b.live[(first + i) % self.b.num_live]
            self.handle[i] = self.b.line[self.rows[i]].handle + self.tag
        if self.trace is not None:
            if op == CLOSE_BATCH and w.c & 1:
                self.say(f"pool.close_finished({self.names_of(n)}, {[True] * n})")
            else:
                self.say(f"pool.close({self.names_of(n)})")
        if op == CLOSE_BATCH and w.c & 1:
            if self.pool.close_finished(self.handles[:n], [True] * n) != n:
                self.fail(f"close_finished closed another number of sequences than {n}")
        elif op == CLOSE_BATCH:
            self.do_close(self.handles[:n])
        else:
            self.do_close(self.handle[0])
        for i in range(n):
            self.mourn(self.rows[i])
            self.close_books(self.rows[i])
        return 0

    cdef int op_defer(self, const Word* w) except -1:
        """Finalizers ask for some to be closed, in any order, now and then one that is dead by then."""
        cdef int32_t n = min(1 + <int32_t>(w.a % 3), self.b.num_live), first = self.pick(w.b), i, slot
        cdef int64_t handle
        for i in range(n):
            slot = self.b.live[(first + (i * 7 if w.a & 1 << 28 else i)) % self.b.num_live]
            handle = self.b.line[slot].handle
            if i == 1 and w.c >> 30 == 0 and self.num_stale:
                handle = self.stale[w.c % <uint32_t>min(self.num_stale, 64)]
            elif i == 1 and w.c >> 30 == 1 and self.b.num_loading:
                handle = self.b.line[self.b.loading[w.c % <uint32_t>self.b.num_loading]].handle
            if self.trace is not None:
                self.say(f"pool.defer_close({self.names.get(handle, handle + self.tag)})")
            self.pool.defer_close(handle + self.tag)
            books_defer(&self.b, handle)
        for i in range(self.b.num_deferred):
            slot = books_find(&self.b, self.b.deferred[i])
            if slot != NOBODY and not self.remembered(self.b.deferred[i]):
                self.mourn(slot)
        return self.settle_deferred() if w.c & 1 or not self.full else 0

    def remembered(self, handle):
        """Whether a handle is among those that are known to be dead soon."""
        cdef int32_t i
        for i in range(<int32_t>min(self.num_stale, 64)):
            if self.stale[i] == handle:
                return True
        return False

    cdef int settle_deferred(self) except -1:
        """Make some call: it closes them first."""
        if self.b.num_deferred == 0:
            return 0
        if self.trace is not None:
            self.trace.append("pool.stats()")
        self.direct_drain()
        books_drain(&self.b)
        return 0

    cdef int op_loaded(self, const Word* w) except -1:
        """A load comes to its end, or its sequence is closed before that."""
        cdef int32_t slot
        cdef Line* line
        cdef int64_t n, most
        cdef bint in_time
        if self.b.num_loading == 0:
            return self.nothing()
        slot = self.b.loading[w.b % <uint32_t>self.b.num_loading]
        line = &self.b.line[slot]
        in_time = line.loads == LOADS
        name = self.names.get(line.handle)
        if in_time and w.c >> 30 == 0:
            if self.trace is not None:
                self.say(f"pool.close({name})")
            self.do_close(line.handle + self.tag)
            self.mourn(slot)
            self.close_books(slot)
            return 0
        most = line.blocks * self.b.block_size
        n = w.a % <uint64_t>(most + 2) if self.full and w.c >> 30 == 1 else (
            line.length + w.a % <uint64_t>(most - line.length + 1) if w.c & 3 else 0)
        self.expect(books_judge_loaded(&self.b, slot, n))
        if self.trace is not None:
            self.say(f"assert pool.loaded({name}, {n}) is {in_time}")
        if self.due is None:
            self.extend(slot, n, self.salt)
            storage_load(&self.s, &self.b, slot, n if in_time else 0)
        try:
            found = self.pool.loaded(line.handle + self.tag, n)
        except REFUSALS as error:
            return self.refused(error)
        self.accepted("loaded")
        if found is not in_time:
            self.fail(f"loaded({line.handle}, {n}) is {found}, not {in_time}")
        self.states[S_LOADED] += in_time and n > line.length
        self.states[S_IN_VAIN] += not in_time
        books_loaded(&self.b, slot, n)
        return 0

    cdef int op_evict(self, const Word* w) except -1:
        cdef int64_t due = books_evict(&self.b, w.a % 4)
        if self.trace is not None:
            self.say(f"assert pool.blocks.evict({w.a % 4}) == {due}")
        n = self.pool.blocks.evict(w.a % 4)
        if n != due:
            self.fail(f"evict({w.a % 4}) cleared {n} blocks, not {due}")
        self.states[S_EVICTED] += n
        return 0

    cdef int op_alloc(self, const Word* w) except -1:
        """Blocks of the caller's own; he writes into them at once, whatever is pending."""
        cdef int64_t n = w.a % 4, k, slot, bs = self.b.block_size
        cdef int32_t block
        self.expect(V_SHORT if n > available(&self.b) else V_OK)
        if self.trace is not None:
            self.say(f"pool.blocks.alloc({n})")
        try:
            self.pool.blocks.alloc(n, out=self.ids)
        except REFUSALS as error:
            return self.refused(error)
        self.accepted("alloc")
        due = [take(&self.b) for k in range(n)]
        if self.ids[:n].tolist() != due:
            self.fail(f"alloc gave blocks {self.ids[:n].tolist()}, not {due}")
        self.clean()
        for k in range(n):
            block = self.id[k]
            self.b.page[block].raw = 1
            for slot in range(block * bs, block * bs + bs):
                self.s.real[slot] = hash64(<uint64_t>self.clock << 20 | <uint64_t>slot)
                if self.full:
                    self.s.virt[slot] = self.s.raw_stamp[slot] = self.s.real[slot]
        return 0

    cdef int32_t find_block(self, uint32_t start, uint32_t op) noexcept:
        """A block that the call is most likely legal for, -1 if none is near; a miss in a large pool is slow."""
        cdef int64_t k, at, n = self.b.num_blocks - self.b.reserved, near = 64 if self.full else 8
        cdef const Page* page
        for k in range(min(n, near)):
            at = self.b.reserved + (start + k) % n
            page = &self.b.page[at]
            if (page.raw if op == DECREF else page.final if op == TOUCH else page.refs):
                return <int32_t>at
        return -1

    cdef int op_reference(self, const Word* w, uint32_t op) except -1:
        """References of block-level calls: incref, decref or free, mark_cached, touch; and drain_evicted."""
        cdef int32_t i = self.find_block(w.a, op), k
        cdef Page* page
        if op > TOUCH:
            return self.nothing() if self.indexed else self.drain_evicted()
        if i < 0 or (self.indexed and op >= MARK):
            return self.nothing()
        page = &self.b.page[i]
        last = op == DECREF and w.b & 1
        call = "free" if last else OPERATIONS[op]
        self.expect(V_VALUE if (last and page.refs > 1) or (op == MARK and (page.noted or page.final)) else V_OK)
        if self.due is not None and not self.full:
            return self.nothing()
        if self.trace is not None:
            self.say(f"pool.blocks.{call}({i})")
        try:
            getattr(self.pool.blocks, call)(i)
        except REFUSALS as error:
            return self.refused(error)
        self.accepted(call)
        if op == MARK:
            page.final = 1
        elif op == DECREF:
            page.raw -= 1
            drop_ref(&self.b, i)
        else:
            if page.raw == 0 and self.full:         # what it holds now has to stay
                memcpy(self.s.raw_stamp + i * self.b.block_size, self.s.virt + i * self.b.block_size,
                       self.b.block_size * sizeof(uint64_t))
            page.raw += 1
            touch(&self.b, i)
        return 0

    def drain_evicted(self):
        """Blocks that lost what they held, in the order in which they did."""
        cdef int32_t k
        due = [self.b.dropped[k] for k in range(self.b.num_dropped)]
        if self.trace is not None:
            self.trace.append(f"assert pool.blocks.drain_evicted().tolist() == {due}")
        found = self.pool.blocks.drain_evicted().tolist()
        if found != due:
            self.fail(f"drain_evicted gave {found}, not {due}")
        for k in range(self.b.num_dropped):
            self.b.page[self.b.dropped[k]].noted = 0
        self.b.num_dropped = 0
        return 0

    # -- reading

    cdef int op_can(self, const Word* w) except -1:
        cdef int32_t n, k = self.free_plan(w)
        if self.b.num_live == 0 or not self.full or k < 0:
            return self.nothing()
        n = self.choose_rows(w)
        due = self.judge_step(k, n, <int64_t>1 << 40, True, False) == V_OK
        self.b.plan[k].num_entries = 0
        if self.trace is not None:
            self.trace.append(f"assert pool.can({self.names_of(n)}, {self.counts[:n].tolist()}) is {due}")
        if self.pool.can(self.handles[:n], self.counts[:n]) != due:
            self.fail(f"can() says {not due}")
        return 0

    cdef int op_read(self, const Word* w) except -1:
        """A call that only tells: its words are those of the books."""
        cdef Line* line
        cdef int32_t i
        kind = w.a % 8
        if kind < 3 and self.b.num_live:
            line = &self.b.line[self.b.live[self.pick(w.b)]]
            name = self.names.get(line.handle) or line.handle + self.tag
            i = <int32_t>(line.handle & 0xFFFFF)
            table = [line_table(&self.b, i)[k] for k in range(line.blocks)]
            call, due = (("table", table), ("num_tokens", line.length + line.evicted),
                         ("capacity", line.blocks * self.b.block_size))[kind]
            found = getattr(self.pool, call)(line.handle + self.tag)
            found = found.tolist() if kind == 0 else found
            shown = f"pool.{call}({name}){'.tolist()' if kind == 0 else ''}"
        elif kind == 5:
            i = self.b.reserved + <int32_t>(w.b % <uint32_t>(self.b.num_blocks - self.b.reserved))
            shown, due, found = f"pool.blocks.refcount({i})", self.b.page[i].refs, self.pool.blocks.refcount(i)
        elif kind == 6 and self.num_stale:
            handle = self.stale[w.b % <uint32_t>min(self.num_stale, 64)] + self.tag
            shown, due, found = f"pool.is_open({handle})", False, self.pool.is_open(handle)
        elif kind > 5 and self.indexed:
            shown, due, found = "pool.prefix.stats()", self.prefix_stats_due(), self.pool.prefix.stats()
        else:
            shown, due, found = "pool.stats()", self.stats_due(), self.pool.stats()
        if self.trace is not None:
            self.trace.append(f"assert {shown} == {due}")
        if found != due:
            self.fail(f"{shown} is {found}, not {due}")
        return 0

    def stats_due(self):
        """What `stats` has to say."""
        b = self.b
        capacity = b.blocks * b.block_size
        return (b.num_blocks, b.reserved, b.num_blank, b.lru.size, b.limbo.size, b.used, b.shared, num_open(&b),
                b.num_queue, b.cow_copies, b.cow_tokens, b.allocs, b.evictions, b.peak_used, b.tokens, capacity,
                1.0 - b.tokens / <double>capacity if capacity else 0.0, b.evicted_tokens)

    def prefix_stats_due(self):
        """What `prefix.stats` has to say."""
        b = self.b
        return (b.queries, b.query_tokens, b.hit_tokens,
                b.hit_tokens / <double>b.query_tokens if b.query_tokens else 0.0,
                b.nodes, b.inserted, b.duplicates, b.evicted_nodes, b.num_roots,
                b.reuse_gap / <double>b.revivals if b.revivals else 0.0, *[0] * 9)  # no checkpoints, and nothing again

    cdef int op_reset(self) except -1:
        cdef int32_t i
        if self.trace is not None:
            self.say("pool.reset()")
        self.pool.reset()
        for i in range(self.b.num_live):
            self.mourn(self.b.live[i])
        for i in range(self.b.num_loading):
            self.mourn(self.b.loading[i])
        self.reset_books()
        return 0

    cdef int op_misuse(self, const Word* w) except -1:
        """A call that must be refused whatever the state, by the exception that is documented for it."""
        cdef int32_t i, k
        live = [self.b.line[self.b.live[i]].handle + self.tag for i in range(min(self.b.num_live, 4))]
        stale = [self.stale[i] + self.tag for i in range(min(self.num_stale, 8))]
        queue = [self.plans[self.b.queue[i]] for i in range(self.b.num_queue)]
        idle = [plan for plan in self.plans if plan not in queue]
        loading = [self.b.line[self.b.loading[i]].handle + self.tag for i in range(self.b.num_loading)
                   if self.b.line[self.b.loading[i]].loads == LOADS]
        facts = Facts(self.pool, live, stale, queue, idle, w.b, w.c, self.refs_of, self.table_of, loading)
        error, attempt = MISUSES[w.a % len(MISUSES)](facts)
        if error is None:
            return self.nothing()
        self.due = error
        if self.trace is not None:
            self.trace.append(f"pool.misuse({MISUSES[w.a % len(MISUSES)].__name__!r}, {w.b}, {w.c})")
        try:
            attempt()
        except error as raised:
            return self.refused(raised)
        return self.accepted(f"misuse {MISUSES[w.a % len(MISUSES)].__name__}")

    def refs_of(self, block):
        """References on a block, by the books."""
        return self.b.page[<int32_t>block].refs

    def table_of(self, handle):
        """The blocks of a sequence, by the books."""
        cdef int32_t slot = <int32_t>(handle & 0xFFFFF), k
        return [line_table(&self.b, slot)[k] for k in range(self.b.line[slot].blocks)]
