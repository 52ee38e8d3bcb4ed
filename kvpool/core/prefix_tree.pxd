"""The prefix cache: a tree of nodes, and checkpoints. docs/prefix.md is the contract.

A *node* is one base block of tokens below another node. An entry of a full group that ends there is
*canonical* (hits find it), a *duplicate* of that, or it *waits*. The canonical entries of a node
are its *unit*. A *checkpoint* is what a hit needs beside units: a *bundle* of blocks with the
states, and *tails*, the entries of windows and chunks. What is *idle* has no reference and may
leave.

    users of a node == nodes below + entries that stand for it + open rows that end with it
                       + 1 if it has a checkpoint
    place != NOWHERE  <=>  idle > 0
    COLD  <=>  idle > 0, no checkpoint at the node or below, and hits need one
    EVICTABLE block  <=>  idle, in a canonical entry, a bundle or a tail; once tree_settle has run
    published of a row == committed // block_size, less what waits

Why it is so:

- A node holds its parent. So the number of a node stands for a whole prefix as long as anybody uses
  it, and one comparison of (parent, tokens) proves a block. A number is given again only when no
  node is below it, so nothing is found below the wrong one.
- `tree_settle`. Blocks are released in many places (close, truncate, the end of a step, limbo), one
  by one, and blocks.pxi knows no tree: a committed one becomes EVICTABLE. Whether it is canonical,
  a duplicate that takes its place, or of no use is decided once, when the next call begins. Then
  all columns of an entry are there, and the order in which things were released is that of the
  list.
- Nobody takes an EVICTABLE block. It is a part of an entry or a bundle, which is of use only as a
  whole, maybe with blocks in other arenas. So `tree_make_room` evicts whole ones before a call
  takes any block, and what was found for the call has its references by then.
- Waiting. A block that a pending plan fills by a copy has no content, so a hit must not find it; if
  the plan is rolled back, it never will have. What is behind it in the row waits too: it would be
  found by nobody while its parent is not, and so one number, `published`, says how far a row is.
- After a rollback the row has the source of the copy again, which nobody committed (role NO_ROLE).
  The row waits there until somebody does, or the row is cut below it.
- COLD units leave first: where hits need a checkpoint, none can use a unit without one below it.
- Ages count uses, not seconds, so equal calls evict equal things, on every rank.
- A load keeps its checkpoint until it is done: the row stands at a length whose states are nowhere
  else, and a load that is rolled back is made again.
"""

cdef enum:
    NO_NODE = -1
    NO_CHECKPOINT = -1
    NO_NAME = -1
    TAIL_TOKENS = 16            # at the end of a prompt, which the next turn may rewrite unless it is told
    MOST_TAKEN = 2              # checkpoints that a row has taken and `commit` has not published
    NODES_PER_CHECKPOINT = 4    # there is room for one checkpoint per so many nodes
    PRIORITIES = 8              # 0: without a directive
    TIME_BITS = 63
    SAVED_ELSEWHERE = -1        # Checkpoint.step: no step saves it, a loader does

cdef enum:                      # Node.place: where its unit is
    NOWHERE                     # no entry of a full group is idle
    COLD                        # no checkpoint at the node or below
    WARM
    ASIDE                       # it is kept: it was to leave, and others left in its place

cdef enum:                      # Standing.role; of the first block of an entry it is 1 + its group,
    NO_ROLE = 0
    WAITS = MAX_GROUPS          # and so much more while the entry of a full group waits to be published
    LATER_COLUMN = 254
    BUNDLE = 255


cdef struct Node:               # one base block of tokens below another node, 32 bytes: two to a cache line
    uint32_t hash               # chained, up to and including these tokens
    int32_t name                # slot of its namespace, NO_NAME: flushed since
    int32_t parent              # NO_NODE: there is none above
    int32_t depth               # base blocks from the first on, itself included; 0: not in use
    int32_t users               # nodes below, entries that stand for it, open rows that end with it; 1: a checkpoint
    int32_t after               # the next node in its bucket
    int32_t entry               # see Tree.entry
    uint8_t idle                # canonical entries that nobody refers to
    uint8_t place
    uint8_t rank                # priority, 0: nothing keeps it


cdef struct NodeMore:           # what a node has besides where hits need checkpoints
    int64_t stamp               # when its unit was used last
    int32_t below               # published checkpoints at it or below it
    int32_t checkpoint          # at it


