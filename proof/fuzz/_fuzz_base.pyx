"""The fuzzer's driver, its lower half: what it knows, how it picks, what a refusal must be, `open`.

What a call is due to do is predicted before it is made, from the books. So a refusal without a reason is a finding as
much as one that is missing, and one that changed something is seen where that shows.
"""
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from kvpool._core cimport Plan, Pool, array_data, mix
from proof.fuzz._books cimport (
    AT_LIMBO,
    MAX_PLANS,
    V_CAPACITY,
    V_FULL,
    V_OK,
    V_SHORT,
    V_STATE,
    V_VALUE,
    Line,
    books_free,
    books_init,
    books_load,
    books_next_handle,
    waits_for_step,
)
from proof.fuzz._books_prefix cimport books_hits, books_judge_open, books_open_prompt
from proof.fuzz._storage cimport (
    line_stamp,
    line_token,
    storage_check,
    storage_free,
    storage_init,
    storage_poison,
)

import re

import numpy as np

from kvpool import errors
from kvpool.testing.fuzz_target import FuzzFinding
from proof.fuzz.shape import plan_options, space_name

REFUSALS = (errors.KVPoolError, ValueError)
#: What each verdict of the books is to a caller.
DUE = {V_OK: None, V_SHORT: errors.OutOfBlocks, V_CAPACITY: errors.CapacityExceeded, V_FULL: errors.OutOfSequences,
       V_VALUE: ValueError, V_STATE: errors.PlanStateError}


