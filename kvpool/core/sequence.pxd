"""Sequences: handles, and the lengths that all layer groups share.

A *slot* is the place of a sequence in the arrays here, a *handle* its slot, a generation and the
tag of the pool. A sequence is open, or *loading*: its bytes come from elsewhere.

    num_tokens <= num_blocks * block_size
    published * block_size <= committed <= num_tokens
    max_seqs == num_open + num_free_slots + retired slots

Why it is so:

- A handle names a generation, so that one of a sequence that was closed is refused, and never hits
  the next sequence in the slot. Tags do the same across pools.
- While a sequence is loading its slot has ~handle. So every call but the few that may look for it
  refuses the handle by the comparison that finds any stale one, and no call needs a test of its
  own.
- There is one num_blocks for all groups. It counts positions, evicted ones too, and each group's
  entries follow from it. So a step judges one length, and a rollback restores one.
- What a decode step reads and moves is in `Seq`, one cache line, with the `Tail` of the first
  group. What it does not touch (generations, the prefix cache's knowledge) lies elsewhere.
- A `Tail` says where the next token goes, as far as no step has to look the table up. It is
  recomputed when a table or a length changes in any other way than by one token at the end.
- The sequence has work of the steps last_step (as a row) and fork_step (by a fork). While the first
  is pending the sequence is not shortened; while the second is, that step is not rolled back.
"""

cdef enum:
    SLOT_BITS = 20              # handle = tag << 52 | generation << 20 | slot
    TAG_SHIFT = 52
    MAX_SEQS = 1 << 20
    MAX_TAG = 2047

cdef enum:
    FREE_SLOT = 0
    OPEN = 1
    RETIRED = 2                 # all generations used up
    LOADING = 3                 # open, and its bytes are being loaded: only its close, `loaded` and readers find it


cdef struct Tail:               # of a row of a layer group: where its next token goes, and the table. 32 bytes
    int64_t next_slot           # slot of the next token in the first column, if next_slot < stop_slot
    int64_t stop_slot           # tokens go there one by one up to here; else look the table up
    uint64_t version            # of the table: unique in the group, new whenever the table changes in any way
    int32_t block               # of next_slot
    uint32_t epoch              # changes when a table entry changes or leaves, but by a window


cdef struct Seq:                # what a step reads and moves: 64 bytes, one cache line
    int64_t handle              # ~slot, which names another: not open, or closed while loading; loading: ~handle
    int64_t num_tokens          # that it has or had: evicted ones count, and give positions
    int64_t last_step           # newest step that had this sequence as a row, 0: none
    int32_t num_blocks          # of the pool that its tables have room for, evicted ones included
    uint32_t mark               # == stamp: seen in the running call
    Tail lead                   # of the first layer group; the others have theirs in arrays of their own


cdef struct SeqLife:            # the rest
    int64_t fork_step           # pending step whose work this sequence inherited by a fork, 0: none
    int64_t point               # num_tokens at the last eviction; truncate cannot go below it
    uint32_t generation         # counted from the pool's first
    uint8_t life
    uint8_t late                # forked from a row whose step was pending: a window has still to let go of something


cdef struct SeqPrefix:          # what a pool with a prefix cache knows besides
    int64_t committed           # tokens made known, <= num_tokens
    int64_t published           # of the full blocks of these, how many the index was offered, in order
    int64_t done                # length after the newest step that passed
    int64_t forked_at           # length when it was forked
    uint32_t root_hash          # of its namespace
    Name* name                  # its namespace, NULL: flushed since


# Invariants beside those above, recomputed by seqs_check:
#   point <= num_tokens; point == 0, or the prefix cache has forgotten the sequence
#   sum_tokens == sum of num_tokens, sum_blocks == sum of num_blocks, num_late == number of late ones
cdef struct Seqs:
    Seq* seq                    # [max_seqs]
    SeqLife* life               # [max_seqs]
    SeqPrefix* prefix           # [max_seqs], NULL without a prefix cache
    Names* names                # of the prefix cache
    int32_t* partial            # [max_seqs, block_size] committed tokens of a block that is not full yet
    int32_t* free_slot          # [max_seqs] ring of free slots, oldest first
    void* memory                # what seq was cut from, to give it cache-line alignment
    int32_t max_seqs
    int32_t max_blocks          # per sequence
    int32_t num_open
    int32_t num_free_slots
    int32_t first_free          # position of the oldest free slot in the ring
    uint32_t stamp
    int64_t tag
    int64_t first_generation    # those before it were given out by dead pools with this tag
    int64_t base                # tag and first generation of a handle: what digests leave out
    int64_t watermark
    int64_t evicted_tokens      # ever, of all sequences
    int32_t num_late            # open sequences that are late
    int64_t newest_fork_step    # largest fork_step that was ever given
    int64_t sum_tokens
    int64_t sum_blocks


cdef inline int32_t slot_of(int64_t handle) noexcept nogil:
    return <int32_t>(handle & (MAX_SEQS - 1))


cdef inline int32_t seq_find(const Seqs* s, int64_t handle) noexcept nogil:
    """Slot of a live handle, -1 if it is stale, foreign or negative."""
    cdef int32_t slot = slot_of(handle)
    return slot if handle >= 0 and slot < s.max_seqs and s.seq[slot].handle == handle else -1


cdef inline bint seq_has_blocks(const Seqs* s, int32_t slot) noexcept nogil:
    """Whether a slot is that of a sequence, one that is being loaded included."""
    return s.life[slot].life == OPEN or s.life[slot].life == LOADING


cdef int32_t seq_judge_any(const Seqs* s, int64_t handle, Py_ssize_t row, Verdict* v) noexcept nogil
