"""The fuzzer's driver, its middle: steps, and how they end.

Which blocks a step needs and whom it serves is worked out here once more, from recomputed references. The backend
is played by `_shadow`: a plan runs (copies, writes, reads) at the latest when it is declared done, all older ones
before it.
"""
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from kvpool._args cimport Ints
from kvpool._blocks cimport Blocks
from kvpool._plan cimport Plan
from kvpool._sequence cimport seq_table
from kvpool._types cimport OK, Verdict
from kvpool._wire cimport (
    BLOCK_TABLES,
    CU_Q_LENS,
    INDICES,
    INDPTR,
    KV_INDPTR,
    KV_SLOTS,
    KV_SLOTS_RAGGED,
    LAST_PAGE_LEN,
    POSITIONS,
    SEQ_LENS,
    SLOT_IDS,
    SLOT_MAPPING,
    Field,
)
from kvpool.testing._fuzz_base cimport (
    S_COPIES,
    S_EXECUTED_ROLLBACKS,
    S_LATE_PLANS,
    S_NOTED,
    S_PARTIAL,
    S_REPLACED,
    S_ROLLBACKS,
    S_SHORT,
    V_CAPACITY,
    V_OK,
    V_SHORT,
    Base,
    Word,
    hash64,
)
from kvpool.testing._shadow cimport (
    Line,
    Pending,
    line_stamp,
    line_table,
    shadow_execute,
    shadow_poison,
    shadow_read,
)

from kvpool import errors

REFUSALS = (errors.KVPoolError, ValueError)


cdef inline int64_t get(const Field* f, int64_t i) noexcept nogil:
    """Entry of an array that a plan has filled."""
    return (<int32_t*>f.data)[i] if f.width == 4 else (<int64_t*>f.data)[i]