cdef struct Standing:           # of a block
    int32_t node                # of its entry, if that is committed; of a bundle its checkpoint
    int32_t role


cdef struct Checkpoint:
    int64_t stamp               # when it was used last
    int64_t step                # pending step that saves it, 0: saved, SAVED_ELSEWHERE
    int64_t position            # 0: not in use
    int32_t node                # NO_NODE: not published
    int32_t row                 # slot that has it in `taken`, -1: none
    int32_t loads               # loads that are not done yet
    uint8_t was_hit             # at least once
    uint8_t listed              # it may leave
    uint8_t aside               # it is kept, and was to leave
    uint8_t orphan              # flushed or closed while it was loaded: it goes when the load is done


cdef struct Link:               # of a line; of what is not in use: `next` is the next free one
    int32_t next
    int32_t prev


cdef struct Line:               # nodes or checkpoints, least recently used first
    int32_t head
    int32_t tail
    int32_t size


cdef struct Directive:          # what a `Keep` says
    int64_t ttl
    int64_t tokens              # INT64_MAX: all
    int32_t priority            # 0: there is none, and `ttl` is that of a pin, 0: none


# A radix heap (Ahuja et al., 1990): the clock only goes on, so each end moves down once a bit.
#   its bucket == highest bit in which it differs from `Tree.now`
cdef struct Ends:
    int64_t* until              # [room] when a directive ends that ends at a node, or a row is closed, 0: never
    Link* link                  # [room] of a node, or of a row, in its bucket
    Line[TIME_BITS] bucket      # of equal ends, the earlier directive or pin first


cdef struct NodeKept:           # what a node has besides once there are directives
    int64_t number              # of the directive that ends here: of those that end at once, the earlier one ends first
    int32_t reasons             # nodes right below that are kept, and that directive


cdef struct Keeping:            # made with the first directive
    NodeKept* node              # [room]
    Ends* ends                  # directives
    Line[PRIORITIES] units      # that were set aside, the first one first; [0]: nothing keeps them any more
    Line[PRIORITIES] checkpoints
    int64_t number              # of the last directive
    int64_t turn                # of what was set aside last
    int32_t num_kept            # nodes
    int32_t num_checkpoints     # set aside


cdef struct RowPlaces:          # what the tree knows of a row beside SeqPrefix
    int64_t cut                 # where checkpoints are taken: here, rounded down,
    int64_t junction            # here, rounded down,
    int64_t hit                 # and at doubling distances, all above this
    int32_t node                # of its last committed base block
    int32_t[MOST_TAKEN] taken   # not published yet
    Directive keep


