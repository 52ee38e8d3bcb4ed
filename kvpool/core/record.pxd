"""The calls that changed a pool, as words in a ring: what `kvpool.replay.calls` writes to a file and replays.

A call is begun, its words are put one after the other, and it is ended with the digest it left; what is put is part of
the ring only then. Where a call is larger than the ring, `record_begin` gives NULL, nothing is put, and the end knows.
"""

cdef enum:
    START = 32                  # beside the OP_* of types.pxd: the pool is new or was reset, a replay may begin here
    FLUSH                       # shares OP_COMMIT in digests
    CLOSE_FINISHED
    DEFERRED

cdef enum:                      # flags of a call
    SAME_ROWS = 1               # step: as in the step before on this plan
    PARTIAL = 2                 # step
    ONE_EACH = 4                # step: a token for each row
    PIN = 1                     # open: only what is cached
    COUNT = 2                   # open: a number of tokens, not the tokens
    ALL = 1                     # flush: of all namespaces
    OLDEST = 1                  # release: committed blocks are evicted before all others

cdef enum:                      # words that a call needs beside its batches
    HEAD = 2                    # call and flags, digest
    BATCH = 3                   # of a batch beside its values: a size, or at most a wide scalar


# The ring is two halves: calls go to one until it is full, then the older half is given up.
cdef struct Record:
    uint32_t* data              # [2, half], NULL: nothing is recorded
    int64_t half                # words, at most 2^30
    int64_t[2] size             # words of each half
    int64_t[2] calls
    int64_t lost                # calls that were given up
    int64_t next_plan           # number of the next plan
    uint32_t epoch              # of the START that plans were numbered since
    int active
