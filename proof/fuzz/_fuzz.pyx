"""The fuzzer's driver: random programs on one pool, judged after every call.

A program is a row of words ``(op, a, b, c)``, each a pure function of the run's seed and its place, and what a word
means depends on the state it meets: "a" may pick a sequence by its index among the open ones. So any part of a
program is a program, which is what shrinking needs. A run draws its pool and the weights of its operations first;
some operations are off (Groce et al., *Swarm Testing*, 2012).

The judge keeps books of its own (`_books`, `_books_steps`, `_books_prefix`, `_books_index`): it says before each call
what that is due to do, down to the ids of blocks and the handles. A backend of its own (`_storage`) says whether
everybody reads his own tokens, whatever the rules are. All that touches the pool is in `_calls`.

The driver calls the pool as Python does (`full`: everything is checked after every call) or, where speed is all that
counts, below the reading of arguments. Opening is in `_fuzz_base`, steps in `_fuzz_steps`, what leaves sequences in
`_fuzz_evict`, the prefix cache in `_fuzz_prefix`, the rest in `_fuzz_calls`.
"""
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int64_t, uint32_t, uint64_t

from proof.fuzz._books cimport available, books_drain, num_open
from proof.fuzz._fuzz_base cimport (
    ALLOC,
    CAN,
    CLOSE,
    COMMIT,
    COMPACT,
    DEFER,
    DONE,
    DONE_ANY,
    EVENTS,
    EVICT,
    EXECUTE,
    FLUSH,
    FORK,
    LEAVE,
    LOAD,
    LOADED,
    MATCH,
    MISUSE,
    OPEN,
    PIN,
    PROMPT,
    RANKS,
    READ,
    RESERVE,
    RESET,
    ROLLBACK,
    S_LIMBO,
    STEP,
    TRUNCATE,
    UNSHARE,
    Word,
    hash64,
)
from proof.fuzz._fuzz_calls cimport Others

from kvpool.testing.fuzz_target import FuzzFinding
from proof.fuzz.shape import OF_GROUPS, OPERATIONS, STATES


