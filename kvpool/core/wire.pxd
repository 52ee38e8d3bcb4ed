"""What a plan hands to a backend: one step in every wire format that was asked for.

A `Field` is one array. A `Wire` has those of a layer group; the arrays that all groups share are
the plan's. A `WireRow` is what row i of the arrays holds, whoever's it is in the next step.

    seen[i] == version of the table that row i shows, or 0: it has to be looked at
    written == ids of the row that may be other than pad
    dirty == rows that show another table than before this step, or are carried, ascending

Why it is so:

- Consumers keep the arrays from step to step, and so does the plan. A row is written when the table
  that it shows is another one (handle), or lost or exchanged an entry (epoch). When the table grew,
  only its new ids are, and when a window let go, only its new holes. So a steady decode step is
  O(rows), not O(blocks).
- `seen` is an array of its own, because it is all that a steady step reads of a row.
- `carried`: after a rollback or a rebind the consumer may have copied what is true no more. So a
  row is dirty once more whatever it shows, padding too.
- CSR has no gaps: behind the first row whose number of entries changed, or whose table did, all
  move, so they are written anew from there.
"""

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
    int32_t max_rows
    int32_t table_width         # ids of a row of block_tables
    int32_t num_dirty
    int32_t csr_rows            # rows that indptr describes
    bint tracks                 # some format has rows
    int64_t nnz                 # entries of indices
