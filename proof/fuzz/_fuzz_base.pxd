"""The fuzzer's driver, its lower half: what it knows, how it picks, what a refusal must be, `open`."""
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from proof.fuzz._books cimport Books
from proof.fuzz._calls cimport Calls
from proof.fuzz._storage cimport Finding, Storage

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
    TOUCH
    DRAIN
    CAN
    RESET
    MISUSE
    UNSHARE
    COMPACT
    LEAVE
    READ
    EVENTS
    RANKS
    LOAD
    LOADED
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
    S_HELD_BACK
    S_CONTRADICTED
    S_FORGOTTEN
    S_LOADED
    S_IN_VAIN
    S_LET_GO
    S_STATES
    S_GONE
    NUM_STATES

cdef enum:
    STALE = 64                  # dead handles that are remembered


cdef struct Word:               # one call of a program
    uint32_t op
    uint32_t a
    uint32_t b
    uint32_t c


cdef uint64_t hash64(uint64_t h) noexcept nogil


cdef class Base(Calls):
    cdef readonly object shape
    cdef Books b
    cdef Storage s
    cdef Finding finding        # of the pool; that of the storage is its own
    cdef bint full
    cdef bint indexed
    cdef uint64_t seed
    cdef int64_t appetite
    cdef int64_t alphabet
    cdef int64_t spaces         # namespaces that prompts have
    cdef uint32_t[256] dice     # operation by weight
    cdef int64_t fresh          # tokens that occur once
    cdef int64_t next_call
    cdef int64_t clock          # calls so far
    cdef int64_t hot            # width of the window that sequences are picked from
    cdef int64_t tag            # of the pool's handles
    cdef object handles
    cdef object counts
    cdef object prompt
    cdef int64_t* handle        # memory of `handles`
    cdef int64_t* count         # memory of `counts`
    cdef int32_t* text          # memory of `prompt`
    cdef object ids
    cdef int32_t* id            # memory of `ids`
    cdef int32_t[1024] rows
    cdef int64_t[1024] lens     # what `unshare` prepares for
    cdef int64_t first          # tokens that stay in place
    cdef int64_t[STALE] stale
    cdef int64_t num_stale
    cdef object due             # the exception that is due, or None
    cdef list trace
    cdef int32_t shown          # plan whose arrays are looked at
    cdef dict names
    cdef dict keys              # node -> its content key, for events
    cdef uint32_t op            # of the running call
    cdef uint64_t salt          # of the tokens that it decides: of the word alone, so that words before it can go
    cdef readonly int64_t idle  # words that met a state in which there was nothing to call
    cdef int64_t[NUM_OPS] calls
    cdef int64_t[NUM_STATES] states

    cdef int nothing(self) noexcept
    cdef int fail(self, str what) except -1
    cdef int report(self, const Finding* finding) except -1
    cdef int check(self) except -1
    cdef void clean(self) noexcept
    cdef int expect(self, int verdict) except -1
    cdef int refused(self, object error) except -1
    cdef int accepted(self, str call) except -1
    cdef int say(self, str line) except -1
    cdef object names_of(self, int32_t n)
    cdef bytes space_name(self, int32_t space)
    cdef int32_t space_of(self, const Word* w) noexcept
    cdef int32_t pick(self, uint32_t word) noexcept
    cdef void mourn(self, int32_t slot) noexcept
    cdef int greet(self, int64_t handle, int64_t due) except -1
    cdef int32_t token_at(self, uint64_t salt, int64_t position) noexcept
    cdef void extend(self, int32_t slot, int64_t end, uint64_t salt) noexcept
    cdef int32_t make_prompt(self, const Word* w) noexcept
    cdef int op_open(self, const Word* w, bint prompt, bint pin) except -1
    cdef int adopt_prompt(self, int32_t slot, int64_t n) except -1