cdef class Driver(Others):
    """One run: one pool, its plans, and what is known about them.

    Parameters
    ----------
    shape : proof.fuzz.shape.Shape
        Pool, plans, weights and appetite.
    make_pool : callable, optional
        Called with the keyword arguments of `kvpool.Pool`; returns a `kvpool.Pool` or one of a subclass.
    trace : list, optional
        Gets the calls as lines of Python.
    """

    # -- running

    cdef void draw(self, int64_t at, Word* w) noexcept nogil:
        cdef uint64_t h = hash64(self.seed + <uint64_t>at * 0x9E3779B97F4A7C15ULL)
        cdef uint64_t more = hash64(h ^ 0xD1B54A32D192ED03ULL)
        w.op = self.dice[h & 255]
        w.a = <uint32_t>(h >> 32)
        w.b = <uint32_t>more
        w.c = <uint32_t>(more >> 32)

    def words(self, int64_t first, int64_t n):
        """Words `first` .. `first + n - 1` of the program: a list of ``(op, a, b, c)``."""
        cdef Word w
        cdef int64_t at
        found = []
        for at in range(first, first + n):
            self.draw(at, &w)
            found.append((w.op, w.a, w.b, w.c))
        return found

    def run(self, int64_t n, int64_t check_every=1):
        """The next `n` calls of the program; every `check_every`-th is followed by the full check."""
        cdef Word w
        cdef int64_t k
        try:
            for k in range(n):
                if k & 0xFFF == 0:
                    PyErr_CheckSignals()            # no Python code runs here that would; 2 ms without checks
                self.draw(self.next_call, &w)
                self.next_call += 1
                self.apply(&w)
                if not self.full and (k + 1) % check_every == 0:
                    self.settle_all()
                    self.clean()
                    self.check()
        except FuzzFinding as finding:
            finding.call = self.next_call - 1
            raise

    def replay(self, words):
        """Calls of a program that is given."""
        cdef Word w
        try:
            for w.op, w.a, w.b, w.c in words:
                self.next_call += 1
                self.apply(&w)
        except FuzzFinding as finding:
            finding.call = self.next_call - 1
            raise

    def audit(self):
        """Let every pending plan pass, then check all there is to check, the pool's own check included."""
        self.settle_deferred()
        self.settle_all()
        self.observe()
        self.check()
        if self.shape.pool.get("events"):
            self.check_events()
        self.pool.check()

    def results(self):
        """Calls by operation and states by name, so far."""
        return ({name: self.calls[i] for i, name in enumerate(OPERATIONS)},
                {name: self.states[i] for i, name in enumerate((*STATES, *OF_GROUPS))})

    def calls_made(self):
        """Calls so far, without the words that met nothing to call."""
        return self.next_call - self.idle

    cdef int observe(self) except -1:
        self.clean()
        if self.b.event_room:
            self.note_events()
        self.states[S_LIMBO] += self.b.limbo.size > 0
        return self.check() if self.full else 0

    cdef int apply(self, const Word* w) except -1:
        """One call, and what is checked after it."""
        cdef uint32_t op = self.eased(w)
        cdef bint deferred = self.b.num_deferred > 0
        cdef bint drains = op != MISUSE and op != DEFER     # these may be refused before they are calls, or are none
        self.clock += 1
        self.salt = (w.a ^ w.b ^ w.c) % 3
        self.calls[op] += 1
        self.op = op
        self.due = None
        if deferred:
            if not drains:
                self.direct_drain()
            books_drain(&self.b)        # as this call does first
        self.dispatch(w, op)
        if deferred and drains:
            self.direct_drain()         # if there was nothing to call
        return self.observe()

    cdef int dispatch(self, const Word* w, uint32_t op) except -1:
        if op == STEP or op == RESERVE:
            return self.op_step(w, op == STEP)
        if op == DONE or op == DONE_ANY:
            return self.op_done(w, op == DONE_ANY)
        if op <= PROMPT or op == PIN:
            return self.op_open(w, op != OPEN, op == PIN)
        if op <= DEFER:
            return self.on_sequences(w, op)
        if op <= FLUSH:
            return self.on_pool(w, op)
        if op == UNSHARE:
            return self.op_unshare_untold(w)
        if op == COMPACT:
            return self.op_compact(w)
        if op == LEAVE:
            return self.op_leave(w)
        if op == LOAD:
            return self.op_open(w, True, False)
        if op == LOADED:
            return self.op_loaded(w)
        if op == READ:
            return self.op_read(w)
        if op == EVENTS:
            return self.op_events()
        if op == RANKS:
            return self.op_ranks(w)
        return self.on_blocks(w, op)

    cdef uint32_t eased(self, const Word* w) noexcept:
        """The word's operation; another where it has nothing to do, mostly one that makes room where all is taken."""
        cdef uint32_t op = w.op
        cdef bint full = num_open(&self.b) == self.b.max_seqs
        if self.b.num_queue == 0 and (op == DONE or op == DONE_ANY or op == EXECUTE or op == ROLLBACK):
            return STEP
        if op == LOADED and self.b.num_loading == 0:
            return STEP
        if op == LOAD and self.b.num_loading and (full or self.b.num_loading > 2 or available(&self.b) == 0):
            return LOADED
        if full and w.c >> 29 and (op <= PROMPT or op == FORK or op == PIN):
            return LOADED if self.b.num_live == 0 else CLOSE
        if (op == STEP or op == PROMPT) and w.c >> 30 and available(&self.b) == 0:
            return DONE if self.b.num_queue and w.c >> 31 else CLOSE
        return op

    cdef int on_sequences(self, const Word* w, uint32_t op) except -1:
        if self.b.num_live == 0:
            return self.op_open(w, False, False)
        if op == FORK:
            return self.op_fork(w)
        if op == TRUNCATE:
            return self.op_truncate(w)
        return self.op_defer(w) if op == DEFER else self.op_close(w, op)

    cdef int on_pool(self, const Word* w, uint32_t op) except -1:
        if op == EXECUTE:
            return self.op_execute()
        if op == ROLLBACK:
            return self.op_rollback(w)
        if op == COMMIT:
            return self.op_commit(w)
        if op == MATCH:
            return self.op_match(w)
        if op == EVICT:
            return self.op_evict(w)
        return self.op_flush(w)

    cdef int on_blocks(self, const Word* w, uint32_t op) except -1:
        if op == ALLOC:
            return self.op_alloc(w)
        if op == CAN:
            return self.op_can(w)
        if op == RESET:
            return self.op_reset()
        if op == MISUSE:
            return self.op_misuse(w)
        return self.op_reference(w, op)
