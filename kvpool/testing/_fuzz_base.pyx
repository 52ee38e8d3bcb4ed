"""The fuzzer's driver, its lower half: what it knows, how it picks, what a refusal must leave alone, `open`.

A refusal is predicted before the call, from what the driver knows, so that one without a reason is a finding as
much as one that is missing; and it must leave the pool's fingerprint as it was.
"""
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from kvpool._args cimport array_data
from kvpool._blocks cimport LIMBO, Blocks
from kvpool._plan cimport Plan
from kvpool._pool cimport Pool
from kvpool._names cimport Name, names_find
from kvpool._prefix cimport Match, index_match, index_root_hash
from kvpool._sequence cimport seq_table, slot_of
from kvpool._types cimport mix
from kvpool.testing._shadow cimport (
    MAX_PLANS,
    Line,
    line_stamp,
    line_table,
    line_token,
    shadow_check,
    shadow_free,
    shadow_init,
    shadow_poison,
)

import numpy as np

from kvpool import errors
from kvpool.testing.fuzz_shape import SPACES, FuzzFinding, plan_options

REFUSALS = (errors.KVPoolError, ValueError)


cdef uint64_t hash64(uint64_t h) noexcept nogil:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014)."""
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9ULL
    h = (h ^ (h >> 27)) * 0x94D049BB133111EBULL
    return h ^ (h >> 31)


cdef class Base:
    """One pool, its plans, and what is known about them; see `kvpool.testing._fuzz.Driver`."""

    def __cinit__(self, shape, make_pool=Pool, trace=None):
        cdef int32_t i, k = 0, n
        self.shape = shape
        self.pool = make_pool(**shape.pool)
        self.do_open, self.do_fork, self.do_truncate = self.pool.open, self.pool.fork, self.pool.truncate
        self.do_close, self.do_commit = self.pool.close, self.pool.commit
        self.do_done, self.do_rollback = self.pool.done, self.pool.rollback
        self.full = shape.full
        self.seed = shape.seed
        self.appetite = shape.appetite
        self.alphabet = shape.alphabet
        self.hot = shape.hot
        self.indexed = self.pool.indexed
        self.next_step = 1
        self.plans = [Plan(self.pool, shape.max_rows, shape.max_tokens, **plan_options(shape, i))
                      for i in range(min(shape.plans, MAX_PLANS))]
        if shadow_init(&self.s, &self.pool.blocks, &self.pool.seqs, shape.max_rows, shape.max_tokens, self.full):
            raise MemoryError("[Driver] no memory for what is known about the pool")
        self.handles = np.zeros(shape.max_rows, np.int64)
        self.counts = np.zeros(shape.max_rows, np.int64)
        self.prompt = np.zeros(self.s.capacity + self.s.block_size + 2, np.int32)
        self.ids = np.zeros(max(self.s.width, 64), np.int32)
        self.handle = <int64_t*>array_data(self.handles)
        self.count = <int64_t*>array_data(self.counts)
        self.text = <int32_t*>array_data(self.prompt)
        self.id = <int32_t*>array_data(self.ids)
        self.trace = trace
        self.names = {}
        for i, n in enumerate(shape.dice):
            for k in range(k, min(k + n, 256)):
                self.dice[k] = i
            k += n > 0
        while k < 256:
            self.dice[k] = self.dice[k - 1]
            k += 1

    def __dealloc__(self):
        shadow_free(&self.s)

    def shutdown(self):
        """Give the pool's memory and tag back."""
        self.pool.shutdown()

    cdef int fail(self, str what) except -1:
        raise FuzzFinding(what)

    cdef int nothing(self) noexcept:
        """The word meets a state in which it means nothing; it does not count as a call."""
        self.idle += 1
        self.calls[self.op] -= 1
        return 0

    cdef int report(self) except -1:
        """Raise what a check found."""
        cdef bytes what = self.s.finding.what
        return self.fail(what.decode().replace("%lld", "{}").format(self.s.finding.a, self.s.finding.b,
                                                                    self.s.finding.c))

    cdef int check(self) except -1:
        PyErr_CheckSignals()                        # a large pool takes tens of milliseconds
        if shadow_check(&self.s, &self.pool.blocks, &self.pool.seqs):
            self.report()
        return 0

    # -- refusals

    cdef int expect(self, object due) except -1:
        """Say which exception is due, or None; a refusal must leave the fingerprint as it is now."""
        self.due = due
        if due is not None and self.full:
            self.before = self.pool.fingerprint()
        return 0

    cdef int refused(self, object error) except -1:
        """The call raised. It was due to, and it changed nothing."""
        self.states[S_REFUSED] += 1
        if self.due is None:
            self.fail(f"refused without a reason: {type(error).__name__}: {error}")
        if not isinstance(error, self.due):
            self.fail(f"refused with {type(error).__name__} ({error}), {self.due.__name__} was due")
        if self.full and self.pool.fingerprint() != self.before:
            self.fail(f"a refused call changed the state: {type(error).__name__}: {error}")
        return 0

    cdef int accepted(self, str call) except -1:
        if self.due is not None:
            self.fail(f"{call} was accepted, {self.due.__name__} was due")
        return 0

    cdef int say(self, str line) except -1:
        """Add a line to the trace, inside of ``pytest.raises`` if the call is to be refused."""
        if self.due is not None:
            line = f"with pytest.raises({self.due.__name__}):\n    {line.rpartition(' = ')[2]}"
        self.trace.append(line)
        return 0

    cdef object names_of(self, int32_t n):
        return "[" + ", ".join([self.names[self.handle[i]] for i in range(n)]) + "]"

    # -- picking

    cdef int32_t pick(self, uint32_t word) noexcept:
        """An index into `live`, mostly in a window that moves slowly: memory that a real engine would touch."""
        cdef int64_t n = self.s.num_live
        if n <= self.hot or (word >> 28) == 0:
            return <int32_t>(word % n)
        return <int32_t>(((self.s.clock >> 8) * 29 + word % self.hot) % n)

    cdef int64_t oldest(self) noexcept:
        """The oldest pending step, past any if there is none."""
        return self.s.plan[self.s.queue[0]].step if self.s.num_queue else INT64_MAX

    cdef int64_t done_length(self, const Line* line) noexcept:
        """Leading tokens that no pending step still has to write."""
        cdef int64_t oldest = self.oldest()
        if line.row_step < oldest and line.inherit < oldest:
            return line.length
        return max(line.done, line.forked_at) if line.inherit < oldest else line.done

    cdef void forget(self, int32_t slot) noexcept:
        """The sequence is closed."""
        cdef Line* line = &self.s.line[slot]
        cdef int32_t last = self.s.live[self.s.num_live - 1]
        self.states[S_PENDING_CLOSES] += line.row_step >= self.oldest()
        self.stale[self.num_stale % STALE] = line.handle
        self.num_stale += 1
        self.s.live[line.at] = last
        self.s.line[last].at = line.at
        self.s.num_live -= 1
        line.handle = -1

    cdef Line* register(self, int64_t handle, int64_t length, int32_t blocks) except NULL:
        """A new sequence, with the table that the pool gave it."""
        cdef int32_t slot = slot_of(handle), i
        cdef Line* line = &self.s.line[slot]
        if slot >= self.s.max_seqs or line.handle >= 0:
            self.fail(f"handle {handle} is that of an open sequence")
        for i in range(min(self.num_stale, STALE)):
            if self.stale[i] == handle:
                self.fail(f"handle {handle} was used before")
        line.handle = handle
        line.length = line.done = line.forked_at = line.committed = length
        line.blocks = blocks
        line.known = 0
        line.row_step = line.inherit = line.evicted = line.point = 0
        line.at = self.s.num_live
        self.s.live[self.s.num_live] = slot
        self.s.num_live += 1
        if self.pool.seqs.seq[slot].num_blocks != blocks:
            self.fail(f"{self.pool.seqs.seq[slot].num_blocks} blocks for a new sequence, {blocks} were due")
        memcpy(line_table(&self.s, slot), seq_table(&self.pool.seqs, slot), blocks * sizeof(int32_t))
        if self.trace is not None:
            self.names[handle] = f"h{len(self.names)}"
        return line

    cdef int32_t token_at(self, uint64_t salt, int64_t position) noexcept:
        """A token that the model says next; without a prefix cache every token is new."""
        if not self.indexed:
            self.fresh += 1
            return <int32_t>(self.fresh & 0x7FFFFFFF)
        return <int32_t>(hash64(salt + <uint64_t>position) % <uint64_t>self.alphabet)

    cdef void extend(self, int32_t slot, int64_t end, uint64_t salt) noexcept:
        """Decide the tokens of a sequence up to `end`, and their stamps."""
        cdef Line* line = &self.s.line[slot]
        cdef int32_t* token = line_token(&self.s, slot)
        cdef uint64_t* stamp = line_stamp(&self.s, slot)
        cdef int64_t at
        cdef uint64_t h
        if end <= line.known:
            return
        h = stamp[line.known - 1] if line.known else hash64(0x243F6A88 + line.space)
        for at in range(line.known, end):
            token[at] = self.token_at(salt, at)
            h = hash64(mix(h, token[at]))
            stamp[at] = h
        line.known = <int32_t>end

    # -- open

    cdef int32_t make_prompt(self, const Word* w) noexcept:
        """Tokens of a prompt, often those of an open sequence to some length; returns how many."""
        cdef int64_t n = 1 + w.a % (4 * self.s.block_size + 2), i, copied = 0
        cdef int32_t slot
        if self.full and w.a >> 28 == 0:
            n = w.a % (self.s.capacity + self.s.block_size + 2)
        if self.s.num_live and w.c & 3:
            slot = self.s.live[self.pick(w.b)]
            copied = min(n, self.s.line[slot].known)
            memcpy(self.text, line_token(&self.s, slot), copied * sizeof(int32_t))
        for i in range(copied, n):
            self.text[i] = self.token_at((w.b >> 8) % 4, i) if self.indexed else 0
        return <int32_t>n

    cdef object judge_open(self, int64_t n, int64_t hits, int64_t evictable, bint take):
        """The exception that is due, or None; in the order of docs/core.md."""
        cdef Blocks* b = &self.pool.blocks
        cdef int64_t need = (n + b.block_size - 1) // b.block_size - hits if take else 0
        if n > self.s.capacity:
            return errors.CapacityExceeded
        if need and need + <int64_t>self.shape.watermark > b.num_blank + b.lru.size - evictable:
            return errors.OutOfBlocks
        if self.s.num_live >= self.s.max_seqs:
            return errors.OutOfSequences
        return None

    cdef Match cached(self, int64_t n, bytes space, bint last) except *:
        """What the pool has of the prompt; `id` gets the blocks."""
        cdef Match hit
        cdef Name* name
        hit.blocks = hit.evictable = 0
        if self.indexed and n <= self.s.capacity:
            self.pool.catch_up()                # as every call does first
            name = names_find(&self.pool.index.names, <const char*>space, len(space))
            if name != NULL:
                hit = index_match(&self.pool.index, &self.pool.blocks, name.uid, index_root_hash(
                                      &self.pool.index, <const unsigned char*>space, len(space)), self.text,
                                  <int32_t>(max(n - last, 0) // self.s.block_size), self.id)
        return hit

    cdef int op_open(self, const Word* w, bint prompt, bint pin) except -1:
        cdef int64_t n, bs = self.s.block_size, k
        cdef int32_t blocks, space = space_of(w)
        cdef Match hit
        cdef Line* line
        prompt = prompt and self.indexed
        pin = pin and prompt
        hit.blocks = hit.evictable = 0
        if prompt:
            n = self.make_prompt(w)
            hit = self.cached(n, SPACES[space], not pin)
        else:
            n = w.a % (self.s.capacity + bs + 1 if self.full and w.a >> 28 == 0 else 2 * bs + 1)
        for k in range(hit.blocks):
            self.states[S_LIMBO_HITS] += self.pool.blocks.block[self.id[k]].place == LIMBO
        self.expect(self.judge_open(n, hit.blocks, hit.evictable, not pin))
        if self.due is not None and not self.full:
            return self.nothing()
        what = self.prompt[:n] if prompt else n
        if self.trace is not None:
            self.say(f"h{len(self.names)} = pool.{'pin' if pin else 'open'}"
                     f"({what.tolist() if prompt else n}, {SPACES[space]!r})")
        try:
            handle = self.pool.pin(what, SPACES[space]) if pin else self.do_open(what, SPACES[space])
        except REFUSALS as error:
            return self.refused(error)
        self.accepted("open")
        blocks = hit.blocks if pin else <int32_t>((n + bs - 1) // bs)
        line = self.register(handle, hit.blocks * bs, blocks)
        line.space = space
        self.states[S_HITS] += hit.blocks > 0
        if self.trace is not None and prompt:
            self.trace.append(f"assert pool.num_tokens({self.names[handle]}) == {line.length}")
        if prompt:
            self.adopt_prompt(slot_of(handle), hit.blocks * bs if pin else n)
        for k in range(hit.blocks, blocks):
            shadow_poison(&self.s, line_table(&self.s, slot_of(handle))[k])
        return 0

    cdef int adopt_prompt(self, int32_t slot, int64_t n) except -1:
        """The tokens of `text` are those of a new sequence."""
        cdef uint64_t h = hash64(0x243F6A88 + self.s.line[slot].space)
        cdef int64_t at
        for at in range(n):
            h = hash64(mix(h, self.text[at]))
            line_stamp(&self.s, slot)[at] = h
        memcpy(line_token(&self.s, slot), self.text, n * sizeof(int32_t))
        self.s.line[slot].known = <int32_t>n
        return 0
