"""What a plan hands to a backend: one step in every wire format that was asked for."""

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
    int32_t written             # entries of the block_tables row that may be other than pad
    int32_t csr_blocks          # entries of the row in indices, -1: unknown
    uint8_t carried             # the consumer cannot trust its copy of the row (new, rolled back, rebound): dirty


cdef struct Wire:
    Field field[NUM_FIELDS]
    WireRow* row                # [max_rows]
    uint64_t* seen              # [max_rows] version of the table the row holds, 0: none, or to be rewritten
    int32_t* dirty              # [max_rows], ascending
    uint8_t* served             # [max_rows]
    int32_t max_rows
    int32_t table_width         # blocks
    int32_t num_dirty
    int32_t csr_rows            # rows that indptr describes
    bint tracks                 # some format has rows
    int64_t nnz                 # entries of indices


cdef void wire_emit(Wire* w, const Step* p, const Seqs* s, const Blocks* b, int32_t pad_rows,
                    int64_t pad_tokens) noexcept nogil
