# cython: boundscheck=False, nonecheck=False, initializedcheck=False
"""The generator: random programs of words on one pool, whose content is judged.

A word is ``(op, a, b, c)``, a pure function of the run's seed and its place in the program. What it means depends on
the state it meets: "c" may pick a row by its place among the open ones. So any part of a program is a program, which
is what shrinking needs.

`content.pxi` is the judge. This file knows what each row was given (its tokens, what was done, committed and flushed),
makes the calls (`calls.pxi`), and tells the judge. It holds a call to few other promises, each where it is made:
`wrong` marks them. `OPS`, at the end, says which method plays which word.
"""
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memmove, memset

from kvpool._core cimport (
    BLOCK_TABLES, CU_Q_LENS, INDICES, INDPTR, OK, OUT_OF_BLOCKS, POSITIONS, SEQ_LENS, SLOT_IDS, SLOT_MAPPING, Field,
    Ints, LayerGroup, Plan, Pool, StepPart, Verdict, entries_of, group_row, pool_enter, pool_leave, pool_step,
)

import hashlib

from kvpool import errors
from kvpool.retention import Keep
from kvpool.testing.fuzz_target import FuzzFinding as Finding
from tests.verify.words import CAP as CAP_OF_WORDS
from tests.verify.words import KINDS, SPACES, WORDS

REFUSALS = (errors.OutOfBlocks, errors.OutOfSequences, errors.CapacityExceeded, errors.PlanStateError,
            errors.StaleHandle, errors.ForeignHandle, errors.DoubleFree, ValueError)

cdef enum:                      # in the order of WORDS
    OPEN, PROMPT, STEP, PREFILL, CHUNKED, RESERVE, EXECUTE, DONE, DONE_ANY, ROLLBACK, COMMIT, LIE, FORK, TRUNCATE, CLOSE
    DEFER_CLOSE, UNSHARE, COMPACT, EVICT_BLOCKS, PIN, MATCH, EVICT, FLUSH, LOAD, LOADED, ALLOC, INCREF
    DECREF, MARK_CACHED, TOUCH, CAN, EVENTS, STALE, READ, BIND, RESET, RESIZE, KEEP, NUM_WORDS

cdef enum:
    MOST_RAW = 48
    FACES = 1024


include "content.pxi"
include "calls.pxi"


cdef struct Word:
    uint32_t op
    uint32_t a
    uint32_t b
    uint32_t c


cdef struct Raw:                # a reference of the caller on a block
    int32_t arena
    int32_t block
    uint64_t sum                # of its cells, which nobody writes any more; 0: unknown
    int64_t dropped             # when the reference was given back, 0: it was not; the block is still cached
    bint cached
    bint own                    # of `alloc`: no row has the block


cdef struct Load:
    int64_t handle
    int32_t begin
    int32_t n
    bint closed


cdef inline uint64_t hash64(uint64_t x) noexcept nogil:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL
    return x ^ (x >> 31)


