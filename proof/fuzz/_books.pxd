"""What a pool has to be after each call, worked out from docs/core.md and docs/prefix.md alone.

Nothing in here has seen a pool: no code, no memory and no answer of one. The driver says which calls were made, the
books say what they were due to do.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

cdef enum:
    MAX_PLANS = 4
    NOBODY = -1

cdef enum:                      # where a block is
    AT_BLANK
    AT_CACHE
    AT_LIMBO
    AT_WORK
    AT_RESERVE

cdef enum:                      # whether somebody else writes a sequence's blocks
    LOADS_NOT
    LOADS
    LOADS_IN_VAIN               # it was closed meanwhile


cdef enum:                      # what a call is due to meet
    V_OK = 0
    V_SHORT                     # OutOfBlocks
    V_CAPACITY                  # CapacityExceeded
    V_FULL                      # OutOfSequences
    V_VALUE                     # ValueError
    V_STATE                     # PlanStateError

cdef enum:                      # kinds of events
    E_STORED
    E_REMOVED
    E_CLEARED


cdef struct Page:               # a block
    int32_t refs                # table entries, raw references, duplicates that keep it
    int32_t raw
    int32_t holds               # pending plans that replaced it in a table
    int32_t floor               # most tokens that a pending copy reads of it
    int32_t before              # neighbours on the list that it is on
    int32_t after
    uint8_t place
    uint8_t final               # committed: nobody writes into it
    uint8_t own                 # its node is in the index, and this block is what a hit gets
    uint8_t back                # committed, and not offered to the index so far
    uint8_t keeps               # a duplicate that has a reference on `original`
    uint8_t noted               # in the list of dropped blocks


cdef struct Leaf:               # what a prefix cache knows of a block
    int64_t node                # that it stands for, 0: none
    int64_t parent              # of that node, if it is its own
    int32_t space               # its namespace
    int64_t made_by             # step whose copy fills it
    int32_t original            # of a duplicate: the block that has the node
    int32_t chain               # next block of its bucket in the index


cdef struct Queue:
    int32_t first
    int32_t last
    int32_t size


cdef struct Line:               # one open sequence; its index is its slot in the pool
    int64_t handle              # -1: none; without the pool's tag
    int64_t length              # of what has slots
    int32_t blocks              # in its table
    int32_t known               # tokens of it that are decided: the prompt, or all that were written
    int64_t committed           # tokens made known to the prefix cache
    int64_t published           # full blocks that the index was offered
    int64_t done                # what its parent had done when it was forked
    int64_t evicted             # tokens that left
    int64_t point               # length, these included, when they did
    int64_t row_step            # newest step that it was a row of
    int64_t inherit             # pending step whose work it got by a fork
    int64_t root                # of its namespace, 0: cut off
    int32_t space               # its namespace
    int32_t at                  # its place in `live`, or in `loading`
    uint32_t epoch              # of its table
    uint8_t waits               # on the list of those with blocks that are not published
    uint8_t loads


cdef struct Entry:              # a table entry that a step replaces
    int32_t row
    int32_t index
    int32_t old
    int32_t new
    int32_t tokens              # to be copied


cdef struct Pending:            # one plan
    int64_t step                # 0: not pending
    bint executed
    bint noted
    int32_t rows
    int64_t tokens
    int64_t* handle             # [max_rows]
    int64_t* length             # [max_rows] after the step
    int64_t* before             # [max_rows] before it
    int64_t* row_step           # [max_rows] of the sequences before it
    int32_t* blocks             # [max_rows] in the tables before it
    int32_t* appended           # [max_rows]
    uint8_t* served             # [max_rows]
    Entry* entry                # [entry_room]
    int32_t num_entries
    int64_t* slot               # [max_tokens] where each new token goes
    uint64_t* stamp             # [max_tokens] what it is
    uint64_t* expect            # [max_rows, width * block_size] what each row has to read, full mode
    int32_t* mirror             # [max_rows, width] tables as a consumer of dirty_rows has them
    int64_t* shown              # [max_rows] handle that the plan's row shows, -1: padding, -2: unknown
    uint32_t* shown_epoch       # [max_rows]
    int32_t* shown_blocks       # [max_rows]


cdef struct Told:               # an event
    int32_t kind
    int32_t space               # -1: all
    int64_t node
    int64_t parent              # 0: a first block


cdef struct Books:
    # the pool's sizes
    int32_t num_blocks
    int32_t reserved
    int32_t max_seqs
    int32_t width               # blocks of a table
    int64_t block_size
    int64_t capacity            # tokens of a sequence
    int64_t watermark
    int32_t max_rows
    int32_t max_tokens
    int32_t num_spaces          # namespaces that programs name
    bint steps_pend
    bint indexed
    bint full                   # small: everything is judged after every call
    # blocks
    Page* page                  # [num_blocks]
    Leaf* leaf                  # [num_blocks] with an index
    int64_t* since              # [num_blocks] limbo: newest step then; evictable: blocks taken until then
    int32_t* blank              # [num_blocks] stack
    int32_t num_blank
    Queue lru
    Queue limbo
    int32_t* dropped            # [num_blocks]
    int32_t num_dropped
    int32_t* spoilt             # [2 * num_blocks] blocks that were taken or became blank in this call
    int64_t num_spoilt
    # sequences
    Line* line                  # [max_seqs]
    int32_t* live               # [max_seqs] slots of open sequences that nobody loads
    int32_t num_live
    int32_t* loading            # [max_seqs] slots of the others
    int32_t num_loading
    int32_t* table              # [max_seqs, width]
    int64_t* generation         # [max_seqs]
    int32_t* free_slot          # [max_seqs] ring
    int32_t first_free
    int64_t* deferred           # [DEFERRED] handles to be closed by the next call
    int32_t num_deferred
    # steps
    Pending[MAX_PLANS] plan
    int32_t[MAX_PLANS] queue    # pending plans, oldest first
    int32_t num_queue
    int32_t entry_room
    int64_t next_step
    int64_t newest_inherit
    int32_t* undo               # [entry_room] floors, to take a judgement back
    # prefix cache
    int32_t* told               # [num_blocks, block_size] tokens of committed blocks
    int32_t* claimed            # [num_blocks, block_size] what earlier rows of a batch commit, full mode
    int32_t* claim              # [num_blocks] batch that claims the block
    int32_t batch
    int32_t* bucket             # [mask + 1]
    uint32_t mask
    int64_t* root               # [num_spaces] 0: not known
    int64_t* users              # [num_spaces] open sequences in it, and nodes
    int64_t num_roots
    int64_t next_node
    int32_t* waiting            # [max_seqs] slots
    int32_t num_waiting
    Told* event                 # [event_room] ring
    int32_t* event_tokens       # [event_room, block_size]
    int32_t event_room
    int64_t events_made         # since they were drained
    # counters
    int64_t used
    int64_t shared
    int64_t peak_used
    int64_t tokens              # of all open sequences
    int64_t blocks              # in all tables
    int64_t allocs
    int64_t evictions
    int64_t cow_copies
    int64_t cow_tokens
    int64_t evicted_tokens
    int64_t revivals
    int64_t reuse_gap
    int64_t queries
    int64_t query_tokens
    int64_t hit_tokens
    int64_t nodes
    int64_t inserted
    int64_t duplicates
    int64_t forgotten           # namespaces that lost their last user
    int64_t evicted_nodes
    void* memory[512]           # all of the above
    int32_t num_memory
    bint starved                # not all of it was to be had


cdef enum:
    DEFERRED = 16


cdef inline int32_t* line_table(const Books* b, int32_t slot) noexcept nogil:
    return b.table + <int64_t>slot * b.width


cdef inline int32_t num_open(const Books* b) noexcept nogil:
    """Slots that are taken."""
    return b.num_live + b.num_loading


cdef inline int32_t open_slot(const Books* b, int32_t k) noexcept nogil:
    """The k-th of them."""
    return b.live[k] if k < b.num_live else b.loading[k - b.num_live]


cdef inline int64_t oldest_step(const Books* b) noexcept nogil:
    """0: none is pending."""
    return b.plan[b.queue[0]].step if b.num_queue else 0


cdef inline bint in_flight(const Books* b, int64_t step) noexcept nogil:
    """Whether a step is pending; what was rolled back is not asked for."""
    return b.num_queue and step >= b.plan[b.queue[0]].step


cdef inline bint waits_for_step(const Books* b, const Line* line) noexcept nogil:
    return in_flight(b, line.row_step)


cdef inline int64_t available(const Books* b) noexcept nogil:
    return b.num_blank + b.lru.size


cdef inline int64_t ceil_blocks(const Books* b, int64_t tokens) noexcept nogil:
    return (tokens + b.block_size - 1) // b.block_size


cdef void* room(Books* b, int64_t n, size_t size) noexcept nogil
cdef int books_init(Books* b) noexcept nogil
cdef void books_free(Books* b) noexcept nogil
cdef void push(Books* b, Queue* queue, int32_t i) noexcept nogil
cdef void cut(Books* b, Queue* queue, int32_t i) noexcept nogil
cdef int32_t take(Books* b) noexcept nogil
cdef void add_ref(Books* b, int32_t i) noexcept nogil
cdef void drop_ref(Books* b, int32_t i) noexcept nogil
cdef void release(Books* b, int32_t i) noexcept nogil
cdef void settle(Books* b, int32_t i) noexcept nogil
cdef void touch(Books* b, int32_t i) noexcept nogil
cdef void drain_limbo(Books* b) noexcept nogil
cdef int64_t books_next_handle(const Books* b, int32_t k) noexcept nogil
cdef void to_blank(Books* b, int32_t i) noexcept nogil
cdef void leave_root(Books* b, int32_t slot) noexcept nogil
cdef void all_blank(Books* b) noexcept nogil
cdef void spoil(Books* b, int32_t i) noexcept nogil
cdef void leave_live(Books* b, int32_t slot) noexcept nogil
cdef void note_waiting(Books* b, int32_t slot) noexcept nogil
cdef void books_load(Books* b, int32_t slot) noexcept nogil
cdef void books_loaded(Books* b, int32_t slot, int64_t length) noexcept nogil
cdef int books_judge_loaded(const Books* b, int32_t slot, int64_t length) noexcept nogil
cdef void end_load(Books* b, int32_t slot) noexcept nogil
cdef int32_t books_open(Books* b, int64_t length, int32_t space) noexcept nogil
cdef void books_close(Books* b, int32_t slot) noexcept nogil
cdef int32_t books_fork_line(Books* b, int32_t parent) noexcept nogil
cdef void books_defer(Books* b, int64_t handle) noexcept nogil
cdef void books_drain(Books* b) noexcept nogil
cdef int32_t books_find(const Books* b, int64_t handle) noexcept nogil
cdef void books_fork(Books* b, int32_t parent, int32_t n, int32_t* children) noexcept nogil
cdef int books_judge_truncate(const Books* b, int32_t slot, int64_t length) noexcept nogil
cdef void books_truncate(Books* b, int32_t slot, int64_t length) noexcept nogil
cdef void books_lose(Books* b, int32_t slot, int64_t tokens) noexcept nogil
cdef void books_compact(Books* b, int32_t slot, int64_t length) noexcept nogil
cdef void books_leave(Books* b, int32_t slot, const int32_t* indices, int32_t n) noexcept nogil
cdef int64_t done_length(const Books* b, const Line* line) noexcept nogil
cdef void books_free_line(Books* b, int32_t slot) noexcept nogil
cdef int64_t books_evict(Books* b, int64_t n) noexcept nogil