# Invariants beside those above, recomputed by tree_check:
#   a node in use has users > 0, and so has its parent
#   node_find finds a node that is not flushed by its tokens, and nothing else
#   below == number of published checkpoints on whose path the node is
#   an entry of a window or chunk is canonical  <=>  published checkpoints need it, as many as the node says
#   a checkpoint may leave  <=>  loads == 0 == step  <=>  its bundle is EVICTABLE; then its tails may leave, too
#   cold, warm and listed have just those units and checkpoints that may leave; all but cold are in order of use
#   a node is kept  <=>  a directive ends there, or a node right below is kept; no parent has a lower rank
#   a row is in a bucket of pins  <=>  it is a pin with a ttl, and its end is later than now
#   place == ASIDE  =>  the unit stands in the line of its rank; so does a checkpoint that is `aside`
#   num_nodes, num_checkpoints, num_loads and num_saves are counted
#   an open row has not published all that it committed  =>  has_waiting
#   no pending plan has still to fill a canonical entry; one that waits is not canonical
cdef struct Tree:
    Index* index                # namespaces, seed of the hash, events, counters of use
    Node* node                  # [room]
    NodeMore* more              # [room], NULL: hits need no checkpoints
    Link* unit                  # [room] of the unit of a node
    int32_t* tokens             # [room, block_size]
    int32_t* entry              # [room, stride] first blocks of the canonical entries that end at the node, or
                                # NO_BLOCK; that of a window or chunk is followed by the checkpoints that need it.
                                # One number a node stands in Node.entry
    uint8_t* key                # [room, 16] content keys, NULL: nobody wants events
    int32_t* bucket             # [num_buckets] the oldest node of a hash, NO_NODE: empty
    Standing* stands[MAX_ARENAS]        # [num_blocks]
    int32_t* column_after[MAX_ARENAS]   # [num_blocks] the next id of its entry, NULL: all have one column
    Checkpoint* checkpoint      # [checkpoint_room]
    Link* link                  # [checkpoint_room] of a checkpoint
    int32_t* bundle             # [checkpoint_room, bundle_size] blocks of arena 0
    RowPlaces* row              # [max_seqs]
    int32_t* path               # [nodes of a sequence] scratch
    int32_t* scratch            # [grain] tokens
    int32_t* load               # [slots of the first state group] checkpoint to be copied there
    int64_t* load_step          # the pending step that does it, 0: none yet
    int32_t[MAX_GROUPS] offset  # of a group's entry at a node; of its states in a bundle
    int32_t[MAX_GROUPS] span    # blocks of a group's states in a bundle
    bint[MAX_ARENAS] has_columns        # some group takes several blocks of an arena for an entry
    bint[MAX_ARENAS] has_units          # blocks of an arena may be in units,
    bint[MAX_ARENAS] has_checkpoints    # and in checkpoints
    Line cold                   # units
    Line warm
    Line[2] listed              # checkpoints that may leave: [0] those that were never a hit, [1] the others
    int64_t clock
    int64_t now                 # the caller's clock
    Keeping* keeping            # NULL: there was no directive
    Ends* pins                  # rows, NULL: no pin had a ttl
    int32_t num_loads           # that are not done
    int32_t num_saves           # checkpoints whose step is pending
    bint has_waiting            # a row may have committed blocks that are not published
    int64_t spacing             # of checkpoints inside a long prompt, 0: none there
    int64_t grain               # hits are multiples of it
    int64_t block_size
    int32_t width               # numbers of a node in `entry`, and from one node to the next
    int32_t stride
    uint32_t num_buckets
    int32_t room
    int32_t num_nodes           # that can be found
    int32_t free_node           # and those never used: fresh_node, ...
    int32_t fresh_node
    int32_t checkpoint_room
    int32_t free_checkpoint
    int32_t fresh_checkpoint
    int32_t num_checkpoints     # published
    int32_t bundle_size
    int32_t state_group         # the first one, -1: none
    bint needs_checkpoints      # some group is not full
    bint can_restore            # every state group has bundles
    int64_t taken               # counters of use: checkpoints that a step saved,
    int64_t published
    int64_t used                # by a hit, each counted once
    int64_t skipped             # wanted, but there were no blocks, or a window was gone
    int64_t evicted


cdef struct Hit:
    int32_t known               # nodes of the prompt that are there, with all entries of full groups
    int32_t nodes               # of these, those that are a hit
    int32_t checkpoint          # what the hit needs beside them
    uint64_t digest             # of the last tokens looked at


cdef inline int32_t* checkpoint_bundle(const Tree* t, int32_t m) noexcept nogil:
    return t.bundle + <int64_t>m * t.bundle_size


cdef inline int32_t checkpoint_rank(const Tree* t, int32_t m) noexcept nogil:
    return t.node[t.checkpoint[m].node].rank if t.checkpoint[m].node != NO_NODE else 0


cdef inline int32_t num_listed(const Tree* t) noexcept nogil:
    """Checkpoints that may leave."""
    return t.listed[0].size + t.listed[1].size + (t.keeping.num_checkpoints if t.keeping != NULL else 0)


cdef void checkpoint_hide(Groups* gs, int32_t m) noexcept nogil
cdef void checkpoint_drop(Groups* gs, int32_t m) noexcept nogil
cdef void keeping_free(Tree* t) noexcept nogil
cdef void keeping_reset(Tree* t) noexcept nogil
cdef void ends_free(Ends* e) noexcept nogil
cdef void ends_reset(Ends* e, int64_t room) noexcept nogil
cdef bint evict_warm(Groups* gs, bint has_units, bint has_checkpoints) noexcept nogil
cdef uint64_t retention_fingerprint(const Tree* t, uint64_t h) noexcept nogil
cdef bint check_retention(const Groups* gs, int32_t* seen, char* finding) noexcept nogil
cdef void node_passes_on(Tree* t, int32_t n) noexcept nogil
cdef void node_let_go(Tree* t, int32_t n) noexcept nogil
cdef bint check_checkpoints(const Groups* gs, int32_t* loads, char* finding) noexcept nogil
