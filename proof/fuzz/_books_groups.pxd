"""What a pool with layer groups has to be after each call, worked out from docs/groups.md alone.

Sequences, plans and arena 0 are in a `Books`, every other arena is one more, of which only the blocks are used.
"""
from libc.stdint cimport int32_t, int64_t

from proof.fuzz._books cimport MAX_PLANS, Books, Entry

cdef enum:
    MOST_GROUPS = 8
    MOST_ARENAS = 16
    GONE = -2                   # stands for the ids of an entry that was let go

cdef enum:                      # in the order of `proof.fuzz.shape.KINDS`
    FULL_KIND
    WINDOW_KIND
    CHUNK_KIND
    STATE_KIND


cdef struct Moves:              # what a plan did in one group; an `Entry` is one id, its index counts ids
    Entry* entry
    int32_t* undo               # floors, to take a judgement back
    int32_t num
    int32_t* appended           # [max_rows] entries
    int32_t* mirror             # [max_rows, width * columns] tables as a consumer of dirty_rows has them


cdef struct Layers:             # one group
    int32_t kind
    int32_t arena
    int32_t columns
    int32_t width               # entries of the longest row
    int64_t size                # tokens of an entry
    int64_t reach               # W or C
    int64_t keep
    int32_t* table              # [max_seqs, width * columns]
    int32_t* entries            # [max_seqs] of the row; of a state 1 or 0
    Moves[MAX_PLANS] moves


cdef struct Lack:               # what an OutOfBlocks has to say
    int32_t arena
    int32_t row
    int64_t needed


cdef struct GroupBooks:
    Books* arena[MOST_ARENAS]   # the first has the sequences and the plans
    Books more[MOST_ARENAS - 1]
    int32_t num_arenas
    Layers layers[MOST_GROUPS]
    int32_t num_groups
    int64_t lookahead
    int64_t* passed             # [max_seqs] most tokens that the sequence had in a step that passed
    int64_t let_go              # entries, ever
    Lack lack


cdef inline int32_t* row_of(const Layers* g, int32_t slot) noexcept nogil:
    return g.table + <int64_t>slot * g.width * g.columns


cdef inline int64_t ceil_entries(const Layers* g, int64_t tokens) noexcept nogil:
    return (tokens + g.size - 1) // g.size


cdef inline int64_t first_read(const Layers* g, int64_t position) noexcept nogil:
    """The first position that a query reads, those that are always kept apart."""
    if g.kind == WINDOW_KIND:
        return max(position - g.reach + 1, <int64_t>0)
    return position // g.reach * g.reach if g.kind == CHUNK_KIND else 0


cdef int group_books_init(GroupBooks* gb, Books* head) noexcept nogil
cdef void group_books_free(GroupBooks* gb) noexcept nogil
cdef int groups_judge_open(GroupBooks* gb, int64_t tokens) noexcept nogil
cdef int32_t groups_open(GroupBooks* gb, int64_t tokens) noexcept nogil
cdef void groups_fork(GroupBooks* gb, int32_t parent, int32_t n, int32_t* children) noexcept nogil
cdef void groups_close(GroupBooks* gb, int32_t slot) noexcept nogil
cdef int groups_judge_truncate(const GroupBooks* gb, int32_t slot, int64_t length) noexcept nogil
cdef void groups_truncate(GroupBooks* gb, int32_t slot, int64_t length) noexcept nogil
cdef int groups_judge_step(GroupBooks* gb, int32_t k, int32_t n, const int32_t* rows, const int64_t* new,
                           int64_t max_tokens, bint advance, bint partial) noexcept nogil
cdef void groups_step(GroupBooks* gb, int32_t k, int32_t n, const int32_t* rows, const int64_t* new,
                      bint advance) noexcept nogil
cdef void groups_pass_at_once(GroupBooks* gb, int32_t k) noexcept nogil
cdef void groups_done(GroupBooks* gb, int32_t k) noexcept nogil
cdef void groups_rollback(GroupBooks* gb, int32_t k) noexcept nogil
cdef void groups_reset(GroupBooks* gb) noexcept nogil
