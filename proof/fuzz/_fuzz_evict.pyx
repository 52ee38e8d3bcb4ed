"""The fuzzer's driver: tokens that leave sequences, by compaction or as whole blocks.

Compaction is work of the backend: what is pending runs before it. Which tokens stay is drawn; both storages and the
stamps that a sequence has to read are moved accordingly, and what lies behind in its last block is poisoned.
"""
from libc.stdint cimport int32_t, int64_t, uint64_t

from proof.fuzz._books cimport V_OK, V_STATE, V_VALUE, Line, books_compact, books_leave, line_table, waits_for_step
from proof.fuzz._books_steps cimport books_judge_compact, books_judge_unshare
from proof.fuzz._fuzz_base cimport S_COMPACTED, Word, hash64
from proof.fuzz._storage cimport line_stamp, line_token, poison

from kvpool import errors

REFUSALS = (errors.KVPoolError, ValueError)


cdef class Evictions(Steps):
    """How tokens leave; see `proof.fuzz._fuzz.Driver`."""

    cdef int64_t shorter(self, int32_t slot, uint64_t word) noexcept:
        """A length to compact to: mostly a few tokens less, now and then one too many."""
        cdef int64_t length = self.b.line[slot].length
        if word >> 27 == 31 and self.full:
            return length + 1
        return length - <int64_t>(word % <uint64_t>(min(length, 2 * self.b.block_size + 1) + 1))

    # -- blocks of one's own

    cdef int op_unshare(self, const Word* w) except -1:
        cdef int32_t k = self.free_plan(w), n, i
        if k < 0 or self.b.num_live == 0:
            return self.nothing()
        n = self.choose_rows(w)
        self.first = w.c % <uint64_t>(2 * self.b.block_size)
        for i in range(n):
            self.lens[i] = self.shorter(self.rows[i], hash64(w.c + <uint64_t>i) >> 32)
        if not self.unshare(k, n):
            self.nothing()
        return 0

    cdef int unshare(self, int32_t k, int32_t n) except -1:
        """`lens` and `first` for the chosen rows; 0 where no call was made."""
        cdef int32_t i
        self.expect(books_judge_unshare(&self.b, &self.b.plan[k], n, self.rows, self.lens, self.first))
        if self.due is not None and not self.full:
            return 0
        lens = [self.lens[i] for i in range(n)]
        if self.trace is not None:
            self.say(f"pool.unshare(p{k}, {self.names_of(n)}, {lens}, {self.first})")
        try:
            self.pool.unshare(self.plans[k], self.handles[:n], lens, self.first)
        except REFUSALS as error:
            self.refused(error)
            return 1
        self.accepted("unshare")
        self.stepped(k, n, False, False)
        return 1

    # -- compaction

    cdef int op_compact(self, const Word* w) except -1:
        """Mostly with everything done before and blocks of its own, now and then as it comes."""
        cdef int32_t slot, k
        cdef int64_t length
        if self.b.num_live == 0:
            return self.nothing()
        slot = self.b.live[self.pick(w.b)]
        length = self.shorter(slot, w.a)
        self.first = w.c % <uint64_t>(2 * self.b.block_size)
        if w.c >> 30:
            self.settle_all()
        k = self.free_plan(w)
        if w.c >> 29 and k >= 0 and length <= self.b.line[slot].length and (
                books_judge_compact(&self.b, slot, length, self.first) == V_VALUE):
            self.rows[0] = slot
            self.handle[0] = self.b.line[slot].handle + self.tag
            self.lens[0] = length
            self.unshare(k, 1)
            if w.c >> 30:
                self.settle_all()
        self.expect(books_judge_compact(&self.b, slot, length, self.first))
        if self.due is not None and not self.full:
            return self.nothing()
        if self.trace is not None:
            self.say(f"pool.compact({self.names[self.b.line[slot].handle]}, {length}, {self.first})")
        try:
            self.pool.compact(self.b.line[slot].handle + self.tag, length, self.first)
        except REFUSALS as error:
            return self.refused(error)
        self.accepted("compact")
        self.clean()                # of what passed before; then the backend moves, then blocks leave
        self.move_tokens(slot, length, w.c)
        books_compact(&self.b, slot, length)
        return 0

    cdef int move_tokens(self, int32_t slot, int64_t length, uint64_t salt) except -1:
        """What the backend does, after all that is pending."""
        cdef Line* line = &self.b.line[slot]
        cdef int32_t* table = line_table(&self.b, slot)
        cdef int64_t bs = self.b.block_size, left = line.length, place = 0, old, at, was
        if length == left:
            return 0
        self.run_until(-1)
        for old in range(line.length):
            if place >= length:
                break
            if place < self.first or left - old == length - place or (
                    hash64(salt + <uint64_t>old) % <uint64_t>(left - old) < <uint64_t>(length - place)):
                at = table[place // bs] * bs + place % bs
                was = table[old // bs] * bs + old % bs
                self.s.real[at] = self.s.real[was]
                if self.full:
                    self.s.virt[at] = self.s.virt[was]
                line_stamp(&self.s, &self.b, slot)[place] = line_stamp(&self.s, &self.b, slot)[old]
                line_token(&self.s, &self.b, slot)[place] = line_token(&self.s, &self.b, slot)[old]
                place += 1
        for place in range(max(length, self.first // bs * bs), (length + bs - 1) // bs * bs):
            at = table[place // bs] * bs + place % bs
            self.s.real[at] = poison(at)
            if self.full:
                self.s.virt[at] = poison(at)
        self.states[S_COMPACTED] += 1
        return 0

    # -- whole blocks

    cdef int op_leave(self, const Word* w) except -1:
        cdef int32_t slot, k, n = 0
        cdef int64_t at, place = 0, bs = self.b.block_size
        cdef Line* line
        if self.b.num_live == 0:
            return self.nothing()
        slot = self.b.live[self.pick(w.b)]
        line = &self.b.line[slot]
        if w.c >> 30:
            self.settle_all()
        leaving = [k for k in range(line.length // bs) if hash64(w.a + <uint64_t>k) % 3 == 0]
        if w.a >> 28 == 15:
            leaving.append(line.length // bs)
        self.expect(V_VALUE if w.a >> 28 == 15 else V_STATE if waits_for_step(&self.b, line) else V_OK)
        if self.due is not None and not self.full:
            return self.nothing()
        if self.trace is not None:
            self.say(f"pool.evict_blocks({self.names[line.handle]}, {leaving})")
        try:
            self.pool.evict_blocks(line.handle + self.tag, leaving)
        except REFUSALS as error:
            return self.refused(error)
        self.accepted("evict_blocks")
        for at in range(line.length):
            if at // bs >= line.length // bs or hash64(w.a + <uint64_t>(at // bs)) % 3:
                line_stamp(&self.s, &self.b, slot)[place] = line_stamp(&self.s, &self.b, slot)[at]
                line_token(&self.s, &self.b, slot)[place] = line_token(&self.s, &self.b, slot)[at]
                place += 1
        for k in leaving:
            self.id[n] = k
            n += 1
        books_leave(&self.b, slot, self.id, n)
        self.states[S_COMPACTED] += n > 0
        return 0
