"""The fuzzer's driver, its lower half: what it knows, how it picks, what a refusal must leave alone, `open`."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from kvpool._pool cimport Pool
from kvpool._prefix cimport Match
from kvpool.testing._shadow cimport Line, Shadow

cdef enum:                      # in the order of OPERATIONS
    OPEN
    PROMPT
    STEP
    RESERVE
    FORK
    TRUNCATE
    CLOSE
    CLOSE_BATCH
    DEFER
    DONE
    DONE_ANY
    EXECUTE
    ROLLBACK
    COMMIT
    MATCH
    PIN
    EVICT
    FLUSH
    ALLOC
    INCREF
    DECREF
    MARK
    REVIVE
    DRAIN
    CAN
    RESET
    MISUSE
    UNSHARE
    COMPACT
    LEAVE
    NUM_OPS

cdef enum:                      # in the order of STATES
    S_COPIES
    S_REPLACED
    S_ROLLBACKS
    S_EXECUTED_ROLLBACKS
    S_LATE_PLANS
    S_LIMBO
    S_LIMBO_HITS
    S_HITS
    S_EVICTED
    S_SHORT
    S_PARTIAL
    S_REFUSED
    S_PENDING_CLOSES
    S_NOTED
    S_COMPACTED
    NUM_STATES

cdef enum:
    STALE = 64                  # dead handles that are remembered
    V_OK = 0                    # what a batch will meet
    V_SHORT
    V_CAPACITY



cdef struct Word:               # one call of a program
    uint32_t op
    uint32_t a
    uint32_t b
    uint32_t c


cdef uint64_t hash64(uint64_t h) noexcept nogil


cdef inline int32_t space_of(const Word* w) noexcept nogil:
    """The namespace of a prompt, mostly the first."""
    cdef uint32_t eighth = w.c // 4 % 8
    return eighth - 5 if eighth > 5 else 0


cdef class Base:
    cdef readonly object shape
    cdef Pool pool
    cdef object do_open, do_fork, do_truncate, do_close, do_commit, do_done, do_rollback  # its methods, looked up once
    cdef list plans
    cdef Shadow s
    cdef bint full
    cdef bint indexed
    cdef uint64_t seed
    cdef int64_t appetite
    cdef int64_t alphabet
    cdef uint32_t[256] dice     # operation by weight
    cdef int64_t next_step
    cdef int64_t newest_inherit # newest step whose work a fork got
    cdef int64_t fresh          # tokens that occur once
    cdef int64_t next_call
    cdef int64_t hot            # width of the window that sequences are picked from
    cdef object handles
    cdef object counts
    cdef object prompt
    cdef int64_t* handle        # memory of `handles`
    cdef int64_t* count         # memory of `counts`
    cdef int32_t* text          # memory of `prompt`
    cdef object ids
    cdef int32_t* id            # memory of `ids`
    cdef uint8_t[1024] served
    cdef int32_t[1024] rows
    cdef int64_t[1024] lens     # what `unshare` prepares for
    cdef int64_t[4] made        # handles of a fork's children
    cdef int64_t first          # tokens that stay in place
    cdef bint unsharing         # the running step is an `unshare`
    cdef int64_t[STALE] stale
    cdef int64_t num_stale
    cdef uint64_t before        # fingerprint, if a refusal is due
    cdef object due             # the exception that is due, or None
    cdef list trace
    cdef dict names
    cdef uint32_t op            # of the running call
    cdef uint64_t salt          # of the tokens that it decides: of the word alone, so that words before it can go
    cdef readonly int64_t idle  # words that met a state in which there was nothing to call
    cdef int64_t[NUM_OPS] calls
    cdef int64_t[NUM_STATES] states

    cdef int nothing(self) noexcept
    cdef int fail(self, str what) except -1
    cdef int report(self) except -1
    cdef int check(self) except -1
    cdef int expect(self, object due) except -1
    cdef int refused(self, object error) except -1
    cdef int accepted(self, str call) except -1
    cdef int say(self, str line) except -1
    cdef object names_of(self, int32_t n)
    cdef int32_t pick(self, uint32_t word) noexcept
    cdef int64_t oldest(self) noexcept
    cdef int64_t done_length(self, const Line* line) noexcept
    cdef void forget(self, int32_t slot) noexcept
    cdef Line* register(self, int64_t handle, int64_t length, int32_t blocks) except NULL
    cdef int32_t token_at(self, uint64_t salt, int64_t position) noexcept
    cdef void extend(self, int32_t slot, int64_t end, uint64_t salt) noexcept
    cdef int32_t make_prompt(self, const Word* w) noexcept
    cdef object judge_open(self, int64_t n, int64_t hits, int64_t evictable, bint take)
    cdef Match cached(self, int64_t n, bytes space, bint last) except *
    cdef int op_open(self, const Word* w, bint prompt, bint pin) except -1
    cdef int adopt_prompt(self, int32_t slot, int64_t n) except -1
