"""The fuzzer's driver, its middle: steps, and how they end.

The backend is played by `_storage`: a plan runs (copies, writes, reads) at the latest when it is declared done, all
older ones before it.
"""
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from proof.fuzz._books cimport V_SHORT, Line, line_table
from proof.fuzz._books_steps cimport (
    books_done,
    books_judge_rollback,
    books_judge_step,
    books_pass_at_once,
    books_rollback,
    books_show,
    books_step,
)
from proof.fuzz._fuzz_base cimport (
    S_COPIES,
    S_EXECUTED_ROLLBACKS,
    S_LATE_PLANS,
    S_NOTED,
    S_PARTIAL,
    S_REPLACED,
    S_ROLLBACKS,
    S_SHORT,
    Base,
    Word,
    hash64,
)
from proof.fuzz._storage cimport line_stamp, storage_execute, storage_read, storage_unwrite

from kvpool import errors

REFUSALS = (errors.KVPoolError, ValueError)


cdef class Steps(Base):
    """How a run steps; see `proof.fuzz._fuzz.Driver`."""

    cdef int32_t choose_rows(self, const Word* w) noexcept:
        """A batch of neighbours among the open sequences, and new tokens for each; returns its size."""
        cdef int32_t n = min(1 + <int32_t>(w.a % <uint32_t>self.b.max_rows), self.b.num_live), i
        cdef int32_t first = self.pick(w.b)
        cdef int64_t left = self.b.max_tokens
        for i in range(n):
            self.rows[i] = self.b.live[(first + i) % self.b.num_live]
            self.handle[i] = self.b.line[self.rows[i]].handle + self.tag
            self.count[i] = (w.c if w.c < 16 else hash64(w.c + <uint64_t>i) >> 8) % <uint64_t>(self.appetite + 1)
            if w.a >> 28 or not self.full:          # else too many for the table or the plan, as may be
                self.count[i] = min(self.count[i], self.b.capacity - self.b.line[self.rows[i]].length, left)
            left -= self.count[i]
        return n

    cdef int32_t free_plan(self, const Word* w) noexcept:
        """A plan that is not pending, -1 if all are."""
        cdef int32_t n = <int32_t>len(self.plans), k, at
        for k in range(n):
            at = ((w.a >> 20) + k) % n
            if self.b.plan[at].step == 0:
                return at
        return -1

    # -- step, reserve

    cdef int judge_step(self, int32_t k, int32_t n, int64_t max_tokens, bint advance, bint partial) noexcept:
        return books_judge_step(&self.b, &self.b.plan[k], n, self.rows, self.count, max_tokens, advance, partial)

    cdef int op_step(self, const Word* w, bint advance) except -1:
        cdef int32_t k = self.free_plan(w), n
        cdef bint partial = advance and (w.a >> 8) % 4 == 0, padded
        cdef int verdict
        if self.b.num_live == 0:
            return self.op_open(w, False, False)
        if k < 0:
            return self.op_done(w, False)
        n = self.choose_rows(w)
        padded = self.full and advance and not w.a >> 30
        verdict = self.judge_step(k, n, self.b.max_tokens, advance, partial)
        self.states[S_SHORT] += verdict == V_SHORT
        self.expect(verdict)
        if self.trace is not None:
            counts = self.counts[:n].tolist()
            self.say(f"pool.{'step' if advance else 'reserve'}(p{k}, {self.names_of(n)}, {counts}"
                     f"{', partial=True' if partial else ''})")
        try:
            if not self.full:
                self.direct_step(k, self.handle, self.count, n, advance, partial)
            elif not advance:
                self.pool.reserve(self.plans[k], self.handles[:n], self.counts[:n])
            elif padded:
                self.pool.step(self.plans[k], self.handles[:n], self.counts[:n], partial=partial,
                               pad_to=(self.b.max_rows, self.b.max_tokens))
            else:
                self.pool.step(self.plans[k], self.handles[:n], self.counts[:n], partial=partial)
        except REFUSALS as error:
            return self.refused(error)
        self.accepted("step")
        if self.trace is not None and partial:
            self.trace.append(f"assert p{k}.served.tolist() == {[int(self.b.plan[k].served[i]) for i in range(n)]}")
        return self.stepped(k, n, advance, padded)

    cdef int stepped(self, int32_t k, int32_t n, bint advance, bint padded) except -1:
        """The step was taken: what it should have done, and what it did."""
        cdef Pending* p = &self.b.plan[k]
        cdef Line* line
        cdef int32_t i, slot
        cdef int64_t at, bs = self.b.block_size
        cdef const int32_t* table
        books_step(&self.b, k, n, self.rows, self.count, advance)
        self.clean()
        p.tokens = 0
        for i in range(n):
            slot = self.rows[i]
            line = &self.b.line[slot]
            self.states[S_PARTIAL] += not p.served[i]
            if p.length[i] > p.before[i]:
                self.extend(slot, p.length[i], self.salt)
                table = line_table(&self.b, slot)
                for at in range(p.before[i], p.length[i]):
                    p.slot[p.tokens] = table[at // bs] * bs + at % bs
                    p.stamp[p.tokens] = line_stamp(&self.s, &self.b, slot)[at]
                    p.tokens += 1
            if self.full:
                memcpy(p.expect + i * self.b.capacity, line_stamp(&self.s, &self.b, slot),
                       p.length[i] * sizeof(uint64_t))
        for i in range(p.num_entries):
            self.states[S_COPIES] += p.entry[i].tokens > 0
            self.states[S_REPLACED] += 1
        self.check_plan(k, padded)
        if self.full:
            storage_execute(&self.s, &self.b, p, self.s.virt)
        if not self.b.steps_pend:
            self.run_plan(p)
            books_pass_at_once(&self.b, p)
        return 0

    cdef int check_plan(self, int32_t k, bint padded) except -1:
        """The arrays that the backend gets."""
        cdef Pending* p = &self.b.plan[k]
        cdef int32_t i
        self.finding.what = NULL
        self.shown = k
        if self.compare_plan(k, &self.b, p, &self.finding):
            self.report(&self.finding)
        if not self.full:
            return 0
        due = [i for i in range(self.b.max_rows if padded else p.rows) if books_show(&self.b, p, i, i >= p.rows)]
        dirty = self.dirty_rows(k)
        if dirty != due:
            if self.trace is not None:
                self.trace.append(f"assert p{k}.dirty_rows.tolist() == {due}")
            self.fail(f"dirty_rows are {dirty}, not {due}")
        self.update_mirror(k, &self.b, p)
        if self.compare_formats(k, &self.b, p, &self.finding):
            self.report(&self.finding)
        return 0

    # -- how steps end

    cdef int run_plan(self, Pending* p) except -1:
        """The backend runs a plan: copies, writes, reads."""
        storage_execute(&self.s, &self.b, p, self.s.real)
        p.executed = True
        self.states[S_LATE_PLANS] += self.b.num_queue > 1
        if self.full and storage_read(&self.s, &self.b, p):
            self.report(&self.s.finding)
        return 0

    cdef int run_until(self, int32_t k) except -1:
        """The backend runs plans in step order, up to plan k; all of them if that is not pending."""
        cdef int32_t i
        for i in range(self.b.num_queue):
            if not self.b.plan[self.b.queue[i]].executed:
                self.run_plan(&self.b.plan[self.b.queue[i]])
            if self.b.queue[i] == k:
                return 0
        return 0

    cdef int op_execute(self) except -1:
        cdef int32_t i
        for i in range(self.b.num_queue):
            if not self.b.plan[self.b.queue[i]].executed:
                if self.trace is not None:
                    self.trace.append(f"pool.execute(p{self.b.queue[i]})")
                return self.run_plan(&self.b.plan[self.b.queue[i]])
        return self.nothing()

    cdef int op_done(self, const Word* w, bint anyone) except -1:
        """Declare a pending plan done: the oldest, or `anyone`."""
        cdef int32_t n = self.b.num_queue, i, k
        for i in range(n):
            k = self.b.queue[(i + w.a) % n if anyone else i]
            if not self.b.plan[k].noted:
                self.states[S_NOTED] += k != self.b.queue[0]
                return self.finish(k)
        return self.nothing()

    cdef int finish(self, int32_t k) except -1:
        if self.trace is not None:
            self.trace.append(f"pool.done(p{k})")
        self.run_until(k)
        self.do_done(self.plans[k])
        self.pass_plan(k)
        return 0

    cdef void pass_plan(self, int32_t k) noexcept:
        books_done(&self.b, k)

    cdef int op_rollback(self, const Word* w) except -1:
        """Take the newest pending plan back; the backend has run it, or never will."""
        cdef int32_t k
        cdef Pending* p
        if self.b.num_queue == 0:
            return self.nothing()
        k = self.b.queue[self.b.num_queue - 1]
        p = &self.b.plan[k]
        self.expect(books_judge_rollback(&self.b, k))
        if self.due is not None and not self.full:
            return self.nothing()
        if self.trace is not None:
            self.say(f"pool.rollback(p{k})")
        try:
            self.do_rollback(self.plans[k])
        except REFUSALS as error:
            return self.refused(error)
        self.accepted("rollback")
        self.states[S_ROLLBACKS] += 1
        self.states[S_EXECUTED_ROLLBACKS] += p.executed
        return self.undo_plan(k)

    cdef int undo_plan(self, int32_t k) except -1:
        cdef Pending* p = &self.b.plan[k]
        cdef int32_t entries = p.num_entries
        books_rollback(&self.b, k)
        self.clean()
        if self.full and not p.executed:
            storage_unwrite(&self.s, &self.b, p, entries)
        return 0

    cdef int settle_all(self) except -1:
        """Every pending plan runs and passes."""
        cdef int32_t i
        while self.b.num_queue:
            for i in range(self.b.num_queue):
                if not self.b.plan[self.b.queue[i]].noted:
                    self.finish(self.b.queue[i])
                    break
        return 0