cdef class Run(Calls):
    """One run: a pool, its plans, and what the words have done so far.

    Parameters
    ----------
    shape : tests.verify.words.Shape
        Pool, plans, weights and appetite.
    make_pool : callable, optional
        Called with the arguments of `kvpool.Pool`; returns one, or one of a subclass. What that has of `make_plan` and
        `bind` takes the place of `Plan` and its `bind`.
    trace : list, optional
        Gets the calls as lines of Python.
    """

    cdef bint in_order, has_cache, has_states
    cdef object bind
    cdef set known              # (content key, group) by the events; None: events were lost, or there are none
    cdef uint8_t[FACES] dice
    cdef uint64_t seed
    cdef int32_t alphabet, texts, eager, hot
    cdef int32_t[3][CAP] text
    cdef uint64_t[3] epoch      # flushes of each namespace
    cdef int32_t[MOST_SEQS] live
    cdef int32_t num_live, last
    cdef int32_t[MOST_SEQS] slots_free      # row ids in the order in which they are to be used
    cdef int32_t num_slots_free
    cdef int64_t[MOST_SEQS] newest          # handle of each row id
    cdef int64_t[MOST_SEQS] deferred
    cdef int32_t num_deferred
    cdef Load[MOST_SEQS] load
    cdef int32_t num_loads
    cdef Raw[MOST_RAW] raw
    cdef int32_t num_raw
    cdef int64_t made, refused, next_token
    cdef uint64_t opened
    cdef bint starved           # the last word found no blocks
    cdef uint32_t op            # the word at hand
    cdef readonly int64_t place # of the word at hand
    cdef int64_t[64] by_word

    def __cinit__(self, shape, make_pool=Pool, trace=None):
        cdef int32_t k, p
        if CAP != CAP_OF_WORDS or len(WORDS) != NUM_WORDS:
            raise ImportError("_verify was compiled for other words")
        self.shape, self.trace = shape, trace
        self.pool = make_pool(**shape.pool)
        self.direct = type(self.pool) is Pool and trace is None
        make_plan, self.bind = getattr(self.pool, "make_plan", Plan), getattr(self.pool, "bind", Plan.bind)
        self.plans = [make_plan(self.pool, **options) for options in shape.plans]
        self.prefix, self.blocks, self.pins = self.pool.prefix, self.pool.blocks, []
        self.has_cache, self.in_order = shape.pool["prefix_cache"], shape.pool["in_order"]
        self.known = set() if shape.pool["events"] else None
        self.seed, self.alphabet, self.texts = shape.seed, shape.alphabet, shape.texts
        self.eager, self.hot, self.next_work, self.next_token = shape.eager, shape.hot, 1, 1000
        for k in range(FACES):
            self.dice[k] = shape.dice[k]
        for k in range(3):
            for p in range(CAP):
                self.text[k][p] = <int32_t>(hash64(self.seed + <uint64_t>(1000 * k + p)) % <uint64_t>self.alphabet)
        self.read_options(shape.pool)
        self.init_content()
        self.num_slots_free = self.max_seqs
        for k in range(self.max_seqs):
            self.slots_free[k], self.newest[k] = k, -1
        for k in range(self.num_plans):
            self.max_rows[k] = min(shape.plans[k]["max_rows"], MOST_ROWS)
            self.max_tokens[k] = shape.plans[k]["max_tokens"]

    cdef int read_options(self, dict options) except -1:
        """Groups, arenas and sizes as they were asked for."""
        cdef Layer* g
        cdef int32_t k = 0, states, longest = options["max_blocks_per_seq"]
        groups = options["groups"]
        sizes = {0: options["num_blocks"]} | {
            group.arena: group.num_blocks for group in groups or () if group.num_blocks is not None}
        states = len(sizes)
        self.max_seqs, self.reserved = options["max_seqs"], options["reserved_blocks"]
        self.lookahead = options["lookahead"] if groups else 0
        self.block_size, self.num_plans = options["block_size"], len(self.plans)
        self.num_groups = len(groups) if groups else 1
        self.group[0].columns, self.group[0].size, self.group[0].width = 1, self.block_size, longest
        for group in groups or ():
            g = &self.group[k]
            g.kind, g.reach, g.keep, g.bundle = KINDS.index(group.kind), group.size, group.keep, group.blocks
            g.columns, g.arena, g.size = group.columns, group.arena, group.block_size or self.block_size
            g.width = ((longest + 4) * self.block_size // g.size + 1) * g.columns
            if group.kind == "state":
                g.arena, g.size, g.width, self.has_states = states, 1, 1, True
                sizes[states] = group.size
                states += 1
            k += 1
        self.num_arenas = states
        for k in range(states):
            self.num_blocks[k] = sizes[k]
        return 0

    # -- running

    cdef void draw(self, int64_t at, Word* w) noexcept nogil:
        cdef uint64_t h = hash64(self.seed + <uint64_t>at * ODD)
        cdef uint64_t more = hash64(h ^ 0xD1B54A32D192ED03ULL)
        w.op = self.dice[h & (FACES - 1)]
        w.a = <uint32_t>(h >> 32)
        w.b = <uint32_t>more
        w.c = <uint32_t>(more >> 32)

    def words(self, int64_t n):
        """The first `n` words of the program: a list of ``(op, a, b, c)``."""
        cdef Word w
        cdef int64_t at
        found = []
        for at in range(n):
            self.draw(at, &w)
            found.append((w.op, w.a, w.b, w.c))
        return found

    def run(self, int64_t n):
        """The first `n` words, and the end. Every 64 words, all that is there is looked at.

        A prefix cache without a full group has room for a million nodes, all of which `Pool.check` visits: then every
        1,024 words.
        """
        cdef Word w
        cdef int64_t check_every = 1024 if self.has_cache and self.group[self.full_group(0)].kind != FULL else 64
        for self.place in range(n):
            if self.place & 0xFFF == 0:
                PyErr_CheckSignals()
            self.draw(self.place, &w)
            self.apply(&w)
            if (self.place + 1) % check_every == 0:
                self.look_around()
        self.finish()

    def replay(self, words, int64_t check_every=1):
        """A program that is given, and the end."""
        cdef Word w
        for self.place, (w.op, w.a, w.b, w.c) in enumerate(words):
            if w.op >= <uint32_t>len(WORDS):
                raise ValueError(f"word {self.place} of the program has number {w.op}, words are 0 .. {len(WORDS) - 1}")
            self.apply(&w)
            if (self.place + 1) % check_every == 0:
                self.look_around()
        self.finish()

    def shutdown(self):
        """Give the pool's memory and tag back."""
        self.pool.shutdown()

    def digest(self):
        """The pool's digest."""
        return self.pool.digest()

    def facts(self):
        """What was met: name -> how often."""
        met = {name: self.by_word[k] for k, name in enumerate(WORDS)}
        return met, {"calls": self.made, "refused": self.refused, "reads": self.reads, "copies": self.copies,
                     "executed late": self.late, "garbage": self.garbage, "hits": self.hits}

    cdef int apply(self, const Word* w) except -1:
        """One word, and what is due after every call."""
        cdef bint watched = w.a >> 27 == 0
        self.op = self.eased(w)
        if self.num_deferred and self.op != DEFER_CLOSE:
            self.drain()
            self.op = self.eased(w)
        self.by_word[self.op] += 1
        before = self.pool.fingerprint() if watched else None
        self.calls_now = self.refused_now = 0
        self.reason = OK
        OPS[self.op](self, w)
        self.starved = self.reason == OUT_OF_BLOCKS
        self.made += max(self.calls_now, <int64_t>1)
        self.refused += self.refused_now
        if watched and self.calls_now == 1 == self.refused_now and self.pool.fingerprint() != before:
            self.wrong("a call that was refused changed the pool")
        return 0

    cdef uint32_t eased(self, const Word* w) noexcept nogil:
        """The word; mostly another where it has nothing to do."""
        cdef uint32_t op = w.op
        if (op == DONE or op == DONE_ANY or op == ROLLBACK or op == EXECUTE) and self.num_queue == 0 and w.b & 7:
            op = STEP
        if op == LOADED and self.num_loads == 0:
            op = STEP
        if self.num_slots_free == 0 and w.b & 7 and (
                op == OPEN or op == PROMPT or op == PIN or op == LOAD or op == FORK):
            op = CLOSE if self.num_live or self.num_loads == 0 else LOADED
        if self.starved and w.b >> 30 and (op == OPEN or op == PROMPT or op == STEP or op == PREFILL):
            op = DONE if self.num_queue and w.b >> 31 else CLOSE
        if self.num_live == 0 and (STEP <= op <= RESERVE or COMMIT <= op <= EVICT_BLOCKS or op == CAN or op == READ):
            op = PROMPT if self.has_cache else OPEN
        return op

    # -- what words name

    cdef int32_t pick(self, uint32_t x) noexcept nogil:
        """An open row, often the one of the call before."""
        if self.hot and <int32_t>(x >> 29) < self.hot and self.row[self.last].handle >= 0 and (
                not self.row[self.last].loading):
            return self.last
        self.last = self.live[x % <uint32_t>self.num_live]
        return self.last

    cdef int32_t pick_rows(self, const Word* w, int32_t most) noexcept nogil:
        """Some open rows, each once."""
        cdef int32_t n = 1 + w.c % 4 if w.c & 12 else MOST_ROWS, i, j, slot
        n = min(min(n, most), self.num_live)
        self.num_rows = 0
        for i in range(n):
            slot = self.pick(w.c) if i == 0 else self.live[(w.c >> 3 * i) % <uint32_t>self.num_live]
            for j in range(self.num_rows):
                if self.rows[j] == slot:
                    break
            else:
                self.rows[self.num_rows], self.handles[self.num_rows] = slot, self.row[slot].handle
                self.num_rows += 1
        return self.num_rows

    cdef void choose(self, int32_t slot) noexcept nogil:
        """The next call is about one row."""
        self.rows[0], self.handles[0], self.num_rows = slot, self.row[slot].handle, 1

    cdef int32_t idle_plan(self, uint32_t a) except -1:
        """A plan that is not pending; where none is, the oldest passes first."""
        cdef int32_t k, i
        for i in range(self.num_plans):
            k = <int32_t>((a + <uint32_t>i) % <uint32_t>self.num_plans)
            if not self.is_pending(k):
                return k
        k = self.oldest()
        self.finish_plan(k)
        return k

    cdef bint is_pending(self, int32_t k) noexcept nogil:
        cdef int32_t i
        for i in range(self.num_queue):
            if self.queue[i].plan == k:
                return True
        return False

    cdef int32_t oldest(self) noexcept nogil:
        """The plan that is pending for longest, -1: none."""
        cdef int32_t i
        for i in range(self.num_queue):
            if self.queue[i].plan != GARBAGE and not self.work[self.queue[i].plan].noted:
                return self.queue[i].plan
        return -1

    cdef int32_t token_for(self, int32_t slot, int32_t p, uint64_t salt) noexcept nogil:
        """The next token of a row: mostly that of the text it repeats."""
        cdef Row* r = &self.row[slot]
        if p < r.text:
            return r.token[p]
        if r.family < 0:
            self.next_token += 1
            return <int32_t>self.next_token
        salt = hash64(salt + <uint64_t>p)
        return self.text[r.family][p] if salt & 7 else <int32_t>((salt >> 8) % <uint64_t>self.alphabet)

    # -- opening and closing

    cdef int32_t claim(self, int64_t handle, str call) except -1:
        """A new sequence has the row that is free for longest, and a handle that nobody had."""
        cdef int32_t slot = slot_of(handle)
        if slot >= self.max_seqs or self.num_slots_free == 0 or slot != self.slots_free[0]:
            self.wrong(call + " gave row {0}, the one that is free for longest is {1}", slot, self.slots_free[0])
        if handle <= self.newest[slot]:
            self.wrong(call + " gave handle {0} again", handle)
        self.num_slots_free -= 1
        memmove(self.slots_free, self.slots_free + 1, self.num_slots_free * sizeof(int32_t))
        memset(self.num_seen + slot * self.num_groups, 0, self.num_groups * sizeof(int32_t))
        self.newest[slot] = handle
        return slot

    cdef int greet(self, int64_t handle, int32_t n, int32_t space, bint loading) except -1:
        """A sequence was opened with the first of the `n` tokens in `prompt`; those of a hit are there."""
        cdef int32_t slot = self.claim(handle, "open"), g, hit, k
        cdef Row* r = &self.row[slot]
        hit = <int32_t>self.pool.state.seqs.seq[slot].num_tokens
        if hit < 0 or hit > n:
            self.wrong("open found {0} of {1} tokens", hit, n)
        memset(r, 0, sizeof(Row))
        r.handle, r.space, r.text, r.loading = handle, space, n, loading
        r.committed = r.passed = r.point = hit
        r.root = mixed(mixed(0xC0FFEE, space), self.epoch[space])
        self.opened += 1
        r.family = <int32_t>(hash64(self.seed + self.opened) % 3)
        if <int32_t>(hash64(self.seed ^ self.opened) & 7) >= self.texts:
            r.family = -1
        memcpy(r.token, self.prompt, n * sizeof(int32_t))
        if self.see_tables(slot, hit, True) and (
                self.pool.state.blocks.num_blank + self.pool.state.blocks.num_evictable
                < self.pool.state.seqs.watermark):
            self.wrong("open took blocks of the watermark")
        self.extend(slot, hit)
        self.hits += hit > 0
        if hit:
            for g in range(self.num_groups):
                if self.group[g].kind != STATE:
                    self.read_for(g, pool_ids(self.pool, slot, g, &k), self.line_of(slot, g), hit, hit, "hit of",
                                  handle)
        if not loading:
            self.join(slot)
            self.last = slot
        return 0

    cdef void forget(self, int64_t handle) noexcept nogil:
        """A sequence was closed; a row that is being loaded stays in use."""
        cdef int32_t slot = slot_of(handle), k
        if self.row[slot].handle != handle:
            return
        self.row[slot].handle = -1
        if self.row[slot].loading:
            for k in range(self.num_loads):
                if self.load[k].handle == handle:
                    self.load[k].closed = True
            return
        self.leave(slot)
        self.free_slot(slot)

    cdef void join(self, int32_t slot) noexcept nogil:
        self.live[self.num_live] = slot
        self.num_live += 1

    cdef void leave(self, int32_t slot) noexcept nogil:
        cdef int32_t k
        for k in range(self.num_live):
            if self.live[k] == slot:
                self.num_live -= 1
                self.live[k] = self.live[self.num_live]
                return

    cdef void free_slot(self, int32_t slot) noexcept nogil:
        self.slots_free[self.num_slots_free] = slot
        self.num_slots_free += 1

    cdef int drain(self) except -1:
        """The next call closes what was deferred; here it is the least call that there is."""
        cdef int32_t k
        pool_enter(&self.pool.state, "num_free")
        pool_leave(&self.pool.state)
        for k in range(self.num_deferred):
            self.forget(self.deferred[k])
        self.num_deferred = 0
        return 0

    cdef int op_open(self, const Word* w) except -1:
        """An empty sequence, sometimes with blocks."""
        cdef int64_t n = w.a % (4 * self.block_size + 1) if w.b & 1 else 0
        cdef int32_t space = <int32_t>(w.c % 3) if self.has_cache else 0
        cdef int64_t handle = self.call_open(n, True, space, -1, True)
        if handle >= 0:
            self.greet(handle, 0, space, False)
            self.row[self.last].reserved = <int32_t>n
        return 0

    cdef int32_t make_prompt(self, const Word* w, int32_t* space) noexcept nogil:
        """A text, perhaps with a change; or the tokens of a row and a few more. Returns its length."""
        cdef int32_t n = 1 + <int32_t>((w.b >> 4) % <uint32_t>min(20 * self.block_size, CAP - 8)), k
        cdef Row* r
        cdef const int32_t* text = self.text[w.a % 3]
        space[0] = <int32_t>(w.a >> 4) % 3 if (w.a >> 8) & 3 == 0 else 0
        if self.num_live and w.c & 3:
            r = &self.row[self.live[(w.c >> 4) % <uint32_t>self.num_live]]
            n = min(1 + (<int32_t>((w.b >> 4) % <uint32_t>(r.n + 2)) if w.c & 4 else r.n), CAP - 8)
            text, space[0] = r.token, r.space
            memcpy(self.prompt, text, n * sizeof(int32_t))
            if n > r.n:
                self.prompt[n - 1] = <int32_t>(w.a >> 12) % self.alphabet
            return n
        memcpy(self.prompt, text, n * sizeof(int32_t))
        if w.b & 3 == 0:
            k = <int32_t>(w.a >> 12) % n
            self.prompt[k] = (self.prompt[k] + 1) % max(self.alphabet, 2)
        return n

    cdef int op_prompt(self, const Word* w) except -1:
        """Open a prompt; pin or load one."""
        cdef int32_t space, n = self.make_prompt(w, &space)
        cdef int64_t handle, cut = -1
        cdef bint reserve = w.c >> 30 != 0
        if not self.has_cache:
            if self.shape.pool["groups"] is not None:
                return self.op_open(w)
            handle = self.call_open(n, False, 0, -1, True)
            if handle >= 0:
                self.greet(handle, n, 0, False)
            return 0
        if self.op == PIN:
            found = self.call("pool.prefix.pin", self.prefix.pin, (self.said(n), SPACES[space]),
                              {} if self.ttl is None else {"ttl": self.ttl})
            if found is not None and self.ttl is not None:
                self.pins.append((self.now + self.ttl, self.opened, found))
            return 0 if found is None else self.greet(found, n, space, False)
        if self.op == LOAD:
            return self.load_prompts(w, n, space)
        if w.b & 4:
            cut = n if w.b & 256 else <int32_t>((w.b >> 9) % <uint32_t>(n + 1))
        handle = self.call_open(n, False, space, cut, reserve)
        if handle < 0:
            return 0
        self.greet(handle, n, space, False)
        self.row[self.last].cut = max(n - 16, 0) if cut < 0 else <int32_t>cut
        self.row[self.last].reserved = n if reserve else 0
        return self.compute(w) if w.b & 32 else 0

    cdef int compute(self, const Word* w) except -1:
        """The row that was opened computes its prompt, in one step or up to each checkpoint that the pool wants."""
        cdef int32_t slot = self.last, k, i
        cdef Row* r = &self.row[slot]
        for i in range(4 if w.b & 64 else 1):
            k = self.idle_plan(w.a)
            self.aim(slot, k, w.b & 64 != 0)
            if self.counts[0] <= 0 or not self.take_step(k, True, False, False, w.a):
                return 0
            if i == 0 and w.a & 48 == 0 and self.num_queue < MOST_QUEUED - 8:   # fails, and is made again
                self.roll_back(k, w)
                self.aim(slot, k, w.b & 64 != 0)
                if self.counts[0] <= 0 or not self.take_step(k, True, False, False, w.a):
                    return 0
            if w.b & 128:                           # and each chunk is done and committed
                while self.done_length(slot) < r.n:
                    self.finish_plan(self.oldest())
                self.commit_to(slot, r.n)
        return 0

    cdef int aim(self, int32_t slot, int32_t k, bint chunked) except -1:
        """The row is to step to the end of its text in plan k; at most to where a checkpoint is wanted."""
        cdef Row* r = &self.row[slot]
        cdef int32_t end = r.text
        if chunked:
            wanted = self.call("pool.prefix.wanted", self.prefix.wanted, (r.handle,))
            if wanted is not None and wanted[0] >= 0:
                end = wanted[0]
                if end <= r.n or end > r.cut:
                    self.wrong("a checkpoint is wanted at {0}, of a row of {1} tokens, cut at {2}", end, r.n, r.cut)
        self.choose(slot)
        self.counts[0] = min(end - r.n, self.max_tokens[k])
        return 0

    cdef int load_prompts(self, const Word* w, int32_t n, int32_t space) except -1:
        """Blocks for a prompt whose bytes come later, or at once; or two with one prefix, one closed before it runs."""
        cdef int32_t grain = self.block_size, g
        cdef int64_t first, second
        for g in range(self.num_groups):
            grain = max(grain, self.group[g].size)
        if w.a & 15:
            n = max(n // grain, 1) * grain
        if n > CAP - 8 or self.num_loads == MOST_SEQS:
            return 0
        memcpy(self.prompt, self.text[w.a % 3], CAP * sizeof(int32_t))
        if w.c & 8:
            self.next_token += 1
            self.prompt[0] = <int32_t>self.next_token
        first = self.load_prompt(n, space, w.c & 1 == 0)
        if first < 0 or w.c & 1 or w.c & 6 == 0 or n + grain > CAP - 8:
            return 0
        n += grain
        if w.c & 32 and n > 2 * grain:              # or a shorter one, while tokens leave the first
            self.evict_blocks_of(slot_of(first), w)
            n -= 2 * grain
        second = self.load_prompt(n, space, True)
        if second < 0:
            return 0
        if w.c & 16:                                # it is closed while a step is pending that computes nothing
            self.step_by(slot_of(first), 0, w)
        self.close_one(second)
        self.last = slot_of(first)
        if w.c & 16:
            self.step_one(self.last, w)
            while self.oldest() >= 0 and self.oldest() != self.newest_plan():
                self.finish_plan(self.oldest())
        return self.look_around()

    cdef int64_t load_prompt(self, int32_t n, int32_t space, bint now) except -2:
        """Open `prompt` to be loaded; -1 if it is refused. `now`: its bytes are there at once, and it is committed."""
        cdef int32_t g, slot
        cdef Load* l = &self.load[self.num_loads]
        handle = self.call("pool.open", self.pool.open, (self.said(n), SPACES[space]), {"load": True})
        if handle is None:
            return -1
        self.greet(handle, n, space, True)
        slot = slot_of(handle)
        l.handle, l.n, l.closed, l.begin = handle, n, False, self.row[slot].n
        self.row[slot].cut = n
        self.num_loads += 1
        for g in range(self.num_groups):
            if self.group[g].kind == STATE:
                for block in self.prefix.bundle(handle, g):
                    self.poison(0, block)
        if now:
            self.end_load(self.num_loads - 1, n)
            self.commit_to(slot, n)
        return handle

    cdef int op_loaded(self, const Word* w) except -1:
        """The bytes have come, into the blocks that the row had all the time; or the load has failed."""
        cdef int32_t at = <int32_t>(w.a % <uint32_t>self.num_loads)
        return self.end_load(at, 0 if w.b & 7 == 0 else self.load[at].n)

    cdef int end_load(self, int32_t at, int32_t n) except -1:
        """The bytes of `n` tokens are there; 0: they will not come."""
        cdef Load l = self.load[at]
        cdef int32_t slot = slot_of(l.handle), g
        cdef Row* r = &self.row[slot]
        if n:
            self.write_load(slot, &l)
        found = self.call("pool.loaded", self.pool.loaded, (l.handle, n))
        if found is None:
            return self.wrong("loaded refused {0} tokens of {1}", n, l.n)
        self.num_loads -= 1
        self.load[at] = self.load[self.num_loads]
        r.loading = False
        if l.closed:
            self.free_slot(slot)
            return 0
        r.n = l.begin
        self.extend(slot, n if n and not r.mute else l.begin)
        g = <int32_t>self.pool.state.seqs.seq[slot].num_tokens
        if g != (0 if r.mute else r.n) and not (n == 0 and g == 0):
            self.wrong("loaded({0}) left {1} tokens, flushed: {2}", n, g, r.mute)
        r.n = g
        r.committed = min(r.committed, g)
        r.passed = r.point = g
        self.see_tables(slot, 0, False)
        self.join(slot)
        self.last = slot
        return 0

    cdef int write_load(self, int32_t slot, const Load* l) except -1:
        """A loader writes beside the order of steps, of a closed row too: whoever got its blocks reads poison."""
        cdef Row* r = &self.row[slot]
        cdef uint64_t* stamp = self.stamp + slot * CAP
        cdef int32_t g, p, c, n, block
        cdef const int32_t* ids
        cdef const Layer* layer
        self.extend(slot, l.n)
        r.n = l.begin
        for g in range(self.num_groups):
            layer = &self.group[g]
            if layer.kind == STATE:
                if not l.closed:
                    ids_of = self.prefix.bundle(l.handle, g)
                    for c in range(<int32_t>len(ids_of)):
                        self.cell[0][<int32_t>ids_of[c] * self.room[0]] = mark(stamp[l.n - 1], g, 0) + c * ODD
                continue
            ids = self.seen_of(slot, g)
            n = self.num_seen[slot * self.num_groups + g]
            for p in range(l.begin, min(l.n, n // layer.columns * layer.size)):
                for c in range(layer.columns):
                    block = ids[p // layer.size * layer.columns + c]
                    if block >= self.reserved and block >= 0:
                        self.cell[layer.arena][block * self.room[layer.arena] + p % layer.size] = (
                            POISON if l.closed else mark(stamp[p], g, c))
        return 0

    cdef int op_close(self, const Word* w) except -1:
        """Close rows, or one that is being loaded."""
        cdef int32_t i, n
        if self.num_loads and (w.b & 7 == 0 or self.num_live == 0):
            i = <int32_t>(w.a % <uint32_t>self.num_loads)
            if self.load[i].closed:
                return 0
            self.handles[0], n = self.load[i].handle, 1
        else:
            n = min(self.pick_rows(w, MOST_ROWS), 1 + <int32_t>(w.a & 1))
        if self.call_close(n):
            for i in range(n):
                self.forget(self.handles[i])
        return 0

    cdef int close_one(self, int64_t handle) except -1:
        self.handles[0] = handle
        if self.call_close(1):
            self.forget(handle)
        return 0

    cdef int op_defer(self, const Word* w) except -1:
        if self.num_deferred < MOST_SEQS:
            self.deferred[self.num_deferred] = self.row[self.pick(w.c)].handle
            self.call("pool.defer_close", self.pool.defer_close, (self.deferred[self.num_deferred],))
            self.num_deferred += 1
        return 0

    cdef int op_fork(self, const Word* w) except -1:
        """Fork a row; perhaps it or the child goes on at once."""
        cdef int32_t parent = self.pick(w.c)
        cdef int32_t child, other
        if self.fork_row(parent, min(1 + (w.a & 1), max(self.num_slots_free, 1))) == 0 or not w.a & 8:
            return 0
        child = slot_of(self.counts[0])
        other = child if w.a & 4 else parent
        self.step_one(parent if w.a & 4 else child, w)
        if w.a & 16 and self.shorten(other, max(self.row[other].n - 1 - <int32_t>(w.b & 3), 0), w):
            self.step_one(other, w)
        return 0

    cdef int fork_row(self, int32_t parent, int32_t n) except -1:
        """`n` children; their handles are in `counts`. Returns how many there are."""
        cdef int32_t k
        children = self.call("pool.fork", self.pool.fork, (self.row[parent].handle, n))
        if children is None:
            return 0
        for k in range(n):
            self.counts[k] = children[k]
        for k in range(n):
            self.born(parent, self.counts[k])
        self.row[parent].reserved = 0
        return n

    cdef int born(self, int32_t parent, int64_t handle) except -1:
        """A child has what its parent has."""
        cdef int32_t slot = self.claim(handle, "fork"), g
        cdef Row* r = &self.row[slot]
        cdef Row p = self.row[parent]
        r[0] = p
        r.handle, r.reserved = handle, 0
        r.shared = self.row[parent].shared = r.n
        if self.last_work(parent) > r.born:
            r.born_done, r.born = self.done_length(parent), self.last_work(parent)
        memcpy(self.stamp + slot * CAP, self.stamp + parent * CAP, CAP * sizeof(uint64_t))
        for g in range(self.num_groups):
            if p.lost[g]:
                memcpy(self.line_of(slot, g), self.line_of(parent, g), CAP * sizeof(uint64_t))
        self.see_tables(slot, 0, False)
        self.join(slot)
        return 0

    # -- steps

    cdef int op_step(self, const Word* w) except -1:
        """Some rows by few tokens; or one or two by many, and others beside them."""
        cdef int32_t k = self.idle_plan(w.a), n = self.pick_rows(w, self.max_rows[k]), i, most
        for i in range(n):
            most = 4
            if self.op == PREFILL and i < 2:
                most = 7 * self.block_size + 2
            self.counts[i] = min((w.b >> 4 * i) % <uint32_t>most, <uint32_t>(CAP - self.row[self.rows[i]].n))
        if self.op == CAN:
            return self.ask_and_step(k, n)
        self.take_step(k, True, w.a & 64 != 0, w.a >> 29 == 3, w.b)
        return 0

    cdef int op_chunk(self, const Word* w) except -1:
        """A row computes its prompt up to the next checkpoint that the pool wants, or a token more than it."""
        cdef int32_t slot = self.pick(w.c), k = self.idle_plan(w.a)
        self.aim(slot, k, True)
        self.counts[0] = min(max(self.counts[0], <int64_t>1), <int64_t>(CAP - self.row[slot].n))
        return self.take_step(k, True, False, False, w.b)

    cdef int op_reserve(self, const Word* w) except -1:
        cdef int32_t k = self.idle_plan(w.a), n = self.pick_rows(w, self.max_rows[k]), i
        for i in range(n):
            self.counts[i] = min(w.b % <uint32_t>(2 * self.block_size + 1), <uint32_t>(CAP - self.row[self.rows[i]].n))
        return self.take_step(k, False, False, False, w.b)

    cdef int ask_and_step(self, int32_t k, int32_t n) except -1:
        """What `can` says of a step is so."""
        cdef int32_t i
        given = [self.handles[i] for i in range(n)], [self.counts[i] for i in range(n)]
        can = self.call("pool.can", self.pool.can, given)
        took = self.take_step(k, True, False, False, 0)
        if (can is True and self.reason == OUT_OF_BLOCKS) or (can is False and took):
            self.wrong("can said {0}, the step was accepted: {1}", can is True, took)
        return 0

    cdef int take_step(self, int32_t k, bint advance, bint partial, bint padded, uint64_t salt) except -1:
        """`rows` step by `counts`, or reserve them; 1 if they did."""
        cdef int32_t n = self.num_rows, i
        cdef Row* r
        if not self.call_step(k, n, advance, partial, padded):
            r = &self.row[self.rows[0]]
            if n == 1 and self.reason == OUT_OF_BLOCKS and advance and r.n + self.counts[0] <= r.reserved and (
                    not self.has_states):
                self.wrong("a step inside a reservation found no blocks: row {0} of {1} + {2} tokens", self.rows[0],
                           r.n, self.counts[0])
            return 0
        self.stepped(k, advance, salt)
        if not advance:
            for i in range(n):
                r = &self.row[self.rows[i]]
                r.reserved = max(r.reserved, r.n + <int32_t>self.counts[i])
        return 1

    cdef int stepped(self, int32_t k, bint advance, uint64_t salt) except -1:
        """Plan k was filled for `rows`: what it says, what its rows have now, and the blocks it took."""
        cdef Plan plan = self.plans[k]
        cdef Work* w = &self.work[k]
        cdef int32_t i, p, served, first = 0
        cdef Row* r
        self.show(k)
        for i in range(self.num_rows):
            r = &self.row[self.rows[i]]
            served = <int32_t>(get(&plan.field[CU_Q_LENS], i + 1) - get(&plan.field[CU_Q_LENS], i))
            if served != (self.counts[i] if advance and plan.served_[i] else 0):
                self.wrong("row {0} of a plan has {1} of {2} new tokens, served {3}", i, served, self.counts[i],
                           plan.served_[i])
            w.old[i], w.new[i] = r.n, r.n + served
            for p in range(r.n, r.n + served):
                r.token[p] = self.token_for(self.rows[i], p, salt)
            self.extend(self.rows[i], r.n + served)
            r.text = max(r.text, r.n)
            self.see_tables(self.rows[i], 0, True)
        self.check_formats(plan, w)
        self.issued(k, self.rows, self.num_rows)
        if self.in_order:
            self.execute_next()
            w.noted = True
            self.settle_queue()
        elif self.eager and self.num_executed + 1 == self.num_queue and <int32_t>(hash64(w.id) & 7) < self.eager:
            self.execute_next()
        return 0

    cdef int op_done(self, const Word* w) except -1:
        """The oldest plan is done, or another one, which waits for its turn."""
        cdef int32_t k = self.oldest(), i
        if self.op == DONE_ANY and self.num_queue > 1:
            i = self.queue[w.a % <uint32_t>self.num_queue].plan
            k = i if i != GARBAGE and not self.work[i].noted else k
        if k < 0:
            if not self.is_pending(0):
                self.call("pool.done", self.pool.done, (self.plans[0],))
            return 0
        return self.finish_plan(k)

    cdef int finish_plan(self, int32_t k) except -1:
        if self.call("pool.done", self.pool.done, (self.plans[k],)) is None:
            return self.wrong("done of plan {0}, which is pending, was refused", k)
        self.work[k].noted = True
        return self.settle_queue()

    cdef int finish_plans(self) except -1:
        while self.oldest() >= 0:
            self.finish_plan(self.oldest())
        return 0

    cdef int op_rollback(self, const Word* w) except -1:
        """The newest plan failed; the device may have begun it. An older one cannot."""
        cdef int32_t k = self.newest_plan()
        if k != GARBAGE and not w.b & 15:
            k = self.queue[w.a % <uint32_t>self.num_queue].plan
        if k == GARBAGE or self.num_queue > MOST_QUEUED - 8:    # the device is far behind
            return 0
        return self.roll_back(k, w)

    cdef int32_t newest_plan(self) noexcept nogil:
        cdef int32_t last = self.num_queue - 1
        while last >= 0 and self.queue[last].plan == GARBAGE:
            last -= 1
        return self.queue[last].plan if last >= 0 else GARBAGE

    cdef int roll_back(self, int32_t k, const Word* w) except -1:
        """Plan k was not executed, or only begun."""
        cdef int32_t i, slot = slot_of(self.work[k].handle[0])
        cdef bint alive = self.work[k].rows and self.row[slot].handle == self.work[k].handle[0]
        cdef Row* r
        if self.call("pool.rollback", self.pool.rollback, (self.plans[k],)) is None:
            return 0
        if self.work[k].noted or self.newest_plan() != k:
            self.wrong("plan {0} was rolled back, which is not the newest", k)
        for i in range(self.work[k].rows):
            r = &self.row[slot_of(self.work[k].handle[i])]
            if r.handle == self.work[k].handle[i]:
                r.reserved = 0
                r.text = max(self.work[k].old[i], r.text if w.a & 1 else 0)
        self.undone(k, w.a & 2 != 0)
        return self.ask(slot, self.row[slot].token, self.row[slot].n) if alive and w.a & 12 else 0

    # -- the prefix cache

    cdef int op_commit(self, const Word* w) except -1:
        """Tokens of a row that are done; sometimes fewer, or some that are not."""
        cdef int32_t slot = self.pick(w.c), end = self.done_length(slot)
        cdef Row* r = &self.row[slot]
        if w.b & 3 == 0:
            end -= w.a % 9
        elif w.b & 31 == 1:
            end = min(r.n, end + 1 + <int32_t>(w.a % 9))
        self.commit_to(slot, end)
        if w.b >> 31 and r.fresh and not r.copied and self.last_work(slot) == 0 and r.born < self.oldest_id():
            self.check_found(slot)
        return 0

    cdef int commit_to(self, int32_t slot, int32_t end) except -1:
        cdef Row* r = &self.row[slot]
        cdef int32_t done = self.done_length(slot)
        r.fresh = False
        if r.n and end > r.committed:
            if not self.call_commit(r, end):
                if end <= done and not r.mute:
                    self.wrong("commit refused {0} tokens of a row, of which {1} are done", end, done)
                return 0
            if end > done:
                self.wrong("commit accepted {0} tokens of a row, of which {1} are done", end, done)
            r.fresh = not r.told and r.shared == 0 and r.committed // self.block_size < end // self.block_size
            r.committed, r.told = end, True
        return 0

    cdef int check_found(self, int32_t slot) except -1:
        """Nothing of a row is pending: what its first commit has just published is found.

        Of what it published before, a part may be gone: where another row had the same, which was evicted.
        """
        cdef Row* r = &self.row[slot]
        cdef int32_t grain = self.block_size, g, whole
        for g in range(self.num_groups):
            grain = max(grain, self.group[g].size if self.group[g].kind == FULL else CAP)
        whole = r.committed // grain * grain
        if not 0 < whole < CAP or r.mute:
            return 0
        for g in range(self.num_live * self.num_groups):    # nodes of tokens that left have no blocks: no room for more
            if self.row[self.live[g // self.num_groups]].lost[g % self.num_groups]:
                return 0
        memcpy(self.prompt, r.token, whole * sizeof(int32_t))
        self.prompt[whole] = 0
        found = self.prefix.match(self.said(whole + 1), SPACES[r.space])
        if found != whole:
            self.wrong("a row has just published {0} tokens, of which {1} are found", whole, found)
        return 0

    cdef int ask(self, int32_t slot, const int32_t* tokens, int32_t n) except -1:
        """Open what a row has or had, and a token more: what is found holds what it should. Then close it."""
        cdef int32_t space = self.row[slot].space, last = self.last
        cdef int64_t handle
        if not self.has_cache or self.num_slots_free == 0 or n + 1 >= CAP - 8:
            return 0
        memcpy(self.prompt, tokens, n * sizeof(int32_t))
        self.prompt[n] = 0
        handle = self.call_open(n + 1, False, space, -1, False)
        if handle >= 0:
            self.greet(handle, n + 1, space, False)
            self.last = last
            self.close_one(handle)
        return 0

    cdef int op_lie(self, const Word* w) except -1:
        """Two rows of one call say different things of a block that both have: refused."""
        cdef int32_t first = self.pick(w.c), second, at, k, i, ends = self.done_length(first), end
        cdef Row* r = &self.row[first]
        cdef Row* q
        if self.group[0].kind != FULL or self.group[0].columns != 1 or self.group[0].size != self.block_size:
            return 0
        for i in range(self.num_live if not r.mute and r.committed < ends else 0):
            second = self.live[(w.a + <uint32_t>i) % <uint32_t>self.num_live]
            q, end = &self.row[second], self.done_length(second)
            at = max(r.committed, q.committed) // self.block_size
            if first == second or q.mute or q.committed >= end or (at + 1) * self.block_size > min(ends, end) or (
                    self.seen_of(first, 0)[at] != self.seen_of(second, 0)[at]):
                continue
            tokens = [r.token[k] for k in range(r.committed, ends)]
            others = [q.token[k] for k in range(q.committed, end)]
            others[max(r.committed, q.committed) - q.committed] += 1
            if self.call("pool.prefix.commit", self.prefix.commit, ([r.handle, q.handle], tokens + others,
                                                                   [len(tokens), len(others)])) is not None:
                self.wrong("commit accepted two contents of a block of rows {0} and {1}", first, second)
            return 0
        return 0

    cdef int op_match(self, const Word* w) except -1:
        """`match` tells the hit of the `open` that follows."""
        cdef int32_t space, n = self.make_prompt(w, &space), slot
        cdef int64_t handle
        hit = self.call("pool.prefix.match", self.prefix.match, (self.said(n), SPACES[space]))
        handle = self.call_open(n, False, space, -1, True)
        if handle >= 0:
            self.greet(handle, n, space, False)
            self.row[self.last].cut = max(n - 16, 0)
            if hit is None or self.row[self.last].n != hit:
                self.wrong("match said {0}, open found {1}", -1 if hit is None else hit, self.row[self.last].n)
        return 0

    cdef int op_flush(self, const Word* w) except -1:
        """Nothing of a namespace, or of all, is found any more."""
        cdef int32_t space = <int32_t>(w.a % 4), k
        if self.num_loads and w.b & 3:
            space = self.row[slot_of(self.load[0].handle)].space
        self.call("pool.prefix.flush", self.prefix.flush, (None if space == 3 else SPACES[space],))
        for k in range(3):
            self.epoch[k] += space == 3 or space == k
        for k in range(self.max_seqs):
            if self.row[k].handle >= 0 and (space == 3 or self.row[k].space == space):
                self.row[k].mute = True
        return 0

    cdef int op_events(self, const Word* w) except -1:
        """By the events, whatever a prompt finds is stored, and nothing is stored twice or removed untold."""
        cdef int32_t space, n = self.make_prompt(w, &space)
        hit = self.call("pool.prefix.match", self.prefix.match, (self.said(n), SPACES[space]))
        told = self.call("pool.prefix.events", self.prefix.events, ())
        for name, *rest in told if self.known is not None else ():
            if name == "lost":
                self.known = None
                return 0
            if name == "stored":
                if (rest[0], rest[5]) in self.known:
                    self.wrong("an event says that what is stored is stored")
                self.known.add((rest[0], rest[5]))
            elif name == "removed":
                if (rest[0], rest[1]) not in self.known:
                    self.wrong("an event says that what is not stored is removed")
                self.known.remove((rest[0], rest[1]))
        if self.known is None or not hit:
            return 0
        if self.num_groups == 1 and self.group[0].kind == FULL and self.group[0].size == self.block_size:
            key = hashlib.sha256(SPACES[space]).digest()[:16]
            for at in range(0, hit, self.block_size):
                block = b"".join(token.to_bytes(4, "little") for token in self.said(n)[at:at + self.block_size])
                key = hashlib.sha256(key + block).digest()[:16]
                if (key, 0) not in self.known:
                    self.wrong("the events do not tell of the hit at {0}", at)
        return 0

    # -- shortening

    cdef int op_truncate(self, const Word* w) except -1:
        """To any length, mostly by little. Then, sometimes, it goes on, and what it had is opened again."""
        cdef int32_t slot = self.pick(w.c), n = self.row[slot].n
        cdef int32_t[CAP] before
        cdef int64_t length = w.a % <uint32_t>(n + 1)
        if w.b & 3:
            length = max(n - <int32_t>(w.a % <uint32_t>(4 + self.lookahead)), 0)
        memcpy(before, self.row[slot].token, n * sizeof(int32_t))
        if not self.shorten(slot, length + (w.b >> 28 == 0), w) or not w.b & 8:
            return 0
        self.step_one(slot, w)
        if w.b & 16 and self.has_cache:
            self.execute_all()
            return self.ask(slot, before, n)
        return 0

    cdef bint shorten(self, int32_t slot, int64_t length, const Word* w) except -1:
        """Whether a row has its first tokens only now."""
        cdef Row* r = &self.row[slot]
        cdef int32_t least
        if self.call("pool.truncate", self.pool.truncate, (r.handle, length)) is None:
            least = max(r.n if self.has_states else r.passed - self.lookahead, r.point)
            if self.last_work(slot) == 0 and least <= length <= r.n:
                self.wrong("truncate refused {0} of {1} tokens, {2} are promised", length, r.n, least)
            return False
        r.n = <int32_t>length
        r.text = r.n if w.b & 4 else r.text
        r.committed = min(r.committed, r.n)
        r.passed = min(r.passed, r.n + self.lookahead)
        r.point, r.reserved = min(r.point, r.n), 0
        self.see_tables(slot, 0, False)
        return True

    cdef int step_one(self, int32_t slot, const Word* w) except -1:
        """A row steps alone by a few tokens, beside plans that are pending."""
        return self.step_by(slot, 1 + <int32_t>((w.a >> 9) % 3), w)

    cdef int step_by(self, int32_t slot, int32_t n, const Word* w) except -1:
        cdef int32_t k
        for k in range(self.num_plans):
            if not self.is_pending(k) and self.row[slot].n + 4 <= CAP:
                self.choose(slot)
                self.counts[0] = n
                return self.take_step(k, True, False, False, w.a)
        return 0

    cdef int op_unshare(self, const Word* w) except -1:
        """Blocks of their own for rows, to be compacted. One that was forked for it may commit what is copied."""
        cdef int32_t k = self.idle_plan(w.a), n = min(self.pick_rows(w, self.max_rows[k]), 1 + <int32_t>(w.b % 3)), i
        cdef int32_t g = self.full_group(w.a), held, first = self.rows[0]
        cdef bint alone = self.row[first].shared == 0 and not self.row[first].copied
        if w.b & (16 if alone and self.has_cache else 48) == 0 and self.num_slots_free:
            self.fork_row(first, 1)
            self.choose(first)
            n = 1
        else:
            alone = False
        for i in range(n):
            held = self.row[self.rows[i]].n - self.row[self.rows[i]].lost[g]
            self.counts[i] = max(held - 1 - <int32_t>((w.b >> 4 * i) % <uint32_t>(1 + held // 2 + (w.b >> 28))), 0)
        self.num_rows = n
        given = (self.plans[k], [self.handles[i] for i in range(n)], [self.counts[i] for i in range(n)],
                 self.block_size if w.b & 8 else 0)
        if self.call("pool.unshare", self.pool.unshare, given, {"group": g} if g else {}) is None:
            return 0
        alone &= self.row[first].committed == 0
        self.stepped(k, False, 0)
        for i in range(self.num_live):              # what they share with a copy, or behind one, may stay unknown
            self.row[self.live[i]].copied |= self.row[self.live[i]].shared > 0
        for i in range(n):
            self.row[self.rows[i]].copied = True
        if self.has_cache and (alone or w.b & 64):  # these copies are no content yet
            self.commit_to(first, self.done_length(first))
            self.ask(first, self.row[first].token, self.row[first].n)
            if alone:                               # and now they are
                self.finish_plans()
                self.check_found(first)
        return 0

    cdef int32_t full_group(self, uint32_t x) noexcept nogil:
        """A full group, from which tokens leave; rarely one that refuses that."""
        cdef int32_t g, i
        if 0 < x < 1 << 27:
            return <int32_t>(x % <uint32_t>self.num_groups)
        for i in range(self.num_groups):
            g = <int32_t>((x + <uint32_t>i) % <uint32_t>self.num_groups)
            if self.group[g].kind == FULL:
                return g
        return 0

    cdef int op_compact(self, const Word* w) except -1:
        """Tokens leave a row; the backend moves those that stay to the front."""
        cdef int32_t slot = self.pick(w.c), g = self.full_group(w.a), held, length, first, k
        cdef Row* r = &self.row[slot]
        cdef const int32_t* ids = pool_ids(self.pool, slot, g, &k)
        held = r.n - r.lost[g]
        length = held - min(<int32_t>(w.b % 9), held)
        first = min(self.block_size if w.b & 16 else 0, length)
        given = (r.handle, length, first)
        before = [ids[k] for k in range(k)]
        if self.call("pool.compact", self.pool.compact, given, {"group": g} if g else {}) is None or length == held:
            return 0
        self.execute_all()
        stay = []
        for k in range(held):
            if k < first or <int32_t>(hash64(w.b + <uint64_t>k) % <uint64_t>(held - k)) < length - <int32_t>len(stay):
                stay.append(k)
        return self.tokens_left(slot, g, stay, before)

    cdef int op_evict_blocks(self, const Word* w) except -1:
        return self.evict_blocks_of(self.pick(w.c), w)

    cdef int evict_blocks_of(self, int32_t slot, const Word* w) except -1:
        """Full blocks leave the table of a row."""
        cdef int32_t g = self.full_group(w.a), size = self.group[g].size, i, full
        cdef Row* r = &self.row[slot]
        full = (r.n - r.lost[g]) // size
        places = [i for i in range(full) if w.b >> i % 16 & 1]
        if not places or self.call("pool.evict_blocks", self.pool.evict_blocks, (r.handle, places),
                                   {"group": g} if g else {}) is None:
            return 0
        stay = [i for i in range(r.n - r.lost[g]) if i // size >= full or not w.b >> i // size % 16 & 1]
        return self.tokens_left(slot, g, stay, None)

    cdef int tokens_left(self, int32_t slot, int32_t g, list stay, list table) except -1:
        """Only these places of a row stay, in this order. `table`: a backend moves their cells to the front of it."""
        cdef const Layer* layer = &self.group[g]
        cdef uint64_t* cell = self.cell[layer.arena]
        cdef uint64_t* line = self.line + (slot * self.num_groups + g) * CAP
        cdef int32_t room = self.room[layer.arena], place, to, c
        cdef Row* r = &self.row[slot]
        if r.lost[g] == 0:
            memcpy(line, self.stamp + slot * CAP, CAP * sizeof(uint64_t))
        for to, place in enumerate(stay):
            line[to] = line[place]
            for c in range(layer.columns if table is not None else 0):
                cell[<int32_t>table[to // layer.size * layer.columns + c] * room + to % layer.size] = (
                    cell[<int32_t>table[place // layer.size * layer.columns + c] * room + place % layer.size])
        r.lost[g] = r.n - <int32_t>len(stay)
        r.point, r.mute, r.reserved, r.committed = r.n, True, 0, r.n
        self.see_tables(slot, 0, False)
        return 0

    # -- blocks by id

    cdef int op_alloc(self, const Word* w) except -1:
        """Blocks of the caller, who writes something into each."""
        cdef int32_t a = <int32_t>(w.a % <uint32_t>self.num_arenas), k, n = <int32_t>(w.b % 4)
        if self.num_raw + n > MOST_RAW // 2:
            return self.op_decref(w)
        found = self.call(f"pool.blocks.arena({a}).alloc", self.arena(a).alloc, (n,))
        if found is None:
            return 0
        self.drain_evicted()
        for block in found:
            self.next_token += 1
            for k in range(self.room[a]):
                self.cell[a][<int32_t>block * self.room[a] + k] = hash64(<uint64_t>self.next_token)
            self.add_raw(a, block, True)
        return 0

    cdef void add_raw(self, int32_t a, int32_t block, bint own) noexcept nogil:
        """The caller has a reference more: nobody writes the block in place, once what is pending is through."""
        cdef Raw* raw = &self.raw[self.num_raw]
        memset(raw, 0, sizeof(Raw))
        raw.arena, raw.block, raw.own = a, block, own
        raw.sum = self.sum_of(raw) if own or self.num_queue == 0 else 0
        self.num_raw += 1

    cdef uint64_t sum_of(self, const Raw* raw) noexcept nogil:
        cdef uint64_t h = 1
        cdef int32_t k
        for k in range(self.room[raw.arena]):
            h = mixed(h, self.cell[raw.arena][raw.block * self.room[raw.arena] + k])
        return h

    cdef int check_raw(self, const Raw* raw) except -1:
        """A block of the caller holds what it held."""
        if raw.sum and raw.sum != self.sum_of(raw):
            self.wrong("content: block {0} of arena {1}, which its caller has, was written", raw.block, raw.arena)
        return 0

    cdef void drop_raw(self, int32_t at) noexcept nogil:
        self.num_raw -= 1
        self.raw[at] = self.raw[self.num_raw]

    cdef int op_incref(self, const Word* w) except -1:
        """A reference on a block of a row."""
        cdef int32_t g = <int32_t>(w.a % <uint32_t>self.num_groups), slot, n, block, k, a = self.group[g].arena
        cdef const int32_t* ids
        if self.num_live == 0 or self.num_raw >= MOST_RAW // 2:
            return 0
        slot = self.pick(w.c)
        ids = pool_ids(self.pool, slot, g, &n)
        block = ids[n - 1 - w.b % <uint32_t>n] if n else -1
        if block < 0 or (self.group[g].kind != STATE and block < self.reserved):
            return 0
        if self.call(f"pool.blocks.arena({a}).incref", self.arena(a).incref, (block,)) is not None:
            self.add_raw(a, block, False)
            for k in range(self.max_seqs):
                self.row[k].reserved = 0
        return 0

    cdef int op_decref(self, const Word* w) except -1:
        cdef int32_t at
        cdef Raw* raw
        if self.num_raw == 0:
            return 0
        at = <int32_t>(w.b % <uint32_t>self.num_raw)
        raw = &self.raw[at]
        if raw.dropped:
            return 0
        self.check_raw(raw)
        if self.call(f"pool.blocks.arena({raw.arena}).decref", self.arena(raw.arena).decref, (raw.block,)) is None:
            self.wrong("decref refused block {0} of arena {1}, which its caller has", raw.block, raw.arena)
        if raw.cached:
            raw.dropped = self.made + 1
        else:
            self.drop_raw(at)
        return 0

    cdef int op_cached(self, const Word* w) except -1:
        """Mark a block that the caller has as cached; take one back that he let go of, if it is still there."""
        cdef Raw* raw
        self.drain_evicted()
        if self.num_raw == 0:
            return 0
        raw = &self.raw[w.b % <uint32_t>self.num_raw]
        blocks = self.arena(raw.arena)
        if self.op == MARK_CACHED and raw.sum and not raw.cached:
            raw.cached = self.call(f"pool.blocks.arena({raw.arena}).mark_cached", blocks.mark_cached,
                                   (raw.block,)) is not None
            return self.op_decref(w) if w.a & 1 else 0
        elif self.op == TOUCH and raw.dropped:
            if self.call(f"pool.blocks.arena({raw.arena}).touch", blocks.touch, (raw.block,)) is None:
                self.wrong("touch refused block {0}, which is cached", raw.block)
            raw.dropped = 0
            self.check_raw(raw)
        return 0

    cdef int drain_evicted(self) except -1:
        """Cached blocks that were let go of and evicted are the caller's no more: those first that he dropped first."""
        cdef int32_t a, k
        cdef int64_t newest
        for a in range(self.num_arenas if not self.has_cache else 0):
            gone = self.arena(a).drain_evicted().tolist()
            self.calls_now += 1
            newest = 0
            for k in range(self.num_raw - 1, -1, -1):
                if self.raw[k].cached and self.raw[k].arena == a and self.raw[k].block in gone:
                    if not self.raw[k].dropped:
                        self.wrong("block {0} of arena {1} was evicted while its caller had it", self.raw[k].block, a)
                    newest = max(newest, self.raw[k].dropped if self.raw[k].own else 0)
                    self.drop_raw(k)
            for k in range(self.num_raw if newest else 0):
                if self.raw[k].own and self.raw[k].arena == a and 0 < self.raw[k].dropped < newest:
                    self.wrong("block {0} of arena {1} stays, one that was let go of later is gone", self.raw[k].block,
                               a)
        return 0

    # -- the rest

    cdef int op_stale(self, const Word* w) except -1:
        """Handles that are dead, a row twice, a row that is being loaded: refused."""
        cdef int32_t slot = <int32_t>(w.a % <uint32_t>self.max_seqs)
        cdef int64_t handle = self.newest[slot]
        if self.num_loads and w.b & 2 and not self.load[0].closed:
            handle, name = self.load[0].handle, ("fork", "truncate", "compact")[w.a % 3]
        elif handle < 0 or self.row[slot].handle == handle or self.row[slot].loading:
            handle, name = self.row[self.live[0]].handle if self.num_live else -1, "close"
        else:
            name = "fork" if w.b & 1 else "truncate"
        given = {"fork": (handle,), "close": ([handle, handle],)}.get(name, (handle, 0))
        if self.call(f"pool.{name}", getattr(self.pool, name), given) is not None:
            self.wrong("handle {0}, which is closed, being loaded or named twice, was accepted", handle)
        return 0

    cdef int op_reset(self, const Word* w) except -1:
        cdef int32_t k
        if self.num_loads:
            return 0
        self.call("pool.reset", self.pool.reset, ())
        for k in range(self.num_queue):
            free(self.queue[k].cells)
        self.num_queue = self.num_executed = self.num_raw = self.num_live = self.num_deferred = 0
        self.pins = []
        self.num_slots_free = self.max_seqs
        for k in range(self.max_seqs):
            self.row[k].handle, self.slots_free[k] = -1, k
        for k in range(3):
            self.epoch[k] += 1
        self.known = set() if self.shape.pool["events"] else None
        if self.has_cache:
            self.prefix.events()
        return 0

    cdef int op_resize(self, const Word* w) except -1:
        """Between two steps, where the caller names no block: up to twice as many, or about as few as are in use."""
        cdef int32_t a = <int32_t>(w.a % <uint32_t>self.num_arenas), k, source, target, size = 2 * self.first_blocks[a]
        if self.num_raw or self.num_deferred:
            return 0
        if w.b & 8:
            self.finish_plans()
        if w.b & 3:
            size = min(size, <int32_t>(self.pool.stats(a).used + self.reserved_in(a) - 1 + <int32_t>(w.c % 6)))
        elif w.b & 4:
            size = self.first_blocks[a] + <int32_t>(w.c % <uint32_t>(self.first_blocks[a] + 1))
        moves = self.call("pool.resize", self.pool.resize, (size, a))
        if moves is None:
            return 0
        if self.oldest() >= 0:
            self.wrong("arena {0} was resized while plans are pending", a)
        for k in range(self.num_blocks[a], size):
            self.poison(a, k)
        for source, target in moves.tolist():
            if not self.reserved_in(a) <= target < size <= source < self.num_blocks[a]:
                self.wrong("block {0} of arena {1} moved to {2}, of {3}", source, a, target, size)
            memcpy(self.cell[a] + target * self.room[a], self.cell[a] + source * self.room[a],
                   self.room[a] * sizeof(uint64_t))
        self.num_blocks[a] = size
        for k in range(self.num_live):
            self.see_tables(self.live[k], 0, False)
        return 0

    cdef int op_keep(self, const Word* w) except -1:
        """Time goes on, a namespace gets a limit, a pin a ttl, or a row is kept by what it commits, or its prompt."""
        if w.b & 3 == 0:
            return self.tick(self.now + w.a % 9 - (1 if w.c & 15 == 0 else 0))
        if w.b & 7 == 2:
            self.op, self.ttl = PIN, 1 + w.a % (40 if w.c & 128 else 6)
            until = self.now + self.ttl
            try:
                self.op_prompt(w)
            finally:
                self.ttl = None
            return 0 if w.c & 512 else self.tick(until - (w.c >> 10 & 1))
        if w.b & 31 == 1:
            self.call("pool.prefix.limit_kept", self.prefix.limit_kept,
                      (SPACES[w.a % 3], None if w.c & 1 else w.c % 13))
            return 0
        tokens = 1 + w.c % 40 if w.c & 64 else None
        self.keep = Keep(1 + w.a % 7, 1 + (w.a >> 3) % (40 if w.c & 128 else 6), tokens)
        try:
            return self.op_commit(w) if w.b & 1 and self.num_live else self.op_prompt(w)
        finally:
            self.keep = None

    cdef int tick(self, int64_t now) except -1:
        """Tell the time: the pins are closed whose time is over, and nobody else is."""
        cdef int64_t handle
        cdef int32_t k
        if self.call("pool.prefix.tick", self.prefix.tick, (now,)) is None:
            return 0
        if now < self.now:
            self.wrong("the clock went back to {0}", now)
        self.now = now
        self.pins.sort()
        while self.pins and self.pins[0][0] <= self.now:
            until, _, handle = self.pins.pop(0)
            if self.pool.state.seqs.seq[slot_of(handle)].handle == handle:
                self.wrong("handle {0}, a pin until {1}, is open at {2}", handle, until, self.now)
            self.forget(handle)
        for k in range(self.num_live):
            handle = self.row[self.live[k]].handle
            if self.pool.state.seqs.seq[self.live[k]].handle != handle:
                self.wrong("a tick to {0} closed handle {1}", self.now, handle)
        return 0

    cdef int32_t reserved_in(self, int32_t a) noexcept nogil:
        """Reserved blocks of an arena; one of states has none."""
        cdef int32_t g
        for g in range(self.num_groups):
            if self.group[g].kind == STATE and self.group[g].arena == a:
                return 0
        return self.reserved

    cdef int op_execute(self, const Word* w) except -1:
        return self.execute_next() if self.num_executed < self.num_queue else 0

    cdef int execute_all(self) except -1:
        while self.num_executed < self.num_queue:
            self.execute_next()
        return 0

    cdef int op_evict(self, const Word* w) except -1:
        self.call("evict", self.arena(w.a % <uint32_t>self.num_arenas).evict, (w.b % 4,))
        return 0

    cdef int op_bind(self, const Word* w) except -1:
        self.call("bind", self.bind, (self.plans[w.a % <uint32_t>self.num_plans],))
        return 0

    cdef int op_read(self, const Word* w) except -1:
        return self.read_idle(self.pick(w.c))

    cdef int read_idle(self, int32_t slot) except -1:
        """A row that waits for nothing reads what the shortest legal truncation leaves it."""
        cdef Row* r = &self.row[slot]
        if self.done_length(slot) == r.n and self.last_work(slot) == 0 and r.born < self.oldest_id():
            self.read_row(slot, max(max(r.passed - self.lookahead, r.point), 0))
        return 0

    cdef int64_t oldest_id(self) noexcept nogil:
        cdef int32_t k = 0
        while k < self.num_queue and self.queue[k].plan == GARBAGE:
            k += 1
        return self.work[self.queue[k].plan].id if k < self.num_queue else self.next_work

    cdef int look_around(self) except -1:
        cdef int32_t k
        if self.num_deferred:
            self.drain()
        self.pool.check()
        for k in range(self.num_live):
            self.read_idle(self.live[k])
        self.drain_evicted()
        for k in range(self.num_raw):
            self.check_raw(&self.raw[k])
        return 0

    cdef int finish(self) except -1:
        """All that is pending is done, every row grows by a token, and everything is given back."""
        cdef int32_t k, a
        cdef Word w
        memset(&w, 0, sizeof(Word))
        w.b = 1
        if self.num_deferred:
            self.drain()
        self.finish_plans()
        self.look_around()
        while self.num_loads:
            self.op_loaded(&w)
        for k in range(self.num_live):
            if self.row[self.live[k]].n < CAP:
                self.choose(self.live[k])
                self.counts[0] = 1
                self.take_step(0, True, False, False, 0)
            self.finish_plans()
        self.look_around()
        while self.num_live:
            self.close_one(self.row[self.live[0]].handle)
        self.drain_evicted()
        for k in range(self.num_raw):
            if self.raw[k].dropped == 0:
                self.arena(self.raw[k].arena).decref(self.raw[k].block)
        self.pool.check()
        for a in range(self.num_arenas):
            stats = self.pool.stats(a)
            if stats.used or stats.limbo:
                self.wrong("arena {0} keeps {1} blocks, {2} in limbo", a, stats.used, stats.limbo)
        return 0


ctypedef int (*Op)(Run, const Word*) except -1
cdef Op[NUM_WORDS] OPS
OPS = [                         # in the order of WORDS
    Run.op_open, Run.op_prompt, Run.op_step, Run.op_step, Run.op_chunk, Run.op_reserve, Run.op_execute, Run.op_done,
    Run.op_done, Run.op_rollback, Run.op_commit, Run.op_lie, Run.op_fork, Run.op_truncate, Run.op_close,
    Run.op_defer, Run.op_unshare, Run.op_compact, Run.op_evict_blocks, Run.op_prompt, Run.op_match, Run.op_evict,
    Run.op_flush, Run.op_prompt, Run.op_loaded, Run.op_alloc, Run.op_incref, Run.op_decref, Run.op_cached,
    Run.op_cached, Run.op_step, Run.op_events, Run.op_stale, Run.op_read, Run.op_bind, Run.op_reset, Run.op_resize,
    Run.op_keep,
]
