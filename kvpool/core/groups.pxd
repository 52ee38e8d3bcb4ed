"""Layer groups: the tables of sequences. docs/core.md is the contract.

A *group* is the layers of one kind and one shape; a pool has one at least. Its table has *entries*
of `columns` ids for a row; an entry has block_size tokens. An *arena* is the blocks that one or
more groups take ids from. An entry that no later query reads is *let go*: a *hole* stands in its
place.

    entries of a row == ceil(num_blocks / 2^scale) - evicted // block_size
    place in the table == position - evicted
    hole  <=>  kept <= entry < gone
    refcount == entries of all tables over the arena that name the block + raw
                + loads and saves that are pending, of a block of a checkpoint

Why it is so:

- Holes stay in the table. So an entry is found by its position, whatever was let go, and two
  numbers say where the holes are, because windows only ever move on.
- `due` is the length at which the next entry can go, so a step that lets go of nothing compares one
  number per row. A row that gains one token can be due only where its length has the phase of the
  group: the others are not even looked at.
- What a window passes leaves when the step is done, not when it is made. The step still reads it, a
  rollback must find it, and a commit in between can publish it.
- A state is a table of one entry that each step replaces as a whole, without a copy. A recurrent
  state cannot be unwritten, so a step writes to another slot, and a rollback puts the old id back:
  the log of copy-on-write does it.
- Evicted tokens stay in num_blocks, so that the groups of a sequence keep one capacity when tokens
  leave one of them.
- The first group leads: its tails stand in `Seq`, the others have arrays of their own. A steady
  step of one group touches one cache line per sequence, and half a line more for each further
  group.
- A table has a *version*, which is new whenever it changes in any way, and an *epoch*, which
  changes when an entry changes or leaves, unless a window lets it go. A plan compares the first to
  see whether to look, the second to see whether what it shows is still the beginning of the row.
"""

cdef enum:
    MAX_GROUPS = 8
    MOST_COLUMNS = 1024
    MAX_ARENAS = MAX_GROUPS + 1 # each has a group; in a pool of states the first has none
    NO_BATCH = -1               # Step.mixed_rows

cdef enum:                      # LayerGroup.kind
    FULL_LAYERS
    WINDOW_LAYERS
    CHUNK_LAYERS
    STATE_LAYERS


# Invariants beside those above, recomputed by groups_check:
#   0 <= evicted <= the point of the sequence <= num_tokens; evicted == 0 unless the group is full
#   gone == 0 or gone > kept; no query at num_tokens or later reads what is in a hole
#   due is what due_of says of gone
#   next_slot < stop_slot: block is the first id of the entry of the next token, next_slot its place there, and
#     stop_slot - next_slot the tokens that go there before the entry is full or num_blocks is used up;
#     else next_slot == stop_slot
#   state: table == NO_BLOCK  <=>  num_tokens == 0
#   holds and floors are those of steps
cdef struct GroupSeq:           # what a sequence has in a group beside its table and its Tail
    int64_t due                 # a step that ends at this length or beyond lets go of more
    int64_t evicted             # tokens that left by eviction: place in the table == position - evicted
    int32_t gone                # entries kept .. gone - 1 are holes


cdef struct LayerGroup:
    int kind
    int32_t arena
    Blocks* blocks              # of the arena
    int32_t columns             # ids of an entry
    int scale                   # log2 of the blocks of the pool that an entry has the tokens of
    int64_t block_size          # tokens of an entry
    int shift                   # log2 of block_size, -1: no power of two; a state is one entry of any length
    int64_t reach               # W or C
    int64_t lookahead           # of the pool
    int64_t period              # of the lengths at which a row lets go, a power of two; 1: any length may be one
    int64_t phase               # lookahead + W - 1: (length - phase) % period == 0 where a row lets go
    int32_t kept                # leading entries that no window lets go
    int32_t hole                # what stands in an entry that was let go
    int64_t width               # ids from a row to the next
    int32_t* table              # [max_seqs, width]; state: [max_seqs], NO_BLOCK: none
    Tail* tails                 # memory of those of a group behind the first, [max_seqs]
    char* tail                  # where they are, of row 0, and
    int64_t tail_stride         # bytes from one to the next
    GroupSeq* seq               # [max_seqs]
    uint64_t versions           # handed out so far


# ---- arrays of plans: see wire.pxi ----------------------------------------------------------------------

cdef enum:
    BLOCK_TABLES
    SEQ_LENS
    SLOT_MAPPING
    POSITIONS
    CU_Q_LENS
    INDPTR
    INDICES
    LAST_PAGE_LEN
    SLOT_IDS
    NUM_FIELDS