cdef class Steps(Base):
    """How a run steps; see `kvpool.testing._fuzz.Driver`."""

    # -- what will happen

    cdef int32_t choose_rows(self, const Word* w) noexcept:
        """A batch of neighbours among the open sequences, and new tokens for each; returns its size."""
        cdef int32_t n = min(1 + <int32_t>(w.a % <uint32_t>self.s.max_rows), self.s.num_live), i
        cdef int32_t first = self.pick(w.b)
        cdef int64_t left = self.s.max_tokens
        for i in range(n):
            self.rows[i] = self.s.live[(first + i) % self.s.num_live]
            self.handle[i] = self.s.line[self.rows[i]].handle
            self.count[i] = (w.c if w.c < 16 else hash64(w.c + <uint64_t>i) >> 8) % <uint64_t>(self.appetite + 1)
            if w.a >> 28 or not self.full:          # else too many for the table or the plan, as may be
                self.count[i] = min(self.count[i], self.s.capacity - self.s.line[self.rows[i]].length, left)
            left -= self.count[i]
        return n

    cdef int32_t free_plan(self, const Word* w) noexcept:
        """A plan that is not pending, -1 if all are."""
        cdef int32_t n = <int32_t>len(self.plans), k, at
        for k in range(n):
            at = ((w.a >> 20) + k) % n
            if self.s.plan[at].step == 0:
                return at
        return -1

    cdef int64_t judge_row(self, int32_t slot, int64_t new, bint undo) noexcept:
        """Blocks that one row takes; without `undo`, what the rows behind it will see is brought up to date."""
        cdef const Line* line = &self.s.line[slot]
        cdef int64_t bs = self.s.block_size, need = 0, end, index, valid
        cdef int32_t block
        if new == 0:
            return 0
        end = (line.length + new + bs - 1) // bs
        for index in range(line.length // bs, min(end, <int64_t>line.blocks)):
            block = line_table(&self.s, slot)[index]
            valid = line.length - index * bs if index * bs < line.length else 0
            if (self.s.count[block] == 1 and not self.pool.blocks.block[block].committed
                    and valid >= self.s.floor[block]):
                continue
            need += 1
            if not undo:
                self.s.count[block] -= 1
                self.s.floor[block] = max(self.s.floor[block], <int32_t>valid)
        return need + max(end - line.blocks, 0)

    cdef int judge_batch(self, int32_t n, int64_t max_tokens, bint advance, bint partial) noexcept:
        """What a batch will meet; who is served stands in `served`. Spoils the recomputed counts."""
        cdef int64_t available = self.pool.blocks.num_blank + self.pool.blocks.lru.size
        cdef int64_t asked = 0, needed = 0, need
        cdef int32_t i
        cdef bint short = False
        for i in range(n):
            self.served[i] = 1
            if self.count[i] > self.s.capacity - self.s.line[self.rows[i]].length:
                return V_CAPACITY
            if advance:
                asked += self.count[i]
                if asked > max_tokens:
                    return V_CAPACITY
            need = self.judge_row(self.rows[i], self.count[i], True)
            if needed + need > available:
                short = not partial
                if partial:
                    self.served[i] = 0
                    continue
            needed += need
            self.judge_row(self.rows[i], self.count[i], False)
        return V_SHORT if short or needed > available else V_OK

    # -- step, reserve

    cdef int op_step(self, const Word* w, bint advance) except -1:
        cdef int32_t k = self.free_plan(w), n
        cdef bint partial = advance and (w.a >> 8) % 4 == 0
        cdef int status = V_OK
        if self.s.num_live == 0:
            return self.op_open(w, False, False)
        if k < 0:
            return self.op_done(w, False)
        n = self.choose_rows(w)
        if not self.full:
            status = self.direct_step(self.plans[k], n, advance, partial)
            self.states[S_SHORT] += status != OK
            return self.stepped(k, n, advance) if status == OK else 0
        status = self.judge_batch(n, self.s.max_tokens, advance, partial)
        self.expect(errors.CapacityExceeded if status == V_CAPACITY else
                    errors.OutOfBlocks if status == V_SHORT else None)
        self.states[S_SHORT] += status == V_SHORT
        if self.trace is not None:
            counts = self.counts[:n].tolist()
            self.say(f"pool.{'step' if advance else 'reserve'}(p{k}, {self.names_of(n)}, {counts}"
                     f"{', partial=True' if partial else ''})")
        try:
            if not advance:
                self.pool.reserve(self.plans[k], self.handles[:n], self.counts[:n])
            elif w.a >> 30:
                self.pool.step(self.plans[k], self.handles[:n], self.counts[:n], partial=partial)
            else:
                self.pool.step(self.plans[k], self.handles[:n], self.counts[:n], partial=partial,
                               pad_to=(self.s.max_rows, self.s.max_tokens))
        except REFUSALS as error:
            return self.refused(error)
        self.accepted("step")
        if self.trace is not None and partial:
            self.trace.append(f"assert p{k}.served.tolist() == {[int(self.served[i]) for i in range(n)]}")
        return self.stepped(k, n, advance)

    cdef int direct_step(self, Plan plan, int32_t n, bint advance, bint partial) except -100:
        """A step without Python arguments: what `Pool.step` does once it has read them."""
        cdef Ints rows, new
        cdef Verdict verdict
        cdef int status
        rows.data = self.handle
        new.data = self.count
        rows.size = new.size = n
        rows.width = new.width = 8
        self.pool.keep_plan(plan)
        self.pool.lock("step")
        status = self.pool.run_rows(plan, &rows, &new, advance, partial, 0, -1, &verdict)
        self.pool.unlock()
        if status != OK:
            self.pool.let_go_of_plan(plan)
        return status

    cdef int stepped(self, int32_t k, int32_t n, bint advance) except -1:
        """The step was taken: what it should have done, and what it did."""
        cdef Plan plan = self.plans[k]
        cdef Pending* p = &self.s.plan[k]
        cdef Line* line
        cdef int32_t i, slot
        cdef int64_t new, at, bs = self.s.block_size
        p.step = self.next_step
        self.next_step += 1
        p.executed = p.noted = False
        p.rows = n
        p.tokens = p.num_copies = p.num_held = 0
        for i in range(n):
            slot = self.rows[i]
            line = &self.s.line[slot]
            if self.full and plan.wire.served[i] != self.served[i]:
                self.fail(f"row {i} has served {plan.wire.served[i]}, and should not")
            new = self.count[i] if plan.wire.served[i] else 0
            self.states[S_PARTIAL] += not plan.wire.served[i]
            p.handle[i] = line.handle
            p.before[i] = line.length
            p.row_step[i] = line.row_step
            self.grown(p, i, slot, new)
            if advance:
                self.extend(slot, line.length + new, self.salt)
                for at in range(line.length, line.length + new):
                    p.slot[p.tokens] = line_table(&self.s, slot)[at // bs] * bs + at % bs
                    p.stamp[p.tokens] = line_stamp(&self.s, slot)[at]
                    p.tokens += 1
                line.length += new
            p.length[i] = line.length
            line.row_step = p.step if self.pool.steps_pend else 0
            if self.full:
                memcpy(p.expect + i * self.s.capacity, line_stamp(&self.s, slot), line.length * sizeof(uint64_t))
        self.check_plan_arrays(plan, p)
        if self.full:
            shadow_execute(&self.s, p, self.s.virt)
        if self.pool.steps_pend:
            self.s.queue[self.s.num_queue] = k
            self.s.num_queue += 1
            return 0
        self.run_plan(p)
        p.step = p.num_held = 0
        return 0

    cdef int grown(self, Pending* p, int32_t row, int32_t slot, int64_t new) except -1:
        """One row: which table entries were replaced, which were added; what is held and copied for it."""
        cdef Line* line = &self.s.line[slot]
        cdef int64_t bs = self.s.block_size, end = (line.length + new + bs - 1) // bs, index
        cdef int32_t* table = line_table(&self.s, slot)
        cdef const int32_t* now = seq_table(&self.pool.seqs, slot)
        cdef int32_t valid
        memcpy(p.table + <int64_t>row * self.s.width, table, line.blocks * sizeof(int32_t))
        p.blocks[row] = line.blocks
        if self.unsharing:
            return self.unshared(p, row, slot)
        if new == 0:
            return 0
        for index in range(line.length // bs, end):
            if index >= line.blocks:
                table[index] = now[index]
                shadow_poison(&self.s, now[index])
            elif now[index] != table[index]:
                valid = <int32_t>(line.length - index * bs) if index * bs < line.length else 0
                self.replaced(p, table + index, now[index], valid)
        line.blocks = max(line.blocks, <int32_t>end)
        return 0

    cdef int unshared(self, Pending* p, int32_t row, int32_t slot) except -1:
        """One row of an `unshare`: like `grown`, where compaction is going to write."""
        cdef int64_t bs = self.s.block_size, length = self.s.line[slot].length, index
        cdef int64_t end = 0 if self.lens[row] == length else (self.lens[row] + bs - 1) // bs
        cdef int32_t* table = line_table(&self.s, slot)
        cdef const int32_t* now = seq_table(&self.pool.seqs, slot)
        for index in range(self.first // bs, end):
            if now[index] != table[index]:
                self.replaced(p, table + index, now[index], <int32_t>min(bs, length - index * bs))
        return 0

    cdef void replaced(self, Pending* p, int32_t* entry, int32_t now, int32_t valid) noexcept:
        """The block that stood at an entry of a table is held by the step, and copied as far as it is filled."""
        p.held[p.num_held] = entry[0]
        p.held_tokens[p.num_held] = valid
        p.num_held += 1
        if valid:
            p.copies[3 * p.num_copies] = entry[0]
            p.copies[3 * p.num_copies + 1] = now
            p.copies[3 * p.num_copies + 2] = valid
            p.num_copies += 1
            self.states[S_COPIES] += 1
        self.states[S_REPLACED] += 1
        entry[0] = now
        shadow_poison(&self.s, now)

    # -- arrays

    cdef int check_plan_arrays(self, Plan plan, Pending* p) except -1:
        """Copies, slots and tables that the backend gets."""
        cdef Field* f = plan.wire.field
        cdef int32_t i, k, width = self.s.width
        cdef int64_t t
        if plan.copies_made != p.num_copies:
            self.fail(f"the plan has {plan.copies_made} copies, {p.num_copies} are due")
        for i in range(3 * p.num_copies):
            if plan.step.copies[i] != p.copies[i]:
                self.fail(f"copy {i // 3} of the plan is wrong ({plan.step.copies[i]}, not {p.copies[i]})")
        if plan.tokens != p.tokens:
            self.fail(f"the plan has {plan.tokens} tokens, {p.tokens} were served")
        for t in range(p.tokens):
            if get(&f[SLOT_MAPPING], t) != p.slot[t]:
                self.fail(f"slot_mapping[{t}] is {get(&f[SLOT_MAPPING], t)}, not {p.slot[t]}")
        if not self.full:
            return 0
        for k in range(plan.wire.num_dirty):
            i = plan.wire.dirty[k]
            for t in range(width):
                p.mirror[i * width + t] = <int32_t>get(&f[BLOCK_TABLES], <int64_t>i * width + t)
        for i in range(p.rows):
            slot = self.rows[i]
            for k in range(width):
                due = line_table(&self.s, slot)[k] if k < self.s.line[slot].blocks else f[BLOCK_TABLES].pad
                if p.mirror[i * width + k] != due:
                    self.fail(f"block_tables[{i}, {k}] is {p.mirror[i * width + k]} by dirty_rows, not {due}")
        self.check_lengths(plan, p)
        return self.check_formats(plan, p)

    cdef int check_lengths(self, Plan plan, Pending* p) except -1:
        cdef Field* f = plan.wire.field
        cdef int32_t i
        cdef int64_t t = 0, at
        for i in range(p.rows):
            if get(&f[SEQ_LENS], i) != p.length[i] or get(&f[CU_Q_LENS], i) != t:
                self.fail(f"row {i} has length {get(&f[SEQ_LENS], i)} from token {get(&f[CU_Q_LENS], i)} on, "
                          f"not {p.length[i]} from {t}")
            for at in range(p.before[i], p.length[i]):
                if get(&f[POSITIONS], t) != at + self.s.line[self.rows[i]].evicted:
                    self.fail(f"positions[{t}] is {get(&f[POSITIONS], t)}, not {at} and what was evicted")
                t += 1
        if get(&f[CU_Q_LENS], p.rows) != t:
            self.fail(f"cu_q_lens ends with {get(&f[CU_Q_LENS], p.rows)}, not {t}")
        return 0

    cdef int check_formats(self, Plan plan, Pending* p) except -1:
        """Tables in the other formats, as far as this plan has them."""
        cdef Field* f = plan.wire.field
        cdef int32_t i, slot
        cdef int64_t at, full, pages = 0, total = 0, bs = self.s.block_size, due
        for i in range(p.rows):
            slot = self.rows[i]
            full = (p.length[i] + bs - 1) // bs
            if f[SLOT_IDS].width and get(&f[SLOT_IDS], i) != slot:
                self.fail(f"slot_ids[{i}] is {get(&f[SLOT_IDS], i)}, not {slot}")
            if f[INDPTR].width:
                if (get(&f[INDPTR], i) != pages or get(&f[INDPTR], i + 1) != pages + full
                        or get(&f[LAST_PAGE_LEN], i) != (p.length[i] - (full - 1) * bs if full else 0)):
                    self.fail(f"indptr or last_page_len of row {i} is wrong")
                for at in range(full):
                    if get(&f[INDICES], pages + at) != line_table(&self.s, slot)[at]:
                        self.fail(f"indices[{pages + at}] is {get(&f[INDICES], pages + at)}")
            for at in range(p.length[i]):
                due = line_table(&self.s, slot)[at // bs] * bs + at % bs
                if f[KV_SLOTS].width and get(&f[KV_SLOTS], i * plan.wire.kv_width + at) != due:
                    self.fail(f"kv_slots[{i}, {at}] is not {due}")
                if f[KV_SLOTS_RAGGED].width and get(&f[KV_SLOTS_RAGGED], total + at) != due:
                    self.fail(f"kv_slots_ragged[{total + at}] is not {due}")
            if f[KV_INDPTR].width and get(&f[KV_INDPTR], i) != total:
                self.fail(f"kv_indptr[{i}] is {get(&f[KV_INDPTR], i)}, not {total}")
            pages += full
            total += p.length[i]
        return 0

    # -- how steps end

    cdef int run_plan(self, Pending* p) except -1:
        """The backend runs a plan: copies, writes, reads."""
        shadow_execute(&self.s, p, self.s.real)
        p.executed = True
        self.states[S_LATE_PLANS] += self.s.num_queue > 1
        if self.full and shadow_read(&self.s, p):
            self.report()
        return 0

    cdef int run_until(self, int32_t k) except -1:
        """The backend runs plans in step order, up to plan k."""
        cdef int32_t i
        for i in range(self.s.num_queue):
            if not self.s.plan[self.s.queue[i]].executed:
                self.run_plan(&self.s.plan[self.s.queue[i]])
            if self.s.queue[i] == k:
                return 0
        return 0

    cdef void leave_queue(self, int32_t at) noexcept:
        cdef int32_t i
        self.s.plan[self.s.queue[at]].step = 0
        self.s.plan[self.s.queue[at]].num_held = 0
        self.s.num_queue -= 1
        for i in range(at, self.s.num_queue):
            self.s.queue[i] = self.s.queue[i + 1]

    cdef int op_execute(self) except -1:
        cdef int32_t i
        for i in range(self.s.num_queue):
            if not self.s.plan[self.s.queue[i]].executed:
                if self.trace is not None:
                    self.trace.append(f"pool.execute(p{self.s.queue[i]})")
                return self.run_plan(&self.s.plan[self.s.queue[i]])
        return self.nothing()

    cdef int op_done(self, const Word* w, bint anyone) except -1:
        """Declare a pending plan done: the oldest, or `anyone`."""
        cdef int32_t n = self.s.num_queue, i, k
        for i in range(n):
            k = self.s.queue[(i + w.a) % n if anyone else i]
            if self.s.plan[k].noted:
                continue
            self.states[S_NOTED] += k != self.s.queue[0]
            if self.trace is not None:
                self.trace.append(f"pool.done(p{k})")
            self.run_until(k)
            self.do_done(self.plans[k])
            self.s.plan[k].noted = True
            return self.pass_plans()
        return self.nothing()

    cdef int pass_plans(self) except -1:
        """The oldest plans leave, as far as they were declared done."""
        cdef Pending* p
        cdef Line* line
        cdef int32_t i
        while self.s.num_queue and self.s.plan[self.s.queue[0]].noted:
            p = &self.s.plan[self.s.queue[0]]
            for i in range(p.rows):
                line = &self.s.line[p.handle[i] & 0xFFFFF]
                if line.handle == p.handle[i]:
                    line.done = p.length[i]
            self.leave_queue(0)
        return 0

    cdef object judge_rollback(self, int32_t k):
        cdef int32_t i
        if self.s.plan[k].noted:
            return errors.PlanStateError
        if self.newest_inherit < self.s.plan[k].step:
            return None
        for i in range(self.s.num_live):
            if self.s.line[self.s.live[i]].inherit == self.s.plan[k].step:
                return errors.PlanStateError
        return None

    cdef int op_rollback(self, const Word* w) except -1:
        """Take the newest pending plan back; the backend has run it, or never will."""
        cdef int32_t k
        if self.s.num_queue == 0:
            return self.nothing()
        k = self.s.queue[self.s.num_queue - 1]
        self.expect(self.judge_rollback(k))
        if self.due is not None and not self.full:
            return self.nothing()
        if self.trace is not None:
            self.say(f"pool.rollback(p{k})")
        try:
            self.do_rollback(self.plans[k])
        except REFUSALS as error:
            return self.refused(error)
        self.accepted("rollback")
        return self.taken_back(k)

    cdef int taken_back(self, int32_t k) except -1:
        cdef Pending* p = &self.s.plan[k]
        cdef Line* line
        cdef int32_t i, slot
        cdef int64_t t, bs = self.s.block_size
        for i in range(p.rows):
            slot = p.handle[i] & 0xFFFFF
            line = &self.s.line[slot]
            if line.handle != p.handle[i]:
                continue
            line.length = p.before[i]
            line.blocks = p.blocks[i]
            line.row_step = p.row_step[i]
            memcpy(line_table(&self.s, slot), p.table + <int64_t>i * self.s.width, line.blocks * sizeof(int32_t))
        self.states[S_ROLLBACKS] += 1
        self.states[S_EXECUTED_ROLLBACKS] += p.executed
        self.leave_queue(self.s.num_queue - 1)
        if self.full and not p.executed:
            self.unwrite(p)
        return 0

    cdef void unwrite(self, Pending* p) noexcept:
        """A plan will never run: `virt` is built again without it."""
        cdef Pending* other
        cdef int32_t i
        cdef int64_t t, slot, bs = self.s.block_size
        memcpy(self.s.virt, self.s.real, self.s.num_blocks * bs * sizeof(uint64_t))
        for i in range(self.s.num_queue):
            other = &self.s.plan[self.s.queue[i]]
            if not other.executed:
                shadow_execute(&self.s, other, self.s.virt)
        for t in range(p.tokens):
            self.s.raw_stamp[p.slot[t]] = self.s.virt[p.slot[t]]
        for i in range(p.num_copies):
            for t in range(p.copies[3 * i + 2]):
                slot = p.copies[3 * i + 1] * bs + t
                self.s.raw_stamp[slot] = self.s.virt[slot]

    cdef int settle_all(self) except -1:
        """Every pending plan runs and passes."""
        cdef int32_t k
        while self.s.num_queue:
            for k in range(self.s.num_queue):
                if not self.s.plan[self.s.queue[k]].noted:
                    k = self.s.queue[k]
                    break
            if self.trace is not None:
                self.trace.append(f"pool.done(p{k})")
            self.run_until(k)
            self.do_done(self.plans[k])
            self.s.plan[k].noted = True
            self.pass_plans()
        return 0