cdef uint64_t hash64(uint64_t h) noexcept nogil:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014)."""
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9ULL
    h = (h ^ (h >> 27)) * 0x94D049BB133111EBULL
    return h ^ (h >> 31)


cdef class Base(Calls):
    """One pool, its plans, and what is known about them; see `proof.fuzz._fuzz.Driver`."""

    def __cinit__(self, shape, make_pool=Pool, trace=None):
        cdef int32_t i, k = 0, n
        self.shape = shape
        self.full = shape.full
        self.seed = shape.seed
        self.appetite = shape.appetite
        self.alphabet = shape.alphabet
        self.spaces = shape.spaces
        self.hot = shape.hot
        self.plans = [Plan(self.pool, shape.max_rows, shape.max_tokens, **plan_options(shape, i))
                      for i in range(min(shape.plans, MAX_PLANS))]
        self.open_books()
        self.handles = np.zeros(shape.max_rows, np.int64)
        self.counts = np.zeros(shape.max_rows, np.int64)
        self.prompt = np.zeros(max(self.b.capacity + self.b.block_size, 4 * self.b.block_size) + 2, np.int32)
        self.ids = np.zeros(max(self.b.width, 64), np.int32)
        self.handle = <int64_t*>array_data(self.handles)
        self.count = <int64_t*>array_data(self.counts)
        self.text = <int32_t*>array_data(self.prompt)
        self.id = <int32_t*>array_data(self.ids)
        self.trace = trace
        self.names = {}
        self.keys = {}
        for i, n in enumerate(shape.dice):
            for k in range(k, min(k + n, 256)):
                self.dice[k] = i
            k += n > 0
        while k < 256:
            self.dice[k] = self.dice[k - 1]
            k += 1

    def __dealloc__(self):
        books_free(&self.b)
        storage_free(&self.s)

    def open_books(self):
        """From what the pool was asked for."""
        asked = self.shape.pool
        blocks = asked["num_blocks"] - asked["reserved_blocks"]
        width = asked["max_blocks_per_seq"]
        self.b.num_blocks, self.b.reserved = asked["num_blocks"], asked["reserved_blocks"]
        self.b.max_seqs, self.b.block_size = asked["max_seqs"], asked["block_size"]
        self.b.width = min(blocks, max(1, (1 << 27) // self.b.max_seqs)) if width is None else width
        self.b.watermark = asked["watermark"]
        self.b.max_rows, self.b.max_tokens = self.shape.max_rows, self.shape.max_tokens
        self.b.steps_pend, self.b.full = not asked["in_order"], self.full
        self.indexed = self.b.indexed = asked.get("prefix_cache", False)
        self.b.event_room = 8 * self.b.num_blocks + 64 if asked.get("events") else 0    # more than a word makes
        self.b.num_spaces = max(self.spaces, 3)
        if books_init(&self.b) or storage_init(&self.s, &self.b):
            raise MemoryError("[Driver] no memory for what is known about the pool")

    cdef int fail(self, str what) except -1:
        raise FuzzFinding(what)

    cdef int nothing(self) noexcept:
        """The word meets a state in which it means nothing; it does not count as a call."""
        self.idle += 1
        self.calls[self.op] -= 1
        return 0

    cdef int report(self, const Finding* finding) except -1:
        """Raise what a check found; the trace gets the call that shows it, where one does."""
        cdef bytes words = finding.what
        what = words.decode()
        for place, number in enumerate((finding.a, finding.b, finding.c, finding.d)):
            what = what.replace("%lld", "" if place < 2 and number < 0 else str(number), 1)
        shown = re.fullmatch(r"(p\w+\..*) is (-?\d+), not (-?\d+)", what)
        if self.trace is not None and shown:
            call = re.sub(r"\((\d+)\)", lambda m: f"({self.names.get(int(m[1]), m[1])})", shown[1])
            call = call.replace("plan.", f"p{self.shown}.")
            self.trace.append(f"assert {call} == {shown[3]}")
        return self.fail(what)

    cdef int check(self) except -1:
        """The pool against the books, and the storage against what everybody has to read."""
        PyErr_CheckSignals()                        # a large pool takes tens of milliseconds
        self.finding.what = NULL
        if self.compare_pool(&self.b, &self.finding):
            self.report(&self.finding)
        if storage_check(&self.s, &self.b):
            self.report(&self.s.finding)
        return 0

    cdef void clean(self) noexcept:
        """Blocks that the last call took or gave back hold nothing that anybody may read."""
        cdef int64_t k
        for k in range(self.b.num_spoilt):
            storage_poison(&self.s, &self.b, self.b.spoilt[k])
        self.b.num_spoilt = 0

    # -- refusals

    cdef int expect(self, int verdict) except -1:
        """Say what the call is due to meet."""
        self.due = DUE[verdict] if verdict else None
        return 0

    cdef int refused(self, object error) except -1:
        """The call raised. It was due to."""
        self.states[S_REFUSED] += 1
        if self.due is None:
            self.fail(f"refused without a reason: {type(error).__name__}: {error}")
        if not isinstance(error, self.due):
            self.fail(f"refused with {type(error).__name__} ({error}), {self.due.__name__} was due")
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
        return "[" + ", ".join([self.names[self.b.line[self.rows[i]].handle] for i in range(n)]) + "]"

    # -- picking

    cdef bytes space_name(self, int32_t space):
        return space_name(space)

    cdef int32_t space_of(self, const Word* w) noexcept:
        """The namespace of a prompt, mostly the first; of many, any."""
        cdef uint32_t eighth = w.c // 4 % 8
        if self.spaces > 3:
            return <int32_t>(hash64(w.c) % <uint64_t>self.spaces) if eighth else 0
        return eighth - 5 if eighth > 5 else 0

    cdef int32_t pick(self, uint32_t word) noexcept:
        """An index into `live`, mostly in a window that moves slowly: memory that a real engine would touch."""
        cdef int64_t n = self.b.num_live
        if n <= self.hot or (word >> 28) == 0:
            return <int32_t>(word % n)
        return <int32_t>(((self.clock >> 8) * 29 + word % self.hot) % n)

    cdef void mourn(self, int32_t slot) noexcept:
        """The sequence is about to be closed."""
        self.states[S_PENDING_CLOSES] += waits_for_step(&self.b, &self.b.line[slot])
        self.stale[self.num_stale % STALE] = self.b.line[slot].handle
        self.num_stale += 1

    cdef int greet(self, int64_t handle, int64_t due) except -1:
        """A new sequence has the handle that was due, beside the tag and the first generation of all of the pool."""
        if self.tag == 0:
            self.tag = handle - due
        if handle != (due + self.tag) or not 1 <= handle >> 52 <= 2047:
            self.fail(f"handle {handle} was given to a new sequence, {due + self.tag} was due")
        if self.trace is not None:
            self.names[due] = f"h{len(self.names)}"
        return 0

    cdef int32_t token_at(self, uint64_t salt, int64_t position) noexcept:
        """A token that the model says next; without a prefix cache every token is new."""
        if not self.indexed:
            self.fresh += 1
            return <int32_t>(self.fresh & 0x7FFFFFFF)
        return <int32_t>(hash64(salt + <uint64_t>position) % <uint64_t>self.alphabet)

    cdef void extend(self, int32_t slot, int64_t end, uint64_t salt) noexcept:
        """Decide the tokens of a sequence up to `end`, and their stamps."""
        cdef Line* line = &self.b.line[slot]
        cdef int32_t* token = line_token(&self.s, &self.b, slot)
        cdef uint64_t* stamp = line_stamp(&self.s, &self.b, slot)
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
        cdef int64_t n = 1 + w.a % (4 * self.b.block_size + 2), i, copied = 0
        cdef int32_t slot
        if self.full and w.a >> 28 == 0:
            n = w.a % (self.b.capacity + self.b.block_size + 2)
        if self.b.num_live and w.c & 3:
            slot = self.b.live[self.pick(w.b)]
            copied = min(n, self.b.line[slot].known)
            memcpy(self.text, line_token(&self.s, &self.b, slot), copied * sizeof(int32_t))
        for i in range(copied, n):
            self.text[i] = self.token_at((w.b >> 8) % 4, i) if self.indexed else 0
        return <int32_t>n

    cdef int op_open(self, const Word* w, bint prompt, bint pin) except -1:
        cdef int64_t n, bs = self.b.block_size
        cdef int32_t space = self.space_of(w), hits = 0, evictable = 0, slot, k
        cdef bint load = self.op == LOAD
        prompt = prompt and self.indexed
        pin = pin and prompt
        if prompt:
            n = self.make_prompt(w)
            if n <= self.b.capacity:
                hits = books_hits(&self.b, space, self.text, n // bs if pin else (n - 1) // bs, self.id, &evictable)
        else:
            n = w.a % (self.b.capacity + bs + 1 if self.full and w.a >> 28 == 0 else 2 * bs + 1)
            n = 0 if self.spaces > 3 and w.a >> 28 else n
        for k in range(hits):
            self.states[S_LIMBO_HITS] += self.b.page[self.id[k]].place == AT_LIMBO
        self.expect(books_judge_open(&self.b, n, hits, evictable, not pin))
        if self.due is not None and not self.full:
            return self.nothing()
        what = self.prompt[:n] if prompt else n
        if self.trace is not None:
            self.say(f"h{len(self.names)} = pool.{'prefix.pin' if pin else 'open'}"
                     f"({what.tolist() if prompt else n}, {space_name(space)!r}{', load=True' if load else ''})")
        try:
            if pin:
                handle = self.pool.prefix.pin(what, space_name(space))
            elif load:
                handle = self.do_open(what, space_name(space), load=True)
            else:
                handle = self.do_open(what, space_name(space))
        except REFUSALS as error:
            return self.refused(error)
        self.accepted("open")
        self.greet(handle, books_next_handle(&self.b, 0))
        slot = books_open_prompt(&self.b, n, space, self.id, hits, not pin, prompt and not pin and not load)
        self.states[S_HITS] += hits > 0
        self.states[S_FORGOTTEN] = self.b.forgotten
        if self.trace is not None and prompt:
            self.trace.append(f"assert pool.num_tokens({self.names[self.b.line[slot].handle]}) == {hits * bs}")
        if prompt:
            self.adopt_prompt(slot, hits * bs if pin else n)
        if load:
            books_load(&self.b, slot)
        return 0

    cdef int adopt_prompt(self, int32_t slot, int64_t n) except -1:
        """The tokens of `text` are those of a new sequence."""
        cdef uint64_t h = hash64(0x243F6A88 + self.b.line[slot].space)
        cdef int64_t at
        for at in range(n):
            h = hash64(mix(h, self.text[at]))
            line_stamp(&self.s, &self.b, slot)[at] = h
        memcpy(line_token(&self.s, &self.b, slot), self.text, n * sizeof(int32_t))
        self.b.line[slot].known = <int32_t>n
        return 0