cdef struct Field:              # one array; nobody asked for it: width 0
    void* data
    int width                   # bytes per element: 0, 4 or 8
    int64_t pad


cdef struct WireRow:            # what a row of the arrays holds
    int64_t handle              # -1: nothing, or unknown
    uint32_t epoch
    int32_t gone                # entries that a window had let go of
    int32_t written             # ids of the block_tables row that may be other than pad
    int32_t csr_entries         # entries of the row in indices, -1: unknown
    uint8_t carried             # the consumer cannot trust its copy of the row (new, rolled back, rebound): dirty


cdef struct Wire:               # the arrays of one layer group
    Field[NUM_FIELDS] field
    WireRow* row                # [max_rows]
    uint64_t* seen              # [max_rows] version of the table the row holds, 0: none, or to be rewritten
    int32_t* dirty              # [max_rows], ascending
    int32_t table_width         # ids of a row of block_tables
    int32_t num_dirty
    int32_t csr_rows            # rows that indptr describes
    bint tracks                 # some format has rows
    int64_t nnz                 # entries of indices


# ---- steps: see step.pxi ------------------------------------------------------------------------------

cdef struct Event:              # a row that did more than put one token into its tails
    int32_t row
    int32_t q_len               # tokens served
    int32_t appended            # blocks of the pool for which its tables got room
    uint8_t served


cdef struct Replaced:           # undo log: a table entry that a step changed
    int32_t index               # in the table
    int32_t old
    int32_t new
    int32_t tokens              # to be copied from old to new
    int32_t old_floor           # floor of `old` before


cdef struct Log:                # what a step replaced in the tables of a layer group, in order
    Replaced* entry             # [room], size valid; grows, never shrinks
    int32_t size
    int64_t room


cdef struct Change:             # what a step did to the table of one row
    int32_t row
    int32_t replaced            # ids, as many entries of the log
    int32_t appended            # ids


cdef struct StepPart:           # what a plan has for one group
    Log log                     # one entry per id
    Change* change              # [max_rows], num_changes valid, by row; other rows kept their table as it was
    int64_t* slot               # [max_rows] slot of the new token in the first column, of rows that were served one
    int64_t own_turns           # `turns` of the blocks when the tails of the first own_rows rows were found own, each
    int32_t own_rows            # in the table that the plan shows
    int32_t* stale              # [max_rows], num_stale valid: rows, ascending, whose tables the plan does not show
    int32_t* taken              # [max_rows] blocks that rows get in a steady step
    int32_t max_rows
    int32_t num_changes
    int32_t num_stale
    int32_t num_copies
    int32_t* copies             # [copies_room, 3], max_rows * columns at first; a state is not copied
    int64_t copies_room
    Wire wire                   # what is shown by row
    int32_t width               # entries of a row of block_tables
    int32_t* kv_starts          # [max_rows], NULL: zeros, as no window lets go
    int32_t* state_src          # [max_rows]
    int32_t* state_dst
    int32_t* loads              # [max_rows, 1 + blocks of a checkpoint] state_loads
    int32_t* saves
    int32_t num_loads
    int32_t num_saves
    int32_t shown_rows
    int64_t shown_tokens


# Rows without an event were served one token. What a step writes and what undoes it stands in arrays by row.
cdef struct Step:
    int64_t* handle             # [max_rows], memory of the plan's array
    int64_t* length             # [max_rows] tokens after the step
    int64_t all_prev            # last_step of every sequence before, while pending; -1: they differ, so ask
    int64_t* prev_step          # [max_rows]
    Event* event                # [max_rows], num_events valid, by row
    StepPart** part             # one per layer group
    int32_t max_rows
    int32_t num_rows
    int32_t num_events
    int64_t num_tokens          # tokens served
    int64_t id                  # 0: never stepped
    uint64_t mixed              # digest of the first `mixed_rows` handles; NO_BATCH: not known
    int32_t mixed_rows
    bint uniform                # every row was served one token
    bint pending                # read by `flag` where the lock is not held, so written by `set_flag`
    bint noted_done             # done was called while an older plan was pending
    Step* newer                 # the next pending step, NULL: this is the newest
    Step* older
    void* plan                  # the Plan whose step this is


cdef struct Pending:            # the steps that are neither done nor rolled back
    Step* oldest
    Step* newest
    int32_t size


cdef struct Limits:             # what the plan at hand can take
    int64_t max_tokens          # of a batch
    int64_t seq_tokens          # that a sequence holds after the step
    int64_t length              # of a sequence after the step, evicted tokens included
    int64_t table_blocks        # of the pool, for which its tables have room


# ---- all groups ---------------------------------------------------------------------------------------

cdef void log_release(const Log* log, Blocks* b) noexcept nogil

