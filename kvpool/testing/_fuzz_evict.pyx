"""The fuzzer's driver: tokens that leave sequences, by compaction or as whole blocks.

Compaction is work of the backend: what is pending runs before it. Which tokens stay is drawn; both storages and the
stamps that a sequence has to read are moved accordingly, and what lies behind in its last block is poisoned.
"""
from libc.stdint cimport int32_t, int64_t, uint64_t

from kvpool._blocks cimport Blocks
from kvpool.testing._fuzz_base cimport S_COMPACTED, Word, hash64
from kvpool.testing._shadow cimport Line, line_stamp, line_table, line_token, poison, shadow_observe

from kvpool import errors

REFUSALS = (errors.KVPoolError, ValueError)


cdef class Evictions(Steps):
    """How tokens leave; see `kvpool.testing._fuzz.Driver`."""

    cdef int64_t rewritten_end(self, int32_t slot, int64_t length) noexcept:
        """End of the table indices that compaction rewrites; they begin at ``first // block_size``."""
        return 0 if length == self.s.line[slot].length else (length + self.s.block_size - 1) // self.s.block_size

    cdef bint is_own(self, int32_t block) noexcept:
        """By recomputed counts; those of a large pool are fresh at checkpoints only, which judge the pool's own."""
        cdef const Blocks* b = &self.pool.blocks
        cdef int32_t count = self.s.count[block] if self.full else b.block[block].refcount
        cdef int32_t floor = self.s.floor[block] if self.full else b.floor[block]
        return count == 1 and not b.block[block].committed and floor == 0

    cdef int64_t shorter(self, int32_t slot, uint64_t word) noexcept:
        """A length to compact to: mostly a few tokens less, now and then one too many."""
        cdef int64_t length = self.s.line[slot].length
        if word >> 27 == 31 and self.full:
            return length + 1
        return length - <int64_t>(word % <uint64_t>(min(length, 2 * self.s.block_size + 1) + 1))

    cdef int look(self) except -1:
        """Judge what the call has done so far; counts and floors are fresh then. A large pool has to wait."""
        if not self.full:
            return 0
        shadow_observe(&self.s, &self.pool.blocks)
        return self.check()

    # -- blocks of one's own

    cdef object judge_unshare(self, int32_t n):
        """The exception that is due, or None. Spoils the recomputed counts; of a large pool, none may be due."""
        cdef int64_t index, needed = 0
        cdef int32_t i, block
        for i in range(n):
            if not 0 <= self.lens[i] <= self.s.line[self.rows[i]].length:
                return ValueError
        for i in range(n):
            for index in range(self.first // self.s.block_size, self.rewritten_end(self.rows[i], self.lens[i])):
                block = line_table(&self.s, self.rows[i])[index]
                if not self.is_own(block):
                    needed += 1
                    if not self.full:
                        continue
                    self.s.count[block] -= 1
                    self.s.floor[block] = max(self.s.floor[block], 1)
        return errors.OutOfBlocks if needed > self.pool.blocks.num_blank + self.pool.blocks.lru.size else None

    cdef int op_unshare(self, const Word* w) except -1:
        cdef int32_t k = self.free_plan(w), n, i
        if k < 0 or self.s.num_live == 0:
            return self.nothing()
        n = self.choose_rows(w)
        self.first = w.c % <uint64_t>(2 * self.s.block_size)
        for i in range(n):
            self.lens[i] = self.shorter(self.rows[i], hash64(w.c + <uint64_t>i) >> 32)
        if not self.full and self.judge_unshare(n) is not None:
            return self.nothing()
        return self.unshare(k, n)

    cdef int unshare(self, int32_t k, int32_t n) except -1:
        """`lens` and `first` for the chosen rows; recomputed counts have to be fresh."""
        cdef int32_t i
        self.expect(self.judge_unshare(n))
        if self.due is not None and not self.full:
            return 0
        lens = [self.lens[i] for i in range(n)]
        if self.trace is not None:
            self.say(f"pool.unshare(p{k}, {self.names_of(n)}, {lens}, {self.first})")
        try:
            self.pool.unshare(self.plans[k], self.handles[:n], lens, self.first)
        except REFUSALS as error:
            return self.refused(error)
        self.accepted("unshare")
        self.s.low_blank = min(self.s.low_blank, self.pool.blocks.num_blank)
        for i in range(n):
            self.count[i] = 0
            self.served[i] = 1
        self.unsharing = True
        try:
            return self.stepped(k, n, False)
        finally:
            self.unsharing = False

    # -- compaction

    cdef object judge_eviction(self, int32_t slot, int64_t length):
        cdef int64_t index
        if not 0 <= length <= self.s.line[slot].length:
            return ValueError
        if self.s.line[slot].row_step >= self.oldest():
            return errors.PlanStateError
        for index in range(self.first // self.s.block_size, self.rewritten_end(slot, length)):
            if not self.is_own(line_table(&self.s, slot)[index]):
                return ValueError
        return None

    cdef int op_compact(self, const Word* w) except -1:
        """Mostly with everything done before and blocks of its own, now and then as it comes."""
        cdef int32_t slot, k
        cdef int64_t length
        if self.s.num_live == 0:
            return self.nothing()
        slot = self.s.live[self.pick(w.b)]
        length = self.shorter(slot, w.a)
        self.first = w.c % <uint64_t>(2 * self.s.block_size)
        if w.c >> 30:
            self.settle_all()
            self.look()
        k = self.free_plan(w)
        if w.c >> 29 and k >= 0 and self.judge_eviction(slot, length) is ValueError:
            self.rows[0] = slot
            self.handle[0] = self.s.line[slot].handle
            self.lens[0] = length
            self.unshare(k, 1)
            if w.c >> 30:
                self.settle_all()
            self.look()
        self.expect(self.judge_eviction(slot, length))
        if self.due is not None and not self.full:
            return self.nothing()
        if self.trace is not None:
            self.say(f"pool.compact({self.names[self.s.line[slot].handle]}, {length}, {self.first})")
        try:
            self.pool.compact(self.s.line[slot].handle, length, self.first)
        except REFUSALS as error:
            return self.refused(error)
        self.accepted("compact")
        return self.compacted(slot, length, w.c)

    cdef int compacted(self, int32_t slot, int64_t length, uint64_t salt) except -1:
        """What the backend does, after all that is pending."""
        cdef Line* line = &self.s.line[slot]
        cdef int32_t* table = line_table(&self.s, slot)
        cdef int64_t bs = self.s.block_size, left = line.length, place = 0, old, at, was
        cdef int32_t i
        if length == left:
            return 0
        for i in range(self.s.num_queue):
            if not self.s.plan[self.s.queue[i]].executed:
                self.run_plan(&self.s.plan[self.s.queue[i]])
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
                line_stamp(&self.s, slot)[place] = line_stamp(&self.s, slot)[old]
                line_token(&self.s, slot)[place] = line_token(&self.s, slot)[old]
                place += 1
        for place in range(max(length, self.first // bs * bs), (length + bs - 1) // bs * bs):
            at = table[place // bs] * bs + place % bs
            self.s.real[at] = poison(at)
            if self.full:
                self.s.virt[at] = poison(at)
        line.blocks = <int32_t>((length + bs - 1) // bs)
        self.lost(slot, line.length - length)
        return 0

    cdef void lost(self, int32_t slot, int64_t left) noexcept:
        """The sequence goes on with fewer tokens, and is none that a prompt could find."""
        cdef Line* line = &self.s.line[slot]
        line.point = line.length + line.evicted
        line.evicted += left
        line.length -= left
        line.known = <int32_t>line.length
        line.committed = line.done = line.forked_at = 0
        self.states[S_COMPACTED] += 1

    # -- whole blocks

    cdef int op_leave(self, const Word* w) except -1:
        cdef int32_t slot, k, n = 0
        cdef int64_t at, place = 0, bs = self.s.block_size
        cdef Line* line
        if self.s.num_live == 0:
            return self.nothing()
        slot = self.s.live[self.pick(w.b)]
        line = &self.s.line[slot]
        if w.c >> 30:
            self.settle_all()
            self.look()
        leaving = [k for k in range(line.length // bs) if hash64(w.a + <uint64_t>k) % 3 == 0]
        if w.a >> 28 == 15:
            leaving.append(line.length // bs)
        self.expect(ValueError if w.a >> 28 == 15 else
                    errors.PlanStateError if line.row_step >= self.oldest() else None)
        if self.due is not None and not self.full:
            return self.nothing()
        if self.trace is not None:
            self.say(f"pool.evict_blocks({self.names[line.handle]}, {leaving})")
        try:
            self.pool.evict_blocks(line.handle, leaving)
        except REFUSALS as error:
            return self.refused(error)
        self.accepted("evict_blocks")
        gone = set(leaving)
        for at in range(line.length):
            if at // bs not in gone:
                line_stamp(&self.s, slot)[place] = line_stamp(&self.s, slot)[at]
                line_token(&self.s, slot)[place] = line_token(&self.s, slot)[at]
                place += 1
        for k in range(line.blocks):
            if k not in gone:
                line_table(&self.s, slot)[n] = line_table(&self.s, slot)[k]
                n += 1
        line.blocks = n
        if leaving:
            self.lost(slot, len(leaving) * bs)
        return 0