cdef struct Tree                # of the prefix cache, which is told of what happens to rows; docs/prefix.md
cdef void tree_free(Groups* gs) noexcept nogil
cdef void tree_reset(Tree* t, const Groups* gs) noexcept nogil
cdef void tree_fork(Groups* gs, int32_t parent, int32_t child) noexcept nogil
cdef void row_ends(Groups* gs, int32_t slot) noexcept nogil
cdef void tree_truncate(Groups* gs, int32_t slot, int64_t length) noexcept nogil
cdef void tree_close(Groups* gs, int32_t slot) noexcept nogil
cdef void tree_make_room(Groups* gs, int32_t arena, int64_t n) noexcept nogil
cdef void tree_loads(Groups* gs, const Step* p, bint advance) noexcept nogil
cdef void tree_saves(Groups* gs, const Step* p) noexcept nogil
cdef void tree_pass(Groups* gs, const Step* p) noexcept nogil
cdef void tree_undo(Groups* gs, const Step* p) noexcept nogil
cdef void tree_undone(Groups* gs, const Step* p) noexcept nogil
cdef void tree_publish(Groups* gs) noexcept nogil
cdef uint64_t tree_fingerprint(const Tree* t, uint64_t h) noexcept nogil
cdef void count_bundles(const Tree* t, int32_t* references) noexcept nogil
cdef bint tree_check(const Groups* gs, int32_t* seen, char* finding) noexcept nogil


cdef struct Groups:
    Tree* tree                  # the prefix cache, NULL: none
    int64_t[MAX_ARENAS] needed  # blocks that the step at hand takes
    LayerGroup[MAX_GROUPS] group
    int32_t num_groups
    Blocks* arena[MAX_ARENAS]   # the first is the pool's,
    Blocks[MAX_GROUPS] more     # the others are these
    int32_t num_arenas
    Seqs* seqs                  # handles and lengths, common to all groups
    int64_t block_size          # of the pool
    int64_t seq_tokens          # that a sequence may hold in a group of blocks
    int64_t most_blocks         # of the pool, with room for so many
    int64_t longest             # length that num_blocks of a sequence can count
    bint has_entries            # some group has entries of blocks; else open and reserve take nothing
    int32_t unit                # blocks of the pool in the smallest entry: capacities are multiples of it
    bint has_states
    bint lets_go                # some group is a window or a chunk
    bint pends                  # not in_order
    StepPart scratch[MAX_GROUPS]    # of dry runs,
    StepPart* dry[MAX_GROUPS]   # and where they are


cdef inline Tail* tail_of(const LayerGroup* g, int32_t slot) noexcept nogil:
    return <Tail*>(g.tail + slot * g.tail_stride)


cdef inline int32_t* group_row(const LayerGroup* g, int32_t slot) noexcept nogil:
    return g.table + slot * g.width


cdef inline int64_t entry_at(const LayerGroup* g, int64_t position) noexcept nogil:
    """position // block_size, without a division where that is possible."""
    return position >> g.shift if g.shift >= 0 else position // g.block_size


cdef inline int32_t entries_for(const LayerGroup* g, int64_t num_blocks) noexcept nogil:
    """Entries that have room for num_blocks blocks of the pool."""
    return <int32_t>((num_blocks + (<int64_t>1 << g.scale) - 1) >> g.scale)


cdef inline int32_t entries_of(const LayerGroup* g, int32_t slot, int64_t num_blocks) noexcept nogil:
    """Entries of a row of a sequence with room for num_blocks blocks of the pool; a state is one entry."""
    if g.kind == STATE_LAYERS:
        return g.table[slot] != NO_BLOCK
    return entries_for(g, num_blocks) - <int32_t>entry_at(g, g.seq[slot].evicted)


cdef inline int64_t held_of(const LayerGroup* g, int32_t slot, int64_t length) noexcept nogil:
    """Of the first `length` tokens of a sequence, those that the row still holds."""
    return length - g.seq[slot].evicted


cdef inline int64_t due_of(const LayerGroup* g, int32_t gone) noexcept nogil:
    """The least length of a step that lets go of more than the first `gone` entries."""
    cdef int64_t end = (<int64_t>max(g.kept, gone) + 1) * g.block_size      # of the entry that leaves next
    if g.kind == WINDOW_LAYERS:
        return end + g.reach - 1 + g.lookahead
    if g.kind == CHUNK_LAYERS:
        return (end + g.reach - 1) // g.reach * g.reach + g.lookahead
    return INT64_MAX


cdef inline void set_gone(LayerGroup* g, int32_t slot, int32_t gone) noexcept nogil:
    g.seq[slot].gone = gone
    g.seq[slot].due = due_of(g, gone)
